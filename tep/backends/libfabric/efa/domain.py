"""One NIC of EFA behind the seam: a device that says by itself what was wrong with a row.

It has one endpoint, which everything goes through, and of each peer an entry of the address vector.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from tep.backends.base import Completions, DomainKey, Kind, ReadBatch, Status
from tep.backends.libfabric import frames
from tep.backends.libfabric.domain import FabricDomain
from tep.backends.libfabric.efa.book import EfaBook
from tep.backends.libfabric.efa.device import STATUSES, check_device
from tep.backends.libfabric.efa.reads import READ, HardwareRegions, HardwareRows, marked
from tep.backends.libfabric.objects import CqError, Endpoint, Nic, Option
from tep.backends.libfabric.peer import Peer
from tep.backends.libfabric.slots import I64, Slots, Ticket
from tep.backends.texts import says

if TYPE_CHECKING:
    from tep.backends.libfabric.completions import Queue
    from tep.backends.libfabric.mailbox import Mailbox
    from tep.backends.libfabric.regions import Regions
    from tep.backends.libfabric.rules import Rules
    from tep.memory.source import DmabufExport

__all__ = ["HardwareDomain"]

_LOG: Final = logging.getLogger("tep.libfabric")
_NOBODY: Final = (
    "no peer has ever answered this NIC; on EC2 both instances need a security group that allows "
    "all traffic within itself, in both directions"
)
_READ: Final = int(Kind.READ)
_OK: Final = int(Status.OK)


class HardwareDomain(FabricDomain[Peer]):
    """One NIC."""

    _book: EfaBook
    _rows: HardwareRows
    _rows_kind = HardwareRows
    _lone_reads_are_simple = False
    """Whether post() takes a batch of one read as it takes one of many."""

    def _open_main(self, options: tuple[Option, ...]) -> tuple[Endpoint, EfaBook]:
        main = self._nic.open_endpoint(options)
        check_device(main, self._nic.name)
        return main, EfaBook(self._nic, main.name())

    def _parts(
        self, nic: Nic, rules: Rules, dmabuf: DmabufExport | None, *, delivery_complete: bool
    ) -> tuple[Slots, Regions, Mailbox, Queue]:
        slots, _, mailbox, queue = super()._parts(
            nic, rules, dmabuf, delivery_complete=delivery_complete
        )
        queue.landed, queue.landed_many = self._take_read, self._take_reads
        self._memory = HardwareRegions(nic, dmabuf)
        return slots, self._memory, mailbox, queue

    def poll(self, out: Completions) -> int:
        filled = super().poll(out)
        self._see_to_peers()
        return filled

    def _see_to_peers(self) -> None:
        """Do what is only due here at a poll: who has left, and doorbells that are owed."""
        if self._nic.closed:
            return
        if self._book.departed:
            self._book.settle()
        slots = self._slots
        if slots.unended is not None:  # any frame rings the doorbell that it waits for
            peer, slots.unended = slots.unended, None
            self._say(peer, frames.Welcome(self.address))

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        """Accept reads start.. of a batch; return how many."""
        self._check_open()
        slots, rows = self._slots, self._rows
        room = min(self.caps.reads - slots.reads, slots.room - rows.waiting)
        stop = min(stop, start + room)
        if stop <= start:
            return 0
        nbytes = batch.nbytes
        simple = nbytes if isinstance(nbytes, int) else nbytes.all()
        if simple and (batch.n > 1 or self._lone_reads_are_simple):
            taken = self.post(marked(batch), start, stop)
        else:
            taken = rows.post_each(marked(batch), start, stop)
        slots.reads += taken
        return taken

    def deregister(self, key: DomainKey) -> None:
        if not (self._closed or self._nic.closed):
            self._memory.cut(key, self._slots)
        super().deregister(key)

    def _take_read(self, context: int) -> None:
        ticket = self._slots.take_back(context)
        if ticket is not None:
            ticket.peer.heard = True
            self._read_is_done(ticket.batch.ctx, 1)

    def _take_reads(self, contexts: I64) -> None:
        for ctx, count in self._slots.give_back_many(contexts).items():
            self._read_is_done(ctx, count)

    def _read_is_done(self, ctx: int, count: int) -> None:
        self._slots.reads -= count
        self._done.append((_READ, _OK, count, 0, 0, ctx ^ READ, 0))

    def _row_failed(self, ticket: Ticket, row: int, error: CqError) -> None:
        status = STATUSES.get(error.prov_errno, Status.PROVIDER)
        self._texts[status] = error.text
        self._rows.fail(ticket.batch.ctx, row, status)
        if status is Status.PROVIDER:  # that says nothing of the peer: is it there?
            self._peers.doubt(ticket.peer, time.monotonic())
            self._stir(ticket.peer)

    def status_text(self, status: int) -> str:
        text = super().status_text(status)
        if status == Status.UNREACHABLE and not self._peers.answered:
            return says(text, _NOBODY)
        return text

    def _look_at_deadlines(self, now_s: float) -> None:
        # What went wrong with no operation of ours: an answer that found nobody, say.
        while event := self._nic.read_event():
            _LOG.warning("%s: %s", self.caps.nic, event)
        super()._look_at_deadlines(now_s)
