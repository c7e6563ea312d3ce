"""Watched words: 64-bit cells that the host or a GPU writes and the engine looks at.

The reader sees the latest value only; values in between may be missed, hence callbacks get old and
new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.base.checks import U64_MAX, check_int, unpicklable
from tep.base.errors import BackendUnavailable, BusyError, ClosedError, TepError
from tep.memory.source import Memory

__all__ = ["WatchPage", "Watcher"]

WORDS: Final = 512
"""Words of one page: 4,096 bytes. Source: fabric-lib allocates its watchers in one such page."""

_PAGE_BYTES: Final = 8 * WORDS

Callback = Callable[[int, int], object]


class WatchPage:
    """All watched words of one engine, by index.

    Attributes:
        pin: maps the page for a GPU; None = no GPU, and only the host writes words.
        device_ptr: the page's address for kernels, once it is pinned.
    """

    def __init__(self) -> None:
        self.pin: Callable[[Memory], int] | None = None
        self.device_ptr: int | None = None
        self._why_not = "the engine was opened without device='cuda:N'"
        self.callbacks: dict[int, Callback] = {}

    @cached_property
    def words(self) -> npt.NDArray[np.uint64]:
        """All words, watched or not; allocated on first use, since few engines watch any."""
        raw = np.zeros(2 * WORDS, np.uint64)  # room for one whole page at a page's start
        skip = -raw.ctypes.data % _PAGE_BYTES // 8
        return raw[skip : skip + WORDS]

    @cached_property
    def _seen(self) -> npt.NDArray[np.uint64]:
        return np.zeros(WORDS, np.uint64)

    def __len__(self) -> int:
        return len(self.callbacks)

    def allocate(self, callback: Callback) -> int:
        """Return the index of a word, set to 0 and watched from now on."""
        index = next((k for k in range(WORDS) if k not in self.callbacks), None)
        if index is None:
            raise BusyError(f"alloc_uvm_watcher: all {WORDS} words are in use; close some watchers")
        if self.pin is not None:
            self._pin(self.pin)
        self.words[index] = self._seen[index] = 0
        self.callbacks[index] = callback
        return index

    def _pin(self, pin: Callable[[Memory], int]) -> None:
        """Map the page for the GPU, once; a failure is kept, for `device_address` to raise."""
        self.pin = None
        start = int(self.words.ctypes.data)
        try:
            self.device_ptr = pin(Memory(start, _PAGE_BYTES, "cpu", False, self.words.base))
        except TepError as error:
            self._why_not = f"pinning failed: {error}"

    def device_address(self) -> int:
        """Return the page's address for kernels; raise if it is pageable memory."""
        if self.device_ptr is None:
            raise BackendUnavailable(f"watched words are in pageable memory: {self._why_not}")
        return self.device_ptr

    def describe(self) -> str:
        """Say how many words are watched and whether kernels can write them, for `explain`."""
        if self.device_ptr is None:
            return f"{len(self)} in pageable memory, written by the host only: {self._why_not}"
        return f"{len(self)} in pinned memory; kernels write them at {self.device_ptr:#x}"

    def free(self, index: int) -> None:
        """Stop watching a word."""
        self.callbacks.pop(index, None)

    def look(self) -> Iterator[tuple[Callback, int, int]]:
        """Yield (callback, old, new) of every watched word that changed since the last look.

        A watcher that is closed meanwhile, by a callback or by another thread, is left out.
        """
        if not self.callbacks:
            return
        old, now = self._seen, self.words.copy()
        self._seen = now
        changed = np.flatnonzero(now != old).tolist()
        found = [(k, callback) for k in changed if (callback := self.callbacks.get(k))]
        for k, callback in found:
            if self.callbacks.get(k) is callback:
                yield callback, int(old[k]), int(now[k])


class Watcher:
    """One watched word.

    Attributes:
        ptr: the word's address, for its writers; 8 bytes, native byte order.
    """

    def __init__(self, page: WatchPage, index: int, kick: Callable[[], None]) -> None:
        self._page: WatchPage | None = page
        self._index = index
        self._kick = kick
        self.ptr = int(page.words.ctypes.data) + 8 * index

    __reduce__ = unpicklable("it is memory of this process; send its `ptr` to who shares it")

    def __repr__(self) -> str:
        page = self._page
        state = "closed" if page is None else f"value {int(page.words[self._index])}"
        return f"Watcher(word {self._index} at {self.ptr:#x}: {state})"

    @property
    def device_ptr(self) -> int:
        """The word's address for kernels of the engine's GPU.

        A kernel that has written it needs __threadfence_system(), or a store of system scope.

        Raises:
            BackendUnavailable: no kernel can write it; says why.
        """
        return self._open().device_address() + 8 * self._index

    @property
    def word(self) -> npt.NDArray[np.uint64]:
        """The word as uint64[1], writable in place.

        In a simulation a plain store is seen at the engine's next step only; `store` also asks for
        one.
        """
        return self._open().words[self._index : self._index + 1]

    def store(self, value: int) -> None:
        """Write the word, 0 <= value < 2**64, and wake the engine to look at it."""
        page = self._open()
        page.words[self._index] = check_int("Watcher.store: value", value, 0, U64_MAX)
        self._kick()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        page, self._page = self._page, None
        if page is not None:
            page.free(self._index)

    def _open(self) -> WatchPage:
        if self._page is None:
            raise ClosedError("this watcher is closed")
        return self._page

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
