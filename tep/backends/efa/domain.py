"""One EFA NIC behind the seam, without libfabric: its queues, under the care of `FabricDomain`.

Greetings, deadlines, messages and what becomes of rows that fail are the same whoever posts them,
and stand in tep.backends.libfabric. Here are parts that fill the places of libfabric's: rows in
flight by request id, memory, message buffers, and completions, sorted.

    request id      of the send queue: a row's slot; behind the last slot a message's buffer
                    of the receive queue: the receive buffer
    context         what the shared parts know a request by: 64 times its number, rows first, then
                    receive buffers, then those of messages that go out
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from tep.backends.base import (
    COMPLETION_BYTES,
    Access,
    Column,
    Completions,
    DomainCaps,
    DomainKey,
    Kind,
    Status,
    WriteBatch,
    new_completions,
    put_completion,
)
from tep.backends.common import part
from tep.backends.efa.device import Nic
from tep.backends.efa.ways import KINDS, OP_READ, OP_WRITE, Columns, Entries, Numbers
from tep.backends.ffi.ibverbs import ENUMS, rights
from tep.backends.libfabric import completions, objects, slots
from tep.backends.libfabric.domain import FabricDomain
from tep.backends.libfabric.frames import HEAD_BYTES_MAX
from tep.backends.libfabric.objects import CqError
from tep.backends.libfabric.peer import Peer, State
from tep.backends.libfabric.slots import READ, Ticket
from tep.base.units import MiB
from tep.memory.source import DmabufExport, Memory

if TYPE_CHECKING:
    from tep.backends.libfabric.objects import Endpoint, Region
    from tep.backends.libfabric.rules import Rules

__all__ = ["STEP", "EfaDomain", "Mailbox", "Queue", "Regions", "Slots"]

_LOOK_EVERY: Final = 4096  # polls between two looks at the device's events
_FEW: Final = 3  # rows up to which one by one is cheaper than columns
_SLOWEST_BYTES_PER_S: Final = 64 * MiB  # a row may take so much longer than peer_timeout_s: guessed
_READY: Final = State.READY  # looking it up in its class takes 0.1 us


class EfaDomain(FabricDomain):
    """One NIC, opened, which this object closes; the rest as for `FabricDomain`."""

    _slots: Slots

    def __init__(
        self,
        nic: Nic,
        way: Columns,
        rules: Rules,
        caps: DomainCaps,
        *,
        epoch: int,
        dmabuf: DmabufExport | None,
        about: str,
    ) -> None:
        self._way = way
        self._device = nic
        self._polls = 0
        self._depth, self._longest = caps.sq_depth, caps.max_write_bytes
        self._half_window = max(1, rules.window_rows // 2)
        # A NIC of libfabric by what is asked of it.
        face = cast("Any", nic)
        super().__init__(face, rules, caps, epoch=epoch, dmabuf=dmabuf, about=about)

    def _make(
        self, nic: Any, rules: Rules, dmabuf: DmabufExport | None
    ) -> tuple[Slots, objects.Regions, completions.Mailbox, completions.Queue]:
        del nic  # libfabric's
        rows = Slots(rules.window_rows, self._way, self._device)
        frame_bytes = rules.msg_bytes_max + HEAD_BYTES_MAX
        box = Mailbox(
            self._device, self._way, frame_bytes, rules.frames_in, rules.frames_out, rows.count
        )
        queue = Queue(self._device, self._way, rows, box)
        return rows, Regions(self._device, dmabuf), box, queue

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        """Post what is simple without a detour: one peer that is ready, one key."""
        number, rkey = batch.peer, batch.rkey
        if type(number) is int and type(rkey) is int and not (self._closed or self._device.closed):
            peer = self.peers.all[number]
            region = self._regions.by_lkey.get(batch.lkey)
            if region is not None and peer.state is _READY and not peer.held:
                slots, rows = self._slots, self._rows
                room = min(slots.room, self._depth - slots.open - rows.waiting)
                if room <= 0:
                    return 0
                if batch.n == 1:
                    taken = self._post_lone(batch, rkey, peer, region)
                else:
                    taken = self._post_columns(batch, start, stop, room, peer, region)
                if taken is not None:
                    return taken
        return super().post(batch, start, stop)

    def _post_lone(self, batch: WriteBatch, rkey: int, peer: Peer, region: Region) -> int | None:
        """Post the only row of a batch; None = it is not simple."""
        src, dst, nbytes, imm = batch.src, batch.dst, batch.nbytes, batch.imm
        if not (type(src) is int and type(dst) is int and type(nbytes) is int):
            return None
        if not (imm is None or type(imm) is int):
            return None
        if not (region.start <= src and src + nbytes <= region.end and 0 < nbytes <= self._longest):
            return None
        due_s = time.monotonic() + self.timeout_s + nbytes / _SLOWEST_BYTES_PER_S
        ticket = Ticket(batch, 0, peer, region, due_s)
        return self._slots.post_row(_no_call, None, ticket, src, dst, rkey, nbytes, imm)

    def _post_columns(
        self, batch: WriteBatch, start: int, stop: int, room: int, peer: Peer, region: Region
    ) -> int | None:
        """Post what there is room for of some rows; None = they are not simple."""
        slots = self._slots
        n = wanted = min(stop - start, slots.chunk_rows)
        if room < wanted:
            # Half a window at a time: a row by itself costs ten times what it costs among others.
            if slots.open and room < self._half_window:
                return 0
            n = room
        if n <= _FEW:
            return None
        src, dst, nbytes, imm = batch.src, batch.dst, batch.nbytes, batch.imm
        if n < batch.n:
            stop = start + n
            src, dst, nbytes = (part(column, start, stop) for column in (src, dst, nbytes))
            imm = None if imm is None else part(imm, start, stop)
        longest = nbytes if isinstance(nbytes, int) else int(nbytes.max())
        if not 0 < longest <= self._longest:
            return None
        # Whether the rows lie in the region is looked at by the device, which ends each that does
        # not by itself (status 5); two passes over the column here cost 3 us a batch.
        due_s = time.monotonic() + self.timeout_s + n * longest / _SLOWEST_BYTES_PER_S
        ticket = Ticket(batch, start, peer, region, due_s)
        return slots.post_columns(ticket, n, src, dst, nbytes, imm)

    def poll(self, out: Completions) -> int:
        self._polls += 1
        if not self._polls % _LOOK_EVERY and not self._device.closed:
            self._device.read_event()
        return FabricDomain.poll(self, out)  # super() takes 0.1 us more


def _no_call(*_: object) -> int:
    """Stand where a call of libfabric would; never called."""
    raise AssertionError


STEP: Final = 64  # from one context to the next
_IDS_PER_ROW: Final = 4  # so that ids come back before their turn comes again
_LOOK_AHEAD: Final = 8192  # ids
_SPREAD: Final = 16
_UNMARKED_MAX: Final = 4  # tickets whose rows are counted by comparing ids with where they begin


class Slots(slots.Slots):
    """Rows in flight.

    Request ids are handed out in turn, so that those of one post lie side by side; ids whose rows
    have not come back are passed over. `rows_max` rows may be in flight: the queue holds them and
    the messages.
    """

    chunk_rows = 4096

    def __init__(self, rows_max: int, way: Columns, nic: Nic) -> None:
        super().__init__(rows_max, 0)
        self._way = way
        self._nic = nic

    def _build(self) -> None:
        """Make the table of request ids; the way has records of its own."""
        count = self.count = _IDS_PER_ROW * self._rows_max
        assert count + self._rows_max < 1 << 16, "request ids have 16 bits"
        self._base, self._end, self._top = 0, count * STEP, 0
        self._owner = np.zeros(count, np.int64)
        self._owners = memoryview(self._owner)  # type: ignore[arg-type]  # a buffer
        self._ids = np.arange(count, dtype=np.uint16)
        self._busy = np.empty(_LOOK_AHEAD, np.bool_)
        # The tickets that are out, as long as `_owner` does not name their rows, the oldest first;
        # what came back meanwhile is in `_back`. Empty: it names all.
        self._unmarked: list[Ticket] = []
        self._back: list[Numbers] = []
        self._cursor = 0
        self._clear = count  # ids from the cursor on that are known to be free

    @property
    def room(self) -> int:
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
        op = OP_READ if ticket.batch.ctx & READ else OP_WRITE
        ends = self._nic.place(ticket.peer.number), ticket.region.desc, rkey, op
        self._way.write(taken, self._ids[first:last], ends, src, dst, nbytes, imm)
        self._cursor = last
        self._clear -= taken
        ticket.slots = cast("list[int]", range(first, last))
        self._count_bytes(ticket, taken, nbytes)
        unmarked = self._unmarked
        few = len(unmarked) == len(self.tickets) < _UNMARKED_MAX and not self._given_up
        if unmarked and not few:
            self._mark()
        number = self._issue(ticket, taken)
        if few:
            unmarked.append(ticket)
        else:
            self._owner[first:last] = number
        return taken

    def _look_ahead(self, n: int) -> tuple[int, int]:
        """Move the cursor to the next free ids: the first of them, and n or how many there are."""
        if self._unmarked:
            self._mark()
        owner, at = self._owner, self._cursor
        while True:
            at %= self.count
            ahead = owner[at : at + _LOOK_AHEAD]
            busy = np.not_equal(ahead, 0, out=self._busy[: len(ahead)])  # post() needs no memory
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
        if self._unmarked:
            self._mark()
        number = self._cursor if self._clear else self._look_ahead(1)[0]
        op = OP_READ if ticket.batch.ctx & READ else OP_WRITE
        ends = self._nic.place(ticket.peer.number), ticket.region.desc, rkey, op
        self._way.write_one(number, ends, src, dst, nbytes, imm)
        self._cursor = number + 1
        self._clear -= 1
        ticket.slots = [number]
        ticket.each = nbytes
        self.nbytes += nbytes
        self._owners[number] = self._issue(ticket, 1)
        return 1

    def _mark(self) -> None:
        """Say of each id whose it is."""
        for ticket in self._unmarked:
            first = ticket.slots[0]
            self._owner[first : first + len(ticket.slots)] = ticket.number
        for numbers in self._back:
            self._owner[numbers] = 0
        self._unmarked.clear()
        self._back.clear()

    def take_back(self, context: int) -> Ticket | None:
        if self._unmarked:
            self._mark()
        number = context // STEP
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
        return ticket, ticket.row + context // STEP - int(ticket.slots[0])

    def give_up(self, ticket: Ticket, *, gone: bool) -> list[int]:
        if self._unmarked:
            self._mark()
        return super().give_up(ticket, gone=gone)

    def give_back_many(self, numbers: Numbers) -> dict[int, int]:
        """Take finished rows back, by their request ids; how many of each batch, by its ctx."""
        n = len(numbers)
        if self._unmarked:
            return self._settle(self._count_back(numbers, n))
        owner, numbers = self._owner, numbers.astype(np.intp)  # the type that an index costs least
        owners = owner[numbers]
        least = int(owners.min())
        assert least, "a row completed twice"
        span = int(owners.max()) - least
        if not span:
            found = {least: n}
        elif span <= _SPREAD * n:
            counts = np.bincount(owners - least)
            found = {least + at: int(counts[at]) for at in np.flatnonzero(counts).tolist()}
        else:
            found = dict(Counter(owners.tolist()))
        owner[numbers] = 0
        return self._settle(found)

    def _count_back(self, numbers: Numbers, left: int) -> dict[int, int]:
        """Count the ids that belong to each unmarked ticket, by its number."""
        unmarked, found, ended = self._unmarked, dict[int, int](), []
        for ticket in unmarked:
            n = left
            if ticket is not unmarked[-1]:
                # Ids before the first one turn round, to far behind the last one.
                from_first = numbers - np.uint16(ticket.slots[0])
                n = int(np.count_nonzero(from_first < len(ticket.slots)))
            if n:
                assert n <= ticket.open, "a row completed twice"
                found[ticket.number] = n
                left -= n
                if n == ticket.open:
                    ended.append(ticket)
            if not left:
                break
        for ticket in ended:
            unmarked.remove(ticket)
        if unmarked:
            self._back.append(numbers)
        else:
            self._back.clear()
        return found


_DRAINED: Final = 512  # completions that are taken at a time where nobody waits for them
_REFILL_SHARE: Final = 4  # of the receives, one or two parts may be unposted: many cost less
_LOCAL: Final = 1 << 62
_SENT: Final = 1 << 1  # of a completion's flags
_WRITE_FLAG: Final = 2 << 4

_IMM: Final = int(Kind.IMM)
_OK: Final = int(Status.OK)


class Regions(objects.Regions):
    """Registered memory; without `dmabuf`, which exports a device's, only the CPU's."""

    def __init__(self, nic: Nic, dmabuf: DmabufExport | None = None) -> None:
        self._device = nic
        self._dmabuf = dmabuf
        self._turn = 0
        self.by_lkey, self.by_rkey, self.readable, self.dying = {}, {}, {}, []

    def add(self, memory: Memory, access: Access) -> objects.Region:
        target = access.target
        flags = rights(access)
        handle = self._device.hold(memory, flags, self._dmabuf)
        # The engine's local key is a number of ours: a device may give the same as lkey and rkey,
        # and a mix-up should fail.
        self._turn += 1
        key = DomainKey(_LOCAL | self._turn << 24 | handle.lkey, handle.rkey, memory.ptr)
        region = objects.Region((handle,), memory, key, handle.lkey, target)
        self.by_lkey[key.lkey] = region
        if target or access.readable:
            self.by_rkey[key.rkey] = region
        if access.readable:
            self.readable[key.rkey] = region
        return region

    def cut(self, key: DomainKey, reads_at: Callable[[objects.Region], list[bool]]) -> None:
        """End a registration at once where peers may read, or reads in flight write.

        The device ends such rows by itself. Others wait for the rows in flight that read there.
        """
        region = self.by_lkey.get(key.lkey)
        if region is None:
            return
        if region.key.rkey in self.readable or any(reads_at(region)):
            self.readable.pop(region.key.rkey, None)
            region.close()


class Mailbox(completions.Mailbox):
    """Message buffers; an immediate takes a receive as well, which is posted again.

    Args:
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
        way: Columns,
        frame_bytes: int,
        receives: int,
        sends: int,
        first: int,
    ) -> None:
        self._device = nic
        self._way = way
        self._first = first
        memory = self._map(frame_bytes, receives, sends)
        handle = nic.hold(memory, ENUMS["IBV_ACCESS_LOCAL_WRITE"])
        self._lkey = handle.lkey
        self.region = objects.Region(
            (handle,), memory, DomainKey(0, 0, 0), handle.lkey, target=False
        )
        self._contexts = first * STEP
        self._end = self._contexts + (receives + sends) * STEP
        self.spent = bytearray(array("H", range(receives)))
        self.refill_from = 2 * max(1, receives // _REFILL_SHARE)
        self._started = False
        way.lay_out(memory.ptr, self._frame_bytes, receives, handle.lkey)

    def start(self, _endpoint: Endpoint) -> None:
        self._started = True
        self.refill()

    def refill(self) -> int:
        if not self._started or self._device.closed or self._device.failure:
            return 0
        if self.spent:
            self._way.receive(self.spent)
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

    What is kept for want of memory stays where the device put it. It is taken in the device's
    order: the device writes over an entry only after all before it have been taken.
    """

    _slots: Slots
    _mailbox: Mailbox
    _left: Entries  # the last `_kept` are not sorted

    def __init__(self, nic: Nic, way: Columns, slots: Slots, mailbox: Mailbox) -> None:
        self._slots = slots
        self._drained = new_completions(_DRAINED)
        self.frames = deque()
        self.errors = deque()
        self._others = deque()
        self._kept = 0
        self.full = False
        self._device = nic
        self._way = way
        self._rows = slots.count
        self._mailbox = mailbox
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
        if self.behind:
            return self._catch_up(out, filled)
        found = self._way.poll(room)
        n = len(found)
        box = self._mailbox
        if not n:
            if len(box.spent) >= box.refill_from:
                box.refill()
            # A NIC that is lost is news too, once all that it had completed is handed out.
            self.full = self._stopped = bool(self._device.failure)
            return filled
        self._device.armed = False
        self.full = self._way.more
        try:
            if n == 1:
                filled = self._take_entry(found[0].item(), out, filled)
            elif self._way.kind is not None:
                filled = self._take_kind(self._way.kind, found, out, filled)
            else:
                filled = self._take_entries(found, out, filled)
        except MemoryError:
            self._keep_entries(found)
        try:
            if self._others:
                self._take_others()
            if len(box.spent) >= 2 * box.refill_from:  # else when there is nothing else to do
                box.refill()
        except MemoryError:
            self.behind = True
        return filled

    def _keep_entries(self, found: Entries) -> None:
        self._left, self._kept, self.behind = found, len(found), True

    def _take_kept(self, out: Completions, filled: int) -> int:
        filled = self._take_entry(self._left[-self._kept].item(), out, filled)
        self._kept -= 1
        return filled

    def _take_entry(self, entry: Any, out: Completions, filled: int) -> int:
        number, status, flags, _, length, _, _, imm = entry
        at = filled * COMPLETION_BYTES
        if status:
            self._take_error(number, status, flags)
        elif flags & _SENT:
            if number >= self._rows:
                self._others.append((self._mailbox.send_context(number), 0))
                return filled
            ticket = self._slots.take_back(number * STEP)
            if ticket is not None:
                ticket.peer.heard = True
                return self._end(ticket.batch.ctx, 1, out, filled)
        elif flags & _WRITE_FLAG:
            self._mailbox.give_back(number)
            put_completion(out, at, _IMM, _OK, 1, imm, 0, 0, 0)
            return filled + 1
        else:
            self._others.append((self._mailbox.receive_context(number), length))
        return filled

    def _take_error(self, number: int, status: int, flags: int) -> None:
        box = self._mailbox
        if not flags & _SENT:
            context = box.receive_context(number)
        else:
            context = number * STEP if number < self._rows else box.send_context(number)
        self.errors.append(CqError(context, status, f"the device's status {status}"))
        self.full = True

    def _take_entries(self, found: Entries, out: Completions, filled: int) -> int:
        """Sort entries by what they tell of: nearly always they are all of one kind."""
        kinds = found.view(KINDS)["kind"]
        try:
            while True:
                kind = int(kinds[0])
                same = kinds == kind
                if same.all():
                    return self._take_kind(kind, found, out, filled)
                others = ~same
                rest, kinds = found[others], kinds[others]
                filled = self._take_kind(kind, found[same], out, filled)
                found = rest
        except MemoryError:
            self._keep_entries(found)
        return filled

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
            spent, imms = numbers.tobytes(), found["imm"]
            n, values = len(imms), imms.tobytes()
            if values == values[:4] * n:  # a third of what comparing columns takes
                at = filled * COMPLETION_BYTES
                put_completion(out, at, _IMM, _OK, n, int(imms[0]), 0, 0, 0)
                filled += 1
            else:
                filled = self._take_imms(imms, out, filled)
            self._mailbox.spent += spent
            return filled
        contexts = map(self._mailbox.receive_context, numbers.tolist())
        self._others += list(zip(contexts, found["length"].tolist(), strict=True))
        return filled

    def _take_sent(self, numbers: Numbers, out: Completions, filled: int) -> int:
        mine = numbers.copy()
        if int(mine.max()) >= self._rows:
            of_rows = mine < self._rows
            messages = [(self._mailbox.send_context(k), 0) for k in mine[~of_rows].tolist()]
            mine = mine[of_rows]
            finished = self._slots.give_back_many(mine) if len(mine) else {}
            self._others += messages
        else:
            finished = self._slots.give_back_many(mine)
        for ctx, count in finished.items():
            filled = self._end(ctx, count, out, filled)
        return filled
