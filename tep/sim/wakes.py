"""A node of the timing fabric: what NICs share, the worker's CPU, and when the worker is woken.

A spinning worker sees every immediate at once, but an event for each would cost more than the whole
model. So there are two kinds of wake-ups. An urgent one comes at its exact time: at the end of a
batch, each row of a scatter, a message, a failure, room after a refusal. All other entries are
gathered: the pause between two looks grows with the burst, so that a burst costs a logarithm of
wake-ups. A look takes in the entries of all NICs of the node, as one step of the worker would.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tep.backends.common import HostRegion
from tep.base.units import PS_PER_MS, PS_PER_US
from tep.memory.source import Memory
from tep.sim.clock import FabricEnv
from tep.sim.congestion import PacedQueue, is_paced
from tep.sim.driver import SimNic, SimNode
from tep.sim.ledger import Agenda, Batches, Ledger
from tep.sim.machines import Machine, Machines
from tep.sim.queues import NEVER_PS, Ints, SendQueue
from tep.sim.row_log import RowLog

__all__ = ["Entry", "Fabric", "Nic", "Node", "Region", "Wakes", "address_of"]

Entry = tuple[int, int, int, int, int, int, int] | npt.NDArray[np.void]
"""One completion in the order of COMPLETION's fields, or an array of them."""


class Region:
    """Registered memory.

    Attributes:
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


_NICS_MIN: Final = 16
_COLUMNS: Final = (
    "free", "soft", "soft_acks", "gone", "landed_bytes", "poll_ps", "first", "heard_ps",
)  # fmt: skip


class Fabric:
    """The part of a timing fabric that its nodes and NICs see; `timing` moves their rows.

    Attributes:
        row_log: None: nothing is recorded.
        pairs: numbers of pairs of unlike machines; None: all are alike.
        payloads: messages in flight, by number.
        controls: numbers of those that are control messages.
        slow: NIC -> percent of its usual time for every byte.
        refused: the NICs whose owners wait for room.
        gone: whether a NIC is gone, by its number; as all columns here.
        soft, soft_acks: earliest times at which non-urgent immediates, and completions, may wake
            the owner.
        free: when the receiving side is free.
        poll_ps: worker's time for an immediate.
        first: the first NIC of the same node.
        heard_ps: when the worker has taken all immediates that have landed; kept at the first NIC.
    """

    def __init__(
        self,
        env: FabricEnv,
        machines: Machines,
        row_log: RowLog | None,
        *,
        move_bytes: bool,
        mortal: bool,
    ) -> None:
        self.env = env
        self.machines = machines
        self.pairs = machines.pairs
        self.row_log = row_log
        self.move_bytes = move_bytes
        self.mortal = mortal
        self.ledger = Ledger()
        self.batches = Batches()
        self.payloads: dict[int, bytes] = {}
        self.controls: set[int] = set()
        self.slow: dict[int, int] = {}
        self.refused: dict[int, Nic] = {}
        self._numbers: dict[bytes, int] = {}
        self._nics: list[Nic | None] = []
        self.free = np.zeros(_NICS_MIN, np.int64)
        self.soft = np.zeros(_NICS_MIN, np.int64)
        self.soft_acks = np.zeros(_NICS_MIN, np.int64)
        self.gone = np.ones(_NICS_MIN, np.bool_)
        self.landed_bytes = np.zeros(_NICS_MIN, np.int64)
        self.poll_ps = np.zeros(_NICS_MIN, np.int64)
        self.first = np.zeros(_NICS_MIN, np.int64)
        self.heard_ps = np.zeros(_NICS_MIN, np.int64)

    def attach(self, nic: Nic) -> int:
        """Give a NIC its number."""
        number = self.number_of(nic.address)
        assert self._nics[number] is None, nic.address
        self._nics[number] = nic
        self.gone[number] = False
        self.poll_ps[number] = nic.profile.poll_ps
        first = self.number_of(address_of(nic.node.name, nic.node.epoch, 0))
        self.first[number] = first
        if self.pairs is not None:
            self.pairs.place(number, nic.node.machine.kind)
        return number

    def number_of(self, address: bytes) -> int:
        """Return the number of an address; one that nobody has yet gets one too."""
        found = self._numbers.get(address)
        if found is None:
            found = self._numbers[address] = len(self._nics)
            self._nics.append(None)
            if found >= len(self.gone):
                for column in _COLUMNS:
                    old = getattr(self, column)
                    fill = np.full(len(old), column == "gone", old.dtype)
                    setattr(self, column, np.concatenate((old, fill)))
        return found

    def nic(self, number: int) -> Nic:
        """The NIC of a number that somebody has."""
        found = self._nics[number]
        assert found is not None, number
        return found

    def name_of(self, number: int) -> str:
        """Name of the node that a NIC number belongs to, "" if it was never there."""
        found = self._nics[number]
        return "" if found is None else found.node.name

    def sending(self, nic: Nic) -> None:
        """A NIC has units to send: see that they are resolved when the first arrives."""
        raise NotImplementedError


def address_of(name: str, epoch: int, index: int) -> bytes:
    """The address of a NIC: "name/index#epoch"."""
    return f"{name}/{index}#{epoch}".encode()


class Nic(SimNic):
    """The part of a NIC that its node, and other NICs, see; `timing_nic.TimingNic` adds the seam.

    Attributes:
        index, number: in its node, and on its fabric.
        queue: quanta that it still has to send.
        inbox: rows that land here, by the time they can be seen.
        outbox: rows sent from here, by the time their completion can be seen.
        sources: lkey -> region.
        open_rows: rows posted and not completed.
    """

    def __init__(self, fabric: Fabric, node: Node, index: int) -> None:
        super().__init__()
        self.fabric = fabric
        self.node = node
        self.index = index
        self.profile = profile = node.machine.profile
        self.caps = profile.caps(
            f"{node.name}/{index}",
            moves_bytes=fabric.move_bytes,
            control_bytes=profile.max_msg_bytes,
        )
        self.address = address_of(node.name, node.epoch, index)
        self.number = fabric.attach(self)
        self.queue = PacedQueue(profile) if is_paced(profile) else SendQueue()
        self.inbox = Agenda()
        self.outbox = Agenda()
        self.sources: dict[int, Region] = {}
        self.ready: deque[Entry] = deque()
        self.open_rows = 0
        node.wakes.nics.append(self)

    def launch(self, numbers: Ints, ready: Ints) -> None:
        """Queue rows, which are with the NIC at `ready`, for the wire."""
        raise NotImplementedError

    def take_in(self, now: int) -> None:
        """Take in everything that is here by now."""
        raise NotImplementedError

    def take_landed(self, now: int) -> None:
        """Place all rows that have landed by now, before their sender is notified."""
        raise NotImplementedError


class Node(SimNode):
    """One host with one device: its NICs and the CPU of its worker."""

    def __init__(self, fabric: Fabric, name: str, epoch: int, machine: Machine) -> None:
        super().__init__(name, epoch)
        self.machine = machine
        self._profile = profile = machine.profile
        self._cpu_free_ps = 0
        self._turn_ps = profile.turn_rows * profile.post_first_ps
        self._fabric = fabric
        self._posts: list[_Post] = []
        self.wakes = Wakes(fabric)

    def step_delay_ps(self) -> int:
        return self._profile.step_delay_ps

    def charge(self, cost_ps: int) -> None:
        """Give the worker work, to be done after the work that it has."""
        self._cpu_free_ps = max(self._fabric.env.now, self._cpu_free_ps)
        self.took(cost_ps)

    def took(self, cost_ps: int) -> None:
        """Put off what the worker has still to do by work that it has done: immediates taken."""
        self._cpu_free_ps += cost_ps
        # While it posts many rows it looks at its NICs now and then.
        self.busy_until_ps = min(self._cpu_free_ps, self._fabric.env.now + self._turn_ps)

    def post(self, nic: Nic, numbers: Ints, costs: Ints) -> None:
        """Have the worker post rows; they are launched once all posts of this instant are known.

        A step of ours offers one NIC all its rows before it comes to the next. The worker of the
        paper posts one row on each NIC at once, then `turn_rows` at the most on one before it comes
        to the next. So the rows of one instant are put in that order.
        """
        if not self._posts:
            self._fabric.env.call_at(self._fabric.env.now, self._launch, self._cpu_free_ps)
        self._posts.append(_Post(nic, numbers, costs))
        self.charge(int(costs.sum()))

    def _launch(self, cpu_free_ps: int) -> None:
        posts, self._posts = self._posts, []
        now = self._fabric.env.now
        rows = sum(len(post.numbers) for post in posts)
        if rows <= self._profile.turn_rows:
            # A worker with a backlog takes new requests at its next turn. Rows planned for then are
            # not put off, but the CPU time is charged behind the backlog.
            cpu_free_ps = min(cpu_free_ps, now + self._turn_ps)
        start_ps = max(now, cpu_free_ps)
        if len(posts) == 1:
            nic, numbers, costs = posts[0]
            nic.launch(numbers, start_ps + np.cumsum(costs))
            return
        mine: dict[int, list[_Post]] = {}
        for post in posts:
            mine.setdefault(post.nic.index, []).append(post)
        each = [np.concatenate([post.costs for post in found]) for found in mine.values()]
        most = self._profile.turn_rows
        turns = np.concatenate([(np.arange(len(own)) + most - 1) // most for own in each])
        order = np.argsort(turns, kind="stable")
        done = np.empty(len(order), np.int64)
        done[order] = start_ps + np.cumsum(np.concatenate(each)[order])
        start = 0
        for found, own in zip(mine.values(), each):
            numbers = np.concatenate([post.numbers for post in found])
            found[0].nic.launch(numbers, done[start : start + len(own)])
            start += len(own)


class _Post(NamedTuple):
    """Rows that the worker posts on one NIC, and the CPU time each costs."""

    nic: Nic
    numbers: Ints
    costs: Ints


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

    Attributes:
        nics: the open NICs of the node.
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
        `acked` has the times of completions that are not in the outbox yet.
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
        # An owner that was woken looks by itself; a message is answered when it is looked at.
        waits = self._woken and not fabric.payloads
        wake_ps = urgent[0] if urgent and not waits else NEVER_PS
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
        if self._woken:
            self._catch_up(now)
        due = self.is_due(now)
        if due:
            self._look(now)
        if due or self._woken:  # else nothing has changed since the last poll
            self._set_woken(woken=False)
            self.book()

    def is_due(self, now: int) -> bool:
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

    def _catch_up(self, now: int) -> None:
        """Look as at each urgent time that passed since the owner was woken, but all at once."""
        last_ps = -1
        while self._urgent and self._urgent[0] <= now:
            time_ps = heappop(self._urgent)
            if time_ps > self._looked_ps:
                last_ps = time_ps
                self._pause(time_ps)
        if last_ps >= 0:
            for nic in self.nics:
                nic.take_in(last_ps)

    def _look(self, now: int) -> None:
        for nic in self.nics:
            nic.take_in(now)
        self._pause(now)

    def _pause(self, now: int) -> None:
        """Let a look at this time be the last one for a while."""
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
