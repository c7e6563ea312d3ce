"""Work requests in memory, filled by columns or one by one; a provider reads them during a post.

A run is a chain of rows to one queue pair. Loose rows stand alone, each for its own queue pair; a
fan is loose rows to the same peers again and again.
Here alone an immediate is turned into network byte order. Nothing is posted here.
"""

from __future__ import annotations

import struct
from socket import htonl
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import Batch, Column, Kind, Row, WriteBatch
from tep.backends.columns import part
from tep.backends.ffi.ibverbs import ref
from tep.backends.ffi.ibverbs_structs import ENUMS, SEND_WR, SGE
from tep.backends.verbs.tags import LOOSE, NUMBER_SHIFT, RUN, tag

if TYPE_CHECKING:
    from tep.backends.verbs.limits import Limits

__all__ = ["FanRing", "LooseRing", "ReadRing", "RunRing"]

_WRITE: Final = ENUMS["IBV_WR_RDMA_WRITE"]
_WRITE_IMM: Final = ENUMS["IBV_WR_RDMA_WRITE_WITH_IMM"]
_READ: Final = ENUMS["IBV_WR_RDMA_READ"]
_SIGNALED: Final = ENUMS["IBV_SEND_SIGNALED"]
_WR_BYTES: Final = SEND_WR.itemsize
_SGE_BYTES: Final = SGE.itemsize

Array = npt.NDArray[np.uint64]
_FIRSTS_MAX: Final = 64  # lengths of runs whose views are kept

# wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, remote_addr, rkey of ibv_send_wr.
_PACK_WR: Final = struct.Struct("<QQQiIIIQI").pack_into
_PACK_SGE: Final = struct.Struct("<QII").pack_into

_NUMBERED: Final = np.dtype(
    {
        "names": ["number"],
        "formats": ["<u4"],
        "offsets": [NUMBER_SHIFT // 8],
        "itemsize": _WR_BYTES,
    }
)
"""The object that a request's id names, of up to 32 bits."""


class _Ring:
    """`n` work requests with a scatter entry each.

    Attributes:
        opcode: of rows without an immediate.
    """

    opcode = _WRITE

    def __init__(self, n: int) -> None:
        self.n = n
        self._wr = np.zeros(n, SEND_WR)
        self._sge = np.zeros(n, SGE)
        self.ptr = int(self._wr.ctypes.data)
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

    def _fill_keys(self, lkey: int, rkey: Column, imm: Column | None, n: int) -> None:
        """Write what is one value for all rows, or one of each of `n`."""
        self._lkey[:n] = lkey
        self._rkey[:n] = rkey
        if imm is None:
            self._opcode[:n] = self.opcode
        else:
            self._opcode[:n] = _WRITE_IMM
            self._imm[:n] = imm

    def _fill_lengths(self, nbytes: Column, start: int, n: int) -> None:
        # Some providers take a length of 0 for 2 GiB: an empty row has no scatter entry at all.
        if isinstance(nbytes, int):
            self._length[:n] = nbytes
            self._num_sge[:n] = 1 if nbytes else 0
        else:
            self._length[:n] = nbytes[start : start + n]
            self._num_sge[:n] = nbytes[start : start + n] != 0


class RunRing(_Ring):
    """A chain that is filled by columns and cut to length for each post.

    A request's id is its place here, always: on one queue pair rows complete in order, so that is
    enough to tell them apart.

    Args:
        n: longest run.
        signal_rows: every so many rows one asks for a completion, and the last one of a run.

    Attributes:
        kind: of the completions.
    """

    kind = int(Kind.WRITE)

    def __init__(self, n: int, signal_rows: int) -> None:
        super().__init__(n)
        self.ref = ref(self.ptr)
        self._wr_id[:] = self._iota + np.uint64(tag(RUN))
        self._links = [self.ptr + (k + 1) * _WR_BYTES for k in range(n - 1)] + [0]
        self._next[:] = self._links
        marks = (self._iota % signal_rows == signal_rows - 1) | (self._iota == n - 1)
        self._flags[:] = np.where(marks, _SIGNALED, 0)
        self._marks: list[int] = self._flags.tolist()
        self._held: tuple[int | None, ...] | None = None
        self._held_n = 0

    def fill(self, batch: Batch, start: int, n: int) -> None:
        """Write rows start.. of a batch into the first `n` requests, and end the chain there."""
        self._fill_addresses(batch, start, n)
        # What is the same for all rows is most often the same as last time, too, or but for keys.
        same, held = _plain(batch), self._held
        if n > self._held_n or same is None or held is None or same[2:] != held[2:]:
            imm = batch.imm if batch.imm is None else part(batch.imm, start, start + n)
            self._fill_keys(batch.lkey, part(batch.rkey, start, start + n), imm, n)
            self._fill_lengths(batch.nbytes, start, n)
            self._held, self._held_n = same, n
        elif same != held:
            _, _, lkeys, rkeys = self._first(n)
            lkeys.fill(same[0])
            rkeys.fill(same[1])
            self._held, self._held_n = same, n
        last = n - 1
        self._next[last] = 0
        self._flags[last] = _SIGNALED

    def mend(self, n: int) -> None:
        """After the post: make the chain whole again."""
        last = n - 1
        self._next[last] = self._links[last]
        self._flags[last] = self._marks[last]

    def is_signaled(self, row: int, n: int) -> bool:
        """Whether a row of a run of `n` asks for a completion."""
        return row == n - 1 or bool(self._marks[row])


class ReadRing(RunRing):
    """The same for rows that are read."""

    kind = int(Kind.READ)
    opcode = _READ


class LooseRing(_Ring):
    """Rows that are posted one by one, each asking for a completion."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._flags[:] = _SIGNALED
        self.ptrs = [self.ptr + k * _WR_BYTES for k in range(n)]
        self._wr_bytes = self._wr.view(np.uint8).data
        self._sge_bytes = self._sge.view(np.uint8).data
        self._keys: tuple[object, ...] = ()
        self._lengths: tuple[object, ...] = ()
        self._sge_ptrs = [self._sge_ptr + k * _SGE_BYTES for k in range(n)]

    def fill(self, batch: WriteBatch, start: int, n: int, wr_id: int) -> None:
        """Write rows start.. of a batch into the first `n` requests; ids count up from `wr_id`."""
        self._fill_addresses(batch, start, n)
        rkey, nbytes, imm = batch.rkey, batch.nbytes, batch.imm
        # Compared as bytes, which costs less than writing them again: scatters to the same peers
        # differ in their addresses, and seldom in more.
        keys = (
            n,
            batch.lkey,
            _frozen(rkey, start, n),
            imm if imm is None else _frozen(imm, start, n),
        )
        if keys != self._keys:
            imm = imm if imm is None else part(imm, start, start + n)
            self._fill_keys(batch.lkey, part(rkey, start, start + n), imm, n)
            self._keys = keys
        lengths = (n, _frozen(nbytes, start, n))
        if lengths != self._lengths:
            self._fill_lengths(nbytes, start, n)
            self._lengths = lengths
        np.add(self._iota[:n], np.uint64(wr_id), out=self._wr_id[:n])

    def write(self, slot: int, row: Row, wr_id: int, flags: int = _SIGNALED) -> None:
        """Write one row into one request."""
        self._keys = self._lengths = ()
        _, src, lkey, dst, rkey, nbytes, imm = row
        _PACK_WR(
            self._wr_bytes,
            slot * _WR_BYTES,
            wr_id,
            0,
            self._sge_ptrs[slot],
            1 if nbytes else 0,
            _WRITE if imm is None else _WRITE_IMM,
            flags,
            0 if imm is None else htonl(imm),
            dst,
            rkey,
        )
        _PACK_SGE(self._sge_bytes, slot * _SGE_BYTES, src, nbytes, lkey)

    def write_nothing(self, wr_id: int) -> int:
        """Make request 0 a row without bytes or immediate; return its pointer."""
        self.write(0, _NOTHING, wr_id)
        return self.ptr


class FanRing(_Ring):
    """Rows that are posted one by one, row k always to the same peer.

    Args:
        n: rows.
        limits: what a row must keep to; asked where keys or lengths are other than last time.
    """

    def __init__(self, n: int, limits: Limits) -> None:
        super().__init__(n)
        self.refs = [ref(self.ptr + k * _WR_BYTES) for k in range(n)]
        self._flags[:] = _SIGNALED
        self._wr_id[:] = self._iota + np.uint64(tag(LOOSE))
        self._number = self._wr.view(_NUMBERED)["number"]
        self._limits = limits
        self._keys: tuple[object, ...] = ()
        self._lengths: int | bytes = b""
        self._usual = False  # whether every request has its scatter entry

    def fill(self, batch: WriteBatch, start: int, number: int) -> bool:
        """Write rows start.. of a batch, as set `number`; False = one of them is impossible."""
        n = self.n
        src, dst, nbytes, rkey, imm = batch.src, batch.dst, batch.nbytes, batch.rkey, batch.imm
        if n < batch.n:
            stop = start + n
            src, dst = part(src, start, stop), part(dst, start, stop)
            nbytes, rkey = part(nbytes, start, stop), part(rkey, start, stop)
            imm = imm if imm is None else part(imm, start, stop)
        # Compared as bytes, which costs less than looking at them, or writing them again.
        lengths = nbytes if isinstance(nbytes, int) else nbytes.tobytes()
        keys = (
            batch.lkey,
            rkey if isinstance(rkey, int) else rkey.tobytes(),
            imm if imm is None or isinstance(imm, int) else imm.tobytes(),
        )
        if lengths != self._lengths:
            if not self._fill_new_lengths(nbytes):
                return False
            self._lengths = lengths
        if keys != self._keys:
            if not self._limits.keys_fit(rkey):
                return False
            self._fill_keys(batch.lkey, rkey, imm, n)
            self._keys = keys
        self._addr[:] = src
        self._remote[:] = dst
        self._number.fill(number)
        return True

    def _fill_new_lengths(self, nbytes: Column) -> bool:
        if isinstance(nbytes, int) or not self._limits.are_usual(nbytes):
            self._usual = False
            if not self._limits.lengths_fit(nbytes):
                return False
            self._fill_lengths(nbytes, 0, self.n)
            return True
        if not self._usual:
            self._num_sge[:] = 1
            self._usual = True
        self._length[:] = nbytes
        return True


_NOTHING: Final = Row(0, 0, 0, 0, 0, 0, None)


def _frozen(column: Column, start: int, n: int) -> int | bytes:
    """A column's value, or its values as bytes."""
    if isinstance(column, int):
        return column
    return column.tobytes() if n == len(column) else column[start : start + n].tobytes()


def _plain(batch: Batch) -> tuple[int | None, ...] | None:
    """What is one value for all rows; None where any of it is a column."""
    rkey, nbytes, imm = batch.rkey, batch.nbytes, batch.imm
    if isinstance(rkey, int) and isinstance(nbytes, int) and (imm is None or isinstance(imm, int)):
        return batch.lkey, rkey, nbytes, imm
    return None
