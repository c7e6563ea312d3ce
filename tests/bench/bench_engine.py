"""The engine's own cost: over NICs that take everything at once, nothing but our Python.

    python -m tests.bench.bench_engine --rounds 40

The time of the null NICs themselves is in every figure, and is measured alone in the same run: no
engine can take less, since it posts on each NIC that has rows, and polls each one.

Each figure counts both ends if the measurement has two: submit, plan, columns, posts,
completions, counts.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tep.backends.base import WriteBatch, new_completions
from tep.base.api import EngineOptions, Pages, ScatterDst
from tep.drivers.threads import InlineDriver, Machine
from tep.engine import TransferEngine
from tests.bench.figures import Figure, call_ns, median_ns, show_figures, summary
from tests.support.inside import machine_of, worker_of
from tests.support.null import NullDomain, null_memory, null_pair

__all__ = ["engine_figures", "kind_of"]

PAGE_BYTES: Final = 4096
_RUST_NS: Final = 90.0
_RUST: Final = "Rust engine, ConnectX-7, 11.1 M op/s at 1 KiB pages: arXiv 2510.27656 Table 2"
_SCATTER: Final = "Rust engine, ConnectX-7, post_all at EP64: arXiv 2510.27656 Table 9"


def engine_figures(rounds: int = 40) -> Iterator[Figure]:
    """Measure, one figure at a time; `rounds` transfers for each of the large ones.

    Beside each figure a loop of method calls is timed: machines differ by a factor of two in both.
    """
    for figure in _figures(rounds):
        ns = figure.value * (1000 if figure.unit == "us" else 1)
        yield replace(figure, calls=ns / call_ns())


def _figures(rounds: int) -> Iterator[Figure]:
    for npages, aim in ((256, None), (1024, 100.0), (16384, 25.0)):
        for nics in (1, 2, 4):
            yield _paged(npages, nics, rounds, distinct=False, aim=aim)
    middle = [
        _paged(256, nics, rounds, distinct=False, aim=60.0, prepared=True) for nics in (1, 2, 4)
    ]
    yield from middle
    for npages, aim in ((1024, 25.0), (16384, 10.0)):
        for nics in (1, 2, 4):
            yield _paged(npages, nics, rounds, distinct=False, aim=aim, prepared=True)
    for nics in (1, 2, 4):
        yield _paged(16384, nics, rounds, distinct=True, aim=90.0)
    for nics, whole in zip((1, 2, 4), middle, strict=True):
        yield _null_nics(1, nics, rounds * 50)
        null = _null_nics(256, nics, rounds * 50)
        yield null
        yield replace(
            whole,
            what=f"{whole.what}, less what the null NICs take",
            value=whole.value - null.value,
            best=whole.best - null.best,
        )
    for nics in (1, 2, 4):
        yield from _single(nics, rounds * 50)
    for nics in (1, 2, 4):
        for prepared in (False, True):
            yield _scatter(nics, rounds * 25, prepared=prepared)


def _engine(name: str, domains: list[NullDomain], ring: list[Machine]) -> TransferEngine:
    return TransferEngine(domains, driver=InlineDriver(ring), name=name, epoch=1)


def _paged(
    npages: int,
    nics: int,
    rounds: int,
    *,
    distinct: bool,
    aim: float | None,
    prepared: bool = False,
) -> Figure:
    """Measure nanoseconds a page, both ends, with page lists as plain arrays, or prepared."""
    ring: list[Machine] = []
    here, there = null_pair(nics)
    a, b = _engine("a", here, ring), _engine("b", there, ring)
    ours, theirs, table = machine_of(a), machine_of(b), worker_of(b).imms
    mr, _ = a.reg_mr(null_memory((npages + 1) * PAGE_BYTES))
    _, desc = b.reg_mr(null_memory((npages + 1) * PAGE_BYTES))
    rng = np.random.default_rng(1)
    src, dst = rng.permutation(npages), rng.permutation(npages)
    imms = np.arange(npages, dtype=np.uint32)
    ready = a.prepare_paged_writes(PAGE_BYTES, (mr, Pages(src)), (desc, Pages(dst)))
    moves = itertools.cycle((0, PAGE_BYTES))  # like the layers of a cache: another offset each time

    def one() -> int:
        nonlocal imms
        imms = imms + np.uint32(npages)  # fresh values in every round, like an application's
        counted = table.total + npages  # stats() would empty the processor's caches
        offset = next(moves)
        start = time.thread_time_ns()
        if prepared:
            got = b.expect_imm_count(7, npages)
            sent = ready.submit(7, src_offset=offset, dst_offset=offset)
        else:
            pages = ((mr, Pages(src)), (desc, Pages(dst)))
            got = b.expect_imm_count(*((int(imms[-1]), 1) if distinct else (7, npages)))
            sent = a.submit_paged_writes(PAGE_BYTES, *pages, imm=imms if distinct else 7)
        while not (sent.finished and got.finished):
            ours.step()
            theirs.step()
            ours.deliver()
            theirs.deliver()
        spent = time.thread_time_ns() - start
        assert counted == table.total, "an immediate is missing or was counted twice"
        if distinct:
            for imm, _ in b.stats().imms_unexpected:
                b.remove_imm(imm)
        return spent

    median, best = median_ns(one, rounds)
    kind = "another immediate on each page" if distinct else "one immediate"
    return Figure(
        what=f"{kind_of(prepared)}paged write, {npages} pages, {nics} NICs, {kind}, both ends",
        value=median / npages,
        best=best / npages,
        unit="ns/page",
        aim=aim,
        reference=_RUST_NS,
        reference_source=_RUST,
    )


def _null_nics(npages: int, nics: int, rounds: int) -> Figure:
    """Measure the NICs of a paged write, or of one row, without an engine: posts and polls."""
    here, there = null_pair(nics)
    used = min(nics, npages)
    n, out = npages // used, new_completions(EngineOptions().poll_rows)
    batches = [WriteBatch(n, nics + k, 0, 1, 0, 1, PAGE_BYTES, 7, k) for k in range(used)]

    def one() -> int:
        start = time.thread_time_ns()
        for nic, batch in zip(here, batches, strict=False):
            nic.post(batch, 0, n)
        for nic in here:
            nic.poll(out)
        for nic in there:
            nic.poll(out)
        return time.thread_time_ns() - start

    median, best = median_ns(one, rounds)
    what = f"{npages} pages" if npages > 1 else "one row"
    scale, unit = (npages, "ns/page") if npages > 1 else (1000, "us")
    return Figure(
        what=f"{what}, {nics} NICs: the null NICs alone, without an engine",
        value=median / scale,
        best=best / scale,
        unit=unit,
    )


def kind_of(prepared: bool) -> str:
    """Return the word for the label of a figure."""
    return "prepared " if prepared else ""


def _single(nics: int, rounds: int) -> Iterator[Figure]:
    """Measure one 4 KiB write, us: submit to the return of the post, the same with the poll and
    the settling after it, and write to counted immediate and back to done.
    """
    whats = (
        "submit to the return of the post",
        "submit to post (with the poll after it)",
        "write to counted immediate and back to done",
    )
    aims = (6.0, None, 8.0)
    for which, (what, aim) in enumerate(zip(whats, aims, strict=True)):
        median, best = summary(_single_ns(which, nics, rounds))
        yield Figure(
            what=f"single write, {nics} NICs: {what}",
            value=median / 1e3,
            best=best / 1e3,
            unit="us",
            aim=aim,
        )


def _single_ns(which: int, nics: int, rounds: int) -> list[int]:
    """Measure each round of one of the figures; only the first needs NICs with a clock."""
    ring: list[Machine] = []
    wire: list[NullDomain] = []
    here = [(NullDomain if which else _Stamping)(k, wire) for k in range(nics)]
    there = [NullDomain(nics + k, wire) for k in range(nics)]
    a, b = _engine("a", here, ring), _engine("b", there, ring)
    ours, theirs = machine_of(a), machine_of(b)
    mr, _ = a.reg_mr(null_memory(1 << 30))
    _, desc = b.reg_mr(null_memory(1 << 30))
    times: list[int] = []
    for _ in range(rounds):
        got = b.expect_imm_count(7, 1)
        theirs.step()
        start = time.thread_time_ns()
        sent = a.submit_single_write(PAGE_BYTES, (mr, 0), (desc, 0), imm=7)
        ours.step()
        end = time.thread_time_ns() if which == 1 else 0
        ours.deliver()
        theirs.step()
        theirs.deliver()
        end = end or time.thread_time_ns()
        if which == 0:
            end = max(nic.last_ns for nic in here if isinstance(nic, _Stamping))
        times.append(end - start)
        assert sent.ok
        assert got.ok
    return times


class _Stamping(NullDomain):
    """A NIC that records the time at which its last post ends."""

    last_ns = 0

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        taken = NullDomain.post(self, batch, start, stop)
        self.last_ns = time.thread_time_ns()
        return taken


def _scatter(nics: int, rounds: int, *, prepared: bool, peers: int = 63) -> Figure:
    """Measure microseconds from the submit to the return of the last post, in a peer group."""
    ring: list[Machine] = []
    wire: list[NullDomain] = []
    last = _Stamping(0, wire)
    a = _engine("a", [*(NullDomain(k, wire) for k in range(1, nics)), last], ring)
    others = [
        _engine(f"p{p}", [NullDomain(nics * (p + 1) + k, wire) for k in range(nics)], ring)
        for p in range(peers)
    ]
    ours, *theirs = map(machine_of, (a, *others))
    mr, _ = a.reg_mr(null_memory(1 << 30))
    descs = [other.reg_mr(null_memory(1 << 20))[1] for other in others]
    group = a.add_peer_group([other.main_address for other in others])
    dsts = [ScatterDst(256, 256 * k, (desc, 0)) for k, desc in enumerate(descs)]
    ready = a.prepare_scatter(mr, dsts, group=group)
    moves = itertools.cycle((0, 1 << 16))  # two buffers alternately

    def one() -> int:
        offset = next(moves)
        start = time.thread_time_ns()
        if prepared:
            sent = ready.submit(3, src_offset=offset, dst_offset=offset)
        else:
            sent = a.submit_scatter(mr, dsts, imm=3, group=group)
        ours.step()
        spent = last.last_ns - start
        ours.deliver()
        for other in theirs:
            other.step()
        assert sent.ok
        return spent

    median, best = median_ns(one, rounds)
    return Figure(
        what=f"{kind_of(prepared)}scatter to {peers} peers in a group, {nics} NICs: "
        "submit to last post",
        value=median / 1e3,
        best=best / 1e3,
        unit="us",
        aim=8.5 if prepared else 40.0,
        reference=8.502,
        reference_source=_SCATTER,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="of each figure, 3 or more")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    show_figures("tests.bench.bench_engine", engine_figures(args.rounds), json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
