"""Numbers in and out of bytes: formats as numpy views, bf16 by bits, the weighted sum. Pure.

No library for bf16 or fp8 is needed: fp8 is only carried, and bf16 is the upper half of an f32.
Rule: sums run over a token's choices in the order 0 .. R-1, in f32, one rounding at the end; so the
result is the same on every fabric, byte for byte.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tep import BadRequest
from tep.apps.moe.config import Format
from tep.apps.moe.routing import NOWHERE, Ints

__all__ = ["F32", "Bytes", "as_rows", "from_f32", "like", "to_f32", "weighted_sum"]

Bytes = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

_BLOCK: Final = 512  # tokens summed at a time: what is gathered stays in the cache


def as_rows(values: Any, width: int, nbytes: int, what: str) -> Bytes:
    """View a [n, width] array or CPU tensor of `nbytes`-wide elements as u8[n, width * nbytes].

    Raises:
        BadRequest: another shape or element size.
    """
    is_torch = type(values).__module__.partition(".")[0] == "torch"
    array: Any = values.detach().contiguous() if is_torch else np.ascontiguousarray(values)
    element_bytes = array.element_size() if is_torch else array.itemsize
    if array.ndim != 2 or array.shape[1] != width or element_bytes != nbytes:
        raise BadRequest(
            f"{what}: {array.dtype} of shape {tuple(array.shape)}; [n, {width}] of {nbytes} bytes "
            "each"
        )
    if is_torch:
        torch = __import__("torch")  # only for whoever has it already
        array = array.view(torch.uint8).numpy()
    found: Bytes = array.view(np.uint8).reshape(len(array), width * nbytes)
    return found


def like(rows: Bytes, sample: Any, fmt: Format) -> Any:
    """Give u8 rows the element type of `sample` if it fits the format; else f32, u16 or u8."""
    if type(sample).__module__.partition(".")[0] == "torch":
        torch = __import__("torch")
        found = torch.from_numpy(np.ascontiguousarray(rows))
        return found.view(sample.dtype) if sample.element_size() == fmt.nbytes else found
    dtype = getattr(sample, "dtype", None)
    if not (isinstance(dtype, np.dtype) and dtype.itemsize == fmt.nbytes):
        dtype = np.dtype({1: np.uint8, 2: np.uint16, 4: np.float32}[fmt.nbytes])
    return np.ascontiguousarray(rows).view(dtype)


def to_f32(rows: Bytes, fmt: Format) -> F32:
    """Read bf16 or fp32 rows of bytes as f32."""
    if fmt is Format.FP32:
        return np.ascontiguousarray(rows).view(np.float32)
    assert fmt is Format.BF16, fmt
    bits = np.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def from_f32(values: F32, fmt: Format) -> Bytes:
    """Write f32 as rows of bytes; bf16 by rounding to nearest, ties to even; NaN stays NaN."""
    values = np.ascontiguousarray(values, np.float32)
    if fmt is Format.FP32:
        return values.view(np.uint8).reshape(len(values), 4 * values.shape[1])
    assert fmt is Format.BF16, fmt
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)
    return rounded.astype(np.uint16).view(np.uint8).reshape(len(values), 2 * values.shape[1])


def weighted_sum(results: Bytes, place: Ints, weights: F32, fmt: Format, width: int) -> F32:
    """Sum each token's results, weighted, in the order of its choices.

    Args:
        results: u8[copies, stride], in sending order.
        place: i64[n, R], position of each choice, or NOWHERE, which adds nothing.
        weights: f32[n, R].
        fmt: of the results.
        width: elements of a result.

    Returns:
        f32[n, width].
    """
    out = np.zeros((len(place), width), np.float32)
    nbytes = width * fmt.nbytes
    for begin in range(0, len(place), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        for choice in range(place.shape[1]):
            where = place[part, choice]
            used = np.flatnonzero(where != NOWHERE)
            if not len(used):
                continue
            values = to_f32(results[where[used], :nbytes], fmt)
            out[begin + used] += weights[part, choice][used, None] * values
    return out
