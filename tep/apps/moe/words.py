"""Watched words of one rank: how kernels tell the host proxy how far they are.

A word holds the number of the last turn that got there. On the host it is stored by numpy's "GPU";
a real one stores the same word at `ptr`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tep import TransferEngine, Watcher

__all__ = ["Word"]


class Word:
    """One word, watched while somebody waits for it.

    Args:
        engine: whose watcher it is.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._value = 0
        self._watcher: Watcher | None = None
        self._seen: asyncio.Future[None] | None = None
        self._wanted = 0

    def store(self, value: int) -> None:
        """Kernel: tell the proxy."""
        self._value = value
        if self._watcher is not None:
            self._watcher.store(value)

    def reach(self, value: int) -> asyncio.Future[None]:
        """Proxy: wait until the word holds this value."""
        loop = asyncio.get_running_loop()
        seen = self._seen = loop.create_future()
        self._wanted = value
        self._watcher = self._engine.alloc_uvm_watcher(
            lambda _, new: loop.call_soon_threadsafe(self._look, new)
        )
        if self._value >= value:  # stored before anybody watched
            self._watcher.store(self._value)
        return seen

    def _look(self, value: int) -> None:
        seen = self._seen
        if seen is not None and value >= self._wanted:
            self.close()
            if not seen.done():
                seen.set_result(None)

    def close(self) -> None:
        """Watch no more. Idempotent."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()
