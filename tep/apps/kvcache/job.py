"""One attempt of a prefiller, its decoder, and what a prefiller counts: state and small rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tep import NetAddr, TransferEngine
from tep.apps.kvcache.messages import Dispatch
from tep.apps.kvcache.pool import PageIndices, PagePool
from tep.apps.kvcache.sender import Lane, Target

__all__ = ["Held", "Job", "Peer", "PrefillerStats", "Watch", "Word", "watch_engine"]


class Word(Protocol):
    """A watched word, as the host advances it."""

    def store(self, value: int) -> None:
        """Write the word."""

    def close(self) -> None:
        """Stop watching."""


Watch = Callable[[TransferEngine, Callable[[int, int], object]], Word]
"""Allocates a watched word on an engine; callback(old, new) when it has changed."""


def watch_engine(engine: TransferEngine, callback: Callable[[int, int], object]) -> Word:
    """The engine's own watched words."""
    return engine.alloc_uvm_watcher(callback)


@dataclass(slots=True)
class PrefillerStats:
    """What a prefiller has done.

    Attributes:
        dispatched: attempts taken on.
        finished: of them, those whose every write was done.
        cancelled: stopped by their decoder.
        failed: stopped by an error, here or on the wire.
        orphaned: stopped because their decoder was silent or has restarted.
        refused: handshakes and dispatches turned down.
        renewed: times that the memory was registered anew, because a NIC had lost it.
        writes, rows, nbytes: transfers that have ended, the rows and the bytes they had.
    """

    dispatched: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    orphaned: int = 0
    refused: int = 0
    renewed: int = 0
    writes: int = 0
    rows: int = 0
    nbytes: int = 0


@dataclass(slots=True, eq=False)
class Peer:
    """A decoder in one incarnation.

    Attributes:
        name, epoch: who it is.
        addr: of its first rank.
        target: where its cache is.
        jobs: its attempts that have not ended, by serial.
        over: those that have: whether a write of each failed, and may land; as long as it may ask.
        oldest: attempts before this serial are over for it too.
    """

    name: str
    epoch: int
    addr: NetAddr
    target: Target
    jobs: dict[int, Job] = field(default_factory=dict)
    over: dict[int, bool] = field(default_factory=dict)
    oldest: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """One attempt.

    Attributes:
        peer: whose.
        order: what is to be done.
        task: that does it.
        computing: whether the task may be cancelled.
        lanes: one a rank, once pages are there.
        words: watched, one a rank.
        busy_lanes: that have not ended.
        watched_lanes: that need their word.
        idle: set when no lane is busy.
        why: it stops: "cancelled", "orphaned", or what failed; "" while nothing stops it.
    """

    peer: Peer
    order: Dispatch
    task: asyncio.Task[None] | None = None
    computing: bool = False
    lanes: list[Lane] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    busy_lanes: int = 0
    watched_lanes: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""

    def stop(self, why: str) -> None:
        """Send nothing more. The first reason stays."""
        if self.why:
            return
        self.why = why
        for lane in self.lanes:
            lane.stop()
        self.stop_watching()
        if self.computing and self.task is not None:
            self.task.cancel()

    def lane_seen(self) -> None:
        """A lane needs its word no more."""
        self.watched_lanes -= 1
        if self.watched_lanes == 0:
            self.stop_watching()

    def lane_idle(self) -> None:
        """A lane has nothing under way, and never will again."""
        self.busy_lanes -= 1
        if self.busy_lanes == 0:
            self.idle.set()

    def stop_watching(self) -> None:
        """Close the watched words. Idempotent."""
        for word in self.words:
            word.close()


class Held:
    """Pages and a tail slot of one attempt, given back together."""

    def __init__(self, pool: PagePool, tails: PagePool) -> None:
        self._pool, self._tails = pool, tails
        self._pages: PageIndices | None = None
        self._slot: PageIndices | None = None

    async def take_pages(self, n: int) -> PageIndices:
        """Wait for pages."""
        self._pages = await self._pool.acquire(n)
        return self._pages

    async def take_slot(self) -> int:
        """Wait for a slot."""
        self._slot = await self._tails.acquire(1)
        return int(self._slot[0])

    def free(self) -> None:
        """Give everything back."""
        if self._pages is not None:
            self._pool.free(self._pages)
        if self._slot is not None:
            self._tails.free(self._slot)
