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
        # The only ticket that is out, as long as `_owner` does not name its rows; those that came
        # back are in `_back`.
        self._lone: Ticket | None = None
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
        if self._lone is not None:
            self._mark()
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
        is_lone = not (self.tickets or self._given_up)
        number = self._issue(ticket, taken)
        if is_lone:
            self._lone = ticket
        else:
            self._owner[first:last] = number
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
        if self._lone is not None:
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
        """Say whose the ids of the lone ticket are: it is not alone any more, or one row is asked
        for.
        """
        ticket, self._lone = self._lone, None
        assert ticket is not None
        first = ticket.slots[0]
        self._owner[first : first + len(ticket.slots)] = ticket.number
        for numbers in self._back:
            self._owner[numbers] = 0
        self._back.clear()

    def take_back(self, context: int) -> Ticket | None:
        if self._lone is not None:
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
        if self._lone is not None:
            self._mark()
        return super().give_up(ticket, gone=gone)

    def give_back_many(self, numbers: Numbers) -> dict[int, int]:
        """Take finished rows back, by their request ids; how many of each batch, by its ctx."""
        n, ticket = len(numbers), self._lone
        if ticket is not None:
            assert n <= ticket.open, "a row completed twice"
            if n < ticket.open:
                self._back.append(numbers)
            else:
                self._lone = None
                self._back.clear()
            return self._settle({ticket.number: n})
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
