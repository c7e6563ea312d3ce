"""The driver of the local backend: a worker thread that leaves the turn to whoever waits.

Between two processes of one host a write takes a few microseconds, and handing it to another thread
takes twenty: the plain ThreadDriver does so on the way in, and again on the way out. Here a thread
that calls wait() turns the engine itself, and sleeps on the NICs' descriptors itself. The worker is
there for the rest of the time: for callbacks, await, and work that nobody waits for.

Rule 1: whoever holds the turn, and nobody else, steps the machine and delivers. Rule 2: a sleeper
says so (`_asleep`) before it looks for the last time whether it was kicked; a kick is noted before
it looks for sleepers. Rule 3: a kick that rings nobody is looked at by somebody within a nap.

What this asks of users: callbacks run on the thread that waits, if one does. They may not block, as
ever, and may not need a lock that is held around wait().
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, TypeVar

from tep.drivers import Machine, Settles, ThreadDriver
from tep.errors import ClosedError, UsageError

__all__ = ["TurnDriver"]

T = TypeVar("T")

# What `signal` wraps in order to make enums of the numbers: 0.5 us a call instead of 5 (measured).
_plain = importlib.import_module("_signal")
_signal: Final[Callable[[int, object], object]] = _plain.signal
_getsignal: Final[Callable[[int], object]] = _plain.getsignal

_SPIN_S: Final = 100e-6
"""How long a waiter polls before it sleeps, where polling has paid lately.

To be put to sleep and woken on another CPU costs 20 to 60 us (measured: half a round trip by
eventfd, idle cores of a virtual machine). Two peers that both sleep at once stay in that rhythm;
they leave it only if one polls for longer than the other's waking and answering take. On busy cores
polling is in the way of the peer, and fails: then it is tried ever less often.
"""

_SKIPS_MAX: Final = 64
_NAP_S: Final = 0.001
_LOOK_S: Final = 0.5
_ASK_S: Final = 0.01
_ASK_PAUSE_S: Final = 50e-6
_YIELD_TURNS: Final = 32  # turns of a long spin after which other threads get the interpreter


class TurnDriver(ThreadDriver):
    """Turns the engine in the waiting thread, and in a worker thread while nobody waits.

    Args:
        name: of the thread, for debuggers.
        cpu: pin the worker to this CPU, or None. Waiting threads stay where they are.
        spin_s: how long to go on polling before sleeping, seconds; 0 = not at all, 1 = "spinning":
            a core for as long as somebody waits. None = a little, while that pays.
        watch_s: how often watched words are read while there is nothing else to do, seconds.
    """

    def __init__(
        self,
        name: str = "tep",
        *,
        cpu: int | None = None,
        spin_s: float | None = None,
        watch_s: float = 0.0005,
    ) -> None:
        super().__init__(
            name, cpu=cpu, spin_s=_SPIN_S if spin_s is None else spin_s, watch_s=watch_s
        )
        self._adaptive = spin_s is None
        self._skips = 0  # waits that sleep at once before polling is tried again
        self._skipped = 0
        self._fds: list[int] = []
        self._machine: Machine | None = None
        self._turn = threading.Lock()
        self._turn.acquire()  # the worker's, until it sleeps for the first time
        self._turner = 0  # thread that has the turn, 0 = nobody, or a worker not yet begun
        self._asleep = False  # nobody turns, or the one who does sleeps: ring
        self._news = False  # somebody kicked since the last turn began
        self._napping = False  # the worker looks up at least every _NAP_S
        self._waiter = 0  # thread whose submits are followed by waits
        self._waits = self._waits_seen = 0
        self._failed: BaseException | None = None
        self._muted = False
        self._left_s = 0.0
        self._asked_s = 0.0
        self._forks = _forks

    # --- what others call

    def start(self, machine: Machine) -> None:
        # The bell and the NICs' descriptors; whoever sleeps with the turn sleeps on this.
        self._nics = select.epoll()
        # The same for the worker without the turn, muted while somebody else has it; and an alarm,
        # which cannot be muted.
        self._listening = select.epoll()
        self._listening.register(self._nics.fileno(), select.EPOLLIN)
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._alarm)
        self._listening.register(self._alarm, select.EPOLLIN | select.EPOLLET)
        self._machine = machine
        super().start(machine)

    def kick(self) -> None:
        if self._news:
            return
        self._news = True
        if not self._asleep:
            return  # whoever turns looks again before it sleeps
        me = threading.get_ident()
        if self._napping and self._waiter == me and not self._turner and not self._calls:
            return  # this thread will wait for what it submits, and turn then; else see _NAP_S
        self._ring(self._bell)

    def call(self, function: Callable[[], T]) -> T:
        if self._turner == threading.get_ident():
            return function()
        return super().call(function)

    def wait(self, handle: Settles, timeout_s: float) -> bool:
        me = threading.get_ident()
        if self._turner == me:
            raise UsageError(
                "wait() inside a callback would wait for the thread it runs on; "
                "use callbacks or await"
            )
        if handle.settled:
            return True
        if self._forks != _forks:
            raise ClosedError(
                "this engine belongs to the process that forked this one; open one in the child"
            )
        deadline = time.monotonic() + timeout_s
        machine = self._machine
        if machine is not None and not self._closing and self._turn.acquire(blocking=False):
            self._turner = me
            self._waiter = me
            self._waits += 1
            with _Interrupts(self._bell) as interrupts:
                self._wait_turning(machine, handle, deadline, interrupts)
            if handle.settled:
                return True
        return super().wait(handle, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        thread = self._thread
        if thread is None or self._closing:
            return
        self._closing = True
        self._ring(self._bell)
        if threading.get_ident() not in {thread.ident, self._turner}:
            thread.join()

    # --- turning

    def _turn_once(self, machine: Machine) -> bool:
        self._news = False
        calls = self._calls
        while calls:
            calls.popleft()()
        work = machine.step()
        machine.deliver()
        return work or bool(calls)

    def _wait_turning(
        self, machine: Machine, handle: Settles, deadline: float, interrupts: _Interrupts
    ) -> None:
        """Turn, with the turn, until the handle is settled or the time is up; then let go of it."""
        self._asleep = False
        if not self._muted:
            self._muted = True
            self._listening.modify(self._nics.fileno(), 0)
        spin_s = self._spin_for()
        spin_until, turns = 0.0, 0
        try:
            while not (self._closing or interrupts.came):
                work = self._turn_once(machine)
                if handle.settled:
                    if spin_until:
                        self._skips = 0  # found by polling
                    break
                now = time.monotonic()
                if now >= deadline:
                    break
                if work:
                    spin_until = 0.0
                    continue
                spin_until = spin_until or now + spin_s
                if now < spin_until:
                    turns += 1
                    if turns % _YIELD_TURNS == 0:
                        # The interpreter's lock is let go for a moment. Not by sched_yield(), which
                        # gives the CPU to any other process for milliseconds.
                        self._nics.poll(0)
                    continue
                self._asleep = True
                if not (self._news or self._closing or interrupts.came) and machine.arm():
                    if spin_s:
                        self._skips = min(2 * self._skips + 1, _SKIPS_MAX)
                    self._sleep_until(machine, deadline - now)
                self._asleep = False
                spin_until = spin_s = 0.0  # what comes after a sleep is not polled for
        except BaseException as error:
            self._failed = error
            self._closing = True
            raise ClosedError(f"the engine failed while it was turned: {error!r}") from error
        finally:
            self._leave(machine)

    def _spin_for(self) -> float:
        """How long this wait polls."""
        if self._adaptive and self._skips:
            self._skipped += 1
            if self._skipped <= self._skips:
                return 0.0
            self._skipped = 0
        return self._spin_s

    def _leave(self, machine: Machine) -> None:
        """Hand the turn back: to nobody if all is quiet, else to the worker."""
        ring = self._failed is not None or self._closing or self._news or bool(self._calls)
        ring = ring or machine.busy() or machine.watching() or machine.must_poll()
        self._asleep = True
        if ring or not self._napping:  # else the worker looks soon, or somebody waits sooner
            self._follow(machine)
            ring = ring or not machine.arm()
            self._unmute()
        self._turner = 0
        self._turn.release()
        if not self._napping and not self._closing:
            self._ask_for_naps()
        if ring or self._news:
            self._ring(self._bell)

    def _ask_for_naps(self) -> None:
        """Where waits come thick and fast, have the worker nap; see _await_turn()."""
        now = time.monotonic()
        thick, self._left_s = now - self._left_s < _NAP_S, now
        if thick and now - self._asked_s > _ASK_S:
            self._asked_s = now
            self._ring(self._alarm)
            # It cannot hear without the interpreter, which a thread that polls never lets go of for
            # long enough.
            time.sleep(_ASK_PAUSE_S)

    def _run(self, machine: Machine) -> None:
        if self._cpu is not None:
            os.sched_setaffinity(0, {self._cpu})
        self._nics.register(self._bell, select.EPOLLIN | select.EPOLLET)
        me = threading.get_ident()
        spin_until = 0.0
        while self._failed is None:
            self._turner = me
            if self._turn_once(machine):
                spin_until = 0.0
                continue
            if self._closing:
                return
            now = time.monotonic()
            spin_until = spin_until or now + self._spin_s
            if machine.busy() and now < spin_until:
                time.sleep(0)  # lets the user's own thread have the interpreter
                continue
            self._asleep = True
            if not (self._news or self._closing) and machine.arm():
                self._follow(machine)
                self._unmute()
                self._turner = 0
                self._turn.release()
                if not self._await_turn(machine):
                    return
            self._asleep = False
            spin_until = 0.0

    # --- sleeping

    def _await_turn(self, machine: Machine) -> bool:
        """Worker: sleep until there is something to do that nobody else does; take the turn.

        While others wait now and then, it sleeps in naps, and they spare themselves to call it.

        Returns:
            False if the driver was closed.
        """
        while not self._closing:
            regular = machine.watching() or machine.must_poll()
            waits = self._waits
            self._napping = napping = waits != self._waits_seen
            self._waits_seen = waits
            if napping or not self._news or self._turner:
                naptime_s = _NAP_S if napping else None
                self._listening.poll(self._watch_s if regular else naptime_s)
            if not self._closing and self._turn.acquire(blocking=False):
                if self._news and napping:
                    self._waiter = 0  # somebody submitted, and did not wait
                self._napping = False
                self._nics.poll(0)  # takes back the bell's ring
                return True
        return False

    def _sleep_until(self, machine: Machine, left_s: float) -> None:
        """Waiter: block until a kick, a NIC's descriptor, or the time is up."""
        self._follow(machine)
        regular = machine.watching() or machine.must_poll()
        # A signal in the moment before the call does not end it: hence a look now and then.
        self._nics.poll(min(left_s, self._watch_s if regular else _LOOK_S))

    def _follow(self, machine: Machine) -> None:
        """Have the NICs' descriptors in the set. One that was closed has left it by itself."""
        fds = machine.wakeup_fds()
        if fds != self._fds:
            for fd in fds:
                with contextlib.suppress(FileExistsError):
                    self._nics.register(fd, select.EPOLLIN)
            self._fds = fds

    def _unmute(self) -> None:
        if self._muted:
            self._muted = False
            self._listening.modify(self._nics.fileno(), select.EPOLLIN)

    @staticmethod
    def _ring(bell: int) -> None:
        with contextlib.suppress(OSError):  # not started yet, or rung 2**64 times
            os.eventfd_write(bell, 1)


_forks = 0  # how many forks away from the first process this one is


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)

_SIGINT: Final = int(signal.SIGINT)


class _Interrupts:
    """While the main thread turns an engine, Ctrl-C waits until the step is over.

    A KeyboardInterrupt in the middle of a step would leave the engine in two minds about what is
    posted. Other handlers than Python's own are left alone.

    Attributes:
        came: Ctrl-C was pressed.
    """

    __slots__ = ("_bell", "_mine", "came")

    def __init__(self, bell: int) -> None:
        self.came = False
        self._bell = bell
        self._mine = False

    def __enter__(self) -> _Interrupts:
        if (
            threading.get_ident() == threading.main_thread().ident
            and _getsignal(_SIGINT) is signal.default_int_handler
        ):
            self._mine = True
            _signal(_SIGINT, self._note)
        return self

    def _note(self, *_: object) -> None:
        self.came = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def __exit__(self, *_: object) -> None:
        if self._mine:
            _signal(_SIGINT, signal.default_int_handler)
            if self.came:
                raise KeyboardInterrupt
