"""Benchmarks: functions that measure and return figures; `tep bench` prints them. No pass or fail
here.

CPU time of the calling thread, medians over rounds: on a shared machine it is steadier than wall
time. What reading the clock costs is measured in the same process and taken out.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Figure", "clock_ns", "cpu_ns", "median_ns", "summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number beside what it is compared to.

    Attributes:
        what: what was measured.
        value: the median.
        best: the best round.
        worst: the worst round, where that is kept.
        unit: of value, best, aim and reference.
        aim: what this project wants to reach; more is worse, unless `more_is_better`.
        reference: somebody else's number for the same thing, or None.
        reference_source: where that is from.
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

    @property
    def ratio(self) -> float | None:
        """value / reference."""
        return None if self.reference is None else self.value / self.reference

    @property
    def reached(self) -> bool | None:
        """Whether the aim is reached, if there is one."""
        if self.aim is None:
            return None
        return self.value >= self.aim if self.more_is_better else self.value <= self.aim


@functools.cache
def clock_ns() -> int:
    """What two readings of the CPU clock differ by with nothing between them: a median."""
    found = []
    for _ in range(2001):
        start = time.thread_time_ns()
        found.append(time.thread_time_ns() - start)
    return int(statistics.median(found))


def median_ns(round_ns: Callable[[], int], rounds: int) -> tuple[float, float]:
    """Run a round `rounds` times; return the median and the best of what its work took.

    Args:
        round_ns: does the work, and returns the difference of two readings of the CPU clock.
        rounds: how often.
    """
    return summary([round_ns() for _ in range(rounds)])


def cpu_ns(function: Callable[[], object], rounds: int) -> tuple[float, float]:
    """CPU nanoseconds of this thread for one call: median and best over `rounds` calls."""

    def one() -> int:
        start = time.thread_time_ns()
        function()
        return time.thread_time_ns() - start

    return median_ns(one, rounds)


def summary(differences: Sequence[int]) -> tuple[float, float]:
    """Median and best of differences of the CPU clock, without what reading it costs."""
    own = clock_ns()
    return statistics.median(differences) - own, min(differences) - own
