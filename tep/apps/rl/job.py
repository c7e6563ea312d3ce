"""A job of real processes: rank 0 is the controller, the next ranks train, the last ones serve.

Whoever starts the processes, on any machines, tells them their places as `tep.rendezvous.launch`
says. `RankedJob` is rank 0's side of it and `work_as_rank` the others'. `LocalJob` starts the
other ranks itself, on this machine, each as `python -m tep.apps.rl.job JOB`, where JOB is a JSON
document.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from tep import FabricError, TransferEngine, UsageError
from tep.apps.rl.compute import Threads
from tep.apps.rl.controller import Controller
from tep.apps.rl.metadata import TrainMeta
from tep.apps.rl.models import (
    InferLayout,
    Model,
    TrainLayout,
    load_model,
    rollout_metas,
    train_metas,
)
from tep.apps.rl.ports import RemoteRollout, RemoteTraining
from tep.apps.rl.rollout import RolloutWorker
from tep.apps.rl.training import TrainingWorker
from tep.apps.rl.weights import Checkpoint
from tep.base.units import MiB
from tep.rendezvous import Place
from tep.rendezvous.calls import Caller, Hello, Listener, answer
from tep.rendezvous.launch import RankProcesses, run_rank

__all__ = [
    "Job", "LocalJob", "RankedJob", "RolloutService", "TrainingService", "main", "work_as_rank",
]  # fmt: skip

_START_S: Final = 120.0
_END_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The facts that all processes of a job must agree on; a JSON document.

    Attributes:
        model: published name or path of a config.json.
        weights: path of the safetensors file to begin with.
        options: of the backend, e.g. {"provider": "tcp", "nics": 1}.
    """

    model: str
    weights: str
    train: TrainLayout
    infer: InferLayout
    backend: str = "libfabric"
    options: dict[str, str | int | list[str]] = field(default_factory=dict)

    def open(self, name: str) -> TransferEngine:
        """Open one worker's engine."""
        options: dict[str, Any] = {"name": name, **self.options}
        return TransferEngine.open(self.backend, **options)


class TrainingService(TrainingWorker):
    """A training rank that takes other checkpoints, as training would change its shards."""

    def __init__(
        self, engine: TransferEngine, meta: TrainMeta, model: Model, weights: Checkpoint
    ) -> None:
        self._tensors = {tensor.name: tensor for tensor in model.tensors}
        shards = {(n, box): weights.read(self._tensors[n], box) for n, box in meta.shards}
        super().__init__(engine, meta, shards, compute=Threads())

    async def load(self, path: str) -> None:
        """Overwrite the shards with those of another checkpoint."""
        checkpoint = Checkpoint(path)
        for (name, box), array in self.shards.items():
            array[...] = checkpoint.read(self._tensors[name], box)


class RolloutService(RolloutWorker):
    """A rollout worker whose weights can be compared with a checkpoint."""

    async def digest(self) -> str:
        """SHA-256 of the weight region."""
        return hashlib.sha256(self.region.data).hexdigest()


class RankedJob:
    """Rank 0 of a job, the controller; an async context manager. Others start the other ranks.

    Args:
        job: what to run.
        place: of this process; the controller listens there.
        sizes: watermark_bytes, bundle_bytes, timeout_s; of the controller.

    Attributes:
        controller: drives the updates of these workers.
        trains, rollouts: the workers.

    Raises:
        UsageError: another number of processes was started.
    """

    def __init__(self, job: Job, place: Place, **sizes: Any) -> None:
        _check_size(job, place)
        self.job = job
        self.trains: list[RemoteTraining] = []
        self.rollouts: dict[str, RemoteRollout] = {}
        self._place = place
        self._sizes = {"bundle_bytes": 4 * MiB, "timeout_s": 120.0, **sizes}
        self._listener = Listener(place.token, place.host, place.port)

    async def __aenter__(self) -> Self:
        await self._listener.__aenter__()
        try:
            await self._gather()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _gather(self) -> None:
        for role, name in _roles(self.job):
            caller = await self._caller(role, name)
            if role == "train":
                self.trains.append(RemoteTraining(caller))
            else:
                self.rollouts[name] = RemoteRollout(caller)
        self.controller = Controller(self.trains, list(self.rollouts.values()), **self._sizes)

    async def _caller(self, role: str, name: str) -> Caller:
        try:
            return await self._listener.wait_for(role, name, _START_S)
        except TimeoutError:
            raise FabricError(f"{name} has not come within {_START_S:g} s", peer=name) from None

    async def load(self, path: str) -> None:
        """Have all training ranks take another checkpoint."""
        await asyncio.gather(*(train.load(path) for train in self.trains))

    async def __aexit__(self, *_: object) -> None:
        await self._listener.__aexit__()


class LocalJob(RankedJob):
    """A job whose processes all run here; it starts them, with their logs in `folder`."""

    module = "tep.apps.rl.job"

    def __init__(self, job: Job, folder: str | os.PathLike[str], **sizes: Any) -> None:
        token = secrets.token_hex(16)
        super().__init__(job, Place(rank=0, size=1 + len(_roles(job)), token=token), **sizes)
        self._folder = Path(folder)
        self._ranks = {name: 1 + k for k, (_, name) in enumerate(_roles(job))}

    async def _gather(self) -> None:
        place = dataclasses.replace(self._place, port=self._listener.port)
        self._processes = RankProcesses(place, self._folder)
        job = msgspec.json.encode(self.job).decode()
        self._command = (sys.executable, "-m", self.module, job)
        await asyncio.gather(*map(self._start, self._ranks))
        await super()._gather()

    async def _start(self, name: str) -> None:
        await self._processes.start(self._ranks[name], self._command)

    async def _caller(self, role: str, name: str) -> Caller:
        coming = super()._caller(role, name)
        return await self._processes.unless_ended(self._ranks[name], name, coming)

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        await self._processes.close(_END_S)


def _roles(job: Job) -> list[tuple[str, str]]:
    """Return role and name of each worker, from rank 1 on."""
    trains = [("train", f"train{k}") for k in range(job.train.world)]
    return trains + [("rollout", f"rollout{k}") for k in range(job.infer.world)]


def _check_size(job: Job, place: Place) -> None:
    train, infer = job.train.world, job.infer.world
    if place.size != 1 + train + infer:
        raise UsageError(
            f"{place.size} processes were started, and the job takes {1 + train + infer}: a "
            f"controller, {train} in training, {infer} in inference"
        )


def work_as_rank(job: Job, place: Place) -> None:
    """Be one worker of a job, by rank, until the controller hangs up.

    Raises:
        UsageError: rank 0, which is the controller; or another number of processes was started.
    """
    _check_size(job, place)
    if not place.rank:
        raise UsageError("rank 0 is the controller: RankedJob")
    asyncio.run(_work(job, place, Hello(*_roles(job)[place.rank - 1])))


async def _work(job: Job, place: Place, hello: Hello) -> None:
    model = load_model(job.model)
    controller = (place.host, place.port, place.token, hello)
    with job.open(hello.name) as engine:
        nics = len(engine.main_address.domains)
        if hello.role == "train":
            weights = Checkpoint(job.weights)
            weights.check(model)
            meta = train_metas(model, job.train, nics)[place.rank - 1]
            await answer(TrainingService(engine, meta, model, weights), *controller)
            return
        metas = rollout_metas(model, job.infer, nics)
        mine = metas[place.rank - 1 - job.train.world]
        await answer(RolloutService(engine, mine), *controller)


def main(argv: Sequence[str]) -> int:
    """Be one worker of the job that is given, at the place that the environment says."""
    return run_rank(lambda place: work_as_rank(msgspec.json.decode(argv[0], type=Job), place))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
