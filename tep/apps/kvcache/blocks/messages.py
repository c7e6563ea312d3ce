"""The messages of senders and receivers of blocks, and the cards and tickets that engines carry.

MessagePack; strict. Messages may be lost, repeated and overtake each other. Each names the
incarnation it is meant for, so that no later one takes it. Rule: what a message says of its sender
is a claim; `KvBlocks.peer_of` compares it with the engine's `Sender`.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tep import BadDescriptor
from tep.apps.kvcache.layout import Placed

__all__ = [
    "Cancel", "Card", "Claim", "Ended", "Go", "Message", "Note", "Over", "Refuse", "Stopping",
    "Ticket", "decode", "decode_as", "encode",
]  # fmt: skip

_U64 = Annotated[int, Meta(ge=0)]
Part = Annotated[int, Meta(ge=0, lt=4096)]
Parts = Annotated[int, Meta(ge=1, le=4096)]
Rank = Annotated[int, Meta(ge=0, lt=4096)]
Ranks = Annotated[int, Meta(ge=1, le=4096)]
Imm = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
Indices = Annotated[bytes, Meta(max_length=1 << 20)]


class Card(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank's cache, as senders need to know it.

    Attributes:
        addr: NetAddr of its engine.
        tp, rank: its place among the ranks of its instance.
        tensors: where they lie: a list of `Placed`, encoded; caches of one layout have equal ones.
        regions: MrDesc of each region.
    """

    addr: bytes
    tp: Ranks
    rank: Rank
    tensors: msgspec.Raw
    regions: tuple[bytes, ...]


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The blocks that one rank expects; it travels by any way to the sender.

    It allows nothing by itself: a sender has to claim it first, and the receiver may refuse.

    Attributes:
        name, epoch: of the receiver's engine.
        serial: of the receiver's requests.
        request: its name.
        blocks: for each group, u32 little-endian.
    """

    name: str
    epoch: _U64
    serial: int
    request: str
    blocks: tuple[Indices, ...]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The epoch of the engine that it is for, and the sender's number of the claim."""

    epoch: _U64
    claim: int


class Claim(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Sender -> receiver: may I write for this ticket?

    Attributes:
        addr: NetAddr of the sender.
        serial, request: of the ticket.
        tp, rank: the sender's.
        rows: length of a row of each tensor that it will write, by the tensor's name.
        sums: its end will bring the checksum of each tensor's rows.
    """

    addr: bytes
    serial: int
    request: str
    tp: Ranks
    rank: Rank
    rows: dict[str, int]
    sums: bool


class Go(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Receiver -> sender: write, each row with this immediate, which is yours alone."""

    imm: Imm


class Refuse(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Receiver -> sender: do not write, and why."""

    reason: str


class Cancel(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Receiver -> sender: stop, and tell me when no row is under way.

    Attributes:
        addr: NetAddr of the receiver.
        serial: of its request.
    """

    addr: bytes
    serial: int
    reason: str


class Ended(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Sender -> receiver: no row of this claim is under way, nor will be. Repeated until Over.

    Attributes:
        addr: NetAddr of the sender.
        serial: of the receiver's request.
        good: for each group, a bitmap of the blocks that were written whole.
        doubt: a failed row may still land.
        reason: why it ended early, else "".
        sums: `tep.checksum` of the rows of each tensor, by its name, if the claim announced it.
    """

    addr: bytes
    serial: int
    good: tuple[bytes, ...]
    doubt: bool
    reason: str
    sums: dict[str, int]


class Stopping(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Sender -> receiver: I know that I shall stop, and rows of this claim are under way.

    `addr` and `serial` are as of Ended.
    """

    addr: bytes
    serial: int


class Over(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Receiver -> sender: I know that it ended."""


class Note(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Either way: a piece of what an integration has to say, see `KvBlocks.send_note`.

    Attributes:
        addr: NetAddr of its sender.
        part, parts: which piece of how many.
        body: of this piece.
    """

    addr: bytes
    part: Part
    parts: Parts
    body: bytes


Message = Claim | Go | Refuse | Cancel | Ended | Stopping | Over | Note
_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, strict=True)


def encode(value: Message | Card | Ticket | tuple[Placed, ...]) -> bytes:
    """Turn a message, a card, a ticket or the tensors of a card into bytes."""
    return _ENCODER.encode(value)


def decode(payload: bytes | memoryview) -> Message:
    """Read a message; BadDescriptor if the bytes are none."""
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadDescriptor(f"{len(payload)} bytes are no message of blocks: {error}") from error


def decode_as(kind: type[_T], payload: bytes) -> _T:
    """Read a card or a ticket; BadDescriptor if the bytes are none."""
    try:
        return msgspec.msgpack.decode(payload, type=kind, strict=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise BadDescriptor(f"these bytes are no {kind.__name__}: {error}") from error
