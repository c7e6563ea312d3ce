"""Messages and control messages over frames: sent once, acknowledged; messages wait while there is
no buffer.

A message that finds no buffer at the peer is not kept there: its sender is told to wait, and to
send again once there is one. So a slow reader costs its senders' memory and nobody else's. A
control message
is the engine's: it is always taken, and handed out with its sender's address. Nothing here calls
libfabric.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from tep.backends.base import Entry, Kind, Status
from tep.backends.handing import ReceivePool
from tep.backends.libfabric import frames

if TYPE_CHECKING:
    from tep.backends.libfabric.peer import Peer
    from tep.backends.libfabric.peers import Peers

__all__ = ["CONTROL_BYTES_MAX", "Inbox", "Outgoing"]

CONTROL_BYTES_MAX: Final = 4096
"""No provider's messages are shorter."""

_OPEN_MAX: Final = 64
_STARVED_MAX: Final = 4096

_SENT: Final = int(Kind.SENT)
_RECV: Final = int(Kind.RECV)
_OK: Final = int(Status.OK)


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
        peers: Peers[Any],
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
            frame = frames.Control if is_control else frames.Data
            peers.say(peer, frame(self._me, self._number, payload))
        return True

    def take_ack(self, frame: frames.Ack) -> None:
        """The peer says how a message or control message ended."""
        message = self.open.get(frame.number)
        if message is not None and message.peer.data == frame.sender:
            known = frame.status in Status._value2member_map_
            self._end(frame.number, Status(frame.status) if known else Status.PROVIDER)

    def take_wait(self, peers: Peers[Any], frame: frames.Wait, now_s: float) -> None:
        """The peer has no buffer, and has not kept the message."""
        self._balance(peers, frame, 1, now_s)

    def take_go(self, peers: Peers[Any], frame: frames.Go, now_s: float) -> None:
        """The peer has a buffer again."""
        self._balance(peers, frame, -1, now_s)

    def _balance(
        self, peers: Peers[Any], frame: frames.Wait | frames.Go, step: int, now_s: float
    ) -> None:
        """Send a message again once both Wait and Go are here, in whatever order they came."""
        message = self.open.get(frame.number)
        if message is not None and message.peer.data == frame.sender:
            message.waiting = max(-1, min(message.waiting + step, 1))
            if message.waiting == 0:
                self._again(peers, frame.number, message, now_s)

    def _again(self, peers: Peers[Any], number: int, message: _Message, now_s: float) -> None:
        """Send a message once more, of which the peer has said that it did not keep it."""
        message.waiting = 0
        message.since_s = now_s
        peers.say(message.peer, frames.Data(self._me, number, message.payload))

    def drop(self, peer: Peer, status: Status) -> None:
        """A peer is over: its messages end with it."""
        for number in [n for n, message in self.open.items() if message.peer is peer]:
            self._end(number, status)

    def interrupt(self, peer: Peer) -> None:
        """The connection broke: whether what was sent arrived is unknown."""
        for number, message in list(self.open.items()):
            if message.peer is peer and message.waiting <= 0:
                self._end(number, Status.PROVIDER)

    def look(self, peers: Peers[Any], now_s: float) -> None:
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

    def add(self, peers: Peers[Any], nbytes: int, count: int) -> None:
        """Add buffers to the pool."""
        self._pool.add(nbytes, count)
        for _ in range(count):
            self._feed(peers)

    def take_data(self, peers: Peers[Any], peer: Peer, frame: frames.Data) -> None:
        """A message comes in: keep it and acknowledge, or say what hinders."""
        nbytes = len(frame.payload)
        if self._pool.never_fits(nbytes):
            peers.say(peer, frames.Ack(self._me, frame.number, Status.LENGTH))
            return
        found = self._pool.take(nbytes, frame.sender)
        if found is None:
            known = (peer, frame.number) in self._starved
            if known or len(self._starved) < _STARVED_MAX:
                if not known:
                    self._starved.append((peer, frame.number))
                peers.say(peer, frames.Wait(self._me, frame.number))
            else:
                peers.say(peer, frames.Ack(self._me, frame.number, Status.RNR))
            return
        slot, buffer = found
        buffer[:nbytes] = frame.payload
        self._done.append((_RECV, _OK, 1, 0, 0, slot, nbytes))
        peers.say(peer, frames.Ack(self._me, frame.number, Status.OK))

    def view(self, slot: int) -> memoryview:
        """The bytes of a received message."""
        return self._pool.view(slot)

    def source(self, slot: int) -> bytes:
        """The address of the NIC that sent a message."""
        return self._pool.sender(slot)

    def give_back(self, peers: Peers[Any], slot: int) -> None:
        """A buffer is free again."""
        self._pool.give_back(slot)
        self._feed(peers)

    def drop(self, peer: Peer) -> None:
        """A peer is over: nobody waits there any more."""
        if self._starved:
            self._starved = deque(item for item in self._starved if item[0] is not peer)

    def _feed(self, peers: Peers[Any]) -> None:
        """Tell one of those who wait that there is a buffer."""
        if self._starved:
            peer, number = self._starved.popleft()
            peers.say(peer, frames.Go(self._me, number))
