"""Notes that have come to a NIC, until its engine takes them; how they travel is the backend's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

from tep.backends.base import Entry, Kind, Status

__all__ = ["Unread"]

_NOTE: Final = int(Kind.NOTE)
_OK: Final = int(Status.OK)


class Unread:
    """The notes of one NIC that nobody has taken.

    Args:
        report: takes the completion of each.
    """

    __slots__ = ("_notes", "_report", "_slots")

    def __init__(self, report: Callable[[Entry], object]) -> None:
        self._notes: dict[int, tuple[bytes, bytes]] = {}
        self._report = report
        self._slots = itertools.count()

    def add(self, payload: bytes, sender: bytes) -> None:
        """Keep a note that has come from the NIC at an address."""
        slot = next(self._slots)
        self._notes[slot] = payload, sender
        self._report((_NOTE, _OK, 1, 0, 0, slot, len(payload)))

    def take(self, slot: int) -> tuple[bytes, bytes]:
        """A note, and the address of its sender; once."""
        return self._notes.pop(slot)
