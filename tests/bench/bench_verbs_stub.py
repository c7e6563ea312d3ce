"""The cost of the verbs backend, engine included: a provider in C takes every request at once.

    python -m tests.bench.bench_verbs_stub --rounds 40

From the user's call to chains posted, and from completions to counts; the NIC's and the provider's
own work comes on top. Needs a C compiler and the header of libibverbs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from tep.backends.base import WriteBatch
from tep.backends.verbs import open_domains
from tep.backends.verbs.domain import VerbsDomain
from tep.base.api import Pages, ScatterDst
from tep.drivers.threads import InlineDriver, Machine, ThreadDriver
from tep.engine import TransferEngine
from tests.bench.bench_engine import kind_of
from tests.bench.figures import Figure, median_ns, show_figures
from tests.support.inside import machine_of, nics_of, worker_of
from tests.support.verbs_stub import Knob, Stub, build

_PAGE_BYTES: Final = 4096
_PEERS: Final = 63
_BURST: Final = 256
_SHAPES: Final = 16
_WARM_S: Final = 10.0
_RUST: Final = (
    "Rust engine, ConnectX-7, 11.1 M op/s at 1 KiB pages: arXiv 2510.27656 Table 2; quoted"
)
_RUST_NS: Final = 90.0
_SCATTER: Final = "Rust engine, ConnectX-7, EP64 scatter: arXiv 2510.27656 Table 9; quoted"
_SCATTER_US: Final = 8.5
_BUSY_PAGES: Final = 2048
_BUSY_PAGE_BYTES: Final = 16384
_BUSY_WORKS: Final[tuple[tuple[str, str, Callable[[float], float], float], ...]] = (
    ("8 B there and back", "us", lambda s: 1e6 * s, 4.0),
    ("32 MiB in 16 KiB pages", "GB/s", lambda s: _BUSY_PAGES * _BUSY_PAGE_BYTES / 1e9 / s, 0.8),
)
"""Name, unit, a time in seconds in that unit, aim of the ratio."""


def verbs_stub_figures(rounds: int = 40) -> Iterator[Figure]:
    """Measure, one figure at a time.

    Raises:
        LookupError: no C compiler, or no header.
    """
    stub = build()
    for npages, aim in ((256, 60.0), (1024, 30.0), (16384, 30.0)):
        yield _paged(stub, npages, aim, rounds * 4, 1)
    yield _paged(stub, 256, 60.0, rounds * 4, 2)
    for npages, aim in ((256, 60.0), (1024, 25.0), (16384, 10.0)):
        yield _paged(stub, npages, aim, rounds * 4, 1, prepared=True)
    yield _receive(stub, 0, 40.0, "equal", rounds * 10)
    yield _receive(stub, 1, 40.0, "all different", rounds * 10)
    yield _single(stub, rounds * 50)
    for prepared in (False, True):
        yield _scatter(stub, rounds * 25, prepared=prepared)
    yield from _busy(stub, max(3, rounds // 4))


class _Rig:
    """One engine towards `npeers` others, all on the stub, connected."""

    def __init__(self, stub: Stub, npeers: int, nbytes: int) -> None:
        stub.reset()
        self.stub = stub
        self.ring: list[Machine] = []
        self.here = self._engine("here", 0)
        self.peers = [self._engine(f"peer{k}", 1 + k % 7) for k in range(npeers)]
        self.mr, _ = self.here.reg_mr(np.zeros(nbytes, np.uint8))
        target = np.zeros(nbytes, np.uint8)
        self.descs = [peer.reg_mr(target)[1] for peer in self.peers]
        self.group = self.here.add_peer_group([peer.main_address for peer in self.peers])
        end_s = time.monotonic() + _WARM_S
        domains = [self.domain(engine) for engine in (self.here, *self.peers)]
        while not all(all(domain.peers.up) for domain in domains):
            self.turn()
            assert time.monotonic() < end_s, "the stub does not connect"
        post = domains[0].post
        self.last_ns = 0

        def stamped(batch: WriteBatch, start: int, stop: int) -> int:
            taken = post(batch, start, stop)
            self.last_ns = time.thread_time_ns()
            return taken

        setattr(domains[0], "post", stamped)  # noqa: B010  # mypy guards methods, not benchmarks
        stub.set(Knob.SINK, 1)

    def _engine(self, name: str, device: int) -> TransferEngine:
        opened = open_domains([f"stub{device}"], name=name, library=self.stub.path)
        driver = InlineDriver(self.ring)
        return TransferEngine(opened.domains, driver=driver, name=name, epoch=opened.epoch)

    @staticmethod
    def domain(engine: TransferEngine) -> VerbsDomain:
        found = nics_of(engine)[0]
        assert isinstance(found, VerbsDomain)
        return found

    def turn(self) -> None:
        for machine in self.ring:
            machine.step()
            machine.deliver()

    def close(self) -> None:
        self.stub.reset()
        for engine in (self.here, *self.peers):
            engine.close()


def _paged(
    stub: Stub, npages: int, aim: float, rounds: int, regions: int, *, prepared: bool = False
) -> Figure:
    """Page lists that are used again and again, each time for the next of some regions.

    A prepared list moves in its region instead, as the layers of a cache do.
    """
    rig = _Rig(stub, 1, npages * _PAGE_BYTES)
    rng = np.random.default_rng(1)
    src, dst = rng.permutation(npages), rng.permutation(npages)
    here, machine, nbytes = rig.here, machine_of(rig.here), (npages + 1) * _PAGE_BYTES
    rounds = max(20, rounds * 1024 // npages if npages > 1024 else rounds)
    buffers = [np.zeros(nbytes, np.uint8) for _ in range(2 * regions)]
    lists = Pages(src), Pages(dst)
    turns = itertools.cycle(
        [
            ((here.reg_mr(source)[0], lists[0]), (rig.peers[0].reg_mr(target)[1], lists[1]))
            for source, target in zip(buffers[::2], buffers[1::2], strict=True)
        ]
    )

    ready = here.prepare_paged_writes(_PAGE_BYTES, *next(turns))
    offsets = itertools.cycle((0, _PAGE_BYTES))

    def one() -> int:
        pages, at = next(turns), next(offsets)
        goal = stub.rows() + npages
        start = time.thread_time_ns()
        if prepared:
            sent = ready.submit(7, src_offset=at, dst_offset=at)
        else:
            sent = here.submit_paged_writes(_PAGE_BYTES, *pages, imm=7)
        machine.step()
        while stub.rows() < goal:
            machine.step()
        spent = rig.last_ns - start
        while not sent.finished:
            machine.step()
            machine.deliver()
        return spent

    found = median_ns(one, rounds)
    rig.close()
    return Figure(
        what=f"{kind_of(prepared)}paged write of {npages:,} pages, submit to posted chains, "
        f"{'the same region' if regions == 1 else 'regions in turn'}, a page",
        value=found[0] / npages,
        best=found[1] / npages,
        unit="ns",
        aim=aim,
        reference=_RUST_NS,
        reference_source=_RUST,
    )


def _receive(stub: Stub, step: int, aim: float | None, how: str, rounds: int) -> Figure:
    rig = _Rig(stub, 1, _PAGE_BYTES)
    there = rig.peers[0]
    domain = rig.domain(there)
    conn = domain.peers.up[0]
    assert conn is not None
    qpn, _ = conn.ids[1]
    machine, table = machine_of(there), worker_of(there).imms

    def one() -> int:
        counted = table.total + _BURST  # stats() would go through all of the table
        stub.inject_imms(qpn, _BURST, 1000, step)
        start = time.thread_time_ns()
        machine.step()
        spent = time.thread_time_ns() - start
        assert counted == table.total, "the burst was not counted in one step"
        return spent

    found = median_ns(one, rounds)
    rig.close()
    return Figure(
        what=f"counted immediates in bursts of {_BURST}, {how}, each",
        value=found[0] / _BURST,
        best=found[1] / _BURST,
        unit="ns",
        aim=aim,
        reference=_RUST_NS,
        reference_source=_RUST,
    )


def _single(stub: Stub, rounds: int) -> Figure:
    rig = _Rig(stub, 1, 1 << 20)
    here, ends = rig.here, ((rig.mr, 0), (rig.descs[0], 0))

    def submit() -> object:
        return here.submit_single_write(65536, *ends, imm=7)

    found = median_ns(lambda: _timed(rig, submit), rounds)
    rig.close()
    return Figure(
        what="single write of 64 KiB, submit to post",
        value=found[0] / 1000,
        best=found[1] / 1000,
        unit="us",
        aim=12.0,
    )


def _scatter(stub: Stub, rounds: int, *, prepared: bool) -> Figure:
    rig = _Rig(stub, _PEERS, 1 << 20)
    here, mr, group = rig.here, rig.mr, rig.group
    # As in a mixture of experts: lengths and places of the source change with every token, where a
    # rank's tokens go at each peer does not.
    rng = np.random.default_rng(1)
    turns = itertools.cycle(
        [
            [
                ScatterDst(int(rng.integers(1, 4096)), 4096 * k, (desc, 8192))
                for k, desc in zip(rng.permutation(_PEERS).tolist(), rig.descs, strict=True)
            ]
            for _ in range(_SHAPES)
        ]
    )

    ready = here.prepare_scatter(mr, next(turns), group=group)

    def submit() -> object:
        if prepared:
            return ready.submit(7)
        return here.submit_scatter(mr, next(turns), imm=7, group=group)

    found = median_ns(lambda: _timed(rig, submit), rounds)
    rig.close()
    return Figure(
        what=f"{kind_of(prepared)}scatter to {_PEERS} peers in a peer group, submit to last post",
        value=found[0] / 1000,
        best=found[1] / 1000,
        unit="us",
        aim=35.0,
        reference=_SCATTER_US,
        reference_source=_SCATTER,
    )


def _busy(stub: Stub, rounds: int) -> Iterator[Figure]:
    """Two engines of one process, each with its worker thread, alone and beside a busy thread.

    One interpreter turns both ends. Each round measures alone and beside in turn.
    """
    stub.reset()
    opened = [open_domains([f"stub{k}"], name=f"busy{k}", library=stub.path) for k in range(2)]
    here, there = (
        TransferEngine(one.domains, driver=ThreadDriver(), name=f"busy{k}", epoch=one.epoch)
        for k, one in enumerate(opened)
    )
    memory = [np.zeros((_BUSY_PAGES, _BUSY_PAGE_BYTES), np.uint8) for _ in range(2)]
    (source, back), (target, desc) = here.reg_mr(memory[0]), there.reg_mr(memory[1])
    pages = Pages(range(_BUSY_PAGES))

    def trip() -> None:
        arrived, answer = there.expect_imm_count(1, 1), here.expect_imm_count(2, 1)
        here.submit_single_write(8, (source, 0), (desc, 0), imm=1)
        arrived.wait(_WARM_S)
        there.submit_single_write(8, (target, 0), (back, 0), imm=2)
        answer.wait(_WARM_S)

    def bulk() -> None:
        arrived = there.expect_imm_count(3, _BUSY_PAGES)
        here.submit_paged_writes(_BUSY_PAGE_BYTES, (source, pages), (desc, pages), imm=3)
        arrived.wait(_WARM_S)

    trip()
    found = [_beside(((trip, 20), (bulk, 4))) for _ in range(rounds)]
    for engine in (here, there):
        engine.close()
    for at, (what, unit, of_s, aim) in enumerate(_BUSY_WORKS):
        name = f"{what}, both ends in one process"
        sizes = [of_s(one[at][0]) for one in found]
        ratios = [of_s(one[at][1]) / size for one, size in zip(found, sizes, strict=True)]
        for values, suffix, of, goal in (
            (sizes, "alone", unit, None),
            (ratios, "beside a thread in Python", "x alone", aim),
        ):
            yield Figure.of(f"{name}, {suffix}", values, of, more_is_better=aim < 1, aim=goal)


def _beside(works: Sequence[tuple[Callable[[], None], int]]) -> list[tuple[float, float]]:
    """Return of each work its median time alone and beside a thread that computes, seconds."""
    alone = [_median_s(*one) for one in works]
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        return list(zip(alone, [_median_s(*one) for one in works], strict=True))
    finally:
        ended.set()
        thread.join()


def _median_s(work: Callable[[], None], times: int) -> float:
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def _timed(rig: _Rig, submit: Callable[[], object]) -> int:
    """CPU from a submit to the return of the last post."""
    machine = machine_of(rig.here)
    start = time.thread_time_ns()
    submit()
    machine.step()
    spent = rig.last_ns - start
    for _ in range(3):
        machine.step()
        machine.deliver()
    return spent


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="of each figure, 3 or more")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        figures = verbs_stub_figures(args.rounds)
        show_figures("tests.bench.bench_verbs_stub", figures, json=args.json)
    except LookupError as error:
        sys.stderr.write(f"the stub provider cannot be built: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
