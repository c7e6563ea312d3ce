"""Frames, in which two NICs talk besides writes, as bytes.

Frames are greetings, leases, messages and control messages. They travel as libfabric messages.
Every frame names its sender's address, and bytes that are not a frame are dropped.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

__all__ = [
    "HEAD_BYTES_MAX", "Ack", "Ask", "Bye", "Control", "Data", "Frame", "Go", "Hello", "Lease",
    "Revoke", "Stale", "Wait", "Welcome", "decode", "encode",
]  # fmt: skip

Unsigned = Annotated[int, Meta(ge=0)]
Address = Annotated[bytes, Meta(min_length=1, max_length=256)]


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A frame; `sender` is the address of the NIC that sent it."""

    sender: Address


class Hello(_Frame, frozen=True, array_like=True, tag=1):
    """I am here; you should be of this epoch."""

    epoch: Unsigned


class Welcome(_Frame, frozen=True, array_like=True, tag=2):
    """I am; and I know your address."""


class Stale(_Frame, frozen=True, array_like=True, tag=3):
    """The one you greet is gone; its address is mine now."""


class Ask(_Frame, frozen=True, array_like=True, tag=4):
    """Tell me which range this key of yours opens to me; `number` 0: to my writes.

    Any other number: to my reads, at this moment.
    """

    rkey: Unsigned
    number: Unsigned = 0


class Lease(_Frame, frozen=True, array_like=True, tag=5):
    """This one, and the number of the question; `nbytes` 0 = none.

    To writes it holds until I revoke it, and (1, 0) takes empty rows.
    """

    rkey: Unsigned
    base: Unsigned
    nbytes: Unsigned
    number: Unsigned = 0


class Revoke(_Frame, frozen=True, array_like=True, tag=6):
    """This key opens nothing any more."""

    rkey: Unsigned


class Data(_Frame, frozen=True, array_like=True, tag=7):
    """A message of the user's."""

    number: Unsigned
    payload: bytes


class Ack(_Frame, frozen=True, array_like=True, tag=8):
    """Your message, or control message, ended with this status."""

    number: Unsigned
    status: Annotated[int, Meta(ge=0, le=255)]


class Wait(_Frame, frozen=True, array_like=True, tag=9):
    """I have no buffer for your message, and did not keep it."""

    number: Unsigned


class Go(_Frame, frozen=True, array_like=True, tag=10):
    """There is a buffer now: send it again."""

    number: Unsigned


class Bye(_Frame, frozen=True, array_like=True, tag=11):
    """I am closing."""


class Control(_Frame, frozen=True, array_like=True, tag=12):
    """A word to your engine; it needs no buffer of the user's. Numbered like messages."""

    number: Unsigned
    payload: bytes


Frame = Hello | Welcome | Stale | Ask | Lease | Revoke | Data | Ack | Wait | Go | Bye | Control

HEAD_BYTES_MAX: Final = 512
"""The bytes that a frame needs at the most besides a payload."""

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Frame, strict=True)


def encode(frame: Frame) -> bytes:
    """Write a frame down."""
    return _ENCODER.encode(frame)


def decode(data: memoryview) -> Frame | None:
    """Read a frame; None if it is not one."""
    try:
        frame: Frame = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return frame
