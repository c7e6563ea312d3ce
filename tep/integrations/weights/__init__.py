"""Weights from trainers to inference engines of others, on tep.apps.rl: see README.md.

`vllm_engine`, `sglang_engine`, `verl_engine` and `nemo_engine` are thin and import what they are
made for; nothing else here does. vLLM loads this module in each of its processes, so it opens no
engine.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

__all__ = ["NAME", "register"]

NAME: Final = "tep"
_FACTORY: Final = "vllm.distributed.weight_transfer.factory"
_ROOM: Final = "tep.integrations.weights.vllm_engine"


def register() -> None:
    """Make "tep" known to both factories of vLLM's weight transfer; again does nothing.

    A vLLM before 0.32 has no such factories and starts as without tep: every vLLM of an environment
    loads this. It says itself that it does not know the backend "tep".
    """
    if find_spec("vllm.distributed.weight_transfer") is None or find_spec(_FACTORY) is None:
        return
    from vllm.distributed.weight_transfer import factory

    for found, engine in (
        ("WeightTransferEngineFactory", "TepWeightTransferEngine"),
        ("WeightTransferTrainerFactory", "TepTrainerWeightTransferEngine"),
    ):
        place = getattr(factory, found, None)
        if place is not None and NAME not in place._registry:
            place.register_engine(NAME, _ROOM, engine)
