"""A simulated cluster of prefillers and decoders that join, leave, crash and restart. No workload.

It plays the part of whoever starts processes: it alone knows for certain that one is dead, and says
so to the scheduler (`fenced`) a while after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from tep import EngineOptions, TransferEngine
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.layout import KvLayout
from tep.apps.kvcache.memory import PagePool, SideOptions
from tep.apps.kvcache.model import Model
from tep.apps.kvcache.prefiller import Prefiller
from tep.apps.kvcache.scheduler import Scheduler
from tep.sim import ChaosFabric, FabricEnv, Profile, SimDriver, SimNode, run

__all__ = ["Fabric", "Member", "World"]

T = TypeVar("T")
Made = TypeVar("Made", Prefiller, Decoder)


class Fabric(Protocol):
    """Makes hosts: the chaos fabric with so many NICs, the others with their profile's."""

    @property
    def env(self) -> FabricEnv:
        """The clock."""


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
        layout, model: of all instances.
        prefiller, decoder: their settings.
        chunk_tokens: of the prefillers.
        nics: of every host, on the chaos fabric.
        fence_s: from a death to the certainty of it.
        decoder_options: more arguments of Decoder.
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
        layout: KvLayout,
        model: Model,
        *,
        prefiller: SideOptions,
        decoder: SideOptions,
        chunk_tokens: int,
        nics: int = 2,
        fence_s: float = 0.05,
        decoder_options: dict[str, Any] | None = None,
        scheduler: Scheduler | None = None,
        options: EngineOptions | None = None,
        decode_profile: Profile | str | None = None,
    ) -> None:
        self.fabric = fabric
        self.env: FabricEnv = fabric.env
        self.layout, self.model = layout, model
        self.scheduler = scheduler or Scheduler()
        self.members: dict[str, Member] = {}
        self.past: list[Member] = []
        self._sides = {"p": prefiller, "d": decoder}
        self._chunk_tokens = chunk_tokens
        self._nics = nics
        self._fence_s = fence_s
        self._options = options or EngineOptions()
        self._decoder_options = decoder_options or {}
        self._machines = {"d": decode_profile}
        self._fences: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ coming

    def add_prefiller(self, name: str, tp: int) -> Prefiller:
        """Start one and have it join."""
        nodes = [self._host(f"{name}.{rank}", "p") for rank in range(tp)]
        return self._start_prefiller(name, nodes)

    def add_decoder(self, name: str, tp: int) -> Decoder:
        """Start one and have it join."""
        nodes = [self._host(f"{name}.{rank}", "d") for rank in range(tp)]
        return self._start_decoder(name, nodes)

    def _host(self, name: str, side: str) -> SimNode:
        chaos = isinstance(self.fabric, ChaosFabric)
        node: SimNode = self.fabric.node(name, self._nics if chaos else self._machines.get(side))
        return node

    def _start_prefiller(self, name: str, nodes: Sequence[SimNode]) -> Prefiller:
        engines = [_engine(self.env, node, self._options) for node in nodes]

        def make(pool: PagePool) -> Prefiller:
            return Prefiller(
                name,
                engines,
                self.layout,
                self.model,
                self._sides["p"],
                chunk_tokens=self._chunk_tokens,
                pool=pool,
            )

        side = self._enrol(make, engines, self._sides["p"].npages)
        self.scheduler.join_prefiller(side.card)
        return side

    def _start_decoder(self, name: str, nodes: Sequence[SimNode]) -> Decoder:
        engines = [_engine(self.env, node, self._options) for node in nodes]

        def make(pool: PagePool) -> Decoder:
            return Decoder(
                name,
                engines,
                self.layout,
                self.model,
                self._sides["d"],
                pool=pool,
                **self._decoder_options,
            )

        side = self._enrol(make, engines, self._sides["d"].npages)
        self.scheduler.join_decoder(side)
        return side

    def _enrol(
        self, make: Callable[[PagePool], Made], engines: list[TransferEngine], npages: int
    ) -> Made:
        side = make(PagePool(npages))
        self.members[side.name] = Member(side, engines)
        return side

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
        if isinstance(self.fabric, ChaosFabric):
            nodes: list[SimNode] = [self.fabric.restart(engine.name) for engine in member.engines]
            self._die(member)
        else:
            self._die(member)
            side = "p" if isinstance(member.side, Prefiller) else "d"
            nodes = [self._host(engine.name, side) for engine in member.engines]
        self.past.append(member)
        if isinstance(member.side, Prefiller):
            self._start_prefiller(name, nodes)
        else:
            self._start_decoder(name, nodes)

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


def _engine(env: FabricEnv, node: SimNode, options: EngineOptions) -> TransferEngine:
    return TransferEngine(
        node.domains,
        driver=SimDriver(env, node),
        name=node.name,
        epoch=node.epoch,
        options=options,
    )
