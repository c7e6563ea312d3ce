"""The table of immediates: counts, expectations, claims; pure, without clock, lock or NIC.

Rule 1: a counter exists before anyone expects it; an immediate that arrives early is counted.
Rule 2: reaching fires once, subtracts the expected count and leaves the surplus to the next
expectation in line. Rule 3: nothing is ever dropped; what nobody expects is in `counts`, or was
handed to the callback that claimed it.
"""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from tep.errors import BadRequest, BusyError
from tep.units import IMM_MAX

__all__ = ["ImmTable", "Want", "check_imm"]

# Below this many immediates a Python loop is cheaper than numpy's fixed costs (measured: cross-over
# at 30 to 50).
_SCALAR_MAX: Final = 32


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
    try:
        found = operator.index(imm)
    except TypeError:
        found = -1
    if not 0 <= found <= IMM_MAX:
        raise BadRequest(f"imm={imm!r} is not an integer of 32 bits (0 .. {IMM_MAX})")
    return found


class ImmTable(Generic[W]):
    """Counts of immediates and the expectations waiting for them.

    Attributes:
        counts: immediates that arrived and that no expectation has taken, by value.
        reached: expectations that fired since the caller last emptied this list, in order.
        loose: (callback, imm, count) of claimed immediates since the caller last emptied this list.
        total: immediates ever counted.
    """

    __slots__ = ("_claims", "_lines", "counts", "loose", "reached", "total")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.reached: list[W] = []
        self.loose: list[tuple[Claim, int, int]] = []
        self.total = 0
        self._lines: dict[int, deque[W]] = {}
        self._claims: list[tuple[range, Claim]] = []

    def expect(self, want: W) -> None:
        """Stand in line for `want.count` immediates `want.imm`; may be reached at once.

        Raises:
            BadRequest: the immediate is claimed by on_imm, so that it is never counted.
        """
        self.refuse_claimed(want.imm)
        line = self._lines.setdefault(want.imm, deque())
        line.append(want)
        self._fire(want.imm, line)

    def refuse_claimed(self, imm: int) -> None:
        """Raise BadRequest if on_imm claims this immediate."""
        for imms, _ in self._claims:
            if imm in imms:
                raise BadRequest(f"imm={imm:#x} is claimed by on_imm({imms}); it is never counted")

    def cancel(self, want: W) -> bool:
        """Leave the line. What arrived stays counted. False: it was reached or cancelled before."""
        line = self._lines.get(want.imm)
        if line is None or want not in line:
            return False
        line.remove(want)
        # The next in line may need fewer than the one that left.
        self._fire(want.imm, line)
        return True

    def give_up(self) -> list[W]:
        """Send everybody home: empty all lines and return who stood in them. Counts stay."""
        wants = [want for line in self._lines.values() for want in line]
        self._lines.clear()
        return wants

    @property
    def waiting(self) -> int:
        """How many expectations are not reached; may be asked from any thread."""
        # list() of a dict's values is one operation; a comprehension could meet a change.
        return sum(map(len, list(self._lines.values())))

    def add(self, imm: int, count: int) -> None:
        """Count `count` arrivals of one immediate."""
        self.total += count
        if self._claims and self._claimed(imm, count):
            return
        self.counts[imm] = self.counts.get(imm, 0) + count
        line = self._lines.get(imm)
        if line is not None:
            self._fire(imm, line)

    def add_many(self, imms: npt.NDArray[np.uint32]) -> None:
        """Count a burst, one arrival an entry; u32[n], n >= 1."""
        first = int(imms[0])
        if np.logical_and.reduce(imms == first):
            self.add(first, len(imms))
        elif len(imms) <= _SCALAR_MAX or self._claims:
            for imm in imms.tolist():
                self.add(imm, 1)
        else:
            self._add_distinct(imms.tolist())

    def _add_distinct(self, imms: list[int]) -> None:
        self.total += len(imms)
        self.counts.update(imms)
        lines = self._lines
        # Look at the smaller side only: a burst has thousands of values, the table few
        # expectations, or the reverse.
        touched = [
            imm
            for imm in (lines if len(lines) <= len(imms) else dict.fromkeys(imms))
            if imm in lines
        ]
        for imm in touched:
            self._fire(imm, lines[imm])

    def claim(self, imms: range, callback: Claim) -> None:
        """Hand every arrival in `imms` to a callback instead of counting it.

        Raises:
            BadRequest: not a range of immediates with step 1, or it overlaps another claim, or
                somebody expects one of them, or some arrived already and are counted.
        """
        sound = isinstance(imms, range) and imms.step == 1 and len(imms) > 0
        if not sound or imms.start < 0 or imms.stop - 1 > IMM_MAX:
            raise BadRequest(f"on_imm: {imms!r} is not a range of 32-bit immediates with step 1")
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
        """Forget an immediate: its count, and a claim that starts with it; return the count.

        Raises:
            BusyError: an expectation still waits for it.
        """
        line = self._lines.get(imm)
        if line:
            raise BusyError(
                f"remove_imm: imm={imm:#x} is expected ({self.counts.get(imm, 0)} of "
                f"{line[0].count} are here); cancel the expectation first"
            )
        self._claims = [(imms, callback) for imms, callback in self._claims if imms.start != imm]
        return self.counts.pop(imm, 0)

    def take(self, imm: int, count: int) -> bool:
        """Subtract `count` arrivals if there are as many and nobody stands in line; say whether."""
        have = self.counts.get(imm, 0)
        if have < count or imm in self._lines:
            return False
        self._keep(imm, have - count)
        return True

    def _keep(self, imm: int, count: int) -> None:
        # A value whose count is back at 0 leaves the table, so that fresh immediates for ever do
        # not fill it.
        if count:
            self.counts[imm] = count
        else:
            self.counts.pop(imm, None)

    def _fire(self, imm: int, line: deque[W]) -> None:
        have = self.counts.get(imm, 0)
        while line and have >= line[0].count:
            want = line.popleft()
            have -= want.count
            self.reached.append(want)
        if not line:
            del self._lines[imm]
        self._keep(imm, have)

    def _claimed(self, imm: int, count: int) -> bool:
        for imms, callback in self._claims:
            if imm in imms:
                self.loose.append((callback, imm, count))
                return True
        return False
