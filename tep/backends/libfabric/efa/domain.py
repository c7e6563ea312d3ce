"""One NIC of EFA behind the seam: a device that says by itself what was wrong with a row.

It has one endpoint, which everything goes through, and of each peer an entry of the address vector.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from tep.backends.base import Status
from tep.backends.libfabric.domain import FabricDomain
from tep.backends.libfabric.efa.book import EfaBook
from tep.backends.libfabric.efa.device import STATUSES, check_device
from tep.backends.libfabric.objects import CqError, Endpoint, Option
from tep.backends.libfabric.peer import Peer
from tep.backends.libfabric.slots import Ticket

__all__ = ["HardwareDomain"]

_LOG: Final = logging.getLogger("tep.libfabric")


class HardwareDomain(FabricDomain[Peer]):
    """One NIC."""

    def _open_main(self, options: tuple[Option, ...]) -> tuple[Endpoint, EfaBook]:
        main = self._nic.open_endpoint(options)
        check_device(main, self._nic.name)
        return main, EfaBook(self._nic, main.name())

    def _row_failed(self, ticket: Ticket, row: int, error: CqError) -> None:
        status = STATUSES.get(error.prov_errno, Status.PROVIDER)
        self._texts[status] = error.text
        self._rows.fail(ticket.batch.ctx, row, status)
        if status is Status.PROVIDER:  # that says nothing of the peer: is it there?
            self._peers.doubt(ticket.peer, time.monotonic())
            self._stir(ticket.peer)

    def _look_at_deadlines(self, now_s: float) -> None:
        # What went wrong with no operation of ours: an answer that found nobody, say.
        while event := self._nic.read_event():
            _LOG.warning("%s: %s", self.caps.nic, event)
        super()._look_at_deadlines(now_s)
