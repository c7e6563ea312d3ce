"""What is known of a peer, and what is told of it: records without logic.

Who keeps them is `lifecycle`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from tep.core.region import Link

if TYPE_CHECKING:
    from tep.wire import NetAddr

__all__ = ["NS_PER_S", "Nic", "Peer", "PeerChange", "PeerEvent", "PeerState", "PeerWatch"]

NS_PER_S: Final = 1_000_000_000


class PeerState(Enum):
    """What is known of a peer."""

    ALIVE = "alive"
    LOST = "lost"
    RESTARTED = "restarted"  # this incarnation is gone for good


class PeerChange(Enum):
    """What a PeerEvent tells."""

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
        nic: index of its NIC where one is concerned, else None.
    """

    peer: str
    epoch: int
    kind: PeerChange
    reason: str
    nic: int | None = None


class Nic:
    """One NIC of a peer.

    Attributes:
        down: whether rows to it failed, and it has not answered since.
        since_ns: when that began, or ended.
        wait_ns: from its failure to the first question, then from one question to the next.
        valid_ns: an answer counts if its question was put then or later.
        due_ns: when to ask next; None: not at all.
    """

    __slots__ = ("down", "due_ns", "since_ns", "valid_ns", "wait_ns")

    def __init__(self) -> None:
        self.down = False
        self.since_ns = self.wait_ns = self.valid_ns = 0
        self.due_ns: int | None = None


class Peer:
    """What is known of one incarnation of a peer.

    Attributes:
        since_ns: when its state began.
        heard_ns: when the last question was put that it answered, later by what kept us busy.
        round_trip_s: of the last answer.
        watch: who wants its heart to beat.
        beats: rounds of questions put to it.
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
        """Whether none of its NICs takes rows."""
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

    def __repr__(self) -> str:
        closed = ", closed" if self.closed else ""
        return f"PeerWatch({self.peer}: {self.state.value} since {self.since_s:.6f} s{closed})"
