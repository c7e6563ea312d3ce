"""Benchmarks: functions that measure and return figures; `tep bench` prints them. No pass or fail
here.

CPU time of the calling thread, medians over rounds: on a shared machine it is steadier than wall
time. The cost of reading the clock is measured in the same process and taken out.

Two machines differ by a factor of two in what the same Python costs. `call_ns` measures that factor
beside each figure, so a figure can be read as a number of method calls.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["Figure", "call_ns", "clock_ns", "cpu_ns", "median_ns", "summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number beside the numbers it is compared to.

    Attributes:
        what: name of the measurement.
        value: the median.
        best: the best round.
        worst: the worst round, if that is kept.
        calls: the median as a number of method calls in Python, timed beside it, or None.
        unit: unit of value, best, aim and reference.
        aim: this project's goal; more is worse, unless `more_is_better`.
        reference: somebody else's number for the same thing, or None.
        reference_source: the source of `reference`.
    """

    what: str
    value: float
    best: float
    unit: str
    aim: float | None = None
    reference: float | None = None
    reference_source: str = ""
    more_is_better: bool = False
    worst: float | None = None
    calls: float | None = None

    @classmethod
    def of(
        cls, what: str, found: Sequence[float], unit: str, *, more_is_better: bool, **others: Any
    ) -> Self:
        """Summarise one value a round: the median, the best and the worst."""
        ends = sorted(found, reverse=more_is_better)
        return cls(
            what=what,
            value=statistics.median(found),
            best=ends[0],
            worst=ends[-1],
            unit=unit,
            more_is_better=more_is_better,
            **others,
        )

    @property
    def ratio(self) -> float | None:
        """The ratio value / reference."""
        return None if self.reference is None else self.value / self.reference

    @property
    def reached(self) -> bool | None:
        """True if the aim is reached, or there is none."""
        if self.aim is None:
            return None
        return self.value >= self.aim if self.more_is_better else self.value <= self.aim


@functools.cache
def clock_ns() -> int:
    """Return the median difference of two successive readings of the CPU clock."""
    found = []
    for _ in range(2001):
        start = time.thread_time_ns()
        found.append(time.thread_time_ns() - start)
    return int(statistics.median(found))


class _Counter:
    """An object with a method as small as those that the engine is made of."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0

    def add(self, by: int) -> None:
        self.total += by


def call_ns() -> float:
    """Return what one method call in a loop of Python costs now, ns: the median of 15 loops."""
    counter, ncalls = _Counter(), 1000

    def loop() -> None:
        for k in range(ncalls):
            counter.add(k)

    return cpu_ns(loop, 15)[0] / ncalls


def median_ns(round_ns: Callable[[], int], rounds: int) -> tuple[float, float]:
    """Run a round `rounds` times; return the median and the best of its times.

    Args:
        round_ns: does the work, and returns the difference of two readings of the CPU clock.
        rounds: number of rounds.
    """
    return summary([round_ns() for _ in range(rounds)])


def cpu_ns(function: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Measure CPU nanoseconds of this thread for one call: median and best over `rounds` calls."""

    def one() -> int:
        start = time.thread_time_ns()
        function()
        return time.thread_time_ns() - start

    return median_ns(one, rounds)


def summary(differences: Sequence[int]) -> tuple[float, float]:
    """Return median and best of differences of the CPU clock, without the cost of reading it."""
    own = clock_ns()
    return statistics.median(differences) - own, min(differences) - own
