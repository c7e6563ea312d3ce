"""Rows of bytes from this process into another: through the kernel, or into a mapping.

Through the kernel: process_vm_writev, up to 1,024 rows a call, the interpreter's lock free
meanwhile. Into a mapping of the peer's alloc_shared() memory: plain copies, which need no
permission and are faster for pages of some KiB: through the whole engine 5.5 against 4.3 GB/s at
4 KiB, but 8.7 against 11.2 at 64 KiB and 9.6 against 14.8 for 256 MiB in one row (measured; huge
pages back ordinary memory here and not memfds, into which the kernel's way is slower still: 7.8).
Keys, ranges and order are checked by the caller.
"""

from __future__ import annotations

import ctypes
import errno
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import Column
from tep.backends.hostcopy import HostRegion, copy_rows
from tep.backends.local.libc import IOV_MAX, errno_of, read_remote, row_writer, write_remote

__all__ = ["Failures", "Mover", "Target", "can_reach"]

Failures = list[tuple[int, int]]
"""(row, errno) of the rows that did not arrive; after a row with ESRCH or EPERM none did."""

_FATAL: Final = frozenset({errno.ESRCH, errno.EPERM, errno.ENOSYS})
_memmove: Final = ctypes.memmove


class Target:
    """A peer's region as it is written to from here.

    Attributes:
        key: as in the port's table.
        word: where in the port's words the key stands while it holds.
        base: address of the first byte, in the peer.
        nbytes: length.
        mapped: the same bytes mapped here, or None.
        shift: what makes an address of the peer's one of ours, if mapped.
    """

    __slots__ = ("base", "key", "mapped", "nbytes", "shift", "word")

    def __init__(
        self, key: int, word: int, base: int, nbytes: int, mapped: HostRegion | None
    ) -> None:
        self.key = key
        self.word = word
        self.base = base
        self.nbytes = nbytes
        self.mapped = mapped
        self.shift = 0 if mapped is None else mapped.origin - base


class Mover:
    """The call's arguments, filled anew for each; one for each NIC, used by one thread."""

    def __init__(self) -> None:
        self._here = np.zeros((IOV_MAX, 2), np.uint64)  # struct iovec { void *; size_t; }[]
        self._there = np.zeros((IOV_MAX, 2), np.uint64)
        self._here_at: int = self._here.ctypes.data
        self._there_at: int = self._there.ctypes.data
        self._here_words = memoryview(self._here.data).cast("B").cast("Q")
        self._there_words = memoryview(self._there.data).cast("B").cast("Q")
        self._write_row = row_writer(self._here_at, self._there_at)

    def move_row(self, pid: int, target: Target, src: int, dst: int, nbytes: int) -> int:
        """Copy one row; return 0, or errno."""
        if target.mapped is not None:
            _memmove(dst + target.shift, src, nbytes)
            return 0
        here, there = self._here_words, self._there_words
        here[0], there[0] = src, dst
        here[1] = there[1] = nbytes
        moved = self._write_row(pid)
        if moved == nbytes:
            return 0
        return errno_of() if moved < 0 else errno.EFAULT

    def move_rows(
        self, pid: int, target: Target, source: HostRegion, src: Column, dst: Column, nbytes: Column
    ) -> Failures:
        """Copy rows between two regions; at least one column is an array, at most IOV_MAX long."""
        n = next(len(column) for column in (src, dst, nbytes) if not isinstance(column, int))
        if target.mapped is None:
            return self._write(pid, src, dst, nbytes, n)
        if isinstance(nbytes, int):
            copy_rows(
                source,
                _offsets(src, source.origin),
                target.mapped,
                _offsets(dst, target.base),
                nbytes,
                n,
            )
        else:
            for here, there, size in zip(_ints(src, n), _ints(dst, n), nbytes.tolist()):
                _memmove(there + target.shift, here, size)
        return []

    def _write(self, pid: int, src: Column, dst: Column, nbytes: Column, n: int) -> Failures:
        here, there = self._here, self._there
        here[:n, 0] = src
        there[:n, 0] = dst
        here[:n, 1] = nbytes
        there[:n, 1] = nbytes
        total = nbytes * n if isinstance(nbytes, int) else int(nbytes.sum())
        moved = write_remote(pid, self._here_at, n, self._there_at, n, 0) if total else 0
        return [] if moved == total else self._resume(pid, n, moved)

    def _resume(self, pid: int, n: int, moved: int) -> Failures:
        """After a call that stopped early: find the row that failed, and go on behind it."""
        code = errno_of() if moved < 0 else 0
        sizes = self._here[:n, 1].astype(np.int64)
        failures: Failures = []
        at = 0
        while at < n:
            if moved < 0:
                failures.append((at, code))
                if code in _FATAL:
                    failures += [(row, code) for row in range(at + 1, n)]
                    break
                at += 1
            else:
                done = int(np.searchsorted(np.cumsum(sizes[at:]), moved, "right"))
                at += done
                if at < n and not done:  # the first row came in part
                    failures.append((at, errno.EFAULT))
                    at += 1
            if at < n:
                rest, skip = n - at, 16 * at
                moved = write_remote(
                    pid, self._here_at + skip, rest, self._there_at + skip, rest, 0
                )
                code = errno_of() if moved < 0 else 0
        return failures


def _offsets(column: Column, origin: int) -> int | npt.NDArray[np.intp]:
    if isinstance(column, int):
        return column - origin
    return (column - np.uint64(origin)).astype(np.intp)


def _ints(column: Column, n: int) -> list[int]:
    return [column] * n if isinstance(column, int) else column.tolist()


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
