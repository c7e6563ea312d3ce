"""Which box of a tensor a training rank holds: DTensor's and FSDP's ways to shard, and mesh groups.

Pure, but for `shard_of`, which asks a tensor; torch is not imported here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tep import UsageError
from tep.apps.rl.metadata import Box, MeshGroup, box_shape, box_size, intersect, whole

__all__ = ["Placed", "flat_boxes", "mesh_groups", "placed_box", "shard_of"]


class Placed(NamedTuple):
    """How one dimension of a device mesh holds a tensor.

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
