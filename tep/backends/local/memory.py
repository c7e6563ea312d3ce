"""Memory that processes share: memfds with seals, arenas of alloc_shared(), lanes; and the witness.

Rule 0. A peer's memfd is mapped only if it can neither shrink nor be smaller than it should, since
a mapping beyond a file's end kills the process that touches it. Words are u64, aligned, and written
by one side only.

A *lane* goes from one NIC to one other. The sender makes its memory; the receiver's *port* holds
the two tails, so that a receiver looks at all its senders with one read (see `port`).

    word    field     written by  content
    0       magic     sender      MAGIC
    8       copying   sender      1 while bytes may be on their way into the receiver's memory
    16      head      receiver    events taken
    24      mhead     receiver    bytes of messages taken
    32      want      sender      1: ring my bell at the next event or message taken
    40      acked     receiver    messages acknowledged
    64      acks      receiver    u64[64]: Status of message k, at k modulo 64
    512     events    sender      u64[8192]: count << 32 | immediate
    8704    messages  sender      records of 8 + nbytes bytes, padded to 8: u64 nbytes, the bytes;
                                  WRAP instead of a length: the next record is at the start

Order of memory, and how a few lines of Python keep it:

Rule 1. An entry is written before the tail that publishes it, and a tail is read before its entry;
bytes are moved before their event. x86 keeps the order of stores, and the order of loads. Other
processors need a fence at both places: `order()`, which is nothing on x86.

Rule 2. "I sleep" is written before the last look, and a tail before the look at "I sleep": one of
the two sees the other, or a wake-up is lost. No processor orders a store before a later load on its
own, so `fence()` stands between, on both sides. "copying" and the withdrawal of a key meet alike.

Rule 3. One word is one aligned store of 8 bytes: memoryview and numpy copy u64 items whole.

The fence is the one of tep.backends.common: 0.1 us (measured), once a burst. membarrier(2) would be
dearer: it interrupts the other CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import Status
from tep.backends.common import STRONG, order_of
from tep.backends.ffi.libc import libc
from tep.backends.local.channel import why
from tep.base.checks import check_int

__all__ = [
    "ACKS", "COPYING", "EVENTS", "LANE_BYTES", "MESSAGES_BYTES", "MESSAGE_BYTES_MAX", "NONSENSE",
    "Arena", "LaneReader", "LaneWriter", "SharedMap", "Witness", "alloc_shared", "arena_of",
    "new_memfd",
]  # fmt: skip

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_POPULATE_MAX: Final = 1 << 30  # larger ones are faulted in as they are touched
_PAGE: Final = mmap.PAGESIZE
_LINE: Final = 64
_MADV_POPULATE_WRITE: Final = 23  # <asm-generic/mman-common.h>, Linux 5.14


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
        words: the bytes as u64; released by close().

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
    The page begins with `proof`.
    """

    def __init__(self, proof: bytes) -> None:
        # void *mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset);
        # int madvise(void *addr, size_t length, int advice);
        # int munmap(void *addr, size_t length);                             <sys/mman.h>
        lib = libc()
        lib.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        lib.mmap.restype = ctypes.c_void_p
        lib.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        lib.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        # 46 bits: what a process of x86-64 has; where it is more than there is, the kernel chooses.
        wanted = int.from_bytes(os.urandom(6), "little") >> 2 & -_PAGE
        self.address: int = lib.mmap(wanted, _PAGE, access, kind, -1, 0)
        code = ctypes.get_errno()
        if self.address == ctypes.c_void_p(-1).value:
            raise OSError(code, why(code))
        if lib.madvise(self.address, _PAGE, mmap.MADV_DONTFORK):
            code = ctypes.get_errno()
            self.close()
            raise OSError(code, why(code))
        ctypes.memmove(self.address, proof, len(proof))

    def close(self) -> None:
        if self.address:
            libc().munmap(self.address, _PAGE)
            self.address = 0

    @staticmethod
    def byte(address: int, slot: int) -> int:
        """Return the address for the sender in a slot: no two neighbours share a cache line."""
        return address + _LINE * (1 + slot % (_PAGE // _LINE - 1))


class Arena(mmap.mmap):
    """Memory of alloc_shared(), mapped: arrays over it keep it alive.

    Attributes:
        number: unique in this process.
        fd: the memfd, for peers to map; closed with the memory.
        nbytes: length, whole pages.
    """

    number: int
    fd: int
    address: int
    nbytes: int


def _populate(mapping: mmap.mmap, nbytes: int) -> None:
    """Ask for huge pages, and have the pages mapped now: at its first write each costs 0.5 us."""
    advices = [mmap.MADV_HUGEPAGE]
    if nbytes <= _POPULATE_MAX:
        advices.append(_MADV_POPULATE_WRITE)
    for advice in advices:
        with contextlib.suppress(OSError):  # older kernels, or not for this kind of memory
            mapping.madvise(advice)


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
    with contextlib.ExitStack() as undo:
        try:
            fd = new_memfd("tep-alloc-shared", whole)
            undo.callback(os.close, fd)
            arena = Arena(fd, whole, mmap.MAP_SHARED)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"alloc_shared: {nbytes} bytes: {error}") from error
        undo.pop_all()
    weakref.finalize(arena, os.close, fd)
    _populate(arena, whole)
    arena.number, arena.fd, arena.nbytes = next(_NUMBERS), fd, whole
    arena.address = np.frombuffer(arena, np.uint8).ctypes.data
    _ARENAS.add(arena)
    return np.frombuffer(arena, np.uint8, nbytes)


def arena_of(address: int, nbytes: int) -> Arena | None:
    """The arena that holds a range of addresses, or None for other memory."""
    for arena in list(_ARENAS):
        if arena.address <= address and address + nbytes <= arena.address + arena.nbytes:
            return arena
    return None


MAGIC: Final = 0x1A4E_5445_5001
EVENTS: Final = 8192
ACKS: Final = 64
"""Messages of one lane that may be on their way."""

MESSAGE_BYTES_MAX: Final = 1 << 18
MESSAGES_BYTES: Final = 1 << 20
"""Bytes of records that a lane holds."""

COPYING: Final = 8
_HEAD, _MHEAD, _WANT, _ACKED, _ACK0 = 16, 24, 32, 40, 64
_EVENT0: Final = 512
_MESSAGE0: Final = 8 * (_EVENT0 + EVENTS)
LANE_BYTES: Final = _MESSAGE0 + MESSAGES_BYTES
NONSENSE: Final = -1
_WRAP: Final = 2**64 - 1
_LENGTH: Final = struct.Struct("=Q")
_MASK: Final = EVENTS - 1

_NO_EVENTS: Final = np.zeros(0, np.uint64)


def _record(nbytes: int) -> int:
    """Bytes of a message in the ring."""
    return 8 + (nbytes + 7 & ~7)


class LaneWriter:
    """The sender's end of a lane.

    Attributes:
        fd: for the receiver to map; the caller closes it.
        words: the lane's words.
        tail, mtail: what the board of the receiver's port is told.
        head: events that the receiver had taken at the last look.
        sent: messages written.
    """

    def __init__(self, fence: Callable[[], None]) -> None:
        self.fd = new_memfd("tep-lane", LANE_BYTES)
        try:
            self._map = SharedMap(self.fd, LANE_BYTES)
        except OSError:
            os.close(self.fd)
            raise
        self.words = self._map.words
        self.words[0] = MAGIC
        self.tail = self.mtail = self.sent = self.acked = 0
        self.head = self._mhead = 0
        self._events = self._map.column(_EVENT0, EVENTS)
        self._order = order_of(fence)

    def room(self, *, look: bool = False) -> int:
        """Count the events that fit. The other side's word is read if asked for, or if half the
        ring is full: reading it each time would move its cache line between the CPUs.
        """
        if look or self.tail - self.head > EVENTS // 2:
            self.head = self.words[_HEAD]
            self._order()
        return EVENTS + self.head - self.tail

    def put_event(self, imm: int, count: int) -> None:
        """Write one event; it shows once the board has the tail. There is room."""
        self.words[_EVENT0 + (self.tail & _MASK)] = count << 32 | imm
        self.tail += 1

    def put_events(self, imms: npt.NDArray[np.unsignedinteger]) -> None:
        """Write an event a row, each with its own immediate. There is room."""
        at, n = self.tail & _MASK, len(imms)
        entries = imms.astype(np.uint64)
        entries |= np.uint64(1 << 32)
        first = min(n, EVENTS - at)
        self._events[at : at + first] = entries[:first]
        self._events[: n - first] = entries[first:]
        self.tail += n

    def put_message(self, payload: bytes) -> bool:
        """Write a message; False = no room now."""
        if not self.fits(len(payload)):
            return False
        nbytes = _record(len(payload))
        at = self.mtail % MESSAGES_BYTES
        skip = MESSAGES_BYTES - at if at + nbytes > MESSAGES_BYTES else 0
        if skip:
            _LENGTH.pack_into(self._map.map, _MESSAGE0 + at, _WRAP)
            at = 0
        _LENGTH.pack_into(self._map.map, _MESSAGE0 + at, len(payload))
        start = _MESSAGE0 + at + 8
        self._map.map[start : start + len(payload)] = payload
        self.mtail += skip + nbytes
        self.sent += 1
        return True

    def fits(self, nbytes: int) -> bool:
        if self.sent - self.acked >= ACKS:
            return False
        self._mhead = self.words[_MHEAD]
        self._order()
        at, need = self.mtail % MESSAGES_BYTES, _record(nbytes)
        skip = MESSAGES_BYTES - at if at + need > MESSAGES_BYTES else 0
        return self.mtail + skip + need - self._mhead <= MESSAGES_BYTES

    def take_acks(self) -> list[int]:
        """The statuses of messages acknowledged since the last call, in order of sending."""
        acked = self.words[_ACKED]
        if acked <= self.acked:
            return []
        self._order()
        acked = min(acked, self.sent)  # whatever the other side has written there
        status_max = int(Status.PROVIDER)
        found = [min(self.words[_ACK0 + k % ACKS], status_max) for k in range(self.acked, acked)]
        self.acked = acked
        return found

    def news(self) -> bool:
        return self.words[_ACKED] > self.acked

    def want(self) -> None:
        """Ask for the bell at the next progress; a fence and a look have to follow (rule 2)."""
        self.words[_WANT] = 1

    def close(self) -> None:
        """Unmap; all_taken() goes on to answer. Idempotent."""
        if self._events is not _NO_EVENTS:
            self.head = self.words[_HEAD]
        self._events = _NO_EVENTS
        self._map.close()

    def all_taken(self) -> bool:
        """After close(): whether the receiver had taken every event that was written."""
        return self.head == self.tail


class LaneReader:
    """The receiver's end of a lane.

    Attributes:
        head, mhead: what has been taken.
        tail, mtail: what the board said at the last look.
    """

    def __init__(self, fd: int, fence: Callable[[], None]) -> None:
        self._map = SharedMap(fd, LANE_BYTES)
        self.words = self._map.words
        if self.words[0] != MAGIC:
            self._map.close()
            raise OSError("a lane of another version; run the same release in both processes")
        self._fence = fence
        self._order = order_of(fence)
        self._events = self._map.column(_EVENT0, EVENTS)
        self.head = self.mhead = self.tail = self.mtail = 0
        self._acked = 0

    @property
    def copying(self) -> bool:
        """Whether the sender may be moving bytes into our memory now."""
        return bool(self.words[COPYING])

    def take_events(self, n: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Take n events of those that are there: immediates, counts. A MemoryError takes none."""
        at = self.head & _MASK
        self._order()
        first = min(n, EVENTS - at)
        found = np.concatenate((self._events[at : at + first], self._events[: n - first]))
        halves = found.astype(np.uint32), (found >> np.uint64(32)).astype(np.uint32)
        self.head += n
        self._order()
        self.words[_HEAD] = self.head
        return halves

    def take_event(self) -> int:
        """Take one event of those that are there: count << 32 | immediate."""
        words, head = self.words, self.head
        if not STRONG:
            self._fence()
        word = words[_EVENT0 + (head & _MASK)]
        self.head = head = head + 1
        if not STRONG:
            self._fence()
        words[_HEAD] = head
        return word

    def next_message(self) -> int | None:
        """The length of the next message, or None; NONSENSE: what stands there is no message."""
        if self.mhead == self.mtail:
            return None
        self._order()
        at = self.mhead % MESSAGES_BYTES
        nbytes: int = _LENGTH.unpack_from(self._map.map, _MESSAGE0 + at)[0]
        if nbytes == _WRAP:
            self.mhead += MESSAGES_BYTES - at
            nbytes = _LENGTH.unpack_from(self._map.map, _MESSAGE0)[0]
        need = _record(nbytes)
        if (
            nbytes > MESSAGE_BYTES_MAX
            or self.mhead + need > self.mtail
            or self.mhead % MESSAGES_BYTES + need > MESSAGES_BYTES
        ):
            return NONSENSE
        return nbytes

    def take_message(self, nbytes: int, into: memoryview | None, status: int) -> None:
        """Copy the next message out, or drop it, and acknowledge it with a status."""
        at = _MESSAGE0 + self.mhead % MESSAGES_BYTES + 8
        if into is not None:
            into[:nbytes] = self._map.map[at : at + nbytes]
        self.mhead += _record(nbytes)
        words = self.words
        self._order()
        words[_MHEAD] = self.mhead
        words[_ACK0 + self._acked % ACKS] = status
        self._acked += 1
        self._order()
        words[_ACKED] = self._acked

    def wanted(self) -> bool:
        """After something was taken: whether the sender wants its bell rung; asked once.

        It need not be asked after less than half a ring of events: a sender that
        sleeps for want of room has shown a whole ring since it last saw `head`, so more is to come.
        """
        self._fence()
        if self.words[_WANT]:
            self.words[_WANT] = 0
            return True
        return False

    def close(self) -> None:
        self._events = _NO_EVENTS
        self._map.close()
