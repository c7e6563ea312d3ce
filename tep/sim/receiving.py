"""The receiving end of a NIC of the timing fabric: keys, bytes, immediates, message buffers.

The landing times of rows are known already; this module only places them when somebody looks.
Last, the columns become records of a row log, if somebody asked for one.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import COMPLETION, Kind, Status
from tep.backends.common import copy_rows
from tep.sim.ledger import Hold
from tep.sim.machines import ack_ps
from tep.sim.queues import Ints, has_all, has_any, is_alike
from tep.sim.row_log import Record, What
from tep.sim.wakes import Fabric, Nic, Region

__all__ = ["FEW", "Inlet", "trace_ends", "trace_landed", "trace_posts", "trace_row"]

FEW: Final = 16
"""So many rows are quicker one by one than as arrays."""
_WIRE: Final = np.uint8(Hold.WIRE)
_OK: Final = int(Status.OK)
_IMM, _RECV, _CONTROL = int(Kind.IMM), int(Kind.RECV), int(Kind.CONTROL)


class Inlet:
    """The receiving end of one NIC."""

    def __init__(self, fabric: Fabric, nic: Nic) -> None:
        self.targets: dict[int, Region] = {}
        self._fabric = fabric
        self._nic = nic
        self._starved: deque[int] = deque()
        self._unread: dict[int, tuple[bytes, bytes]] = {}  # control messages, by their numbers

    # ------------------------------------------------------------------ rows

    def take(self, now: int) -> None:
        """Check, place and announce all rows that have landed by now."""
        inbox = self._nic.inbox
        if inbox.first_ps > now:
            return
        fabric, ledger = self._fabric, self._fabric.ledger
        times, numbers = inbox.take(now)
        rows = numbers - ledger.base
        if len(rows) <= FEW:
            rest = [k for k, row in enumerate(rows.tolist()) if not self._take_one(row)]
            if not rest:
                return
            times, numbers, rows = times[rest], numbers[rest], rows[rest]
        left = ledger.hold[rows] & ~_WIRE
        ledger.hold[rows] = left
        wanted = left != 0  # else the sender is gone: nothing lands
        if fabric.payloads:
            messages = ledger.message[rows]
            for index in (wanted & messages).nonzero()[0].tolist():
                self._take_message(int(numbers[index]), int(times[index]))
            wanted &= ~messages
        if not has_all(wanted):
            times, rows = times[wanted], rows[wanted]
        if len(rows):
            self._take_rows(times, rows)

    def _take_one(self, row: int) -> bool:
        """Do as `take` for a lone row, as of a scatter; False, and nothing: it is no usual one."""
        fabric, ledger = self._fabric, self._fabric.ledger
        target = self.targets.get(ledger.rkey.item(row))
        unusual = fabric.move_bytes or fabric.mortal or fabric.row_log is not None
        if target is None or unusual or ledger.message[row]:
            return False
        nbytes = ledger.nbytes.item(row)
        if not 0 <= ledger.dst.item(row) - target.ptr <= target.nbytes - nbytes:
            return False
        ledger.hold[row] &= ~_WIRE
        if ledger.hold[row]:  # else the sender is gone
            fabric.landed_bytes[self._nic.number] += nbytes
            imm = ledger.imm.item(row)
            if imm >= 0:
                self._nic.ready.append((_IMM, _OK, 1, imm, 0, 0, 0))
        return True

    def _take_rows(self, times: Ints, rows: Ints) -> None:
        fabric, nic = self._fabric, self._nic
        ledger = fabric.ledger
        nbytes = ledger.nbytes[rows]
        for same in _runs(ledger.rkey[rows], ledger.lkey[rows], nbytes):
            self._place(rows[same])
        good = ledger.status[rows] == _OK
        if not has_all(good):
            for index in (~good).nonzero()[0].tolist():
                sender = fabric.nic(int(ledger.source[rows[index]]))
                notice_ps = int(times[index]) + _gap_ps(sender, nic)
                sender.node.wakes.wake_at(max(notice_ps, fabric.env.now))
                sender.node.wakes.book()
            times, rows, nbytes = times[good], rows[good], nbytes[good]
        fabric.landed_bytes[nic.number] += nbytes.sum()
        if fabric.row_log is not None:
            trace_landed(nic, self.targets, times, rows)
        imms = ledger.imm[rows]
        said = imms >= 0
        if not has_all(said):
            imms = imms[said]
        if len(imms):
            self._announce(imms, rows)

    def _place(self, rows: Ints) -> None:
        """Check and copy rows of one source region, one target region and one length."""
        fabric = self._fabric
        ledger = fabric.ledger
        row = int(rows[0])
        nbytes = int(ledger.nbytes[row])
        target = self.targets.get(int(ledger.rkey[row]))
        if target is None:
            ledger.status[rows] = Status.REMOTE_KEY
            return
        # Unsigned: an address below the region wraps, and is beyond its end.
        dst = ledger.dst[rows] - np.uint64(target.ptr)
        if nbytes > target.nbytes:
            ledger.status[rows] = Status.REMOTE_RANGE
            return
        bad = dst > np.uint64(target.nbytes - nbytes)
        if has_any(bad):
            ledger.status[rows[bad]] = Status.REMOTE_RANGE
            rows, dst = rows[~bad], dst[~bad]
        if nbytes == 0 or not fabric.move_bytes or not len(rows):
            return
        source = fabric.nic(int(ledger.source[row])).sources.get(int(ledger.lkey[row]))
        if source is None:
            ledger.status[rows] = Status.LOCAL_KEY
            return
        assert source.host is not None, "a fabric moves bytes of all regions or of none"
        assert target.host is not None, "a fabric moves bytes of all regions or of none"
        src = (ledger.src[rows] - np.uint64(source.ptr)).astype(np.intp)
        copy_rows(source.host, src, target.host, dst.astype(np.intp), nbytes, len(rows))

    def _announce(self, imms: Ints, rows: Ints) -> None:  # noqa: ARG002  # a mortal NIC's
        if is_alike(imms):
            self._nic.ready.append((_IMM, _OK, len(imms), int(imms[0]), 0, 0, 0))
            return
        entries = np.zeros(len(imms), COMPLETION)
        entries["kind"] = _IMM
        entries["count"] = 1
        entries["imm"] = imms
        self._nic.ready.append(entries)

    # ------------------------------------------------------------------ messages

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        """A control message, and the address of its sender; once."""
        return self._unread.pop(slot)

    def feed(self) -> None:
        """Receive the messages that waited for a buffer, as far as there are some now."""
        fabric = self._fabric
        while self._starved:
            number = self._starved[0]
            if number in fabric.payloads:
                if not self._receive(number, fabric.env.now):
                    return
                self._nic.node.wakes.wake_at(fabric.env.now)
                self._nic.node.wakes.book()
            self._starved.popleft()

    def _take_message(self, number: int, time_ps: int) -> None:
        if number in self._fabric.controls:
            self._keep_control(number, time_ps)
            return
        if not self._starved and self._receive(number, time_ps):
            return
        # No buffer. As on RC with an endless RNR retry it waits, but not for ever.
        self._starved.append(number)
        fabric = self._fabric
        sender = fabric.nic(int(fabric.ledger.source[number - fabric.ledger.base]))
        due_ps = max(time_ps + sender.profile.peer_timeout_ps, fabric.env.now)
        fabric.env.call_at(due_ps, self._give_up, number)

    def _keep_control(self, number: int, time_ps: int) -> None:
        """Take a control message, which needs no buffer."""
        fabric = self._fabric
        payload = fabric.payloads[number]
        self._unread[number] = payload, self._sender(number)
        self._nic.ready.append((_CONTROL, _OK, 1, 0, 0, number, len(payload)))
        self._finish(number, time_ps)

    def _sender(self, number: int) -> bytes:
        ledger = self._fabric.ledger
        return self._fabric.nic(int(ledger.source[number - ledger.base])).address

    def _give_up(self, number: int) -> None:
        if number in self._starved:
            self._starved.remove(number)
            self._answer(number, Status.RNR, self._fabric.env.now)

    def _receive(self, number: int, time_ps: int) -> bool:
        """Put a message into a buffer, or refuse it; False: there is no buffer for it now."""
        payload, pool = self._fabric.payloads[number], self._nic.pool
        if pool.never_fits(len(payload)):
            self._answer(number, Status.LENGTH, time_ps)
            return True
        found = pool.take(len(payload), self._sender(number))
        if found is None:
            return False
        slot, buffer = found
        buffer[: len(payload)] = payload
        self._nic.ready.append((_RECV, _OK, 1, 0, 0, slot, len(payload)))
        self._finish(number, time_ps)
        return True

    def _finish(self, number: int, time_ps: int) -> None:
        """Record that a message or control message was taken, and answer it."""
        fabric, nic = self._fabric, self._nic
        fabric.landed_bytes[nic.number] += len(fabric.payloads[number])
        if fabric.row_log is not None:
            sender = fabric.ledger.source[number - fabric.ledger.base]
            trace_row(nic, "recv", time_ps, number, fabric.name_of(int(sender)))
        self._answer(number, Status.OK, time_ps)

    def _answer(self, number: int, status: Status, time_ps: int) -> None:
        """Notify the sender of a message, after the way of an acknowledgement."""
        fabric = self._fabric
        ledger = fabric.ledger
        del fabric.payloads[number]
        fabric.controls.discard(number)
        row = number - ledger.base
        ledger.status[row] = status
        sender = fabric.nic(int(ledger.source[row]))
        sent_ps = max(time_ps + _gap_ps(sender, self._nic), fabric.env.now)
        sender.outbox.add(np.array([sent_ps]), np.array([number]))
        sender.node.wakes.wake_at(sent_ps)
        sender.node.wakes.book()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Forget everything; rows under way to here fail at their senders."""
        fabric = self._fabric
        ledger = fabric.ledger
        numbers = self._nic.inbox.clear()
        rows = numbers - ledger.base
        ledger.hold[rows] &= ~_WIRE
        ledger.status[rows] = Status.UNREACHABLE
        waiting = numbers[ledger.message[rows]].tolist()
        for number in [*waiting, *self._starved]:
            if number in fabric.payloads:
                self._answer(number, Status.UNREACHABLE, fabric.env.now)
        self._starved.clear()
        self.targets.clear()


def _gap_ps(sender: Nic, receiver: Nic) -> int:
    """The time between a row's visibility and the notice at its sender."""
    return ack_ps(sender.profile, receiver.profile) - receiver.profile.receive_ps


def _runs(*columns: npt.NDArray[np.generic]) -> list[slice | Ints]:
    """Indices of the rows that agree in all columns, a run each."""
    if len(columns[0]) == 1 or all(map(is_alike, columns)):
        return [slice(None)]
    order = np.lexsort(columns)
    change = np.zeros(len(order) - 1, np.bool_)
    for column in columns:
        ordered = column[order]
        change |= ordered[1:] != ordered[:-1]
    return list(np.split(order, np.flatnonzero(change) + 1))


# ---------------------------------------------------------------------- row log


def trace_row(nic: Nic, what: What, time_ps: int, number: int, peer: str) -> None:
    """Record a row or message at a NIC that goes to, or is from, a peer."""
    ledger, row_log = nic.fabric.ledger, nic.fabric.row_log
    assert row_log is not None, "checked by the caller"
    row = number - ledger.base
    ctx, nbytes, status = ledger.ctx.item(row), ledger.nbytes.item(row), ledger.status.item(row)
    where = nic.node.name, nic.index, peer, number, ctx
    row_log.add(Record(time_ps, what, *where, 0, nbytes, status))


def trace_posts(nic: Nic, where: slice, ctx: int) -> None:
    """Record rows that a NIC has just accepted, those of one target behind each other."""
    fabric, now = nic.fabric, nic.fabric.env.now
    ledger, row_log = fabric.ledger, fabric.row_log
    assert row_log is not None, "checked by the caller"
    region = nic.sources.get(int(ledger.lkey[where.start]))
    targets = ledger.target[where]
    for place in np.argsort(targets, kind="stable").tolist():
        row, peer = where.start + place, fabric.name_of(int(targets[place]))
        # A row without a source has no offset.
        offset = 0 if region is None else int(ledger.src[row]) - region.ptr
        at = nic.node.name, nic.index, peer, row + ledger.base, ctx, offset
        row_log.add(Record(now, "post", *at, int(ledger.nbytes[row])))


def trace_ends(nic: Nic, times: Ints, numbers: Ints) -> None:
    """Record the ends of rows and messages at their sender."""
    ledger = nic.fabric.ledger
    for time_ps, number in zip(times.tolist(), numbers.tolist()):
        row = number - ledger.base
        failed = ledger.status[row] != _OK
        what: What = "sent" if ledger.message[row] else "fail" if failed else "done"
        trace_row(nic, what, time_ps, number, nic.fabric.name_of(int(ledger.target[row])))


def trace_landed(nic: Nic, targets: Mapping[int, Region], times: Ints, rows: Ints) -> None:
    """Record placements and immediates of rows that landed well at a NIC."""
    ledger, row_log = nic.fabric.ledger, nic.fabric.row_log
    assert row_log is not None, "checked by the caller"
    for time_ps, row in zip(times.tolist(), rows.tolist()):
        target = targets[int(ledger.rkey[row])]
        nbytes, offset = int(ledger.nbytes[row]), int(ledger.dst[row]) - target.ptr
        crc = 0
        if target.host is not None:
            crc = zlib.crc32(target.host.view[offset : offset + nbytes].data)
        peer = nic.fabric.name_of(int(ledger.source[row]))
        where = (nic.node.name, nic.index, peer, row + ledger.base, int(ledger.ctx[row]))
        row_log.add(Record(time_ps, "place", *where, offset, nbytes, crc))
        if ledger.imm[row] >= 0:
            row_log.add(Record(time_ps, "imm", *where, 0, nbytes, int(ledger.imm[row])))
