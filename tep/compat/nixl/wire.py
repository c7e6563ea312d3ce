"""The messages between agents, beside the data: metadata, and the messages of transfers."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from tep import BadDescriptor, MrDesc, NetAddr
from tep.compat.nixl.bindings import Rows

__all__ = ["Body", "Forget", "Give", "Grant", "Load", "Metadata", "Notif", "Part", "Region",
           "Remote", "Sums", "WantGrant", "WantSums", "Written", "decode", "encode",
           "find_regions"]  # fmt: skip

_T = TypeVar("_T")

Imm = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
ImmEnd = Annotated[int, Meta(ge=0, le=1 << 32)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Key = tuple[int, int, int, int]


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Registered memory: its kind, address, length and device, and its MrDesc."""

    mem: int
    start: Number
    nbytes: Number
    device: Number
    desc: bytes

    @property
    def key(self) -> Key:
        return self.mem, self.start, self.nbytes, self.device


class Metadata(msgspec.Struct, frozen=True, array_like=True, tag="tep.nixl.1"):
    """The metadata of `get_agent_metadata`; `addr` is a NetAddr, or b"" in partial metadata."""

    name: str
    addr: bytes
    regions: tuple[Region, ...]
    partial: bool


class _Body(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message of an agent."""


class WantGrant(_Body, frozen=True, array_like=True, tag=True):
    """Writer -> target: request immediates to write with."""


class Grant(_Body, frozen=True, array_like=True, tag=True):
    """Target -> writer: grant the immediates start .. stop - 1; none are left if both are equal."""

    start: ImmEnd
    stop: ImmEnd


class Written(_Body, frozen=True, array_like=True, tag=True):
    """Writer -> target: a transfer has ended well; when its immediates are counted, notify."""

    imm: Imm
    count: Number
    notif: bytes | None


class Notif(_Body, frozen=True, array_like=True, tag=True):
    """A notification that waits for no bytes."""

    notif: bytes


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one length in one region of the receiver: its key, their length and offsets."""

    key: Key
    nbytes: Number
    offsets: list[Number]


class WantSums(_Body, frozen=True, array_like=True, tag=True):
    """To the agent at the other end of a transfer: what are the checksums of these rows?"""

    number: Number
    parts: list[Part]


class Sums(_Body, frozen=True, array_like=True, tag=True):
    """Answer: `tep.checksum` of each part, or why they cannot be computed."""

    number: Number
    values: list[int]
    why: str = ""


class Load(_Body, frozen=True, array_like=True, tag=True):
    """Over a socket: this is my metadata."""

    metadata: bytes


class Give(_Body, frozen=True, array_like=True, tag=True):
    """Over a socket: answer with your metadata."""


class Forget(_Body, frozen=True, array_like=True, tag=True):
    """Over a socket: my metadata is void."""

    name: str


Body = WantGrant | Grant | Written | Notif | WantSums | Sums | Load | Give | Forget
_ENCODER = msgspec.msgpack.Encoder()
_BODY: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(Body, strict=True)
_METADATA = msgspec.msgpack.Decoder(Metadata, strict=True)


def encode(value: Body | Metadata) -> bytes:
    """Encode a message or metadata."""
    return _ENCODER.encode(value)


def decode(raw: bytes) -> Body:
    """Decode a message; BadDescriptor if the bytes are none."""
    return _read(_BODY, raw, "message of an agent")


def _read(decoder: msgspec.msgpack.Decoder[_T], raw: bytes, what: str) -> _T:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadDescriptor(f"{len(raw)} bytes are no {what}: {error}") from error


class Remote:
    """Another agent as known here; `addr` is None before its metadata has come."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.addr: NetAddr | None = None
        self.regions: list[tuple[Region, MrDesc]] = []

    @staticmethod
    def read(raw: bytes) -> Metadata:
        """Decode metadata; BadDescriptor if the bytes are none."""
        return _read(_METADATA, raw, "agent's metadata")

    def learn(self, found: Metadata) -> None:
        """Take metadata: full metadata replaces the known regions, partial adds to them."""
        if found.addr:
            self.addr = NetAddr.from_bytes(found.addr).by_address()
        fresh = [(one, MrDesc.from_bytes(one.desc).by_address()) for one in found.regions]
        if found.partial:
            self.regions += fresh
        else:
            self.regions = fresh


def find_regions(regions: list[Region], mem: int, rows: Rows) -> Rows:
    """Find for each row the index of a region that contains it, or -1."""
    found = np.full(len(rows), -1, np.int64)
    named = [
        (index, one.start, one.nbytes, one.device)
        for index, one in enumerate(regions)
        if one.mem == mem
    ]
    kind = np.array(named, np.int64).reshape(-1, 4)
    for device in np.unique(kind[:, 3]):
        mine = kind[kind[:, 3] == device]
        mine = mine[np.argsort(mine[:, 1], kind="stable")]
        # Nearly always no region lies in another: take the last one that begins before a row.
        at = np.searchsorted(mine[:, 1], rows[:, 0], side="right") - 1
        last = mine[at]
        good = (at >= 0) & (rows[:, 2] == device)
        good &= rows[:, 0] + rows[:, 1] <= last[:, 1] + last[:, 2]
        found[good] = last[good, 0]
    left = np.flatnonzero(found < 0)
    if len(left):
        some = rows[left]
        for index, start, nbytes, device in kind.tolist():
            inside = (some[:, 0] >= start) & (some[:, 2] == device)
            found[left[inside & (some[:, 0] + some[:, 1] <= start + nbytes)]] = index
    return found
