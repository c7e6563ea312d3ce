"""Rows in flight on one NIC, by request id. What all backends share is in libfabric's `Slots`.

Nothing here knows a completion or a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from tep.backends.base import Column
from tep.backends.columns import part
from tep.backends.efa.device import Nic
from tep.backends.efa.entries import OP_READ, OP_WRITE
from tep.backends.efa.rowwise import Numbers, RowWise
from tep.backends.libfabric import slots
from tep.backends.libfabric.efa.reads import READ
from tep.backends.libfabric.slots import Ticket

if TYPE_CHECKING:
    from tep.backends.efa.columns import Columns

__all__ = ["STEP", "Slots"]

STEP: Final = 64  # from one context to the next
_IDS_PER_ROW: Final = 4  # so that ids come back before their turn comes again
_LOOK_AHEAD: Final = 8192  # ids
_SPREAD: Final = 16
_UNMARKED_MAX: Final = 4  # tickets whose rows are counted by comparing ids with where they begin


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
        self._base, self._end, self._top = 0, count * STEP, 0
        self._owner = np.zeros(count, np.int64)
        self._owners = memoryview(self._owner)  # type: ignore[arg-type]  # a buffer
        self._ids = np.arange(count, dtype=np.uint16)
        # The tickets that are out, as long as `_owner` does not name their rows, the oldest first;
        # what came back meanwhile is in `_back`. Empty: it names all.
        self._unmarked: list[Ticket] = []
        self._back: list[Numbers] = []
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
            OP_READ if ticket.batch.ctx & READ else OP_WRITE,
        )
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
        if self._unmarked:
            self._mark()
        number = self._cursor if self._clear else self._look_ahead(1)[0]
        place = self._nic.place(ticket.peer.number)
        op = OP_READ if ticket.batch.ctx & READ else OP_WRITE
        self._way.write_one(number, place, src, dst, nbytes, ticket.region.desc, rkey, imm, op)
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

    def _count_back(self, numbers: Numbers, left: int) -> dict[int, int]:
        """How many of some ids are of each unmarked ticket, by its number."""
        unmarked, found = self._unmarked, dict[int, int]()
        for ticket in tuple(unmarked):
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
                    unmarked.remove(ticket)
            if not left:
                break
        if unmarked:
            self._back.append(numbers)
        else:
            self._back.clear()
        return found
