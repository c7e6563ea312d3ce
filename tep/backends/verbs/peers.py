"""The peers of a NIC: the way to a connection with each, and what waits for one.

Rule 1: rows and messages for a peer that is not connected are kept here, never posted on queue
pairs that are not ready. Rule 2: what is kept ends, well or not: the handshake has a deadline.
Rule 3: a call from the engine takes a few steps of handshakes and no more, however many peers
connect: datagrams are taken off the NIC at once, and wait here in line.

Control messages between engines go over the handshake's datagrams, so they need no connection: they
pass where queue pairs have failed, or were fenced. Rule 4: one control message at a time is out to
one peer, and is repeated until the peer has answered; so a control message that comes twice has the
number of the one before. Rule 5: a peer that does not answer in time loses all control messages
that wait for it, and the time is a part of a handshake's: engines ask four times before they give a
peer up.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import Batch, Entry, ReadBatch, Status
from tep.backends.base import Kind as Completed
from tep.backends.common import Unread
from tep.backends.verbs.conns import Conn, Draining, Queues
from tep.backends.verbs.device import Device, Settings
from tep.backends.verbs.handshake import (
    Address,
    Hello,
    Kind,
    Negotiation,
    Patience,
    Phase,
    QpId,
)
from tep.backends.verbs.messages import Datagrams, Messages
from tep.backends.verbs.send import Writer
from tep.base.errors import BadDescriptor, FabricError, UsageError

__all__ = ["STEPS_MAX", "Peers", "ended_as"]

STEPS_MAX: Final = 8
"""Steps of handshakes that are taken before the engine gets on with its rows. Each costs four to
six commands of the device, of about 0.1 ms (guessed)."""

_HEARD_MAX: Final = 4096


class Peers:
    """All peers of one NIC.

    Attributes:
        table: by PeerId.
        conns: by number of a queue pair; also for a while after one is gone, for the source of what
            comes late.
        work: all that progress() looks at; it need not be called while these are empty.
        link_lost: whether our own port is at fault when nobody answers, and this NIC given up.
        trouble: what went wrong last while connecting.
    """

    def __init__(
        self,
        device: Device,
        queues: Queues,
        messages: Messages,
        datagrams: Datagrams,
        own: Address,
        ready: deque[Entry],
        not_inline: Container[int],
        link_lost: Callable[[], bool],
    ) -> None:
        self.device = device
        self.messages = messages
        self.datagrams = datagrams
        self.own = own
        self.ready = ready
        self.attempts: Iterator[int] = itertools.count(1)
        self.table: list[Peer] = []
        self.writer = Writer(device, queues.depths, not_inline, ready, self.keep, self.fail)
        self.up = self.writer.up
        self.conns: dict[int, Conn] = {}
        self.controls = _Controls(ready)
        self.draining = Draining(self._holds, ready, queues.depths.cq, self._retire)
        self.link_lost = link_lost
        self.trouble = ""
        self._queues = queues
        self._sources: tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]] | None = None
        self._by_address: dict[Address, Peer] = {}
        self._latest: dict[int, Peer] = {}  # by identity
        self._unsettled: dict[Peer, None] = {}
        self._lifting: dict[Peer, None] = {}  # to be let in again, once their fence has ended
        self._heard: dict[tuple[Address, Kind], Hello] = {}  # datagrams that cost commands
        self._asking: dict[Peer, None] = {}  # who wants to be asked for a connection
        self._tend_s = 0.0  # when the next of the unsettled is due
        self._rng = random.SystemRandom()
        self.work = (
            self._unsettled,
            self._heard,
            self._asking,
            self.draining.conns,
            self.draining.fences,
            self.controls.open,
        )

    # --- peers

    def connect(self, raw: bytes) -> int:
        """Number a peer by its address, and begin to connect; UsageError: there is no way there."""
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
        """Let only the latest of several incarnations of one NIC live."""
        other = self._latest.setdefault(new.where.identity, new)
        if other is not new:
            older, later = sorted((other, new), key=lambda peer: peer.where.epoch)
            self._latest[new.where.identity] = later
            self.bury(older, Status.STALE_PEER)

    def bury(self, peer: Peer, status: Status) -> None:
        """A peer's incarnation is over: what is open fails, nothing is tried again."""
        if peer.gone is None:
            self._end(peer, status)
            self._unsettled.pop(peer, None)
            self._asking.pop(peer, None)
            self.datagrams.routes.forget(peer.where)

    def _end(self, peer: Peer, status: Status) -> None:
        peer.gone = peer.gone or status
        self._lose(peer, peer.gone)
        self.controls.fail(peer, peer.gone)

    def _lose(self, peer: Peer, status: Status) -> None:
        """Give up the way to a connection with a peer, and what waits for one."""
        peer.negotiation.lose()
        if peer.conn is not None:
            self.drop(peer.conn)
        peer.fail_waiting(status)

    def attend(self, peer: Peer) -> None:
        """Begin or go on to connect to a peer, in a later turn: see `progress`."""
        self._asking[peer] = None

    def hear(self, payload: bytes, now_s: float) -> None:
        """Take a datagram; what is none of ours is ignored."""
        try:
            hello = Hello.decode(payload)
        except BadDescriptor:
            return
        if hello.target != self.own.epoch or (
            hello.sender not in self._by_address and self.own.why_unreachable(hello.sender)
        ):
            return
        peer = self._peer(hello.sender)
        if peer.gone is not None:
            return
        if hello.kind is Kind.BYE:
            self.bury(peer, Status.UNREACHABLE)
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
        peer = self._peer(hello.sender)
        if peer.gone is None:
            self._tend(peer, now_s, partial(peer.negotiation.hear, hello))

    # --- what waits

    def keep(self, number: int, batch: Batch, start: int, stop: int) -> None:
        """Keep rows that found no room on their peer's queue pair."""
        peer = self.table[number]
        peer.rows.append((batch, start, stop))
        self._unsettled[peer] = None
        self._tend_s = 0.0  # from the next turn on

    def hold(self, number: int, batch: Batch, start: int, stop: int) -> None:
        """Keep rows until their peer is connected."""
        peer = self.table[number]
        peer.rows.append((batch, start, stop))
        self.attend(peer)

    # --- connections

    def new_conn(self, peer: Peer) -> Conn:
        conn = Conn(self.device, self._queues, peer.number, self._rng, rows=not peer.shut)
        self.conns.update((number, conn) for number, _ in conn.ids)
        self._sources = None
        return conn

    def sources_of(self, numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """The PeerIds at the far ends of queue pairs, by the numbers of these."""
        if self._sources is None:
            known = sorted(self.conns)
            peers = np.array([self.conns[number].peer for number in known], np.uint64)
            self._sources = np.array(known, np.uint32), peers
        known_numbers, peers = self._sources
        return peers[known_numbers.searchsorted(numbers)]

    def _holds(self, conn: Conn) -> bool:
        return self.writer.holds(conn) or self.messages.holds(conn)

    def drop(self, conn: Conn) -> None:
        """Take a connection out of use; its rows come back flushed."""
        peer = self.table[conn.peer]
        if peer.conn is conn:
            peer.conn = None
            self.pause(peer)
        if not conn.lost:
            self.draining.add(conn, time.monotonic())

    def pause(self, peer: Peer) -> None:
        """Post nothing more on a peer's connection; what comes for it is kept."""
        peer.live = None
        self.up[peer.number] = None
        self.writer.forget_fans()

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
        conn.destroy()
        if drained:
            for number, _ in conn.ids:
                del self.conns[number]
            self._sources = None
        else:  # what comes of it all the same still has a source, until its number is used again
            peer = self.table[conn.peer]
            if conn.row_ref and not self.device.dead:
                self.draining.blurred.add(peer.number)
            self.trouble = f"the queue pairs with {peer.where} did not return what they held"
            self.writer.fail_all(self.lost_status(conn), [conn])
            self.messages.fail_all(self.lost_status(conn), conn)

    def fence(self, source: bytes, ctx: int) -> None:
        """Let no rows of a NIC land any more; its connection is for messages only from now on."""
        peer = self._peer(Address.decode(source))
        peer.shut = True
        peer.fail_rows(Status.UNREACHABLE)
        self._lifting.pop(peer, None)
        if peer.conn is not None and peer.conn.row_ref:
            peer.negotiation.lose()
            self.drop(peer.conn)
        self.draining.fences.append((peer.number, ctx))

    def unfence(self, source: bytes, now_s: float) -> None:
        """Let rows of a NIC land again, once its fence has been put up if that is going on."""
        peer = self._by_address.get(Address.decode(source))
        if peer is not None and peer.gone is None:
            self._lifting[peer] = None
            self._lift(now_s)

    def _lift(self, now_s: float) -> None:
        """Ask those that we let in again for a fresh connection, and others whether theirs stands.

        The others may have fenced us, and let us in again, without our having heard of either.
        """
        fencing = {number for number, _ in self.draining.fences}
        for peer in [peer for peer in self._lifting if peer.number not in fencing]:
            del self._lifting[peer]
            if peer.gone is not None or (peer.shut and peer.number in self.draining.blurred):
                continue
            # An answer to what we had asked before may be from behind the fence: ask anew.
            step: Callable[[float], object] | None = None
            if peer.shut or peer.negotiation.phase is Phase.ASKING:
                step = peer.negotiation.start
            elif peer.negotiation.connected:
                step = peer.check
            peer.shut = False
            self._tend(peer, now_s, step)

    def why_silent(self) -> Status:
        """The status of rows and messages that were not answered."""
        return Status.NIC_DOWN if self.link_lost() else Status.UNREACHABLE

    def blur(self, why: str) -> None:
        """Completions were lost: of no peer it is known what has landed here."""
        self.draining.blurred.update(range(len(self.table)))
        self.trouble = f"completions were lost, what has landed is not known: {why}"

    def sink(self, status: Status) -> None:
        """The NIC dies: let all connections drain; what is open or waits fails."""
        for peer in self.table:
            self._end(peer, status)
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

    def progress(self, now_s: float, n: int, *, whole: bool) -> None:
        """Repeat and give up what is due, post what waits, end what does not drain.

        `n` completions were read since the last call; `whole`: there were no more.
        """
        self._take_steps(now_s)
        if now_s >= self._tend_s:
            self._tend_s = math.inf
            for peer in list(self._unsettled):
                self._tend(peer, now_s)
        if self.controls.open:
            self.controls.progress(now_s)
        if self.draining.conns or self.draining.fences:
            self.draining.progress(now_s, n, whole=whole)
        if self._lifting:
            self._lift(now_s)

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
            self._tend(peer, now_s, peer.ask)

    def _tend(
        self, peer: Peer, now_s: float, step: Callable[[float], object] | None = None
    ) -> None:
        """Take a step, repeat or give up what is due, and post what waits for a peer.

        Where this fails, what waits fails.
        """
        negotiation = peer.negotiation
        self._unsettled[peer] = None
        try:
            if step is not None:
                step(now_s)
            negotiation.tick(now_s)
            peer.flush()
        except (FabricError, MemoryError) as error:
            self.trouble = str(error) or "MemoryError"
            self._lose(peer, Status.PROVIDER)
        if negotiation.next_s is not None:
            self._tend_s = min(self._tend_s, negotiation.next_s)
        elif not peer.rows and not peer.messages:
            self._unsettled.pop(peer, None)
        else:
            self._tend_s = now_s
            if peer.refused or negotiation.phase is not Phase.UP:
                self.attend(peer)

    def next_s(self, now_s: float) -> float | None:
        """The time when progress() has something to do though nothing came, or None."""
        asking = [peer.negotiation for peer in self._unsettled]
        lines = [peer.line for peer in self.controls.open]
        times = [each.next_s for each in (*asking, *lines) if each.next_s is not None]
        return min(times + self.draining.next_s(now_s), default=None)

    def lost_status(self, conn: Conn) -> int:
        """The status of a flushed row of a connection: why the peer is gone, if it is."""
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
        self.writer.forget_fans()
        self.up[:] = [None] * len(self.table)


class Peer:
    """One incarnation of a remote NIC; what its negotiation makes it do.

    Attributes:
        number: its PeerId.
        conn, live: the connection being made or in use; the connection in use.
        gone: once it is known that this incarnation never comes back: the status its rows get.
        shut: we have fenced it.
        refused: it has fenced us, as the last handshake said.
    """

    def __init__(self, owner: Peers, number: int, where: Address) -> None:
        self.number = number
        self.where = where
        self.conn: Conn | None = None
        self.live: Conn | None = None
        self.gone: Status | None = None
        self.shut = False
        self.refused = False
        self.rows: deque[tuple[Batch, int, int]] = deque()
        self.messages: deque[int] = deque()
        self._asked = 0  # so many of the rows have waited since before the last check()
        self._owner = owner
        settings = owner.device.settings
        self.negotiation = Negotiation(
            self, owner.attempts, patience_s=settings.handshake_s, resend_s=settings.resend_s
        )
        self.line = _Line(settings)

    # --- what the negotiation asks for

    def begin(self) -> None:
        if self.conn is not None:
            self._owner.drop(self.conn)
        self.conn = self._owner.new_conn(self)
        self._asked = 0

    def ready(self, hello: Hello) -> None:
        assert self.conn is not None
        self.conn.to_rtr(hello)
        self.refused = len(hello.qps) == 1

    def up(self) -> None:
        assert self.conn is not None
        self.conn.to_rts()
        self.live = self.conn
        if self.conn.row_ref:
            self._owner.up[self.number] = self.conn
        else:
            self.fail_rows(Status.UNREACHABLE, self._asked)
        self.flush()

    def say(self, kind: Kind, attempt: int, echo: int, payload: bytes = b"") -> None:
        owner = self._owner
        ids: tuple[QpId, ...] = ()
        if self.conn is not None and kind in {Kind.REQ, Kind.REP}:
            ids = self.conn.ids
        hello = Hello(
            kind=kind,
            sender=owner.own,
            target=self.where.epoch,
            attempt=attempt,
            echo=echo,
            mtu=owner.device.port.active_mtu,
            qps=ids,
            reads=owner.device.reads_served if ids else 0,
            payload=payload,
        )
        owner.datagrams.send(self.where, hello.encode())

    def give_up(self) -> None:
        if self.negotiation.phase is Phase.IDLE and self.conn is not None:
            self._owner.drop(self.conn)
        self.fail_waiting(self._owner.why_silent())

    # --- what waits

    @property
    def fenced(self) -> bool:
        """Whether no rows pass between the two, either way."""
        return self.shut or self.refused

    def ask(self, now_s: float) -> None:
        """See to it that a connection is being made, or that what waits fails."""
        negotiation = self.negotiation
        if self.shut:
            self.fail_rows(Status.UNREACHABLE)
        if self.gone is not None:
            self.fail_waiting(self.gone)
        elif negotiation.next_s is None and negotiation.phase is not Phase.UP:
            negotiation.start(now_s)
        elif negotiation.phase is Phase.UP and self.refused and self.rows:
            self.check(now_s)

    def check(self, now_s: float) -> None:
        """Post nothing until the peer has said that its half of the connection still stands.

        If it does, and is for messages only, then the peer has fenced us: of the rows that wait,
        those end that have waited since before the question. It may have let us in since.
        """
        self._asked = len(self.rows)
        self._owner.pause(self)
        self.negotiation.check(now_s)

    def flush(self) -> None:
        """Post what waits, as far as the queues take it."""
        conn = self.live
        if conn is None:
            return
        rows, messages = self.rows, self.messages
        while rows and conn.row_ref and not conn.lost:
            batch, start, stop = rows[0]
            start += self._owner.writer.post_any(conn, batch, start, stop)
            if start < stop:
                rows[0] = batch, start, stop
                break
            rows.popleft()
        while messages and not conn.lost and self._owner.messages.post(messages[0], conn):
            messages.popleft()

    def fail_rows(self, status: Status, nparts: int | None = None) -> None:
        """End rows that wait; `nparts` = so many parts of batches only, the oldest."""
        self._asked = 0
        for _ in range(len(self.rows) if nparts is None else nparts):
            batch, start, stop = self.rows.popleft()
            kind, told = ended_as(batch, status)
            for row in range(start, stop):
                self._owner.ready.append((kind, told, 1, 0, row, batch.ctx, 0))

    def fail_waiting(self, status: Status) -> None:
        self.fail_rows(status)
        while self.messages:
            self._owner.messages.sent(self.messages.popleft(), int(status))


def ended_as(batch: Batch, status: Status) -> tuple[int, int]:
    """(kind, status) of rows that were never posted: such a read is over, whatever the NIC does."""
    if isinstance(batch, ReadBatch):
        status = Status.FLUSHED if status is Status.NIC_DOWN else status
        return int(Completed.READ), int(status)
    return int(Completed.WRITE), int(status)


_CONTROLS_MAX: Final = 64
_PARTS: Final = 4  # the patience with a control message is such a part of a handshake's
_PAUSES: Final = 8


class _Line(Patience):
    """The control messages that wait for one peer; the first is out.

    `number` is that one's, `heard` the number of the last one that came from there.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.handshake_s / _PARTS, settings.resend_s, _PAUSES)
        self.number = self.heard = 0
        self.waiting: deque[tuple[bytes, int]] = deque()


class _Controls:
    """The control messages of one NIC: those that have come, and peers that one is out to."""

    def __init__(self, ready: deque[Entry]) -> None:
        self.open: dict[Peer, None] = {}
        self.unread = Unread(ready.append)
        self._ready = ready
        self._count = 0

    def post(self, peer: Peer, payload: bytes, ctx: int, now_s: float) -> bool:
        """Take a control message; False = too many wait."""
        if self._count == _CONTROLS_MAX:
            return False
        self._count += 1
        if peer.gone is not None:
            self._end(ctx, peer.gone)
            return True
        peer.line.waiting.append((payload, ctx))
        if len(peer.line.waiting) == 1:
            self._begin(peer, now_s)
        return True

    def _begin(self, peer: Peer, now_s: float) -> None:
        self.open[peer] = None
        peer.line.number += 1
        peer.line.begin(now_s)
        self._say(peer)

    @staticmethod
    def _say(peer: Peer) -> None:
        line = peer.line
        peer.say(Kind.CONTROL, peer.negotiation.attempt, line.number, line.waiting[0][0])

    def hear(self, peer: Peer, hello: Hello, now_s: float) -> None:
        """Take a CONTROL, or the answer to one."""
        line = peer.line
        if hello.kind is Kind.CONTROL:
            if hello.echo > line.heard:
                self.unread.add(hello.payload, peer.where.encode())
                line.heard = hello.echo  # behind it: without memory the repeat is taken
            peer.say(Kind.CONTROL_ACK, peer.negotiation.attempt, hello.echo)
        elif peer in self.open and hello.echo == line.number:
            self._end(line.waiting[0][1], Status.OK)
            line.waiting.popleft()
            if line.waiting:
                self._begin(peer, now_s)
            else:
                del self.open[peer]

    def progress(self, now_s: float) -> None:
        """Repeat what was not answered, or give up."""
        for peer in [peer for peer in self.open if peer.line.is_due(now_s)]:
            if peer.line.again(now_s):
                self._say(peer)
            else:
                self.fail(peer, Status.UNREACHABLE)

    def fail(self, peer: Peer, status: Status) -> None:
        """End every control message that waits for a peer."""
        self.open.pop(peer, None)
        while peer.line.waiting:
            _, ctx = peer.line.waiting.popleft()
            self._end(ctx, status)

    def _end(self, ctx: int, status: Status) -> None:
        self._ready.append((int(Completed.SENT), int(status), 1, 0, 0, ctx, 0))
        self._count -= 1
