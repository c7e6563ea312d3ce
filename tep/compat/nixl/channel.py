"""Messages between agents, in order and once each, over an engine's messages, which are neither.

A message is sent in pieces with consecutive numbers. A piece that the engine reports as lost is
sent again; after some tries its message and all later unsettled ones are given up, and each
frame names their numbers until the peer has one such frame, so that no later message waits for
them. The receiver waits for every other piece, since its callback may come after those of later
pieces. Rule 1: for each message the sender learns that the receiver's engine has it and all before
it, or that it is lost. Rule 2: a message counts only if the engine saw it come from the engine that
it names as its sender. Rule 3: every store that a peer can fill has a limit. This module knows no
meaning of messages.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from threading import RLock
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tep import (
    BadDescriptor,
    Message,
    NetAddr,
    PeerChange,
    PeerEvent,
    Sender,
    TepError,
    TransferEngine,
    UsageError,
)

__all__ = ["BODY_MAX", "Channel", "Channels", "Frame"]

logger = logging.getLogger("tep.compat.nixl")

PIECE: Final = 6 * 1024
"""Longest piece: it fits into a datagram of every backend."""

PIECES_MAX: Final = 4096
BODY_MAX: Final = PIECES_MAX * PIECE
"""Longest message: 24 MiB."""

WINDOW: Final = 1024
"""Pieces in flight at a time."""

GAPS_MAX: Final = 8
"""Gaps of a frame; at one more, all messages since the last one are given up too."""

EARLY_MAX: Final = 2 * WINDOW
"""Pieces that a receiver keeps out of order: those in flight, and as many that one overtook."""

HELD_MAX: Final = WINDOW
"""Messages kept for an agent whose name another one has; later ones are dropped, and logged."""

AGENTS_MAX: Final = 4096
"""Limit of agents that have sent messages; beyond it the first that was not introduced goes."""

_MESSAGE_BYTES: Final = 32 * 1024
_BUFFERS: Final = 64
_TRIES: Final = 4

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Gap = tuple[Number, Number]
Piece = tuple[bool, bytes]
Told = Callable[[], object]
Lost = Callable[[str], object]


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One piece as it is sent.

    Attributes:
        name, addr: name of the sending agent, and NetAddr of its engine.
        seq: number of the piece; -1: a frame without a piece.
        first: pieces below it are not sent any more; the receiver's engine may have them.
        gaps: (start, stop) of numbers that were given up.
        last: the piece ends its message.
        body: bytes of the piece.
    """

    name: Annotated[str, Meta(max_length=1024)]
    addr: bytes
    seq: Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
    first: Number
    gaps: Annotated[tuple[Gap, ...], Meta(max_length=GAPS_MAX)]
    last: bool
    body: Annotated[bytes, Meta(max_length=PIECE)]


class _Sending:
    """A message that is not settled: the numbers of its pieces, and those not acknowledged."""

    def __init__(self, start: int, pieces: list[bytes], on_sent: Told, on_lost: Lost) -> None:
        self.start, self.pieces = start, pieces
        self.left = set(range(len(pieces)))
        self.on_sent, self.on_lost = on_sent, on_lost
        self.lost = False


class Channel:
    """The messages to and from one incarnation of one agent.

    Attributes:
        held: received messages that wait until the agent owns its name.
        next: number of the piece that is taken next.
        early: pieces that came before it, by number.
        gaps: (start, stop) of numbers that the peer has given up.
        part: pieces of the message that is not whole yet.
    """

    def __init__(self, owner: Channels, name: str, addr: NetAddr) -> None:
        self._owner, self.name, self.addr = owner, name, addr
        self.held: list[bytes] = []
        self._seq = 0
        self._sending: deque[_Sending] = deque()
        self._todo: deque[tuple[_Sending, int]] = deque()
        self._gaps: tuple[Gap, ...] = ()  # given up, and the peer may not know
        self._posting = False
        self.next = 0
        self.early: dict[int, Piece] = {}
        self.gaps: set[Gap] = set()
        self.part: list[bytes] = []

    # ------------------------------------------------------------------ sending

    def send(self, body: bytes, on_sent: Told = bool, on_lost: Lost = bool) -> None:
        """Send a message; one of on_sent() and on_lost(why) is called, under the lock.

        Raises:
            UsageError: it is longer than BODY_MAX.
        """
        if len(body) > BODY_MAX:
            raise UsageError(f"a message of {len(body)} bytes; {BODY_MAX} are possible")
        pieces = [body[at : at + PIECE] for at in range(0, max(1, len(body)), PIECE)]
        sending = _Sending(self._seq, pieces, on_sent, on_lost)
        self._seq += len(pieces)
        self._sending.append(sending)
        self._todo.extend((sending, index) for index in range(len(pieces)))
        self._post()

    def probe(self) -> None:
        """Send an empty frame: if the peer is gone, the engine notices."""
        self._put(-1, True, b"", lambda _: None)

    def _first(self) -> int:
        return self._sending[0].start if self._sending else self._seq

    def _post(self) -> None:
        """Send the pieces that the window has room for."""
        if self._posting:
            return
        self._posting = True
        while self._todo:
            sending, index = self._todo[0]
            if sending.start + index >= self._first() + WINDOW:
                break
            self._todo.popleft()
            self._try(sending, index, _TRIES)
        self._posting = False

    def _try(self, sending: _Sending, index: int, tries: int) -> None:
        def ended(why: str) -> None:
            if sending.lost:
                return
            if why and tries > 1:
                self._try(sending, index, tries - 1)
            elif why:
                self._give_up(sending, why)
            else:
                sending.left.discard(index)
                while self._sending and not self._sending[0].left:
                    self._sending.popleft().on_sent()
                self._post()

        last = index + 1 == len(sending.pieces)
        self._put(sending.start + index, last, sending.pieces[index], ended)

    def _put(self, seq: int, last: bool, body: bytes, ended: Callable[[str], object]) -> None:
        """Send one frame; ended(why) is called with "" once the peer's engine has it."""
        owner, gaps = self._owner, self._gaps
        frame = Frame(owner.name, owner.raw, seq, self._first(), gaps, last, body)

        def done(sent: Message) -> None:
            with owner.lock:
                if sent.error is None:
                    self._gaps = tuple(gap for gap in self._gaps if gap not in gaps)
                ended("" if sent.error is None else str(sent.error) or "unknown")

        try:
            owner.engine.submit_send(self.addr, msgspec.msgpack.encode(frame), on_done=done)
        except TepError as error:
            ended(str(error))

    def _give_up(self, sending: _Sending, why: str) -> None:
        """Give up a message, and all after it."""
        start = sending.start
        if len(self._gaps) == GAPS_MAX:
            start = min(start, self._gaps[-1][0])
        self._gaps = (*(gap for gap in self._gaps if gap[0] < start), (start, self._seq))
        self._todo.clear()  # the piece that failed was before these
        lost = [one for one in self._sending if one.start >= start]
        for one in lost:
            one.lost = True
            self._sending.pop()
        for one in lost:
            one.on_lost(why)

    # ------------------------------------------------------------------ receiving

    def take(self, frame: Frame) -> Iterator[bytes]:
        """Yield the messages that are now in order."""
        seq = frame.seq
        for gap in frame.gaps:
            if gap[0] <= self.next or len(self.gaps) < EARLY_MAX:
                self.gaps.add(gap)
            else:
                self._owner.garbled += 1
        if seq == self.next or (seq > self.next and len(self.early) < EARLY_MAX):
            self.early[seq] = frame.last, frame.body
        elif seq > self.next:
            self._owner.garbled += 1
        while True:
            stop = max((stop for start, stop in self.gaps if start <= self.next), default=0)
            if stop > self.next:
                self.next, self.part = stop, []
                self.early = {at: piece for at, piece in self.early.items() if at >= stop}
            elif (piece := self.early.pop(self.next, None)) is not None:
                self.next += 1
                yield from self._join(*piece)
            else:
                break
        self.gaps = {gap for gap in self.gaps if gap[1] > self.next}

    def _join(self, last: bool, body: bytes) -> Iterator[bytes]:
        """Yield the message that a piece completes, if it does."""
        self.part.append(body)
        if last or len(self.part) > PIECES_MAX:
            pieces, self.part = self.part, []
            if len(pieces) <= PIECES_MAX:
                yield b"".join(pieces)


class Channels:
    """All channels of one agent.

    Args:
        engine: its messages belong to this object.
        on_message: called under the lock, on the engine's thread, with each message in order.
        on_gone: called under the lock with a channel whose agent was lost, or has restarted.

    Attributes:
        lock: guards everything of the agent.
        garbled: number of undecodable messages.
        foreign: number of messages from another engine than they name.
    """

    def __init__(
        self,
        engine: TransferEngine,
        name: str,
        on_message: Callable[[Channel, bytes], object],
        on_gone: Callable[[Channel, str], object],
    ) -> None:
        self.engine, self.name = engine, name
        self.lock = RLock()
        self.raw = engine.main_address.to_bytes()
        self.garbled = self.foreign = 0
        self._on_message, self._on_gone = on_message, on_gone
        self._known: dict[tuple[str, NetAddr], Channel] = {}
        self._spoken: dict[bytes, Channel] = {}  # by engine
        self._owners: dict[str, NetAddr] = {}  # the engine that owns an agent's name
        self._introduced: set[str] = set()
        self._forgot = False
        self._lost: set[NetAddr] = set()
        self.introduce(name, engine.main_address.by_address())
        engine.on_peer(self._on_peer)
        engine.submit_recvs(_MESSAGE_BYTES, _BUFFERS, self._take, with_sender=True)

    def to(self, name: str, addr: NetAddr) -> Channel:
        """Return the channel to an incarnation of an agent, at the `by_address` of its engine."""
        found = self._known.get((name, addr))
        if found is None:
            found = self._known[name, addr] = Channel(self, name, addr)
        return found

    def introduce(self, name: str, addr: NetAddr) -> None:
        """Give an agent's name to the engine that its metadata names."""
        self._introduced.add(name)
        self._owners[name] = addr
        self._hand_out()

    def forget(self, name: str) -> None:
        """Forget an agent: the next engine that sends under its name owns it."""
        if name != self.name:
            self._introduced.discard(name)
            self._owners.pop(name, None)

    def _take(self, payload: memoryview, sender: Sender) -> None:
        try:
            frame = msgspec.msgpack.decode(payload, type=Frame, strict=True)
            addr = NetAddr.from_bytes(frame.addr)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, BadDescriptor):
            self.garbled += 1
            return
        with self.lock:
            channel = self._from(frame, addr, sender)
            if channel is None:
                self.foreign += 1
                return
            for body in channel.take(frame):
                self._got(channel, body)

    def _from(self, frame: Frame, addr: NetAddr, sender: Sender) -> Channel | None:
        """Return the channel of a frame's agent; None: another engine has sent the frame."""
        name, peer, channel = frame.name, addr.by_address(), self._spoken.get(sender.engine)
        if not sender.owns(addr):
            return None
        if channel is None:
            channel = self._spoken[sender.engine] = self.to(name, peer)
            if self._forgot:  # perhaps this one, so accept its current number
                channel.next = frame.first
            while len(self._spoken) > AGENTS_MAX:
                self._drop_one()
        return channel if (channel.name, channel.addr) == (name, peer) else None

    def _drop_one(self) -> None:
        self._forgot = True
        engines = self._spoken.items()
        strangers = (key for key, one in engines if one.name not in self._introduced)
        channel = self._spoken.pop(next(strangers, next(iter(self._spoken))))
        self._known.pop((channel.name, channel.addr), None)
        self._on_gone(channel, f"more than {AGENTS_MAX} agents have spoken since")
        self._lost.discard(channel.addr)
        if self._owners.get(channel.name) == channel.addr:
            self.forget(channel.name)

    def _got(self, channel: Channel, body: bytes) -> None:
        if self._has_name(channel):
            self._on_message(channel, body)
        elif len(channel.held) < HELD_MAX and sum(map(len, channel.held)) < BODY_MAX:
            channel.held.append(body)
        else:
            text = "messages of agent %r at %s are dropped: %s has that name"
            logger.warning(text, channel.name, channel.addr, self._owners[channel.name])

    def _has_name(self, channel: Channel) -> bool:
        """Return True if an agent owns its name; else probe the owner, which may be gone."""
        owner = self._owners.setdefault(channel.name, channel.addr)
        if owner != channel.addr and owner in self._lost:
            owner = self._owners[channel.name] = channel.addr
        if owner != channel.addr:
            self.to(channel.name, owner).probe()
        return owner == channel.addr

    def _hand_out(self) -> None:
        """Deliver the messages of agents that own their name now."""
        for channel in [one for one in self._known.values() if one.held]:
            if self._has_name(channel):
                held, channel.held = channel.held, []
                for body in held:
                    self._on_message(channel, body)

    def _on_peer(self, event: PeerEvent) -> None:
        with self.lock:
            who = (event.peer, event.epoch)
            found = [one for one in self._known.values() if (one.addr.name, one.addr.epoch) == who]
            for channel in found:
                if event.kind in {PeerChange.LOST, PeerChange.RESTARTED}:
                    self._lost.add(channel.addr)
                    self._on_gone(channel, event.reason)
                elif event.kind is PeerChange.BACK:
                    self._lost.discard(channel.addr)
            if found:
                self._hand_out()

    def is_lost(self, channel: Channel) -> bool:
        """Return True if an agent is known to be lost, or to have restarted."""
        return channel.addr in self._lost
