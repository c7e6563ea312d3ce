"""One worker of trainers that build their groups anew each round: verl and NeMo-RL. No torch.

Each worker says in prepare() where it listens; the first training rank's place is the hub's, and
all others connect there in join(). Who is connected stays connected over rounds.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from tep import UsageError
from tep.integrations.weights.member import Fabric, Meeting, Member
from tep.integrations.weights.receiver import Weight

__all__ = ["Worker"]


class Worker:
    """One training or rollout rank.

    Args:
        fabric: how to reach the others.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
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

    def join(self, rank: int, world: int, metadata: Sequence[Mapping[str, Any]]) -> None:
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

    async def send(self, weights: Iterable[Any] | AsyncIterable[Any]) -> None:
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

    async def receive(self) -> AsyncIterator[list[Weight]]:
        """Wait for the next version, and give it out once; no update begins before the exit."""
        member = self._joined(training=False)
        version = await member.wait_whole(None)
        with member.read(version) as weights:
            yield weights

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
