"""RL weight updates: from a sharded model in training to a differently sharded one in inference.

Names only; each is imported from its room when it is first used. `Controller` drives
`TrainingWorker`s and `RolloutWorker`s, `make_schedule` is the routing table, pure, and the room
`study` asks what an update would take at full scale.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tep.apps.rl.compute import AtOnce, Compute, Threads, numpy_dtype, scale_dtype
    from tep.apps.rl.controller import Controller
    from tep.apps.rl.metadata import (
        Box,
        DType,
        MeshGroup,
        Placed,
        RolloutMeta,
        SourceShard,
        TargetShard,
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
        Model,
        TrainLayout,
        lay_out,
        load_model,
        rollout_metas,
        train_metas,
    )
    from tep.apps.rl.ports import RolloutPort, RolloutState, TrainingPort, TrainReport, UpdateReport
    from tep.apps.rl.predict import Prediction
    from tep.apps.rl.remote import Call, Hello, Listener, RemoteRollout, RemoteTraining, answer
    from tep.apps.rl.rollout import RolloutWorker
    from tep.apps.rl.routes import Schedule
    from tep.apps.rl.schedule import make_schedule
    from tep.apps.rl.training import TrainingWorker

__all__ = [
    "AtOnce", "Box", "Call", "Compute", "Controller", "DType", "Hello", "InferLayout", "Listener",
    "MeshGroup", "Model", "Placed", "Prediction", "RemoteRollout", "RemoteTraining",
    "RolloutMeta", "RolloutPort", "RolloutState", "RolloutWorker", "Schedule", "SourceShard",
    "TargetShard", "Threads", "TrainLayout", "TrainMeta", "TrainReport", "TrainingPort",
    "TrainingWorker", "UpdateReport", "answer", "box_shape", "box_size", "flat_boxes", "lay_out",
    "load_model", "make_schedule", "mesh_groups", "numpy_dtype", "placed_box", "rollout_metas",
    "scale_dtype", "scale_shape", "shard_of", "train_metas", "whole",
]  # fmt: skip

_ROOMS = {
    "compute": ("AtOnce", "Compute", "Threads", "numpy_dtype", "scale_dtype"),
    "controller": ("Controller",),
    "metadata": (
        *("Box", "DType", "MeshGroup", "Placed", "RolloutMeta", "SourceShard", "TargetShard"),
        *("TrainMeta", "box_shape", "box_size", "flat_boxes", "mesh_groups", "placed_box"),
        *("scale_shape", "shard_of", "whole"),
    ),
    "models": (
        *("InferLayout", "Model", "TrainLayout", "lay_out", "load_model", "rollout_metas"),
        "train_metas",
    ),
    "ports": ("RolloutPort", "RolloutState", "TrainReport", "TrainingPort", "UpdateReport"),
    "predict": ("Prediction",),
    "remote": ("Call", "Hello", "Listener", "RemoteRollout", "RemoteTraining", "answer"),
    "rollout": ("RolloutWorker",),
    "routes": ("Schedule",),
    "schedule": ("make_schedule",),
    "training": ("TrainingWorker",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

if not TYPE_CHECKING:  # a checker that saw __getattr__ would believe in every misspelt name

    def __getattr__(name: str) -> object:
        """Import a public name from its room, once; afterwards it is an ordinary attribute."""
        room = _ROOM_OF.get(name)
        if room is None:
            raise AttributeError(f"module 'tep.apps.rl' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"tep.apps.rl.{room}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
