"""Rows on their way: requests in memory, posted as runs or loose, remembered until they are back.

A run is a chain of rows to one queue pair, filled by columns. Loose rows are posted one by one: a
few to one peer, or a fan, each to a peer of its own. Scatters go to the same peers again and again,
so from the second on they have a fan of their own, until some peer loses its connection. Reads are
runs always.

Rule 1: every row taken ends in exactly one entry, or is counted by one. Rule 2: the NIC lets no
more rows out than each queue pair and the completion queue can hold. Rule 3: on one queue pair rows
complete in order, so a completion speaks for the rows of its run before it that asked for none;
after a failure every row has one of its own. Rule 4: a run's last row asks for a completion; where
a provider took only a part of it, which none should, the connection is given up. Rule 5: here alone
an immediate is turned into network byte order.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import repeat, starmap
from operator import length_hint
from socket import htonl
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import Batch, Column, Entry, Kind, ReadBatch, Row, Status, WriteBatch
from tep.backends.common import at, most, part, row_of
from tep.backends.ffi.ibverbs import ENUMS, SEND_WR, SGE, Ref, ref
from tep.backends.verbs.conns import NUMBER_MASK, NUMBER_SHIFT, ROW_MASK, Conn, Tag, tag
from tep.backends.verbs.device import Depths, Device

__all__ = ["RKEY_MAX", "Writer"]

RKEY_MAX: Final = 2**32 - 1

_FAN_MAX: Final = 256  # rows
_FANS_MAX: Final = 64

ROWS_FEW: Final = 6
"""Up to here rows are packed and posted one by one; from there on columns cost less."""

_RUN_MAX: Final = 2048
_SIGNAL_ROWS: Final = 256  # every so many rows of a run one asks for a completion
_SETS_MASK: Final = 2**32 - 1  # a set is not out for as many posts
_OP_WRITE: Final = ENUMS["IBV_WR_RDMA_WRITE"]
_OP_WRITE_IMM: Final = ENUMS["IBV_WR_RDMA_WRITE_WITH_IMM"]
_OP_READ: Final = ENUMS["IBV_WR_RDMA_READ"]
_SIGNALED: Final = ENUMS["IBV_SEND_SIGNALED"]
_WR_BYTES: Final = SEND_WR.itemsize
_SGE_BYTES: Final = SGE.itemsize

Array = npt.NDArray[np.uint64]
_FIRSTS_MAX: Final = 64  # lengths of runs whose views are kept

# wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, remote_addr, rkey of ibv_send_wr.
_PACK_WR: Final = struct.Struct("<QQQiIIIQI").pack_into
_PACK_SGE: Final = struct.Struct("<QII").pack_into

_INLINE: Final = _SIGNALED | ENUMS["IBV_SEND_INLINE"]
_WRITE, _READ = int(Kind.WRITE), int(Kind.READ)
_NIC_DOWN, _FLUSHED = int(Status.NIC_DOWN), int(Status.FLUSHED)
_OK: Final = int(Status.OK)
_PROVIDER: Final = int(Status.PROVIDER)
_ONE: Final[npt.NDArray[np.uint64]] = np.array(1, np.uint64)
_LATER: Final = frozenset({errno.ENOMEM, errno.EAGAIN})


class _Loose:
    """Rows of one batch, posted each by itself: where each went, and whether it is back (1)."""

    __slots__ = ("conns", "ctx", "done", "left", "start")

    def __init__(self, ctx: int, start: int, n: int, conns: Sequence[Conn]) -> None:
        self.ctx = ctx
        self.start = start
        self.left = n
        self.conns = conns
        self.done = bytearray(n)


class Writer:
    """The rows of one NIC, on their way to queue pairs and back.

    Args:
        not_inline: local keys of memory that the CPU cannot read, so that the provider cannot copy
            short rows out of it.
        keep: takes rows that found no room on their queue pair: (peer, batch, start, stop).
        broken: is told of a connection that cannot be used any more, and the status of that.

    Attributes:
        up: by PeerId, the connection that rows can be posted on, or None.
        write_bytes_max: the longest row.
        refusal: what the last refused post was told.
        short: memory was short, and rows were refused for it; arm() resets it.
    """

    def __init__(
        self,
        device: Device,
        depths: Depths,
        not_inline: Container[int],
        ready: deque[Entry],
        keep: Callable[[int, Batch, int, int], object],
        broken: Callable[[Conn, int], object],
    ) -> None:
        self.up: list[Conn | None] = []
        self.write_bytes_max = int(device.port.max_msg_sz)
        self._keep = keep
        self._broken = broken
        self._met: set[bytes] = set()  # who scatters went to
        self._fans: dict[bytes, _Fan] = {}
        self._inline_max = device.inline_max
        self._not_inline = not_inline
        self._ready = ready
        self.refusal = ""
        self.short = False
        self._post_send = device.data.post_send
        self._run = _RunRing(min(depths.rows, _RUN_MAX))
        self._reads = _ReadRing(max(1, depths.reads))
        self._one = _One()
        self._bad = ctypes.c_void_p()
        self._bad_ref = ref(ctypes.addressof(self._bad))
        self._first_fan = _Fan(_FAN_MAX, self.write_bytes_max, self._bad_ref)
        self._sets: dict[int, _Loose] = {}
        self._number = 0

    # --- posting

    def post_up(self, conn: Conn, batch: WriteBatch, start: int, stop: int) -> int:
        """Post rows to one connected peer; return how many were taken, a prefix."""
        if stop - start <= ROWS_FEW:
            return self._post_few(conn, batch, start, stop)
        return self._post_chains(self._run, conn, batch, start, stop)

    def post_any(self, conn: Conn, batch: Batch, start: int, stop: int) -> int:
        """Post rows of either kind to one connected peer; return how many were taken, a prefix."""
        if isinstance(batch, ReadBatch):
            return self.post_reads(conn, batch, start, stop)
        assert isinstance(batch, WriteBatch), batch
        return self.post_up(conn, batch, start, stop)

    def scatter(self, batch: WriteBatch, start: int, stop: int) -> int:
        """Post each row to a peer of its own; return how many were dealt with, a prefix.

        It ends before the first part with an impossible row, or a peer that is not connected.
        """
        peers = batch.peer
        assert not isinstance(peers, int)
        n = stop - start
        if n > _FAN_MAX:
            taken = self.scatter(batch, start, start + _FAN_MAX)
            return taken and taken + self.scatter(batch, start + _FAN_MAX, stop)
        some = peers if n == batch.n else peers[start:stop]
        try:
            key = some.tobytes()
            fan = self._fans.get(key) or self._fan_for(key, some.tolist())
            if fan is None or not self._fill_fan(fan, batch, start):
                return 0
        except MemoryError:
            self.forget_fans()  # one may be half filled
            self.short = True
            return 0
        self._post_fan(fan, batch, start)
        return n

    def _fan_for(self, key: bytes, peers: Sequence[int]) -> _Fan | None:
        """Aim the fan of first scatters, or a new one for the second; None = not all are up."""
        conns = [conn for peer in peers if (conn := self.up[peer]) is not None]
        if len(conns) < len(peers):
            return None
        fan = self._first_fan
        if key in self._met:
            fan = self._fans[key] = _Fan(len(conns), self.write_bytes_max, self._bad_ref)
        elif len(self._met) >= _FANS_MAX:
            self.forget_fans()
        self._met.add(key)
        fan.aim(conns)
        return fan

    def forget_fans(self) -> None:
        """Forget who scatters went to: some peer has lost its connection."""
        self._met.clear()
        self._fans.clear()

    def post_reads(self, conn: Conn, batch: ReadBatch, start: int, stop: int) -> int:
        """Read rows from one peer, by chains; return how many were taken, a prefix."""
        if not conn.reads:
            self.refusal = "the peer's device answers no reads (its max_qp_rd_atom is 0)"
            for row in range(start, stop):
                self._ready.append((_READ, _PROVIDER, 1, 0, row, batch.ctx, 0))
            return stop - start
        return self._post_chains(self._reads, conn, batch, start, stop)

    def _post_chains(self, ring: _RunRing, conn: Conn, batch: Batch, start: int, stop: int) -> int:
        row = start
        while row < stop:
            n = min(stop - row, ring.n)
            try:
                ring.fill(batch, row, n)
                conn.runs.append((ring.kind, batch.ctx, row, n))
            except MemoryError:
                ring.mend(n)
                self.short = True
                break
            rc = self._post_send(conn.row_ref, ring.ref, self._bad_ref)
            ring.mend(n)
            if rc:
                conn.runs.pop()
                row += self._take_part(ring, conn, batch, row, rc)
                break
            row += n
        return row - start

    def _take_part(self, ring: _RunRing, conn: Conn, batch: Batch, start: int, rc: int) -> int:
        """A run was taken in part, or not; return how many rows have been dealt with."""
        bad = self._bad.value
        assert bad is not None, "a refused post must name the request that it refused"
        taken = (bad - ring.ptr) // SEND_WR.itemsize
        if taken:
            # The last of these asked for no completion. On a queue pair that fails each has one.
            conn.runs.append((ring.kind, batch.ctx, start, taken))
            self._broken(conn, _FLUSHED)
        if rc in _LATER:
            return taken
        self._refuse(rc, batch.ctx, start + taken, ring.kind)
        return taken + 1

    def _refuse(self, rc: int, ctx: int, row: int, kind: int = _WRITE) -> None:
        """A provider will never take a row: it has failed."""
        self.refusal = f"ibv_post_send: {os.strerror(rc)} (errno {rc})"
        self._ready.append((kind, _PROVIDER, 1, 0, row, ctx, 0))

    def _post_few(self, conn: Conn, batch: WriteBatch, start: int, stop: int) -> int:
        """Post rows to one peer one by one; return how many were taken, a prefix."""
        self._number = number = self._number + 1 & _SETS_MASK
        wr_id = tag(Tag.LOOSE, number)
        one, inline_max = self._one, 0 if batch.lkey in self._not_inline else self._inline_max
        n = stop - start
        try:
            self._sets[number] = _Loose(batch.ctx, start, n, (conn,) * n)
        except MemoryError:
            self.short = True
            return 0
        taken = refused = 0
        for row in (row_of(batch, start),) if n == 1 else batch.rows(start, stop):
            flags = _INLINE if 0 < row.nbytes <= inline_max else _SIGNALED
            one.write(row, wr_id + taken, flags)
            rc = self._post_send(conn.row_ref, one.ref, self._bad_ref)
            if rc:
                if rc not in _LATER:
                    self._refuse(rc, batch.ctx, start + taken)
                    refused = 1
                break
            taken += 1
        if taken < n:
            del self._sets[number]
            if taken:
                self._sets[number] = _Loose(batch.ctx, start, taken, (conn,) * taken)
        return taken + refused

    def _fill_fan(self, fan: _Fan, batch: WriteBatch, start: int) -> bool:
        """Lay out row `start + k` for the k-th peer; False = a row is impossible."""
        number = self._number + 1 & _SETS_MASK
        if not fan.fill(batch, start, number):
            return False
        self._sets[number] = _Loose(batch.ctx, start, len(fan.conns), fan.conns)
        self._number = number
        return True

    def _post_fan(self, fan: _Fan, batch: WriteBatch, start: int) -> None:
        number, n = self._number, len(fan.conns)
        calls = iter(fan.calls)
        codes = starmap(self._post_send, calls)
        failures = [(n - length_hint(calls) - 1, rc) for rc in filter(None, codes)]
        if failures:
            self._sort_out(number, batch, start, failures)

    def _sort_out(
        self, number: int, batch: WriteBatch, start: int, failures: Sequence[tuple[int, int]]
    ) -> None:
        """Deal with rows of a set that were not taken: they are kept, or have failed."""
        found = self._sets[number]
        for k, rc in failures:
            found.done[k] = 1
            found.left -= 1
            if rc in _LATER:
                self._keep(found.conns[k].peer, batch, start + k, start + k + 1)
            else:
                self._refuse(rc, batch.ctx, start + k)
        if not found.left:
            del self._sets[number]

    def possible_until(self, batch: Batch, start: int, stop: int) -> int:
        """Return the first of rows start .. stop that can never be posted; `stop` if all can."""
        if self._fit(batch, start, stop):
            return stop
        return next(row for row in range(start, stop) if not self._fit(batch, row, row + 1))

    def why_impossible(self, batch: Batch, row: int) -> Status:
        """Say why a row that cannot be posted cannot."""
        too_long = at(batch.nbytes, row) > self.write_bytes_max
        return Status.LENGTH if too_long else Status.REMOTE_KEY

    def _fit(self, batch: Batch, start: int, stop: int) -> bool:
        return (
            most(part(batch.nbytes, start, stop)) <= self.write_bytes_max
            and most(part(batch.rkey, start, stop)) <= RKEY_MAX
        )

    # --- completing

    def complete_run(self, conn: Conn, wr_id: int, status: int) -> None:
        """Take the completion of a row of a connection's oldest run.

        A row behind the end of that run is of a later one: it tells that all before it went well.
        """
        row, runs = wr_id & ROW_MASK, conn.runs
        while row >= (n := runs[0][3]):
            self._finish(conn, n - conn.back, _OK)
        before = row - conn.back
        if status == _OK:
            self._finish(conn, before + 1, _OK)
        else:
            if before:
                self._finish(conn, before, _OK)
            if status == _NIC_DOWN and runs[0][0] == _READ:
                status = _FLUSHED  # it has come back, so it is over
            self._finish(conn, 1, status)

    def _finish(self, conn: Conn, count: int, status: int) -> None:
        """End the next rows of a connection's oldest run."""
        kind, ctx, start, n = conn.runs[0]
        self._ready.append((kind, status, count, 0, start + conn.back, ctx, 0))
        conn.back += count
        if conn.back == n:
            conn.runs.popleft()
            conn.back = 0

    def complete_loose(self, wr_id: int, status: int) -> None:
        number = wr_id >> NUMBER_SHIFT & NUMBER_MASK
        found = self._sets[number]
        row = wr_id & ROW_MASK
        found.done[row] = 1
        found.left -= 1
        self._ready.append((_WRITE, status, 1, 0, found.start + row, found.ctx, 0))
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
            self._ready.append((_WRITE, _OK, last - first, 0, found.start, found.ctx, 0))
            if not found.left:
                del self._sets[key & NUMBER_MASK]
            first = last

    def holds(self, conn: Conn) -> bool:
        """Whether rows on a connection have not come back."""
        return bool(conn.runs) or any(
            to is conn and not done
            for found in self._sets.values()
            for to, done in zip(found.conns, found.done, strict=True)
        )

    def fail_all(self, status: int, conns: Iterable[Conn]) -> None:
        """End every open row of some connections, where no completion will come."""
        lost = set(conns)
        for conn in lost:
            while conn.runs:
                self._finish(conn, 1, status)
        for number, found in list(self._sets.items()):
            for row, done in enumerate(found.done):
                if not done and found.conns[row] in lost:
                    self.complete_loose(tag(Tag.LOOSE, number) + row, status)


class _Ring:
    """`n` work requests with a scatter entry each."""

    opcode = _OP_WRITE  # of rows without an immediate

    def __init__(self, n: int) -> None:
        self.n = n
        self._wr = np.zeros(n, SEND_WR)
        self._sge = np.zeros(n, SGE)
        self.ptr = int(self._wr.ctypes.data)
        self.ref = ref(self.ptr)
        self._sge_ptr = int(self._sge.ctypes.data)
        self._iota = np.arange(n, dtype=np.uint64)
        wr, sge = self._wr, self._sge
        wr["sg_list"] = np.uint64(self._sge_ptr) + self._iota * np.uint64(_SGE_BYTES)
        wr["num_sge"] = 1
        # Views, made once: looking a field up costs 100 ns.
        self._wr_id, self._next, self._flags = wr["wr_id"], wr["next"], wr["send_flags"]
        self._num_sge, self._opcode, self._imm = wr["num_sge"], wr["opcode"], wr["imm_data"]
        self._remote, self._rkey = wr["remote_addr"], wr["rkey"]
        self._addr, self._length, self._lkey = sge["addr"], sge["length"], sge["lkey"]
        self._firsts: dict[int, tuple[Array, Array, Array, Array]] = {}

    def _first(self, n: int) -> tuple[Array, Array, Array, Array]:
        """Source, target, local and remote keys of the first n requests."""
        found = self._firsts.get(n)
        if found is None:
            if len(self._firsts) >= _FIRSTS_MAX:
                self._firsts.clear()
            found = (self._addr[:n], self._remote[:n], self._lkey[:n], self._rkey[:n])
            self._firsts[n] = found
        return found

    def _fill_addresses(self, batch: Batch, start: int, n: int) -> None:
        src, dst = batch.src, batch.dst
        found = self._first(n)
        # A slice costs 150 ns, which a batch that goes out whole can save.
        whole = n == batch.n
        found[0][:] = src if whole or isinstance(src, int) else src[start : start + n]
        found[1][:] = dst if whole or isinstance(dst, int) else dst[start : start + n]

    def _fill_keys(self, batch: Batch, start: int, n: int) -> None:
        rkey, imm = batch.rkey, batch.imm
        self._lkey[:n] = batch.lkey
        self._rkey[:n] = rkey if isinstance(rkey, int) else rkey[start : start + n]
        if imm is None:
            self._opcode[:n] = self.opcode
        else:
            self._opcode[:n] = _OP_WRITE_IMM
            self._imm[:n] = imm if isinstance(imm, int) else imm[start : start + n]

    def _fill_lengths(self, nbytes: Column, start: int, n: int) -> None:
        # Some providers take a length of 0 for 2 GiB: an empty row has no scatter entry at all.
        if isinstance(nbytes, int):
            self._length[:n] = nbytes
            self._num_sge[:n] = 1 if nbytes else 0
        else:
            self._length[:n] = nbytes[start : start + n]
            self._num_sge[:n] = nbytes[start : start + n] != 0


class _RunRing(_Ring):
    """A chain of up to `n` rows that is filled by columns and cut to length for each post.

    A request's id is its place here, always: on one queue pair rows complete in order, so that is
    enough to tell them apart.
    """

    kind = int(Kind.WRITE)

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._wr_id[:] = self._iota + np.uint64(tag(Tag.RUN))
        self._links = [self.ptr + (k + 1) * _WR_BYTES for k in range(n - 1)] + [0]
        self._next[:] = self._links
        marks = (self._iota % _SIGNAL_ROWS == _SIGNAL_ROWS - 1) | (self._iota == n - 1)
        self._flags[:] = np.where(marks, _SIGNALED, 0)
        self._marks: list[int] = self._flags.tolist()
        self._held: tuple[int | None, ...] | None = None
        self._held_n = 0

    def fill(self, batch: Batch, start: int, n: int) -> None:
        """Write rows start.. of a batch into the first `n` requests, and end the chain there."""
        self._fill_addresses(batch, start, n)
        # What is the same for all rows is most often the same as last time, too, or but for keys.
        same, held = _plain(batch), self._held
        self._held = None  # until all is written: what is half written is held by nobody
        if n > self._held_n or same is None or held is None or same[2:] != held[2:]:
            self._fill_keys(batch, start, n)
            self._fill_lengths(batch.nbytes, start, n)
            self._held_n = n
        elif same != held:
            _, _, lkeys, rkeys = self._first(n)
            lkeys.fill(same[0])
            rkeys.fill(same[1])
            self._held_n = n
        self._held = same
        last = n - 1
        self._next[last] = 0
        self._flags[last] = _SIGNALED

    def mend(self, n: int) -> None:
        """After the post: make the chain whole again."""
        last = n - 1
        self._next[last] = self._links[last]
        self._flags[last] = self._marks[last]


class _ReadRing(_RunRing):
    """The same for rows that are read."""

    kind = int(Kind.READ)
    opcode = _OP_READ


class _One(_Ring):
    """One request, packed anew for each row."""

    def __init__(self) -> None:
        super().__init__(1)
        self._wr_bytes = self._wr.view(np.uint8).data
        self._sge_bytes = self._sge.view(np.uint8).data

    def write(self, row: Row, wr_id: int, flags: int) -> None:
        _, src, lkey, dst, rkey, nbytes, imm = row
        opcode, imm = (_OP_WRITE, 0) if imm is None else (_OP_WRITE_IMM, htonl(imm))
        sge, sges = self._sge_ptr, 1 if nbytes else 0
        _PACK_WR(self._wr_bytes, 0, wr_id, 0, sge, sges, opcode, flags, imm, dst, rkey)
        _PACK_SGE(self._sge_bytes, 0, src, nbytes, lkey)


class _Fan(_Ring):
    """Rows that are posted one by one, row k always to the same peer: what stays is made once."""

    def __init__(self, n: int, write_bytes_max: int, bad: Ref) -> None:
        super().__init__(n)
        self._refs = [ref(self.ptr + k * _WR_BYTES) for k in range(n)]
        self._bad = bad
        self._flags[:] = _SIGNALED
        self._wr_id[:] = self._iota + np.uint64(tag(Tag.LOOSE))
        # The object that each id names, of up to 32 bits.
        raw = self._wr.view(np.uint8)
        self._number = np.ndarray(self.n, np.uint32, raw, NUMBER_SHIFT // 8, (_WR_BYTES,))
        self._write_bytes_max = write_bytes_max
        self._usual = False  # whether every request has its scatter entry

    def aim(self, conns: Sequence[Conn]) -> None:
        """Let row k go to conns[k] from now on."""
        self.conns = conns
        pairs = [conn.row_ref for conn in conns]
        self.calls = list(zip(pairs, self._refs, repeat(self._bad), strict=False))
        self._keys: tuple[object, ...] = ()
        self._lengths: int | bytes = b""

    def fill(self, batch: WriteBatch, start: int, number: int) -> bool:
        """Write rows start.. of a batch, as set `number`; False = one of them is impossible."""
        n = len(self.conns)
        stop = start + n
        keys, lengths = _frozen_keys(batch, start, n), _frozen(batch.nbytes, start, n)
        if lengths != self._lengths:
            if not self._fill_new_lengths(part(batch.nbytes, start, stop)):
                return False
            self._lengths = lengths
        if keys != self._keys:
            if most(part(batch.rkey, start, stop)) > RKEY_MAX:
                return False
            self._fill_keys(batch, start, n)
            self._keys = keys
        self._fill_addresses(batch, start, n)
        self._number.fill(number)
        return True

    def _fill_new_lengths(self, nbytes: Column) -> bool:
        # No row is empty and none too long, in one look: one less than 0 is very long.
        if (
            isinstance(nbytes, int)
            or int(np.maximum.reduce(nbytes - _ONE)) >= self._write_bytes_max
        ):
            self._usual = False
            if most(nbytes) > self._write_bytes_max:
                return False
            self._fill_lengths(nbytes, 0, len(self.conns))
            return True
        if not self._usual:
            self._num_sge[:] = 1
            self._usual = True
        self._length[: len(nbytes)] = nbytes
        return True


def _frozen(column: Column, start: int, n: int) -> int | bytes:
    """A column's value, or its values as bytes."""
    if isinstance(column, int):
        return column
    return column.tobytes() if n == len(column) else column[start : start + n].tobytes()


def _frozen_keys(batch: Batch, start: int, n: int) -> tuple[object, ...]:
    """The keys and immediates of `n` rows, as bytes: comparing costs less than writing them again.

    Scatters to the same peers differ in their addresses, and seldom in more.
    """
    imm = batch.imm
    frozen = imm if imm is None else _frozen(imm, start, n)
    return n, batch.lkey, _frozen(batch.rkey, start, n), frozen


def _plain(batch: Batch) -> tuple[int | None, ...] | None:
    """The values that all rows share; None where any of them is a column."""
    rkey, nbytes, imm = batch.rkey, batch.nbytes, batch.imm
    if isinstance(rkey, int) and isinstance(nbytes, int) and (imm is None or isinstance(imm, int)):
        return batch.lkey, rkey, nbytes, imm
    return None
