"""What both ends of a path remember of its immediates, to judge where an acknowledgement is lost.

Sums only, since the beginning: the sender's of what was acknowledged, the receiver's of what came.
Pure. Who compares them, and when, is `recovery` and `audit`.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["KEYS_MAX", "Lane", "Tally"]

KEYS_MAX: Final = 1 << 18
"""Values that one tally remembers, about 30 MB; beyond it forgets everything, and says so."""

_ROWS_MAX: Final = 1 << 16
"""Rows of columns that wait to be summed up: folding many at once costs a tenth of one by one."""

_LOW_BITS: Final = 32

_CELLS_MAX: Final = 1 << 20

U64 = npt.NDArray[np.uint64]


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

    def __len__(self) -> int:
        return len(self._sums) + self._rows

    def _fold(self) -> None:
        if not self._rows:
            return
        for high, lows in self._lows.items():
            column = np.frombuffer(b"".join(lows), np.uint32)
            self._chunks.append(column | np.uint64(high << _LOW_BITS))
        values, counts = _count(np.concatenate(self._chunks))
        self._chunks.clear()
        self._lows.clear()
        self._rows = 0
        sums = self._sums
        for key, count in zip(values.tolist(), counts.tolist(), strict=True):
            sums[key] = sums.get(key, 0) + count
        if len(sums) > self._limit:
            self._forget()

    def _forget(self) -> None:
        self._sums.clear()
        self.forgot = True


def _count(keys: U64) -> tuple[U64, npt.NDArray[np.int64]]:
    """Each key that occurs, and how often.

    Most often both halves are from narrow ranges: then there is a cell for every key there can be,
    which costs 5 ns a key. To sort them costs 90.
    """
    high, low = keys >> np.uint64(_LOW_BITS), keys & np.uint64((1 << _LOW_BITS) - 1)
    first_high, first_low = high.min(), low.min()
    width = int(low.max() - first_low) + 1
    if width * (int(high.max() - first_high) + 1) > _CELLS_MAX:
        return np.unique(keys, return_counts=True)
    cells = (high - first_high) * np.uint64(width) + (low - first_low)
    found = np.bincount(cells.view(np.int64))
    used = np.flatnonzero(found)
    highs, lows = np.divmod(used.astype(np.uint64), np.uint64(width))
    return (highs + first_high << np.uint64(_LOW_BITS)) + lows + first_low, found[used]


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
