"""The states of an engine's peers: lost, back, restarted, removed; and the events about them.

It learns of a loss by heartbeats, if a user watches the peer, and by rows that fail, which costs
nothing. A peer's NIC that failed is asked repeatedly whether it is back. What a peer says of its
failed requests, or its loss, burns immediates here. Nothing here posts rows or reads a clock. Rule
1: one event for each change. Rule 2: a loss ends only by the answer to a question that was sent
after it. Rule 3: nothing of a peer is dropped before the last transfer that refers to it has ended.
Rule 4: an expectation that fails because of a peer burns its immediate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from tep.base.api import EngineOptions
from tep.base.checks import unpicklable
from tep.base.errors import FabricError, TepError
from tep.base.wire import NetAddr
from tep.control.channel import Channel, Drop
from tep.control.failover import Failover, Fencing, Reopening
from tep.control.messages import Failed, Ping, Pong
from tep.core.group import DomainGroup
from tep.core.handles import Expectation, Handle, Message, Removal, State, Transfer, closed_error
from tep.core.imm import ImmTable
from tep.core.path import Link, Path, PeerHeard
from tep.core.regions import Remote

__all__ = ["Membership", "PeerChange", "PeerEvent", "PeerState", "PeerWatch"]

NS_PER_S: Final = 1_000_000_000

_SERIALS_MAX: Final = 256
"""Serials of notices that are remembered of each engine: a late copy burns nothing again."""

_ENGINES_MAX: Final = 4096
"""Engines whose serials are remembered; beyond that the first engine is forgotten."""

_LONG_S: Final = 1e9
"""Longer times, also infinite ones, count as this: 31 years."""


class PeerState(Enum):
    """The state of a peer."""

    ALIVE = "alive"
    LOST = "lost"
    RESTARTED = "restarted"  # this incarnation is gone for good


class PeerChange(Enum):
    """The kind of a PeerEvent."""

    LOST = "lost"
    BACK = "back"
    RESTARTED = "restarted"
    NIC_LOST = "NIC lost"
    NIC_BACK = "NIC back"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEvent:
    """One change of one peer.

    Attributes:
        peer: its name.
        epoch: its incarnation.
        kind: what happened.
        reason: why, in words.
        nic: index of its NIC if the change is about one, else None.
    """

    peer: str
    epoch: int
    kind: PeerChange
    reason: str
    nic: int | None = None


class Nic:
    """One NIC of a peer.

    Attributes:
        down: whether rows to it failed, and it has not answered since; changed at `since_ns`.
        wait_ns: time from its failure to the first question, then from one question to the next.
        valid_ns: an answer counts only if its question was sent at this time or later.
        due_ns: when to ask next; None: do not ask.
    """

    __slots__ = ("down", "due_ns", "since_ns", "valid_ns", "wait_ns")

    def __init__(self) -> None:
        self.down = False
        self.since_ns = self.wait_ns = self.valid_ns = 0
        self.due_ns: int | None = None


class Peer:
    """The state of one incarnation of a peer, since `since_ns`.

    Attributes:
        heard_ns: when the last question that it answered was sent, plus the time since then in
            which this engine was held up.
        beats: rounds of questions sent to it.
    """

    __slots__ = ("beats", "heard_ns", "link", "nics", "round_trip_s", "since_ns", "state", "watch")

    def __init__(self, link: Link, now_ns: int) -> None:
        self.link = link
        self.nics = [Nic() for _ in link.addr.domains]
        self.state = PeerState.ALIVE
        self.since_ns = self.heard_ns = now_ns
        self.round_trip_s: float | None = None
        self.watch: PeerWatch | None = None
        self.beats = 0

    def is_down(self) -> bool:
        """Whether all of its NICs are marked down."""
        return all(nic.down for nic in self.nics)


class PeerWatch:
    """A peer that is asked again and again whether it is there.

    Attributes:
        every_s: between two questions.
        lost_after_s: without an answer for so long it counts as lost.
        closed: close() was called, or the peer was removed.
    """

    __slots__ = ("_due_ns", "_peer", "closed", "every_s", "lost_after_s")

    def __init__(self, peer: Peer, every_s: float, lost_after_s: float, due_ns: int) -> None:
        self.every_s = every_s
        self.lost_after_s = lost_after_s
        self.closed = False
        self._peer = peer
        self._due_ns = due_ns

    @property
    def peer(self) -> NetAddr:
        """The peer's address."""
        return self._peer.link.addr

    @property
    def state(self) -> PeerState:
        """alive, lost or restarted."""
        return self._peer.state

    @property
    def since_s(self) -> float:
        """Since when, in seconds of the driver's clock."""
        return self._peer.since_ns / NS_PER_S

    @property
    def round_trip_s(self) -> float | None:
        """From the last question that was answered to its answer; None: none was yet."""
        return self._peer.round_trip_s

    def close(self) -> None:
        """Ask no more. Idempotent; the state stays what transfers reveal."""
        self.closed = True

    __reduce__ = unpicklable("it is asked from this process; send `watch.peer`")

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"PeerWatch({self.peer}: {self.state.value} since {self.since_s:.6f} s{closed})"


class Membership:
    """The states of all peers of one engine.

    `drop` forgets a link for good; its flag says whether the paths from the peer are fenced off.
    `opened` has every handle that has not settled, and `settle` ends one.

    Attributes:
        busy: whether step() has something to do, now or later.
        events: events that no callback has received yet.
        peers: those that are watched, or have had a NIC down.
    """

    def __init__(
        self,
        group: DomainGroup,
        channel: Channel,
        failover: Failover,
        fencing: Fencing,
        imms: ImmTable[Expectation],
        find: Callable[[bytes], Link | None],
        drop: Callable[[Link, bool], object],
        opened: dict[Handle, None],
        settle: Callable[[Handle, State, TepError | None], None],
        options: EngineOptions,
        now_s: Callable[[], float],
    ) -> None:
        self.busy = False
        self.events: list[PeerEvent] = []
        self.peers: dict[Link, Peer] = {}
        self.callbacks: tuple[Callable[[PeerEvent], object], ...] = ()
        self._group, self._channel, self._fencing = group, channel, fencing
        self._imms, self._drop = imms, drop
        self._serials: dict[bytes, dict[int, None]] = {}  # of notices, by engine
        self._opened, self._settle = opened, settle
        self._options = options
        self._now_s = now_s
        self._nics: dict[bytes, tuple[Peer, int]] = {}
        self._leaving: list[Removal] = []
        self._due_ns: int | None = None
        self._alarm_ns: int | None = None
        self._closed = False
        self._reopening = Reopening(
            group, channel, failover, fencing, find, self._path_opened, self._path_busy
        )
        channel.hear(Ping, lambda nic, address, n: channel.answer(nic, address, Pong(n.number)))
        channel.hear(Pong, self._heard)
        channel.hear(Failed, self._noticed)

    # ------------------------------------------------------------------ turning

    def step(self) -> bool:
        """Ask what is due, and drop peers that were removed; True if there was work."""
        work = False
        for removal in tuple(self._leaving):
            work |= self._let_go(removal)
        if self._due_ns is not None and self._due_ns <= (now_ns := self._now_ns()):
            work = True
            for peer in self.peers.values():
                self._ask(peer, now_ns)
        if work:
            self._book()
        return work

    def due_s(self) -> float | None:
        """When step() must be called even if nothing happens; None: never.

        Only heartbeats need that. NICs that failed are asked when the engine is turned anyway: an
        engine that has nothing to do needs no NIC.
        """
        return None if self._alarm_ns is None else self._alarm_ns / NS_PER_S

    def take_events(self) -> list[tuple[Callable[[PeerEvent], object], PeerEvent]]:
        """Take the new events, each with every callback that is to be called with it."""
        events, self.events = self.events, []
        return [(callback, event) for event in events for callback in self.callbacks]

    def _now_ns(self) -> int:
        return int(self._now_s() * NS_PER_S)

    @staticmethod
    def _ns(seconds: float) -> int:
        return max(1, int(min(seconds, _LONG_S) * NS_PER_S))

    def _book(self) -> None:
        peers = self.peers.values()
        beats = [peer.watch._due_ns for peer in peers if peer.watch is not None]
        probes = [nic.due_ns for peer in peers for nic in peer.nics if nic.due_ns is not None]
        self._alarm_ns = min(beats, default=None)
        self._due_ns = min([*beats, *probes], default=None)
        self.busy = bool(self._leaving) or self._due_ns is not None

    def _emit(self, peer: Peer, kind: PeerChange, reason: str, nic: int | None = None) -> None:
        addr = peer.link.addr
        mended = kind in {PeerChange.BACK, PeerChange.NIC_BACK}
        which = "peer" if nic is None else f"NIC {nic} of peer"
        text = f"{which} {addr.name} (epoch {addr.epoch}): {kind.value}: {reason}"
        level = logging.INFO if mended else logging.WARNING
        self._group.journal.say(f"peer_{kind.name.lower()}", text, level)
        if self.callbacks:
            self.events.append(
                PeerEvent(peer=addr.name, epoch=addr.epoch, kind=kind, reason=reason, nic=nic)
            )

    def _peer(self, link: Link) -> Peer:
        peer = self.peers.get(link)
        if peer is None:
            peer = self.peers[link] = Peer(link, self._now_ns())
            for nic, address in enumerate(link.addr.domains):
                self._nics[address] = peer, nic
        return peer

    # ------------------------------------------------------------------ asking

    def watch(self, link: Link, every_s: float, lost_after_s: float) -> PeerWatch | None:
        """Begin to watch a peer; None: it is watched already."""
        peer, now_ns = self._peer(link), self._now_ns()
        if peer.watch is not None and not peer.watch.closed:
            return None
        peer.heard_ns = max(peer.heard_ns, now_ns)
        watch = peer.watch = PeerWatch(peer, every_s, lost_after_s, now_ns)
        watch.closed = peer.state is PeerState.RESTARTED  # it will not come back
        self._book()
        return watch

    def _ask(self, peer: Peer, now_ns: int) -> None:
        watch = peer.watch
        if watch is not None and watch.closed:
            watch = peer.watch = None
        if watch is not None and watch._due_ns <= now_ns:
            self._beat(peer, watch, now_ns)
        for number, nic in enumerate(peer.nics):
            if nic.due_ns is not None and nic.due_ns <= now_ns:
                self._probe(peer, number, nic, now_ns)

    def _beat(self, peer: Peer, watch: PeerWatch, now_ns: int) -> None:
        # While this engine was held up it received nothing; that time is no silence of the peer.
        peer.heard_ns = min(now_ns, peer.heard_ns + now_ns - watch._due_ns)
        silent_ns = now_ns - peer.heard_ns
        if peer.state is PeerState.ALIVE and silent_ns >= self._ns(watch.lost_after_s):
            self._lose(peer, f"no answer for {watch.lost_after_s:g} s")
        watch._due_ns = now_ns + self._ns(watch.every_s)
        peer.beats += 1
        everywhere = peer.is_down()
        for number, nic in enumerate(peer.nics):
            if everywhere or not nic.down:
                self._ping(peer, number, now_ns)

    def _probe(self, peer: Peer, number: int, nic: Nic, now_ns: int) -> None:
        """Ask a NIC whether it is back, and wait for twice as long before the next time."""
        if peer.state is PeerState.RESTARTED:  # perhaps rows or answers came late
            nic.due_ns = None
            return
        nic.wait_ns = min(2 * nic.wait_ns, self._ns(self._options.probe_max_s))
        nic.due_ns = now_ns + nic.wait_ns
        peer.beats += 1
        if nic.down and self._paths(peer.link, number):
            self._ping(peer, number, now_ns)
        for path in self._reopening.wanted(peer.link, number):
            self._say(peer, now_ns, path)

    def _ping(self, peer: Peer, number: int, now_ns: int) -> None:
        here = [(nic, number) for nic, alive in enumerate(self._group.alive) if alive]
        paths = self._paths(peer.link, number) or here
        if paths:
            self._say(peer, now_ns, paths[(number + peer.beats) % len(paths)])

    def _say(self, peer: Peer, now_ns: int, path: tuple[int, int]) -> None:
        self._channel.beat(peer.link, Ping(now_ns), path)

    def _paths(self, link: Link, number: int) -> list[tuple[int, int]]:
        paths = [(nic, number) for nic, alive in enumerate(self._group.alive) if alive]
        return [path for path in paths if link.is_up(*path)]

    # ------------------------------------------------------------------ hearing

    def _heard(self, here: int, address: bytes, message: Pong) -> None:
        """A peer's NIC answers the question that ours sent it at time `message.number`."""
        found, now_ns, asked_ns = self._nics.get(address), self._now_ns(), message.number
        if found is None or asked_ns > now_ns:
            self._channel.drop(Drop.UNASKED, address, f"Pong {asked_ns}")
            return
        peer, number = found
        peer.round_trip_s = (now_ns - asked_ns) / NS_PER_S
        peer.heard_ns = max(peer.heard_ns, asked_ns)
        nic = peer.nics[number]
        if asked_ns >= nic.valid_ns:
            if nic.down and self._paths(peer.link, number):
                nic.down, nic.since_ns = False, now_ns
                self._group.mark_up(peer.link, [not each.down for each in peer.nics])
                self._emit(peer, PeerChange.NIC_BACK, "it answers again", number)
                self._group.events.append(PeerHeard(peer.link))
            self._reopening.begin(peer.link.path(here, number))
            if not nic.down and not self._reopening.wanted(peer.link, number):
                nic.due_ns = None
        if peer.state is PeerState.LOST and asked_ns >= peer.since_ns and not peer.is_down():
            peer.state, peer.since_ns = PeerState.ALIVE, now_ns
            self._emit(peer, PeerChange.BACK, "it answers again")
            self._group.events.append(PeerHeard(peer.link))

    def path_shut(self, path: Path) -> None:
        """Ask the peer's NIC from time to time, until no path to it is shut."""
        if not (path.link.current and self._channel.able):
            return
        nic = self._peer(path.link).nics[path.nic]
        if nic.due_ns is None:
            nic.wait_ns = nic.wait_ns or self._ns(self._options.probe_first_s)
            nic.due_ns = self._now_ns() + nic.wait_ns
            self._book()

    def _path_opened(self, path: Path) -> None:
        """A path is in use again; if the peer's NIC is marked down, ask it at once."""
        link, number = path.link, path.nic
        nic = self._peer(link).nics[number]
        if nic.down:
            nic.due_ns = self._now_ns()  # its answer over this path marks it up
        elif not self._reopening.wanted(link, number):
            nic.due_ns = None
        self._book()

    def _path_busy(self, path: Path) -> None:
        """Rows keep a path shut: ask again soon, whatever wait the peer's silence had led to."""
        peer = self.peers.get(path.link)
        if peer is not None and (nic := peer.nics[path.nic]).due_ns is not None:
            nic.wait_ns = self._ns(self._options.probe_first_s)
            nic.due_ns = min(nic.due_ns, self._now_ns() + nic.wait_ns)
            self._book()

    def nic_down(self, link: Link, number: int) -> None:
        """Rows to a peer's NIC came back: it is gone, or cannot be reached."""
        if link.left:
            return
        peer, now_ns = self._peer(link), self._now_ns()
        nic = peer.nics[number]
        if nic.down or peer.state is PeerState.RESTARTED:
            return
        # A NIC that fails again soon after it came back is asked later than the last time.
        if nic.wait_ns == 0 or now_ns - nic.since_ns > self._ns(self._options.probe_max_s):
            nic.wait_ns = self._ns(self._options.probe_first_s)
        nic.down, nic.since_ns = True, now_ns
        nic.valid_ns = now_ns + nic.wait_ns
        nic.due_ns = nic.valid_ns if self._channel.able else None
        self._emit(peer, PeerChange.NIC_LOST, "rows to it came back UNREACHABLE", number)
        if peer.is_down() and peer.state is PeerState.ALIVE:
            self._lose(peer, "none of its NICs can be reached")
        self._book()

    def _lose(self, peer: Peer, reason: str) -> None:
        peer.state, peer.since_ns = PeerState.LOST, self._now_ns()
        self._emit(peer, PeerChange.LOST, reason)
        self._miss(peer.link, f"was lost: {reason}")

    def met_later(
        self, link: Link, reason: str = "a later incarnation answers at its address"
    ) -> None:
        """A later incarnation of a peer is known: this one is gone for good."""
        if link.left:
            return
        peer = self._peer(link)
        if peer.state is PeerState.RESTARTED:
            return
        peer.state, peer.since_ns = PeerState.RESTARTED, self._now_ns()
        if peer.watch is not None:
            peer.watch.closed = True
        self._emit(peer, PeerChange.RESTARTED, reason)
        self._miss(link, f"restarted: {reason}")

    # ------------------------------------------------------------------ senders

    def check_sender(self, link: Link) -> None:
        """Fail the expectations of a peer that is gone already."""
        peer = self.peers.get(link)
        if not link.current:
            self._miss(link, "was removed, or replaced by a later incarnation")
        elif peer is not None and peer.state is not PeerState.ALIVE:
            self._miss(link, f"is {peer.state.value}")

    def _miss(self, link: Link, what: str) -> None:
        """Burn the immediates of all expectations that named this sender and are not reached."""
        reached = set(self._imms.reached)  # they settle at the end of this step
        found = (h for h in self._opened if isinstance(h, Expectation) and h.sender is link)
        imms = dict.fromkeys(h.imm for h in found if not h.finished and h not in reached)
        if imms:
            name = link.addr.name
            self._burn(link, imms, f"its sender {name} {what}", "PEER_LOST", name)

    # ------------------------------------------------------------------ burnt immediates

    def _noticed(self, nic: int, address: bytes, message: Failed) -> None:
        """Requests of a peer failed: burn their immediates, unless this is a late copy."""
        engine = self._channel.engine_of(nic, address)
        serials = self._serials.setdefault(engine, {})
        if message.serial not in serials:
            imms = (imm for first, n in message.imms for imm in range(first, first + n))
            text = f"{message.who} gave it up: {message.reason}"
            self._burn(engine, imms, text, "PEER_FAILED", message.who)
            serials[message.serial] = None
            if len(serials) > _SERIALS_MAX:
                del serials[next(iter(serials))]
            if len(self._serials) > _ENGINES_MAX:
                del self._serials[next(iter(self._serials))]
        self._channel.tell(nic, address, message.number)

    def _burn(self, owner: Hashable, imms: Iterable[int], why: str, code: str, peer: str) -> None:
        for imm in imms:
            if self._imms.is_claimed(imm):
                continue
            error = FabricError(f"imm {imm:#x}: {why}", code=code, peer=peer)
            expectations, came = self._imms.burn(imm, owner, error)
            for handle in expectations:
                handle.fix_arrived(came)
                text = f"; {handle.arrived} of {handle.count} came"
                self._settle(handle, State.FAILED, error.saying(text))

    # ------------------------------------------------------------------ leaving

    def leave(self, removal: Removal) -> None:
        """Command: drop a peer as soon as nothing refers to it."""
        link = removal.link
        self._opened[removal] = None
        if self._closed:
            self._settle(removal, State.FAILED, closed_error())
            return
        if removal.why:
            self.met_later(link, removal.why)
        self._miss(link, "was removed")
        removal.waits = [handle for handle in self._opened if _refers(handle, link)]
        self._leaving.append(removal)
        self.busy = True

    def _let_go(self, removal: Removal) -> bool:
        waits, link = removal.waits, removal.link
        while waits and waits[-1].finished:
            waits.pop()
        if waits:
            return False
        if removal.fencing < 0:  # not before: on one connection both ways end
            removal.fencing = 0
            if not removal.why:
                self._fencing.bar(removal)
        if removal.fencing:
            return False
        self._leaving.remove(removal)
        peer = self.peers.pop(link, None)
        if peer is not None:
            if peer.watch is not None:
                peer.watch.closed = True
            self._nics = {at: known for at, known in self._nics.items() if known[0] is not peer}
        if self._group.acks is not None:
            self._group.acks.fold()  # sums of whole scatters refer to their targets
        link.forget()
        self._fencing.forget(link.addr.domains)
        self._drop(link, not (removal.why or removal.unfenced))
        self._settle(removal, State.DONE, None)
        return True

    def close(self) -> None:
        """The engine is about to close: fail the open removals."""
        self._closed = True
        for removal in self._leaving:
            self._settle(removal, State.FAILED, closed_error())
        self._leaving.clear()


def _refers(handle: Handle, link: Link) -> bool:
    """Whether a handle needs this link until it settles."""
    if isinstance(handle, Message):
        return handle.link is link
    if not isinstance(handle, Transfer):
        return False
    remotes = handle.job.remotes
    if isinstance(remotes, Remote):
        return remotes.link is link
    return any(remote.link is link for remote in remotes.remotes)
