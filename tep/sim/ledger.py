"""The ledger of the timing fabric: rows in flight as columns, events by time. No model here.

A row has a number, counted over the whole fabric in the order of posting. Columns are indexed by
`number - base`; `base` moves on when old rows are dropped, so indices are never kept.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Final, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

from tep.sim.queues import NEVER_PS, Ints, Which, has_all, has_any

__all__ = ["Agenda", "Batches", "Hold", "Ledger"]

_ROWS_MIN: Final = 4096
_NONE: Final = np.empty(0, np.int64)


class Hold(IntFlag):
    """The ends that still need a row."""

    SENDER = 1  # it has not been completed there
    WIRE = 2  # it has not landed


class Ledger:
    """Rows in flight, a column an attribute.

    Attributes:
        base: number of the row at index 0.
        end: number of the next row.
        columns: name -> array, each `room` long; also as attributes of the same names:
            source, target (NICs), src, dst, lkey, rkey, nbytes, imm (-1: none), ctx, row (index
            in its batch), status, hold, message (bool), batch (its number in `Batches`),
            extra_ps (jitter of its landing).
    """

    source: Ints
    target: Ints
    src: npt.NDArray[np.uint64]
    dst: npt.NDArray[np.uint64]
    lkey: npt.NDArray[np.uint64]
    rkey: npt.NDArray[np.uint64]
    nbytes: Ints
    imm: Ints
    ctx: npt.NDArray[np.uint64]
    row: Ints
    status: npt.NDArray[np.uint8]
    hold: npt.NDArray[np.uint8]
    message: npt.NDArray[np.bool_]
    batch: Ints
    extra_ps: Ints

    def __init__(self) -> None:
        self.base = 0
        self.end = 0
        self._resize(_ROWS_MIN)

    def _resize(self, room: int) -> None:
        """Give every column `room` entries, and drop the oldest rows that nobody needs."""
        used = self.end - self.base
        first = 0
        if used:
            held = self.hold[:used] != 0
            first = int(np.argmax(held)) if has_any(held) else used
        for name, dtype in _DTYPES.items():
            old: npt.NDArray[np.generic] = getattr(self, name, _NONE)
            column = old if len(old) == room else np.empty(room, dtype)
            column[: used - first] = old[first:used]
            setattr(self, name, column)
        self.base += first
        self._room = room

    def open_rows(self, n: int) -> slice:
        """Add n rows, to be filled in; return their indices. Every other index may have moved."""
        if self.end - self.base + n > self._room:
            self._resize(self._room)
            need = self.end - self.base + n
            if need > self._room // 2:
                self._resize(max(_ROWS_MIN, 1 << need.bit_length()))
        start = self.end - self.base
        self.end += n
        return slice(start, start + n)

    def where(self, numbers: Ints) -> Which:
        """The indices of rows, one at the least, by ascending numbers; of neighbours a slice."""
        first, n = numbers.item(0), len(numbers)
        if numbers.item(-1) - first == n - 1:
            return slice(first - self.base, first - self.base + n)
        return numbers - self.base

    def of_sender(self, nic: int) -> Ints:
        """Numbers of the rows that NIC `nic` sent and that are not completed."""
        used = self.end - self.base
        mine = (self.source[:used] == nic) & ((self.hold[:used] & Hold.SENDER) != 0)
        return np.flatnonzero(mine) + self.base


_DTYPES: Final[dict[str, type[np.generic]]] = {
    name: get_args(get_args(column)[1])[0] for name, column in get_type_hints(Ledger).items()
}


class Batches:
    """The batches in flight, as the wakes need them; numbers are used again.

    Attributes:
        left: rows posted that have not landed.
        seen_ps: time when the last of its rows becomes visible at its target.
        acked_ps: time when its sender learns of the last; kept if machines are not all alike.
        whole: whether all its rows are posted.
        target: the NIC that all its rows go to; -1: several.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self.left = np.zeros(0, np.int64)
        self.seen_ps = np.zeros(0, np.int64)
        self.acked_ps = np.zeros(0, np.int64)
        self.whole = np.zeros(0, np.bool_)
        self.target = np.zeros(0, np.int64)

    def begin(self, target: int) -> int:
        """Return the number of a new batch, without rows so far."""
        if not self._free:
            old = len(self.left)
            for name in ("left", "seen_ps", "acked_ps", "whole", "target"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros(max(64, old), column.dtype))))
            self._free = list(range(len(self.left) - 1, old - 1, -1))
        number = self._free.pop()
        self.left[number] = self.seen_ps[number] = self.acked_ps[number] = 0
        self.whole[number] = False
        self.target[number] = target
        return number

    def end(self, number: int) -> None:
        self._free.append(number)


class Agenda:
    """Row numbers by time, added in bunches and taken in order; ties in order of number."""

    __slots__ = ("_at", "_more", "_nmore", "_numbers", "_times", "first_ps")

    def __init__(self) -> None:
        self._times = _NONE
        self._numbers = _NONE
        self._at = 0
        self._more: list[tuple[Ints, Ints]] = []
        self._nmore = 0  # rows of these
        self.first_ps = NEVER_PS
        """The time of the first; NEVER_PS if there is none."""

    def __len__(self) -> int:
        return len(self._times) - self._at + self._nmore

    def add(self, times: Ints, numbers: Ints) -> None:
        """Add rows, in any order; at least one."""
        self._more.append((times, numbers))
        self._nmore += len(times)
        self.first_ps = min(self.first_ps, int(times.min()))

    def _merge(self) -> None:
        if not self._more:
            return
        bunches = [(self._times[self._at :], self._numbers[self._at :]), *self._more]
        self._more, self._nmore = [], 0
        if len(bunches) == 2 and not len(bunches[0][0]) and len(bunches[1][0]) == 1:
            (self._times, self._numbers), self._at = bunches[1], 0  # as most rows of scatters
            return
        times = np.concatenate([times for times, _ in bunches])
        numbers = np.concatenate([numbers for _, numbers in bunches])
        if not has_all(times[1:] > times[:-1]):
            order = np.lexsort((numbers, times))
            times, numbers = times[order], numbers[order]
        self._times, self._numbers, self._at = times, numbers, 0

    def take(self, now_ps: int) -> tuple[Ints, Ints]:
        """Take the rows that are due: times and numbers, in order."""
        if self.first_ps > now_ps:
            return _NONE, _NONE
        if self._more:
            self._merge()
        times, begin = self._times, self._at
        if begin == len(times):
            return _NONE, _NONE
        end = begin + 1  # mostly one is due; a search takes longer than a look at the next
        if end < len(times) and times.item(end) <= now_ps:
            end = int(times.searchsorted(now_ps, "right"))
        self._at = end
        self.first_ps = times.item(end) if end < len(times) else NEVER_PS
        return times[begin:end], self._numbers[begin:end]

    def nth_ps(self, n: int) -> int:
        """The time of the n-th from now, n >= 1; NEVER_PS if there are fewer."""
        self._merge()
        index = self._at + n - 1
        return int(self._times[index]) if index < len(self._times) else NEVER_PS

    def put_off(self, numbers: Ints, times: Ints) -> None:
        """Move rows to other times, whether they were here or not."""
        was, rows = self.take(NEVER_PS)
        others = ~np.isin(rows, numbers)
        if others.any():
            self.add(was[others], rows[others])
        self.add(times, numbers)

    def clear(self) -> Ints:
        """Take all; return their numbers."""
        return self.take(NEVER_PS)[1]
