"""The messages and beats of decoders and prefillers: notes of the first ranks' `KvBlocks`.

MessagePack arrays that begin with the name of the message; strict: what does not fit is refused.
Notes may be lost, repeated and overtake each other. Who sent one is known from `KvBlocks`. What
senders and receivers of blocks say to each other is in blocks/messages.py. Silence proves nothing:
a peer that is silent may still write; what follows from it is the caller's business.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Literal

import msgspec

from tep import BadDescriptor, NetAddr, TepError
from tep.apps.kvcache.blocks import KvBlocks, Patience
from tep.apps.kvcache.layout import KvLayout

__all__ = ["Answer", "Beat", "Mail", "Message", "Order", "Pulse", "decode", "encode"]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """One message."""


class Order(_Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Decoder -> prefiller: compute this prompt, and write what the tickets are for.

    Attributes:
        serial: of this attempt; grows with each that this incarnation makes.
        name: of the instance.
        layout: of the model.
        cards: where you may write, one a rank; others once the memory is registered anew.
        request: its name.
        tickets: one a rank.
        ntokens: length of the prompt.
        input_ids: i32 little-endian; empty where the model needs none.
    """

    serial: int
    name: str
    layout: KvLayout
    cards: tuple[bytes, ...]
    request: str
    tickets: tuple[bytes, ...]
    ntokens: int
    input_ids: bytes


class Answer(_Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Prefiller -> decoder: what becomes of an order.

    Attributes:
        serial: of the order.
        state: "taken": it is being done, or was. "refused": it is not.
        reason: why it is refused.
    """

    serial: int
    state: Literal["taken", "refused"]
    reason: str = ""


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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TepError) as error:
        raise BadDescriptor(f"{len(payload)} bytes are no KV cache message: {error}") from error


class Mail:
    """The messages of one instance, handed over on the event loop's thread.

    Args:
        blocks: of the first rank.
        take: called with the address of each message's sender, and the message.

    Attributes:
        loop: of the instance.
        garbled: notes that were no messages.
    """

    def __init__(self, blocks: KvBlocks, take: Callable[[NetAddr, Message], object]) -> None:
        self.loop = asyncio.get_running_loop()
        self.garbled = 0
        self._blocks, self._take = blocks, take
        self._numbers = itertools.count(1)
        blocks.on_note(self._hear)

    def number(self) -> int:
        """A number for a message that is sent again and again."""
        return next(self._numbers)

    def send(self, peer: NetAddr, message: Message, number: int | None = None) -> None:
        """Send a message that may be lost.

        Args:
            peer: the first rank of its instance.
            message: to send.
            number: the same each time that it is sent; None: it is not sent again.
        """
        self._blocks.send_note(peer, self.number() if number is None else number, encode(message))

    def _hear(self, peer: NetAddr, body: bytes) -> None:
        """Hand a note over, from the engine's thread."""
        try:
            message = decode(body)
        except BadDescriptor:
            self.garbled += 1
            return
        self.call(self._take, peer, message)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Have a function called on the event loop's thread, unless the loop is closed."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *args)


class Pulse:
    """A turn every beat_s: beats to watched peers, and a call for each that falls silent.

    Args:
        patience: how often, and how long.
        beat: called with a watched peer: send it a beat.
        on_silent: called once with a peer that has been silent for too long; it is not watched any
            more then.
        turn: called once a turn; turns go on while it returns True or somebody is watched.
    """

    def __init__(
        self,
        patience: Patience,
        *,
        beat: Callable[[NetAddr], object],
        on_silent: Callable[[NetAddr], object],
        turn: Callable[[], bool],
    ) -> None:
        self._patience = patience
        self._beat, self._on_silent, self._each = beat, on_silent, turn
        self._heard: dict[NetAddr, float] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def watch(self, peer: NetAddr) -> None:
        """Beat to a peer from now on, and expect its beats. Idempotent."""
        if peer not in self._heard:
            self._heard[peer] = self._loop.time()
        self.start()

    def start(self) -> None:
        """Begin to turn. Idempotent."""
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._patience.beat_s, self._turn)

    def leave(self, peer: NetAddr) -> None:
        """Watch a peer no more. Idempotent."""
        self._heard.pop(peer, None)

    def heard(self, peer: NetAddr) -> None:
        """Something came from a peer."""
        if peer in self._heard:
            self._heard[peer] = self._loop.time()

    def close(self) -> None:
        """Turn no more. Idempotent."""
        self._closed = True
        self._heard.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        for peer, heard_s in list(self._heard.items()):
            if now_s - heard_s > self._patience.silent_s:
                self._heard.pop(peer, None)
                self._on_silent(peer)
            else:
                self._beat(peer)
        if self._each() or self._heard:
            self.start()
