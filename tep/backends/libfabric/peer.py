"""One peer's NIC as a record: its state, what goes to it, what waits, what is read from it.

Rule: only peers.py changes a peer's `state` and `status`, and only tcp.py its `reading`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from tep.backends.base import ReadRow, Status, WriteBatch
from tep.backends.ffi.libfabric import FI_ADDR_UNSPEC
from tep.backends.libfabric.frames import Frame
from tep.backends.libfabric.objects import Endpoint, Region
from tep.backends.libfabric.rules import NicAddress

__all__ = ["Accepted", "Peer", "PeersReads", "Piece", "State"]

_EMPTY: Final[deque[Any]] = deque(maxlen=0)


class State(Enum):
    """The state of a peer."""

    CONNECTING = auto()
    READY = auto()
    SILENT = auto()  # did not answer; may be asked again
    LEAVING = auto()  # said goodbye; answers to rows in flight may still be on their way
    GONE = auto()  # said goodbye, or was replaced, or our NIC is lost; for ever


_ALIVE: Final = frozenset({State.CONNECTING, State.READY})


@dataclass(slots=True, eq=False)
class Peer:
    """One NIC of a peer, in one incarnation.

    Attributes:
        index: its PeerId.
        number: its fi_addr_t; FI_ADDR_UNSPEC = libfabric was never told of it.
        endpoint: what rows and frames to it go through, once there was something to send.
        status: how rows to it end while it is SILENT or GONE.
        open: rows in flight to it.
        adrift: rows to it that were given up, and that libfabric still has.
        heard: something completed since the last look at deadlines.
        since_s: when it entered its state, or was last heard.
        held: (batch, row, due_s) accepted and not posted, oldest first.
        sends: frames in libfabric's hands.
        stuck_s: since when libfabric has not taken the next frame; 0 = it does.
        pause_until_s: no frame is sent before: one failed just now, and the next may fail at once.
        forget_s: when what it costs us is given back at the latest, once it is quiet; 0 = keep it.
        leases: (base, nbytes) of its keys; None = asked. This and the rest are tcp's alone.
        lost: (ctx, row, rkey) that came back failed and wait until it is known whether it lives.
        reading: its reads; None = none was posted.
    """

    index: int
    data: bytes
    address: NicAddress
    number: int = FI_ADDR_UNSPEC
    endpoint: Endpoint | None = None
    state: State = State.SILENT
    status: Status = Status.UNREACHABLE
    open: int = 0
    adrift: int = 0
    heard: bool = False
    since_s: float = 0.0
    held: deque[tuple[WriteBatch, int, float]] = field(default_factory=deque)
    outbox: deque[Frame] = field(default_factory=deque)
    sends: int = 0
    stuck_s: float = 0.0
    pause_until_s: float = 0.0
    forget_s: float = 0.0
    leases: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    lost: list[tuple[int, int, int]] = field(default_factory=list)
    reading: PeersReads | None = None

    @property
    def out(self) -> int:
        """Rows and frames that libfabric still has."""
        return self.open + self.adrift + self.sends

    @property
    def over(self) -> bool:
        """Tell whether rows to it fail at once."""
        return self.state not in _ALIVE

    @property
    def unanswered(self) -> bool:
        """Tell whether something waits for its next word."""
        return self.state is State.CONNECTING or bool(self.lost)

    @property
    def unsettled(self) -> bool:
        """Tell whether it needs looking after at each poll."""
        waits = self.state is State.CONNECTING or self.state is State.LEAVING
        if waits or self.outbox or self.held or self.lost or self.forget_s:
            return True
        return bool(self.reading)

    def empty(self) -> None:
        """It is gone, and kept for its number only: peers may come and go by the thousand."""
        self.held = self.outbox = _EMPTY
        self.lost, self.leases = [], {}


@dataclass(slots=True, eq=False)
class Accepted:
    """A row that has been accepted.

    Attributes:
        posted, left: bytes that were asked for, and bytes that have not arrived.
        ended: its completion is made.
    """

    ctx: int
    index: int
    row: ReadRow
    region: Region | None
    left: int
    posted: int = 0
    ended: bool = False


@dataclass(slots=True, eq=False)
class Piece:
    """A part of a row, in the buffer of a slot; `reads` are those that the row is one of."""

    slot: int
    reads: PeersReads
    row: Accepted
    at: int
    nbytes: int
    failed: bool = False


@dataclass(slots=True, eq=False)
class PeersReads:
    """The reads from one peer; false when none is open.

    Attributes:
        waiting: rows that have pieces to post, oldest first.
        open: rows that have not ended.
        ranges: (base, nbytes) that its keys opened when it was asked last; None = asked.
        landed: pieces that wait to be asked about, by key.
        asked: the number of the question that is out about a key, and the pieces it is about.
        moved_s: when something of it came last.
    """

    waiting: deque[Accepted] = field(default_factory=deque)
    open: dict[Accepted, None] = field(default_factory=dict)
    ranges: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    landed: dict[int, list[Piece]] = field(default_factory=dict)
    asked: dict[int, tuple[int, list[Piece]]] = field(default_factory=dict)
    moved_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.open)
