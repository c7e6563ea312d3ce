"""The record of a backend interface: rows posted and returned, immediates delivered.

A Tap stands between an engine and one simulated NIC. It changes nothing; the oracle judges by this
record, and shares no code with the engine.
"""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from tep.backends.base import (
    Batch,
    Completions,
    Entry,
    Kind,
    ReadBatch,
    Status,
    WriteBatch,
    first_completions,
    take_completion,
)
from tep.control.membership import PeerChange, PeerEvent
from tep.sim.chaos import ChaosNic
from tep.sim.chaos_parts import NicState
from tests.world.turns import Turns

_Taken = TypeVar("_Taken")

_WRITE, _IMM, _DOWN, _SENT = int(Kind.WRITE), int(Kind.IMM), int(Kind.DOWN), int(Kind.SENT)
_READ: Final = int(Kind.READ)
_OK = int(Status.OK)


@dataclass(slots=True, eq=False, kw_only=True)
class Mover:
    """The owner of rows, as a tap sees it: one transfer.

    Attributes:
        posted, back, failed: rows that NICs took, handed back, and handed back with an error.
        faults: (status, NIC of the sender) of each kind of error that its rows had.
        reads_out: rows among them that read, and that NICs hold.
    """

    posted: int = 0
    back: int = 0
    failed: int = 0
    reads_out: int = 0
    faults: set[tuple[int, int]] = field(default_factory=set)

    def may_post(self) -> str:
        """Say why no row of it may be posted now; "" if it may."""
        return ""

    def is_failing(self) -> bool:
        """Return True if it has an error, and will fail although none of its rows did."""
        return False


class Ledger:
    """The account of one engine.

    Attributes:
        imms: arrivals handed to the engine, by immediate.
        movers: the transfer of each batch, by its ctx.
        batches: the last batch of each ctx.
        silent: NICs of peers that did not answer one of this engine's, by node: its number and
            their address; all of them again once all were silent.
        was_silent: all that ever were.
        unsure: nodes that an engine may know more about: a NIC of theirs answered again, rows
            to them were flushed with a control message that got lost, or a message did not
            arrive.
        rows, nbytes: rows and bytes that each NIC took.
        reads, read_bytes: rows that read, and their bytes.
        turns: the record of waits at the NICs.
        seen: the coverage counters.
    """

    def __init__(
        self,
        find: Callable[[Batch, int], Mover | None],
        nics: int,
        rows_max: int,
        depth: int,
        *,
        in_pieces: bool = False,
    ) -> None:
        self.find = find
        self.imms: defaultdict[int, int] = defaultdict(int)
        self.movers: dict[int, Mover] = {}
        self.batches: dict[int, Batch] = {}
        self.silent: dict[bytes, set[tuple[int, bytes]]] = {}
        self.was_silent: set[bytes] = set()
        self.unsure: set[bytes] = set()
        self.rows = [0] * nics
        self.nbytes = [0] * nics
        self.reads = [0] * nics
        self.read_bytes = [0] * nics
        self.seen: defaultdict[str, int] = defaultdict(int)
        self.wrong: list[str] = []
        self.turns = Turns(nics, rows_max, depth, self.wrong.append, in_pieces=in_pieces)

    def heard_of(self, event: PeerEvent) -> None:
        """The engine says that something changed at a peer."""
        if event.kind is PeerChange.NIC_BACK:
            self.unsure.add(f"sim:{event.peer}#{event.epoch}".encode())
            self.seen["NIC back"] += 1


class Tap:
    """One NIC, as its engine sees it; a Domain of the seam.

    Attributes:
        down: whether the engine was told that this NIC is gone.
        fenced_off: whom its engine has ever fenced off.
        unconnected: how often it could not connect.
    """

    def __init__(self, nic: ChaosNic, ledger: Ledger) -> None:
        self.nic = nic
        self.down = False
        self.fenced_off: set[bytes] = set()
        self.unconnected = 0
        self.caps = nic.caps
        self.address = nic.address
        self._ledger = ledger
        self._outstanding = 0
        self._addresses: dict[int, bytes] = {}
        self._messages: dict[int, int] = {}  # the peer of each message, by ctx
        self._number, self._stepped, self._poll = nic.number, ledger.turns.stepped, nic.poll
        self._fresh, self._queued, self._offered = ledger.turns.watched(nic.number)
        self._entries = nic.entries
        # Bound methods in place of forwarding ones: what is not watched costs nothing.
        self.register = nic.register
        self.deregister = nic.deregister
        self.post_recvs = nic.post_recvs
        self.recv_view = nic.recv_view
        self.recv_source = nic.recv_source
        self.recv_done = nic.recv_done
        self.post_control = nic.post_control
        self.take_control = nic.take_control
        self.engine_of = nic.engine_of
        self.source = nic.source
        self.status_text = nic.status_text
        self.set_waker = nic.set_waker
        self.wakeup_fd = nic.wakeup_fd
        self.arm = nic.arm

    def is_closed_to(self, other: Tap) -> bool:
        """Return True if another NIC may have no route: one is dead, was silent, or is fenced."""
        alive = self.is_useful and other.is_useful
        ledger = other._ledger
        unheard = self.address in ledger.was_silent or _node_of(self.address) in ledger.unsure
        return not alive or unheard or other.address in self.fenced_off

    @property
    def is_useful(self) -> bool:
        """Return True if its NIC lives, and its engine has not given it up."""
        return self.nic.state is NicState.UP and not self.down

    def fence(self, source: bytes, ctx: int) -> None:
        self.fenced_off.add(source)
        self.nic.fence(source, ctx)

    def unfence(self, source: bytes) -> None:
        self._ledger.seen["path opened again"] += 1
        self.nic.unfence(source)

    def forget(self, peer: int) -> None:
        self.nic.forget(peer)

    def connect(self, peer: bytes) -> int:
        try:
            found = self.nic.connect(peer)
        except OSError:
            self.unconnected += 1
            raise
        self._addresses[found] = peer
        return found

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        self._messages[ctx] = peer
        return self._try(self.nic.post_send, peer, payload, ctx)

    def _try(self, post: Callable[..., _Taken], *args: object) -> _Taken:
        """Post. If that raises, and no signal was why, its engine posts no more rows here."""
        try:
            return post(*args)
        except (OSError, MemoryError) as error:
            self._ledger.turns.forget()
            if not (isinstance(error, OSError) and error.errno == errno.EINTR):
                self._lose()
            raise

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        taken = self._try(self.nic.post, batch, start, stop)
        if self.down:
            self._ledger.wrong.append(f"{self.caps.nic}: posted on although it is known to be dead")
        if taken < stop - start:
            self._ledger.seen["short post" if taken else "post refused"] += 1
        mover = self._mover(batch, start)
        if mover is not None:
            if taken:
                self._note(batch, start, taken, mover)
            left = batch.n - start - taken
            self._ledger.turns.offered(self.nic.number, mover, batch.ctx, taken, left)
        return taken

    def _mover(self, batch: Batch, start: int) -> Mover | None:
        ledger = self._ledger
        mover = ledger.movers.get(batch.ctx)
        if mover is None or start == 0:
            mover = ledger.find(batch, start)
            if mover is None:
                what = f"{self.caps.nic}: row {start} is of no transfer ever submitted"
                ledger.wrong.append(what)
                return None
            ledger.movers[batch.ctx] = mover
            ledger.batches[batch.ctx] = batch
        return mover

    def _note(self, batch: WriteBatch, start: int, taken: int, mover: Mover) -> None:
        ledger = self._ledger
        self._outstanding += taken
        why = mover.may_post()
        if why:
            ledger.wrong.append(f"{self.caps.nic}: {taken} rows posted, but {why}")
        if ledger.silent:
            self._check_silent(batch, start, taken)
        mover.posted += taken
        ledger.rows[self.nic.number] += taken
        ledger.nbytes[self.nic.number] += _bytes_of(batch, start, taken)

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        taken = self._try(self.nic.post_read, batch, start, stop)
        ledger, number = self._ledger, self.nic.number
        if self.down:
            ledger.wrong.append(f"{self.caps.nic}: reads posted although it is known to be dead")
        mover = self._mover(batch, start)
        if mover is None or not taken:
            return taken
        why = mover.may_post()
        if why:
            ledger.wrong.append(f"{self.caps.nic}: {taken} rows of reads posted, but {why}")
        mover.posted += taken
        mover.reads_out += taken
        ledger.reads[number] += taken
        ledger.read_bytes[number] += _bytes_of(batch, start, taken)
        return taken

    def close(self) -> None:
        self._ledger.turns.forget()
        self.nic.close()

    def poll(self, out: Completions) -> int:
        if (self._fresh or self._queued or self._offered) and not self.down:
            self._stepped(self._number, self._outstanding)
        if not self._entries:
            return 0
        n = self._poll(out)
        if n:
            self._read((take_completion(out),) if n == 1 else first_completions(out, n))
        return n

    def _read(self, entries: Sequence[Entry]) -> None:
        ledger = self._ledger
        for kind, status, count, imm, row, ctx, _nbytes in entries:
            if kind == _IMM:
                ledger.imms[imm] += count
            elif kind == _WRITE:
                mover = ledger.movers[ctx]
                mover.back += count
                self._outstanding -= count
                if status != _OK:
                    self._note_failed(mover, count, status, "row")
                    if status == Status.UNREACHABLE:
                        self._control_silent(ledger.batches[ctx], row)
                    elif status == Status.FLUSHED:
                        ledger.unsure.add(self._to(ledger.batches[ctx], row)[0])
            elif kind == _READ:
                self._read_back(count, status, ctx, row)
            elif kind == _SENT and status != _OK and ctx in self._messages:
                # The engine may take that NIC for dead, and move what waits for it.
                ledger.turns.forget()
                ledger.unsure.add(_node_of(self._addresses[self._messages[ctx]]))
            elif kind == _DOWN:
                self._lose()
                ledger.seen["NIC down"] += 1

    def _read_back(self, count: int, status: int, ctx: int, row: int) -> None:
        ledger = self._ledger
        mover = ledger.movers[ctx]
        mover.back += count
        mover.reads_out -= count
        if status == _OK:
            return
        self._note_failed(mover, count, status, "row of a read")
        if status in {Status.UNREACHABLE, Status.FLUSHED, Status.GIVEN_UP}:
            # What an engine makes of it for writes is not said by the contract.
            node, address = self._to(ledger.batches[ctx], row)
            ledger.unsure.add(node)
            ledger.was_silent.add(address)

    def _note_failed(self, mover: Mover, count: int, status: int, what: str) -> None:
        self._ledger.turns.forget()
        mover.failed += count
        mover.faults.add((status, self.nic.number))
        self._ledger.seen[f"{what} {Status(status).name}"] += 1
        if status == Status.NIC_DOWN:
            self._lose()

    def _lose(self) -> None:
        self.down = True
        self._ledger.turns.lost(self.nic.number)

    def _to(self, batch: Batch, row: int) -> tuple[bytes, bytes]:
        """Incarnation of a node, and address of its NIC, that a row goes to."""
        peer = batch.peer if isinstance(batch.peer, int) else int(batch.peer[row])
        address = self._addresses[peer]
        return _node_of(address), address

    def _control_silent(self, batch: Batch, row: int) -> None:
        node, address = self._to(batch, row)
        silent = self._ledger.silent.setdefault(node, set())
        silent.add((self._number, address))
        self._ledger.was_silent.add(address)
        name = node.partition(b":")[2].rpartition(b"#")[0].decode()
        if len({its for _, its in silent}) == len(self.nic.fabric.nodes[name].domains):
            del self._ledger.silent[node]  # perhaps it is back: everything may be tried again

    def _check_silent(self, batch: WriteBatch, start: int, taken: int) -> None:
        for row in range(start, start + taken):
            node, address = self._to(batch, row)
            known = (self._number, address) in self._ledger.silent.get(node, ())
            if known and node not in self._ledger.unsure:
                self._ledger.wrong.append(
                    f"{self.caps.nic}: a row posted to {address!r}, which is known not to answer"
                )


def _bytes_of(batch: Batch, start: int, rows: int) -> int:
    """Bytes of some rows."""
    sizes = batch.nbytes
    if isinstance(sizes, int):
        return sizes * rows
    return int(np.sum(sizes[start : start + rows]))


def _node_of(address: bytes) -> bytes:
    """The incarnation of a node that a NIC belongs to."""
    node, _, rest = address.rpartition(b"/")
    return node + b"#" + rest.partition(b"#")[2]
