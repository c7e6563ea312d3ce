"""The backend `efa` beside libfabric's EFA provider: CPU of the engine's thread, device taken out.

Every figure of a round is taken before the next round begins, so that all ways meet the same
machine. Both ends of a pair are engines of this process, turned by hand in this thread.

How a fake device's own time is taken out. Before what is timed the device is held
(tests/efa_fake, fake_efa_hold): no call moves it, and its thread stands still. Between two timed
parts it moves by fake_efa_run(), which is not timed. What is posted and polled by columns then
calls nothing of the device. Who posts and polls row by row still pays for the calls of the fake
library, which copy requests and completions. What these cost a row is measured in the same run by a
C loop that makes nothing but these calls (`cost` of tests/efa_fake/driver.c), and is subtracted
from the figures of such ways; that includes what a real library would do there, so that a ratio
to them comes out too small rather than too large. What cannot be taken out: the fake device's work
empties the caches of the core, for which each timed part behind it pays; so the figures scatter. A
real device is never held and costs no CPU; there, a CPU time a row has in it what was spent on
polling in vain.

Of several transfers that are posted one behind the other while the device is held, the first is not
counted, for the same reason; a transfer of 4,000 pages fills the queue alone, and is always the
first.

What reading the clock costs is taken out as well, as in the other benchmarks.

Submit to doorbell: from the call of submit_paged_writes() or submit_single_write() to the return of
the post that rang the last doorbell, plan and columns of the engine included.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

import tep
from tep.backends.base import WriteBatch
from tep.bench import Figure
from tep.core.handle import Handle
from tep.drivers import Machine
from tep.errors import BackendUnavailable

__all__ = ["COLUMN_FIGURES", "column_figures"]

COLUMN_FIGURES: Final = 14
"""How many figures column_figures() yields, at most."""

_ROW_BYTES: Final = 64
_ROWS: Final = 4000  # fit into the queue with the messages
_BURST: Final = 256
_BURST_LONG: Final = 1500  # there are receives for so many
_AIMS: Final = {1024: 25.0, 64: 45.0, 16: 110.0}  # ns a page, by the largest batch of a doorbell
_WARM, _REPEATS = 2, 8  # runs of each figure in a round, one after the other; the first are untimed
_TIMES_LESS: Final = 20.0
_TURNS: Final = 200
_TURNS_MAX: Final = 100_000
_SINGLES: Final = 64
_BURSTS: Final = 8


class _Device:
    """The fake device, held or moving; a real one takes no notice."""

    def __init__(self) -> None:
        self._hold = self._run = None
        if "TEP_FAKE_EFA" in os.environ:
            library = ctypes.CDLL("libibverbs.so.1")
            self._hold, self._run = library.fake_efa_hold, library.fake_efa_run

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No call moves it meanwhile."""
        if self._hold is None:
            yield
            return
        self._hold(1)
        try:
            yield
        finally:
            self._hold(0)

    def move(self) -> None:
        """Let it do what it has to do."""
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


class _Pair:
    """Two engines of one backend on one NIC, and what a transfer between them needs."""

    def __init__(self, device: _Device, backend: str, **options: Any) -> None:
        self.device = device
        self._now_ns = now_ns = _Clock()
        ring: list[Machine] = []
        driver = tep.InlineDriver(ring)
        self.a, self.b = (
            tep.TransferEngine.open(backend, driver=driver, nics=1, **options) for _ in "ab"
        )
        self._machines = self.a._machine, self.b._machine
        self._nic: Any = self.a._domains[0]
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
        self.transfer(16)

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

    def transfer(self, npages: int) -> None:
        """Write so many pages, and wait until they are counted."""
        got = self.b.expect_imm_count(1, npages)
        sent = self.a.submit_paged_writes(_ROW_BYTES, *self._ends(npages), imm=1)
        self._settle(sent, got)

    def submit_ns(self, npages: int) -> list[float]:
        """Submit to the last doorbell, a page; of as many transfers as the queue holds."""
        ends, times = self._ends(npages), _ROWS // npages
        got = self.b.expect_imm_count(1, npages * times)
        found, sent = [], []
        with self.device.held():
            for _ in range(times):
                goal = self.posted + npages
                start = self._now_ns()
                sent.append(self.a.submit_paged_writes(_ROW_BYTES, *ends, imm=1))
                while self.posted < goal:
                    self.a._machine.step()
                found.append((self.rung_ns - start) / npages)
        self._settle(*sent, got)
        return found[1:] or found

    def single_us(self) -> list[float]:
        """Submit to doorbell of one write; of some, one after the other."""
        found, sent = [], []
        got = self.b.expect_imm_count(1, _SINGLES)
        with self.device.held():
            for _ in range(_SINGLES):
                start = self._now_ns()
                ends = (self.mr, 0), (self.desc, 0)
                sent.append(self.a.submit_single_write(_ROW_BYTES, *ends, imm=1))
                self.a._machine.step()
                found.append((self.rung_ns - start) / 1000)
        self._settle(*sent, got)
        return found[1:]

    def counted_ns(self, burst: int) -> list[float]:
        """What an immediate costs its reader, from the completion queue to the count."""
        found = []
        for _ in range(_BURSTS):
            got = self.b.expect_imm_count(1, burst + 1)
            counted = self.b._worker.imms.total + burst
            with self.device.held():
                sent = self.a.submit_paged_writes(_ROW_BYTES, *self._ends(burst), imm=1)
                self._settle(sent, machines=(self.a._machine,))
                start = self._now_ns()
                self.b._machine.step()
                found.append((self._now_ns() - start) / burst)
                assert counted == self.b._worker.imms.total, "a burst was not counted in one step"
            last = self.a.submit_single_write(_ROW_BYTES, (self.mr, 0), (self.desc, 0), imm=1)
            self._settle(last, got)
        return found

    def _settle(self, *handles: Handle, machines: tuple[Any, ...] = ()) -> None:
        """Turn engines and device until all of it has ended."""
        for _ in range(_TURNS_MAX):
            if all(handle.finished for handle in handles):
                return
            for machine in machines or self._machines:
                machine.step()
                machine.deliver()
            self.device.move()
        raise AssertionError("a transfer does not end")

    def row_ns(self, rows: int = _ROWS) -> list[float]:
        """CPU of both ends a row: submit, post, complete, count."""
        ends = self._ends(rows)
        with self.device.held():
            start = self._now_ns()
            got = self.b.expect_imm_count(1, rows)
            sent = self.a.submit_paged_writes(_ROW_BYTES, *ends, imm=1)
            spent = self._now_ns() - start
            for _ in range(_TURNS_MAX):
                start = self._now_ns()
                for machine in self._machines:
                    machine.step()
                    machine.deliver()
                spent += self._now_ns() - start
                if sent.finished and got.finished:
                    return [spent / rows]
                self.device.move()
        raise AssertionError("rows do not come back")

    def close(self) -> None:
        self.a.close()
        self.b.close()


class _Taken:
    """One figure to be, and what was measured for it so far."""

    def __init__(
        self, measure: Callable[[], list[float]], what: str, unit: str, aim: float | None
    ) -> None:
        self.measure, self.what, self.unit, self.aim = measure, what, unit, aim
        self.values: list[float] = []

    def figure(self, less: float = 0.0, reference: float | None = None) -> Figure:
        """Its median, least and most; `less` is the library's own time."""
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
        BackendUnavailable: no EFA device, or libefa does not say where queues are mapped.
    """
    device = _Device()
    pairs: list[_Pair] = []

    def pair(backend: str, **options: Any) -> _Pair:
        pairs.append(_Pair(device, backend, **options))
        return pairs[-1]

    try:
        columns, rows = pair("efa", post="columns"), pair("efa", post="rows")
        fabrics = {name: pair("libfabric", provider=name) for name in ("efa", "efa-direct")}
        taken = list(_of_columns(columns))
        most = columns.limit_batch(max(_AIMS))
        each = [
            _Taken(measure, f"{name}: CPU a row of {_ROW_BYTES} B, both ends", "ns", None)
            for name, measure in (
                (f"by columns, batches of {most:,}", _limited(columns, most, columns.row_ns)),
                ("row by row", rows.row_ns),
                *((f"libfabric's {name}", one.row_ns) for name, one in fabrics.items()),
            )
        ]
        for _ in range(rounds):
            for figure in (*taken, *each):
                for _ in range(_WARM):
                    figure.measure()
                for _ in range(_REPEATS):
                    figure.values += figure.measure()
        calls_ns = _calls_ns(rounds)
    finally:
        for one in pairs:
            one.close()
    yield from (figure.figure() for figure in taken)
    others = [figure.figure(calls_ns) for figure in each[1:]]
    each[0].aim = others[1].value / _TIMES_LESS
    yield each[0].figure(reference=others[1].value)
    yield from others


def _of_columns(pair: _Pair) -> Iterator[_Taken]:
    most = pair.limit_batch(max(_AIMS))
    batches = sorted({min(batch, most) for batch in _AIMS}, reverse=True)

    for npages in (1024, _ROWS):
        for batch in batches:
            yield _Taken(
                _limited(pair, batch, partial(pair.submit_ns, npages)),
                f"{npages:,} pages, submit to doorbell, batches of {batch:,}, a page",
                "ns",
                _AIMS.get(batch),
            )
    middle = batches[-2] if len(batches) > 1 else batches[0]
    yield _Taken(
        _limited(pair, middle, partial(pair.submit_ns, _BURST)),
        f"{_BURST} pages, submit to doorbell, batches of {middle}, a page",
        "ns",
        80.0,
    )
    for burst in (_BURST, _BURST_LONG):
        what = f"counted immediates in bursts of {burst:,}, each"
        yield _Taken(partial(pair.counted_ns, burst), what, "ns", 40.0)
    yield _Taken(pair.single_us, "single write, submit to doorbell", "us", 10.0)


def _limited(
    pair: _Pair, batch: int, measure: Callable[[], list[float]]
) -> Callable[[], list[float]]:
    """Measure with at most so many entries between two doorbells."""

    def one() -> list[float]:
        pair.limit_batch(batch)
        return measure()

    return one


def _calls_ns(rounds: int) -> float:
    """What the fake library's calls take for a row and its receive; 0 on a real device."""
    driver = os.environ.get("TEP_FAKE_EFA_DRIVER")
    if driver is None:
        return 0.0
    with subprocess.Popen(  # noqa: S603  # the program that came with the fake device, no shell
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
