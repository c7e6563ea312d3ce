"""Rows of one NIC that wait or end, where some are reads.

A batch of reads goes through the shared parts as one of writes whose ctx has the bit `READ`; here,
in slots.py and flight.py that bit decides what its rows are posted as, and how their ends are told.
"""

from __future__ import annotations

from typing import Final

from tep.backends.base import Kind, Row, Status, WriteBatch
from tep.backends.efa.slots import READ, Slots
from tep.backends.libfabric import rows
from tep.backends.libfabric.peer import Peer

__all__ = ["Rows"]

_READ_KIND: Final = int(Kind.READ)


class Rows(rows.Rows[Peer]):
    """Those of one NIC."""

    _slots: Slots

    def post_each(self, batch: WriteBatch, start: int, stop: int) -> int:
        """Accept rows one by one; return how many."""
        return self._post_each(batch, start, stop)

    def _place(self, batch: WriteBatch, index: int, row: Row) -> bool:
        if batch.ctx & READ and not row.nbytes:  # its keys mean nothing (C29): no device is asked
            self.fail(batch.ctx, index, Status.OK)
            return True
        return super()._place(batch, index, row)

    def fail(self, ctx: int, row: int, status: Status) -> None:
        if ctx & READ:
            self._slots.reads -= 1
            self._done.append((_READ_KIND, int(status), 1, 0, row, ctx ^ READ, 0))
        else:
            super().fail(ctx, row, status)

    def end(self, peer: Peer, status: Status, *, gone: bool, spare: bool = False) -> None:
        if not gone and status is not Status.NIC_DOWN:
            # The device has these reads still, and may write where they go.
            slots = self._slots
            for ticket in [ticket for ticket in slots.tickets.values() if ticket.peer is peer]:
                if ticket.batch.ctx & READ:
                    for row in slots.give_up(ticket, gone=False):
                        self.fail(ticket.batch.ctx, row, Status.GIVEN_UP)
        super().end(peer, status, gone=gone, spare=spare)
