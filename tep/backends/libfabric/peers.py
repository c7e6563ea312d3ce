"""Who is at the other end, and do they live: one peer's state, and the greetings that change it.

A peer is greeted before the first row goes to it: the answer proves that it polls, that it is of
the epoch that its address names, and that it knows us (EFA needs that). Rows wait in `held`.

    CONNECTING --Welcome, or its own Hello--> READY
    CONNECTING --no answer in time--> SILENT        READY --no completion in time--> SILENT
    SILENT --rows wait that came later--> CONNECTING
    CONNECTING --Stale--> GONE                      any --Bye--> LEAVING, then GONE
    any --our own NIC is lost--> GONE
    READY --a row or frame failed--> CONNECTING     SILENT --asked again later--> CONNECTING

Rule: this file decides a peer's state, and nobody else.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

from tep.backends.base import Status, WriteBatch
from tep.backends.libfabric import frames, neighbours
from tep.backends.libfabric.address import (
    NicAddress,
    efa_place,
    parse,
    shm_alias,
    shm_name,
    shm_pid,
)
from tep.backends.libfabric.process import Process
from tep.backends.libfabric.seats import SEATS, take_seat
from tep.errors import BadDescriptor, FabricError
from tep.ffi.libfabric import FI_ADDR_UNSPEC

if TYPE_CHECKING:
    from tep.backends.libfabric.mailbox import Mailbox
    from tep.backends.libfabric.objects import Endpoint, Nic, Option
    from tep.backends.libfabric.rules import Rules

__all__ = ["Peer", "Peers", "State"]

_SILENCE_S: Final = 1.0
"""For how long a peer that did not answer is not asked again for the sake of messages and notes,
which engines repeat: they fail at once. Rows are tried anew."""

_GRACE_S: Final = 0.1
"""For how long answers may follow a goodbye. A guess: far more than a network takes."""

_EMPTY: Final[deque[Any]] = deque(maxlen=0)
_OUTBOX_MAX: Final = 1024
_NEVER_FULL: Final = 1 << 62


class State(Enum):
    """How a peer is."""

    CONNECTING = auto()
    READY = auto()
    SILENT = auto()  # did not answer; may be asked again
    LEAVING = auto()  # said goodbye; answers to rows in flight may still be on their way
    GONE = auto()  # said goodbye, or was replaced, or our NIC is lost; for ever


class Probe(Enum):
    """Whether a peer that returns no rows has been asked if it polls, and has answered."""

    NONE = auto()
    ASKED = auto()
    ANSWERED = auto()


_ALIVE: Final = frozenset({State.CONNECTING, State.READY})
_SETTLED: Final = frozenset({State.CONNECTING, State.LEAVING, State.GONE})


class Peer:
    """One NIC of a peer, in one incarnation.

    Attributes:
        index: its PeerId.
        data: its address as bytes.
        number: its fi_addr_t; FI_ADDR_UNSPEC = libfabric was never told of it.
        endpoint: what rows and frames to it go through, once there was something to send.
        state: see above.
        status: how rows to it end while it is SILENT or GONE.
        open: rows in flight to it.
        adrift: rows to it that were given up, and that libfabric still has.
        full_at: rows in flight with which libfabric took no more; none is offered until one is
            back.
        appetite: rows that it took last time.
        heard: something completed since the last look at deadlines.
        since_s: when it entered its state, or was last heard.
        probe: how far we are in asking whether a peer that returns no rows polls at all.
        held: (batch, row, due_s) accepted and not posted, oldest first.
        lost: (ctx, row, rkey) that came back failed, waiting for the verdict: is the peer alive?
        leases: (base, nbytes) of its keys; None = asked.
        outbox: frames to send.
        sends: frames in libfabric's hands.
        stuck_s: since when libfabric has not taken the next frame; 0 = it does.
        forget_s: when what it costs us is given back at the latest, once it is quiet; 0 = keep it.
        neighbour: it is of this process, and shares memory with us.
        process: its process, where that is one of this host.
    """

    __slots__ = (
        "address",
        "adrift",
        "appetite",
        "data",
        "endpoint",
        "forget_s",
        "full_at",
        "heard",
        "held",
        "index",
        "leases",
        "lost",
        "neighbour",
        "number",
        "open",
        "outbox",
        "probe",
        "process",
        "sends",
        "since_s",
        "state",
        "status",
        "stuck_s",
    )

    def __init__(self, index: int, data: bytes, address: NicAddress) -> None:
        self.index = index
        self.data = data
        self.address = address
        self.number = FI_ADDR_UNSPEC
        self.endpoint: Endpoint | None = None
        self.state = State.SILENT
        self.status = Status.UNREACHABLE
        self.open = self.adrift = 0
        self.full_at = _NEVER_FULL
        self.appetite = 1
        self.heard = False
        self.since_s = 0.0
        self.probe = Probe.NONE
        self.held: deque[tuple[WriteBatch, int, float]] = deque()
        self.lost: deque[tuple[int, int, int]] = deque()
        self.leases: dict[int, tuple[int, int] | None] = {}
        self.outbox: deque[bytes] = deque()
        self.sends = 0
        self.stuck_s = self.forget_s = 0.0
        self.neighbour = False
        self.process: Process | None = None

    @property
    def out(self) -> int:
        """Rows and frames that libfabric still has."""
        return self.open + self.adrift + self.sends

    @property
    def over(self) -> bool:
        """Whether rows to it fail at once."""
        return self.state not in _ALIVE

    @property
    def unsettled(self) -> bool:
        """Whether it needs looking after at each poll."""
        waits = self.state is State.CONNECTING or self.state is State.LEAVING
        return bool(waits or self.outbox or self.held or self.lost or self.forget_s)


class Peers:
    """All peers of one NIC.

    Args:
        nic, mailbox, rules: of this NIC.
        me: its own address.
        options: of endpoints.
        timeout_s: how long a peer may stay silent.
        on_over: called with a peer that has become SILENT or GONE, after its endpoint is closed.

    Attributes:
        all: by PeerId.
        departed: who is gone, and waits to be removed from libfabric.
        complaint: why the last peer that was refused could not be met; "" = none was.
        refusal: why the last endpoint could not be opened; "" = it was.
    """

    def __init__(
        self,
        nic: Nic,
        mailbox: Mailbox,
        rules: Rules,
        me: NicAddress,
        main: Endpoint,
        options: tuple[Option, ...],
        timeout_s: float,
        on_over: Callable[[Peer], None],
    ) -> None:
        self.all: list[Peer] = []
        self.departed: list[Peer] = []
        self.complaint = self.refusal = ""
        self._nic = nic
        self._mailbox = mailbox
        self._rules = rules
        self._epoch = me.epoch
        self._me = me.to_bytes()
        self._raw = me.raw
        self._main = main
        self._options = options
        self._timeout_s = timeout_s
        self._on_over = on_over
        self._by_data: dict[bytes, Peer] = {}
        self._by_place: dict[bytes, dict[bytes, Peer]] = {}  # EFA: whom libfabric knows there
        self._latest: dict[bytes, Peer] = {}  # by raw address
        self._closed = False

    # --- finding

    def find(self, data: bytes) -> Peer:
        """The peer at an address, made known to libfabric when first seen.

        Raises:
            BadDescriptor: not an address of this provider.
        """
        found = self._by_data.get(data)
        if found is None:
            address = parse(data, self._rules.provider)
            found = Peer(len(self.all), data, address)
            pid = shm_pid(address.raw) if self._rules.by_pid else 0
            if pid and pid != os.getpid():
                found.process = Process(pid)
            elif pid:
                found.neighbour = True
                if not neighbours.meet(self._raw, address.raw):
                    found.state = State.GONE
            if self._nic.failure:
                found.state, found.status = State.GONE, Status.NIC_DOWN
            if found.state is not State.GONE:
                self._insert(found)
            self.all.append(found)
            self._by_data[data] = found
            self._supersede(found)
        return found

    def _insert(self, peer: Peer) -> None:
        """Make a peer known to libfabric."""
        raw = peer.address.raw
        if self._rules.by_pid:
            me, it = self._raw, raw
            if peer.neighbour:
                raw = shm_alias(raw)
            # Within one process each is known to the other by two names, see shm_alias().
            names = {me: {it, raw}, it: {me, shm_alias(me) if peer.neighbour else me}}
            full = [
                shm_name(one)
                for one, others in names.items()
                if not all(take_seat(shm_name(one), shm_name(other)) for other in others)
            ]
            if full:
                peer.state = State.GONE
                self.complaint = (
                    f"shm: {' and '.join(full)} met {SEATS} peers, those of its own process "
                    "counted twice, and has no more places: open that engine anew"
                )
                return
        peer.number = self._nic.insert(raw)
        if self._rules.hardware:
            self._by_place.setdefault(efa_place(raw), {})[raw] = peer

    def _supersede(self, peer: Peer) -> None:
        """Of two incarnations at one address the earlier is gone."""
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
        """What rows and frames to a peer go through."""
        if peer.endpoint is None:
            peer.endpoint = (
                self._nic.open_endpoint(self._options)
                if self._rules.endpoint_per_peer
                else self._main
            )
            self.refusal = ""
        return peer.endpoint

    # --- greeting

    def greet(self, peer: Peer, now_s: float) -> None:
        """Ask a peer whether it is there, unless that is under way."""
        if peer.state in _SETTLED:
            return
        peer.state = State.CONNECTING
        peer.since_s = now_s
        peer.outbox.appendleft(frames.encode(frames.Hello(self._me, peer.address.epoch)))

    def greet_again(self, peer: Peer, now_s: float) -> None:
        """Ask once more, if the peer has been silent long enough to be asked again."""
        if peer.state is State.SILENT and now_s - peer.since_s >= _SILENCE_S:
            self.greet(peer, now_s)

    def doubt(self, peer: Peer, now_s: float) -> None:
        """Something to or from a peer failed: what it told us is void, ask whether it lives."""
        peer.leases.clear()
        if peer.state is State.READY:
            self.greet(peer, now_s)

    def frame_failed(self, peer: Peer, now_s: float) -> None:
        """A frame did not arrive, maybe our greeting: greet again, within the same deadline."""
        peer.leases.clear()
        if peer.state is State.CONNECTING:
            hello = frames.encode(frames.Hello(self._me, peer.address.epoch))
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
        peer.outbox.append(frames.encode(frame))

    def take_hello(self, frame: frames.Hello, now_s: float) -> Peer | None:
        """A peer greets: it lives, and knows our address; answer."""
        peer = self.known(frame.sender)
        if peer is None or peer.state is State.GONE:
            return None
        self._is_ready(peer, now_s)  # it lives there, whomever it meant to greet
        if frame.epoch != self._epoch:
            self.say(peer, frames.Stale(self._me, self._epoch))
            return None
        self.say(peer, frames.Welcome(self._me))
        return peer

    def take_welcome(self, frame: frames.Welcome, now_s: float) -> Peer | None:
        """A peer answers our greeting."""
        peer = self.known(frame.sender)
        if peer is not None and peer.state is not State.GONE:
            self._is_ready(peer, now_s)
            if peer.probe is Probe.ASKED:
                peer.probe = Probe.ANSWERED
        return peer

    def take_stale(self, frame: frames.Stale) -> None:
        """Somebody else has the address of whom we greeted."""
        sender = self.known(frame.sender)  # as the later incarnation, which ends the earlier
        del sender

    def take_bye(self, frame: frames.Bye, now_s: float) -> Peer | None:
        """A peer closes."""
        peer = self.known(frame.sender)
        if peer is not None and peer.state is State.READY and peer.open:
            # What it answered before it said goodbye came by another connection.
            peer.state, peer.status, peer.since_s = State.LEAVING, Status.UNREACHABLE, now_s
        elif peer is not None:
            self._end(peer, State.GONE, Status.UNREACHABLE)
            self._forget(peer)  # also one that had closed before we met: this was its last frame

        return peer

    def see_off(self, peer: Peer, now_s: float) -> None:
        """End a peer that is LEAVING, once its last answers are here or never will be."""
        if not peer.open or now_s - peer.since_s > _GRACE_S:
            self._end(peer, State.GONE, Status.UNREACHABLE)

    def _is_ready(self, peer: Peer, now_s: float) -> None:
        peer.state = State.READY
        peer.since_s = now_s

    # --- looking after

    def look_next_door(self, peer: Peer) -> None:
        """End a peer that closed within this process, or whose process has ended.

        For before a post, to a neighbour or where `rules.asks_first`; else look() finds out.
        """
        if peer.neighbour:
            gone = not neighbours.is_open(peer.address.raw)
        else:
            gone = peer.process is not None and peer.process.ended()
        if gone:
            self._end(peer, State.GONE, Status.UNREACHABLE)

    def let_go(self, peer: Peer, now_s: float) -> None:
        """Close the endpoint of a peer that is to be forgotten, once nothing goes through it."""
        if peer.held:
            peer.forget_s = 0.0  # the engine has met it anew
        elif not (peer.open or peer.outbox or peer.sends or peer.lost) or now_s > peer.forget_s:
            peer.forget_s = 0.0
            self._end(peer, State.SILENT, Status.UNREACHABLE, now_s - _SILENCE_S)

    def bury_the_dead(self) -> None:
        """End the peers whose processes have ended, also those to whom nothing was outstanding.

        Else a descriptor and a mapping of 13 MiB would stay for each until this NIC is closed.
        """
        for peer in self.all:
            if peer.state is not State.GONE and peer.process is not None and peer.process.ended():
                self._end(peer, State.GONE, Status.UNREACHABLE)

    def clear_departed(self) -> None:
        """Remove peers that are gone from libfabric, once all that went to them is back.

        EFA's provider drops the completions of a peer that is removed before: what they hold, slots
        and regions, would stay taken. Of two addresses with one queue pair number it forgets the
        wrong one, and crashes later (2.5.1, efa_av_reverse_av_remove): these stay.
        """
        for peer in self.departed:
            known = self._by_place.get(efa_place(peer.address.raw), {})
            if not peer.out and known == {peer.address.raw: peer}:
                self._nic.remove(peer.number)
                known.clear()
        self.departed = [peer for peer in self.departed if peer.out]

    def flush(self, peer: Peer, now_s: float) -> bool:
        """Hand out what is in a peer's outbox; True if something left."""
        moved = False
        while peer.outbox and not (peer.over or self._closed or self._nic.failure):
            try:
                if not self._mailbox.send(peer, self.endpoint(peer), peer.outbox[0]):
                    peer.stuck_s = peer.stuck_s or now_s
                    break
            except OSError:
                self.doubt(peer, now_s)
                break
            except FabricError as error:  # no endpoint: no descriptor is left, say; tried again
                self.refusal = str(error)
                peer.stuck_s = peer.stuck_s or now_s
                break
            peer.outbox.popleft()
            peer.stuck_s = 0.0
            moved = True
        return moved

    def look(self, peer: Peer, oldest_due_s: float | None, now_s: float) -> None:
        """End a peer that has been silent for too long.

        Args:
            peer: whom.
            oldest_due_s: when its oldest row in flight is due; None = it has none.
            now_s: the time.
        """
        if peer.heard:
            peer.heard = False
            peer.since_s = now_s
            peer.probe = Probe.NONE
        if peer.over:
            return
        alive = peer.process is None or not peer.process.ended()
        stuck = bool(peer.outbox) and bool(peer.stuck_s) and now_s - peer.stuck_s > self._timeout_s
        if not alive:
            self._end(peer, State.GONE, Status.UNREACHABLE, now_s)
        elif stuck and not peer.open:
            self._end(peer, State.SILENT, Status.UNREACHABLE, now_s)
        elif now_s - peer.since_s < self._timeout_s:
            return
        elif peer.state is State.CONNECTING or peer.lost:
            self._end(peer, State.SILENT, Status.UNREACHABLE, now_s)
        elif oldest_due_s is not None and oldest_due_s < now_s:
            self._look_at_overdue(peer, now_s)

    def _look_at_overdue(self, peer: Peer, now_s: float) -> None:
        """A peer that is READY has returned no row for too long.

        Where its process can be asked, one that lives and does not poll is back-pressure: its rows
        cannot be recalled, and would land once it polls again. One that polls, and answers a frame
        that was sent after the rows, should have returned them: they are lost.
        """
        if not self._rules.by_pid:
            self._end(peer, State.SILENT, Status.UNREACHABLE, now_s)
        elif peer.probe is Probe.ANSWERED:
            peer.probe = Probe.NONE
            self._end(peer, State.SILENT, Status.PROVIDER, now_s)
        elif peer.probe is Probe.NONE:
            peer.probe = Probe.ASKED
            self.say(peer, frames.Hello(self._me, peer.address.epoch))
            self.flush(peer, now_s)

    def _end(self, peer: Peer, state: State, status: Status, now_s: float = 0.0) -> None:
        if peer.state is State.GONE:
            return
        was_over = peer.over
        peer.state = state
        peer.status = status
        peer.since_s = now_s
        peer.stuck_s = 0.0
        peer.outbox.clear()
        peer.leases.clear()
        self.cut(peer)
        if state is State.GONE:
            if self._rules.hardware:
                self.departed.append(peer)
            else:
                self._nic.remove(peer.number)
            self._forget(peer)
            if peer.process is not None:
                peer.process.close()
        if not was_over or peer.held or peer.lost or peer.open:
            self._on_over(peer)
        if state is State.GONE:
            # It is kept for its number only: peers may come and go by the thousand.
            peer.held = peer.lost = peer.outbox = _EMPTY
            peer.leases = {}
        elif peer.held and peer.over:  # what came later has its own time to be answered
            self.greet(peer, now_s)

    def _forget(self, peer: Peer) -> None:
        """Nothing of ours goes there any more, so a neighbour may be unmapped."""
        if peer.neighbour:
            peer.neighbour = False
            neighbours.forget(peer.address.raw, self._raw)

    def cut(self, peer: Peer) -> None:
        """Close a peer's own endpoint, which makes libfabric let go of all that goes to it."""
        endpoint, peer.endpoint = peer.endpoint, None
        if endpoint is not None and endpoint is not self._main:
            endpoint.close()

    def give_up(self) -> None:
        """Our NIC is lost: nobody is reached any more. Endpoints stay open until close()."""
        for peer in self.all:
            peer.state, peer.status = State.GONE, Status.NIC_DOWN
            peer.outbox.clear()

    def close(self) -> None:
        """Close the peers' endpoints, let go of neighbours; nothing is sent any more."""
        self._closed = True
        for peer in self.all:
            self.cut(peer)
            if peer.neighbour and peer.number != FI_ADDR_UNSPEC:
                self._nic.remove(peer.number)
            self._forget(peer)
            if peer.process is not None:
                peer.process.close()

    def farewell(self) -> list[Peer]:
        """Queue a Bye to everybody who listens; return them."""
        listening = [peer for peer in self.all if peer.state is State.READY]
        for peer in listening:
            peer.outbox.append(frames.encode(frames.Bye(self._me)))
        return listening
