"""Paths: our NIC to one NIC of a peer. A path's state, its sums and what was lost on it are here.

Records and one table of transitions; what to do about a state is the business of the group, which
deals rows out, and of `tep.control`, which talks to the peer. Rule 1: `Path.to` is the only way to
change a state. Rule 2: a path belongs to one incarnation of a peer, so its record goes with the
peer's. Rule 3: what a stranger may ask about has a record of its own, a `FarEnd`, found by address.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, Protocol

from tep.backends.base import Domain
from tep.core.sums import PathSums
from tep.errors import FabricError
from tep.wire import NetAddr

__all__ = ["TRANSITIONS", "FarEnd", "FarEnds", "Fence", "Link", "Path", "PathEvent", "PathState"]

_UNKNOWN: Final = -1


class PathState(Enum):
    """What may be sent on a path."""

    UP = "rows go there"
    SUSPECT = "rows were lost there; none goes there while another path is left"
    FENCING = "the peer was asked to fence it off"
    FENCED = "the peer has fenced it off: nothing that was sent before lands any more"
    REOPENING = "fenced off, and the peer was asked to lift its fence"

    # By identity, as they compare: Enum's own is a Python function.
    __hash__ = object.__hash__


class PathEvent(Enum):
    """What changes the state of a path."""

    LOST = "a row ended, and nobody knows whether it landed"
    ASKED = "the peer is asked to fence it off"
    UNANSWERED = "the peer did not answer, or could not do it"
    FENCED = "the peer has fenced it off"
    ASKED_BACK = "the peer is asked to lift its fence"
    REFUSED = "the peer keeps its fence, or did not answer"
    OPENED = "the peer has lifted its fence"

    __hash__ = object.__hash__


_UP, _SUSPECT, _FENCING, _FENCED, _REOPENING = PathState

TRANSITIONS: Final[Mapping[tuple[PathState, PathEvent], PathState]] = {
    (_UP, PathEvent.LOST): _SUSPECT,
    (_SUSPECT, PathEvent.LOST): _SUSPECT,
    (_SUSPECT, PathEvent.ASKED): _FENCING,
    (_SUSPECT, PathEvent.UNANSWERED): _SUSPECT,
    (_SUSPECT, PathEvent.FENCED): _FENCED,  # of two that asked, the other got no answer
    (_FENCING, PathEvent.LOST): _FENCING,
    (_FENCING, PathEvent.ASKED): _FENCING,
    (_FENCING, PathEvent.UNANSWERED): _SUSPECT,
    (_FENCING, PathEvent.FENCED): _FENCED,
    (_FENCED, PathEvent.LOST): _FENCED,
    (_FENCED, PathEvent.ASKED): _FENCED,
    (_FENCED, PathEvent.UNANSWERED): _FENCED,
    (_FENCED, PathEvent.FENCED): _FENCED,
    (_FENCED, PathEvent.ASKED_BACK): _REOPENING,
    (_REOPENING, PathEvent.LOST): _FENCED,  # what the peer answers now does not count any more
    (_REOPENING, PathEvent.REFUSED): _FENCED,
    (_REOPENING, PathEvent.OPENED): _UP,
}
"""All that may happen. What is not here is a bug: `Path.to` asserts."""


class Rows(Protocol):
    """A batch, as far as a path looks at it: rows posted, and rows that are back."""

    at: int
    back: int


class Unsettled(Protocol):
    """Rows that were lost together; see `tep.core.pending.Loss`."""

    asked: bool


class Path:
    """Our NIC `domain` to NIC `nic` of one incarnation of a peer.

    Attributes:
        link, domain, nic: the peer, our NIC, its NIC.
        state: see PathState.
        fences: how often the peer has fenced it off.
        peer_id: what our NIC calls its NIC; -1 = not connected.
        sums: immediates that were acknowledged there.
        losses: rows lost there that are not settled, in the order of their loss.
        seen: a batch with rows in flight there, as far as is known.
        asking: whether the peer is being asked for it back, or for the fence that comes first.
    """

    __slots__ = (
        "asking", "domain", "fences", "link", "losses", "nic", "peer_id", "seen", "state", "sums",
    )  # fmt: skip

    def __init__(self, link: Link, domain: int, nic: int) -> None:
        self.link = link
        self.domain = domain
        self.nic = nic
        self.state = PathState.UP
        self.fences = 0
        self.peer_id = _UNKNOWN
        self.sums = PathSums(forgot=link.again)
        self.losses: list[Unsettled] = []
        self.seen: Rows | None = None
        self.asking = False

    def __repr__(self) -> str:
        return f"Path({self.domain} -> {self.link.addr.name} NIC {self.nic}: {self.state.name})"

    @property
    def is_up(self) -> bool:
        """Whether rows may go there."""
        return self.state is _UP

    @property
    def is_fenced(self) -> bool:
        """Whether the peer has fenced it off, and not lifted the fence."""
        return self.state is _FENCED or self.state is _REOPENING

    def to(self, event: PathEvent) -> None:
        """Change the state by an event."""
        was = self.state
        now = TRANSITIONS.get((was, event))
        assert now is not None, f"{self}: {event.name} cannot happen there"
        self.state = now
        self.link.closed += (now is not _UP) - (was is not _UP)
        if event is PathEvent.FENCED:
            self.fences += 1


class Link:
    """One incarnation of a peer: its NICs' addresses, and the paths to them.

    Attributes:
        addr: the peer.
        alive: for each of its NICs, whether it is used; False: marked down.
        closed: how many paths are not UP.
        current: False once a later incarnation of the peer is known, or it is being removed.
        again: it was removed before, and the sums of its paths with it.
        left: it has been removed.
    """

    __slots__ = ("_domains", "_paths", "addr", "again", "alive", "closed", "current", "left")

    def __init__(self, addr: NetAddr, domains: tuple[Domain, ...]) -> None:
        self.addr = addr
        self.alive = [True] * len(addr.domains)
        self.closed = 0
        self.current = True
        self.again = self.left = False
        self._domains = domains
        self._paths: list[list[Path | None]] = [[None] * len(addr.domains) for _ in domains]

    def path(self, domain: int, nic: int) -> Path:
        """The path between two NICs; made when it is asked for first."""
        found = self._paths[domain][nic]
        if found is None:
            found = self._paths[domain][nic] = Path(self, domain, nic)
        return found

    def paths(self) -> list[Path]:
        """Every path that was ever asked for."""
        return [path for row in self._paths for path in row if path is not None]

    def shut(self) -> list[tuple[int, int]]:
        """(our NIC, its NIC) of the paths that are not UP."""
        return [(path.domain, path.nic) for path in self.paths() if not path.is_up]

    def is_up(self, domain: int, nic: int) -> bool:
        """Whether rows may go over a path."""
        found = self._paths[domain][nic]
        return found is None or found.state is _UP

    def is_fenced(self, domain: int, nic: int) -> bool:
        """Whether the peer has fenced a path off."""
        found = self._paths[domain][nic]
        return found is not None and found.is_fenced

    def route(self, here: Sequence[bool], domain: int, nic: int) -> tuple[int, int]:
        """Where what is meant for a path goes today; `here`: which of our NICs live.

        Its own NICs if they live, else the next on each side. A path that is not UP is taken only
        if there is no other, and a fenced one only if all are fenced.
        """
        there = self.alive
        ours = [i for k in range(len(here)) if here[i := (domain + k) % len(here)]]
        theirs = [j for k in range(len(there)) if there[j := (nic + k) % len(there)]]
        if self.closed:
            pairs = list(itertools.product(ours, theirs))
            for i, j in pairs:
                if self.is_up(i, j):
                    return i, j
            for i, j in pairs:
                if not self.is_fenced(i, j):
                    return i, j
        return ours[0], theirs[0]

    def has_way(self, ours: Iterable[int]) -> bool:
        """Whether a path from one of these NICs of ours is UP."""
        return any(self.is_up(i, j) for i in ours for j in range(len(self.alive)))

    def forget(self) -> None:
        """Drop the sums of its paths; NICs give back what it costs them."""
        self.again = self.left = True
        for path in self.paths():
            path.sums = PathSums(forgot=True)
            if path.peer_id != _UNKNOWN:
                self._domains[path.domain].forget(path.peer_id)

    def peer(self, domain: int, nic: int) -> int:
        """The PeerId of its NIC `nic` on our NIC `domain`; connects on first use."""
        path = self._paths[domain][nic]
        if path is not None and path.peer_id != _UNKNOWN:
            return path.peer_id
        try:
            found = self._domains[domain].connect(self.addr.domains[nic])
        except (OSError, MemoryError) as error:  # what goes there fails
            raise FabricError(
                f"{self._domains[domain].caps.nic}: no connection to {self.addr.name}, whose "
                f"NIC {nic} is meant: {error}",
                code="UNREACHABLE",
            ) from error
        self.path(domain, nic).peer_id = found
        return found


class Fence:
    """Our fence against the rows of a peer's NIC: who wants to know, and how it ended.

    Attributes:
        asking: what to call with the status.
        status: how it ended; None: it has not.
    """

    __slots__ = ("asking", "status")

    def __init__(self) -> None:
        self.asking: list[Callable[[int], object]] = []
        self.status: int | None = None


class FarEnd:
    """What is known of a path by the address of its other end, whether that peer was met or not.

    Attributes:
        fence: ours against its rows; None: there is none.
        asked, reopened: number of the last question to fence it, and of the last to open it.
        leases: that keep our fence up until their holder has let go.
        unheard: the last control message did not get there. Where an error flushes, rows on the
            same path end with it.
    """

    __slots__ = ("asked", "fence", "leases", "reopened", "unheard")

    def __init__(self) -> None:
        self.fence: Fence | None = None
        self.asked = self.reopened = 0
        self.leases: dict[object, None] = {}
        self.unheard = False

    def is_idle(self) -> bool:
        """Whether nothing is lost with it but the numbers of questions."""
        busy = self.fence is not None and self.fence.status is None
        return not (busy or self.leases or self.unheard)


class FarEnds:
    """The far ends of all paths of one engine, by (our NIC, address)."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], FarEnd] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, nic: int, address: bytes) -> FarEnd | None:
        """What is known of one; None: nothing."""
        return self._known.get((nic, address))

    def at(self, nic: int, address: bytes) -> FarEnd:
        """The record of one, made when it is asked for first."""
        found = self._known.get((nic, address))
        if found is None:
            found = self._known[nic, address] = FarEnd()
        return found

    def note_heard(self, nic: int, address: bytes, *, heard: bool) -> None:
        """A control message got there, or not."""
        if not heard:
            self.at(nic, address).unheard = True
        elif (found := self.get(nic, address)) is not None:
            found.unheard = False

    def drop(self, nic: int, address: bytes) -> None:
        """Forget one that is idle."""
        found = self._known.get((nic, address))
        if found is not None and found.is_idle():
            del self._known[nic, address]

    def forget(self, addresses: Collection[bytes]) -> None:
        """Forget those of a peer that has left, but for fences that have not ended."""
        for nic, address in [key for key in self._known if key[1] in addresses]:
            self._known[nic, address].unheard = False
            self.drop(nic, address)

    def release(self, gone: Callable[[object], bool]) -> None:
        """Let go of leases that keep paths shut, if gone(lease) says so."""
        for far in self._known.values():
            for lease in [lease for lease in far.leases if gone(lease)]:
                del far.leases[lease]
