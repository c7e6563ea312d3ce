"""The hub, at training rank 0: brings a version from all training ranks to all rollout ranks.

Rule 1: what rollout ranks want and what training ranks have is asked for again only when one of the
two has changed. Rule 2: a version is complete when every rollout rank has counted all of it; then,
and not before, each is told so. Rule 3: an update that fails is told to everybody who waits for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterable, Sequence
from typing import Final, Protocol, TypeVar

from tep import FabricError, TepError, UsageError
from tep.apps.rl import (
    Controller,
    MeshGroup,
    RemoteRollout,
    RemoteTraining,
    RolloutPort,
    TrainingPort,
    UpdateReport,
    mesh_groups,
)
from tep.integrations.weights.params import Param, wire_form
from tep.integrations.weights.sender import Held

__all__ = ["Hub", "ReceiverPort", "RemoteReceiver", "RemoteSender", "SenderPort"]

T = TypeVar("T")

_FAULTS: Final = (TepError, OSError, TimeoutError)
_ITEM_MAX: Final = 4  # bytes of the widest dtype that travels
_ROOM_BYTES: Final = 1 << 16  # scales and padding


class SenderPort(TrainingPort, Protocol):
    """A training rank as the hub drives it."""

    async def held(self, version: int) -> Held:
        """Wait until it has a version; what there is of it."""

    async def plan(self, groups: tuple[MeshGroup, ...]) -> None:
        """Take the mesh groups."""

    async def ended(self, why: str) -> None:
        """The update is over; why it failed, or ""."""


class ReceiverPort(RolloutPort, Protocol):
    """A rollout rank as the hub drives it."""

    async def welcome(self) -> None:
        """The hub knows it."""

    async def describe(self, params: tuple[Param, ...]) -> None:
        """Get ready for these parameters."""

    async def complete(self, version: int) -> None:
        """All ranks have all of a version."""

    async def failed(self, version: int, why: str) -> None:
        """An update has failed."""


class RemoteSender(RemoteTraining):
    """A training rank in another process."""

    async def held(self, version: int) -> Held:
        return await self.caller.call(Held, "held", version)

    async def plan(self, groups: tuple[MeshGroup, ...]) -> None:
        await self.caller.call(object, "plan", groups)

    async def ended(self, why: str) -> None:
        await self.caller.call(object, "ended", why)


class RemoteReceiver(RemoteRollout):
    """A rollout rank in another process."""

    async def welcome(self) -> None:
        await self.caller.call(object, "welcome")

    async def describe(self, params: tuple[Param, ...]) -> None:
        await self.caller.call(object, "describe", params)

    async def complete(self, version: int) -> None:
        await self.caller.call(object, "complete", version)

    async def failed(self, version: int, why: str) -> None:
        await self.caller.call(object, "failed", version, why)


class Hub:
    """Drives updates between senders and receivers.

    Args:
        senders: the training ranks, in rank order.
        timeout_s: of an update, and of each question.
        watermark_bytes: temporary memory of a training rank; more where a parameter needs more.
        bundle_bytes: small parameters share a task up to this.
    """

    def __init__(
        self,
        senders: Sequence[SenderPort],
        *,
        timeout_s: float = 300.0,
        watermark_bytes: int = 64 << 20,
        bundle_bytes: int = 4 << 20,
    ) -> None:
        self._senders = list(senders)
        self._receivers: dict[str, ReceiverPort] = {}
        self._new: dict[str, ReceiverPort] = {}
        self._held: list[Held] = []
        self._timeout_s = timeout_s
        self._watermark_bytes = watermark_bytes
        self._controller = Controller(
            self._senders,
            watermark_bytes=watermark_bytes,
            bundle_bytes=bundle_bytes,
            timeout_s=timeout_s,
        )

    @property
    def senders(self) -> tuple[SenderPort, ...]:
        """The training ranks, in rank order."""
        return tuple(self._senders)

    def add_sender(self, sender: SenderPort) -> None:
        """Have another training rank take part; its rank is the next one."""
        self._senders.append(sender)
        self._controller.append(sender)
        self._held = []

    @property
    def receivers(self) -> tuple[str, ...]:
        """Names of the rollout ranks that the next update is for."""
        return tuple(self._receivers | self._new)

    async def add(self, name: str, receiver: ReceiverPort) -> None:
        """Have a rollout rank take part from the next update on; one of its name is replaced."""
        self._new[name] = receiver
        await receiver.welcome()

    def keep(self, names: Sequence[str]) -> None:
        """Leave out all rollout ranks but these."""
        for name in set(self.receivers) - set(names):
            self._new.pop(name, None)
            self._leave(name)

    def _leave(self, name: str) -> None:
        if self._receivers.pop(name, None) is not None and name in self._controller.members:
            self._controller.remove(name)

    async def update(self, version: int) -> UpdateReport:
        """Bring a version, which every training rank sends, to every rollout rank.

        Raises:
            TepError: not every rollout rank has it; none is told that it may load it.
        """
        try:
            await self._prepare(version)
            report = await self._controller.update(version)
            self._check(report)
        except _FAULTS as error:
            why = f"version {version} failed: {type(error).__name__}: {error}"
            await self._tell_all(version, why)
            raise FabricError(why, code="UPDATE_FAILED") from error
        why = await self._complete(version)
        await self._tell(sender.ended(why) for sender in self._senders)
        if why:
            raise FabricError(why, code="UPDATE_FAILED")
        return report

    async def _complete(self, version: int) -> str:
        """Tell all rollout ranks that they may load a version; why one was not told, or ""."""
        told = {name: one.complete(version) for name, one in self._receivers.items()}
        answers = dict(zip(told, await self._tell(told.values()), strict=True))
        lost = {name: one for name, one in answers.items() if isinstance(one, BaseException)}
        for name in lost:
            self._leave(name)
        said = [f"{name}: {type(one).__name__}: {one}" for name, one in lost.items()]
        return f"version {version} is in use, but not here: {'; '.join(said)}" if said else ""

    def _check(self, report: UpdateReport) -> None:
        missing = [name for name in self._receivers if report.outcome(name) != "updated"]
        for name in missing:
            if name not in self._controller.members:
                self._receivers.pop(name)  # it is gone; the others may go on without it
        if missing or not report.ok:
            lines = " | ".join(report.table().splitlines())
            raise TepError(f"{report.error or 'not all rollout ranks have it'}: {lines}")

    async def _tell_all(self, version: int, why: str) -> None:
        """Tell everybody that it failed; who is gone need not know."""
        told = [receiver.failed(version, why) for receiver in self._receivers.values()]
        told += [receiver.failed(version, why) for receiver in self._new.values()]
        told += [sender.ended(why) for sender in self._senders]
        await self._tell(told)

    async def _tell(self, told: Iterable[Awaitable[object]]) -> list[object]:
        """Tell many at once; who is gone is told nothing, and keeps nobody from being told."""

        async def one(telling: Awaitable[object]) -> object:
            return await asyncio.wait_for(telling, self._timeout_s)

        return list(await asyncio.gather(*map(one, told), return_exceptions=True))

    async def _all(self, questions: Iterable[Awaitable[T]]) -> list[T]:
        """Ask many at once."""
        return await asyncio.wait_for(asyncio.gather(*questions), self._timeout_s)

    # ------------------------------------------------------------------ before an update

    async def _prepare(self, version: int) -> None:
        """Describe the weights to who does not know them, and plan what has changed."""
        if not self.receivers:
            raise UsageError("no rollout rank takes part; each connects to the hub first")
        held = await self._all(sender.held(version) for sender in self._senders)
        changed = held != self._held
        if changed:
            self._new = self._receivers | self._new
        if not self._new:
            return
        params = _same_params(held)
        if not params:
            raise UsageError("the weights are empty: no training rank was given a parameter")
        self._held = []  # until all of this is done
        await self._all(receiver.describe(params) for receiver in self._new.values())
        for name, receiver in self._new.items():
            self._receivers[name] = receiver
            self._controller.add(receiver)
        self._new = {}
        metas = [await receiver.param_meta() for receiver in self._receivers.values()]
        joined = [
            ([part.name for part in shard.parts], shard.scale_offset >= 0)
            for meta in metas
            for shard in meta.shards
        ]
        groups = mesh_groups([one.boxes for one in held], joined)
        await self._all(sender.plan(groups) for sender in self._senders)
        for rank, sender in enumerate(self._senders):
            self._controller.replace(rank, sender)
        # A task holds a tensor as its shards, as a whole and as what is made of it.
        largest = max(math.prod(wire_form(param)[1]) for param in params)
        self._controller.watermark_bytes = max(
            self._watermark_bytes, largest * _ITEM_MAX * 3 + _ROOM_BYTES
        )
        self._held = held


def _same_params(held: Sequence[Held]) -> tuple[Param, ...]:
    """The parameters of all ranks, in the order of the first that has each.

    Raises:
        UsageError: two ranks differ in what a parameter is.
    """
    found: dict[str, Param] = {}
    for rank, one in enumerate(held):
        for param in one.params:
            if found.setdefault(param.name, param) != param:
                raise UsageError(f"rank {rank} has {param}, another rank {found[param.name]}")
    return tuple(found.values())
