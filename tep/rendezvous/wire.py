"""The messages between ranks at a rendezvous, and one connection, framed. No policy lives here.

A peer that knows the token is trusted; one that has not proved it may send one short frame. The
proof is in `proof`.

offset  size  field    content
0       4     length   u32, little-endian: bytes of the message
4       ...   message  MessagePack array: the kind's tag, then its fields in their order
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import msgspec

from tep.base.errors import RendezvousError

__all__ = [
    "PART_BYTES_MAX", "STRANGER_BYTES_MAX", "TROUBLE", "Challenge", "Got", "Join", "Joined",
    "Late", "Message", "Peer", "Put", "Refused", "Who", "decode", "encode",
]  # fmt: skip

PART_BYTES_MAX: Final = 1 << 20
"""The longest part that a rank may give to a collective call."""

STRANGER_BYTES_MAX: Final = 4096
"""The longest frame of a peer that has not proved that it knows the token."""

_CHUNK_BYTES: Final = 1 << 16

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


def encode(message: Message) -> bytes:
    """Make the frame of a message; one frame can be sent to many peers."""
    data = _encode(message)
    return len(data).to_bytes(4, "little") + data


def decode(data: bytes) -> Message:
    """Read a message.

    Raises:
        RendezvousError: the bytes are no message.
    """
    try:
        message: Message = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RendezvousError(f"{len(data)} bytes that are no message: {error}") from error
    return message


class Peer:
    """One connection, framed.

    Attributes:
        name: its address.
        proven: True if it has proved that it knows the token.
    """

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
        await self.send(encode(message))

    async def send(self, frame: bytes) -> None:
        """Send a frame of encode(), and return when the kernel has all of it.

        It is sent in chunks: the transport copies the bytes that the kernel does not take at once,
        and an answer to all ranks would be in memory once for each of them.
        """
        view = memoryview(frame)
        for at in range(0, len(frame), _CHUNK_BYTES):
            self._writer.write(view[at : at + _CHUNK_BYTES])
            await self._writer.drain()

    async def hear(self, parts: int) -> Message:
        """Receive the next message, which may hold `parts` parts of others; 0 for strangers.

        Raises one of TROUBLE.
        """
        limit = STRANGER_BYTES_MAX
        if parts:
            limit = parts * (PART_BYTES_MAX + 5) + _AROUND_BYTES_MAX
        length = int.from_bytes(await self._reader.readexactly(4), "little")
        if length > limit:
            raise RendezvousError(f"a frame of {length} bytes; {limit} are allowed here")
        return decode(await self._reader.readexactly(length))

    def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection itself, for a service with its own protocol."""
        self._writer.transport.set_write_buffer_limits()
        return self._reader, self._writer

    @property
    def gone(self) -> bool:
        """True if the other end has hung up."""
        return self._reader.at_eof()

    def abort(self) -> None:
        """Hang up at once, and drop unsent bytes."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
