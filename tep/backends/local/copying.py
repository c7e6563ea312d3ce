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

from tep.backends.base import Column, Kind
from tep.backends.common import HostRegion, copy_rows, offsets, total
from tep.backends.ffi.libc import libc

__all__ = ["ROWS_MAX", "Flow", "Target", "can_reach", "open_memory"]

_memmove: Final = ctypes.memmove

IOV_MAX: Final = 1024
"""Entries that one call takes: UIO_MAXIOV of <linux/uio.h>, quoted."""

ROWS_MAX: Final = IOV_MAX - 1
"""Rows that one call moves; the first entry is the witness's, see `memory.Witness`."""

_COUNTS: Final = list(map(ctypes.c_ulong.from_param, range(IOV_MAX + 1)))


def remote_call(name: str, here: int, there: int) -> Callable[[int, int], int]:
    """Make the kernel's call of this name, with iovecs at two addresses.

    It takes a process and the number of entries, and returns the bytes moved, or -1 and errno. The
    interpreter's lock is free meanwhile. argtypes would be applied anew in each call, 0.6 us of 2.2
    (measured). Here each argument brings its type along; a plain int is a C int, which pid_t is.
    """
    # ssize_t process_vm_writev(pid_t pid,
    #     const struct iovec *local_iov, unsigned long liovcnt,
    #     const struct iovec *remote_iov, unsigned long riovcnt,
    #     unsigned long flags);                          <sys/uio.h>, glibc 2.15; readv alike
    function = libc()[name]
    function.restype = ctypes.c_ssize_t
    local, remote = ctypes.c_void_p.from_param(here), ctypes.c_void_p.from_param(there)
    counts, flags = _COUNTS, _COUNTS[0]

    def call(pid: int, n: int) -> int:
        found: int = function(pid, local, counts[n], remote, counts[n], flags)
        return found

    return call


_THERE: Final = 2 * IOV_MAX  # words from the entries here to those there


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


class Flow:
    """The rows of one NIC that go one way, writes or reads, and the kernel's call that moves them.

    The call's entries are filled anew for each. The one before the first row is a byte for the
    witness: a call reaches the peer, or nobody.

    Attributes:
        kind: of their completions, a `Kind`.
        reads: whether they are reads.
        regions: memory here by lkey, what writes are from, or what reads are to; the owner's.
        open: rows taken and not handed out; the owner subtracts.
        name: of the kernel's call, for texts.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = int(kind)
        self.reads = kind is Kind.READ
        self.regions: dict[int, HostRegion] = {}
        self.open = 0
        self.name = "process_vm_readv" if self.reads else "process_vm_writev"
        self._byte = ctypes.create_string_buffer(1)
        entries = np.zeros((2, IOV_MAX, 2), np.uint64)  # struct iovec { void *; size_t; }[], twice
        self._here, self._there = entries
        self._here[0] = ctypes.addressof(self._byte), 1
        self._there[0, 1] = 1
        self._words = memoryview(entries.reshape(-1))  # type: ignore[arg-type]  # a buffer
        self._call = remote_call(self.name, self._here.ctypes.data, self._there.ctypes.data)

    def move_row(self, pid: int, target: Target, here: int, there: int, nbytes: int) -> int:
        """Copy one row; return 0, or errno."""
        if target.mapped is not None:
            there += target.mapped.origin - target.base
            source, sink = (there, here) if self.reads else (here, there)
            _memmove(sink, source, nbytes)
            return 0
        words = self._words
        words[_THERE], words[2], words[_THERE + 2] = target.witness, here, there
        words[3] = words[_THERE + 3] = nbytes
        moved = self._call(pid, 2)
        if moved == nbytes + 1:
            return 0
        if moved >= 0:
            return errno.EFAULT
        code = ctypes.get_errno()
        return errno.ESRCH if code == errno.EFAULT else code  # it is not the peer's process

    def move_rows(
        self,
        pid: int,
        target: Target,
        region: HostRegion,
        here: Column,
        there: Column,
        nbytes: Column,
        n: int,
    ) -> bool:
        """Copy n rows, at most ROWS_MAX, between two regions; False = perhaps only some of them."""
        if target.mapped is not None:
            ours = region, offsets(here, region.origin)
            theirs = target.mapped, offsets(there, target.base)
            copy_rows(*(theirs + ours if self.reads else ours + theirs), nbytes, n)
            return True
        local, remote = self._here[1 : n + 1], self._there[1 : n + 1]
        local[:, 0], remote[:, 0] = here, there
        local[:, 1] = remote[:, 1] = nbytes
        self._there[0, 0] = target.witness
        return self._call(pid, n + 1) == total(nbytes, n) + 1


def can_reach(pid: int, address: int, expected: bytes) -> int:
    """Try to read bytes of another process; 0, or why it cannot be reached, as an errno.

    Bytes other than expected mean that `pid` names another process than it should.
    """
    found = ctypes.create_string_buffer(len(expected))
    here = np.array([ctypes.addressof(found), len(expected)], np.uint64)
    there = np.array([address, len(expected)], np.uint64)
    if remote_call("process_vm_readv", here.ctypes.data, there.ctypes.data)(pid, 1) < 0:
        return ctypes.get_errno()
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
