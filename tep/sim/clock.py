"""The simulated clock: simpy in integer picoseconds. No NIC, no engine, no asyncio here.

Rule 1: time is an int; a float delay is refused, since it would make a trace depend on rounding.
Rule 2: nothing here reads a wall clock, a random source, `id` or `hash`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import simpy
from simpy.core import EmptySchedule
from simpy.events import NORMAL, Event, EventPriority

from tep.base.checks import unpicklable
from tep.base.errors import UsageError
from tep.base.hashing import draws, stream_key
from tep.sim.draws import Stream

__all__ = ["FOREVER_PS", "Call", "FabricEnv", "Turned", "in_one_process"]

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


class Call(Event):
    """A call of a function with one argument, triggered from the start; nobody holds one."""

    # Class attributes in place of Event.__init__, which takes longer than the rest of a call.
    _ok = True
    _value = None

    def __init__(self, fn: Callable[[Any], object], arg: object) -> None:
        self.fn = fn
        self.arg = arg


def _fire(event: Any) -> None:  # Call by name; simpy types its callbacks for any event
    event.fn(event.arg)


Call.callbacks = (_fire,)  # type: ignore[assignment]  # a tuple: shared, so nobody may append


class FabricEnv(simpy.Environment):
    """A simpy environment in integer picoseconds, with call_at() and runs that have a deadline.

    Processes, timeouts and conditions of simpy work in it; delays are ints, in ps.

    Attributes:
        running: True while events are being processed, or an asyncio loop on this clock runs.
        deadline_ps: when the present run comes back at the latest, and others may act again; a
            model that computes ahead must not settle what lies behind it.
        reporters: give the text of a stall report each; engines' drivers put theirs here.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.running = False
        self.deadline_ps = FOREVER_PS
        self.reporters: list[Callable[[], str]] = []
        self._daemons = 0
        self._rank: Callable[[], int] | None = None

    __reduce__ = in_one_process

    def __repr__(self) -> str:
        return f"FabricEnv(at {self.now} ps, {len(self._queue)} events)"

    if TYPE_CHECKING:  # ints: rule 1, schedule() lets nothing else in

        @property
        def now(self) -> int:
            """The time, in ps."""

    else:
        now = property(operator.attrgetter("_now"), doc="The time, in ps.")  # half the time

    def shuffle_ties(self, seed: int) -> None:
        """From now on, order the events of one instant by a hash of this seed."""
        self._rank = draws(stream_key(seed, Stream.TIES), 1).__next__

    def schedule(
        self, event: Event, priority: EventPriority = NORMAL, delay: int | float = 0
    ) -> None:
        """Queue an event; simpy's own events come here as well.

        Raises:
            UsageError: the delay is not a whole number of ps.
        """
        try:
            whole = operator.index(delay)  # type: ignore[arg-type]  # a float may come
        except TypeError:
            raise UsageError(
                f"delay {delay!r}: simulated time is an integer count of picoseconds; "
                "multiply by tep.base.units.PS_PER_US and round"
            ) from None
        if self._rank is not None and priority == NORMAL:
            priority = EventPriority(NORMAL + (self._rank() >> 8))  # behind URGENT
        simpy.Environment.schedule(self, event, priority, whole)

    def call_at(self, t_ps: int, fn: Callable[[Any], object], arg: object = None) -> None:
        """Call fn(arg) at t_ps, which is now or later.

        A call cannot be taken back: let `arg` show whether it is out of date.
        """
        assert t_ps >= self.now, (t_ps, self.now)
        self.schedule(Call(fn, arg), NORMAL, t_ps - self.now)

    def call_daemon(self, t_ps: int, fn: Callable[[Any], object], arg: object = None) -> None:
        """Do as call_at, for periodic looks: an environment with only daemons counts as empty."""
        self._daemons += 1
        self.call_at(t_ps, self._run_daemon, (fn, arg))

    def _run_daemon(self, call: tuple[Callable[[Any], object], object]) -> None:
        self._daemons -= 1
        call[0](call[1])

    def next_ps(self) -> int:
        """The time of the next event; FOREVER_PS if there is none."""
        return int(self._queue[0][0]) if self._queue else FOREVER_PS

    def skip_to(self, t_ps: int) -> None:
        """Set the clock forward, never back."""
        self._now = max(self._now, t_ps)

    # ---- turning

    def _revive(self) -> bool:
        """Give every daemon one last look; True if that brought events that are none."""
        for _ in range(self._daemons):
            if len(self._queue) > self._daemons:
                break
            simpy.Environment.step(self)
        return len(self._queue) > self._daemons

    def run_until(self, settled: Callable[[], bool], deadline_ps: int = FOREVER_PS) -> Turned:
        """Process events until `settled()`, looked at after each, or the deadline, or the end.

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
        queue, step = self._queue, super().step
        while not settled():
            if queue and queue[0][0] > deadline_ps:
                self.skip_to(deadline_ps)
                return Turned.DEADLINE
            if len(queue) > self._daemons:
                step()
            elif not self._revive():
                return Turned.SETTLED if settled() else Turned.EMPTY
        return Turned.SETTLED

    def step(self) -> None:
        """Process the next event.

        Raises:
            EmptySchedule: none is left but daemons' looks.
        """
        if len(self._queue) <= self._daemons and not self._revive():
            raise EmptySchedule
        super().step()

    def enter(self) -> None:
        """Mark the clock as running; the caller sets `running` back to False."""
        if self.running:
            raise UsageError(
                "the simulated clock is already running: inside a coroutine, process or callback "
                "use `await`, not wait() or run()"
            )
        self.running = True

    def run(self, until: int | float | Event | None = None) -> Any:
        """Run as simpy does: to the end, to a time in ps, or to an event, and return its value."""
        if isinstance(until, Event):
            self.enter()
            try:
                return super().run(until)
            finally:
                self.running = False
        if until is None:
            self.run_until(_never)
            return None
        until_ps = operator.index(until)  # type: ignore[arg-type]  # raises TypeError for floats
        if until_ps < self.now:
            raise UsageError(f"run({until_ps}): the clock stands at {self.now} ps already")
        if self.run_until(_never, until_ps) is Turned.EMPTY:
            self.skip_to(until_ps)
        return None

    def stall_report(self) -> str:
        """Report what every registered engine waits for, one paragraph an engine."""
        reports = [report() for report in self.reporters]
        text = "\n".join(one for one in reports if one)
        return text or "no engine reports anything outstanding"


def _never() -> bool:
    return False
