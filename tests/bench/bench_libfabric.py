"""The whole engine over libfabric against a plain C loop: same provider, same settings, in turns.

The time is from submit_paged_writes() to the last counted immediate and the transfer's own end.
Runs of C and of tep take turns, in several pairs of fresh processes: other work on the machine then
affects both, and the place of a process's memory alone changes its figures by a tenth. Processes
are stopped while the others run: their targets poll without end, and would take a core. The C
program is tests/bench/libfabric/yardstick.c, built with cc against the library that tep found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import operator
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

import tep
from tep.backends.ffi.libfabric import load
from tep.base.units import KiB, MiB
from tep.drivers.threads import Machine
from tests.bench.figures import Figure, show_figures
from tests.support.inside import machine_of

__all__ = ["efa_figures", "libfabric_figures", "serve"]

SOURCE: Final = Path(__file__).parent / "libfabric" / "yardstick.c"
_RUNS: Final = 3  # runs of each pair of processes
_PINGS: Final = 500  # pings of a run; on a crowded machine each may take two time slices
_WAIT_S: Final = 30.0
_IDLE_S: Final = 180.0  # while the other one of a pair runs
_CALL_US: Final = 100.0
_CALLS: Final = 200  # calls of a round


def libfabric_figures(rounds: int = 15) -> Iterator[Figure]:
    """Measure, one figure at a time; `rounds` runs of C and of tep each, in turns.

    Raises:
        LookupError: no C compiler, no headers of libfabric, or no yardstick.
        BackendUnavailable: no libfabric.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder, "yardstick"))
        compare = partial(compare_runs, pairs=max(1, rounds // _RUNS), source=_what_c_is(program))
        for size, most in ((4 * KiB, 1.25), (64 * KiB, 1.05), (MiB, 1.05)):
            rows = max(128, min(4096, 64 * MiB // size))
            window = max(4, min(1024, 4 * MiB // size))
            yield compare(
                f"tcp {_spell(size)}: CPU a write, both ends",
                partial(_Pair, "tcp", size, rows),
                partial(_C, program, "cpu", "tcp", size, rows, window),
                aim=partial(operator.mul, most),
            )
        yield compare(
            "tcp 8 B: half a round trip, wall time",
            partial(_Two, "tcp", 8, _PINGS, pings=True),
            partial(_C, program, "lat", "tcp", 8, _PINGS, 1),
            aim=partial(operator.mul, 2.5),
        )
        yield compare(
            "tcp 4,096 x 64 KiB: two processes, wall time",
            partial(_Two, "tcp", 64 * KiB, 4096),
            partial(_C, program, "rate", "tcp", 64 * KiB, 4096, 64),
            gbytes=4096 * 64 * KiB / 1e9,
            aim=partial(operator.mul, 0.95),
        )
        yield from _delays(program, "tcp", rounds)


def efa_figures(rounds: int = 15) -> Iterator[Figure]:
    """Measure EFA beside the C loop: CPU of a write, both ends, device included.

    Raises:
        LookupError: no C compiler, no headers of libfabric, or no yardstick.
        BackendUnavailable: no libfabric, or no EFA device.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder, "yardstick"))
        for size in (64, 8 * KiB):
            yield compare_runs(
                f"efa {_spell(size)}: CPU a write, both ends",
                partial(_Pair, "efa", size, 4096),
                partial(_C, program, "cpu", "efa", size, 4096, 512),
                aim=partial(operator.mul, 2.0),
                pairs=max(1, rounds // _RUNS),
                source=_what_c_is(program),
            )


def _spell(nbytes: int) -> str:
    if nbytes < KiB:
        return f"{nbytes} B"
    return f"{nbytes // MiB} MiB" if nbytes >= MiB else f"{nbytes // KiB} KiB"


def _what_c_is(program: Path) -> str:
    return f"{program.name}.c, a plain C loop over the same {load().describe()}, measured in turns"


def build(program: Path) -> Path:
    """Compile the yardstick against the libfabric that tep itself has found."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise LookupError("no C compiler (Debian: gcc)")
    if not SOURCE.exists():
        raise LookupError(f"no {SOURCE}: the yardstick is in a checkout only")
    library = load().found.path
    link = [library, f"-Wl,-rpath,{Path(library).parent}"] if "/" in library else ["-l:" + library]
    done = subprocess.run(  # the compiler of PATH on our own file, no shell
        [compiler, "-O2", str(SOURCE), *link, "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise LookupError(f"{first.strip()} (Debian: libfabric-dev has the headers)")
    return program


# ------------------------------------------------------------------ what is compared


class _Runs(Protocol):
    """One of the two contestants that take turns."""

    def run(self) -> float:
        """Make one run; return its microseconds."""

    def signal(self, number: int) -> None:
        """Stop the processes other than this one, or continue them."""

    def close(self) -> None:
        """End the processes."""


def _take_turn(one: _Runs) -> float:
    one.signal(signal.SIGCONT)
    try:
        return one.run()
    finally:
        one.signal(signal.SIGSTOP)


def compare_runs(
    what: str,
    ours: Callable[[], _Runs],
    theirs: Callable[[], _Runs],
    *,
    pairs: int,
    source: str,
    aim: Callable[[float], float] | None,
    gbytes: float | None = None,
) -> Figure:
    """Run both in turns; `gbytes` a run turns times into rates, and more is then better."""
    mine: list[float] = []
    c: list[float] = []
    for _ in range(pairs):
        other = theirs()
        try:
            own = ours()
            try:
                own.signal(signal.SIGSTOP)
                _take_turn(other)
                for _ in range(_RUNS):
                    c.append(_take_turn(other))
                    mine.append(_take_turn(own))
            finally:
                own.close()
        finally:
            other.close()
    if gbytes is not None:
        mine, c = ([gbytes / us * 1e6 for us in found] for found in (mine, c))
    reference = statistics.median(c)
    return Figure.of(
        what,
        mine,
        "us" if gbytes is None else "GB/s",
        more_is_better=gbytes is not None,
        aim=None if aim is None else aim(reference),
        reference=reference,
        reference_source=source,
    )


class _C:
    """The C program; a line on its input makes one run."""

    def __init__(self, program: Path, *arguments: object) -> None:
        complete = int(arguments[1] == "tcp")  # True: rows wait for the target, like tep's
        self._process = subprocess.Popen(  # what build() made, no shell
            [str(program), *map(str, arguments), str(complete)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # its target with it
        )

    def run(self) -> float:
        self.start()
        return self.finish()

    def start(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def ended(self) -> bool:
        """Return True if finish() would return at once."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def finish(self) -> float:
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.communicate()


def _engine(provider: str, ring: list[Machine] | None = None) -> tep.TransferEngine:
    driver = tep.ThreadDriver("bench") if ring is None else tep.InlineDriver(ring)
    return tep.TransferEngine.open("libfabric", driver=driver, provider=provider, nics=1)


def _memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Allocate page-aligned memory and write to it, like the yardstick."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE), np.uint8)
    memory[:] = 1
    return memory


class _Pair:
    """Both ends in one thread; CPU time of a write."""

    def __init__(self, provider: str, size: int, rows: int) -> None:
        self.rows, self.size = rows, size
        ring: list[Machine] = []
        self.a, self.b = _engine(provider, ring), _engine(provider, ring)
        self.mr, _ = self.a.reg_mr(_memory(rows * size))
        _, self.desc = self.b.reg_mr(_memory(rows * size))
        self.pages = tep.Pages(np.arange(rows))
        self.run()

    def run(self) -> float:
        start = time.process_time_ns()
        got = self.b.expect_imm_count(1, self.rows)
        ends = (self.mr, self.pages), (self.desc, self.pages)
        sent = self.a.submit_paged_writes(self.size, *ends, imm=1)
        got.wait(_WAIT_S)
        sent.wait(_WAIT_S)
        return (time.process_time_ns() - start) / self.rows / 1000

    def signal(self, number: int) -> None:
        """Do nothing: there is no other process."""

    def close(self) -> None:
        self.a.close()
        self.b.close()


class _Two:
    """Two processes, the other one in serve(): time of all rows, or the median half round trip."""

    def __init__(
        self, provider: str, size: int, rows: int, *, pings: bool = False, threads: bool = False
    ) -> None:
        self.rows, self.size, self.pings = rows, size, pings
        self.engine = _engine(provider, None if threads else [])
        self.mr, desc = self.engine.reg_mr(_memory(max(size, 4 * KiB) * (1 if pings else rows)))
        job = {
            "provider": provider,
            "nbytes": max(size, 4 * KiB) * (1 if pings else rows),
            "count": 1 if pings else rows,
            "threads": threads,
            "desc": desc.to_bytes().hex(),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from tests.bench.bench_libfabric import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        self.desc = tep.MrDesc.from_bytes(bytes.fromhex(self.process.stdout.readline()))
        self.pages = tep.Pages(np.arange(rows))
        self.run()

    def run(self) -> float:
        if self.pings:
            return statistics.median(self._ping() for _ in range(self.rows))
        start = time.perf_counter_ns()
        answer = self.engine.expect_imm_count(2, 1)
        sent = self.submit(1)
        answer.wait(_WAIT_S)
        sent.wait(_WAIT_S)
        return (time.perf_counter_ns() - start) / 1000

    def submit(self, imm: int, on_done: Callable[[object], object] | None = None) -> tep.Transfer:
        ends = (self.mr, self.pages), (self.desc, self.pages)
        return self.engine.submit_paged_writes(self.size, *ends, imm=imm, on_done=on_done)

    def _ping(self) -> float:
        start = time.perf_counter_ns()
        sent = self.engine.submit_single_write(self.size, (self.mr, 0), (self.desc, 0), imm=1)
        machine_of(self.engine).step()  # sent before we prepare for the answer
        answer = self.engine.expect_imm_count(2, 1)
        answer.wait(_WAIT_S)
        took_us = (time.perf_counter_ns() - start) / 2000
        sent.wait(_WAIT_S)  # raise an error here instead of waiting for an answer that never comes
        return took_us

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.engine.close()


def serve() -> None:
    """Run the other process of a pair: count, then answer with one write; end when it is killed,
    or when nothing was written for three minutes.
    """
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    target = tep.MrDesc.from_bytes(bytes.fromhex(job["desc"]))
    here = _engine(job["provider"], None if job["threads"] else [])
    mr, mine = here.reg_mr(_memory(job["nbytes"]))
    sys.stdout.write(mine.to_bytes().hex() + "\n")
    sys.stdout.flush()
    answered: tep.Transfer | None = None
    while True:
        here.expect_imm_count(1, job["count"]).wait(_IDLE_S)
        former, answered = answered, here.submit_single_write(8, (mr, 0), (target, 0), imm=2)
        if not job["threads"]:
            machine_of(here).step()  # sent before we prepare for the next one
        if former is not None:
            former.wait(_WAIT_S)


# ------------------------------------------------------------------ the user's own thread


def _delays(program: Path, provider: str, rounds: int) -> Iterator[Figure]:
    """Measure a call of the user's own thread beside a busy engine, 99th percentile.

    The call drops the interpreter's lock (SHA-256 over a buffer of the right length), as numpy's,
    torch's and file calls do; it needs the lock again to return. Sender, target and this thread
    are three on what may be two cores; so a call beside the C loop, which shares no lock with us,
    is the reference, and the second figure leaves out what the kernel let this thread wait for.
    """
    two = _Two(provider, 64 * KiB, 512, threads=True)
    try:
        c = _C(program, "rate", provider, 64 * KiB, 512, 64)
        try:
            c.run()
            data = bytes(16 * KiB)
            while min(_timed_us(data)[0] for _ in range(5)) < _CALL_US:
                data += bytes(8 * KiB)
            busy: list[tuple[float, float]] = []
            beside_c: list[tuple[float, float]] = []
            for _ in range(rounds):
                two.signal(signal.SIGSTOP)
                c.signal(signal.SIGCONT)
                beside_c += _beside_c(c, data)
                c.signal(signal.SIGSTOP)
                two.signal(signal.SIGCONT)
                busy += _beside_engine(two, data)
        finally:
            c.close()
    finally:
        two.close()
    for what, own in (("", 0), (", but for its waits for a CPU", 1)):
        yield Figure(
            what=f"{provider}: a {_CALL_US:.0f} us call beside a busy engine, p99{what}",
            value=percentile([call[own] for call in busy], 0.99),
            best=percentile([call[own] for call in busy], 0.5),
            unit="us",
            aim=1000.0,
            reference=percentile([call[own] for call in beside_c], 0.99),
            reference_source="the same call, p99, while two other processes run the C loop, in "
            "turns; `best` of that row is the median beside the engine",
        )


def _beside_engine(two: _Two, data: bytes) -> list[tuple[float, float]]:
    going = [True]

    def again(_: object) -> None:
        if going:
            two.submit(7, again)

    sent = two.submit(7, again)
    found = [_timed_us(data) for _ in range(_CALLS)]
    going.clear()
    sent.wait(_WAIT_S)
    two.run()  # after the rows still in flight
    return found


def _beside_c(c: _C, data: bytes) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    while len(found) < _CALLS:
        c.start()
        while not c.ended() and len(found) < _CALLS:
            found.append(_timed_us(data))
        c.finish()
    return found


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


def _timed_us(data: bytes) -> tuple[float, float]:
    """Measure microseconds of one call: in all, and without those in which it was ready to run."""
    waited = _run_delay_ns()
    start = time.perf_counter_ns()
    hashlib.sha256(data)
    took = time.perf_counter_ns() - start
    return took / 1000, (took - (_run_delay_ns() - waited)) / 1000


def _run_delay_ns() -> int:
    """Read the time this thread has waited for a CPU; proc(5), schedstat, its second number."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="of each figure, 3 or more")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        figures = libfabric_figures(args.rounds)
        show_figures("tests.bench.bench_libfabric", figures, json=args.json, decimals=2)
    except LookupError as error:
        sys.stderr.write(f"the C yardstick cannot be built: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
