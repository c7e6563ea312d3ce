"""Every decoder of the project, against bytes that a stranger could send: typed errors, or a value.

Decoders are found in the sources by their names, and a room that decodes MessagePack has to have
one, so that a new decoder fails here until it is listed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import typing
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tep
from tep.apps.kvcache import instance as kvcache_messages
from tep.apps.kvcache.blocks import messages as block_messages
from tep.apps.kvcache.layout import Placed
from tep.apps.moe.config import MoeConfig
from tep.apps.moe.proxy import pack_hello, unpack_hellos
from tep.apps.rl import metadata as rl_metadata
from tep.apps.rl import ports as rl_ports
from tep.backends import loopback
from tep.backends.libfabric import frames as libfabric_frames
from tep.backends.libfabric import rules as libfabric_rules
from tep.backends.local import channel as local_channel
from tep.backends.verbs import handshake as verbs_handshake
from tep.base.wire import VERSION, MrDesc, NetAddr
from tep.compat.nixl import wire as nixl_wire
from tep.control import messages
from tep.integrations.vllm import terms as vllm_terms
from tep.rendezvous import calls as rendezvous_calls
from tep.rendezvous import wire as rendezvous_wire
from tep.sim import ChaosFabric
from tests.support.effort import effort
from tests.tidy.sources import python_files, text

NAMES = {"from_bytes", "decode", "_decode", "parse", "check_address", "unpack_hellos"}
NO_DECODERS = {
    "tep/base/wire.py::_Wire.from_bytes": "listed by its subclasses",
}
READERS = {
    "tep/compat/engines.py": "a variable of the environment, as JSON",
    "tep/compat/nixl/channel.py": "a frame; what does not decode is counted and dropped",
    "tep/apps/rl/job.py": "an argument of a process that this one starts, as JSON",
    "tep/apps/rl/weights.py": "an index of checkpoint files, a file of the user's own, as JSON",
    "tep/host/hostfiles.py": "a captured machine, a file of the user's own, as JSON",
    "tep/sim/fit.py": "measurements, a file of the user's own, as JSON",
    "tep/integrations/weights/sglang_engine.py": "an order that the server's user gave, as JSON",
    "tep/apps/kvcache/cluster.py": "an argument of a process that this one starts, as JSON",
}


class Case(NamedTuple):
    """A decoder; what it reads; and how bytes that were altered get their checksum again."""

    decode: Callable[[bytes], object]
    samples: list[bytes]
    seal: Callable[[bytes], bytes] = bytes


def a_value(kind: Any) -> Any:
    """Some value of an annotated type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return a_value(inner[0])
    if origin is tuple and inner[-1:] != (...,):  # one value for each place
        return tuple(a_value(arg) for arg in inner)
    if origin in {list, tuple, set, frozenset}:
        return origin(a_value(arg) for arg in inner[:1])
    if origin is dict:
        return {a_value(inner[0]): a_value(inner[1])}
    if inner:  # a union, a literal
        return inner[0] if isinstance(inner[0], (str, int)) else a_value(inner[0])
    plain = {int: 1, float: 1.0, str: "name", bool: True, bytes: b"sixteen bytes..!"}
    plain[msgspec.Raw] = msgspec.Raw(b"\x90")
    if kind in plain:
        return plain[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(**{name: a_value(hints[name]) for name in kind.__struct_fields__})
    return None


def structs(room: ModuleType) -> list[bytes]:
    """Each kind of message of a room, encoded."""
    kinds = [kind for kind in vars(room).values() if isinstance(kind, type)]
    messages = [k for k in kinds if issubclass(k, msgspec.Struct) and k.__module__ == room.__name__]
    return [msgspec.msgpack.encode(a_value(kind)) for kind in messages]


def sealed(kind: bytes, payload: bytes) -> bytes:
    """The envelope of tep.base.wire, with a checksum that fits."""
    head = b"TEP" + kind + VERSION.to_bytes(2, "little") + len(payload).to_bytes(4, "little")
    return head + zlib.crc32(head + payload).to_bytes(4, "little") + payload


ADDR = NetAddr("loopback", "n", 5, (b"abc", b"xyz"), (10, 20))
DESC = MrDesc(ADDR, 3, 4096, "cpu", True, (1, 2**63 + 5), (0, 2**47))
CONFIG = MoeConfig(num_experts=8, topk=2, hidden=128, max_tokens=16, world=1)
NIC = libfabric_rules.NicAddress
TCP = NIC("tcp", 77, "127.0.0.1", b"\x02\0\x10\x01\x7f\0\0\x01" + bytes(8)).to_bytes()
EFA = NIC("efa", 77, "rdmap0", b"\xfe\x80" + bytes(30)).to_bytes()
LOCAL = local_channel.Address(0, 1, 2, local_channel.host_digest(), b"k" * 16).to_bytes()
VERBS = verbs_handshake.Address(
    link=2, lid=1, gid=bytes(16), gid_type=1, ud_qpn=5, qkey=7, epoch=9, identity=11
)
GREETINGS = [
    verbs_handshake.Hello(kind=kind, sender=VERBS, mtu=4, attempt=1, target=5, qps=qps).encode()
    for kind in verbs_handshake.Kind
    for qps in ((), ((5, 6), (7, 8)))
]
SCHEDULE = (rl_metadata._VERSION, 1, ("a",), ("b",), (), b"", 1)


def loopback_address() -> bytes:
    opened = loopback.open_domains()
    for domain in opened.domains:
        domain.close()
    return opened.domains[0].address


CASES: dict[str, list[Case]] = {
    "tep/base/wire.py": [
        case
        for value in (ADDR, DESC)
        for case in (
            Case(type(value).from_bytes, [value.to_bytes()]),
            Case(
                type(value).from_bytes,
                [value.to_bytes()[14:]],
                functools.partial(sealed, value.KIND),
            ),
        )
    ],
    "tep/apps/kvcache/blocks/messages.py::decode": [
        Case(block_messages.decode, structs(block_messages)),
        *(
            Case(functools.partial(block_messages.decode_as, kind), structs(block_messages))
            for kind in (block_messages.Card, block_messages.Ticket)
        ),
        Case(
            functools.partial(block_messages.decode_as, tuple[Placed, ...]),
            [msgspec.msgpack.encode((a_value(Placed),))],
        ),
    ],
    "tep/compat/nixl/wire.py::decode": [
        Case(nixl_wire.decode, structs(nixl_wire)),
        Case(nixl_wire.Remote.read, structs(nixl_wire)),
    ],
    "tep/integrations/vllm/terms.py::decode": [Case(vllm_terms.decode, structs(vllm_terms))],
    "tep/apps/kvcache/instance.py::decode": [
        Case(kvcache_messages.decode, structs(kvcache_messages))
    ],
    "tep/apps/moe/proxy.py::unpack_hellos": [
        Case(lambda data: unpack_hellos(CONFIG, 0, [data]), [pack_hello(CONFIG, DESC)])
    ],
    "tep/apps/rl/ports.py::Regions.from_bytes": [
        Case(rl_ports.Regions.from_bytes, [rl_ports.Regions((0, 64), (DESC, DESC)).to_bytes()])
    ],
    "tep/apps/rl/metadata.py::Schedule.from_bytes": [
        Case(rl_metadata.Schedule.from_bytes, [msgspec.msgpack.encode(SCHEDULE)])
    ],
    "tep/backends/libfabric/rules.py::parse": [
        Case(functools.partial(libfabric_rules.parse, provider=provider), [TCP, EFA])
        for provider in ("tcp", "efa")
    ],
    "tep/backends/libfabric/frames.py::decode": [
        Case(lambda data: libfabric_frames.decode(memoryview(data)), structs(libfabric_frames))
    ],
    "tep/backends/local/channel.py::Address.from_bytes": [
        Case(local_channel.Address.from_bytes, [LOCAL])
    ],
    "tep/backends/local/channel.py::decode": [Case(local_channel.decode, structs(local_channel))],
    "tep/backends/loopback.py::check_address": [Case(loopback.check_address, [loopback_address()])],
    "tep/backends/verbs/handshake.py::Address.decode": [
        Case(verbs_handshake.Address.decode, [VERBS.encode()])
    ],
    "tep/backends/verbs/handshake.py::Hello.decode": [
        Case(verbs_handshake.Hello.decode, GREETINGS)
    ],
    "tep/control/messages.py::decode": [Case(messages.decode, structs(messages))],
    "tep/rendezvous/calls.py::_decode": [Case(rendezvous_calls._decode, structs(rendezvous_calls))],
    "tep/rendezvous/wire.py::decode": [Case(rendezvous_wire.decode, structs(rendezvous_wire))],
    "tep/sim/chaos_target.py::Fabric.parse": [
        Case(lambda data: ChaosFabric.parse(None, data), [b"sim:a/0#1", b"sim:\xff/0#1"])
    ],
}


def found_decoders() -> set[str]:
    """Functions that read bytes, by file and name."""
    found: set[str] = set()

    def walk(path: str, node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                kinds = [ast.unparse(a.annotation) for a in child.args.args if a.annotation]
                if child.name in NAMES and any("bytes" in k or "memoryview" in k for k in kinds):
                    found.add(f"{path}::{inside}{child.name}")
            walk(path, child, f"{child.name}." if isinstance(child, ast.ClassDef) else inside)

    for path in python_files("tep"):
        if re.search(rf"def ({'|'.join(NAMES)})\b", text(path)):
            walk(str(path), ast.parse(text(path)), "")
    return found


def test_every_decoder_is_listed_here() -> None:
    """A decoder that nobody has fed with garbage raises what its caller does not expect."""
    listed = {name for name in CASES if "::" in name} | set(NO_DECODERS)
    rooms = {name.partition("::")[0] for name in (*CASES, *NO_DECODERS, *READERS)}
    readers = {
        str(path)
        for path in python_files("tep")
        if re.search(r"msgspec\.(msgpack|json)\.(decode|Decoder)\(", text(path))
    }

    assert listed == found_decoders()
    assert set() == readers - rooms


def test_whoever_expects_msgspecs_errors_expects_all_of_them() -> None:
    """Text that is not UTF-8 and deep nesting raise what is no MsgspecError; it ended engines."""
    found = [
        f"{path}:{node.lineno}"
        for path in python_files("tep")
        if "MsgspecError" in text(path)
        for node in ast.walk(ast.parse(text(path)))
        if isinstance(node, ast.ExceptHandler)
        and node.type is not None
        and "MsgspecError" in (caught := ast.unparse(node.type))
        and not ("RecursionError" in caught and ("Unicode" in caught or "ValueError" in caught))
    ]

    assert [] == found


BOMBS = [
    *(opener * depth for opener in (b"\x91", b"\x93\x01", b"\x81\xa0") for depth in (10, 5000)),
    *(b"\x95\x01" + head + b"\xff" * 4 for head in (b"\xdd", b"\xdb", b"\xc6", b"\xdf")),
    b"\x93\x01\xc4\x03abc\xa2\xff\xfe",
    b"\x92\x04\xa2\xff\xfe",
    b"",
]
PIECES = st.one_of(
    st.binary(max_size=9),
    st.sampled_from(
        [
            b"\xdd\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xcf" + b"\xff" * 8,
            b"\xd3\x80" + bytes(7),
            b"\xa2\xff\xfe",
            b"\x91" * 3000,
        ]
    ),
)


@st.composite
def altered(draw: st.DrawFn, samples: list[bytes]) -> bytes:
    """A sample cut, with a bit flipped, or with a piece put in or written over; or a bomb."""
    data = bytearray(draw(st.sampled_from(samples + BOMBS)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 3)):
            case 0:
                del data[at:]
            case 1 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case 2:
                data[at:at] = draw(PIECES)
            case _:
                piece = draw(PIECES)
                data[at : at + len(piece)] = piece
    return bytes(data)


def check(case: Case, data: bytes) -> bool:
    """Decode; whether it is read. Anything but a TepError ends the test."""
    with contextlib.suppress(tep.TepError):
        case.decode(data)
        return True
    return False


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{name}-{k}")
        for name, of in CASES.items()
        for k, case in enumerate(of)
    ],
)
def test_what_a_stranger_sends_is_a_value_or_a_typed_error(case: Case) -> None:
    """Each decoder reads its own samples, and raises nothing but tep's errors for any other."""
    read = [case.seal(sample) for sample in case.samples if check(case, case.seal(sample))]
    assert read, "none of the samples passes: the fuzz would stop at the first byte"
    for bomb in BOMBS:
        check(case, case.seal(bomb))

    @settings(max_examples=effort(120, 15))
    @given(data=altered(case.samples))
    def fuzz(data: bytes) -> None:
        check(case, case.seal(data))

    fuzz()
