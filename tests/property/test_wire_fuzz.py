"""Hostile bytes: whatever arrives, decoding returns a sound object or raises BadDescriptor."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep.base.errors import BadDescriptor
from tep.base.wire import VERSION, MrDesc, NetAddr

U64 = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1), st.just(2**64 - 1))
NAMES = st.text(max_size=40)
Wire = NetAddr | MrDesc
CLASSES = {cls.KIND: cls for cls in (NetAddr, MrDesc)}


@st.composite
def addresses(draw: st.DrawFn) -> NetAddr:
    """Draw any address that is sound."""
    domains = draw(st.lists(st.binary(min_size=1, max_size=256), min_size=1, max_size=8))
    rates = st.lists(U64, min_size=len(domains), max_size=len(domains))
    return NetAddr(draw(NAMES), draw(NAMES), draw(U64), tuple(domains), tuple(draw(rates)))


@st.composite
def descriptors(draw: st.DrawFn) -> MrDesc:
    """Draw any descriptor that is sound."""
    addr = draw(addresses())
    column = st.lists(U64, min_size=len(addr.domains), max_size=len(addr.domains)).map(tuple)
    return MrDesc(
        addr, draw(U64), draw(U64), draw(NAMES), draw(st.booleans()), draw(column), draw(column)
    )


OBJECTS = st.one_of(addresses(), descriptors())


def sealed(kind: bytes, payload: bytes) -> bytes:
    """Put a payload into an envelope that fits it, as an attacker would."""
    head = b"TEP" + kind + VERSION.to_bytes(2, "little") + len(payload).to_bytes(4, "little")
    return head + zlib.crc32(head + payload).to_bytes(4, "little") + payload


def decode(cls: type[Wire], data: bytes) -> Wire | None:
    """Decode, or None where it was refused; any other exception ends the test."""
    try:
        return cls.from_bytes(data)
    except BadDescriptor:
        return None


@given(value=OBJECTS)
def test_bytes_and_back(value: Wire) -> None:
    """Decoding must give the encoded fields, and encoding them again the same bytes."""
    data = value.to_bytes()
    found = type(value).from_bytes(data)

    assert value == found
    assert data == found.to_bytes()


@given(data=st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    """Random bytes never pass for an address or a descriptor."""
    for cls in CLASSES.values():
        with pytest.raises(BadDescriptor):
            cls.from_bytes(data)


@given(value=OBJECTS)
def test_truncation_at_every_length_is_refused(value: Wire) -> None:
    """A short read of a socket must not yield an object with fewer NICs."""
    data = value.to_bytes()
    for length in range(0, len(data), max(1, len(data) // 200)):
        with pytest.raises(BadDescriptor):
            type(value).from_bytes(data[:length])


@given(value=OBJECTS, data=st.data())
def test_every_bit_flip_is_refused(value: Wire, data: st.DataObject) -> None:
    """The checksum covers header and payload: no single altered bit goes through."""
    whole = value.to_bytes()
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8

    with pytest.raises(BadDescriptor):
        type(value).from_bytes(flipped)


@given(value=OBJECTS, version=st.integers(0, 2**16 - 1).filter(lambda v: v != VERSION))
def test_other_versions_are_refused_by_number(value: Wire, version: int) -> None:
    """A later release's bytes must be named as such, not called damaged."""
    head = bytearray(value.to_bytes()[:10])
    payload = value.to_bytes()[14:]
    head[4:6] = version.to_bytes(2, "little")
    crc = zlib.crc32(payload, zlib.crc32(head)).to_bytes(4, "little")

    with pytest.raises(BadDescriptor, match=f"wire version {version}, this tep reads {VERSION}"):
        type(value).from_bytes(bytes(head) + crc + payload)


@given(value=OBJECTS)
def test_other_kinds_are_refused(value: Wire) -> None:
    """An address given where a descriptor belongs is a mistake with a name."""
    other = MrDesc if isinstance(value, NetAddr) else NetAddr

    with pytest.raises(BadDescriptor, match=f"not a {other.__name__}"):
        other.from_bytes(value.to_bytes())


@given(payload=st.binary(max_size=200), kind=st.sampled_from(sorted(CLASSES)))
def test_garbage_with_a_right_checksum(payload: bytes, kind: bytes) -> None:
    """The checksum guards against accidents only; behind it the fields are checked as strictly."""
    found = decode(CLASSES[kind], sealed(kind, payload))

    if found is not None:
        found.check()


@given(value=OBJECTS, data=st.data())
def test_altered_payload_with_a_right_checksum(value, data: st.DataObject) -> None:
    """One changed byte of a true payload gives a sound object or BadDescriptor, nothing else."""
    payload = bytearray(value.to_bytes()[14:])
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))

    found = decode(type(value), sealed(value.KIND, bytes(payload)))
    if found is not None:
        found.check()
        assert found == type(value).from_bytes(found.to_bytes())


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner, max_size=3),
)


@pytest.mark.slow
@given(tree=TREES, kind=st.sampled_from(sorted(CLASSES)))
def test_any_messagepack_tree_with_a_right_checksum(tree: object, kind: bytes) -> None:
    """Well-formed MessagePack of another shape: no KeyError, no TypeError, no recursion."""
    found = decode(CLASSES[kind], sealed(kind, msgspec.msgpack.encode(tree)))

    if found is not None:
        found.check()


def test_nesting_bombs_are_refused() -> None:
    """A thousand brackets a peer sends must not exhaust our stack."""
    for depth in (10, 1_000, 100_000):
        for opener in (b"\x91", b"\x95", b"\x97", b"\x81\xa0"):
            with pytest.raises(BadDescriptor):
                MrDesc.from_bytes(sealed(b"M", opener * depth))


def test_length_bombs_are_refused() -> None:
    """A header that promises 4 GiB must not make us allocate them."""
    for header in (b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        with pytest.raises(BadDescriptor):
            NetAddr.from_bytes(sealed(b"A", b"\x95" + header))
