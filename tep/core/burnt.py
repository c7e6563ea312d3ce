"""Immediates under which something failed; neither end of a pair uses one again.

Rule: a count that is complete has all its bytes. The rows of a failed request may have arrived, may
arrive later, or never come, and nobody can tell its arrivals from those of another request under
the same immediate. So the sender refuses requests under it, and the receiver counts it for nobody.
The record is bounded; `forgotten` says how many immediates it has lost.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

__all__ = ["BURNT_MAX", "Burnt"]

BURNT_MAX: Final = 1 << 16
"""Immediates in one record, about 10 MB; with more, half of those of the largest owner go."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Burnt(Generic[K, V]):
    """The burnt immediates of one engine, each with the reason, and by whose failure.

    The sender's keys are (link, immediate), and the owner is the link. The receiver's keys are
    immediates, and the owner is an id of the engine that failed. Any thread may look one up.

    Attributes:
        why: the reason of each.
        forgotten: how many were dropped because there were more than BURNT_MAX.
    """

    __slots__ = ("_owned", "forgotten", "why")

    def __init__(self) -> None:
        self.why: dict[K, V] = {}
        self.forgotten = 0
        self._owned: dict[Hashable, dict[K, None]] = {}

    def add(self, owner: Hashable, key: K, why: V) -> None:
        """Burn one immediate; the first reason stays."""
        if key in self.why:
            return
        self.why[key] = why
        self._owned.setdefault(owner, {})[key] = None
        if len(self.why) > BURNT_MAX:
            largest = max(self._owned.values(), key=len)
            for old in list(largest)[: (len(largest) + 1) // 2]:
                self.remove(old)
                self.forgotten += 1

    def remove(self, key: K) -> None:
        """Let one immediate be used again."""
        if self.why.pop(key, None) is None:
            return
        for owner, mine in self._owned.items():
            if key in mine:
                del mine[key]
                if not mine:
                    del self._owned[owner]
                return

    def drop(self, owner: Hashable) -> None:
        """Forget everything that one owner burnt, because the owner is gone."""
        for key in self._owned.pop(owner, ()):
            del self.why[key]
