"""Addresses and descriptors <-> bytes: versioned, checked, with the owner's epoch; no pickle.

Rule 1: bytes from a peer are hostile until `from_bytes` has returned. Rule 2: a change of any
layout below is a new VERSION, and tests/unit/base/test_wire.py holds the old one's golden bytes.

The envelope of every object (all integers little-endian):

    offset  size  field     content
    0       3     magic     b"TEP"
    3       1     kind      ASCII: A = NetAddr, M = MrDesc
    4       2     version   5
    6       4     length    bytes of the payload
    10      4     crc32     of bytes 0..9 followed by the payload
    14      ...   payload   MessagePack array of the object's fields, in their order in the class
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from functools import lru_cache
from typing import Annotated, ClassVar, Final, Self, get_type_hints

import msgspec
from msgspec import Meta

from tep.base.checks import shown
from tep.base.errors import BadDescriptor

__all__ = ["VERSION", "MrDesc", "NetAddr"]

VERSION: Final = 5
_HEADER: Final = struct.Struct("<3scHII")
_MAGIC: Final = b"TEP"

# msgspec bounds integers by int64; 64-bit keys and addresses are checked for >= 0 and travel as
# msgpack uint64.
Unsigned = Annotated[int, Meta(ge=0)]
Nic = Annotated[bytes, Meta(min_length=1, max_length=256)]
_NICS_MAX: Final = 64
_SHOWN: Final = 80
"""Characters of a name that `by_address` keeps."""


_UNSOUND: Final = (
    *(msgspec.MsgspecError, OverflowError, UnicodeEncodeError, TypeError, RecursionError),
)


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An object with an envelope."""

    KIND: ClassVar[bytes]

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            value = getattr(self, name)
            try:
                sound = msgspec.convert(value, hint, strict=True)
                msgspec.msgpack.encode(sound)  # integers beyond 64 bits, text that is not UTF-8
            except _UNSOUND as error:
                what = f"{type(self).__name__}: {name}={shown(value)}"
                raise BadDescriptor(f"{what} cannot be: {error}") from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def to_bytes(self) -> bytes:
        """Encode as envelope + payload; `from_bytes` of the same class is the inverse."""
        payload = msgspec.msgpack.encode(self)
        head = _HEADER.pack(_MAGIC, self.KIND, VERSION, len(payload), 0)[:10]
        crc = zlib.crc32(payload, zlib.crc32(head))
        return head + crc.to_bytes(4, "little") + payload

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Decode strictly.

        Raises:
            BadDescriptor: not tep's, of another kind or version, truncated, altered, or with
                impossible fields.
        """
        try:
            found = msgspec.msgpack.decode(_payload(cls, bytes(data)), type=cls, strict=True)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadDescriptor(
                f"{cls.__name__}: payload does not hold its fields: {error}"
            ) from error
        found.check()
        return found

    def check(self) -> None:
        """Raise BadDescriptor where fields contradict each other."""


@lru_cache(maxsize=8)
def _hints(cls: type[_Wire]) -> dict[str, object]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__struct_fields__}


def _payload(cls: type[_Wire], data: bytes) -> bytes:
    name = cls.__name__
    if len(data) < _HEADER.size:
        raise BadDescriptor(
            f"{name}: {len(data)} bytes, but the envelope alone has {_HEADER.size}; truncated?"
        )
    magic, kind, version, length, crc = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise BadDescriptor(
            f"{name}: starts with {magic!r}, not {_MAGIC!r}; these bytes were not written by tep"
        )
    if version != VERSION:
        raise BadDescriptor(
            f"{name}: wire version {version}, this tep reads {VERSION}; "
            "run the same release on both sides"
        )
    if kind != cls.KIND:
        what = _KINDS.get(kind, f"an unknown kind {kind!r}")
        raise BadDescriptor(f"{name}: these bytes are {what}, not a {name}")
    payload = data[_HEADER.size :]
    if len(payload) != length:
        raise BadDescriptor(
            f"{name}: {len(payload)} payload bytes, the envelope says {length}; truncated or padded"
        )
    if zlib.crc32(payload, zlib.crc32(data[:10])) != crc:
        raise BadDescriptor(
            f"{name}: checksum {crc:#010x} does not fit the bytes; altered on the way"
        )
    return payload


class NetAddr(_Wire, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The address of one engine: all NICs of its group, and the engine's incarnation.

    Attributes:
        backend: the registry's name; peers must agree.
        name: the engine's name in reports.
        epoch: number of this incarnation; a restarted engine has a larger one.
        domains: the opaque address of each NIC, in NIC order, 1 to 64.
        link_bps: nominal rate of each NIC, bits a second.
    """

    KIND = b"A"

    backend: str
    name: str
    epoch: Unsigned
    domains: tuple[Nic, ...]
    link_bps: tuple[Unsigned, ...]

    def check(self) -> None:
        """Raise BadDescriptor unless there are 1 to 64 NICs, each with an address and a rate."""
        if not 1 <= len(self.domains) <= _NICS_MAX:
            raise BadDescriptor(f"NetAddr: {len(self.domains)} NICs; 1 to {_NICS_MAX} are possible")
        if len(self.link_bps) != len(self.domains):
            raise BadDescriptor(f"NetAddr: {len(self.domains)} NICs but {len(self.link_bps)} rates")

    def by_address(self) -> NetAddr:
        """Return this address under a unique name: its name and a digest of all fields.

        Use it for addresses from strangers: under such a name no engine is taken for another one,
        nor for another one's later incarnation. All that have the address compute the same name.
        """
        digest = hashlib.blake2b(self.to_bytes(), digest_size=10).hexdigest()
        return msgspec.structs.replace(self, name=f"{self.name[:_SHOWN]}~{digest}")

    def __str__(self) -> str:
        return f"{self.name}@{self.backend}/{len(self.domains)} NICs, epoch {self.epoch}"


class MrDesc(_Wire, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A memory region as its peers see it: owner, length, and its key on each NIC.

    Attributes:
        addr: the owner.
        region: number of the region, unique within the owner's epoch.
        nbytes: length of the region.
        device: "cpu" or "cuda:N".
        writable: False for a region that may only be a source.
        rkeys: the key of each NIC, in NIC order.
        bases: what to add to an offset, for each NIC: the virtual address, or 0 where a provider
            wants offsets.
        readable: True for a region that peers may read.
    """

    KIND = b"M"

    addr: NetAddr
    region: Unsigned
    nbytes: Unsigned
    device: str
    writable: bool
    rkeys: tuple[Unsigned, ...]
    bases: tuple[Unsigned, ...]
    readable: bool = False

    def by_address(self) -> MrDesc:
        """Return the same region of its owner's `NetAddr.by_address`."""
        return msgspec.structs.replace(self, addr=self.addr.by_address())

    def check(self) -> None:
        """Raise BadDescriptor unless the address is sound and every NIC has a key and a base."""
        self.addr.check()
        nics = len(self.addr.domains)
        if not len(self.rkeys) == len(self.bases) == nics:
            raise BadDescriptor(
                f"MrDesc: {nics} NICs, {len(self.rkeys)} keys and {len(self.bases)} bases"
            )

    def __str__(self) -> str:
        return f"region {self.region} ({self.nbytes} bytes, {self.device}) of {self.addr}"


_KINDS: Final = {NetAddr.KIND: "a NetAddr", MrDesc.KIND: "an MrDesc"}
