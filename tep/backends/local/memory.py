"""Memory that processes share: memfds with seals, their mappings, and the arenas of alloc_shared();
and the witness, by which the kernel's way into a process is kept to that process.

Rule 1: a peer's memfd is mapped only if it can neither shrink nor be smaller than it should, since
a mapping beyond a file's end kills the process that touches it. Rule 2: words are u64, aligned, and
written by one side only; what orders them is in `rings`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import weakref
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.local.libc import map_page, unmap_page
from tep.base.checks import check_int

__all__ = ["Arena", "SharedMap", "Witness", "alloc_shared", "arena_of", "new_memfd"]

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_POPULATE_MAX: Final = 1 << 30  # larger ones are faulted in as they are touched
_PAGE: Final = mmap.PAGESIZE
_LINE: Final = 64
_MADV_HUGEPAGE: Final = 14  # <asm-generic/mman-common.h>
_MADV_POPULATE_WRITE: Final = 23  # likewise, Linux 5.14


def new_memfd(name: str, nbytes: int) -> int:
    """Make a memfd of `nbytes`, sealed against resizing; the caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


class SharedMap:
    """A memfd, mapped. It keeps the mapping, not the descriptor.

    Attributes:
        address: of the first byte, here.
        nbytes: length.
        words: the same bytes as u64; released by close().

    Raises:
        OSError: the memfd is not sealed, or too small.
    """

    def __init__(self, fd: int, nbytes: int, *, populate: bool = False) -> None:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
        if seals & _SEALS != _SEALS or not 0 < nbytes <= size:
            raise OSError(f"a shared memory of {size} bytes with seals {seals:#x}: too small")
        self.map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        if populate:
            _populate(self.map, nbytes)
        self.nbytes = nbytes
        self.address: int = np.frombuffer(self.map, np.uint8).ctypes.data
        self.words = memoryview(self.map)[: nbytes // 8 * 8].cast("Q")

    def column(self, start: int, count: int) -> npt.NDArray[np.uint64]:
        """Words start .. start + count as an array, for bursts; it keeps the mapping alive."""
        return np.frombuffer(self.map, np.uint64, count, 8 * start)

    def close(self) -> None:
        """Unmap, unless somebody still holds an array over it: then with the last of them."""
        self.words.release()
        with contextlib.suppress(BufferError):
            self.map.close()


class Witness:
    """A page of this process at an address that no other process has mapped.

    process_vm_writev finds its target by process id, which may be another process's by the time of
    the call, and it writes its entries in order and stops at the first that is not mapped. So each
    call begins with one byte for this page: in any other process, in a forked child, or in another
    program after an exec, it fails before a byte of data has moved. It takes 0.4 us (measured).

    Args:
        proof: stands in the page's first bytes.

    Raises:
        OSError: the kernel refuses.
    """

    def __init__(self, proof: bytes) -> None:
        # 46 bits: what a process of x86-64 has; where it is more than there is, the kernel chooses.
        self.address = map_page(int.from_bytes(os.urandom(6), "little") >> 2 & -_PAGE)
        ctypes.memmove(self.address, proof, len(proof))

    def close(self) -> None:
        """Unmap it. Idempotent."""
        if self.address:
            unmap_page(self.address)
            self.address = 0

    @staticmethod
    def byte(address: int, slot: int) -> int:
        """Where the sender in a slot writes: neighbours do not share a line of the cache."""
        return address + _LINE * (1 + slot % (_PAGE // _LINE - 1))


class Arena(mmap.mmap):
    """Memory of alloc_shared(), mapped: arrays over it keep it alive. Made by new_arena().

    Attributes:
        number: unique in this process.
        fd: the memfd, for peers to map; closed with the memory.
        address: of the first byte.
        nbytes: length, whole pages.
    """

    number: int
    fd: int
    address: int
    nbytes: int


def _populate(mapping: mmap.mmap, nbytes: int) -> None:
    """Ask for huge pages, and have the pages mapped now: at its first write each costs 0.5 us."""
    for advice in (_MADV_HUGEPAGE, *(() if nbytes > _POPULATE_MAX else (_MADV_POPULATE_WRITE,))):
        with contextlib.suppress(OSError):  # older kernels, or not for this kind of memory
            mapping.madvise(advice)


def _new_arena(nbytes: int) -> Arena:
    fd = new_memfd("tep-alloc-shared", nbytes)
    try:
        arena = Arena(fd, nbytes, mmap.MAP_SHARED)
    except OSError:
        os.close(fd)
        raise
    weakref.finalize(arena, os.close, fd)
    _populate(arena, nbytes)
    arena.number = next(_NUMBERS)
    arena.fd = fd
    arena.nbytes = nbytes
    arena.address = np.frombuffer(arena, np.uint8).ctypes.data
    return arena


_NUMBERS: Final = itertools.count(1)
_ARENAS: Final[weakref.WeakSet[Arena]] = weakref.WeakSet()


def alloc_shared(nbytes: int) -> npt.NDArray[np.uint8]:
    """Allocate memory that engines of other processes on this host can map: uint8[nbytes], zeros.

    Registered with an engine of the local backend, whole or in part, it is written by plain copies
    into a mapping, which is faster than a system call for small pages and needs no permission to
    touch another process: it is handed to engines of this process's user, and of root. To every
    other backend it is memory like any other. It is freed when the last array over it is gone
    and no engine has it registered. A forked child shares it.

    Args:
        nbytes: length, 1 or more.

    Raises:
        UsageError: not a positive length.
        MemoryError: the kernel refuses.
    """
    nbytes = check_int("alloc_shared: nbytes", nbytes, 1)
    whole = -(-nbytes // _PAGE) * _PAGE
    try:
        arena = _new_arena(whole)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"alloc_shared: {nbytes} bytes: {error}") from error
    _ARENAS.add(arena)
    return np.frombuffer(arena, np.uint8, nbytes)


def arena_of(address: int, nbytes: int) -> Arena | None:
    """The arena that holds a range of addresses, or None for other memory."""
    for arena in list(_ARENAS):
        if arena.address <= address and address + nbytes <= arena.address + arena.nbytes:
            return arena
    return None
