"""The things that all backends do alike: names and epochs, refusals and texts, forked children,
messages that wait for the engine, descriptors to sleep on, columns of a batch, copies between host
memory, memory fences.

Nothing here knows a provider. The engine's own checks are above the seam, in `core.requests`. A
column is one int for every row, or one value a row.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import platform
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tep.backends.base import (
    COMPLETION,
    Access,
    Column,
    Completions,
    Domain,
    DomainCaps,
    Entry,
    Kind,
    Row,
    Status,
    WriteBatch,
)
from tep.backends.ffi.libc import Timer
from tep.base.checks import check_text
from tep.base.errors import BadDescriptor, ClosedError, FabricError, UsageError
from tep.host.folders import own_folder
from tep.memory.source import Memory

__all__ = [
    "STRONG",
    "HostRegion",
    "Offsets",
    "ReceivePool",
    "Sleeper",
    "Unread",
    "all_or_none",
    "at",
    "bounds",
    "check_memory",
    "check_timeout",
    "closed",
    "copy_rows",
    "identity",
    "keep_at_fork",
    "meaning",
    "most",
    "new_fence",
    "nothing",
    "offsets",
    "order_of",
    "orphan_at_fork",
    "part",
    "put_imms",
    "read_message",
    "row_of",
    "says",
    "spread",
    "total",
]  # fmt: skip

DomainT = TypeVar("DomainT", bound=Domain)
T = TypeVar("T")

_NUMBERS: Final = itertools.count(1)
_NAME_BYTES_MAX: Final = 200
_EPOCH_BYTES: Final = 8
_EPOCH_MAX: Final = 1 << 63
_last_epoch = 0

_log = logging.getLogger("tep")


def identity(backend: str, name: str | None, epoch: int | None) -> tuple[str, int]:
    """An incarnation's name and epoch; None = host, pid and a number, and a number of its own.

    So later incarnations have larger epochs, also in another process. Control messages carry the
    name, and peers drop a message with a longer one.
    """
    if epoch is None:
        epoch = _next_epoch()
    if name is None:
        name = f"{socket.gethostname()}-{os.getpid()}-{next(_NUMBERS)}"
    if not 1 <= len(check_text(f"{backend}: name", name).encode()) <= _NAME_BYTES_MAX:
        raise UsageError(f"{backend}: name={name!r}; 1 to {_NAME_BYTES_MAX} bytes of UTF-8")
    return name, epoch


def _next_epoch() -> int:
    """The time in ns, or one more than the last epoch where that is later.

    The wall clock may be set back between two lives of an engine. So the last epoch of this user's
    engines on this machine is kept in a file.
    """
    global _last_epoch
    try:
        path = own_folder() / "epoch"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except (OSError, UsageError) as error:
        _log.info("epochs need a clock that goes forward: the last one cannot be kept: %s", error)
        _last_epoch = max(time.time_ns(), _last_epoch + 1)
        return _last_epoch
    try:
        kept = int.from_bytes(os.pread(fd, _EPOCH_BYTES, 0), "little")
        kept = kept if kept < _EPOCH_MAX else 0  # nothing of ours
        _last_epoch = max(time.time_ns(), _last_epoch + 1, kept + 1)
        with contextlib.suppress(OSError):  # a full disk: as without the file
            os.pwrite(fd, _last_epoch.to_bytes(_EPOCH_BYTES, "little"), 0)
    finally:
        os.close(fd)
    return _last_epoch


def check_timeout(backend: str, peer_timeout_s: float) -> None:
    """Refuse a timeout that cannot be, NaN too."""
    if not peer_timeout_s > 0:
        raise UsageError(f"{backend}: peer_timeout_s={peer_timeout_s}; it must be more than 0")


def all_or_none(opening: Iterable[DomainT]) -> tuple[DomainT, ...]:
    """Open NIC after NIC; if one cannot be, close those before."""
    domains: list[DomainT] = []
    try:
        for domain in opening:
            domains.append(domain)  # noqa: PERF402  # those before a failure are needed
    except BaseException:
        for domain in domains:
            domain.close()
        raise
    return tuple(domains)


def check_memory(caps: DomainCaps, memory: Memory, access: Access) -> None:
    """Raise FabricError, LOCAL_KEY, if a NIC cannot reach this memory, or a target is read-only."""
    if memory.kind not in caps.memory_kinds:
        raise FabricError(
            f"{caps.nic}: memory on {memory.device} cannot be registered; "
            f"this NIC takes {', '.join(caps.memory_kinds)}",
            code=Status.LOCAL_KEY.name,
        )
    if memory.readonly and access.sink:
        raise FabricError(
            f"{caps.nic}: {memory.nbytes} bytes at {memory.ptr:#x} are read-only "
            "and cannot be a target; register them with Access.SOURCE",
            code=Status.LOCAL_KEY.name,
        )


_USUAL: Final[Mapping[int, str]] = MappingProxyType(
    {
        Status.FLUSHED: "the domain was closed before this was carried out",
        Status.LOCAL_KEY: "the source was deregistered, or the row reaches beyond it",
        Status.REMOTE_KEY: "the peer has no such key: the region was deregistered, or peers may "
        "not write (read) there, or the row carries the key of another NIC",
        Status.REMOTE_RANGE: "the row reaches beyond the peer's region",
        Status.LENGTH: "longer than caps allow, or than the peer's receive buffers",
        Status.RNR: "too many messages wait for the peer's receive buffers",
        Status.UNREACHABLE: "the peer does not answer, or has closed",
        Status.STALE_PEER: "the peer was opened again; exchange addresses and descriptors anew",
        Status.NIC_DOWN: "the NIC is lost; whether the row landed is unknown",
        Status.PROVIDER: "the connection broke; whether the row landed is unknown",
        Status.GIVEN_UP: "the read was given up, and may still write here",
    }
)


def meaning(**own: str) -> Mapping[int, str]:
    """The usual meanings of statuses; `own` texts, by a status' name, replace some of them."""
    return MappingProxyType({**_USUAL, **{Status[name]: text for name, text in own.items()}})


def says(*parts: str) -> str:
    """Join what is known; parts may be empty."""
    return "; ".join(part for part in parts if part)


def closed(nic: str) -> ClosedError:
    """The error of a call to a NIC that takes none any more."""
    return ClosedError(
        f"{nic}: this domain is closed, or belongs to the process that forked this one; open the "
        "engine anew"
    )


def read_message(decoder: msgspec.msgpack.Decoder[T], data: bytes, meant: str) -> T:
    """Read bytes of a peer strictly; BadDescriptor: they are not what is `meant`."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadDescriptor(
            f"{bytes(data[:16])!r}... ({len(data)} bytes) is not {meant} of this release of tep; "
            f"is the peer's engine on another backend? ({error})"
        ) from error


class Unread:
    """The control messages that have come to one NIC and that its engine has not taken."""

    __slots__ = ("_controls", "_report", "_slots")

    def __init__(self, report: Callable[[Entry], object]) -> None:
        self._controls: dict[int, tuple[bytes, bytes]] = {}
        self._report = report
        self._slots = itertools.count()

    def add(self, payload: bytes, sender: bytes) -> None:
        """Keep a control message that has come from the NIC at an address."""
        slot = next(self._slots)
        self._controls[slot] = payload, sender
        self._report((int(Kind.CONTROL), int(Status.OK), 1, 0, 0, slot, len(payload)))

    def take(self, slot: int) -> tuple[bytes, bytes]:
        """A control message, and the address of its sender; once."""
        return self._controls.pop(slot)


class ReceivePool:
    """The user's receive buffers, in rotation, where the NIC does not write them by itself."""

    def __init__(self) -> None:
        self._buffers: list[memoryview] = []
        self._messages: dict[int, tuple[int, bytes]] = {}  # by slot: length and sender
        self._free: deque[int] = deque()
        self._longest = 0

    def add(self, nbytes: int, count: int) -> None:
        """Add buffers.

        All of their memory is set aside now, so that no message is lost for want of it; what no
        message has used is not touched: a thousand simulated NICs would need gigabytes.
        """
        first, private = len(self._buffers), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            memory = memoryview(mmap.mmap(-1, nbytes * count, flags=private))
        except OSError as error:
            raise MemoryError(f"{count} receive buffers of {nbytes} bytes: {error}") from error
        self._buffers.extend(memory[k * nbytes : (k + 1) * nbytes] for k in range(count))
        self._free.extend(range(first, first + count))
        self._longest = max(self._longest, nbytes)

    def never_fits(self, nbytes: int) -> bool:
        """Whether a message is longer than every buffer that there is."""
        return bool(self._buffers) and nbytes > self._longest

    def take(self, nbytes: int, sender: bytes) -> tuple[int, memoryview] | None:
        """A free buffer for a message of this length, and its slot; None = there is none now.

        `sender` is the address of the NIC that it comes from.
        """
        buffers = self._buffers
        slot = next((slot for slot in self._free if len(buffers[slot]) >= nbytes), None)
        if slot is None:
            return None
        self._messages[slot] = nbytes, sender
        self._free.remove(slot)  # last: for want of memory the line above may raise
        return slot, buffers[slot]

    def view(self, slot: int) -> memoryview:
        return self._buffers[slot][: self._messages[slot][0]].toreadonly()

    def sender(self, slot: int) -> bytes:
        return self._messages[slot][1]

    def give_back(self, slot: int) -> None:
        """A buffer's message was read: it is free again."""
        del self._messages[slot]
        self._free.append(slot)


class Sleeper:
    """A descriptor to sleep on: readable while one of several is, or once a set time has come.

    A dead peer makes no event. The time is what lets an engine sleep without a limit.

    `fds` are not closed here; `fd` is what to sleep on.
    """

    def __init__(self, *fds: int) -> None:
        self._timer = Timer()
        self._timed = False
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()
        for fd in (self._timer.fd, *fds):
            self._epoll.register(fd, select.EPOLLIN)

    def wake_in(self, delay_s: float | None) -> None:
        """Become readable after so many seconds, in place of a time set before; None = never."""
        if delay_s is not None or self._timed:
            self._timer.set(delay_s)
        self._timed = delay_s is not None

    def ignore(self, fd: int) -> None:
        """Leave a descriptor out: a dead device's may stay readable for ever."""
        self._epoll.unregister(fd)

    def close(self) -> None:
        self._epoll.close()
        self._timer.close()


class _Held(Protocol):
    def orphan(self) -> None:
        """In a forked child: forget everything, call nothing. May come again."""


_HELD: Final[weakref.WeakSet[_Held]] = weakref.WeakSet()

orphan_at_fork: Final = _HELD.add
"""Have orphan() called in forked children from now on; the thing is held weakly."""

keep_at_fork: Final = _HELD.discard


def _after_fork() -> None:
    for held in list(_HELD):
        held.orphan()


os.register_at_fork(after_in_child=_after_fork)


STRONG: Final = platform.machine().lower() in {"x86_64", "amd64", "i386", "i686"}
"""Whether the processor keeps stores in order, and loads, by itself."""


def new_fence() -> Callable[[], None]:
    """Make a full memory barrier for one thread at a time, on any processor.

    It is a lock let go and taken again by its only user: an atomic release followed by an atomic
    acquire of one word is a full barrier on x86 (locked instructions) and on AArch64 (the
    architecture orders a store-release before a later load-acquire). It orders memory of this
    host; what a device has mapped may need more, see tep/backends/efa/ways.py.
    """
    lock = threading.Lock()
    lock.acquire()  # noqa: SIM115, RUF100  # held for ever
    release, acquire = lock.release, lock.acquire

    def fence() -> None:
        release()
        acquire()

    return fence


def order_of(fence: Callable[[], None]) -> Callable[[], None]:
    """Return what keeps stores in order, and loads, on this processor: nothing, or a fence."""
    return nothing if STRONG else fence


def nothing() -> None:
    """Do nothing: the waker until one is set, and a fence where the processor needs none."""


_ONE_IMM: Final = np.array((Kind.IMM, Status.OK, 1, 0, 0, 0, 0), COMPLETION)


def put_imms(out: Completions, imms: npt.NDArray[np.uint32], counts: Column = 1) -> None:
    """Fill entries, one an immediate that has arrived `counts` times."""
    out[:] = _ONE_IMM
    out["imm"], out["count"] = imms, counts


def part(column: Column, start: int, stop: int) -> Column:
    """Rows start..stop of a column."""
    return column if isinstance(column, int) else column[start:stop]


def at(column: Column, row: int) -> int:
    """One row's value."""
    return column if isinstance(column, int) else int(column[row])


def row_of(batch: WriteBatch, index: int) -> Row:
    """Spell out one row; its columns are ints most often."""
    peer, src, dst, rkey = batch.peer, batch.src, batch.dst, batch.rkey
    nbytes, imm = batch.nbytes, batch.imm
    return Row(
        peer if isinstance(peer, int) else int(peer[index]),
        src if isinstance(src, int) else int(src[index]),
        batch.lkey,
        dst if isinstance(dst, int) else int(dst[index]),
        rkey if isinstance(rkey, int) else int(rkey[index]),
        nbytes if isinstance(nbytes, int) else int(nbytes[index]),
        imm if imm is None or isinstance(imm, int) else int(imm[index]),
    )


def most(column: Column) -> int:
    """The largest value."""
    return column if isinstance(column, int) else int(np.maximum.reduce(column))


def total(column: Column, n: int) -> int:
    """The sum over n rows."""
    return column * n if isinstance(column, int) else int(column.sum())


def spread(column: Column, n: int) -> list[int]:
    """The values of n rows, spelled out."""
    return [column] * n if isinstance(column, int) else column.tolist()


Offsets = int | npt.NDArray[np.intp]
"""Byte offsets in a region: one for every row, or one a row."""

# Below this length a gather by numpy beats one memmove a row. Measured, CPU ns a row, random pages:
# 64 B 27 against 437, 4 KiB 795 against 1,077, 16 KiB 2,997 against 2,370.
_GATHER_BYTES_MAX: Final = 8192
_CHUNK_BYTES: Final = 256 * 1024  # the gathered copy of a chunk should stay in the L2 cache


class HostRegion:
    """Registered host memory.

    Attributes:
        memory: the record; it keeps the bytes mapped.
        view: the bytes, uint8[nbytes].
        raw: the same; a slice of it costs a third of one of `view`.
        origin: virtual address of the first byte.
        base: what the region's first byte is called by peers: origin, or 0.
        writable: whether peers may write here.
    """

    __slots__ = ("base", "memory", "nbytes", "origin", "raw", "view", "writable")

    def __init__(self, memory: Memory, base: int, *, writable: bool) -> None:
        self.memory = memory
        self.view = memory.bytes_view()
        self.raw = memoryview(self.view)  # type: ignore[arg-type]  # numpy has the buffer protocol
        self.origin = memory.ptr
        self.nbytes = memory.nbytes
        self.base = base
        self.writable = writable

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether offset .. offset + nbytes lies inside."""
        return 0 <= offset <= self.nbytes - nbytes

    def covers(self, column: Column, nbytes: Column, base: int) -> bool:
        """Whether all rows lie inside, whose first byte is called `base`."""
        first, end = bounds(column, nbytes)
        return base <= first and end <= base + self.nbytes


def copy_rows(
    source: HostRegion, src: Offsets, target: HostRegion, dst: Offsets, nbytes: Column, nrows: int
) -> None:
    """Copy `nrows` rows between offsets that were checked."""
    if (
        isinstance(src, int)
        or isinstance(dst, int)
        or not isinstance(nbytes, int)
        or nbytes > _GATHER_BYTES_MAX
    ):
        sources = _addresses(src, source.origin, nrows)
        targets = _addresses(dst, target.origin, nrows)
        deque(map(ctypes.memmove, targets, sources, spread(nbytes, nrows)), 0)
        return
    if nbytes == 0:
        return
    # Row k of such a window is the bytes from offset k on: rows may start anywhere.
    reads = np.ndarray((source.nbytes - nbytes + 1, nbytes), np.uint8, source.view, 0, (1, 1))
    writes = np.ndarray((target.nbytes - nbytes + 1, nbytes), np.uint8, target.view, 0, (1, 1))
    step = max(1, _CHUNK_BYTES // nbytes)
    for start in range(0, nrows, step):
        writes[dst[start : start + step]] = reads[src[start : start + step]]


def offsets(column: Column, origin: int) -> Offsets:
    """Turn addresses into offsets behind `origin`."""
    if isinstance(column, int):
        return column - origin
    return (column - np.uint64(origin)).astype(np.intp)


def bounds(column: Column, nbytes: Column) -> tuple[int, int]:
    """First byte and end of rows; as Python ints, which do not wrap."""
    if isinstance(column, int):
        return column, column + most(nbytes)
    if isinstance(nbytes, int):
        return int(column.min()), int(column.max()) + nbytes
    ends = column.astype(np.uint64) + nbytes.astype(np.uint64)
    wrapped = bool((ends < column).any())
    return int(column.min()), 2**64 if wrapped else int(ends.max())


def _addresses(offsets: Offsets, origin: int, nrows: int) -> list[int]:
    if isinstance(offsets, int):
        return [origin + offsets] * nrows
    return [origin + offset for offset in offsets.tolist()]
