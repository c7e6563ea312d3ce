"""The launcher of a cluster of real processes: admits its members, schedules, settles deaths.

The members are ranks that torchrun, srun or Ray has started on any machines (`RankedCluster`), or
processes that the launcher starts here (`Cluster`). A connection that the other host closes proves
that the process has let go of its engines: it is fenced. One that times out proves nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from tep import BadDescriptor, FabricError, NetAddr, TepError, UsageError
from tep.apps.kvcache.model import Completion, Request
from tep.apps.kvcache.pipes import (
    SERVICE,
    Done,
    Fenced,
    Generate,
    Leased,
    LeaseOver,
    Pipe,
    Ready,
    Stop,
    WantLease,
    keep_alive,
)
from tep.apps.kvcache.process import Role, Shape, check_size
from tep.apps.kvcache.scheduler import Lease, PrefillerCard, Router, Scheduler
from tep.rendezvous import Place
from tep.rendezvous.door import Door, listen
from tep.rendezvous.launch import RankProcesses
from tep.rendezvous.proof import challenge, refuse, welcome
from tep.rendezvous.wire import Peer

__all__ = ["Cluster", "RankedCluster"]

_END_S: Final = 20.0


@dataclass(slots=True, eq=False)
class _Child:
    """One member."""

    role: Role
    name: str
    pipe: Pipe
    ready: asyncio.Future[PrefillerCard]
    task: asyncio.Task[None] | None = None
    pending: dict[str, asyncio.Future[Completion]] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)


class _RemoteDecoder:
    """A decoder in another process, as the scheduler sees it."""

    def __init__(self, child: _Child) -> None:
        self._child = child

    @property
    def name(self) -> str:
        return self._child.name

    async def generate(
        self,
        request: Request,
        router: Router,  # noqa: ARG002  # the launcher's own is asked
    ) -> Completion:
        assert request.input_ids is not None, "processes compute for real"
        place: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._child.pending[request.name] = place
        ids = tuple(request.input_ids.tolist())
        self._child.pipe.send(Generate(request.name, ids, request.max_tokens))
        try:
            return await place
        finally:
            self._child.pending.pop(request.name, None)

    def fenced(self, prefiller: str, epoch: int) -> None:
        self._child.pipe.send(Fenced(prefiller, epoch))


class RankedCluster:
    """Rank 0 of a cluster whose processes others have started. An async context manager.

    Args:
        shape: what was started.
        place: of this process: rank 0 of as many as there are members, and itself.

    Attributes:
        shape, scheduler: of the cluster.
        port: where members connect.

    Raises:
        UsageError: another number of processes was started, or this is another rank.
    """

    def __init__(self, shape: Shape, place: Place) -> None:
        check_size(shape, place)
        if place.rank:
            raise UsageError(f"rank {place.rank} is a member, not the launcher: work_as_rank")
        self.shape = shape
        self.scheduler = Scheduler()
        self.port = place.port
        self._place = place
        self._children: dict[str, _Child] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._came: dict[str, asyncio.Future[Pipe]] = {}
        self._door: Door | None = None

    async def generate(
        self, prompts: Sequence[npt.NDArray[np.int32]], max_tokens: int
    ) -> list[Completion]:
        """See prompts through, all at once; completions in the order of the prompts."""
        requests = [
            Request(f"r{index}", len(ids), ids, max_tokens) for index, ids in enumerate(prompts)
        ]
        return list(await asyncio.gather(*map(self.scheduler.submit, requests)))

    async def kill(self, name: str) -> None:
        """Not from here: whoever has started a process can kill it.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{name} was started by another program; kill its process on its host")

    # ------------------------------------------------------------------ coming and going

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._came = {name: loop.create_future() for _, name in self.shape.members}
        try:
            sockets = await listen(self._place.host, self._place.port)
        except OSError as error:
            raise FabricError(f"the launcher cannot listen at {self._place}: {error}") from error
        self.port = sockets[0].getsockname()[1]
        self._door = Door(sockets, self._admit)
        try:
            await self._start()
            await asyncio.gather(*(self._add(*pair) for pair in self.shape.members))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _start(self) -> None:
        """Start the members, where that is the launcher's business."""

    async def _gone(self, name: str) -> object:
        """Wait for the end of a process whose connection has ended; return its exit status."""
        self._children[name].pipe.hang_up()
        return "unknown"

    async def close(self) -> None:
        """Stop every member, decoders first; hang up on those that do not go."""
        for role in ("decoder", "prefiller"):
            mine = [one for one in self._children.values() if one.role == role]
            for child in mine:
                child.pipe.send(Stop())
            await asyncio.gather(*(self._end(child) for child in mine))
        if self._door is not None:
            await self._door.close()
        for came in self._came.values():
            if came.done() and not came.cancelled():
                came.result().hang_up()

    async def _end(self, child: _Child) -> None:
        assert child.task is not None
        await asyncio.wait({child.task}, timeout=_END_S)
        if not child.task.done():
            child.pipe.hang_up()
        await child.task

    async def _admit(self, peer: Peer) -> None:
        """Let a member in that is awaited."""
        asked = await challenge(peer, self._place.token)
        match asked.who:
            case (str(service), str(name)) if service == SERVICE:
                place = self._came.get(name)
            case _:
                place = None
        if place is None or place.done():
            await refuse(peer, f"{asked.who} is not awaited, or is here already")
        reader, writer = peer.streams()
        keep_alive(writer)
        place.set_result(Pipe(reader, writer))
        await welcome(peer, self._place.token, asked)

    async def _add(self, role: Role, name: str) -> None:
        """Wait until a member has come and is ready; have it join."""
        start_s = self.shape.start_s
        try:
            pipe = await asyncio.wait_for(self._came[name], start_s)
        except TimeoutError:
            raise FabricError(f"{name} has not come within {start_s:g} s", peer=name) from None
        ready: asyncio.Future[PrefillerCard] = asyncio.get_running_loop().create_future()
        child = self._children[name] = _Child(role, name, pipe, ready)
        child.task = asyncio.create_task(self._listen(child), name=f"pipe of {name}")
        try:
            card = await asyncio.wait_for(asyncio.shield(ready), start_s)
        except TimeoutError:
            raise FabricError(f"{role} {name} did not start within {start_s} s") from None
        if role == "prefiller":
            self.scheduler.join_prefiller(card)
        else:
            self.scheduler.join_decoder(_RemoteDecoder(child))

    # ------------------------------------------------------------------ what members say

    async def _listen(self, child: _Child) -> None:
        """Take what a member says until it ends; then settle what it leaves behind."""
        pipe = child.pipe
        try:
            await self._take_all(child)
        except BadDescriptor as error:
            pipe.lost = str(error)
            pipe.hang_up()
        code = await self._gone(child.name)
        how = f"was lost: {pipe.lost}" if pipe.lost else f"has ended, exit {code}"
        self._mourn(child, f"{child.role} {child.name} {how}")

    async def _take_all(self, child: _Child) -> None:
        while (line := await child.pipe.receive()) is not None:
            match line:
                case Ready():
                    addrs = tuple(NetAddr.from_bytes(raw) for raw in line.addrs)
                    child.ready.set_result(PrefillerCard(child.name, addrs))
                case Done():
                    self._take_done(child, line)
                case WantLease():
                    task = asyncio.create_task(self._lease(child, line))
                    self._asking.add(task)
                    task.add_done_callback(self._asking.discard)
                case LeaseOver():
                    lease = child.leases.pop(line.number, None)
                    if lease is not None:
                        lease.close(line.failure)
                case _:
                    pass

    def _take_done(self, child: _Child, line: Done) -> None:
        place = child.pending.get(line.name)
        if place is not None and not place.done():
            told = (line.reason, line.attempts, line.prefiller, line.ttft_s, line.pages_sent)
            place.set_result(Completion(line.name, line.tokens, *told))

    def _mourn(self, child: _Child, what: str) -> None:
        name = child.name
        if not child.ready.done():
            child.ready.set_exception(FabricError(f"{what}, before it was ready"))
        elif child.pipe.lost:  # nobody knows whether it writes on: a fence would be a lie
            self.scheduler.leave_prefiller(name)
        elif child.role == "prefiller" and child.ready.exception() is None:
            self.scheduler.fenced(name, child.ready.result().epoch)
        self.scheduler.leave_decoder(name)
        for lease in child.leases.values():
            lease.close()
        for request, place in child.pending.items():
            if not place.done():
                place.set_result(Completion(request, None, what))

    async def _lease(self, child: _Child, want: WantLease) -> None:
        try:
            lease = await self.scheduler.lease(Request(want.name, want.ntokens), want.exclude)
        except TepError as error:
            child.pipe.send(Leased(want.number, "", (), str(error)))
            return
        child.leases[want.number] = lease
        addrs = tuple(addr.to_bytes() for addr in lease.card.addrs)
        child.pipe.send(Leased(want.number, lease.card.name, addrs, ""))


class Cluster(RankedCluster):
    """A cluster whose members are processes of this host; it starts them.

    Args:
        shape: what to start.
    """

    def __init__(self, shape: Shape) -> None:
        size = 1 + len(shape.members)
        super().__init__(shape, Place(rank=0, size=size, token=secrets.token_hex(16)))
        self._ranks = {name: rank for rank, (_, name) in enumerate(shape.members, 1)}
        self._folder = tempfile.TemporaryDirectory(prefix="tep-kvcache-")
        self._processes: RankProcesses | None = None

    async def _start(self) -> None:
        place = dataclasses.replace(self._place, port=self.port)
        processes = self._processes = RankProcesses(place, self._folder.name)
        shape = msgspec.json.encode(self.shape).decode()
        command = (sys.executable, "-m", "tep.apps.kvcache.process", shape)
        await asyncio.gather(*(processes.start(rank, command) for rank in self._ranks.values()))

    async def _add(self, role: Role, name: str) -> None:
        """Wait for a member, or for its end."""
        assert self._processes is not None
        rank = self._ranks[name]
        ended = asyncio.ensure_future(self._processes.ended(rank))
        joined = asyncio.ensure_future(super()._add(role, name))
        await asyncio.wait({ended, joined}, return_when=asyncio.FIRST_COMPLETED)
        if not joined.done():
            joined.cancel()
            words = self._processes.last_words(rank)
            raise FabricError(f"{role} {name} has ended, exit {ended.result()}:\n{words}")
        ended.cancel()
        joined.result()

    async def kill(self, name: str) -> None:
        """Kill a process, as a machine's failure would."""
        assert self._processes is not None
        await self._processes.kill(self._ranks[name])

    async def _gone(self, name: str) -> object:
        assert self._processes is not None
        return await self._processes.ended(self._ranks[name])

    async def close(self) -> None:
        """Stop every process, decoders first; kill those that do not go."""
        await super().close()
        if self._processes is not None:
            await self._processes.close()
        self._folder.cleanup()
