"""A task's arithmetic on its staging memory: unshard, fuse, quantise. Real numpy, no transfers.

Rule 1: what is made for one sender equals what is made for any other, bit for bit. Rule 2: nothing
larger than a row of quantisation blocks lives outside staging, or the watermark would not hold.
Rule 3: only this room knows ml_dtypes, which gives numpy its bfloat16 and float8. Where the program
has imported torch, torch does the arithmetic, on all cores, with the same bits.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tep import UsageError
from tep.apps.rl.metadata import (
    BLOCK,
    SCALINGS,
    Box,
    DType,
    Out,
    Rows,
    Scaling,
    Task,
    box_shape,
    joined_axis,
    joined_shape,
    nbytes_of,
    scale_shape,
)
from tep.base.distribution import need

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

__all__ = [
    "FP8_MAX", "Compute", "Threads", "as_array", "as_bytes", "check_finite", "load_shards",
    "make_outs", "needed_outs", "numpy_dtype", "numpy_dtypes", "quantise", "unshard",
]  # fmt: skip


Bytes = npt.NDArray[np.uint8]


def load_shards(
    task: Task, rank: int, shards: Mapping[tuple[str, Box], Array], staging: Bytes
) -> None:
    """Copy what a rank holds of a task's tensors to its place in staging.

    This is the copy from host to device where the weights are offloaded. UsageError names a tensor
    with an infinity or a NaN.
    """
    for gather in task.gathers:
        for piece in gather.pieces:
            if rank in piece.holders:
                view = _view(staging, piece.offset, gather.dtype, box_shape(piece.box))
                view[...] = as_array(shards[gather.name, piece.box], gather.name)
                check_finite(view, gather.name)


def as_array(values: object, name: str) -> Array:
    """Return an array as it is, or a torch tensor as one; see as_bytes()."""
    if isinstance(values, np.ndarray):
        return values
    raw, tensor = as_bytes(values, name), typing.cast("Any", values)
    kind = str(tensor.dtype).removeprefix("torch.")
    dtype = numpy_dtype("bf16") if kind == "bfloat16" else np.dtype(kind)
    return raw.view(dtype).reshape(tuple(tensor.shape))


def as_bytes(values: object, name: str) -> Bytes:
    """Return all bytes in C order: where they lie, if that is the host and in this order; else a
    copy.

    Raises:
        UsageError: neither a numpy array nor a torch tensor; the message has the name.
    """
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is None or not isinstance(values, torch.Tensor):
        kind = type(values)
        raise UsageError(f"{name}: a weight is a numpy array or a torch tensor, not {kind!r}")
    flat = values.detach().contiguous().cpu().reshape(-1)
    found: Bytes = flat.view(torch.uint8).numpy()
    return found


def unshard(task: Task, staging: Bytes) -> list[Array]:
    """Return each gathered tensor, whole: a view of staging, where its pieces are put together if
    they do not lie in order.
    """
    found = []
    for gather in task.gathers:
        whole = _view(staging, gather.offset, gather.dtype, box_shape(gather.box))
        for piece in () if gather.in_place else gather.pieces:
            packed = _view(staging, piece.offset, gather.dtype, box_shape(piece.box))
            whole[_slices(piece.box, gather.box)] = packed
        found.append(whole)
    return found


def _view(staging: Bytes, offset: int, dtype: DType, shape: tuple[int, ...]) -> Array:
    raw = staging[offset : offset + nbytes_of(shape, dtype)]
    return raw.view(numpy_dtype(dtype)).reshape(shape)


def _slices(box: Box, origin: Box) -> tuple[slice, ...]:
    return tuple(slice(start - at, stop - at) for (start, stop), (at, _) in zip(box, origin))


def needed_outs(task: Task, rows: Rows) -> list[Out]:
    """The outputs to which a sender contributes at least a byte."""
    starts = rows["src"]
    stops = starts + rows["nbytes"]

    def touched(offset: int, nbytes: int) -> bool:
        return bool(((starts < offset + nbytes) & (stops > offset)).any())

    return [out for out in task.outs if any(itertools.starmap(touched, out.places))]


def make_outs(task: Task, outs: Sequence[Out], tensors: Sequence[Array], staging: Bytes) -> None:
    """Fuse and quantise outputs, straight into their places in staging."""
    for out in outs:
        parts = [
            tensors[part.gather][_slices(part.box, task.gathers[part.gather].box)]
            for part in out.parts
        ]
        axis = joined_axis(parts[0].ndim)
        shapes = [[part.shape for part in parts]]
        if out.dtype in SCALINGS:
            shapes.append([scale_shape(part.shape, out.dtype) for part in parts])
        places = []
        for (start, nbytes), dtype, mine in zip(out.places, numpy_dtypes(out.dtype), shapes):
            whole = staging[start : start + nbytes].view(dtype).reshape(joined_shape(mine))
            stops = np.cumsum([shape[axis] for shape in mine])
            places.append(np.split(whole, stops[:-1], axis))
        for part, *into in zip(parts, *places):
            if out.dtype in SCALINGS:
                quantise(part, out.dtype, into=(into[0], into[1]))
                continue
            with np.errstate(over="ignore"):  # it is refused by name
                into[0][...] = part
            if part.dtype != into[0].dtype:
                check_finite(into[0], f"{out.target} as {out.dtype}")


FP8_MAX: Final = 448.0
"""Largest finite e4m3fn number. Source: OCP 8-bit floating point specification, quoted."""

_TINY: Final[np.float32] = np.float32(2.0**-126)
"""Smallest scale: below it float32 has fewer digits, and a value over its scale could pass 448."""

_NAMES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "u8": "uint8"}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The numpy dtype of a parameter; BackendUnavailable where ml_dtypes is missing."""
    if dtype in {"fp16", "fp32", "u8"}:
        return np.dtype(_NAMES[dtype])
    ml_dtypes = need("ml_dtypes", "rl", f"an array of {dtype}")
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _NAMES.get(dtype, "float8_e4m3fn")))
    return found


def numpy_dtypes(dtype: DType) -> list[np.dtype[Any]]:
    """The numpy dtype of a parameter; and of its scales, if dtype is quantised."""
    scales = [SCALINGS[dtype].item] if dtype in SCALINGS else []
    return [numpy_dtype(dtype), *(np.dtype(np.float32 if n == 4 else np.uint8) for n in scales)]


def check_finite(values: Array, name: str) -> None:
    """Refuse an infinity or a NaN by a UsageError that has the name and the first place."""
    if values.dtype.kind in "biu":
        return
    # By the bits, since numpy is slow with bfloat16: infinities and NaN have all of these.
    raw = values.view(f"u{values.itemsize}")
    bits = np.array(np.inf, values.dtype).view(raw.dtype)
    # By chunks: a mask of a whole tensor would be another half of it.
    chunks = np.nditer(raw, flags=["external_loop", "buffered", "zerosize_ok"], buffersize=1 << 16)
    if any((np.asarray(chunk) & bits == bits).any() for chunk in chunks):
        found = np.argwhere(raw & bits == bits)
        raise UsageError(
            f"{name}: {len(found)} of {values.size} values are infinite or NaN, the first at "
            f"{found[0].tolist()}; the update is not sent"
        )


def quantise(
    values: Array, dtype: DType = "fp8", into: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Quantise a matrix, or a stack of matrices.

    Args:
        values: any[..., rows, columns], finite; blocks at the right and lower edge may be smaller.
        dtype: which fp8.
        into: where the result goes; None: allocate it.

    Returns:
        e4m3[..., rows, columns] and scales of scale_shape(), see numpy_dtypes(): value is about
        e4m3 * scale, where a UE8M0 scale s stands for 2**(s - 127). A block of zeros has scale 1.

    Source: `weight_scale_inv` of DeepSeek-V3's published weights: amax of the block / 448; for
    UE8M0 the next power of two above it.
    """
    scaling = SCALINGS[dtype]
    shape = scale_shape(values.shape, dtype)
    if into is None:
        values_dtype, scales_dtype = numpy_dtypes(dtype)
        into = np.empty(values.shape, values_dtype), np.empty(shape, scales_dtype)
    quantised, scales = into
    assert (values.shape, shape) == (quantised.shape, scales.shape)
    torch = sys.modules.get("torch")
    band = _band_by_torch if hasattr(torch, "float8_e4m3fn") else _band
    starts = range(0, values.shape[-2], BLOCK)
    for at, start in itertools.product(np.ndindex(values.shape[:-2]), starts):
        # A row of blocks at a time: float32 copies of a whole tensor would double the memory.
        mine = (*at, slice(start, start + BLOCK))
        own = (*at, slice(start // scaling.rows, -(-(start + BLOCK) // scaling.rows)))
        band(values[mine], quantised[mine], scales[own], scaling)
    return quantised, scales


def _band(values: Array, quantised: Array, scales: Array, scaling: Scaling) -> None:
    """Quantise at most BLOCK rows."""
    part = values.astype(np.float32)
    if scaling.columns:
        starts = np.arange(0, part.shape[1], scaling.columns)
        amax = np.maximum.reduceat(np.abs(part).max(axis=0), starts)[None]
    else:
        amax = np.abs(part).max(axis=1, keepdims=True)
    scale = _scales_of(amax, scales, scaling)
    if scaling.columns:
        scale = np.repeat(scale, scaling.columns, axis=1)[:, : part.shape[1]]
    part /= scale
    quantised[...] = part.astype(quantised.dtype)


def _band_by_torch(values: Array, quantised: Array, scales: Array, scaling: Scaling) -> None:
    """Quantise at most BLOCK rows with the torch that the program has imported."""
    torch: Any = sys.modules["torch"]
    if values.dtype.name == "bfloat16":
        part = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).float()
    else:
        part = torch.from_numpy(values.astype(np.float32))
    rows, columns = part.shape
    if scaling.columns:
        nblocks = -(-columns // scaling.columns)
        padded = torch.nn.functional.pad(part.abs(), (0, nblocks * scaling.columns - columns))
        amax = padded.view(rows, nblocks, scaling.columns).amax(dim=(0, 2))[None]
    else:
        amax = part.abs().amax(dim=1, keepdim=True)
    scale = torch.from_numpy(_scales_of(amax.numpy(), scales, scaling))
    if scaling.columns:
        scale = scale.repeat_interleave(scaling.columns, dim=1)[:, :columns]
    quantised[...] = (
        (part / scale).to(torch.float8_e4m3fn).view(torch.uint8).numpy().view(quantised.dtype)
    )


def _scales_of(amax: Array, scales: Array, scaling: Scaling) -> npt.NDArray[np.float32]:
    """Set the scales for these largest magnitudes; return them as float32."""
    found = np.where(amax == 0, np.float32(1), np.maximum(amax / np.float32(FP8_MAX), _TINY))
    if scaling.item == 1:
        mantissa, exponent = np.frexp(found)  # 0.5 <= mantissa < 1
        exponent -= mantissa == 0.5
        scales[...] = exponent + 127
        found = np.ldexp(np.float32(1), exponent)
    else:
        scales[...] = found
    return found.astype(np.float32)


class Compute:
    """At once, in the event loop's thread: for simulations, where computing takes no simulated
    time.
    """

    async def run(self, stage: str, nbytes: int, function: Callable[[], None]) -> None:
        """Run a stage's arithmetic on so many bytes."""
        del stage, nbytes
        function()


class Threads(Compute):
    """On asyncio's threads, so that stages of different tasks overlap."""

    async def run(self, stage: str, nbytes: int, function: Callable[[], None]) -> None:
        del stage, nbytes
        await asyncio.to_thread(function)
