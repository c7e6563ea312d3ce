"""The log of a simulated fabric, row by row: a digest, columns for pictures, spans.

Both fabrics write here, and only when the log is on; nothing here models anything. A fabric must
record every placement and every completion, since the digest stands for "the same run".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tep.base.errors import UsageError
from tep.base.units import PS_PER_S
from tep.observe import trace

__all__ = ["ARRIVAL", "Record", "RowLog", "What"]

What = Literal["post", "place", "imm", "done", "fail", "send", "recv", "sent", "fault"]
"""post, done, fail, send, sent: at the sender; place, imm, recv: at the target; fault: anywhere."""


class Record(NamedTuple):
    """One event.

    Attributes:
        t_ps: time.
        what: the kind of event.
        node: name of the node it happened at.
        nic: number of the NIC there.
        peer: name of the node at the other end; fault: its kind.
        row: number of the row or message, counted over the whole fabric in the order of posting;
            -1 where there is none.
        ctx: of its batch.
        offset: place: byte in the target's region. post: byte in the source's region. Else 0.
        nbytes: of the row, message or fragment.
        value: imm: the immediate. recv: the buffer. fail, sent: the status. place: CRC-32 of the
            bytes, where a fabric moves any.
    """

    t_ps: int
    what: What
    node: str
    nic: int
    peer: str = ""
    row: int = -1
    ctx: int = 0
    offset: int = 0
    nbytes: int = 0
    value: int = 0


ARRIVAL: Final = np.dtype(
    [
        ("t_ps", "i8"),
        ("nic", "i4"),
        ("row", "i8"),
        ("offset", "i8"),
        ("nbytes", "i8"),
        ("value", "u4"),
    ]
)
"""One record as numbers: what RowLog.columns() returns, for pictures and counting."""


class RowLog:
    """A list of records; a fabric holds None in its place when nobody asked for one.

    Attributes:
        on: False: nothing is recorded, and reading it is a UsageError.
        add: append one Record; the fast way in.
    """

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self._items: list[Record] = []
        self.add = self._items.append

    def __repr__(self) -> str:
        return f"RowLog({len(self._items)} records)" if self.on else "RowLog(off)"

    def records(self) -> Iterator[Record]:
        """Every record, in the order they were written."""
        if not self.on:
            raise UsageError("no rows were logged: open the Cluster, or fabric, with row_log=True")
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def digest(self) -> str:
        """SHA-256 over all records, as hexadecimal digits: equal for equal runs."""
        sha = hashlib.sha256()
        for record in self.records():
            sha.update(repr(tuple(record)).encode())
        return sha.hexdigest()

    def columns(self, what: What, node: str | None = None) -> npt.NDArray[np.void]:
        """All records of one kind, at one node or at all, by time: dtype ARRIVAL [n]."""
        rows = [
            (r.t_ps, r.nic, r.row, r.offset, r.nbytes, r.value)
            for r in self.records()
            if r.what == what and node in (None, r.node)
        ]
        found: npt.NDArray[np.void] = np.array(rows, ARRIVAL)
        return found[np.argsort(found["t_ps"], kind="stable")]

    def overtakes(self, node: str | None = None) -> int:
        """Count immediates that arrived, at a node or at all, before one of a row posted earlier.

        Counted for each pair of sender and receiver by itself.
        """
        arrivals: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for r in self.records():
            if r.what == "imm" and node in (None, r.node):
                arrivals.setdefault((r.peer, r.node), []).append((r.t_ps, r.row))
        return sum(_overtakes(pairs) for pairs in arrivals.values())

    def picture(self) -> trace.Trace:
        """The same as spans and marks: a span a row, from its post to its completion."""
        found, last_ps = trace.Trace("simulated"), 0
        open_rows: dict[tuple[str, int], Record] = {}
        for r in self.records():
            last_ps = max(last_ps, r.t_ps)
            if r.what in _OPENS:
                open_rows[_OPENS[r.what], r.row] = r
            elif r.what in _CLOSES:
                begun = open_rows.pop((_CLOSES[r.what], r.row))
                found.add(_span(begun, r.t_ps, {"status": r.value} if r.value else {}))
            else:
                found.mark(_mark(r))
        for begun in open_rows.values():
            found.add(_span(begun, last_ps, {"in_flight": 1}))
        return found


def _overtakes(pairs: list[tuple[int, int]]) -> int:
    pairs.sort(key=lambda pair: pair[0])
    rows = np.array([row for _, row in pairs], np.int64)
    # The smallest row number among all that arrive later; an arrival above it overtook that one.
    later = np.minimum.accumulate(rows[::-1])[::-1]
    return int(np.count_nonzero(rows[:-1] > later[1:]))


_OPENS: Final = {"post": "write", "send": "message"}
_CLOSES: Final = {"done": "write", "fail": "write", "sent": "message"}


def _span(r: Record, stop_ps: int, more: dict[str, object]) -> trace.Span:
    args = {"nic": r.nic, "to": r.peer, "rows": 1, "bytes": r.nbytes, "ctx": r.ctx, **more}
    name = f"{_OPENS[r.what]} {r.row}"
    times = r.t_ps / PS_PER_S, stop_ps / PS_PER_S
    return trace.Span("batch", r.node, f"NIC {r.nic}", name, *times, args)


def _mark(r: Record) -> trace.Mark:
    args: dict[str, object] = {"peer": r.peer, "row": r.row, "offset": r.offset, "bytes": r.nbytes}
    name: str = r.what
    if r.what == "imm":
        args |= {"imm": r.value, "count": 1}
        name = f"imm {r.value:#x}"
    elif r.what == "fault":
        name = f"fault: {r.peer}"
    track = "faults" if r.what == "fault" else f"arrivals of NIC {r.nic}"
    return trace.Mark(r.what, r.node, track, name, r.t_ps / PS_PER_S, args)
