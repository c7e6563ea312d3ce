"""Bounded exhaustive mode: a tiny scenario in every order that its events can come in.

Seeds draw orders; here all of them are gone through, one after another, for scenarios of a few
rows: what can happen within a window of time may happen in any order, a NIC's death included.
Rule: nothing is drawn; the path of choices names a run, and plays it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify
from typing import Any, Final

from tep.base.units import PS_PER_US
from tep.engine import TransferEngine
from tep.sim.clock import Call, FabricEnv, Turned
from tep.sim.driver import SimDriver
from tep.testing.case import Violation
from tests.world.oracle import Outcome, run_scenario
from tests.world.scenario import Scenario

WINDOW_PS: Final = PS_PER_US
"""Wide enough for a row to overtake a whole transfer, and narrower than any timeout."""


class Choices:
    """One path after another through a tree of choices, whose shape shows on the way.

    Args:
        path: where to begin; the choices behind its end are the first ones.
    """

    __slots__ = ("_at", "_path")

    def __init__(self, path: Sequence[int] = ()) -> None:
        self._path = [(choice, 0) for choice in path]  # of how many is not known yet
        self._at = 0

    @property
    def path(self) -> tuple[int, ...]:
        """The choices of this path."""
        return tuple(choice for choice, _ in self._path)

    def pick(self, n: int) -> int:
        """Choose one of n, 0 to n - 1."""
        if self._at == len(self._path):
            self._path.append((0, n))
        choice, known = self._path[self._at]
        assert choice < n, "the run is not a function of its choices"
        assert known in (0, n), "the run is not a function of its choices"
        self._path[self._at] = choice, n
        self._at += 1
        return choice

    def next(self) -> bool:
        """Go to the next path; False: that was the last."""
        self._at = 0
        while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
            self._path.pop()
        if not self._path:
            return False
        choice, n = self._path.pop()
        self._path.append((choice + 1, n))
        return True


class OrderEnv(FabricEnv):
    """A clock on which near events come in the order that somebody chooses.

    Args:
        choices: who chooses.
        window_ps: an event may come before any other that is due at most so much earlier.
        eager: engines step as soon as they were kicked; False: that is chosen as well.
    """

    def __init__(self, choices: Choices, window_ps: int = WINDOW_PS, *, eager: bool = True) -> None:
        super().__init__()
        self._choices = choices
        self._window_ps = window_ps
        self._eager = eager

    def turn(self, settled: Callable[[], bool], deadline_ps: int) -> Turned:
        queue = self._queue
        while len(queue) > self._daemons:
            if queue[0][0] > deadline_ps:
                self.skip_to(deadline_ps)
                return Turned.DEADLINE
            entry = self._next(sorted(queue, key=lambda entry: entry[:3]))
            queue.remove(entry)
            heapify(queue)
            self.skip_to(entry[0])
            event = entry[3]
            assert type(event) is Call, "only calls can be put in another order"
            event.fn(event.arg)
            if settled():
                return Turned.SETTLED
        return Turned.EMPTY

    def call_at(self, t_ps: int, fn: Callable[[Any], object], arg: object = None) -> None:
        super().call_at(max(t_ps, self.now), fn, arg)

    def _next(self, waiting: list[Any]) -> Any:
        near = [entry for entry in waiting if entry[0] <= waiting[0][0] + self._window_ps]
        if self._eager:
            steps = [entry for entry in near if _is_step(entry[3].fn)]
            if steps:
                return steps[0]
        return near[self._choices.pick(len(near))] if len(near) > 1 else near[0]


def _is_step(fn: object) -> bool:
    return isinstance(getattr(fn, "__self__", None), SimDriver)


@dataclass(frozen=True, slots=True)
class Explored:
    """The result of an exploration.

    Attributes:
        runs: number of orders.
        whole: True if these are all orders.
        ends: number of orders with each combination of final states of all transfers.
    """

    runs: int
    whole: bool
    ends: dict[tuple[tuple[str, ...], ...], int]


def explore(
    scenario: Scenario,
    *,
    engine_class: type[TransferEngine] = TransferEngine,
    eager: bool = True,
    window_ps: int = WINDOW_PS,
    runs_max: int = 100_000,
) -> Explored:
    """Play a scenario in every order, and judge each run as run_scenario() does.

    Args:
        scenario: a few rows; a tame fabric, so that only the order matters.
        engine_class: the engine, or a subclass with something to prove.
        eager: engines step as soon as they were kicked; False: that is chosen as well.
        window_ps: how far events may overtake each other.
        runs_max: give up after so many.

    Raises:
        Violation: a promise was broken; the message ends with the call that plays that order again.
    """
    choices = Choices()
    ends: dict[tuple[tuple[str, ...], ...], int] = {}
    for runs in range(1, runs_max + 1):
        outcome = _play(scenario, choices, engine_class, window_ps, eager=eager)
        ends[outcome.states] = ends.get(outcome.states, 0) + 1
        if not choices.next():
            return Explored(runs, whole=True, ends=ends)
    return Explored(runs_max, whole=False, ends=ends)


def replay_path(
    scenario: Scenario,
    path: Sequence[int],
    *,
    engine_class: type[TransferEngine] = TransferEngine,
    eager: bool = True,
    window_ps: int = WINDOW_PS,
) -> Outcome:
    """Play a scenario in one order, as a finding of explore() names it. Raises Violation."""
    return _play(scenario, Choices(path), engine_class, window_ps, eager=eager)


def _play(
    scenario: Scenario,
    choices: Choices,
    engine_class: type[TransferEngine],
    window_ps: int,
    *,
    eager: bool,
) -> Outcome:
    env = OrderEnv(choices, window_ps, eager=eager)
    try:
        return run_scenario(scenario, engine_class=engine_class, env=env)
    except Violation as found:
        what = str(found).rpartition("\nreplay: ")[0]
        how = "" if eager else ", eager=False"
        if window_ps != WINDOW_PS:
            how += f", window_ps={window_ps}"
        again = f"tests.world.explore.replay_path({scenario!r}, {choices.path}{how})"
        raise Violation(f"{what}\nreplay: {again}") from found.__cause__
