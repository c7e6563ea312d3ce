"""The expected contents of a rollout worker, computed slowly: block by block, from whole tensors.

Shares no code with tep.apps.rl but its records; the tests compare the received bytes with it.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

BLOCK = 128
DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp32": np.float32,
    "fp8": ml_dtypes.float8_e4m3fn,
    "fp8_channel": ml_dtypes.float8_e4m3fn,
    "fp8_ue8m0": ml_dtypes.float8_e4m3fn,
}


def reference_region(meta, tensors):
    """Bytes that a worker must hold, and how often each must have been written (0 or 1)."""
    region = np.zeros(meta.nbytes, np.uint8)
    owned = np.zeros(meta.nbytes, np.uint8)
    for shard in meta.shards:
        parts = [_cut(tensors[name], box) for name, box in shard.parts]
        axis = -2 if parts[0].ndim > 1 else 0
        if shard.dtype.startswith("fp8"):
            pairs = [_quantise(part, shard.dtype) for part in parts]
            for offset, arrays in zip(shard.offsets, zip(*pairs)):
                _place(region, owned, offset, np.concatenate(arrays, axis))
        else:
            joined = np.concatenate(parts, axis).astype(DTYPES[shard.dtype])
            _place(region, owned, shard.offsets[0], joined)
    return region, owned


def _cut(tensor, box):
    for axis, (start, stop) in enumerate(box):
        tensor = np.take(tensor, np.arange(start, stop), axis=axis)
    return tensor


def _quantise(values, dtype):
    rows, columns = values.shape[-2:]
    lead = values.shape[:-2]
    high, wide = (1, columns) if dtype == "fp8_channel" else (BLOCK, BLOCK)
    out = np.zeros(values.shape, DTYPES["fp8"])
    scales = np.zeros((*lead, -(-rows // high), -(-columns // wide)), np.float32)
    for at in np.ndindex(*scales.shape):
        i, j = at[-2:]
        area = (*at[:-2], slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
        block = values[area].astype(np.float32)
        scale = np.float32(np.abs(block).max()) / np.float32(448)
        scale = scale if scale != 0 else np.float32(1)
        if dtype == "fp8_ue8m0":
            scale = np.float32(2.0 ** math.ceil(math.log2(scale)))
        scales[at] = scale
        out[area] = (block / scale).astype(DTYPES["fp8"])
    if dtype == "fp8_ue8m0":
        return out, (np.log2(scales) + 127).astype(np.uint8)
    return out, scales


def _place(region, owned, offset, values):
    raw = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
    region[offset : offset + len(raw)] = raw
    owned[offset : offset + len(raw)] += 1
