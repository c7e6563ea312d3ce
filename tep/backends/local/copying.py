"""Rows of bytes between this process and another: through the kernel, or by a mapping.

Through the kernel: process_vm_writev or process_vm_readv, up to 1,024 rows a call, the
interpreter's lock free meanwhile. By a mapping of the peer's alloc_shared() memory: plain copies,
which need no permission and are faster for pages of some KiB: for writes, through the whole engine,
5.5 against 4.3 GB/s at 4 KiB, but 8.7 against 11.2 at 64 KiB and 9.6 against 14.8 for 256 MiB in
one row (measured; huge pages back ordinary memory here and not memfds, into which the kernel's way
is slower still: 7.8). Keys, ranges and order are checked by the caller.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import Column
from tep.backends.columns import spread
from tep.backends.hostcopy import HostRegion, Offsets, copy_rows
from tep.backends.local.libc import IOV_MAX, errno_of, read_remote, row_caller, write_remote

__all__ = [
    "ROWS_MAX",
    "Failures",
    "Mover",
    "ReadMover",
    "Target",
    "at_row",
    "can_reach",
    "cut",
    "extent",
    "inside",
    "rows_within",
]

Failures = list[tuple[int, int]]
"""(row, errno) of the rows that did not arrive; after a row with ESRCH or EPERM none did."""

ROWS_MAX: Final = IOV_MAX - 1
"""Rows that one call moves; the first entry is the witness's, see `memory.Witness`."""

_FATAL: Final = frozenset({errno.ESRCH, errno.EPERM, errno.ENOSYS})
_memmove: Final = ctypes.memmove
_Rows = tuple[HostRegion, Offsets]


class Target:
    """A peer's region as it is written to, or read, from here.

    Attributes:
        key: as in the port's table.
        word: where in the port's words the key stands while it holds.
        base: address of the first byte, in the peer.
        nbytes: length.
        mapped: the same bytes mapped here, or None.
        shift: what makes an address of the peer's one of ours, if mapped.
        witness: address of our byte in the peer's witness, see `memory.Witness`.
    """

    __slots__ = ("base", "key", "mapped", "nbytes", "shift", "witness", "word")

    def __init__(
        self,
        key: int,
        word: int,
        base: int,
        nbytes: int,
        mapped: HostRegion | None,
        witness: int,
    ) -> None:
        self.key = key
        self.word = word
        self.base = base
        self.nbytes = nbytes
        self.mapped = mapped
        self.witness = witness
        self.shift = 0 if mapped is None else mapped.origin - base


class Mover:
    """The call's arguments, filled anew for each; one for each NIC, used by one thread.

    The entry before the first row is a byte for the witness: a call reaches the peer, or nobody.

    Attributes:
        name: of the kernel's call, for texts.
    """

    name = "process_vm_writev"
    _many: Callable[..., int] = staticmethod(write_remote)

    def __init__(self) -> None:
        self._here = np.zeros((IOV_MAX, 2), np.uint64)  # struct iovec { void *; size_t; }[]
        self._there = np.zeros((IOV_MAX, 2), np.uint64)
        self._here_at: int = self._here.ctypes.data
        self._there_at: int = self._there.ctypes.data
        self._here_words = memoryview(self._here.data).cast("B").cast("Q")
        self._there_words = memoryview(self._there.data).cast("B").cast("Q")
        self._byte = ctypes.create_string_buffer(1)
        self._byte_at = ctypes.addressof(self._byte)
        self._row = memoryview(bytearray(64)).cast("Q")  # the same for one row: here, then there
        self._row[0], self._row[1], self._row[5] = self._byte_at, 1, 1
        row_at = np.frombuffer(self._row, np.uint8).ctypes.data
        self._one = row_caller(self.name, row_at, row_at + 32)

    def move_row(self, pid: int, target: Target, src: int, dst: int, nbytes: int) -> int:
        """Copy one row; return 0, or errno."""
        if target.mapped is not None:
            _memmove(dst + target.shift, src, nbytes)
            return 0
        row = self._row
        row[4], row[2], row[6] = target.witness, src, dst
        row[3] = row[7] = nbytes
        moved = self._one(pid)
        if moved == nbytes + 1:
            return 0
        return _errno_of_call() if moved < 0 else errno.EFAULT

    def move_rows(
        self, pid: int, target: Target, source: HostRegion, src: Column, dst: Column, nbytes: Column
    ) -> Failures:
        """Copy rows between two regions; at least one column is an array, at most ROWS_MAX long."""
        n = next(len(column) for column in (src, dst, nbytes) if not isinstance(column, int))
        if target.mapped is None:
            return self._move(pid, target.witness, src, dst, nbytes, n)
        if isinstance(nbytes, int):
            here, there = _offsets(src, source.origin), _offsets(dst, target.base)
            self._copy_rows((source, here), (target.mapped, there), nbytes, n)
        else:
            for row in zip(spread(src, n), spread(dst, n), nbytes.tolist()):
                self.move_row(pid, target, *row)
        return []

    def _copy_rows(self, here: _Rows, there: _Rows, nbytes: int, n: int) -> None:
        copy_rows(*here, *there, nbytes, n)

    def _move(
        self, pid: int, witness: int, src: Column, dst: Column, nbytes: Column, n: int
    ) -> Failures:
        here, there = self._here[1 : n + 1], self._there[1 : n + 1]
        here[:, 0] = src
        there[:, 0] = dst
        here[:, 1] = nbytes
        there[:, 1] = nbytes
        total = nbytes * n if isinstance(nbytes, int) else int(nbytes.sum())
        if not total:
            return []
        moved = self._call(pid, witness, 0, n)
        return [] if moved == total else self._resume(pid, witness, n, moved)

    def _call(self, pid: int, witness: int, at: int, n: int) -> int:
        """Move rows `at` to n; return how many bytes of rows have moved, or -errno."""
        here, there, k = self._here_words, self._there_words, 2 * at
        here[k], there[k] = self._byte_at, witness  # over the row before, which is done
        here[k + 1] = there[k + 1] = 1
        skip, rows = 16 * at, n - at + 1
        moved = self._many(pid, self._here_at + skip, rows, self._there_at + skip, rows, 0)
        return moved - 1 if moved > 0 else -_errno_of_call()

    def _resume(self, pid: int, witness: int, n: int, moved: int) -> Failures:
        """After a call that stopped early: find the row that failed, and go on behind it."""
        sizes = self._here[1 : n + 1, 1].astype(np.int64)
        failures: Failures = []
        at = 0
        while at < n:
            if -moved in _FATAL:
                return failures + [(row, -moved) for row in range(at, n)]
            done = int(np.searchsorted(np.cumsum(sizes[at:]), moved, "right")) if moved > 0 else 0
            at += done
            if at < n and not done:  # the first row did not come, or came in part
                failures.append((at, errno.EFAULT if moved >= 0 else -moved))
                at += 1
            if at < n:
                moved = self._call(pid, witness, at, n)
        return failures


class ReadMover(Mover):
    """The same in the other direction: `src` here is written, and `dst` there is read."""

    name = "process_vm_readv"
    _many: Callable[..., int] = staticmethod(read_remote)

    def move_row(self, pid: int, target: Target, src: int, dst: int, nbytes: int) -> int:
        if target.mapped is None:
            return super().move_row(pid, target, src, dst, nbytes)
        _memmove(src, dst + target.shift, nbytes)
        return 0

    def _copy_rows(self, here: _Rows, there: _Rows, nbytes: int, n: int) -> None:
        copy_rows(*there, *here, nbytes, n)


def _errno_of_call() -> int:
    """Why nothing has moved, not even the witness's byte: EFAULT = it is not the peer's process."""
    code = errno_of()
    return errno.ESRCH if code == errno.EFAULT else code


def _offsets(column: Column, origin: int) -> int | npt.NDArray[np.intp]:
    if isinstance(column, int):
        return column - origin
    return (column - np.uint64(origin)).astype(np.intp)


def extent(nbytes: Column, n: int) -> tuple[int, int]:
    """The longest row, and all of them together."""
    if isinstance(nbytes, int):
        return nbytes, nbytes * n
    return int(nbytes.max()), int(nbytes.sum())


def inside(at: Column, nbytes: Column, origin: int, region_bytes: int) -> bool:
    """Whether every row lies in a region. Compared as Python ints, which do not wrap."""
    if isinstance(nbytes, int):
        low = at if isinstance(at, int) else int(at.min())
        high = at if isinstance(at, int) else int(at.max())
        return origin <= low and high + nbytes <= origin + region_bytes
    if isinstance(at, int):
        return origin <= at and at + int(nbytes.max()) <= origin + region_bytes
    if not (origin <= int(at.min()) and int(at.max()) <= origin + region_bytes):
        return False
    return int((at + nbytes).max()) <= origin + region_bytes


def rows_within(nbytes: Column, at: int, n: int, budget: int) -> int:
    """How many of n rows from row `at` on have no more bytes than the budget; 1 at the least."""
    if isinstance(nbytes, int):
        return max(1, min(n, budget // nbytes)) if nbytes else n
    sizes = np.cumsum(nbytes[at : at + n])
    return max(1, int(np.searchsorted(sizes, budget, "right")))


def at_row(column: Column, row: int) -> int:
    """A row's value."""
    return column if isinstance(column, int) else int(column[row])


def cut(column: Column, part: slice) -> Column:
    """The values of some rows."""
    return column if isinstance(column, int) else column[part]


def can_reach(pid: int, address: int, expected: bytes) -> int:
    """Try to read bytes of another process; 0, or why it cannot be reached, as an errno.

    Bytes other than expected mean that `pid` names another process than it should.
    """
    found = ctypes.create_string_buffer(len(expected))
    here = np.array([[ctypes.addressof(found), len(expected)]], np.uint64)
    there = np.array([[address, len(expected)]], np.uint64)
    moved = read_remote(pid, here.ctypes.data, 1, there.ctypes.data, 1, 0)
    if moved < 0:
        return errno_of()
    return 0 if found.raw == expected else errno.ESRCH


def open_memory(pid: int, address: int, expected: bytes) -> int:
    """Open another process's memory, to write short rows to by pwrite(); -1: it cannot be done.

    The descriptor stays with that memory, whatever process gets the id later or takes its place by
    exec. `expected`: as of can_reach().
    """
    try:
        found = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        if os.pread(found, len(expected), address) == expected:
            return found
    except (OSError, OverflowError):
        pass
    os.close(found)
    return -1
