"""One prefiller or decoder as a process of its own: `python -m tep.apps.kvcache.process SETTINGS`.

It speaks with its launcher over stdin and stdout, and with its peers over the engine. SETTINGS is a
JSON document of `Settings`. What others have started speaks over a socket: see `ranks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from tep import FabricError, NetAddr, TepError, TransferEngine
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.heartbeat import Patience
from tep.apps.kvcache.model import Request
from tep.apps.kvcache.options import SideOptions
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
from tep.apps.kvcache.prefiller import Prefiller
from tep.apps.kvcache.routing import PrefillerCard
from tep.apps.kvcache.transformer import TinyConfig, TinyTransformer

__all__ = ["Settings", "main", "serve"]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one process is told.

    Attributes:
        role: what it is.
        name: of the instance.
        tp: its ranks; each is an engine with a worker thread.
        backend, options: of tep.TransferEngine.open.
        npages: of its cache.
        seed: of the model's weights.
        silent_s: when a peer counts as silent.
    """

    role: Literal["prefiller", "decoder"]
    name: str
    tp: int
    backend: str
    options: dict[str, Any]
    npages: int
    seed: int
    silent_s: float


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
        self._addresses: dict[bytes, NetAddr] = {}

    async def lease(self, request: Request, exclude: Collection[str]) -> _RemoteLease:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.pipe.send(WantLease(number, request.name, request.ntokens, tuple(exclude)))
        leased = await answer
        if leased.error:
            raise FabricError(leased.error)
        addr = self._addresses.setdefault(leased.addr, NetAddr.from_bytes(leased.addr))
        return _RemoteLease(self, number, PrefillerCard(leased.name, leased.epoch, addr))

    def take(self, leased: Leased) -> None:
        waiting = self._waiting.pop(leased.number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(leased)


async def serve(settings: Settings, pipe: Pipe) -> None:
    """Be one process of a cluster until its launcher says stop, or hangs up."""
    config = TinyConfig(seed=settings.seed)
    model = TinyTransformer(config)
    side = SideOptions(
        npages=settings.npages,
        tail_bytes=config.tail_bytes,
        patience=Patience(beat_s=settings.silent_s / 10, silent_s=settings.silent_s),
        message_bytes=16384,
    )
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                TransferEngine.open(
                    settings.backend, name=f"{settings.name}.{rank}", **settings.options
                )
            )
            for rank in range(settings.tp)
        ]
        if settings.role == "prefiller":
            prefiller = Prefiller(
                settings.name, engines, config.layout, model, side, chunk_tokens=config.chunk_tokens
            )
            card = prefiller.card
            pipe.send(Ready(card.epoch, card.addr.to_bytes()))
            while not isinstance(await pipe.receive(), Stop | None):
                pass
            await prefiller.leave()
        else:
            await _serve_decoder(Decoder(settings.name, engines, config.layout, model, side), pipe)


async def _serve_decoder(decoder: Decoder, pipe: Pipe) -> None:
    router = _RemoteRouter(pipe)
    pipe.send(Ready(decoder.addr.epoch, decoder.addr.to_bytes()))
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


async def _connect() -> Pipe:
    """Take stdout for the lines; what anybody prints goes to stderr from here on."""
    loop = asyncio.get_running_loop()
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, out)
    return Pipe(reader, asyncio.StreamWriter(transport, protocol, None, loop))


def main(argv: Sequence[str]) -> int:
    """Run one process to its end."""
    settings = msgspec.json.decode(argv[0], type=Settings)

    async def run() -> None:
        await serve(settings, await _connect())

    try:
        asyncio.run(run())
    except TepError as error:
        sys.stderr.write(f"{settings.role} {settings.name}: {type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
