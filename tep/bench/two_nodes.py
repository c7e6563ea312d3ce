"""The measurements of scripts/bench_two_nodes between two engines, and its format of results.

Two processes run this alike, one of them writes; on the simulator and on loopback both engines are
in one process. The source times its transfers, from submit to the last acknowledgement.

Results are one JSON document, which `tep sim fit` reads:

    format   "tep-two-nodes-1"
    points   [{"kind": "single" | "paged", "bytes", "gbps", "nics"}]  The points to fit a profile
             to: single: bytes of the write, one in flight at a time; paged: bytes of a page, many
             pages in random order; gbps: Gb/s over all NICs; for the largest number of NICs only
    others   [{"kind", "bytes", "value", "unit", "nics"}]  everything else, fewer NICs as well
    run      backend, options, memory, NICs, versions, date
"""

from __future__ import annotations

import contextlib
import json
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tep import __version__
from tep.base.api import Pages, Scatter, ScatterDst, Single
from tep.base.errors import FabricError, UsageError
from tep.base.units import GiB, KiB, MiB
from tep.base.wire import MrDesc
from tep.core.plan import count_imms
from tep.cuda.arena import Arena, alloc
from tep.engine import TransferEngine
from tep.rendezvous import Group

__all__ = ["FORMAT", "Plan", "Point", "Result", "document", "measure"]

FORMAT: Final = "tep-two-nodes-1"
_SINGLES: Final = (64 * KiB, 256 * KiB, MiB, 32 * MiB)
_PAGES: Final = (KiB, 8 * KiB, 16 * KiB, 64 * KiB)
"""The sizes of the paper's Table 2, both NICs (tep/bench/reproduce/data/p2p.csv)."""

_SLICES: Final = 16
_WAIT_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of the measurements; both sides must have the same.

    Attributes:
        singles, pages: sizes in bytes.
        pages_each: pages of one paged run.
        bytes_each: bytes of single writes of one size, at the least 4 writes.
        rounds: rounds of latencies.
        buffer_bytes: bytes of the region on each side.
    """

    singles: tuple[int, ...] = _SINGLES
    pages: tuple[int, ...] = _PAGES
    pages_each: int = 16_384
    bytes_each: int = 4 * GiB
    rounds: int = 1_000
    buffer_bytes: int = 256 * MiB

    @classmethod
    def short(cls) -> Plan:
        """Make a plan of seconds: every kind, small numbers. Its figures mean nothing."""
        return cls(
            singles=(64 * KiB, MiB),
            pages=(KiB, 8 * KiB, 64 * KiB),
            pages_each=256,
            bytes_each=4 * MiB,
            rounds=20,
            buffer_bytes=16 * MiB,
        )


class Point(NamedTuple):
    """One figure: `value` in `unit`, of writes or pages of `nbytes`, over so many NICs."""

    kind: str
    nbytes: int
    value: float
    unit: str
    nics: int


@dataclass(frozen=True, slots=True)
class Result:
    """The figures over one engine, in order, and the names of its NICs."""

    points: tuple[Point, ...]
    nics: tuple[str, ...]


class _Side:
    """One engine with its buffer; the source or the target, in this process."""

    def __init__(self, engine: TransferEngine, arena: Arena, *, source: bool, seed: int) -> None:
        self.engine = engine
        self.arena = arena
        self.mr, self.desc = engine.reg_mr(arena)
        if source:
            arena.write(_pattern(arena.nbytes, seed).tobytes())

    @property
    def nics(self) -> int:
        """The number of NICs."""
        return len(self.engine.main_address.domains)


def _pattern(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class _Match:
    """The two sides of a run: here, or one of them elsewhere.

    Attributes:
        source, target: the sides in this process.
        there: descriptors of both buffers, the source's first.
        row_bytes: longest write that one NIC takes: 8 MiB on Soft-RoCE. Both sides have the same
            NICs, so they agree.
    """

    def __init__(self, sides: Sequence[_Side], meeting: Group | None) -> None:
        self.meeting = meeting
        if meeting is None:
            self.source, self.target = sides[0], sides[1]
            descs = [side.desc for side in sides]
        else:
            mine = sides[0]
            self.source, self.target = (mine, None) if meeting.rank == 0 else (None, mine)
            descs = [MrDesc.from_bytes(raw) for raw in meeting.all_gather(mine.desc.to_bytes())]
        self.there = descs
        domains = [domain for side in sides for domain in side.engine._domains]
        self.row_bytes = min(domain.caps.max_write_bytes for domain in domains)
        self._imm = 0

    source: _Side | None
    target: _Side | None

    @property
    def nics(self) -> tuple[int, int]:
        """The numbers of NICs of the source and of the target."""
        ours, theirs = (len(desc.addr.domains) for desc in self.there)
        return ours, theirs

    def next_imm(self) -> int:
        """Return an immediate that neither side has used."""
        self._imm += 1
        return self._imm

    def together(self) -> None:
        """Wait until both sides are here."""
        if self.meeting is not None:
            self.meeting.barrier(timeout_s=_WAIT_S)

    def run(self, imm: int, count: int, write: Callable[[_Side], None]) -> float:
        """Run the source's writes while the target counts; return seconds, 0.0 at the target."""
        got = self.target.engine.expect_imm_count(imm, count) if self.target else None
        self.together()
        took_s = 0.0
        if self.source:
            now_s = self.source.engine.driver.now_s
            started = now_s()
            write(self.source)
            took_s = now_s() - started
        if got is not None:
            got.wait(_WAIT_S)
        self.together()
        return took_s


def measure(
    engines: Sequence[TransferEngine],
    plan: Plan,
    *,
    meeting: Group | None = None,
    memory: str = "cpu",
    progress: Callable[[str], None] = lambda _: None,
    seed: int = 1,
) -> Result:
    """Measure between two engines; the points are the source's, none at a lone target.

    Args:
        engines: both engines if no meeting is given; else this process's.
        plan: the measurements.
        meeting: the meeting with the other process; rank 0 is the source.
        memory: "cpu" or "cuda:N", the device of the buffers.
        progress: called with the name of the next measurement.
        seed: seed of contents and of the order of pages.

    Raises:
        FabricError: bytes have arrived wrong, or a write failed.
    """
    roles = [True, False] if meeting is None else [meeting.rank == 0]
    with contextlib.ExitStack() as stack:
        sides = []
        for engine, source in zip(engines, roles, strict=True):
            arena = stack.enter_context(alloc(plan.buffer_bytes, memory))
            sides.append(_Side(engine, arena, source=source, seed=seed))
        match = _Match(sides, meeting)
        points: list[Point] = []
        for kind, nbytes, unit, run in _steps(match, plan, seed):
            progress(f"{kind} {nbytes}")
            value = run()
            points.append(Point(kind, nbytes, value, unit, match.nics[0]))
        names = tuple(domain.caps.nic for domain in engines[0]._domains)
        for side in sides:
            side.engine.deregister(side.mr)
    return Result(tuple(points) if match.source else (), names)


def _steps(
    match: _Match, plan: Plan, seed: int
) -> Iterator[tuple[str, int, str, Callable[[], float]]]:
    """Yield (kind, bytes, unit, function to run), the same on both sides."""
    size = plan.buffer_bytes
    yield "verified", size, "Gb/s", lambda: _verified(match, size, seed)
    for nbytes in plan.singles:
        if nbytes <= min(size, match.row_bytes):
            count = min(1000, max(4, plan.bytes_each // nbytes))
            yield "single", nbytes, "Gb/s", _single(match, nbytes, count)
    for nbytes in plan.pages:
        yield "paged", nbytes, "Gb/s", _paged(match, nbytes, plan, seed)
    yield "scatter", 4 * KiB, "us", _scatter(match, 4 * KiB, plan.rounds // 10)
    yield "barrier", 0, "us", lambda: _ping(match, plan.rounds, 0)
    yield "latency", 8, "us", lambda: _ping(match, plan.rounds, 8)
    yield "bidirectional", MiB, "Gb/s", lambda: _both_ways(match, MiB, min(64, size // MiB))


def _verified(match: _Match, nbytes: int, seed: int) -> float:
    """Write the whole buffer, which also warms up; compare every byte."""
    imm, (ours, theirs) = match.next_imm(), match.nics
    parts = [(at, min(match.row_bytes, nbytes - at)) for at in range(0, nbytes, match.row_bytes)]

    def write(side: _Side) -> None:
        dst = match.there[1]
        sent = [
            side.engine.submit_single_write(part, (side.mr, at), (dst, at), imm)
            for at, part in parts
        ]
        for transfer in sent:
            transfer.wait(_WAIT_S)

    count = sum(count_imms(Single(part), ours, theirs) for _, part in parts)
    took_s = match.run(imm, count, write)
    wrong = -1
    if match.target and match.target.engine._domains[0].caps.moves_bytes:
        found = np.frombuffer(match.target.arena.read(), np.uint8)
        differs = np.flatnonzero(found != _pattern(nbytes, seed))
        wrong = int(differs[0]) if len(differs) else -1
    if wrong >= 0:
        raise FabricError(f"bench_two_nodes: byte {wrong} of {nbytes} differs", code="PROVIDER")
    return 8 * nbytes / took_s / 1e9 if took_s else 0.0


def _single(match: _Match, nbytes: int, count: int) -> Callable[[], float]:
    def run() -> float:
        imm, (ours, theirs) = match.next_imm(), match.nics
        each = count_imms(Single(nbytes), ours, theirs)

        def write(side: _Side) -> None:
            engine, dst = side.engine, match.there[1]
            for _ in range(count):
                engine.submit_single_write(nbytes, (side.mr, 0), (dst, 0), imm).wait(_WAIT_S)

        took_s = match.run(imm, count * each, write)
        return 8 * nbytes * count / took_s / 1e9 if took_s else 0.0

    return run


def _paged(match: _Match, nbytes: int, plan: Plan, seed: int) -> Callable[[], float]:
    def run() -> float:
        npages = min(plan.pages_each, plan.buffer_bytes // nbytes)
        times = max(1, plan.pages_each // npages)
        rng = np.random.default_rng(seed)
        orders = [Pages(rng.permutation(npages)) for _ in range(2)]
        warm = match.next_imm()

        def write(side: _Side, imm: int, times: int) -> None:
            pair = (side.mr, orders[0]), (match.there[1], orders[1])
            sent = [side.engine.submit_paged_writes(nbytes, *pair, imm) for _ in range(times)]
            for transfer in sent:
                transfer.wait(_WAIT_S)

        match.run(warm, npages, lambda side: write(side, warm, 1))
        imm = match.next_imm()
        took_s = match.run(imm, npages * times, lambda side: write(side, imm, times))
        return 8 * nbytes * npages * times / took_s / 1e9 if took_s else 0.0

    return run


def _scatter(match: _Match, nbytes: int, rounds: int) -> Callable[[], float]:
    """Measure sixteen slices to the one peer, from submit to acknowledged; median, us."""

    def run() -> float:
        imm, (ours, theirs) = match.next_imm(), match.nics
        slices = [
            ScatterDst(nbytes, k * nbytes, (match.there[1], k * nbytes)) for k in range(_SLICES)
        ]
        each = _SLICES * count_imms(Scatter(nbytes), ours, theirs)
        times_s: list[float] = []

        def write(side: _Side) -> None:
            now_s = side.engine.driver.now_s
            for _ in range(rounds):
                started = now_s()
                side.engine.submit_scatter(side.mr, slices, imm).wait(_WAIT_S)
                times_s.append(now_s() - started)

        match.run(imm, each * rounds, write)
        return 1e6 * statistics.median(times_s) if times_s else 0.0

    return run


def _ping(match: _Match, rounds: int, nbytes: int) -> float:
    """Measure half a round trip, median, us: a write of 8 bytes, or a barrier, and its answer."""
    there, back = match.next_imm(), match.next_imm()
    ours, theirs = match.nics
    times_s = []

    def send(side: _Side, dst: MrDesc, imm: int) -> None:
        if nbytes:
            side.engine.submit_single_write(nbytes, (side.mr, 0), (dst, 0), imm)
        else:
            side.engine.submit_barrier([dst], imm)

    shape = Single(nbytes) if nbytes else Scatter(0)
    match.together()
    for _ in range(rounds):
        started = match.source.engine.driver.now_s() if match.source else 0.0
        if match.source:
            send(match.source, match.there[1], there)
        if match.target:
            count = count_imms(shape, ours, theirs)
            match.target.engine.expect_imm_count(there, count).wait(_WAIT_S)
            send(match.target, match.there[0], back)
        if match.source:
            count = count_imms(shape, theirs, ours)
            match.source.engine.expect_imm_count(back, count).wait(_WAIT_S)
            times_s.append((match.source.engine.driver.now_s() - started) / 2)
    match.together()
    return 1e6 * statistics.median(times_s) if times_s else 0.0


def _both_ways(match: _Match, nbytes: int, count: int) -> float:
    """Measure writes both ways at once; Gb/s of both, by the source's clock."""
    imm, (ours, theirs) = match.next_imm(), match.nics
    sides = [side for side in (match.source, match.target) if side]
    each = [count_imms(Single(nbytes), theirs, ours), count_imms(Single(nbytes), ours, theirs)]
    got = [side.engine.expect_imm_count(imm, count * each[side is match.target]) for side in sides]
    match.together()
    started = sides[0].engine.driver.now_s()
    sent = []
    for k in range(count):
        for side in sides:
            dst = match.there[0 if side is match.target else 1]
            at = k * nbytes
            sent.append(side.engine.submit_single_write(nbytes, (side.mr, at), (dst, at), imm))
    for handle in (*sent, *got):
        handle.wait(_WAIT_S)
    took_s = sides[0].engine.driver.now_s() - started
    match.together()
    return 2 * 8 * nbytes * count / took_s / 1e9


def document(
    results: Sequence[Result], backend: str, options: dict[str, object], memory: str
) -> dict[str, object]:
    """Return the results as the JSON that this module describes; the last one is fitted to.

    Raises:
        UsageError: there are none.
    """
    if not results or not results[-1].points:
        raise UsageError("bench_two_nodes: nothing was measured here; rank 0 has the results")
    fitted = [point for point in results[-1].points if point.kind in {"single", "paged"}]
    others = [point for result in results for point in result.points if point not in fitted]
    return {
        "format": FORMAT,
        "points": [
            {"kind": one.kind, "bytes": one.nbytes, "gbps": one.value, "nics": one.nics}
            for one in fitted
        ],
        "others": [
            {
                "kind": one.kind,
                "bytes": one.nbytes,
                "value": one.value,
                "unit": one.unit,
                "nics": one.nics,
            }
            for one in others
        ],
        "run": {
            "backend": backend,
            "options": json.loads(json.dumps(options, default=str)),
            "memory": memory,
            "nics": list(results[-1].nics),
            "tep": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "date": datetime.now(UTC).date().isoformat(),
        },
    }
