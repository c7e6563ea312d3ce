"""NeMo-RL's checkpoint engine over tep, named in its configuration by module and class.

backend="tep.integrations.weights.nemo_engine:TepCheckpointEngine"

Built to the interface as it was read from NeMo-RL's sources; never run under NeMo-RL.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import ray
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from tep.integrations.weights.member import Fabric, Worker
from tep.integrations.weights.ranks import named_tensors

__all__ = ["TepCheckpointEngine"]


class TepCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # NeMo-RL's
    """One worker's side.

    Args:
        bucket_size: bytes of weights that one batch may have; a larger weight is one by itself.
        fabric, options: of tep's engine.
        device: to which received tensors are moved.
        host: at which the hub listens; None: this node's address in Ray.
        timeout_s: of an update, and of each wait.
    """

    def __init__(
        self,
        bucket_size: int,
        fabric: str = "local",
        options: Mapping[str, Any] | None = None,
        device: str = "cpu",
        host: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        address = host or ray.util.get_node_ip_address().strip("[]")
        self._bucket_bytes = bucket_size
        self._device = device
        self._worker = Worker(Fabric(fabric, options or {}, address, 0, timeout_s))

    def prepare(self) -> dict[str, Any]:
        return self._worker.prepare()

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None:
        self._worker.join(worker_rank, train_world_size, metadata)

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None:
        self._worker.join(-1, train_world_size, metadata)

    async def send_weights(self, weights: Any) -> None:
        await self._worker.send(weights)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Any]], None]:
        async for weights in self._worker.receive():
            batch: list[tuple[str, Any]] = []
            held = 0
            for name, tensor in named_tensors(weights, self._device):
                if batch and held + tensor.nbytes > self._bucket_bytes:
                    yield batch
                    batch, held = [], 0
                batch.append((name, tensor))
                held += tensor.nbytes
            if batch:
                yield batch
