"""A driver whose callers step the engine themselves, beside its thread.

The thread, and the base of all drivers, are in threads.py; this module decides who steps when.
"""

from __future__ import annotations

import contextlib
import math
import select
import time
from collections.abc import Collection
from threading import Lock
from typing import Final, cast

from tep.backends.base import CallersTurn, Opened
from tep.base.checks import check_seconds
from tep.base.errors import ClosedError, UsageError
from tep.base.waiting import Interrupts, Process, escaped, system_s, thread_id
from tep.drivers.threads import _WORKERS, Driver, Machine, Pace, Settles, ThreadDriver, wake_on_time

__all__ = ["TurnDriver", "driver_for"]

_POLLS_S: Final = 100e-6
"""Time that a wait polls before it sleeps, if polling has paid lately, seconds.

Sleeping and being woken on another CPU costs 20 to 60 us (measured: half a round trip by eventfd
between idle cores of a virtual machine). Two peers that both sleep at once go on doing so, until
one polls for longer than the other takes to wake and answer. On busy cores polling takes time
from the peer and fails: then it is tried ever less often.
"""

_RESTS_MAX: Final = 64
_YIELD_TURNS: Final = 32  # polls after which other threads get the interpreter
_LOOK_S: Final = 0.2  # interval at which a sleeper looks again, in case a wake-up was missed


class TurnDriver(ThreadDriver):
    """A worker thread, and callers that step the engine themselves while nobody else does.

    Passing work to another thread and waking up at its end costs some 20 us each, several times
    the duration of a short write between two processes of one host. Here a submit steps once, and
    a wait() steps, and sleeps on the NICs, until its handle is settled. The worker steps while no
    caller waits, and it alone runs callbacks and calls, as in a ThreadDriver.

    Rule 1: only the thread that holds the lock `_turn` steps. Rule 2: it is released with the NICs
    armed and the worker listening, or with `_due` set and the worker woken. Rule 3: a kick sets its
    flag before it looks for the lock's holder; a holder looks for kicks after it has released the
    lock, and before it sleeps.

    A wait() polls for `spin_s` before it sleeps, seconds; 0 = not at all; 60 = spin, which takes a
    core during every wait; None = up to 100 us, while that pays. The rest is as of ThreadDriver.
    """

    def __init__(
        self,
        name: str = "tep",
        *,
        cpu: int | Collection[int] | None = None,
        spin_s: float | None = None,
        watch_s: float = 0.0005,
        call_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(name, cpu=cpu, watch_s=watch_s, call_timeout_s=call_timeout_s)
        self._polls_s = (
            _POLLS_S if spin_s is None else check_seconds("spin_s", spin_s, error=UsageError)
        )
        self._adapts = spin_s is None
        self._rests = self._rested = 0  # waits that sleep at once, since polling has not paid
        self._turn = Lock()
        self._turner = 0  # the thread that holds `_turn`, or 0
        self._due = True  # the worker is about to step: callers do not take `_turn`
        self._asleep = False  # a caller holds `_turn` and sleeps: wake it
        self._muted = False
        self._line: list[Lock] = []  # waits that found `_turn` taken
        self._owing = True  # the last step left callbacks for the worker to run
        self._failed: BaseException | None = None
        self._until_s = math.inf  # end of the worker's sleep, unless it is woken

    def start(self, machine: Machine) -> None:
        self._forks = Process.forks
        Interrupts.forget()
        # A caller that holds `_turn` sleeps on the first set, the worker without it on the second,
        # which is muted meanwhile.
        self._nics, self._listening = select.epoll(), select.epoll()
        for fd in machine.wakeup_fds():
            self._nics.register(fd, select.EPOLLIN)
        self._listening.register(self._nics.fileno(), select.EPOLLIN)
        super().start(machine)

    def kick(self) -> None:
        if self._turner == thread_id():
            self._kicked_here = True
            return
        self._kicked = True
        if self._due or self._forks != Process.forks:
            return
        if not (self._calls or self._closing):
            machine = self._machine_ref()
            if self._turner or machine is None:  # rule 3: the holder sees the kick
                if self._asleep:
                    self._ring()
                return
            with Interrupts(self._bell):
                if self._take_turn():
                    self._pace.hold()
                    self._put_down(machine, work=self._step(machine))
                elif self._asleep:
                    self._ring()
            return
        self._ring()

    def wait(self, handle: Settles, timeout_s: float) -> bool:
        if thread_id() in _WORKERS:  # refused on our worker; another one has calls to serve
            return super().wait(handle, timeout_s)
        if self._forks != Process.forks:
            raise ClosedError(
                "this engine belongs to the process that forked this one; open one in the child"
            )
        machine = self._machine_ref()
        deadline = time.monotonic() + timeout_s
        while not handle.finished:
            turned = False
            if machine is not None and not (self._closing or (self._due and self._needed())):
                with Interrupts(self._bell) as interrupts:
                    turned = self._take_turn()
                    if turned:
                        self._turn_until(machine, handle, deadline, interrupts)
            if time.monotonic() >= deadline or (escaped and thread_id() == Process.main):
                break
            if not turned:
                self._wait_in_line(handle, deadline)
        return handle.finished

    def _take_turn(self) -> bool:
        if not self._turn.acquire(False):
            return False
        self._turner = thread_id()
        self._due = False
        return True

    def _is_free(self) -> bool:
        """Return True if `_turn` can be taken. Lock.locked() lags behind."""
        with Interrupts(self._bell):
            free = not self._due and self._turn.acquire(blocking=False)
            if free:
                self._turn.release()
                if self._kicked:  # by a thread that found it taken
                    self._ring()
        return free

    def _put_down(self, machine: Machine, *, work: bool) -> bool:
        """Release `_turn`; False = the worker has something to do, and is woken."""
        pending = self._kicked or self._owing or self._wanted()
        # A kick from within the step is a NIC's: its completions were polled since, or arm() finds
        # them. It may also announce room in a queue, which matters only if there are rows left.
        if not pending and (work or self._kicked_here):
            pending = machine.busy()
        quiet = not pending and machine.arm()
        if self._muted:
            self._muted = False
            self._listening.modify(self._nics.fileno(), select.EPOLLIN)
        overslept = self._due_s(machine) < self._until_s
        if quiet and self._pace.held and not machine.engaged():
            self._pace.let_go()
        self._due = not quiet
        self._turner = 0
        self._turn.release()
        if not quiet or self._kicked or overslept:
            self._ring()
        if quiet and self._line:
            for waiting in self._line[:1]:  # it may have left by now
                _release(waiting)
        return quiet

    def _needed(self) -> bool:
        """Return True if the worker has more to do than to step, which a waiter does as well."""
        return self._owing or self._wanted()

    def _wanted(self) -> bool:
        """Return True if only the worker can go on."""
        return bool(self._calls) or self._closing or self._failed is not None

    def _step(self, machine: Machine) -> bool:
        """Step once, on a caller's thread; run no user's function."""
        self._kicked = self._kicked_here = False
        try:
            work = machine.step()
            self._owing = machine.owing()
            if work and not self._owing:
                machine.deliver()
        except BaseException as error:  # noqa: BLE001  # raised again by the worker, at once
            machine.crash(error)
            self._failed = error
            return False
        return work

    def _turn_until(
        self, machine: Machine, handle: Settles, deadline: float, interrupts: Interrupts
    ) -> None:
        work = True
        try:
            work = self._turn_while(machine, handle, deadline, interrupts)
        finally:
            self._asleep = False
            self._put_down(machine, work=work)

    def _turn_while(
        self, machine: Machine, handle: Settles, deadline: float, interrupts: Interrupts
    ) -> bool:
        """Step for _turn_until(); return whether the last step had work."""
        polls_s, poll_until, turns, work = self._polls_now(), 0.0, 0, False
        while not interrupts.came:
            work = self._step(machine)
            if handle.finished or self._owing or self._wanted():
                if poll_until:
                    self._rests = 0
                break
            now = time.monotonic()
            if now >= deadline:
                break
            if work or self._kicked_here:
                poll_until = 0.0
                self._pace.hold()
                continue
            poll_until = poll_until or now + polls_s
            if now < poll_until:
                turns += 1
                if turns % _YIELD_TURNS == 0:
                    # Give other threads the interpreter. sched_yield() would give the CPU to
                    # any other process for milliseconds.
                    self._nics.poll(0)
                continue
            self._asleep = True
            self._pace.hold()
            wake_on_time()
            kicked = self._kicked or self._kicked_here
            if not (kicked or self._wanted() or interrupts.came):
                self._mute()
                if machine.arm():
                    if polls_s:
                        self._rests = min(2 * self._rests + 1, _RESTS_MAX)
                    look_s = self._watch_s if machine.must_poll() else _LOOK_S
                    until_s = min(deadline, now + look_s, self._due_s(machine))
                    self._nics.poll(system_s(until_s - now))
            self._asleep = False
            poll_until = polls_s = 0.0  # no polling after a sleep
        return work

    def _polls_now(self) -> float:
        if self._adapts and self._rests:
            self._rested += 1
            if self._rested <= self._rests:
                return 0.0
            self._rested = 0
        return self._polls_s

    def _mute(self) -> None:
        if not self._muted:
            self._muted = True
            self._listening.modify(self._nics.fileno(), 0)

    def _wait_in_line(self, handle: Settles, deadline: float) -> None:
        """Block until the handle is settled, `_turn` is free, or it is time for another look."""
        gate, pace = Lock(), Pace(self._switch_s)
        gate.acquire()  # noqa: SIM115, RUF100  # opened by another thread

        def wake(_: Settles) -> None:
            _release(gate)

        try:
            pace.hold()
            handle.add_done_callback(wake)
            self._line.append(gate)
            if not self._is_free():
                gate.acquire(timeout=system_s(min(deadline - time.monotonic(), _LOOK_S)))
                self._check_alive(lambda: handle.finished)
        finally:
            pace.let_go()
            if gate in self._line:
                self._line.remove(gate)
            handle.remove_done_callback(wake)

    def _run(self) -> None:
        self._nics.register(self._bell, select.EPOLLIN | select.EPOLLET)  # never read
        while (machine := self._machine_ref()) is not None:
            self._turn.acquire()
            self._turner = thread_id()
            self._due = self._kicked_here = False
            self._nics.poll(0)  # resets the wake-up
            if self._failed is not None:
                raise self._failed
            if not self._turn_until_idle(machine):
                return
            self._owing = False
            self._until_s = self._sleep_until_s(machine)
            quiet = self._put_down(machine, work=False)
            del machine
            if quiet:
                self._listening.poll(system_s(self._until_s - time.monotonic()))
        self._await_drop()


def _release(gate: Lock) -> None:
    """Open a gate; it may be open already."""
    with contextlib.suppress(RuntimeError):
        gate.release()


def driver_for(opened: Opened) -> Driver:
    """Return the driver for an engine over these NICs, unless its user has chosen one."""
    match opened.driver:
        case None:
            return ThreadDriver(opened.name, cpu=opened.cpus or None)
        case CallersTurn():
            return TurnDriver(opened.name, cpu=opened.cpus or None)
        case own:
            return cast("Driver", own)
