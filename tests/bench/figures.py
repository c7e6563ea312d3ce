"""Figures: how the benchmarks of this folder measure, and how they print. No pass or fail here.

CPU time of the calling thread, medians over rounds: on a shared machine it is steadier than wall
time. The cost of reading the clock is measured in the same process and taken out.

Two machines differ by a factor of two in what the same Python costs. `call_ns` measures that factor
beside each figure, so a figure can be read as a number of method calls.
"""

from __future__ import annotations

import functools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from tep.cli.show import emit_json, print_table

__all__ = [
    "Figure", "call_ns", "clock_ns", "cpu_ns", "machine_of_figures", "median_ns", "show_figures",
    "summary",
]  # fmt: skip


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


def show_figures(title: str, figures: Iterable[Figure], *, json: bool, decimals: int = 1) -> None:
    """Measure figures, and print them as a table or as JSON."""
    found, machine = list(figures), machine_of_figures()
    if json:
        rows = [asdict(one) | {"ratio": one.ratio, "reached": one.reached} for one in found]
        emit_json({"command": title, "machine": machine, "figures": rows})
        return
    table = (
        {
            "what": figure.what,
            "median": f"{figure.value:,.{decimals}f} {figure.unit}",
            "best": f"{figure.best:,.{decimals}f}",
            "worst": None if figure.worst is None else f"{figure.worst:,.{decimals}f}",
            "calls": None if figure.calls is None else f"{figure.calls:,.2f}",
            "aim": _aim(figure),
            "ratio": None if figure.ratio is None else f"{figure.ratio:.2f} x {figure.reference:g}",
        }
        for figure in found
    )
    columns = ("what", "median", "best", "worst", "calls", "aim", "ratio")
    print_table(f"{title} ({machine}; CPU time)", columns, table)
    for source in dict.fromkeys(one.reference_source for one in found if one.reference_source):
        sys.stdout.write(f"compared to: {source}\n")


def machine_of_figures() -> str:
    """Describe the machine on which figures were measured."""
    return f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"


def _aim(figure: Figure) -> str | None:
    if figure.aim is None:
        return None
    sign = ">=" if figure.more_is_better else "<="
    return f"{sign} {figure.aim:g} {'reached' if figure.reached else 'MISSED'}"
