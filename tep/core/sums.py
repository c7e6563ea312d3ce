"""Sums of the immediates of a path at both ends, to decide which lost rows landed.

The sender sums what was acknowledged, the receiver what arrived, each from the beginning, less what
both ends have pruned. Pure. `failover` compares the sums, and `pruning` prunes them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import ControlDomain

__all__ = ["KEYS_MAX", "PRUNE_AT", "Arrivals", "PathSums", "Run", "Sums", "expand", "runs_of"]

KEYS_MAX: Final = 1 << 18
"""Values in one `Sums`, about 30 MB; with more of them it forgets all and sets `forgot`."""

PRUNE_AT: Final = 1 << 12
"""With more values on one path its sender prunes them; most paths never have so many."""

_ROWS_MAX: Final = 1 << 14
"""Rows of columns collected before they are summed: summing many at once costs a tenth."""

_LOW_BITS: Final = 32

_SOURCE_BITS: Final = 32

_CELLS_MAX: Final = 1 << 20

U64 = npt.NDArray[np.uint64]
Found = tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]
"""Values that occur, and how often each does."""


class Sums:
    """How often each key came; a key is a number of 64 bits.

    Args:
        limit: the most keys that it holds.
        large_at: with more keys than this it is large; None: `limit`.
        full: is called when there are more than `limit` keys; None: forget all.

    Attributes:
        forgot: whether there were too many keys once, so that the sums mean nothing any more.
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
        """How often a key came."""
        self._fold()
        return self._sums.get(key, 0)

    def items(self) -> list[tuple[int, int]]:
        """Every key whose sum is not 0, with its sum."""
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
    """Each value that occurs, and how often.

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

    Args:
        forgot: whether the sums of earlier rows are gone already.

    Attributes:
        sent: acknowledged rows, by value, less what was pruned.
        unsure: immediates of failed rows of which nobody will know whether they landed, so that
            the sums of both ends may differ.
        pruned: the last generation that the receiver is known to have pruned.
        waiting: runs of the next generations, in order. The first ones may have been sent already,
            and then do not change until the receiver is known to have pruned them.
        asking: whether the receiver is being asked to prune the first ones.
        retry_s: when to ask again.
        wait_s: the time from the last question without an answer to the next; 0: it answered.
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
        """Why the sums mean nothing."""
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
    """(key, count) of every value of these runs; `high` is the upper half of the keys."""
    base = high << _LOW_BITS
    return ((base + v, count) for first, n, count in runs for v in range(first, first + n))


def runs_of(sums: Iterable[tuple[int, int]], longest: int) -> Iterable[Run]:
    """These values as runs, in order, none longer than `longest`."""
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
        """The numbers of the NICs at these addresses."""
        return [source for source in self._known() if nic.source(source) in addresses]

    def _known(self) -> set[int]:
        """Every sender so far."""
        if self._columns:
            self._columns = False
            self._sources |= {key >> _SOURCE_BITS for key, _ in self.counted.items()}
        return self._sources

    def sums(self, nic: ControlDomain, address: bytes, imms: Sequence[int]) -> tuple[int, ...]:
        """How many of each came from the NIC at an address, less what was pruned."""
        sources = [source << _SOURCE_BITS for source in self._of(nic, (address,))]
        return tuple(sum(self.counted.sum(at | imm) for at in sources) for imm in imms)

    def pruned(self, address: bytes) -> int:
        """The last generation that was pruned of what came from the NIC at an address."""
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
        """Why the sums of the NIC at an address are not complete; None: they are."""
        found = (why for source, why in self._forgotten.items() if nic.source(source) == address)
        return next(found, None)

    @property
    def forgotten(self) -> tuple[str, ...]:
        """For each sender whose sums are not complete, why."""
        return tuple(self._forgotten.values())
