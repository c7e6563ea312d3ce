"""Pages of a cache and who holds them: free, held, or kept for their prefix.

Bookkeeping only: no bytes, no engine. A page is one index for all layers, buffers and ranks of an
instance.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tep import ClosedError, UsageError

__all__ = ["PageIndices", "PagePool", "PrefixCache"]

_CLOSED = "the instance that these pages belong to was closed"

PageIndices = npt.NDArray[np.int64]
"""int64[n]: page indices."""


class PagePool:
    """All pages of one instance.

    Args:
        npages: how many there are.
        on_take: called with the pages that are handed out.
        on_free: called with the pages that come back, before they can be handed out again.
        reclaim: called with a number of pages that are wanted; gives back what it can by free().

    Attributes:
        npages: how many there are.
        nfree, nheld: how many of them are free, and how many somebody holds.
    """

    def __init__(
        self,
        npages: int,
        *,
        on_take: Callable[[PageIndices], object] | None = None,
        on_free: Callable[[PageIndices], object] | None = None,
        reclaim: Callable[[int], object] | None = None,
    ) -> None:
        if npages < 1:
            raise UsageError(f"PagePool: npages={npages}; one at the least")
        self.npages = npages
        # A stack: a page that was just freed is the next to be used, so that a write that comes too
        # late hits a page in use, in every test.
        self._stack: PageIndices = np.arange(npages - 1, -1, -1)
        self.nfree = npages
        self._refs = np.zeros(npages, np.int32)
        self._waiting: deque[tuple[int, asyncio.Future[PageIndices]]] = deque()
        self._serving = self._closed = False
        self._on_take, self._on_free = on_take, on_free
        self.reclaim = reclaim

    @property
    def nheld(self) -> int:
        """Pages that somebody holds."""
        return self.npages - self.nfree

    def take(self, n: int) -> PageIndices | None:
        """Hand out n pages now, or None if there are fewer or others wait."""
        if self._waiting or not self._make_room(n):
            return None
        return self._pop(n)

    async def acquire(self, n: int) -> PageIndices:
        """Hand out n pages, in the order of asking; waits for those that are missing.

        Raises:
            UsageError: the pool is smaller than that.
            ClosedError: the pool was closed.
        """
        if self._closed:
            raise ClosedError(_CLOSED)
        if not 0 <= n <= self.npages:
            raise UsageError(f"{n} pages wanted of a pool of {self.npages}; enlarge the pool")
        if not self._waiting and self._make_room(n):
            return self._pop(n)
        place: asyncio.Future[PageIndices] = asyncio.get_running_loop().create_future()
        self._waiting.append((n, place))
        try:
            return await asyncio.shield(place)
        except asyncio.CancelledError:
            if place.done():
                self.free(place.result())
            else:
                place.cancel()
                self._serve()  # the next in line may need fewer
            raise

    def close(self) -> None:
        """Hand out no more: whoever waits gets a ClosedError. Idempotent."""
        self._closed = True
        while self._waiting:
            _, place = self._waiting.popleft()
            if not place.done():
                place.set_exception(ClosedError(_CLOSED))

    def share(self, pages: PageIndices) -> None:
        """Hold pages once more: each needs one more free()."""
        assert (self._refs[pages] > 0).all(), "a page that nobody holds cannot be shared"
        self._refs[pages] += 1

    def free(self, pages: PageIndices) -> None:
        """Give pages back. Those that nobody else holds can be handed out again."""
        assert (self._refs[pages] > 0).all(), f"freed twice: {pages[self._refs[pages] <= 0]}"
        self._refs[pages] -= 1
        self._push(pages[self._refs[pages] == 0])

    def _make_room(self, n: int) -> bool:
        if self.nfree < n and self.reclaim is not None:
            self._serving = True  # what comes back is for the one who asked
            try:
                self.reclaim(n - self.nfree)
            finally:
                self._serving = False
        return self.nfree >= n

    def _pop(self, n: int) -> PageIndices:
        assert self.nfree >= n, (self.nfree, n)
        found = self._stack[self.nfree - n : self.nfree].copy()
        self.nfree -= n
        self._refs[found] = 1
        if self._on_take is not None:
            self._on_take(found)
        return found

    def _push(self, pages: PageIndices) -> None:
        n = len(pages)
        if not n:
            return
        if self._on_free is not None:
            self._on_free(pages)
        self._stack[self.nfree : self.nfree + n] = pages
        self.nfree += n
        if not self._serving:
            self._serve()

    def _serve(self) -> None:
        """Hand pages to those who wait, in their order, as far as they go."""
        while self._waiting:
            n, place = self._waiting[0]
            if place.done():  # cancelled
                self._waiting.popleft()
            elif self._make_room(n):
                self._waiting.popleft()
                place.set_result(self._pop(n))
            else:
                break


class PrefixCache:
    """Full pages of past prompts, by the key of all tokens up to their end; oldest out first.

    It holds each of its pages once in the pool, and gives them back when the pool runs short.

    Args:
        pool: whose pages. Its `reclaim` becomes this cache's.
        limit: pages kept at the most.
    """

    def __init__(self, pool: PagePool, limit: int) -> None:
        self._pool = pool
        self._limit = limit
        self._pages: OrderedDict[bytes, int] = OrderedDict()
        pool.reclaim = self.give_back

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, keys: Sequence[bytes]) -> PageIndices:
        """The longest known prefix, held once more for the caller."""
        found: list[int] = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            self._pages.move_to_end(key)
            found.append(page)
        pages = np.array(found, np.int64)
        self._pool.share(pages)
        return pages

    def keep(self, keys: Sequence[bytes], pages: PageIndices) -> None:
        """Remember full, complete pages; the cache holds those that it did not know."""
        for key, page in zip(keys, pages.tolist(), strict=True):
            if key not in self._pages:
                self._pool.share(np.array([page]))
                self._pages[key] = page
        while len(self._pages) > self._limit:
            self._drop()

    def give_back(self, n: int) -> None:
        """Let go of pages until n have become free, or none is left."""
        goal = self._pool.nfree + n
        while self._pages and self._pool.nfree < goal:
            self._drop()

    def clear(self) -> None:
        """Let go of all."""
        while self._pages:
            self._drop()

    def _drop(self) -> None:
        _, page = self._pages.popitem(last=False)
        self._pool.free(np.array([page]))
