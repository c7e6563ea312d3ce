"""How requests find prefillers: what is known of one, and who picks. Types only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from tep import NetAddr
from tep.apps.kvcache.model import Request

__all__ = ["Lease", "PrefillerCard", "Router"]


@dataclass(frozen=True, slots=True)
class PrefillerCard:
    """What a scheduler and a decoder need to know of a prefiller.

    Attributes:
        name: of the instance.
        epoch: of this incarnation.
        addr: of its first rank.
    """

    name: str
    epoch: int
    addr: NetAddr


class Lease(Protocol):
    """The use of one prefiller for one attempt."""

    @property
    def card(self) -> PrefillerCard:
        """Which prefiller."""

    def close(self, failure: str = "") -> None:
        """The attempt is over; `failure` says why it did not work."""


class Router(Protocol):
    """Who picks prefillers: a scheduler."""

    async def lease(self, request: Request, exclude: Collection[str]) -> Lease:
        """Pick one; of those in `exclude` only if there is no other.

        Raises:
            TepError: there is none.
        """
