"""The messages between ranks at a rendezvous, one connection, its handshake, and the listener.

A peer that knows the token is trusted; one that has not proved it may send one short frame. Both
processes prove that they know it, and it is never sent. The listener sends a nonce. The caller
answers with a proof over that nonce and over its own introduction, and sends a nonce of its own;
the listener proves the same. So a proof is good for one connection, one caller and one direction.
The later messages are not encrypted: an attacker who can change packets in flight can take over a
caller's connection.

The listener bounds the resources that strangers can take. A stranger is a connected process that
has not proved that it knows the token. Rule 1: at most STRANGERS_MAX are connected at once; at one
more, the oldest is disconnected. Rule 2: a stranger that has not introduced itself after STRANGER_S
is disconnected. Rule 3: if the system has no descriptor left, the oldest stranger is disconnected.
A caller that is disconnected this way calls again.

offset  size  field    content
0       4     length   u32, little-endian: bytes of the message
4       ...   message  MessagePack array: the kind's tag, then its fields in their order
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import os
import resource
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, NoReturn

import msgspec

from tep.base.errors import RendezvousError, UsageError
from tep.host.ways import names_this_host

__all__ = [
    "PART_BYTES_MAX", "STRANGERS_MAX", "STRANGER_BYTES_MAX", "STRANGER_S", "TROUBLE", "Challenge",
    "Door", "Got", "Join", "Joined", "Late", "Message", "Peer", "Put", "Refused", "Who",
    "challenge", "decode", "enter", "frame", "join_proof", "listen", "prove", "refuse", "welcome",
]  # fmt: skip

PART_BYTES_MAX: Final = 1 << 20
"""The longest part that a rank may give to a collective call."""

STRANGER_BYTES_MAX: Final = 4096
"""The longest frame of a peer that has not proved that it knows the token."""

_CHUNK_BYTES: Final = 1 << 16

_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
)
"""A host that has vanished ends its connections within 20 s."""

_AROUND_BYTES_MAX: Final = 4096  # a frame's overhead beside the parts; 5 bytes a part, and 4 KiB


Who = tuple[int | str, ...]
"""A caller's introduction: the service that it calls, and the facts that this service needs."""


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The listener's first message to a caller."""

    nonce: bytes


class Join(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The caller's answer: its introduction, and a proof over it that it knows the token."""

    version: int
    who: Who
    nonce: bytes
    proof: bytes


class Joined(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The listener admits the caller, with its own proof."""

    proof: bytes


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The listener refuses the caller, with the reason."""

    why: str


class Put(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A rank's part of a collective call."""

    turn: int
    what: str
    data: bytes


class Got(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Rank 0's answer: the parts of all ranks, by rank."""

    turn: int
    data: list[bytes]


class Late(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Rank 0's answer to a failed call; `lost` if a rank has left, else a rank is missing."""

    why: str
    lost: bool = False


Message = Challenge | Join | Joined | Refused | Put | Got | Late
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


TROUBLE: Final = (RendezvousError, EOFError, OSError)
"""The exceptions of hear() and say() when the other end is gone, or no rank of this job."""


def frame(message: object, limit: int = 2**32 - 1) -> bytes:
    """Make the frame of a message; one frame can be sent to many peers."""
    data = _encode(message)
    if len(data) > limit:
        raise UsageError(f"a control frame of {len(data)} bytes; {limit} at the most")
    return len(data).to_bytes(4, "little") + data


def decode(data: bytes) -> Message:
    """Read a message; RendezvousError if the bytes are none."""
    try:
        message: Message = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RendezvousError(f"{len(data)} bytes that are no message: {error}") from error
    return message


class Peer:
    """One connection, framed; `proven` if the other end has proved that it knows the token."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.proven = False
        # A drain() then means that the kernel has all: this loop may not run afterwards.
        writer.transport.set_write_buffer_limits(0)
        where = writer.get_extra_info("peername")  # None: it has hung up already
        self.name = "{}:{}".format(*where[:2]) if where else "somebody"

    async def say(self, message: Message) -> None:
        """Send, and return when the kernel has all of it."""
        await self.send(frame(message))

    async def send(self, data: bytes) -> None:
        """Send a frame of frame(), and return when the kernel has all of it.

        It is sent in chunks: the transport copies the bytes that the kernel does not take at once,
        and an answer to all ranks would be in memory once for each of them.
        """
        view = memoryview(data)
        for at in range(0, len(data), _CHUNK_BYTES):
            self.write(view[at : at + _CHUNK_BYTES])
            await self.drain()

    def write(self, data: bytes | memoryview) -> None:
        """Send a frame of frame() in its turn; a peer that is gone is noticed by receive()."""
        if not self._writer.is_closing():
            self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    async def hear(self, parts: int) -> Message:
        """Receive the next message, which may hold `parts` parts of others; 0 for strangers."""
        limit = STRANGER_BYTES_MAX
        if parts:
            limit = parts * (PART_BYTES_MAX + 5) + _AROUND_BYTES_MAX
        return decode(await self.receive(limit))

    async def receive(self, limit: int) -> bytes:
        """Receive the contents of the next frame; raises one of TROUBLE."""
        length = int.from_bytes(await self._reader.readexactly(4), "little")
        if length > limit:
            raise RendezvousError(f"a frame of {length} bytes; {limit} are allowed here")
        return await self._reader.readexactly(length)

    def keep_alive(self) -> None:
        """Have the connection end some time after the other host has vanished."""
        for option in _KEEPALIVE:
            self._writer.get_extra_info("socket").setsockopt(*option)

    @property
    def gone(self) -> bool:
        """True if the other end has hung up."""
        return self._reader.at_eof()

    def hang_up(self) -> None:
        """End the connection once the kernel has all that was written."""
        self._writer.close()

    def abort(self) -> None:
        """Hang up at once, and drop unsent bytes."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self.hang_up()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


_VERSION: Final = 2
_RETRY_S: Final = 0.05


def prove(token: str, what: str, *words: int | bytes | Who) -> bytes:
    """Compute a proof of the token, for one question and one answer."""
    key = hashlib.sha256(token.encode()).digest()
    return hmac.digest(key, msgspec.msgpack.encode((what, *words)), "sha256")


def join_proof(token: str, nonce: bytes, asked: Join) -> bytes:
    """Compute the caller's proof, over the listener's nonce and the caller's introduction."""
    return prove(token, "join", nonce, asked.version, asked.who, asked.nonce)


# ---------------------------------------------------------------------- the listener


async def challenge(peer: Peer, token: str) -> Join:
    """Ask a stranger for its proof; check it and return the stranger's introduction.

    Raises one of TROUBLE if the proof fails; the stranger gets the reason.
    """
    nonce = os.urandom(16)
    await peer.say(Challenge(nonce))
    asked = await peer.hear(0)
    if not isinstance(asked, Join):
        raise RendezvousError("it did not introduce itself")
    if not hmac.compare_digest(asked.proof, join_proof(token, nonce, asked)):
        await refuse(peer, "wrong token; set the same TEP_TOKEN in all ranks")
    peer.proven = True
    if asked.version != _VERSION:
        await refuse(peer, f"rendezvous version {asked.version}, the listener has {_VERSION}")
    return asked


async def refuse(peer: Peer, why: str) -> NoReturn:
    """Send a caller a refusal, and raise its reason as RendezvousError."""
    await peer.say(Refused(why))
    raise RendezvousError(why)


async def welcome(peer: Peer, token: str, asked: Join) -> None:
    """Admit a caller, and prove to it that this is the right listener."""
    await peer.say(Joined(prove(token, "joined", asked.nonce)))


STRANGERS_MAX: Final = 64
STRANGER_S: Final = 10.0
_PAUSE_S: Final = 0.05  # before the next accept(), if no descriptor was left
_BACKLOG: Final = 1024
_REFUSALS_MAX: Final = 8  # in a report
_NO_SUCH_FAMILY: Final = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}  # "localhost" without IPv6


class Door:
    """Bound sockets, which it closes, and the strangers connected to them; needs a running loop.

    admit() admits a peer, or raises one of TROUBLE. `refusals` are the reasons of the first few of
    the `refused` peers.
    """

    def __init__(
        self, sockets: list[socket.socket], admit: Callable[[Peer], Awaitable[None]]
    ) -> None:
        self.refused = 0
        self.refusals: list[str] = []
        self._admit = admit
        self._strangers: dict[Peer, asyncio.Task[None]] = {}  # the oldest first
        self._sockets = sockets
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._strangers_max = max(1, min(STRANGERS_MAX, limit // 4))
        for sock in sockets:
            sock.setblocking(False)
            sock.listen(_BACKLOG)
        self._accepting = [asyncio.ensure_future(self._accept(sock)) for sock in sockets]

    async def close(self) -> None:
        """Stop listening, and disconnect all strangers."""
        for peer, task in self._strangers.items():
            task.cancel()
            peer.abort()
        for task in self._accepting:
            task.cancel()
        tasks = (*self._accepting, *self._strangers.values())
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in self._sockets:
            sock.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
                peer = Peer(*await asyncio.open_connection(sock=sock))
            except ConnectionError:  # it has hung up already
                continue
            except OSError:  # no descriptor or no memory left
                self._evict()
                await asyncio.sleep(_PAUSE_S)
                continue
            if sum(not peer.proven for peer in self._strangers) >= self._strangers_max:
                self._evict()
                await asyncio.sleep(0)  # so that its descriptor is closed
            self._strangers[peer] = asyncio.ensure_future(self._receive(peer))

    def _evict(self) -> None:
        """Disconnect the stranger that has been here longest."""
        for peer, task in self._strangers.items():
            if not peer.proven:
                del self._strangers[peer]
                task.cancel()
                peer.abort()
                self._turned_away(peer, "others came, and it had not introduced itself")
                return

    async def _receive(self, peer: Peer) -> None:
        try:
            async with asyncio.timeout(STRANGER_S):
                await self._admit(peer)
        except TROUBLE as error:
            timed_out = isinstance(error, TimeoutError)
            self._turned_away(peer, f"silent for {STRANGER_S} s" if timed_out else str(error))
            await peer.close()
        finally:
            self._strangers.pop(peer, None)

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


# ---------------------------------------------------------------------- the caller


async def enter(host: str, port: int, token: str, who: Who, timeout_s: float) -> Peer:
    """Connect until a listener that knows the token admits us.

    The listener may not be up yet, and it disconnects the oldest of many callers.

    Raises:
        TimeoutError: no listener admitted us in time; says how the last try failed.
        RendezvousError: the listener does not know the token, or speaks another protocol.
        UsageError: the listener refused; says why.
    """
    what = "nobody listens there"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    peer = Peer(*await asyncio.open_connection(host, port))
                except OSError as error:  # not up yet
                    what = str(error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                what = "it does not answer"
                async with contextlib.AsyncExitStack() as undo:
                    undo.push_async_callback(peer.close)
                    if await _introduce(peer, token, who):
                        undo.pop_all()
                        return peer
                what = "it hangs up without an answer"
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise TimeoutError(what) from None


async def _introduce(peer: Peer, token: str, who: Who) -> bool:
    """Introduce this process; return True if it is admitted, False if the listener hung up."""
    nonce = os.urandom(16)
    try:
        asks = await peer.hear(0)
        if not isinstance(asks, Challenge):
            raise RendezvousError("it is no rendezvous")
        asked = Join(_VERSION, who, nonce, b"")
        proof = join_proof(token, asks.nonce, asked)
        await peer.say(msgspec.structs.replace(asked, proof=proof))
        answer = await peer.hear(0)
    except (EOFError, ConnectionError):
        return False
    except TROUBLE as error:
        raise RendezvousError(f"it is something else: {error}") from error
    if isinstance(answer, Refused):
        raise UsageError(answer.why)
    expected = prove(token, "joined", nonce)
    if not isinstance(answer, Joined) or not hmac.compare_digest(answer.proof, expected):
        raise RendezvousError("it does not know the token")
    peer.proven = True
    return True
