"""verl's checkpoint engine (0.9 or later) over tep, by the name "tep" in its registry.

In verl's configuration: checkpoint_engine.backend=tep and
checkpoint_engine.custom_backend_module=tep.integrations.weights.verl_engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from tep.integrations.weights.member import Fabric, Worker
from tep.integrations.weights.ranks import named_tensors

__all__ = ["TepCheckpointEngine"]


@CheckpointEngineRegistry.register("tep")
class TepCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl's
    """One worker's side.

    Args:
        bucket_size: not used: a version arrives as a whole, so that it is never half loaded.
        is_master: not used: training rank 0 leads.
        fabric, options: of tep's engine.
        device: to which received tensors are moved.
        host: at which the hub listens; None: this node's address in Ray.
        timeout_s: of an update, and of each wait.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        fabric: str = "local",
        options: Mapping[str, Any] | None = None,
        device: str = "cpu",
        host: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        address = host or ray.util.get_node_ip_address().strip("[]")
        self._device = device
        self._worker = Worker(Fabric(fabric, options or {}, address, 0, timeout_s))

    def prepare(self) -> dict[str, Any]:
        return self._worker.prepare()

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        def group(ranks: list[int]) -> dict[str, list[Any]]:
            return {
                "rank": ranks,
                "world": [actor_wg_world_size] * len(ranks),
                "metadata": [metadata] * len(ranks),
            }

        return group(list(range(actor_wg_world_size))), group([-1] * rollout_world_size)

    def init_process_group(self, rank: int, world: int, metadata: list[dict[str, Any]]) -> None:
        self._worker.join(rank, world, metadata)

    def finalize(self) -> None:
        """Do nothing: connections and memory serve the next round too."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        await self._worker.send(weights)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, Any], None]:
        async for weights in self._worker.receive():
            for pair in named_tensors(weights, self._device):
                yield pair
