"""Wire objects by golden bytes, by the table in wire.py's docstring, by each refusal's message."""

from __future__ import annotations

import re
import zlib

import msgspec
import pytest

from tep.base import wire
from tep.base.errors import BadDescriptor
from tep.base.wire import MrDesc, NetAddr

ADDR = NetAddr(
    backend="loopback",
    name="a",
    epoch=7,
    domains=(b"nic0", b"nic1"),
    link_bps=(200_000_000_000, 0),
)
DESC = MrDesc(
    addr=ADDR,
    region=3,
    nbytes=65_536,
    device="cuda:1",
    writable=True,
    rkeys=(2**64 - 1, 2),
    bases=(2**63, 0),
    readable=True,
)

ADDR_PAYLOAD = (
    "95"  # five fields
    "a86c6f6f706261636b"  # "loopback"
    "a161"  # "a"
    "07"  # epoch
    "92c4046e696330c4046e696331"  # two addresses as bin8
    "92cf0000002e90edd00000"  # 200 Gbit/s as uint64, and unknown
)
GOLDEN_ADDR = "544550410500250000006cee6248" + ADDR_PAYLOAD
GOLDEN_DESC = (
    "5445504d05004b000000a95d4e46"
    "98" + ADDR_PAYLOAD + "03"  # eight fields  # region
    "ce00010000"  # 65,536 bytes
    "a6637564613a31"  # "cuda:1"
    "c3"  # writable
    "92cfffffffffffffffff02"  # rkeys: the largest 64-bit key, and 2
    "92cf800000000000000000"  # bases: 2**63, and 0
    "c3"  # readable
)


def sealed(payload: bytes, *, kind: bytes = b"M", version: int = 5, magic: bytes = b"TEP") -> bytes:
    """Put a payload into an envelope whose length and checksum are right."""
    head = magic + kind + version.to_bytes(2, "little") + len(payload).to_bytes(4, "little")
    return head + zlib.crc32(head + payload).to_bytes(4, "little") + payload


@pytest.mark.parametrize(("value", "golden"), [(ADDR, GOLDEN_ADDR), (DESC, GOLDEN_DESC)])
def test_golden_bytes(value: NetAddr | MrDesc, golden: str) -> None:
    """Another release must read what this one wrote; a changed layout needs a new VERSION."""
    assert golden == value.to_bytes().hex()
    assert value == type(value).from_bytes(bytes.fromhex(golden))


def test_who_says_nothing_of_reads_allows_none() -> None:
    """Peers could read whatever an older program had registered for writes."""
    desc = MrDesc(
        addr=ADDR, region=1, nbytes=8, device="cpu", writable=True,
        rkeys=DESC.rkeys, bases=DESC.bases,
    )  # fmt: skip
    assert not desc.readable


def test_docstring_table_matches_the_envelope() -> None:
    """The table is what a second implementation would be written from."""
    found = re.findall(r"^    (\d+) +(\d+|\.\.\.) +(\w+) ", wire.__doc__, re.MULTILINE)

    expected_offset = 0
    for offset, size, _ in found[:-1]:
        assert expected_offset == int(offset)
        expected_offset += int(size)
    assert ["magic", "kind", "version", "length", "crc32", "payload"] == [row[2] for row in found]
    assert (str(expected_offset), "...", "payload") == found[-1]

    data = ADDR.to_bytes()
    field = {name: (int(offset), int(size)) for offset, size, name in found[:-1]}

    def read(name: str) -> bytes:
        offset, size = field[name]
        return data[offset : offset + size]

    payload = data[expected_offset:]
    assert b"TEP" == read("magic")
    assert b"A" == read("kind")
    assert wire.VERSION == int.from_bytes(read("version"), "little")
    assert len(payload) == int.from_bytes(read("length"), "little")
    assert zlib.crc32(data[:10] + payload) == int.from_bytes(read("crc32"), "little")


def test_payload_holds_the_fields_in_class_order() -> None:
    """A reordered field would be read as another one of the same type, without an error."""
    payload = msgspec.msgpack.decode(DESC.to_bytes()[14:])

    assert payload[1:5] == [DESC.region, DESC.nbytes, DESC.device, DESC.writable]
    assert payload[5:] == [list(DESC.rkeys), list(DESC.bases), DESC.readable]
    assert payload[0][:3] == [ADDR.backend, ADDR.name, ADDR.epoch]


def test_docstring_names_every_kind() -> None:
    """A kind that the table forgets is one that a reader cannot recognise."""
    for cls in (NetAddr, MrDesc):
        assert f"{cls.KIND.decode()} = {cls.__name__}" in wire.__doc__


def test_objects_are_values() -> None:
    """A descriptor serves as a key of tables: equal bytes must be equal and hash alike."""
    again = MrDesc.from_bytes(DESC.to_bytes())

    assert again == DESC
    assert hash(again) == hash(DESC)
    with pytest.raises(AttributeError):
        again.region = 4


@pytest.mark.parametrize("container", [bytes, bytearray, memoryview])
def test_any_bytes_like_is_read(container: type) -> None:
    """Messages arrive as memoryviews of a receive buffer; copying them first is needless work."""
    assert DESC == MrDesc.from_bytes(container(DESC.to_bytes()))


def test_descriptions_name_owner_and_epoch() -> None:
    """Error reports identify peers by these lines."""
    assert "a@loopback/2 NICs, epoch 7" == str(ADDR)
    assert "region 3 (65536 bytes, cuda:1) of a@loopback/2 NICs, epoch 7" == str(DESC)


FIELDS = [ADDR, 3, 65_536, "cpu", True, [1, 2], [0, 0], False]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "MrDesc: 0 bytes, but the envelope alone has 14; truncated?"),
        (b"\x80\x04pickle-of-something", "starts with .*; these bytes were not written by tep"),
        (ADDR.to_bytes(), "MrDesc: these bytes are a NetAddr, not a MrDesc"),
        (sealed(b"", kind=b"Z"), "MrDesc: these bytes are an unknown kind b'Z', not a MrDesc"),
        (sealed(b"", version=1), "MrDesc: wire version 1, this tep reads 5; run the same release"),
        (sealed(b"", version=1, kind=b"Z"), "wire version 1"),
        (DESC.to_bytes()[:-1], "74 payload bytes, the envelope says 75; truncated or padded"),
        (DESC.to_bytes() + b"\0", "76 payload bytes, the envelope says 75; truncated or padded"),
        (DESC.to_bytes()[:-1] + b"\1", "MrDesc: checksum 0x464e5da9 does not fit the bytes"),
        (sealed(b""), "MrDesc: payload does not hold its fields"),
        (sealed(b"\xc1"), "MrDesc: payload does not hold its fields"),
        (sealed(msgspec.msgpack.encode({"a": 1})), "payload does not hold its fields"),
        (sealed(msgspec.msgpack.encode(FIELDS[:-2])), "payload does not hold its fields"),
        (sealed(msgspec.msgpack.encode([*FIELDS, 0])), "payload does not hold its fields"),
        (sealed(msgspec.msgpack.encode([ADDR, -1, *FIELDS[2:]])), "payload does not hold"),
        (sealed(msgspec.msgpack.encode([ADDR, 3.0, *FIELDS[2:]])), "payload does not hold"),
        (sealed(msgspec.msgpack.encode([ADDR, "3", *FIELDS[2:]])), "payload does not hold"),
        (
            sealed(msgspec.msgpack.encode([*FIELDS[:5], [1], [0, 0], True])),
            "2 NICs, 1 keys and 2 bases",
        ),
        (
            sealed(msgspec.msgpack.encode([*FIELDS[:5], [1, 2], [0], True])),
            "2 NICs, 2 keys and 1 bases",
        ),
        (
            sealed(msgspec.msgpack.encode([*FIELDS[:5], [1] * 3, [0] * 3, True])),
            "2 NICs, 3 keys and 3 bases",
        ),
        (sealed(b"\x98\x95\xa1\xff"), "MrDesc: payload does not hold its fields"),
    ],
)
def test_refused_by_message(data: bytes, message: str) -> None:
    """Bytes from a peer are hostile: each fault has its words, and nothing half-read escapes."""
    with pytest.raises(BadDescriptor, match=message):
        MrDesc.from_bytes(data)


@pytest.mark.parametrize(
    ("domains", "link_bps", "message"),
    [
        ([], [], "NetAddr: 0 NICs; 1 to 64 are possible"),
        ([b"n"] * 65, [0] * 65, "NetAddr: 65 NICs; 1 to 64 are possible"),
        ([b"n"], [0, 0], "NetAddr: 1 NICs but 2 rates"),
        ([b"n", b"m"], [0], "NetAddr: 2 NICs but 1 rates"),
        ([b""], [0], "NetAddr: payload does not hold its fields"),
        ([b"n" * 257], [0], "NetAddr: payload does not hold its fields"),
        (["text"], [0], "NetAddr: payload does not hold its fields"),
    ],
)
def test_impossible_addresses_are_refused(domains: list, link_bps: list, message: str) -> None:
    """An engine with no NIC, or with a NIC that has no rate, would break the planner."""
    data = sealed(msgspec.msgpack.encode(["b", "n", 1, domains, link_bps]), kind=b"A")

    with pytest.raises(BadDescriptor, match=message):
        NetAddr.from_bytes(data)


def test_descriptor_of_an_impossible_address_is_refused() -> None:
    """The owner inside a descriptor is as hostile as the descriptor."""
    fields = [["b", "n", 1, [], []], 3, 1, "cpu", True, [], [], False]

    with pytest.raises(BadDescriptor, match="NetAddr: 0 NICs"):
        MrDesc.from_bytes(sealed(msgspec.msgpack.encode(fields)))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("region", -1, "MrDesc: region=-1 cannot be: Expected `int` >= 0"),
        ("region", "3", "MrDesc: region='3' cannot be: Expected `int`, got `str`"),
        ("nbytes", 2**64, "MrDesc: nbytes=18446744073709551616 cannot be"),
        ("device", "\udc80", "MrDesc: device=.* cannot be: .* surrogates not allowed"),
    ],
)
def test_what_no_peer_could_read_cannot_be_made(field: str, value: object, message: str) -> None:
    """It would travel, and be refused far from who made it."""
    with pytest.raises(BadDescriptor, match=message):
        msgspec.structs.replace(DESC, **{field: value})
