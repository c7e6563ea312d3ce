"""A cluster of real processes: a launcher at rank 0, then the prefillers, then the decoders.

The members are ranks that torchrun, srun or Ray has started on any machines (`RankedCluster` and
`work_as_rank`), or processes that the launcher starts here (`Cluster`), each as `python -m
tep.apps.kvcache.cluster SHAPE`, where SHAPE is a JSON document. Launcher and members call each
other's methods over `tep.rendezvous.calls`; members speak to their peers over the engine. A
connection that the other host closes proves that the process has let go of its engines: it is
fenced. One that times out proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt

from tep import FabricError, TepError, TransferEngine, UsageError
from tep.apps.kvcache.blocks import Patience
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.memory import SideOptions
from tep.apps.kvcache.model import Completion, Request
from tep.apps.kvcache.prefiller import Prefiller
from tep.apps.kvcache.scheduler import PrefillerCard, Scheduler
from tep.apps.kvcache.toy import ToyModel
from tep.rendezvous import Place
from tep.rendezvous.calls import Caller, Hello, Listener, connect
from tep.rendezvous.launch import RankProcesses, run_rank

__all__ = ["Cluster", "RankedCluster", "Role", "Shape", "main", "work_as_rank"]

Role = Literal["prefiller", "decoder"]

_CALL_S: Final = 60.0
_END_S: Final = 20.0


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cluster.

    Attributes:
        prefillers, decoders: processes of each kind.
        prefill_tp, decode_tp: engines in each; each has a worker thread.
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
    options: dict[str, Any] = msgspec.field(default_factory=lambda: {"provider": "tcp"})
    npages: int = 256
    seed: int = 0
    silent_s: float = 5.0
    start_s: float = 60.0

    @property
    def members(self) -> list[Hello]:
        """Role and name of each process, from rank 1 on."""
        members = [Hello("prefiller", f"p{k}") for k in range(self.prefillers)]
        return members + [Hello("decoder", f"d{k}") for k in range(self.decoders)]

    def check_size(self, place: Place) -> None:
        """Raise UsageError where another number of processes was started than a cluster takes."""
        wanted = 1 + len(self.members)
        if place.size != wanted:
            raise UsageError(
                f"{place.size} processes were started, and the cluster takes {wanted}: a launcher, "
                f"prefillers={self.prefillers}, decoders={self.decoders}"
            )


# ---------------------------------------------------------------------- a member


def work_as_rank(shape: Shape, place: Place) -> None:
    """Be one member of a cluster, by rank, until the launcher says stop.

    Raises:
        UsageError: rank 0, which is the launcher; or another number of processes was started.
        FabricError: the launcher is not there, or has hung up.
    """
    shape.check_size(place)
    if not place.rank:
        raise UsageError("rank 0 is the launcher: RankedCluster")
    asyncio.run(_work(shape, place))


async def _work(shape: Shape, place: Place) -> None:
    member = _Member(shape, *shape.members[place.rank - 1])
    what = f"{member.role} {member.name}: the launcher at {place}"
    hello = Hello(member.role, member.name)
    try:
        caller = await connect(
            member, place.host, place.port, place.token, hello, patience_s=_CALL_S
        )
    except TepError as error:
        raise FabricError(f"{what} is not there: {error}") from error
    caller.keep_alive()
    member.launcher = caller
    stopped = asyncio.ensure_future(member.stopped.wait())
    try:
        with member.engines:
            await asyncio.wait({stopped, caller.ended}, return_when=asyncio.FIRST_COMPLETED)
            await member.leave()
    finally:  # the end of the connection tells the launcher that the engines are closed
        stopped.cancel()
        await caller.close()
    if not member.stopped.is_set():
        raise FabricError(f"{what} hung up. {caller.lost or ''}".rstrip())


class _Member:
    """A prefiller or decoder, as the launcher calls it."""

    def __init__(self, shape: Shape, role: str, name: str) -> None:
        self.role, self.name = role, name
        self.engines = contextlib.ExitStack()
        self.stopped = asyncio.Event()
        self.launcher: Caller | None = None
        self._shape = shape
        self._prefiller: Prefiller | None = None
        self._decoder: Decoder | None = None

    async def start(self) -> PrefillerCard:
        """Open the engines, and return their addresses."""
        shape, model = self._shape, ToyModel(seed=self._shape.seed)
        side = SideOptions(
            npages=shape.npages,
            tail_bytes=model.tail_bytes,
            patience=Patience(beat_s=shape.silent_s / 10, silent_s=shape.silent_s),
        )
        prefills = self.role == "prefiller"
        engines = []
        for rank in range(shape.prefill_tp if prefills else shape.decode_tp):
            opened = TransferEngine.open(shape.backend, name=f"{self.name}.{rank}", **shape.options)
            engines.append(self.engines.enter_context(opened))
        if prefills:
            self._prefiller = Prefiller(self.name, engines, model, side)
        else:
            self._decoder = Decoder(self.name, engines, model, side)
        return PrefillerCard(self.name, tuple(one.main_address for one in engines))

    async def generate(
        self,
        number: int,
        name: str,
        input_ids: tuple[int, ...],
        max_tokens: int,
        prefiller: PrefillerCard,
    ) -> Completion:
        """See a prompt through; `number` is the launcher's own for it."""
        launcher = self.launcher
        if self._decoder is None or launcher is None:
            raise UsageError(f"{self.role} {self.name} decodes nothing")
        ids = np.array(input_ids, np.int32)
        request = Request(name, len(ids), ids, max_tokens)
        cached = partial(launcher.tell, "cached", number)
        return await self._decoder.generate(request, prefiller, cached)

    async def fenced(self, prefiller: str, epoch: int) -> None:
        """The process of this incarnation has ended."""
        if self._decoder is not None:
            self._decoder.fenced(prefiller, epoch)

    async def stop(self) -> None:
        """End in good order."""
        self.stopped.set()

    async def leave(self) -> None:
        if self._prefiller is not None:
            await self._prefiller.leave()
        if self._decoder is not None:
            self._decoder.close()


# ---------------------------------------------------------------------- the launcher


class _Child:
    """One member, as the launcher, its scheduler and the member itself see it.

    `over` is done when the member has ended and is settled, and says how it ended.
    """

    def __init__(self, caller: Caller) -> None:
        self.role, self.name = caller.hello
        self.caller = caller
        self.card: PrefillerCard | None = None
        self.over: asyncio.Task[str]
        self._cached: dict[int, Callable[[], object]] = {}
        self._numbers = itertools.count()  # of requests: names may come again
        caller.worker = self

    async def generate(
        self, request: Request, prefiller: PrefillerCard, cached: Callable[[], object]
    ) -> Completion:
        assert request.input_ids is not None, "processes compute for real"
        number = next(self._numbers)
        asked = (number, request.name, request.input_ids.tolist(), request.max_tokens, prefiller)
        self._cached[number] = cached
        try:
            return await self.caller.call(Completion, "generate", *asked)
        except FabricError as error:
            gone = error.code == "PEER_GONE"
            return Completion(request.name, None, await self.over if gone else str(error))
        finally:
            del self._cached[number]

    async def cached(self, number: int) -> None:
        """The member has the cache of a request, and decodes now."""
        self._cached.get(number, int)()

    def fenced(self, prefiller: str, epoch: int) -> None:
        self.caller.tell("fenced", prefiller, epoch)


class RankedCluster:
    """Rank 0 of a cluster whose processes others have started. An async context manager.

    Args:
        shape: what was started.
        place: of this process: rank 0 of as many as there are members, and itself.

    Raises:
        UsageError: another number of processes was started, or this is another rank.
    """

    def __init__(self, shape: Shape, place: Place) -> None:
        shape.check_size(place)
        if place.rank:
            raise UsageError(f"rank {place.rank} is a member, not the launcher: work_as_rank")
        self.shape = shape
        self.scheduler = Scheduler()
        self._place = place
        self._children: dict[str, _Child] = {}
        self._listener = Listener(place.token, place.host, place.port, shape.members)

    @property
    def port(self) -> int:
        """The port that members connect to."""
        return self._listener.port

    async def generate(
        self, prompts: Sequence[npt.NDArray[np.int32]], max_tokens: int
    ) -> list[Completion]:
        """See prompts through, all at once; completions in the order of the prompts."""
        requests = [
            Request(f"r{index}", len(ids), ids, max_tokens) for index, ids in enumerate(prompts)
        ]
        return list(await asyncio.gather(*map(self.scheduler.submit, requests)))

    # ------------------------------------------------------------------ coming and going

    async def __aenter__(self) -> Self:
        await self._listener.__aenter__()
        try:
            await self._start()
            await asyncio.gather(*(self._add(*member) for member in self.shape.members))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _start(self) -> None:
        """Start the members, where that is the launcher's business."""

    async def _status(self, name: str) -> object:  # noqa: ARG002  # Cluster asks for it
        """Wait for the end of a process whose connection has ended; return its exit status."""
        return "unknown"

    async def close(self) -> None:
        """Stop every member, decoders first; hang up on those that do not go."""
        for role in ("decoder", "prefiller"):
            mine = [one for one in self._children.values() if one.role == role]
            for child in mine:
                child.caller.tell("stop")
            await asyncio.gather(*map(self._end, mine))
        await self._listener.__aexit__()

    async def _end(self, child: _Child) -> None:
        await asyncio.wait({child.over}, timeout=_END_S)
        await child.caller.close()
        await child.over

    async def _add(self, role: str, name: str) -> None:
        """Wait until a member has come and is ready; have it join."""
        start_s = self.shape.start_s
        try:
            caller = await self._listener.wait_for(role, name, start_s)
        except TimeoutError:
            raise FabricError(f"{name} has not come within {start_s:g} s", peer=name) from None
        caller.keep_alive()
        child = self._children[name] = _Child(caller)
        child.over = asyncio.create_task(self._settle(child), name=f"end of {name}")
        try:
            card = await asyncio.wait_for(caller.call(PrefillerCard, "start"), start_s)
        except TimeoutError:
            raise FabricError(f"{role} {name} did not start within {start_s} s") from None
        if role == "prefiller":
            child.card = card
            self.scheduler.join_prefiller(card)
        else:
            self.scheduler.join_decoder(child)

    async def _settle(self, child: _Child) -> str:
        """Wait for the end of a member, and settle what it leaves behind; say how it ended."""
        name = child.name
        await asyncio.wait({child.caller.ended})
        status = await self._status(name)
        if child.card is not None and child.caller.lost is None:
            self.scheduler.fenced(name, child.card.epoch)
        self.scheduler.leave_prefiller(name)  # if lost, nobody knows whether it writes on
        self.scheduler.leave_decoder(name)
        lost = child.caller.lost
        how = f"has ended, exit {status}" if lost is None else f"was lost: {lost}"
        return f"{child.role} {name} {how}"


class Cluster(RankedCluster):
    """A cluster whose members are processes of this host; it starts them."""

    def __init__(self, shape: Shape) -> None:
        size = 1 + len(shape.members)
        super().__init__(shape, Place(rank=0, size=size, token=secrets.token_hex(16)))
        self._ranks = {name: rank for rank, (_, name) in enumerate(shape.members, 1)}
        self._folder = tempfile.TemporaryDirectory(prefix="tep-kvcache-")
        self._processes: RankProcesses

    async def _start(self) -> None:
        place = dataclasses.replace(self._place, port=self.port)
        self._processes = RankProcesses(place, self._folder.name)
        shape = msgspec.json.encode(self.shape).decode()
        command = (sys.executable, "-m", "tep.apps.kvcache.cluster", shape)
        await asyncio.gather(*(self._processes.start(r, command) for r in self._ranks.values()))

    async def _add(self, role: str, name: str) -> None:
        adding = super()._add(role, name)
        await self._processes.unless_ended(self._ranks[name], f"{role} {name}", adding)

    async def _status(self, name: str) -> object:
        return await self._processes.ended(self._ranks[name])

    async def close(self) -> None:
        """Stop every process, decoders first; kill those that do not go."""
        await super().close()
        await self._processes.close()
        self._folder.cleanup()


def main(argv: Sequence[str]) -> int:
    """Be one member of the cluster that is given."""
    return run_rank(lambda place: work_as_rank(msgspec.json.decode(argv[0], type=Shape), place))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
