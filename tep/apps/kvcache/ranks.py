"""A cluster whose processes torchrun, srun or Ray has started, on any machines: they are ranks.

Rank 0 is the launcher; the next ranks are the prefillers, the last ones the decoders. They meet by
`tep.rendezvous`, where rank 0 says where it listens. Then each connects to it, both prove again
that they know the token, and it speaks as a process that the launcher has started would. A
connection that the other host closes proves that the process has let go of its engines: it is
fenced. One that times out proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final, Self

from tep import FabricError, TepError, UsageError, rendezvous
from tep.apps.kvcache.launch import Cluster, Shape, Started
from tep.apps.kvcache.pipes import Pipe
from tep.apps.kvcache.process import Settings, serve
from tep.rendezvous.door import Door, listen
from tep.rendezvous.proof import challenge, enter, refuse, welcome
from tep.rendezvous.wire import Peer

__all__ = ["RankedCluster", "work_as_rank"]

_CALL_S: Final = 10.0
_SERVICE: Final = "kvcache"
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
)
"""A host that has vanished ends its connections within 20 s."""


def _check_size(shape: Shape, place: rendezvous.Place) -> None:
    wanted = 1 + len(shape.members)
    if place.size != wanted:
        raise UsageError(
            f"{place.size} processes were started, and the cluster takes {wanted}: a launcher, "
            f"prefillers={shape.prefillers}, decoders={shape.decoders}"
        )


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    for option in _KEEPALIVE:
        writer.get_extra_info("socket").setsockopt(*option)


class _Rank:
    """A process that somebody else has started, as its launcher sees it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def kill(self) -> None:
        """Hang up; then it ends by itself."""
        self._writer.transport.abort()

    async def wait(self) -> str:
        """Only who has started it learns the status."""
        self._writer.close()
        return "unknown"


class RankedCluster(Cluster):
    """Rank 0 of a cluster whose processes others have started.

    Args:
        shape: what was started.
        place: of this process: rank 0 of as many as there are members, and itself.
        address: of this host, which the other ranks reach.

    Raises:
        UsageError: another number of processes was started, or this is another rank.
    """

    def __init__(self, shape: Shape, place: rendezvous.Place, address: str) -> None:
        _check_size(shape, place)
        if place.rank:
            raise UsageError(f"rank {place.rank} is a member, not the launcher: work_as_rank")
        super().__init__(shape)
        self._place, self._address = place, address
        self._came: dict[str, asyncio.Future[tuple[Started, Pipe]]] = {}
        self._known: list[asyncio.StreamWriter] = []
        self._door: Door | None = None

    def kill(self, name: str) -> None:
        """Not from here: whoever has started a process can kill it.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{name} was started by another program; kill its process on its host")

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._came = {name: loop.create_future() for _, name in self.shape.members}
        sockets = await listen(self._address, 0)
        said = f"{self._address} {sockets[0].getsockname()[1]}".encode()
        self._door = Door(sockets, self._admit)
        try:
            await rendezvous.exchange_async(said, self._place, timeout_s=self.shape.start_s)
            return await super().__aenter__()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop all ranks, and hang up on whoever is connected."""
        await super().close()
        assert self._door is not None
        await self._door.close()
        for writer in self._known:
            writer.transport.abort()

    async def _admit(self, peer: Peer) -> None:
        """Let a rank in that is awaited."""
        asked = await challenge(peer, self._place.token)
        match asked.who:
            case (str(service), str(name)) if service == _SERVICE:
                place = self._came.get(name)
            case _:
                place = None
        if place is None or place.done():
            await refuse(peer, f"{asked.who} is not awaited, or is here already")
        reader, writer = peer.streams()
        _keep_alive(writer)
        self._known.append(writer)
        place.set_result((_Rank(writer), Pipe(reader, writer)))
        await welcome(peer, self._place.token, asked)

    async def _start(self, settings: Settings) -> tuple[Started, Pipe]:
        """Wait until it has come."""
        name, start_s = settings.name, self.shape.start_s
        if name not in self._came:
            raise UsageError(f"no rank is {name}; the ranks are {', '.join(self._came)}")
        try:
            return await asyncio.wait_for(self._came[name], start_s)
        except TimeoutError:
            raise FabricError(f"{name} has not come within {start_s:g} s", peer=name) from None


def work_as_rank(shape: Shape, place: rendezvous.Place) -> None:
    """Be one member of a cluster, by rank, until the launcher says stop.

    Raises:
        UsageError: rank 0, which is the launcher; or another number of processes was started.
        FabricError: the launcher is not there, or has hung up.
    """
    _check_size(shape, place)
    if not place.rank:
        raise UsageError("rank 0 is the launcher: RankedCluster")
    said = rendezvous.exchange(b"", place, timeout_s=shape.start_s)[0].decode()
    address, port = said.split()
    settings = shape.settings(*shape.members[place.rank - 1])
    asyncio.run(_work(settings, address, int(port), place.token))


async def _work(settings: Settings, address: str, port: int, token: str) -> None:
    who = f"{settings.role} {settings.name}"
    try:
        peer = await enter(address, port, token, (_SERVICE, settings.name), _CALL_S)
    except (TimeoutError, TepError) as error:
        raise FabricError(f"{who}: no launcher at {address}:{port}: {error}") from error
    reader, writer = peer.streams()
    _keep_alive(writer)
    pipe = Pipe(reader, writer)
    try:
        await serve(settings, pipe)
    finally:  # its engines are closed by now, which the end of this connection tells the launcher
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if pipe.over:
        raise FabricError(f"{who}: the launcher at {address}:{port} hung up. {pipe.lost}".rstrip())
