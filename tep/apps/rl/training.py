"""A training rank: holds shards, and does its part of an update by the schedule.

What one update does is in `attempt`; here is what outlives it: the staging region, the peers, and
that an abort leaves nothing in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tep import FabricError, MrDesc, MrHandle, TransferEngine, UsageError
from tep.apps.rl.attempt import Attempt, Rank, Shards
from tep.apps.rl.metadata import TrainMeta
from tep.apps.rl.ports import TrainReport
from tep.apps.rl.regions import Regions
from tep.apps.rl.routes import Schedule
from tep.apps.rl.stages import AtOnce, Compute

__all__ = ["TrainingWorker"]


class TrainingWorker:
    """One training rank over one engine.

    Args:
        engine: of this rank's device; the caller closes it.
        meta: what the rank holds.
        shards: numpy arrays or torch tensors, by tensor name and box; read at each update, so train
            on in place.
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
        self.rank = meta.rank
        self.schedule: Schedule | None = None
        self.engine = engine
        self.shards = shards
        self.compute = compute or AtOnce()
        self.staging: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.peers: list[MrDesc] = []
        self.rollouts: dict[str, Regions] = {}
        self._mr: MrHandle | None = None
        self._running: asyncio.Task[TrainReport] | None = None
        self._work: Attempt | None = None
        self._idle = asyncio.Event()
        self._cancelled = False
        self.hold(meta)

    def hold(self, meta: TrainMeta) -> None:
        """Hold other tensors from now on; a new routing has to follow.

        Raises:
            UsageError: an array is missing.
        """
        missing = [tuple(shard) for shard in meta.shards if tuple(shard) not in self.shards]
        if missing:
            raise UsageError(f"rank {meta.rank}: no array for {missing[:3]}")
        self._meta = meta
        self.schedule = None

    @property
    def mr(self) -> MrHandle:
        """The staging region."""
        if self._mr is None:
            raise UsageError(f"rank {self.rank}: no routing yet; call set_routing() first")
        return self._mr

    async def param_meta(self) -> TrainMeta:
        return self._meta

    async def set_routing(self, schedule: bytes) -> bytes:
        found = Schedule.from_bytes(schedule)
        await self.abort()  # of an update that the controller has given up
        # New keys, also for old memory: what a dead rank wrote, or a row that failed and lands
        # after all, is refused and does not land between the shards of the next update.
        self.close()
        if len(self.staging) != found.watermark_bytes:
            self.staging = np.zeros(found.watermark_bytes, np.uint8)
        self._mr, _ = self.engine.reg_mr(self.staging)
        self.schedule = found
        return self.mr.desc.to_bytes()

    async def connect(self, peers: Sequence[bytes], rollouts: dict[str, bytes]) -> None:
        self.peers = [MrDesc.from_bytes(peer) for peer in peers]
        self.rollouts = {name: Regions.from_bytes(data) for name, data in rollouts.items()}

    async def transfer_weights(self, attempt: int, skip: Sequence[str] = ()) -> TrainReport:
        if self.schedule is None or not self.peers:
            raise UsageError(f"rank {self.rank}: transfer_weights() before routing and peers")
        if self._running is not None:
            raise UsageError(f"rank {self.rank}: an update runs already")
        self._idle.clear()
        self._cancelled = False
        mine = Rank(
            rank=self.rank,
            engine=self.engine,
            mr=self.mr,
            staging=self.staging,
            shards=self.shards,
            compute=self.compute,
            peers=self.peers,
            rollouts=self.rollouts,
        )
        work = self._work = Attempt(mine, self.schedule, attempt, skip)
        running = self._running = asyncio.get_running_loop().create_task(_whole(work))
        running.add_done_callback(self._ended)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.done():
                text = f"rank {self.rank}: update {attempt} was aborted"
                raise FabricError(text, code="ABORTED") from None
            self._cancel()
            raise

    def _cancel(self) -> None:
        """Cancel what runs, once, and only until it drains: that must not be cut short."""
        draining = self._work is not None and self._work.draining
        if self._running is not None and not (self._cancelled or draining):
            self._cancelled = True
            self._running.cancel()

    def _ended(self, running: asyncio.Task[TrainReport]) -> None:
        if not running.cancelled():
            running.exception()  # whoever gave up on it does not ask
        self._running = None
        self._idle.set()

    async def abort(self) -> None:
        if self._running is not None:
            self._cancel()
            await self._idle.wait()

    def close(self) -> None:
        """Give the staging region back; the engine stays open."""
        if self._mr is not None and not self._mr.closed:
            self.engine.deregister(self._mr)
        self._mr = None


async def _whole(work: Attempt) -> TrainReport:
    """Run an attempt, and drain it: whatever a NIC still holds must come back before anybody may
    trust the staging, or the rollout workers' memory, again.
    """
    try:
        return await work.run()
    finally:
        await work.drain()
