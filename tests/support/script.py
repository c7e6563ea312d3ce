"""A NIC that does what a test tells it to, and an engine over such NICs. Not a test.

It moves no bytes. What it was given to post is written down row by row; what it hands out of poll()
is what the test has put there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from tep.backends.base import (
    Access,
    Completions,
    DomainCaps,
    DomainKey,
    Kind,
    ReadBatch,
    ReadRow,
    Row,
    Status,
    WriteBatch,
)
from tep.base.api import EngineOptions
from tep.base.errors import FabricError, TepError
from tep.drivers.threads import InlineDriver
from tep.engine import TransferEngine
from tep.memory.source import Memory


class Posted(NamedTuple):
    """One row that a NIC took: the row, its batch, and its index there."""

    row: Row | ReadRow
    ctx: int
    index: int


class ScriptNic:
    """A domain on strings; `tep.backends.base.Domain` describes the methods.

    Attributes:
        room: rows it takes before post() says full; the test refills it.
        posted: every row it ever took, in order.
        out: rows it took and has not returned, in order.
        sent: messages it took: (peer, payload, ctx).
        send_room: messages it takes.
        refuse_connect: address -> what connect() raises for it.
        refuse_register: what register() raises.
        refuse_peers: peers whose rows post() does not take, though there is room.
        calls: rows offered in each post().
        slots: messages received and not given back.
        keys: what is registered now.
        closed: close() was called.
    """

    def __init__(
        self, name: str, nic: int, *, max_write_bytes: int = 1 << 40, reads: int = 0
    ) -> None:
        self.caps = DomainCaps(
            backend="script",
            nic=f"{name}/{nic}",
            link_bps=0,
            sq_depth=1 << 30,
            max_write_bytes=max_write_bytes,
            max_msg_bytes=64,
            ordered=False,
            peer_timeout_s=1.0,
            reads=reads,
        )
        self.nic = nic
        self.address = f"{name}/{nic}".encode()
        self.room = 1 << 40
        self.posted: list[Posted] = []
        self.out: deque[Posted] = deque()
        self.sent: list[tuple[int, bytes, int]] = []
        self.send_room = 1 << 40
        self.refuse_connect: dict[bytes, TepError] = {}
        self.refuse_register: FabricError | None = None
        self.keys: list[DomainKey] = []
        self.peers: list[bytes] = []
        self.refuse_peers: set[int] = set()
        self.calls: list[int] = []
        self.slots: dict[int, bytes] = {}
        self.closed = False
        self.waker: Callable[[], None] = lambda: None
        self._events: deque[tuple[int, int, int, int, int, int, int]] = deque()
        self._nkeys = 0

    # --- what tests do

    def finish(self, nrows: int | None = None, status: Status = Status.OK) -> None:
        """Return the oldest rows it holds, all of them by default."""
        for _ in range(len(self.out) if nrows is None else nrows):
            done = self.out.popleft()
            kind = Kind.READ if isinstance(done.row, ReadRow) else Kind.WRITE
            self._events.append((kind, status, 1, 0, done.index, done.ctx, 0))

    def arrive(self, imm: int, count: int = 1) -> None:
        """Let immediates of a peer arrive here."""
        self._events.append((Kind.IMM, Status.OK, count, imm, 0, 0, 0))

    def receive(self, payload: bytes) -> None:
        """Let a message of a peer arrive here."""
        slot = len(self.slots)
        self.slots[slot] = payload
        self._events.append((Kind.RECV, Status.OK, 1, 0, 0, slot, len(payload)))

    def acknowledge(self, status: Status = Status.OK) -> None:
        """Return the messages it took."""
        for _, _, ctx in self.sent:
            self._events.append((Kind.SENT, status, 1, 0, 0, ctx, 0))

    def go_down(self) -> None:
        """Die: what it holds comes back with NIC_DOWN, then it says DOWN."""
        self.finish(status=Status.NIC_DOWN)
        self._events.append((Kind.DOWN, Status.NIC_DOWN, 1, 0, 0, 0, 0))
        self.room = 0

    # --- what the engine does

    def register(self, memory: Memory, access: Access) -> DomainKey:
        if self.refuse_register is not None:
            raise self.refuse_register
        self._nkeys += 1
        number = 100 * (self.nic + 1) + self._nkeys
        # Even NICs want addresses, odd ones offsets: keys and bases all differ between NICs.
        key = DomainKey(number, 7000 + number, 0 if self.nic % 2 else memory.ptr + self.nic)
        self.keys.append(key)
        return key

    def deregister(self, key: DomainKey) -> None:
        self.keys.remove(key)

    def connect(self, peer: bytes) -> int:
        if peer in self.refuse_connect:
            raise self.refuse_connect[peer]
        if peer not in self.peers:
            self.peers.append(peer)
        return 10 * self.nic + self.peers.index(peer)

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        assert not self.closed, "posted on a closed NIC"
        self.calls.append(stop - start)
        taken = self._room(batch, stop - start)
        for index, row in enumerate(batch.rows(start, start + taken), start):
            done = Posted(row, batch.ctx, index)
            self.posted.append(done)
            self.out.append(done)
        self.room -= taken
        return taken

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        assert not self.closed, "a read was posted on a closed NIC"
        taken = self._room(batch, stop - start)
        for index, row in enumerate(batch.rows(start, start + taken), start):
            done = Posted(row, batch.ctx, index)
            self.posted.append(done)
            self.out.append(done)
        self.room -= taken
        return taken

    def _room(self, batch: WriteBatch | ReadBatch, nrows: int) -> int:
        """Return how many of the offered rows it takes."""
        refused = isinstance(batch.peer, int) and batch.peer in self.refuse_peers
        return 0 if refused else min(self.room, nrows)

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        if self.send_room == 0:
            return False
        self.send_room -= 1
        self.sent.append((peer, payload, ctx))
        return True

    def post_recvs(self, nbytes: int, count: int) -> None:
        pass

    def recv_view(self, slot: int) -> memoryview:
        assert not self.closed, "a message was read on a closed NIC"
        return memoryview(self.slots[slot])

    def recv_source(self, slot: int) -> bytes:
        return b"nowhere"

    def recv_done(self, slot: int) -> None:
        assert not self.closed, "a buffer was given back to a closed NIC"
        del self.slots[slot]

    def poll(self, out: Completions) -> int:
        filled = 0
        while self._events and filled < len(out):
            out[filled] = self._events.popleft()
            filled += 1
        return filled

    def status_text(self, status: int) -> str:
        return "as scripted" if status == Status.REMOTE_KEY else ""

    def forget(self, peer: int) -> None:
        """Nothing is kept of a peer that could be given back."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.waker = waker

    def wakeup_fd(self) -> int | None:
        return None

    def arm(self) -> bool:
        return not self._events

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.finish(status=Status.FLUSHED)
            returned = Counter(event[5] for event in self._events if event[0] == Kind.SENT)
            for _, _, ctx in self.sent:
                if not returned[ctx]:
                    self._events.append((Kind.SENT, Status.FLUSHED, 1, 0, 0, ctx, 0))


class Scripted(NamedTuple):
    """An engine, its NICs, and the driver that turns it alone."""

    engine: TransferEngine
    nics: list[ScriptNic]
    driver: InlineDriver

    def turn(self, times: int = 1) -> None:
        """Step and deliver."""
        for _ in range(times):
            self.driver.turn()

    @property
    def posted(self) -> list[Posted]:
        """Every row that any NIC took."""
        return [row for nic in self.nics for row in nic.posted]


def scripted(
    nics: int = 1,
    *,
    name: str = "a",
    epoch: int = 1,
    options: EngineOptions = EngineOptions(),
    max_write_bytes: int = 1 << 40,
    reads: int = 0,
) -> Scripted:
    """Open an engine over NICs on strings."""
    domains = [
        ScriptNic(name, nic, max_write_bytes=max_write_bytes, reads=reads) for nic in range(nics)
    ]
    driver = InlineDriver()
    engine = TransferEngine(domains, driver=driver, name=name, epoch=epoch, options=options)
    return Scripted(engine, domains, driver)


def memory(nbytes: int, ptr: int = 1 << 20) -> Memory:
    """Memory that nobody touches: a region of any size."""
    return Memory(ptr, nbytes, "cpu", False, None)


__all__ = ["Posted", "ScriptNic", "Scripted", "memory", "scripted"]
