"""A disaggregated cluster of real processes on this machine: starts them, schedules, compares.

The launcher knows for certain when a process has ended, and fences it. `ranks` is the same for
processes that others have started.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from tep import BadDescriptor, FabricError, NetAddr, TepError
from tep.apps.kvcache.model import Completion, Request
from tep.apps.kvcache.pipes import (
    Done,
    Fenced,
    Generate,
    Leased,
    LeaseOver,
    Pipe,
    Ready,
    Stop,
    WantLease,
)
from tep.apps.kvcache.process import Settings
from tep.apps.kvcache.routing import Lease, PrefillerCard, Router
from tep.apps.kvcache.scheduler import Scheduler

__all__ = ["Cluster", "Role", "Shape", "Started"]

Role = Literal["prefiller", "decoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What to start.

    Attributes:
        prefillers, decoders: processes of each kind.
        prefill_tp, decode_tp: engines in each.
        backend, options: of tep.TransferEngine.open.
        npages: of each cache.
        seed: of the model's weights.
        silent_s: when a peer counts as silent; a shared machine can be slow.
        start_s: how long a process may take to start.
    """

    prefillers: int = 2
    decoders: int = 2
    prefill_tp: int = 1
    decode_tp: int = 1
    backend: str = "libfabric"
    options: Mapping[str, Any] = field(default_factory=lambda: {"provider": "tcp"})
    npages: int = 256
    seed: int = 0
    silent_s: float = 5.0
    start_s: float = 60.0

    @property
    def members(self) -> list[tuple[Role, str]]:
        """Role and name of each process."""
        members: list[tuple[Role, str]] = [("prefiller", f"p{k}") for k in range(self.prefillers)]
        return members + [("decoder", f"d{k}") for k in range(self.decoders)]

    def settings(self, role: Role, name: str) -> Settings:
        """What a process of this cluster is told."""
        return Settings(
            role,
            name,
            self.prefill_tp if role == "prefiller" else self.decode_tp,
            self.backend,
            dict(self.options),
            self.npages,
            self.seed,
            self.silent_s,
        )


class Started(Protocol):
    """A process, whoever has started it."""

    def kill(self) -> None:
        """End it, or at least have no more to do with it."""

    async def wait(self) -> object:
        """Its exit status, once its pipe has ended."""


@dataclass(slots=True, eq=False)
class _Child:
    """One process."""

    settings: Settings
    process: Started
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
        return self._child.settings.name

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


class Cluster:
    """Prefiller and decoder processes, and their scheduler. An async context manager.

    Args:
        shape: what to start.

    Attributes:
        scheduler: of the cluster.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.scheduler = Scheduler()
        self._children: dict[str, _Child] = {}
        self._asking: set[asyncio.Task[None]] = set()

    async def generate(
        self, prompts: Sequence[npt.NDArray[np.int32]], max_tokens: int
    ) -> list[Completion]:
        """See prompts through, all at once; completions in the order of the prompts."""
        requests = [
            Request(f"r{index}", len(ids), ids, max_tokens) for index, ids in enumerate(prompts)
        ]
        return list(await asyncio.gather(*map(self.scheduler.submit, requests)))

    def kill(self, name: str) -> None:
        """Kill a process, as a machine's failure would."""
        self._children[name].process.kill()

    async def add(self, role: Role, name: str) -> None:
        """Start one more process and have it join.

        Raises:
            FabricError: it did not start; its stderr says why.
        """
        shape = self.shape
        settings = shape.settings(role, name)
        process, pipe = await self._start(settings)
        ready: asyncio.Future[PrefillerCard] = asyncio.get_running_loop().create_future()
        child = _Child(settings, process, pipe, ready)
        self._children[name] = child
        child.task = asyncio.create_task(self._listen(child), name=f"pipe of {name}")
        try:
            card = await asyncio.wait_for(asyncio.shield(ready), shape.start_s)
        except TimeoutError:
            raise FabricError(f"{role} {name} did not start within {shape.start_s} s") from None
        if role == "prefiller":
            self.scheduler.join_prefiller(card)
        else:
            self.scheduler.join_decoder(_RemoteDecoder(child))

    async def _start(self, settings: Settings) -> tuple[Started, Pipe]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tep.apps.kvcache.process",
            msgspec.json.encode(settings).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        return process, Pipe(process.stdout, process.stdin)

    async def close(self) -> None:
        """Stop every process, decoders first; kill what does not go."""
        for role in ("decoder", "prefiller"):
            mine = [c for c in self._children.values() if c.settings.role == role]
            for child in mine:
                child.pipe.send(Stop())
            await asyncio.gather(*(self._end(child) for child in mine))

    async def _end(self, child: _Child) -> None:
        assert child.task is not None
        await asyncio.wait({child.task}, timeout=20.0)
        if not child.task.done():
            child.process.kill()
        await child.task

    async def _listen(self, child: _Child) -> None:
        """Take what a process says until it ends; then settle what it leaves behind."""
        who, pipe = f"{child.settings.role} {child.settings.name}", child.pipe
        try:
            await self._take_all(child)
        except BadDescriptor as error:
            pipe.lost = str(error)
            child.process.kill()
        code = await child.process.wait()
        how = f"was lost: {pipe.lost}" if pipe.lost else f"has ended, exit {code}"
        self._mourn(child, f"{who} {how}")

    async def _take_all(self, child: _Child) -> None:
        while (line := await child.pipe.receive()) is not None:
            match line:
                case Ready():
                    addr = NetAddr.from_bytes(line.addr)
                    child.ready.set_result(PrefillerCard(child.settings.name, line.epoch, addr))
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
        name = child.settings.name
        if not child.ready.done():
            child.ready.set_exception(FabricError(f"{what}, before it was ready"))
        elif child.pipe.lost:  # nobody knows whether it writes on: a fence would be a lie
            self.scheduler.leave_prefiller(name)
        elif child.settings.role == "prefiller" and child.ready.exception() is None:
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
            child.pipe.send(Leased(want.number, "", 0, b"", str(error)))
            return
        child.leases[want.number] = lease
        card = lease.card
        child.pipe.send(Leased(want.number, card.name, card.epoch, card.addr.to_bytes(), ""))

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            await asyncio.gather(*(self.add(*pair) for pair in self.shape.members))
            undo.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
