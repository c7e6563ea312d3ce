"""What vLLM loads in each of its processes: makes the name "tep" known, and imports no engine."""

from __future__ import annotations

from typing import Final

__all__ = ["NAME", "register"]

NAME: Final = "tep"
_ROOM: Final = "tep.integrations.weights.vllm_engine"


def register() -> None:
    """Make "tep" known to both factories of vLLM's weight transfer; again does nothing."""
    from vllm.distributed.weight_transfer import factory

    for found, engine in (
        (factory.WeightTransferEngineFactory, "TepWeightTransferEngine"),
        (factory.WeightTransferTrainerFactory, "TepTrainerWeightTransferEngine"),
    ):
        if NAME not in found._registry:
            found.register_engine(NAME, _ROOM, engine)
