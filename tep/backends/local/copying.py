"""Rows of bytes between this process and another: through the kernel, or by a mapping.

Through the kernel: process_vm_writev or process_vm_readv, up to 1,024 rows a call, the
interpreter's lock free meanwhile. By a mapping of the peer's alloc_shared() memory: plain copies,
which need no permission and are faster for pages of some KiB: for writes, through the whole engine,
5.5 against 4.3 GB/s at 4 KiB, but 8.7 against 11.2 at 64 KiB and 9.6 against 14.8 for 256 MiB in
one row (measured; huge pages back ordinary memory here and not memfds, into which the kernel's way
is slower still: 7.8). Keys, ranges and order are checked by the caller.

The kernel's copies and memmove run without the interpreter's lock, so that a second thread moves
its share at the same time (`copy_threads`), where the memory's bandwidth is more than one core
uses. What is handed out is cut into one share a thread; a call returns when all shares are done.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tep.backends.base import Column
from tep.backends.columns import HostRegion, Offsets, copy_rows, part, spread
from tep.backends.ffi.libc import libc

__all__ = [
    "ROWS_MAX", "Crew", "Failures", "Mover", "ReadMover", "SharedMover", "Target", "can_reach",
    "extent", "inside", "open_memory", "rows_within",
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


_SHARE_BYTES_MIN: Final = 512 * 1024
"""Less than this is not worth handing to another thread, which takes some 40 us (measured)."""

_PAGE: Final = 4096

_MAPPED_ROW_MIN: Final = 256 * 1024
"""Shorter rows into a mapping are a call each, and two threads would take turns at the lock."""

R = TypeVar("R")


class _Helper(threading.Thread):
    """One thread of a crew; it ends with None in its inbox."""

    def __init__(self) -> None:
        super().__init__(name="tep-copier", daemon=True)
        self.inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.outbox: SimpleQueue[object] = SimpleQueue()

    def run(self) -> None:
        while (share := self.inbox.get()) is not None:
            try:
                found = share()
            except BaseException as error:  # noqa: BLE001  # raised where the share was asked for
                found = error
            self.outbox.put(found)
            share = found = None  # hold nobody's memory while waiting


class Crew:
    """The threads that copy for one NIC.

    Args:
        threads: how many, with the thread that asks; the others start now.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._helpers = [_Helper() for _ in range(threads - 1)]
        for helper in self._helpers:
            helper.start()

    def run(self, shares: list[Callable[[], R]]) -> list[R]:
        """Carry out at most one share a thread; return what each returned, in order."""
        assert 1 <= len(shares) <= self.threads, (len(shares), self.threads)
        busy = self._helpers[: len(shares) - 1]
        for helper, share in zip(busy, shares[1:], strict=True):
            helper.inbox.put(share)
        try:
            mine = shares[0]()
        finally:  # nobody may copy any more when this returns
            others = [helper.outbox.get() for helper in busy]
        for found in others:
            if isinstance(found, BaseException):
                raise found
        return [mine, *cast("list[R]", others)]

    def close(self) -> None:
        """Let the threads end; none of them copies."""
        for helper in self._helpers:
            helper.inbox.put(None)


class SharedMover:
    """A Mover whose long calls are shared by a crew; one for each NIC and direction.

    Args:
        crew: who copies.
        make: makes a mover; each thread has one of its own.
    """

    def __init__(self, crew: Crew, make: Callable[[], Mover]) -> None:
        self._crew = crew
        self._movers = [make() for _ in range(crew.threads)]
        self.name = self._movers[0].name

    def move_row(self, pid: int, target: Target, src: int, dst: int, nbytes: int) -> int:
        """Copy one row; return 0, or errno."""
        n = min(self._crew.threads, nbytes // _SHARE_BYTES_MIN)
        if n <= 1:
            return self._movers[0].move_row(pid, target, src, dst, nbytes)
        size = -(-nbytes // n // _PAGE) * _PAGE
        shares: list[Callable[[], int]] = []
        for mover, at in zip(self._movers, range(0, nbytes, size), strict=False):
            size_here = min(size, nbytes - at)
            shares.append(partial(mover.move_row, pid, target, src + at, dst + at, size_here))
        codes = self._crew.run(shares)
        return next((code for code in codes if code), 0)

    def move_rows(
        self, pid: int, target: Target, source: HostRegion, src: Column, dst: Column, nbytes: Column
    ) -> Failures:
        """Copy rows between two regions, as a Mover does."""
        n = next(len(column) for column in (src, dst, nbytes) if not isinstance(column, int))
        longest, total = extent(nbytes, n)
        parts = min(self._crew.threads, total // _SHARE_BYTES_MIN, n)
        if parts <= 1 or (target.mapped is not None and longest < _MAPPED_ROW_MIN):
            return self._movers[0].move_rows(pid, target, source, src, dst, nbytes)
        shares: list[Callable[[], Failures]] = []
        starts = [n * k // parts for k in range(parts + 1)]
        for mover, start, stop in zip(self._movers, starts, starts[1:], strict=False):
            columns = (part(column, start, stop) for column in (src, dst, nbytes))
            shares.append(partial(mover.move_rows, pid, target, source, *columns))
        failures: Failures = []
        for start, found in zip(starts, self._crew.run(shares), strict=False):
            failures += [(start + row, code) for row, code in found]
        return failures
