"""What one sub-mesh can make of one target: packed slices, and where their runs lie. Pure geometry.

Parts are joined along the last axis but one. Where a sub-mesh has all parts over the whole of that
axis they make one piece; else each part is one by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tep import UsageError
from tep.apps.rl.metadata import (
    ITEM_BYTES,
    SCALINGS,
    Box,
    DType,
    Scaling,
    SourceShard,
    box_shape,
    box_size,
    joined_axis,
    local_shape,
    scale_shape,
)

__all__ = ["Piece", "are_in_order", "pieces_of", "runs_of"]

Runs = tuple[npt.NDArray[np.int64], int]
"""Byte offsets in the target of equally long contiguous runs, and their bytes. In the packed piece
they lie one behind the other."""


class Piece(NamedTuple):
    """A slice of one target, packed.

    Attributes:
        target: name of the target.
        dtype: in inference.
        parts: (number of the part, box in its source tensor), joined in this order.
        nbytes: of its values.
        runs: where they go.
        scale_nbytes: of its block scales; 0 if it has none.
        scale_runs: where those go.
    """

    target: str
    dtype: DType
    parts: tuple[tuple[int, Box], ...]
    nbytes: int
    runs: Runs
    scale_nbytes: int
    scale_runs: Runs


def pieces_of(
    target: str, dtype: DType, parts: tuple[SourceShard, ...], boxes: Sequence[Box | None]
) -> Iterator[Piece]:
    """Make pieces of what a sub-mesh has of each part (None: nothing).

    Raises:
        UsageError: the parts do not fit together, or a slice of a quantised target does not begin
            or end at a block.
    """
    shape = local_shape(parts)
    inner = [_inside(part.box, box) for part, box in zip(parts, boxes)]
    scaling = SCALINGS.get(dtype)
    if scaling:
        if len(shape) < 2:
            raise UsageError(f"{target}: a vector cannot be quantised in blocks")
        for part, box in zip(parts, boxes):
            _check_blocks(target, part, box, scaling)
    axis = joined_axis(len(shape))
    edges = np.cumsum([0, *(box_shape(part.box)[axis] for part in parts)]).tolist()
    scales = [scale_shape(box_shape(part.box), dtype) if scaling else () for part in parts]
    scale_edges = np.cumsum([0, *(found[axis] if found else 0 for found in scales)]).tolist()
    scale_whole = (*scales[0][:axis], scale_edges[-1], *scales[0][axis + 1 :]) if scales[0] else ()
    for first, last, box in _joined(inner, edges, axis):
        chosen = tuple((k, found) for k in range(first, last) if (found := boxes[k]) is not None)
        scale_box: Box = ()
        if scaling:
            low = scale_edges[first] + (box[axis][0] - edges[first]) // scaling.rows
            high = scale_edges[last - 1] - (edges[last - 1] - box[axis][1]) // scaling.rows
            start, stop = box[-1]
            wide = scaling.columns or max(stop, 1)  # all columns: one block
            scale_box = (*box[:-2], (low, high), (start // wide, -(-stop // wide)))
        item = ITEM_BYTES[dtype]
        yield Piece(
            target,
            dtype,
            chosen,
            box_size(box) * item,
            runs_of(shape, box, item),
            box_size(scale_box) * scaling.item if scaling else 0,
            runs_of(scale_whole, scale_box, scaling.item)
            if scaling
            else (np.zeros(0, np.int64), 0),
        )


def _inside(part: Box, box: Box | None) -> Box | None:
    """A slice in coordinates of its part."""
    if box is None:
        return None
    return tuple((low - start, high - start) for (low, high), (start, _) in zip(box, part))


def _joined(
    inner: Sequence[Box | None], edges: Sequence[int], axis: int
) -> Iterator[tuple[int, int, Box]]:
    """(first part, behind the last, box in the joined target) of each piece."""
    full = [
        box is not None and box[axis] == (0, edges[k + 1] - edges[k]) for k, box in enumerate(inner)
    ]
    rest = {(*box[:axis], *box[axis + 1 :]) if box else None for box in inner}
    if all(full) and len(rest) == 1:
        box = inner[0]
        assert box is not None
        yield 0, len(inner), (*box[:axis], (0, edges[-1]), *box[axis + 1 :])
        return
    for k, found in enumerate(inner):
        if found is not None:
            low, high = found[axis]
            moved = (edges[k] + low, edges[k] + high)
            yield k, k + 1, (*found[:axis], moved, *found[axis + 1 :])


def _check_blocks(target: str, part: SourceShard, box: Box | None, scaling: Scaling) -> None:
    if box is None:
        return
    for block, (start, stop), (part_start, part_stop) in zip(scaling[:2], box[-2:], part.box[-2:]):
        if not block and (start, stop) != (part_start, part_stop):
            raise UsageError(
                f"{target}: {part.name}{list(part.box)} is cut at {list(box)}; a scale of this "
                "target needs whole rows in one sub-mesh"
            )
        if block and (start % block or part_start % block or (stop % block and stop != part_stop)):
            raise UsageError(
                f"{target}: {part.name}{list(part.box)} is cut at {list(box)}, not at multiples of "
                f"the {block} of a quantisation block"
            )


def are_in_order(whole: Box, boxes: Sequence[Box]) -> bool:
    """Whether packed boxes that tile a whole are that whole in C order, one behind the other: they
    are cut in one axis, with nothing but ones before it.
    """
    shape = box_shape(whole)
    lead = next((k for k, extent in enumerate(shape) if extent != 1), 0)
    tail = whole[lead + 1 :]
    return all(box[lead + 1 :] == tail for box in boxes)


def runs_of(shape: tuple[int, ...], box: Box, item: int) -> Runs:
    """Byte offsets of the contiguous runs of a box in an array in C order, and their bytes."""
    axis = len(shape) - 1
    while axis > 0 and box[axis] == (0, shape[axis]):
        axis -= 1
    strides = [math.prod(shape[k + 1 :]) * item for k in range(len(shape))]
    start, stop = box[axis]
    offsets = np.array([start * strides[axis]], np.int64)
    for k in reversed(range(axis)):
        low, high = box[k]
        steps = np.arange(low, high, dtype=np.int64) * strides[k]
        offsets = (steps[:, None] + offsets).ravel()
    return offsets, (stop - start) * strides[axis]
