"""Where immediates come from: the number of a queue pair -> that of the NIC at its far end."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["Sources"]


class Sources:
    """The queue pairs of one NIC, by number.

    Attributes:
        of: the PeerId at the far end of each.
    """

    def __init__(self) -> None:
        self.of: dict[int, int] = {}
        self._columns: tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]] | None = None

    def add(self, numbers: Iterable[int], peer: int) -> None:
        """Take note of a peer's queue pairs; numbers are used again."""
        self.of.update(dict.fromkeys(numbers, peer))
        self._columns = None

    def remove(self, numbers: Iterable[int]) -> None:
        """Forget queue pairs of which all completions were read."""
        for number in numbers:
            del self.of[number]
        self._columns = None

    def of_many(self, numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """The same for a column."""
        if self._columns is None:
            known = sorted(self.of)
            self._columns = (
                np.array(known, np.uint32),
                np.array([self.of[number] for number in known], np.uint64),
            )
        known_numbers, peers = self._columns
        return peers[known_numbers.searchsorted(numbers)]
