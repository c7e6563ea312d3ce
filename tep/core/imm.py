"""The table of immediates: counts, expectations, claims; pure, without clock, lock or NIC.

Rule 1: a counter exists before anyone expects it; an immediate that arrives early is counted.
Rule 2: reaching fires once, subtracts the expected count and leaves the surplus to the next
expectation in line. Rule 3: what is expected is never dropped; what nobody expects is in `counts`,
or was handed to the callback that claimed it. Peers choose the values, so there is a limit to those
that nobody expects: beyond it arrivals are dropped, and from then on a value without any arrival
cannot be expected any more. Rule 4: a value's count is in one place, its page if it has one,
else the dict. Rule 5: a burnt value has no line and gets none: what arrives counts for nobody.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from typing import Final, Generic, Protocol, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from tep.base.checks import check_int, shown
from tep.base.errors import BadRequest, BusyError, FabricError
from tep.base.units import IMM_MAX

__all__ = ["BURNT_MAX", "Burnt", "Counts", "ImmTable", "Want", "check_imm"]

BURNT_MAX: Final = 1 << 16
"""Immediates in one record, about 10 MB; with more, half of those of the largest owner go."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Burnt(Generic[K, V]):
    """The burnt immediates of one engine: `why` has the reason of each.

    The sender's keys are (link, immediate), and the owner is the link. The receiver's keys are
    immediates, and the owner is an id of the engine that failed. Any thread may look one up.
    `forgotten` were dropped because there were more than BURNT_MAX.
    """

    __slots__ = ("_owned", "forgotten", "why")

    def __init__(self) -> None:
        self.why: dict[K, V] = {}
        self.forgotten = 0
        self._owned: dict[Hashable, dict[K, None]] = {}

    def add(self, owner: Hashable, key: K, why: V) -> None:
        """Burn one immediate; the first reason stays."""
        if key in self.why:
            return
        self.why[key] = why
        self._owned.setdefault(owner, {})[key] = None
        if len(self.why) > BURNT_MAX:
            largest = max(self._owned.values(), key=len)
            for old in list(largest)[: (len(largest) + 1) // 2]:
                self.remove(old)
                self.forgotten += 1

    def remove(self, key: K) -> None:
        """Let one immediate be used again."""
        if self.why.pop(key, None) is None:
            return
        for owner, mine in self._owned.items():
            if key in mine:
                del mine[key]
                if not mine:
                    del self._owned[owner]
                return

    def drop(self, owner: Hashable) -> None:
        """Forget everything that one owner burnt."""
        for key in self._owned.pop(owner, ()):
            del self.why[key]


# Below this many immediates a Python loop is cheaper than numpy's fixed costs (measured: cross-over
# at 30 to 50).
_SCALAR_MAX: Final = 32

_PAGE_BITS: Final = 16
_PAGE_MASK: Final = (1 << _PAGE_BITS) - 1

_PAGES_MAX: Final = 64
"""Pages of one table: 512 KiB each; the system gives only what was touched."""

REST_MAX: Final = 1 << 21
"""Values outside pages that nobody expects: about 200 MB."""

_LINES_FEW: Final = 64


class Want(Protocol):
    """An expectation, as far as the table is concerned."""

    imm: int
    count: int


W = TypeVar("W", bound=Want)
Claim = Callable[[int, int], object]


def check_imm(imm: SupportsIndex) -> int:
    """Return the immediate as a plain int if it is a 32-bit number.

    Raises:
        BadRequest: it is not.
    """
    if type(imm) is int and 0 <= imm <= IMM_MAX:
        return imm
    try:
        return check_int("imm", imm, 0, IMM_MAX)
    except BadRequest:
        text = f"imm={shown(imm)} is not an integer of 32 bits (0 .. {IMM_MAX})"
        raise BadRequest(text) from None


class Counts(Mapping[int, int]):
    """Arrivals by value; what is at 0 is not there.

    A dict, and pages for stretches of 65,536 values that bursts of different ones fall into: there
    an arrival costs 8 ns, in the dict 80 (measured, bursts of 256). May be read from any thread.

    Attributes:
        dropped: arrivals of values that nobody expected, and for which there was no room.
    """

    __slots__ = ("_pages", "_rest", "dropped")

    def __init__(self) -> None:
        self.dropped = 0
        self._rest: Counter[int] = Counter()
        self._pages: dict[int, npt.NDArray[np.int64]] = {}

    def __getitem__(self, imm: int) -> int:
        return self.get(imm)  # 0 where it is not there: it may have gone since a reader saw it

    def __contains__(self, imm: object) -> bool:
        return isinstance(imm, int) and self.get(imm) > 0

    def get(self, imm: int, default: int = 0) -> int:  # type: ignore[override]  # counts are ints
        """Return the count of one value."""
        if self._pages and (page := self._pages.get(imm >> _PAGE_BITS)) is not None:
            return page.item(imm & _PAGE_MASK) or default
        return self._rest.get(imm, default)

    def __iter__(self) -> Iterator[int]:
        found = list(self._rest)  # one operation; another thread may be counting
        for high, page in tuple(self._pages.items()):
            still = page.copy()  # numpy refuses an array that changes while it is searched
            found += (np.flatnonzero(still) + (high << _PAGE_BITS)).tolist()
        return iter(found)

    def __len__(self) -> int:
        return len(self._rest) + sum(map(np.count_nonzero, tuple(self._pages.values())))

    def put(self, imm: int, count: int) -> None:
        """Set the count of one value."""
        if self._pages and (page := self._pages.get(imm >> _PAGE_BITS)) is not None:
            page[imm & _PAGE_MASK] = count
        elif count:
            self._rest[imm] = count
        else:
            # A value whose count is back at 0 is removed, so that ever new immediates do not fill
            # the table.
            self._rest.pop(imm, None)

    @property
    def is_full(self) -> bool:
        """Whether there are more values than there is room for."""
        return len(self._rest) > REST_MAX

    def drop_newest(self, kept: Container[int]) -> None:
        """Drop the values that came last, but for those in `kept`, until there is room."""
        back = {}
        while self.is_full:
            imm, count = self._rest.popitem()
            if imm in kept:
                back[imm] = count
            else:
                self.dropped += count
        self._rest.update(back)

    def pop(self, imm: int, default: int = 0) -> int:
        """Take one value out; return its count."""
        found = self.get(imm, default)
        self.put(imm, 0)
        return found

    def count(self, raw: bytes) -> int | None:
        """Count a burst of u32, one arrival each; return the page that took it, if one did."""
        halves = np.frombuffer(raw, np.uint16)
        highs = halves[_HIGH::2].tobytes()
        if highs == highs[:2] * (len(raw) >> 2):
            high = int(halves[_HIGH])
            page = self._pages.get(high)
            if page is None and len(self._pages) < _PAGES_MAX:
                page = self._new_page(high)
            if page is not None:
                # Of this type an index costs 4 ns, of any other 7.
                np.add.at(page, halves[1 - _HIGH :: 2].astype(np.intp), _ONE)
                return high
        rest = np.frombuffer(raw, np.uint32)
        if self._pages:  # some of them may have a page, and are counted there
            for high in self._pages.keys() & set((rest >> _PAGE_BITS).tolist()):
                mine = rest >> _PAGE_BITS == high
                lows = (rest[mine] & _PAGE_MASK).astype(np.intp)
                np.add.at(self._pages[high], lows, _ONE)
                rest = rest[~mine]
        self._rest.update(rest.tolist())
        return None

    def _new_page(self, high: int) -> npt.NDArray[np.int64]:
        page = np.zeros(1 << _PAGE_BITS, np.int64)
        for imm in [imm for imm in self._rest if imm >> _PAGE_BITS == high]:
            page[imm & _PAGE_MASK] = self._rest[imm]
        self._pages[high] = page  # from now on lookups use it
        for imm in [imm for imm in self._rest if imm >> _PAGE_BITS == high]:
            del self._rest[imm]
        return page


_HIGH: Final = int(sys.byteorder == "little")  # place of a number's upper half
_ONE: Final = np.array(1)


class ImmTable(Generic[W]):
    """Counts of immediates, and the expectations that wait for them.

    Attributes:
        burnt: immediates under which something failed, and what an expectation of one fails with.
        counts: immediates that arrived and that no expectation has taken, by value.
        reached: expectations that fired since the caller last emptied this list, in order.
        loose: (callback, imm, count) of claimed immediates since the caller last emptied this list.
        total: immediates ever counted.
    """

    __slots__ = ("_claims", "_lines", "burnt", "counts", "loose", "reached", "total")

    def __init__(self) -> None:
        self.burnt: Burnt[int, FabricError] = Burnt()
        self.counts = Counts()
        self.reached: list[W] = []
        self.loose: list[tuple[Claim, int, int]] = []
        self.total = 0
        # Ordered: the first of a plain dict costs a step for each that was taken before it.
        self._lines: dict[int, OrderedDict[W, None]] = {}
        self._claims: list[tuple[range, Claim]] = []

    def expect(self, want: W) -> None:
        """Enter an expectation of `want.count` immediates `want.imm`; may be reached at once.

        Raises:
            BadRequest: the immediate is claimed by on_imm, so that it is never counted.
            FabricError: it is burnt, or arrivals of it may have been dropped, since nobody expected
                them.
        """
        self.refuse_claimed(want.imm)
        if self.burnt.why and (error := self.burnt.why.get(want.imm)) is not None:
            raise error.saying(
                "; the immediate is burnt: take a fresh one, or, once nothing of it is on its way, "
                f"call remove_imm({want.imm:#x}) at both ends"
            )
        if self.counts.dropped and want.imm not in self.counts and want.imm not in self._lines:
            raise FabricError(
                f"imm={want.imm:#x}: {self.counts.dropped} arrivals of immediates that nobody "
                f"expected were dropped, beyond {REST_MAX} values; its own may be among them. "
                "State expectations before the peers write, or open the engine anew",
                code="COUNTS_FULL",
            )
        line = self._lines.get(want.imm)
        if line is None:
            line = self._lines[want.imm] = OrderedDict()
        line[want] = None
        have = self.counts.get(want.imm)
        if have >= next(iter(line)).count:
            self._fire(want.imm, line, have)

    def is_claimed(self, imm: int) -> bool:
        """Whether on_imm claims this immediate."""
        return any(imm in imms for imms, _ in self._claims)

    def refuse_claimed(self, imm: int) -> None:
        """Raise BadRequest if on_imm claims this immediate."""
        for imms, _ in self._claims:
            if imm in imms:
                raise BadRequest(f"imm={imm:#x} is claimed by on_imm({imms}); it is never counted")

    def cancel(self, want: W) -> bool:
        """Take an expectation out of its line; arrivals stay counted. False: it had left."""
        line = self._lines.get(want.imm)
        if line is None or want not in line:
            return False
        del line[want]
        # The next in line may need fewer than the one that left.
        self._fire(want.imm, line, self.counts.get(want.imm))
        return True

    def burn(self, imm: int, owner: Hashable, error: FabricError) -> tuple[list[W], int]:
        """Count an immediate for nobody from now on, because something failed under it.

        Returns the expectations that waited for it, and how many had arrived.
        """
        self.burnt.add(owner, imm, error)
        wants = list(self._lines.pop(imm, ()))
        return wants, self.counts.pop(imm)

    def give_up(self) -> list[W]:
        """Empty all lines, and return the expectations that were in them. Counts stay."""
        wants = [want for line in self._lines.values() for want in line]
        self._lines.clear()
        return wants

    @property
    def waiting(self) -> int:
        """The number of expectations that are not reached; any thread may ask."""
        return sum(map(len, tuple(self._lines.values())))

    def add(self, imm: int, count: int) -> None:
        """Count `count` arrivals of one immediate."""
        self.total += count
        if self._claims and self._claimed(imm, count):
            return
        counts, line = self.counts, self._lines.get(imm)
        # As counts.get(), without the call where there are no pages.
        have = count + (counts.get(imm) if counts._pages else counts._rest.get(imm, 0))
        if line is None:
            if counts.dropped and have == count:
                counts.dropped += count  # what is in the table stays exact
                return
            counts.put(imm, have)
            if counts.is_full:
                counts.drop_newest(self._lines)
        elif have < (first := next(iter(line))).count:
            counts.put(imm, have)
        elif have == first.count and len(line) == 1:  # as _fire(), in half the time
            self.reached.append(first)
            del self._lines[imm]
            if have != count:
                counts.put(imm, 0)
        else:
            self._fire(imm, line, have)

    def add_many(self, raw: bytes) -> None:
        """Count a burst, one arrival for each entry; `raw` has them, u32[n], n >= 1."""
        n = len(raw) >> 2
        # Comparing bytes is cheaper than a column of answers.
        if raw == raw[:4] * n:
            self.add(int.from_bytes(raw[:4], sys.byteorder), n)
        elif n <= _SCALAR_MAX or self._claims or self.counts.dropped:
            for imm in np.frombuffer(raw, np.uint32).tolist():
                self.add(imm, 1)
        else:
            self._add_distinct(n, raw)

    def _add_distinct(self, n: int, raw: bytes) -> None:
        self.total += n
        high = self.counts.count(raw)
        lines = self._lines
        if self.counts.is_full:
            self.counts.drop_newest(lines)
        if not lines:
            return
        # Look at the smaller side only: a burst has thousands of values, the table few
        # expectations, or the reverse. One that no arrival has touched does not fire.
        if len(lines) <= min(n, _LINES_FEW) or len(lines) <= n // 4:
            touched = [imm for imm in lines if high is None or imm >> _PAGE_BITS == high]
        else:
            imms = np.frombuffer(raw, np.uint32).tolist()
            touched = [imm for imm in dict.fromkeys(imms) if imm in lines]
        for imm in touched:
            self._fire(imm, lines[imm], self.counts.get(imm))

    def claim(self, imms: range, callback: Claim) -> None:
        """Hand every arrival in `imms` to a callback instead of counting it.

        Raises:
            BadRequest: not a range of immediates with step 1, or it overlaps another claim, or
                somebody expects one of them, or some arrived already and are counted.
        """
        sound = isinstance(imms, range) and imms.step == 1 and 0 <= imms.start < imms.stop
        if not sound or imms.stop - 1 > IMM_MAX:
            raise BadRequest(
                f"on_imm: imms={shown(imms)} is not a range of 32-bit immediates with step 1"
            )
        for other, _ in self._claims:
            if imms.start < other.stop and other.start < imms.stop:
                raise BadRequest(f"on_imm: {imms} overlaps {other}, which is claimed already")
        for imm in (*self._lines, *self.counts):
            if imm in imms:
                raise BadRequest(
                    f"on_imm: imm={imm:#x} in {imms} is expected or counted already; claim it first"
                )
        self._claims.append((imms, callback))

    def remove(self, imm: int) -> int:
        """Forget an immediate: its count, that it is burnt, and a claim that starts with it.

        Returns the count.

        Raises:
            BusyError: an expectation still waits for it.
        """
        line = self._lines.get(imm)
        if line:
            raise BusyError(
                f"remove_imm: imm={imm:#x} is expected ({self.counts.get(imm, 0)} of "
                f"{next(iter(line)).count} are here); cancel the expectation first"
            )
        self._claims = [(imms, callback) for imms, callback in self._claims if imms.start != imm]
        self.burnt.remove(imm)
        return self.counts.pop(imm)

    def _fire(self, imm: int, line: OrderedDict[W, None], have: int) -> None:
        """Fire the expectations that `have` suffices for, in line; the rest stays as the count."""
        while line and have >= (want := next(iter(line))).count:
            del line[want]
            have -= want.count
            self.reached.append(want)
        if not line:
            del self._lines[imm]
        self.counts.put(imm, have)

    def _claimed(self, imm: int, count: int) -> bool:
        for imms, callback in self._claims:
            if imm in imms:
                self.loose.append((callback, imm, count))
                return True
        return False
