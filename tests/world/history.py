"""Judging a fabric's record of what happened, after the fact: it shares no code with the engine.

Like a referee who has seen the tape only: rows posted, bytes placed, immediates seen, rows ended,
and the immediates that receivers said they were waiting for. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tep.sim.row_log import Record

_BACK = ("done", "fail", "sent")


@dataclass(slots=True)
class _Row:
    """One row as the tape shows it."""

    posted: Record
    placed: list[tuple[int, int]] = field(default_factory=list)
    imms: int = 0
    ended: str = ""


def judge_history(
    records: Iterable[Record], fired: Mapping[tuple[str, int], int] | None = None
) -> list[str]:
    """Say what is wrong with a run that has come to rest; [] if nothing.

    A row ends once. Its immediate is seen once at most, after all of its bytes. Bytes of a row that
    ended well are not placed again. No receiver is told of more immediates than came.

    Args:
        records: of a chaos fabric's RowLog, in order.
        fired: by (node, immediate), how many of it have been used up by expectations that fired.
    """
    rows: dict[int, _Row] = {}
    crashed: set[tuple[str, int]] = set()
    seen: Counter[tuple[str, int]] = Counter()
    wrong: list[str] = []
    for record in records:
        if record.what in ("post", "send"):
            if record.row in rows:
                wrong.append(f"row {record.row} was posted twice")
            rows[record.row] = _Row(record)
        elif record.what == "fault":
            if record.peer == "crash":
                crashed.add((record.node, record.nic))
        elif record.row not in rows:
            if record.what == "fail":
                continue  # its own NIC refused it: it never left
            wrong.append(f"{record.what} of row {record.row}, which nobody posted")
        else:
            _take(record, rows[record.row], seen, wrong)
    for number, row in rows.items():
        owner = row.posted.node, row.posted.nic
        if not row.ended and owner not in crashed:
            wrong.append(f"row {number} of {owner[0]} NIC {owner[1]} never ended")
    for (node, imm), count in (fired or {}).items():
        if count > seen[node, imm]:
            wrong.append(f"{count} immediates {imm:#x} fired at {node}, {seen[node, imm]} came")
    return wrong


def _take(record: Record, row: _Row, seen: Counter[tuple[str, int]], wrong: list[str]) -> None:
    if record.what == "place":
        if row.ended == "done":
            wrong.append(f"bytes of row {record.row} were placed after it was done")
        row.placed.append((record.offset, record.offset + record.nbytes))
    elif record.what == "imm":
        row.imms += 1
        seen[record.node, record.value] += 1
        if row.imms > 1:
            wrong.append(f"the immediate of row {record.row} was seen twice")
        if _covered(row.placed) != row.posted.nbytes:
            wrong.append(f"the immediate of row {record.row} was seen before its bytes")
    elif record.what in _BACK:
        if row.ended:
            wrong.append(f"row {record.row} ended twice: {row.ended}, {record.what}")
        row.ended = record.what
        if record.what == "done" and _covered(row.placed) != row.posted.nbytes:
            wrong.append(f"row {record.row} is done, but not all of its bytes were placed")


def _covered(pieces: list[tuple[int, int]]) -> int:
    """Bytes that a set of stretches covers."""
    total, end = 0, -1
    for start, stop in sorted(pieces):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
