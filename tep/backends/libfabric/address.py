"""A NIC's address as bytes: provider, incarnation, and the provider's own name of the endpoint.

The layout (integers little-endian); tests/unit/backends/test_libfabric_parts.py checks it:

    offset  size  field     content
    0       4     magic     b"OFI1"
    4       8     epoch     of this incarnation
    12      1     length p  of the provider's name
    13      1     length n  of the NIC's name
    14      1     length r  of the raw address
    15      p     provider  UTF-8, e.g. "tcp"
    15+p    n     nic       UTF-8, e.g. "127.0.0.1"
    15+p+n  r     raw       what fi_getname gave

Rule: raw bytes reach fi_av_insert only through `parse`. On tcp one address of a wrong family would
be taken in silence and make every later insert fail.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tep.base.errors import BadDescriptor

__all__ = [
    "NicAddress", "efa_place", "engine_of", "is_loopback", "parse",
]  # fmt: skip

_HEAD: Final = struct.Struct("<4sQBBB")
_MAGIC: Final = b"OFI1"
_BYTES_MAX: Final = 256  # of the field that carries an address in NetAddr


@dataclass(frozen=True, slots=True)
class NicAddress:
    """One NIC in one incarnation.

    Attributes:
        provider: as the user names it; peers must agree.
        epoch: of its engine.
        nic: for people to read.
        raw: the endpoint's name in the provider's format.
    """

    provider: str
    epoch: int
    nic: str
    raw: bytes

    def to_bytes(self) -> bytes:
        """Write the address down; `parse` is the inverse."""
        provider, nic = self.provider.encode(), self.nic.encode()
        # The NIC's name is for people only, and gives way where the rest is long.
        nic = nic[: _BYTES_MAX - _HEAD.size - len(provider) - len(self.raw)]
        head = _HEAD.pack(_MAGIC, self.epoch, len(provider), len(nic), len(self.raw))
        return head + provider + nic + self.raw

    def __str__(self) -> str:
        return f"{self.provider} {self.nic} ({_spell(self.raw)}, epoch {self.epoch})"


def parse(data: bytes, provider: str) -> NicAddress:
    """Read an address of this provider.

    Raises:
        BadDescriptor: not such an address, or one that the provider would choke on.
    """
    if len(data) < _HEAD.size or data[:4] != _MAGIC:
        raise BadDescriptor(
            f"{data[:16]!r}... ({len(data)} bytes) is not a libfabric NIC's address; is the peer's "
            "engine on another backend?"
        )
    _, epoch, p, n, r = _HEAD.unpack_from(data)
    if len(data) != _HEAD.size + p + n + r:
        raise BadDescriptor(
            f"libfabric address: {len(data)} bytes, its head says {_HEAD.size + p + n + r}; "
            "truncated or padded"
        )
    body = data[_HEAD.size :]
    try:
        theirs, nic = body[:p].decode(), body[p : p + n].decode(errors="replace")
    except UnicodeDecodeError as error:
        raise BadDescriptor(f"libfabric address: its provider is not UTF-8: {error}") from error
    if theirs != provider:
        raise BadDescriptor(
            f"the peer's NIC {nic!r} is driven by provider {theirs!r}, this one by {provider!r}; "
            "open both ends with the same provider"
        )
    raw = body[p + n :]
    complaint = _CHECKS[provider](raw)
    if complaint:
        raise BadDescriptor(f"libfabric address of {nic!r}: {complaint}: {raw.hex() or 'empty'}")
    # One copy of a NIC's name: peers that come and go a thousand times are all kept.
    return NicAddress(provider, epoch, sys.intern(nic), raw)


def engine_of(data: bytes) -> bytes:
    """Return what the addresses of all NICs of one engine share: the epoch, a time in ns."""
    return data[4:12] if len(data) >= _HEAD.size else data


def is_loopback(raw: bytes) -> bool:
    """Tell whether only its own host reaches a socket address."""
    if int.from_bytes(raw[:2], "little") == socket.AF_INET:
        return raw[4:5] == b"\x7f"
    return raw[8:24] == bytes(15) + b"\1"


def efa_place(raw: bytes) -> bytes:
    """The GID and the number of the queue pair in an EFA address: endpoints get numbers again."""
    return raw[:18]


def _check_socket(raw: bytes) -> str:
    """Complain unless this is a sockaddr_in or sockaddr_in6 with a port."""
    if len(raw) < 4:
        return f"{len(raw)} bytes are too few for a socket address"
    family = int.from_bytes(raw[:2], "little")
    sizes = {int(socket.AF_INET): 16, int(socket.AF_INET6): 28}
    if family not in sizes:
        return f"socket family {family} is neither IPv4 nor IPv6"
    if len(raw) != sizes[family]:
        return f"{len(raw)} bytes, a socket address of family {family} has {sizes[family]}"
    if raw[2:4] == b"\0\0":
        return "port 0"
    return ""


def _check_efa(raw: bytes) -> str:
    """Complain unless this is GID, queue pair number, connection id: 32 bytes."""
    if len(raw) != 32:
        return f"{len(raw)} bytes, an EFA address has 32"
    return "" if any(raw[:16]) else "its GID is zero"


_CHECKS: Final[Mapping[str, Callable[[bytes], str]]] = MappingProxyType(
    {
        "tcp": _check_socket,
        "tcp;ofi_rxm": _check_socket,
        "efa": _check_efa,
        "efa-direct": _check_efa,
        "srd": _check_efa,  # of the backend `efa`
    }
)


def _spell(raw: bytes) -> str:
    if len(raw) == 16 and raw[:2] == b"\x02\0":
        return f"{socket.inet_ntoa(raw[4:8])}:{int.from_bytes(raw[2:4], 'big')}"
    return raw.hex()
