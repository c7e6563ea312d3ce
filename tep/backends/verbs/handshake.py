"""The address of a NIC, and the way two NICs agree on queue pairs over datagrams; no I/O here.

A datagram may be lost, doubled or late. Its form stands here, for control messages too.

Rule: bytes are hostile until `Address.decode` or `Hello.decode` has returned.

Three messages: REQ "these are my queue pairs", REP "these are mine, and they are ready to receive
from yours", ACK "mine too". Rule 1: a side sends on its queue pairs only once it knows that the
peer's are ready to receive. Rule 2: every attempt has a number, larger than the one before; an
answer to an older attempt is ignored, a request of a newer one replaces what there is. Rule 3: who
waits for an answer repeats itself; who gets a repetition repeats the answer. When both ask at once,
each takes the other's REQ for the answer it needs to get ready, and sends its REP. Who names no
queue pair for writes lets the other write no more: it has fenced it, and what they connect is for
messages only.

CHECK asks whether the connection of two attempts still stands at the peer, and CHECKED says so; who
has none, or another, asks for a fresh one instead. Rule 4: who checks sends nothing on its queue
pairs until the answer to that very question has come.

An address is what a peer gives back to connect(). Both it and a datagram are MessagePack arrays: a
tag with the layout's version, then the fields of the class in order; limits stand at the fields.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterator
from enum import Enum, IntEnum, auto
from typing import Annotated, Final, Protocol

import msgspec
from msgspec import Meta

from tep.backends.common import read_message
from tep.backends.ffi.ibverbs import ENUMS
from tep.base.errors import BadDescriptor

__all__ = [
    "DATAGRAM_BYTES_MAX", "Actions", "Address", "Hello",
    "Kind", "Negotiation", "Patience", "Phase", "QpId", "control_bytes", "engine_of",
    "gid_text", "identity_of", "is_link_local", "is_mapped",
]  # fmt: skip

_IB: Final = ENUMS["IBV_LINK_LAYER_INFINIBAND"]
_GID_TYPES: Final = ("InfiniBand", "RoCE v1", "RoCE v2")
_QPS_MAX: Final = 2

U64 = Annotated[int, Meta(ge=0)]  # no larger one can be written down
U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
U24 = Annotated[int, Meta(ge=0, lt=1 << 24)]


class Address(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="VERB2"
):
    """The address of a NIC.

    Attributes:
        link: 1 = InfiniBand, 2 = Ethernet, as the library numbers link layers.
        lid: InfiniBand only, else 0.
        gid_type: 0 = InfiniBand, 1 = RoCE v1, 2 = RoCE v2.
        ud_qpn, qkey: queue pair that takes handshake datagrams, and the key that it asks of them.
        epoch: of the engine's incarnation.
        identity: hash of engine name and NIC number, which outlives a restart.
    """

    link: Annotated[int, Meta(ge=1, le=2)]
    lid: Annotated[int, Meta(ge=0, lt=1 << 16)]
    gid: Annotated[bytes, Meta(min_length=16, max_length=16)]
    gid_type: Annotated[int, Meta(ge=0, lt=len(_GID_TYPES))]
    ud_qpn: U24
    qkey: U32
    epoch: U64
    identity: U64

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """Read it strictly; raise BadDescriptor for what cannot be such an address."""
        return read_message(_ADDRESS, data, "the address of a verbs NIC")

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
    try:
        return Address.decode(address).epoch.to_bytes(8, "little")
    except BadDescriptor:
        return address


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


_PAUSES: Final = 16

_HEAD_BYTES: Final = 96
"""The most bytes that a datagram takes without queue pairs and payload."""

_CONTROL_BYTES_MAX: Final = 888
"""With head and routing header it fills 1 KiB, and goes into a packet of 1,500 bytes."""

_CONTROL_BYTES_MIN: Final = 512
"""A NIC that takes control messages takes as much. Source: C24."""

DATAGRAM_BYTES_MAX: Final = _HEAD_BYTES + _CONTROL_BYTES_MAX

QpId = tuple[U24, U24]
"""Number and first packet sequence number of a queue pair."""


def control_bytes(mtu: int) -> int:
    """The longest control message for packets of `mtu` (an enum ibv_mtu); 0 = too short."""
    room = min(_CONTROL_BYTES_MAX, (128 << mtu) - _HEAD_BYTES)
    return room if room >= _CONTROL_BYTES_MIN else 0


class Kind(IntEnum):
    """The kinds of datagrams."""

    REQ = 1
    REP = 2
    ACK = 3
    BYE = 5  # "I am closing"
    CONTROL = 6  # for the peer's engine; repeated until CONTROL_ACK
    CONTROL_ACK = 7
    CHECK = 8  # "do you still have this connection?"
    CHECKED = 9  # "I have"


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="VHSK4"):
    """One datagram.

    Attributes:
        target: epoch of the incarnation that is meant.
        attempt: the sender's.
        echo: attempt of the receiver that this answers, or 0; number of a control message.
        mtu: the port's, as the library numbers them.
        qps, reads: of REQ and REP: the queue pairs, for messages and for rows; how many reads each
            answers at a time.
        payload: of CONTROL: what it says; of CHECK and CHECKED: the question's own 4 bytes.
    """

    kind: Kind
    sender: Address
    target: U64
    attempt: U32
    echo: U32 = 0
    mtu: Annotated[int, Meta(ge=1, le=5)] = 1
    qps: Annotated[tuple[QpId, ...], Meta(max_length=_QPS_MAX)] = ()
    reads: Annotated[int, Meta(ge=0, lt=1 << 8)] = 0
    payload: bytes = b""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Read it strictly; raise BadDescriptor for what cannot be such a datagram."""
        found = read_message(_HELLO, data, "a handshake")
        if bool(found.qps) != (found.kind in {Kind.REQ, Kind.REP}):
            raise BadDescriptor(f"handshake {found.kind.name}: queue pairs {found.qps}")
        return found


_ADDRESS: Final = msgspec.msgpack.Decoder(Address)
_HELLO: Final = msgspec.msgpack.Decoder(Hello)


class Phase(Enum):
    """The states of a handshake."""

    IDLE = auto()  # nothing, or given up
    ASKING = auto()  # REQ is out
    READY = auto()  # ours can receive; whether the peer's can is unknown
    UP = auto()
    CHECKING = auto()  # was READY or UP, and CHECK is out


_CONNECTED: Final = frozenset({Phase.READY, Phase.UP, Phase.CHECKING})


class Actions(Protocol):
    """The owner of a negotiation, which acts for it."""

    def begin(self) -> None:
        """Make fresh queue pairs; what there was is given up, its rows come back flushed."""

    def ready(self, hello: Hello) -> None:
        """Let ours receive from those named in `hello`."""

    def up(self) -> None:
        """Let ours send, or go on to."""

    def say(self, kind: Kind, attempt: int, echo: int, payload: bytes = b"") -> None:
        """Send a datagram; REQ and REP name our queue pairs."""

    def give_up(self) -> None:
        """The peer does not answer; what waits for it fails."""


class Patience:
    """The times of a question: when it is repeated, and when its peer is given up.

    Args:
        patience_s: give up after so long, seconds.
        resend_s: first pause before repeating, seconds; it doubles.
        pauses: the longest pause is such a part of the patience, or the first one.

    Attributes:
        next_s: when again() is to be called; None = no question is out.
    """

    def __init__(self, patience_s: float, resend_s: float, pauses: int) -> None:
        self.next_s: float | None = None
        self._patience_s = patience_s
        self._resend_s = self._pause_s = resend_s
        self._pause_s_max = max(resend_s, patience_s / pauses)
        self._deadline_s = 0.0

    def begin(self, now_s: float) -> None:
        self._pause_s = self._resend_s
        self._deadline_s = now_s + self._patience_s
        self.next_s = now_s + self._pause_s

    def is_due(self, now_s: float) -> bool:
        """Whether a question is out, and it is time for again()."""
        return self.next_s is not None and now_s >= self.next_s

    def again(self, now_s: float) -> bool:
        """Whether to repeat the question; False = give the peer up."""
        assert self.next_s is not None
        # If we come late, it is this process that was held up, and not the peer.
        self._deadline_s += now_s - self.next_s
        if now_s >= self._deadline_s:
            self.next_s = None
            return False
        self._pause_s = min(2 * self._pause_s, self._pause_s_max)
        self.next_s = now_s + self._pause_s
        return True


class Negotiation(Patience):
    """One side's view of one peer; `next_s` is when tick() wants to be called, or None.

    `attempts` are numbers for ours, each larger than the one before.
    """

    def __init__(
        self, actions: Actions, attempts: Iterator[int], *, patience_s: float, resend_s: float
    ) -> None:
        # Of so many tries hardly all are lost, even where each third datagram is.
        super().__init__(patience_s, resend_s, _PAUSES)
        self.phase = Phase.IDLE
        self.attempt = 0
        self.remote = 0
        self._actions = actions
        self._attempts = attempts
        self._question = b""

    def start(self, now_s: float) -> None:
        """Ask the peer for a fresh connection."""
        self._renew()
        self.phase = Phase.ASKING
        self.begin(now_s)
        self._actions.say(Kind.REQ, self.attempt, 0)

    @property
    def connected(self) -> bool:
        """Whether ours can receive from the peer's, as far as we know."""
        return self.phase in _CONNECTED

    def check(self, now_s: float) -> None:
        """Ask whether the peer's half of the connection still stands; up() says that it does."""
        assert self.connected, self.phase
        self._question = next(self._attempts).to_bytes(4, "little")
        self.phase = Phase.CHECKING
        self.begin(now_s)
        self._actions.say(Kind.CHECK, *self._pair, self._question)

    def lose(self) -> None:
        """The queue pairs failed, or the peer is gone: there is no connection any more."""
        self.phase = Phase.IDLE
        self.next_s = None

    def hear(self, hello: Hello, now_s: float) -> None:
        """Take a datagram of this peer that means this incarnation, and is no control message."""
        match hello.kind:
            case Kind.REQ:
                self._hear_request(hello, now_s)
            case Kind.REP:
                self._hear_reply(hello, now_s)
            case Kind.ACK:
                if self.phase is Phase.READY and (hello.echo, hello.attempt) == self._pair:
                    self._go_up()
            case Kind.CHECK:
                self._hear_check(hello, now_s)
            case Kind.CHECKED:
                if self.phase is Phase.CHECKING and hello.payload == self._question:
                    self._go_up()
            case Kind.BYE | Kind.CONTROL | Kind.CONTROL_ACK:
                raise AssertionError("the owner deals with these")

    def tick(self, now_s: float) -> None:
        """Repeat what was not answered, or give up."""
        if not self.is_due(now_s):
            return
        if not self.again(now_s):
            if self.phase is not Phase.READY:
                self.phase = Phase.IDLE
            self._actions.give_up()
            return
        if self.phase is Phase.ASKING:
            self._actions.say(Kind.REQ, self.attempt, 0)
        elif self.phase is Phase.CHECKING:
            self._actions.say(Kind.CHECK, *self._pair, self._question)
        else:
            self._actions.say(Kind.REP, *self._pair)

    @property
    def _pair(self) -> tuple[int, int]:
        return self.attempt, self.remote

    def _hear_request(self, hello: Hello, now_s: float) -> None:
        if hello.attempt < self.remote:
            return
        known = hello.attempt == self.remote and self.connected
        if not known:
            if self.phase is not Phase.ASKING:
                self._renew()
            self.remote = hello.attempt
            self._actions.ready(hello)
            self.phase = Phase.READY
            self.begin(now_s)
        elif self.phase is Phase.CHECKING:
            self.next_s = now_s + self._pause_s  # who asks has no answer to a question
        self._actions.say(Kind.REP, *self._pair)

    def _hear_reply(self, hello: Hello, now_s: float) -> None:
        if self.phase is not Phase.ASKING and hello.attempt > self.remote:
            # The peer has made fresh queue pairs since, perhaps in answer to an older request:
            # ours belong to ones that are gone, or are gone themselves.
            self.start(now_s)
            return
        if hello.echo != self.attempt or self.phase is Phase.IDLE:
            return
        if self.phase is Phase.ASKING:
            self.remote = hello.attempt
            self._actions.ready(hello)
        elif hello.attempt < self.remote:
            return
        if self.phase in {Phase.ASKING, Phase.READY}:
            self._go_up()
        self._actions.say(Kind.ACK, *self._pair)

    def _hear_check(self, hello: Hello, now_s: float) -> None:
        if self.connected and (hello.echo, hello.attempt) == self._pair:
            self._actions.say(Kind.CHECKED, *self._pair, hello.payload)
        elif hello.attempt >= self.remote and self.phase is not Phase.ASKING:
            self.start(now_s)

    def _renew(self) -> None:
        self.attempt = next(self._attempts)
        self._actions.begin()

    def _go_up(self) -> None:
        self.phase = Phase.UP
        self.next_s = None
        self._actions.up()
