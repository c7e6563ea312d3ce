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

An address is what a peer gives back to connect(). Integers are little-endian; the GID is as on the
wire:

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

A datagram (integers little-endian):

    offset  size  field     content
    0       4     magic     b"VHSK"
    4       1     version   3
    5       1     kind      1 = REQ, 2 = REP, 3 = ACK, 4 = STALE, 5 = BYE, 6 = CONTROL,
                            7 = CONTROL_ACK, 8 = CHECK, 9 = CHECKED
    6       1     mtu       the port's, as the library numbers them
    7       1     count     queue pairs listed
    8       4     attempt   the sender's
    12      4     echo      attempt of the receiver that this answers, or 0; number of the control
                            message
    16      8     target    epoch of the incarnation that is meant
    24      48    sender    its address
    72      8 n   (number, first packet sequence number) of each queue pair: messages, then rows;
                  REQ and REP end with how many reads each of these answers at a time (1 byte), and
                  with what they can do beyond the standard (ECE): vendor, options and mask, of 4
                  bytes each, all 0 for nothing;
                  CONTROL: what it says; CHECK, CHECKED: 4 bytes that are the question's own
"""

from __future__ import annotations

import hashlib
import ipaddress
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Final, Protocol

from tep.backends.ffi.ibverbs import ENUMS
from tep.base.errors import BadDescriptor

__all__ = [
    "ADDRESS_BYTES", "DATAGRAM_BYTES_MAX", "NO_ECE", "Actions", "Address", "Ece", "Hello",
    "Kind", "Negotiation", "Patience", "Phase", "QpId", "control_bytes", "engine_of",
    "gid_text", "identity_of", "is_link_local", "is_mapped",
]  # fmt: skip

_LAYOUT: Final = struct.Struct("<4sBBH16sIIQQ")
_VERB: Final = (b"VERB", 1)  # magic and version of an address
ADDRESS_BYTES: Final = _LAYOUT.size

_IB: Final = ENUMS["IBV_LINK_LAYER_INFINIBAND"]
_ETHERNET: Final = ENUMS["IBV_LINK_LAYER_ETHERNET"]
_GID_TYPES: Final = ("InfiniBand", "RoCE v1", "RoCE v2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a NIC; the fields are those of the table above."""

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
        packed = self.gid_type | self.ud_qpn << 8
        return _LAYOUT.pack(
            *_VERB, self.link, self.lid, self.gid, packed, self.qkey, self.epoch, self.identity
        )

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """Read it, strictly.

        Raises:
            BadDescriptor: these bytes cannot be such an address.
        """
        if len(data) != _LAYOUT.size or data[:4] != _VERB[0]:
            raise BadDescriptor(
                f"{bytes(data[:16])!r}... ({len(data)} bytes) is no address of a verbs NIC; is the "
                "peer's engine on another backend?"
            )
        _, version, link, lid, gid, packed, qkey, epoch, identity = _LAYOUT.unpack(data)
        if version != _VERB[1]:
            raise BadDescriptor(
                f"verbs address: version {version}, this tep reads {_VERB[1]}; run the same release"
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


_HEAD: Final = struct.Struct("<4sBBBBIIQ")
_QP: Final = struct.Struct("<II")
_TAIL: Final = struct.Struct("<BIII")
_VHSK: Final = (b"VHSK", 3)  # of a datagram
_QPS_MAX: Final = 17
_MTU_MAX: Final = 5
_PAUSES: Final = 16

_HEAD_BYTES: Final = _HEAD.size + ADDRESS_BYTES

_CONTROL_BYTES_MAX: Final = 912
"""With head and routing header it fills 1 KiB, and goes into a packet of 1,500 bytes."""

_CONTROL_BYTES_MIN: Final = 512
"""A NIC that takes control messages takes as much. Source: C24."""

DATAGRAM_BYTES_MAX: Final = _HEAD_BYTES + max(_CONTROL_BYTES_MAX, _QPS_MAX * _QP.size + _TAIL.size)

QpId = tuple[int, int]
"""Number and first packet sequence number of a queue pair, 24 bits each."""

Ece = tuple[int, int, int]
"""Vendor, options and mask, as struct ibv_ece has them."""

NO_ECE: Final = (0, 0, 0)


def control_bytes(mtu: int) -> int:
    """The longest control message for packets of `mtu` (an enum ibv_mtu); 0 = too short."""
    room = min(_CONTROL_BYTES_MAX, (128 << mtu) - _HEAD_BYTES)
    return room if room >= _CONTROL_BYTES_MIN else 0


class Kind(IntEnum):
    """The kinds of datagrams."""

    REQ = 1
    REP = 2
    ACK = 3
    STALE = 4  # "I am not the incarnation that you mean"
    BYE = 5  # "I am closing"
    CONTROL = 6  # for the peer's engine; repeated until CONTROL_ACK
    CONTROL_ACK = 7
    CHECK = 8  # "do you still have this connection?"
    CHECKED = 9  # "I have"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """One datagram; the fields are those of the table above."""

    kind: Kind
    sender: Address
    target: int
    attempt: int
    echo: int = 0
    mtu: int = 1
    qps: tuple[QpId, ...] = ()
    reads: int = 0
    ece: Ece = NO_ECE
    payload: bytes = b""

    def encode(self) -> bytes:
        """Write it down."""
        count = len(self.qps)
        head = _HEAD.pack(*_VHSK, self.kind, self.mtu, count, self.attempt, self.echo, self.target)
        qps = b"".join(_QP.pack(*qp) for qp in self.qps)
        tail = _TAIL.pack(self.reads, *self.ece) if self.kind in _CONNECTING else b""
        return head + self.sender.encode() + qps + tail + self.payload

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Read it, strictly.

        Raises:
            BadDescriptor: these bytes cannot be such a datagram.
        """
        if len(data) < _HEAD_BYTES or data[:4] != _VHSK[0]:
            raise BadDescriptor(f"{len(data)} bytes that are no handshake of tep")
        _, version, kind, mtu, count, attempt, echo, target = _HEAD.unpack_from(data)
        if version != _VHSK[1] or kind not in Kind.__members__.values():
            raise BadDescriptor(f"handshake of version {version}, kind {kind}")
        sender, rest = Address.decode(data[_HEAD.size : _HEAD_BYTES]), data[_HEAD_BYTES:]
        payload, reads, ece = b"", 0, NO_ECE
        if kind in _CONNECTING:
            if len(rest) < _TAIL.size:
                raise BadDescriptor(f"handshake: {len(data)} bytes are too few for its kind")
            (reads, *said), rest = _TAIL.unpack(rest[-_TAIL.size :]), rest[: -_TAIL.size]
            ece = (said[0], said[1], said[2])
        if kind in _NOTING:
            payload, rest = rest, b""
        if count > _QPS_MAX or len(rest) != count * _QP.size or not 1 <= mtu <= _MTU_MAX:
            raise BadDescriptor(f"handshake: {len(data)} bytes, {count} queue pairs, MTU {mtu}")
        qps = tuple(_QP.iter_unpack(rest))
        if any(number >> 24 or psn >> 24 for number, psn in qps):
            raise BadDescriptor(f"handshake: queue pairs {qps}; numbers have 24 bits")
        if kind in _CONNECTING and not qps:
            raise BadDescriptor("handshake: no queue pairs; one at the least")
        return cls(
            kind=Kind(kind),
            sender=sender,
            target=target,
            attempt=attempt,
            echo=echo,
            mtu=mtu,
            qps=qps,
            reads=reads,
            ece=ece,
            payload=payload,
        )


_CONNECTING: Final = frozenset({Kind.REQ, Kind.REP})
_NOTING: Final = frozenset({Kind.CONTROL, Kind.CHECK, Kind.CHECKED})


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
        """A question goes out."""
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

    Args:
        actions: what is done about it.
        attempts: numbers for our attempts, each larger than the one before.
        patience_s: give up after so long, seconds.
        resend_s: first pause before repeating, seconds.
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
            case Kind.STALE | Kind.BYE | Kind.CONTROL | Kind.CONTROL_ACK:
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
