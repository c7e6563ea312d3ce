"""What a parameter is and where its pieces lie, on both sides of an update: frozen records.

Boxes, shards, mesh groups and the two workers' metadata. No layout rule and no planning here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from tep import UsageError

__all__ = [
    "ALIGN_BYTES",
    "BLOCK",
    "ITEM_BYTES",
    "SCALINGS",
    "Box",
    "DType",
    "MeshGroup",
    "RolloutMeta",
    "Scaling",
    "SourceShard",
    "TargetShard",
    "Tensor",
    "TrainMeta",
    "box_bytes",
    "box_shape",
    "box_size",
    "intersect",
    "joined_axis",
    "joined_shape",
    "local_shape",
    "nbytes_of",
    "scale_bytes",
    "scale_shape",
    "whole",
]

DType = Literal["bf16", "fp16", "fp32", "fp8", "fp8_channel", "fp8_ue8m0", "u8"]
"""The fp8 are e4m3, with the scales of SCALINGS. u8 is any other, as bytes: never converted."""

Box = tuple[tuple[int, int], ...]
"""A slice of a tensor: (start, stop) for each dimension."""

ITEM_BYTES: Final[dict[DType, int]] = {
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "fp8": 1,
    "fp8_channel": 1,
    "fp8_ue8m0": 1,
    "u8": 1,
}

BLOCK: Final = 128
"""Edge of a quantisation block. Source: `weight_block_size` in DeepSeek-V3's published config.json,
[128, 128]; Kimi-K2's is the same. Quoted."""


class Scaling(NamedTuple):
    """What shares one scale in a quantised matrix.

    Attributes:
        rows: of a block.
        columns: of a block; 0: all there are.
        item: bytes of a scale: 4 is a float32, 1 the exponent of a power of two (UE8M0).
    """

    rows: int
    columns: int
    item: int


SCALINGS: Final[dict[str, Scaling]] = {
    "fp8": Scaling(BLOCK, BLOCK, 4),
    "fp8_channel": Scaling(1, 0, 4),
    "fp8_ue8m0": Scaling(BLOCK, BLOCK, 1),
}
"""By dtype. fp8_ue8m0 is DeepSeek-V3.1's `scale_fmt` "ue8m0", read from its config.json, quoted."""

ALIGN_BYTES: Final = 16
"""Where tensors may begin in an arena or a staging area: what vector loads and TMA ask for."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter of the model in training.

    Attributes:
        name: as in the checkpoint; "*" stands for the expert number where experts are stacked in
            one tensor [experts, rows, columns].
        shape: whole, not sharded.
        dtype: in training.
        layer: its transformer layer; -1 before the first, the number of layers behind the last.
        expert: it is one of the routed experts' stacked tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    layer: int
    expert: bool = False


class SourceShard(NamedTuple):
    """A piece of one tensor."""

    name: str
    box: Box


class TargetShard(NamedTuple):
    """What one rollout worker holds of one fused parameter.

    Attributes:
        name: of the fused parameter, e.g. "model.layers.0.self_attn.qkv_proj.weight".
        dtype: in inference.
        parts: pieces of source tensors, joined along the last axis but one (the only axis of
            vectors); all other extents are equal.
        offset: byte in the worker's region.
        scale_offset: byte of the scales; -1 where dtype is not quantised.
    """

    name: str
    dtype: DType
    parts: tuple[SourceShard, ...]
    offset: int
    scale_offset: int = -1


@dataclass(frozen=True, slots=True)
class MeshGroup:
    """Tensors with one way of sharding, and the sub-meshes that unshard them.

    Attributes:
        name: e.g. "experts".
        tensors: names.
        submeshes: disjoint sets of training ranks; each gathers what its members hold.
    """

    name: str
    tensors: tuple[str, ...]
    submeshes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TrainMeta:
    """What one training rank tells the controller.

    Attributes:
        rank: its number, 0 to n-1.
        nics: NICs of its engine.
        shards: what it holds; an empty box is left out.
        dtypes: of its tensors.
        groups: all mesh groups, in the order in which they are updated; the same on every rank.
    """

    rank: int
    nics: int
    shards: tuple[SourceShard, ...]
    dtypes: dict[str, DType]
    groups: tuple[MeshGroup, ...]


@dataclass(frozen=True, slots=True)
class RolloutMeta:
    """What one rollout worker tells the controller.

    Attributes:
        name: its identity over restarts.
        nics: NICs of its engine.
        shards: what it holds.
        nbytes: of its weight region.
    """

    name: str
    nics: int
    shards: tuple[TargetShard, ...]
    nbytes: int


def box_shape(box: Box) -> tuple[int, ...]:
    """Extent of each dimension."""
    return tuple(stop - start for start, stop in box)


def box_size(box: Box) -> int:
    """Number of elements; 0 if empty."""
    size = 1
    for start, stop in box:  # called half a million times for a trillion parameters
        size *= stop - start
    return size


def nbytes_of(shape: tuple[int, ...], dtype: DType) -> int:
    """Bytes of an array."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def box_bytes(box: Box, dtype: DType) -> int:
    """Bytes of a box's elements, packed."""
    return box_size(box) * ITEM_BYTES[dtype]


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, extent) for extent in shape)


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor share, or None."""
    found = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        found.append((start, stop))
    return tuple(found)


def joined_axis(ndim: int) -> int:
    """The axis along which parts are joined."""
    return max(0, ndim - 2)


def joined_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of arrays joined along joined_axis(); the other extents must be equal."""
    axis = joined_axis(len(shapes[0]))
    joined = sum(shape[axis] for shape in shapes)
    return (*shapes[0][:axis], joined, *shapes[0][axis + 1 :])


def local_shape(parts: Sequence[SourceShard]) -> tuple[int, ...]:
    """Shape of parts joined together.

    Raises:
        UsageError: they do not fit.
    """
    shapes = [box_shape(part.box) for part in parts]
    axis = joined_axis(len(shapes[0]))
    if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) != 1:
        listed = ", ".join(f"{part.name}{list(shape)}" for part, shape in zip(parts, shapes))
        raise UsageError(f"these parts cannot be joined along axis {axis}: {listed}")
    return joined_shape(shapes)


def scale_shape(shape: tuple[int, ...], dtype: DType = "fp8") -> tuple[int, ...]:
    """Shape of the scales of one part; the last block of an axis may cover fewer elements."""
    rows, columns, _ = SCALINGS[dtype]
    return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns) if columns else 1)


def scale_bytes(parts: Sequence[SourceShard], dtype: DType) -> int:
    """Bytes of the scales of parts joined together."""
    shapes = (scale_shape(box_shape(part.box), dtype) for part in parts)
    return sum(math.prod(shape) * SCALINGS[dtype].item for shape in shapes)
