"""Reads of a local NIC: rows in line, each peer's in order, carried out in bounded helpings.

They stand in a line of their own, so that a write that waits for room in the peer's lane holds up
no read. Rule 1 of `sender` holds here too: a read is OK only if the peer was alive after its bytes
had moved. Each copy is over when the call that made it returns: what ends, well or not, is written
no more.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from tep.backends.base import DomainCaps, Entry, Kind, ReadBatch, Status
from tep.backends.fences import STRONG
from tep.backends.hostcopy import HostRegion
from tep.backends.local.copying import (
    ROWS_MAX,
    ReadMover,
    Target,
    at_row,
    cut,
    extent,
    rows_within,
)
from tep.backends.local.crew import Crew, SharedMover
from tep.backends.local.outbound import Outbound, Segment, Way
from tep.backends.local.rings import COPYING

__all__ = ["Reads"]

_SCALAR_MAX: Final = 3  # rows up to which a loop is cheaper than columns
_READ: Final = int(Kind.READ)


class Reads:
    """The reads of one NIC, from all its peers.

    Attributes:
        open_rows: rows taken and not handed out; the owner subtracts.

    Args:
        sinks: by lkey, registered memory that reads may write; the owner keeps it.
        done: completions, for the owner to hand out.
        fence: a full barrier.
        meaning: the status that an errno of a call has.
        crew: who copies long rows; None = the thread that asks, alone.
    """

    def __init__(
        self,
        sinks: Mapping[int, HostRegion],
        caps: DomainCaps,
        done: deque[Entry],
        fence: Callable[[], None],
        meaning: Callable[[Outbound, int, str], Status],
        crew: Crew | None = None,
    ) -> None:
        self.open_rows = 0
        self._sinks = sinks
        self._longest = caps.max_write_bytes
        self._done = done
        self._fence = fence
        self._meaning = meaning
        self._mover = ReadMover() if crew is None else SharedMover(crew, ReadMover)

    def stand(self, out: Outbound, segment: Segment[ReadBatch]) -> bool:
        """Put rows into their peer's line; False = it is gone, and they have failed."""
        if out.way is not Way.GONE:
            out.reads.append(segment)
            return True
        self._fail(segment, Status.UNREACHABLE)
        return False

    def serve(self, out: Outbound, helping: int) -> int:
        """Carry out a peer's reads, in order; return how many bytes of the helping are left."""
        line = out.reads
        while line and helping > 0 and out.way is Way.UP:
            segment = line[0]
            n = min(segment.stop - segment.at, ROWS_MAX)
            n = rows_within(segment.batch.nbytes, segment.at, n, helping)
            moved = self._read_columns(out, segment, n) if n > _SCALAR_MAX else 0
            helping -= moved or self._read_row(out, segment, helping)
            if segment.at == segment.stop and line and line[0] is segment:
                line.popleft()
        return helping

    def _read_columns(self, out: Outbound, segment: Segment[ReadBatch], n: int) -> int:
        """Read rows of one region into one region at once; return the bytes, 1 at the least.

        0 = it is not so simple, and nothing is done.
        """
        batch, at = segment.batch, segment.at
        if segment.moved or not isinstance(batch.rkey, int):
            return 0
        part = slice(at, at + n)
        here, there = cut(batch.local, part), cut(batch.remote, part)
        nbytes = cut(batch.nbytes, part)
        if isinstance(here, int) and isinstance(there, int) and isinstance(nbytes, int):
            here = np.full(n, here, np.uint64)  # the same row n times
        sink, target = self._sinks.get(batch.lkey), out.readable(batch.rkey)
        if sink is None or target is None or (target.mapped is None and not out.pid):
            return 0
        if not segment.inside(batch.local, batch.remote, sink, target, self._longest):
            return 0
        if not out.begin_copy(target):
            return 0
        _, total = extent(nbytes, n)
        codes = dict(self._mover.move_rows(out.pid, target, sink, here, there, nbytes))
        self._end_copy(out)
        segment.at += n
        lost = 0 if out.way is Way.UP else errno.ESRCH
        if lost or codes:
            for row in range(n):
                code = codes.get(row, lost)
                status = self._meaning(out, code, self._mover.name) if code else Status.OK
                self._finish(status, batch.ctx, row=at + row)
        else:
            self._finish(Status.OK, batch.ctx, count=n, nbytes=total)
        return max(total, 1)

    def _read_row(self, out: Outbound, segment: Segment[ReadBatch], helping: int) -> int:
        """Carry out one row, or the part that the helping allows; return the bytes, 1 at least."""
        batch, row, done = segment.batch, segment.at, segment.moved
        nbytes = at_row(batch.nbytes, row)
        size = min(nbytes - done, helping)
        status = self._check(out, batch, row, nbytes)
        if isinstance(status, Target):
            here, there = at_row(batch.local, row) + done, at_row(batch.remote, row) + done
            status = self._copy(out, status, here, there, size)
        elif status is Status.OK:  # an empty row, of whoever is there
            out.watch()
            status = status if out.way is Way.UP else Status.UNREACHABLE
        segment.moved = done + size
        if status is not Status.OK or segment.moved == nbytes:
            segment.at, segment.moved = row + 1, 0
            self._finish(status, batch.ctx, row=row, nbytes=nbytes)
        return max(size, 1)

    def _check(self, out: Outbound, batch: ReadBatch, row: int, nbytes: int) -> Target | Status:
        """What is to be read; OK = nothing, any other status = it may not be."""
        if not nbytes:
            return Status.OK
        here, there = at_row(batch.local, row), at_row(batch.remote, row)
        sink = self._sinks.get(batch.lkey)
        if sink is None or not sink.holds(here - sink.origin, nbytes):
            return Status.LOCAL_KEY
        if nbytes > self._longest:
            return Status.LENGTH
        target = out.readable(at_row(batch.rkey, row))
        if target is None:
            return out.without_key()
        if not 0 <= there - target.base <= target.nbytes - nbytes:
            return Status.REMOTE_RANGE
        return target

    def _copy(self, out: Outbound, target: Target, here: int, there: int, nbytes: int) -> Status:
        if target.mapped is None and not out.pid:
            return self._meaning(out, errno.EPERM, self._mover.name)
        if not out.begin_copy(target):
            return out.without_key()
        code = self._mover.move_row(out.pid, target, here, there, nbytes)
        self._end_copy(out)
        if code:
            return self._meaning(out, code, self._mover.name)
        return Status.OK if out.way is Way.UP else Status.UNREACHABLE

    def _end_copy(self, out: Outbound) -> None:
        """Say that the owner may have its memory back, and see whether the owner still lives."""
        if not STRONG:  # else the words could tell of the end before the last byte was read
            self._fence()
        out.lane.words[COPYING] = 0
        out.watch()

    # --- ends

    def end(self, out: Outbound, status: Status) -> None:
        """Nothing more is read from this peer."""
        while out.reads:
            self._fail(out.reads.popleft(), status)

    def _fail(self, segment: Segment[ReadBatch], status: Status) -> None:
        for row in range(segment.at, segment.stop):
            self._finish(status, segment.batch.ctx, row=row)

    def _finish(
        self, status: Status, ctx: int, *, row: int = 0, count: int = 1, nbytes: int = 0
    ) -> None:
        self._done.append((_READ, int(status), count, 0, row, ctx, nbytes))
