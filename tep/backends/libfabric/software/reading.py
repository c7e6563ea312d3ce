"""Reads from one peer on tcp, as records; reads.py carries them out."""

from __future__ import annotations

from collections import deque

from tep.backends.base import ReadRow
from tep.backends.libfabric.regions import Region

__all__ = ["PeersReads", "Piece", "Row"]


class Row:
    """A row that has been accepted.

    Attributes:
        posted, left: bytes that were asked for, and bytes that have not arrived.
        region: where it goes.
        ended: its completion is made.
    """

    __slots__ = ("ctx", "ended", "index", "left", "posted", "region", "row")

    def __init__(self, ctx: int, index: int, row: ReadRow, region: Region | None) -> None:
        self.ctx = ctx
        self.index = index
        self.row = row
        self.region = region
        self.posted = 0
        self.left = row.nbytes
        self.ended = False


class Piece:
    """A part of a row, in the buffer of a slot; `reads` are those that the row is one of."""

    __slots__ = ("at", "failed", "nbytes", "reads", "row", "slot")

    def __init__(self, slot: int, reads: PeersReads, row: Row, at: int, nbytes: int) -> None:
        self.slot = slot
        self.reads = reads
        self.row = row
        self.at = at
        self.nbytes = nbytes
        self.failed = False


class PeersReads:
    """The reads from one peer; false when none is open.

    Attributes:
        waiting: rows that have pieces to post, oldest first.
        open: rows that have not ended.
        ranges: (base, nbytes) that its keys opened when it was asked last; None = asked.
        landed: pieces that wait to be asked about, by key.
        asked: the number of the question that is out about a key, and the pieces it is about.
        moved_s: when something of it came last.
    """

    def __init__(self) -> None:
        self.waiting: deque[Row] = deque()
        self.open: dict[Row, None] = {}
        self.ranges: dict[int, tuple[int, int] | None] = {}
        self.landed: dict[int, list[Piece]] = {}
        self.asked: dict[int, tuple[int, list[Piece]]] = {}
        self.moved_s = 0.0

    def __bool__(self) -> bool:
        return bool(self.open)
