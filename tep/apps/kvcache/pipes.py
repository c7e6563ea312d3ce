"""What a launcher and its prefiller and decoder processes say, over pipes or a socket, and how.

Each frame is 4 bytes of length, little-endian, and MessagePack. This is the control plane of a
launcher, not a protocol between peers: those speak `messages` over the engine.
"""

from __future__ import annotations

import asyncio

import msgspec

from tep import BadDescriptor

__all__ = [
    "Done",
    "Fenced",
    "Generate",
    "LeaseOver",
    "Leased",
    "Line",
    "Pipe",
    "Ready",
    "Stop",
    "WantLease",
]

_FRAME_BYTES_MAX = 1 << 26


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """One frame."""


class Ready(_Line, frozen=True, forbid_unknown_fields=True):
    """Process -> launcher: I run; this is my first rank's address."""

    epoch: int
    addr: bytes


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
    epoch: int
    addr: bytes
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
