"""Benchmarks: functions that measure and return figures; `tep bench` prints them. No pass or fail
here.

CPU time of the calling thread, medians over rounds: on a shared machine it is steadier than wall
time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["Figure", "median_ns"]


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


def median_ns(round_ns: Callable[[], int], rounds: int) -> tuple[float, float]:
    """Run a round that returns its own nanoseconds `rounds` times; return median and best."""
    return _summary(round_ns() for _ in range(rounds))


def cpu_ns(function: Callable[[], object], rounds: int) -> tuple[float, float]:
    """CPU nanoseconds of this thread for one call: median and best over `rounds` calls."""

    def one() -> int:
        start = time.thread_time_ns()
        function()
        return time.thread_time_ns() - start

    return median_ns(one, rounds)


def _summary(values: Iterable[int]) -> tuple[float, float]:
    found = list(values)
    return statistics.median(found), min(found)
