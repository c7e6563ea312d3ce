"""verl's checkpoint engine (0.9 or later) over tep, by the name "tep" in its registry.

In verl's configuration: checkpoint_engine.backend=tep and
checkpoint_engine.custom_backend_module=tep.integrations.weights.verl_engine.

verl builds its groups anew each round: each worker says in prepare() where it listens, the first
training rank's place is the hub's, and all others connect there in init_process_group(). Who is
connected stays connected over rounds.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from tep import UsageError
from tep.integrations.weights.member import Fabric, Meeting, Member
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
        self._fabric = Fabric(fabric, options or {}, address, 0, timeout_s)
        self._device = device
        self._member: Member | None = None
        self._meeting: Meeting | None = None
        self._rank: int | None = None
        self._rounds = 0

    def prepare(self) -> dict[str, Any]:
        """Say who this is, and where it could be met."""
        if self._member is None:
            self._member = Member(f"worker-{uuid.uuid4().hex[:12]}", self._fabric)
        if self._meeting is None:
            self._meeting = self._member.meet()
        return {"name": self._member.name, "hub": list(self._meeting)}

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
        """Come together with the others.

        Args:
            rank: of a training rank; -1: a rollout rank.
            world: training ranks.
            metadata: of all workers, what prepare() gave; the training ranks' first.
        """
        if self._member is None:
            raise UsageError("prepare() comes before the process group")
        hub = Meeting(*metadata[0]["hub"])
        if self._rank is not None and (rank != self._rank or hub != self._meeting):
            raise UsageError(
                f"{self._member.name} was rank {self._rank} of the hub {self._meeting}; now rank "
                f"{rank} of {hub}: make a new engine for another group"
            )
        self._rank, self._meeting = rank, hub
        if rank < 0:
            self._member.receive_from(hub)
        elif rank > 0:
            self._member.follow(hub, rank, world)
        else:
            self._member.lead(world)
            self._member.keep(str(one["name"]) for one in metadata[world:])

    def finalize(self) -> None:
        """Do nothing: connections and memory serve the next round too."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Send the next version: this rank's part of it; all training ranks call it.

        Raises:
            TepError: not every rollout rank has it.
        """
        member = self._joined(training=True)
        with member.loading() as add:
            if isinstance(weights, AsyncIterable):
                async for name, tensor in weights:
                    add(name, tensor)
            else:
                for name, tensor in weights:
                    add(name, tensor)
        self._rounds += 1
        await asyncio.wrap_future(member.sending(self._rounds))

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """Wait for the next version and give it out once; no update begins before the end."""
        member = self._joined(training=False)
        version = await member.wait_whole(None)
        with member.read(version) as weights:
            for pair in named_tensors(weights, self._device):
                yield pair

    def _joined(self, *, training: bool) -> Member:
        if self._member is None or self._rank is None or training != (self._rank >= 0):
            kind = "training" if training else "rollout"
            raise UsageError(f"this is no {kind} rank of a process group (rank {self._rank})")
        return self._member

    def close(self) -> None:
        """Leave the group."""
        if self._member is not None:
            self._member.close()
        self._member = self._meeting = self._rank = None
