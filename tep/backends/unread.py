"""Control messages that have come to a NIC, until its engine takes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

from tep.backends.base import Entry, Kind, Status

__all__ = ["Unread"]

_CONTROL: Final = int(Kind.CONTROL)
_OK: Final = int(Status.OK)


class Unread:
    """The control messages of one NIC that nobody has taken.

    Args:
        report: takes the completion of each.
    """

    __slots__ = ("_controls", "_report", "_slots")

    def __init__(self, report: Callable[[Entry], object]) -> None:
        self._controls: dict[int, tuple[bytes, bytes]] = {}
        self._report = report
        self._slots = itertools.count()

    def add(self, payload: bytes, sender: bytes) -> None:
        """Keep a control message that has come from the NIC at an address."""
        slot = next(self._slots)
        self._controls[slot] = payload, sender
        self._report((_CONTROL, _OK, 1, 0, 0, slot, len(payload)))

    def take(self, slot: int) -> tuple[bytes, bytes]:
        """A control message, and the address of its sender; once."""
        return self._controls.pop(slot)
