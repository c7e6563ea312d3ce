"""A task's arithmetic on its staging memory: unshard, fuse, quantise. Real numpy, no transfers.

Rule 1: what is made for one sender equals what is made for any other, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tep.apps.rl.metadata import Box, box_bytes, box_shape, joined_axis
from tep.apps.rl.quantise import numpy_dtype, quantise
from tep.apps.rl.routes import Gather, Out, Rows, Task

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

__all__ = ["load_shards", "make_outs", "needed_outs", "unshard"]

Bytes = npt.NDArray[np.uint8]


def load_shards(
    task: Task, rank: int, shards: Mapping[tuple[str, Box], Array], staging: Bytes
) -> int:
    """Copy what a rank holds of a task's tensors to its place in staging; return the bytes.

    This is the copy from host to device where the weights are offloaded.
    """
    copied = 0
    for gather in task.gathers:
        for piece in gather.pieces:
            if rank in piece.holders:
                nbytes = box_bytes(piece.box, gather.dtype)
                view = staging[piece.offset : piece.offset + nbytes].view(numpy_dtype(gather.dtype))
                view.reshape(box_shape(piece.box))[...] = shards[gather.name, piece.box]
                copied += nbytes
    return copied


def unshard(task: Task, staging: Bytes) -> list[Array]:
    """Return each gathered tensor: a view of staging where its pieces lie in order, else a copy."""
    return [_whole(gather, staging) for gather in task.gathers]


def _whole(gather: Gather, staging: Bytes) -> Array:
    dtype, shape = numpy_dtype(gather.dtype), box_shape(gather.box)
    first = gather.pieces[0].offset
    if _in_order(gather):
        nbytes = box_bytes(gather.box, gather.dtype)
        return staging[first : first + nbytes].view(dtype).reshape(shape)
    found = np.empty(shape, dtype)
    for piece in gather.pieces:
        nbytes = box_bytes(piece.box, gather.dtype)
        packed = staging[piece.offset : piece.offset + nbytes].view(dtype)
        found[_slices(piece.box, gather.box)] = packed.reshape(box_shape(piece.box))
    return found


def _in_order(gather: Gather) -> bool:
    """Whether packed pieces, one behind the other, are the whole in C order: cut in one axis, with
    nothing but ones before it.
    """
    shape = box_shape(gather.box)
    lead = next((k for k, extent in enumerate(shape) if extent != 1), 0)
    return all(box_shape(piece.box)[lead + 1 :] == shape[lead + 1 :] for piece in gather.pieces)


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
    """Fuse and quantise outputs into their places in staging; return the bytes made."""
    made = 0
    for out in outs:
        parts = [
            tensors[part.gather][_slices(part.box, task.gathers[part.gather].box)]
            for part in out.parts
        ]
        axis = joined_axis(parts[0].ndim)
        if out.scale_nbytes:
            pairs = [quantise(part) for part in parts]
            values = np.concatenate([values for values, _ in pairs], axis)
            scales = np.concatenate([scales for _, scales in pairs], axis)
            _put(staging, out.scale_offset, scales)
        else:
            values = np.concatenate(parts, axis).astype(numpy_dtype(out.dtype))
        _put(staging, out.offset, values)
        made += out.nbytes + out.scale_nbytes
    return made


def _put(staging: Bytes, offset: int, values: Array) -> None:
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    staging[offset : offset + len(raw)] = raw
