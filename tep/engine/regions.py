"""Regions of an engine: which bytes a NIC may still touch, and which memory is kept for that.

The rules are in ARCHITECTURE.md, the statuses in `tep.core.quarantine`.
"""

from __future__ import annotations

from typing import Final, Protocol

from tep.backends.base import Domain
from tep.core.quarantine import Quarantine
from tep.core.region import MrHandle
from tep.engine.worker import Worker
from tep.errors import BusyError

__all__ = ["Keeper", "keep_or_free", "quarantines"]


_GIVEN_UP: Final = "a read into it was given up, and may still be carried out"


class Keeper(Protocol):
    """What regions need of an engine; see `Machine`."""

    domains: tuple[Domain, ...]
    worker: Worker
    kept: dict[MrHandle, None]
    closed: bool
    crashed: bool


def quarantines(engine: Keeper, mr: MrHandle) -> tuple[Quarantine, ...]:
    """The bytes of a region that are in quarantine now."""
    whole = mr.memory.nbytes
    if engine.crashed:
        why = "the engine's worker was stopped by a bug, and what NICs hold is unknown"
        return (Quarantine(0, whole, why),)
    if engine.closed or (mr.closed and mr not in engine.kept):
        return ()
    found = [
        Quarantine(0, whole, f"NIC {k} ({engine.domains[k].caps.nic}) is down, cannot be asked")
        for k in _down(engine, mr)
    ]
    found += [Quarantine(0, whole, _GIVEN_UP)] if mr.given_up else []
    return (*found, *engine.worker.leases.quarantines(mr))


def _down(engine: Keeper, mr: MrHandle) -> list[int]:
    """NICs that are down and may still write to a region, or read from it."""
    target = mr.access.target
    alive = engine.worker.group.alive
    return [k for k, up in enumerate(alive) if not up and (target or k in mr.readers)]


def keep_or_free(engine: Keeper, mr: MrHandle) -> bool:
    """A region is about to be deregistered: keep its memory if a NIC may still touch it.

    That may be a NIC that is down, or, if `deregister` is no fence, the NIC of a peer whose lease
    could not be ended.

    Returns:
        Whether its keys are to be given back to the NICs. They are not where late rows may still
        use them: a NIC may give the same numbers to the next region, which those would write to.

    Raises:
        BusyError: the engine does not own the memory and cannot keep it, or a lease is not over.
    """
    leases = engine.worker.leases
    leases.refuse(mr)
    why = [f"NIC {k} ({engine.domains[k].caps.nic}) is down" for k in _down(engine, mr)]
    fences = all(domain.caps.deregister_fences for domain in engine.domains)
    late = [_GIVEN_UP] if mr.given_up else []
    late += [] if fences else [found.why for found in leases.quarantines(mr)]
    why += late
    if why and mr.memory.owner is None:
        raise BusyError(
            f"deregister: {why[0]}: region {mr.desc.region} may still be touched, and the engine "
            "cannot hold its memory for you: keep it mapped, and close() the engine first"
        )
    if why:
        engine.kept[mr] = None
    if fences:
        leases.forget(mr)
    return not late
