"""Connections to a tcp NIC's port whose other end has not said Hello: few, and for a short time.

libfabric accepts whoever connects, and keeps the connection for as long as the other end does.
Its sockets are found here among the process's descriptors, by the NIC's port, and shut down;
libfabric then closes them. A peer that is hung up on this way connects again.

Rule 1: a thread of libfabric's may close a socket at any time, and its number may then be another
file's. So a socket is looked at, and shut down, through a descriptor of our own.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["STRANGERS_MAX", "STRANGER_S", "Strangers"]

STRANGERS_MAX: Final = 64
STRANGER_S: Final = 10.0

_HELLO_BYTES_MIN: Final = 100
"""A peer has sent more than this once it has said Hello.

libfabric's own greeting is 40 bytes on tcp, 56 on tcp;ofi_rxm, and the frame with our Hello at
least 100 more. Measured with libfabric 2.5.1.
"""

# struct tcp_info, linux/tcp.h: u8 tcpi_state at 0; u32 tcpi_last_data_recv at 52, milliseconds
# since data came, or since the connection; u64 tcpi_bytes_received at 128 (Linux 4.1).
_INFO: Final = struct.Struct("=B51xI72xQ")
_ESTABLISHED: Final = 1  # net/tcp_states.h
_DESCRIPTORS: Final = Path("/proc/self/fd")
_DESCRIPTORS_MAX: Final = 1 << 16  # looked through one by one where they cannot be listed


class Strangers:
    """Strangers at one NIC.

    Args:
        port: where the NIC listens.

    Attributes:
        refused: how many were hung up on.
    """

    def __init__(self, port: int) -> None:
        self.refused = 0
        self._port = port
        self._known: set[int] = set()  # inodes of sockets that are no strangers
        self._null = self._held = -1

    def close(self) -> None:
        """Give back the descriptors; nobody may look any more."""
        for fd in (self._held, self._null):
            if fd >= 0:
                os.close(fd)

    def look(self) -> None:
        """Hang up on strangers that are too many, the oldest first, or have been here too long."""
        try:  # the first time; then one is here when all others are in use
            if self._null < 0:
                self._null = os.open(os.devnull, os.O_RDONLY)
            if self._held < 0:
                self._held = os.dup(self._null)
        except OSError:
            return
        known: set[int] = set()
        found: list[tuple[float, int]] = []  # how long it has been silent, its descriptor
        for fd in _descriptors():
            inode = _socket(fd)
            if not inode:
                continue
            silent_s = 0.0 if inode in self._known else self._silent_s(fd)
            if silent_s:
                found.append((silent_s, fd))
            else:
                known.add(inode)
        self._known = known
        most = max(1, min(STRANGERS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        for number, (silent_s, fd) in enumerate(sorted(found, reverse=True)):
            if len(found) - number > most or silent_s > STRANGER_S:
                self.refused += bool(self._silent_s(fd, hang_up=True))

    def _silent_s(self, fd: int, *, hang_up: bool = False) -> float:
        """For how long a stranger has been silent; 0 = this is none."""
        try:
            os.dup2(fd, self._held, inheritable=False)
            sock = socket.socket(fileno=self._held)
        except OSError:  # closed meanwhile, or no socket any more
            return 0.0
        try:
            if not self._connected(sock):
                return 0.0
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            if len(info) < _INFO.size:
                return 0.0
            state, silent_ms, received = _INFO.unpack(info)
            if state != _ESTABLISHED or received >= _HELLO_BYTES_MIN:
                return 0.0
            if hang_up:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end was quicker
            return 0.0
        finally:
            sock.detach()
            os.dup2(self._null, self._held, inheritable=False)
        return max(0.001, float(silent_ms) / 1000)

    def _connected(self, sock: socket.socket) -> bool:
        """Whether this is a connection to our port."""
        return (
            sock.family in {socket.AF_INET, socket.AF_INET6}
            and sock.type == socket.SOCK_STREAM
            and sock.getsockname()[1] == self._port
        )


def _socket(fd: int) -> int:
    """The inode of a socket; 0 = the descriptor is of something else, or closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return 0
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0


def _descriptors() -> Iterable[int]:
    try:
        return [int(path.name) for path in _DESCRIPTORS.iterdir()]
    except OSError:  # there is none left to list them with
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _DESCRIPTORS_MAX))
