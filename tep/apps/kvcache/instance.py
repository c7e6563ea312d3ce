"""The base of prefillers and decoders: memory, pages, and words with the peers of its requests.

A turn every `Patience.beat_s` sends beats to watched peers and notices those that fell silent.
Silence proves nothing: a peer that is silent may still write; what follows from it is decided by
the instance. Rule: everything here runs on the event loop's thread, but `_hear` and `_call`.

Messages are notes of the first ranks' `KvBlocks`: MessagePack arrays that begin with the name of
the message; strict: what does not fit is refused. Notes may be lost, repeated and overtake each
other. Who sent one is known from `KvBlocks`. What senders and receivers of blocks say to each other
is in blocks/messages.py.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec

from tep import BadDescriptor, NetAddr, TransferEngine
from tep.apps.kvcache.blocks import KvReceiver, KvSender
from tep.apps.kvcache.memory import KvMemory, PagePool, SideOptions
from tep.apps.kvcache.model import Model

__all__ = ["Answer", "Beat", "Instance", "Message", "Order", "decode", "encode"]


class Instance(ABC):
    """One prefill or decode instance; made inside a running event loop.

    Args:
        name: unique.
        engines: one a rank.
        model: computes.
        side: sizes, times and memory.

    Attributes:
        pool, tails: of pages, and of tail slots.
    """

    def __init__(
        self, name: str, engines: Sequence[TransferEngine], model: Model, side: SideOptions
    ) -> None:
        self.name = name
        self.memory = KvMemory(engines, model.layout, side)
        self.pool = PagePool(side.npages)
        self.tails = PagePool(side.tail_slots)
        self._model, self._layout, self._patience = model, model.layout, side.patience
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)  # of messages
        self._heard: dict[NetAddr, float] = {}  # the watched peers, and when each spoke last
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._changed = asyncio.Event()
        self._sides: Sequence[KvSender | KvReceiver] = ()
        self.memory.blocks[0].on_note(self._hear)

    @property
    def addr(self) -> NetAddr:
        """The address of the first rank, which messages go to."""
        return self.memory.engines[0].main_address

    def close(self) -> None:
        """Stop at once, as if it died: nothing that is under way is waited for. Idempotent."""
        self._closed = True
        self._heard.clear()
        if self._timer is not None:
            self._timer.cancel()

    @abstractmethod
    def _take(self, peer: NetAddr, message: Message) -> None:
        """Act on a message."""

    @abstractmethod
    def _on_silent(self, peer: NetAddr) -> None:
        """Give up waiting for a peer that has been silent for too long; it is not watched now."""

    @abstractmethod
    def _beat(self, peer: NetAddr) -> None:
        """Send a watched peer what it needs to hear, once a turn."""

    # ------------------------------------------------------------------ messages

    def _send(self, peer: NetAddr, message: Message, number: int | None = None) -> None:
        """Send a message, which may be lost, to the first rank of an instance.

        `number` is the same each time that it is sent; None: it is not sent again.
        """
        number = next(self._numbers) if number is None else number
        self.memory.blocks[0].send_note(peer, number, encode(message))

    def _hear(self, peer: NetAddr, body: bytes) -> None:
        try:
            message = decode(body)
        except BadDescriptor:
            return
        self._call(self._on_message, peer, message)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        """Have a function called on the event loop's thread, unless the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _on_message(self, peer: NetAddr, message: Message) -> None:
        if self._closed:
            return
        if peer in self._heard:
            self._heard[peer] = self._loop.time()
        self._take(peer, message)

    # ------------------------------------------------------------------ time

    def _watch(self, peer: NetAddr) -> None:
        """Beat to a peer from now on, and expect its beats. Idempotent."""
        self._heard.setdefault(peer, self._loop.time())
        self._turn_later()

    def _turn_later(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._patience.beat_s, self._turn)

    def _turn(self) -> None:
        self._timer = None
        for peer, heard_s in list(self._heard.items()):
            if self._loop.time() - heard_s > self._patience.silent_s:
                self._heard.pop(peer, None)
                self._on_silent(peer)
            else:
                self._beat(peer)
        if self._poll() or self._heard:
            self._turn_later()

    def _poll(self) -> bool:
        """Poll senders or receivers; False: nothing is under way."""
        for side in self._sides:
            side.poll()
        self._changed.set()
        return not all(side.idle for side in self._sides)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; `_changed` is set whenever it may have come true."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()


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
