"""The simulated clock: simpy with integer picoseconds and a cheap call event.

No NIC, no engine, no asyncio here.

Rule 1: time is an int; a float delay is refused, since it would make a trace depend on rounding.
Rule 2: nothing here reads a wall clock, a random source, `id` or `hash`.

What is used of simpy's inside, and why `simpy >=4.1,<4.2` is pinned: `Environment._queue`, a heap
of (time, priority, number, event); `_eid`, the counter of the third field; `_now`. A pooled call
pushed there costs half of a Timeout with a callback, and a twentieth of a process. A unit test
looks at a probe of all three.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, TypeVar

import simpy
from simpy.core import EmptySchedule
from simpy.events import NORMAL, Event, EventPriority

from tep.base.checks import unpicklable
from tep.base.errors import UsageError
from tep.base.hashing import draws, stream_key
from tep.sim.draws import Stream

__all__ = ["FOREVER_PS", "Call", "FabricEnv", "Place", "Turned", "in_one_process"]

T = TypeVar("T")

Place = tuple[int, EventPriority, int]
"""The position of an event in the order of all: time, rank, number."""

FOREVER_PS: Final = 1 << 100
"""Later than any event: the deadline of what has none."""


class Call(Event):
    """A call at a time: one function, one argument; triggered from the start, reused once run.

    A real simpy event, so that it may stand in the queue beside timeouts and processes. Nobody may
    hold one.
    """

    __slots__ = ("arg", "fn")
    fn: Callable[[Any], object]
    arg: Any

    # Class attributes in place of Event.__init__: stock step() reads them, at no cost per call.
    _ok = True
    _value = None

    def __init__(self, fn: Callable[[Any], object], arg: object) -> None:
        self.fn = fn
        self.arg = arg


def _fire(event: Any) -> None:  # Call by name; simpy types its callbacks for any event
    event.fn(event.arg)


Call.callbacks = (_fire,)  # type: ignore[assignment]  # a tuple: shared, so nobody may append


class Turned(Enum):
    """Why a run came back."""

    SETTLED = "settled"
    DEADLINE = "deadline"
    EMPTY = "empty"  # no event is left that could change anything


in_one_process: Final = unpicklable(
    "a simulation lives in one process; make another there, with the same seed"
)
"""The `__reduce__` of what lives in a simulation."""


class FabricEnv(simpy.Environment):
    """A simpy environment in integer picoseconds, with call_at() and an inlined run().

    Stock processes, timeouts and conditions work in it; delays are ints, in ps.

    Attributes:
        running: True while events are being processed, or an asyncio loop on this clock runs.
        deadline_ps: when the present run comes back at the latest, and others may act again; a
            model that computes ahead must not settle what lies behind it.
        passes_places: a run that comes to its end stands at the last place that was reserved and
            not taken, as if the call had been there. False: it stands at its last event.
        reporters: give the text of a stall report each; engines' drivers put theirs here.

    Args:
        tie_seed: order events of one instant by a hash of this seed; None: as they were made.
    """

    def __init__(self, *, tie_seed: int | None = None) -> None:
        super().__init__(0)
        self.running = False
        self.deadline_ps = FOREVER_PS
        self.reporters: list[Callable[[], str]] = []
        self._pool: list[Call] = []
        self._daemons = 0
        self._next_tie: Callable[[], int] | None = None
        self.passes_places = False
        self._reserved: tuple[Any, ...] = (-1,)  # the last of all places
        self._head: tuple[Any, ...] = (-1,)  # the place of the last event that was processed
        if tie_seed is not None:
            self.shuffle_ties(tie_seed)

    __reduce__ = in_one_process

    def __repr__(self) -> str:
        return f"FabricEnv(at {self.now} ps, {len(self._queue)} events)"

    def shuffle_ties(self, seed: int) -> None:
        """From now on, order the events of one instant by a hash of this seed."""
        self._next_tie = draws(stream_key(seed, Stream.TIES), 1).__next__

    if TYPE_CHECKING:  # ints: rule 1, schedule() lets nothing else in

        @property
        def now(self) -> int:
            """The time, in ps."""

    else:
        now = property(operator.attrgetter("_now"), doc="The time, in ps.")  # half the time

    def call_at(self, t_ps: int, fn: Callable[[Any], object], arg: object = None) -> None:
        """Call fn(arg) at t_ps, which is now or later.

        A call cannot be taken back: let `arg` show whether it is out of date.
        """
        assert t_ps >= self._now, (t_ps, self._now)
        if self._pool:
            event = self._pool.pop()
            event.fn = fn
            event.arg = arg
        else:
            event = Call(fn, arg)
        rank = NORMAL if self._next_tie is None else self._rank()
        heappush(self._queue, (t_ps, rank, next(self._eid), event))

    def reserve(self, t_ps: int) -> Place:
        """Reserve the place that call_at(t_ps) would take now, without an event.

        `call_in_place` makes the event if it turns out to be needed.
        """
        assert t_ps >= self._now, (t_ps, self._now)
        rank = NORMAL if self._next_tie is None else self._rank()
        place = t_ps, rank, next(self._eid)
        self._reserved = max(self._reserved, place)
        return place

    def is_ahead(self, place: Place) -> bool:
        """Whether an event in this place would still be to come."""
        t_ps, now = place[0], self._now
        return t_ps > now or (t_ps == now and self._head[0] == now and place > self._head)

    def call_in_place(self, place: Place, fn: Callable[[Any], object]) -> None:
        """Call fn(None) in a place that was reserved, if `is_ahead` says so, once."""
        event = self._pool.pop() if self._pool else Call(fn, None)
        event.fn, event.arg = fn, None
        t_ps, rank, number = place
        assert t_ps >= self._now, (t_ps, self._now)
        heappush(self._queue, (t_ps, rank, number, event))

    def call_daemon(self, t_ps: int, fn: Callable[[Any], object], arg: object = None) -> None:
        """Do as call_at, for periodic looks: an environment with only daemons counts as empty."""
        self._daemons += 1
        self.call_at(t_ps, self._run_daemon, (fn, arg))

    def _run_daemon(self, call: tuple[Callable[[Any], object], object]) -> None:
        self._daemons -= 1
        call[0](call[1])

    def schedule(
        self, event: Event, priority: EventPriority = NORMAL, delay: int | float = 0
    ) -> None:
        """Queue an event of simpy's own; checks that the delay is a whole number of ps."""
        try:
            whole = operator.index(delay)  # type: ignore[arg-type]  # a float may come
        except TypeError:
            raise UsageError(
                f"delay {delay!r}: simulated time is an integer count of picoseconds; "
                "multiply by tep.base.units.PS_PER_US and round"
            ) from None
        if self._next_tie is not None and priority == NORMAL:
            priority = self._rank()
        super().schedule(event, priority, whole)

    def _rank(self) -> EventPriority:
        """A hashed priority behind URGENT: shuffles the events of one instant, never instants."""
        assert self._next_tie is not None
        return EventPriority(NORMAL + (self._next_tie() >> 8))

    # ---- turning

    def peek_live(self) -> int:
        """The time of the next event that can change anything; FOREVER_PS if there is none."""
        if len(self._queue) <= self._daemons:
            return FOREVER_PS
        # As in now().
        return self._queue[0][0]  # type: ignore[return-value]

    def step(self) -> None:
        """Process the next event. Raises simpy's EmptySchedule when none but daemons are left."""
        queue = self._queue
        if len(queue) <= self._daemons and not self.revive():
            raise EmptySchedule
        head = queue[0]
        event = head[3]
        self._head = max(self._head, head)
        if type(event) is Call:
            heappop(queue)
            self._now = head[0]
            event.fn(event.arg)
            self._pool.append(event)
        else:
            super().step()

    def revive(self) -> bool:
        """Give every daemon one last look; True if that brought events that are none."""
        for _ in range(self._daemons):
            if len(self._queue) > self._daemons:
                break
            head = heappop(self._queue)
            self._head = max(self._head, head)
            self._now = head[0]
            assert type(head[3]) is Call, head
            head[3].fn(head[3].arg)
        return len(self._queue) > self._daemons

    def run_until(self, settled: Callable[[], bool], deadline_ps: int = FOREVER_PS) -> Turned:
        """Process events until `settled()`, looked at after each, or the deadline, or the end.

        At the deadline the clock stands at the deadline, with everything up to it done.

        Raises:
            UsageError: called from inside an event, or a coroutine, of this environment.
        """
        if settled():
            return Turned.SETTLED
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
        pool = self._pool
        stock_step = super().step
        while True:
            while len(queue) > self._daemons:
                head = queue[0]
                if head[0] > deadline_ps:
                    self._now = deadline_ps
                    return Turned.DEADLINE
                event = head[3]
                # With shuffled ties an event may be made for a place before its maker's.
                if head > self._head:  # noqa: PLR1730  # max() takes twice as long
                    self._head = head
                if type(event) is Call:
                    heappop(queue)
                    self._now = head[0]
                    event.fn(event.arg)
                    pool.append(event)
                else:
                    stock_step()
                if settled():
                    return Turned.SETTLED
            if queue and queue[0][0] > deadline_ps:  # a daemon's look, too late to matter
                self._now = deadline_ps
                return Turned.DEADLINE
            revived = self.revive()
            if settled():
                return Turned.SETTLED
            if not revived:
                return self._end(deadline_ps)

    def _end(self, deadline_ps: int) -> Turned:
        """End a run without events: move past the reserved places that nobody took."""
        place = self._reserved
        if self.passes_places and place > self._head:
            if place[0] > deadline_ps:
                self._now = deadline_ps
                return Turned.DEADLINE
            self._head, self._now = place, place[0]
        return Turned.EMPTY

    def enter(self) -> None:
        """Mark the clock as running; whoever calls this sets `running` back to False."""
        if self.running:
            raise UsageError(
                "the simulated clock is already running: inside a coroutine, process or callback "
                "use `await`, not wait() or run()"
            )
        self.running = True

    def run(self, until: int | float | Event | None = None) -> Any:
        """Run as simpy does: to the end, to a time in ps, or to an event, and return its value."""
        if until is None:
            self.run_until(_never)
            return None
        if isinstance(until, Event):
            self.enter()
            try:
                return super().run(until)
            finally:
                self.running = False
        until_ps = operator.index(until)  # type: ignore[arg-type]  # raises TypeError for floats
        if until_ps < self.now:
            raise UsageError(f"run(until={until_ps}): the clock stands at {self.now} ps already")
        if self.run_until(_never, until_ps) is Turned.EMPTY:
            self.skip_to(until_ps)
        return None

    def skip_to(self, t_ps: int) -> None:
        """Set the clock forward; nothing may be left to do before that time."""
        assert self.peek_live() >= t_ps, (self.peek_live(), t_ps)
        self._now = max(self._now, t_ps)

    def stall_report(self) -> str:
        """Report what every registered engine waits for, one paragraph an engine."""
        reports = [report() for report in self.reporters]
        text = "\n".join(one for one in reports if one)
        return text or "no engine reports anything outstanding"


def _never() -> bool:
    return False
