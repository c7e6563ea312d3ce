"""The applications of one small run: transfers and reads, as frozen records.

Every record prints as a literal that can be pasted into a test.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

from tep.base.checks import check_int
from tep.base.units import IMM_MAX
from tep.sim.faults import Chaos

TransferKind = Literal["single", "paged", "per_page", "scatter", "barrier"]
ReadKind = Literal["single", "paged"]

IMMS: Final = (1, 0x10001, 7, IMM_MAX, 0x20007, 3)
"""The immediate of each transfer, by its place: some alike in their lower 16 bits, the largest."""

TRANSFERS_MAX: Final = len(IMMS)
PAGES_MAX: Final = 12
MESSAGES_MAX: Final = 8
READS_MAX: Final = 4
SENDER: Final = "a"
RECEIVERS: Final = ("b", "c", "d", "e", "f")
STEADY_ROUNDS: Final = 10

_BOUNDS: Final[dict[str, tuple[int, int | None]]] = {
    "size": (0, None),
    "pages": (1, PAGES_MAX),
    "gap": (0, None),
    "shards": (0, None),
    "start_ps": (1, None),
    "expect_ps": (1, None),
    "rounds": (1, None),
    "pace_ps": (1, None),
    "again": (0, None),
    "again_ps": (1, None),
    "restate_ps": (1, None),
}
"""The least and the most of each number of a TransferSpec."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TransferSpec:
    """One transfer, and what its receivers do. Times are ps.

    Attributes:
        kind: the verb; per_page is a paged write with an immediate of its own on every page.
        size: bytes of the write, of each page, or of the first receiver's slice.
        pages: of a paged write.
        gap: bytes between a page and the next, on both sides.
        shards: cut a single write, or each slice of a scatter by bytes, in so many shards, but no
            more than there are lanes; 0 = as the engine decides.
        pinned: whether only one NIC of the sender may carry it.
        by_bytes: a scatter's slices go over all NICs.
        grouped: a scatter or barrier names a peer group.
        silent: without an immediate, so that no receiver can know.
        start_ps: when it is submitted.
        expect_ps: when the receivers say what they expect; may be before the start or long after.
        claimed: the receivers claim the immediate with on_imm in place of expecting it.
        split: the receivers expect it in two parts, one behind the other.
        recall_ps: when the receivers take their expectations back and state them again, or None.
        rounds: how often it is done, each time after the one before; the immediate is the same.
        pace_ps: time from the end of a round to the next.
        lined_up: the expectations of all rounds are stated at once, not each after the one before.
        cancel_ps: when it is cancelled, counted from its start, or None.
        stale: it names the receivers by the descriptors they had before a restart.
        probe: right after its submit somebody tries to give the source region back.
        prepared: it is prepared in its first round, and submitted at an offset in the others.
        shared: all that are shared have one immediate, and receivers expect the sum of them.
        again: how often it is tried again, from other bytes and under a fresh immediate, after it
            failed or was cancelled.
        again_ps: time from its end to the next try.
        restate_ps: time after which receivers expect the next try of what failed.
    """

    kind: TransferKind = "single"
    size: int = 8
    pages: int = 1
    gap: int = 0
    shards: int = 0
    pinned: bool = False
    by_bytes: bool = False
    grouped: bool = False
    silent: bool = False
    start_ps: int = 1
    expect_ps: int = 1
    claimed: bool = False
    split: bool = False
    recall_ps: int | None = None
    rounds: int = 1
    pace_ps: int = 1
    lined_up: bool = False
    cancel_ps: int | None = None
    stale: bool = False
    probe: bool = False
    prepared: bool = False
    shared: bool = False
    again: int = 0
    again_ps: int = 1
    restate_ps: int = 1

    def __post_init__(self) -> None:
        assert self.kind in get_args(TransferKind), self.kind
        for name, (low, high) in _BOUNDS.items():
            settle(self, name, low, high)
        for name in ("recall_ps", "cancel_ps"):
            if getattr(self, name) is not None:
                settle(self, name, 0)
        assert not (self.silent and self.kind == "barrier"), "a barrier is just its immediate"
        assert not self.shared or self.may_share, "alone with its immediate"
        assert not self.again or self.may_retry, "its receiver does not wait for one count of it"

    def __repr__(self) -> str:
        return literal(self)

    @property
    def wide(self) -> bool:
        """True if it goes to all receivers, and not to the first alone."""
        return self.kind in ("scatter", "barrier")

    @property
    def may_share(self) -> bool:
        """True if others may use its immediate: rows without bytes are known by it, rounds too."""
        return self.kind in ("single", "paged", "scatter") and not self.silent and self.rounds == 1

    @property
    def may_retry(self) -> bool:
        """True if it may be tried again as a whole: its receiver waits for one count of it."""
        kept = self.silent or self.claimed or self.split or self.shared or self.rounds > 1
        one = self.kind in ("single", "paged") and self.size > 0  # bytes tell the tries apart
        return one and not kept and self.recall_ps is None

    def page_imm(self, imm: int, page: int) -> int:
        """The immediate of one page; no two pages, and no two transfers, share one."""
        return imm ^ page << 20 if self.kind == "per_page" else imm


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ReadSpec:
    """One read of node a, and what the owner does. Times are ps.

    Attributes:
        kind: the verb; it reads from b.
        size: bytes of the read, or of each page.
        pages: of a paged read.
        told: the owner gets an immediate when all is read, and frees what was read.
        start_ps: when it is submitted.
        change_ps: when the owner writes new bytes there, or None.
        cancel_ps: when it is cancelled, counted from its start, or None.
    """

    kind: ReadKind = "single"
    size: int = 8
    pages: int = 1
    told: bool = False
    start_ps: int = 1
    change_ps: int | None = None
    cancel_ps: int | None = None

    def __post_init__(self) -> None:
        assert self.kind in get_args(ReadKind), self.kind
        for name in ("size", "pages", "start_ps"):
            settle(self, name, *_BOUNDS[name])
        for name in ("change_ps", "cancel_ps"):
            if getattr(self, name) is not None:
                settle(self, name, 0)

    def __repr__(self) -> str:
        return literal(self)


def names_of(nics: tuple[int, ...], transfers: tuple[TransferSpec, ...]) -> tuple[str, ...]:
    """The nodes that take part in these transfers, the sender first."""
    wide = any(spec.wide for spec in transfers)
    return (SENDER, *RECEIVERS[: len(nics) - 1 if wide else 1])


def settle(record: Any, name: str, low: int, high: int | None = None) -> None:
    """Check an integer, and keep it as a plain one: numpy's do not print as literals."""
    value = getattr(record, name)
    if type(value) is int and low <= value and (high is None or value <= high):
        return
    value = check_int(f"{type(record).__name__}: {name}", value, low, high)
    object.__setattr__(record, name, value)


def literal(record: Any) -> str:
    """The fields that differ from their defaults, as a line that makes the record again."""
    parts = (
        f"{field.name}={_part(getattr(record, field.name))}"
        for field in fields(record)
        if getattr(record, field.name) != field.default
    )
    return f"{type(record).__name__}({', '.join(parts)})"


def _part(value: object) -> str:
    return str(value) if isinstance(value, Chaos) else repr(value)
