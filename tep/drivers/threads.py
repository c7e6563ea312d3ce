"""The drivers: they own an engine's time and step it. All threads are here, but for `sight`.

The engine has one verb, `step()`. A driver calls it, then `deliver()`, which runs the users'
callbacks outside the step. Here are the thread driver (hardware, tcp, local) and the inline driver
(benchmarks, tests); turning.py lets callers step the engine beside the thread, and the simulated
driver is in `tep.sim.driver`.

A thread that needs the interpreter while another one computes in Python sleeps for
`sys.getswitchinterval()`, 5 ms by default, and for the kernel's timer slack of 50 us before it may
ask for it. Each transfer needs it several times. Both are lowered here by `Pace`, and only here.

Rule: each change looks again afterwards at who holds a pace, so whichever thread comes last leaves
the right interval. There is no lock, since a signal handler may come between any two lines.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

from tep.base.checks import check_int, check_seconds, unpicklable
from tep.base.errors import ClosedError, UsageError, WaitTimeout
from tep.base.waiting import Interrupts, Process, escaped, raise_escaped, system_s, thread_id
from tep.host.sight import hide, show

if TYPE_CHECKING:
    import asyncio

__all__ = ["Driver", "InlineDriver", "Machine", "Pace", "Settles", "ThreadDriver", "wake_on_time"]

_SLACK_NS: Final = 1000
_HOLDERS: Final[dict[int, float]] = {}
"""The interval that each holder wants, seconds, by its id(): nothing is kept alive."""

_OURS: Final[set[float]] = set()  # every interval that may have been set here
_USUAL: Final = [sys.getswitchinterval()]  # the program's own
_get, _set = sys.getswitchinterval, sys.setswitchinterval
_here: Final = threading.local()


class Pace:
    """One reason to have a short switch interval: an engine that works, or a wait.

    While it is held the interval is `interval_s`, seconds; a shorter one of the program is left
    alone. Infinite: hold() changes nothing.
    """

    __slots__ = ("_interval_s", "held")

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.held = False
        if interval_s < math.inf:
            _OURS.add(1e-6 * int(1e6 * interval_s))  # the interpreter cuts it to microseconds

    def hold(self) -> None:
        """Lower the interval until let_go(). Idempotent."""
        if not self.held and self._interval_s < math.inf:
            self.held = True
            _HOLDERS[id(self)] = self._interval_s
            now = _get()
            if now > self._interval_s:
                if now not in _OURS:
                    _USUAL[0] = now
                _set(self._interval_s)
                if not _HOLDERS:
                    _put_back()

    def let_go(self) -> None:
        """Put the interval back, unless others hold it, or the program has set another one."""
        _HOLDERS.pop(id(self), None)
        if not _HOLDERS:
            _put_back()
        self.held = False  # last: where a signal handler raises before, __del__ does it again

    def __del__(self) -> None:
        if self.held:
            self.let_go()


def _put_back() -> None:
    if _get() in _OURS:
        _set(_USUAL[0])
        if wanted := tuple(_HOLDERS.values()):  # somebody holds it since
            _set(min(_USUAL[0], *wanted))


def wake_on_time() -> None:
    """Let this thread's short sleeps end when they should. Linux has the timer slack by thread."""
    if not getattr(_here, "done", False):
        _here.done = True
        with contextlib.suppress(OSError):  # another system, or no /proc: it is a courtesy
            Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text(str(_SLACK_NS))


def _forked() -> None:
    """In a forked child nobody holds a pace: the parent's threads are not here."""
    _HOLDERS.clear()
    _put_back()


os.register_at_fork(after_in_child=_forked)


T = TypeVar("T")

_LOOK_S: Final = 0.2
"""Interval at which a blocked caller checks that the worker still lives, seconds."""

_NICE: Final = 5
_NICE_MAX: Final = 19
"""The worker gives way to other threads when CPUs are scarce. Beside a busy engine on two CPUs, one
call in a hundred of the user's own thread is delayed by 1.2 ms or more with 0, by 0.4 ms with 5.
"""

_DROP_LOOKS: Final = 10
_EXIT_S: Final = 1.0  # time that the end of the process waits for each worker
_write: Final = os.eventfd_write

_WORKERS: Final[dict[int, ThreadDriver]] = {}
"""The worker threads of this process, by thread, with the driver of each."""


class Settles(Protocol):
    """A handle that can be waited for: a transfer or an expectation."""

    @property
    def finished(self) -> bool: ...

    def add_done_callback(self, callback: Callable[..., object], /) -> None: ...

    def remove_done_callback(self, callback: Callable[..., object], /) -> None: ...


class Machine(Protocol):
    """The interface of the engine that a driver steps."""

    def step(self) -> bool:
        """Take commands, post, poll, count. True = there was work, step again soon."""

    def deliver(self) -> None:
        """Run the callbacks of handles that settled in the steps before. Never raises."""

    def busy(self) -> bool:
        """Return True if rows or messages are in flight, so that spinning pays."""

    def engaged(self) -> bool:
        """Return True if a handle is open or busy() holds: interpreter needed soon."""

    def watching(self) -> bool:
        """Return True if watched words must be looked at now and then."""

    def wakeup_fds(self) -> list[int]:
        """Return the descriptors to sleep on; empty if no NIC has one."""

    def owing(self) -> bool:
        """Return True if deliver() would run a user's function now."""

    def arm(self) -> bool:
        """Ask each NIC for one wake-up; False: there is work already."""

    def crash(self, error: BaseException) -> None:
        """Fail all open handles after a step raised (a bug in tep): no step will follow."""

    def must_poll(self) -> bool:
        """Return True if some NIC does not signal completions, so that it must be polled."""

    def due_s(self) -> float | None:
        """Return when a step is due without an event, on the driver's clock; None: never."""


class Driver(Protocol):
    """The owner of one engine's time.

    Attributes:
        lock: guards a handle's callbacks against the thread that settles it; any context manager
            if one thread does all.
    """

    lock: AbstractContextManager[object]

    def start(self, machine: Machine) -> None:
        """Begin to step a machine."""

    def kick(self) -> None:
        """Wake the driver: step soon, since work was queued or a NIC has completions.

        Callable from any thread, cheap when repeated.
        """

    def nudge(self) -> None:
        """Note queued work that needs no step before the next completion of a NIC."""

    def call(self, function: Callable[[], T]) -> T:
        """Run a function between two steps, on the thread that owns the NICs; return its result."""

    def wait(self, handle: Settles, timeout_s: float) -> bool:
        """Step, or block, until the handle is settled; False after `timeout_s` of this clock.

        Raises StallError if it is certain that nothing can settle it.
        """

    def check_await(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raise UsageError if awaiting under this event loop could never end."""

    def now_s(self) -> float:
        """Return the time of this driver's clock, seconds from an arbitrary start."""

    def close(self) -> None:
        """Stop stepping; afterwards call() runs on its caller's thread. Idempotent."""


class InlineDriver:
    """A driver without a thread: every wait() and turn() steps all machines of one ring.

    Args:
        ring: machines that are stepped together, e.g. both ends of a loopback pair; share one
            list between drivers.
    """

    def __init__(self, ring: list[Machine] | None = None) -> None:
        self.ring: list[Machine] = [] if ring is None else ring
        self._machine: Machine | None = None
        self._turning = False
        self._interrupts = Interrupts()
        self.lock: AbstractContextManager[object] = threading.Lock()  # cheaper than a null context

    __reduce__ = unpicklable("it steps an engine of this process; make another there")

    def __repr__(self) -> str:
        return f"InlineDriver(the caller steps {len(self.ring)} engines)"

    def start(self, machine: Machine) -> None:
        self._machine = machine
        self.ring.append(machine)
        Interrupts.forget()

    def kick(self) -> None:
        """Do nothing: the caller steps the engine."""

    def nudge(self) -> None:
        """Do nothing, like kick()."""

    def turn(self) -> bool:
        """Step every machine of the ring once; True if any had work."""
        if self._turning:
            self._refuse()
        with self._interrupts:
            self._turning = True
            try:
                work = self._turn_all()
            finally:
                self._turning = False
        if escaped:
            raise_escaped()
        return work

    def _turn_all(self) -> bool:
        work = False
        for machine in tuple(self.ring):
            try:
                work |= machine.step()
                machine.deliver()
            except BaseException as error:
                machine.crash(error)  # fails its handles; the caller gets the error too
                raise
        return work

    def _refuse(self) -> None:
        raise UsageError(
            "turn() or wait() inside a callback of the same engine would step it within a "
            "step; use callbacks"
        )

    def call(self, function: Callable[[], T]) -> T:
        with Interrupts():
            return function()

    def wait(self, handle: Settles, timeout_s: float) -> bool:
        now_s = time.monotonic
        deadline = now_s() + timeout_s
        if self._turning:
            self._refuse()
        with Interrupts() as interrupts:
            self._turning = True
            try:
                while not (handle.finished or interrupts.came or escaped):
                    self._turn_all()
                    if now_s() >= deadline:
                        break
            finally:
                self._turning = False
        if interrupts.came and not handle.finished and not escaped and now_s() < deadline:
            return self.wait(handle, deadline - now_s())  # the handler did not raise
        return handle.finished

    def check_await(self, loop: asyncio.AbstractEventLoop) -> None:  # noqa: ARG002  # protocol
        raise UsageError(
            "an engine with an inline driver cannot be awaited: nothing would step it; "
            "use wait() or turn()"
        )

    now_s = staticmethod(time.monotonic)

    def close(self) -> None:
        if self._machine in self.ring:
            self.ring.remove(self._machine)


class _Call:
    """A function that a worker is asked to run, with its progress and outcome."""

    __slots__ = ("_function", "_tell", "begun", "done", "error", "result")

    def __init__(self, function: Callable[[], object], tell: Callable[[], object]) -> None:
        self._function = function
        self._tell = tell
        self.begun = self.done = False
        self.result: object = None
        self.error: BaseException | None = None

    @property
    def name(self) -> str:
        """The name of the verb that called."""
        name = getattr(self._function, "__qualname__", repr(self._function))
        return ".".join(name.split(".<locals>")[0].split(".")[-2:])

    def run(self) -> None:
        """Run the function, on the worker; an exception is kept for the caller."""
        self.begun = True
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001  # handed to the caller, who asked for it
            self.error = error
        finally:
            self.done = True
            self._tell()


def _gate() -> threading.Event:
    """Return the event to block on. A worker uses its inbox, to serve calls while it waits."""
    mine = _WORKERS.get(thread_id())
    return threading.Event() if mine is None else mine._inbox


class ThreadDriver:
    """One worker thread an engine: spins while rows are outstanding, else sleeps until woken.

    Args:
        name: name of the thread, for debuggers.
        cpu: pin the worker to this CPU, or to any of these; None = leave it where it is.
        spin_s: time to go on polling after the last work before sleeping, seconds.
        watch_s: interval at which watched words are read while nothing else happens, seconds.
        call_timeout_s: longest time a verb waits for the worker, e.g. while a callback blocks it.

    Raises:
        UsageError: this process may not run on that CPU.
    """

    def __init__(
        self,
        name: str = "tep",
        *,
        cpu: int | Collection[int] | None = None,
        spin_s: float = 0.0005,
        watch_s: float = 0.0005,
        call_timeout_s: float = 60.0,
    ) -> None:
        allowed = os.sched_getaffinity(0)
        several: Collection[object] = () if cpu is None else (cpu,)
        if isinstance(cpu, Collection) and getattr(cpu, "shape", None) != ():
            several = cpu
        cpus = frozenset(check_int("cpu", one, error=UsageError) for one in several)
        if (cpu is not None and not cpus) or not cpus <= allowed:
            raise UsageError(f"cpu={cpu} is not among the CPUs of this process: {sorted(allowed)}")
        self._name = name
        self._cpus = cpus
        self._spin_s = check_seconds("spin_s", spin_s, never=True, error=UsageError)
        self._watch_s = check_seconds("watch_s", watch_s, never=True, error=UsageError)
        self._kicked = self._kicked_here = False  # here: by a NIC, within a TurnDriver's step
        self._calls: deque[_Call] = deque()
        self._inbox = threading.Event()  # a call came or ended, for a worker that waits
        self._call_timeout_s = check_seconds(
            "call_timeout_s", call_timeout_s, never=True, error=UsageError
        )
        self._thread: threading.Thread | None = None
        self._closing = self._left = False  # _left: the process ends
        self._bell = -1
        self._pace = Pace(math.inf)
        self.lock: AbstractContextManager[object] = threading.Lock()

    __reduce__ = unpicklable("it is a thread of this process; make another there")

    def __repr__(self) -> str:
        worker, cpus = self._thread, ", ".join(map(str, sorted(self._cpus))) or "any"
        state = "not started" if worker is None else "ended"
        if worker is not None and worker.is_alive():
            state = f"runs as thread {worker.native_id}"
        return f"ThreadDriver({self._name!r}, {state}, CPUs {cpus}, spins {self._spin_s:g} s)"

    def start(self, machine: Machine) -> None:
        assert self._thread is None, "a driver steps one machine"
        # Weak, here and in the worker while it sleeps: an engine without references is collected.
        # Its NICs are referenced: the end of a collected machine still needs them.
        self._machine_ref = weakref.ref(machine)
        self._held = getattr(machine, "domains", ())
        self._switch_s = getattr(machine, "switch_interval_s", math.inf)
        self._pace = Pace(self._switch_s)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed with this object and not in close(): another thread may be about to ring, and by
        # then the number could belong to somebody else's file.
        weakref.finalize(self, os.close, self._bell).atexit = False  # its worker may read it yet
        self._thread = threading.Thread(target=self._work, name=f"{self._name}-worker", daemon=True)
        # Finalisers run in reverse order: the worker ends before the engine that it steps.
        weakref.finalize(self, _leave, weakref.ref(self))
        self._thread.start()
        show(machine)

    def kick(self) -> None:
        # The flag saves the system call while the worker is awake: it clears the flag before its
        # last look. No signal handler runs between the flag and the system call.
        if not self._kicked:
            self._pace.hold()
            try:
                self._kicked = True
                _write(self._bell, 1)
            except (OSError, ValueError):  # rung 2**64 times, or not started yet
                pass

    def nudge(self) -> None:
        """Step nothing: the polling thread has the NICs armed, or the worker is about to step."""
        self._pace.hold()

    def _ring(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            _write(self._bell, 1)

    def call(self, function: Callable[[], T]) -> T:
        thread = self._thread
        if thread is None or thread.ident == thread_id() or not thread.is_alive():
            with Interrupts(self._bell):
                return function()
        gate = _gate()
        call = _Call(function, gate.set)
        try:
            self._calls.append(call)
            self.kick()
            self._inbox.set()
            deadline = time.monotonic() + self._call_timeout_s
            if not self._block(gate, lambda: call.done, deadline):
                raise WaitTimeout(self._lateness(call))
        except BaseException:
            with contextlib.suppress(ValueError):  # else it has begun
                self._calls.remove(call)
            raise
        if call.error is not None:
            raise call.error
        return cast("T", call.result)

    def _block(self, gate: threading.Event, ended: Callable[[], bool], deadline: float) -> bool:
        """Block until `ended()`; False: time is up, or the main thread has to raise.

        A worker that waits for another one goes on serving calls, so that engines whose callbacks
        call each other, even in a ring, do not deadlock.

        Raises:
            ClosedError: the worker has ended.
        """
        mine = _WORKERS.get(thread_id())
        while True:
            if mine is not None:
                gate.clear()
                mine._serve()
            if ended():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if gate.wait(system_s(min(left, _LOOK_S))):
                continue
            if escaped and thread_id() == Process.main:
                return ended()
            self._check_alive(ended)

    def _lateness(self, call: _Call) -> str:
        thread = self._thread
        assert thread is not None
        frame = sys._current_frames().get(thread.ident or 0)
        where = "nowhere"
        if frame is not None:
            code = frame.f_code
            where = f"in {code.co_name} ({code.co_filename}:{frame.f_lineno})"
        state = "has begun and goes on" if call.begun else "was not begun and is withdrawn"
        return (
            f"{call.name} waited {self._call_timeout_s:g} s for the worker {thread.name!r}, which "
            f"is {where}; it {state}. A callback must not block; ThreadDriver(call_timeout_s=...) "
            "sets the limit"
        )

    def _serve(self) -> None:
        while self._calls:
            self._kicked = True  # so that another step follows
            self._calls.popleft().run()

    def wait(self, handle: Settles, timeout_s: float) -> bool:
        if threading.current_thread() is self._thread:
            raise UsageError(
                "wait() inside a callback would wait for the thread it runs on; "
                "use callbacks or await"
            )
        if handle.finished:
            return True
        gate, pace = _gate(), Pace(self._switch_s)
        settled = False
        wake_on_time()

        def wake(_: Settles) -> None:
            nonlocal settled
            settled = True
            gate.set()

        try:
            pace.hold()
            handle.add_done_callback(wake)
            return (
                self._block(gate, lambda: settled or handle.finished, time.monotonic() + timeout_s)
                or handle.finished
            )
        finally:
            pace.let_go()
            handle.remove_done_callback(wake)  # else repeated waits would pile them up

    def check_await(self, loop: asyncio.AbstractEventLoop) -> None:
        """Accept any real event loop: the worker steps the engine."""

    now_s = staticmethod(time.monotonic)

    def close(self) -> None:
        thread = self._thread
        if thread is None:
            return
        self._closing = True
        self._ring()
        if thread_id() not in _WORKERS:  # else one may wait for the other
            thread.join(self._call_timeout_s)
            if thread.is_alive():
                raise WaitTimeout(self._lateness(_Call(self.close, self._inbox.set)))
        hide(self._machine_ref())

    def drop(self, end: Callable[[], object]) -> None:
        """Let the worker end a machine without references; do not wait for it."""
        if self._thread is None:
            return
        self._calls.append(_Call(end, self._inbox.set))
        self._closing = True
        self._ring()

    def _check_alive(self, ended: Callable[[], bool]) -> None:
        thread = self._thread
        if thread is not None and not thread.is_alive() and not ended():
            if self._left and thread_id() != Process.main:
                return  # a daemon thread that the interpreter is about to end
            raise ClosedError(
                "the engine's worker has ended and nothing can end this any more; the engine was "
                "closed, or it failed: then its traceback is on stderr"
            )

    def _work(self) -> None:
        _WORKERS[thread_id()] = self
        try:
            self._settle_in()
            self._run()
            self._serve()
        except BaseException as error:
            machine = self._machine_ref()
            if machine is not None:
                machine.crash(error)
            raise
        finally:
            self._pace.let_go()
            del _WORKERS[thread_id()]

    def _run(self) -> None:
        """Step and sleep until closed, on the worker. A sleep holds no reference to the machine."""
        while (machine := self._machine_ref()) is not None:
            if not self._turn_until_idle(machine):
                return
            if not self._kicked and machine.arm():
                poller = select.poll()
                poller.register(self._bell, select.POLLIN)
                for fd in machine.wakeup_fds():
                    poller.register(fd, select.POLLIN)
                left_s = self._sleep_until_s(machine) - time.monotonic()
                if self._pace.held and not machine.engaged():
                    self._pace.let_go()
                del machine
                poller.poll(system_s(left_s) * 1000)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
        self._await_drop()

    def _await_drop(self) -> None:
        """Wait, on the worker, for the end of a machine that is being collected."""
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        for _ in range(_DROP_LOOKS):
            if self._closing:
                break
            poller.poll(_LOOK_S * 1000)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)

    def _settle_in(self) -> None:
        """Set the worker's CPUs, niceness and timer slack. Linux has them by thread."""
        wake_on_time()
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)
        with contextlib.suppress(OSError):  # a sandbox may forbid it; it is a courtesy
            nice = os.getpriority(os.PRIO_PROCESS, 0) + _NICE
            os.setpriority(os.PRIO_PROCESS, 0, min(nice, _NICE_MAX))

    def _turn_until_idle(self, machine: Machine) -> bool:
        """Step while there is work, and a little longer; False = the driver was closed."""
        spin_until = 0.0
        while True:
            self._kicked = self._kicked_here = False
            while self._calls:
                self._calls.popleft().run()
            work = machine.step()
            machine.deliver()
            if work or self._calls or self._kicked or self._kicked_here:
                spin_until = 0.0
                continue
            if self._closing:
                return False
            now = time.monotonic()
            spin_until = spin_until or now + self._spin_s
            if not machine.busy() or now >= spin_until:
                return True
            time.sleep(0)  # lets the user's own thread have the interpreter

    def _sleep_until_s(self, machine: Machine) -> float:
        """Return the latest end of a sleep; infinite: sleep until an event."""
        if machine.watching() or machine.must_poll():
            return min(time.monotonic() + self._watch_s, self._due_s(machine))
        return self._due_s(machine)

    def _due_s(self, machine: Machine) -> float:
        due_s = machine.due_s()
        return math.inf if due_s is None else due_s + 0.001  # not a little too early


def _leave(ref: weakref.ref[ThreadDriver]) -> None:
    """Stop every worker at the end of the process, before the objects that it uses are gone.

    All at the first call: a worker that still ran would tell that the next engine's NICs are lost.
    """
    mine = ref()
    if mine is None or thread_id() in _WORKERS:
        return
    drivers = {mine, *_WORKERS.values()}
    for driver in drivers:
        driver._closing = driver._left = True
        driver._ring()
    for driver in drivers:
        if driver._thread is not None:
            driver._thread.join(_EXIT_S)


os.register_at_fork(after_in_child=_WORKERS.clear)
