"""What decoders and prefillers say to each other, and its bytes. No behaviour lives here.

MessagePack arrays that begin with the name of the message; strict: what does not fit is refused. A
message may be lost when its sender is told of an error, may have arrived all the same, and
messages overtake each other: every receiver must bear repeats and any order.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from tep import BadDescriptor
from tep.apps.kvcache.layout import KvLayout

__all__ = [
    "Beat",
    "Cancel",
    "Dispatch",
    "Ended",
    "Hello",
    "Message",
    "Refuse",
    "Welcome",
    "decode",
    "encode",
]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The sender's name and incarnation come first, so that old ones can be told."""

    NAMED: ClassVar[bool] = True

    sender: str
    epoch: int


class Hello(_Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Decoder -> prefiller: who I am, and where you may write.

    Attributes:
        addr: NetAddr of my first rank.
        fingerprint: of the layout.
        layout: whole, for the refusal's text.
        kv: MrDesc bytes, one a buffer, for each rank.
        tail: MrDesc bytes of the tail slots, on the first rank.
        npages: pages of each buffer.
        tail_bytes: length of one tail slot.
    """

    addr: bytes
    fingerprint: bytes
    layout: KvLayout
    kv: tuple[tuple[bytes, ...], ...]
    tail: bytes
    npages: int
    tail_bytes: int


class Welcome(_Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Prefiller -> decoder: the layouts agree; I have so many ranks."""

    tp: int


class Refuse(_Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Prefiller -> decoder: no dealings with you, and why."""

    reason: str


class Dispatch(_Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Decoder -> prefiller: compute this prompt and write its cache to my pages.

    Attributes:
        serial: of this attempt; grows with each that this incarnation makes.
        request: its name.
        imm: what every write is to carry.
        pages: u32 little-endian, one for each page from `first_page` on.
        first_page: pages before it are here already, and are neither sent nor counted.
        tail_slot: where the tail goes.
        ntokens: length of the prompt.
        input_ids: i32 little-endian; empty where the model needs none.
        seed: of the random matching of ranks.
    """

    serial: int
    request: str
    imm: int
    pages: bytes
    first_page: int
    tail_slot: int
    ntokens: int
    input_ids: bytes
    seed: int


class Cancel(_Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Decoder -> prefiller: stop this attempt, and tell me when no write of it is under way."""

    serial: int


class Ended(_Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Prefiller -> decoder: nothing of this attempt is under way, nor ever will be again.

    The answer to a Cancel; also sent unasked when an attempt failed. A request that went well ends
    without a message.

    Attributes:
        serial: of the attempt.
        unsure: a write of it failed, and may land after its error.
        reason: why it failed; "" if it was cancelled, was over before, or never came.
    """

    serial: int
    unsure: bool
    reason: str


class Beat(_Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Both ways: I live.

    Attributes:
        oldest: decoder's: attempts before this serial are over; 0 from a prefiller.
    """

    oldest: int


Message = Hello | Welcome | Refuse | Dispatch | Cancel | Ended | Beat

_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, strict=True)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Turn a message into bytes."""
    return _ENCODER.encode(message)


def decode(payload: bytes | memoryview) -> Message:
    """Read a message.

    Raises:
        BadDescriptor: the bytes are none.
    """
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadDescriptor(f"{len(payload)} bytes are no KV cache message: {error}") from error
