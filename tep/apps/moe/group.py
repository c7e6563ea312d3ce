"""The ranks of one all-to-all: how they exchange hellos, and the link within a node.

A link moves bytes between arenas of one node by loads and stores, and counts flags. Rule 1: whoever
has seen a flag sees all that its sender pushed before (release and acquire); nothing else is
promised, neither order nor that bytes arrive whole. `Nvlink` is a fabric of its own in the
simulator: each GPU has one port, which carries so many bytes a second in each direction, and the
switch between ports is perfect; with `chaos` the bytes come in pieces, in any order, late.
`SharedMemory` is one real host: an arena is an anonymous memory file, which peers of the same user
open through /proc, and nothing is left behind when a process dies. Rule 2: its flags go through the
engine, whose system calls and locks order them behind the stores before.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from tep import UsageError
from tep.apps.moe.config import Batch
from tep.apps.moe.payload import Bytes

if TYPE_CHECKING:
    from tep import MrDesc, TransferEngine

__all__ = [
    "Board", "Exchange", "Group", "Move", "NodeLink", "Nvlink", "NvlinkPort", "NvlinkTimes",
    "Settles", "SharedMemory", "local_groups",
]  # fmt: skip


Exchange = Callable[[bytes], Awaitable[list[bytes]]]
"""Give every rank's bytes to every rank, by rank; e.g. a rendezvous group's `all_gather`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One rank's view.

    Attributes:
        rank, world: this one, and how many.
        exchange: gives bytes to all ranks, once.
        node_size: neighbouring ranks that share a node; 1 = all payload goes through the engine.
        link: the node's link; needed if node_size > 1.
        board: what ranks of one process may share where no bytes are moved; None elsewhere.
    """

    rank: int
    world: int
    exchange: Exchange
    node_size: int = 1
    link: NodeLink | None = None
    board: Board | None = None

    def __post_init__(self) -> None:
        """Refuse a rank that is none, and a node without a link.

        Raises:
            UsageError: with the values.
        """
        if not 0 <= self.rank < self.world:
            raise UsageError(f"Group: rank={self.rank} world={self.world}; 0 <= rank < world")
        if self.node_size > 1 and self.link is None:
            raise UsageError(f"Group: node_size={self.node_size} needs a link within the node")


@dataclass(slots=True)
class Board:
    """The exchange of hellos among the ranks of one process.

    Attributes:
        batches: (turn, DP group) -> its copies; where no bytes are moved, this is how the model of
            a rank learns what the bytes would have told it. It is read once the immediates that
            vouch for those bytes are counted, never before.
    """

    world: int
    batches: dict[tuple[int, int], Batch] = field(default_factory=dict)
    _hellos: dict[int, dict[int, bytes]] = field(default_factory=dict)
    _ready: dict[int, asyncio.Future[list[bytes]]] = field(default_factory=dict)
    _rounds: dict[int, int] = field(default_factory=dict)

    def publish(self, turn: int, group: int, batch: Batch) -> None:
        """Note a group's copies, and forget those of two turns before."""
        self.batches[turn, group] = batch
        self.batches.pop((turn - 2, group), None)

    async def exchange(self, rank: int, data: bytes) -> list[bytes]:
        """Give every rank's bytes to every rank of this process."""
        turn = self._rounds[rank] = self._rounds.get(rank, 0) + 1
        hellos = self._hellos.setdefault(turn, {})
        hellos[rank] = data
        ready = self._ready.setdefault(turn, asyncio.get_running_loop().create_future())
        if len(hellos) == self.world and not ready.done():
            ready.set_result([hellos[k] for k in range(self.world)])
        return await ready


def local_groups(
    world: int, *, node_size: int = 1, links: Callable[[int], NodeLink] | None = None
) -> list[Group]:
    """Make the groups of all ranks of one process: for the simulator, and for tests.

    Args:
        world: ranks.
        node_size: neighbouring ranks that share a node.
        links: rank -> its end of the node's link; needed if node_size > 1.
    """
    board = Board(world)

    def exchange(rank: int) -> Exchange:
        return lambda data: board.exchange(rank, data)

    return [
        Group(
            rank=rank,
            world=world,
            exchange=exchange(rank),
            node_size=node_size,
            link=links(rank) if links is not None and node_size > 1 else None,
            board=board,
        )
        for rank in range(world)
    ]


# ---------------------------------------------------------------------- link


class Move(NamedTuple):
    """Bytes between the own arena and a peer's: `here` and `there` are offsets."""

    peer: int
    here: int
    there: int
    nbytes: int


class Settles(Protocol):
    """A thing that the proxy can wait for: a handle of the engine, or a future."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object: ...

    def result(self) -> object: ...

    def cancel(self) -> object: ...


class NodeLink(Protocol):
    """One rank's end of its node's link."""

    def allocate(self, nbytes: int) -> Bytes | None:
        """Allocate the arena where peers of the node reach it; None where no bytes are moved."""

    def hello(self) -> bytes:
        """The bytes that peers of the node need to reach it."""

    def connect(
        self, engine: TransferEngine, hellos: Mapping[int, bytes], descs: Mapping[int, MrDesc]
    ) -> None:
        """Meet the peers of the node: rank -> hello and arena descriptor."""

    def move(self, moves: Sequence[Move], *, pushes: bool) -> Awaitable[None]:
        """Store bytes into peers' arenas, done once they are all there; or load them from there."""

    def signal(self, peers: Sequence[int], flag: int) -> None:
        """Add one to a flag (an immediate's value) at each peer, behind all pushes so far."""

    def expect(self, flag: int, count: int) -> Settles:
        """Wait for `count` signals of a flag."""

    def close(self) -> None:
        """Let go. Idempotent."""


# ---------------------------------------------------------------------- nvlink


_LATE_S: Final = 3e-6  # of a piece under chaos; as late as the slowest of the chaos fabric's knobs
_PIECES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkTimes:
    """The rates and latencies of a simulated NVLink.

    Attributes:
        bytes_s: payload bytes a second of a port, each way; 0 = no time passes.
        latency_s: last byte stored to flag seen, seconds.
    """

    bytes_s: float = 0.0
    latency_s: float = 0.0


class Nvlink:
    """The fabric: all ports of all nodes.

    Args:
        times: of every port; None: no time passes.
        carries_bytes: False: moves take time, and nothing is copied.
        chaos: a seed for hostile delays, or None.
    """

    def __init__(
        self,
        times: NvlinkTimes | None = None,
        *,
        carries_bytes: bool = True,
        chaos: int | None = None,
    ) -> None:
        self.times = times or NvlinkTimes()
        self.carries_bytes = carries_bytes
        self._dice = None if chaos is None else random.Random(chaos)
        self.ports: dict[int, NvlinkPort] = {}
        self._out_free: dict[int, float] = {}
        self._in_free: dict[int, float] = {}

    def port(self, rank: int) -> NvlinkPort:
        """A rank's end."""
        found = self.ports[rank] = NvlinkPort(self, rank)
        return found

    def busy_s(self, loads: Mapping[tuple[int, int], int], now: float) -> float:
        """Book (from, to) -> bytes on both ports; return how long until the last is there."""
        rate = self.times.bytes_s
        if not rate:
            return 0.0
        end = now
        for (source, target), nbytes in loads.items():
            for free, port in ((self._out_free, source), (self._in_free, target)):
                free[port] = max(free.get(port, 0.0), now) + nbytes / rate
                end = max(end, free[port])
        return end - now + self.times.latency_s

    def lateness_s(self) -> float:
        """The extra delay after which something is seen."""
        return 0.0 if self._dice is None else self._dice.random() * _LATE_S

    def pieces(self, jobs: list[tuple[Bytes, Bytes]]) -> list[tuple[Bytes, Bytes]]:
        """Cut (target, source) pairs in pieces and mix them, under chaos only."""
        dice = self._dice
        if dice is None:
            return jobs
        cut = []
        for target, source in jobs:
            at = sorted({0, len(source), *(dice.randint(0, len(source)) for _ in range(_PIECES))})
            cut += [(target[a:b], source[a:b]) for a, b in itertools.pairwise(at)]
        dice.shuffle(cut)
        return cut

    @property
    def chaotic(self) -> bool:
        """Whether delays are drawn."""
        return self._dice is not None


class NvlinkPort:
    """One GPU's end; a NodeLink."""

    def __init__(self, fabric: Nvlink, rank: int) -> None:
        self._fabric = fabric
        self._rank = rank
        self.arena: Bytes | None = None
        self._peers: dict[int, NvlinkPort] = {}
        self._seen: dict[int, int] = {}
        self._wanted: dict[int, tuple[int, asyncio.Future[None]]] = {}

    def allocate(self, nbytes: int) -> Bytes | None:
        self.arena = np.zeros(nbytes, np.uint8) if self._fabric.carries_bytes else None
        return self.arena

    def hello(self) -> bytes:
        return b""

    def connect(
        self,
        engine: TransferEngine,  # noqa: ARG002  # the protocol's; NVLink needs no NIC
        hellos: Mapping[int, bytes],
        descs: Mapping[int, MrDesc],  # noqa: ARG002  # as above
    ) -> None:
        self._peers = {rank: self._fabric.ports[rank] for rank in hellos}

    async def move(self, moves: Sequence[Move], *, pushes: bool) -> None:
        fabric, mine = self._fabric, self._rank
        loads: dict[tuple[int, int], int] = {}
        jobs: list[tuple[Bytes, Bytes]] = []
        for peer, here, there, nbytes in moves:
            way = (mine, peer) if pushes else (peer, mine)
            loads[way] = loads.get(way, 0) + nbytes
            far = self._peers[peer].arena
            if self.arena is not None and far is not None and nbytes:
                pair = (far[there : there + nbytes], self.arena[here : here + nbytes])
                jobs.append(pair if pushes else (pair[1], pair[0]))
        wait_s = fabric.busy_s(loads, asyncio.get_running_loop().time())
        if wait_s:
            await asyncio.sleep(wait_s)
        for target, source in fabric.pieces(jobs):
            if fabric.chaotic:
                await asyncio.sleep(fabric.lateness_s())
            target[:] = source

    def signal(self, peers: Sequence[int], flag: int) -> None:
        loop = asyncio.get_running_loop()
        for peer in peers:
            delay_s = self._fabric.times.latency_s + self._fabric.lateness_s()
            loop.call_later(delay_s, self._peers[peer].count, flag)

    def count(self, flag: int) -> None:
        """Take one signal."""
        self._seen[flag] = self._seen.get(flag, 0) + 1
        self._fire(flag)

    def expect(self, flag: int, count: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert flag not in self._wanted, f"flag {flag:#x} is expected twice"
        self._wanted[flag] = count, future
        self._fire(flag)
        return future

    def _fire(self, flag: int) -> None:
        if flag not in self._wanted:
            return
        count, future = self._wanted[flag]
        if self._seen.get(flag, 0) >= count or future.cancelled():
            del self._wanted[flag]
            self._seen.pop(flag, None)
            if not future.done():
                future.set_result(None)

    def close(self) -> None:
        self._peers = {}


# ---------------------------------------------------------------------- shm


class SharedMemory:
    """One rank's end; a NodeLink. All ranks of the node are processes of one user on one host."""

    def __init__(self) -> None:
        self.arena: Bytes | None = None
        self._fd = -1
        self._peers: dict[int, Bytes] = {}
        self._engine: TransferEngine | None = None
        self._descs: Mapping[int, MrDesc] = {}

    def allocate(self, nbytes: int) -> Bytes:
        self._fd = os.memfd_create("tep-moe", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        self.arena = np.frombuffer(mmap.mmap(self._fd, nbytes), np.uint8)
        return self.arena

    def hello(self) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._fd}".encode()

    def connect(
        self, engine: TransferEngine, hellos: Mapping[int, bytes], descs: Mapping[int, MrDesc]
    ) -> None:
        self._engine, self._descs = engine, descs
        for rank, hello in hellos.items():
            path = hello.decode()
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise UsageError(
                    f"rank {rank}: its memory {path} cannot be opened: {error.strerror}; ranks of "
                    "one node must be processes of one user and one PID namespace; else use "
                    "node_size=1"
                ) from error
            try:
                self._peers[rank] = np.frombuffer(mmap.mmap(fd, descs[rank].nbytes), np.uint8)
            finally:
                os.close(fd)

    async def move(self, moves: Sequence[Move], *, pushes: bool) -> None:
        assert self.arena is not None, "allocate() comes first"
        for peer, here, there, nbytes in moves:
            mine, theirs = self.arena[here : here + nbytes], self._peers[peer][there:][:nbytes]
            if pushes:
                theirs[:] = mine
            else:
                mine[:] = theirs
            await asyncio.sleep(0)  # the proxy must go on between copies

    def signal(self, peers: Sequence[int], flag: int) -> None:
        assert self._engine is not None, "connect() comes first"
        self._engine.submit_barrier([self._descs[peer] for peer in peers], flag)

    def expect(self, flag: int, count: int) -> Settles:
        assert self._engine is not None, "connect() comes first"
        return self._engine.expect_imm_count(flag, count)

    def close(self) -> None:
        # The mappings live as long as somebody uses their arrays; the engine may hold the arena.
        self._peers = {}
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
