"""What both ends of a path remember of its immediates, to judge where an acknowledgement is lost.

Sums only, since the beginning: the sender's of what was acknowledged, the receiver's of what came.
Pure. Who compares them, and when, is `recovery` and `audit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["KEYS_MAX", "Lane", "Tally"]

KEYS_MAX: Final = 1 << 18
"""Values that one tally remembers, about 30 MB; beyond it forgets everything, and says so."""

_ROWS_MAX: Final = 1 << 14
"""Rows of columns that wait to be summed up: folding many at once costs a tenth of one by one."""

_LOW_BITS: Final = 32

_CELLS_MAX: Final = 1 << 20

U64 = npt.NDArray[np.uint64]
Found = tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]
"""Values that occur, and how often each does."""


class Tally:
    """How often each key came; a key is a number of 64 bits.

    Attributes:
        forgot: whether it held too many keys once, so that its sums mean nothing any more.
    """

    __slots__ = ("_chunks", "_limit", "_lows", "_rows", "_sums", "forgot")

    def __init__(self, limit: int = KEYS_MAX) -> None:
        self.forgot = False
        self._limit = limit
        self._sums: dict[int, int] = {}
        self._chunks: list[U64] = []
        self._lows: dict[int, list[bytes]] = {}
        self._rows = 0

    def add(self, key: int, count: int) -> None:
        """Add `count`, which may be negative, to one key."""
        sums = self._sums
        sums[key] = sums.get(key, 0) + count
        if len(sums) > self._limit:
            self._forget()

    def add_many(self, keys: U64) -> None:
        """Add 1 to each key of a column; the column stays as it is from now on."""
        self._chunks.append(keys)
        self._rows += len(keys)
        if self._rows > _ROWS_MAX:
            self._fold()

    def add_lows(self, high: int, lows: bytes) -> None:
        """Add 1 to each key of a column with one upper half; `lows` are the lower ones, as u32."""
        self._lows.setdefault(high, []).append(lows)
        self._rows += len(lows) >> 2
        if self._rows > _ROWS_MAX:
            self._fold()

    def sum(self, key: int) -> int:
        """How often a key came."""
        self._fold()
        return self._sums.get(key, 0)

    def items(self) -> list[tuple[int, int]]:
        """Every key with its sum, those that are 0 left out."""
        self._fold()
        return [(key, count) for key, count in self._sums.items() if count]

    def drop(self, wanted: Callable[[int], bool]) -> None:
        """Forget the keys for which wanted(key) says so."""
        self._fold()
        for key in [key for key in self._sums if wanted(key)]:
            del self._sums[key]

    def __len__(self) -> int:
        return len(self._sums) + self._rows

    def _fold(self) -> None:
        if not self._rows:
            return
        for high, lows in self._lows.items():
            self._add(high << _LOW_BITS, _count(np.frombuffer(b"".join(lows), np.uint32)))
        if self._chunks:
            self._add(0, _count_pairs(np.concatenate(self._chunks)))
        self._chunks.clear()
        self._lows.clear()
        self._rows = 0
        if len(self._sums) > self._limit:
            self._forget()

    def _add(self, base: int, found: Found) -> None:
        values, counts = found
        sums = self._sums
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            key = base + value
            sums[key] = sums.get(key, 0) + count

    def _forget(self) -> None:
        self._sums.clear()
        self.forgot = True


def _count(column: npt.NDArray[np.unsignedinteger]) -> Found:
    """Each value that occurs, and how often.

    Most often they are near each other: then there is a cell for each that there can be, which
    costs 2 ns a row. To sort them costs 40 to 90.
    """
    first = column.min()
    if column.max() - first >= _CELLS_MAX:
        return np.unique(column, return_counts=True)
    counts = np.bincount((column - first).astype(np.intp))
    used = np.flatnonzero(counts)
    return used + int(first), counts[used]


def _count_pairs(keys: U64) -> Found:
    """The same where upper and lower halves are near each other."""
    high, low = keys >> np.uint64(_LOW_BITS), keys & np.uint64((1 << _LOW_BITS) - 1)
    first_high, first_low = int(high.min()), int(low.min())
    width = int(low.max()) - first_low + 1
    if width * (int(high.max()) - first_high + 1) > _CELLS_MAX:
        return np.unique(keys, return_counts=True)
    # In place: columns of this length come from fresh pages, which cost more than the sums.
    high -= np.uint64(first_high)
    high *= np.uint64(width)
    low -= np.uint64(first_low)
    high += low
    used, counts = _count(high)
    highs, lows = np.divmod(used.astype(np.uint64), np.uint64(width))
    base = np.uint64(first_high << _LOW_BITS | first_low)
    return (highs << np.uint64(_LOW_BITS)) + lows + base, counts


class Lane:
    """What a sender remembers of one lane: immediates acknowledged there, and those in doubt.

    Attributes:
        sent: acknowledged, by value.
        doubt: rows whose end will never be known, by value: of transfers that failed.
    """

    __slots__ = ("doubt", "sent")

    def __init__(self) -> None:
        self.sent = Tally()
        self.doubt: Counter[int] = Counter()
