"""The engine's own cost, over NICs that take everything at once (tep.testing.null): nothing but our
Python.

Each figure counts both ends where the thing measured has two: submit, plan, columns, posts,
completions, counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from tep.api import Pages, ScatterDst
from tep.backends.base import WriteBatch
from tep.bench import Figure, median_ns
from tep.drivers import InlineDriver, Machine
from tep.engine import TransferEngine
from tep.testing.null import NullDomain, null_memory, null_pair

__all__ = ["engine_figures"]

PAGE_BYTES: Final = 4096
_RUST_NS: Final = 90.0
_RUST: Final = "Rust engine, ConnectX-7, 11.1 M op/s at 1 KiB pages: arXiv 2510.27656 Table 2"
_SCATTER: Final = "Rust engine, ConnectX-7, post_all at EP64: arXiv 2510.27656 Table 9"


def engine_figures(rounds: int = 40) -> Iterator[Figure]:
    """Measure, one figure at a time; `rounds` transfers for each of the large ones."""
    for npages, aim in ((256, None), (1024, 100.0), (16384, 25.0)):
        for nics in (1, 2, 4):
            yield _paged(npages, nics, rounds, distinct=False, aim=aim)
    for nics in (1, 2, 4):
        yield _paged(16384, nics, rounds, distinct=True, aim=90.0)
    for nics in (1, 2, 4):
        yield from _single(nics, rounds * 50)
    for nics in (1, 2, 4):
        yield _scatter(nics, rounds * 25)


def _engine(name: str, domains: list[NullDomain], ring: list[Machine]) -> TransferEngine:
    return TransferEngine(domains, driver=InlineDriver(ring), name=name, epoch=1)


def _paged(npages: int, nics: int, rounds: int, *, distinct: bool, aim: float | None) -> Figure:
    """Nanoseconds a page, both ends, the page lists given as plain arrays."""
    ring: list[Machine] = []
    here, there = null_pair(nics)
    a, b = _engine("a", here, ring), _engine("b", there, ring)
    mr, _ = a.reg_mr(null_memory(npages * PAGE_BYTES))
    _, desc = b.reg_mr(null_memory(npages * PAGE_BYTES))
    rng = np.random.default_rng(1)
    src, dst = rng.permutation(npages), rng.permutation(npages)
    imms = np.arange(npages, dtype=np.uint32)

    def one() -> int:
        nonlocal imms
        imms = imms + np.uint32(
            npages
        )  # fresh values in every round, as an application would have them
        counted = b.stats().imms_counted + npages
        start = time.thread_time_ns()
        pages = ((mr, Pages(src)), (desc, Pages(dst)))
        if distinct:
            got = b.expect_imm_count(int(imms[-1]), 1)
            sent = a.submit_paged_writes(PAGE_BYTES, *pages, imm=imms)
        else:
            got = b.expect_imm_count(7, npages)
            sent = a.submit_paged_writes(PAGE_BYTES, *pages, imm=7)
        while not (sent.finished and got.finished):
            a._machine.step()
            b._machine.step()
            a._machine.deliver()
            b._machine.deliver()
        spent = time.thread_time_ns() - start
        assert counted == b.stats().imms_counted, "an immediate is missing or was counted twice"
        for imm, _ in b.stats().imms_unexpected:
            b.remove_imm(imm)
        return spent

    median, best = median_ns(one, rounds)
    kind = "another immediate on each page" if distinct else "one immediate"
    return Figure(
        what=f"paged write, {npages} pages, {nics} NICs, {kind}, both ends",
        value=median / npages,
        best=best / npages,
        unit="ns/page",
        aim=aim,
        reference=_RUST_NS,
        reference_source=_RUST,
    )


def _single(nics: int, rounds: int) -> Iterator[Figure]:
    """Microseconds of one 4 KiB write: submit to post, and write to counted immediate and back to
    done.
    """
    ring: list[Machine] = []
    here, there = null_pair(nics)
    a, b = _engine("a", here, ring), _engine("b", there, ring)
    mr, _ = a.reg_mr(null_memory(1 << 30))
    _, desc = b.reg_mr(null_memory(1 << 30))
    posting: list[int] = []

    def one() -> int:
        got = b.expect_imm_count(7, 1)
        b._machine.step()
        start = time.thread_time_ns()
        sent = a.submit_single_write(PAGE_BYTES, (mr, 0), (desc, 0), imm=7)
        a._machine.step()
        posting.append(time.thread_time_ns() - start)
        a._machine.deliver()
        b._machine.step()
        b._machine.deliver()
        spent = time.thread_time_ns() - start
        assert sent.ok
        assert got.ok
        return spent

    median, best = median_ns(one, rounds)
    posting.sort()
    yield Figure(
        what=f"single write, {nics} NICs: submit to post (with the poll after it)",
        value=posting[len(posting) // 2] / 1e3,
        best=posting[0] / 1e3,
        unit="us",
        aim=15.0,
    )
    yield Figure(
        what=f"single write, {nics} NICs: write to counted immediate and back to done",
        value=median / 1e3,
        best=best / 1e3,
        unit="us",
        aim=35.0,
    )


class _Stamping(NullDomain):
    """The last NIC that is posted on: takes the time at which that post ends."""

    last_ns = 0

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        taken = super().post(batch, start, stop)
        self.last_ns = time.thread_time_ns()
        return taken


def _scatter(nics: int, rounds: int, peers: int = 63) -> Figure:
    """Microseconds from submit_scatter to the return of the last post, in a peer group."""
    ring: list[Machine] = []
    wire: list[NullDomain] = []
    last = _Stamping(0, wire)
    a = _engine("a", [*(NullDomain(k, wire) for k in range(1, nics)), last], ring)
    others = [
        _engine(f"p{p}", [NullDomain(nics * (p + 1) + k, wire) for k in range(nics)], ring)
        for p in range(peers)
    ]
    mr, _ = a.reg_mr(null_memory(1 << 30))
    descs = [other.reg_mr(null_memory(1 << 20))[1] for other in others]
    group = a.add_peer_group([other.main_address for other in others])
    dsts = [ScatterDst(256, 256 * k, (desc, 0)) for k, desc in enumerate(descs)]

    def one() -> int:
        start = time.thread_time_ns()
        sent = a.submit_scatter(mr, dsts, imm=3, group=group)
        a._machine.step()
        spent = last.last_ns - start
        a._machine.deliver()
        for other in others:
            other._machine.step()
        assert sent.ok
        return spent

    median, best = median_ns(one, rounds)
    return Figure(
        what=f"scatter to {peers} peers in a group, {nics} NICs: submit to last post",
        value=median / 1e3,
        best=best / 1e3,
        unit="us",
        aim=40.0,
        reference=8.502,
        reference_source=_SCATTER,
    )
