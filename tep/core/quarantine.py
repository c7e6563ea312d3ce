"""Which memory a NIC may still touch although nothing is open: by status, by access, and why.

A settled handle says that every posted row is back. Of some ends nobody can know more: what is in
doubt at a peer is named by the transfer, what is in doubt here by the region. Nothing here waits,
asks or fences; what does is `leases`. The table is in ARCHITECTURE.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tep.backends.base import Access, Status
from tep.errors import BusyError, FabricError, InDoubt, TepError

if TYPE_CHECKING:
    from tep.core.group import DomainGroup
    from tep.core.region import MrHandle
    from tep.core.transfer import Transfer
    from tep.engine import TransferEngine

__all__ = [
    "MAY_LAND",
    "Quarantine",
    "doubt_all",
    "doubts_text",
    "failure_of",
    "keep_or_free",
    "quarantines",
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


def quarantines(engine: TransferEngine, mr: MrHandle) -> tuple[Quarantine, ...]:
    """What of a region is in quarantine now."""
    whole = mr.memory.nbytes
    if engine._crashed:
        why = "the engine's worker was stopped by a bug, and what NICs hold is unknown"
        return (Quarantine(0, whole, why),)
    if engine._closed or (mr.closed and mr not in engine._kept):
        return ()
    found = [
        Quarantine(0, whole, f"NIC {k} ({engine._domains[k].caps.nic}) is down, cannot be asked")
        for k in _down(engine, mr)
    ]
    return (*found, *engine._worker.leases.quarantines(mr))


def _down(engine: TransferEngine, mr: MrHandle) -> list[int]:
    """NICs that are down and may touch a region: as a target, or reading what they had begun."""
    target = mr.access is Access.SOURCE_AND_TARGET
    alive = engine._worker.group.alive
    return [k for k, up in enumerate(alive) if not up and (target or k in mr.readers)]


def keep_or_free(engine: TransferEngine, mr: MrHandle) -> None:
    """A region is about to be deregistered: keep its memory if a NIC may touch it all the same.

    One that is down may; and where `deregister` is no fence, peers whose lease could not be ended.

    Raises:
        BusyError: it cannot hold what it does not own, or a lease of it is not over.
    """
    leases = engine._worker.leases
    leases.refuse(mr)
    why = [f"NIC {k} ({engine._domains[k].caps.nic}) is down" for k in _down(engine, mr)]
    fences = all(domain.caps.deregister_fences for domain in engine._domains)
    why += [] if fences else [found.why for found in leases.quarantines(mr)]
    if why and mr.memory.owner is None:
        raise BusyError(
            f"deregister: {why[0]}: region {mr.desc.region} may still be touched, and the engine "
            "cannot hold its memory for you: keep it mapped, and close() the engine first"
        )
    if why:
        engine._kept[mr] = None
    if fences:
        leases.forget(mr)
