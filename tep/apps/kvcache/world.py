"""A simulated cluster of prefillers and decoders that join, leave, crash and restart. No workload.

It plays the part of whoever starts processes: it alone knows for certain that one is dead, and says
so to the scheduler (`fenced`) a while after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from tep import EngineOptions, TransferEngine
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.memory import SideOptions
from tep.apps.kvcache.model import Model
from tep.apps.kvcache.prefiller import Prefiller
from tep.apps.kvcache.scheduler import Scheduler
from tep.sim import ChaosFabric, FabricEnv, Profile, SimDriver, SimNode, run

__all__ = ["Member", "World"]

T = TypeVar("T")
Made = TypeVar("Made", Prefiller, Decoder)


@dataclass(slots=True)
class Member:
    """One incarnation of one instance.

    Attributes:
        side: the prefiller or decoder.
        engines: one a rank.
        alive: whether it runs.
        maimed: ranks whose engine has lost a NIC.
    """

    side: Prefiller | Decoder
    engines: list[TransferEngine]
    alive: bool = True
    maimed: set[int] = field(default_factory=set)


class World:
    """Instances on one fabric, and their scheduler. Use it inside `run`, as a context manager.

    Args:
        fabric: where hosts are made.
        model: of all instances.
        side: their settings.
        nics: of every host, on the chaos fabric.
        fence_s: from a death to the certainty of it.
        options: of every engine.
        decode_profile: the decoders' machine, one of a fabric that has several.

    Attributes:
        env: the clock.
        scheduler: of the world.
        members: name -> its newest incarnation.
        past: incarnations that were replaced or have left.
    """

    def __init__(
        self,
        fabric: Any,
        model: Model,
        side: SideOptions,
        *,
        nics: int = 2,
        fence_s: float = 0.05,
        scheduler: Scheduler | None = None,
        options: EngineOptions | None = None,
        decode_profile: Profile | str | None = None,
    ) -> None:
        self.fabric = fabric
        self.env: FabricEnv = fabric.env
        self.model = model
        self.scheduler = scheduler or Scheduler()
        self.members: dict[str, Member] = {}
        self.past: list[Member] = []
        self._side = side
        self._nics = nics
        self._fence_s = fence_s
        self._options = options or EngineOptions()
        self._decode_profile = decode_profile
        self._fences: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ coming

    def add_prefiller(self, name: str, tp: int) -> Prefiller:
        """Start one and have it join."""
        return self._start_prefiller(name, self._hosts([f"{name}.{k}" for k in range(tp)], None))

    def add_decoder(self, name: str, tp: int) -> Decoder:
        """Start one and have it join."""
        names = [f"{name}.{k}" for k in range(tp)]
        return self._start_decoder(name, self._hosts(names, self._decode_profile))

    def _hosts(self, names: Sequence[str], profile: Profile | str | None) -> list[SimNode]:
        what = self._nics if isinstance(self.fabric, ChaosFabric) else profile
        return [self.fabric.node(name, what) for name in names]

    def _start_prefiller(self, name: str, nodes: Sequence[SimNode]) -> Prefiller:
        side = Prefiller(name, self._engines(nodes), self.model, self._side)
        self.enrol(side)
        self.scheduler.join_prefiller(side.card)
        return side

    def _start_decoder(self, name: str, nodes: Sequence[SimNode]) -> Decoder:
        side = Decoder(name, self._engines(nodes), self.model, self._side)
        self.enrol(side)
        self.scheduler.join_decoder(side)
        return side

    def _engines(self, nodes: Sequence[SimNode]) -> list[TransferEngine]:
        return [
            TransferEngine(
                node.domains,
                driver=SimDriver(self.env, node),
                name=node.name,
                epoch=node.epoch,
                options=self._options,
            )
            for node in nodes
        ]

    def enrol(self, side: Prefiller | Decoder) -> None:
        """Count an instance among the members, before it joins."""
        self.members[side.name] = Member(side, list(side.memory.engines))

    # ------------------------------------------------------------------ going

    async def retire(self, name: str) -> None:
        """Have an instance leave in good order: what it has under way is finished first."""
        member = self.members[name]
        if isinstance(member.side, Prefiller):
            self.scheduler.leave_prefiller(name)
            await member.side.leave()
        else:
            self.scheduler.leave_decoder(name)
            await member.side.drained()
        self._end(member)
        if isinstance(member.side, Prefiller):
            self._certify(member.side)
        if self.members.get(name) is member:
            del self.members[name]
        self.past.append(member)

    def crash(self, name: str) -> None:
        """Pull the plug of an instance, on the chaos fabric all at once. It does not come back."""
        member = self.members[name]
        if isinstance(self.fabric, ChaosFabric):
            for engine in member.engines:
                self.fabric.crash(engine.name)
        self._die(member)

    def restart(self, name: str) -> None:
        """Crash an instance and start it again at once: same name, later epoch, empty cache."""
        member = self.members[name]
        names = [engine.name for engine in member.engines]
        chaos, prefills = isinstance(self.fabric, ChaosFabric), isinstance(member.side, Prefiller)
        nodes = [self.fabric.restart(one) for one in names] if chaos else []
        self._die(member)
        if not chaos:
            nodes = self._hosts(names, None if prefills else self._decode_profile)
        self.past.append(member)
        (self._start_prefiller if prefills else self._start_decoder)(name, nodes)

    def kill_nic(self, name: str, rank: int, nic: int) -> None:
        """Kill one NIC of an instance for good, on the chaos fabric."""
        member = self.members[name]
        member.maimed.add(rank)
        self.fabric.kill_nic(member.engines[rank].name, nic)

    def _die(self, member: Member) -> None:
        name = member.side.name
        self._end(member)
        if isinstance(member.side, Prefiller):
            self.scheduler.leave_prefiller(name)
            self._certify(member.side)
        else:
            self.scheduler.leave_decoder(name)

    def _certify(self, dead: Prefiller) -> None:
        task = asyncio.get_running_loop().create_task(self._fence(dead))
        self._fences.add(task)
        task.add_done_callback(self._fences.discard)

    async def _fence(self, dead: Prefiller) -> None:
        await asyncio.sleep(self._fence_s)
        self.scheduler.fenced(dead.name, dead.card.epoch)
        for member in self.members.values():  # also those that take no new requests
            if isinstance(member.side, Decoder):
                member.side.fenced(dead.name, dead.card.epoch)

    def _end(self, member: Member) -> None:
        member.alive = False
        member.side.close()
        for engine in member.engines:
            engine.close()

    # ------------------------------------------------------------------ all of it

    @property
    def everybody(self) -> list[Member]:
        """All incarnations there ever were."""
        return [*self.past, *self.members.values()]

    def alive(self, kind: type[Made]) -> list[Made]:
        """The instances of one kind that run."""
        return [m.side for m in self.members.values() if m.alive and isinstance(m.side, kind)]

    async def settled(self) -> None:
        """Return when every fence is up and every end is confirmed."""
        while self._fences:
            await asyncio.wait(tuple(self._fences))
        for decoder in self.alive(Decoder):
            await decoder.settled()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this world's simulated time."""
        return run(main, self.env)

    def close(self) -> None:
        """End everything. Idempotent."""
        for member in self.members.values():
            if member.alive:
                self._end(member)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
