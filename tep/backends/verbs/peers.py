"""Who a NIC talks to: peers, the way to a connection with each, and what waits for one.

Rule 1: rows and messages for a peer that is not connected are kept here, never posted on queue
pairs that are not ready. Rule 2: what is kept ends, well or not: the handshake has a deadline.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import Entry, Status, WriteBatch
from tep.backends.verbs.address import Address
from tep.backends.verbs.conns import Conn, Queues
from tep.backends.verbs.draining import Draining
from tep.backends.verbs.handshake import Hello, Kind, Phase
from tep.backends.verbs.notes import Notes
from tep.backends.verbs.peer import Peer
from tep.backends.verbs.sources import Sources
from tep.backends.verbs.writes import LOOSE_MAX, ROWS_FEW, Fan, Writer
from tep.errors import BadDescriptor, FabricError, UsageError

if TYPE_CHECKING:
    from tep.backends.verbs.datagrams import Datagrams
    from tep.backends.verbs.device import Device
    from tep.backends.verbs.limits import Limits
    from tep.backends.verbs.messages import Messages

__all__ = ["Peers"]

Array = npt.NDArray[np.unsignedinteger]
_SETS_MAX: Final = 64


class Peers:
    """All peers of one NIC.

    Attributes:
        own: this NIC's address.
        up: by PeerId, the connection that rows can be posted on, or None.
        conns: by number of a queue pair.
        sources: the same for immediates, also for a while after a connection is gone.
        notes: between engines.
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
        self.attempts = itertools.count(1)
        self.table: list[Peer] = []
        self.up: list[Conn | None] = []
        self.conns: dict[int, Conn] = {}
        self.sources = Sources()
        self.notes = Notes(device.settings, ready)
        self.draining = Draining(writer, ready, queues.depth, self._retire)
        self.link_lost = link_lost
        self.trouble = ""
        self._queues = queues
        self._by_address: dict[Address, Peer] = {}
        self._latest: dict[int, Peer] = {}  # by identity
        self._unsettled: dict[Peer, None] = {}
        self._lifting: dict[Peer, None] = {}  # to be let in again, once their fence has ended
        # Scatters go to the same peers again and again: who they are is kept after the first, a
        # fan is made for the second; both until some peer loses its connection.
        self._sets: dict[bytes, list[Conn]] = {}
        self._fans: dict[bytes, Fan] = {}
        self._numbers = itertools.count(1)
        self._one_qp = device.settings.qps_per_peer == 1
        seed = device.settings.spray_seed
        self._rng = random.SystemRandom() if seed is None else random.Random(seed)

    # --- peers

    def connect(self, raw: bytes, now_s: float) -> int:
        """Number a peer by its address, and begin to connect to it.

        Raises:
            BadDescriptor: these bytes are no address of such a NIC.
            UsageError: there is no way from here to there.
        """
        where = Address.decode(raw)
        why = self.own.why_unreachable(where)
        if why:
            raise UsageError(f"{self.device.name} at {self.own} cannot reach {where}: {why}")
        peer = self._peer(where)
        if peer.gone is None:
            self.attend(peer, now_s)
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
        self.notes.fail(peer, status)
        self._unsettled.pop(peer, None)
        self.datagrams.forget(peer.where)

    def attend(self, peer: Peer, now_s: float) -> None:
        """Begin or go on to connect to a peer; what fails here fails what waits for it."""
        try:
            peer.ask(now_s)
        except FabricError as error:
            self._abandon(peer, error)
        else:
            self._unsettled[peer] = None

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
        if self.own.why_unreachable(hello.sender):
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
        elif hello.kind in {Kind.NOTE, Kind.NOTED}:
            self.notes.hear(peer, hello, now_s)
        else:
            try:
                peer.negotiation.hear(hello, now_s)
            except FabricError as error:
                self._abandon(peer, error)
            else:
                self._unsettled[peer] = None

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

    # --- posting

    def post_up(self, conn: Conn, batch: WriteBatch, start: int, stop: int) -> int:
        """Post rows to one connected peer; return how many were taken, a prefix."""
        if stop - start <= ROWS_FEW:
            return self.writer.post_few(conn, batch, start, stop)
        if len(conn.qps) == 1:
            return self.writer.post_run(conn, batch, start, stop)
        self.post_loose([conn] * (stop - start), batch, start)
        return stop - start

    def scatter(self, batch: WriteBatch, start: int, stop: int, limits: Limits) -> bool:
        """Post each row to a peer of its own.

        False = not all are connected, or a row is impossible; nothing is done.
        """
        peers = batch.peer
        assert not isinstance(peers, int)
        key = (peers if stop - start == batch.n else peers[start:stop]).tobytes()
        fan = self._fans.get(key)
        if fan is None:
            conns = self._sets.get(key)
            if conns is None or len(conns) > LOOSE_MAX or not self._one_qp:
                return self._first_scatter(key, batch, start, stop, limits)
            fan = self._fans[key] = self.writer.new_fan(conns, limits)
        later = self.writer.post_fan(fan, batch, start)
        if later:
            self._keep(later, fan.conns, batch, start)
        return later is not None

    def _first_scatter(
        self, key: bytes, batch: WriteBatch, start: int, stop: int, limits: Limits
    ) -> bool:
        assert not isinstance(batch.peer, int)
        conns = self._sets.get(key)
        if conns is None:
            found = [self.up[peer] for peer in batch.peer[start:stop].tolist()]
            conns = [conn for conn in found if conn is not None]
            if len(conns) < len(found):
                return False
            if len(self._sets) >= _SETS_MAX:
                self._forget_sets()
            self._sets[key] = conns
        if limits.possible_until(batch, start, stop) < stop:
            return False
        self.post_loose(conns, batch, start)
        return True

    def _forget_sets(self) -> None:
        self._sets.clear()
        self._fans.clear()

    def post_loose(self, conns: Sequence[Conn], batch: WriteBatch, start: int) -> None:
        """Post row `start + k` to conns[k]; what finds no room is kept, and follows."""
        for first in range(0, len(conns), LOOSE_MAX):
            part = conns[first : first + LOOSE_MAX] if len(conns) > LOOSE_MAX else conns
            qps = [conn.qp for conn in part] if self._one_qp else [conn.pick() for conn in part]
            later = self.writer.post_loose(part, qps, batch, start + first)
            self._keep(later, conns, batch, start)

    def _keep(
        self, rows: Sequence[int], conns: Sequence[Conn], batch: WriteBatch, start: int
    ) -> None:
        """Keep rows that found no room on their queue pairs."""
        for row in rows:
            peer = conns[row - start].peer
            peer.rows.append((batch, row, row + 1))
            self._unsettled[peer] = None

    def hold(self, peer: Peer, batch: WriteBatch, start: int, stop: int, now_s: float) -> None:
        """Keep rows until their peer is connected."""
        peer.rows.append((batch, start, stop))
        self.attend(peer, now_s)

    def hold_message(self, peer: Peer, slot: int, now_s: float) -> None:
        """Keep a message until its peer is connected."""
        peer.messages.append(slot)
        self.attend(peer, now_s)

    # --- connections

    def new_conn(self, peer: Peer) -> Conn:
        """Make queue pairs for a peer."""
        number = next(self._numbers)
        conn = Conn(self.device, self._queues, peer, number, self._rng, rows=not peer.shut)
        self.conns.update((number, conn) for number, _ in conn.ids)
        self.sources.add((number for number, _ in conn.ids), peer.number)
        return conn

    def drop(self, conn: Conn) -> None:
        """Take a connection out of use; its rows come back flushed."""
        peer = conn.peer
        if peer.conn is conn:
            peer.conn = None
            self.pause(peer)
        if not conn.lost:
            self.draining.add(conn, self.clock_s())

    def pause(self, peer: Peer) -> None:
        """Post nothing more on a peer's connection; what comes for it is kept."""
        peer.live = None
        self.up[peer.number] = None
        self._forget_sets()

    def fail(self, conn: Conn, status: int, now_s: float) -> None:
        """A completion says that a connection is broken."""
        if conn.lost:
            return
        peer = conn.peer
        peer.negotiation.lose()
        self.drop(conn)
        # A peer that is alive learns in this way that its half is broken too.
        if peer.gone is None and (status != Status.UNREACHABLE or peer.rows or peer.messages):
            self.attend(peer, now_s)

    def _retire(self, conn: Conn, drained: bool) -> None:
        numbers = [number for number, _ in conn.ids]
        for number in numbers:
            del self.conns[number]
        conn.destroy()
        if drained:
            self.sources.remove(numbers)
        else:  # what comes of it all the same still has a source, until its number is used again
            conn.peer.blurred |= bool(conn.qps) and not self.device.dead
            self.trouble = f"the queue pairs with {conn.peer.where} did not return what they held"
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
                if lifted:
                    peer.negotiation.start(now_s)
                elif peer.negotiation.connected:
                    peer.check(now_s)
            except FabricError as error:
                self._abandon(peer, error)
            else:
                self._unsettled[peer] = None

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
            self.notes.fail(peer, peer.gone)
        self._unsettled.clear()

    # --- time

    @property
    def busy(self) -> bool:
        """Whether progress() has to be called."""
        draining = self.draining
        return bool(self._unsettled or draining.busy or self.writer.tails or self.notes.open)

    def progress(self, now_s: float, n: int, *, whole: bool) -> None:
        """Repeat and give up what is due, post what waits, end what does not drain.

        Args:
            now_s: time.
            n: completions that were read since the last call.
            whole: whether these were all there were.
        """
        for peer in list(self._unsettled):
            try:
                peer.negotiation.tick(now_s)
                peer.flush()
            except FabricError as error:
                self._abandon(peer, error)
            if peer.negotiation.next_s is None and not (peer.rows or peer.messages):
                self._unsettled.pop(peer, None)
            elif peer.negotiation.next_s is None and (
                peer.refused or peer.negotiation.phase is not Phase.UP
            ):
                self.attend(peer, now_s)
        if self.notes.open:
            self.notes.progress(now_s)
        if self.draining.busy:
            self.draining.progress(now_s, n, whole=whole)
        if self._lifting:
            self._lift(now_s)
        if self.writer.tails:
            self.writer.post_tails()

    def next_s(self, now_s: float) -> float | None:
        """When progress() has something to do though nothing came, or None."""
        times = [p.negotiation.next_s for p in self._unsettled if p.negotiation.next_s is not None]
        times += self.notes.next_s() + self.draining.next_s(now_s)
        return min(times, default=None)

    @staticmethod
    def lost_status(conn: Conn) -> int:
        """What a flushed row of a connection is told: why the peer is gone, if it is."""
        if conn.peer.gone is None:
            return int(Status.UNREACHABLE if conn.peer.fenced else Status.FLUSHED)
        return int(conn.peer.gone)

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
        self._unsettled.clear()
        for peer in self.table:
            peer.conn = peer.live = None
            peer.gone = peer.gone or status
            peer.fail_waiting(status)
            self.notes.fail(peer, status)
        self._forget_sets()
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
