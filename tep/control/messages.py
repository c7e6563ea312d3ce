"""Control messages: what engines say to each other, as bytes.

A note is the MessagePack array of one class below, its fields in order after the tag. Nothing here
sends. Rule 1: bytes from a peer are hostile until `decode` has returned. Rule 2: whatever can be
wrong with a note by itself is declared at its fields, and checked there. Rule 3: a note that names
a NIC as its sender's says which field that is (`claimed`), and who takes it in compares.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tep.errors import BadDescriptor, FabricError

__all__ = [
    "NICS_MAX",
    "PRUNED_MAX",
    "REASON_MAX",
    "RUN_BYTES",
    "WHY_MAX",
    "Answer",
    "Asked",
    "Ended",
    "Failed",
    "Note",
    "Ping",
    "Pong",
    "Prune",
    "Renewed",
    "Reopen",
    "Run",
    "Told",
    "decode",
    "encode",
    "given_up",
    "runs_max",
    "values_max",
]

REASON_MAX: Final = 60
"""Characters of a reason, so that it fits into the shortest note that a NIC may have."""

NICS_MAX: Final = 64
"""NICs of an engine, as `wire` has it."""

WHY_MAX: Final = 200
"""Characters of the reason in an answer."""

VALUES_MAX: Final = 1 << 14
"""Values in one list: more than any NIC's longest note has room for."""

_U63: Final = 2**63 - 1
Number = Annotated[int, Meta(ge=0, le=_U63)]
Count = Annotated[int, Meta(ge=0, le=_U63)]
NicNumber = Annotated[int, Meta(ge=0, lt=NICS_MAX)]
Nanoseconds = Annotated[int, Meta(ge=1, le=10**18)]
Imm = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
Address = Annotated[bytes, Meta(min_length=1, max_length=256)]

PRUNED_MAX: Final = 1 << 14
"""Immediates that one message prunes."""

Run = tuple[Imm, Annotated[int, Meta(ge=1, le=PRUNED_MAX)], Annotated[int, Meta(ge=1, le=_U63)]]
"""Immediates in a row with the same count: the first, how many, the count."""

RUN_BYTES: Final = 18
"""The longest that a run may be as bytes."""

_HEAD_BYTES: Final = 320
"""Room for all of a note but its list: an address of 256 bytes and some numbers."""


class _Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A note; `number` is the sender's, and the answer has the same."""

    number: Number

    @property
    def claimed(self) -> bytes:
        """The address that the note gives as one of its sender's NICs; b"" = it gives none."""
        return b""


class Asked(_Note, frozen=True, array_like=True, tag=1):
    """Fence off my NIC `source` at your NIC `nic`. How often did these immediates come from it?"""

    source: Address
    nic: NicNumber
    imms: Annotated[tuple[Imm, ...], Meta(max_length=VALUES_MAX)]

    @property
    def claimed(self) -> bytes:
        """The path's sender."""
        return self.source


class Told(_Note, frozen=True, array_like=True, tag=2):
    """It is fenced, and these are the sums; or why they cannot be said.

    The sums are those since the beginning, less what was pruned up to generation `pruned`.
    """

    why: Annotated[str, Meta(max_length=WHY_MAX)]
    counts: Annotated[tuple[Count, ...], Meta(max_length=VALUES_MAX)]
    pruned: Number = 0


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
    lease: Number

    @property
    def claimed(self) -> bytes:
        """The owner."""
        return self.owner


class Renewed(_Note, frozen=True, array_like=True, tag=9):
    """My lease lasts so long from now on; of two renewals the one with the larger round holds."""

    owner: Address
    lease: Number
    round: Number
    for_ns: Nanoseconds

    @property
    def claimed(self) -> bytes:
        """The owner."""
        return self.owner


class Reopen(_Note, frozen=True, array_like=True, tag=10):
    """Take rows of my NIC `source` at your NIC `nic` again; those that I sent have ended."""

    source: Address
    nic: NicNumber

    @property
    def claimed(self) -> bytes:
        """The path's sender."""
        return self.source


class Prune(_Note, frozen=True, array_like=True, tag=11):
    """Subtract these counts from what came from my NIC `source` at your NIC `nic`, as I do.

    Each run is (first immediate, how many immediates in a row, count of each). Of one path the
    generations are 1, 2, 3 ...; one that was applied before is answered, and not applied again.
    """

    source: Address
    nic: NicNumber
    generation: Annotated[int, Meta(ge=1, le=_U63)]
    runs: Annotated[tuple[Run, ...], Meta(min_length=1, max_length=VALUES_MAX)]

    @property
    def claimed(self) -> bytes:
        """The path's sender."""
        return self.source

    def __post_init__(self) -> None:
        end = total = 0
        for first, n, _ in self.runs:
            if first < end:
                raise ValueError(f"run at {first} begins before the end of the last, {end}")
            end, total = first + n, total + n
        if end > 1 << 32 or total > PRUNED_MAX:
            raise ValueError(f"runs of {total} immediates up to {end - 1}")


Answer = Told
Note = Asked | Told | Failed | Ping | Pong | Ended | Renewed | Reopen | Prune

_DECODER: Final[msgspec.msgpack.Decoder[Note]] = msgspec.msgpack.Decoder(Note, strict=True)


def encode(note: Note) -> bytes:
    """The bytes of a note."""
    return msgspec.msgpack.encode(note)


def decode(data: bytes) -> Note:
    """The note in these bytes. Raises BadDescriptor, whatever is wrong with them."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        text = f"{bytes(data[:16])!r}... ({len(data)} bytes) is no control message: {error}"
        raise BadDescriptor(text) from error


def given_up(note: Failed, more: str) -> FabricError:
    """What an expectation fails with that a peer gave up."""
    text = f"imm {note.imm:#x}: {note.who} gave it up: {note.reason}{more}"
    return FabricError(text, code="PEER_FAILED", peer=note.who)


def values_max(note_bytes: int) -> int:
    """How many immediates one question may name: its answer, 9 bytes each, must fit as well."""
    return max(1, (note_bytes - _HEAD_BYTES) // 9)


def runs_max(note_bytes: int) -> int:
    """How many runs fit into one message."""
    return max(1, (note_bytes - _HEAD_BYTES) // RUN_BYTES)
