"""What both ends of a path remember of its immediates, to judge where an acknowledgement is lost.

Sums only: the sender's of what was acknowledged, the receiver's of what came, since the beginning,
less what both ends have pruned. Pure. Who compares them, and when, is `failover` and `audit`; who
prunes them is `pruning`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import Noting

__all__ = ["KEYS_MAX", "PRUNE_AT", "Arrivals", "PathSums", "Run", "Sums", "expand", "runs_of"]

KEYS_MAX: Final = 1 << 18
"""Values that one tally remembers, about 30 MB; beyond it forgets, and says so."""

PRUNE_AT: Final = 1 << 12
"""Values of one lane from which on its sender prunes them; most lanes never have so many."""

_ROWS_MAX: Final = 1 << 14
"""Rows of columns that wait to be summed up: folding many at once costs a tenth of one by one."""

_LOW_BITS: Final = 32

_SOURCE_BITS: Final = 32

_CELLS_MAX: Final = 1 << 20

U64 = npt.NDArray[np.uint64]
Found = tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]
"""Values that occur, and how often each does."""


class Sums:
    """How often each key came; a key is a number of 64 bits.

    Args:
        limit: keys that it holds.
        large_at: keys from which on it says that it is large.
        full: what to do with more keys than that; None: forget all.

    Attributes:
        forgot: whether it held too many keys once, so that its sums mean nothing any more.
        large: whether there were more than `large_at` keys since calm().
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
        """Add 1 to each key of a column; the column stays as it is from now on."""
        self._chunks.append(keys)
        self._rows += len(keys)
        if self._rows > _ROWS_MAX:
            self._fold()

    def add_lows(self, high: int, lows: bytes) -> None:
        """Add 1 to each key of a column with one upper half; `lows` are the lower ones, as u32."""
        self._lows.setdefault(high, []).append(lows)
        self._rows += len(lows) >> 2
        if self._rows > _ROWS_MAX:
            self._fold()

    def sum(self, key: int) -> int:
        """How often a key came."""
        self._fold()
        return self._sums.get(key, 0)

    def items(self) -> list[tuple[int, int]]:
        """Every key with its sum, those that are 0 left out."""
        self._fold()
        return [(key, count) for key, count in self._sums.items() if count]

    def take(self, wanted: Iterable[tuple[int, int]]) -> bool:
        """Subtract (key, count) each, if every sum is that large; else nothing. Keys at 0 go."""
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
        """Begin anew to look whether there are many keys."""
        self.large, self._mark = False, self._large_at

    def drop(self, wanted: Callable[[int], bool]) -> None:
        """Forget the keys for which wanted(key) says so."""
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
    """Each value that occurs, and how often.

    Most often they are near each other: then there is a cell for each that there can be, which
    costs 2 ns a row. To sort them costs 40 to 90.
    """
    first = column.min()
    if column.max() - first >= _CELLS_MAX:
        return np.unique(column, return_counts=True)
    counts = np.bincount((column - first).astype(np.intp))
    used = np.flatnonzero(counts)
    return used + int(first), counts[used]


def _count_pairs(keys: U64) -> Found:
    """The same where upper and lower halves are near each other."""
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
    """What a sender remembers of one path: immediates acknowledged there, and those in doubt.

    Args:
        forgot: whether the sums of earlier rows are gone already.

    Attributes:
        sent: acknowledged, by value, less what was pruned.
        doubt: rows whose end will never be known, by value: of transfers that failed.
        pruned: the last generation that the receiver is known to have pruned.
        waiting: runs of the next generations, in order. Those of the first may have been asked for:
            they stay what they are until the receiver is known to have pruned them.
        asking: whether they are asked for now.
        retry_s: when to ask again.
        why: what kept the receiver from pruning them the last time; "" = nothing.
    """

    __slots__ = ("asking", "doubt", "pruned", "retry_s", "sent", "waiting", "why")

    def __init__(self, *, forgot: bool = False) -> None:
        self.sent = Sums(large_at=PRUNE_AT)
        self.sent.forgot = forgot
        self.doubt: Counter[int] = Counter()
        self.pruned = 0
        self.waiting: deque[tuple[Run, ...]] = deque()
        self.asking = False
        self.retry_s = 0.0
        self.why = ""

    def why_forgot(self) -> str:
        """Why the sums mean nothing."""
        text = "it was removed meanwhile, or too many different immediates went there"
        pruned = f", and it did not prune them ({self.why})" if self.why else ""
        return f"{text}{pruned}: their sums are forgotten"

    def prune(self, generation: int) -> bool:
        """The receiver has pruned up to a generation: do the same. False: that cannot be."""
        if generation == self.pruned:
            return True
        if generation != self.pruned + 1 or not self.waiting:
            return False
        if not self.sent.take(expand(self.waiting.popleft())):
            return False
        self.pruned = generation
        return True


Run = tuple[int, int, int]
"""Values in a row with the same count: the first, how many, the count."""


def expand(runs: Iterable[Run], high: int = 0) -> Iterable[tuple[int, int]]:
    """(key, count) of every value of these runs; `high` is the upper half of the keys."""
    base = high << _LOW_BITS
    return ((base + v, count) for first, n, count in runs for v in range(first, first + n))


def runs_of(sums: Iterable[tuple[int, int]], longest: int) -> Iterable[Run]:
    """Runs of all these values, none longer than `longest`, in order."""
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
    """The immediates that came in on one NIC, by where they came from, less what was pruned."""

    __slots__ = ("_columns", "_forgotten", "_pruned", "_sources", "counted")

    def __init__(self) -> None:
        self.counted = Sums(full=self._drop_largest)
        self._forgotten: dict[int, str] = {}  # and why
        self._pruned: dict[bytes, int] = {}  # the last generation, by address
        self._sources: set[int] = set()  # that were met, but for those in mixed columns
        self._columns = False  # whether there were such since

    def add(self, source: int, imm: int, count: int) -> None:
        """Note `count` equal ones."""
        self._sources.add(source)
        self.counted.add(source << _SOURCE_BITS | imm, count)

    def add_columns(self, sources: npt.NDArray[np.uint64], imms: npt.NDArray[np.uint32]) -> bool:
        """Note a burst, one an entry; the columns are copied. True: all immediates are equal."""
        n = len(imms)
        # Compared as bytes: a quarter of comparing as columns.
        raw, ends = imms.tobytes(), sources.tobytes()
        if ends == ends[:8] * n:
            source = int(sources[0])
            self._sources.add(source)
            self.counted.add_lows(source, raw)
        else:
            self._columns = True
            self.counted.add_many(sources << np.uint64(_SOURCE_BITS) | imms)
        return raw == raw[:4] * n

    def _of(self, nic: Noting, addresses: Collection[bytes]) -> list[int]:
        """The numbers of the NICs at these addresses."""
        if self._columns:
            self._columns = False
            self._sources |= {key >> _SOURCE_BITS for key, _ in self.counted.items()}
        return [source for source in self._sources if nic.source(source) in addresses]

    def sums(self, nic: Noting, address: bytes, imms: Sequence[int]) -> tuple[int, ...]:
        """How many of each came from the NIC at an address, less what was pruned."""
        sources = [source << _SOURCE_BITS for source in self._of(nic, (address,))]
        return tuple(sum(self.counted.sum(at | imm) for at in sources) for imm in imms)

    def pruned(self, address: bytes) -> int:
        """The last generation that was pruned of what came from the NIC at an address."""
        return self._pruned.get(address, 0)

    def prune(
        self, nic: Noting, address: bytes, generation: int, runs: tuple[Run, ...]
    ) -> str | None:
        """Subtract what a sender says, once; return why not, or None."""
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

    def forget(self, nic: Noting, addresses: Collection[bytes]) -> None:
        """Drop the sums of a peer's NICs; `forgot` knows of it, since more may come."""
        self._drop(self._of(nic, addresses), "it has removed this peer, and forgotten what came")

    def _drop(self, gone: Collection[int], why: str) -> None:
        gone = set(gone)
        self.counted.drop(lambda key: key >> _SOURCE_BITS in gone)
        self._forgotten |= dict.fromkeys(gone, why)

    def _drop_largest(self) -> None:
        """Too many values: forget those of the sender that has the most, and of nobody else."""
        values = Counter(key >> _SOURCE_BITS for key, _ in self.counted.items())
        ((source, n),) = values.most_common(1)
        why = f"it has forgotten what came: {n} different immediates, which were not pruned"
        self._drop([source], why)

    def forgot(self, nic: Noting, address: bytes) -> str | None:
        """Why the sums of the NIC at an address are not complete; None: they are."""
        found = (why for source, why in self._forgotten.items() if nic.source(source) == address)
        return next(found, None)

    @property
    def forgotten(self) -> tuple[str, ...]:
        """Why sums of senders are not complete, one each."""
        return tuple(self._forgotten.values())
