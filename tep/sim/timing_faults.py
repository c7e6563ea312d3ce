"""NICs of the timing fabric that can die, or lose their link for a while, and fence others off.

A NIC that dies tells its owner at once; how long a driver takes to notice is not modelled. To a
peer it is silent, and so is one without a link: a row that does not land for that ends UNREACHABLE,
`peer_timeout` after it would have landed. Bytes that are under way when a NIC dies are lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from tep.backends.base import COMPLETION, Kind, Status, WriteBatch
from tep.sim.ledger import NEVER_PS, Hold
from tep.sim.queues import Ints, is_alike
from tep.sim.receiving import Inlet
from tep.sim.timing_faces import Fabric, Host, Nic
from tep.sim.timing_nic import TimingNic

__all__ = ["MortalNic"]

_WIRE: Final = np.uint8(Hold.WIRE)
_OK: Final = int(Status.OK)
_WRITE, _SENT, _IMM = int(Kind.WRITE), int(Kind.SENT), int(Kind.IMM)
_DOWN, _FENCED = int(Kind.DOWN), int(Kind.FENCED)


class _MortalInlet(Inlet):
    """The receiving end of a MortalNic: it knows whom it has fenced off, and names senders."""

    barred: dict[int, int]
    """By sender, the last row of its that may not land."""

    def _place(self, rows: Ints) -> None:
        ledger = self._fabric.ledger
        for sender, last in self.barred.items():
            late = (ledger.source[rows] == sender) & (rows + ledger.base <= last)
            if late.any():
                ledger.status[rows[late]] = Status.UNREACHABLE
                rows = rows[~late]
                if not len(rows):
                    return
        super()._place(rows)

    def _announce(self, imms: Ints, rows: Ints) -> None:
        ledger = self._fabric.ledger
        source = ledger.source[rows[ledger.imm[rows] >= 0]]
        if is_alike(imms) and is_alike(source):
            self._nic.ready.append((_IMM, _OK, len(imms), int(imms[0]), 0, int(source[0]), 0))
            return
        entries = np.zeros(len(imms), COMPLETION)
        entries["kind"] = _IMM
        entries["count"] = 1
        entries["imm"] = imms
        entries["ctx"] = source
        self._nic.ready.append(entries)


class MortalNic(TimingNic):
    """A NIC that can die, whose engine can make good what that loses: C23 and C25 to C27."""

    def __init__(self, fabric: Fabric, node: Host, index: int) -> None:
        super().__init__(fabric, node, index)
        self.caps = replace(self.caps, imm_source=True)
        self._inlet = self._mortal = _MortalInlet(fabric, self)
        self._mortal.barred = {}

    @property
    def is_dead(self) -> bool:
        """Whether it was killed."""
        return bool(self.fabric.gone[self.number])

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        if not self.is_dead:
            return super().post(batch, start, stop)
        self._check_open()
        down = int(Status.NIC_DOWN)
        self.ready.extend((_WRITE, down, 1, 0, row, batch.ctx, 0) for row in range(start, stop))
        self.waker()
        return stop - start

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        return self._end_send(ctx) if self.is_dead else super().post_send(peer, payload, ctx)

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        return self._end_send(ctx) if self.is_dead else super().post_control(peer, payload, ctx)

    def _end_send(self, ctx: int) -> bool:
        self._check_open()
        self.ready.append((_SENT, int(Status.NIC_DOWN), 1, 0, 0, ctx, 0))
        self.waker()
        return True

    # ------------------------------------------------------------------ faults

    def kill(self) -> None:
        """Die."""
        self._lose_flying()
        self._end(Status.NIC_DOWN)
        self.ready.append((_DOWN, int(Status.NIC_DOWN), 1, 0, 0, 0, 0))
        self.waker()

    def cut(self, until_ps: int) -> None:
        """Have no link until then."""
        self._lose_flying()
        self.fabric.cut_ps[self.number] = max(until_ps, self.fabric.cut_ps[self.number])

    def _lose_flying(self) -> None:
        """What has landed has landed; what is booked to land, here or from here, does not."""
        fabric = self.fabric
        ledger, now = fabric.ledger, fabric.env.now
        self.take_in(now)
        self._lose(self, *self.inbox.take(NEVER_PS))
        sent = ledger.of_sender(self.number)
        for target in np.unique(ledger.target[sent - ledger.base]).tolist():
            if fabric.gone[target]:
                continue
            nic = fabric.nic(target)
            nic.take_landed(now)
            times, numbers = nic.inbox.take(NEVER_PS)
            mine = ledger.source[numbers - ledger.base] == self.number
            if (~mine).any():
                nic.inbox.add(times[~mine], numbers[~mine])
            self._lose(nic, times[mine], numbers[mine])

    def _lose(self, target: Nic, seen: Ints, numbers: Ints) -> None:
        """Fail rows that a NIC was booked to see then: their senders learn it by a timeout."""
        fabric, ledger = self.fabric, self.fabric.ledger
        rows = numbers - ledger.base
        ledger.hold[rows] &= ~_WIRE
        ledger.status[rows] = Status.UNREACHABLE
        for number in numbers[ledger.message[rows]].tolist():
            fabric.payloads.pop(number, None)
            fabric.controls.discard(number)
        landed = seen - target.profile.receive_ps
        for sender in np.unique(ledger.source[rows]).tolist():
            if fabric.gone[sender]:
                continue
            mine = (ledger.source[rows] == sender).nonzero()[0]
            nic = fabric.nic(sender)
            failed = landed[mine] + nic.profile.peer_timeout_ps
            nic.outbox.put_off(numbers[mine], failed)
            for time_ps in np.unique(failed).tolist():
                nic.node.wakes.must(time_ps)
            nic.node.wakes.book()

    # ------------------------------------------------------------------ fences

    def source(self, number: int) -> bytes:
        return self.fabric.nic(number).address

    def fence(self, source: bytes, ctx: int) -> None:
        self._check_open()
        if not self.is_dead:
            self.take_in(self.fabric.env.now)
        self._mortal.barred[self.fabric.number_of(source)] = NEVER_PS
        self.ready.append((_FENCED, _OK, 1, 0, 0, ctx, 0))
        self.waker()

    def unfence(self, source: bytes) -> None:
        self._check_open()
        number = self.fabric.number_of(source)
        if self._mortal.barred.get(number) == NEVER_PS:
            self._mortal.barred[number] = self.fabric.ledger.end - 1
