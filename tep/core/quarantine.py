"""Which memory a NIC may still touch although nothing is open: by status, by access, and why.

When a handle settles, every posted row is back, but some of them may still land: the transfer names
the bytes in doubt at a peer, the region names those in doubt here. Nothing here waits, asks or
fences; `leases` does. `tep.engine.regions` says which bytes of a region are in quarantine. The
table is in ARCHITECTURE.md.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tep.backends.base import Status
from tep.errors import InDoubt

__all__ = [
    "MAY_LAND",
    "Quarantine",
    "doubts_text",
]

MAY_LAND: Final = frozenset(Status) - {
    Status.OK,  # the peer's NIC has acknowledged the row (C1)
    Status.REMOTE_KEY,
    Status.REMOTE_RANGE,
    Status.LENGTH,  # these three change nothing (C11)
    Status.STALE_PEER,  # the memory's owner is gone, and it touches nothing of the next (C13)
}
"""Statuses of a row whose bytes may land after its end: all that no clause excludes."""


class Quarantine(NamedTuple):
    """Bytes start .. stop of a region here that a NIC may still touch, and why."""

    start: int
    stop: int
    why: str


def doubts_text(doubts: tuple[InDoubt, ...]) -> str:
    """Say where bytes may still land; "" = nowhere."""
    regions = dict.fromkeys(f"region {d.region} of {d.peer}" for d in doubts)
    return f"bytes may still land in {', '.join(regions)}" if regions else ""
