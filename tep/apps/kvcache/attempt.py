"""One attempt of a decoder at a request, and what a decoder counts. State only."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tep import Expectation
from tep.apps.kvcache.pool import PageIndices
from tep.apps.kvcache.sessions import Session

__all__ = ["Attempt", "DecoderStats"]


@dataclass(slots=True)
class DecoderStats:
    """What a decoder has done.

    Attributes:
        dispatched: attempts.
        completed: caches counted complete.
        unclean: attempts that ended otherwise.
        silent: times that a prefiller fell silent.
        confirmed: unclean ends that the prefiller confirmed.
        fenced: unclean ends settled because the prefiller was certain to be dead.
        reused_pages: pages of prefixes that did not travel.
        renewed: times that the memory was registered anew, because a NIC had lost it.
    """

    dispatched: int = 0
    completed: int = 0
    unclean: int = 0
    silent: int = 0
    confirmed: int = 0
    fenced: int = 0
    reused_pages: int = 0
    renewed: int = 0


@dataclass(slots=True, eq=False)
class Attempt:
    """One dispatch, from its pages to their end.

    Attributes:
        serial: of this decoder's attempts.
        session: with the prefiller.
        imm: its immediate.
        fresh, held: pages it brought, and those of a known prefix.
        slot: of its tail.
        ended: "" when the cache is complete, else why it will not be.
        confirmed: that nothing of it is under way any more.
        keys: how often the memory had been registered anew when it began.
        counts: immediates that each rank expects.
        expectations: one a rank.
        ranks_left: ranks that have not counted all.
        unsure: a write of it failed, and may land after its error.
    """

    serial: int
    session: Session
    imm: int
    fresh: PageIndices
    held: PageIndices
    slot: PageIndices
    ended: asyncio.Future[str]
    confirmed: asyncio.Future[None]
    keys: int
    counts: tuple[int, ...] = ()
    expectations: list[Expectation] = field(default_factory=list)
    ranks_left: int = 0
    unsure: bool = False

    def fail(self, reason: str) -> None:
        """It did not work; a first verdict stays."""
        if not self.ended.done():
            self.ended.set_result(reason)

    def confirm(self) -> None:
        """Nothing of it is under way any more."""
        if not self.confirmed.done():
            self.confirmed.set_result(None)
