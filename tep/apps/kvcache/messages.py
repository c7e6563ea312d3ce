"""The messages of decoders and prefillers: notes of the first ranks' `KvBlocks`.

MessagePack arrays that begin with the name of the message; strict: what does not fit is refused.
Notes may be lost, repeated and overtake each other. Who sent one is known from `KvBlocks`. What
senders and receivers of blocks say to each other is in blocks/messages.py.
"""

from __future__ import annotations

import msgspec

from tep import BadDescriptor

__all__ = ["Answer", "Beat", "Message", "Order", "decode", "encode"]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """One message."""


class Order(_Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Decoder -> prefiller: compute this prompt, and write what the tickets are for.

    Attributes:
        serial: of this attempt; grows with each that this incarnation makes.
        cards: where you may write, one a rank.
        request: its name.
        tickets: one a rank.
        ntokens: length of the prompt.
        input_ids: i32 little-endian; empty where the model needs none.
    """

    serial: int
    cards: tuple[bytes, ...]
    request: str
    tickets: tuple[bytes, ...]
    ntokens: int
    input_ids: bytes


class Answer(_Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Prefiller -> decoder: what becomes of an order.

    Attributes:
        serial: of the order.
        refusal: why it is not done; "": it is being done, or was.
    """

    serial: int
    refusal: str = ""


class Beat(_Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Decoder -> prefiller, and back: I live.

    Attributes:
        serials: orders that the decoder knows to be taken, and waits for; none from a prefiller.
    """

    serials: tuple[int, ...] = ()


Message = Order | Answer | Beat

_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, strict=True)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Turn a message into bytes."""
    return _ENCODER.encode(message)


def decode(payload: bytes) -> Message:
    """Read a message.

    Raises:
        BadDescriptor: the bytes are none.
    """
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadDescriptor(f"{len(payload)} bytes are no KV cache message: {error}") from error
