"""What is in flight on one NIC: rows by request id, message buffers, and completions sorted.

These fill the places that libfabric's parts have in `FabricDomain`: who lives, what waits and what
has failed is decided there, for both. The way that entries take is `RowWise` or `Columns`.

    request id      of the send queue: a row's slot; behind the last slot a message's buffer
                    of the receive queue: the receive buffer
    context         what the shared parts know a request by: 64 times its number, rows first, then
                    receive buffers, then those of messages that go out
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tep.backends.base import (
    COMPLETION_BYTES,
    Access,
    Completions,
    DomainKey,
    Kind,
    Status,
    put_completion,
)
from tep.backends.efa.device import Nic
from tep.backends.efa.entries import HAS_IMM, KINDS
from tep.backends.efa.rowwise import Entries, Numbers, RowWise, Span
from tep.backends.efa.slots import STEP, Slots
from tep.backends.ffi.ibverbs_structs import ENUMS
from tep.backends.libfabric import completions, mailbox, regions
from tep.backends.libfabric.efa.reads import READ, HardwareRegions
from tep.backends.libfabric.objects import CqError
from tep.memory.source import DmabufExport, Memory, exported

if TYPE_CHECKING:
    from tep.backends.efa.columns import Columns
    from tep.backends.libfabric import slots as shared
    from tep.backends.libfabric.objects import Endpoint
    from tep.backends.libfabric.peer import Peer

__all__ = ["Mailbox", "Queue", "Regions"]


_REMOTE_READ: Final = 1 << 2  # verbs.h, IBV_ACCESS_REMOTE_READ
_REFILL_SHARE: Final = 4  # of the receives, one or two parts may be unposted: many cost less
_LOCAL: Final = 1 << 62
_READ_MAX: Final = 2048
_SENT: Final = 1 << 1  # of a completion's flags
_IMM_FLAG: Final = HAS_IMM >> 1
_WRITE_FLAG: Final = 2 << 4

_WRITE: Final = int(Kind.WRITE)
_READ: Final = int(Kind.READ)
_IMM: Final = int(Kind.IMM)
_OK: Final = int(Status.OK)


class Regions(HardwareRegions):
    """Registered memory.

    Args:
        nic: where.
        dmabuf: exports device memory; without it only the CPU's can be registered.
    """

    def __init__(self, nic: Nic, dmabuf: DmabufExport | None = None) -> None:
        self._device = nic
        self._dmabuf = dmabuf
        self._turn = 0
        self.by_lkey, self.by_rkey, self.readable, self.dying = {}, {}, {}, []

    def add(self, memory: Memory, access: Access) -> regions.Region:
        target = access.target
        flags = ENUMS["IBV_ACCESS_LOCAL_WRITE"] if access.sink else 0
        flags |= ENUMS["IBV_ACCESS_REMOTE_WRITE"] if target else 0
        flags |= _REMOTE_READ if access.readable else 0
        if self._dmabuf is not None and memory.kind != "cpu":
            with exported(self._dmabuf, memory) as (fd, offset):
                handle = self._device.register_dmabuf(fd, offset, memory.ptr, memory.nbytes, flags)
        else:
            handle = self._device.register(memory.ptr, memory.nbytes, flags)
        # The engine's local key is a number of ours: a device may give the same as lkey and rkey,
        # and a mix-up should fail.
        self._turn += 1
        key = DomainKey(_LOCAL | self._turn << 24 | handle.lkey, handle.rkey, memory.ptr)
        region = regions.Region((handle,), memory, key, handle.lkey, target)
        self.by_lkey[key.lkey] = region
        if target or access.readable:
            self.by_rkey[key.rkey] = region
        if access.readable:
            self.readable[key.rkey] = region
        return region

    def cut(self, key: DomainKey, slots: shared.Slots) -> None:
        """End a registration at once where peers may read, or reads in flight write.

        The device ends such rows by itself. Others wait for the rows in flight that read there.
        """
        region = self.by_lkey.get(key.lkey)
        if region is None:
            return
        if region.key.rkey in self.readable or any(
            ticket.batch.ctx & READ for ticket in slots.of_region(region)
        ):
            self.readable.pop(region.key.rkey, None)
            region.close()


class Mailbox(mailbox.Mailbox):
    """Message buffers; an immediate takes a receive as well, which is posted again.

    Args:
        nic: whose.
        way: how they are posted.
        frame_bytes: of the longest message.
        receives, sends: buffers for each direction.
        first: the first request id of messages that go out.

    Attributes:
        spent: receives that are not posted, each a u16, in the order in which they were used.
        refill_from: how many bytes of them are worth a refill() by a poll that finds nothing.
    """

    def __init__(
        self,
        nic: Nic,
        way: RowWise | Columns,
        frame_bytes: int,
        receives: int,
        sends: int,
        first: int,
    ) -> None:
        self._device = nic
        self._way = way
        self._first = first
        memory = self._map(frame_bytes, receives, sends)
        handle = nic.register(memory.ptr, memory.nbytes, ENUMS["IBV_ACCESS_LOCAL_WRITE"])
        self._lkey = handle.lkey
        self.region = regions.Region(
            (handle,), memory, DomainKey(0, 0, 0), handle.lkey, target=False
        )
        self._contexts = first * STEP
        self._end = self._contexts + (receives + sends) * STEP
        self.spent = bytearray(array("H", range(receives)))
        self.refill_from = 2 * max(1, receives // _REFILL_SHARE)
        self._started = False
        way.lay_out(Span(memory.ptr, self._frame_bytes, receives, handle.lkey))

    def start(self, _endpoint: Endpoint) -> None:
        self._started = True
        self.refill()

    def refill(self) -> int:
        if not self._started or self._device.closed or self._device.failure:
            return 0
        if self.spent:
            try:
                self._way.receive(self.spent)
            except OSError as error:
                self._device.lose(f"{error.strerror}: {error.errno}")
            self.spent.clear()
        return 0

    def stop(self) -> None:
        """Post nothing any more: the queue pair is closed."""
        self._started = False

    def _post(self, peer: Peer, _endpoint: Endpoint, index: int, nbytes: int) -> bool:
        number = self._first + index - self._receives
        at = self._buffers + index * self._frame_bytes
        self._way.send(number, self._device.place(peer.number), at, nbytes, self._lkey)
        return True

    def give_back(self, index: int) -> None:
        """A receive has been used; refill() posts it again, with others."""
        self.spent += index.to_bytes(2, sys.byteorder)

    def receive_context(self, number: int) -> int:
        """The context of a receive, from its request id."""
        return self._contexts + number * STEP

    def send_context(self, number: int) -> int:
        """The context of a message that went out, from its request id."""
        return self._contexts + (self._receives + number - self._first) * STEP


class Queue(completions.Queue):
    """The completion queue, sorted by columns.

    Args:
        nic, way, slots, mailbox: of one NIC.
    """

    _slots: Slots

    def __init__(self, nic: Nic, way: RowWise | Columns, slots: Slots, mailbox: Mailbox) -> None:
        self._slots = slots
        self.frames = deque()
        self.errors = deque()
        self.full = False
        self._device = nic
        self._way = way
        self._rows = slots.count
        self._box = mailbox
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def read(self, out: Completions, filled: int) -> int:
        if self._stopped:
            self.full = False
            return filled
        room = len(out) - filled
        if room <= 0:
            return filled
        room = min(room, _READ_MAX)
        found = self._way.poll(room)
        n = len(found)
        box = self._box
        if not n:
            if len(box.spent) >= box.refill_from:
                box.refill()
            # A NIC that is lost is news too, once all that it had completed is handed out.
            self.full = self._stopped = bool(self._device.failure)
            return filled
        self._device.armed = False
        self.full = self._way.more
        if n == 1:
            filled = self._take_entry(found[0].item(), out, filled)
        elif self._way.kind is not None:
            filled = self._take_kind(self._way.kind, found, out, filled)
        else:
            filled = self._take_entries(found, out, filled)
        if len(box.spent) >= 2 * box.refill_from:  # else when there is nothing else to do
            box.refill()
        return filled

    def _take_entry(self, entry: Any, out: Completions, filled: int) -> int:
        number, status, flags, _, length, _, _, imm = entry
        at = filled * COMPLETION_BYTES
        if status:
            self._take_error(number, status, flags)
        elif flags & _SENT:
            if number >= self._rows:
                self._box.sent(self._box.send_context(number))
                return filled
            ticket = self._slots.take_back(number * STEP)
            if ticket is not None:
                ticket.peer.heard = True
                ctx = ticket.batch.ctx
                if ctx & READ:
                    self._slots.reads -= 1
                    put_completion(out, at, _READ, _OK, 1, 0, 0, ctx ^ READ, 0)
                else:
                    put_completion(out, at, _WRITE, _OK, 1, 0, 0, ctx, 0)
                return filled + 1
        elif flags & _WRITE_FLAG:
            self._box.give_back(number)
            put_completion(out, at, _IMM, _OK, 1, imm, 0, 0, 0)
            return filled + 1
        else:
            self._box.received(self._box.receive_context(number), length, self._keep)
        return filled

    def _take_error(self, number: int, status: int, flags: int) -> None:
        box = self._box
        if not flags & _SENT:
            context = box.receive_context(number)
        else:
            context = number * STEP if number < self._rows else box.send_context(number)
        text = f"the device's status {status}"
        self.errors.append(CqError(context, flags, 5, status, text))
        self.full = True

    def _take_entries(self, found: Entries, out: Completions, filled: int) -> int:
        """Sort entries by what they tell of: nearly always they are all of one kind."""
        kinds = found.view(KINDS)["kind"]
        while True:
            kind = int(kinds[0])
            same = kinds == kind
            if same.all():
                return self._take_kind(kind, found, out, filled)
            filled = self._take_kind(kind, found[same], out, filled)
            others = ~same
            found, kinds = found[others], kinds[others]

    def _take_kind(self, kind: int, found: Entries, out: Completions, filled: int) -> int:
        """Take entries of the same status and flags."""
        status, flags = kind & 0xFF, kind >> 8
        if status:
            for entry in found.tolist():
                self._take_error(entry[0], status, flags)
            return filled
        numbers = found["req_id"]
        if flags & _SENT:
            return self._take_sent(numbers, out, filled)
        if flags & _WRITE_FLAG:
            self._box.spent += numbers.tobytes()
            imms = found["imm"]
            n, values = len(imms), imms.tobytes()
            if values == values[:4] * n:  # a third of what comparing columns takes
                at = filled * COMPLETION_BYTES
                put_completion(out, at, _IMM, _OK, n, int(imms[0]), 0, 0, 0)
                return filled + 1
            return self._take_imms(imms, out, filled)
        for number, length in zip(numbers.tolist(), found["length"].tolist(), strict=True):
            self._box.received(self._box.receive_context(number), length, self._keep)
        return filled

    def _take_sent(self, numbers: Numbers, out: Completions, filled: int) -> int:
        mine = numbers.copy()
        if int(mine.max()) >= self._rows:
            of_rows = mine < self._rows
            for number in mine[~of_rows].tolist():
                self._box.sent(self._box.send_context(number))
            mine = mine[of_rows]
            if not len(mine):
                return filled
        for ctx, count in self._slots.give_back_many(mine).items():
            at = filled * COMPLETION_BYTES
            if ctx & READ:
                self._slots.reads -= count
                put_completion(out, at, _READ, _OK, count, 0, 0, ctx ^ READ, 0)
            else:
                put_completion(out, at, _WRITE, _OK, count, 0, 0, ctx, 0)
            filled += 1
        return filled
