"""What engines say to each other, as bytes. Rule: bytes from a peer are hostile until decoded.

A note is the MessagePack array of one class below, its fields in order after the tag. Nothing here
sends.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tep.errors import FabricError

__all__ = [
    "NICS_MAX",
    "REASON_MAX",
    "Answer",
    "Asked",
    "Ended",
    "Failed",
    "Note",
    "Ping",
    "Pong",
    "Renewed",
    "Reopen",
    "Told",
    "decode",
    "encode",
    "given_up",
    "values_max",
]

Unsigned = Annotated[int, Meta(ge=0)]
Imm = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
Address = Annotated[bytes, Meta(min_length=1, max_length=256)]

REASON_MAX: Final = 60
"""Characters of a reason, so that it fits into the shortest note that a NIC may have."""

NICS_MAX: Final = 64
"""NICs of an engine, as `wire` has it."""

_HEAD_BYTES: Final = 320
"""Room for all of a note but its list: an address of 256 bytes and some numbers."""


class _Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A note; `number` is the sender's, and the answer has the same."""

    number: Unsigned


class Asked(_Note, frozen=True, array_like=True, tag=1):
    """Fence off my NIC `source` at your NIC `nic`. How often did these immediates come from it?"""

    source: Address
    nic: Unsigned
    imms: tuple[Imm, ...]


class Told(_Note, frozen=True, array_like=True, tag=2):
    """It is fenced, and these are the sums, since the beginning; or why they cannot be said."""

    why: str
    counts: tuple[int, ...]


class Failed(_Note, frozen=True, array_like=True, tag=3):
    """What you expect under this immediate will not come from me; `who` is my engine's name."""

    who: Annotated[str, Meta(max_length=200)]
    imm: Imm
    reason: Annotated[str, Meta(max_length=REASON_MAX)]


class Ping(_Note, frozen=True, array_like=True, tag=4):
    """Are you there? `number` is when this was asked, in nanoseconds of the sender's clock."""


class Pong(_Note, frozen=True, array_like=True, tag=5):
    """I am here."""


class Ended(_Note, frozen=True, array_like=True, tag=8):
    """My lease is over. Say when no row under it is left, and over which paths bytes may come.

    `owner` is the address of my first NIC. The answer's counts are paths: yours * NICS_MAX + mine.
    """

    owner: Address
    lease: Unsigned


class Renewed(_Note, frozen=True, array_like=True, tag=9):
    """My lease lasts so long from now on; of two renewals the one with the larger round holds."""

    owner: Address
    lease: Unsigned
    round: Unsigned
    for_ns: Unsigned


class Reopen(_Note, frozen=True, array_like=True, tag=10):
    """Take rows of my NIC `source` at your NIC `nic` again; those that I sent have ended."""

    source: Address
    nic: Unsigned


Answer = Told
Note = Asked | Told | Failed | Ping | Pong | Ended | Renewed | Reopen

_DECODER: Final[msgspec.msgpack.Decoder[Note]] = msgspec.msgpack.Decoder(Note, strict=True)


def encode(note: Note) -> bytes:
    """The bytes of a note."""
    return msgspec.msgpack.encode(note)


def decode(data: bytes) -> Note | None:
    """The note in these bytes, or None where they are none."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def given_up(note: Failed, more: str) -> FabricError:
    """What an expectation fails with that a peer gave up."""
    text = f"imm {note.imm:#x}: {note.who} gave it up: {note.reason}{more}"
    return FabricError(text, code="PEER_FAILED", peer=note.who)


def values_max(note_bytes: int) -> int:
    """How many immediates one question may name: its answer, 9 bytes each, must fit as well."""
    return max(1, (note_bytes - _HEAD_BYTES) // 9)
