"""Immediates for requests in flight: none is given out while an arrival of it may still come.

A number is *live* from take() to its end. A clean end (all that was expected has arrived) frees it
at once. After a cancel, what was sent and has not been seen yet may still be counted: the number is
*draining* until the stated arrivals are in. Where nobody can state them it is *burnt*, for as long
as the engines live. Numbers go round: one that ended comes last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tep import BusyError, Expectation, TransferEngine, UsageError

__all__ = ["ImmSpace"]


class ImmSpace:
    """The immediates of one instance, the same number on all its ranks.

    Args:
        engines: one a rank.
        numbers: which immediates are ours, e.g. range(1, 1 << 24).

    Attributes:
        live: numbers given out.
        draining: number -> what each rank still has to see before it is free.
        burnt: numbers that stay out of use.
    """

    def __init__(self, engines: Sequence[TransferEngine], numbers: range) -> None:
        if numbers.step != 1 or len(numbers) < 1 or numbers.start < 0 or numbers.stop > 2**32:
            raise UsageError(f"ImmSpace: {numbers} is no range of immediates with step 1")
        self._engines = tuple(engines)
        self._numbers = numbers
        self._next = numbers.start
        self.live: set[int] = set()
        self.draining: dict[int, tuple[Expectation, ...]] = {}
        self.burnt: set[int] = set()

    def take(self) -> int:
        """Give out a number that nothing in flight can carry.

        Raises:
            BusyError: all numbers are live, draining or burnt.
        """
        self._drain()
        for _ in range(len(self._numbers)):
            imm = self._next
            self._next += 1
            if self._next == self._numbers.stop:
                self._next = self._numbers.start
            if not (imm in self.live or imm in self.draining or imm in self.burnt):
                self.live.add(imm)
                return imm
        raise BusyError(
            f"all {len(self._numbers)} immediates are in use: {len(self.live)} live, "
            f"{len(self.draining)} draining, {len(self.burnt)} burnt; enlarge the range"
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
                if not (self.live or self.draining):
                    raise
            await asyncio.sleep(pause_s)

    def end(self, imm: int) -> None:
        """All that was expected has arrived, and nothing else was sent."""
        self.live.remove(imm)

    def end_unclean(self, imm: int, landed: Sequence[int] | None) -> None:
        """The request ended early; its expectations are cancelled.

        Args:
            imm: its number.
            landed: for each rank, how many immediates the sender knows to have been delivered, when
                it will send no more; None: nobody knows.
        """
        self.live.remove(imm)
        if landed is None:
            self.burnt.add(imm)
        else:
            self.draining[imm] = tuple(
                engine.expect_imm_count(imm, max(0, n))
                for engine, n in zip(self._engines, landed, strict=True)
            )

    def _drain(self) -> None:
        """Free the numbers whose arrivals have all been counted, and forget their counts."""
        for imm, waits in list(self.draining.items()):
            if all(wait.finished for wait in waits):
                del self.draining[imm]
                if all(wait.ok for wait in waits):
                    for engine in self._engines:
                        engine.remove_imm(imm)
                else:
                    self.burnt.add(imm)
