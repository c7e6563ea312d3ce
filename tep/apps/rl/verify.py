"""What a rollout worker must hold, straight from the checkpoint: no schedule and no transfer."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from tep.apps.rl.metadata import SCALINGS, RolloutMeta, joined_axis
from tep.apps.rl.models import Model
from tep.apps.rl.quantise import numpy_dtype, quantise
from tep.apps.rl.weights import Checkpoint

__all__ = ["expected_digest", "expected_region"]


def expected_region(
    model: Model, checkpoint: Checkpoint, meta: RolloutMeta
) -> npt.NDArray[np.uint8]:
    """Read, join and quantise a worker's share of a checkpoint; gaps are zero."""
    tensors = {tensor.name: tensor for tensor in model.tensors}
    region = np.zeros(meta.nbytes, np.uint8)
    for shard in meta.shards:
        parts = [checkpoint.read(tensors[part.name], part.box) for part in shard.parts]
        axis = joined_axis(parts[0].ndim)
        if shard.dtype in SCALINGS:
            pairs = [quantise(part, shard.dtype) for part in parts]
            scales = np.concatenate([scales for _, scales in pairs], axis)
            _put(region, shard.scale_offset, scales.view(np.uint8).reshape(-1))
            values = np.concatenate([values for values, _ in pairs], axis)
        else:
            values = np.concatenate(parts, axis).astype(numpy_dtype(shard.dtype))
        _put(region, shard.offset, values.view(np.uint8).reshape(-1))
    return region


def expected_digest(model: Model, checkpoint: Checkpoint, meta: RolloutMeta) -> str:
    """SHA-256 of expected_region()."""
    return hashlib.sha256(expected_region(model, checkpoint, meta).data).hexdigest()


def _put(region: npt.NDArray[np.uint8], offset: int, raw: npt.NDArray[np.uint8]) -> None:
    region[offset : offset + len(raw)] = raw
