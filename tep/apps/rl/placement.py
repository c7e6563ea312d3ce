"""Which rank holds what: the usual ways to shard a model for training and for inference.

Rule 1: everything here is one way to fill `TrainMeta` and `RolloutMeta`; the schedule takes any
other as well. Rule 2: shards of quantised parameters begin at multiples of the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from tep import UsageError
from tep.apps.rl.metadata import (
    ALIGN_BYTES,
    SCALINGS,
    Box,
    DType,
    MeshGroup,
    RolloutMeta,
    SourceShard,
    TargetShard,
    Tensor,
    TrainMeta,
    box_size,
    local_shape,
    nbytes_of,
    scale_bytes,
    whole,
)
from tep.apps.rl.models import Fused, Model

__all__ = [
    "InferLayout",
    "TrainLayout",
    "cut",
    "lay_out",
    "rollout_metas",
    "target_shards",
    "train_metas",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLayout:
    """How a model in training is sharded; the number of ranks is the product.

    Experts are split over `ep`, and each part over fsdp x tp along its first axis with enough
    entries. Other tensors are cut by `tp` (rows or columns) and then over fsdp x ep along axis 0.
    Every replica holds the same. Rank order: stage, replica, fsdp, tp, ep; the last runs fastest.

    Attributes:
        fsdp: shards of each parameter.
        pp: pipeline stages, contiguous layers each.
        ep: expert parallelism.
        tp: tensor parallelism.
        replicas: copies of everything.
    """

    fsdp: int
    pp: int = 1
    ep: int = 1
    tp: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes below 1."""
        _check_sizes(self, ("fsdp", "pp", "ep", "tp", "replicas"))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.fsdp * self.pp * self.ep * self.tp * self.replicas

    def rank(self, stage: int, replica: int, fsdp: int, tp: int, ep: int) -> int:
        """The rank at these coordinates."""
        at = (stage * self.replicas + replica) * self.fsdp + fsdp
        return (at * self.tp + tp) * self.ep + ep


@dataclass(frozen=True, slots=True, kw_only=True)
class InferLayout:
    """How the inference engine shards a model; the number of workers is ep x replicas.

    Attributes:
        ep: workers of one replica; experts are split over them.
        tp: tensor parallelism of all else; divides ep. 1: every worker holds all of it, as with
            data-parallel attention.
        replicas: copies of the whole.
    """

    ep: int
    tp: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes below 1, and a tp that does not divide ep."""
        _check_sizes(self, ("ep", "tp", "replicas"))
        if self.ep % self.tp:
            raise UsageError(f"InferLayout: tp={self.tp} does not divide ep={self.ep}")

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.ep * self.replicas


def _check_sizes(layout: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(layout, name)
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{type(layout).__name__}: {name}={value!r}; 1 or more")


def cut(extent: int, pieces: int, index: int, unit: int = 1) -> tuple[int, int]:
    """Piece `index` of `pieces` near-equal ones, which begin at multiples of `unit`."""
    units = -(-extent // unit)
    start, stop = units * index // pieces * unit, units * (index + 1) // pieces * unit
    return min(start, extent), min(stop, extent)


# ---------------------------------------------------------------------- training


def train_metas(model: Model, layout: TrainLayout, nics: int = 1) -> tuple[TrainMeta, ...]:
    """What every training rank holds, and the mesh groups: experts first, then all else."""
    groups = tuple(_mesh_groups(model, layout))
    splits = {source: fused.split for fused in model.fused for source in fused.sources}
    shards: list[list[SourceShard]] = [[] for _ in range(layout.world)]
    for tensor in model.tensors:
        stage = _stage(tensor.layer, model.layers, layout.pp)
        dealt = _expert_boxes if tensor.expert else _dense_boxes
        for ranks, box in dealt(tensor, layout, stage, splits.get(tensor.name, "none")):
            if box_size(box):
                shard = SourceShard(tensor.name, box)
                for rank in ranks:
                    shards[rank].append(shard)
    dtypes = {tensor.name: tensor.dtype for tensor in model.tensors}
    return tuple(
        TrainMeta(rank, nics, tuple(mine), dtypes, groups) for rank, mine in enumerate(shards)
    )


def _stage(layer: int, layers: int, pp: int) -> int:
    """Pipeline stage of a layer: the embedding is in the first, the head in the last."""
    clipped = min(max(layer, 0), layers - 1)
    return next(k for k in range(pp) if clipped < layers * (k + 1) // pp)


def _mesh_groups(model: Model, layout: TrainLayout) -> Iterator[MeshGroup]:
    experts = tuple(tensor.name for tensor in model.tensors if tensor.expert)
    dense = tuple(tensor.name for tensor in model.tensors if not tensor.expert)
    inner = [
        (replica, fsdp, tp)
        for replica in range(layout.replicas)
        for fsdp in range(layout.fsdp)
        for tp in range(layout.tp)
    ]
    if experts:
        meshes = tuple(
            tuple(layout.rank(stage, *at, ep) for at in inner)
            for stage in range(layout.pp)
            for ep in range(layout.ep)
        )
        yield MeshGroup("experts", experts, meshes)
    meshes = tuple(
        tuple(layout.rank(stage, *at, ep) for at in inner for ep in range(layout.ep))
        for stage in range(layout.pp)
    )
    yield MeshGroup("dense", dense, meshes)


def _expert_boxes(
    tensor: Tensor, layout: TrainLayout, stage: int, split: str
) -> Iterator[tuple[tuple[int, ...], Box]]:
    del split  # experts are not cut by tensor parallelism
    pieces = layout.fsdp * layout.tp
    for ep in range(layout.ep):
        start, stop = cut(tensor.shape[0], layout.ep, ep)
        for k in range(pieces):
            box = [(start, stop), *whole(tensor.shape[1:])]
            axis = 0 if stop - start >= pieces else 1
            low, high = cut(box[axis][1] - box[axis][0], pieces, k)
            box[axis] = (box[axis][0] + low, box[axis][0] + high)
            fsdp, tp = divmod(k, layout.tp)
            ranks = (layout.rank(stage, r, fsdp, tp, ep) for r in range(layout.replicas))
            yield tuple(ranks), tuple(box)


def _dense_boxes(
    tensor: Tensor, layout: TrainLayout, stage: int, split: str
) -> Iterator[tuple[tuple[int, ...], Box]]:
    axis = {"rows": 0, "columns": 1}.get(split)
    for tp in range(layout.tp):
        outer = list(whole(tensor.shape))
        if axis is not None and axis < len(outer):
            outer[axis] = cut(tensor.shape[axis], layout.tp, tp)
        for k in range(layout.fsdp * layout.ep):
            box = list(outer)
            low, high = cut(box[0][1] - box[0][0], layout.fsdp * layout.ep, k)
            box[0] = (box[0][0] + low, box[0][0] + high)
            fsdp, ep = divmod(k, layout.ep)
            ranks = (layout.rank(stage, r, fsdp, tp, ep) for r in range(layout.replicas))
            yield tuple(ranks), tuple(box)


# ---------------------------------------------------------------------- inference


def rollout_metas(
    model: Model, layout: InferLayout, nics: int = 1, prefix: str = "rollout"
) -> tuple[RolloutMeta, ...]:
    """What every inference worker holds; worker k is named f"{prefix}{k}"."""
    held = [target_shards(model, layout, index) for index in range(layout.ep)]
    return tuple(
        RolloutMeta(f"{prefix}{k}", nics, *held[k % layout.ep]) for k in range(layout.world)
    )


def target_shards(
    model: Model, layout: InferLayout, index: int
) -> tuple[tuple[TargetShard, ...], int]:
    """What worker `index` of a replica holds, laid out one after another, and bytes in all.

    Block scales stand right behind their weights, so that both are one write.
    """
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    parts = ((fused, _parts(fused, layout, index, shapes)) for fused in model.fused)
    return lay_out((fused.name, fused.dtype, mine) for fused, mine in parts if mine)


def lay_out(
    targets: Iterable[tuple[str, DType, tuple[SourceShard, ...]]], *, apart: bool = False
) -> tuple[tuple[TargetShard, ...], int]:
    """Give targets their offsets, one after another, and say how many bytes that makes.

    Args:
        targets: name, dtype and parts of each.
        apart: each has memory of its own: no row of a schedule may cover two of them.
    """
    found, at = [], 0
    gap = ALIGN_BYTES if apart else 0
    for name, dtype, parts in targets:
        offset, at = at, at + _aligned(nbytes_of(local_shape(parts), dtype)) + gap
        scales = -1
        if dtype in SCALINGS:
            scales, at = at, at + _aligned(scale_bytes(parts, dtype)) + gap
        found.append(TargetShard(name, dtype, parts, offset, scales))
    return tuple(found), at


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _parts(
    fused: Fused, layout: InferLayout, index: int, shapes: dict[str, tuple[int, ...]]
) -> tuple[SourceShard, ...]:
    found = []
    for k, name in enumerate(fused.sources):
        box = list(whole(shapes[name]))
        if fused.expert:
            box[0] = cut(box[0][1], layout.ep, index)
        elif fused.split != "none" and layout.tp > 1:
            axis = 0 if fused.split == "rows" else 1
            units = fused.units[k] if k < len(fused.units) else 0
            box[axis] = _slice(fused, box[axis][1], layout.tp, index % layout.tp, units)
        if box_size(tuple(box)):
            found.append(_shard(name, tuple(box)))
    return tuple(found)


def _slice(fused: Fused, extent: int, tp: int, index: int, units: int) -> tuple[int, int]:
    rows, columns, _ = SCALINGS.get(fused.dtype, (1, 1, 0))
    unit = (rows if fused.split == "rows" else columns) or 1
    if not units:
        return cut(extent, tp, index, unit)
    if tp > units:
        if tp % units:
            raise UsageError(f"{fused.name}: tp={tp} is no multiple of its {units} heads")
        index, tp = index * units // tp, units
    start, stop = (units * k // tp * (extent // units) for k in (index, index + 1))
    if start % unit or (stop % unit and stop != extent):
        raise UsageError(
            f"{fused.name}: tp={tp} cuts at {start} and {stop}, not at multiples of the "
            f"{unit} of a quantisation block; choose another tp"
        )
    return start, stop


@cache
def _shard(name: str, box: Box) -> SourceShard:
    """One object for all ranks that hold the same."""
    return SourceShard(name, box)
