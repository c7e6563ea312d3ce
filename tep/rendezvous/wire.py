"""What ranks say to each other at a rendezvous, and one connection, framed. No policy lives here.

Whoever knows the token is trusted; who has not proved it is listened to for one short frame. How
it is proved is in `proof`.

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
    "PART_BYTES_MAX",
    "STRANGER_BYTES_MAX",
    "TROUBLE",
    "Challenge",
    "Got",
    "Join",
    "Joined",
    "Late",
    "Message",
    "Peer",
    "Put",
    "Refused",
    "Who",
    "decode",
    "encode",
]

PART_BYTES_MAX: Final = 1 << 20
"""The longest part that a rank may give to a collective call."""

STRANGER_BYTES_MAX: Final = 4096
"""The longest frame of somebody who has not proved that it belongs here."""

_CHUNK_BYTES: Final = 1 << 16

_AROUND_BYTES_MAX: Final = 4096  # what a frame holds beside the parts; 5 bytes a part, and 4 KiB


Who = tuple[int | str, ...]
"""What a caller says of itself: the service that it calls, and what that service asks for."""


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Whoever listens, to whoever connects."""

    nonce: bytes


class Join(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The answer: who it is, and a proof over all of this that it knows the token."""

    version: int
    who: Who
    nonce: bytes
    proof: bytes


class Joined(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Whoever listens: come in; and its own proof."""

    proof: bytes


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Whoever listens: no, and why."""

    why: str


class Put(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A rank's part of a collective call."""

    turn: int
    what: str
    data: bytes


class Got(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Rank 0: everybody's parts, by rank."""

    turn: int
    data: list[bytes]


class Late(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Rank 0: the call failed; `lost` where a rank has gone, else somebody is missing."""

    why: str
    lost: bool = False


Message = Challenge | Join | Joined | Refused | Put | Got | Late
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


TROUBLE: Final = (RendezvousError, EOFError, OSError)
"""What hear() and say() raise when the other end is gone, or not what it should be."""


def encode(message: Message) -> bytes:
    """The frame of a message; one frame can be sent to many peers."""
    data = _encode(message)
    return len(data).to_bytes(4, "little") + data


def decode(data: bytes) -> Message:
    """Read a message.

    Raises:
        RendezvousError: the bytes are none.
    """
    try:
        message: Message = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RendezvousError(f"{len(data)} bytes that are no message: {error}") from error
    return message


class Peer:
    """One connection, framed.

    Attributes:
        name: where it comes from.
        proven: whether it has proved that it knows the token.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.proven = False
        # A drain() then means that all is with the kernel: this loop may not run afterwards.
        writer.transport.set_write_buffer_limits(0)
        where = writer.get_extra_info("peername")  # None: it has hung up already
        self.name = "{}:{}".format(*where[:2]) if where else "somebody"

    async def say(self, message: Message) -> None:
        """Send, until all of it is with the kernel."""
        await self.send(encode(message))

    async def send(self, frame: bytes) -> None:
        """Send what encode() made, until all of it is with the kernel.

        It goes out in chunks: the transport copies what the kernel does not take at once, and an
        answer that goes to all ranks would be held once for each of them.
        """
        view = memoryview(frame)
        for at in range(0, len(frame), _CHUNK_BYTES):
            self._writer.write(view[at : at + _CHUNK_BYTES])
            await self._writer.drain()

    async def hear(self, parts: int) -> Message:
        """The next message, which may hold `parts` parts of others; 0 for strangers.

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
        """The connection itself, for a service with a language of its own."""
        self._writer.transport.set_write_buffer_limits()
        return self._reader, self._writer

    @property
    def gone(self) -> bool:
        """Whether the other end has hung up."""
        return self._reader.at_eof()

    def abort(self) -> None:
        """Hang up at once, and drop what was not sent."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
