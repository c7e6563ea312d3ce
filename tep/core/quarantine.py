"""Which memory a NIC may still touch although nothing is open: by status, by access, and why.

A settled handle says that every posted row is back. Of some ends nobody can know more: what is in
doubt at a peer is named by the transfer, what is in doubt here by the region. Nothing here waits,
asks or fences; `leases` does. Which bytes of a region are held is in `tep.engine.regions`. The
table is in ARCHITECTURE.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tep.backends.base import Status
from tep.errors import FabricError, InDoubt, TepError

if TYPE_CHECKING:
    from tep.core.group import DomainGroup
    from tep.core.transfer import Transfer

__all__ = [
    "MAY_LAND",
    "Quarantine",
    "doubt_all",
    "doubts_text",
    "failure_of",
]

MAY_LAND: Final = frozenset(Status) - {
    Status.OK,  # the peer's NIC has acknowledged the row (C1)
    Status.REMOTE_KEY,
    Status.REMOTE_RANGE,
    Status.LENGTH,  # these three change nothing (C11)
    Status.STALE_PEER,  # the memory's owner is gone, and it touches nothing of the next (C13)
}
"""Statuses of a row whose bytes may land after its end: all of which no clause says otherwise."""


class Quarantine(NamedTuple):
    """Bytes start .. stop of a region here that a NIC may still touch, and why."""

    start: int
    stop: int
    why: str


def doubts_text(doubts: tuple[InDoubt, ...]) -> str:
    """Say where bytes may still land; "" = nowhere."""
    regions = dict.fromkeys(f"region {d.region} of {d.peer}" for d in doubts)
    return f"bytes may still land in {', '.join(regions)}" if regions else ""


def doubt_all(group: DomainGroup) -> None:
    """Nothing comes back any more: what is posted may land, or not."""
    for pending in list(group.batches.values()):
        if pending.at > pending.back:
            one = isinstance(pending.nics, int)  # all rows go to one region
            for row in (0,) if one else pending.posted_rows():
                group.doubt(pending, row, "UNKNOWN")


def failure_of(transfer: Transfer) -> TepError | None:
    """What a transfer failed for, with what is in doubt because of it."""
    failure, doubts = transfer.failure, transfer.in_doubt
    if not doubts or not isinstance(failure, FabricError):
        return failure
    return failure.saying(f"; {doubts_text(doubts)}", doubts)
