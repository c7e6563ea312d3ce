"""How far a long transfer is, and how fast: read by who waits, so it costs nothing otherwise."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from tep.core.stats import TransferStats

__all__ = ["Meter", "Progress"]


class Progress(NamedTuple):
    """What a progress callback gets.

    Attributes:
        nbytes: bytes of the rows that have come back, as if all rows were of one length. NICs may
            report many rows at once, at the end of a batch: it grows in steps.
        total_bytes: bytes of the request.
        bytes_per_s: since the callback before, or since the submit.
        elapsed_s: since the submit, on the driver's clock.
        left_s: until the end, at this rate; infinite while nothing moves.
    """

    nbytes: int
    total_bytes: int
    bytes_per_s: float
    elapsed_s: float
    left_s: float


class Metered(Protocol):
    """A transfer."""

    def stats(self) -> TransferStats:
        """What it has done so far."""


class Meter:
    """Reads a transfer now and then, and remembers what it read last."""

    def __init__(self, transfer: Metered) -> None:
        self._transfer = transfer
        self._last = 0, 0.0

    def read(self) -> Progress:
        """How far it is now."""
        stats = self._transfer.stats()
        rows = stats.rows + stats.rows_again
        back = stats.rows_back - stats.rows_failed
        nbytes = stats.nbytes * back // rows if rows else stats.nbytes
        (before, then_s), self._last = self._last, (nbytes, stats.elapsed_s)
        gone_s = stats.elapsed_s - then_s
        rate = (nbytes - before) / gone_s if gone_s > 0 else 0.0
        left = stats.nbytes - nbytes
        left_s = 0.0 if left == 0 else left / rate if rate > 0 else math.inf
        return Progress(nbytes, stats.nbytes, rate, stats.elapsed_s, left_s)
