"""The chaos fabric at the seam, under drawn knobs, rows and faults; invariants are sentences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tep.backends.base import Kind, Status
from tep.sim.faults import KNOBS, Chaos, Fault, KillNic, Restart, Revoke
from tep.sim.row_log import RowLog
from tests.support.effort import effort
from tests.unit.sim.sim_seam import NS, Seam, Seen

SLOT = 320
IMMS = (None, 0, 1, 0x10001, 2**32 - 1)
NS_MAX = 2000


@dataclass(frozen=True)
class Post:
    """One batch: its rows' lengths; row k of the scenario has slot k on both sides."""

    sizes: tuple[int, ...]
    imm: int | None
    nic: int
    remote: int
    at_ns: int


@dataclass(frozen=True)
class Scenario:
    """Everything a run depends on."""

    chaos: Chaos
    nics: int
    posts: tuple[Post, ...]
    fault: tuple[int, Fault] | None = None


@st.composite
def scenarios(draw, *, faults: bool) -> Scenario:
    """Small runs: up to 4 NICs, 4 batches, 12 rows, one fault."""
    knobs = {
        name: draw(st.sampled_from(knob.choices), label=name)
        for name, knob in KNOBS.items()
        if 0 < knob.number < 40
    }
    nics = draw(st.integers(1, 4))
    sizes = st.lists(st.sampled_from([0, 1, 2, 7, 64, 257, SLOT]), min_size=1, max_size=3)
    posts = draw(
        st.lists(
            st.builds(
                Post,
                sizes.map(tuple),
                st.sampled_from(IMMS),
                st.integers(0, nics - 1),
                st.integers(0, nics - 1),
                st.integers(0, NS_MAX),
            ),
            min_size=1,
            max_size=4,
        )
    )
    fault = None
    if faults:
        node, nic = draw(st.sampled_from("ab")), draw(st.integers(0, nics - 1))
        what = st.sampled_from([KillNic(node, nic), Revoke(node, nic), Restart("b")])
        fault = (draw(st.integers(1, NS_MAX)), draw(what))
    chaos = Chaos(seed=draw(st.integers(0, 2**32)), **knobs)
    return Scenario(chaos, nics, tuple(posts), fault)


class Run:
    """One scenario, run to its end, with what was seen."""

    def __init__(self, scenario: Scenario) -> None:
        self.row_log = RowLog()
        seam = self.seam = Seam(scenario.chaos, nics=scenario.nics, row_log=self.row_log)
        self.late: list[Seen] = []
        self.rows: dict[int, list[tuple[int, int]]] = {}
        self.posts = scenario.posts
        self.ctxs: list[int] = []
        self.frozen: np.ndarray | None = None
        seam.on_seen = self._check_bytes
        slot = 0
        for post in scenario.posts:
            rows = [(SLOT * (slot + k), SLOT * (slot + k), n) for k, n in enumerate(post.sizes)]
            slot += len(rows)
            batch = seam.batch(rows, post.imm, nic=post.nic, remote=post.remote)
            self.rows[batch.ctx] = [(at, n) for at, _, n in rows]
            self.ctxs.append(batch.ctx)
            seam.env.call_at(post.at_ns * NS, lambda call: seam.offer(*call), (batch, post.nic))
        if scenario.fault is not None:
            at_ns, fault = scenario.fault
            seam.env.call_at(at_ns * NS, self._inflict, fault)
        seam.env.run()

    def _inflict(self, fault: Fault) -> None:
        self.seam.fabric.inflict(fault)
        if not isinstance(fault, KillNic):
            self.frozen = self.seam.b.dst.copy()

    def landed(self, at: int, nbytes: int) -> bool:
        seam = self.seam
        return bool((seam.a.src[at : at + nbytes] == seam.b.dst[at : at + nbytes]).all())

    def _check_bytes(self, seen: Seen) -> None:
        """When an immediate is seen, enough rows that carry it must be whole."""
        if seen.kind is not Kind.IMM:
            return
        whole = sum(
            self.landed(at, n)
            for ctx, post in zip(self.ctxs, self.posts, strict=True)
            for at, n in self.rows[ctx]
            if post.imm == seen.imm
        )
        if whole < self.seam.imms()[seen.imm]:
            self.late.append(seen)


def _check_always(run: Run) -> None:
    """Check the invariants of every run, with faults and without."""
    seam = run.seam
    for ctx, rows in run.rows.items():
        ended = seam.ended(ctx)
        assert len(rows) == seam.accepted[ctx], "every row is taken in the end"
        assert len(rows) == ended.total(), "every accepted row ends exactly once"
    assert [] == run.late, "an immediate comes after all bytes of its row"
    covered = np.zeros(len(seam.b.dst), bool)
    for rows in run.rows.values():
        for at, n in rows:
            covered[at : at + n] = True
    assert not seam.b.dst[~covered].any(), "bytes outside the rows stay untouched"
    asked: Counter[int] = Counter()
    for ctx, post in zip(run.ctxs, run.posts, strict=True):
        if post.imm is not None:
            asked[post.imm] += len(run.rows[ctx])
    assert seam.imms() <= asked, "no immediate is invented or doubled"


@settings(max_examples=effort(150, 15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios(faults=False))
def test_without_faults_everything_arrives(scenario: Scenario) -> None:
    """Whatever the knobs: reliable means that bytes, immediates and completions all come."""
    run = Run(scenario)
    _check_always(run)
    for ctx, post in zip(run.ctxs, run.posts, strict=True):
        assert {Status.OK: len(post.sizes)} == run.seam.ended(ctx)
        assert all(run.landed(at, n) for at, n in run.rows[ctx])
    expected = Counter(p.imm for p in run.posts for _ in p.sizes if p.imm is not None)
    assert expected == run.seam.imms()


@settings(max_examples=effort(150, 15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios(faults=True))
def test_with_a_fault_rows_fail_with_cause(scenario: Scenario) -> None:
    """A failure without a cause would be blamed on the engine; a success without bytes is worse."""
    run = Run(scenario)
    _check_always(run)
    assert scenario.fault is not None
    _, fault = scenario.fault
    causes = {
        KillNic: {Status.NIC_DOWN, Status.UNREACHABLE, Status.FLUSHED},
        Revoke: {Status.LOCAL_KEY, Status.REMOTE_KEY, Status.FLUSHED},
        Restart: {Status.STALE_PEER, Status.FLUSHED},
    }[type(fault)]
    for ctx, post in zip(run.ctxs, run.posts, strict=True):
        ended = run.seam.ended(ctx)
        assert set(ended) - {Status.OK} <= causes
        over = post.nic if fault.node == "a" else post.remote
        if isinstance(fault, KillNic) and fault.nic != over:
            assert {Status.OK} == set(ended), "only rows over the dead NIC fail"
        if set(ended) == {Status.OK}:
            assert all(run.landed(at, n) for at, n in run.rows[ctx])
    if isinstance(fault, Restart) and run.frozen is not None:
        assert (run.frozen == run.seam.b.dst).all(), "old memory is out of reach after a restart"


@settings(max_examples=effort(40, 10), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios(faults=True))
@example(Scenario(Chaos(seed=1, tie_shuffle=True), 2, (Post((64, 1), 1, 0, 1, 0),)))
def test_c20_same_scenario_same_trace(scenario: Scenario) -> None:
    """A failure that cannot be run again cannot be repaired."""
    first, second = Run(scenario), Run(scenario)

    assert first.row_log.digest() == second.row_log.digest()
    assert first.seam.seen == second.seam.seen


def test_the_swarm_is_hostile() -> None:
    """A suite that never saw an overtake, a torn row or a refusal would be green for nothing."""
    sometimes: Counter[str] = Counter()
    for seed in range(120):
        chaos = Chaos.draw(seed)
        post = Post((257, 257, 257), 1, 0, 0, 0)
        run = Run(Scenario(chaos, 2, (post, Post((64, 64, 64), 2, 1, 0, 0))))
        places = run.row_log.columns("place", "b")
        by_row = Counter(places["row"].tolist())
        sometimes["overtaken"] += run.row_log.overtakes() > 0
        sometimes["torn"] += max(by_row.values()) > 1
        sometimes["placed twice"] += places["nbytes"].sum() > 3 * 257 + 3 * 64
        sometimes["counted together"] += any(s.count > 1 for s in run.seam.seen)
        sometimes["offsets"] += run.seam.b.targets[0].base == 0
        done = [s.row for s in run.seam.of(Kind.WRITE, run.ctxs[0])]
        sometimes["completed out of order"] += done != sorted(done)

    assert 6 == len(sometimes)
    assert min(sometimes.values()) > 10, sometimes
