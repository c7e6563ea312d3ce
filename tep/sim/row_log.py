"""The log of a simulated fabric, row by row: a digest, and columns for pictures.

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


def _overtakes(pairs: list[tuple[int, int]]) -> int:
    pairs.sort(key=lambda pair: pair[0])
    rows = np.array([row for _, row in pairs], np.int64)
    # The smallest row number among all that arrive later; an arrival above it overtook that one.
    later = np.minimum.accumulate(rows[::-1])[::-1]
    return int(np.count_nonzero(rows[:-1] > later[1:]))
