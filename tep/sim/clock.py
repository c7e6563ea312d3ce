"""The simulated clock: calls at times, in integer picoseconds. No NIC, no engine, no asyncio here.

Rule 1: time is an int; a float would make a trace depend on rounding. Rule 2: nothing here reads a
wall clock, a random source, `id` or `hash`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final

from tep.base.checks import unpicklable
from tep.base.errors import UsageError
from tep.base.hashing import draws, stream_key
from tep.sim.draws import Stream

__all__ = ["FOREVER_PS", "FabricEnv", "Turned", "in_one_process"]

FOREVER_PS: Final = 1 << 100
"""Later than any event: the deadline of what has none."""


class Turned(Enum):
    """Why a run came back."""

    SETTLED = "settled"
    DEADLINE = "deadline"
    EMPTY = "empty"  # no event is left that could change anything


in_one_process: Final = unpicklable(
    "a simulation lives in one process; make another there, with the same seed"
)
"""The `__reduce__` of what lives in a simulation."""

_Event = tuple[int, int, int, Callable[[Any], object], Any]
"""A call in the order of all: time, rank, number; the function and its argument."""


class FabricEnv:
    """A clock in integer picoseconds, and the calls that are booked on it.

    Attributes:
        now: the time, in ps.
        running: True while events are being processed, or an asyncio loop on this clock runs.
        deadline_ps: when the present run comes back at the latest, and others may act again; a
            model that computes ahead must not settle what lies behind it.
        reporters: give the text of a stall report each; engines' drivers put theirs here.

    Args:
        tie_seed: order events of one instant by a hash of this seed; None: as they were made.
    """

    def __init__(self, *, tie_seed: int | None = None) -> None:
        self.now = 0
        self.running = False
        self.deadline_ps = FOREVER_PS
        self.reporters: list[Callable[[], str]] = []
        self._queue: list[_Event] = []
        self._number = count()
        self._daemons = 0
        self._rank: Callable[[], int] | None = None
        if tie_seed is not None:
            self.shuffle_ties(tie_seed)

    __reduce__ = in_one_process

    def __repr__(self) -> str:
        return f"FabricEnv(at {self.now} ps, {len(self._queue)} events)"

    def shuffle_ties(self, seed: int) -> None:
        """From now on, order the events of one instant by a hash of this seed."""
        self._rank = draws(stream_key(seed, Stream.TIES), 1).__next__

    def call_at(self, t_ps: int, fn: Callable[[Any], object], arg: object = None) -> None:
        """Call fn(arg) at t_ps, which is now or later.

        A call cannot be taken back: let `arg` show whether it is out of date.
        """
        assert t_ps >= self.now, (t_ps, self.now)
        rank = 0 if self._rank is None else self._rank()
        heappush(self._queue, (t_ps, rank, next(self._number), fn, arg))

    def call_daemon(self, t_ps: int, fn: Callable[[Any], object], arg: object = None) -> None:
        """Do as call_at, for periodic looks: an environment with only daemons counts as empty."""
        self._daemons += 1
        self.call_at(t_ps, self._run_daemon, (fn, arg))

    def _run_daemon(self, call: tuple[Callable[[Any], object], object]) -> None:
        self._daemons -= 1
        call[0](call[1])

    def next_ps(self) -> int:
        """The time of the next event; FOREVER_PS if there is none."""
        return self._queue[0][0] if self._queue else FOREVER_PS

    # ---- turning

    def revive(self) -> bool:
        """Give every daemon one last look; True if that brought events that are none."""
        for _ in range(self._daemons):
            if len(self._queue) > self._daemons:
                break
            self.now, _, _, fn, arg = heappop(self._queue)
            fn(arg)
        return len(self._queue) > self._daemons

    def run_until(self, settled: Callable[[], bool], deadline_ps: int = FOREVER_PS) -> Turned:
        """Process events until `settled()`, looked at after each, or the deadline, or the end.

        At the deadline the clock stands at the deadline, with everything up to it done.

        Raises:
            UsageError: called from inside an event, or a coroutine, of this environment.
        """
        if settled():
            return Turned.SETTLED  # also from inside an event
        self.enter()
        try:
            return self.turn(settled, deadline_ps)
        finally:
            self.running = False
            self.deadline_ps = FOREVER_PS

    def turn(self, settled: Callable[[], bool], deadline_ps: int) -> Turned:
        """Run the loop of run_until; enter() must have been called."""
        self.deadline_ps = deadline_ps
        queue = self._queue
        while not settled():
            if queue and queue[0][0] > deadline_ps:
                self.now = deadline_ps
                return Turned.DEADLINE
            if len(queue) > self._daemons:
                self.now, _, _, fn, arg = heappop(queue)
                fn(arg)
            elif not self.revive():
                return Turned.SETTLED if settled() else Turned.EMPTY
        return Turned.SETTLED

    def enter(self) -> None:
        """Mark the clock as running; whoever calls this sets `running` back to False."""
        if self.running:
            raise UsageError(
                "the simulated clock is already running: inside a coroutine or callback use "
                "`await`, not wait() or run()"
            )
        self.running = True

    def run(self, until: int | None = None) -> None:
        """Run to the end, or to a time in ps."""
        if until is None:
            self.run_until(_never)
            return
        until_ps = operator.index(until)  # raises TypeError for floats
        if until_ps < self.now:
            raise UsageError(f"run({until_ps}): the clock stands at {self.now} ps already")
        if self.run_until(_never, until_ps) is Turned.EMPTY:
            self.now = until_ps

    def stall_report(self) -> str:
        """Report what every registered engine waits for, one paragraph an engine."""
        reports = [report() for report in self.reporters]
        text = "\n".join(one for one in reports if one)
        return text or "no engine reports anything outstanding"


def _never() -> bool:
    return False
