"""The pages of one instance and who holds them, and the memory behind them, as `KvBlocks` wants it.

A page is one index for all layers, buffers and ranks of an instance.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tep import ClosedError, TransferEngine, UsageError
from tep.apps.kvcache.blocks import KvBlocks, Patience
from tep.apps.kvcache.layout import KvLayout, RankShape

__all__ = [
    "Allocate", "KvMemory", "PageIndices", "PagePool", "SideOptions", "host_memory", "no_memory",
]  # fmt: skip

_CLOSED = "the instance that these pages belong to was closed"

PageIndices = npt.NDArray[np.int64]
"""int64[n]: page indices."""


class PagePool:
    """All pages of one instance; `nfree` of them are free."""

    def __init__(self, npages: int) -> None:
        if npages < 1:
            raise UsageError(f"PagePool: npages={npages}; one at the least")
        self.npages = npages
        # A stack: a page that was just freed is the next to be used, so that a write that comes too
        # late hits a page in use, in every test.
        self._stack: PageIndices = np.arange(npages - 1, -1, -1)
        self.nfree = npages
        self._held = np.zeros(npages, np.bool_)
        self._turn = asyncio.Lock()  # of those who wait for pages, in the order of asking
        self._changed = asyncio.Event()
        self._closed = False

    async def acquire(self, n: int) -> PageIndices:
        """Hand out n pages, in the order of asking; waits for those that are missing.

        Raises:
            UsageError: the pool is smaller than that.
            ClosedError: the pool was closed.
        """
        if not 0 <= n <= self.npages:
            raise UsageError(f"{n} pages wanted of a pool of {self.npages}; enlarge the pool")
        async with self._turn:
            while self.nfree < n and not self._closed:
                self._changed.clear()
                await self._changed.wait()
            if self._closed:
                raise ClosedError(_CLOSED)
            return self._pop(n)

    def close(self) -> None:
        """Hand out no more: whoever waits gets a ClosedError. Idempotent."""
        self._closed = True
        self._changed.set()

    def free(self, pages: PageIndices) -> None:
        """Give pages back: they can be handed out again."""
        n = len(pages)
        if not n:
            return
        assert self._held[pages].all(), f"freed twice: {pages[~self._held[pages]]}"
        self._held[pages] = False
        self._stack[self.nfree : self.nfree + n] = pages
        self.nfree += n
        self._changed.set()

    def _pop(self, n: int) -> PageIndices:
        assert self.nfree >= n, (self.nfree, n)
        found = self._stack[self.nfree - n : self.nfree].copy()
        self.nfree -= n
        self._held[found] = True
        return found


Allocate = Callable[[int, str, int], object]
"""(rank, buffer's name or "tail", bytes) -> what tep.TransferEngine.reg_mr takes: a numpy array, a
torch tensor, or anything else that speaks DLPack or the CUDA array interface.
"""

Bytes = npt.NDArray[np.uint8]


def host_memory(rank: int, name: str, nbytes: int) -> object:  # noqa: ARG001  # Allocate's form
    """Zeroed numpy bytes."""
    return np.zeros(nbytes, np.uint8)


def no_memory(rank: int, name: str, nbytes: int) -> object:
    """Addresses without memory, for fabrics that move no bytes; different ranks do not overlap."""
    return ((1 << 44) + (rank << 41) + (sum(name.encode()) % 32 << 36), nbytes, "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class SideOptions:
    """Settings of one side.

    Attributes:
        npages: pages of its cache.
        tail_slots: how many tails can be under way.
        tail_bytes: length of one, the same on both sides.
        patience: times.
        allocate: makes the memory.
    """

    npages: int
    tail_slots: int = 64
    tail_bytes: int = 1024
    patience: Patience = field(default_factory=Patience)
    allocate: Allocate = host_memory


@dataclass(frozen=True, slots=True)
class _View:
    """Dense bytes at an address, in the form that `KvBlocks.add` takes of a tensor.

    `memory` owns them; `bytes` shows them where the CPU can touch them.
    """

    address: int
    shape: tuple[int, ...]
    device: str
    memory: object = None
    bytes: Bytes | None = None

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return 1

    def stride(self) -> list[int]:
        return [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]

    def reshape(self, *dims: int) -> Bytes:
        if self.bytes is None:
            raise UsageError(f"{self.device} memory cannot be looked at as a numpy array")
        return self.bytes.reshape(dims)


def _locate(engine: TransferEngine, memory: object) -> _View:
    mr, _ = engine.reg_mr(memory)  # the engine knows how to read all kinds
    found = mr.memory
    # Of an address that somebody made up, as for a simulation without bytes, there is no view.
    visible = found.kind == "cpu" and not isinstance(memory, tuple)
    seen = found.bytes_view() if visible else None
    engine.deregister(mr)
    return _View(found.ptr, (found.nbytes,), found.device, memory, seen)


class KvMemory:
    """Buffers and tail slots of one instance.

    Each layer of a buffer is a tensor of the rank's `KvBlocks`, whose blocks are the pages. The
    tail slots are one more, with a list of blocks of its own: the layer after the last.

    Args:
        engines: one a rank; their number is the degree of tensor parallelism.
        layout: of the model.
        side: sizes, and what makes the memory.

    Attributes:
        shapes, blocks: one a rank; all is registered.
    """

    def __init__(
        self, engines: Sequence[TransferEngine], layout: KvLayout, side: SideOptions
    ) -> None:
        self.tail_slots, self.tail_bytes = side.tail_slots, side.tail_bytes
        if not engines or self.tail_slots < 1 or self.tail_bytes < 1:
            raise UsageError(
                f"KvMemory: {len(engines)} engines, tail_slots={self.tail_slots}, "
                f"tail_bytes={self.tail_bytes}; one of each at the least"
            )
        self.engines, self.layout, self.npages = tuple(engines), layout, side.npages
        self.shapes = tuple(RankShape(layout, len(engines), r) for r in range(len(engines)))
        self._buffers: list[list[_View]] = []
        for rank, (engine, shape) in enumerate(zip(self.engines, self.shapes, strict=True)):
            sizes = {b.name: math.prod(shape.dims(b, self.npages)) for b in layout.buffers}
            sizes["tail"] = self.tail_slots * self.tail_bytes
            found = [_locate(engine, side.allocate(rank, *item)) for item in sizes.items()]
            self._buffers.append(found)
        self.blocks = tuple(self._describe(rank) for rank in range(len(engines)))

    def _describe(self, rank: int) -> KvBlocks:
        layout, shape = self.layout, self.shapes[rank]
        blocks = KvBlocks(self.engines[rank], tp=self.tp, rank=rank)
        for spec, held in zip(layout.buffers, self._buffers[rank], strict=False):
            _, *dims = shape.dims(spec, self.npages)
            for layer in range(spec.layers):
                at = held.address + layer * math.prod(dims)
                view, place = _View(at, tuple(dims), held.device), spec.first_layer + layer
                blocks.add(f"{spec.name}.{layer}", place, view, "pbhtd", heads=spec.heads)
        tails = self._buffers[rank][-1]
        view = _View(tails.address, (self.tail_slots, self.tail_bytes), tails.device)
        name = f"tail of {layout.model} {layout.dtype}"  # so other models' caches are told apart
        blocks.add(name, layout.layers, view, "bd", heads=1, group=1)
        blocks.register()
        return blocks

    @property
    def tp(self) -> int:
        """Ranks."""
        return len(self.engines)

    def pages(self, rank: int, buffer: int) -> Bytes:
        """One buffer as u8[layers, planes, npages, heads, head_bytes], writable in place.

        Raises:
            UsageError: the memory is a device's; the model has its own view of it.
        """
        *dims, _, _ = self.shapes[rank].dims(self.layout.buffers[buffer], self.npages)
        return self._buffers[rank][buffer].reshape(*dims, -1)

    def tail(self, slot: int) -> Bytes:
        """One tail slot of the first rank as u8[tail_bytes], writable in place."""
        slots = self._buffers[0][-1].reshape(self.tail_slots, self.tail_bytes)
        found: Bytes = slots[slot]
        return found
