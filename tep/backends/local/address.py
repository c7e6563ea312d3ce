"""The address of a local NIC: which socket it listens on, in which incarnation, on which host.

    offset  size  field   content (integers little-endian)
    0       4     magic   b"TLOC"
    4       1     version 1
    5       1     -       0
    6       2     nic     index in its engine
    8       4     pid     of its process, in that process's own namespace; for people
    12      4     -       0
    16      8     start   when that process started, clock ticks since boot
    24      8     epoch   of its engine's incarnation
    32      8     host    digest of this boot of this machine
    40      16    token   random; whoever connects has to show it
    56      4     crc32   of bytes 0..55

The socket's name is made of these fields and is new with every incarnation, so that an old address
leads nowhere. The token keeps strangers out: such names have no owner and no permissions.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import zlib
from pathlib import Path
from typing import Final, NamedTuple, Self

from tep.backends.local.libc import SHORT, why
from tep.base.errors import BackendUnavailable, BadDescriptor

__all__ = ["Address", "engine_of", "host_digest", "process_start"]

_LAYOUT: Final = struct.Struct("<4sBxHI4xQQ8s16s")
_MAGIC: Final = b"TLOC"
_VERSION: Final = 1


class Address(NamedTuple):
    """The fields of an address; see the table above."""

    nic: int
    pid: int
    start: int
    epoch: int
    host: bytes
    token: bytes

    def to_bytes(self) -> bytes:
        """Write it down, 60 bytes."""
        body = _LAYOUT.pack(
            _MAGIC, _VERSION, self.nic, self.pid, self.start, self.epoch, self.host, self.token
        )
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read it back.

        Raises:
            BadDescriptor: no such address, of another version, altered, or of another host.
        """
        if len(data) != _LAYOUT.size + 4 or data[:4] != _MAGIC:
            raise BadDescriptor(
                f"{data[:16]!r}... ({len(data)} bytes) is not a local address; is the peer's "
                "engine on another backend?"
            )
        if data[4] != _VERSION:
            raise BadDescriptor(
                f"local address of version {data[4]}, this tep reads {_VERSION}; run the same "
                "release in both processes"
            )
        body, crc = data[:-4], int.from_bytes(data[-4:], "little")
        if zlib.crc32(body) != crc:
            raise BadDescriptor("local address: its checksum does not fit; altered on the way")
        found = cls(*_LAYOUT.unpack(body)[2:])
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


def engine_of(data: bytes) -> bytes:
    """Return what the addresses of all NICs of one engine share: process, epoch and host."""
    return data[8:40] if len(data) == _LAYOUT.size + 4 else data


@functools.cache
def host_digest() -> bytes:
    """8 bytes that are the same in all processes, and containers, of this boot of this machine.

    Raises:
        BackendUnavailable: no descriptor is left to find out.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError as error:
        if error.errno in SHORT:
            tried = (("this host's boot id", why(error.errno or 0)),)
            raise BackendUnavailable("the local backend cannot start", tried) from error
        boot = os.uname().nodename.encode()
    return hashlib.sha256(b"tep local" + boot).digest()[:8]


def process_start(pid: int | str = "self") -> int:
    """When a process started, clock ticks since boot; 0 where /proc does not tell.

    A process id alone is used again; together with this it names one process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat[stat.rindex(b")") + 2 :].split()[19])  # field 22; the name may hold anything
