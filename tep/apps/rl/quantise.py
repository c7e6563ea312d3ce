"""Quantise to fp8: numpy arrays -> e4m3 values, and scales as SCALINGS says. Pure.

The only room that knows ml_dtypes, which gives numpy its bfloat16 and float8. Where the program has
imported torch, torch does the arithmetic, on all cores, with the same bits.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tep import UsageError
from tep.apps.rl.metadata import BLOCK, SCALINGS, DType, Scaling, scale_shape
from tep.base.distribution import need

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

__all__ = ["FP8_MAX", "check_finite", "numpy_dtype", "quantise", "scale_dtype"]

FP8_MAX: Final = 448.0
"""Largest finite e4m3fn number. Source: OCP 8-bit floating point specification, quoted."""

_TINY: Final[np.float32] = np.float32(2.0**-126)
"""Smallest scale: below it float32 has fewer digits, and a value over its scale could pass 448."""

_NAMES: Final[dict[DType, str]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_channel": "float8_e4m3fn",
    "fp8_ue8m0": "float8_e4m3fn",
    "u8": "uint8",
}
_EXPONENTS: Final = {"bf16": (np.uint16, 0x7F80), "fp16": (np.uint16, 0x7C00)}
"""Integers as wide as a dtype, and the bits that are all set in infinities and NaN."""


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The numpy dtype of a parameter.

    Raises:
        BackendUnavailable: it needs ml_dtypes, which is not installed.
    """
    if dtype in {"fp16", "fp32", "u8"}:
        return np.dtype(_NAMES[dtype])
    ml_dtypes = need("ml_dtypes", "rl", f"an array of {dtype}")
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _NAMES[dtype]))
    return found


def scale_dtype(dtype: DType) -> np.dtype[Any]:
    """The numpy dtype of a quantised parameter's scales."""
    return np.dtype(np.float32 if SCALINGS[dtype].item == 4 else np.uint8)


def check_finite(values: Array, name: str) -> None:
    """Refuse what has no place in a model.

    Raises:
        UsageError: there is an infinity or a NaN; the message has the name and the first place.
    """
    kind = {"bfloat16": "bf16", "float16": "fp16"}.get(values.dtype.name)
    if kind is None and values.dtype.kind != "f":
        return
    integer, bits = _EXPONENTS.get(kind or "", (None, 0))
    raw = values if integer is None else values.view(integer)

    def odd(part: Array) -> Array:  # by the bits, where numpy is slow or knows no such float
        return ~np.isfinite(part) if integer is None else part & bits == bits

    # By chunks: a mask of a whole tensor would be another half of it.
    chunks = np.nditer(raw, flags=["external_loop", "buffered", "zerosize_ok"], buffersize=1 << 16)
    if any(odd(np.asarray(chunk)).any() for chunk in chunks):
        found = np.argwhere(odd(raw))
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
        e4m3[..., rows, columns] and scales of scale_shape() and scale_dtype(): value is about
        e4m3 * scale, where a UE8M0 scale s stands for 2**(s - 127). A block of zeros has scale 1.

    Source: `weight_scale_inv` of DeepSeek-V3's published weights: amax of the block / 448; for
    UE8M0 the next power of two above it.
    """
    scaling = SCALINGS[dtype]
    shape = scale_shape(values.shape, dtype)
    if into is None:
        into = np.empty(values.shape, numpy_dtype(dtype)), np.empty(shape, scale_dtype(dtype))
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
