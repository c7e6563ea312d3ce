"""The lines that a launcher and its members say over a socket, and their bytes.

Each frame is 4 bytes of length, little-endian, and MessagePack. This is the control plane of a
launcher, not a protocol between peers: those speak `messages` over the engine.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

import msgspec

from tep import BadDescriptor

__all__ = [
    "SERVICE", "Done", "Fenced", "Generate", "LeaseOver", "Leased", "Line", "Pipe", "Ready",
    "Stop", "WantLease", "keep_alive",
]  # fmt: skip

SERVICE: Final = "kvcache"
"""The name by which members introduce themselves to a launcher."""

_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
)
"""A host that has vanished ends its connections within 20 s."""

_FRAME_BYTES_MAX = 1 << 26


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """One frame."""


class Ready(_Line, frozen=True, forbid_unknown_fields=True):
    """Process -> launcher: I run; these are my engines' addresses."""

    addrs: tuple[bytes, ...]


class Generate(_Line, frozen=True, forbid_unknown_fields=True):
    """Launcher -> decoder: see this prompt through."""

    name: str
    input_ids: tuple[int, ...]
    max_tokens: int


class Done(_Line, frozen=True, forbid_unknown_fields=True):
    """Decoder -> launcher: how it ended."""

    name: str
    tokens: tuple[int, ...] | None
    reason: str
    attempts: int
    prefiller: str
    ttft_s: float
    pages_sent: int


class WantLease(_Line, frozen=True, forbid_unknown_fields=True):
    """Decoder -> launcher: pick a prefiller."""

    number: int
    name: str
    ntokens: int
    exclude: tuple[str, ...]


class Leased(_Line, frozen=True, forbid_unknown_fields=True):
    """Launcher -> decoder: this one; or none, for this reason."""

    number: int
    name: str
    addrs: tuple[bytes, ...]
    error: str


class LeaseOver(_Line, frozen=True, forbid_unknown_fields=True):
    """Decoder -> launcher: the attempt is over."""

    number: int
    failure: str


class Fenced(_Line, frozen=True, forbid_unknown_fields=True):
    """Launcher -> decoder: this incarnation's process has ended."""

    prefiller: str
    epoch: int


class Stop(_Line, frozen=True, forbid_unknown_fields=True):
    """Launcher -> process: end in good order."""


Line = Ready | Generate | Done | WantLease | Leased | LeaseOver | Fenced | Stop

_DECODER: msgspec.msgpack.Decoder[Line] = msgspec.msgpack.Decoder(Line, strict=True)


def decode(payload: bytes) -> Line:
    """Read a line.

    Raises:
        BadDescriptor: the bytes are none.
    """
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadDescriptor(f"{len(payload)} bytes are no line: {error}") from error


class Pipe:
    """Both directions of one process's pipes or socket.

    Attributes:
        over: the other side's stream has ended.
        lost: why, if that does not prove that the other process has hung up.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.over = False
        self.lost = ""
        self._reader = reader
        self._writer = writer

    def send(self, line: Line) -> None:
        """Send; a process that has gone is noticed by receive()."""
        payload = msgspec.msgpack.encode(line)
        if not self._writer.is_closing():
            self._writer.write(len(payload).to_bytes(4, "little") + payload)

    def hang_up(self) -> None:
        """End the connection at once. Idempotent."""
        self._writer.transport.abort()

    async def receive(self) -> Line | None:
        """The next line; None at the end.

        Raises:
            BadDescriptor: the bytes are none.
        """
        try:
            head = await self._reader.readexactly(4)
            nbytes = int.from_bytes(head, "little")
            if nbytes > _FRAME_BYTES_MAX:
                raise BadDescriptor(f"a line of {nbytes} bytes; did something else print here?")
            payload = await self._reader.readexactly(nbytes)
        except (asyncio.IncompleteReadError, OSError) as error:
            self.over = True
            if not isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                self.lost = str(error)
            return None
        return decode(payload)


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Have a connection end some time after its other host has vanished."""
    for option in _KEEPALIVE:
        writer.get_extra_info("socket").setsockopt(*option)
