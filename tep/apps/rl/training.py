"""A training rank: holds shards, and does its part of an update by the schedule.

`TrainingWorker` is what outlives an update: the staging region, the peers, and that an abort leaves
nothing in flight. `Attempt` is one update: tasks through four overlapped stages, then barriers.

    load     its shards into staging            (host to device, where weights are offloaded)
    gather   the other members' shards          (one-sided writes, counted by immediates)
    make     unshard, fuse, quantise
    write    to the rollout workers             (one-sided writes; they count, and do nothing else)

Rule 1: a task begins when its place in staging is free, which is the watermark. Rule 2: a stage has
one task at a time, in order; so stages of different tasks overlap and no two ranks wait for each
other in a circle. Rule 3: mesh groups are separated by a barrier after all gathering. Rule 4: what
a NIC holds is in `_open` until it has come back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tep import (
    BadDescriptor,
    BurntImm,
    Expectation,
    FabricError,
    MrDesc,
    MrHandle,
    ScatterDst,
    Span,
    TepError,
    Transfer,
    TransferEngine,
    UsageError,
)
from tep.apps.rl.compute import Compute, load_shards, make_outs, needed_outs, unshard
from tep.apps.rl.metadata import Box, GatherPiece, Rows, Schedule, Task, TrainMeta, box_bytes
from tep.apps.rl.ports import (
    ROUTING,
    Kind,
    Regions,
    TrainReport,
    count_row,
    cut_rows,
    make_imm,
    stage_span,
)

__all__ = ["Attempt", "Shards", "TrainingWorker"]


class TrainingWorker:
    """One training rank over one engine.

    Args:
        engine: of this rank's device; the caller closes it.
        meta: what the rank holds.
        shards: numpy arrays or torch tensors, by tensor name and box; read at each update, so train
            on in place.
        compute: where the arithmetic runs.

    Attributes:
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
        self.compute = compute or Compute()
        self.staging: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.peers: list[MrDesc] = []
        self.rollouts: dict[str, Regions] = {}
        self._mr: MrHandle | None = None
        self._running: asyncio.Task[TrainReport] | None = None
        self._work: Attempt | None = None
        self._cancelled = False
        self._meta = meta
        missing = [tuple(shard) for shard in meta.shards if tuple(shard) not in shards]
        if missing:
            raise UsageError(f"rank {meta.rank}: no array for {missing[:3]}")

    @property
    def mr(self) -> MrHandle:
        """The staging region."""
        if self._mr is None:
            raise UsageError(f"rank {self.rank}: no routing yet; call set_routing() first")
        return self._mr

    async def param_meta(self) -> TrainMeta:
        """Say what it holds."""
        return self._meta

    async def set_routing(self, schedule: bytes) -> bytes:
        """Take a schedule; return the MrDesc of its staging, with keys that nobody has yet."""
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
        """Learn where the ranks' staging (MrDesc) and the rollouts' weights (Regions) are."""
        self.peers = [MrDesc.from_bytes(peer) for peer in peers]
        self.rollouts = {name: Regions.from_bytes(data) for name, data in rollouts.items()}

    async def transfer_weights(self, attempt: int, skip: Sequence[str] = ()) -> TrainReport:
        """Do its part of one update; skip these rollout workers."""
        if self.schedule is None or not self.peers:
            raise UsageError(f"rank {self.rank}: transfer_weights() before routing and peers")
        if self._running is not None:
            raise UsageError(f"rank {self.rank}: an update runs already")
        self._cancelled = False
        work = self._work = Attempt(self, self.schedule, attempt, skip)
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

    async def abort(self) -> None:
        """End an update that runs, with nothing left in flight."""
        if self._running is not None:
            self._cancel()
            await asyncio.wait({self._running})

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


Shards = Mapping[tuple[str, Box], npt.NDArray[Any]]
"""The weights of a rank: an array for each tensor name and box."""

_STAGES: Final = ("load", "gather", "make")
_BARRIERS: Final = 32  # rounds of one barrier at the most: 2**32 ranks


class Attempt:
    """One update on one rank. `run()` it, then `drain()` it, in any case.

    Attributes:
        draining: whether drain() has begun, which must not be cut short.
    """

    def __init__(
        self, worker: TrainingWorker, schedule: Schedule, attempt: int, skip: Sequence[str]
    ) -> None:
        self._worker, self._rank, self._engine = worker, worker.rank, worker.engine
        # The worker may learn of others while this attempt runs, or is drained.
        self._mr, self._staging = worker.mr, worker.staging
        self._peers, self._rollouts = worker.peers, worker.rollouts
        self._schedule = schedule
        self._attempt = attempt
        self._tasks = list(schedule.tasks_of(worker.rank))
        self._lost = dict.fromkeys(skip, "was gone before the update")
        self._known_lost = frozenset(skip)
        self._locks = {stage: asyncio.Lock() for stage in _STAGES}
        self._ended = [False] * len(self._tasks)
        self._ended_upto = -1
        self._released = asyncio.Condition()
        self._open: dict[Transfer | Expectation, None] = {}
        self.draining = False
        self._group: asyncio.TaskGroup | None = None
        self._running: list[asyncio.Task[None]] = []
        self._spans: list[Span] = []
        self._held = self._peak = self._written = self._sent = 0

    async def run(self) -> TrainReport:
        """Do all tasks and barriers; FabricError: another training rank cannot be reached."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for number in range(len(self._schedule.groups)):
                    mine = [k for k, task in enumerate(self._tasks) if task.group == number]
                    gathered = [await self._start(k) for k in mine]
                    for future in gathered:
                        await future
                    await self._barrier(number)
                for running in self._running:
                    await running
                await self._barrier(len(self._schedule.groups))
                await self._finish()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        lost = {name: why for name, why in self._lost.items() if name not in self._known_lost}
        return TrainReport(
            self._rank, self._written, self._sent, self._peak, lost, tuple(self._spans)
        )

    async def drain(self) -> None:
        """Cancel what is open and wait until all of it has come back."""
        self.draining = True
        for handle in list(self._open):
            handle.cancel()
        for handle in list(self._open):
            with contextlib.suppress(TepError):  # how it ended does not matter any more
                await handle
            self._open.pop(handle, None)

    # ------------------------------------------------------------------ tasks

    async def _start(self, k: int) -> asyncio.Future[None]:
        """Begin a task once its place is free; return what is set when it has gathered."""
        task = self._tasks[k]
        wait_for = task.after_of(self._rank)
        async with self._released:
            await self._released.wait_for(lambda: self._ended_upto >= wait_for)
        self._held += task.nbytes
        self._peak = max(self._peak, self._held)
        gathered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert self._group is not None
        running = self._group.create_task(self._task(k, task, gathered))
        self._running.append(running)
        return gathered

    async def _task(self, k: int, task: Task, gathered: asyncio.Future[None]) -> None:
        mine, compute, shards = self._rank, self._worker.compute, self._worker.shards
        base = task.staging_of(mine)
        staging = self._staging[base : base + task.nbytes]
        rows = self._schedule.rows_of(task.number, mine)
        others = [rank for rank in task.members if rank != mine]
        if others:
            self._announce(task, others)
        async with self._stage("load", task):
            await compute.run(
                "load",
                _own_bytes(task, mine),
                lambda: load_shards(task, mine, shards, staging),
            )
        async with self._stage("gather", task):
            sent = await self._gather(task, base, others)
        async with self._stage("make", task):
            outs = needed_outs(task, rows)
            await compute.run(
                "make",
                task.gather_bytes,
                lambda: make_outs(task, outs, unshard(task, staging), staging),
            )
        gathered.set_result(None)
        with self._span("write", task.name):
            await self._write(base, rows)
        if sent is not None:
            await self._settled(sent)
        await self._release(k, task)

    @asynccontextmanager
    async def _stage(self, name: str, task: Task) -> AsyncIterator[None]:
        async with self._locks[name]:
            with self._span(name, task.name):
                yield

    @contextlib.contextmanager
    def _span(self, stage: str, task: str) -> Iterator[None]:
        start_s = self._engine.driver.now_s()
        yield
        stop_s = self._engine.driver.now_s()
        self._spans.append(stage_span(f"rank {self._rank}", stage, task, start_s, stop_s))

    async def _release(self, k: int, task: Task) -> None:
        async with self._released:
            self._held -= task.nbytes
            self._ended[k] = True
            while self._ended_upto + 1 < len(self._ended) and self._ended[self._ended_upto + 1]:
                self._ended_upto += 1
            self._released.notify_all()

    # ------------------------------------------------------------------ gathering

    def _announce(self, task: Task, others: Sequence[int]) -> None:
        """Tell the other members that this one has room for their shards."""
        imm = make_imm(Kind.READY, self._attempt, task.number)
        self._watch(self._engine.submit_barrier([self._peers[rank] for rank in others], imm))

    async def _gather(self, task: Task, base: int, others: Sequence[int]) -> Transfer | None:
        """Exchange shards; return the transfer of one's own, whose source must stay."""
        if not others:
            return None
        rank = self._rank
        nics = len(self._mr.desc.rkeys)
        coming = sum(
            count_row(nbytes, len(self._peers[sender].rkeys), nics)
            for piece, total in _pieces(task)
            if (sender := piece.sender_to(rank)) is not None
            for _, nbytes in cut_rows(0, total)
        )
        ready = make_imm(Kind.READY, self._attempt, task.number)
        await self._expect(ready, len(others))
        imm = make_imm(Kind.SHARD, self._attempt, task.number)
        sent = None
        dsts = [
            ScatterDst(nbytes, base + at, (self._peers[other], task.staging_of(other) + at))
            for piece, total in _pieces(task)
            for other in others
            if piece.sender_to(other) == rank
            for at, nbytes in cut_rows(piece.offset, total)
        ]
        if dsts:
            sent = self._engine.submit_scatter(self._mr, dsts, imm, routing=ROUTING)
            self._watch(sent)
            self._sent += sum(dst.nbytes for dst in dsts)
        await self._expect(imm, coming)
        return sent

    # ------------------------------------------------------------------ writing

    async def _write(self, base: int, rows: Rows) -> None:
        """Write to each rollout worker on its own: one that dies must not take rows of others."""
        imm = make_imm(Kind.DATA, self._attempt)
        open_: list[tuple[str, Transfer]] = []
        for receiver in dict.fromkeys(rows["receiver"].tolist()):
            name = self._schedule.receivers[receiver]
            if name in self._lost:
                continue
            mine, regions = rows[rows["receiver"] == receiver], self._rollouts[name]
            dsts = [
                ScatterDst(nbytes, base + src, regions.at(dst))
                for src, dst, nbytes in zip(*(mine[c].tolist() for c in ("src", "dst", "nbytes")))
            ]
            try:
                transfer = self._engine.submit_scatter(self._mr, dsts, imm, routing=ROUTING)
            # It restarted, cannot be reached, or another task's write to it has just failed.
            except (BadDescriptor, BurntImm, FabricError) as error:
                self._lost[name] = str(error)
                continue
            self._track(transfer)
            open_.append((name, transfer))
        for name, transfer in open_:
            try:
                await self._settled(transfer)
            except FabricError as error:
                self._lost.setdefault(name, str(error))
            else:
                self._written += transfer.job.total

    # ------------------------------------------------------------------ barriers

    async def _barrier(self, number: int) -> None:
        """Wait for all training ranks: in round r each tells the one 2**r further on."""
        rank, world = self._rank, self._schedule.ranks
        step = 0
        with self._span("barrier", f"barrier {number}"):
            while 1 << step < world:
                imm = make_imm(Kind.BARRIER, self._attempt, number * _BARRIERS + step)
                peer = self._peers[(rank + (1 << step)) % world]
                self._watch(self._engine.submit_barrier([peer], imm))
                await self._expect(imm, 1)
                step += 1

    async def _finish(self) -> None:
        """Tell this rank's share of the rollout workers that all ranks have written everything."""
        imm = make_imm(Kind.FINISH, self._attempt)
        told = []
        for name in self._schedule.receivers[self._schedule.finishes(self._rank)]:
            if name not in self._lost:
                first = self._rollouts[name].descs[0]
                told.append((name, self._engine.submit_barrier([first], imm)))
                self._track(told[-1][1])
        for name, transfer in told:
            try:
                await self._settled(transfer)
            except FabricError as error:
                self._lost[name] = str(error)

    # ------------------------------------------------------------------ handles

    async def _expect(self, imm: int, count: int) -> None:
        expectation = self._engine.expect_imm_count(imm, count)
        self._open[expectation] = None
        await expectation
        self._open.pop(expectation)

    def _track(self, transfer: Transfer) -> None:
        """Keep a transfer until it has settled; drain() looks after what is left."""
        self._open[transfer] = None

    def _watch(self, transfer: Transfer) -> None:
        """Track a transfer to another training rank; if it fails, so does this attempt, at once."""
        assert self._group is not None
        self._track(transfer)
        self._group.create_task(self._settled(transfer))

    async def _settled(self, transfer: Transfer) -> None:
        try:
            await transfer
        finally:
            if transfer.finished:
                self._open.pop(transfer, None)


def _pieces(task: Task) -> Iterator[tuple[GatherPiece, int]]:
    for gather in task.gathers:
        for piece in gather.pieces:
            yield piece, box_bytes(piece.box, gather.dtype)


def _own_bytes(task: Task, rank: int) -> int:
    return sum(nbytes for piece, nbytes in _pieces(task) if rank in piece.holders)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group of tasks; the others were cancelled because of it."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
