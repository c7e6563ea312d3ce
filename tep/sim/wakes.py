"""When the owner of a node of the timing fabric is woken: as rarely as is exact enough.

No rows here. A spinning worker sees every immediate at once, but an event for each would cost more
than the whole model. So there are two kinds of news. A must wakes at its exact time: the end of a
batch, each row of a scatter, a message, a failure, room after a refusal. All else is gathered: the
pause between two looks grows with the burst, so that a burst costs a logarithm of wakes. A look
takes in the news of all NICs of the node, as one turn of the worker would.

Rows of scatters land one by one, and between a wake and the owner's poll more of them land. A wake
for one of these would change nothing but what later looks depend on: when the last look was. So it
is no event: the poll makes up for it, as if there had been one.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

import numpy as np

from tep.sim.ledger import NEVER_PS
from tep.sim.queues import Ints
from tep.sim.timing_faces import Fabric, Host, Nic
from tep.units import PS_PER_MS, PS_PER_US

__all__ = ["Wakes"]

# Choices of the model, not of any hardware: how long gathered news may wait. They bound how late an
# expectation is seen that ends in the middle of a batch. A sender's completions may wait longer:
# only failures matter before the batch is done, and these are musts.
_PAUSE_PS_MIN: Final = 2 * PS_PER_US
_PAUSE_PS_MAX: Final = 5 * PS_PER_MS
_ACKS_PS: Final = 5 * PS_PER_MS
_QUIET_PS: Final = 100 * PS_PER_US  # so long without news, and a burst is over

_NOTHING: Final = np.empty(0, np.int64)


class Wakes:
    """The wakes of one node.

    Args:
        fabric: whose clock. Its columns `soft` and `soft_acks` hold, for each NIC, from when on
            gathered news, and gathered completions, may wake the owner.
        node: whose wakes these are.

    Attributes:
        nics: of the node, those that are open.
    """

    def __init__(self, fabric: Fabric, node: Host) -> None:
        self.nics: list[Nic] = []
        self._fabric = fabric
        self._node = node
        self._musts: list[int] = []
        self._rows: list[int] = []  # musts that are plain rows of scatters
        self._left_out: list[int] = []  # those of them for which there is no event
        self._polled_ps = 0  # when an owner that was told polls at the latest
        # Later than this after it landed, a row that fails would be told to its sender too late.
        profile = node.machine.profile
        self._late_ps = profile.ack_ps - profile.receive_ps
        plain = fabric.row_log is None and not fabric.mortal and fabric.pairs is None
        self._leaves_out = plain and not profile.qp_depth
        self._booked_ps = NEVER_PS
        self._looked_ps = -1
        self._burst_ps = 0
        self._floor_ps = 0
        self._told = False

    # ------------------------------------------------------------------ what will be

    def must(self, time_ps: int) -> None:
        """See that the owner is woken at this very time; book() is to follow."""
        heappush(self._musts, time_ps)

    def must_row(self, time_ps: int) -> None:
        """As must(), for a row of a scatter that can be seen at this time."""
        heappush(self._rows if self._leaves_out else self._musts, time_ps)

    def refuse(self, nic: Nic) -> None:
        """A NIC refused rows: the owner waits for room."""
        self._fabric.refused[nic.number] = nic
        self.book()

    def room_ps(self, nic: Nic, acked: Ints = _NOTHING) -> int:
        """When most of a send queue is free again; NEVER_PS if that is not known yet.

        The quarter that is still to be sent keeps the wire busy until the owner has refilled it.

        Args:
            nic: whose queue.
            acked: times of completions that are not in its outbox yet.
        """
        need = max(1, nic.open_rows - nic.caps.sq_depth // 4)
        booked = len(nic.outbox)
        if need <= booked:
            return nic.outbox.nth_ps(need)
        last = need - booked - 1
        return int(np.partition(acked, last)[last]) if last < len(acked) else NEVER_PS

    def book(self) -> None:
        """Book the next wake: a must, gathered news once the pause is over, or room."""
        fabric = self._fabric
        musts, rows = self._musts, self._rows
        while musts and musts[0] <= self._looked_ps:
            heappop(musts)
        while rows and rows[0] <= self._looked_ps:
            heappop(rows)
        wake_ps = musts[0] if musts else NEVER_PS
        if self._told and (rows or self._left_out):
            self._leave_out()
        if rows and rows[0] < wake_ps:
            wake_ps = rows[0]
        for nic in self.nics:
            if not self._told:
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
        if self._left_out:
            self._make_up(booked_ps)
        if self.is_due(booked_ps):
            self._look(booked_ps)
        told = [nic for nic in self.nics if nic.ready or nic.number in self._fabric.refused]
        for nic in told:
            self._fabric.refused.pop(nic.number, None)
        if told and not self._told:
            # Gathered news waits for the owner's poll from here on: an owner that never polls must
            # not be woken for ever.
            self._tell(told=True)
        for nic in told:
            nic.waker()
        self.book()

    def _leave_out(self) -> None:
        """The owner was told: leave out the wakes for rows that land before it polls.

        Not if completions come before that and rows are gathered anywhere: whoever takes in a
        completion has the receiver take in what it gathered. And not where the poll is so late that
        a row could be due back at its sender before.
        """
        rows, polled_ps, fabric = self._rows, self._polled_ps, self._fabric
        for nic in self.nics:
            if (
                nic.outbox.first_ps <= polled_ps and fabric.gathers
            ) or nic.number in fabric.refused:
                self._keep(fabric.env.now)
                return
        while rows and polled_ps - self._late_ps <= rows[0] <= polled_ps:
            self._left_out.append(heappop(rows))

    def _keep(self, now: int) -> None:
        """Wakes that were left out and are still to come are events after all."""
        if self._left_out:
            for time_ps in self._left_out:
                if time_ps > now:
                    heappush(self._rows, time_ps)
            self._left_out = [time_ps for time_ps in self._left_out if time_ps <= now]

    def _make_up(self, now: int) -> None:
        """Do what the wakes until now would have done that were left out."""
        self._keep(now)
        self._left_out.sort()
        for time_ps in self._left_out:
            if time_ps > self._looked_ps:
                self._looked(time_ps)
        # Of completions each look reports its own, in an order of its own.
        last_ps = self._left_out[-1] if self._left_out else -1
        for time_ps in self._left_out:
            for nic in self.nics:
                if time_ps == last_ps or nic.outbox.first_ps <= time_ps:
                    nic.take_in(time_ps)
        self._left_out.clear()

    def catch_up(self) -> None:
        """Do now what a poll would make up for."""
        if self._left_out:
            self._make_up(self._fabric.env.now)
            self.book()

    # ------------------------------------------------------------------ looking

    def poll(self) -> None:
        """The owner polls: take in what is here, if it is time to.

        An engine polls again as long as it finds something. If each poll told it of the one row
        that came since the last, it would turn once a row, and the pauses would be in vain.
        """
        now = self._fabric.env.now
        if self._left_out:
            self._make_up(now)
        due = self.is_due(now)
        if due:
            self._look(now)
        if due or self._told:  # else nothing has changed since the last poll
            self._tell(told=False)
            self.book()

    def is_due(self, now: int) -> bool:
        """Whether it is time to take in what is here."""
        if (self._musts and self._musts[0] <= now) or (self._rows and self._rows[0] <= now):
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
        """A NIC took in news although it was not time to look: let it be told when it is."""
        if not self._told:  # else the owner is about to poll
            self.must(max(self._floor_ps, self._fabric.env.now))
            self.book()

    def _look(self, now: int) -> None:
        for nic in self.nics:
            nic.take_in(now)
        self._looked(now)

    def _looked(self, now: int) -> None:
        if now > self._floor_ps + _QUIET_PS:
            self._burst_ps = now
        pause_ps = max(_PAUSE_PS_MIN, min(_PAUSE_PS_MAX, now - self._burst_ps))
        self._looked_ps = now
        self._floor_ps = now + pause_ps

    def _tell(self, *, told: bool) -> None:
        self._told = told
        fabric, node = self._fabric, self._node
        if told:
            self._polled_ps = max(fabric.env.now + node.step_delay_ps(), node.busy_until_ps)
        for nic in self.nics:
            fabric.soft[nic.number] = NEVER_PS if told else self._floor_ps
            fabric.soft_acks[nic.number] = NEVER_PS if told else self._floor_ps + _ACKS_PS
