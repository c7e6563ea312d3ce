"""Messages between agents, in order and once each, over an engine's messages, which are neither.

A message that its sender is told to be lost is sent again under its number; the receiver sorts them
and drops copies. A peer that cannot be reached loses the whole stream: the next message begins
another. No meaning lives here.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock

import msgspec

from tep import BadDescriptor, Message, NetAddr, TepError, TransferEngine

__all__ = ["MESSAGE_BYTES", "Channel", "Channels"]

MESSAGE_BYTES = 64 * 1024
_BUFFERS = 32
_TRIES = 4


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One message on its way; `addr` is its sender's NetAddr."""

    name: str
    addr: bytes
    stream: int
    seq: int
    body: bytes


class Channel:
    """Both ways to one incarnation of one agent.

    Attributes:
        name, addr: the agent's.
        lost: why the last stream to it broke, or "".
    """

    def __init__(self, owner: Channels, name: str, addr: NetAddr) -> None:
        self._owner, self.name, self.addr, self.lost = owner, name, addr, ""
        self._stream = self._seq = 0
        self._their_stream = -1
        self._next = 0
        self._early: dict[int, bytes] = {}

    def send(self, body: bytes) -> None:
        """Send a message; what cannot be sent breaks the stream, and `on_lost` is called."""
        owner = self._owner
        frame = _Frame(owner.name, owner.raw, self._stream, self._seq, body)
        self._seq += 1
        self._try(msgspec.msgpack.encode(frame), self._stream, _TRIES)

    def _try(self, raw: bytes, stream: int, tries: int) -> None:
        def done(sent: Message) -> None:
            if sent.error is not None:
                with self._owner.lock:
                    if tries > 1 and stream == self._stream:
                        self._try(raw, stream, tries - 1)
                    else:
                        self._break(stream, str(sent.error))

        try:
            self._owner.engine.submit_send(self.addr, raw, on_done=done)
        except TepError as error:
            self._break(stream, str(error))

    def _break(self, stream: int, why: str) -> None:
        if stream == self._stream:
            self._stream, self._seq, self.lost = stream + 1, 0, why
            self._owner.on_lost(self, why)

    def take(self, frame: _Frame) -> list[bytes]:
        """The messages that are now in order."""
        if frame.stream > self._their_stream:
            self._their_stream, self._next, self._early = frame.stream, 0, {}
        if frame.stream == self._their_stream and frame.seq >= self._next:
            self._early[frame.seq] = frame.body
        found = []
        while self._next in self._early:
            found.append(self._early.pop(self._next))
            self._next += 1
        return found


class Channels:
    """All channels of one agent.

    Args:
        engine: its messages belong to this object.
        name: of the agent.
        on_message: called under the lock, on the engine's thread, with each message in order.
        on_lost: called under the lock with a channel whose stream broke, and why.

    Attributes:
        engine, name, on_lost: as given.
        lock: guards everything of the agent.
        raw: the engine's address.
        garbled: messages that were none.
    """

    def __init__(
        self,
        engine: TransferEngine,
        name: str,
        on_message: Callable[[Channel, bytes], object],
        on_lost: Callable[[Channel, str], object],
    ) -> None:
        self.engine, self.name, self.on_lost = engine, name, on_lost
        self.lock = RLock()
        self.raw = engine.main_address.to_bytes()
        self.garbled = 0
        self._on_message = on_message
        self._known: dict[tuple[str, str, int], Channel] = {}
        engine.submit_recvs(MESSAGE_BYTES, _BUFFERS, self._take)

    def to(self, name: str, addr: NetAddr) -> Channel:
        """The channel to an incarnation of an agent."""
        key = (name, addr.name, addr.epoch)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Channel(self, name, addr)
        return found

    def forget(self, channel: Channel) -> None:
        """Drop a channel; a message from there opens another."""
        self._known.pop((channel.name, channel.addr.name, channel.addr.epoch), None)

    def _take(self, payload: memoryview) -> None:
        try:
            frame = msgspec.msgpack.decode(payload, type=_Frame, strict=True)
            addr = NetAddr.from_bytes(frame.addr)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, BadDescriptor):
            self.garbled += 1
            return
        with self.lock:
            channel = self.to(frame.name, addr)
            for body in channel.take(frame):
                self._on_message(channel, body)
