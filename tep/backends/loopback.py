"""The loopback backend: engines of one process, memory to memory, in an order shuffled by a seed.

Engines may be turned by one thread, or by one each: what other threads touch is in the port. Here
are the sending half of a NIC, its completions, and the backend's two functions. No clock here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Final

from tep.backends.base import (
    Access,
    Batch,
    Completions,
    DomainCaps,
    DomainKey,
    Kind,
    Opened,
    ReadBatch,
    ReadRow,
    Row,
    Status,
    WriteBatch,
)
from tep.backends.checks import check_memory
from tep.backends.columns import Rows, pick, row_of
from tep.backends.hostcopy import HostRegion, offsets_within, spell
from tep.backends.loopback_port import (
    NAME_BYTES_MAX,
    NICS_MAX,
    Hub,
    Port,
    check_address,
    engine_of,
)
from tep.backends.shuffle import Disorder, Entry, Message
from tep.backends.texts import closed, meaning
from tep.base.errors import UsageError
from tep.base.units import MiB
from tep.memory.source import Memory

__all__ = ["HUB", "Hub", "LoopbackDomain", "Way", "open_domains", "probe"]

HUB: Final = Hub()
"""The hub that open_domains() uses unless told otherwise."""

_SQ_DEPTH: Final = 1024  # as deep as the send queues of the paper's engine
_READS: Final = 128  # fewer than writes, so that a run meets this limit as well
_MESSAGES_MAX: Final = 64
_CONTROL_BYTES: Final = 4096
_VECTOR_ROWS: Final = 16  # from here on columns beat a loop

# Plain ints: to store an IntEnum costs numpy three times as much.
_WRITE: Final = int(Kind.WRITE)
_SENT: Final = int(Kind.SENT)
_DOWN: Final = int(Kind.DOWN)
_FENCED: Final = int(Kind.FENCED)
_READ: Final = int(Kind.READ)
_OK: Final = int(Status.OK)


class _State(Enum):
    OPEN = auto()
    DOWN = auto()  # the NIC died; what is posted ends with NIC_DOWN
    CLOSED = auto()


class Way:
    """The rows of one NIC that write, or those that read: what differs between the two.

    Attributes:
        kind: of their completions, a `Kind`.
        depth: rows that may be out.
        died: what rows that are out end with when the NIC dies.
        regions: memory here, by lkey: what writes are from, or what reads are to.
        open: rows that are out.
    """

    __slots__ = ("depth", "died", "kind", "open", "regions")

    def __init__(self, kind: int, depth: int, died: Status) -> None:
        self.kind = kind
        self.depth = depth
        self.died = died
        self.regions: dict[int, HostRegion] = {}
        self.open = 0


class LoopbackDomain:
    """One NIC of the loopback; `tep.backends.base.Domain` describes the methods.

    Args:
        hub: where its peers are.
        name: of its engine; with `nic` the identity that outlives a restart.
        nic: index in its engine. Even NICs want virtual addresses and odd ones offsets, since
            providers differ in this.
        epoch: of its engine's incarnation.
        caps: its limits, enforced.
        seed: of the shuffle; None = in order, nothing held.
    """

    def __init__(
        self, hub: Hub, name: str, nic: int, *, epoch: int, caps: DomainCaps, seed: int | None
    ) -> None:
        self.caps = caps
        self.port = Port(hub, name, nic, epoch)
        self.address = self.port.address
        self._hub = hub
        self._state = _State.OPEN
        self._numbers = itertools.count(1)
        self._writes = Way(_WRITE, caps.sq_depth, Status.NIC_DOWN)
        # What is not copied when the NIC dies never is, so that FLUSHED is the truth (C30).
        self._reads = Way(_READ, caps.reads, Status.FLUSHED)
        self._peer_ids: dict[bytes, int] = {}
        self._peer_addresses: list[bytes] = []
        self._peers: list[Port | Status] = []
        self._open_messages = 0
        self._refused = False
        self._stalled: deque[Message] = deque()  # the peer has no receive posted
        self._disorder = None if seed is None else Disorder(seed, f"{name}/{nic}")
        # Without a shuffle, what arrives is ready at once.
        self._ready: deque[Entry] = self.port.arrived if seed is None else deque()

    # --- memory and peers

    def register(self, memory: Memory, access: Access) -> DomainKey:
        self._check_open()
        check_memory(self.caps, memory, access)
        writable = access.target
        base = 0 if self.port.nic % 2 else memory.ptr
        region = HostRegion(memory, base, writable=writable)
        # Keys differ between NICs and incarnations, and no lkey is an rkey: a mix-up never works.
        number = (self.port.epoch << 24) + (next(self._numbers) << 8) + self.port.nic
        key = DomainKey(lkey=2 * number + 1, rkey=2 * number, base=base)
        self._writes.regions[key.lkey] = region
        if access.sink:
            self._reads.regions[key.lkey] = region
        self.port.grant(key.rkey, region, readable=access.readable)
        return key

    def deregister(self, key: DomainKey) -> None:
        self._writes.regions.pop(key.lkey, None)
        self._reads.regions.pop(key.lkey, None)
        self.port.revoke(key.rkey)

    def connect(self, peer: bytes) -> int:
        self._check_open()
        found = self._peer_ids.get(peer)
        if found is None:
            check_address(peer)
            found = self._peer_ids[peer] = len(self._peers)
            self._peer_addresses.append(peer)
            self._peers.append(self._hub.find(peer))
        return found

    def _reach(self, peer: int) -> Port | Status:
        """Return who is at the other end now."""
        assert 0 <= peer < len(self._peers), (peer, len(self._peers))
        found = self._peers[peer]
        if isinstance(found, Status) or not found.alive:
            found = self._peers[peer] = self._hub.find(self._peer_addresses[peer])
        return found

    # --- writes and reads

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        return self._post(self._writes, batch, start, stop)

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        return self._post(self._reads, batch, start, stop)

    def _post(self, way: Way, batch: Batch, start: int, stop: int) -> int:
        self._check_open()
        assert 0 <= start < stop <= batch.n, (start, stop, batch.n)
        take = min(stop - start, way.depth - way.open)
        if take > 0 and self._disorder is not None:
            take = self._disorder.shorten(take)
        if take <= 0:
            self._refused = True
            self.port.waker()  # polling is what makes room here
            return 0
        way.open += take
        if self._state is _State.DOWN:
            self._fail_rows(way, batch, range(start, start + take), way.died)
        elif self._disorder is not None:
            self._disorder.hold_rows(batch, start, take)
        else:
            self._carry_out(way, batch, slice(start, start + take), take)
        self.port.waker()
        return take

    def _way_of(self, batch: Batch) -> Way:
        return self._reads if isinstance(batch, ReadBatch) else self._writes

    def _carry_out(self, way: Way, batch: Batch, rows: Rows, nrows: int) -> None:
        if nrows == 1:
            index = rows.start if isinstance(rows, slice) else int(rows[0])
            row: Row | ReadRow
            if isinstance(batch, WriteBatch):
                row = row_of(batch, index)
            else:
                row = next(spell(batch, slice(index, index + 1), 1))
            status = self._carry_row(row)
            if status is Status.OK:
                self._finish(way, status, batch.ctx, nbytes=row.nbytes)
            else:
                self._finish(way, status, batch.ctx, row=index)
        elif nrows < _VECTOR_ROWS or not self._carry_columns(way, batch, rows, nrows):
            self._carry_each(way, batch, rows, nrows)

    def _carry_columns(self, way: Way, batch: Batch, rows: Rows, nrows: int) -> bool:
        """Move rows of one length to or from one region at once; False: nothing was moved."""
        peer, rkey, nbytes = batch.peer, batch.rkey, batch.nbytes
        if not (isinstance(peer, int) and isinstance(rkey, int) and isinstance(nbytes, int)):
            return False
        mine = way.regions.get(batch.lkey)
        port = self._reach(peer)
        if mine is None or isinstance(port, Status) or nbytes > self.caps.max_write_bytes:
            return False
        here = offsets_within(pick(batch.src, rows), mine.origin, nbytes, mine.nbytes)
        if here is None:
            return False
        if not port.carry_rows(batch, rows, nrows, mine, here, self.address):
            return False
        self._finish(way, Status.OK, batch.ctx, count=nrows, nbytes=nrows * nbytes)
        return True

    def _carry_each(self, way: Way, batch: Batch, rows: Rows, nrows: int) -> None:
        indices = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        moved = nbytes = 0
        for index, row in zip(indices, spell(batch, rows, nrows)):
            status = self._carry_row(row)
            if status is Status.OK:
                moved += 1
                nbytes += row.nbytes
            else:
                self._finish(way, status, batch.ctx, row=index)
        if moved:
            self._finish(way, Status.OK, batch.ctx, count=moved, nbytes=nbytes)

    def _carry_row(self, row: Row | ReadRow) -> Status:
        if row.nbytes:  # an empty row has no memory here
            if isinstance(row, ReadRow):
                mine, here = self._reads.regions.get(row.lkey), row.local
            else:
                mine, here = self._writes.regions.get(row.lkey), row.src
            if mine is None or not mine.holds(here - mine.origin, row.nbytes):
                return Status.LOCAL_KEY
        if row.nbytes > self.caps.max_write_bytes:
            return Status.LENGTH
        port = self._reach(row.peer)
        return port if isinstance(port, Status) else port.carry_row(row, self.address)

    def _finish(
        self, way: Way, status: Status, ctx: int, *, row: int = 0, count: int = 1, nbytes: int = 0
    ) -> None:
        self._own((way.kind, int(status), count, 0, row, ctx, nbytes))

    def _own(self, entry: Entry) -> None:
        if self._disorder is None:
            self._ready.append(entry)
        else:
            self._disorder.hold_entry(entry)

    def _fail_rows(self, way: Way, batch: Batch, rows: Iterable[int], status: Status) -> None:
        for row in rows:
            self._finish(way, status, batch.ctx, row=row)

    # --- messages

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        self._check_open()
        if self._open_messages >= _MESSAGES_MAX:
            self._refused = True
            return False
        self._open_messages += 1
        message = Message(peer, bytes(payload), ctx)
        if self._disorder is None:
            self._send(message)
        else:
            self._disorder.messages.put(message)
        self.port.waker()
        return True

    def _send(self, message: Message) -> None:
        status = self._try_send(message)
        if status is None:
            self._stalled.append(message)
        else:
            self._own((_SENT, int(status), 1, 0, 0, message.ctx, 0))

    def _try_send(self, message: Message) -> Status | None:
        """Return how it ended, or None where the peer has no receive posted now."""
        if self._state is _State.DOWN:
            return Status.NIC_DOWN
        if len(message.payload) > self.caps.max_msg_bytes:
            return Status.LENGTH
        target = self._reach(message.peer)
        if isinstance(target, Status):
            return target
        return target.take_message(message.payload, self.port)

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        self._check_open()
        if self._open_messages >= _MESSAGES_MAX:
            self._refused = True
            return False
        self._open_messages += 1
        target: Port | Status = Status.NIC_DOWN
        if self._state is not _State.DOWN:
            target = self._reach(peer)
        if not isinstance(target, Status):
            target = target.take_control_in(bytes(payload), self.address)
        self._own((_SENT, int(target), 1, 0, 0, ctx, 0))
        self.port.waker()
        return True

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        return self.port.take_control(slot)

    engine_of = staticmethod(engine_of)

    def source(self, number: int) -> bytes:
        return self.port.source(number)

    def fence(self, source: bytes, ctx: int) -> None:
        self._check_open()
        self.port.fence(source)
        if self._disorder is not None:  # what is held of its immediates comes out first
            self._ready.extend(self._disorder.entries.drain())
            self._ready.extend(self.port.arrived)
            self.port.arrived.clear()
        self._ready.append((_FENCED, _OK, 1, 0, 0, ctx, 0))
        self.port.waker()

    def unfence(self, source: bytes) -> None:
        self._check_open()
        self.port.unfence(source)

    def post_recvs(self, nbytes: int, count: int) -> None:
        self._check_open()
        self.port.add_buffers(nbytes, count)

    def recv_view(self, slot: int) -> memoryview:
        return self.port.view(slot)

    def recv_source(self, slot: int) -> bytes:
        return self.port.message_from(slot)

    def recv_done(self, slot: int) -> None:
        self.port.give_back(slot)

    # --- completions

    def poll(self, out: Completions) -> int:
        for _ in range(len(self._stalled)):
            self._send(self._stalled.popleft())
        if self._disorder is not None:
            self._advance(self._disorder)
        ready, filled, room = self._ready, 0, len(out)
        while filled < room and ready:
            entry = ready.popleft()
            if isinstance(entry, tuple):
                out[filled] = entry
                filled += 1
                if entry[0] == _WRITE:
                    self._writes.open -= entry[2]
                elif entry[0] == _READ:
                    self._reads.open -= entry[2]
                elif entry[0] == _SENT:
                    self._open_messages -= 1
            else:
                fits = min(room - filled, len(entry))
                out[filled : filled + fits] = entry[:fits]
                filled += fits
                if fits < len(entry):
                    ready.appendleft(entry[fits:])
        if ready or (self._refused and filled) or self._disorder:
            self._refused = False
            self.port.waker()
        return filled

    def _advance(self, disorder: Disorder) -> None:
        """Let one turn of the shuffle pass."""
        for batch, rows in disorder.rows.due():
            self._carry_out(self._way_of(batch), batch, rows, len(rows))
        for message in disorder.messages.due():
            self._send(message)
        while self.port.arrived:
            disorder.hold_entry(self.port.arrived.popleft())
        self._ready.extend(disorder.entries.due())

    def status_text(self, status: int) -> str:
        return _STATUS_TEXT.get(status, "")

    def forget(self, peer: int) -> None:
        """Nothing is kept of a peer that could be given back."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.port.waker = waker

    def wakeup_fd(self) -> int | None:
        return None

    def arm(self) -> bool:
        return not (self._ready or self.port.arrived or self._disorder)

    # --- ends

    def close(self) -> None:
        if self._state is not _State.CLOSED:
            self._end(_State.CLOSED, Status.FLUSHED)

    def fail(self) -> None:
        """Let this NIC die as hardware does: NIC_DOWN for all that is open, and Kind.DOWN."""
        if self._state is _State.OPEN:
            self._end(_State.DOWN, Status.NIC_DOWN)
            self._ready.append((_DOWN, int(Status.NIC_DOWN), 1, 0, 0, 0, 0))
            self.port.waker()

    def die(self) -> None:
        """Vanish as a killed process does: peers find nobody, no completion is handed out."""
        self._end(_State.CLOSED, Status.FLUSHED)
        self._ready.clear()
        self.port.arrived.clear()

    def _end(self, state: _State, status: Status) -> None:
        self._state = state
        self.port.shut()
        self._writes.regions.clear()
        self._reads.regions.clear()
        disorder, self._disorder = self._disorder, None
        if disorder is not None:
            self._ready.extend(disorder.entries.drain())
            while self.port.arrived:
                self._ready.append(self.port.arrived.popleft())
            self.port.arrived = self._ready
            for batch, rows in disorder.rows.drain():
                way = self._way_of(batch)
                end = way.died if state is _State.DOWN else status
                self._fail_rows(way, batch, rows.tolist(), end)
            self._stalled.extend(disorder.messages.drain())
        for message in self._stalled:
            self._own((_SENT, int(status), 1, 0, 0, message.ctx, 0))
        self._stalled.clear()
        self.port.waker()

    def _check_open(self) -> None:
        if self._state is _State.CLOSED or not (self.port.alive or self._state is _State.DOWN):
            raise closed(self.caps.nic)


_STATUS_TEXT: Final = meaning(
    UNREACHABLE="no open engine of this process has that address",
    NIC_DOWN="the NIC was made to fail",
)


def open_domains(
    nics: int = 1,
    *,
    hub: Hub | None = None,
    seed: int | None = 0,
    name: str | None = None,
    sq_depth: int = _SQ_DEPTH,
    reads: int = _READS,
    link_bps: int = 0,
    max_write_bytes: int = 1 << 40,
    max_msg_bytes: int = MiB,
) -> Opened:
    """Open the NICs of one engine.

    Args:
        nics: how many, 1 to 64.
        hub: who can be reached; None = all engines of this process that named no hub.
        seed: of the shuffle of rows, immediates and completions; None = in order, nothing held.
        name: for reports, and the identity of a restart: the same name again makes the addresses
            of its closed predecessor stale.
        sq_depth: rows outstanding on one NIC.
        reads: rows of reads outstanding on one NIC; 0 = it has no reads.
        link_bps: nominal rate to report, bits a second; 0 = unknown.
        max_write_bytes: longest row.
        max_msg_bytes: longest message.

    Raises:
        UsageError: an impossible number or name.
    """
    hub = HUB if hub is None else hub
    epoch = hub.next_epoch()
    name = f"loopback-{epoch}" if name is None else name
    if not 1 <= nics <= NICS_MAX:
        raise UsageError(f"loopback: nics={nics}; 1 to {NICS_MAX} are possible")
    if sq_depth < 1 or min(reads, link_bps) < 0 or max_write_bytes < 1 or max_msg_bytes < 1:
        raise UsageError(
            f"loopback: sq_depth={sq_depth} reads={reads} link_bps={link_bps} max_write_bytes="
            f"{max_write_bytes} max_msg_bytes={max_msg_bytes}; reads, rate: 0 or more, others: 1"
        )
    if not 1 <= len(name.encode()) <= NAME_BYTES_MAX:
        raise UsageError(f"loopback: name={name!r}; 1 to {NAME_BYTES_MAX} bytes of UTF-8")
    domains = []
    for nic in range(nics):
        caps = DomainCaps(
            backend="loopback",
            nic=f"{name}/{nic}",
            link_bps=link_bps,
            sq_depth=sq_depth,
            max_write_bytes=max_write_bytes,
            max_msg_bytes=max_msg_bytes,
            ordered=seed is None,
            imm_eats_recv=False,
            peer_timeout_s=1.0,
            control_bytes=_CONTROL_BYTES,
            imm_source=True,
            reads=reads,
            no_reads="it was opened with reads=0",
        )
        domains.append(LoopbackDomain(hub, name, nic, epoch=epoch, caps=caps, seed=seed))
    return Opened(tuple(domains), epoch, name)


def probe() -> str:
    """Say what is here: nothing is needed."""
    return "memory to memory in this process; always here"
