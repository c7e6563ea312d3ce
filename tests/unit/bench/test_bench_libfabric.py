"""The comparison of the libfabric bench, without libfabric; and its errors for missing tools."""

from __future__ import annotations

import operator
import signal
from functools import partial
from typing import ClassVar

import pytest

from tests.bench import bench_libfabric as bench


class Runs:
    """Gives the same times again and again; notes who was going then, and who was closed."""

    open = 0
    going: ClassVar[set[Runs]] = set()
    together: ClassVar[list[int]] = []  # how many were going, for each run

    def __init__(self, times):
        self.times = list(times)
        Runs.open += 1
        Runs.going.add(self)

    def run(self):
        Runs.together.append(len(Runs.going) if self in Runs.going else 0)
        self.times.append(self.times.pop(0))
        return self.times[-1]

    def signal(self, number):
        (Runs.going.add if number == signal.SIGCONT else Runs.going.discard)(self)

    def close(self):
        Runs.open -= 1
        Runs.going.discard(self)


def compare(ours, theirs, **options):
    return bench.compare_runs(
        "x", partial(Runs, ours), partial(Runs, theirs), pairs=2, source="C", **options
    )


def test_a_figure_is_the_median_beside_the_others_median():
    """One slow run, by other work on the machine, must not be the figure."""
    figure = compare([8.0, 100.0, 9.0], [4.0, 5.0, 300.0], aim=partial(operator.mul, 2.5))

    assert (9.0, 8.0, "us") == (figure.value, figure.best, figure.unit)
    assert 5.0 == figure.reference
    assert 12.5 == figure.aim
    assert figure.reached
    assert 0 == Runs.open, "processes left running disturb every later figure"


def test_who_has_no_turn_is_stopped():
    """A target that polls beside the run of another would take one of two cores from it."""
    Runs.together.clear()
    compare([1.0], [1.0], aim=None)

    assert {1} == set(Runs.together)


def test_of_a_rate_more_is_better():
    """A rate held against its aim the wrong way round would call a regression reached."""
    figure = compare([1e6] * 3, [0.5e6] * 3, gbytes=2.0, aim=partial(operator.mul, 0.95))

    assert (2.0, 4.0, "GB/s") == (figure.value, figure.reference, figure.unit)
    assert pytest.approx(3.8) == figure.aim
    assert not figure.reached


def test_a_run_that_fails_leaves_no_process_behind():
    """The other one of a pair spins on a core for as long as it lives."""

    def broken():
        raise OSError("no such thing")

    with pytest.raises(OSError, match="no such thing"):
        bench.compare_runs("x", broken, partial(Runs, [1.0]), pairs=1, source="", aim=None)
    assert 0 == Runs.open


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    """Without a compiler, or out of a checkout, there is nothing to compare to: say which."""
    monkeypatch.setattr(bench.shutil, "which", lambda _: None)
    with pytest.raises(LookupError, match="no C compiler"):
        bench.build(tmp_path / "yardstick")
    monkeypatch.setattr(bench.shutil, "which", lambda name: name)
    monkeypatch.setattr(bench, "SOURCE", tmp_path / "absent.c")
    with pytest.raises(LookupError, match=r"absent\.c: the yardstick is in a checkout only"):
        bench.build(tmp_path / "yardstick")


def test_a_percentile_is_one_of_the_values():
    """The 99th of two hundred is the second largest, not a guess between."""
    assert 198.0 == bench.percentile([float(k) for k in range(200)], 0.99)
    assert 100.0 == bench.percentile([float(k) for k in range(200)], 0.5)
