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
from dataclasses import dataclass
from typing import Final

import numpy as np

from tep.backends.base import Column
from tep.backends.common import HostRegion, Offsets, copy_rows, offsets
from tep.backends.ffi.libc import libc

__all__ = [
    "ROWS_MAX", "Failures", "Mover", "ReadMover", "Target", "can_reach",
    "extent", "open_memory", "rows_within",
]  # fmt: skip

IOV_MAX: Final = 1024
"""Entries that one call takes: UIO_MAXIOV of <linux/uio.h>, quoted."""


def _absent(*_: int) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


def _load(name: str) -> Callable[..., int]:
    try:
        function = getattr(libc(), name)
    except (AttributeError, OSError):  # another libc or system: news at use, not at import
        return _absent
    # ssize_t process_vm_writev(pid_t pid,
    #     const struct iovec *local_iov, unsigned long liovcnt,
    #     const struct iovec *remote_iov, unsigned long riovcnt,
    #     unsigned long flags);                          <sys/uio.h>, glibc 2.15; readv alike
    number, pointer = ctypes.c_ulong, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
    function.restype = ctypes.c_ssize_t
    return function  # type: ignore[no-any-return]  # typed by the two lines above


# Each returns the bytes moved, or -1 and errno. The interpreter's lock is free meanwhile.
write_remote: Final = _load("process_vm_writev")
read_remote: Final = _load("process_vm_readv")
errno_of: Final = ctypes.get_errno


def row_caller(name: str, here: int, there: int) -> Callable[[int], int]:
    """Make a call by this name for a witness and one row: of a pid, with iovecs at these addresses.

    The argtypes of a function are applied anew in each call, 0.6 us of 2.2 (measured).
    Here each argument brings its type along, made once; a plain int is a C int, which pid_t is.
    """
    try:
        function = libc()[name]
    except (AttributeError, OSError):
        return _absent
    function.restype = ctypes.c_ssize_t
    number, pointer = ctypes.c_ulong.from_param, ctypes.c_void_p.from_param
    typed = pointer(here), number(2), pointer(there), number(2), number(0)
    return lambda pid: function(pid, *typed)


Failures = list[tuple[int, int]]
"""(row, errno) of the rows that did not arrive."""

ROWS_MAX: Final = IOV_MAX - 1
"""Rows that one call moves; the first entry is the witness's, see `memory.Witness`."""

_memmove: Final = ctypes.memmove
_Rows = tuple[HostRegion, Offsets]


@dataclass(slots=True, eq=False)
class Target:
    """A peer's region as it is written to, or read, from here.

    Attributes:
        key: as in the port's table.
        word: where in the port's words the key stands while it holds.
        base: address of the first byte, in the peer.
        nbytes: length.
        mapped: the same bytes mapped here, or None.
        witness: address of our byte in the peer's witness, see `memory.Witness`.
    """

    key: int
    word: int
    base: int
    nbytes: int
    mapped: HostRegion | None
    witness: int

    @property
    def shift(self) -> int:
        """The number that makes an address of the peer's one of ours, where it is mapped."""
        assert self.mapped is not None
        return self.mapped.origin - self.base


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
        self._byte = ctypes.create_string_buffer(1)
        self._here[0] = ctypes.addressof(self._byte), 1
        self._there[0, 1] = 1
        self._row = memoryview(bytearray(64)).cast("Q")  # the same for one row: here, then there
        self._row[0], self._row[1], self._row[5] = ctypes.addressof(self._byte), 1, 1
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
            return self._move(pid, target, src, dst, nbytes, n)
        here, there = offsets(src, source.origin), offsets(dst, target.base)
        self._copy_rows((source, here), (target.mapped, there), nbytes, n)
        return []

    def _copy_rows(self, here: _Rows, there: _Rows, nbytes: Column, n: int) -> None:
        copy_rows(*here, *there, nbytes, n)

    def _move(
        self, pid: int, target: Target, src: Column, dst: Column, nbytes: Column, n: int
    ) -> Failures:
        here, there = self._here[1 : n + 1], self._there[1 : n + 1]
        here[:, 0] = src
        there[:, 0] = dst
        here[:, 1] = nbytes
        there[:, 1] = nbytes
        total = nbytes * n if isinstance(nbytes, int) else int(nbytes.sum())
        if not total:
            return []
        self._there[0, 0] = target.witness
        moved = self._many(pid, self._here_at, n + 1, self._there_at, n + 1, 0)
        if moved == total + 1:
            return []
        # It stopped early: go row by row. A row that was moved already is moved once more.
        rows = enumerate(zip(here[:, 0].tolist(), there[:, 0].tolist(), here[:, 1].tolist()))
        return [(k, code) for k, row in rows if (code := self.move_row(pid, target, *row))]


class ReadMover(Mover):
    """The same in the other direction: `src` here is written, and `dst` there is read."""

    name = "process_vm_readv"
    _many: Callable[..., int] = staticmethod(read_remote)

    def move_row(self, pid: int, target: Target, src: int, dst: int, nbytes: int) -> int:
        if target.mapped is None:
            return super().move_row(pid, target, src, dst, nbytes)
        _memmove(src, dst + target.shift, nbytes)
        return 0

    def _copy_rows(self, here: _Rows, there: _Rows, nbytes: Column, n: int) -> None:
        copy_rows(*there, *here, nbytes, n)


def _errno_of_call() -> int:
    """Why nothing has moved, not even the witness's byte: EFAULT = it is not the peer's process."""
    code = errno_of()
    return errno.ESRCH if code == errno.EFAULT else code


def extent(nbytes: Column, n: int) -> tuple[int, int]:
    """The longest row, and all of them together."""
    if isinstance(nbytes, int):
        return nbytes, nbytes * n
    return int(nbytes.max()), int(nbytes.sum())


def rows_within(nbytes: Column, at: int, n: int, budget: int) -> int:
    """Count the rows, of n from row `at` on, that fit into a budget of bytes; 1 at the least."""
    if isinstance(nbytes, int):
        return max(1, min(n, budget // nbytes)) if nbytes else n
    sizes = np.cumsum(nbytes[at : at + n])
    return max(1, int(np.searchsorted(sizes, budget, "right")))


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
