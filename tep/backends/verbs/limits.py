"""Rows that no NIC can take, too long or with a key that does not fit: found before posting."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import Batch, Column, Status
from tep.backends.columns import most

__all__ = ["LOOSE_MAX", "RKEY_MAX", "Limits"]

LOOSE_MAX: Final = 256
"""Rows posted loose in one go."""

RKEY_MAX: Final = 2**32 - 1

_KNOWN_MAX: Final = 64


class Limits:
    """What a row of one NIC must keep to.

    Args:
        write_bytes_max: the longest row.
    """

    def __init__(self, write_bytes_max: int) -> None:
        self._write_bytes_max = write_bytes_max
        self._one: npt.NDArray[np.uint64] = np.array(1, np.uint64)
        # Columns of scatters that were found good; the same ones come again and again.
        self._known: set[tuple[int, bytes]] = set()

    def possible_until(self, batch: Batch, start: int, stop: int) -> int:
        """Return the first of rows start .. stop that can never be posted; `stop` if all can."""
        if self._all_fit(batch, start, stop):
            return stop
        return next(row for row in range(start, stop) if not self._all_fit(batch, row, row + 1))

    def are_usual(self, nbytes: npt.NDArray[np.unsignedinteger]) -> bool:
        """Whether no row is empty and none too long, in one look: one less than 0 is very long."""
        return int(np.maximum.reduce(nbytes - self._one)) < self._write_bytes_max

    def lengths_fit(self, nbytes: Column) -> bool:
        """Whether no row is too long."""
        return most(nbytes) <= self._write_bytes_max

    def keys_fit(self, rkey: Column) -> bool:
        """Whether every key fits into a request."""
        return most(rkey) <= RKEY_MAX

    def why_impossible(self, batch: Batch, row: int) -> Status:
        """Say why a row that cannot be posted cannot."""
        too_long = not self._fits(batch.nbytes, row, row + 1, self._write_bytes_max)
        return Status.LENGTH if too_long else Status.REMOTE_KEY

    def _all_fit(self, batch: Batch, start: int, stop: int) -> bool:
        return self._fits(batch.nbytes, start, stop, self._write_bytes_max) and self._fits(
            batch.rkey, start, stop, RKEY_MAX
        )

    def _fits(self, column: Column, start: int, stop: int, limit: int) -> bool:
        """Whether no value of a column exceeds a limit."""
        if isinstance(column, int):
            return column <= limit
        if stop - start > LOOSE_MAX:
            return int(column[start:stop].max()) <= limit
        key = (limit, column[start:stop].tobytes())
        if key not in self._known:
            if int(column[start:stop].max()) > limit:
                return False
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known.add(key)
        return True
