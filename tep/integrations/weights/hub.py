"""The hub, at training rank 0: the controller of `tep.apps.rl`, for weights that nobody planned.

Before an update it asks what the training ranks were given and describes that to the rollout ranks;
after it, it says whether the version may be loaded. Rule 1: both sides are asked again only when
one of them has changed. Rule 2: a version is complete when every rollout rank has counted all of
it; then, and not before, each is told. Rule 3: an update that fails is told to all who wait for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import replace
from types import NoneType
from typing import Final, TypeAlias, TypeVar

from tep import FabricError, TepError, UsageError
from tep.apps.rl import (
    FAULTS,
    Controller,
    RemoteRollout,
    RemoteTraining,
    RolloutMeta,
    UpdateReport,
    mesh_groups,
)
from tep.base.units import MiB
from tep.integrations.weights.ranks import Held, Param, WeightReceiver, WeightSender, wire_form
from tep.rendezvous.calls import Call

__all__ = ["Hub", "RemoteReceiver", "RemoteSender"]

T = TypeVar("T")

_ITEM_MAX: Final = 4  # bytes of the widest dtype that travels
_ROOM_BYTES: Final = 1 << 16  # scales and padding
_BUNDLE_BYTES: Final = 4 * MiB
_WATERMARK_BYTES: Final = 64 * MiB  # more where a parameter needs more


class RemoteSender(RemoteTraining):
    """A WeightSender in another process."""

    held = Call(Held)
    ended = Call(NoneType)


class RemoteReceiver(RemoteRollout):
    """A WeightReceiver in another process."""

    welcome = Call(NoneType)
    describe = Call(RolloutMeta)
    ended = Call(NoneType)


SenderPort: TypeAlias = WeightSender | RemoteSender
ReceiverPort: TypeAlias = WeightReceiver | RemoteReceiver


class Hub(Controller[SenderPort, ReceiverPort]):
    """Drives updates from senders, in rank order; `timeout_s` is of an update and each question."""

    def __init__(self, senders: Sequence[SenderPort], *, timeout_s: float = 300.0) -> None:
        super().__init__(senders, bundle_bytes=_BUNDLE_BYTES, timeout_s=timeout_s)
        self._new: dict[str, ReceiverPort] = {}
        self._held: list[Held] = []

    @property
    def receivers(self) -> tuple[str, ...]:
        """Names of the rollout ranks that the next update is for."""
        return tuple(self.rollouts | self._new)

    async def welcome(self, name: str, receiver: ReceiverPort) -> None:
        """Have a rollout rank take part from the next update on; one of its name is replaced."""
        self._new[name] = receiver
        await receiver.welcome()

    def keep(self, names: Sequence[str]) -> None:
        """Leave out all rollout ranks but these."""
        for name in set(self.receivers) - set(names):
            self._new.pop(name, None)
            if name in self.rollouts:
                self.remove(name)

    async def update(self, version: int) -> UpdateReport:
        """Bring a version, which every training rank sends, to every rollout rank.

        Raises:
            TepError: not every rollout rank has it; none is told that it may load it.
        """
        try:
            await self._describe(version)
            expected = tuple(self.rollouts)
            report = await super().update(version)
            if not report.ok or any(report.outcome(name) != "updated" for name in expected):
                lines = " | ".join(report.table().splitlines())
                raise TepError(f"{report.error or 'not all rollout ranks have it'}: {lines}")
        except FAULTS as error:
            why = f"version {version} failed: {type(error).__name__}: {error}"
            await self._end(version, why)
            raise FabricError(why, code="UPDATE_FAILED") from error
        if why := await self._end(version):
            raise FabricError(why, code="UPDATE_FAILED")
        return report

    async def _end(self, version: int, why: str = "") -> str:
        """Tell all ranks how an update ended; return why not all of them have its version."""
        told = self.rollouts | self._new if why else self.rollouts
        answers = await self.ask_all(told, lambda _, port: port.ended(version, why))
        lost = {name: one for name, one in answers.items() if isinstance(one, Exception)}
        if lost and not why:
            for name in lost:
                self.remove(name)
            said = "; ".join(f"{name}: {type(one).__name__}: {one}" for name, one in lost.items())
            why = f"version {version} is in use, but not here: {said}"
        await self.ask_all(dict(enumerate(self.trains)), lambda _, port: port.ended(version, why))
        return why

    async def _describe(self, version: int) -> None:
        """Describe the weights to whoever does not know them, and plan what has changed."""
        if not self.receivers:
            raise UsageError("no rollout rank takes part; each connects to the hub first")
        held = await self._all(sender.held(version) for sender in self.trains)
        if held != self._held:
            self._new = self.rollouts | self._new
        if not self._new:
            return
        params = _same_params(held)
        if not params:
            raise UsageError("the weights are empty: no training rank was given a parameter")
        new = dict(self._new)
        metas = await self._all(receiver.describe(params) for receiver in new.values())
        for (name, receiver), meta in zip(new.items(), metas):
            self._take(receiver, replace(meta, name=name))  # a connection speaks for one rank
        joined = [
            ([part.name for part in shard.parts], len(shard.offsets) > 1)
            for meta in self.metas.values()
            for shard in meta.shards
        ]
        groups = mesh_groups([one.boxes for one in held], joined)
        self._train_metas = [one.meta(rank, groups) for rank, one in enumerate(held)]
        self._changed = True
        # A task holds a tensor as its shards, as a whole and as what is made of it.
        largest = max(math.prod(wire_form(param)[1]) for param in params)
        self.watermark_bytes = max(_WATERMARK_BYTES, largest * _ITEM_MAX * 3 + _ROOM_BYTES)
        self._held = held
        self._new = {name: one for name, one in self._new.items() if one is not new.get(name)}

    async def _all(self, questions: Iterable[Awaitable[T]]) -> list[T]:
        """Ask many at once; the first that fails ends it."""
        return await asyncio.wait_for(asyncio.gather(*questions), self.timeout_s)


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
