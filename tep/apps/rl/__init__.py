"""RL weight updates: from a sharded model in training to a differently sharded one in inference.

`Controller` drives `TrainingWorker`s and `RolloutWorker`s, `make_schedule` is the routing table,
pure, and the room `study` asks what an update would take at full scale.
"""

from __future__ import annotations

from tep.apps.rl.compute import Compute, Threads, numpy_dtype, scale_dtype
from tep.apps.rl.controller import Controller
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
    flat_boxes,
    mesh_groups,
    placed_box,
    scale_shape,
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
    RolloutPort,
    TrainingPort,
    UpdateReport,
)
from tep.apps.rl.rollout import RolloutWorker
from tep.apps.rl.schedule import make_schedule
from tep.apps.rl.training import TrainingWorker

__all__ = [
    "Box", "Compute", "Controller", "DType", "InferLayout", "MeshGroup", "Placed", "RemoteRollout",
    "RemoteTraining", "RolloutMeta", "RolloutPort", "RolloutWorker", "SourceShard", "Threads",
    "TrainLayout", "TrainMeta", "TrainingPort", "TrainingWorker", "UpdateReport", "box_shape",
    "box_size", "flat_boxes", "lay_out", "load_model", "make_schedule", "mesh_groups",
    "numpy_dtype", "placed_box", "rollout_metas", "scale_dtype", "scale_shape", "shard_of",
    "train_metas", "whole",
]  # fmt: skip
