"""The things that all backends do alike: names and epochs, refusals and texts, forked children,
and messages that wait for the engine.

Nothing here knows a provider. The engine's own checks are above the seam, in `core.requests`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from tep.backends.base import Access, Domain, DomainCaps, Entry, Kind, Status
from tep.base.checks import check_text
from tep.base.errors import ClosedError, FabricError, UsageError
from tep.host.folders import own_folder

if TYPE_CHECKING:
    from tep.memory.source import Memory

__all__ = [
    "ReceivePool", "Unread", "all_or_none", "check_memory", "check_timeout", "closed", "identity",
    "keep_at_fork", "meaning", "orphan_at_fork", "says",
]  # fmt: skip

DomainT = TypeVar("DomainT", bound=Domain)

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
    """Raise unless a NIC can reach this memory, and peers may do with it what they are to.

    Raises:
        FabricError: LOCAL_KEY; a device that the NIC does not take, or read-only as a target.
    """
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


class Unread:
    """The control messages that have come to one NIC and that its engine has not taken.

    Args:
        report: takes the completion of each.
    """

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
        """The message in a buffer."""
        return self._buffers[slot][: self._messages[slot][0]].toreadonly()

    def sender(self, slot: int) -> bytes:
        """The address of the NIC that sent the message in a buffer."""
        return self._messages[slot][1]

    def give_back(self, slot: int) -> None:
        """A buffer's message was read: it is free again."""
        del self._messages[slot]
        self._free.append(slot)


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
