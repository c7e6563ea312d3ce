"""The listener of a rendezvous, which bounds the resources that strangers can take.

A stranger is a connected process that has not proved that it knows the token. Rule 1: at most
STRANGERS_MAX are connected at once; at one more, the oldest is disconnected. Rule 2: a stranger
that has not introduced itself after STRANGER_S is disconnected. Rule 3: if the system has no
descriptor left, the oldest stranger is disconnected. A caller that is disconnected this way calls
again.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from tep.host.ways import names_this_host
from tep.rendezvous.wire import TROUBLE, Peer

__all__ = ["STRANGERS_MAX", "STRANGER_S", "Door", "listen"]

STRANGERS_MAX: Final = 64
STRANGER_S: Final = 10.0
_PAUSE_S: Final = 0.05  # before the next accept(), if no descriptor was left
_BACKLOG: Final = 1024
_REFUSALS_MAX: Final = 8  # in a report
_NO_SUCH_FAMILY: Final = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}  # "localhost" without IPv6


class Door:
    """Listening sockets, and the strangers connected to them; needs a running loop.

    Args:
        sockets: bound sockets; the door closes them.
        admit: admits a peer, or raises one of TROUBLE.

    Attributes:
        refused: number of peers that were refused.
        refusals: reasons for the first few.
    """

    def __init__(
        self, sockets: list[socket.socket], admit: Callable[[Peer], Awaitable[None]]
    ) -> None:
        self.refused = 0
        self.refusals: list[str] = []
        self._admit = admit
        self._strangers: dict[asyncio.Task[None], Peer] = {}  # the oldest first
        self._sockets = sockets
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._strangers_max = max(1, min(STRANGERS_MAX, limit // 4))
        for sock in sockets:
            sock.setblocking(False)
            sock.listen(_BACKLOG)
        self._accepting = [asyncio.ensure_future(self._accept(sock)) for sock in sockets]

    async def close(self) -> None:
        """Stop listening, and disconnect all strangers."""
        for task, peer in self._strangers.items():
            task.cancel()
            peer.abort()
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, *self._strangers, return_exceptions=True)
        for sock in self._sockets:
            sock.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
                peer = await _accepted(sock)
            except ConnectionError:  # it has hung up already
                continue
            except OSError:  # no descriptor or no memory left
                self._evict()
                await asyncio.sleep(_PAUSE_S)
                continue
            if sum(not peer.proven for peer in self._strangers.values()) >= self._strangers_max:
                self._evict()
                await asyncio.sleep(0)  # so that its descriptor is closed
            self._strangers[asyncio.ensure_future(self._receive(peer))] = peer

    def _evict(self) -> None:
        """Disconnect the stranger that has been here longest."""
        for task, peer in self._strangers.items():
            if not peer.proven:
                del self._strangers[task]
                task.cancel()
                peer.abort()
                self._turned_away(peer, "others came, and it had not introduced itself")
                return

    async def _receive(self, peer: Peer) -> None:
        me = asyncio.current_task()
        assert me is not None
        try:
            async with asyncio.timeout(STRANGER_S):
                await self._admit(peer)
        except TROUBLE as error:
            timed_out = isinstance(error, TimeoutError)
            self._turned_away(peer, f"silent for {STRANGER_S} s" if timed_out else str(error))
            await peer.close()
        finally:
            self._strangers.pop(me, None)

    def _turned_away(self, peer: Peer, why: str) -> None:
        self.refused += 1
        if len(self.refusals) < _REFUSALS_MAX:
            self.refusals.append(f"{peer.name}: {why}")


async def listen(host: str, port: int) -> list[socket.socket]:
    """Bind sockets at every address of a host; for port 0, at its first one alone.

    Where its name stands for loopback here alone, as on Debian, that is every address of this host:
    the other ranks come to another one.

    Raises:
        OSError: a socket cannot listen there.
    """
    loop = asyncio.get_running_loop()
    found: list[socket.socket] = []
    try:
        find = partial(loop.getaddrinfo, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        infos = await find(host or None, port)
        if names_this_host(host, (str(where[0]) for *_, where in infos)):
            infos = await find(None, port)
        for family, _, _, _, where in infos:
            found.append(socket.create_server(where, family=family))
            if not port:
                break
    except OSError as error:
        if found and error.errno in _NO_SUCH_FAMILY:
            return found
        for sock in found:
            sock.close()
        raise
    return found


async def _accepted(sock: socket.socket) -> Peer:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    try:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock)
    except BaseException:
        sock.close()
        raise
    return Peer(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
