"""The things that a NIC hands to its engine: entries that wait, messages, control messages.

How they travel is the backend's.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Final

from tep.backends.base import COMPLETION_BYTES, Completions, Entry, Kind, Status, put_completion

__all__ = ["ReceivePool", "Unread", "hand_out"]

_WRITE: Final = int(Kind.WRITE)
_READ: Final = int(Kind.READ)
_CONTROL: Final = int(Kind.CONTROL)
_OK: Final = int(Status.OK)


def hand_out(ready: deque[Entry], out: Completions, at: int) -> tuple[int, int, int]:
    """Fill `out` from entry `at` on; return how many it holds, and how many writes, reads ended."""
    room, rows, reads = len(out), 0, 0
    while ready and at < room:
        entry = ready[0]
        put_completion(out, at * COMPLETION_BYTES, *entry)
        ready.popleft()  # last: for want of memory the lines above may raise
        at += 1
        if entry[0] == _WRITE:
            rows += entry[2]
        elif entry[0] == _READ:
            reads += entry[2]
    return at, rows, reads


class Unread:
    """The control messages that have come to one NIC and that its engine has not taken.

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


class ReceivePool:
    """The user's receive buffers, in rotation, where the NIC does not write them by itself."""

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []
        self._lengths: dict[int, int] = {}
        self._senders: dict[int, bytes] = {}
        self._free: deque[int] = deque()
        self._longest = 0

    def add(self, nbytes: int, count: int) -> None:
        """Add buffers."""
        first = len(self._buffers)
        self._buffers.extend(bytearray(nbytes) for _ in range(count))
        self._free.extend(range(first, first + count))
        self._longest = max(self._longest, nbytes)

    def never_fits(self, nbytes: int) -> bool:
        """Whether a message is longer than every buffer that there is."""
        return bool(self._buffers) and nbytes > self._longest

    def take(self, nbytes: int, sender: bytes) -> tuple[int, bytearray] | None:
        """A free buffer for a message of this length, and its slot; None = there is none now.

        `sender` is the address of the NIC that it comes from.
        """
        buffers = self._buffers
        slot = next((slot for slot in self._free if len(buffers[slot]) >= nbytes), None)
        if slot is None:
            return None
        self._free.remove(slot)
        self._lengths[slot] = nbytes
        self._senders[slot] = sender
        return slot, buffers[slot]

    def view(self, slot: int) -> memoryview:
        """The message in a buffer."""
        return memoryview(self._buffers[slot])[: self._lengths[slot]].toreadonly()

    def sender(self, slot: int) -> bytes:
        """The address of the NIC that sent the message in a buffer."""
        return self._senders[slot]

    def give_back(self, slot: int) -> None:
        """A buffer's message was read: it is free again."""
        del self._lengths[slot], self._senders[slot]
        self._free.append(slot)
