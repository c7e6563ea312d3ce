"""How far a long transfer is, and how fast: read by who waits, so it costs nothing otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from tep.checks import check_seconds
from tep.core.handle import Awaited, wait_for
from tep.core.stats import TransferStats
from tep.errors import WaitTimeout

__all__ = ["Meter", "Metered", "Progress", "Told"]


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


@runtime_checkable
class Metered(Protocol):
    """A transfer."""

    def stats(self) -> TransferStats:
        """What it has done so far."""


class Meter:
    """Reads transfers now and then, and remembers what it read last."""

    def __init__(self, *transfers: Metered) -> None:
        self._transfers = transfers
        self._last = 0, 0.0

    def read(self) -> Progress:
        """How far they are now, together."""
        all_stats = [transfer.stats() for transfer in self._transfers]
        nbytes = sum(map(_bytes_back, all_stats))
        total = sum(stats.nbytes for stats in all_stats)
        elapsed_s = max((stats.elapsed_s for stats in all_stats), default=0.0)
        (before, then_s), self._last = self._last, (nbytes, elapsed_s)
        gone_s = elapsed_s - then_s
        rate = (nbytes - before) / gone_s if gone_s > 0 else 0.0
        left = total - nbytes
        left_s = 0.0 if left == 0 else left / rate if rate > 0 else math.inf
        return Progress(nbytes, total, rate, elapsed_s, left_s)


def _bytes_back(stats: TransferStats) -> int:
    rows = stats.rows + stats.rows_again
    back = stats.rows_back - stats.rows_failed
    return stats.nbytes * back // rows if rows else stats.nbytes


class Clock(Protocol):
    """A driver, as far as its time is concerned."""

    def now_s(self) -> float:
        """The time, seconds."""


class Told:
    """A wait that tells of its progress: of a transfer, or of several.

    Args:
        what: the verb, for errors.
        waited: what is waited for.
        transfers: whose bytes count.
        clock: whose time it is.
        timeout_s, every_s: how long, and how often it is told.
        on_progress: what is called.
    """

    def __init__(
        self,
        what: str,
        waited: Awaited,
        transfers: Iterable[Metered],
        clock: Clock,
        timeout_s: float | None,
        every_s: float,
        on_progress: Callable[[Progress], object],
    ) -> None:
        if timeout_s is None:
            timeout_s = waited.wait_timeout_s
        self.timeout_s = check_seconds(f"{what}: timeout_s", timeout_s, -math.inf, math.inf)
        self._every_s = check_seconds(f"{what}: every_s", every_s, 1e-6)
        self._waited = waited
        self._meter = Meter(*transfers)
        self._clock = clock
        self._tell = on_progress

    def wait(self, turn: Callable[[float], bool]) -> bool:
        """Wait by a function that turns, or waits, for so many seconds; False after the timeout."""
        end_s = self._clock.now_s() + self.timeout_s
        while not self._waited.finished:
            left_s = end_s - self._clock.now_s()
            if not turn(max(0.0, min(self._every_s, left_s))) and left_s <= self._every_s:
                return False
            self._tell(self._meter.read())
        return True

    async def wait_async(self) -> None:
        """The same for coroutines. Raises WaitTimeout."""
        end_s = self._clock.now_s() + self.timeout_s
        while not self._waited.finished:
            left_s = end_s - self._clock.now_s()
            try:
                await wait_for(self._waited, max(0.0, min(self._every_s, left_s)))
            except WaitTimeout:
                if left_s <= self._every_s:
                    raise
            self._tell(self._meter.read())
