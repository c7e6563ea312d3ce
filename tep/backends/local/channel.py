"""What two NICs say to each other over their UNIX socket: who they are, descriptors, and notes.

The socket carries nothing that is counted or timed: its other use is to be closed by the kernel
the moment a process ends, however it ends. All is non-blocking.

The sender says Hello, with its lane and its bell; the receiver answers Welcome, with its port and
its bell, or Refused. Later it offers shared memory with Share and takes it back with Unshare. The
sender's engine has its notes carried to the receiver's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from typing import Final

import msgspec

__all__ = [
    "Channel",
    "Hello",
    "Note",
    "Refused",
    "Said",
    "Share",
    "Unshare",
    "Welcome",
    "close_all",
]

_BYTES_MAX: Final = 4096
_FDS_MAX: Final = 4
_UCRED: Final = struct.Struct("=iII")  # struct ucred { pid_t pid; uid_t uid; gid_t gid; };


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The sender introduces itself. Descriptors: its lane, its bell.

    Attributes:
        token: of the address that it was given.
        name: of its NIC, for reports.
    """

    token: bytes
    name: str


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The receiver takes a sender. Descriptors: its port, its bell.

    Attributes:
        slot: where on the port's board the sender publishes its tails.
        port_at: address of the port's mapping in the receiver, for a trial of access.
    """

    slot: int
    port_at: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The receiver does not take a sender; `why` in words."""

    why: str


class Share(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Memory of alloc_shared() that holds a target. Descriptor: the memory.

    Attributes:
        number: of the arena, in the receiver.
        address: of its first byte, there.
        nbytes: length.
    """

    number: int
    address: int
    nbytes: int


class Unshare(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The last target in an arena is gone: unmap it, so that its memory can be freed."""

    number: int


class Note(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A word to the receiver's engine.

    Attributes:
        sender: address of the NIC that it comes from.
        payload: at most noting.NOTE_BYTES_MAX bytes.
    """

    sender: bytes
    payload: bytes


Said = Hello | Welcome | Refused | Share | Unshare | Note
_encode = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Said).decode


class Channel:
    """One end of a socket between two NICs.

    Attributes:
        fd: for the epoll set.
        open: False once the other end is gone, or said what cannot be understood.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.fd = sock.fileno()
        self.open = True
        self._waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()

    @property
    def peer_pid(self) -> int:
        """The process at the other end, as this process names it; 0 = it cannot be named here."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid: int = _UCRED.unpack(raw)[0]
        return pid

    def say(self, what: Said, *fds: int) -> None:
        """Send now, or when the socket has room: flush() goes on. Descriptors are duplicated."""
        self._waiting.append((_encode(what), tuple(map(os.dup, fds))))
        self.flush()

    def try_say(self, what: Said) -> bool:
        """Send now, behind all that waits, or not at all."""
        self.flush()
        if self._waiting or not self.open:
            return False
        try:
            self._socket.send(_encode(what))
        except BlockingIOError:
            return False
        except OSError:
            self.open = False
            return False
        return True

    def flush(self) -> None:
        """Send what waits, as far as it goes."""
        while self.open and self._waiting:
            data, fds = self._waiting[0]
            try:
                socket.send_fds(self._socket, [data], fds)
            except BlockingIOError:
                return
            except OSError:
                self.open = False
            self._waiting.popleft()
            close_all(fds)

    def hear(self) -> list[tuple[Said, list[int]]]:
        """What has come, with its descriptors, which are the caller's now."""
        found: list[tuple[Said, list[int]]] = []
        while self.open:
            try:
                data, fds, flags, _ = socket.recv_fds(
                    self._socket, _BYTES_MAX, _FDS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except OSError:
                data, fds, flags = b"", [], 0
            try:
                if not data or flags & socket.MSG_CTRUNC:  # the end, or no descriptors left here
                    raise msgspec.DecodeError
                found.append((_decode(data), fds))
            except msgspec.MsgspecError:
                close_all(fds)
                self.open = False
        return found

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.open = False
        self._socket.close()
        for _, fds in self._waiting:
            close_all(fds)
        self._waiting.clear()


def close_all(fds: list[int] | tuple[int, ...]) -> None:
    """Close descriptors that nobody else closes."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
