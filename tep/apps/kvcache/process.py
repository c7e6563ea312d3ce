"""One prefiller or decoder as a process: a rank of a cluster, whoever has started it.

Rank 0 is the launcher; the next ranks are the prefillers, the last ones the decoders. A member
connects to rank 0, both prove that they know the token, and it speaks `pipes` over this connection,
and with its peers over the engine. `python -m tep.apps.kvcache.process SHAPE` is one member, at the
place that the environment says; SHAPE is a JSON document.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Collection, Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np

from tep import FabricError, NetAddr, TepError, TransferEngine, UsageError
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.heartbeat import Patience
from tep.apps.kvcache.memory import SideOptions
from tep.apps.kvcache.model import Request
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
from tep.apps.kvcache.prefiller import Prefiller
from tep.apps.kvcache.scheduler import PrefillerCard
from tep.apps.kvcache.transformer import TinyConfig, TinyTransformer
from tep.rendezvous import Place
from tep.rendezvous.proof import enter

__all__ = ["Role", "Shape", "check_size", "main", "work_as_rank"]

Role = Literal["prefiller", "decoder"]

_CALL_S: Final = 60.0


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
    def members(self) -> list[tuple[Role, str]]:
        """Role and name of each process, from rank 1 on."""
        members: list[tuple[Role, str]] = [("prefiller", f"p{k}") for k in range(self.prefillers)]
        return members + [("decoder", f"d{k}") for k in range(self.decoders)]


def check_size(shape: Shape, place: Place) -> None:
    """Raise UsageError where another number of processes was started than a cluster takes."""
    wanted = 1 + len(shape.members)
    if place.size != wanted:
        raise UsageError(
            f"{place.size} processes were started, and the cluster takes {wanted}: a launcher, "
            f"prefillers={shape.prefillers}, decoders={shape.decoders}"
        )


def work_as_rank(shape: Shape, place: Place) -> None:
    """Be one member of a cluster, by rank, until the launcher says stop.

    Raises:
        UsageError: rank 0, which is the launcher; or another number of processes was started.
        FabricError: the launcher is not there, or has hung up.
    """
    check_size(shape, place)
    if not place.rank:
        raise UsageError("rank 0 is the launcher: RankedCluster")
    asyncio.run(_work(shape, place))


async def _work(shape: Shape, place: Place) -> None:
    role, name = shape.members[place.rank - 1]
    launcher = f"the launcher at {place.host}:{place.port}"
    try:
        peer = await enter(place.host, place.port, place.token, (SERVICE, name), _CALL_S)
    except (TimeoutError, TepError) as error:
        raise FabricError(f"{role} {name}: {launcher} is not there: {error}") from error
    reader, writer = peer.streams()
    keep_alive(writer)
    pipe = Pipe(reader, writer)
    try:
        await _serve(shape, role, name, pipe)
    finally:  # its engines are closed by now, which the end of this connection tells the launcher
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if pipe.over:
        raise FabricError(f"{role} {name}: {launcher} hung up. {pipe.lost}".rstrip())


async def _serve(shape: Shape, role: Role, name: str, pipe: Pipe) -> None:
    """Be one member until the launcher says stop, or hangs up."""
    config = TinyConfig(seed=shape.seed)
    model = TinyTransformer(config)
    side = SideOptions(
        npages=shape.npages,
        tail_bytes=config.tail_bytes,
        patience=Patience(beat_s=shape.silent_s / 10, silent_s=shape.silent_s),
    )
    tp = shape.prefill_tp if role == "prefiller" else shape.decode_tp
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                TransferEngine.open(shape.backend, name=f"{name}.{rank}", **shape.options)
            )
            for rank in range(tp)
        ]
        ready = Ready(tuple(one.main_address.to_bytes() for one in engines))
        if role == "prefiller":
            prefiller = Prefiller(
                name, engines, config.layout, model, side, chunk_tokens=config.chunk_tokens
            )
            pipe.send(ready)
            while not isinstance(await pipe.receive(), Stop | None):
                pass
            await prefiller.leave()
        else:
            decoder = Decoder(name, engines, config.layout, model, side)
            pipe.send(ready)
            await _serve_decoder(decoder, pipe)


async def _serve_decoder(decoder: Decoder, pipe: Pipe) -> None:
    router = _RemoteRouter(pipe)
    tasks: set[asyncio.Task[None]] = set()

    async def see_through(order: Generate) -> None:
        ids = np.array(order.input_ids, np.int32)
        request = Request(order.name, len(ids), ids, order.max_tokens)
        done = await decoder.generate(request, router)
        told = (done.tokens, done.reason, done.attempts, done.prefiller)
        pipe.send(Done(done.request, *told, done.ttft_s, done.pages_sent))

    while not isinstance(line := await pipe.receive(), Stop | None):
        match line:
            case Generate():
                task = asyncio.create_task(see_through(line))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            case Leased():
                router.take(line)
            case Fenced():
                decoder.fenced(line.prefiller, line.epoch)
            case _:
                pass
    decoder.close()


class _RemoteLease:
    """A lease that the launcher keeps."""

    def __init__(self, router: _RemoteRouter, number: int, card: PrefillerCard) -> None:
        self._router, self._number, self.card = router, number, card

    def close(self, failure: str = "") -> None:
        self._router.pipe.send(LeaseOver(self._number, failure))


class _RemoteRouter:
    """Asks the launcher's scheduler."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Leased]] = {}

    async def lease(self, request: Request, exclude: Collection[str]) -> _RemoteLease:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.pipe.send(WantLease(number, request.name, request.ntokens, tuple(exclude)))
        leased = await answer
        if leased.error:
            raise FabricError(leased.error)
        addrs = tuple(map(NetAddr.from_bytes, leased.addrs))
        return _RemoteLease(self, number, PrefillerCard(leased.name, addrs))

    def take(self, leased: Leased) -> None:
        waiting = self._waiting.pop(leased.number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(leased)


def main(argv: Sequence[str]) -> int:
    """Be one member of the cluster that is given."""
    place = Place.from_env()
    try:
        work_as_rank(msgspec.json.decode(argv[0], type=Shape), place)
    except TepError as error:
        sys.stderr.write(f"rank {place.rank}: {type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
