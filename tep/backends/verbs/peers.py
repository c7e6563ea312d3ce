"""Who a NIC talks to: peers, the way to a connection with each, and what waits for one.

Rule 1: rows and messages for a peer that is not connected are kept here, never posted on queue
pairs that are not ready. Rule 2: what is kept ends, well or not: the handshake has a deadline.
Rule 3: a call from the engine takes a few steps of handshakes and no more, however many peers
connect: datagrams are taken off the NIC at once, and wait here in line.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from tep.backends.base import Batch, Entry, Status
from tep.backends.verbs.address import Address
from tep.backends.verbs.conns import Conn, Queues
from tep.backends.verbs.control import ControlMessages
from tep.backends.verbs.draining import Draining
from tep.backends.verbs.handshake import Hello, Kind, Phase
from tep.backends.verbs.peer import Peer
from tep.backends.verbs.posting import Posting
from tep.backends.verbs.sources import Sources
from tep.base.errors import BadDescriptor, FabricError, UsageError

if TYPE_CHECKING:
    from tep.backends.verbs.datagrams import Datagrams
    from tep.backends.verbs.device import Device
    from tep.backends.verbs.messages import Messages
    from tep.backends.verbs.writes import Writer

__all__ = ["STEPS_MAX", "Peers"]

STEPS_MAX: Final = 8
"""Steps of handshakes that are taken before the engine gets on with its rows. Each costs four to
six commands of the device, of about 0.1 ms (guessed)."""

_HEARD_MAX: Final = 4096


class Peers:
    """All peers of one NIC.

    Attributes:
        own: this NIC's address.
        up: by PeerId, the connection that rows can be posted on, or None.
        conns: by number of a queue pair.
        sources: the same for immediates, also for a while after a connection is gone.
        control messages: between engines.
        draining: connections that failed.
        link_lost: whether our own port is at fault when nobody answers, and this NIC given up.
        trouble: what went wrong last while connecting.
    """

    def __init__(
        self,
        device: Device,
        queues: Queues,
        writer: Writer,
        messages: Messages,
        datagrams: Datagrams,
        own: Address,
        ready: deque[Entry],
        clock_s: Callable[[], float],
        link_lost: Callable[[], bool],
    ) -> None:
        self.device = device
        self.writer = writer
        self.messages = messages
        self.datagrams = datagrams
        self.own = own
        self.ready = ready
        self.clock_s = clock_s
        self.attempts: Iterator[int] = itertools.count(1)
        self.table: list[Peer] = []
        self.posting = Posting(writer, self._keep, one_qp=device.settings.qps_per_peer == 1)
        self.up = self.posting.up
        self.conns: dict[int, Conn] = {}
        self.sources = Sources()
        self.controls = ControlMessages(device.settings, ready)
        self.draining = Draining(writer, ready, queues.depth, self._retire)
        self.link_lost = link_lost
        self.trouble = ""
        self._queues = queues
        self._by_address: dict[Address, Peer] = {}
        self._latest: dict[int, Peer] = {}  # by identity
        self._unsettled: dict[Peer, None] = {}
        self._lifting: dict[Peer, None] = {}  # to be let in again, once their fence has ended
        self._numbers = itertools.count(1)
        self._heard: dict[tuple[Address, Kind], Hello] = {}  # datagrams that cost commands
        self._asking: dict[Peer, None] = {}  # who wants to be asked for a connection
        self._tend_s = 0.0  # when the next of the unsettled is due
        seed = device.settings.spray_seed
        self._rng = random.SystemRandom() if seed is None else random.Random(seed)

    # --- peers

    def connect(self, raw: bytes) -> int:
        """Number a peer by its address, and begin to connect to it.

        Raises:
            BadDescriptor: these bytes are no address of such a NIC.
            UsageError: there is no way from here to there.
        """
        where = Address.decode(raw)
        why = "" if where in self._by_address else self.own.why_unreachable(where)
        if why:
            raise UsageError(f"{self.device.name} at {self.own} cannot reach {where}: {why}")
        peer = self._peer(where)
        if peer.gone is None:
            self.attend(peer)
        return peer.number

    def _peer(self, where: Address) -> Peer:
        found = self._by_address.get(where)
        if found is None:
            found = self._by_address[where] = Peer(self, len(self.table), where)
            self.table.append(found)
            self.up.append(None)
            self._replace(found)
        return found

    def _replace(self, new: Peer) -> None:
        """Of several incarnations of one NIC only the latest lives."""
        other = self._latest.setdefault(new.where.identity, new)
        if other is not new:
            older, later = sorted((other, new), key=lambda peer: peer.where.epoch)
            self._latest[new.where.identity] = later
            self.bury(older, Status.STALE_PEER)

    def bury(self, peer: Peer, status: Status) -> None:
        """A peer's incarnation is over: what is open fails, nothing is tried again."""
        if peer.gone is not None:
            return
        peer.gone = status
        peer.negotiation.lose()
        if peer.conn is not None:
            self.drop(peer.conn)
        peer.fail_waiting(status)
        self.controls.fail(peer, status)
        self._unsettled.pop(peer, None)
        self._asking.pop(peer, None)
        self.datagrams.forget(peer.where)

    def attend(self, peer: Peer) -> None:
        """Begin or go on to connect to a peer, in a later turn: see `progress`."""
        self._asking[peer] = None

    def _unsettle(self, peer: Peer) -> None:
        """Look after a peer, from the next turn on."""
        self._unsettled[peer] = None
        self._tend_s = 0.0

    def _ask(self, peer: Peer, now_s: float) -> None:
        """Ask a peer; what fails here fails what waits for it."""
        try:
            peer.ask(now_s)
        except FabricError as error:
            self._abandon(peer, error)
        else:
            self._unsettled[peer] = None
            self._tend(peer, now_s)

    def _abandon(self, peer: Peer, error: FabricError) -> None:
        self.trouble = str(error)
        peer.negotiation.lose()
        if peer.conn is not None:
            self.drop(peer.conn)
        peer.fail_waiting(Status.PROVIDER)

    def hear(self, payload: bytes, now_s: float) -> None:
        """Take a datagram; what is none of ours is ignored."""
        try:
            hello = Hello.decode(payload)
        except BadDescriptor:
            return
        if hello.sender not in self._by_address and self.own.why_unreachable(hello.sender):
            return
        if hello.target != self.own.epoch:
            if hello.kind is not Kind.STALE:
                self._disown(hello)
            return
        peer = self._peer(hello.sender)
        if peer.gone is not None:
            return
        if hello.kind is Kind.BYE:
            self.bury(peer, Status.UNREACHABLE)
        elif hello.kind is Kind.STALE:
            if hello.echo == peer.negotiation.attempt:
                self.bury(peer, Status.STALE_PEER)
        elif hello.kind in {Kind.CONTROL, Kind.CONTROL_ACK}:
            self.controls.hear(peer, hello, now_s)
        else:
            key = hello.sender, hello.kind
            before = self._heard.get(key)
            if before is None and len(self._heard) >= _HEARD_MAX:
                return  # as good as lost: who waits repeats it
            if before is None or before.attempt <= hello.attempt:
                self._heard[key] = hello

    def _answer(self, hello: Hello, now_s: float) -> None:
        """Take a datagram of a handshake."""
        peer = self._peer(hello.sender)
        if peer.gone is not None:
            return
        try:
            peer.negotiation.hear(hello, now_s)
        except FabricError as error:
            self._abandon(peer, error)
        else:
            self._unsettled[peer] = None
            self._tend(peer, now_s)

    def _disown(self, hello: Hello) -> None:
        """Tell a sender that it means an incarnation that is no more."""
        answer = Hello(
            kind=Kind.STALE,
            sender=_with_epoch(self.own, hello.target),
            target=hello.sender.epoch,
            attempt=0,
            echo=hello.attempt,
        )
        self.datagrams.send(hello.sender, answer.encode())

    # --- what waits

    def _keep(self, number: int, batch: Batch, row: int) -> None:
        """Keep a row that found no room on its queue pair."""
        self.keep(self.table[number], batch, row, row + 1)

    def keep(self, peer: Peer, batch: Batch, start: int, stop: int) -> None:
        """Keep rows that found no room on their queue pair."""
        peer.rows.append((batch, start, stop))
        self._unsettle(peer)

    def hold(self, peer: Peer, batch: Batch, start: int, stop: int) -> None:
        """Keep rows until their peer is connected."""
        peer.rows.append((batch, start, stop))
        self.attend(peer)

    def hold_message(self, peer: Peer, slot: int) -> None:
        """Keep a message until its peer is connected."""
        peer.messages.append(slot)
        self.attend(peer)

    # --- connections

    def new_conn(self, peer: Peer) -> Conn:
        """Make queue pairs for a peer."""
        number = next(self._numbers)
        conn = Conn(self.device, self._queues, peer.number, number, self._rng, rows=not peer.shut)
        self.conns.update((number, conn) for number, _ in conn.ids)
        self.sources.add((number for number, _ in conn.ids), peer.number)
        return conn

    def drop(self, conn: Conn) -> None:
        """Take a connection out of use; its rows come back flushed."""
        peer = self.table[conn.peer]
        if peer.conn is conn:
            peer.conn = None
            self.pause(peer)
        if not conn.lost:
            self.draining.add(conn, self.clock_s())

    def pause(self, peer: Peer) -> None:
        """Post nothing more on a peer's connection; what comes for it is kept."""
        peer.live = None
        self.up[peer.number] = None
        self.posting.forget_sets()

    def fail(self, conn: Conn, status: int) -> None:
        """A completion says that a connection is broken."""
        if conn.lost:
            return
        peer = self.table[conn.peer]
        peer.negotiation.lose()
        self.drop(conn)
        # A peer that is alive learns in this way that its half is broken too.
        if peer.gone is None and (status != Status.UNREACHABLE or peer.rows or peer.messages):
            self.attend(peer)

    def _retire(self, conn: Conn, drained: bool) -> None:
        numbers = [number for number, _ in conn.ids]
        for number in numbers:
            del self.conns[number]
        conn.destroy()
        if drained:
            self.sources.remove(numbers)
        else:  # what comes of it all the same still has a source, until its number is used again
            peer = self.table[conn.peer]
            peer.blurred |= bool(conn.qps) and not self.device.dead
            self.trouble = f"the queue pairs with {peer.where} did not return what they held"
            self.writer.fail_all(self.lost_status(conn), [conn])
            self.messages.fail_all(self.lost_status(conn), conn)

    def fence(self, source: bytes, ctx: int) -> None:
        """Let no rows of a NIC land any more; its connection is for messages only from now on.

        Raises:
            BadDescriptor: these bytes are no address of such a NIC.
        """
        peer = self._peer(Address.decode(source))
        peer.shut = True
        peer.fail_rows(Status.UNREACHABLE)
        self._lifting.pop(peer, None)
        if peer.conn is not None and peer.conn.qps:
            peer.negotiation.lose()
            self.drop(peer.conn)
        self.draining.fence(peer, ctx)

    def unfence(self, source: bytes, now_s: float) -> None:
        """Let rows of a NIC land again; while its fence is being put up, wait for the end of that.

        Raises:
            BadDescriptor: these bytes are no address of such a NIC.
        """
        peer = self._by_address.get(Address.decode(source))
        if peer is not None and peer.gone is None:
            self._lifting[peer] = None
            self._lift(now_s)

    def _lift(self, now_s: float) -> None:
        """Ask those that we let in again for a fresh connection, and others whether theirs stands.

        For those may have fenced us, and let us in again, without our having heard of either.
        """
        for peer in [peer for peer in self._lifting if not self.draining.is_fencing(peer)]:
            del self._lifting[peer]
            if peer.gone is not None or (peer.shut and peer.blurred):
                continue
            lifted, peer.shut = peer.shut, False
            try:
                # An answer to what we had asked before may be from behind the fence: ask anew.
                if lifted or peer.negotiation.phase is Phase.ASKING:
                    peer.negotiation.start(now_s)
                elif peer.negotiation.connected:
                    peer.check(now_s)
            except FabricError as error:
                self._abandon(peer, error)
            else:
                self._unsettle(peer)

    def why_silent(self) -> Status:
        """What is told of rows and messages to which there was no answer."""
        return Status.NIC_DOWN if self.link_lost() else Status.UNREACHABLE

    def blur(self, why: str) -> None:
        """Completions were lost: of no peer it is known what has landed here."""
        for peer in self.table:
            peer.blurred = True
        self.trouble = f"completions were lost, what has landed is not known: {why}"

    def sink(self, status: Status) -> None:
        """The NIC dies: let all connections drain; what is open or waits fails."""
        for peer in self.table:
            peer.gone = peer.gone or status
            peer.negotiation.lose()
            if peer.conn is not None:
                self.drop(peer.conn)
            peer.fail_waiting(peer.gone)
            self.controls.fail(peer, peer.gone)
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._unsettled.clear()
        self._heard.clear()
        self._asking.clear()

    # --- time

    @property
    def has_steps(self) -> bool:
        """Whether progress() has more to do at once."""
        return bool(self._heard or self._asking)

    @property
    def busy(self) -> bool:
        """Whether progress() has to be called."""
        return bool(
            self._unsettled
            or self._heard
            or self._asking
            or self.draining.busy
            or self.writer.tails
            or self.controls.open
        )

    def progress(self, now_s: float, n: int, *, whole: bool) -> None:
        """Repeat and give up what is due, post what waits, end what does not drain.

        Args:
            now_s: time.
            n: completions that were read since the last call.
            whole: whether these were all there were.
        """
        self._take_steps(now_s)
        if now_s >= self._tend_s:
            self._tend_s = math.inf
            for peer in list(self._unsettled):
                self._tend(peer, now_s)
        if self.controls.open:
            self.controls.progress(now_s)
        if self.draining.busy:
            self.draining.progress(now_s, n, whole=whole)
        if self._lifting:
            self._lift(now_s)
        if self.writer.tails:
            self.writer.post_tails()

    def _take_steps(self, now_s: float) -> None:
        """Answer, then ask, but only so many peers: each costs commands that wait for the device.

        Answers first: who was asked by its peer does not have to ask.
        """
        left = STEPS_MAX
        while self._heard and left:
            left -= 1
            self._answer(self._heard.pop(next(iter(self._heard))), now_s)
        while self._asking and left:
            left -= 1
            peer = next(iter(self._asking))
            del self._asking[peer]
            self._ask(peer, now_s)

    def _tend(self, peer: Peer, now_s: float) -> None:
        """Repeat or give up what is due, and post what waits for a peer."""
        negotiation = peer.negotiation
        try:
            negotiation.tick(now_s)
            peer.flush()
        except FabricError as error:
            self._abandon(peer, error)
        if negotiation.next_s is not None:
            self._tend_s = min(self._tend_s, negotiation.next_s)
        elif not peer.rows and not peer.messages:
            self._unsettled.pop(peer, None)
        else:
            self._tend_s = now_s
            if peer.refused or negotiation.phase is not Phase.UP:
                self.attend(peer)

    def next_s(self, now_s: float) -> float | None:
        """When progress() has something to do though nothing came, or None."""
        times = [p.negotiation.next_s for p in self._unsettled if p.negotiation.next_s is not None]
        times += self.controls.next_s() + self.draining.next_s(now_s)
        return min(times, default=None)

    def lost_status(self, conn: Conn) -> int:
        """What a flushed row of a connection is told: why the peer is gone, if it is."""
        peer = self.table[conn.peer]
        if peer.gone is None:
            return int(Status.UNREACHABLE if peer.fenced else Status.FLUSHED)
        return int(peer.gone)

    # --- the end

    def say_goodbye(self) -> None:
        """Tell every peer with a connection that this NIC closes."""
        for peer in self.table:
            if peer.conn is not None and peer.gone is None:
                peer.say(Kind.BYE, peer.negotiation.attempt, peer.negotiation.remote)

    def close(self, status: Status) -> None:
        """Destroy all queue pairs; what is open or waits fails."""
        conns = set(self.conns.values())
        for conn in conns:
            conn.destroy()
        self.writer.fail_all(int(status), conns)
        self.conns.clear()
        self.draining.conns.clear()
        self._forget_steps()
        for peer in self.table:
            peer.conn = peer.live = None
            peer.gone = peer.gone or status
            peer.fail_waiting(status)
            self.controls.fail(peer, status)
        self.posting.forget_sets()
        self.up[:] = [None] * len(self.table)


def _with_epoch(address: Address, epoch: int) -> Address:
    return Address(
        link=address.link,
        lid=address.lid,
        gid=address.gid,
        gid_type=address.gid_type,
        ud_qpn=address.ud_qpn,
        qkey=address.qkey,
        epoch=epoch,
        identity=address.identity,
    )
