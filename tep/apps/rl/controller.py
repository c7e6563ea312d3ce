"""The controller: collects metadata, computes the routing, starts updates, says how each ended.

It moves no bytes. Rule 1: the routing is computed anew only when membership has changed. Rule 2: no
rollout worker serves a version before all training ranks have written all of it. Rule 3: an update
that fails is ended everywhere before update() returns, and the next one may be tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from tep import TepError, UsageError
from tep.apps.rl.metadata import RolloutMeta, Schedule, TrainMeta
from tep.apps.rl.ports import (
    PeerResult,
    RemoteRollout,
    RemoteTraining,
    RolloutState,
    TrainReport,
    UpdateReport,
    count_data,
)
from tep.apps.rl.rollout import RolloutWorker
from tep.apps.rl.schedule import WATERMARK_BYTES, make_schedule
from tep.apps.rl.training import TrainingWorker

__all__ = ["FAULTS", "Controller"]

T = TypeVar("T")
K = TypeVar("K")
P = TypeVar("P")
Train = TypeVar("Train", bound=TrainingWorker | RemoteTraining)
Rollout = TypeVar("Rollout", bound=RolloutWorker | RemoteRollout)

FAULTS: Final = (TepError, OSError, TimeoutError)
"""The errors of a peer that is gone, or of a fabric."""


class Controller(Generic[Train, Rollout]):
    """Drives weight updates between training ranks and rollout workers.

    Args:
        trains: the training ranks, in rank order.
        rollouts: the rollout workers there are; more may join by add().
        watermark_bytes, bundle_bytes: of the schedule.
        timeout_s: for an update, and for each question to a peer; seconds of the loop's clock.

    Attributes:
        schedule: the routing in force.
        version: of the last update that went well; None before.
        rollouts: the rollout workers that the next update will reach, as far as is known, by name.
        metas: what each of them holds.
    """

    def __init__(
        self,
        trains: Sequence[Train],
        rollouts: Sequence[Rollout] = (),
        *,
        watermark_bytes: int = WATERMARK_BYTES,
        bundle_bytes: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        self.schedule: Schedule | None = None
        self.version: int | None = None
        self.trains = list(trains)
        self._joining = list(rollouts)
        self.rollouts: dict[str, Rollout] = {}
        self.metas: dict[str, RolloutMeta] = {}
        self._train_metas: list[TrainMeta] = []
        self.watermark_bytes, self.bundle_bytes = watermark_bytes, bundle_bytes
        self.timeout_s = timeout_s
        self._attempt = 0
        self._staging: list[bytes] = []
        self._encoded = b""
        self._stale = False
        self._changed = True
        self._busy = False

    # ------------------------------------------------------------------ membership

    def add(self, rollout: Rollout) -> None:
        """Have a rollout worker take part from the next update on; a restarted one replaces itself.

        May be called while an update runs.
        """
        self._joining.append(rollout)

    def remove(self, name: str) -> None:
        """Leave a rollout worker out from the next update on."""
        if name not in self.rollouts:
            raise UsageError(f"no rollout worker {name!r}; there are: {sorted(self.rollouts)}")
        self._forget(name)

    def replace(self, rank: int, train: Train) -> None:
        """Put a restarted training rank in the place of the one that failed."""
        if not 0 <= rank < len(self.trains):
            raise UsageError(f"no training rank {rank}; there are {len(self.trains)}")
        self.trains[rank] = train
        self._ask_again()

    def append(self, train: Train) -> None:
        """Have another training rank take part from the next update on, with the next number."""
        self.trains.append(train)
        self._ask_again()

    def _ask_again(self) -> None:
        """Ask the training ranks before the next update what they hold, and route anew."""
        self._train_metas = []
        self._changed = True

    def _forget(self, name: str) -> None:
        del self.rollouts[name], self.metas[name]
        self._changed = True

    async def admit(self) -> list[PeerResult]:
        """Ask those who join what they hold; return those that did not answer."""
        refused = []
        joining, self._joining = self._joining, []
        for port in joining:
            try:
                meta = await self._ask(port.param_meta())
            except FAULTS as error:
                refused.append(PeerResult("a joining worker", "lost", _say(error)))
                continue
            self._take(port, meta)
        return refused

    def _take(self, port: Rollout, meta: RolloutMeta) -> None:
        if self.metas.get(meta.name) != meta:
            self._changed = True
        self.rollouts[meta.name], self.metas[meta.name] = port, meta

    async def prepare(self) -> bool:
        """Compute and hand out the routing if membership has changed; return whether it had.

        After an update that failed it is handed out again: the ranks' staging gets new keys.

        Raises:
            UsageError: no rollout worker is there, or the two sides do not fit together.
            TepError: a training rank cannot be reached.
        """
        if not self.rollouts:
            raise UsageError("no rollout worker takes part; add() one")
        rerouted = self._changed
        if rerouted:
            await self._route()
        if rerouted or self._stale:
            answers = (self._ask(port.set_routing(self._encoded)) for port in self.trains)
            self._staging = list(await asyncio.gather(*answers))
        self._changed = self._stale = False
        return rerouted

    async def _route(self) -> None:
        if not self._train_metas:
            self._train_metas = [await self._ask(port.param_meta()) for port in self.trains]
        self.schedule = make_schedule(
            self._train_metas,
            list(self.metas.values()),
            watermark_bytes=self.watermark_bytes,
            bundle_bytes=self.bundle_bytes,
        )
        self._encoded = self.schedule.to_bytes()

    # ------------------------------------------------------------------ updates

    async def update(self, version: int) -> UpdateReport:
        """Bring all rollout workers to a version of the weights that the training ranks hold now.

        Never raises for a peer's fault: the report says how it ended for each. One that failed may
        be tried again at once: a rank learns of a peer's dead NIC by a row that does not arrive,
        and goes round it the next time.
        """
        if self._busy:
            raise UsageError("an update runs already")
        self._busy = True
        start_s = asyncio.get_running_loop().time()
        peers: list[PeerResult] = []
        reports: list[TrainReport] = []
        error, rerouted = "", False
        try:
            peers += await self.admit()
            rerouted = await self.prepare()
            reports = await self._try(version, peers)
        except FAULTS as found:
            error = _say(found)
        finally:
            self._busy = False
        if not error and not any(peer.outcome == "updated" for peer in peers):
            error = "no rollout worker has the version"
        if not error:
            self.version = version
        elapsed_s = asyncio.get_running_loop().time() - start_s
        return UpdateReport(
            version,
            self._attempt,
            not error,
            error,
            elapsed_s,
            tuple(peers),
            tuple(reports),
            rerouted,
        )

    async def _try(self, version: int, peers: list[PeerResult]) -> list[TrainReport]:
        """Run an update; add how it ended for each peer, also where it fails."""
        self._attempt += 1
        gone, regions = await self._begin(version)
        try:
            reports = await self._transfer(regions, tuple(gone))
        except FAULTS:
            self._stale = True
            peers += await self._abort(list(self.rollouts), version, gone)
            raise
        for report in reports:
            for name, why in report.lost.items():
                gone.setdefault(name, f"rank {report.rank}: {why}")
        peers += [PeerResult(f"rank {report.rank}", "sent") for report in reports]
        peers += await self._settle(version, gone)
        return reports

    async def _begin(self, version: int) -> tuple[dict[str, str], dict[str, bytes]]:
        """Have the rollout workers stop and count; why some are gone, and the others' regions."""
        assert self.schedule is not None
        nics = [meta.nics for meta in self._train_metas]
        counts = {
            name: count_data(self.schedule, k, nics, self.metas[name].nics)
            for k, name in enumerate(self.schedule.receivers)
        }
        answers = await self.ask_all(
            self.rollouts,
            lambda name, port: port.begin(self._attempt, version, counts[name]),
        )
        gone = {name: _say(one) for name, one in answers.items() if isinstance(one, Exception)}
        return gone, {name: one for name, one in answers.items() if isinstance(one, bytes)}

    async def _transfer(self, regions: dict[str, bytes], skip: Sequence[str]) -> list[TrainReport]:
        """Run all training ranks; the first that fails ends the others."""
        await asyncio.gather(
            *(self._ask(port.connect(self._staging, regions)) for port in self.trains)
        )
        running = [
            asyncio.ensure_future(port.transfer_weights(self._attempt, skip))
            for port in self.trains
        ]
        done, pending = await asyncio.wait(
            running, timeout=self.timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        failed = [task for task in running if task in done and task.exception() is not None]
        if not failed and not pending:
            return [task.result() for task in running]
        await self.ask_all(dict(enumerate(self.trains)), lambda _, port: port.abort())
        for task in pending:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if not failed:
            raise TimeoutError(f"{len(pending)} training ranks not through in {self.timeout_s} s")
        number = running.index(failed[0])
        error = failed[0].exception()
        assert error is not None
        if not isinstance(error, FAULTS):
            raise error
        raise TepError(f"training rank {number}: {_say(error)}") from error

    async def _settle(self, version: int, gone: Mapping[str, str]) -> list[PeerResult]:
        """Collect the rollout workers' ends; those that cannot end are aborted."""
        alive = {name: port for name, port in self.rollouts.items() if name not in gone}
        answers = await self.ask_all(alive, lambda _, port: port.finished(self.timeout_s))
        lost = dict(gone)
        for name, found in answers.items():
            if isinstance(found, Exception):
                lost[name] = _say(found)
        results = [PeerResult(name, "updated") for name in alive if name not in lost]
        return results + await self._abort(list(lost), version, lost)

    async def _abort(
        self, names: Sequence[str], version: int, lost: Mapping[str, str]
    ) -> list[PeerResult]:
        """End an update at rollout workers and say how each stands; those that are gone leave."""
        ports = {name: self.rollouts[name] for name in names}
        answers = await self.ask_all(ports, lambda _, port: port.abort())
        results = []
        for name, found in answers.items():
            why = lost.get(name, "")
            if isinstance(found, Exception):
                results.append(PeerResult(name, "lost", why or _say(found)))
                self._forget(name)
            elif (found.serving, found.attempt) == (version, self._attempt):
                results.append(PeerResult(name, "updated", "before the update was aborted"))
            elif why:
                results.append(PeerResult(name, "lost", f"{why}; it answers, and stays a member"))
            else:
                results.append(PeerResult(name, "aborted", _stands(found)))
        return results

    # ------------------------------------------------------------------ questions

    async def _ask(self, question: Awaitable[T]) -> T:
        return await asyncio.wait_for(question, self.timeout_s)

    async def ask_all(
        self, ports: Mapping[K, P], ask: Callable[[K, P], Awaitable[T]]
    ) -> dict[K, T | Exception]:
        """Ask many at once, in so much time each; a peer's fault is its answer."""

        async def one(key: K, port: P) -> T | Exception:
            try:
                return await self._ask(ask(key, port))
            except FAULTS as error:
                return error

        answers = await asyncio.gather(*(one(key, port) for key, port in ports.items()))
        return dict(zip(ports, answers))


def _stands(state: RolloutState) -> str:
    if state.serving is None:
        return "serves nothing until the next update"
    return f"serves version {state.serving} as before"


def _say(error: BaseException) -> str:
    """The first line of an error, with its kind."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
