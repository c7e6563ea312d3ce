"""The peers of one NIC, and whether they live: their states, and the greetings that change these.

A peer is greeted before the first row goes to it: the answer proves that it polls, that it is of
the epoch that its address names, and that it knows us (EFA needs that). Rows wait in `held`.

    CONNECTING --Welcome, or its own Hello--> READY
    CONNECTING --no answer in time--> SILENT        READY --no completion in time--> SILENT
    SILENT --rows wait that came later--> CONNECTING
    CONNECTING --Stale--> GONE                      any --Bye--> LEAVING, then GONE
    any --our own NIC is lost--> GONE
    READY --a row or frame failed--> CONNECTING     SILENT --asked again later--> CONNECTING

Rule: this file decides a peer's state, and nobody else.

Messages go in frames, too. One is sent once and acknowledged. One that finds no buffer at the peer
is not kept there: its sender is told to wait, and to send again once there is one. So a slow reader
costs its senders' memory and nobody else's. A control message is the engine's: it is always taken,
and handed out with its sender's address.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tep.backends.base import Kind, Status
from tep.backends.common import ReceivePool
from tep.backends.libfabric import frames
from tep.backends.libfabric.completions import Parts
from tep.backends.libfabric.objects import Endpoint
from tep.backends.libfabric.peer import Peer, State
from tep.backends.libfabric.rules import NicAddress, efa_place, parse
from tep.base.errors import BadDescriptor, FabricError

__all__ = ["CONTROL_BYTES_MAX", "Inbox", "Outgoing", "Peers"]

_SILENCE_S: Final = 1.0
"""For how long a peer that did not answer is not asked again for the sake of messages, which
engines repeat: they fail at once. Rows are tried anew."""

_GRACE_S: Final = 0.1
"""For how long answers may follow a goodbye. A guess: far more than a network takes."""

_OUTBOX_MAX: Final = 1024
_SETTLED: Final = frozenset({State.CONNECTING, State.LEAVING, State.GONE})


class Peers:
    """All peers of one NIC.

    Args:
        main: the NIC's own endpoint.
        on_over: called with a peer that has become SILENT or GONE, after cut().

    Attributes:
        all: by PeerId.
        refusal: why the last endpoint could not be opened; "" = it was.
        answered: some peer has answered this NIC, ever.
        departed: peers that are gone and that a device still knows; settle() is called while there
            are some.
    """

    def __init__(
        self,
        parts: Parts,
        me: NicAddress,
        main: Endpoint,
        on_over: Callable[[Peer], None],
    ) -> None:
        self.parts = parts
        self.all: list[Peer] = []
        self.refusal = ""
        self.answered = False
        self._epoch = me.epoch
        self.me = me.to_bytes()
        self._main = main
        self._on_over = on_over
        self.departed: list[Peer] = []
        self._places: dict[bytes, dict[bytes, Peer]] = {}  # whom a device knows, by queue pair
        self._by_data: dict[bytes, Peer] = {}
        self._latest: dict[bytes, Peer] = {}  # by raw address
        self._closed = False

    # --- finding

    def find(self, data: bytes) -> Peer:
        """The peer at an address, made known to libfabric when first seen; or BadDescriptor."""
        found = self._by_data.get(data)
        if found is None:
            found = Peer(len(self.all), data, parse(data, self.parts.rules.provider))
            if self.parts.nic.failure:
                found.state, found.status = State.GONE, Status.NIC_DOWN
            else:
                self._meet(found)
            self.all.append(found)
            self._by_data[data] = found
            self._supersede(found)
        return found

    def _meet(self, peer: Peer) -> None:
        raw = peer.address.raw
        peer.number = self.parts.nic.insert(raw)
        if not self.parts.rules.software:
            self._places.setdefault(efa_place(raw), {})[raw] = peer

    def _part(self, peer: Peer) -> None:
        """Take a peer that is gone out of the address vector: now, or by settle()."""
        if self.parts.rules.software:
            self.parts.nic.remove(peer.number)
        else:
            self.departed.append(peer)

    def settle(self) -> None:
        """Remove peers of a device: once all that went to them is back, and where it is safe.

        EFA's provider drops the completions of a peer that is removed before: what they hold, slots
        and regions, would stay taken. And of two addresses with one queue pair number it forgets
        the wrong one, and crashes later (2.5.1, efa_av_reverse_av_remove): such addresses stay.
        """
        for peer in self.departed:
            known = self._places.get(efa_place(peer.address.raw), {})
            if not peer.out and known == {peer.address.raw: peer}:
                self.parts.nic.remove(peer.number)
                known.clear()
        self.departed[:] = [peer for peer in self.departed if peer.out]

    def _supersede(self, peer: Peer) -> None:
        """End the earlier one of two incarnations at one address."""
        other = self._latest.get(peer.address.raw)
        if other is None or other.address.epoch < peer.address.epoch:
            self._latest[peer.address.raw] = peer
            peer, other = other, peer  # type: ignore[assignment]  # checked below
        if peer is not None and other is not None:
            self._end(peer, State.GONE, Status.STALE_PEER)

    def known(self, data: bytes) -> Peer | None:
        """The peer that a frame names as its sender; None if that is no address."""
        try:
            return self.find(data)
        except (BadDescriptor, FabricError):
            return None

    def endpoint(self, peer: Peer) -> Endpoint:
        """Return what rows and frames to a peer go through."""
        if peer.endpoint is None:
            own = self.parts.rules.software
            peer.endpoint = self.parts.nic.open_endpoint() if own else self._main
            self.refusal = ""
        return peer.endpoint

    # --- greeting

    def greet(self, peer: Peer, now_s: float) -> None:
        """Ask a peer whether it is there, unless that is under way."""
        if peer.state in _SETTLED:
            return
        peer.state = State.CONNECTING
        peer.since_s = now_s
        peer.outbox.appendleft(frames.Hello(self.me, peer.address.epoch))

    def greet_again(self, peer: Peer, now_s: float) -> None:
        """Ask once more, if the peer has been silent long enough to be asked again."""
        if peer.state is State.SILENT and now_s - peer.since_s >= _SILENCE_S:
            self.greet(peer, now_s)

    def doubt(self, peer: Peer, now_s: float) -> None:
        """Something to or from a peer failed: ask whether it lives; what it told us is void."""
        peer.leases.clear()
        if peer.state is State.READY:
            self.greet(peer, now_s)

    def frame_failed(self, peer: Peer, now_s: float) -> None:
        """A frame did not arrive, maybe our greeting: greet again, within the same deadline."""
        peer.leases.clear()
        if peer.state is State.CONNECTING:
            hello = frames.Hello(self.me, peer.address.epoch)
            if not peer.outbox or peer.outbox[0] != hello:
                peer.outbox.appendleft(hello)
        else:
            self.doubt(peer, now_s)

    def say(self, peer: Peer, frame: frames.Frame) -> None:
        """Queue a frame. A peer that takes nothing loses the oldest."""
        if peer.state is State.GONE:
            return
        if len(peer.outbox) >= _OUTBOX_MAX:
            peer.outbox.popleft()
        peer.outbox.append(frame)

    def take_hello(self, peer: Peer, frame: frames.Hello, now_s: float) -> None:
        """A peer greets: it lives, whomever it meant to greet, and knows our address; answer."""
        self.is_ready(peer, now_s)
        if frame.epoch == self._epoch:
            self.say(peer, frames.Welcome(self.me))
        else:
            self.say(peer, frames.Stale(self.me))

    def is_ready(self, peer: Peer, now_s: float) -> None:
        if peer.state is not State.GONE:
            peer.state, peer.since_s, self.answered = State.READY, now_s, True

    def take_bye(self, peer: Peer, now_s: float) -> None:
        if peer.state is State.READY and peer.open:
            # What it answered before it said goodbye came by another connection.
            peer.state, peer.status, peer.since_s = State.LEAVING, Status.UNREACHABLE, now_s
        else:
            self._end(peer, State.GONE, Status.UNREACHABLE)

    def see_off(self, peer: Peer, now_s: float) -> None:
        """End a peer that is LEAVING, once its last answers are here or never will be."""
        if not peer.open or now_s - peer.since_s > _GRACE_S:
            self._end(peer, State.GONE, Status.UNREACHABLE)

    # --- looking after

    def flush(self, peer: Peer, now_s: float) -> bool:
        """Hand out what is in a peer's outbox; True if something left."""
        moved = False
        while peer.outbox and not (peer.over or self._closed or self.parts.nic.failure):
            try:
                if not self.parts.mailbox.send(peer, self.endpoint(peer), peer.outbox[0]):
                    peer.stuck_s = peer.stuck_s or now_s
                    break
            except OSError:
                self.doubt(peer, now_s)
                break
            except (FabricError, MemoryError) as error:  # no endpoint: no descriptor is left, say
                self.refusal = str(error) or "MemoryError"
                peer.stuck_s = peer.stuck_s or now_s
                break
            peer.outbox.popleft()
            peer.stuck_s = 0.0
            moved = True
        return moved

    def look(self, peer: Peer, oldest_due_s: float | None, now_s: float) -> None:
        """End a peer that was silent too long; its oldest row in flight, if any, is due then."""
        if peer.heard:
            peer.heard = False
            peer.since_s = now_s
        if peer.over:
            return
        timeout_s = self.parts.timeout_s
        stuck = bool(peer.outbox) and bool(peer.stuck_s) and now_s - peer.stuck_s > timeout_s
        silent = now_s - peer.since_s >= timeout_s
        overdue = oldest_due_s is not None and oldest_due_s < now_s
        if (stuck and not peer.open) or (silent and (peer.unanswered or overdue)):
            self._end(peer, State.SILENT, Status.UNREACHABLE, now_s)

    def _end(self, peer: Peer, state: State, status: Status, now_s: float = 0.0) -> None:
        if peer.state is State.GONE:
            return
        was_over = peer.over
        peer.state = state
        peer.status = status
        peer.since_s = now_s
        peer.stuck_s = 0.0
        peer.outbox.clear()
        self.cut(peer)
        if state is State.GONE:
            self._part(peer)
        if not was_over or peer.open or peer.held or peer.lost or peer.reading:
            self._on_over(peer)
        if state is State.GONE:
            peer.empty()
        elif peer.held and peer.over:  # what came later has its own time to be answered
            self.greet(peer, now_s)

    def cut(self, peer: Peer) -> None:
        """Post nothing more to a peer that is over.

        An endpoint of its own is closed, which makes libfabric let go of all that goes to it.
        """
        peer.leases.clear()
        endpoint, peer.endpoint = peer.endpoint, None
        if endpoint is not None and endpoint is not self._main:
            endpoint.close()

    def let_go(self, peer: Peer, now_s: float) -> None:
        """Close the endpoint of a peer that is to be forgotten, once nothing goes through it."""
        if peer.held:
            peer.forget_s = 0.0  # the engine has met it anew
        elif not (peer.open or peer.outbox or peer.sends or peer.lost) or now_s > peer.forget_s:
            peer.forget_s = 0.0
            self._end(peer, State.SILENT, Status.UNREACHABLE, now_s - _SILENCE_S)

    def give_up(self) -> None:
        """Our NIC is lost: nobody is reached any more. Endpoints stay open until close()."""
        for peer in self.all:
            peer.state, peer.status = State.GONE, Status.NIC_DOWN
            peer.outbox.clear()

    def close(self) -> None:
        """Close the peers' endpoints; nothing is sent any more."""
        self._closed = True
        for peer in self.all:
            self.cut(peer)

    def farewell(self) -> list[Peer]:
        """Queue a Bye to everybody who listens; return them."""
        listening = [peer for peer in self.all if peer.state is State.READY]
        for peer in listening:
            peer.outbox.append(frames.Bye(self.me))
        return listening


# ------------------------------------------------------------------ messages

CONTROL_BYTES_MAX: Final = 4096
"""No provider's messages are shorter."""

_OPEN_MAX: Final = 64
_STARVED_MAX: Final = 4096

_SENT: Final = int(Kind.SENT)
_RECV: Final = int(Kind.RECV)
_OK: Final = int(Status.OK)


@dataclass(slots=True, eq=False)
class _Message:
    """One message or control message of ours that has not been acknowledged."""

    peer: Peer
    payload: bytes
    ctx: int
    since_s: float
    is_control: bool
    waiting: int = 0  # Waits less Gos since it was sent; frames may overtake each other


class Outgoing:
    """Messages and control messages that this NIC sends. One kind that is full does not hold up
    the other.

    Attributes:
        open: what has not been acknowledged, by number.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._done, self._timeout_s = peers.parts.done, peers.parts.timeout_s
        self.open: dict[int, _Message] = {}
        self._number = 0
        self._controls = 0  # of those that are open

    def send(self, peer: Peer, payload: bytes, ctx: int, now_s: float, *, is_control: bool) -> bool:
        """Take one message or control message; False = too many of its kind are open."""
        if (self._controls if is_control else len(self.open) - self._controls) >= _OPEN_MAX:
            return False
        self._number += 1
        message = _Message(peer, payload, ctx, now_s, is_control)
        too_long = is_control and len(payload) > CONTROL_BYTES_MAX
        if not (peer.over or too_long):  # first of all: for want of memory it may raise
            frame = frames.Control if is_control else frames.Data
            self._peers.say(peer, frame(self._peers.me, self._number, payload))
        self.open[self._number] = message
        self._controls += is_control
        if peer.over or too_long:
            self._end(self._number, peer.status if peer.over else Status.LENGTH)
        return True

    def take_ack(self, frame: frames.Ack) -> None:
        message = self.open.get(frame.number)
        if message is not None and message.peer.data == frame.sender:
            known = frame.status in Status._value2member_map_
            self._end(frame.number, Status(frame.status) if known else Status.PROVIDER)

    def balance(self, frame: frames.Wait | frames.Go, now_s: float) -> None:
        """Send a message again once the peer had no buffer for it (Wait), and has one (Go).

        The two come in any order.
        """
        message = self.open.get(frame.number)
        if message is not None and message.peer.data == frame.sender:
            step = 1 if isinstance(frame, frames.Wait) else -1
            message.waiting = max(-1, min(message.waiting + step, 1))
            if message.waiting == 0:
                self._again(frame.number, message, now_s)

    def _again(self, number: int, message: _Message, now_s: float) -> None:
        """Send a message again that the peer has dropped."""
        message.waiting = 0
        message.since_s = now_s
        self._peers.say(message.peer, frames.Data(self._peers.me, number, message.payload))

    def drop(self, peer: Peer, status: Status) -> None:
        """A peer is over: its messages end with it."""
        for number in [n for n, message in self.open.items() if message.peer is peer]:
            self._end(number, status)

    def interrupt(self, peer: Peer) -> None:
        """The connection broke: whether what was sent arrived is unknown."""
        for number, message in list(self.open.items()):
            if message.peer is peer and message.waiting <= 0:
                self._end(number, Status.PROVIDER)

    def look(self, now_s: float) -> None:
        """Messages without an answer make us doubt their peer; and fail when they stay so."""
        for number, message in list(self.open.items()):
            if now_s - message.since_s < self._timeout_s:
                continue
            if message.waiting > 0:
                # It waits for a buffer, for as long as that takes. But does the peer live, and was
                # its Go lost? It is offered anew.
                self._peers.doubt(message.peer, now_s)
                self._again(number, message, now_s)
            else:
                self._end(number, Status.UNREACHABLE)

    def close(self, status: Status) -> None:
        for number in list(self.open):
            self._end(number, status)

    def _end(self, number: int, status: Status) -> None:
        message = self.open.pop(number)
        self._controls -= message.is_control
        self._done.append((_SENT, int(status), 1, 0, 0, message.ctx, 0))


class Inbox(ReceivePool):
    """Messages that this NIC receives, and who waits for a buffer."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._peers = peers
        self._done = peers.parts.done
        self._starved: deque[tuple[Peer, int]] = deque()

    def add(self, nbytes: int, count: int) -> None:
        super().add(nbytes, count)
        for _ in range(count):
            self._feed()

    def take_data(self, peer: Peer, frame: frames.Data) -> None:
        """A message comes in: keep it and acknowledge, or say what hinders."""
        nbytes = len(frame.payload)
        if self.never_fits(nbytes):
            self._peers.say(peer, frames.Ack(self._peers.me, frame.number, Status.LENGTH))
            return
        found = self.take(nbytes, frame.sender)
        if found is None:
            known = (peer, frame.number) in self._starved
            if known or len(self._starved) < _STARVED_MAX:
                if not known:
                    self._starved.append((peer, frame.number))
                self._peers.say(peer, frames.Wait(self._peers.me, frame.number))
            else:
                self._peers.say(peer, frames.Ack(self._peers.me, frame.number, Status.RNR))
            return
        slot, buffer = found
        buffer[:nbytes] = frame.payload
        self._done.append((_RECV, _OK, 1, 0, 0, slot, nbytes))
        self._peers.say(peer, frames.Ack(self._peers.me, frame.number, Status.OK))

    def give_back(self, slot: int) -> None:
        super().give_back(slot)
        self._feed()

    def drop(self, peer: Peer) -> None:
        """A peer is over: nobody waits there any more."""
        if self._starved:
            self._starved = deque(item for item in self._starved if item[0] is not peer)

    def _feed(self) -> None:
        """Tell one of those who wait that there is a buffer."""
        if self._starved:
            peer, number = self._starved.popleft()
            self._peers.say(peer, frames.Go(self._peers.me, number))
