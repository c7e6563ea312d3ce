"""Writes safetensors files: checkpoints of small models, for the tests."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

__all__ = ["write_safetensors"]

_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8": "F8_E4M3"}


def write_safetensors(path, tensors):
    """Write (Tensor, array) pairs, stacked experts one by one; return the bytes of the file."""
    header, arrays, at = {}, [], 0
    for tensor, values in tensors:
        for k, one in enumerate(values if "*" in tensor.name else [values]):
            header[tensor.name.replace("*", str(k))] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(one.shape),
                "data_offsets": [at, at + one.nbytes],
            }
            at += one.nbytes
            arrays.append(np.ascontiguousarray(one))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in arrays:
            file.write(one.tobytes())
    return 8 + len(text) + at
