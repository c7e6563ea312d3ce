"""Weights that have arrived, as named torch tensors in the words of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from tep.apps.rl import DType
from tep.integrations.weights.params import as_tensor
from tep.integrations.weights.receiver import Weight

__all__ = ["named_tensors"]

_NAMES: Final[dict[DType, str]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_channel": "float8_e4m3fn",
    "fp8_ue8m0": "float8_e4m3fn",
}
_SCALES: Final[dict[DType, tuple[str, str]]] = {
    "fp8": ("_scale_inv", "float32"),
    "fp8_channel": ("_scale", "float32"),
    "fp8_ue8m0": ("_scale_inv", "float8_e8m0fnu"),
}
"""What is put behind the name of a quantised weight, and the dtype of the scales. Source: names in
DeepSeek-V3's checkpoint (blocks) and of compressed-tensors (channels), quoted."""


def named_tensors(weights: Iterable[Weight], device: Any = "cpu") -> Iterator[tuple[str, Any]]:
    """Name and torch tensor of each weight; its scales follow it.

    On the CPU a tensor is a view of memory that the next version is written to: use it before the
    version is given back, or copy it.
    """
    for param, dtype, values, scales in weights:
        shape = param.shape if dtype == "u8" or not param.shape else values.shape
        yield param.name, as_tensor(values, _NAMES.get(dtype, param.dtype), shape).to(device)
        if scales is not None:
            suffix, kind = _SCALES[dtype]
            yield param.name + suffix, as_tensor(scales, kind, scales.shape).to(device)
