"""What is in flight on one NIC: rows by request id, message buffers, and completions sorted.

These fill the places that libfabric's parts have in `FabricDomain`: who lives, what waits and what
has failed is decided there, for both. The way that entries take is `RowWise` or `Columns`.

    request id      of the send queue: a row's slot; behind the last slot a message's buffer
                    of the receive queue: the receive buffer
    context         what the shared parts know a request by: 64 times its number, rows first, then
                    receive buffers, then those of messages that go out
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

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
from tep.backends.efa.entries import HAS_IMM
from tep.backends.efa.rowwise import Entries, Numbers, RowWise, Span
from tep.backends.libfabric import completions, mailbox, regions, slots
from tep.backends.libfabric.objects import CqError
from tep.backends.libfabric.slots import Ticket
from tep.ffi.ibverbs_wr import ENUMS
from tep.memory import DmabufExport, Memory, adapt, exported

if TYPE_CHECKING:
    from tep.backends.efa.columns import Columns
    from tep.backends.libfabric.objects import Endpoint
    from tep.backends.libfabric.peer import Peer

__all__ = ["Mailbox", "Queue", "Regions", "Slots"]

_STEP: Final = 64  # from one context to the next
_LOCAL: Final = 1 << 62
_READ_MAX: Final = 2048
_SENT: Final = 1 << 1  # of a completion's flags
_IMM_FLAG: Final = HAS_IMM >> 1
_WRITE_FLAG: Final = 2 << 4

_WRITE: Final = int(Kind.WRITE)
_IMM: Final = int(Kind.IMM)
_OK: Final = int(Status.OK)


class Slots(slots.Slots):
    """Rows in flight.

    Args:
        rows_max: rows that may be in flight; the queue holds them and the messages.
        way: how rows are posted.
        nic: where peers are.
    """

    chunk_rows = 4096

    def __init__(self, rows_max: int, way: RowWise | Columns, nic: Nic) -> None:
        super().__init__(rows_max, 0, more=True)
        self._way = way
        self._nic = nic
        count = self.count = len(self._owner)
        assert count + rows_max < 1 << 16, "request ids have 16 bits"
        self._base, self._end = 0, count * _STEP
        self._free = np.arange(count)[::-1] * _STEP
        self._frees = memoryview(self._free)  # type: ignore[arg-type]  # a buffer

    def _build(self) -> None:
        """No records: the way has its own."""

    def post(self, _call: Callable[..., int], _endpoint: object, ticket: Ticket, n: int) -> int:
        batch, start = ticket.batch, ticket.row
        stop, nbytes, rkey = start + n, batch.nbytes, batch.rkey
        assert isinstance(rkey, int)
        # The first row takes the top of the stack.
        numbers = self._free[self._top - n : self._top][::-1] >> 6
        lengths = nbytes if isinstance(nbytes, int) else nbytes[start:stop]
        self._way.write(
            n,
            numbers,
            self._nic.place(ticket.peer.number),
            batch.src if isinstance(batch.src, int) else batch.src[start:stop],
            batch.dst if isinstance(batch.dst, int) else batch.dst[start:stop],
            lengths,
            ticket.region.desc,
            rkey,
            batch.imm if batch.imm is None or isinstance(batch.imm, int) else batch.imm[start:stop],
        )
        ticket.slots = numbers
        if isinstance(lengths, int):
            ticket.each = lengths
            total = n * lengths
        else:
            ticket.nbytes = total = int(lengths.sum())
        self._owner[numbers] = self._issue(ticket, n, total)
        self._top -= n
        return n

    def post_row(
        self,
        _call: Callable[..., int],
        _endpoint: object,
        ticket: Ticket,
        src: int,
        dst: int,
        rkey: int,
        nbytes: int,
        imm: int | None,
    ) -> int:
        number = self._frees[self._top - 1] >> 6
        place = self._nic.place(ticket.peer.number)
        self._way.write_one(number, place, src, dst, nbytes, ticket.region.desc, rkey, imm)
        ticket.slots = [number]
        ticket.each = nbytes
        self._owners[number] = self._issue(ticket, 1, nbytes)
        self._top -= 1
        return 1


class Regions(regions.Regions):
    """Registered memory.

    Args:
        nic: where.
        dmabuf: exports device memory; without it only the CPU's can be registered.
    """

    def __init__(self, nic: Nic, dmabuf: DmabufExport | None = None) -> None:
        self._device = nic
        self._dmabuf = dmabuf
        self._turn = 0
        self.by_lkey, self.by_rkey, self.dying = {}, {}, []

    def add(self, memory: Memory, access: Access) -> regions.Region:
        target = access.target
        flags = ENUMS["IBV_ACCESS_LOCAL_WRITE"] | ENUMS["IBV_ACCESS_REMOTE_WRITE"] if target else 0
        if self._dmabuf is not None and memory.kind != "cpu":
            with exported(self._dmabuf, memory) as (fd, offset):
                handle = self._device.register_dmabuf(fd, offset, memory.ptr, memory.nbytes, flags)
        else:
            handle = self._device.register(memory.ptr, memory.nbytes, flags)
        # The engine's local key is a number of ours: a device may give the same as lkey and rkey,
        # and a mix-up should fail.
        self._turn += 1
        key = DomainKey(_LOCAL | self._turn << 24 | handle.lkey, handle.rkey, memory.ptr)
        region = regions.Region(handle, memory, key, handle.lkey, target)
        self.by_lkey[key.lkey] = region
        if target:
            self.by_rkey[key.rkey] = region
        return region


class Mailbox(mailbox.Mailbox):
    """Message buffers; an immediate takes a receive as well, which is posted again.

    Args:
        nic: whose.
        way: how they are posted.
        frame_bytes: of the longest message.
        receives, sends: buffers for each direction.
        first: the first request id of messages that go out.
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
        self._frame_bytes = -(-frame_bytes // 64) * 64
        self._receives = receives
        self._first = first
        count = receives + sends
        # An anonymous mapping: pages that no message has touched cost nothing until registered.
        self._bytes = mmap.mmap(-1, count * self._frame_bytes)
        memory = adapt(self._bytes)
        handle = nic.register(memory.ptr, memory.nbytes, ENUMS["IBV_ACCESS_LOCAL_WRITE"])
        self._lkey = handle.lkey
        self.region = regions.Region(handle, memory, DomainKey(0, 0, 0), handle.lkey, target=False)
        self._view = memoryview(self._bytes)
        self._buffers = memory.ptr
        self._contexts = first * _STEP
        self._end = self._contexts + count * _STEP
        self._owner: list[Peer | None] = [None] * count
        self._free = list(range(receives, count))
        self.idle: list[int] = list(range(receives))
        self.spent: list[Numbers] = []
        self._started = False
        way.lay_out(Span(memory.ptr, self._frame_bytes, receives, handle.lkey))

    def start(self, _endpoint: Endpoint) -> None:
        self._started = True
        self.refill()

    def refill(self) -> int:
        if not self._started or self._device.closed or self._device.failure:
            return 0
        spent, self.spent = self.spent, []
        if self.idle:
            spent.append(np.array(self.idle, np.uint16))
            self.idle.clear()
        if spent:
            try:
                self._way.receive(spent[0] if len(spent) == 1 else np.concatenate(spent))
            except OSError as error:
                self._device.lose(f"{error.strerror}: {error.errno}")
        return 0

    def stop(self) -> None:
        """Post nothing any more: the queue pair is closed."""
        self._started = False

    def send(self, peer: Peer, _endpoint: Endpoint, frame: bytes) -> bool:
        if not self._free or peer.sends >= mailbox.OUT_PER_PEER:
            return False
        assert len(frame) <= self._frame_bytes, (len(frame), self._frame_bytes)
        index = self._free[-1]
        at = index * self._frame_bytes
        self._view[at : at + len(frame)] = frame
        number = self._first + index - self._receives
        place = self._device.place(peer.number)
        self._way.send(number, place, self._buffers + at, len(frame), self._lkey)
        self._free.pop()
        self._owner[index] = peer
        peer.sends += 1
        return True

    def received(self, context: int, nbytes: int, take: Callable[[memoryview], None]) -> None:
        index = (context - self._contexts) // _STEP
        at = index * self._frame_bytes
        with self._view[at : at + nbytes] as view:
            take(view)
        self.idle.append(index)

    def dropped(self, context: int) -> None:
        self.idle.append((context - self._contexts) // _STEP)
        self.refill()

    def receive_context(self, number: int) -> int:
        """The context of a receive, from its request id."""
        return self._contexts + number * _STEP

    def send_context(self, number: int) -> int:
        """The context of a message that went out, from its request id."""
        return self._contexts + (self._receives + number - self._first) * _STEP


class Queue(completions.Queue):
    """The completion queue, sorted by columns.

    Args:
        nic, way, slots, mailbox: of one NIC.
    """

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
        if not n:
            # A NIC that is lost is news too, once all that it had completed is handed out.
            self.full = self._stopped = bool(self._device.failure)
            return filled
        self._device.armed = False
        self.full = n == room
        if n == 1:
            filled = self._take_entry(found[0].item(), out, filled)
        else:
            filled = self._take_entries(found, out, filled)
        if self._box.idle or self._box.spent:
            self._box.refill()
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
            ticket = self._slots.take_back(number * _STEP)
            if ticket is not None:
                ticket.peer.heard = True
                put_completion(out, at, _WRITE, _OK, 1, 0, 0, ticket.batch.ctx, 0)
                return filled + 1
        elif flags & _WRITE_FLAG:
            self._box.idle.append(number)
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
            context = number * _STEP if number < self._rows else box.send_context(number)
        text = f"the device's status {status}"
        self.errors.append(CqError(context, flags, 5, status, text))

    def _take_entries(self, found: Entries, out: Completions, filled: int) -> int:
        bad = found["status"]
        if bad.any():
            for entry in found[bad != 0].tolist():
                self._take_error(entry[0], entry[1], entry[2])
            found = found[bad == 0]
            if not len(found):
                return filled
        flags, numbers = found["flags"], found["req_id"]
        sent = (flags & np.uint8(_SENT)) != 0
        nsent = int(np.count_nonzero(sent))
        if nsent:
            mine = numbers if nsent == len(found) else numbers[sent]
            of_rows = mine < self._rows
            if not of_rows.all():
                for number in mine[~of_rows].tolist():
                    self._box.sent(self._box.send_context(number))
                mine = mine[of_rows]
            if len(mine):
                done = self._slots.give_back_many(mine.astype(np.int64) * _STEP)
                for ctx, count in done.items():
                    out[filled] = (_WRITE, _OK, count, 0, 0, ctx, 0)
                    filled += 1
        if nsent == len(found):
            return filled
        if nsent:
            found = found[~sent]
            flags, numbers = found["flags"], found["req_id"]
        writes = (flags & np.uint8(_WRITE_FLAG)) != 0
        if not writes.all():
            lengths = found["length"]
            for at in np.flatnonzero(~writes).tolist():
                context = self._box.receive_context(int(numbers[at]))
                self._box.received(context, int(lengths[at]), self._keep)
            found, numbers = found[writes], numbers[writes]
        if len(found):
            self._box.spent.append(numbers.copy())
            filled = self._take_imms(found["imm"], out, filled)
        return filled
