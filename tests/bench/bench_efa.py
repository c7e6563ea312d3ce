"""The backend `efa` beside libfabric's EFA provider: CPU of the engine's thread, device taken out.

Every figure of a round is taken before the next round begins, so that all ways meet the same
machine. Both ends of a pair are engines of this process, stepped in this thread.

The fake device's own time is taken out as follows. Before a timed part the device is paused
(tests/efa_fake, fake_efa_hold): no call moves it, and its thread stands still. Between two timed
parts it moves by fake_efa_run(), which is not timed. Posting and polling by columns then calls
nothing of the device. Libfabric's provider still pays for the calls of the fake library, which copy
requests and completions. Their cost a row is measured in the same run by a C loop that
makes nothing but these calls (`cost` of tests/efa_fake/driver.c), and is subtracted from the
figures of such ways; that includes the work of a real library there, so that a ratio to them comes
out too small rather than too large.

The fake device's work also empties the caches of the core, which a real one leaves alone. So each
way has two pairs of engines. The first pair does every timed part just before the second, untimed,
to warm the code. The second pair's own queues, tables and buffers are still cold, as they are after
the work of a real device. A real device is never paused and costs no CPU; there, the CPU time a row
includes polls that find nothing.

The cost of reading the clock is taken out as well, as in the other benchmarks.

Needs an EFA device, or a fake one: `scripts/fake_efa python -m tests.bench.bench_efa`. The fake
device takes batches of 64 entries; `--set max_batch=0` lets it take any.

Submit to doorbell: from the call of submit_paged_writes() or submit_single_write() to the return of
the post that rang the last doorbell, plan and columns of the engine included.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

import tep
from tep.backends.base import WriteBatch
from tep.base.errors import BackendUnavailable
from tep.core.handles import Handle
from tep.drivers.threads import Machine
from tests.bench.bench_libfabric import efa_figures
from tests.bench.figures import Figure, show_figures
from tests.support.inside import machine_of, nics_of, worker_of

__all__ = ["column_figures"]

_ROW_BYTES: Final = 64
_ROWS: Final = 4000  # fit into the queue with the messages
_BURST: Final = 256
_BURST_LONG: Final = 1500  # at most the number of receives
_AIMS: Final = {1024: 25.0, 64: 45.0, 16: 110.0}  # ns a page, by the largest batch of a doorbell
_WARM, _REPEATS = 2, 8  # runs of each figure in a round, one after the other; the first are untimed
_TIMES_LESS: Final = 20.0
_TURNS: Final = 200
_TURNS_MAX: Final = 100_000
_SINGLES: Final = 64
_BURSTS: Final = 8


class _Device:
    """The fake device, paused or moving; a real one is not affected."""

    def __init__(self) -> None:
        self._hold = self._run = None
        if "TEP_FAKE_EFA" in os.environ:
            library = ctypes.CDLL("libibverbs.so.1")
            self._hold, self._run = library.fake_efa_hold, library.fake_efa_run

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Pause the device meanwhile: no call moves it."""
        if self._hold is None:
            yield
            return
        self._hold(1)
        try:
            yield
        finally:
            self._hold(0)

    def move(self) -> None:
        """Let the device do its pending work."""
        if self._run is not None:
            self._run(_TURNS)


class _Clock:
    """The CPU clock of this thread, nanoseconds, without what its own readings cost."""

    def __init__(self) -> None:
        self._readings = self._own_ns = 0
        times = [self() for _ in range(1001)]
        self._own_ns = int(statistics.median(b - a for a, b in itertools.pairwise(times)))

    def __call__(self) -> int:
        self._readings += 1
        return time.thread_time_ns() - self._readings * self._own_ns


Steps = Generator[tuple[tuple[Handle, ...], tuple[Machine, ...]], None, list[float]]
"""A measurement. It yields each time the device may move, with the handles that must end meanwhile
and the machines that may be stepped for that, and returns its results."""


class _Pair:
    """Two engines of one backend on one NIC, with the regions for transfers between them."""

    def __init__(self, now_ns: Callable[[], int], backend: str, **options: Any) -> None:
        self._now_ns = now_ns
        ring: list[Machine] = []
        driver = tep.InlineDriver(ring)
        self.a, self.b = (
            tep.TransferEngine.open(backend, driver=driver, nics=1, **options) for _ in "ab"
        )
        self.machines = machine_of(self.a), machine_of(self.b)
        self._nic: Any = nics_of(self.a)[0]
        self._memory = [np.ones(_ROWS * _ROW_BYTES, np.uint8) for _ in "ab"]
        self.mr, _ = self.a.reg_mr(self._memory[0])
        _, self.desc = self.b.reg_mr(self._memory[1])
        self._pages: dict[int, tuple[tep.Pages, tep.Pages]] = {}
        self.posted = self.rung_ns = 0
        post = self._nic.post

        def stamped(batch: WriteBatch, start: int, stop: int) -> int:
            taken = int(post(batch, start, stop))
            self.posted += taken
            self.rung_ns = now_ns()
            return taken

        setattr(self._nic, "post", stamped)  # noqa: B010  # mypy guards methods, not benchmarks

    def limit_batch(self, most: int) -> int:
        """Ring a doorbell after so many entries, or after as many as the device takes if these
        are fewer; return which.
        """
        way = self._nic._way
        way.batch_max = min(most, way.device_batch_max)
        return int(way.batch_max)

    def _ends(self, npages: int) -> tuple[Any, Any]:
        if npages not in self._pages:
            rng = np.random.default_rng(npages)
            source, target = (tep.Pages(rng.permutation(npages)) for _ in "ab")
            self._pages[npages] = source, target
        source, target = self._pages[npages]
        return (self.mr, source), (self.desc, target)

    def submit_ns(self, npages: int) -> Steps:
        """Measure submit to the last doorbell, a page, for as many transfers as the queue holds."""
        ends, times = self._ends(npages), _ROWS // npages
        found: list[float] = []
        open_: list[Handle] = [self.b.expect_imm_count(1, npages * times)]
        for _ in range(times):
            goal = self.posted + npages
            start = self._now_ns()
            open_.append(self.a.submit_paged_writes(_ROW_BYTES, *ends, imm=1))
            while self.posted < goal:
                self.machines[0].step()
            found.append((self.rung_ns - start) / npages)
        yield tuple(open_), self.machines
        return found

    def single_us(self) -> Steps:
        """Measure submit to doorbell of one write, for some writes one after the other."""
        found: list[float] = []
        open_: list[Handle] = [self.b.expect_imm_count(1, _SINGLES)]
        for _ in range(_SINGLES):
            start = self._now_ns()
            ends = (self.mr, 0), (self.desc, 0)
            open_.append(self.a.submit_single_write(_ROW_BYTES, *ends, imm=1))
            self.machines[0].step()
            found.append((self.rung_ns - start) / 1000)
        yield tuple(open_), self.machines
        return found

    def counted_ns(self, burst: int) -> Steps:
        """Measure an immediate's cost at its reader, from the completion queue to the count."""
        found = []
        for _ in range(_BURSTS):
            got = self.b.expect_imm_count(1, burst + 1)
            counted = worker_of(self.b).imms.total + burst
            sent = self.a.submit_paged_writes(_ROW_BYTES, *self._ends(burst), imm=1)
            yield (sent,), self.machines[:1]
            start = self._now_ns()
            self.machines[1].step()
            found.append((self._now_ns() - start) / burst)
            assert counted == worker_of(self.b).imms.total, "a burst was not counted in one step"
            last = self.a.submit_single_write(_ROW_BYTES, (self.mr, 0), (self.desc, 0), imm=1)
            yield (last, got), self.machines
        return found

    def row_ns(self, rows: int = _ROWS) -> Steps:
        """Measure CPU of both ends a row: submit, post, complete, count."""
        ends = self._ends(rows)
        start = self._now_ns()
        got = self.b.expect_imm_count(1, rows)
        sent = self.a.submit_paged_writes(_ROW_BYTES, *ends, imm=1)
        spent = self._now_ns() - start
        while not (sent.finished and got.finished):
            yield (), ()
            start = self._now_ns()
            for machine in self.machines:
                machine.step()
                machine.deliver()
            spent += self._now_ns() - start
        return [spent / rows]

    def close(self) -> None:
        self.a.close()
        self.b.close()


class _Way:
    """One way to post and poll, with its two pairs: only the second is timed."""

    def __init__(self, device: _Device, backend: str, **options: Any) -> None:
        self._device, self._pairs = device, list[_Pair]()
        now_ns = _Clock()
        try:
            for _ in range(2):
                self._pairs.append(_Pair(now_ns, backend, **options))
            self.measure(partial(_Pair.row_ns, rows=16))
        except BaseException:
            self.close()
            raise

    def limit_batch(self, most: int) -> int:
        """Call _Pair.limit_batch() of both pairs."""
        return [pair.limit_batch(most) for pair in self._pairs][-1]

    def measure(self, steps: Callable[[_Pair], Steps]) -> list[float]:
        """Run a measurement on both pairs; return the results of the second."""
        runs = [steps(pair) for pair in self._pairs]
        found: list[float] = []
        with self._device.held():
            while runs:
                handles, machines = list[Handle](), list[Machine]()
                for run in tuple(runs):
                    try:
                        wanted, turned = next(run)
                    except StopIteration as end:
                        found = end.value
                        runs.remove(run)
                    else:
                        handles += wanted
                        machines += turned
                self._settle(handles, machines)
        return found

    def _settle(self, handles: list[Handle], machines: list[Machine]) -> None:
        """Move the device until all handles have ended."""
        for _ in range(_TURNS_MAX):
            self._device.move()
            if all(handle.finished for handle in handles):
                return
            for machine in machines:
                machine.step()
                machine.deliver()
        raise AssertionError("a transfer does not end")

    def close(self) -> None:
        """Close all engines."""
        for pair in self._pairs:
            pair.close()


class _Taken:
    """One figure, with its values so far."""

    def __init__(
        self, measure: Callable[[], list[float]], what: str, unit: str, aim: float | None
    ) -> None:
        self.measure, self.what, self.unit, self.aim = measure, what, unit, aim
        self.values: list[float] = []

    def figure(self, less: float = 0.0, reference: float | None = None) -> Figure:
        """Return its median, least and most; `less` is the library's own time."""
        values = [value - less for value in self.values]
        return Figure(
            what=self.what,
            value=statistics.median(values),
            best=min(values),
            worst=max(values),
            unit=self.unit,
            aim=self.aim,
            reference=reference,
            reference_source="libfabric's provider `efa`, the same pages in the same run"
            if reference is not None
            else "",
        )


def column_figures(rounds: int = 15) -> Iterator[Figure]:
    """Measure all, round by round; see the module's docstring for how.

    Raises:
        BackendUnavailable: no EFA device, or no libefa.
    """
    device = _Device()
    ways: list[_Way] = []

    def way(backend: str, **options: Any) -> _Way:
        ways.append(_Way(device, backend, **options))
        return ways[-1]

    try:
        columns = way("efa")
        libfabrics = way("libfabric", provider="efa")
        taken = list(_of_columns(columns))
        most = columns.limit_batch(max(_AIMS))
        measures = {
            f"by columns, batches of {most:,}": _limited(columns, most, _Pair.row_ns),
            "libfabric's efa": partial(libfabrics.measure, _Pair.row_ns),
        }
        each = [
            _Taken(measure, f"{name}: CPU a row of {_ROW_BYTES} B, both ends", "ns", None)
            for name, measure in measures.items()
        ]
        for _ in range(rounds):
            for figure in (*taken, *each):
                for _ in range(_WARM):
                    figure.measure()
                for _ in range(_REPEATS):
                    figure.values += figure.measure()
        calls_ns = _calls_ns(rounds)
    finally:
        for one in ways:
            one.close()
    yield from (figure.figure() for figure in taken)
    referred = [figure.figure(calls_ns) for figure in each[1:]]
    each[0].aim = referred[0].value / _TIMES_LESS
    yield each[0].figure(reference=referred[0].value)
    yield from referred


def _of_columns(way: _Way) -> Iterator[_Taken]:
    most = way.limit_batch(max(_AIMS))
    batches = sorted({min(batch, most) for batch in _AIMS}, reverse=True)

    for npages in (1024, _ROWS):
        for batch in batches:
            yield _Taken(
                _limited(way, batch, partial(_Pair.submit_ns, npages=npages)),
                f"{npages:,} pages, submit to doorbell, batches of {batch:,}, a page",
                "ns",
                _AIMS.get(batch),
            )
    middle = batches[-2] if len(batches) > 1 else batches[0]
    yield _Taken(
        _limited(way, middle, partial(_Pair.submit_ns, npages=_BURST)),
        f"{_BURST} pages, submit to doorbell, batches of {middle}, a page",
        "ns",
        80.0,
    )
    for burst in (_BURST, _BURST_LONG):
        what = f"counted immediates in bursts of {burst:,}, each"
        yield _Taken(partial(way.measure, partial(_Pair.counted_ns, burst=burst)), what, "ns", 40.0)
    yield _Taken(
        partial(way.measure, _Pair.single_us), "single write, submit to doorbell", "us", 10.0
    )


def _limited(way: _Way, batch: int, steps: Callable[[_Pair], Steps]) -> Callable[[], list[float]]:
    """Measure with at most so many entries between two doorbells."""

    def one() -> list[float]:
        way.limit_batch(batch)
        return way.measure(steps)

    return one


def _calls_ns(rounds: int) -> float:
    """Measure the fake library's calls for a row and its receive; 0 on a real device."""
    driver = os.environ.get("TEP_FAKE_EFA_DRIVER")
    if driver is None:
        return 0.0
    with subprocess.Popen(  # the program that came with the fake device, no shell
        [driver], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(*words: object) -> list[int]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(" ".join(map(str, words)) + "\n")
            process.stdin.flush()
            said = process.stdout.readline().split()
            if said[:1] != ["ok"]:
                raise BackendUnavailable(
                    "the fake device's driver refuses", ((str(words[0]), " ".join(said)),)
                )
            return [int(word) for word in said[1:]]

        qkey, every = 7, 7  # every access
        end, qpn, host, nic = ask("open", 0, 4 * _BURST, _BURST, _BURST, 7, qkey, 0)
        _, lkey, rkey, at = ask("reg", end, 1 << 16, every, 0)
        (ah,) = ask("ah", end, host, nic)
        where = (ah, qpn, qkey, rkey, at, lkey, at, _ROW_BYTES)
        found = ask("cost", end, *where, _BURST, _BURST, min(256, _REPEATS * rounds))
    return sum(found) / 1000


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="of each figure, 3 or more")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        figures = itertools.chain(column_figures(args.rounds), efa_figures(args.rounds))
        show_figures("tests.bench.bench_efa", figures, json=args.json, decimals=2)
    except LookupError as error:
        sys.stderr.write(f"the C yardstick cannot be built: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
