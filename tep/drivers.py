"""The drivers: what owns time and turns the engine. The only home of threads.

The engine has one verb, `step()`. A driver calls it, then `deliver()`, which runs the users'
callbacks outside the step. Here are the thread driver (hardware, tcp, shm) and the inline driver
(benchmarks, tests); `tep.turning` lets callers turn beside the thread, and the simulated one lives
in `tep.sim.driver`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import os
import select
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, Protocol, TypeVar, runtime_checkable

from tep.errors import ClosedError, UsageError

__all__ = [
    "Driver",
    "InlineDriver",
    "Interrupts",
    "Machine",
    "Process",
    "Settles",
    "ThreadDriver",
    "Timed",
    "left_s",
    "thread_id",
]

T = TypeVar("T")

# What `signal` wraps in order to make enums of the numbers: 0.5 us a call instead of 5 (measured).
_plain = importlib.import_module("_signal")
_signal: Final[Callable[[int, object], object]] = _plain.signal
_getsignal: Final[Callable[[int], object]] = _plain.getsignal
_SIGINT: Final = int(signal.SIGINT)

_INTERRUPT: Final = signal.default_int_handler

_LOOK_S: Final = 0.2
"""How often a blocked caller looks whether the worker still lives, seconds."""

_NICE_MAX: Final = 19

thread_id: Final = threading.get_ident
"""Who runs this, as a number other than 0."""


class Process:
    """What drivers remember of this process, since each look at it costs a system call.

    Attributes:
        forks: how often it, or those it descends from, forked; a driver belongs to one of them.
        main: its main thread.
    """

    forks = 0
    main = threading.main_thread().ident

    @classmethod
    def note_fork(cls) -> None:
        """In the child: this is another process."""
        cls.forks += 1
        cls.main = threading.main_thread().ident


os.register_at_fork(after_in_child=Process.note_fork)


class Settles(Protocol):
    """What can be waited for: a transfer or an expectation."""

    @property
    def settled(self) -> bool: ...

    def add_done_callback(self, callback: Callable[[Settles], object], /) -> None: ...

    def remove_done_callback(self, callback: Callable[[Settles], object], /) -> None: ...


class Machine(Protocol):
    """What a driver turns: the engine."""

    def step(self) -> bool:
        """Take commands, post, poll, count. True = there was work, turn again soon."""

    def deliver(self) -> None:
        """Run the callbacks of what settled in the steps before. Never raises."""

    def busy(self) -> bool:
        """Whether rows or messages are outstanding, so that spinning pays."""

    def watching(self) -> bool:
        """Whether watched words must be looked at now and then."""

    def wakeup_fds(self) -> list[int]:
        """The descriptors to sleep on; empty where no NIC has one."""

    def owing(self) -> bool:
        """Whether deliver() would run a user's function now."""

    def arm(self) -> bool:
        """Ask each NIC for one wake-up; False: something is waiting already."""

    def crash(self, error: BaseException) -> None:
        """A step raised, which is a bug in tep: fail what is open, since nobody will turn again."""

    def must_poll(self) -> bool:
        """Whether some NIC gives no sign of news, so that it must be polled now and then."""


@runtime_checkable
class Timed(Protocol):
    """A machine that wants to be turned at a time although nothing happens."""

    def due_s(self) -> float | None:
        """When, on the driver's clock; None: only when there is news."""


class Driver(Protocol):
    """What owns time for one engine.

    Attributes:
        lock: guards a handle's callbacks against the thread that settles it; any context manager
            where one thread does all.
    """

    lock: AbstractContextManager[object]

    def start(self, machine: Machine) -> None:
        """Begin to turn the machine."""

    def kick(self) -> None:
        """Work was queued, or a NIC has news: step soon.

        Callable from any thread, cheap when repeated.
        """

    def nudge(self) -> None:
        """Work was queued that can wait until a NIC has news: nothing comes of it before."""

    def call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps, on the thread that owns the NICs; return its result."""

    def wait(self, handle: Settles, timeout_s: float) -> bool:
        """Turn, or block, until the handle is settled; False after `timeout_s` of this clock.

        Raises StallError where it is certain that nothing can settle it.
        """

    def check_await(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raise UsageError if awaiting under this event loop could never end."""

    def now_s(self) -> float:
        """This driver's clock, seconds from an arbitrary start."""

    def close(self) -> None:
        """Stop turning; afterwards call() runs where it is called. Idempotent."""


class InlineDriver:
    """The caller turns: every wait() and turn() steps all machines of one ring.

    Args:
        ring: machines that are turned together, e.g. both ends of a loopback pair; share one list
            between drivers.
    """

    def __init__(self, ring: list[Machine] | None = None) -> None:
        self.ring: list[Machine] = [] if ring is None else ring
        self._machine: Machine | None = None
        self._turning = False
        self.lock: AbstractContextManager[object] = threading.Lock()  # cheaper than a null context

    def start(self, machine: Machine) -> None:
        self._machine = machine
        self.ring.append(machine)

    def kick(self) -> None:
        """Nothing to do: the caller turns."""

    def nudge(self) -> None:
        """Nothing to do, as for kick()."""

    def turn(self) -> bool:
        """Step every machine of the ring once; True if any had work."""
        if self._turning:
            self._refuse()
        self._turning, work = True, False
        try:
            for machine in tuple(self.ring):
                work |= machine.step()
                machine.deliver()
        finally:
            self._turning = False
        return work

    def _refuse(self) -> None:
        raise UsageError(
            "turn() or wait() inside a callback of the same engine would turn it while it is "
            "turned; use callbacks"
        )

    def call(self, function: Callable[[], T]) -> T:
        return function()

    def wait(self, handle: Settles, timeout_s: float) -> bool:
        now_s, ring = time.monotonic, self.ring
        deadline = now_s() + timeout_s
        if self._turning:
            self._refuse()
        self._turning = True
        try:
            while not handle.settled:  # as turn() does, once a loop instead of once a call
                for machine in tuple(ring):
                    machine.step()
                    machine.deliver()
                if now_s() >= deadline:
                    return handle.settled
        finally:
            self._turning = False
        return True

    def check_await(self, loop: asyncio.AbstractEventLoop) -> None:  # noqa: ARG002  # protocol
        raise UsageError(
            "an engine with an inline driver cannot be awaited: nobody would turn it; "
            "use wait() or turn()"
        )

    now_s = staticmethod(time.monotonic)

    def close(self) -> None:
        if self._machine in self.ring:
            self.ring.remove(self._machine)


class ThreadDriver:
    """One worker thread an engine: spins while rows are outstanding, else sleeps until woken.

    Args:
        name: of the thread, for debuggers.
        cpu: pin the worker to this CPU, or None.
        spin_s: how long to go on polling after the last work before sleeping, seconds.
        watch_s: how often watched words are read while there is nothing else to do, seconds.
        nice: how much the worker gives way to other threads where CPUs are scarce, 0 to 19 above
            the process's own niceness. Beside a busy engine on two CPUs, one call in a hundred of
            the user's own thread is held up for 1.2 ms or more with 0, and for 0.4 ms with 5.

    Raises:
        UsageError: this process may not run on that CPU, or no such niceness.
    """

    def __init__(
        self,
        name: str = "tep",
        *,
        cpu: int | None = None,
        spin_s: float = 0.0005,
        watch_s: float = 0.0005,
        nice: int = 5,
    ) -> None:
        allowed = os.sched_getaffinity(0)
        if cpu is not None and cpu not in allowed:
            raise UsageError(f"cpu={cpu} is not among the CPUs of this process: {sorted(allowed)}")
        if not 0 <= nice <= _NICE_MAX:
            raise UsageError(f"nice={nice} is outside 0 .. {_NICE_MAX}")
        self._name = name
        self._cpu = cpu
        self._nice = nice
        self._spin_s = spin_s
        self._watch_s = watch_s
        self._kicked = False
        self._calls: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._timed: Timed | None = None
        self._closing = False
        self._bell = -1
        self.lock: AbstractContextManager[object] = threading.Lock()

    def start(self, machine: Machine) -> None:
        assert self._thread is None, "a driver turns one machine"
        self._timed = machine if isinstance(machine, Timed) else None  # asked here once: it is slow
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed with this object and not in close(): another thread may be about to ring, and by
        # then the number could belong to somebody else's file.
        weakref.finalize(self, os.close, self._bell)
        self._thread = threading.Thread(
            target=self._run, args=(machine,), name=f"{self._name}-worker", daemon=True
        )
        self._thread.start()

    def kick(self) -> None:
        # The flag saves the system call while the worker is awake: it clears the flag before its
        # last look.
        if not self._kicked:
            self._kicked = True
            self._ring()

    def nudge(self) -> None:
        """Nothing to do: whoever polls has the NICs armed, or the worker on its way."""

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # not started yet, or rung 2**64 times
            os.eventfd_write(self._bell, 1)

    def call(self, function: Callable[[], T]) -> T:
        thread = self._thread
        if thread is None or thread is threading.current_thread() or not thread.is_alive():
            return function()
        done = threading.Event()
        box: list[T] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                box.append(function())
            except BaseException as error:  # noqa: BLE001  # handed to the caller, who asked for it
                raised.append(error)
            finally:
                done.set()

        self._calls.append(run)
        self.kick()
        while not done.wait(_LOOK_S):
            if not thread.is_alive() and not done.is_set():
                raise ClosedError(
                    "the engine's worker ended before it took this call; the engine is closed"
                )
        if raised:
            raise raised[0]
        return box[0]

    def wait(self, handle: Settles, timeout_s: float) -> bool:
        if threading.current_thread() is self._thread:
            raise UsageError(
                "wait() inside a callback would wait for the thread it runs on; "
                "use callbacks or await"
            )
        if handle.settled:
            return True
        done = threading.Event()

        def wake(_: Settles) -> None:
            done.set()

        handle.add_done_callback(wake)
        deadline = time.monotonic() + timeout_s
        try:
            while not done.wait(max(0.0, min(deadline - time.monotonic(), _LOOK_S))):
                if time.monotonic() >= deadline:
                    return handle.settled
                self._check_alive(handle)
        finally:
            handle.remove_done_callback(wake)  # a wait that is repeated must not pile them up
        return True

    def check_await(self, loop: asyncio.AbstractEventLoop) -> None:
        """Any real event loop will do: the worker turns the engine."""

    now_s = staticmethod(time.monotonic)

    def close(self) -> None:
        thread = self._thread
        if thread is None or self._closing:
            return
        self._closing = True
        self.kick()
        if thread is not threading.current_thread():
            thread.join()

    def _check_alive(self, handle: Settles) -> None:
        thread = self._thread
        if thread is not None and not thread.is_alive() and not handle.settled:
            raise ClosedError(
                "the engine's worker has ended and nothing can settle this any more; it was "
                "closed, or it failed: then its traceback is on stderr"
            )

    def _run(self, machine: Machine) -> None:
        self._settle_in()
        while self._turn_until_idle(machine):
            if not self._kicked and machine.arm():
                self._sleep(machine)

    def _settle_in(self) -> None:
        """Worker: go where it was told to, and give way to others. Linux does both by thread."""
        if self._cpu is not None:
            os.sched_setaffinity(0, {self._cpu})
        with contextlib.suppress(OSError):  # a sandbox may forbid it; it is a courtesy
            nice = os.getpriority(os.PRIO_PROCESS, 0) + self._nice
            os.setpriority(os.PRIO_PROCESS, 0, min(nice, _NICE_MAX))

    def _turn_until_idle(self, machine: Machine) -> bool:
        """Worker: turn while there is work, and a little longer; False = the driver was closed."""
        spin_until = 0.0
        while True:
            self._kicked = False
            while self._calls:
                self._calls.popleft()()
            try:
                work = machine.step()
                machine.deliver()
            except BaseException as error:
                machine.crash(error)
                raise
            if work or self._calls:
                spin_until = 0.0
                continue
            if self._closing:
                return False
            now = time.monotonic()
            spin_until = spin_until or now + self._spin_s
            if not machine.busy() or now >= spin_until:
                return True
            time.sleep(0)  # lets the user's own thread have the interpreter

    def _sleep(self, machine: Machine) -> None:
        """Block until a kick, a NIC's descriptor, or the next look at the watched words."""
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        for fd in machine.wakeup_fds():
            poller.register(fd, select.POLLIN)
        wait_s = left_s(self._sleep_until_s(machine))
        poller.poll(None if wait_s is None else wait_s * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _sleep_until_s(self, machine: Machine) -> float:
        """Until when to sleep at the most; infinite: until there is news."""
        if machine.watching() or machine.must_poll():
            return min(time.monotonic() + self._watch_s, self._due_s())
        return self._due_s()

    def _due_s(self) -> float:
        """When a turn is due although nothing happens; infinite: only when there is news."""
        due_s = None if self._timed is None else self._timed.due_s()
        return math.inf if due_s is None else due_s + 0.001  # not a little too early


def left_s(until_s: float) -> float | None:
    """Seconds until then, as a poll wants them."""
    return None if until_s == math.inf else max(0.0, until_s - time.monotonic())


class Interrupts:
    """While the main thread turns an engine, Ctrl-C waits until the step is over.

    A KeyboardInterrupt in the middle of a step would leave the engine in two minds about what is
    posted. Other handlers than Python's own are left alone.

    Args:
        bell: an eventfd that wakes whoever turns from its sleep.

    Attributes:
        came: Ctrl-C was pressed; raised at the end.
    """

    __slots__ = ("_bell", "_mine", "came")

    def __init__(self, bell: int) -> None:
        self.came = False
        self._bell = bell
        self._mine = False

    def __enter__(self) -> Interrupts:
        if thread_id() == Process.main and _getsignal(_SIGINT) is _INTERRUPT:
            self._mine = True
            _signal(_SIGINT, self._note)
        return self

    def _note(self, *_: object) -> None:
        self.came = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def __exit__(self, *_: object) -> None:
        if self._mine:
            _signal(_SIGINT, _INTERRUPT)
            if self.came:
                raise KeyboardInterrupt
