"""The seam: what a backend (one NIC = one Domain) owes the engine, and the columns that cross it.

Only data and protocols live here. Queueing, striping, peer groups, counting and retry policy sit
above the seam, once; a backend translates and does not decide. CONTRACT.md has the clauses C1...
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from struct import Struct
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tep.memory.source import Memory

__all__ = [
    "COMPLETION", "COMPLETION_BYTES", "LATER", "SHORT", "Access", "Batch", "CallersTurn", "Column",
    "Completions", "ControlDomain", "Domain", "DomainCaps", "DomainKey", "Entry", "Kind", "Opened",
    "ReadBatch", "ReadDomain", "ReadRow", "Row", "Status", "WriteBatch", "first_completions",
    "hand_out", "new_completions", "put_completion", "take_completion",
]  # fmt: skip

Column = int | npt.NDArray[np.unsignedinteger]
"""One value for every row (an int), or one value a row (an unsigned array)."""


class Kind(IntEnum):
    """The kind of a completion."""

    WRITE = 1  # `count` rows of batch `ctx` finished here, at the sender
    IMM = 2  # `count` immediates `imm` arrived here, each with all bytes of its row
    SENT = 3  # the message `ctx` was delivered, or failed
    RECV = 4  # a message arrived; `ctx` is the slot for recv_view(), `nbytes` its length
    DOWN = 5  # this NIC is gone for good: nothing can be posted on it any more
    CONTROL = 6  # a control message arrived; `ctx` is the slot for take_control()
    FENCED = 7  # fence(): with OK nothing of that sender lands here any more; else it is not known
    READ = 8  # `count` rows of the read batch `ctx` finished here, at the reader


class Status(IntEnum):
    """The status of a completion: the union of the statuses of verbs and EFA."""

    OK = 0
    FLUSHED = 1  # not tried, or given up, because the queue or the domain was closed
    LOCAL_KEY = 2
    REMOTE_KEY = 3
    REMOTE_RANGE = 4
    LENGTH = 5
    RNR = 6  # the peer had no receive posted for too long
    UNREACHABLE = 7  # the peer, or its NIC, does not answer
    STALE_PEER = 8  # the peer is there, in a later incarnation
    NIC_DOWN = 9  # this NIC died; whether the row landed is unknown
    PROVIDER = 10  # anything else; the backend's `status_text` says what
    GIVEN_UP = 11  # a read that this NIC, which lives, may still carry out (C30)


_TARGET, _READABLE, _SINK = 2, 4, 8  # plain numbers: `&` of two flags takes 1 us


class Access(IntFlag):
    """The rights of NICs on a registered region. Rows written from here may read every region.

    Members combine: `Access.SOURCE_AND_TARGET | Access.READABLE`.
    """

    SOURCE = 1  # nothing else: no NIC changes it, so it may be read-only memory
    TARGET = _TARGET  # peers may write here; so may our own reads
    READABLE = _READABLE  # peers may read here
    SINK = _SINK  # our own reads may write here, and peers may not
    SOURCE_AND_TARGET = 3

    @property
    def target(self) -> bool:
        """True if peers may write to the region."""
        return int(self) & _TARGET != 0

    @property
    def readable(self) -> bool:
        """True if peers may read the region."""
        return int(self) & _READABLE != 0

    @property
    def sink(self) -> bool:
        """True if reads of this engine may write here."""
        return int(self) & (_TARGET | _SINK) != 0


COMPLETION = np.dtype(
    [
        ("kind", "u1"),
        ("status", "u1"),
        ("count", "u4"),  # rows, or immediates, that this entry stands for; 1 or more
        ("imm", "u4"),  # Kind.IMM only
        ("row", "u4"),  # Kind.WRITE and READ with an error: index of the row in its batch
        # the batch's, message's, control message's or fence's ctx, or a slot; IMM: its source
        ("ctx", "u8"),
        ("nbytes", "u8"),  # Kind.RECV: bytes of the message. Else 0 or the bytes moved
    ],
    align=True,  # 32 bytes; unaligned columns would cost numpy twice the time
)
"""One completion.

`count` lets one signalled entry stand for a chain, or one burst of equal immediates.
"""

Completions = npt.NDArray[np.void]
"""A preallocated array of COMPLETION that poll() fills from the front."""

Entry = tuple[int, int, int, int, int, int, int]
"""One completion as plain ints: kind, status, count, imm, row, ctx, nbytes."""

COMPLETION_BYTES: Final = COMPLETION.itemsize
put_completion: Final[Callable[..., None]] = Struct("=BBxxIIIQQ").pack_into
"""(out, offset in bytes, the fields): half the price of `out[k] = fields`.

Its stubs, unlike the arrays, do not say that these are buffers.
"""

take_completion: Final[Callable[..., Entry]] = Struct("=BBxxIIIQQ").unpack_from
"""(out, offset in bytes): one entry as plain ints."""


def first_completions(out: Completions, n: int) -> list[Entry]:
    """The first entries as plain ints; for few this is a third of what tolist() costs."""
    return [take_completion(out, at) for at in range(0, n * COMPLETION_BYTES, COMPLETION_BYTES)]


_WRITE, _READ = int(Kind.WRITE), int(Kind.READ)


def hand_out(ready: deque[Entry], out: Completions, at: int) -> tuple[int, int, int]:
    """Fill `out` from entry `at` on; return how many it holds, and how many writes, reads ended."""
    room, rows, reads = len(out), 0, 0
    while ready and at < room:
        entry = ready[0]
        put_completion(out, at * COMPLETION_BYTES, *entry)
        ready.popleft()  # last: for want of memory the lines above may raise
        at += 1
        if entry[0] == _WRITE:
            rows += entry[2]
        elif entry[0] == _READ:
            reads += entry[2]
    return at, rows, reads


def new_completions(nrows: int) -> Completions:
    """Allocate a buffer for poll(): zeros, dtype COMPLETION, `nrows` entries."""
    return np.zeros(nrows, COMPLETION)


SHORT: Final = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.ENOSPC,  # of epoll: fs.epoll.max_user_watches
        errno.ETOOMANYREFS,  # descriptors in flight: RLIMIT_NOFILE
    }
)
"""Errors that may pass: a resource of this process or of the system is used up now (C23)."""

LATER: Final = SHORT | {errno.EAGAIN}
"""The same, and that there is no room at the other end now."""


class Row(NamedTuple):
    """One write, spelled out: the scalar view of a batch's row."""

    peer: int
    src: int
    lkey: int
    dst: int
    rkey: int
    nbytes: int
    imm: int | None


class ReadRow(NamedTuple):
    """One read, spelled out: the scalar view of a read batch's row."""

    peer: int
    local: int
    lkey: int
    remote: int
    rkey: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Batch:
    """Rows as columns, in whichever direction their bytes go: WriteBatch or ReadBatch.

    `src` and `lkey` are of the end that posts, `dst` and `rkey` of the other end. A column may be
    one int that holds for every row. `WriteBatch` says what each of them is.
    """

    n: int
    peer: Column
    src: Column
    lkey: int
    dst: Column
    rkey: Column
    nbytes: Column
    imm: Column | None
    ctx: int


class WriteBatch(Batch):
    """Rows to write, as columns; a column may be one int that holds for every row.

    Attributes:
        n: rows, 1 or more.
        peer: PeerId as connect() returned it.
        src, dst: addresses in bytes; dst already contains the key's `base`.
        lkey, rkey: of the domain this batch is posted on, and of the target's domain.
        nbytes: 0 or more.
        imm: u32, or None when no row carries an immediate.
        ctx: one number for the whole batch; completions name it together with the row.
    """

    __slots__ = ()

    def rows(self, start: int, stop: int) -> Iterator[Row]:
        """Spell out rows start..stop as plain ints, for backends that work row by row."""
        imms: list[int] | list[None] = [None] * (stop - start)
        if self.imm is not None:
            imms = _spelled(self.imm, start, stop)
        columns = (self.peer, self.src, self.lkey, self.dst, self.rkey, self.nbytes)
        return map(Row, *[_spelled(column, start, stop) for column in columns], imms)


class ReadBatch(Batch):
    """Rows to read, as columns; a column may be one int that holds for every row.

    The layout is a WriteBatch's, so that backends and the core can share what handles columns.
    `imm` is None: reads carry no immediate.

    Attributes:
        n, peer, nbytes, ctx: as of a WriteBatch; `peer` is the owner's NIC.
        src, lkey: addresses here, where the bytes go, and the key of their region on the domain
            this batch is posted on.
        dst, rkey: addresses at the owner, where the bytes are; they contain the key's `base`.
    """

    __slots__ = ()

    def rows(self, start: int, stop: int) -> Iterator[ReadRow]:
        """Spell out rows start..stop as plain ints, for backends that work row by row."""
        columns = (self.peer, self.src, self.lkey, self.dst, self.rkey, self.nbytes)
        return map(ReadRow, *[_spelled(column, start, stop) for column in columns])


def _spelled(column: Column, start: int, stop: int) -> list[int]:
    if isinstance(column, int):
        return [column] * (stop - start)
    return column[start:stop].tolist() if stop - start > 1 else [column.item(start)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainCaps:
    """The abilities of one NIC; data, asked once at opening.

    Attributes:
        backend: the registry's name, for people to read; no code may branch on it.
        nic: the device's own name, e.g. "mlx5_0", "127.0.0.1", "a/0".
        link_bps: nominal rate in bits a second, both directions each; 0 where unknown.
        sq_depth: rows that post() may have outstanding at the most.
        max_write_bytes: longest single row, written or read.
        max_msg_bytes: longest message of post_send().
        ordered: whether rows to one peer land in posting order; nothing above may rely on it.
        memory_kinds: devices whose memory can be registered: "cpu", "cuda".
        peer_timeout_s: a dead peer ends in an error completion within this time (C17).
        moves_bytes: False on a model that keeps time only, and copies nothing.
        wakes: False if neither an fd nor the waker tells of news: poll() must be called regularly.
        control_bytes: longest control message of post_control(); 0: it is no `ControlDomain` (C24).
        imm_source: whether immediates say which NIC they came from (C25), and senders can be
            fenced off (C26) and let in again (C27), so that a NIC's death can be made good; needs
            control messages.
        reads: rows that post_read() may have outstanding at the most; 0: it is no `ReadDomain`, and
            has no reads (C29). They are counted apart from sq_depth.
        no_reads: why `reads` is 0, in words, for errors and `explain`.
    """

    backend: str
    nic: str
    link_bps: int
    sq_depth: int
    max_write_bytes: int
    max_msg_bytes: int
    ordered: bool
    memory_kinds: tuple[str, ...] = ("cpu",)
    peer_timeout_s: float
    moves_bytes: bool = True
    wakes: bool = True
    control_bytes: int = 0
    imm_source: bool = False
    reads: int = 0
    no_reads: str = "this backend does not offer them"


@dataclass(frozen=True, slots=True)
class DomainKey:
    """One region's keys on one NIC.

    Attributes:
        lkey: what a row's `lkey` must hold when the region is its end here.
        rkey: what a peer's row must hold as `rkey` when the region is its other end.
        base: what a peer must add to an offset to get a row's `dst`: the virtual address, or 0
            where the provider wants offsets.
    """

    lkey: int
    rkey: int
    base: int


class Domain(Protocol):
    """One NIC.

    All calls come from one thread, the engine's owner; none of them blocks, but `close`.
    """

    caps: DomainCaps
    address: bytes
    """Opaque; names this NIC in this incarnation.

    It travels inside NetAddr and comes back to connect().
    """

    def register(self, memory: Memory, access: Access) -> DomainKey:
        """Make memory known to the NIC. Raises FabricError if the NIC refuses."""

    def deregister(self, key: DomainKey) -> None:
        """Forget a key; later rows that name it fail with LOCAL_KEY or REMOTE_KEY."""

    def connect(self, peer: bytes) -> int:
        """Return the PeerId of an address, always the same. May finish in a later poll.

        Raises BadDescriptor for bytes that cannot be an address of this backend.
        """

    def forget(self, peer: int) -> None:
        """Give back what a peer costs: sockets, mappings. The engine has no more to say to it.

        Its PeerId stays its own, and what is posted to it later reaches it as at first (C28).
        """

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        """Take rows start.. of a batch, up to stop; return how many, a prefix. 0 = full, ask again.

        After a refusal the waker is called (or the fd becomes readable) once there is room.
        """

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        """Take one message, to be acknowledged by SENT, or say False = full, ask again."""

    def post_recvs(self, nbytes: int, count: int) -> None:
        """Add `count` receive buffers of `nbytes` each to this NIC's rotating pool."""

    def recv_view(self, slot: int) -> memoryview:
        """The bytes of a received message; valid until recv_done(slot)."""

    def recv_source(self, slot: int) -> bytes:
        """The address of the NIC that sent it; valid until recv_done(slot). Clause C34."""

    def recv_done(self, slot: int) -> None:
        """Give a message's buffer back to the pool."""

    def poll(self, out: Completions) -> int:
        """Fill `out` from the front with what has finished; return how many entries."""

    def status_text(self, status: int) -> str:
        """Say in words what a status usually means on this backend, or "" for nothing to add."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        """Set what to call, from any thread, when poll() may have something new.

        Fabrics with an fd may ignore it.
        """

    def wakeup_fd(self) -> int | None:
        """A descriptor that becomes readable, once armed, when poll() may have news; None: none."""

    def arm(self) -> bool:
        """Ask for one wake-up on the fd. False: something is waiting already, poll first."""

    def close(self) -> None:
        """End every open row and message with FLUSHED, then free the NIC. Idempotent.

        poll() still hands these completions out.
        """


class ControlDomain(Domain, Protocol):
    """A NIC whose engines can talk to each other: `caps.control_bytes` is 1 or more.

    What they say makes NIC failover, heartbeats and news of failures possible. Clauses C24 to C27;
    all but the first, source(), fence() and unfence(), only where `caps.imm_source` is True.
    """

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        """Take one control message, or say False = full, ask again; acknowledged by SENT.

        Like post_send(), but for the peer's engine: it takes no buffer of the users' pool.
        """

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        """Return a control message that has arrived, and its sender's address. Once a slot."""

    def engine_of(self, address: bytes) -> bytes:
        """Return the identity that the addresses of one engine's incarnation share, and no others.

        Any bytes may be asked about: a peer may have made them up. Those that are no address of
        this backend are returned as they are.
        """

    def source(self, number: int) -> bytes:
        """The address of the NIC behind the `ctx` of an immediate."""

    def fence(self, source: bytes, ctx: int) -> None:
        """Take nothing more of what the NIC at this address has sent, or sends later.

        Ends in one FENCED entry. OK: nothing of it lands here any more, and all its immediates
        that did land were handed out before. Repeatable.
        """

    def unfence(self, source: bytes) -> None:
        """Take rows of the NIC at this address again. Of those that had ended, none lands any more.

        Rows pass for sure, both ways, once its own engine has called this as well, after this one
        and while none of them is out. Nothing happens if it was not fenced; a fence that ended in
        another status than OK stays. Repeatable.
        """


class ReadDomain(Domain, Protocol):
    """A NIC that can read its peers' memory: `caps.reads` is 1 or more. Clauses C29 to C33."""

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        """Take rows start.. of a batch, up to stop; return how many, a prefix. 0 = full, ask again.

        Each ends in one READ completion. As post() in all else.
        """


class CallersTurn:
    """Have whoever submits or waits turn the engine, beside its thread: TurnDriver."""


class Opened(NamedTuple):
    """The result of a backend's `open()`, for the engine.

    Attributes:
        domains: the NICs of one device, in NIC order.
        epoch: this incarnation's number; later incarnations at the same addresses have larger ones.
        name: the engine's name in reports.
        driver: None = a worker thread steps the engine. A backend that needs another driver says
            so: CallersTurn, or its own driver (a `Driver`, which this interface does not know).
        cpus: the CPUs for the engine's worker; () = anywhere.
        about: why these NICs and CPUs were chosen, for `explain`; "" = nothing to say.
        pin: maps host memory into the address space of the engine's GPU, so that kernels can write
            it, and returns the address that they use; None = no GPU was named.
    """

    domains: tuple[Domain, ...]
    epoch: int
    name: str
    driver: object = None
    cpus: tuple[int, ...] = ()
    about: str = ""
    pin: Callable[[Memory], int] | None = None
