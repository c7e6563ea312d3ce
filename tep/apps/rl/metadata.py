"""Parameters and the places of their pieces on both sides of an update, and the routing table.

Frozen records and boxes. The boxes are those of DTensor and FSDP: which part of a tensor a training
rank holds. A `Schedule` has tasks, what they gather and make, and one row for each write: static,
serialisable, the same on every rank; how it is made is `schedule`'s matter.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tep import BadDescriptor, UsageError
from tep.observe.shown import Shown

__all__ = [
    "ALIGN_BYTES", "BLOCK", "ROW", "SCALINGS", "Box", "DType", "Gather", "GatherPiece", "MeshGroup",
    "Out", "OutPart", "Placed", "RolloutMeta", "Rows", "Scaling", "Schedule", "SourceShard",
    "TargetShard", "Task", "Tensor", "TrainMeta", "are_disjoint", "box_bytes", "box_shape",
    "box_size", "extents_of", "intersect", "item_bytes", "joined_axis",
    "joined_shape", "local_shape", "mesh_groups", "nbytes_of", "placed_box", "scale_shape",
    "shard_of", "whole",
]  # fmt: skip

DType = Literal["bf16", "fp16", "fp32", "fp8", "fp8_channel", "fp8_ue8m0", "u8"]
"""The fp8 are e4m3, with the scales of SCALINGS. u8 is any other, as bytes: never converted."""

Box = tuple[tuple[int, int], ...]
"""A slice of a tensor: (start, stop) for each dimension."""

_WIDE: Final = {"bf16": 2, "fp16": 2, "fp32": 4}

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
        offsets: byte in the worker's region of the values; and of the scales, if dtype is
            quantised.
    """

    name: str
    dtype: DType
    parts: tuple[SourceShard, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MeshGroup:
    """Tensors with one way of sharding, and the sub-meshes that unshard them.

    Attributes:
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
        nics: of its engine.
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
        nics: of its engine.
        nbytes: of its weight region.
    """

    name: str
    nics: int
    shards: tuple[TargetShard, ...]
    nbytes: int


def box_shape(box: Box) -> tuple[int, ...]:
    """The extent of each dimension."""
    return tuple(stop - start for start, stop in box)


def box_size(box: Box) -> int:
    """Number of elements; 0 if empty."""
    size = 1
    for start, stop in box:  # called half a million times for a trillion parameters
        size *= stop - start
    return size


def item_bytes(dtype: DType) -> int:
    """Bytes of an element."""
    return _WIDE.get(dtype, 1)


def nbytes_of(shape: tuple[int, ...], dtype: DType) -> int:
    """Bytes of an array."""
    return math.prod(shape) * item_bytes(dtype)


def box_bytes(box: Box, dtype: DType) -> int:
    """Bytes of a box's elements, packed."""
    return box_size(box) * item_bytes(dtype)


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
    """Shape of parts joined together; UsageError if they do not fit."""
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


def extents_of(
    parts: Sequence[SourceShard], dtype: DType
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Shape and bytes of parts joined together; and of their scales, if dtype is quantised."""
    shape = local_shape(parts)
    values = shape, nbytes_of(shape, dtype)
    if dtype not in SCALINGS:
        return (values,)
    shape = joined_shape([scale_shape(box_shape(part.box), dtype) for part in parts])
    return values, (shape, math.prod(shape) * SCALINGS[dtype].item)


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
    return all(len(boxes) == 1 for boxes in held) and are_disjoint({boxes[0] for boxes in held})


def are_disjoint(boxes: Iterable[Box]) -> bool:
    """Whether boxes share no element; quick where they differ in one axis only."""
    boxes = sorted(boxes)
    axes = [k for k, axis in enumerate(zip(*boxes)) if any(pair != axis[0] for pair in axis)]
    if len(axes) <= 1:
        spans = [box[axes[0]] for box in boxes] if axes else [(0, 1)] * len(boxes)
        return all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    return not any(intersect(a, b) for k, a in enumerate(boxes) for b in boxes[k + 1 :])


# ---------------------------------------------------------------------- the routing table

ROW: Final = np.dtype(
    [
        ("task", "<i4"),
        ("sender", "<i4"),
        ("receiver", "<i4"),
        ("src", "<i8"),
        ("dst", "<i8"),
        ("nbytes", "<i8"),
    ]
)
"""One write. src: byte in the task's staging; dst: byte in the receiver's weight region."""

Rows = npt.NDArray[np.void]

_VERSION: Final = 3
_RANKS_MAX: Final = 1 << 31


class GatherPiece(NamedTuple):
    """One shard of a source tensor, packed in the task's staging.

    Attributes:
        box: in the tensor.
        offset: byte in the task's staging.
        holders: ranks that have it; the others get it from one of them.
    """

    box: Box
    offset: int
    holders: tuple[int, ...]

    def sender_to(self, rank: int) -> int | None:
        """The rank that sends this piece to a member of the sub-mesh; None if it has it already."""
        if rank in self.holders:
            return None
        return self.holders[rank % len(self.holders)]


class Gather(NamedTuple):
    """One source tensor that a task unshards.

    Attributes:
        box: what is there once all pieces are; they tile it.
        offset: byte in the task's staging of the whole tensor in C order; the first piece's offset
            if the pieces, one behind the other, are the whole already.
    """

    name: str
    dtype: DType
    box: Box
    pieces: tuple[GatherPiece, ...]
    offset: int

    @property
    def in_place(self) -> bool:
        """Whether the pieces as they lie are the whole."""
        return self.offset == self.pieces[0].offset


class OutPart(NamedTuple):
    """A slice of a gathered tensor that becomes a part of an output."""

    gather: int
    box: Box


class Out(NamedTuple):
    """One output of a task: parts joined, quantised, packed.

    Attributes:
        target: name of the fused parameter; `dtype` is in inference.
        parts: joined along the last axis but one, in order.
        places: byte in the task's staging and bytes of the values; and of the scales, if dtype is
            quantised.
    """

    target: str
    dtype: DType
    parts: tuple[OutPart, ...]
    places: tuple[tuple[int, int], ...]


class Task(NamedTuple):
    """One parameter, or a few small ones, of one sub-mesh: gather, make, write.

    Attributes:
        number: in the schedule.
        name: of its first output.
        group: number of its mesh group.
        members: ranks of its sub-mesh; all take part.
        gather_bytes: of all gathered tensors.
        nbytes: staging that every member needs for it.
        staging: where that begins in each member's staging region.
        after: for each member, the position in its own list of tasks up to which all must have
            ended before this may begin; -1: none.
    """

    number: int
    name: str
    group: int
    members: tuple[int, ...]
    gathers: tuple[Gather, ...]
    outs: tuple[Out, ...]
    gather_bytes: int
    nbytes: int
    staging: tuple[int, ...]
    after: tuple[int, ...]

    def staging_of(self, rank: int) -> int:
        """The byte at which the task's staging begins at a member."""
        return self.staging[self.members.index(rank)]

    def after_of(self, rank: int) -> int:
        """Up to which of its own tasks a member must have ended; -1: none."""
        return self.after[self.members.index(rank)]


@dataclass(frozen=True, slots=True)
class Schedule(Shown):
    """The routing table: all writes, in order. Made once; recomputed when membership changes.

    Attributes:
        ranks: number of training ranks.
        receivers: names of the rollout workers.
        groups: names of the mesh groups, in order.
        tasks: ordered by group.
        rows: ROW, ordered by task, sender and position.
        watermark_bytes: staging that no rank exceeds.
    """

    ranks: int
    receivers: tuple[str, ...]
    groups: tuple[str, ...]
    tasks: tuple[Task, ...]
    rows: Rows
    watermark_bytes: int
    _starts: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the rows by task and sender."""
        key = self.rows["task"].astype(np.int64) * self.ranks + self.rows["sender"]
        object.__setattr__(self, "_starts", key)

    def __repr__(self) -> str:
        return (
            f"Schedule({len(self.tasks)} tasks, {len(self.rows)} writes, {self.ranks} ranks to "
            f"{len(self.receivers)} workers)"
        )

    def table(self) -> list[dict[str, int | float]]:
        """Return a row a training rank."""
        writes = np.bincount(self.rows["sender"], minlength=self.ranks)
        return [
            {"training rank": rank, "writes": int(count), "sent, GB": nbytes / 1e9}
            for rank, (count, nbytes) in enumerate(zip(writes, self.sent_bytes(), strict=True))
        ]

    def rows_of(self, task: int, sender: int) -> Rows:
        """The rows that one rank writes in one task."""
        key = task * self.ranks + sender
        first, last = np.searchsorted(self._starts, (key, key + 1))
        return self.rows[first:last]

    def tasks_of(self, rank: int) -> Iterator[Task]:
        """The tasks that a rank takes part in, in order."""
        return (task for task in self.tasks if rank in task.members)

    def finishes(self, rank: int) -> slice:
        """The receivers that a rank tells when all ranks are through, each receiver by one rank.

        One is enough: no rank is past the last barrier before all have entered it. If every rank
        told every receiver, 4,096 ranks would send millions of words that say the same.
        """
        return slice(rank, None, self.ranks)

    def sent_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes that each training rank writes to rollout workers."""
        return self._sums("sender", self.ranks)

    def received_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes that each rollout worker is written."""
        return self._sums("receiver", len(self.receivers))

    def _sums(self, column: str, count: int) -> npt.NDArray[np.int64]:
        return np.bincount(self.rows[column], self.rows["nbytes"], count).astype(np.int64)

    def to_bytes(self) -> bytes:
        """Encode; `from_bytes` is the inverse."""
        head = (_VERSION, self.ranks, self.receivers, self.groups, self.tasks)
        return msgspec.msgpack.encode((*head, self.rows.tobytes(), self.watermark_bytes))

    @classmethod
    def from_bytes(cls, data: bytes) -> Schedule:
        """Decode strictly.

        Raises:
            BadDescriptor: these bytes are no schedule of this version.
        """
        try:
            version, ranks, receivers, groups, tasks, raw, watermark_bytes = msgspec.msgpack.decode(
                data, type=_Wire
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadDescriptor(f"Schedule: {error}") from error
        if version != _VERSION or len(raw) % ROW.itemsize:
            raise BadDescriptor(
                f"Schedule: version {version} with {len(raw)} bytes of rows; this tep "
                f"reads version {_VERSION} and rows of {ROW.itemsize} bytes"
            )
        rows = np.frombuffer(raw, ROW)
        limits = {"task": len(tasks), "sender": ranks, "receiver": len(receivers)}
        if wrong := _wrong(limits, rows):
            raise BadDescriptor(f"Schedule: {wrong}")
        return cls(ranks, receivers, groups, tasks, rows, watermark_bytes)

    def digest(self) -> str:
        """SHA-256 of the encoded table: equal on all ranks, or they do not fit together."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


_Wire = tuple[int, int, tuple[str, ...], tuple[str, ...], tuple[Task, ...], bytes, int]
"""A schedule as it travels, with its version before it."""


def _wrong(limits: Mapping[str, int], rows: Rows) -> str:
    """Say which of a schedule's numbers cannot be; "" = none."""
    if not 0 <= limits["sender"] <= _RANKS_MAX:
        return f"ranks={limits['sender']} is outside 0 .. {_RANKS_MAX}"
    if not len(rows):
        return ""
    for name, count in limits.items():
        low, high = int(rows[name].min()), int(rows[name].max())
        if low < 0 or high >= count:
            return f"rows name {name} {low if low < 0 else high}, there are {count}"
    if int(rows["nbytes"].min()) < 0 or rows["nbytes"].sum(dtype=np.float64) >= 2**63:
        return "the rows' bytes are negative, or too many"
    return ""
