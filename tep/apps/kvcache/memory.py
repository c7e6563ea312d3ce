"""The memory of one instance: cache buffers and tail slots of every rank, registered.

Allocation, registration and views; who holds which page is `pool`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tep import MrDesc, MrHandle, TransferEngine, UsageError
from tep.apps.kvcache.layout import KvLayout, RankShape

__all__ = ["Allocate", "KvMemory", "Registered", "host_memory", "no_memory"]

Allocate = Callable[[int, str, int], object]
"""(rank, buffer's name or "tail", bytes) -> what tep.TransferEngine.reg_mr takes: a numpy array, a
torch tensor, or anything else that speaks DLPack or the CUDA array interface.
"""


def host_memory(rank: int, name: str, nbytes: int) -> object:  # noqa: ARG001  # Allocate's form
    """Zeroed numpy bytes."""
    return np.zeros(nbytes, np.uint8)


def no_memory(rank: int, name: str, nbytes: int) -> object:
    """Addresses without memory, for fabrics that move no bytes; different ranks do not overlap."""
    return ((1 << 44) + (rank << 41) + (sum(name.encode()) << 20), nbytes, "cpu")


@dataclass(frozen=True, slots=True)
class Registered:
    """One piece of memory.

    Attributes:
        memory: as allocated.
        mr: for its use as a source.
        desc: for the peers.
        view: its bytes, or None where the CPU cannot touch them.
    """

    memory: object
    mr: MrHandle
    desc: MrDesc
    view: npt.NDArray[np.uint8] | None


class KvMemory:
    """Buffers and tail slots of one instance.

    Args:
        engines: one a rank; their number is the degree of tensor parallelism.
        layout: of the model.
        npages: of each buffer.
        tail_slots: how many tails can be under way.
        tail_bytes: length of one.
        allocate: makes the memory; see Allocate.

    Attributes:
        shapes: one a rank.
        kv: for each rank, its buffers in the layout's order.
        tails: the tail slots, on the first rank.
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
        self.kv: list[list[Registered]] = []
        for rank, (engine, shape) in enumerate(zip(self.engines, self.shapes, strict=True)):
            sizes = [(b.name, shape.nbytes(b, npages)) for b in layout.buffers]
            made = [(engine, allocate(rank, name, nbytes)) for name, nbytes in sizes]
            self.kv.append([_register(*pair) for pair in made])
        tail = allocate(0, "tail", tail_slots * tail_bytes)
        self.tails = _register(self.engines[0], tail)

    @property
    def tp(self) -> int:
        """Ranks."""
        return len(self.engines)

    def renew(self) -> None:
        """Register everything anew: keys given out before are worth nothing from here on.

        Raises:
            BusyError: transfers still read from it.
        """
        for engine, row in zip(self.engines, self.kv, strict=True):
            for index, held in enumerate(row):
                engine.deregister(held.mr)
                row[index] = _register(engine, held.memory)
        self.engines[0].deregister(self.tails.mr)
        self.tails = _register(self.engines[0], self.tails.memory)

    def page(
        self, rank: int, buffer: int, layer: int, plane: int, page: int
    ) -> npt.NDArray[np.uint8]:
        """One page as u8[heads, head_bytes], writable in place.

        Args:
            rank: whose.
            buffer: index in the layout.
            layer: of the buffer, from 0.
            plane: from 0.
            page: its index.
        """
        found: npt.NDArray[np.uint8] = self.pages(rank, buffer)[layer, plane, page]
        return found

    def pages(self, rank: int, buffer: int) -> npt.NDArray[np.uint8]:
        """One buffer as u8[layers, planes, npages, heads, head_bytes], writable in place.

        Raises:
            UsageError: the memory is a device's; the model has its own view of it.
        """
        spec, shape = self.layout.buffers[buffer], self.shapes[rank]
        heads = len(shape.heads(spec))
        dims = (spec.layers, spec.planes, self.npages, heads, shape.head_bytes(spec))
        return _bytes_of(self.kv[rank][buffer]).reshape(dims)

    def tail(self, slot: int) -> npt.NDArray[np.uint8]:
        """One tail slot as u8[tail_bytes], writable in place."""
        slots = _bytes_of(self.tails).reshape(self.tail_slots, self.tail_bytes)
        found: npt.NDArray[np.uint8] = slots[slot]
        return found


def _register(engine: TransferEngine, memory: object) -> Registered:
    mr, desc = engine.reg_mr(memory)
    # Of an address that somebody made up, as for a simulation without bytes, there is no view.
    visible = mr.memory.kind == "cpu" and not isinstance(memory, tuple)
    return Registered(memory, mr, desc, mr.memory.bytes_view() if visible else None)


def _bytes_of(held: Registered) -> npt.NDArray[np.uint8]:
    if held.view is None:
        raise UsageError(f"{held.mr.memory.device} memory cannot be looked at as a numpy array")
    return held.view
