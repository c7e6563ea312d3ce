"""Reads on EFA: rows that the device carries out, among the writes, and told apart by one bit.

A batch of reads goes through the shared parts as one of writes whose ctx has the bit `READ`. Here
and in domain.py that bit decides by which call its rows are posted, and how their ends are told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tep.backends.base import Access, DomainKey, Kind, ReadBatch, Row, Status, WriteBatch
from tep.backends.ffi import libfabric as fi
from tep.backends.libfabric.objects import Endpoint
from tep.backends.libfabric.peer import Peer
from tep.backends.libfabric.regions import Regions
from tep.backends.libfabric.rows import Rows
from tep.backends.libfabric.slots import Slots

__all__ = ["READ", "HardwareRegions", "HardwareRows", "marked"]

READ: Final = 1 << 64
"""In a ctx, above its 64 bits: the batch is one of reads. The shared parts carry a ctx, and never
look at it; what is handed out has it no more."""

_READ_KIND: Final = int(Kind.READ)


def marked(batch: ReadBatch) -> WriteBatch:
    """A batch of reads, as the shared parts take it."""
    return WriteBatch(
        batch.n,
        batch.peer,
        batch.src,
        batch.lkey,
        batch.dst,
        batch.rkey,
        batch.nbytes,
        None,
        batch.ctx | READ,
    )


class HardwareRows(Rows[Peer]):
    """The rows of one NIC that have been accepted and have not ended."""

    def post_each(self, batch: WriteBatch, start: int, stop: int) -> int:
        """Accept rows one by one; return how many."""
        return self._post_each(batch, start, stop)

    def _place(self, batch: WriteBatch, index: int, row: Row) -> bool:
        if batch.ctx & READ and not row.nbytes:  # its keys mean nothing (C29): no device is asked
            self.fail(batch.ctx, index, Status.OK)
            return True
        return super()._place(batch, index, row)

    def _call(self, endpoint: Endpoint, batch: WriteBatch, nbytes: int) -> Callable[..., int]:
        return endpoint.readmsg if batch.ctx & READ else super()._call(endpoint, batch, nbytes)

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


class HardwareRegions(Regions):
    """Registered memory; what peers may read is registered once for us, and once for them.

    So the owner can end what peers do while its own rows are in flight. libfabric must not lose a
    registration that such a row was posted with: it may post the row again.
    """

    def _rights(self, access: Access) -> tuple[int, ...]:
        ours = fi.FI_WRITE | (fi.FI_READ if access.sink else 0)
        theirs = fi.FI_REMOTE_WRITE if access.target else 0
        if access.readable:
            return ours, theirs | fi.FI_REMOTE_READ
        return (ours | theirs,)

    def cut(self, key: DomainKey, slots: Slots) -> None:
        """End at once what peers may read, and what reads of ours write: the device ends those."""
        region = self.by_lkey.get(key.lkey)
        if region is None:
            return
        region.shut_out()
        if region.open and all(ticket.batch.ctx & READ for ticket in slots.of_region(region)):
            region.close()
