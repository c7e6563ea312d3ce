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
import sys
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

# struct tcp_info, linux/tcp.h: u8 tcpi_state at 0, u64 tcpi_bytes_received at 128 (Linux 4.1).
_INFO_BYTES: Final = 136
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
        self._since: dict[int, float] = {}  # by inode, the oldest first
        self._known: set[int] = set()  # inodes of sockets that are no strangers
        self._null = self._held = -1

    def close(self) -> None:
        """Give back the descriptors; nobody may look any more."""
        for fd in (self._held, self._null):
            if fd >= 0:
                os.close(fd)

    def look(self, now_s: float) -> None:
        """Hang up on strangers that are too many, the oldest first, or have been here too long."""
        try:  # the first time; then one is here when all others are in use
            if self._null < 0:
                self._null = os.open(os.devnull, os.O_RDONLY)
            if self._held < 0:
                self._held = os.dup(self._null)
        except OSError:
            return
        known: set[int] = set()
        found: dict[int, int] = {}  # descriptors, by inode
        for fd in _descriptors():
            inode = _socket(fd)
            if not inode:
                continue
            if inode in self._known or not self._is_stranger(fd):
                known.add(inode)
            else:
                found[inode] = fd
        self._known = known
        since = {inode: at_s for inode, at_s in self._since.items() if inode in found}
        for inode in found:
            since.setdefault(inode, now_s)
        self._since = since
        most = max(1, min(STRANGERS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        for inode, at_s in list(since.items()):
            if len(since) <= most and now_s < at_s + STRANGER_S:
                break
            del since[inode]
            if self._is_stranger(found[inode], hang_up=True):
                self.refused += 1

    def _is_stranger(self, fd: int, *, hang_up: bool = False) -> bool:
        try:
            os.dup2(fd, self._held, inheritable=False)
            sock = socket.socket(fileno=self._held)
        except OSError:  # closed meanwhile, or no socket any more
            return False
        try:
            strange = self._connected(sock) and _received(sock) < _HELLO_BYTES_MIN
            if strange and hang_up:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end was quicker
            return False
        finally:
            sock.detach()
            os.dup2(self._null, self._held, inheritable=False)
        return strange

    def _connected(self, sock: socket.socket) -> bool:
        """Whether this is a connection to our port."""
        return (
            sock.family in {socket.AF_INET, socket.AF_INET6}
            and sock.type == socket.SOCK_STREAM
            and sock.getsockname()[1] == self._port
        )


def _received(sock: socket.socket) -> int:
    """How many bytes have come over a connection; as many as can be where that cannot be told."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES or info[0] != _ESTABLISHED:
        return sys.maxsize
    return int.from_bytes(info[-8:], sys.byteorder)


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
