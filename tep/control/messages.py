"""Control messages: what engines say to each other, as bytes.

A control message is the MessagePack array of one class below: the tag, then the fields in order.
It has no version of its own: another layout needs a new `wire.VERSION`, which addresses carry.
Nothing here sends. Rule 1: bytes from a peer are hostile until `decode` has returned. Rule 2:
limits of single values are declared at the fields, and `decode` checks them. Rule 3: a message that
names a NIC of its sender says in which field (`claimed`), and the receiver compares it with the
address that the message came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta

from tep.base.errors import BadDescriptor

__all__ = [
    "IMM_RUN_BYTES", "NICS_MAX", "PRUNED_MAX", "RUN_BYTES", "WHY_MAX", "Answer", "ControlMessage",
    "Failed", "FenceOff", "ImmRun", "Ping", "Pong", "Prune", "Reopen", "Run", "decode", "encode",
    "runs_max", "values_max",
]  # fmt: skip

NICS_MAX: Final = 64
"""NICs of an engine, the same limit as in `wire`."""

WHY_MAX: Final = 200
"""Characters of a reason."""

VALUES_MAX: Final = 1 << 14
"""Values in one list: more than fit into the longest control message of any NIC."""

_U63: Final = 2**63 - 1
Number = Annotated[int, Meta(ge=0, le=_U63)]
NicNumber = Annotated[int, Meta(ge=0, lt=NICS_MAX)]
Imm = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
Address = Annotated[bytes, Meta(min_length=1, max_length=256)]

PRUNED_MAX: Final = 1 << 14
"""Immediates that one message prunes, or burns."""

Run = tuple[Imm, Annotated[int, Meta(ge=1, le=PRUNED_MAX)], Annotated[int, Meta(ge=1, le=_U63)]]
"""Consecutive immediates with the same count: the first, how many, the count."""

ImmRun = tuple[Imm, Annotated[int, Meta(ge=1, le=PRUNED_MAX)]]
"""Consecutive immediates: the first, and how many."""

IMM_RUN_BYTES: Final = 10
"""The most bytes that one of these takes."""

WHO_MAX: Final = 200
"""Characters of an engine's name."""

RUN_BYTES: Final = 18
"""The most bytes that a run takes."""

_HEAD_BYTES: Final = 320
"""Room for all of a message but its list: an address of 256 bytes and some numbers."""


class _Control(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A control message; its sender chooses `number`, and the answer has the same number."""

    number: Number

    claims: ClassVar[str] = ""
    """The field that names a NIC of the sender; "" = there is none."""

    @property
    def claimed(self) -> bytes:
        """The address that the message names as a NIC of its sender; b"" = it names none."""
        return getattr(self, self.claims) if self.claims else b""


class FenceOff(_Control, frozen=True, array_like=True, tag=1):
    """Fence off my NIC `source` at your NIC `nic`. How often did these immediates come from it?"""

    claims: ClassVar[str] = "source"

    source: Address
    nic: NicNumber
    imms: Annotated[tuple[Imm, ...], Meta(max_length=VALUES_MAX)]


class Answer(_Control, frozen=True, array_like=True, tag=2):
    """The answer to a question: `why` it failed, or "" and the counts that were asked for.

    Sums count from the beginning, less what was pruned up to generation `pruned`.
    """

    why: Annotated[str, Meta(max_length=WHY_MAX)]
    counts: Annotated[tuple[Number, ...], Meta(max_length=VALUES_MAX)]
    pruned: Number = 0


class Failed(_Control, frozen=True, array_like=True, tag=3):
    """Requests of mine with these immediates failed or were cancelled: count them for nobody.

    `serial` is mine for this notice, and stays the same when I send it again under another number.
    `who` is my engine's name, for error texts. Each run is (first immediate, how many).
    """

    serial: Number
    who: Annotated[str, Meta(max_length=WHO_MAX)]
    reason: Annotated[str, Meta(max_length=WHY_MAX)]
    imms: Annotated[tuple[ImmRun, ...], Meta(min_length=1, max_length=VALUES_MAX)]

    def __post_init__(self) -> None:
        _check_runs(self.imms)


class Ping(_Control, frozen=True, array_like=True, tag=4):
    """Are you there? `number` is when this was asked, in nanoseconds of the sender's clock."""


class Pong(_Control, frozen=True, array_like=True, tag=5):
    """I am here."""


class Reopen(_Control, frozen=True, array_like=True, tag=10):
    """Accept rows of my NIC `source` at your NIC `nic` again; all that I sent have ended."""

    claims: ClassVar[str] = "source"

    source: Address
    nic: NicNumber


class Prune(_Control, frozen=True, array_like=True, tag=11):
    """Subtract these counts from your sums of my NIC `source` at your NIC `nic`, as I do.

    Each run is (first immediate, how many consecutive immediates, count of each). The generations
    of a path are 1, 2, 3 ...; one that was applied before is answered, and not applied again.
    """

    claims: ClassVar[str] = "source"

    source: Address
    nic: NicNumber
    generation: Annotated[int, Meta(ge=1, le=_U63)]
    runs: Annotated[tuple[Run, ...], Meta(min_length=1, max_length=VALUES_MAX)]

    def __post_init__(self) -> None:
        _check_runs([(first, n) for first, n, _ in self.runs])


def _check_runs(runs: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError unless these (first, n) are in order, and not too many values."""
    end = total = 0
    for first, n in runs:
        if first < end:
            raise ValueError(f"run at {first} begins before the end of the last, {end}")
        end, total = first + n, total + n
    if end > 1 << 32 or total > PRUNED_MAX:
        raise ValueError(f"runs of {total} immediates up to {end - 1}")


ControlMessage = FenceOff | Answer | Failed | Ping | Pong | Reopen | Prune

_DECODER: Final[msgspec.msgpack.Decoder[ControlMessage]] = msgspec.msgpack.Decoder(
    ControlMessage, strict=True
)


def encode(message: ControlMessage) -> bytes:
    """Encode a control message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes) -> ControlMessage:
    """Decode a control message. Raises BadDescriptor if the bytes are not a valid one."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        text = f"{bytes(data[:16])!r}... ({len(data)} bytes) is no control message: {error}"
        raise BadDescriptor(text) from error


def values_max(control_bytes: int) -> int:
    """Return how many immediates one question may name: its answer, 9 bytes each, fits too."""
    return max(1, (control_bytes - _HEAD_BYTES) // 9)


def runs_max(control_bytes: int) -> int:
    """Return how many runs fit into one message."""
    return max(1, (control_bytes - _HEAD_BYTES) // RUN_BYTES)
