"""Shared words between two NICs: events, messages and their acknowledgements, one writer a word.

A *lane* goes from one NIC to one other. The sender makes its memory; the receiver's *port* holds
the two tails, so that a receiver looks at all its senders with one read (see `port`).

    word    field     written by  content
    0       magic     sender      MAGIC
    8       copying   sender      1 while bytes may be on their way into the receiver's memory
    16      head      receiver    events taken
    24      mhead     receiver    bytes of messages taken
    32      want      sender      1: ring my bell at the next event or message taken
    40      acked     receiver    messages acknowledged
    64      acks      receiver    u64[64]: Status of message k, at k modulo 64
    512     events    sender      u64[8192]: count << 32 | immediate
    8704    messages  sender      records of 8 + nbytes bytes, padded to 8: u64 nbytes, the bytes;
                                  WRAP instead of a length: the next record is at the start

Order of memory, and how a few lines of Python keep it:

Rule 1. An entry is written before the tail that publishes it, and a tail is read before its entry;
bytes are moved before their event. x86 keeps the order of stores, and that of loads. Other
processors need a fence at both places: `order()`, which is nothing on x86.

Rule 2. "I sleep" is written before the last look, and a tail before the look at "I sleep": one of
the two sees the other, or a wake-up is lost. No processor orders a store before a later load on its
own, so `fence()` stands between, on both sides. "copying" and the withdrawal of a key meet alike.

Rule 3. One word is one aligned store of 8 bytes: memoryview and numpy copy u64 items whole.

The fence is that of tep.backends.fences: 0.1 us (measured), once a burst. membarrier(2) would be
dearer: it interrupts the other CPU.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import Status
from tep.backends.fences import STRONG, order_of
from tep.backends.local.memory import SharedMap, new_memfd

__all__ = [
    "ACKS",
    "COPYING",
    "EVENTS",
    "LANE_BYTES",
    "MESSAGES_BYTES",
    "MESSAGE_BYTES_MAX",
    "NONSENSE",
    "LaneReader",
    "LaneWriter",
]

MAGIC: Final = 0x1A4E_5445_5001
EVENTS: Final = 8192
ACKS: Final = 64
"""Messages of one lane that may be on their way."""

MESSAGE_BYTES_MAX: Final = 1 << 18
MESSAGES_BYTES: Final = 1 << 20
"""Bytes of records that a lane holds."""

_MESSAGES: Final = MESSAGES_BYTES
COPYING: Final = 8
_HEAD, _MHEAD, _WANT, _ACKED, _ACK0 = 16, 24, 32, 40, 64
_EVENT0: Final = 512
_MESSAGE0: Final = 8 * (_EVENT0 + EVENTS)
LANE_BYTES: Final = _MESSAGE0 + _MESSAGES
NONSENSE: Final = -1
_WRAP: Final = 2**64 - 1
_LENGTH: Final = struct.Struct("=Q")
_MASK: Final = EVENTS - 1

_NO_EVENTS: Final = np.zeros(0, np.uint64)


def _record(nbytes: int) -> int:
    """What a message takes in the ring."""
    return 8 + (nbytes + 7 & ~7)


class LaneWriter:
    """The sender's end of a lane.

    Attributes:
        fd: for the receiver to map; the caller closes it.
        words: the lane's words.
        tail, mtail: what the board of the receiver's port is told.
        head: events that the receiver had taken at the last look.
        sent: messages written.
    """

    def __init__(self, fence: Callable[[], None]) -> None:
        self.fd = new_memfd("tep-lane", LANE_BYTES)
        try:
            self._map = SharedMap(self.fd, LANE_BYTES)
        except OSError:
            os.close(self.fd)
            raise
        self.words = self._map.words
        self.words[0] = MAGIC
        self.tail = self.mtail = self.sent = self.acked = 0
        self.head = self._mhead = 0
        self._events = self._map.column(_EVENT0, EVENTS)
        self._order = order_of(fence)

    def room(self, *, look: bool = False) -> int:
        """How many events fit. The other side's word is read when asked for, or half the ring is
        full: reading it each time would move its cache line between the CPUs.
        """
        if look or self.tail - self.head > EVENTS // 2:
            self.head = self.words[_HEAD]
            self._order()
        return EVENTS + self.head - self.tail

    def put_event(self, imm: int, count: int) -> None:
        """Write one event; it shows once the board has the tail. There is room."""
        self.words[_EVENT0 + (self.tail & _MASK)] = count << 32 | imm
        self.tail += 1

    def put_events(self, imms: npt.NDArray[np.unsignedinteger]) -> None:
        """Write an event a row, each with its own immediate. There is room."""
        at, n = self.tail & _MASK, len(imms)
        entries = imms.astype(np.uint64)
        entries |= np.uint64(1 << 32)
        first = min(n, EVENTS - at)
        self._events[at : at + first] = entries[:first]
        self._events[: n - first] = entries[first:]
        self.tail += n

    def put_message(self, payload: bytes) -> bool:
        """Write a message; False = no room now."""
        if not self.fits(len(payload)):
            return False
        nbytes = _record(len(payload))
        at = self.mtail % _MESSAGES
        skip = _MESSAGES - at if at + nbytes > _MESSAGES else 0
        if skip:
            _LENGTH.pack_into(self._map.map, _MESSAGE0 + at, _WRAP)
            at = 0
        _LENGTH.pack_into(self._map.map, _MESSAGE0 + at, len(payload))
        start = _MESSAGE0 + at + 8
        self._map.map[start : start + len(payload)] = payload
        self.mtail += skip + nbytes
        self.sent += 1
        return True

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for a message of this length."""
        if self.sent - self.acked >= ACKS:
            return False
        self._mhead = self.words[_MHEAD]
        self._order()
        at, need = self.mtail % _MESSAGES, _record(nbytes)
        skip = _MESSAGES - at if at + need > _MESSAGES else 0
        return self.mtail + skip + need - self._mhead <= _MESSAGES

    def take_acks(self) -> list[int]:
        """The statuses of messages acknowledged since the last call, in order of sending."""
        acked = self.words[_ACKED]
        if acked <= self.acked:
            return []
        self._order()
        acked = min(acked, self.sent)  # whatever the other side has written there
        status_max = int(Status.PROVIDER)
        found = [min(self.words[_ACK0 + k % ACKS], status_max) for k in range(self.acked, acked)]
        self.acked = acked
        return found

    def news(self) -> bool:
        """Whether acknowledgements wait."""
        return self.words[_ACKED] > self.acked

    def want(self) -> None:
        """Ask for the bell at the next progress; a fence and a look have to follow (rule 2)."""
        self.words[_WANT] = 1

    def close(self) -> None:
        """Unmap; all_taken() goes on to answer. Idempotent."""
        if self._events is not _NO_EVENTS:
            self.head = self.words[_HEAD]
        self._events = _NO_EVENTS
        self._map.close()

    def all_taken(self) -> bool:
        """After close(): whether the receiver had taken every event that was written."""
        return self.head == self.tail


class LaneReader:
    """The receiver's end of a lane.

    Attributes:
        head, mhead: what has been taken.
        tail, mtail: what the board said at the last look.

    Args:
        fd: from the sender; the caller closes it.

    Raises:
        OSError: no such memory.
    """

    def __init__(self, fd: int, fence: Callable[[], None]) -> None:
        self._map = SharedMap(fd, LANE_BYTES)
        self.words = self._map.words
        if self.words[0] != MAGIC:
            self._map.close()
            raise OSError("a lane of another version; run the same release in both processes")
        self._fence = fence
        self._order = order_of(fence)
        self._events = self._map.column(_EVENT0, EVENTS)
        self.head = self.mhead = self.tail = self.mtail = 0
        self._acked = 0

    @property
    def copying(self) -> bool:
        """Whether the sender may be moving bytes into our memory now."""
        return bool(self.words[COPYING])

    def take_events(self, n: int) -> npt.NDArray[np.uint64]:
        """Take n events of those that are there."""
        at = self.head & _MASK
        self._order()
        first = min(n, EVENTS - at)
        found = np.concatenate((self._events[at : at + first], self._events[: n - first]))
        self.head += n
        self._order()
        self.words[_HEAD] = self.head
        return found

    def take_event(self) -> int:
        """Take one event of those that are there: count << 32 | immediate."""
        words, head = self.words, self.head
        if not STRONG:
            self._fence()
        word = words[_EVENT0 + (head & _MASK)]
        self.head = head = head + 1
        if not STRONG:
            self._fence()
        words[_HEAD] = head
        return word

    def next_message(self) -> int | None:
        """The length of the next message, or None; NONSENSE: what stands there is no message."""
        if self.mhead == self.mtail:
            return None
        self._order()
        at = self.mhead % _MESSAGES
        nbytes: int = _LENGTH.unpack_from(self._map.map, _MESSAGE0 + at)[0]
        if nbytes == _WRAP:
            self.mhead += _MESSAGES - at
            nbytes = _LENGTH.unpack_from(self._map.map, _MESSAGE0)[0]
        need = _record(nbytes)
        if (
            nbytes > MESSAGE_BYTES_MAX
            or self.mhead + need > self.mtail
            or self.mhead % _MESSAGES + need > _MESSAGES
        ):
            return NONSENSE
        return nbytes

    def take_message(self, nbytes: int, into: bytearray | None, status: int) -> None:
        """Copy the next message out, or drop it, and acknowledge it with a status."""
        at = _MESSAGE0 + self.mhead % _MESSAGES + 8
        if into is not None:
            into[:nbytes] = self._map.map[at : at + nbytes]
        self.mhead += _record(nbytes)
        words = self.words
        self._order()
        words[_MHEAD] = self.mhead
        words[_ACK0 + self._acked % ACKS] = status
        self._acked += 1
        self._order()
        words[_ACKED] = self._acked

    def wanted(self) -> bool:
        """After something was taken: whether the sender wants its bell rung; asked once.

        It need not be asked after events of which less than half a ring was there: a sender that
        sleeps for want of room has shown a whole ring since it last saw `head`, so more is to come.
        """
        self._fence()
        if self.words[_WANT]:
            self.words[_WANT] = 0
            return True
        return False

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._events = _NO_EVENTS
        self._map.close()
