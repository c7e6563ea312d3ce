"""Paths: our NIC to one NIC of a peer. A path has its state, its sums and its lost rows here.

Records and one table of transitions. The group, which deals rows out, and `tep.control`, which
talks to the peer, decide what to do in a state. What one part of an engine finds out about peers
and paths, and another handles, is an event here: the worker takes them once a step. Rule 1: only
`Path.to` changes a state. Rule 2: a path belongs to one incarnation of a peer, and its record is
dropped with the peer's. Rule 3: an engine that was never met may ask about a path, so that has a
record of its own, a `FarEnd`, found by address. Rule 4: the sender sums what was acknowledged, the
receiver what arrived, each from the beginning, less what both ends have pruned.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tep.backends.base import ControlDomain, Domain, WriteBatch
from tep.base.errors import FabricError
from tep.base.wire import NetAddr
from tep.core.stats import Journal

__all__ = [
    "AS_FAST", "KEYS_MAX", "PRUNE_AT", "TRANSITIONS", "Acks", "Arrivals", "Event", "FarEnd",
    "FarEnds", "Fence", "Link", "Path", "PathEvent", "PathShut", "PathState", "PathSums",
    "PeerHeard", "PeerNicDown", "PeerRestarted", "Routes", "Run", "Sums", "expand", "runs_of",
]  # fmt: skip

KEYS_MAX: Final = 1 << 18
"""Values in one `Sums`, about 30 MB; with more of them it forgets all and sets `forgot`."""

PRUNE_AT: Final = 1 << 12
"""With more values on one path its sender prunes them; most paths never have so many."""

_ROWS_MAX: Final = 1 << 14
"""Rows of columns collected before they are summed: summing many at once costs a tenth."""

_LOW_BITS: Final = 32

_SOURCE_BITS: Final = 32

_CELLS_MAX: Final = 1 << 20

_WIDE_MAX: Final = 1024
"""Kinds of scatters that are counted as a whole; with more, they are counted target by target."""

U64 = npt.NDArray[np.uint64]
Found = tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]
"""Values that occur, and how often each does."""


class Sums:
    """Counts by key; a key is a number of 64 bits.

    With more than `limit` keys it calls `full`, or forgets all (`forgot`): then the sums mean
    nothing any more. `large`: there were more than `large_at` keys since calm().
    """

    __slots__ = (
        "_chunks", "_full", "_large_at", "_limit", "_lows", "_mark", "_rows", "_sums", "forgot",
        "large",
    )  # fmt: skip

    def __init__(
        self,
        limit: int = KEYS_MAX,
        large_at: int | None = None,
        full: Callable[[], object] | None = None,
    ) -> None:
        self.forgot = self.large = False
        self._limit = limit
        self._large_at = self._mark = limit if large_at is None else large_at
        self._full = self._forget if full is None else full
        self._sums: dict[int, int] = {}
        self._chunks: list[U64] = []
        self._lows: dict[int, list[bytes]] = {}
        self._rows = 0

    def add(self, key: int, count: int) -> None:
        """Add `count`, which may be negative, to one key."""
        sums = self._sums
        sums[key] = sums.get(key, 0) + count
        if len(sums) > self._mark:
            self._grown()

    def add_many(self, keys: U64) -> None:
        """Add 1 to each key of a column, which the caller must not change any more."""
        self._chunks.append(keys)
        self._rows += len(keys)
        if self._rows > _ROWS_MAX:
            self._fold()

    def add_lows(self, high: int, lows: bytes) -> None:
        """Add 1 to each key of a column: upper half `high`, lower halves `lows`, as u32."""
        self._lows.setdefault(high, []).append(lows)
        self._rows += len(lows) >> 2
        if self._rows > _ROWS_MAX:
            self._fold()

    def sum(self, key: int) -> int:
        """Return the count of a key."""
        self._fold()
        return self._sums.get(key, 0)

    def items(self) -> list[tuple[int, int]]:
        """List every key whose sum is not 0, with its sum."""
        self._fold()
        return [(key, count) for key, count in self._sums.items() if count]

    def take(self, wanted: Iterable[tuple[int, int]]) -> bool:
        """Subtract all (key, count), if every sum is large enough; else nothing. Drop keys at 0."""
        self._fold()
        sums = self._sums
        left = [(key, sums.get(key, 0) - count) for key, count in wanted]
        if any(count < 0 for _, count in left):
            return False
        for key, count in left:
            if count:
                sums[key] = count
            else:
                del sums[key]
        return True

    def calm(self) -> None:
        """Clear `large`; it is set again at the next key beyond `large_at`."""
        self.large, self._mark = False, self._large_at

    def drop(self, wanted: Callable[[int], bool]) -> None:
        """Forget the keys for which wanted(key) is true."""
        self._fold()
        for key in [key for key in self._sums if wanted(key)]:
            del self._sums[key]

    def __len__(self) -> int:
        return len(self._sums) + self._rows

    def _fold(self) -> None:
        if not self._rows:
            return
        for high, lows in self._lows.items():
            self._add(high << _LOW_BITS, _count(np.frombuffer(b"".join(lows), np.uint32)))
        if self._chunks:
            self._add(0, _count_pairs(np.concatenate(self._chunks)))
        self._chunks.clear()
        self._lows.clear()
        self._rows = 0
        if len(self._sums) > self._mark:
            self._grown()

    def _add(self, base: int, found: Found) -> None:
        values, counts = found
        sums = self._sums
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            key = base + value
            sums[key] = sums.get(key, 0) + count

    def _grown(self) -> None:
        self.large = True
        self._mark = self._limit
        if len(self._sums) > self._limit:
            self._full()

    def _forget(self) -> None:
        self._sums.clear()
        self.forgot, self.large = True, False


def _count(column: npt.NDArray[np.unsignedinteger]) -> Found:
    """Count each value that occurs.

    Usually the values are near each other: then each possible value has a cell in an array, which
    costs 2 ns a row. Sorting costs 40 to 90 ns.
    """
    first = column.min()
    if column.max() - first >= _CELLS_MAX:
        return np.unique(column, return_counts=True)
    counts = np.bincount((column - first).astype(np.intp))
    used = np.flatnonzero(counts)
    return used + int(first), counts[used]


def _count_pairs(keys: U64) -> Found:
    """The same for keys whose upper and whose lower halves are near each other."""
    high, low = keys >> np.uint64(_LOW_BITS), keys & np.uint64((1 << _LOW_BITS) - 1)
    first_high, first_low = int(high.min()), int(low.min())
    width = int(low.max()) - first_low + 1
    if width * (int(high.max()) - first_high + 1) > _CELLS_MAX:
        return np.unique(keys, return_counts=True)
    # In place: columns of this length come from fresh pages, which cost more than the sums.
    high -= np.uint64(first_high)
    high *= np.uint64(width)
    low -= np.uint64(first_low)
    high += low
    used, counts = _count(high)
    highs, lows = np.divmod(used.astype(np.uint64), np.uint64(width))
    base = np.uint64(first_high << _LOW_BITS | first_low)
    return (highs << np.uint64(_LOW_BITS)) + lows + base, counts


class PathSums:
    """The sender's sums of one path: how often each immediate was acknowledged.

    Attributes:
        sent: acknowledged rows, by value, less what was pruned.
        unsure: immediates of failed rows that may or may not have landed, for good, so that the
            sums of both ends may differ.
        pruned: the last generation that the receiver is known to have pruned.
        waiting: runs of the next generations, in order. The first ones may have been sent already,
            and then do not change until the receiver is known to have pruned them.
        asking: whether the receiver is being asked to prune the first ones; else it is asked again
            at `retry_s`, after a wait of `wait_s` (0: it has answered).
        why: why the receiver did not prune them the last time; "" = it did.
    """

    __slots__ = ("asking", "pruned", "retry_s", "sent", "unsure", "wait_s", "waiting", "why")

    def __init__(self, *, forgot: bool = False) -> None:
        self.sent = Sums(large_at=PRUNE_AT)
        self.sent.forgot = forgot
        self.unsure: set[int] = set()
        self.pruned = 0
        self.waiting: deque[tuple[Run, ...]] = deque()
        self.asking = False
        self.retry_s = self.wait_s = 0.0
        self.why = ""

    def why_forgot(self) -> str:
        """Say why the sums mean nothing."""
        text = "it was removed meanwhile, or too many different immediates went there"
        pruned = f", and it did not prune them ({self.why})" if self.why else ""
        return f"{text}{pruned}: their sums are forgotten"

    def prune(self, generation: int) -> bool:
        """Prune up to the generation that the receiver has pruned. False: it does not follow."""
        if generation == self.pruned:
            return True
        if generation != self.pruned + 1 or not self.waiting:
            return False
        if not self.sent.take(expand(self.waiting.popleft())):
            return False
        self.pruned = generation
        return True


Run = tuple[int, int, int]
"""Consecutive values with the same count: the first, how many, the count."""


def expand(runs: Iterable[Run], high: int = 0) -> Iterable[tuple[int, int]]:
    """Yield (key, count) of every value of these runs; `high` is the upper half of the keys."""
    base = high << _LOW_BITS
    return ((base + v, count) for first, n, count in runs for v in range(first, first + n))


def runs_of(sums: Iterable[tuple[int, int]], longest: int) -> Iterable[Run]:
    """Join these values to runs, in order, none longer than `longest`."""
    first = n = count = 0
    for value, times in sorted(sums):
        if n and value == first + n and times == count and n < longest:
            n += 1
            continue
        if n:
            yield first, n, count
        first, n, count = value, 1, times
    if n:
        yield first, n, count


class Arrivals:
    """The receiver's sums of one NIC: immediates by their sender, less what was pruned."""

    __slots__ = ("_columns", "_forgotten", "_pruned", "_sources", "counted")

    def __init__(self) -> None:
        self.counted = Sums(full=self._drop_largest)
        self._forgotten: dict[int, str] = {}  # and why
        self._pruned: dict[bytes, int] = {}  # the last generation, by address
        self._sources: set[int] = set()  # senders so far, except those in mixed columns
        self._columns = False  # whether mixed columns came since `_sources` was completed

    def add(self, source: int, imm: int, count: int) -> None:
        """Count `count` equal immediates of one sender."""
        self._sources.add(source)
        self.counted.add(source << _SOURCE_BITS | imm, count)

    def add_columns(self, sources: npt.NDArray[np.uint64], raw: bytes) -> None:
        """Count a burst, one for each entry; `raw` has the immediates, u32. Sources are copied."""
        # Comparing bytes takes a quarter of the time of comparing columns.
        ends = sources.tobytes()
        if ends == ends[:8] * len(sources):
            source = int(sources[0])
            self._sources.add(source)
            self.counted.add_lows(source, raw)
        else:
            self._columns = True
            imms = np.frombuffer(raw, np.uint32)
            self.counted.add_many(sources << np.uint64(_SOURCE_BITS) | imms)

    def _of(self, nic: ControlDomain, addresses: Collection[bytes]) -> list[int]:
        return [source for source in self._known() if nic.source(source) in addresses]

    def _known(self) -> set[int]:
        if self._columns:
            self._columns = False
            self._sources |= {key >> _SOURCE_BITS for key, _ in self.counted.items()}
        return self._sources

    def sums(self, nic: ControlDomain, address: bytes, imms: Sequence[int]) -> tuple[int, ...]:
        """Return the counts that came from the NIC at an address, less what was pruned."""
        sources = [source << _SOURCE_BITS for source in self._of(nic, (address,))]
        return tuple(sum(self.counted.sum(at | imm) for at in sources) for imm in imms)

    def pruned(self, address: bytes) -> int:
        """Return the last generation that was pruned of what came from the NIC at an address."""
        return self._pruned.get(address, 0)

    def prune(
        self, nic: ControlDomain, address: bytes, generation: int, runs: tuple[Run, ...]
    ) -> str | None:
        """Subtract a sender's list, once; return why not, or None."""
        last = self.pruned(address)
        if generation == last:
            return None
        if why := self.forgot(nic, address):
            return why
        if generation != last + 1:
            return f"generation {last} was pruned last, {generation} cannot follow"
        for source in self._of(nic, (address,)):
            if self.counted.take(expand(runs, source)):
                self._pruned[address] = generation
                return None
        return "not all of these have been counted"

    def forget(self, nic: ControlDomain, addresses: Collection[bytes]) -> None:
        """Drop the sums of a peer's NICs; `forgot` says so from now on, since more may arrive."""
        self._drop(self._of(nic, addresses), "it has removed this peer, and forgotten what came")

    def _drop(self, gone: Collection[int], why: str) -> None:
        gone = set(gone)
        self.counted.drop(lambda key: key >> _SOURCE_BITS in gone)
        self._forgotten |= dict.fromkeys(gone, why)

    def _drop_largest(self) -> None:
        """There are too many values: forget those of the sender that has the most."""
        values = Counter(key >> _SOURCE_BITS for key, _ in self.counted.items())
        ((source, n),) = values.most_common(1)
        why = f"it has forgotten what came: {n} different immediates, which were not pruned"
        self._drop([source], why)

    def forgot(self, nic: ControlDomain, address: bytes) -> str | None:
        """Say why the sums of the NIC at an address are not complete; None: they are."""
        found = (why for source, why in self._forgotten.items() if nic.source(source) == address)
        return next(found, None)

    @property
    def forgotten(self) -> tuple[str, ...]:
        """For each sender whose sums are not complete, why."""
        return tuple(self._forgotten.values())


_UNKNOWN: Final = -1

AS_FAST: Final = 0.85
"""A path that is nearly as fast as the fastest has the same share: equal NICs stay equal."""


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
    """The event that changes the state of a path."""

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
"""The journal's word for a path that gets into a state."""


class Rows(Protocol):
    """A batch as paths and sums see it; see `tep.core.posting.Pending`."""

    batch: WriteBatch
    domain: int
    at: int
    back: int
    stop: int
    lost: set[int]
    remotes: Any  # a region, or one a row
    nics: int | Sequence[int]

    def imm(self, row: int) -> int | None: ...
    def target(self, row: int) -> tuple[Any, int]: ...


class Unsettled(Protocol):
    """Rows that were lost together; see `tep.core.group.Loss`."""

    asked: bool


class Path:
    """Our NIC `domain` to NIC `nic` of one incarnation of a peer.

    Attributes:
        peer_id: our NIC's number for the peer's NIC; -1 = not connected.
        losses: rows lost on it that are not settled, in the order of their loss.
        seen: the batch that was last found to have rows in flight on it.
        asking: whether the peer is being asked to open it again, or to fence it before that.
        silent: whether it is why the peer's NIC was marked down.
        pace: how fast it was lately, compared with the fastest path of the same transfers; at most
            1. It is 1 where nothing was seen since the path opened.
    """

    __slots__ = (
        "asking", "domain", "link", "losses", "nic", "pace", "peer_id", "seen", "silent", "state",
        "sums",
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
        self.pace = 1.0

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
            self.pace = 1.0
            if closed > 0:
                self.link.routes.left(self)
        if now is not was and (told := _TOLD.get(now)) is not None:
            kind, level = told
            where = f"NIC {self.domain} to NIC {self.nic} of {self.link.addr.name}"
            self.link.routes.journal.say(kind, f"path {where}: {event.value}", level)


class Routes:
    """The version of all routes of one engine: what was remembered is valid while it stays.

    Attributes:
        version: how often it has changed which NICs and paths rows are sent over, or how much.
        alive: for each NIC of the engine, whether it works; () = all do.
        left: called with each path that leaves UP: it is to be opened again.
    """

    __slots__ = ("alive", "journal", "left", "version")

    def __init__(
        self, journal: Journal | None = None, left: Callable[[Path], object] | None = None
    ) -> None:
        self.version = 0
        self.alive: Sequence[bool] = ()
        self.journal = Journal() if journal is None else journal
        self.left = left or (lambda _: None)


class Link:
    """One incarnation of a peer: its NICs' addresses, and the paths to them.

    Attributes:
        alive: for each of its NICs, whether it is used; False: marked down.
        closed: how many paths are not UP.
        current: False once a later incarnation of the peer is known, or it is being removed.
        again: whether it was removed before, so that the sums of its paths are gone.
        left: whether it has been removed.
        barred: whether the fences of an earlier removal stay up, because since then it was named
            for messages only.
        weights: the share of each lane in a paged write; () = all are equal. They are those of
            `weighed`, a version of the routes.
    """

    __slots__ = (
        "_domains", "_paths", "addr", "again", "alive", "barred", "closed", "current", "left",
        "routes", "weighed", "weights",
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
        self.weights: tuple[int, ...] = ()
        self.weighed = -1
        self._domains = domains
        self._paths: list[list[Path | None]] = [[None] * len(addr.domains) for _ in domains]

    def path(self, domain: int, nic: int) -> Path:
        """Return the path between two NICs; it is made on first use."""
        found = self._paths[domain][nic]
        if found is None:
            found = self._paths[domain][nic] = Path(self, domain, nic)
        return found

    def paths(self) -> list[Path]:
        """List every path that was ever used."""
        return [path for row in self._paths for path in row if path is not None]

    def shut(self) -> list[tuple[int, int]]:
        """List (our NIC, its NIC) of the paths that are not UP."""
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
        """Choose the path for rows that were planned for a path; `here`: which of our NICs work.

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

    def weigh(self) -> tuple[int, ...]:
        """Weigh its lanes anew, and keep the weights."""
        self.weights, self.weighed = self.weights_now(), self.routes.version
        return self.weights

    def weights_now(self) -> tuple[int, ...]:
        """Weigh its lanes by the pace of their paths; one whose path is not in use gets nothing."""
        here = self.routes.alive or [True] * len(self._domains)
        found = []
        for lane in range(math.lcm(len(here), len(self.alive))):
            domain, nic = lane % len(here), lane % len(self.alive)
            path = self._paths[domain][nic]
            pace = 1.0 if path is None else path.pace
            used = here[domain] and self.alive[nic] and self.is_up(domain, nic)
            eighths = 8 if pace > AS_FAST else max(1, round(8 * pace))
            found.append(eighths if used else 0)
        return tuple(found) if len(set(found)) > 1 else ()

    def learn(self, seen: Sequence[tuple[Path, float]]) -> None:
        """Take note of the bytes a second that each path has carried of one transfer.

        The half of what was known is kept, so that one odd transfer moves little, and each one
        that follows forgets half of it.
        """
        fastest, before = max(pace for _, pace in seen), self.weights
        for path, pace in seen:
            path.pace += (pace / fastest - path.pace) / 2
        if self.weigh() != before:
            self.routes.version += 1
            self.weighed = self.routes.version

    def forget(self) -> None:
        """Drop the sums of its paths, and make the NICs forget its connections."""
        self.again = self.left = True
        for path in self.paths():
            path.sums = PathSums(forgot=True)
            if path.peer_id != _UNKNOWN:
                self._domains[path.domain].forget(path.peer_id)

    def peer(self, domain: int, nic: int) -> int:
        """Return our NIC's number for its NIC `nic`; the first use connects."""
        path = self._paths[domain][nic]
        if path is not None and path.peer_id != _UNKNOWN:
            return path.peer_id
        try:
            found = self._domains[domain].connect(self.addr.domains[nic])
        except (OSError, MemoryError) as error:  # rows to this NIC fail
            raise FabricError(
                f"{self._domains[domain].caps.nic}: no connection to NIC {nic} of "
                f"{self.addr.name}: {error!r}",
                code="UNREACHABLE",
            ) from error
        self.path(domain, nic).peer_id = found
        return found


class _Wide:
    """The number of scatters or barriers over the same lanes with the same immediate."""

    __slots__ = ("count", "domain", "imm", "nics", "remotes")

    def __init__(self, domain: int, remotes: Sequence[Any], nics: Sequence[int], imm: int) -> None:
        self.domain = domain
        self.remotes = remotes
        self.nics = nics
        self.imm = imm
        self.count = 1


class Acks:
    """The rows that one engine's peers have acknowledged; paths with many values are `large`.

    A scatter or barrier in a steady group uses the same lanes each time. It is counted by (lanes,
    immediate), and divided among the paths only when somebody asks, or when there are too many.
    """

    __slots__ = ("_wide", "large")

    def __init__(self) -> None:
        self.large: dict[Path, None] = {}
        self._wide: dict[tuple[int, int], _Wide] = {}

    def add(self, pending: Rows) -> None:
        """Count a batch whose rows have all come back, without its lost rows."""
        imm, n, nics = pending.batch.imm, pending.stop, pending.nics
        if n == 0 or imm is None:
            return
        if isinstance(nics, int):
            path = pending.remotes.link.path(pending.domain, nics)
            sent = path.sums.sent
            if not isinstance(imm, int):
                rows = imm[:n].astype(np.uint64)
                sent.add_many(np.delete(rows, list(pending.lost)) if pending.lost else rows)
            elif n > len(pending.lost):
                sent.add(imm, n - len(pending.lost))
            if sent.large:
                self.large[path] = None
        elif pending.lost or n < pending.batch.n or not isinstance(imm, int):
            for row in range(n):
                one = pending.imm(row)
                if row not in pending.lost and one is not None:
                    remote, nic = pending.target(row)
                    self._add(remote.link, pending.domain, nic, one, 1)
        else:
            # The list of NICs identifies the lanes: each template has one list, which _Wide keeps.
            key = id(nics), imm
            known = self._wide.get(key)
            if known is not None:
                known.count += 1
                return
            self._wide[key] = _Wide(pending.domain, pending.remotes, nics, imm)
            if len(self._wide) > _WIDE_MAX:
                self.fold()

    def miss(self, pending: Rows, row: int) -> None:
        """Record that nobody will know whether a failed row landed."""
        imm = pending.imm(row)
        if imm is not None:
            remote, nic = pending.target(row)
            remote.link.path(pending.domain, nic).sums.unsure.add(imm)

    def fold(self) -> None:
        """Add everything that is counted as a whole to the sums of its paths."""
        wide, self._wide = self._wide, {}
        for each in wide.values():
            for remote, nic in zip(each.remotes, each.nics, strict=True):
                self._add(remote.link, each.domain, nic, each.imm, each.count)

    def _add(self, link: Link, domain: int, nic: int, imm: int, count: int) -> None:
        path = link.path(domain, nic)
        path.sums.sent.add(imm, count)
        if path.sums.sent.large:
            self.large[path] = None


class PeerNicDown(NamedTuple):
    """Rows or messages to a NIC of a peer came back UNREACHABLE, and it was marked down."""

    link: Link
    nic: int


class PeerRestarted(NamedTuple):
    """A later incarnation of a peer answers at its address."""

    link: Link


class PathShut(NamedTuple):
    """A path left UP: it is to be opened again."""

    path: Path


class PeerHeard(NamedTuple):
    """A peer that did not answer, or a NIC of it, does again."""

    link: Link


Event = PeerNicDown | PeerRestarted | PathShut | PeerHeard


class Fence:
    """Our fence against a peer's NIC; `asking` are called with the status when it has ended."""

    __slots__ = ("asking", "status")

    def __init__(self) -> None:
        self.asking: list[Callable[[int], object]] = []
        self.status: int | None = None


class FarEnd:
    """The record of a path by the address of its other end, even of a peer that was never met.

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
    """The far ends of all paths of one engine.

    Attributes:
        known: those that have a record, by (our NIC, address).
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, bytes], FarEnd] = {}

    def get(self, nic: int, address: bytes) -> FarEnd | None:
        """Find the record of one."""
        return self.known.get((nic, address))

    def at(self, nic: int, address: bytes) -> FarEnd:
        """Find the record of one, or make it."""
        found = self.known.get((nic, address))
        if found is None:
            found = self.known[nic, address] = FarEnd()
        return found

    def control_heard(self, nic: int, address: bytes, *, heard: bool) -> None:
        """Record whether a control message arrived."""
        if not heard:
            self.at(nic, address).unheard = True
        elif (found := self.get(nic, address)) is not None:
            found.unheard = False

    def drop(self, nic: int, address: bytes) -> None:
        """Forget one if it is idle."""
        found = self.known.get((nic, address))
        if found is not None and found.is_idle():
            del self.known[nic, address]

    def forget(self, addresses: Collection[bytes]) -> None:
        """Forget those of a removed peer, except fences that have not ended."""
        for nic, address in [key for key in self.known if key[1] in addresses]:
            self.known[nic, address].unheard = False
            self.drop(nic, address)
