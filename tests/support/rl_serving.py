"""Ranks of a job whose rollout workers serve requests all the time; they can be killed, and started
again. This module is the ranks' program, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from dataclasses import dataclass

from tep import TransferEngine
from tep.apps.rl import job
from tep.apps.rl.metadata import RolloutMeta
from tep.apps.rl.ports import RemoteRollout, RemoteTraining
from tep.base.errors import UsageError

REQUEST_BYTES = 1 << 20  # of the weights that one request of the load looks at


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The requests that a rollout worker served.

    Attributes:
        served: requests answered.
        refused: requests that came while the weights were mixed.
        answers: version -> the different answers that it gave; more than one is a mixed version.
    """

    served: int
    refused: int
    answers: dict[int, list[str]]


class Serving(job.RolloutService):
    """A rollout worker under load."""

    def __init__(self, engine: TransferEngine, meta: RolloutMeta) -> None:
        super().__init__(engine, meta)
        self._served = self._refused = 0
        self._answers: dict[int, dict[str, None]] = {}
        self._load = asyncio.ensure_future(self.serve())

    async def load_report(self) -> LoadReport:
        """Report what was served since the last report."""
        answers = {version: list(found) for version, found in self._answers.items()}
        report = LoadReport(self._served, self._refused, answers)
        self._served, self._refused, self._answers = 0, 0, {}
        return report

    async def serve(self) -> None:
        """Answer requests for ever: each reads a slice of every part of the weights."""
        region = self.region
        step = max(1, len(region) // REQUEST_BYTES)
        while True:
            try:
                with self.lease() as version:
                    found = await asyncio.to_thread(
                        lambda: hashlib.sha256(region[::step].tobytes()).hexdigest()
                    )
                    self._answers.setdefault(version, {})[found] = None
                self._served += 1
            except UsageError:
                self._refused += 1
                await asyncio.sleep(0.005)


class Fleet(job.LocalJob):
    """A job of such ranks."""

    module = "tests.support.rl_serving"

    async def load_report(self, name: str) -> LoadReport:
        """Return what a rollout worker served since the last report."""
        return await self.rollouts[name].caller.call(LoadReport, "load_report")

    async def kill(self, name: str) -> None:
        """Kill a worker's process, as a machine that fails would."""
        await self._processes.kill(self._ranks[name])

    async def restart_rollout(self, name: str) -> RemoteRollout:
        """Start a rollout worker again and have it join."""
        await self._start(name)
        self.rollouts[name] = RemoteRollout(await self._caller("rollout", name))
        self.controller.add(self.rollouts[name])
        return self.rollouts[name]

    async def restart_train(self, rank: int, weights: str) -> RemoteTraining:
        """Start a training rank again, with the weights of a checkpoint."""
        name = f"train{rank}"
        await self._start(name)
        self.trains[rank] = RemoteTraining(await self._caller("train", name))
        await self.trains[rank].load(weights)
        self.controller.replace(rank, self.trains[rank])
        return self.trains[rank]


if __name__ == "__main__":
    job.RolloutService = Serving
    sys.exit(job.main(sys.argv[1:]))
