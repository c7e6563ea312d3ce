"""Decides when a node's worker is woken, using few events without changing results.

Also the protocols by which fabric, node and NIC of the timing fabric know each other. A spinning
worker sees every immediate at once, but an event for each would cost more than the whole model. So
there are two kinds of wake-ups. An urgent one comes at its exact time: at the end of a batch, each
row of a scatter, a message, a failure, room after a refusal. All other entries are gathered: the
pause between two looks grows with the burst, so that a burst costs a logarithm of wake-ups. A look
takes in the entries of all NICs of the node, as one step of the worker would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from tep.backends.base import DomainCaps
from tep.backends.columns import HostRegion
from tep.base.units import PS_PER_MS, PS_PER_US
from tep.memory.source import Memory
from tep.sim.clock import FabricEnv
from tep.sim.ledger import Agenda, Batches, Ledger
from tep.sim.machines import Machine, Pairs
from tep.sim.profile import Profile
from tep.sim.queues import NEVER_PS, Ints, SendQueue
from tep.sim.row_log import RowLog

__all__ = ["Entry", "Fabric", "Host", "Nic", "Region", "Wakes"]

Entry = tuple[int, int, int, int, int, int, int] | npt.NDArray[np.void]
"""One completion in the order of COMPLETION's fields, or an array of them."""


class Region:
    """Registered memory.

    Attributes:
        ptr: address of the first byte.
        nbytes: length.
        writable: whether peers may write here.
        host: the bytes; None where the fabric moves none, so that the memory need not exist.
    """

    __slots__ = ("host", "memory", "nbytes", "ptr", "writable")

    def __init__(self, memory: Memory, *, writable: bool, host: bool) -> None:
        self.memory = memory
        self.ptr = memory.ptr
        self.nbytes = memory.nbytes
        self.writable = writable
        self.host = HostRegion(memory, memory.ptr, writable=writable) if host else None


class Host(Protocol):
    """A node as its NICs see it; `timing.Node` is one."""

    name: str
    epoch: int
    machine: Machine

    @property
    def wakes(self) -> Wakes: ...

    def post(self, nic: Nic, numbers: Ints, costs: Ints) -> None:
        """Have the worker post rows."""

    def charge(self, cost_ps: int) -> None:
        """Give the worker work."""


class Nic(Protocol):
    """A NIC as the others see it; `timing_nic.TimingNic` is one."""

    number: int
    index: int
    address: bytes
    caps: DomainCaps
    profile: Profile
    inbox: Agenda
    outbox: Agenda
    ready: deque[Entry]
    sources: dict[int, Region]
    queue: SendQueue
    open_rows: int
    waker: Callable[[], None]

    @property
    def node(self) -> Host: ...

    @property
    def fabric(self) -> Fabric: ...

    def launch(self, numbers: Ints, ready: Ints) -> None:
        """Queue rows for the wire."""

    def take_in(self, now: int) -> None:
        """Take in everything that is here by now."""

    def take_landed(self, now: int) -> None:
        """Place all rows that have landed by now."""


class Fabric(Protocol):
    """The fabric as its NICs see it; `timing.TimingFabric` is one, and says what these are."""

    env: FabricEnv
    pairs: Pairs | None
    row_log: RowLog | None
    move_bytes: bool
    mortal: bool
    ledger: Ledger
    batches: Batches
    payloads: dict[int, bytes]
    controls: set[int]
    slow: dict[int, int]
    refused: dict[int, Nic]
    soft: Ints
    soft_acks: Ints
    gone: npt.NDArray[np.bool_]
    landed_bytes: Ints
    cut_ps: Ints

    def attach(self, nic: Nic) -> int: ...

    def number_of(self, address: bytes) -> int: ...

    def nic(self, number: int) -> Nic: ...

    def name_of(self, number: int) -> str: ...

    def sending(self, nic: Nic) -> None: ...


# Choices of the model, not of any hardware: the longest waits of gathered entries. They bound the
# delay of an expectation that ends in the middle of a batch. A sender's completions may wait
# longer: only failures matter before the batch is done, and these are urgent.
_PAUSE_PS_MIN: Final = 2 * PS_PER_US
_PAUSE_PS_MAX: Final = 5 * PS_PER_MS
_ACKS_PS: Final = 5 * PS_PER_MS
_QUIET_PS: Final = 100 * PS_PER_US  # after such a pause a burst is over

_NOTHING: Final = np.empty(0, np.int64)


class Wakes:
    """The wakes of one node.

    Args:
        fabric: has the clock. Its columns `soft` and `soft_acks` hold the earliest time at which
            gathered immediates, and gathered completions, of each NIC may wake the owner.

    Attributes:
        nics: of the node, those that are open.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.nics: list[Nic] = []
        self._fabric = fabric
        self._urgent: list[int] = []
        self._booked_ps = NEVER_PS
        self._looked_ps = -1
        self._burst_ps = 0
        self._floor_ps = 0
        self._woken = False

    # ------------------------------------------------------------------ booking

    def wake_at(self, time_ps: int) -> None:
        """Have the owner woken at this very time; book() is to follow."""
        heappush(self._urgent, time_ps)

    def refuse(self, nic: Nic) -> None:
        """A NIC refused rows: the owner waits for room."""
        self._fabric.refused[nic.number] = nic
        self.book()

    def room_ps(self, nic: Nic, acked: Ints = _NOTHING) -> int:
        """The time when most of a send queue is free; NEVER_PS if that is not known yet.

        The quarter that is still to be sent keeps the wire busy until the owner has refilled it.

        Args:
            nic: the owner of the queue.
            acked: times of completions that are not in its outbox yet.
        """
        need = max(1, nic.open_rows - nic.caps.sq_depth // 4)
        booked = len(nic.outbox)
        if need <= booked:
            return nic.outbox.nth_ps(need)
        last = need - booked - 1
        return int(np.partition(acked, last)[last]) if last < len(acked) else NEVER_PS

    def book(self) -> None:
        """Book the next wake-up: an urgent one, gathered entries after the pause, or room."""
        fabric = self._fabric
        urgent = self._urgent
        while urgent and urgent[0] <= self._looked_ps:
            heappop(urgent)
        wake_ps = urgent[0] if urgent else NEVER_PS
        for nic in self.nics:
            if not self._woken:
                if nic.inbox.first_ps < wake_ps:
                    wake_ps = min(wake_ps, max(nic.inbox.first_ps, self._floor_ps))
                if nic.outbox.first_ps < wake_ps:
                    wake_ps = min(wake_ps, max(nic.outbox.first_ps, self._floor_ps + _ACKS_PS))
            if nic.number in fabric.refused:
                wake_ps = min(wake_ps, self.room_ps(nic))
        wake_ps = max(wake_ps, fabric.env.now)
        if wake_ps < self._booked_ps:
            self._booked_ps = wake_ps
            fabric.env.call_at(wake_ps, self._wake, wake_ps)

    def _wake(self, booked_ps: int) -> None:
        if booked_ps != self._booked_ps:
            return  # an earlier one was booked since
        self._booked_ps = NEVER_PS
        if self.is_due(booked_ps):
            self._look(booked_ps)
        woken = [nic for nic in self.nics if nic.ready or nic.number in self._fabric.refused]
        for nic in woken:
            self._fabric.refused.pop(nic.number, None)
        if woken and not self._woken:
            # Gathered entries wait for the owner's poll from here on: an owner that never polls is
            # not to be woken for ever.
            self._set_woken(woken=True)
        for nic in woken:
            nic.waker()
        self.book()

    # ------------------------------------------------------------------ looking

    def poll(self) -> None:
        """Take in what has arrived, if it is time to look: the owner polls.

        An engine polls again as long as it finds something. If each poll returned the one row that
        came since the last, it would step once a row, and the pauses would be useless.
        """
        now = self._fabric.env.now
        due = self.is_due(now)
        if due:
            self._look(now)
        if due or self._woken:  # else nothing has changed since the last poll
            self._set_woken(woken=False)
            self.book()

    def is_due(self, now: int) -> bool:
        """Whether it is time to look."""
        if self._urgent and self._urgent[0] <= now:
            return True
        for nic in self.nics:
            if nic.inbox.first_ps <= now and now >= self._floor_ps:
                return True
            if nic.outbox.first_ps <= now:
                if now >= self._floor_ps + _ACKS_PS:
                    return True
                if nic.number in self._fabric.refused and self.room_ps(nic) <= now:
                    return True
        return False

    def gather(self) -> None:
        """Wake the owner at its next time to look: a NIC took entries in before that."""
        if not self._woken:  # else the owner is about to poll
            self.wake_at(max(self._floor_ps, self._fabric.env.now))
            self.book()

    def _look(self, now: int) -> None:
        for nic in self.nics:
            nic.take_in(now)
        if now > self._floor_ps + _QUIET_PS:
            self._burst_ps = now
        pause_ps = max(_PAUSE_PS_MIN, min(_PAUSE_PS_MAX, now - self._burst_ps))
        self._looked_ps = now
        self._floor_ps = now + pause_ps

    def _set_woken(self, *, woken: bool) -> None:
        self._woken = woken
        fabric = self._fabric
        for nic in self.nics:
            fabric.soft[nic.number] = NEVER_PS if woken else self._floor_ps
            fabric.soft_acks[nic.number] = NEVER_PS if woken else self._floor_ps + _ACKS_PS
