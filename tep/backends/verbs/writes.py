"""Rows on their way: posted as runs or loose, remembered until their completions have come.

Reads are runs always, on the first queue pair of their peer.

Rule 1: every row taken ends in exactly one entry, or is counted by one. Rule 2: the NIC lets no
more rows out than each queue pair and the completion queue can hold. Rule 3: on one queue pair rows
complete in order, so a completion speaks for the rows of its run before it that asked for none;
after a failure every row has one of its own. Rule 4: a run's last row asks for a completion; where
a provider took less of it, a tail does, before the queue pair gets another run.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from collections.abc import Container, Iterable, Sequence
from itertools import repeat, starmap
from operator import length_hint
from typing import TYPE_CHECKING, Final

from tep.backends.base import Batch, Entry, Kind, ReadBatch, Status, WriteBatch
from tep.backends.columns import row_of
from tep.backends.ffi.ibverbs import Ref, ref
from tep.backends.ffi.ibverbs_structs import ENUMS, SEND_WR
from tep.backends.verbs.conns import Conn, Run
from tep.backends.verbs.limits import LOOSE_MAX, Limits
from tep.backends.verbs.rings import FanRing, LooseRing, ReadRing, RunRing
from tep.backends.verbs.tags import LOOSE, NUMBER_MASK, NUMBER_SHIFT, ROW_MASK, TAIL, tag

if TYPE_CHECKING:
    from tep.backends.verbs.depths import Depths
    from tep.backends.verbs.device import Device

__all__ = ["ROWS_FEW", "Fan", "Writer"]

ROWS_FEW: Final = 6
"""Up to here rows are packed and posted one by one; from there on columns cost less."""

_RUN_MAX: Final = 2048
_SETS_MASK: Final = 2**32 - 1  # a set is not out for as many posts
_SIGNALED: Final = ENUMS["IBV_SEND_SIGNALED"]
_INLINE: Final = _SIGNALED | ENUMS["IBV_SEND_INLINE"]
_WRITE, _READ = int(Kind.WRITE), int(Kind.READ)
_NIC_DOWN, _FLUSHED = int(Status.NIC_DOWN), int(Status.FLUSHED)
_OK: Final = int(Status.OK)
_PROVIDER: Final = int(Status.PROVIDER)
_LATER: Final = frozenset({errno.ENOMEM, errno.EAGAIN})


class _Loose:
    """Rows of one batch, posted each by itself; they come back in any order.

    Attributes:
        conns: where each went.
        done: which are back, one byte each.
    """

    __slots__ = ("conns", "ctx", "done", "left", "start")

    def __init__(self, ctx: int, start: int, n: int, conns: Sequence[Conn]) -> None:
        self.ctx = ctx
        self.start = start
        self.left = n
        self.conns = conns
        self.done = bytearray(n)


class Fan:
    """The same peers again and again, a row to each: all that stays the same, made once.

    Attributes:
        conns: where row k goes.
        ring: their requests.
        calls: the arguments of each post.
    """

    __slots__ = ("calls", "conns", "ring")

    def __init__(self, conns: Sequence[Conn], ring: FanRing, bad: Ref) -> None:
        self.conns = conns
        self.ring = ring
        self.calls = [(conn.ref, at, bad) for conn, at in zip(conns, ring.refs, strict=True)]


class Writer:
    """The rows of one NIC.

    Args:
        device: where.
        depths: how many rows may be out.
        not_inline: local keys of memory that the CPU cannot read, so that the provider cannot copy
            short rows out of it.
        ready: where entries for poll() go.

    Attributes:
        tails: connections whose last run was taken in part, and waits for its tail.
        refusal: what the last refused post was told.
        ready: entries for poll(), made here and elsewhere in the NIC.
    """

    def __init__(
        self, device: Device, depths: Depths, not_inline: Container[int], ready: deque[Entry]
    ) -> None:
        self._inline_max = device.inline_max
        self._not_inline = not_inline
        self.ready = ready
        self.refusal = ""
        self.tails: dict[Conn, int] = {}
        self._post_send = device.data.post_send
        self._post_refs = device.data.post_send_refs
        self._run = RunRing(min(depths.rows, _RUN_MAX), device.settings.signal_rows)
        self._reads = ReadRing(max(1, depths.reads), device.settings.signal_rows)
        self._loose = LooseRing(min(depths.rows, LOOSE_MAX))
        self._few = LooseRing(ROWS_FEW)  # of its own, so that it does not disturb what a set holds
        self._bad = ctypes.c_void_p()
        self._bad_ptr = ctypes.addressof(self._bad)
        self._bad_ref = ref(self._bad_ptr)
        self._sets: dict[int, _Loose] = {}
        self._number = 0

    # --- posting

    def post_run(self, conn: Conn, batch: WriteBatch, start: int, stop: int) -> int:
        """Post rows to one peer as chains; return how many were taken, a prefix."""
        return self._post_chains(self._run, conn, batch, start, stop)

    def post_reads(self, conn: Conn, batch: ReadBatch, start: int, stop: int) -> int:
        """Read rows from one peer, by chains; return how many were taken, a prefix."""
        if not conn.reads:
            self.refusal = "the peer's device answers no reads (its max_qp_rd_atom is 0)"
            for row in range(start, stop):
                self.ready.append((_READ, _PROVIDER, 1, 0, row, batch.ctx, 0))
            return stop - start
        return self._post_chains(self._reads, conn, batch, start, stop)

    def _post_chains(self, ring: RunRing, conn: Conn, batch: Batch, start: int, stop: int) -> int:
        at = start
        while at < stop:
            if self.tails and conn in self.tails:
                break
            n = min(stop - at, ring.n)
            ring.fill(batch, at, n)
            rc = self._post_refs(conn.ref, ring.ref, self._bad_ref)
            ring.mend(n)
            if rc:
                at += self._take_part(ring, conn, batch, at, n, rc)
                break
            conn.runs.append(Run(ring.kind, batch.ctx, at, n))
            at += n
        return at - start

    def _take_part(
        self, ring: RunRing, conn: Conn, batch: Batch, start: int, n: int, rc: int
    ) -> int:
        """A run was taken in part; return how many rows have been dealt with."""
        bad = self._bad.value
        assert bad is not None, "a refused post must name the request that it refused"
        taken = (bad - ring.ptr) // SEND_WR.itemsize
        if taken:
            conn.runs.append(Run(ring.kind, batch.ctx, start, taken))
            if not ring.is_signaled(taken - 1, n):
                self.tails[conn] = tag(TAIL) + taken - 1
        if rc in _LATER:
            return taken
        self._refuse(rc, batch.ctx, start + taken, ring.kind)
        return taken + 1

    def _refuse(self, rc: int, ctx: int, row: int, kind: int = _WRITE) -> None:
        """A provider will never take a row: it has failed."""
        self.refusal = f"ibv_post_send: {os.strerror(rc)} (errno {rc})"
        self.ready.append((kind, _PROVIDER, 1, 0, row, ctx, 0))

    def post_few(self, conn: Conn, batch: WriteBatch, start: int, stop: int) -> int:
        """Post rows to one peer one by one; return how many were taken, a prefix."""
        self._number = number = self._number + 1 & _SETS_MASK
        wr_id = tag(LOOSE, number)
        ring = self._few
        n = stop - start
        if n == 1:
            row = row_of(batch, start)
            flags = _INLINE if 0 < row.nbytes <= self._inline_max else _SIGNALED
            if flags == _INLINE and batch.lkey in self._not_inline:
                flags = _SIGNALED
            ring.write(0, row, wr_id, flags)
        else:
            inline_max = 0 if batch.lkey in self._not_inline else self._inline_max
            for k, row in enumerate(batch.rows(start, stop)):
                flags = _INLINE if 0 < row.nbytes <= inline_max else _SIGNALED
                ring.write(k, row, wr_id + k, flags)
        taken = 0
        for at in ring.ptrs[:n]:
            rc = self._post_send(conn.pick(), at, self._bad_ptr)
            if rc:
                if rc not in _LATER:
                    self._refuse(rc, batch.ctx, start + taken)
                    self._remember(number, batch.ctx, start, taken, (conn,) * taken)
                    return taken + 1
                break
            taken += 1
        self._remember(number, batch.ctx, start, taken, (conn,) * taken)
        return taken

    def post_loose(
        self, conns: Sequence[Conn], qps: Sequence[int], batch: WriteBatch, start: int
    ) -> list[int]:
        """Post row `start + k` to queue pair qps[k] of conns[k], LOOSE_MAX at the most.

        Returns:
            Rows that their queue pairs had no room for now: the caller keeps them.
        """
        n = len(qps)
        self._number = number = self._number + 1 & _SETS_MASK
        ring = self._loose
        ring.fill(batch, start, n, tag(LOOSE, number))
        codes = list(map(self._post_send, qps, ring.ptrs, repeat(self._bad_ptr)))
        self._remember(number, batch.ctx, start, n, conns)
        if not any(codes):
            return []
        failures = [(k, rc) for k, rc in enumerate(codes) if rc]
        return self._sort_out(number, batch.ctx, start, failures)

    def new_fan(self, conns: Sequence[Conn], limits: Limits) -> Fan:
        """Make all ready for posting a row to each of the same peers again and again."""
        return Fan(conns, FanRing(len(conns), limits), self._bad_ref)

    def post_fan(self, fan: Fan, batch: WriteBatch, start: int) -> list[int] | None:
        """Post row `start + k` to the k-th peer of a fan.

        Returns:
            As post_loose; None = a row is impossible, and nothing is done.
        """
        number = self._number + 1 & _SETS_MASK
        if not fan.ring.fill(batch, start, number):
            return None
        self._number = number
        n = fan.ring.n
        self._sets[number] = _Loose(batch.ctx, start, n, fan.conns)
        calls = iter(fan.calls)
        codes = starmap(self._post_refs, calls)
        failures = [(n - length_hint(calls) - 1, rc) for rc in filter(None, codes)]
        return self._sort_out(number, batch.ctx, start, failures) if failures else []

    def _sort_out(
        self, number: int, ctx: int, start: int, failures: Sequence[tuple[int, int]]
    ) -> list[int]:
        found = self._sets[number]
        later = []
        for k, rc in failures:
            found.done[k] = 1
            found.left -= 1
            if rc in _LATER:
                later.append(start + k)
            else:
                self._refuse(rc, ctx, start + k)
        if not found.left:
            del self._sets[number]
        return later

    def _remember(self, number: int, ctx: int, start: int, n: int, conns: Sequence[Conn]) -> None:
        if n:
            self._sets[number] = _Loose(ctx, start, n, conns)

    def post_tails(self) -> None:
        """Ask for the completions that short posts left open, where there is room by now."""
        for conn, wr_id in list(self.tails.items()):
            gone = conn.lost or not conn.runs
            if gone or self.post_marker(conn.qp, wr_id):
                del self.tails[conn]

    def post_marker(self, qp: int, wr_id: int) -> bool:
        """Put a last request on a failed queue pair; its completion comes after all others."""
        return self._post_send(qp, self._few.write_nothing(wr_id), self._bad_ptr) == 0

    # --- completing

    def complete_run(self, conn: Conn, wr_id: int, status: int) -> None:
        """Take the completion of a row of a connection's oldest run, or of its tail.

        A row behind the end of that run is of a later one: it tells that all before it went well.
        """
        row = wr_id & ROW_MASK
        if not conn.runs:
            return  # a tail's own, after the row that it stands behind has failed and had one too
        while row >= (run := conn.runs[0]).n:
            self._finish(conn.runs.popleft(), run.n - run.back, _OK)
        before = row - run.back
        if before < 0:
            return  # likewise
        if status == _OK:
            self._finish(run, before + 1, _OK)
        else:
            if before:
                self._finish(run, before, _OK)
            if status == _NIC_DOWN and run.kind == _READ:
                status = _FLUSHED  # it has come back, so it is over
            self._finish(run, 1, status)
        if run.back == run.n:
            conn.runs.popleft()

    def _finish(self, run: Run, count: int, status: int) -> None:
        self.ready.append((run.kind, status, count, 0, run.start + run.back, run.ctx, 0))
        run.back += count

    def complete_loose(self, wr_id: int, status: int) -> None:
        """Take the completion of a loose row."""
        number = wr_id >> NUMBER_SHIFT & NUMBER_MASK
        found = self._sets[number]
        row = wr_id & ROW_MASK
        found.done[row] = 1
        found.left -= 1
        self.ready.append((_WRITE, status, 1, 0, found.start + row, found.ctx, 0))
        if not found.left:
            del self._sets[number]

    def complete_many_loose(self, wr_ids: list[int]) -> None:
        """Take a burst of completions of loose rows that went well; count those of a set."""
        first = 0
        while first < len(wr_ids):
            key = wr_ids[first] >> NUMBER_SHIFT
            found = self._sets[key & NUMBER_MASK]
            done, last = found.done, first
            while last < len(wr_ids) and wr_ids[last] >> NUMBER_SHIFT == key:
                done[wr_ids[last] & ROW_MASK] = 1
                last += 1
            found.left -= last - first
            self.ready.append((_WRITE, _OK, last - first, 0, found.start, found.ctx, 0))
            if not found.left:
                del self._sets[key & NUMBER_MASK]
            first = last

    def fail_all(self, status: int, conns: Iterable[Conn]) -> None:
        """End every open row of some connections, where no completion will come."""
        lost = set(conns)
        for conn in lost:
            while conn.runs:
                run = conn.runs.popleft()
                while run.back < run.n:
                    self._finish(run, 1, status)
        for number, found in list(self._sets.items()):
            for row, done in enumerate(found.done):
                if not done and found.conns[row] in lost:
                    self.complete_loose(tag(LOOSE, number) + row, status)
