"""A task's arithmetic on its staging memory: unshard, fuse, quantise. Real numpy, no transfers.

Rule 1: what is made for one sender equals what is made for any other, bit for bit. Rule 2: nothing
larger than a row of quantisation blocks lives outside staging, or the watermark would not hold.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tep import UsageError
from tep.apps.rl.metadata import (
    Box,
    DType,
    box_bytes,
    box_shape,
    joined_axis,
    joined_shape,
    nbytes_of,
    scale_shape,
)
from tep.apps.rl.quantise import check_finite, numpy_dtype, quantise, scale_dtype
from tep.apps.rl.routes import Gather, Out, Rows, Task

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

__all__ = ["as_array", "load_shards", "make_outs", "needed_outs", "unshard"]

Bytes = npt.NDArray[np.uint8]


def load_shards(
    task: Task, rank: int, shards: Mapping[tuple[str, Box], Array], staging: Bytes
) -> int:
    """Copy what a rank holds of a task's tensors to its place in staging; return the bytes.

    This is the copy from host to device where the weights are offloaded.

    Raises:
        UsageError: a tensor has an infinity or a NaN; its name is in the message.
    """
    copied = 0
    for gather in task.gathers:
        for piece in gather.pieces:
            if rank in piece.holders:
                view = _view(staging, piece.offset, gather.dtype, box_shape(piece.box))
                view[...] = as_array(shards[gather.name, piece.box])
                check_finite(view, gather.name)
                copied += box_bytes(piece.box, gather.dtype)
    return copied


def as_array(values: object) -> Array:
    """Return an array as it is, or a torch tensor as one: a view of it on the host, a copy of one
    on a device.
    """
    if isinstance(values, np.ndarray):
        return values
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is None or not isinstance(values, torch.Tensor):
        raise UsageError(f"a shard is a numpy array or a torch tensor, not {type(values)!r}")
    tensor = values.detach().cpu()
    bf16 = tensor.dtype == torch.bfloat16  # numpy has no such thing; the bits are the same
    found: Array = (tensor.view(torch.int16) if bf16 else tensor).numpy()
    return found.view(numpy_dtype("bf16")) if bf16 else found


def unshard(task: Task, staging: Bytes) -> list[Array]:
    """Return each gathered tensor, whole: a view of staging, where its pieces are put together if
    they do not lie in order.
    """
    return [_whole(gather, staging) for gather in task.gathers]


def _whole(gather: Gather, staging: Bytes) -> Array:
    whole = _view(staging, gather.offset, gather.dtype, box_shape(gather.box))
    if not gather.in_place:
        for piece in gather.pieces:
            packed = _view(staging, piece.offset, gather.dtype, box_shape(piece.box))
            whole[_slices(piece.box, gather.box)] = packed
    return whole


def _view(staging: Bytes, offset: int, dtype: DType, shape: tuple[int, ...]) -> Array:
    raw = staging[offset : offset + nbytes_of(shape, dtype)]
    return raw.view(numpy_dtype(dtype)).reshape(shape)


def _slices(box: Box, origin: Box) -> tuple[slice, ...]:
    return tuple(slice(start - at, stop - at) for (start, stop), (at, _) in zip(box, origin))


def needed_outs(task: Task, rows: Rows) -> list[Out]:
    """The outputs of which a sender writes at least a byte."""
    starts = rows["src"]
    stops = starts + rows["nbytes"]

    def touched(offset: int, nbytes: int) -> bool:
        return bool(((starts < offset + nbytes) & (stops > offset)).any())

    return [
        out
        for out in task.outs
        if touched(out.offset, out.nbytes)
        or (out.scale_nbytes > 0 and touched(out.scale_offset, out.scale_nbytes))
    ]


def make_outs(task: Task, outs: Sequence[Out], tensors: Sequence[Array], staging: Bytes) -> int:
    """Fuse and quantise outputs, straight into their places in staging; return the bytes made."""
    made = 0
    for out in outs:
        parts = [
            tensors[part.gather][_slices(part.box, task.gathers[part.gather].box)]
            for part in out.parts
        ]
        axis = joined_axis(parts[0].ndim)
        shapes = [part.shape for part in parts]
        values = _view(staging, out.offset, out.dtype, joined_shape(shapes))
        places = _along(values, axis, [shape[axis] for shape in shapes])
        if out.scale_nbytes:
            scale_shapes = [scale_shape(shape, out.dtype) for shape in shapes]
            raw = staging[out.scale_offset : out.scale_offset + out.scale_nbytes]
            scales = raw.view(scale_dtype(out.dtype)).reshape(joined_shape(scale_shapes))
            blocks = _along(scales, axis, [shape[axis] for shape in scale_shapes])
            for part, place, block in zip(parts, places, blocks):
                quantise(part, out.dtype, into=(place, block))
        else:
            for part, place in zip(parts, places):
                with np.errstate(over="ignore"):  # it is refused by name
                    place[...] = part
                if part.dtype != place.dtype:
                    check_finite(place, f"{out.target} as {out.dtype}")
        made += out.nbytes + out.scale_nbytes
    return made


def _along(values: Array, axis: int, extents: Sequence[int]) -> list[Array]:
    """Cut an array along an axis in views of these extents."""
    stops = list(itertools.accumulate(extents))
    head = (slice(None),) * axis
    return [values[(*head, slice(stop - extent, stop))] for stop, extent in zip(stops, extents)]
