"""The messages between workers of a decoder and of a prefiller, in notes of their KV caches.

MessagePack; strict. Notes may be lost, repeated and overtake each other: a Want is repeated until
it is answered, and an answer gives the current state.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tep import BadDescriptor

__all__ = ["Kind", "Told", "Want", "decode", "encode"]

Kind = Literal["load", "keep", "drop"]
Key = Annotated[str, Meta(max_length=256)]


class Want(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Decoder -> prefiller, about the blocks of one key.

    Attributes:
        number: counted by the decoder; the answer has it too.
        key: key of the transfer.
        kind: "load": write them for this ticket. "keep": keep them, a load will come. "drop": they
            are not wanted any more.
        early: see Source.
        card: the card of the decoder's cache, once it was asked for; else b"".
        ticket: ticket of the load.
    """

    number: Annotated[int, Meta(ge=0)]
    key: Key
    kind: Kind
    early: bool
    card: bytes = b""
    ticket: bytes = b""


class Told(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Prefiller -> decoder: the answer.

    Attributes:
        number, key: those of the Want.
        state: "taken": the load was begun. "kept": they are here, or will be. "gone": they are not,
            and the reason says why. "card": ask again, with the card.
        reason: the reason for "gone".
        process: mark of the prefiller's process, see `processes`; "" if there is none.
    """

    number: Annotated[int, Meta(ge=0)]
    key: Key
    state: Literal["taken", "kept", "gone", "card"]
    reason: Annotated[str, Meta(max_length=4096)] = ""
    process: Annotated[str, Meta(max_length=256)] = ""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Want | Told] = msgspec.msgpack.Decoder(Want | Told, strict=True)


def encode(note: Want | Told) -> bytes:
    """Encode a note."""
    return _ENCODER.encode(note)


def decode(raw: bytes) -> Want | Told:
    """Decode a note; BadDescriptor if the bytes are none."""
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadDescriptor(f"{len(raw)} bytes are no note of the connector: {error}") from error
