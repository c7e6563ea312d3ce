"""The controller's side of a job of real processes: start them, wire them up, end them.

`LocalJob` starts its workers, on this machine. Where something else has started the processes, on
any machines, they are ranks: rank 0 is the controller (`RankedJob`), the others `work_as_rank`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from pathlib import Path
from typing import Final, Self

from tep import FabricError, UsageError, rendezvous
from tep.apps.rl.controller import Controller
from tep.apps.rl.job import TOKEN, Job, be_worker
from tep.apps.rl.remote import Caller, Listener, RemoteRollout, RemoteTraining
from tep.base.units import MiB

__all__ = ["LocalJob", "RankedJob", "work_as_rank"]

_START_S: Final = 60.0
_END_S: Final = 10.0


class LocalJob:
    """A job whose processes all run here; use it as an async context manager.

    Args:
        job: what to run.
        folder: for the job's file and the workers' logs.
        watermark_bytes, bundle_bytes, timeout_s: of the controller.

    Attributes:
        controller: drives the updates.
        trains, rollouts: the workers, as the controller sees them.
    """

    def __init__(
        self,
        job: Job,
        folder: str | os.PathLike[str],
        *,
        watermark_bytes: int = 64 * MiB,
        bundle_bytes: int = 4 * MiB,
        timeout_s: float = 120.0,
    ) -> None:
        self.job = job
        self.trains: list[RemoteTraining] = []
        self.rollouts: dict[str, RemoteRollout] = {}
        self._folder = Path(folder)
        self._path = str(self._folder / "job.json")
        self._sizes = (watermark_bytes, bundle_bytes)
        self._timeout_s = timeout_s
        self._token = secrets.token_hex(16)
        self._listener = Listener(self._token)
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def __aenter__(self) -> Self:
        self.job.write(self._path)
        await self._listener.__aenter__()
        try:
            await self._start_all()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start_all(self) -> None:
        roles = _roles(self.job)
        names = [name for role, name in roles if role == "train"]
        actors = [name for role, name in roles if role == "rollout"]
        await asyncio.gather(*(self._spawn(role, name) for role, name in roles))
        self.trains = [RemoteTraining(await self._caller("train", name)) for name in names]
        for name in actors:
            self.rollouts[name] = RemoteRollout(await self._caller("rollout", name))
        watermark, bundle = self._sizes
        self.controller = Controller(
            self.trains,
            list(self.rollouts.values()),
            watermark_bytes=watermark,
            bundle_bytes=bundle,
            timeout_s=self._timeout_s,
        )

    async def _spawn(self, role: str, name: str) -> None:
        command = (sys.executable, "-m", "tep.apps.rl.job", self._path, role, name)
        where = ("127.0.0.1", str(self._listener.port))
        with self._log(name).open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *command, *where, env={**os.environ, TOKEN: self._token}, stderr=log
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    async def _caller(self, role: str, name: str) -> Caller:
        process = self._processes[name]
        ended = asyncio.ensure_future(process.wait())
        came = asyncio.ensure_future(self._listener.wait_for(role, name, _START_S))
        await asyncio.wait({ended, came}, return_when=asyncio.FIRST_COMPLETED)
        if not came.done():
            came.cancel()
            tail = self._log(name).read_text(encoding="utf-8", errors="replace")[-2000:]
            raise FabricError(f"{name} ended with status {process.returncode}:\n{tail}")
        ended.cancel()
        return came.result()

    async def kill(self, name: str) -> None:
        """Kill a worker's process, as a machine that fails would."""
        process = self._processes.pop(name)
        process.kill()
        await process.wait()

    async def restart_rollout(self, name: str) -> RemoteRollout:
        """Start a rollout worker again and have it join."""
        await self._spawn("rollout", name)
        self.rollouts[name] = RemoteRollout(await self._caller("rollout", name))
        self.controller.add(self.rollouts[name])
        return self.rollouts[name]

    async def restart_train(self, rank: int, weights: str) -> RemoteTraining:
        """Start a training rank again, with the weights of a checkpoint."""
        name = f"train{rank}"
        await self._spawn("train", name)
        self.trains[rank] = RemoteTraining(await self._caller("train", name))
        await self.trains[rank].load(weights)
        self.controller.replace(rank, self.trains[rank])
        return self.trains[rank]

    async def load(self, path: str) -> None:
        """Have all training ranks take another checkpoint."""
        await asyncio.gather(*(train.load(path) for train in self.trains))

    async def __aexit__(self, *_: object) -> None:
        await self._listener.__aexit__()
        for process in self._processes.values():
            try:
                async with asyncio.timeout(_END_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


def _roles(job: Job) -> list[tuple[str, str]]:
    """(role, name) of each worker."""
    trains = [("train", f"train{k}") for k in range(job.train.world)]
    return trains + [("rollout", f"rollout{k}") for k in range(job.infer.world)]


def _check_size(job: Job, place: rendezvous.Place) -> None:
    train, infer = job.train.world, job.infer.world
    if place.size != 1 + train + infer:
        raise UsageError(
            f"{place.size} processes were started, and the job takes {1 + train + infer}: a "
            f"controller, {train} in training, {infer} in inference"
        )


class RankedJob(LocalJob):
    """Rank 0 of a job whose processes torchrun, srun or Ray has started.

    Args:
        job: what to run.
        place: of this process: rank 0 of as many as there are workers, and itself.
        address: of this host, which the other ranks reach.
        watermark_bytes: of the controller.

    Raises:
        UsageError: another number of processes was started.
    """

    def __init__(
        self, job: Job, place: rendezvous.Place, address: str, *, watermark_bytes: int
    ) -> None:
        _check_size(job, place)
        super().__init__(job, os.devnull, watermark_bytes=watermark_bytes)
        self._listener = Listener(place.token, address)
        self._place, self._address = place, address

    async def __aenter__(self) -> Self:
        await self._listener.__aenter__()
        try:
            said = f"{self._address} {self._listener.port}".encode()
            await rendezvous.exchange_async(said, self._place, timeout_s=_START_S)
            await self._start_all()
        except BaseException:
            await self._listener.__aexit__()
            raise
        return self

    async def _spawn(self, role: str, name: str) -> None:
        """It was started by somebody else."""

    async def _caller(self, role: str, name: str) -> Caller:
        try:
            return await self._listener.wait_for(role, name, _START_S)
        except TimeoutError:
            raise FabricError(f"{name} has not come within {_START_S:g} s", peer=name) from None


def work_as_rank(job: Job, place: rendezvous.Place) -> None:
    """Be one worker of a job, by rank, until the controller hangs up.

    Raises:
        UsageError: rank 0, which is the controller; or another number of processes was started.
    """
    _check_size(job, place)
    if not place.rank:
        raise UsageError("rank 0 is the controller: RankedJob")
    said = rendezvous.exchange(b"", place, timeout_s=_START_S)[0].decode()
    address, port = said.split()
    role, name = _roles(job)[place.rank - 1]
    asyncio.run(be_worker(job, role, name, address, int(port), place.token))
