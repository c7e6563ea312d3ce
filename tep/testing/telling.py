"""The story of a finding, in at most 30 lines: rows that had not landed, what overtook them, and
where the protocol's code stood. Nothing is run here but the finding once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from tep.backends.base import Status
from tep.base.errors import UsageError
from tep.base.units import PS_PER_US
from tep.sim.draws import describe
from tep.sim.row_log import Record, RowLog
from tep.testing.case import Violation

__all__ = ["story"]

_ROWS_MAX: Final = 9
_PIECES_MAX: Final = 3
_EACH_MAX: Final = 4  # lines of each of the other parts


@dataclass(slots=True)
class _Row:
    """One row or message, from its post on.

    Attributes:
        post: its first record.
        pieces: (time in ps, first byte, bytes) of what landed.
        imm, end: records of its immediate, and of its end at the sender; None: not yet.
    """

    post: Record
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    imm: Record | None = None
    end: Record | None = None

    @property
    def landed(self) -> bool:
        """Whether all of it is there; a piece that landed twice counts once."""
        places = {start: nbytes for _, start, nbytes in self.pieces}
        return self.imm is not None or sum(places.values()) >= self.post.nbytes

    def told(self) -> str:
        """Its life in one line."""
        post = self.post
        what = "message" if post.what == "send" else "row"
        said = [f"{what} {post.row}, {post.node}/{post.nic} to {post.peer}, {post.nbytes} B"]
        said.append(f"posted at {_us(post.t_ps)}")
        for t_ps, start, nbytes in self.pieces[:_PIECES_MAX]:
            said.append(f"{nbytes} B at byte {start} land at {_us(t_ps)}")
        if len(self.pieces) > _PIECES_MAX:
            said.append(f"{len(self.pieces) - _PIECES_MAX} more pieces land")
        if not self.landed and post.what == "post":
            said.append("THE REST HAS NOT LANDED" if self.pieces else "HAS NOT LANDED")
        if self.imm is not None:
            said.append(f"its immediate {self.imm.value} is handed out at {_us(self.imm.t_ps)}")
        if self.end is None:
            said.append("not acknowledged")
        else:
            failed = self.end.what == "fail" or (self.end.what == "sent" and self.end.value)
            ended = f"fails, {Status(self.end.value).name}" if failed else "acknowledged"
            said.append(f"{ended} at {_us(self.end.t_ps)}")
        return "; ".join(said)


def story(finding: Violation) -> str:
    """Tell what came before what should have waited, in the run of a finding.

    First the case, which is the smallest one after `shrink`, and what was drawn in it; then the
    faults, the rows that matter, which of them overtook which, and where the code stood.

    Raises:
        UsageError: it does not say how it is run again.
    """
    if finding.case is None or finding.again is None:
        raise UsageError("story: this finding does not know its run; tell what run() raised")
    log, stood, what = RowLog(), tuple[str, ...](), "nothing was found this time"
    try:
        finding.again(finding.case, row_log=log)
    except Violation as found:
        what, stood = str(found).rpartition("\nreplay: ")[0], found.stood
    records, kept = list(log.records()), finding.case.chaos.kept
    faults = [f"{_us(t_ps)}: {fault}" for t_ps, fault in finding.case.events]
    rows = _rows(records)
    lines = [f"case: {finding.case!r}"]
    if isinstance(kept, tuple):
        nodes = sorted(dict.fromkeys(one.node for one in records))
        lines += [f"drawn: {text}" for text in describe(kept, nodes)[:_EACH_MAX]]
    lines += [f"fault at {text}" for text in faults[:_EACH_MAX]]
    lines += [row.told() for row in _that_matter(rows)]
    lines += [f"out of order: {text}" for text in islice(_overtakes(rows), _EACH_MAX)]
    lines += stood[:_EACH_MAX]
    return "\n".join([*lines, *what.splitlines()[:_EACH_MAX]])


def _us(t_ps: int) -> str:
    return f"{t_ps / PS_PER_US:.3f} us"


def _rows(records: Sequence[Record]) -> list[_Row]:
    """The rows and messages of a log, in the order of posting."""
    rows: dict[int, _Row] = {}
    last_ps = records[-1].t_ps if records else 0
    for one in records:
        if one.what in ("post", "send"):
            rows[one.row] = _Row(one)
            continue
        row = rows.get(one.row)
        if row is None:
            continue
        if one.what in ("place", "recv"):
            row.pieces.append((one.t_ps, one.offset, one.nbytes))
        elif one.what == "imm":
            row.imm = one
        elif one.t_ps < last_ps or one.value != Status.FLUSHED:  # else the cluster was closed
            row.end = one
    return list(rows.values())


def _that_matter(rows: Sequence[_Row]) -> list[_Row]:
    """Select the rows that have not landed or ended, then the latest others, as posted."""
    ranked = sorted(rows, key=lambda row: (row.landed, row.end is not None, -row.post.row))
    return sorted(ranked[:_ROWS_MAX], key=lambda row: row.post.row)


def _overtakes(rows: Sequence[_Row]) -> Iterator[str]:
    """Find what landed before something that was posted earlier, between the same two nodes."""
    written = [row for row in rows if row.post.what == "post" and row.post.nbytes]
    for at, later in enumerate(written):
        if not later.pieces or not later.landed:
            continue
        when = f"row {later.post.row} is there at {_us(later.pieces[-1][0])}"
        for earlier in written[:at]:
            if (earlier.post.node, earlier.post.peer) != (later.post.node, later.post.peer):
                continue
            if earlier.end is not None and earlier.end.what == "fail":
                continue
            if not earlier.landed:
                yield f"{when}, and row {earlier.post.row}, posted before it, is not"
            elif earlier.pieces and earlier.pieces[-1][0] > later.pieces[-1][0]:
                there = _us(earlier.pieces[-1][0])
                yield f"{when}, row {earlier.post.row}, posted before it, at {there}"
    for row in written:
        starts = [start for _, start, _ in row.pieces]
        if starts != sorted(starts):
            yield f"the bytes of row {row.post.row} do not land from the first to the last"
