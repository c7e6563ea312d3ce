"""A training rank: holds shards, and does its part of an update by the schedule.

What one update does is in `attempt`; here is what outlives it: the staging region, the peers, and
that an abort leaves nothing in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tep.apps.rl.attempt import Attempt
from tep.apps.rl.metadata import Box, TrainMeta
from tep.apps.rl.ports import TrainReport
from tep.apps.rl.routes import Schedule
from tep.apps.rl.stages import AtOnce, Compute
from tep.engine import TransferEngine
from tep.errors import UsageError
from tep.region import MrHandle
from tep.wire import MrDesc

if TYPE_CHECKING:
    Shards = Mapping[tuple[str, Box], npt.NDArray[Any]]

__all__ = ["TrainingWorker"]


class TrainingWorker:
    """One training rank over one engine.

    Args:
        engine: of this rank's device; the caller closes it.
        meta: what the rank holds.
        shards: the arrays, by tensor name and box; read at each update, so train on in place.
        compute: where the arithmetic runs.

    Attributes:
        rank: its number.
        schedule: the routing in force, None before the first.
    """

    def __init__(
        self,
        engine: TransferEngine,
        meta: TrainMeta,
        shards: Shards,
        *,
        compute: Compute | None = None,
    ) -> None:
        missing = [tuple(shard) for shard in meta.shards if tuple(shard) not in shards]
        if missing:
            raise UsageError(f"rank {meta.rank}: no array for {missing[:3]}")
        self.rank = meta.rank
        self.schedule: Schedule | None = None
        self.engine = engine
        self.shards = shards
        self.compute = compute or AtOnce()
        self.staging: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.peers: list[MrDesc] = []
        self.rollouts: dict[str, MrDesc] = {}
        self._meta = meta
        self._mr: MrHandle | None = None
        self._running: asyncio.Task[TrainReport] | None = None
        self._idle = asyncio.Event()

    @property
    def mr(self) -> MrHandle:
        """The staging region."""
        if self._mr is None:
            raise UsageError(f"rank {self.rank}: no routing yet; call set_routing() first")
        return self._mr

    async def param_meta(self) -> TrainMeta:
        return self._meta

    async def set_routing(self, schedule: bytes) -> bytes:
        if self._running is not None:
            raise UsageError(f"rank {self.rank}: set_routing() while an update runs")
        found = Schedule.from_bytes(schedule)
        if self._mr is None or len(self.staging) != found.watermark_bytes:
            if self._mr is not None:
                self.engine.deregister(self._mr)
            self.staging = np.zeros(found.watermark_bytes, np.uint8)
            self._mr, _ = self.engine.reg_mr(self.staging)
        self.schedule = found
        return self.mr.desc.to_bytes()

    async def connect(self, peers: Sequence[bytes], rollouts: dict[str, bytes]) -> None:
        self.peers = [MrDesc.from_bytes(peer) for peer in peers]
        self.rollouts = {name: MrDesc.from_bytes(desc) for name, desc in rollouts.items()}

    async def transfer_weights(self, attempt: int, skip: Sequence[str] = ()) -> TrainReport:
        if self.schedule is None or not self.peers:
            raise UsageError(f"rank {self.rank}: transfer_weights() before routing and peers")
        if self._running is not None:
            raise UsageError(f"rank {self.rank}: an update runs already")
        work = Attempt(self, self.schedule, attempt, skip)
        self._idle.clear()
        self._running = asyncio.get_running_loop().create_task(work.run())
        try:
            return await self._running
        finally:
            # Cancelled or failed: whatever a NIC still holds must come back before anybody may
            # trust the staging, or the rollout workers' memory, again.
            if not self._running.done():
                self._running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._running
            await work.drain()
            self._running = None
            self._idle.set()

    async def abort(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await self._idle.wait()

    def close(self) -> None:
        """Give the staging region back; the engine stays open."""
        if self._mr is not None and not self._mr.closed:
            self.engine.deregister(self._mr)
        self._mr = None
