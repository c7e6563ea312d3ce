"""The layout of a KV cache: the whole model's, each rank's part of it, and any tensors by strides.

Pure arithmetic: no engine, no memory, no time. `KvLayout` is a system's own cache. One buffer of
one rank is `u8[layers, planes, npages, heads, page_tokens, token_bytes]`. Heads stand before the
tokens of a page, so that neighbouring heads are one run of bytes: one long write takes them all.

`KvTensor` and `Placed` describe any cache. A block is what inference engines call a page: the cache
of `tokens` neighbouring tokens. Each side describes its own tensors; the two sides may order
planes, heads, tokens and blocks differently, keep K and V together or apart, and differ in their
degree of tensor parallelism. They must agree on names, layers, planes, heads, tokens of a block and
element bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from tep import UsageError

__all__ = [
    "KvBuffer", "KvLayout", "KvTensor", "Offsets", "Placed", "RankShape", "describe_tensor",
    "held_heads", "rows_of", "served_heads",
]  # fmt: skip


class KvBuffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of the cache, as the whole model sees it.

    Attributes:
        name: unique among the buffers.
        layers: how many layers it holds.
        heads: KV heads of the model; 1 for a compressed (MLA) cache, which every rank keeps whole.
        token_bytes: of one token, one head and one plane.
        planes: pages of one layer and index: 2 where K and V are pages of their own.
        first_layer: the model's layer that is this buffer's layer 0.
    """

    name: str
    layers: int
    heads: int
    token_bytes: int
    planes: int = 1
    first_layer: int = 0


class KvLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cache of one model; peers must agree in every field. Parallelism is not part of it.

    Attributes:
        model: its name.
        page_tokens: tokens of one page.
        buffers: its tensors.
        dtype: of the elements.
    """

    model: str
    page_tokens: int
    buffers: tuple[KvBuffer, ...]
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        """Refuse what cannot be: UsageError with the values."""
        if self.page_tokens < 1 or not self.buffers:
            raise UsageError(
                f"KvLayout {self.model!r}: page_tokens={self.page_tokens} and "
                f"{len(self.buffers)} buffers; one of each at the least"
            )
        for buffer in self.buffers:
            sizes = (buffer.layers, buffer.heads, buffer.token_bytes, buffer.planes)
            if min(sizes) < 1 or buffer.first_layer < 0:
                raise UsageError(f"KvLayout {self.model!r}: a size below 1 in {buffer}")

    @property
    def layers(self) -> int:
        """Layers of the model: one more than the last that any buffer holds."""
        return max(buffer.first_layer + buffer.layers for buffer in self.buffers)

    def npages(self, ntokens: int) -> int:
        """Pages that `ntokens` tokens need."""
        return -(-ntokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class RankShape:
    """The part of a cache that rank `rank` of `tp` holds."""

    layout: KvLayout
    tp: int
    rank: int

    def heads(self, buffer: KvBuffer) -> range:
        """The model's heads that are here."""
        what = f"{self.layout.model}, buffer {buffer.name!r}"
        return held_heads(buffer.heads, self.tp, self.rank, what)

    def dims(self, buffer: KvBuffer, npages: int) -> tuple[int, int, int, int, int, int]:
        """Dimensions of a buffer of `npages` pages; the last is the bytes of a token."""
        heads, tokens = len(self.heads(buffer)), self.layout.page_tokens
        return buffer.layers, buffer.planes, npages, heads, tokens, buffer.token_bytes


def held_heads(heads: int, tp: int, rank: int, what: str) -> range:
    """Which heads of a model one of `tp` ranks holds; more ranks than heads hold copies.

    Raises:
        UsageError: the heads cannot be shared out evenly; `what` says whose they are.
    """
    if tp <= heads:
        if heads % tp:
            raise UsageError(f"{what}: {heads} heads cannot be shared out evenly over {tp} ranks")
        share = heads // tp
        return range(rank * share, (rank + 1) * share)
    if tp % heads:
        raise UsageError(f"{what}: {tp} ranks cannot hold equal copies of {heads} heads")
    head = rank * heads // tp
    return range(head, head + 1)


Index = Annotated[int, Meta(ge=0, lt=1 << 48)]
Size = Annotated[int, Meta(ge=1, lt=1 << 48)]

Offsets = npt.NDArray[np.int64]
"""int64[n]: byte offsets."""


class KvTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The contents of one tensor of a cache, the same on every rank of both sides.

    Attributes:
        name: unique, e.g. "3.k".
        layer: of the model, as `layer_done` counts.
        heads: KV heads of the whole model; 1 for a compressed (MLA) cache, which each rank copies.
        tokens: tokens of a block.
        run: bytes of one token of one head.
        group: which of a request's lists of blocks it uses.
        planes: parts of each block that lie apart: 2 where one tensor has K and V.
    """

    name: Annotated[str, Meta(max_length=256)]
    layer: Index
    heads: Size
    tokens: Size
    run: Size
    group: Index = 0
    planes: Size = 1


class Placed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The places of a tensor's blocks on one rank, in bytes.

    Attributes:
        tensor: what it holds.
        region: index of the registered region.
        start: of block 0 in the region.
        blocks: how many there are.
        block_stride, head_stride, token_stride, plane_stride: from one to the next.
    """

    tensor: KvTensor
    region: Index
    start: Index
    blocks: Size
    block_stride: Index
    head_stride: Index
    token_stride: Index
    plane_stride: Index = 0


def describe_tensor(array: Any, axes: str) -> tuple[int, dict[str, tuple[int, int]], int, str]:
    """Read address, extents and strides of a numpy array or torch tensor.

    Args:
        array: a view of the cache; slices such as `cache[:, 0]` are fine.
        axes: one letter a dimension: b block, p plane, h head, t token, d the elements of one token
            of one head, which must be contiguous. Letters p, h and t may be missing.

    Returns:
        Address, {letter: (extent, stride in bytes)}, bytes of the elements, device.

    Raises:
        UsageError: other axes, or elements that are not contiguous.
    """
    shape = tuple(int(n) for n in array.shape)
    if sorted(axes) != sorted(set(axes)) or not {"b", "d"} <= set(axes) <= set("bphtd"):
        raise UsageError(f"axes={axes!r}: letters b and d, and p, h and t where there are any")
    if len(axes) != len(shape):
        raise UsageError(f"axes={axes!r} names {len(axes)} dimensions, the tensor has {shape}")
    if hasattr(array, "data_ptr"):
        itemsize = int(array.element_size())
        strides = tuple(int(n) * itemsize for n in array.stride())
        address, device = int(array.data_ptr()), str(array.device)
    else:
        itemsize, strides = int(array.itemsize), tuple(int(n) for n in array.strides)
        address, device = int(array.__array_interface__["data"][0]), "cpu"
    found = {letter: (n, step) for letter, n, step in zip(axes, shape, strides, strict=True)}
    if min(shape) < 1 or min(strides) < 0:
        raise UsageError(f"axes={axes!r}: shape {shape}, strides {strides}; none may be negative")
    if found["d"][1] != itemsize and found["d"][0] > 1:
        raise UsageError(f"axes={axes!r}: elements lie {found['d'][1]} bytes apart, not {itemsize}")
    return address, found, found["d"][0] * itemsize, device


@lru_cache(maxsize=4096)
def served_heads(
    heads: int, src: tuple[int, int], dst: tuple[int, int], what: str
) -> tuple[int, int, int]:
    """Which heads one rank writes to another: (first at the source, first at the target, count).

    Where several ranks of the source hold a head, one of them writes it: another for each rank of
    the target, in turn. Both sides compute this alike.

    `src` and `dst` are degree and rank of both; `what` is for errors.
    """
    here, there = held_heads(heads, *src, what), held_heads(heads, *dst, what)
    first, stop = max(here.start, there.start), min(here.stop, there.stop)
    copies = max(1, src[0] // heads)
    if first >= stop or src[1] % copies != dst[1] % copies:
        return 0, 0, 0
    return first - here.start, first - there.start, stop - first


def rows_of(src: Placed, dst: Placed, served: tuple[int, int, int]) -> tuple[int, Offsets, Offsets]:
    """The rows that carry one block: their length, and their offsets in the block on both sides.

    A row is as long as both layouts are contiguous.
    """
    tensor = src.tensor
    dims = (
        (tensor.planes, src.plane_stride, dst.plane_stride),
        (tensor.tokens, src.token_stride, dst.token_stride),
        (served[2], src.head_stride, dst.head_stride),
    )
    return _rows(tensor.run, served[:2], dims)


@lru_cache(maxsize=4096)
def _rows(
    length: int, first: tuple[int, int], dims: tuple[tuple[int, int, int], ...]
) -> tuple[int, Offsets, Offsets]:
    """Do rows_of() for the bytes of one token of one head, the first heads, and the dimensions."""
    _, *steps = dims[-1]
    left = [dim for dim in dims if dim[0] > 1]
    while (next_dim := next((d for d in left if d[1] == d[2] == length), None)) is not None:
        left.remove(next_dim)
        length *= next_dim[0]
    src_rows, dst_rows = (np.array([h * step], np.int64) for h, step in zip(first, steps))
    for count, src_step, dst_step in left:
        ticks = np.arange(count)
        src_rows = (src_rows[:, None] + ticks * src_step).ravel()
        dst_rows = (dst_rows[:, None] + ticks * dst_step).ravel()
    return length, src_rows, dst_rows
