"""Immediates for requests in flight: one that ended badly is never given out again.

A number is *live* from take() to its end. A clean end (all that was expected has arrived) frees it
at once. After a cancel or a failure it is *burnt*, as engines call it: neither end uses it again.
Numbers go round: one that ended comes last.
"""

from __future__ import annotations

import asyncio

from tep import BusyError, UsageError

__all__ = ["ImmSpace"]


class ImmSpace:
    """The immediates of one instance, the same number on all its ranks.

    Args:
        numbers: which immediates are ours, e.g. range(1, 1 << 24).

    Attributes:
        live: numbers given out.
        burnt: numbers that stay out of use.
    """

    def __init__(self, numbers: range) -> None:
        if numbers.step != 1 or len(numbers) < 1 or numbers.start < 0 or numbers.stop > 2**32:
            raise UsageError(f"ImmSpace: {numbers} is no range of immediates with step 1")
        self._numbers = numbers
        self._next = numbers.start
        self.live: set[int] = set()
        self.burnt: set[int] = set()

    def take(self) -> int:
        """Give out a number that nothing in flight can carry.

        Raises:
            BusyError: all numbers are live or burnt.
        """
        for _ in range(len(self._numbers)):
            imm = self._next
            self._next += 1
            if self._next == self._numbers.stop:
                self._next = self._numbers.start
            if not (imm in self.live or imm in self.burnt):
                self.live.add(imm)
                return imm
        raise BusyError(
            f"all {len(self._numbers)} immediates are in use: {len(self.live)} live, "
            f"{len(self.burnt)} burnt; enlarge the range"
        )

    async def acquire(self, pause_s: float) -> int:
        """Like take(), but wait for a number where one can still become free.

        Args:
            pause_s: how often to look.
        """
        while True:
            try:
                return self.take()
            except BusyError:
                if not self.live:
                    raise
            await asyncio.sleep(pause_s)

    def end(self, imm: int) -> None:
        """All that was expected has arrived, and nothing else was sent."""
        self.live.remove(imm)

    def burn(self, imm: int) -> None:
        """The request ended early: what was sent of it may still be counted."""
        self.live.remove(imm)
        self.burnt.add(imm)
