"""The address of one NIC in one incarnation: bytes that a peer gives back to connect().

Rule: bytes are hostile until `Address.decode` has returned.

All integers are little-endian; the GID is as on the wire:

    offset  size  field       content
    0       4     magic       b"VERB"
    4       1     version     1
    5       1     link        1 = InfiniBand, 2 = Ethernet, as the library numbers link layers
    6       2     lid         InfiniBand only, else 0
    8       16    gid         of the port, the entry in use
    24      1     gid_type    0 = InfiniBand, 1 = RoCE v1, 2 = RoCE v2
    25      3     ud_qpn      queue pair that takes handshake datagrams
    28      4     qkey        that it asks of them
    32      8     epoch       of the engine's incarnation
    40      8     identity    hash of engine name and NIC number: what outlives a restart
"""

from __future__ import annotations

import hashlib
import ipaddress
import struct
from dataclasses import dataclass
from typing import Final

from tep.backends.ffi.ibverbs_structs import ENUMS
from tep.base.errors import BadDescriptor

__all__ = [
    "ADDRESS_BYTES",
    "Address",
    "engine_of",
    "gid_text",
    "identity_of",
    "is_link_local",
    "is_mapped",
]

_LAYOUT: Final = struct.Struct("<4sBBH16sIIQQ")
_MAGIC: Final = b"VERB"
_VERSION: Final = 1
ADDRESS_BYTES: Final = _LAYOUT.size

_IB: Final = ENUMS["IBV_LINK_LAYER_INFINIBAND"]
_ETHERNET: Final = ENUMS["IBV_LINK_LAYER_ETHERNET"]
_GID_TYPES: Final = ("InfiniBand", "RoCE v1", "RoCE v2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a NIC is; the fields are those of the table above."""

    link: int
    lid: int
    gid: bytes
    gid_type: int
    ud_qpn: int
    qkey: int
    epoch: int
    identity: int

    def encode(self) -> bytes:
        """Write it down."""
        return _LAYOUT.pack(
            _MAGIC,
            _VERSION,
            self.link,
            self.lid,
            self.gid,
            self.gid_type | self.ud_qpn << 8,
            self.qkey,
            self.epoch,
            self.identity,
        )

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """Read it, strictly.

        Raises:
            BadDescriptor: these bytes cannot be such an address.
        """
        if len(data) != _LAYOUT.size or data[:4] != _MAGIC:
            raise BadDescriptor(
                f"{bytes(data[:16])!r}... ({len(data)} bytes) is no address of a verbs NIC; is the "
                "peer's engine on another backend?"
            )
        _, version, link, lid, gid, packed, qkey, epoch, identity = _LAYOUT.unpack(data)
        if version != _VERSION:
            raise BadDescriptor(
                f"verbs address: version {version}, this tep reads {_VERSION}; run the same release"
            )
        if link not in {_IB, _ETHERNET} or packed & 0xFF >= len(_GID_TYPES):
            raise BadDescriptor(f"verbs address: link {link}, GID type {packed & 0xFF} cannot be")
        return cls(
            link=link,
            lid=lid,
            gid=gid,
            gid_type=packed & 0xFF,
            ud_qpn=packed >> 8,
            qkey=qkey,
            epoch=epoch,
            identity=identity,
        )

    @property
    def is_ib(self) -> bool:
        """Whether packets find their way by LID."""
        return self.link == _IB

    def why_unreachable(self, peer: Address) -> str:
        """Say why a peer can never be reached from here, or ""."""
        if self.link != peer.link:
            return "one end is InfiniBand, the other Ethernet"
        if self.is_ib:
            if self.gid[:8] == peer.gid[:8]:
                return ""
            return (
                f"one end is in InfiniBand subnet {self.gid[:8].hex()}, the other in "
                f"{peer.gid[:8].hex()}; where each rail is a subnet, name the NICs of all engines "
                "in the same order (nics=[...])"
            )
        if self.gid_type != peer.gid_type:
            return (
                f"one end speaks {_GID_TYPES[self.gid_type]}, the other {_GID_TYPES[peer.gid_type]}"
            )
        if is_link_local(self.gid) != is_link_local(peer.gid):
            return "a link-local address does not reach beyond its own subnet; set gid_index"
        if is_mapped(self.gid) != is_mapped(peer.gid):
            return "one end has an IPv4 address, the other IPv6; set gid_index"
        return ""

    def __str__(self) -> str:
        where = f"LID {self.lid}" if self.is_ib else gid_text(self.gid)
        return f"{where} ({_GID_TYPES[self.gid_type]}), UD QP {self.ud_qpn}"


def engine_of(address: bytes) -> bytes:
    """Return what the addresses of all NICs of one engine share: the epoch, a time in ns."""
    return address[32:40] if len(address) == ADDRESS_BYTES else address


def identity_of(name: str, nic: int) -> int:
    """Number the NIC `nic` of the engine `name`, 64 bits: the same in each incarnation."""
    return int.from_bytes(
        hashlib.blake2b(f"{name}/{nic}".encode(), digest_size=8).digest(), "little"
    )


def gid_text(gid: bytes) -> str:
    """Spell a GID as the IP address it holds."""
    found = ipaddress.IPv6Address(gid)
    return str(found.ipv4_mapped or found)


def is_mapped(gid: bytes) -> bool:
    """Whether a GID holds an IPv4 address."""
    return ipaddress.IPv6Address(gid).ipv4_mapped is not None


def is_link_local(gid: bytes) -> bool:
    """Whether a GID is of one subnet only: fe80::/10, or 169.254.0.0/16 within IPv6."""
    found = ipaddress.IPv6Address(gid)
    return (found.ipv4_mapped or found).is_link_local
