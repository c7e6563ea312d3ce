"""The worlds of the contract's suite, one a backend; and a net of nodes with guarded memory.

A backend's test file gives the suite a World, which makes nodes, lets time pass and breaks things.
A Net posts and polls at the seam, writes down every completion, and fails at once on one that no
row or message accounts for. It waits by turns, never by sleeping. No clause is tested here.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pytest

from tep.backends.base import (
    Access,
    Batch,
    Column,
    ControlDomain,
    Domain,
    DomainKey,
    Kind,
    ReadBatch,
    ReadDomain,
    Status,
    WriteBatch,
    new_completions,
)
from tep.base.waiting import system_s
from tep.memory.source import Memory, adapt

__all__ = [
    "GUARD", "Ability", "Buffer", "Net", "Node", "OpenWorld", "Seen", "Side", "World",
]  # fmt: skip

T = TypeVar("T")


class Node(Protocol):
    """One engine's worth of NICs; `tep.backends.base.Opened` is one."""

    @property
    def domains(self) -> Sequence[Domain]:
        """The NICs, in NIC order."""


class Ability(Enum):
    """The abilities of a world beside making nodes; a test that needs more is skipped there."""

    KILL = auto()  # end a node as a killed process ends: nothing is said to anybody
    RESTART = auto()  # bring a node back: same name, later incarnation
    FAIL_NIC = auto()  # let one NIC die under its owner
    TWIN = auto()  # make a second world of the same seed, in which the same happens
    FORK = auto()  # the process may fork while nodes are open


class World:
    """The world of one test's nodes. Subclass it, or use OpenWorld.

    Attributes:
        turns_max: turns after which a test gives up waiting.
        quiet_turns: turns after which nothing more arrives.
        burst_rows: immediates in the suite's largest burst; more than any receive queue holds.
        patience_s: real seconds within which a call that must not block has to return.
    """

    abilities: frozenset[Ability] = frozenset()
    turns_max: int = 20_000
    quiet_turns: int = 40
    burst_rows: int = 3_000
    patience_s: float = 5.0

    def node(self, nics: int = 1) -> Node:
        """Open a node; all nodes of one world reach each other."""
        raise NotImplementedError

    def turn(self) -> None:
        """Let a little time pass. The suite polls; this moves whatever else has to move."""

    def doze(self) -> None:
        """Let more time pass, while a test waits for a timeout."""
        self.turn()

    def now_s(self) -> float:
        """Say what time it is on the clock that caps.peer_timeout_s is measured by, seconds."""
        return time.monotonic()

    def returns(self, call: Callable[[], T], what: str) -> T:
        """Run a call that must not block; fail if it has not returned within patience_s."""
        box: list[T] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                box.append(call())
            except BaseException as error:  # noqa: BLE001  # raised again below
                raised.append(error)

        thread = threading.Thread(target=run, name=what, daemon=True)
        thread.start()
        thread.join(system_s(self.patience_s))
        assert not thread.is_alive(), f"C2: {what} has not returned within {self.patience_s} s"
        if raised:
            raise raised[0]
        return box[0]

    def kill(self, node: Node) -> None:
        """End a node as a killed process ends. Ability.KILL."""
        raise NotImplementedError

    def restart(self, node: Node) -> Node:
        """Open a killed node again: its next incarnation. Ability.RESTART."""
        raise NotImplementedError

    def fail_nic(self, node: Node, nic: int) -> None:
        """Let one NIC of a node die. Ability.FAIL_NIC."""
        raise NotImplementedError

    def twin(self) -> World:
        """Make a fresh world of the same seed. Ability.TWIN."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all nodes. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenWorld(World):
    """A world of real time, from a function that opens a node.

    Args:
        open_node: called with the number of NICs, e.g. a backend's `open_domains`.
        abilities: what holds for this backend besides; KILL, RESTART and so on need a subclass.
    """

    def __init__(
        self,
        open_node: Callable[[int], Node],
        abilities: frozenset[Ability] = frozenset({Ability.FORK}),
    ) -> None:
        self.abilities = abilities
        self._open_node = open_node
        self.nodes: list[Node] = []

    def node(self, nics: int = 1) -> Node:
        found = self._open_node(nics)
        self.nodes.append(found)
        return found

    def turn(self) -> None:
        # Else two threads that poll on one CPU take turns of a scheduler's slice.
        os.sched_yield()

    def close(self) -> None:
        for node in reversed(self.nodes):
            for domain in node.domains:
                domain.close()
        self.nodes.clear()


# ---------------------------------------------------------------------- net

GUARD: Final = 4096
"""Bytes before and after each buffer that belong to nobody."""

_BLANK: Final = 0x5A
_GUARD_BYTE: Final = 0xA5
_POLL_ROWS: Final = 16

_TURN_S_MAX: Final = 0.01
"""A turn that takes longer was held up by the machine: the rest of it is not the backend's time."""

Values = int | Sequence[int]
"""One value for all rows, or one a row."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One completion as it came out of poll()."""

    nic: int
    kind: int
    status: int
    count: int
    imm: int
    row: int
    ctx: int
    nbytes: int


class Buffer:
    """Memory registered on every NIC of a side, between two guards; `keys` has one a NIC."""

    def __init__(
        self, domains: Sequence[Domain], data: npt.NDArray[np.uint8], access: Access
    ) -> None:
        self._domains = domains
        self._whole = np.full(len(data) + 2 * GUARD, _GUARD_BYTE, np.uint8)
        self.data = self._whole[GUARD : GUARD + len(data)]
        self.data[:] = data
        self.memory: Memory = adapt(self.data)
        self.keys: list[DomainKey] = [domain.register(self.memory, access) for domain in domains]

    def guards_hold(self) -> bool:
        """Return True if nothing was written before or after the buffer."""
        before, after = self._whole[:GUARD], self._whole[-GUARD:]
        return bool((before == _GUARD_BYTE).all() and (after == _GUARD_BYTE).all())

    def deregister(self) -> None:
        """Withdraw the keys."""
        for domain, key in zip(self._domains, self.keys, strict=True):
            domain.deregister(key)


class Side:
    """One node with a source and a target buffer.

    Attributes:
        source: pseudo-random bytes, never equal to the target's blank ones.
        target: blank, open to peers.
        seen: every completion, in the order of polling.
        out: what it polls into.
        unread: messages that arrived and whose buffers are still out.
        controls: (NIC, payload, sender's address) of each control message that arrived.
        on_imm: called with each immediate at the moment it is polled, before anything else moves.
    """

    def __init__(self, net: Net, node: Node, nbytes: int) -> None:
        self.net = net
        self.node = node
        self.domains = node.domains
        noise = np.random.default_rng(len(net.sides) + 1).integers(0, 255, nbytes, np.uint8)
        noise[noise == _BLANK] = 0xFF
        self.source = Buffer(self.domains, noise, Access.SOURCE)
        self.target = self.buffer(nbytes)
        self.seen: list[Seen] = []
        self.unread: list[Seen] = []
        self.controls: list[tuple[int, bytes, bytes]] = []
        self.on_imm: Callable[[Seen], None] | None = None
        self.accepted: Counter[int] = Counter()  # rows by ctx
        self.returned: Counter[int] = Counter()
        self.reads: set[int] = set()  # which ctx are of reads
        self.sent: Counter[int] = Counter()  # messages by ctx
        self.acknowledged: Counter[int] = Counter()
        self._ctx = 0
        self._peers: dict[tuple[int, bytes], int] = {}
        self.out = new_completions(_POLL_ROWS)

    def buffer(self, nbytes: int, access: Access = Access.SOURCE_AND_TARGET) -> Buffer:
        """Register more blank memory: another target, unless told otherwise."""
        return Buffer(self.domains, np.full(nbytes, _BLANK, np.uint8), access)

    def readable(self, nbytes: int, access: Access = Access.READABLE) -> Buffer:
        """Register more memory that peers may read, with no blank byte in it."""
        found = self.buffer(nbytes, access)
        seed = [nbytes, len(self.net.sides)]
        found.data[:] = np.random.default_rng(seed).integers(_BLANK + 1, 255, nbytes, np.uint8)
        return found

    def untouched(
        self, start: int = 0, stop: int | None = None, buffer: Buffer | None = None
    ) -> bool:
        """Return True if bytes start .. stop of the target, and the guards, are unchanged."""
        buffer = self.target if buffer is None else buffer
        return bool((buffer.data[start:stop] == _BLANK).all()) and buffer.guards_hold()

    def peer(self, to: Side, nic: int = 0, remote: int = 0) -> int:
        """Return the PeerId of another side's NIC, connecting when first asked."""
        address = to.domains[remote].address
        found = self._peers.get((nic, address))
        if found is None:
            found = self._peers[nic, address] = self.domains[nic].connect(address)
        return found

    def batch(
        self,
        to: Side,
        *,
        n: int | None = None,
        src: Values = 0,
        dst: Values = 0,
        nbytes: Values = 64,
        imm: Values | None = None,
        nic: int = 0,
        remote: int = 0,
        rkey: int | None = None,
        target: Buffer | None = None,
        ctx: int | None = None,
    ) -> WriteBatch:
        """Make a batch from this side's source to another's target; src and dst are offsets.

        A list gives a column; its length is the number of rows. Without any list, one row. With
        `n` there are so many, of 64 bytes unless told otherwise, one behind the other.
        """
        if n is not None:
            src = dst = [64 * k for k in range(n)]
        target = to.target if target is None else target
        if ctx is None:
            self._ctx += 1
            ctx = self._ctx
        lengths = [
            len(v) for v in (src, dst, nbytes, imm) if v is not None and not isinstance(v, int)
        ]
        key = target.keys[remote]
        return WriteBatch(
            lengths[0] if lengths else 1,
            self.peer(to, nic, remote),
            _column(src, self.source.memory.ptr),
            self.source.keys[nic].lkey,
            _column(dst, key.base),
            key.rkey if rkey is None else rkey,
            _column(nbytes),
            None if imm is None else _column(imm, dtype=np.uint32),
            ctx,
        )

    def read(
        self,
        owner: Side,
        memory: Buffer,
        *,
        n: int | None = None,
        local: Values = 0,
        remote: Values = 0,
        nbytes: Values = 64,
        nic: int = 0,
        far: int = 0,
        rkey: int | None = None,
        into: Buffer | None = None,
    ) -> ReadBatch:
        """Make a batch of reads from another side's memory into this side's; both are offsets.

        As `batch`: a list gives a column. `far` is the owner's NIC; `into` the target unless given.
        """
        if n is not None:
            local = remote = [64 * k for k in range(n)]
        into = self.target if into is None else into
        self._ctx += 1
        lengths = [len(v) for v in (local, remote, nbytes) if not isinstance(v, int)]
        key = memory.keys[far]
        return ReadBatch(
            lengths[0] if lengths else 1,
            self.peer(owner, nic, far),
            _column(local, into.memory.ptr),
            into.keys[nic].lkey,
            _column(remote, key.base),
            key.rkey if rkey is None else rkey,
            _column(nbytes),
            None,
            self._ctx,
        )

    def try_post(self, batch: Batch, start: int, stop: int, nic: int = 0) -> int:
        """Post once and check the answer's range; C3 is about it."""
        domain = self.domains[nic]
        if isinstance(batch, ReadBatch):
            taken = cast("ReadDomain", domain).post_read(batch, start, stop)
        else:
            assert isinstance(batch, WriteBatch)
            taken = domain.post(batch, start, stop)
        assert 0 <= taken <= stop - start, f"post({start}, {stop}) says {taken} rows"
        self.accepted[batch.ctx] += taken
        if isinstance(batch, ReadBatch):
            self.reads.add(batch.ctx)
        return taken

    def offer(self, batch: Batch, nic: int = 0, stop: int | None = None) -> bool:
        """Post once what is left of a batch, up to row `stop`; True if all of it is posted now."""
        stop = batch.n if stop is None else stop
        start = self.accepted[batch.ctx]
        return start == stop or start + self.try_post(batch, start, stop, nic) == stop

    def post(self, batch: Batch, nic: int = 0) -> None:
        """Post all rows, turning the net while the queue is full."""
        self.net.until(lambda: self.offer(batch, nic), f"post() to take all {batch.n} rows")

    def close(self) -> None:
        """Close all NICs."""
        for domain in self.domains:
            domain.close()

    def send(self, to: Side, payload: bytes, remote: int = 0, nic: int = 0) -> int:
        """Post a message, turning the net while the queue is full; return its ctx."""
        return self._say(self.domains[nic].post_send, self.peer(to, nic, remote), payload)

    def control(self, to: Side, payload: bytes, nic: int = 0, remote: int = 0) -> int:
        """Post a control message, turning the net while the queue is full; return its ctx."""
        domain = cast("ControlDomain", self.domains[nic])
        return self._say(domain.post_control, self.peer(to, nic, remote), payload)

    def _say(self, post: Callable[[int, bytes, int], bool], peer: int, payload: bytes) -> int:
        self._ctx += 1
        ctx = self._ctx
        what = f"a message of {len(payload)} bytes to be taken"
        self.net.until(lambda: post(peer, payload, ctx), what)
        self.sent[ctx] += 1
        return ctx

    def poll(self) -> None:
        """Poll each NIC once and write down what came."""
        for nic, domain in enumerate(self.domains):
            # A field that poll() forgets to fill shows up as junk.
            self.out.view(np.uint8)[:] = 0xEE
            n = domain.poll(self.out)
            assert 0 <= n <= len(self.out), f"poll() of {len(self.out)} rows says {n}"
            for entry in self.out[:n].tolist():
                self._note(Seen(nic, *entry))

    def _note(self, seen: Seen) -> None:
        self.seen.append(seen)
        assert seen.count >= 1, f"a completion that stands for nothing: {seen}"
        match seen.kind:
            case Kind.WRITE | Kind.READ:
                assert (seen.kind == Kind.READ) == (seen.ctx in self.reads), (
                    f"C29: rows of batch {seen.ctx} went the other way: {seen}"
                )
                self.returned[seen.ctx] += seen.count
                back, taken = self.returned[seen.ctx], self.accepted[seen.ctx]
                assert back <= taken, (
                    f"C1: batch {seen.ctx}: {taken} rows taken, {back} completed: {seen}"
                )
            case Kind.SENT:
                self.acknowledged[seen.ctx] += seen.count
                back, taken = self.acknowledged[seen.ctx], self.sent[seen.ctx]
                assert back <= taken, f"C21: message {seen.ctx}: completed {back} times: {seen}"
            case Kind.IMM:
                if self.on_imm is not None:
                    self.on_imm(seen)
            case Kind.RECV:
                assert seen.status == Status.OK, f"C21: a message that did not arrive whole: {seen}"
                self.unread.append(seen)
            case Kind.CONTROL:
                assert seen.status == Status.OK, (
                    f"C24: a control message that did not arrive whole: {seen}"
                )
                domain = cast("ControlDomain", self.domains[seen.nic])
                self.controls.append((seen.nic, *domain.take_control(seen.ctx)))
            case Kind.DOWN | Kind.FENCED:
                pass
            case _:
                raise AssertionError(f"a completion of unknown kind: {seen}")

    @property
    def rows_open(self) -> int:
        """Count the rows taken and not completed."""
        return self.accepted.total() - self.returned.total()

    @property
    def messages_open(self) -> int:
        """Count the messages taken and not acknowledged."""
        return self.sent.total() - self.acknowledged.total()

    def imms(self) -> Counter[int]:
        """Immediates that arrived, by value."""
        found: Counter[int] = Counter()
        for seen in self.seen:
            if seen.kind == Kind.IMM:
                found[seen.imm] += seen.count
        return found

    def rows_ended(self, ctx: int) -> Counter[Status]:
        """Return the final statuses of a batch's rows."""
        found: Counter[Status] = Counter()
        for seen in self.seen:
            if seen.kind in (Kind.WRITE, Kind.READ) and seen.ctx == ctx:
                found[Status(seen.status)] += seen.count
        return found

    def errors(self) -> list[Seen]:
        """Completions that say something failed."""
        return [seen for seen in self.seen if seen.status != Status.OK]

    def senders(self) -> list[bytes]:
        """The NICs that sent the messages that arrived and have not been taken."""
        return [self.domains[seen.nic].recv_source(seen.ctx) for seen in self.unread]

    def messages(self) -> list[bytes]:
        """Take the messages that arrived and have not been taken, and give their buffers back."""
        found = []
        for seen in self.unread:
            domain = self.domains[seen.nic]
            view = domain.recv_view(seen.ctx)
            assert len(view) == seen.nbytes, f"C21: {len(view)} bytes in the buffer: {seen}"
            found.append(bytes(view))
            view.release()
            domain.recv_done(seen.ctx)
        self.unread.clear()
        return found


class Net:
    """The sides of one test, turned together."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sides: list[Side] = []
        self._turns = 0

    def need(self, *abilities: Ability) -> None:
        """Skip the calling test where the world lacks an ability; the first line of such a test."""
        missing = [ability.name for ability in abilities if ability not in self.world.abilities]
        if missing:
            pytest.skip(f"this world cannot {', '.join(missing)}")

    def side(self, nics: int = 1, nbytes: int = 65536, node: Node | None = None) -> Side:
        """Open a node and give it buffers of `nbytes`."""
        node = self.world.node(nics) if node is None else node
        side = Side(self, node, nbytes)
        self.sides.append(side)
        return side

    def pair(self, nics: int = 1, nbytes: int = 65536) -> tuple[Side, Side]:
        """Open two nodes."""
        return self.side(nics, nbytes), self.side(nics, nbytes)

    def forget(self, side: Side) -> None:
        """Poll a side no more: it is dead."""
        self.sides.remove(side)

    def kill(self, side: Side) -> None:
        """End a side's node as a killed process ends. Ability.KILL."""
        self.forget(side)
        self.world.kill(side.node)

    def turn(self) -> None:
        """Let time pass, and poll every NIC once; who comes first changes from turn to turn."""
        self.world.turn()
        self._turns += 1
        for side in self.sides[:: 1 if self._turns % 2 else -1]:
            side.poll()

    def until(self, done: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        """Turn until done() holds, which is asked before each turn.

        Args:
            done: the condition.
            what: the condition in words.
            timeout_s: seconds of the world's clock, less those in which this process was held up;
                None = the world's turns_max turns.
        """
        world = self.world
        # After the last second, time to poll what came in it.
        turns_left = world.turns_max if timeout_s is None else world.quiet_turns
        spent_s, last_s = 0.0, world.now_s()
        for turns in itertools.count():
            if done():
                return
            now_s = world.now_s()
            spent_s += min(now_s - last_s, _TURN_S_MAX)
            last_s = now_s
            if timeout_s is not None and spent_s <= timeout_s:
                world.doze()
            else:
                turns_left -= 1
            if turns_left == 0:
                raise AssertionError(f"waited for {what}: {turns} turns in vain. {self._tell()}")
            self.turn()

    def quiet(self) -> None:
        """Turn until what has not come by now never will: nothing new for quiet_turns turns."""
        idle = 0
        for _ in range(self.world.turns_max):
            before = sum(len(side.seen) for side in self.sides)
            self.turn()
            idle = idle + 1 if before == sum(len(side.seen) for side in self.sides) else 0
            if idle == self.world.quiet_turns:
                return
        raise AssertionError(f"completions without end. {self._tell()}")

    def settle(self) -> None:
        """Turn until every row and message taken is completed, and nothing more comes."""
        self.until(
            lambda: not any(side.rows_open or side.messages_open for side in self.sides),
            "every row and message taken to complete",
        )
        self.quiet()

    def ended(self, side: Side, what: str) -> None:
        """Turn until all rows and messages of a side have ended, within its peer timeout (C17)."""
        limit_s = side.domains[0].caps.peer_timeout_s
        self.until(lambda: not (side.rows_open or side.messages_open), what, limit_s)

    def try_lost(self, side: Side, batch: Batch, what: str) -> Counter[Status]:
        """Post a batch to a peer that is gone, and wait until it has ended (C17); say how."""
        limit_s = side.domains[0].caps.peer_timeout_s
        self.until(lambda: side.offer(batch), "room", limit_s)
        self.ended(side, what)
        return side.rows_ended(batch.ctx)

    def write(self, batch: Batch, side: Side, nic: int = 0) -> None:
        """Post a batch and turn until all is quiet."""
        side.post(batch, nic)
        self.settle()

    def _tell(self) -> str:
        return "; ".join(
            f"side {k}: {side.rows_open} rows and {side.messages_open} messages open, "
            f"{side.imms().total()} immediates, {len(side.errors())} errors seen"
            for k, side in enumerate(self.sides)
        )


def _column(values: Values, base: int = 0, dtype: type[np.unsignedinteger] = np.uint64) -> Column:
    if isinstance(values, int):
        return values + base
    return np.array([value + base for value in values], dtype)
