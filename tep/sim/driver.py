"""The simulated driver: turns one engine on the simulated clock. It knows no fabric, only a node.

`kick()` books one step after the node's poll delay, and not before the node's worker is free again;
a step runs `machine.step()` and `machine.deliver()`, and books the next one if there was work.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, cast

from tep.backends.base import Domain
from tep.backends.common import ReceivePool
from tep.base.errors import StallError, UsageError
from tep.base.units import PS_PER_NS, PS_PER_S, PS_PER_US
from tep.base.waiting import Interrupts, escaped
from tep.drivers.threads import Machine, Settles
from tep.sim.clock import FOREVER_PS, FabricEnv, Turned, in_one_process
from tep.sim.loop import SimLoop

__all__ = ["WATCH_PS", "SimDriver", "SimNic", "SimNode", "nobody"]

T = TypeVar("T")

_LONG_S: Final = 1e9
"""Deadlines later than this are not booked; seconds."""

_MILLION: Final = 1_000_000

WATCH_PS: Final = 500 * PS_PER_NS
"""The interval between reads of watched words while nothing else steps the engine; a guess, as a
poll on an idle core takes well under a microsecond."""


class SimNode:
    """One simulated host with one engine; each fabric derives its own.

    Attributes:
        epoch: this incarnation's number.
        busy_until_ps: when the engine's worker has done the work that it is charged with.
        on_drift: called with the new speed of the engine's clock, in millionths of the
            simulation's, and with a jump in ps.
    """

    domains: Sequence[Domain]

    def __init__(self, name: str, epoch: int) -> None:
        self.name = name
        self.epoch = epoch
        self.busy_until_ps = 0
        self.on_drift: Callable[[int, int], object] = _no_drift

    __reduce__ = in_one_process

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, epoch {self.epoch}, {len(self.domains)} NICs)"

    def step_delay_ps(self) -> int:
        """The delay from a kick to the step; 0 or more."""
        raise NotImplementedError


class SimNic:
    """One simulated NIC: what those of all fabrics have in common.

    An address ends in name/nic#epoch.

    Attributes:
        pool: the buffers that messages come to.
    """

    def __init__(self) -> None:
        self.pool = ReceivePool()
        self.waker: Callable[[], object] = nobody

    def recv_view(self, slot: int) -> memoryview:
        return self.pool.view(slot)

    def recv_source(self, slot: int) -> bytes:
        return self.pool.sender(slot)

    def engine_of(self, address: bytes) -> bytes:
        """All of the address but the NIC's number."""
        name, _, rest = address.rpartition(b"/")
        return name + b"#" + rest.rpartition(b"#")[2]

    def forget(self, peer: int) -> None:
        """Nothing is kept of a peer that could be given back."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.waker = waker

    def wakeup_fd(self) -> int | None:
        return None


def nobody() -> None:
    """Wake nobody: there is no owner yet, or none any more."""


def _no_drift(_speed: int, _ahead_ps: int) -> None:
    """Let no clock drift: there is no driver yet."""


class _Machine(Machine, Protocol):
    """An engine, as the simulation turns it."""

    def stall_report(self) -> str:
        """Report what the engine waits for; "": nothing."""


@dataclass(frozen=True, slots=True)
class _Clock:
    """A clock that read `reads_ps` at time `at_ps`, and runs at `speed` millionths since."""

    at_ps: int
    reads_ps: int
    speed: int

    def read(self, now_ps: int) -> int:
        return self.reads_ps + (now_ps - self.at_ps) * self.speed // _MILLION

    def when(self, reads_ps: int) -> int:
        """Compute the first time at which it reads so much."""
        return self.at_ps - (self.reads_ps - reads_ps) * _MILLION // self.speed


class SimDriver:
    """Drives one engine of one node, on the clock that all nodes of a fabric share."""

    def __init__(self, env: FabricEnv, node: SimNode) -> None:
        self.env = env
        self.node = node
        self.lock: AbstractContextManager[object] = contextlib.nullcontext()
        self._machine: _Machine | None = None
        self._booked = False
        self._watching = False
        self._due_ps = FOREVER_PS
        self._clock: _Clock | None = None  # the simulation's

    __reduce__ = in_one_process

    def __repr__(self) -> str:
        return f"SimDriver(node {self.node.name}, {self.env!r})"

    def start(self, machine: Machine) -> None:
        assert self._machine is None, "a driver turns one machine"
        self._machine = engine = cast("_Machine", machine)
        Interrupts.forget()
        self.node.on_drift = self.drift
        self.env.reporters.append(engine.stall_report)

    def kick(self) -> None:
        if self._booked or self._machine is None:
            return
        self._booked = True
        try:
            self.env.call_at(self._next_ps(), self._run)
        except BaseException:  # a signal handler's: a step too many does no harm
            self._booked = False
            raise

    def nudge(self) -> None:
        """Do as kick(): a step takes the queued commands, and simulated time passes with it."""
        self.kick()

    def call(self, function: Callable[[], T]) -> T:
        with Interrupts():
            try:
                return function()
            except BaseException:  # it may have done something before that wants a step
                self.kick()
                raise

    def wait(self, handle: Settles, timeout_s: float) -> bool:
        """Run the simulation until the handle is settled; False after timeout_s simulated seconds.

        Raises:
            StallError: no event is left, so nothing can settle it.
            UsageError: called while the simulation runs; use await there.
        """
        env = self.env
        if handle.finished:
            return True
        deadline_ps = FOREVER_PS
        if timeout_s < _LONG_S:
            deadline_ps = env.now + round(max(0.0, timeout_s) * PS_PER_S)
        if self._machine is not None and self._machine.watching():
            self.kick()  # a word may have been changed since the last look
        while True:
            with Interrupts() as interrupts:
                turned = env.run_until(
                    lambda: handle.finished or interrupts.came or bool(escaped), deadline_ps
                )
            if not interrupts.came or handle.finished or escaped:
                break  # else a signal handler ran and did not raise
        if turned is Turned.EMPTY:
            raise StallError(
                f"nothing can happen any more at {env.now / PS_PER_US:.3f} us of simulated time, "
                f"but {self.node.name} waits.\n{env.stall_report()}"
            )
        return handle.finished

    def check_await(self, loop: asyncio.AbstractEventLoop) -> None:
        if isinstance(loop, SimLoop) and loop.env is self.env:
            return
        where = "another simulation" if isinstance(loop, SimLoop) else "an event loop in real time"
        raise UsageError(
            f"{self.node.name} lives in simulated time and cannot be awaited under {where}: "
            "use cluster.run(main()), or tep.sim.run(main()) with the Cluster made inside main, "
            "or the blocking wait()"
        )

    def now_s(self) -> float:
        clock, now_ps = self._clock, self.env.now
        return (now_ps if clock is None else clock.read(now_ps)) / PS_PER_S

    def drift(self, speed: int, ahead_ps: int) -> None:
        """Let the engine's clock jump ahead, and run at another speed from now on."""
        now_ps, clock = self.env.now, self._clock
        reads_ps = now_ps if clock is None else clock.read(now_ps)
        self._clock = _Clock(now_ps, reads_ps + ahead_ps, speed)
        self._due_ps = FOREVER_PS
        if self._machine is not None:
            self._set_alarm(self._machine.due_s())

    def close(self) -> None:
        machine, self._machine = self._machine, None
        if machine is not None:
            self.env.reporters.remove(machine.stall_report)

    def _run(self, _: object) -> None:
        self._booked = False
        machine = self._machine
        if machine is None:
            return
        work = machine.step()
        machine.deliver()
        if self._machine is None:  # closed by a callback
            return
        if work:
            self.kick()
        else:
            self._set_alarm(machine.due_s())
        if not self._watching and not self._booked and machine.watching():
            self._watching = True
            self.env.call_daemon(self.env.now + WATCH_PS, self._look)

    def _next_ps(self) -> int:
        """The time of a step that is asked for now."""
        node = self.node
        return max(self.env.now + node.step_delay_ps(), node.busy_until_ps)

    def _set_alarm(self, due_s: float | None) -> None:
        """Have the machine turned at a time, unless that is booked already."""
        if due_s is not None and due_s < _LONG_S:
            due_ps = math.ceil(due_s * PS_PER_S) + 1  # so that the time has come then
            if self._clock is not None:
                due_ps = self._clock.when(due_ps)
            if due_ps < self._due_ps:
                self._due_ps = due_ps
                self.env.call_at(max(due_ps, self.env.now + 1), self._ring, due_ps)

    def _ring(self, due_ps: int) -> None:
        if due_ps == self._due_ps:
            self._due_ps = FOREVER_PS
        if self._machine is None or self._booked:
            return
        due_s = self._machine.due_s()  # the reason for the alarm may be gone
        if due_s is not None and due_s <= self.now_s():
            self.kick()
        else:
            self._set_alarm(due_s)

    def _look(self, _: object) -> None:
        self._watching = False
        if not self._booked:
            self._run(None)
