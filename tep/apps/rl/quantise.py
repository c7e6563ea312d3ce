"""Block-wise fp8: numpy arrays -> e4m3 values and one float32 scale for each block. Pure.

The only room that knows ml_dtypes, which gives numpy its bfloat16 and float8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tep.apps.rl.metadata import BLOCK, DType, scale_shape
from tep.distribution import need

if TYPE_CHECKING:
    Array = npt.NDArray[Any]

__all__ = ["FP8_MAX", "numpy_dtype", "quantise"]

FP8_MAX: Final = 448.0
"""Largest finite e4m3fn number. Source: OCP 8-bit floating point specification, quoted."""

_NAMES: Final[dict[DType, str]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The numpy dtype of a parameter.

    Raises:
        BackendUnavailable: it needs ml_dtypes, which is not installed.
    """
    if dtype in {"fp16", "fp32"}:
        return np.dtype(_NAMES[dtype])
    ml_dtypes = need("ml_dtypes", "rl", f"an array of {dtype}")
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _NAMES[dtype]))
    return found


def quantise(
    values: Array, into: tuple[Array, npt.NDArray[np.float32]] | None = None
) -> tuple[Array, npt.NDArray[np.float32]]:
    """Quantise a matrix, or a stack of matrices, in blocks of BLOCK x BLOCK.

    Args:
        values: any[..., rows, columns]; blocks at the right and lower edge may be smaller.
        into: where the result goes; None: allocate it.

    Returns:
        fp8[..., rows, columns] and scales float32[..., ceil(rows/BLOCK), ceil(columns/BLOCK)]:
        value is about fp8 * scale. A block of zeros has scale 1.

    Source: `weight_scale_inv` of DeepSeek-V3's published weights: amax of the block / 448.
    """
    fp8 = numpy_dtype("fp8")
    if into is None:
        into = np.empty(values.shape, fp8), np.empty(scale_shape(values.shape), np.float32)
    quantised, scales = into
    assert (values.shape, scale_shape(values.shape)) == (quantised.shape, scales.shape)
    rows, columns = values.shape[-2:]
    for at in np.ndindex(values.shape[:-2]):
        for block, start in enumerate(range(0, rows, BLOCK)):
            # A row of blocks at a time: float32 copies of a whole tensor would double the memory.
            mine = (*at, slice(start, start + BLOCK))
            part = values[mine].astype(np.float32)
            found = _amax(part) / np.float32(FP8_MAX)
            found[found == 0] = 1
            scales[(*at, block)] = found
            part /= np.repeat(found, BLOCK)[:columns]
            quantised[mine] = part.astype(fp8)
    return quantised, scales


def _amax(part: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Largest magnitude of each block of columns."""
    by_column = np.abs(part).max(axis=0)
    found: npt.NDArray[np.float32] = np.maximum.reduceat(
        by_column, np.arange(0, len(by_column), BLOCK)
    )
    return found
