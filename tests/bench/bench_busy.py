"""The engine beside a busy program: the same work alone, and beside threads that compute.

    python -m tests.bench.bench_busy --fabric local --rounds 5

Two processes of this host run it with `--rank`. In each round they do the same work alone and
beside each load in turns, so that other work on the machine affects all alike.
Each ratio is to the round's own figure alone. A load in another process takes cores and not the
interpreter: what is lost beside it is not the interpreter's fault.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import mmap
import os
import statistics
import subprocess  # the other process is this Python
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np

from tep.base.api import Pages
from tep.base.wire import MrDesc
from tep.engine import TransferEngine
from tep.rendezvous import join
from tep.rendezvous.launch import launch
from tests.bench.figures import Figure, show_figures

__all__ = ["FABRICS", "busy_figures"]

FABRICS: Final = ("local", "tcp")
_SIDES: Final = ("sender", "receiver", "both")
_PAGE_BYTES: Final = 16384
_NPAGES: Final = 2048
_TRIPS: Final = 40
_BULKS: Final = 4
_PACE_S: Final = 0.1
_TRIP, _BULK = "8 B there and back", "32 MiB in 16 KiB pages"
_KEEPS: Final = "of its pace"
_PYTHON: Final = "a thread in Python"
_COUNTS: Final = (
    "import mmap\nv=memoryview(mmap.mmap({},4096)).cast('Q')\nn=0\nwhile 1: n+=1; v[0]=n"
)


class _Load(Protocol):
    """Something that computes until close(), and counts what it has done."""

    @property
    def count(self) -> int: ...

    def close(self) -> None: ...


class _Thread:
    """A thread of this process that runs `run(load)`, which computes until `ended`."""

    def __init__(self, run: Callable[[_Thread], object]) -> None:
        self.count = 0
        self.ended = False
        self._thread = threading.Thread(target=run, args=(self,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.ended = True
        self._thread.join()


def _python(load: _Thread) -> None:
    while not load.ended:
        load.count += 1


def _numpy(load: _Thread) -> None:
    source = np.ones(1 << 18)
    target = source.copy()
    while not load.ended:
        np.add(source, 1.0, out=target)  # without the interpreter
        load.count += 1


def _loop(load: _Thread) -> None:
    async def tick() -> None:
        while not load.ended:
            load.count += 1
            await asyncio.sleep(0)

    async def ticks() -> None:
        await asyncio.gather(*(tick() for _ in range(10)))

    asyncio.run(ticks())


class _Process:
    """Another process that computes in Python."""

    def __init__(self) -> None:
        shared = os.memfd_create("tep-bench")
        os.ftruncate(shared, mmap.PAGESIZE)
        self._words = memoryview(mmap.mmap(shared, mmap.PAGESIZE)).cast("Q")
        command = [sys.executable, "-S", "-c", _COUNTS.format(shared)]
        self._process = subprocess.Popen(command, pass_fds=[shared])  # this Python
        os.close(shared)

    @property
    def count(self) -> int:
        return int(self._words[0])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


_LOADS: Final[dict[str, Callable[[], _Load]]] = {
    _PYTHON: lambda: _Thread(_python),
    "a thread in numpy": lambda: _Thread(_numpy),
    "an asyncio loop": lambda: _Thread(_loop),
    "another process": _Process,
}


_CONDITIONS: Final = (
    ("", "both"),
    *((load, side) for load in (_PYTHON, "another process") for side in _SIDES),
    ("a thread in numpy", "both"),
    ("an asyncio loop", "both"),
)
"""Load and side, "" = alone."""


class _Rank:
    """One of the two processes."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.ranks = join()
        self.memory = np.zeros((_NPAGES, _PAGE_BYTES), np.uint8)
        self.mr, desc = engine.reg_mr(self.memory)
        raw = self.ranks.all_gather(desc.to_bytes())
        self.target = MrDesc.from_bytes(raw[1 - self.ranks.rank])
        self.pages = Pages(range(_NPAGES))

    def trip(self) -> None:
        """Send 8 bytes there and back; rank 0 begins."""
        here, there = (self.mr, 0), (self.target, 0)
        answer = self.engine.expect_imm_count(7, 1)
        if self.ranks.rank:
            answer.wait()
        self.engine.submit_single_write(8, here, there, imm=7)
        if not self.ranks.rank:
            answer.wait()

    def bulk(self) -> None:
        """Send 32 MiB in pages, and 8 bytes back."""
        if self.ranks.rank:
            self.engine.expect_imm_count(8, _NPAGES).wait()
            self.engine.submit_single_write(8, (self.mr, 0), (self.target, 0), imm=9)
            return
        answer = self.engine.expect_imm_count(9, 1)
        pages = (self.mr, self.pages), (self.target, self.pages)
        self.engine.submit_paged_writes(_PAGE_BYTES, *pages, imm=8)
        answer.wait()

    def timed(
        self, work: Callable[[], None], times: int, load: _Load | None
    ) -> tuple[float, float]:
        """Return the median time of some work, seconds, and the load's pace meanwhile."""
        self.ranks.barrier()
        found = []
        count, begun = load.count if load else 0, time.perf_counter()
        for _ in range(times):
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
        pace = (load.count - count if load else 0) / (time.perf_counter() - begun)
        return statistics.median(found), pace

    def measure(self, load: str, side: str) -> dict[str, float]:
        """Do all work beside a load; "keeps" is its pace, 1 = that beside an idle engine."""
        mine = load and side in {"both", _SIDES[self.ranks.rank]}
        running = _LOADS[load]() if mine else None
        try:
            time.sleep(_PACE_S)
            _, idle = self.timed(lambda: time.sleep(_PACE_S), 1, running)
            trip_s, beside_trips = self.timed(self.trip, _TRIPS, running)
            bulk_s, beside_bulks = self.timed(self.bulk, _BULKS, running)
        finally:
            if running is not None:
                running.close()
        found = {"trip": trip_s * 1e6, "bulk": _NPAGES * _PAGE_BYTES / bulk_s / 1e9}
        if running is not None:
            idle = max(idle, 1 / _PACE_S)  # a load that got no core at all meanwhile
            found |= {"trip keeps": beside_trips / idle, "bulk keeps": beside_bulks / idle}
        return found


def _paces(times: int) -> list[float]:
    """Return how fast a thread computes in Python, several times."""
    load, found = _LOADS[_PYTHON](), []
    for _ in range(times):
        count, begun = load.count, time.perf_counter()
        time.sleep(_PACE_S)
        found.append((load.count - count) / (time.perf_counter() - begun))
    load.close()
    return found


def run_rank(fabric: str, rounds: int) -> None:
    """Be one of the two processes; rank 0 prints what both have found."""
    without = statistics.median(_paces(rounds))
    engine = (
        TransferEngine.open("local")
        if fabric == "local"
        else TransferEngine.open("libfabric", provider="tcp", nics=["127.0.0.1"])
    )
    with engine:
        rank = _Rank(engine)
        for _ in range(_TRIPS):
            rank.trip()
        kept = [pace / without for pace in _paces(rounds)]
        found = [[rank.measure(*one) for one in _CONDITIONS] for _ in range(rounds)]
        everybody = rank.ranks.all_gather(json.dumps([kept, found]).encode())
        if rank.ranks.rank == 0:
            sys.stdout.write(json.dumps([json.loads(one) for one in everybody]))
        rank.ranks.close()


def busy_figures(fabric: str, rounds: int = 5) -> Iterator[Figure]:
    """Measure over one fabric, `rounds` times alone and beside each load."""
    out = io.StringIO()
    command = [sys.executable, "-m", "tests.bench.bench_busy", "--rank"]
    command += ["--fabric", fabric, "--rounds", str(rounds)]
    launch("local", ["127.0.0.1"] * 2, command, out=out)
    (kept, sender), (_, receiver) = json.loads(out.getvalue())
    yield _figure(f"{fabric}: a thread in Python beside an idle engine keeps", kept, _KEEPS, 0.99)
    for at, (load, side) in enumerate(_CONDITIONS):
        rows, alone = [one[at] for one in sender], [one[0] for one in sender]
        if not load:
            yield _figure(f"{fabric}, alone: {_TRIP}", [row["trip"] for row in rows], "us")
            yield _figure(f"{fabric}, alone: {_BULK}", [row["bulk"] for row in rows], "GB/s")
            continue
        what, python = f"{fabric}, beside {load}, {side}", load == _PYTHON
        for key, text, aim in (("trip", _TRIP, 4.0), ("bulk", _BULK, 0.8)):
            ratios = [row[key] / base[key] for row, base in zip(rows, alone, strict=True)]
            yield _figure(f"{what}: {text}", ratios, "x alone", aim if python else None)
            loaded = [one[at] for one in (receiver if side == "receiver" else sender)]
            keeps = [row[f"{key} keeps"] for row in loaded]
            yield _figure(f"{what}: it keeps, {text}", keeps, _KEEPS, 0.85 if python else None)


def _figure(what: str, found: list[float], unit: str, aim: float | None = None) -> Figure:
    less = _TRIP in what and unit != _KEEPS
    return Figure.of(what, found, unit, more_is_better=not less, aim=aim)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fabric", choices=FABRICS, help="both if not given")
    parser.add_argument("--rounds", type=int, default=5, help="of each figure, 3 or more")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", action="store_true", help="be one of the two processes")
    args = parser.parse_args(argv)
    if args.rank:
        run_rank(args.fabric, args.rounds)
        return 0
    fabrics = [args.fabric] if args.fabric else FABRICS
    figures = itertools.chain.from_iterable(busy_figures(one, args.rounds) for one in fabrics)
    show_figures("tests.bench.bench_busy", figures, json=args.json, decimals=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
