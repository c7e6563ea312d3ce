"""Paths: our NIC to one NIC of a peer. A path has its state, its sums and its lost rows here.

Records and one table of transitions. The group, which deals rows out, and `tep.control`, which
talks to the peer, decide what to do in a state. What one part of an engine finds out about peers
and paths, and another handles, is an event here: the worker takes them once a step. Rule 1: only
`Path.to` changes a state. Rule 2: a path belongs to one incarnation of a peer, and its record is
dropped with the peer's. Rule 3: an engine that was never met may ask about a path, so that has a
record of its own, a `FarEnd`, found by address.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple, Protocol

from tep.backends.base import Domain
from tep.base.errors import FabricError
from tep.base.wire import NetAddr
from tep.core.journal import Journal
from tep.core.sums import PathSums

__all__ = [
    "TRANSITIONS", "Event", "FarEnd", "FarEnds", "Fence", "Link", "Path", "PathEvent", "PathShut",
    "PathState", "PeerHeard", "PeerNicDown", "PeerRestarted", "Routes",
]  # fmt: skip

_UNKNOWN: Final = -1


class PathState(Enum):
    """The state of a path: whether rows may be sent over it."""

    UP = "rows are sent over it"
    SUSPECT = "rows were lost on it; it is used only if no path is UP"
    FENCING = "the peer was asked to fence it off"
    FENCED = "the peer has fenced it off: nothing that was sent before lands any more"
    REOPENING = "fenced off, and the peer was asked to lift its fence"

    # Hash by identity, as they compare: Enum's own hash is a Python function.
    __hash__ = object.__hash__


class PathEvent(Enum):
    """What changes the state of a path."""

    LOST = "a row ended, and nobody knows whether it landed"
    ASKED = "the peer is asked to fence it off"
    UNANSWERED = "the peer did not answer, or could not fence it off"
    FENCED = "the peer has fenced it off"
    ASKED_BACK = "the peer is asked to lift its fence"
    REFUSED = "the peer keeps its fence, or did not answer"
    OPENED = "the peer has lifted its fence"

    __hash__ = object.__hash__


_UP, _SUSPECT, _FENCING, _FENCED, _REOPENING = PathState
_SHUT: Final = (_FENCING, _FENCED, _REOPENING)

TRANSITIONS: Final[Mapping[tuple[PathState, PathEvent], PathState]] = {
    (_UP, PathEvent.LOST): _SUSPECT,
    (_SUSPECT, PathEvent.LOST): _SUSPECT,
    (_SUSPECT, PathEvent.ASKED): _FENCING,
    (_SUSPECT, PathEvent.UNANSWERED): _SUSPECT,
    # Two questions were open, and the other one got no answer.
    (_SUSPECT, PathEvent.FENCED): _FENCED,
    (_FENCING, PathEvent.LOST): _FENCING,
    (_FENCING, PathEvent.ASKED): _FENCING,
    (_FENCING, PathEvent.UNANSWERED): _SUSPECT,
    (_FENCING, PathEvent.FENCED): _FENCED,
    (_FENCED, PathEvent.LOST): _FENCED,
    (_FENCED, PathEvent.ASKED): _FENCED,
    (_FENCED, PathEvent.UNANSWERED): _FENCED,
    (_FENCED, PathEvent.FENCED): _FENCED,
    (_FENCED, PathEvent.ASKED_BACK): _REOPENING,
    (_REOPENING, PathEvent.LOST): _FENCED,  # an answer that comes now does not count any more
    (_REOPENING, PathEvent.REFUSED): _FENCED,
    (_REOPENING, PathEvent.OPENED): _UP,
}
"""All changes that may happen. Any other is a bug: `Path.to` asserts."""


_TOLD: Final = {
    _SUSPECT: ("failover", logging.WARNING),
    _FENCED: ("fence", logging.INFO),
    _UP: ("reopen", logging.INFO),
}
"""How the journal calls it that a path gets into a state."""


class Rows(Protocol):
    """What a path needs of a batch: how many rows are posted, and how many are back."""

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
        peer_id: our NIC's number for the peer's NIC; -1 = not connected.
        sums: immediates that were acknowledged on it.
        losses: rows lost on it that are not settled, in the order of their loss.
        seen: the batch that was last found to have rows in flight on it.
        asking: whether the peer is being asked to open it again, or to fence it before that.
        silent: whether it is why the peer's NIC was marked down.
    """

    __slots__ = (
        "asking", "domain", "link", "losses", "nic", "peer_id", "seen", "silent", "state", "sums",
    )  # fmt: skip

    def __init__(self, link: Link, domain: int, nic: int) -> None:
        self.link = link
        self.domain = domain
        self.nic = nic
        self.state = PathState.UP
        self.peer_id = _UNKNOWN
        self.losses: list[Unsettled] = []
        self.seen: Rows | None = None
        self.asking = self.silent = False

    def __getattr__(self, name: str) -> PathSums:
        """Make the sums when they are first used: engines that count none have many paths."""
        if name != "sums":
            raise AttributeError(f"'Path' object has no attribute {name!r}")
        self.sums = PathSums(forgot=self.link.again)
        return self.sums

    def __repr__(self) -> str:
        return f"Path({self.domain} -> {self.link.addr.name} NIC {self.nic}: {self.state.name})"

    @property
    def is_up(self) -> bool:
        """Whether rows may be sent over it."""
        return self.state is _UP

    @property
    def is_fenced(self) -> bool:
        """Whether the peer has fenced it off, or is asked to, and has not lifted the fence.

        A row that is posted while it is asked may land before the fence, and be counted for a row
        that was lost.
        """
        return self.state in _SHUT

    def to(self, event: PathEvent) -> None:
        """Change the state by an event."""
        was = self.state
        now = TRANSITIONS.get((was, event))
        assert now is not None, f"{self}: {event.name} cannot happen there"
        self.state = now
        closed = (now is not _UP) - (was is not _UP)
        if closed:
            self.link.closed += closed
            self.link.routes.version += 1
            if closed > 0:
                self.link.routes.left(self)
        if now is not was and (told := _TOLD.get(now)) is not None:
            kind, level = told
            where = f"NIC {self.domain} to NIC {self.nic} of {self.link.addr.name}"
            self.link.routes.journal.say(kind, f"path {where}: {event.value}", level)


class Routes:
    """What one engine remembers of routes is valid as long as `version` is the same.

    Attributes:
        version: how often it has changed which NICs and paths rows are sent over.
        journal: where changes of paths are told.
        left: called with each path that leaves UP: it is to be opened again.
    """

    __slots__ = ("journal", "left", "version")

    def __init__(
        self, journal: Journal | None = None, left: Callable[[Path], object] | None = None
    ) -> None:
        self.version = 0
        self.journal = Journal() if journal is None else journal
        self.left = left or (lambda _: None)


class Link:
    """One incarnation of a peer: its NICs' addresses, and the paths to them.

    Attributes:
        addr: the peer.
        alive: for each of its NICs, whether it is used; False: marked down.
        closed: how many paths are not UP.
        current: False once a later incarnation of the peer is known, or it is being removed.
        again: whether it was removed before, so that the sums of its paths are gone.
        left: whether it has been removed.
        barred: whether the fences of an earlier removal stay up, because since then it was named
            for messages only.
        routes: the engine's; its version changes with the state of any path.
    """

    __slots__ = (
        "_domains", "_paths", "addr", "again", "alive", "barred", "closed", "current", "left",
        "routes",
    )  # fmt: skip

    def __init__(
        self, addr: NetAddr, domains: tuple[Domain, ...], routes: Routes | None = None
    ) -> None:
        self.addr = addr
        self.routes = Routes() if routes is None else routes
        self.alive = [True] * len(addr.domains)
        self.closed = 0
        self.current = True
        self.again = self.barred = self.left = False
        self._domains = domains
        self._paths: list[list[Path | None]] = [[None] * len(addr.domains) for _ in domains]

    def path(self, domain: int, nic: int) -> Path:
        """The path between two NICs; made on first use."""
        found = self._paths[domain][nic]
        if found is None:
            found = self._paths[domain][nic] = Path(self, domain, nic)
        return found

    def paths(self) -> list[Path]:
        """Every path that was ever used."""
        return [path for row in self._paths for path in row if path is not None]

    def shut(self) -> list[tuple[int, int]]:
        """(our NIC, its NIC) of the paths that are not UP."""
        return [(path.domain, path.nic) for path in self.paths() if not path.is_up]

    def is_up(self, domain: int, nic: int) -> bool:
        """Whether rows may be sent over a path."""
        found = self._paths[domain][nic]
        return found is None or found.state is _UP

    def is_fenced(self, domain: int, nic: int) -> bool:
        """Whether the peer has fenced a path off, or is asked to."""
        found = self._paths[domain][nic]
        return found is not None and found.is_fenced

    def route(self, here: Sequence[bool], domain: int, nic: int) -> tuple[int, int]:
        """The path to use for rows that were planned for a path; `here`: which of our NICs work.

        It is the planned path if both of its NICs work, else one of the next NICs on each side. A
        path that is not UP is used only if none is, and a fenced one only if all are. A NIC
        of the peer that is marked down comes before these: perhaps only one of ours misses it.
        """
        there = self.alive
        ours = [i for k in range(len(here)) if here[i := (domain + k) % len(here)]]
        theirs = [j for k in range(len(there)) if there[j := (nic + k) % len(there)]]
        if self.closed:
            pairs = list(itertools.product(ours, theirs))
            for i, j in pairs:
                if self.is_up(i, j):
                    return i, j
            down = (j for j, alive in enumerate(there) if not alive)
            for i, j in itertools.product(ours, down):
                found = self._paths[i][j]
                if found is None or (found.is_up and not found.silent):
                    return i, j
            for i, j in pairs:
                if not self.is_fenced(i, j):
                    return i, j
        return ours[0], theirs[0]

    def has_way(self, ours: Iterable[int], but: tuple[int, int] | None = None) -> bool:
        """Whether a path from one of these NICs of ours is UP, other than `but`."""
        paths = ((i, j) for i in ours for j in range(len(self.alive)))
        return any(path != but and self.is_up(*path) for path in paths)

    def forget(self) -> None:
        """Drop the sums of its paths, and make the NICs forget its connections."""
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
        except (OSError, MemoryError) as error:  # rows to this NIC fail
            raise FabricError(
                f"{self._domains[domain].caps.nic}: no connection to NIC {nic} of "
                f"{self.addr.name}: {error}",
                code="UNREACHABLE",
            ) from error
        self.path(domain, nic).peer_id = found
        return found


class PeerNicDown(NamedTuple):
    """Rows or messages to a NIC of a peer came back UNREACHABLE, and it was marked down."""

    link: Link
    nic: int


class PeerRestarted(NamedTuple):
    """A later incarnation of a peer answers at its address."""

    link: Link


class PathShut(NamedTuple):
    """Rows are not sent over a path any more: it is to be opened again."""

    path: Path


class PeerHeard(NamedTuple):
    """A peer that did not answer, or a NIC of it, does again."""

    link: Link


Event = PeerNicDown | PeerRestarted | PathShut | PeerHeard


class Fence:
    """Our fence against the rows of a peer's NIC.

    Attributes:
        asking: functions to call with the status when it ends.
        status: how it ended; None: it has not ended.
    """

    __slots__ = ("asking", "status")

    def __init__(self) -> None:
        self.asking: list[Callable[[int], object]] = []
        self.status: int | None = None


class FarEnd:
    """What is known of a path by the address of its other end, even of a peer that was never met.

    Attributes:
        fence: ours against its rows; None: there is none.
        asked, reopened: numbers of the last questions to fence it, and to open it again.
        barred: whether the peer was removed here, which keeps the fence up until it is named again.
        unheard: whether the last control message, or a row or message since, had no answer. On a
            connection that an error flushes, the rows on the same path ended with it.
    """

    __slots__ = ("asked", "barred", "fence", "reopened", "unheard")

    def __init__(self) -> None:
        self.fence: Fence | None = None
        self.asked = self.reopened = 0
        self.barred = False
        self.unheard = False

    def is_idle(self) -> bool:
        """Whether it holds nothing but the numbers of questions."""
        busy = self.fence is not None and self.fence.status is None
        return not (busy or self.barred or self.unheard)


class FarEnds:
    """The far ends of all paths of one engine, by (our NIC, address)."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], FarEnd] = {}

    def get(self, nic: int, address: bytes) -> FarEnd | None:
        """The record of one; None: there is none."""
        return self._known.get((nic, address))

    def at(self, nic: int, address: bytes) -> FarEnd:
        """The record of one, made on first use."""
        found = self._known.get((nic, address))
        if found is None:
            found = self._known[nic, address] = FarEnd()
        return found

    def control_heard(self, nic: int, address: bytes, *, heard: bool) -> None:
        """Record whether a control message arrived."""
        if not heard:
            self.at(nic, address).unheard = True
        elif (found := self.get(nic, address)) is not None:
            found.unheard = False

    def drop(self, nic: int, address: bytes) -> None:
        """Forget one if it is idle."""
        found = self._known.get((nic, address))
        if found is not None and found.is_idle():
            del self._known[nic, address]

    def forget(self, addresses: Collection[bytes]) -> None:
        """Forget those of a removed peer, except fences that have not ended."""
        for nic, address in [key for key in self._known if key[1] in addresses]:
            self._known[nic, address].unheard = False
            self.drop(nic, address)
