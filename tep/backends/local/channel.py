"""The addresses of local NICs, the socket between two of them, and the epoll set of each.

The address of a NIC says which socket it listens on, in which incarnation, on which host. It is a
MessagePack array: a tag with the layout's version, then the fields of `Address` in order.

The socket's name is made of these fields and is new with every incarnation, so that an old address
leads nowhere. The token keeps strangers out: such names have no owner and no permissions.

The socket carries descriptors and control messages, and nothing that is counted or timed: its other
use is to be closed by the kernel the moment a process ends, however it ends. All is non-blocking.
The sender says Hello, with its lane and its bell; the receiver answers Welcome, with its port and
its bell, or Refused. Later it offers shared memory with Share and takes it back with Unshare. The
sender's engine has its control messages carried to the receiver's.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import math
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec

from tep.backends.base import LATER, SHORT
from tep.backends.common import read_message
from tep.backends.ffi.libc import Timer
from tep.base.errors import BackendUnavailable, BadDescriptor

__all__ = [
    "CONTROL_BYTES_MAX", "Address", "Channel", "Control", "Hello", "Refused", "Said",
    "Share", "Unshare", "Watches", "Welcome", "close_all", "decode", "engine_of", "host_digest",
    "is_bell", "why",
]  # fmt: skip

_BYTES_MAX: Final = 4096
CONTROL_BYTES_MAX: Final = 2048
"""Fits, with its sender's address, into what a socket is read with."""

_FDS_MAX: Final = 4
_HEARD_MAX: Final = 1 << 16
_EVENTS_MAX: Final = 32  # taken in one look; room for all that could be is 12 KB each time
_EVENTFD: Final = "anon_inode:[eventfd]"
_UCRED: Final = struct.Struct("=iII")  # struct ucred { pid_t pid; uid_t uid; gid_t gid; };


Unsigned = Annotated[int, msgspec.Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The sender introduces itself, with the token of the address that it was given.

    Descriptors: its lane, its bell. `name` is for reports, `sender` the address of its NIC.
    """

    token: bytes
    name: str
    sender: Annotated[bytes, msgspec.Meta(min_length=1, max_length=256)]

    def __repr__(self) -> str:  # without the token, which is in the address, too
        return f"Hello({self.name})"


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The receiver takes a sender. Descriptors: its port, its bell.

    Attributes:
        slot: where on the port's board the sender publishes its tails.
        witness: address of its page in the receiver, see `memory.Witness`; 0 = none.
    """

    slot: Unsigned
    witness: Unsigned


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The receiver does not take a sender; `why` in words."""

    why: str


class Share(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Memory of alloc_shared() that holds a target; `number` and `address` are the receiver's.

    Descriptor: the memory.
    """

    number: Unsigned
    address: Unsigned
    nbytes: Unsigned


class Unshare(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The last target in an arena is gone: unmap it, so that its memory can be freed."""

    number: Unsigned


class Control(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A word to the receiver's engine, from the NIC at the address `sender`."""

    sender: bytes
    payload: bytes


Said = Hello | Welcome | Refused | Share | Unshare | Control
_encode = msgspec.msgpack.Encoder().encode
_DECODER: Final[msgspec.msgpack.Decoder[Said]] = msgspec.msgpack.Decoder(Said, strict=True)


def decode(data: bytes) -> Said | None:
    """Decode one message; None if these bytes are none."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class Channel:
    """One end of a socket between two NICs.

    Attributes:
        fd: for the epoll set.
        open: False once the other end is gone, or said what cannot be understood.
        peer_pid: the process at the other end, as this one names it; 0 = it cannot be named here.
        may_write: the user at the other end may write here by the kernel's rule: ours, or root.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.fd = sock.fileno()
        self.open = True
        self._waiting: deque[tuple[bytes, tuple[int, ...], object]] = deque()
        made_by = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        self.peer_pid, uid, _ = _UCRED.unpack(made_by)
        self.may_write = uid in {0, os.geteuid()}

    def say(self, what: Said, *fds: int, owner: object = None) -> None:
        """Send now, or when the socket has room: flush() goes on.

        The descriptors stay open until then: they are the NIC's own, or `owner` keeps them open.
        """
        self._waiting.append((_encode(what), fds, owner))
        self.flush()

    def try_say(self, what: Said) -> bool:
        """Send now, behind all that waits, or not at all."""
        self.flush()
        if self._waiting:
            return False
        self.say(what)
        sent = not self._waiting
        self._waiting.clear()
        return sent and self.open

    def flush(self) -> None:
        """Send what waits, as far as it goes."""
        while self.open and self._waiting:
            data, fds, _ = self._waiting[0]
            try:
                socket.send_fds(self._socket, [data], fds)
            except OSError as error:
                if error.errno in LATER:
                    return
                self.open = False
            self._waiting.popleft()

    def hear(self, most: int = _HEARD_MAX) -> list[tuple[Said, list[int]]]:
        """Take at most `most` messages, each with its descriptors, which are the caller's now.

        Of descriptors for which this process has no room, none arrives.
        """
        found: list[tuple[Said, list[int]]] = []
        while self.open and len(found) < most:
            try:
                data, fds, flags, _ = socket.recv_fds(
                    self._socket, _BYTES_MAX, _FDS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                if error.errno in LATER:
                    break
                data, fds, flags = b"", [], 0
            if flags & socket.MSG_CTRUNC:
                close_all(fds)
                fds = []
            said = decode(data)  # no bytes: the end
            if said is None:
                close_all(fds)
                self.open = False
            else:
                found.append((said, fds))
        return found

    def close(self) -> None:
        self.open = False
        self._socket.close()
        self._waiting.clear()


def is_bell(fd: int) -> bool:
    """Whether a descriptor from a peer is an eventfd that does not block: writing to it is safe."""
    try:
        return not os.get_blocking(fd) and str(Path(f"/proc/self/fd/{fd}").readlink()) == _EVENTFD
    except OSError:
        return False


def close_all(fds: list[int] | tuple[int, ...]) -> None:
    """Close descriptors that nobody else closes; -1 is none."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="LOC3"):
    """The address of a NIC.

    Attributes:
        nic: index in its engine.
        pid: of its process, in that process's own namespace; for people.
        epoch: of its engine's incarnation.
        host: digest of this boot of this machine.
        token: random; whoever connects has to show it.
    """

    nic: Unsigned
    pid: Unsigned
    epoch: Unsigned
    host: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    token: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

    def to_bytes(self) -> bytes:
        return _encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Address:
        """Read it; raise BadDescriptor for no such address, or one of another host."""
        found = read_message(_ADDRESS, data, "a local address")
        if found.host != host_digest():
            raise BadDescriptor(
                f"local address of process {found.pid} on another host, or of an earlier boot of "
                "this one: the local backend joins processes of one machine; use libfabric"
            )
        return found

    @property
    def socket(self) -> bytes:
        """The name to listen on and to connect to, in Linux's abstract namespace."""
        return b"\0tep/%d/%x/%d/" % (self.pid, self.epoch, self.nic) + self.token[:4].hex().encode()

    def __str__(self) -> str:
        return f"process {self.pid} NIC {self.nic}, epoch {self.epoch}"

    def __repr__(self) -> str:  # without the token
        return str(self)


_ADDRESS: Final = msgspec.msgpack.Decoder(Address)


def engine_of(data: bytes) -> bytes:
    """Return what the addresses of all NICs of one engine share: process, epoch and host."""
    try:
        found = read_message(_ADDRESS, data, "a local address")
    except BadDescriptor:
        return data
    return _encode((found.pid, found.epoch, found.host))


@functools.cache
def host_digest() -> bytes:
    """8 bytes that are the same in all processes, and containers, of this boot of this machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError as error:
        if error.errno in SHORT:
            tried = (("this host's boot id", why(error.errno or 0)),)
            raise BackendUnavailable("the local backend cannot start", tried) from error
        boot = os.uname().nodename.encode()
    return hashlib.sha256(b"tep local" + boot).digest()[:8]


class Watches:
    """The descriptors of one NIC, in one epoll set, and whom their events are passed to.

    Attributes:
        epoll: the set.
        bell: an eventfd by which peers wake the NIC. Nobody reads it: each ring is one edge, and
            taken back by look().
    """

    def __init__(self) -> None:
        self._told: dict[int, Callable[[], None]] = {}
        self._wake_s = math.inf
        with contextlib.ExitStack() as undo:
            try:
                self._timer = Timer()
                undo.callback(self._timer.close)
                self.epoll = select.epoll()
                undo.callback(self.epoll.close)
                self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                undo.callback(os.close, self.bell)
                self.epoll.register(self.bell, select.EPOLLIN | select.EPOLLET)
                self.add(self._timer.fd, self._woken)
            except OSError as error:
                what = "an eventfd, a timer and an epoll set"
                raise BackendUnavailable(
                    "the local backend cannot start", ((what, why(error.errno or 0)),)
                ) from error
            self.close = undo.pop_all().close  # not what it watches besides
        self._poll = self.epoll.poll

    def add(self, fd: int, told: Callable[[], None], events: int = select.EPOLLIN) -> None:
        self.epoll.register(fd, events)
        self._told[fd] = told

    def add_process(self, pid: int, ended: Callable[[], None]) -> int:
        """Watch a process; return a descriptor for the caller to drop() and to close, or -1.

        -1: it cannot be named here, or there is no descriptor left; its socket will have to tell.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return -1
        try:
            self.add(pidfd, ended)
        except OSError:
            os.close(pidfd)
            return -1
        return pidfd

    def tell(self, fd: int, told: Callable[[], None]) -> None:
        """Tell somebody else of a descriptor's events."""
        self._told[fd] = told

    def wake_in(self, delay_s: float) -> None:
        """Have the owner polled in so many seconds, or earlier."""
        at_s = time.monotonic() + delay_s
        if at_s < self._wake_s:
            self._wake_s = at_s
            self._timer.set(delay_s)

    def _woken(self) -> None:
        self._wake_s = math.inf
        self._timer.clear()

    def drop(self, fd: int) -> None:
        """Watch it no more; before it is closed."""
        if self._told.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def look(self) -> bool:
        """Tell everybody whose descriptor has news; whether there was any."""
        try:
            found = self._poll(0, _EVENTS_MAX)
        except MemoryError:  # what there is stays there for the next look
            return False
        for fd, _ in found:
            told = self._told.get(fd)  # None: a bell, or dropped on account of another just now
            if told is not None:
                told()
        return bool(found)


def why(code: int) -> str:
    """An errno in words, with the cure where there is one."""
    cure = "; raise the limit of descriptors (ulimit -n)" if code == errno.EMFILE else ""
    return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}{cure}"
