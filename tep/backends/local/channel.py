"""What two NICs say to each other over their UNIX socket: who they are, descriptors, and control
messages.

The socket carries nothing that is counted or timed: its other use is to be closed by the kernel
the moment a process ends, however it ends. All is non-blocking.

The sender says Hello, with its lane and its bell; the receiver answers Welcome, with its port and
its bell, or Refused. Later it offers shared memory with Share and takes it back with Unshare. The
sender's engine has its control messages carried to the receiver's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections import deque
from pathlib import Path
from typing import Annotated, Final

import msgspec

from tep.backends.local.libc import SHORT

__all__ = [
    "Channel",
    "Control",
    "Hello",
    "Refused",
    "Said",
    "Share",
    "Unshare",
    "Welcome",
    "close_all",
    "decode",
    "is_bell",
]

_BYTES_MAX: Final = 4096
_FDS_MAX: Final = 4
_HEARD_MAX: Final = 1 << 16
_LATER: Final = SHORT | {errno.EAGAIN}
_EVENTFD: Final = "anon_inode:[eventfd]"
_UCRED: Final = struct.Struct("=iII")  # struct ucred { pid_t pid; uid_t uid; gid_t gid; };


Unsigned = Annotated[int, msgspec.Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The sender introduces itself. Descriptors: its lane, its bell.

    Attributes:
        token: of the address that it was given.
        name: of its NIC, for reports.
        sender: the address of its NIC.
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
    """Memory of alloc_shared() that holds a target. Descriptor: the memory.

    Attributes:
        number: of the arena, in the receiver.
        address: of its first byte, there.
        nbytes: length.
    """

    number: Unsigned
    address: Unsigned
    nbytes: Unsigned


class Unshare(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The last target in an arena is gone: unmap it, so that its memory can be freed."""

    number: Unsigned


class Control(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A word to the receiver's engine.

    Attributes:
        sender: address of the NIC that it comes from.
        payload: at most control.CONTROL_BYTES_MAX bytes.
    """

    sender: bytes
    payload: bytes


Said = Hello | Welcome | Refused | Share | Unshare | Control
_encode = msgspec.msgpack.Encoder().encode
_DECODER: Final[msgspec.msgpack.Decoder[Said]] = msgspec.msgpack.Decoder(Said, strict=True)


def decode(data: bytes) -> Said | None:
    """What was said in these bytes, or None where nothing was."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


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
        self._waiting: deque[tuple[bytes, tuple[int, ...], object]] = deque()

    @property
    def peer_pid(self) -> int:
        """The process at the other end, as this process names it; 0 = it cannot be named here."""
        return self._credentials()[0]

    @property
    def may_write(self) -> bool:
        """Whether the user at the other end may write here by the kernel's rule: ours, or root."""
        return self._credentials()[1] in {0, os.geteuid()}

    def _credentials(self) -> tuple[int, int]:
        """pid and uid of the process that made the other end."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, _ = _UCRED.unpack(raw)
        return pid, uid

    def say(self, what: Said, *fds: int, owner: object = None) -> None:
        """Send now, or when the socket has room: flush() goes on.

        The descriptors stay open until then: they are the NIC's own, or `owner` keeps them open.
        """
        self._waiting.append((_encode(what), fds, owner))
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
            data, fds, _ = self._waiting[0]
            try:
                socket.send_fds(self._socket, [data], fds)
            except OSError as error:
                if error.errno in _LATER:
                    return
                self.open = False
            self._waiting.popleft()

    def hear(self, most: int = _HEARD_MAX) -> list[tuple[Said, list[int]]]:
        """What has come, `most` at the most, with its descriptors, which are the caller's now.

        Of descriptors for which this process has no room, none arrives.
        """
        found: list[tuple[Said, list[int]]] = []
        while self.open and len(found) < most:
            try:
                data, fds, flags, _ = socket.recv_fds(
                    self._socket, _BYTES_MAX, _FDS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                if error.errno in _LATER:
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
        """Hang up. Idempotent."""
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
    """Close descriptors that nobody else closes."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
