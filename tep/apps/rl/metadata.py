"""Parameters and the places of their pieces, on both sides of an update: frozen records, boxes.

The boxes are those of DTensor and FSDP: which part of a tensor a training rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from tep import UsageError

__all__ = [
    "ALIGN_BYTES", "BLOCK", "ITEM_BYTES", "SCALINGS", "Box", "DType", "MeshGroup", "Placed",
    "RolloutMeta", "Scaling", "SourceShard", "TargetShard", "Tensor", "TrainMeta", "box_bytes",
    "box_shape", "box_size", "flat_boxes", "intersect", "joined_axis", "joined_shape",
    "local_shape", "mesh_groups", "nbytes_of", "placed_box", "scale_bytes", "scale_shape",
    "shard_of", "whole",
]  # fmt: skip


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
    """The elements of a quantised matrix that share one scale.

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
"""Alignment of tensors in an arena or a staging area: vector loads and TMA ask for it."""


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
    """One rollout worker's part of one fused parameter.

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
    """One training rank's account of itself to the controller.

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
    """One rollout worker's account of itself to the controller.

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
    """The box that two boxes of one tensor share, or None."""
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


class Placed(NamedTuple):
    """The placement of a tensor along one dimension of a device mesh.

    Attributes:
        size: ranks of the dimension.
        place: this rank's in it.
        axis: of the tensor that it cuts; -1: each has all of it.
        split: pieces that other dimensions cut the axis in before this one does; 1 unless torch
            says otherwise (`_StridedShard`, where FSDP shards what TP has sharded).
    """

    size: int
    place: int
    axis: int = -1
    split: int = 1


def placed_box(shape: Sequence[int], mesh: Sequence[Placed]) -> Box:
    """The box of one rank.

    An axis is cut as torch.chunk cuts it: all pieces but the last are equally long, and the last
    ones may be empty.

    Raises:
        UsageError: a rank would hold several stretches of an axis.
    """
    box, pieces = list(whole(tuple(shape))), [1] * len(shape)
    later = [one for one in mesh if one.split != 1]
    for size, place, axis, split in (*(one for one in mesh if one.split == 1), *reversed(later)):
        if axis < 0:
            continue
        if axis >= len(box):
            raise UsageError(f"a mesh cuts axis {axis} of a tensor of shape {list(shape)}")
        if split not in {1, pieces[axis]}:
            raise UsageError(
                f"axis {axis} is cut after a cut in {split}, but the mesh has cut it in "
                f"{pieces[axis]}; a rank would hold several stretches, which is no box"
            )
        start, stop = box[axis]
        step = -(-(stop - start) // size)
        box[axis] = (min(start + step * place, stop), min(start + step * (place + 1), stop))
        pieces[axis] *= size
    return tuple(box)


def shard_of(tensor: Any) -> tuple[tuple[int, ...], Box, Any]:
    """The global shape of a tensor, and the box and the values that this rank holds of it.

    Args:
        tensor: a torch DTensor; any other tensor or array is taken for a whole one.

    Raises:
        UsageError: it holds a partial sum, or its local values do not have its box's shape.
    """
    shape = tuple(int(extent) for extent in tensor.shape)
    if not hasattr(tensor, "placements"):
        return shape, whole(shape), tensor
    mesh, local = tensor.device_mesh, tensor.to_local()
    where = mesh.get_coordinate()
    if where is None:
        return shape, tuple((0, 0) for _ in shape), local
    placed = []
    for size, index, how in zip(mesh.shape, where, tensor.placements, strict=True):
        if how.is_partial():
            raise UsageError(f"a tensor of shape {list(shape)} is a partial sum ({how}); reduce it")
        axis = getattr(how, "dim", -1)
        split = getattr(how, "split_factor", 1)
        placed.append(Placed(int(size), int(index), axis % len(shape) if axis != -1 else -1, split))
    box = placed_box(shape, placed)
    if box_size(box) and box_shape(box) != tuple(local.shape):
        raise UsageError(
            f"a tensor of shape {list(shape)} is placed as {tensor.placements}: {list(box)} should "
            f"be here, but the local values have the shape {list(local.shape)}"
        )
    return shape, box, local


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements start to stop of a tensor in C order, in this order.

    So FSDP shards a parameter that it has flattened (`use_orig_params`).

    Raises:
        UsageError: the range is not in the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise UsageError(f"elements {start} to {stop} of a tensor of shape {list(shape)}")
    if start == stop:
        return
    if len(shape) == 1:
        yield ((start, stop),)
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # rows that are there from end to end
    if first > last:  # within one row
        first = start // inner
        for box in flat_boxes(shape[1:], start - first * inner, stop - first * inner):
            yield ((first, first + 1), *box)
        return
    for box in flat_boxes(shape[1:], inner - (first * inner - start), inner):
        yield ((first - 1, first), *box)
    if first < last:
        yield ((first, last), *whole(tuple(shape[1:])))
    for box in flat_boxes(shape[1:], 0, stop - last * inner):
        yield ((last, last + 1), *box)


def mesh_groups(
    held: Sequence[Mapping[str, Sequence[Box]]], joined: Iterable[tuple[Sequence[str], bool]] = ()
) -> tuple[MeshGroup, ...]:
    """Sort tensors into mesh groups: those that each rank can send as it has them, and the rest.

    Args:
        held: boxes by tensor name, of each training rank.
        joined: names of tensors that one target is made of, and whether it is quantised. What is
            quantised is gathered first, by those who hold it: a block may lie in two shards.
    """
    owners: dict[str, dict[int, Sequence[Box]]] = {}
    for rank, mine in enumerate(held):
        for name, boxes in mine.items():
            if boxes:
                owners.setdefault(name, {})[rank] = boxes
    gathered = {name for name, boxes in owners.items() if not _is_direct(list(boxes.values()))}
    partners: dict[str, list[set[str]]] = {}
    for names, quantised in joined:
        known = {name for name in names if name in owners}
        if quantised:
            gathered |= known
        for name in known:
            partners.setdefault(name, []).append(known)
    waiting = list(gathered)
    while waiting:  # what is joined has to be of one group
        for known in partners.pop(waiting.pop(), ()):
            waiting += known - gathered
            gathered |= known
            known.clear()
    groups: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    alone = tuple((rank,) for rank in range(len(held)))
    for name, found in owners.items():
        groups.setdefault((tuple(found),) if name in gathered else alone, []).append(name)
    return tuple(
        MeshGroup(f"group{k}", tuple(names), meshes)
        for k, (meshes, names) in enumerate(groups.items())
    )


def _is_direct(held: Sequence[Sequence[Box]]) -> bool:
    """Whether each rank has one box, and any two of them are the same or share nothing."""
    if any(len(boxes) != 1 for boxes in held):
        return False
    different = sorted({boxes[0] for boxes in held})
    return not any(intersect(a, b) for k, a in enumerate(different) for b in different[k + 1 :])
