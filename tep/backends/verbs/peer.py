"""One peer of a NIC: the way to a connection with it, and what waits for one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Protocol

from tep.backends.base import Batch, Entry, ReadBatch, Status
from tep.backends.base import Kind as Completed
from tep.backends.verbs.handshake import NO_ECE, Ece, Hello, Kind, Negotiation, Phase, QpId

if TYPE_CHECKING:
    from tep.backends.verbs.address import Address
    from tep.backends.verbs.conns import Conn
    from tep.backends.verbs.datagrams import Datagrams
    from tep.backends.verbs.device import Device
    from tep.backends.verbs.messages import Messages
    from tep.backends.verbs.posting import Posting

__all__ = ["Owner", "Peer", "ended_as"]

_WRITE, _READ = int(Completed.WRITE), int(Completed.READ)
_FLUSHED: Final = int(Status.FLUSHED)


class Owner(Protocol):
    """What a peer needs of its NIC."""

    device: Device
    own: Address
    attempts: Iterator[int]
    ready: deque[Entry]
    posting: Posting
    messages: Messages
    datagrams: Datagrams

    def new_conn(self, peer: Peer) -> Conn:
        """Make queue pairs for a peer."""

    def drop(self, conn: Conn) -> None:
        """Take a connection out of use; its rows come back flushed."""

    def pause(self, peer: Peer) -> None:
        """Post nothing more on a peer's connection; what comes for it is kept."""

    def why_silent(self) -> Status:
        """What is told of rows and messages to which there was no answer."""


class Peer:
    """One incarnation of a remote NIC; what its negotiation makes it do.

    Attributes:
        number: its PeerId.
        where: its address.
        conn: the connection being made or in use.
        live: the connection in use.
        gone: once it is known that this incarnation never comes back: the status its rows get.
        shut: we have fenced it.
        refused: it has fenced us, as the last handshake said.
        blurred: a connection did not drain, and what had landed on it is not known.
    """

    def __init__(self, owner: Owner, number: int, where: Address) -> None:
        self.number = number
        self.where = where
        self.conn: Conn | None = None
        self.live: Conn | None = None
        self.gone: Status | None = None
        self.shut = False
        self.refused = False
        self.blurred = False
        self.rows: deque[tuple[Batch, int, int]] = deque()
        self.messages: deque[int] = deque()
        self._asked = 0  # so many of the rows have waited since before the last check()
        self._owner = owner
        settings = owner.device.settings
        self.negotiation = Negotiation(
            self, owner.attempts, patience_s=settings.handshake_s, resend_s=settings.resend_s
        )

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
        if self.conn.qps:
            self._owner.posting.up[self.number] = self.conn
        else:
            self.fail_rows(Status.UNREACHABLE, self._asked)
        self.flush()

    def say(self, kind: Kind, attempt: int, echo: int, payload: bytes = b"") -> None:
        owner = self._owner
        ids: tuple[QpId, ...] = ()
        ece: Ece = NO_ECE
        if self.conn is not None and kind in {Kind.REQ, Kind.REP}:
            ids, ece = self.conn.ids, self.conn.ece
        hello = Hello(
            kind=kind,
            sender=owner.own,
            target=self.where.epoch,
            attempt=attempt,
            echo=echo,
            mtu=owner.device.port.active_mtu,
            qps=ids,
            reads=owner.device.reads_served if ids else 0,
            ece=ece,
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
        while rows and conn.qps:
            batch, start, stop = rows.popleft()
            start += self._owner.posting.post_held(conn, batch, start, stop)
            if start < stop:
                rows.appendleft((batch, start, stop))
                break
        while messages and self._owner.messages.post(messages[0], conn):
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
        """End what waits."""
        self.fail_rows(status)
        while self.messages:
            self._owner.messages.sent(self.messages.popleft(), int(status))


def ended_as(batch: Batch, status: Status) -> tuple[int, int]:
    """(kind, status) of rows that were never posted: such a read is over, whatever the NIC does."""
    if isinstance(batch, ReadBatch):
        return _READ, _FLUSHED if status is Status.NIC_DOWN else int(status)
    return _WRITE, int(status)
