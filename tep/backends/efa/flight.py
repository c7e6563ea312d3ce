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
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import numpy.typing as npt

from tep.backends.base import (
    COMPLETION_BYTES,
    Access,
    Column,
    Completions,
    DomainKey,
    Kind,
    Status,
    put_completion,
)
from tep.backends.columns import part
from tep.backends.efa.device import Nic
from tep.backends.efa.entries import HAS_IMM, KINDS
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
_IDS_PER_ROW: Final = 4  # so that ids come back before their turn comes again
_LOOK_AHEAD: Final = 8192  # ids
_SPREAD: Final = 16
_REFILL_SHARE: Final = 4  # of the receives, one part may be unposted: many at a time cost less
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

    Request ids are handed out in turn, so that those of one post lie side by side; ids whose rows
    have not come back are passed over.

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
        count = self.count = _IDS_PER_ROW * rows_max
        assert count + rows_max < 1 << 16, "request ids have 16 bits"
        self._base, self._end, self._top = 0, count * _STEP, 0
        self._owner = np.zeros(count, np.int64)
        self._owners = memoryview(self._owner)  # type: ignore[arg-type]  # a buffer
        self._ids = np.arange(count, dtype=np.uint16)
        self._cursor = 0
        self._clear = count  # ids from the cursor on that are known to be free

    def _build(self) -> None:
        """No records: the way has its own."""

    @property
    def room(self) -> int:
        """Rows that may still be posted."""
        return self._rows_max - self.open - self.adrift

    def post(self, _call: Callable[..., int], _endpoint: object, ticket: Ticket, n: int) -> int:
        batch, start = ticket.batch, ticket.row
        stop = start + n
        src, dst, nbytes = (
            part(column, start, stop) for column in (batch.src, batch.dst, batch.nbytes)
        )
        imm = None if batch.imm is None else part(batch.imm, start, stop)
        return self.post_columns(ticket, n, src, dst, nbytes, imm)

    def post_columns(
        self, ticket: Ticket, n: int, src: Column, dst: Column, nbytes: Column, imm: Column | None
    ) -> int:
        """Post the first of n rows, one peer, one key, and return how many; there is room."""
        first, taken = self._cursor, n
        if self._clear < n:
            first, taken = self._look_ahead(n)
            if taken < n:
                src, dst, nbytes = (part(column, 0, taken) for column in (src, dst, nbytes))
                imm = None if imm is None else part(imm, 0, taken)
        rkey = ticket.batch.rkey
        assert isinstance(rkey, int)
        last = first + taken
        self._way.write(
            taken,
            self._ids[first:last],
            self._nic.place(ticket.peer.number),
            src,
            dst,
            nbytes,
            ticket.region.desc,
            rkey,
            imm,
        )
        self._cursor = last
        self._clear -= taken
        ticket.slots = cast("list[int]", range(first, last))
        if isinstance(nbytes, int):
            ticket.each = nbytes
            total = taken * nbytes
        else:
            ticket.nbytes = total = int(nbytes.sum())
        self._owner[first:last] = self._issue(ticket, taken, total)
        return taken

    def _look_ahead(self, n: int) -> tuple[int, int]:
        """Move the cursor to the next free ids: the first of them, and n or how many there are."""
        owner, at = self._owner, self._cursor
        while True:
            at %= self.count
            busy = owner[at : at + _LOOK_AHEAD] != 0
            first = int(busy.argmax())
            if not busy[first]:  # all are free
                first = len(busy)
            if first:
                break
            at += int(busy.argmin()) or len(busy)
        self._cursor, self._clear = at, first
        return at, min(n, first)

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
        number = self._cursor if self._clear else self._look_ahead(1)[0]
        place = self._nic.place(ticket.peer.number)
        self._way.write_one(number, place, src, dst, nbytes, ticket.region.desc, rkey, imm)
        self._cursor = number + 1
        self._clear -= 1
        ticket.slots = [number]
        ticket.each = nbytes
        self._owners[number] = self._issue(ticket, 1, nbytes)
        return 1

    def take_back(self, context: int) -> Ticket | None:
        number = context // _STEP
        owner = self._owners[number]
        assert owner, f"a row completed twice: request id {number}"
        self._owners[number] = 0
        ticket = self.tickets.get(owner)
        if ticket is None:
            self._count_given_up(owner, 1)
        else:
            self._count_off(ticket, 1)
        return ticket

    def take_failed(self, context: int) -> tuple[Ticket, int] | None:
        ticket = self.take_back(context)
        if ticket is None:
            return None
        return ticket, ticket.row + context // _STEP - int(ticket.slots[0])

    def give_back_many(self, numbers: npt.NDArray[np.signedinteger]) -> dict[int, int]:
        """Take finished rows back, by their request ids; how many of each batch, by its ctx."""
        n, owner = len(numbers), self._owner
        if len(self.tickets) == 1 and not self._given_up:
            ticket = next(iter(self.tickets.values()))
            assert n <= ticket.open, "a row completed twice"
            if n == ticket.open:
                first = ticket.slots[0]
                owner[first : first + len(ticket.slots)] = 0
            else:
                owner[numbers] = 0
            return self._settle({ticket.number: n})
        owners = owner[numbers]
        owner[numbers] = 0
        least = int(owners.min())
        assert least, "a row completed twice"
        span = int(owners.max()) - least
        if not span:
            return self._settle({least: n})
        if span <= _SPREAD * n:
            counts = np.bincount(owners - least)
            found = {least + at: int(counts[at]) for at in np.flatnonzero(counts).tolist()}
        else:
            found = dict(Counter(owners.tolist()))
        return self._settle(found)


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
        self._spent: list[Numbers] = []
        self.unposted = receives
        self.refill_from = max(1, receives // _REFILL_SHARE)
        self._started = False
        way.lay_out(Span(memory.ptr, self._frame_bytes, receives, handle.lkey))

    def start(self, _endpoint: Endpoint) -> None:
        self._started = True
        self.refill()

    def refill(self) -> int:
        if not self._started or self._device.closed or self._device.failure:
            return 0
        spent, self._spent = self._spent, []
        self.unposted = 0
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
        self.give_back(index)

    def give_back(self, index: int) -> None:
        """A receive has been used; refill() posts it again, with others."""
        self.idle.append(index)
        self.unposted += 1

    def take_spent(self, indices: Numbers) -> None:
        """Receives have been used by immediates."""
        self._spent.append(indices.copy())
        self.unposted += len(indices)

    def dropped(self, context: int) -> None:
        self.give_back((context - self._contexts) // _STEP)
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
        self.full = self._way.more
        if n == 1:
            filled = self._take_entry(found[0].item(), out, filled)
        else:
            filled = self._take_entries(found, out, filled)
        if self._box.unposted >= self._box.refill_from:
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
            context = number * _STEP if number < self._rows else box.send_context(number)
        text = f"the device's status {status}"
        self.errors.append(CqError(context, flags, 5, status, text))

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
            self._box.take_spent(numbers)
            imms = found["imm"]
            imm = int(imms[0])
            if (imms == imm).all():
                at = filled * COMPLETION_BYTES
                put_completion(out, at, _IMM, _OK, len(imms), imm, 0, 0, 0)
                return filled + 1
            return self._take_imms(imms, out, filled)
        for number, length in zip(numbers.tolist(), found["length"].tolist(), strict=True):
            self._box.received(self._box.receive_context(number), length, self._keep)
        return filled

    def _take_sent(self, numbers: Numbers, out: Completions, filled: int) -> int:
        mine = numbers.astype(np.intp)
        if int(mine.max()) >= self._rows:
            of_rows = mine < self._rows
            for number in mine[~of_rows].tolist():
                self._box.sent(self._box.send_context(number))
            mine = mine[of_rows]
            if not len(mine):
                return filled
        for ctx, count in self._slots.give_back_many(mine).items():
            put_completion(out, filled * COMPLETION_BYTES, _WRITE, _OK, count, 0, 0, ctx, 0)
            filled += 1
        return filled
