"""The memory of one instance: cache buffers and tail slots of every rank, as `KvBlocks` wants it.

Allocation, registration and views; who holds which page is `pool`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tep import TransferEngine, UsageError
from tep.apps.kvcache.blocks import KvBlocks
from tep.apps.kvcache.heartbeat import Patience
from tep.apps.kvcache.layout import KvLayout, RankShape

__all__ = ["Allocate", "KvMemory", "SideOptions", "host_memory", "no_memory"]

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

    def memory(self, engines: Sequence[TransferEngine], layout: KvLayout) -> KvMemory:
        """Allocate the memory of one side, one engine a rank."""
        return KvMemory(
            engines,
            layout,
            npages=self.npages,
            tail_slots=self.tail_slots,
            tail_bytes=self.tail_bytes,
            allocate=self.allocate,
        )


@dataclass(frozen=True, slots=True)
class _View:
    """A part of a buffer, dense bytes, in the form that `KvBlocks.add` takes of a tensor."""

    address: int
    shape: tuple[int, ...]
    device: str

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return 1

    def stride(self) -> list[int]:
        return [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One piece of memory, as allocated; `view` is its bytes where the CPU can touch them."""

    memory: object
    address: int
    device: str
    view: Bytes | None

    @property
    def bytes(self) -> Bytes:
        if self.view is None:
            raise UsageError(f"{self.device} memory cannot be looked at as a numpy array")
        return self.view


def _locate(engine: TransferEngine, memory: object) -> _Buffer:
    mr, _ = engine.reg_mr(memory)  # the engine knows how to read all kinds
    found = mr.memory
    # Of an address that somebody made up, as for a simulation without bytes, there is no view.
    visible = found.kind == "cpu" and not isinstance(memory, tuple)
    buffer = _Buffer(memory, found.ptr, found.device, found.bytes_view() if visible else None)
    engine.deregister(mr)
    return buffer


class KvMemory:
    """Buffers and tail slots of one instance.

    Each layer and plane of a buffer is a tensor of the rank's `KvBlocks`, whose blocks are the
    pages. The tail slots are one more, with a list of blocks of its own: the layer after the last.

    Args:
        engines: one a rank; their number is the degree of tensor parallelism.
        layout: of the model.
        npages: of each buffer.
        tail_slots: how many tails can be under way.
        tail_bytes: length of one.
        allocate: makes the memory; see Allocate.

    Attributes:
        shapes: one a rank.
        blocks: one a rank; all is registered.
    """

    def __init__(
        self,
        engines: Sequence[TransferEngine],
        layout: KvLayout,
        *,
        npages: int,
        tail_slots: int,
        tail_bytes: int,
        allocate: Allocate = host_memory,
    ) -> None:
        if not engines or tail_slots < 1 or tail_bytes < 1:
            raise UsageError(
                f"KvMemory: {len(engines)} engines, tail_slots={tail_slots}, "
                f"tail_bytes={tail_bytes}; one of each at the least"
            )
        self.engines = tuple(engines)
        self.layout = layout
        self.npages = npages
        self.tail_slots = tail_slots
        self.tail_bytes = tail_bytes
        self.shapes = tuple(RankShape(layout, len(engines), r) for r in range(len(engines)))
        self._buffers: list[list[_Buffer]] = []
        for rank, (engine, shape) in enumerate(zip(self.engines, self.shapes, strict=True)):
            sizes = [(b.name, shape.nbytes(b, npages)) for b in layout.buffers]
            sizes.append(("tail", tail_slots * tail_bytes))
            self._buffers.append(
                [_locate(engine, allocate(rank, name, nbytes)) for name, nbytes in sizes]
            )
        self.blocks = tuple(self._describe(rank) for rank in range(len(engines)))

    def _describe(self, rank: int) -> KvBlocks:
        layout, shape = self.layout, self.shapes[rank]
        blocks = KvBlocks(self.engines[rank], tp=self.tp, rank=rank)
        for spec, held in zip(layout.buffers, self._buffers[rank], strict=False):
            heads = len(shape.heads(spec))
            dims = (spec.planes, self.npages, heads, layout.page_tokens, spec.token_bytes)
            for layer in range(spec.layers):
                at = held.address + layer * shape.layer_bytes(spec, self.npages)
                view, place = _View(at, dims, held.device), spec.first_layer + layer
                blocks.add(f"{spec.name}.{layer}", place, view, "pbhtd", heads=spec.heads)
        tails = self._buffers[rank][-1]
        view = _View(tails.address, (self.tail_slots, self.tail_bytes), tails.device)
        blocks.add("tail", layout.layers, view, "bd", heads=1, group=1)
        blocks.register()
        return blocks

    @property
    def tp(self) -> int:
        """Ranks."""
        return len(self.engines)

    def renew(self) -> None:
        """Register everything anew: keys given out before are worth nothing from here on.

        Raises:
            BusyError: transfers still read from it.
        """
        for blocks in self.blocks:
            blocks.renew()

    def page(self, rank: int, buffer: int, layer: int, plane: int, page: int) -> Bytes:
        """One page as u8[heads, head_bytes], writable in place.

        Args:
            rank: whose.
            buffer: index in the layout.
            layer: of the buffer, from 0.
            plane: from 0.
            page: its index.
        """
        found: Bytes = self.pages(rank, buffer)[layer, plane, page]
        return found

    def pages(self, rank: int, buffer: int) -> Bytes:
        """One buffer as u8[layers, planes, npages, heads, head_bytes], writable in place.

        Raises:
            UsageError: the memory is a device's; the model has its own view of it.
        """
        spec, shape = self.layout.buffers[buffer], self.shapes[rank]
        heads = len(shape.heads(spec))
        dims = (spec.layers, spec.planes, self.npages, heads, shape.head_bytes(spec))
        return self._buffers[rank][buffer].bytes.reshape(dims)

    def tail(self, slot: int) -> Bytes:
        """One tail slot of the first rank as u8[tail_bytes], writable in place."""
        slots = self._buffers[0][-1].bytes.reshape(self.tail_slots, self.tail_bytes)
        found: Bytes = slots[slot]
        return found
