"""A job of real processes: what it is, how its workers start, and what they answer.

`python -m tep.apps.rl.job JOB ROLE NAME HOST PORT` is one worker; the controller starts it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from tep import TepError, TransferEngine, UsageError
from tep.apps.rl.metadata import RolloutMeta, TrainMeta
from tep.apps.rl.models import Model, load_model
from tep.apps.rl.placement import InferLayout, TrainLayout, rollout_metas, train_metas
from tep.apps.rl.ports import LoadReport, RolloutState, TrainReport
from tep.apps.rl.remote import Hello, answer
from tep.apps.rl.rollout import RolloutWorker
from tep.apps.rl.stages import Threads
from tep.apps.rl.training import TrainingWorker
from tep.apps.rl.weights import Checkpoint

__all__ = ["TOKEN", "Job", "RolloutService", "TrainingService", "be_worker", "main"]

TOKEN: Final = "TEP_RL_TOKEN"  # noqa: S105  # the name of the variable, not a secret
"""Environment variable that holds the secret which workers and controller share."""

_REQUEST_BYTES: Final = 1 << 20  # of the weights that one request of the load looks at


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all processes of a job must agree on; a JSON file.

    Attributes:
        model: published name or path of a config.json.
        weights: path of the safetensors file to begin with.
        train, infer: layouts.
        backend: a name of `tep info`.
        options: of the backend, e.g. {"provider": "tcp", "nics": 1}.
        load: rollout workers serve requests all the time.
    """

    model: str
    weights: str
    train: TrainLayout
    infer: InferLayout
    backend: str = "libfabric"
    options: dict[str, str | int | list[str]] = field(default_factory=dict)
    load: bool = False

    @classmethod
    def read(cls, path: str) -> Job:
        """Read a job from its file.

        Raises:
            UsageError: it is none.
        """
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{path}: {error}") from error

    def write(self, path: str) -> None:
        """Write the file."""
        Path(path).write_bytes(msgspec.json.encode(self))

    def open(self, name: str) -> TransferEngine:
        """Open one worker's engine."""
        options: dict[str, Any] = {"name": name, **self.options}
        return TransferEngine.open(self.backend, **options)


class TrainingService:
    """A training rank as its process answers for it."""

    def __init__(self, worker: TrainingWorker, model: Model) -> None:
        self._worker = worker
        self._tensors = {tensor.name: tensor for tensor in model.tensors}

    async def param_meta(self) -> TrainMeta:
        return await self._worker.param_meta()

    async def set_routing(self, schedule: bytes) -> bytes:
        return await self._worker.set_routing(schedule)

    async def connect(self, peers: list[bytes], rollouts: dict[str, bytes]) -> None:
        await self._worker.connect(peers, rollouts)

    async def transfer_weights(self, attempt: int, skip: list[str]) -> TrainReport:
        return await self._worker.transfer_weights(attempt, skip)

    async def abort(self) -> None:
        await self._worker.abort()

    async def load(self, path: str) -> None:
        """Overwrite the shards with those of another checkpoint, as training would."""
        checkpoint = Checkpoint(path)
        for (name, box), array in self._worker.shards.items():
            array[...] = checkpoint.read(self._tensors[name], box)


class RolloutService:
    """A rollout worker as its process answers for it, with a load of requests if asked for."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker
        self._served = self._refused = 0
        self._answers: dict[int, dict[str, None]] = {}

    async def param_meta(self) -> RolloutMeta:
        return await self._worker.param_meta()

    async def begin(self, attempt: int, version: int, data_imms: int) -> bytes:
        return await self._worker.begin(attempt, version, data_imms)

    async def finished(self, timeout_s: float) -> int:
        return await self._worker.finished(timeout_s)

    async def abort(self) -> RolloutState:
        return await self._worker.abort()

    async def state(self) -> RolloutState:
        return await self._worker.state()

    async def digest(self) -> str:
        """SHA-256 of the weight region."""
        return hashlib.sha256(self._worker.region.data).hexdigest()

    async def load_report(self) -> LoadReport:
        """What was served since the last report."""
        answers = {version: list(found) for version, found in self._answers.items()}
        report = LoadReport(self._served, self._refused, answers)
        self._served, self._refused, self._answers = 0, 0, {}
        return report

    async def serve(self) -> None:
        """Answer requests for ever: each reads a slice of every part of the weights."""
        region = self._worker.region
        step = max(1, len(region) // _REQUEST_BYTES)
        while True:
            try:
                with self._worker.lease() as version:
                    found = await asyncio.to_thread(
                        lambda: hashlib.sha256(region[::step].tobytes()).hexdigest()
                    )
                    self._answers.setdefault(version, {})[found] = None
                self._served += 1
            except UsageError:
                self._refused += 1
                await asyncio.sleep(0.005)


async def be_worker(job: Job, role: str, name: str, host: str, port: int, token: str) -> None:
    """Be one worker: connect to the controller, and answer until it hangs up."""
    model = load_model(job.model)
    hello = Hello(role, name)
    with job.open(name) as engine:
        nics = len(engine.main_address.domains)
        if role == "train":
            meta = train_metas(model, job.train, nics)[int(name.removeprefix("train"))]
            checkpoint = Checkpoint(job.weights)
            checkpoint.check(model)
            tensors = {tensor.name: tensor for tensor in model.tensors}
            shards = {(n, box): checkpoint.read(tensors[n], box) for n, box in meta.shards}
            worker = TrainingWorker(engine, meta, shards, compute=Threads())
            await answer(TrainingService(worker, model), host, port, token, hello)
            return
        metas = {meta.name: meta for meta in rollout_metas(model, job.infer, nics)}
        if role != "rollout" or name not in metas:
            raise UsageError(f"role {role!r}, name {name!r}; rollout workers are {list(metas)}")
        service = RolloutService(RolloutWorker(engine, metas[name]))
        load = asyncio.ensure_future(service.serve()) if job.load else None
        try:
            await answer(service, host, port, token, hello)
        finally:
            if load is not None:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)


def main(argv: Sequence[str]) -> int:
    """Be one worker of a job until the controller hangs up."""
    path, role, name, host, port = argv
    try:
        token = os.environ.get(TOKEN, "")
        asyncio.run(be_worker(Job.read(path), role, name, host, int(port), token))
    except TepError as error:
        sys.stderr.write(f"{role} {name}: {type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
