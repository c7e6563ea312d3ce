"""Prepared transfers have the effect of their verbs: same rows, bytes, counts and errors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tep
from tep.backends.base import Completions, WriteBatch
from tep.base.units import PS_PER_US
from tep.drivers.threads import InlineDriver
from tep.sim import Cluster
from tests.support.effort import effort
from tests.support.inside import machine_of
from tests.support.null import NullDomain, null_memory
from tests.support.pairs import pair

NBYTES = 4096
PAGE = 32
PAGES = 12
ONE = tep.Pages([0])
WRITES = ("one", "pages", "scatter", "barrier", "other")
END_US = 3000
Log = list[tuple[object, ...]]


@dataclass(frozen=True)
class Submit:
    """One submit of what was prepared as `kind`."""

    kind: str
    imm: object
    src_offset: int
    dst_offset: int


@dataclass(frozen=True)
class Happens:
    """A change underneath: "kill", "restart", "deregister", "withdraw", "remove"; or time."""

    what: str
    number: int = 0


numbers = st.one_of(st.integers(-64, 64), st.integers(-NBYTES, NBYTES), st.sampled_from([0, 0, 0]))
imms = st.one_of(
    st.integers(0, 9),
    st.none(),
    st.sampled_from([-1, 2**32, True, np.uint32(5), "7", 1.0]),
    st.integers(1, PAGES).map(lambda n: np.arange(n) + 100),
)
submits = st.builds(Submit, st.sampled_from(WRITES), imms, numbers, numbers)
events = st.one_of(
    st.builds(Happens, st.just("pass"), st.integers(0, 40)),
    st.builds(Happens, st.sampled_from(["kill here", "kill there"]), st.integers(0, 2)),
    st.builds(Happens, st.sampled_from(["restart", "deregister", "withdraw", "remove"])),
)
scripts = st.lists(st.one_of(submits, submits, events), min_size=1, max_size=14)


class World:
    """One run of a script on the chaos fabric, by prepared transfers or by the verbs."""

    def __init__(self, seed: int, nics: tuple[int, int, int], *, prepared: bool) -> None:
        self.prepared = prepared
        self.cluster = Cluster(nodes=3, nics=nics, seed=seed, row_log=True)
        self.nics = nics
        a, b, c = self.cluster.engines
        self.a, self.b, self.c = a, b, c
        self.sources = [(np.arange(NBYTES) * step % 251).astype(np.uint8) for step in (7, 5)]
        self.mr, self.other = (a.reg_mr(memory)[0] for memory in self.sources)
        self.targets = [np.full(NBYTES, 7 + k, np.uint8) for k in range(3)]
        _, self.to_b = b.reg_mr(self.targets[0])
        _, self.to_c = c.reg_mr(self.targets[1])
        self.target_mr, self.third = b.reg_mr(self.targets[2])
        order = np.random.default_rng(seed)
        self.lists = (
            tep.Pages(order.permutation(PAGES), offset=256),
            tep.Pages(order.permutation(PAGES), stride=PAGE + 8, offset=512),
        )
        self.parts = [(40 + k, 64 * k, desc, 128 * k) for k, desc in enumerate(self.descs())]
        self.group = a.add_peer_group([b.main_address, c.main_address])
        # Made in both runs: whoever prepares a transfer meets the peer.
        self.ready = {
            "one": a.prepare_paged_writes(
                96,
                (self.mr, tep.Pages([0], offset=100)),
                (self.to_b, tep.Pages([0], offset=200)),
            ),
            "pages": a.prepare_paged_writes(
                PAGE, (self.mr, self.lists[0]), (self.to_b, self.lists[1])
            ),
            "scatter": a.prepare_scatter(self.other, self.slices(0, 0), group=self.group),
            "barrier": a.prepare_barrier(self.descs()),
            "other": a.prepare_paged_writes(
                64,
                (self.other, tep.Pages([0], offset=64)),
                (self.third, tep.Pages([0], offset=64)),
            ),
        }
        self.handles: list[tep.Transfer] = []
        self.log: list[object] = []

    def descs(self) -> list[tep.MrDesc]:
        return [self.to_b, self.to_c, self.to_b]

    def slices(self, src: int, dst: int) -> list[tep.ScatterDst]:
        return [tep.ScatterDst(n, at + src, (d, to + dst)) for n, at, d, to in self.parts]

    def submit(self, s: Submit) -> tep.Transfer:
        """Submit it, one way or the other."""
        a = self.a
        src, dst = (0, 0) if s.kind == "barrier" else (s.src_offset, s.dst_offset)
        if self.prepared:
            ready = self.ready[s.kind]
            return ready.submit(s.imm, src_offset=src, dst_offset=dst)
        match s.kind:
            case "one":
                one = tep.Pages([0], offset=100 + src), tep.Pages([0], offset=200 + dst)
                return a.submit_paged_writes(96, (self.mr, one[0]), (self.to_b, one[1]), s.imm)
            case "other":
                one = tep.Pages([0], offset=64 + src), tep.Pages([0], offset=64 + dst)
                return a.submit_paged_writes(64, (self.other, one[0]), (self.third, one[1]), s.imm)
            case "scatter":
                return a.submit_scatter(self.other, self.slices(src, dst), s.imm, group=self.group)
            case "barrier":
                return a.submit_barrier(self.descs(), s.imm)
        first, second = (
            tep.Pages(one.indices, stride=one.stride, offset=one.offset + offset)
            for one, offset in zip(self.lists, (src, dst), strict=True)
        )
        return a.submit_paged_writes(PAGE, (self.mr, first), (self.to_b, second), s.imm)

    def is_no_list(self, s: Submit) -> bool:
        """Return True if tep.Pages itself refuses the list of a submit."""
        lists = self.lists[0].offset, self.lists[1].offset
        begins = {"one": (100, 200), "pages": lists, "other": (64, 64)}
        src, dst = begins.get(s.kind, (NBYTES, NBYTES))
        return min(src + s.src_offset, dst + s.dst_offset) < 0

    def happens(self, event: Happens) -> None:
        """Change what is underneath."""
        cluster = self.cluster
        match event.what:
            case "pass":
                cluster.env.run(until=cluster.env.now + event.number * PS_PER_US)
            case "kill here":
                cluster.kill_nic("a", event.number % self.nics[0])
            case "kill there":
                cluster.kill_nic("b", event.number % self.nics[1])
            case "restart":
                self.a.add_peer_group([cluster.restart("b").main_address])
            case "deregister":
                self.a.deregister(self.mr)
            case "withdraw":
                self.b.deregister(self.target_mr)
            case "remove":
                self.a.remove_peer(self.c.main_address)

    def play(self, script: list[Submit | Happens]) -> None:
        for step in script:
            try:
                if isinstance(step, Submit):
                    self.handles.append(self.submit(step))
                else:
                    self.happens(step)
            except tep.TepError as error:
                # A list that cannot be is refused by Pages, before the verb looks at anything.
                no_list = isinstance(step, Submit) and self.is_no_list(step)
                self.log.append("refused" if no_list else type(error).__name__)
            else:
                self.log.append(None)
        self.cluster.env.run(until=self.cluster.env.now + END_US * PS_PER_US)

    def result(self) -> list[object]:
        """All that can be seen of the run."""
        ends = [
            (handle.stats(), type(handle.error).__name__, str(handle.error).splitlines()[0])
            for handle in self.handles
        ]
        stats = [engine.stats() for engine in (self.a, self.b, self.c)]
        found = [self.log, ends, [each.tobytes() for each in self.targets + self.sources], stats]
        return [*found, self.cluster.row_log.digest()]


@settings(max_examples=effort(120, 15), deadline=None)
@given(
    script=scripts,
    seed=st.integers(0, 2**20),
    nics=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)),
)
@example(
    script=[Submit("pages", np.arange(PAGES) + 100, k, 0) for k in (0, 8)], seed=1, nics=(2, 2, 1)
)
def test_prepared_is_the_verb(
    script: list[Submit | Happens], seed: int, nics: tuple[int, int, int]
) -> None:
    """A prepared request must write, count and report the same as the verb.

    The traces are compared: every row with its NIC, place and time.
    """
    found = []
    for prepared in (True, False):
        world = World(seed, nics, prepared=prepared)
        with world.cluster:
            world.play(script)
            found.append(world.result())

    for mine, theirs in zip(*found, strict=True):
        assert theirs == mine


reluctance = st.lists(st.sampled_from([0, 0, 1, 3, 9, 40, 40, -1, -2]), max_size=30)


class Reluctant(NullDomain):
    """A NIC that takes what its script says of each post: so many rows, or it raises below 0."""

    def __init__(self, index: int, wire: list[NullDomain], script: list[int], log: Log) -> None:
        super().__init__(index, wire)
        self.caps = replace(self.caps, sq_depth=24)
        self.script, self.log = script, log
        self.out = 0

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        takes = self.script.pop() if self.script else stop - start
        taken = min(takes, stop - start, 24 - self.out)
        self.log.append((self.caps.nic, batch.ctx, start, stop, taken, *batch.rows(start, stop)))
        if takes < 0:
            raise OSError(5, "the NIC broke") if takes == -1 else MemoryError("no room")
        self.out += taken
        return super().post(batch, start, start + taken) if taken else 0

    def poll(self, out: Completions) -> int:
        self.out = 0
        return super().poll(out)


@settings(max_examples=effort(150, 15), deadline=None)
@given(
    nics=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    scripts=st.lists(reluctance, min_size=3, max_size=3),
    kinds=st.lists(st.sampled_from(["single", "long", "pages", "scatter", "step"]), max_size=12),
)
@example(nics=(1, 2), scripts=[[], [], []], kinds=["pages", "step", "step"])
@example(nics=(1, 5), scripts=[[], [], []], kinds=["pages", "step", "step"])  # full between batches
def test_a_reluctant_nic_is_asked_as_by_the_verb(
    nics: tuple[int, int], scripts: list[list[int]], kinds: list[str]
) -> None:
    """Rows posted at once must not be offered out of turn, or twice in a step, or lost."""
    found = []
    for prepared in (True, False):
        log: Log = []
        wire: list[NullDomain] = []
        here = [Reluctant(k, wire, list(scripts[k]), log) for k in range(nics[0])]
        there = [NullDomain(nics[0] + k, wire) for k in range(nics[1])]
        a, b = (
            tep.TransferEngine(domains, driver=InlineDriver([]), name=name, epoch=1)
            for name, domains in (("a", here), ("b", there))
        )
        mr, desc = a.reg_mr(null_memory(1 << 20))[0], b.reg_mr(null_memory(1 << 20))[1]
        pages, group = tep.Pages(range(40)), a.add_peer_group([b.main_address])
        slices = [tep.ScatterDst(8, 8 * k, (desc, 64 * k)) for k in range(5)]
        ready = {
            "pages": a.prepare_paged_writes(64, (mr, pages), (desc, pages)),
            "scatter": a.prepare_scatter(mr, slices, group=group),
        }
        handles: list[tep.Transfer] = []
        for imm, kind in enumerate(kinds * 3):
            if kind == "step":
                machine_of(a).step()
            elif kind in {"single", "long"}:  # between the others, as they are
                n = 64 if kind == "single" else 1 << 16
                handles.append(a.submit_single_write(n, (mr, 64), (desc, 0), imm))
            elif prepared:
                handles.append(ready[kind].submit(imm, src_offset=64))
            elif kind == "pages":
                moved = tep.Pages(range(40), offset=64)
                to = desc, pages
                handles.append(a.submit_paged_writes(64, (mr, moved), to, imm))
            else:
                dsts = [tep.ScatterDst(n, src + 64, dst) for n, src, dst in slices]
                handles.append(a.submit_scatter(mr, dsts, imm, group=group))
        for _ in range(40):
            machine_of(a).step()
        ends = [(str(each.error).splitlines()[0], each.stats().rows_back) for each in handles]
        found.append((log, ends, a.stats()))

    assert found[1] == found[0]


def test_bad_input_is_refused_by_name() -> None:
    """An offset that is no number, or is outside, would be an error of numpy's, or none."""
    with pair(nbytes=8192) as p:
        some = tep.Pages(range(4))
        pages = p.a.prepare_paged_writes(64, (p.mr, some), (p.desc, some))
        scatter = p.a.prepare_scatter(p.mr, [tep.ScatterDst(64, 64, (p.desc, 64))])
        barrier = p.a.prepare_barrier([p.desc])
        for call, words in (
            (lambda: pages.submit(1, src_offset=0.5), "src_offset"),
            (lambda: pages.submit(1, dst_offset=8192), "src_offset=0 dst_offset=8192"),
            (lambda: scatter.submit(1, dst_offset=8192), "src_offset=0 dst_offset=8192"),
            (lambda: scatter.submit(1, src_offset=8192), "src_offset=8192 dst_offset=0"),
            (lambda: pages.submit(1, dst_offset=8192), "outside the 8192 bytes"),
            (lambda: pages.submit([1, 2]), "imm"),
            (
                lambda: p.a.prepare_paged_writes(64, p.mr, (p.desc, some)),
                "prepare_paged_writes: src=",
            ),
            (
                lambda: p.a.prepare_paged_writes(9000, (p.mr, some), (p.desc, some)),
                "outside the 8192 bytes",
            ),
            (lambda: p.a.prepare_scatter(p.mr, []), "no targets"),
            (
                lambda: pages.submit(1, src_offset=8192),
                "source page 3 ends at byte 8448 .*src_offset=8192 dst_offset=0",
            ),
            (barrier.submit, "imm=None"),
            (lambda: barrier.submit(1, src_offset=1), "it has no bytes"),
            (lambda: barrier.submit(1, dst_offset=1), "it has no bytes"),
        ):
            with pytest.raises(tep.BadRequest, match=words):
                call()


@pytest.mark.parametrize("kind", ["pages", "scatter"])
def test_offsets_reach_exactly_as_far_as_the_regions(kind: str) -> None:
    """The row that leaves a region first may be any of them, and each region has its own end."""
    with pair(nbytes=1024) as p:
        _, small = p.b.reg_mr(np.zeros(768, np.uint8))
        lists = tep.Pages([1, 9, 3], stride=32), tep.Pages([12, 2, 5], stride=32)
        slices = [tep.ScatterDst(*one) for one in ((8, 64, (p.desc, 512)), (16, 32, (small, 480)))]
        ready = {
            "pages": lambda: p.a.prepare_paged_writes(64, (p.mr, lists[0]), (p.desc, lists[1])),
            "scatter": lambda: p.a.prepare_scatter(p.mr, slices),
        }[kind]()
        src = {"pages": (-32, 672), "scatter": (-32, 952)}[kind]
        dst = {"pages": (-64, 576), "scatter": (-480, 272)}[kind]
        for name, (least, most) in (("src_offset", src), ("dst_offset", dst)):
            for offset in (least, most):
                p.settle(done := ready.submit(1, **{name: offset}))
                assert done.ok, (name, offset)
            for offset in (least - 1, most + 1):
                with pytest.raises(tep.BadRequest):
                    ready.submit(1, **{name: offset})


def test_a_region_that_was_given_back_is_refused_before_anything_is_posted() -> None:
    """The NIC's error would come later, and burn the immediate at the peer."""
    with pair() as p:
        mr, _ = p.a.reg_mr(np.zeros(64, np.uint8))
        ready = p.a.prepare_paged_writes(64, (mr, ONE), (p.desc, ONE))
        p.settle(ready.submit(1))
        p.a.deregister(mr)
        with pytest.raises(tep.ClosedError):
            ready.submit(1)
        p.settle(last := p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 1))
        assert last.ok


def test_a_closed_engine_refuses_by_the_name_of_the_verb() -> None:
    """A submit that nobody takes would never settle."""
    with pair() as p:
        ready = p.a.prepare_paged_writes(64, (p.mr, ONE), (p.desc, ONE))
        p.a.close()
        with pytest.raises(tep.ClosedError, match="is closed"):
            ready.submit(1)
        with pytest.raises(tep.ClosedError, match="prepare_paged_writes: .*closed"):
            p.a.prepare_paged_writes(64, (p.mr, ONE), (p.desc, ONE))
