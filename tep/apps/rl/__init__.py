"""RL weight updates: from a sharded model in training to a differently sharded one in inference.

`Controller` drives `TrainingWorker`s and `RolloutWorker`s, `make_schedule` is the routing table,
pure, and the room `study` asks what an update would take at full scale.
"""

from __future__ import annotations

from tep.apps.rl.compute import Compute, Threads, as_bytes, numpy_dtype, numpy_dtypes
from tep.apps.rl.controller import FAULTS, Controller
from tep.apps.rl.metadata import (
    Box,
    DType,
    MeshGroup,
    Placed,
    RolloutMeta,
    SourceShard,
    TrainMeta,
    box_shape,
    box_size,
    extents_of,
    mesh_groups,
    placed_box,
    shard_of,
    whole,
)
from tep.apps.rl.models import (
    InferLayout,
    TrainLayout,
    lay_out,
    load_model,
    rollout_metas,
    train_metas,
)
from tep.apps.rl.ports import (
    RemoteRollout,
    RemoteTraining,
    UpdateReport,
)
from tep.apps.rl.rollout import RolloutWorker
from tep.apps.rl.schedule import make_schedule
from tep.apps.rl.training import TrainingWorker

__all__ = [
    "FAULTS", "Box", "Compute", "Controller", "DType", "InferLayout", "MeshGroup", "Placed",
    "RemoteRollout", "RemoteTraining", "RolloutMeta", "RolloutWorker", "SourceShard",
    "Threads", "TrainLayout", "TrainMeta", "TrainingWorker", "UpdateReport",
    "as_bytes", "box_shape", "box_size", "extents_of", "lay_out", "load_model",
    "make_schedule", "mesh_groups", "numpy_dtype", "numpy_dtypes", "placed_box", "rollout_metas",
    "shard_of", "train_metas", "whole",
]  # fmt: skip
