"""Frames, in which two NICs talk besides writes, as bytes; and messages, which frames carry.

Frames are greetings, leases, messages and control messages. They travel as libfabric messages.
Every frame names its sender's address, and bytes that are not a frame are dropped.

A message is sent once and acknowledged. One that finds no buffer at the peer is not kept there: its
sender is told to wait, and to send again once there is one. So a slow reader costs its senders'
memory and nobody else's. A control message is the engine's: it is always taken, and handed out with
its sender's address. Nothing here calls libfabric.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Annotated, Final, Protocol

import msgspec
from msgspec import Meta

from tep.backends.base import Entry, Kind, Status
from tep.backends.handing import ReceivePool

if TYPE_CHECKING:
    from tep.backends.libfabric.peer import Peer

__all__ = [
    "CONTROL_BYTES_MAX", "HEAD_BYTES_MAX", "Ack", "Ask", "AskRead", "Bye", "Control", "Data",
    "Frame", "Go", "Hello", "Inbox", "Lease", "Outgoing", "Readable", "Revoke", "Stale", "Talk",
    "Wait", "Welcome", "decode", "encode",
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

    epoch: Unsigned


class Ask(_Frame, frozen=True, array_like=True, tag=4):
    """Tell me which range this key of yours opens to me."""

    rkey: Unsigned


class Lease(_Frame, frozen=True, array_like=True, tag=5):
    """This one; `nbytes` 0 = none, but for empty rows where `base` is 1. Until I revoke it."""

    rkey: Unsigned
    base: Unsigned
    nbytes: Unsigned


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


class AskRead(_Frame, frozen=True, array_like=True, tag=13):
    """Tell me which range I may read under this key of yours now; under the same number."""

    rkey: Unsigned
    number: Unsigned


class Readable(_Frame, frozen=True, array_like=True, tag=14):
    """This one, at this moment; `nbytes` 0 = none."""

    rkey: Unsigned
    base: Unsigned
    nbytes: Unsigned
    number: Unsigned


Frame = (
    Hello
    | Welcome
    | Stale
    | Ask
    | Lease
    | Revoke
    | Data
    | Ack
    | Wait
    | Go
    | Bye
    | Control
    | AskRead
    | Readable
)

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


# ------------------------------------------------------------------ messages

CONTROL_BYTES_MAX: Final = 4096
"""No provider's messages are shorter."""

_OPEN_MAX: Final = 64
_STARVED_MAX: Final = 4096

_SENT: Final = int(Kind.SENT)
_RECV: Final = int(Kind.RECV)
_OK: Final = int(Status.OK)


class Talk(Protocol):
    """Peers, as far as messages go."""

    def say(self, peer: Peer, frame: Frame) -> None:
        """Queue a frame to a peer."""

    def doubt(self, peer: Peer, now_s: float) -> None:
        """Ask whether a peer lives."""


class _Message:
    """One message or control message of ours that has not been acknowledged."""

    __slots__ = ("ctx", "is_control", "payload", "peer", "since_s", "waiting")

    def __init__(
        self, peer: Peer, payload: bytes, ctx: int, now_s: float, is_control: bool
    ) -> None:
        self.peer = peer
        self.is_control = is_control
        self.payload = payload
        self.ctx = ctx
        self.waiting = 0  # Waits less Gos since it was sent; frames may overtake each other
        self.since_s = now_s


class Outgoing:
    """Messages and control messages that this NIC sends. One kind that is full does not hold up
    the other.

    Args:
        me: this NIC's address.
        done: where completions go.
        timeout_s: how long a message may go unanswered.

    Attributes:
        open: what has not been acknowledged, by number.
    """

    def __init__(self, me: bytes, done: deque[Entry], timeout_s: float) -> None:
        self._me = me
        self._done = done
        self._timeout_s = timeout_s
        self.open: dict[int, _Message] = {}
        self._number = 0
        self._controls = 0  # of those that are open

    def send(
        self,
        peers: Talk,
        peer: Peer,
        payload: bytes,
        ctx: int,
        now_s: float,
        *,
        is_control: bool,
    ) -> bool:
        """Take one message or control message; False = too many of its kind are open."""
        if (self._controls if is_control else len(self.open) - self._controls) >= _OPEN_MAX:
            return False
        self._number += 1
        self._controls += is_control
        self.open[self._number] = _Message(peer, payload, ctx, now_s, is_control)
        if peer.over:
            self._end(self._number, peer.status)
        elif is_control and len(payload) > CONTROL_BYTES_MAX:
            self._end(self._number, Status.LENGTH)
        else:
            frame = Control if is_control else Data
            peers.say(peer, frame(self._me, self._number, payload))
        return True

    def take_ack(self, frame: Ack) -> None:
        """The peer says how a message or control message ended."""
        message = self.open.get(frame.number)
        if message is not None and message.peer.data == frame.sender:
            known = frame.status in Status._value2member_map_
            self._end(frame.number, Status(frame.status) if known else Status.PROVIDER)

    def balance(self, peers: Talk, frame: Wait | Go, now_s: float) -> None:
        """Send a message again once the peer had no buffer for it (Wait), and has one (Go).

        The two come in any order.
        """
        message = self.open.get(frame.number)
        if message is not None and message.peer.data == frame.sender:
            step = 1 if isinstance(frame, Wait) else -1
            message.waiting = max(-1, min(message.waiting + step, 1))
            if message.waiting == 0:
                self._again(peers, frame.number, message, now_s)

    def _again(self, peers: Talk, number: int, message: _Message, now_s: float) -> None:
        """Send a message again that the peer reported as dropped."""
        message.waiting = 0
        message.since_s = now_s
        peers.say(message.peer, Data(self._me, number, message.payload))

    def drop(self, peer: Peer, status: Status) -> None:
        """A peer is over: its messages end with it."""
        for number in [n for n, message in self.open.items() if message.peer is peer]:
            self._end(number, status)

    def interrupt(self, peer: Peer) -> None:
        """The connection broke: whether what was sent arrived is unknown."""
        for number, message in list(self.open.items()):
            if message.peer is peer and message.waiting <= 0:
                self._end(number, Status.PROVIDER)

    def look(self, peers: Talk, now_s: float) -> None:
        """Messages without an answer make us doubt their peer; and fail when they stay so."""
        for number, message in list(self.open.items()):
            if now_s - message.since_s < self._timeout_s:
                continue
            if message.waiting > 0:
                # It waits for a buffer, for as long as that takes. But does the peer live, and was
                # its Go lost? It is offered anew.
                peers.doubt(message.peer, now_s)
                self._again(peers, number, message, now_s)
            else:
                self._end(number, Status.UNREACHABLE)

    def close(self, status: Status) -> None:
        """End what is open."""
        for number in list(self.open):
            self._end(number, status)

    def _end(self, number: int, status: Status) -> None:
        message = self.open.pop(number)
        self._controls -= message.is_control
        self._done.append((_SENT, int(status), 1, 0, 0, message.ctx, 0))


class Inbox:
    """Messages that this NIC receives: the user's rotating pool.

    Args:
        me: this NIC's address.
        done: where completions go.
    """

    def __init__(self, me: bytes, done: deque[Entry]) -> None:
        self._me = me
        self._done = done
        self._pool = ReceivePool()
        self._starved: deque[tuple[Peer, int]] = deque()

    def add(self, peers: Talk, nbytes: int, count: int) -> None:
        """Add buffers to the pool."""
        self._pool.add(nbytes, count)
        for _ in range(count):
            self._feed(peers)

    def take_data(self, peers: Talk, peer: Peer, frame: Data) -> None:
        """A message comes in: keep it and acknowledge, or say what hinders."""
        nbytes = len(frame.payload)
        if self._pool.never_fits(nbytes):
            peers.say(peer, Ack(self._me, frame.number, Status.LENGTH))
            return
        found = self._pool.take(nbytes, frame.sender)
        if found is None:
            known = (peer, frame.number) in self._starved
            if known or len(self._starved) < _STARVED_MAX:
                if not known:
                    self._starved.append((peer, frame.number))
                peers.say(peer, Wait(self._me, frame.number))
            else:
                peers.say(peer, Ack(self._me, frame.number, Status.RNR))
            return
        slot, buffer = found
        buffer[:nbytes] = frame.payload
        self._done.append((_RECV, _OK, 1, 0, 0, slot, nbytes))
        peers.say(peer, Ack(self._me, frame.number, Status.OK))

    def view(self, slot: int) -> memoryview:
        """The bytes of a received message."""
        return self._pool.view(slot)

    def source(self, slot: int) -> bytes:
        """The address of the NIC that sent a message."""
        return self._pool.sender(slot)

    def give_back(self, peers: Talk, slot: int) -> None:
        """A buffer is free again."""
        self._pool.give_back(slot)
        self._feed(peers)

    def drop(self, peer: Peer) -> None:
        """A peer is over: nobody waits there any more."""
        if self._starved:
            self._starved = deque(item for item in self._starved if item[0] is not peer)

    def _feed(self, peers: Talk) -> None:
        """Tell one of those who wait that there is a buffer."""
        if self._starved:
            peer, number = self._starved.popleft()
            peers.say(peer, Go(self._me, number))
