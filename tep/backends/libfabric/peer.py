"""One peer's NIC as a record: its state, what goes to it, what waits. Nothing here calls anybody.

Rule: only peers.py changes a peer's `state` and `status`.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Any, Final, TypeVar

from tep.backends.base import Status, WriteBatch
from tep.backends.ffi.libfabric import FI_ADDR_UNSPEC
from tep.backends.libfabric.address import NicAddress
from tep.backends.libfabric.objects import Endpoint

__all__ = ["Peer", "PeerT", "State"]

_NEVER_FULL: Final = 1 << 62
_EMPTY: Final[deque[Any]] = deque(maxlen=0)


class State(Enum):
    """How a peer is."""

    CONNECTING = auto()
    READY = auto()
    SILENT = auto()  # did not answer; may be asked again
    LEAVING = auto()  # said goodbye; answers to rows in flight may still be on their way
    GONE = auto()  # said goodbye, or was replaced, or our NIC is lost; for ever


_ALIVE: Final = frozenset({State.CONNECTING, State.READY})


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
        held: (batch, row, due_s) accepted and not posted, oldest first.
        outbox: frames to send.
        sends: frames in libfabric's hands.
        stuck_s: since when libfabric has not taken the next frame; 0 = it does.
        pause_until_s: no frame is sent before: one failed just now, and the next may fail at once.
    """

    __slots__ = (
        "address",
        "adrift",
        "appetite",
        "data",
        "endpoint",
        "full_at",
        "heard",
        "held",
        "index",
        "number",
        "open",
        "outbox",
        "pause_until_s",
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
        self.held: deque[tuple[WriteBatch, int, float]] = deque()
        self.outbox: deque[bytes] = deque()
        self.sends = 0
        self.stuck_s = self.pause_until_s = 0.0

    @property
    def out(self) -> int:
        """Rows and frames that libfabric still has."""
        return self.open + self.adrift + self.sends

    @property
    def over(self) -> bool:
        """Whether rows to it fail at once."""
        return self.state not in _ALIVE

    @property
    def unanswered(self) -> bool:
        """Whether something waits for its next word."""
        return self.state is State.CONNECTING

    @property
    def has_rows(self) -> bool:
        """Whether rows to it have not ended."""
        return bool(self.open or self.held)

    @property
    def unsettled(self) -> bool:
        """Whether it needs looking after at each poll."""
        waits = self.state is State.CONNECTING or self.state is State.LEAVING
        return bool(waits or self.outbox or self.held)

    def empty(self) -> None:
        """It is gone, and kept for its number only: peers may come and go by the thousand."""
        self.held = self.outbox = _EMPTY


PeerT = TypeVar("PeerT", bound=Peer)
"""What a room knows of a peer: `Peer`, or more."""
