"""One peer's NIC as a record: how it is, what goes to it, what waits. Nothing here calls anybody.

Rule: only peers.py changes a peer's `state` and `status`.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Final, Protocol

from tep.backends.base import Status, WriteBatch
from tep.backends.libfabric.address import NicAddress
from tep.backends.libfabric.objects import Endpoint
from tep.ffi.libfabric import FI_ADDR_UNSPEC

__all__ = ["Peer", "Probe", "State", "Watched"]

_NEVER_FULL: Final = 1 << 62


class Watched(Protocol):
    """A process that can be asked whether it has ended."""

    def ended(self) -> bool: ...

    def close(self) -> None: ...


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
        pause_until_s: no frame is sent before: one failed just now, and the next may fail at once.
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
        "pause_until_s",
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
        self.stuck_s = self.forget_s = self.pause_until_s = 0.0
        self.neighbour = False
        self.process: Watched | None = None

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
