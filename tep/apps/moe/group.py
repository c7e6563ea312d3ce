"""The ranks of one all-to-all: how they exchange hellos, and the link within a node.

A link moves bytes between arenas of one node by loads and stores, and counts flags. Rule: whoever
has seen a flag sees all that its sender pushed before (release and acquire); nothing else is
promised, neither order nor that bytes arrive whole. `Nvlink` is a fabric of its own in the
simulator: each GPU has one port, which carries so many bytes a second in each direction, and the
switch between ports is perfect; with `chaos` the bytes come in pieces, in any order, late.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tep import UsageError
from tep.apps.moe.config import Ints, Routes
from tep.apps.moe.payload import Bytes

__all__ = ["Board", "Exchange", "Group", "Move", "Nvlink", "NvlinkPort", "local_groups"]


Exchange = Callable[[bytes], Awaitable[list[bytes]]]
"""Give every rank's bytes to every rank, by rank; e.g. a rendezvous group's `all_gather`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One rank's view.

    Attributes:
        rank, world: this one, and how many.
        exchange: called once, by start().
        node_size: neighbouring ranks that share a node; 1 = all payload goes through the engine.
        link: needed if node_size > 1.
        board: shared by the ranks of one process where no bytes are moved; None elsewhere.
    """

    rank: int
    world: int
    exchange: Exchange
    node_size: int = 1
    link: NvlinkPort | None = None
    board: Board | None = None

    def __post_init__(self) -> None:
        """Refuse a rank that is none, and a node without a link: UsageError."""
        if not 0 <= self.rank < self.world:
            raise UsageError(f"Group: rank={self.rank} world={self.world}; 0 <= rank < world")
        if self.node_size > 1 and self.link is None:
            raise UsageError(f"Group: node_size={self.node_size} needs a link within the node")


@dataclass(slots=True)
class Board:
    """The exchange of hellos among the ranks of one process.

    Attributes:
        counts: (turn, rank) -> copies of each expert; where no bytes are moved, this is how the
            model of a rank learns what the bytes would have told it. It is read once the immediates
            that vouch for those bytes are counted, never before.
    """

    world: int
    counts: dict[tuple[int, int], Ints] = field(default_factory=dict)
    _made: dict[int, Routes] = field(default_factory=dict)
    _hellos: dict[int, dict[int, bytes]] = field(default_factory=dict)
    _ready: dict[int, asyncio.Future[list[bytes]]] = field(default_factory=dict)
    _rounds: dict[int, int] = field(default_factory=dict)

    def publish(self, turn: int, rank: int, counts: Ints) -> None:
        """Note a rank's counts, and forget those of two turns before."""
        self.counts[turn, rank] = counts
        self.counts.pop((turn - 2, rank), None)

    def once(self, turn: int, make: Callable[[], Routes]) -> Routes:
        """Make what all ranks make of the same counts in a turn; the others take the first's."""
        if turn not in self._made:
            self._made = {key: made for key, made in self._made.items() if key > turn - 2}
            self._made[turn] = make()
        return self._made[turn]

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
    world: int, *, node_size: int = 1, links: Callable[[int], NvlinkPort] | None = None
) -> list[Group]:
    """Make the groups of all ranks of one process: for the simulator, and for tests.

    `links(rank)` is the rank's end of its node's link; needed if node_size > 1.
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


_LATE_S: Final = 3e-6  # of a piece under chaos; as late as the slowest of the chaos fabric's knobs
_PIECES: Final = 3


class Nvlink:
    """The fabric: all ports of all nodes.

    Args:
        bytes_s: payload bytes a second of a port, each way; 0 = no time passes.
        latency_s: last byte stored to flag seen, seconds.
        chaos: a seed for hostile delays, or None.
    """

    def __init__(
        self, *, bytes_s: float = 0.0, latency_s: float = 0.0, chaos: int | None = None
    ) -> None:
        self.latency_s = latency_s
        self.ports: dict[int, NvlinkPort] = {}
        self._bytes_s = bytes_s
        self._dice = None if chaos is None else random.Random(chaos)
        self._out_free: dict[int, float] = {}
        self._in_free: dict[int, float] = {}

    def port(self, rank: int) -> NvlinkPort:
        """Make a rank's end."""
        found = self.ports[rank] = NvlinkPort(self, rank)
        return found

    def busy_s(self, loads: Mapping[tuple[int, int], int], now: float) -> float:
        """Book (from, to) -> bytes on both ports; return how long until the last is there."""
        rate = self._bytes_s
        if not rate:
            return 0.0
        end = now
        for (source, target), nbytes in loads.items():
            for free, port in ((self._out_free, source), (self._in_free, target)):
                free[port] = max(free.get(port, 0.0), now) + nbytes / rate
                end = max(end, free[port])
        return end - now + self.latency_s

    def lateness_s(self) -> float:
        """Draw the extra delay after which something is seen."""
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


class NvlinkPort:
    """One GPU's end.

    Attributes:
        arena: of its rank, which peers of the node store to and load from; None: no bytes are
            moved, and only time passes.
    """

    def __init__(self, fabric: Nvlink, rank: int) -> None:
        self._fabric = fabric
        self._rank = rank
        self.arena: Bytes | None = None
        self._seen: dict[Hashable, int] = {}
        self._wanted: dict[Hashable, tuple[int, asyncio.Future[None]]] = {}

    async def move(self, moves: Sequence[Move], *, pushes: bool) -> None:
        """Store bytes into peers' arenas, done once they are all there; or load them from there."""
        fabric, mine = self._fabric, self._rank
        loads: dict[tuple[int, int], int] = {}
        jobs: list[tuple[Bytes, Bytes]] = []
        for peer, here, there, nbytes in moves:
            way = (mine, peer) if pushes else (peer, mine)
            loads[way] = loads.get(way, 0) + nbytes
            far = fabric.ports[peer].arena
            if self.arena is not None and far is not None and nbytes:
                pair = (far[there : there + nbytes], self.arena[here : here + nbytes])
                jobs.append(pair if pushes else (pair[1], pair[0]))
        wait_s = fabric.busy_s(loads, asyncio.get_running_loop().time())
        if wait_s:
            await asyncio.sleep(wait_s)
        for target, source in fabric.pieces(jobs):
            if late_s := fabric.lateness_s():
                await asyncio.sleep(late_s)
            target[:] = source

    def signal(self, peers: Sequence[int], flag: Hashable) -> None:
        """Add one to a flag at each peer, behind all pushes so far."""
        loop = asyncio.get_running_loop()
        for peer in peers:
            delay_s = self._fabric.latency_s + self._fabric.lateness_s()
            loop.call_later(delay_s, self._fabric.ports[peer].count, flag)

    def count(self, flag: Hashable) -> None:
        """Take one signal."""
        self._seen[flag] = self._seen.get(flag, 0) + 1
        self._fire(flag)

    def expect(self, flag: Hashable, count: int) -> asyncio.Future[None]:
        """Wait for `count` signals of a flag."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert flag not in self._wanted, f"flag {flag} is expected twice"
        self._wanted[flag] = count, future
        self._fire(flag)
        return future

    def _fire(self, flag: Hashable) -> None:
        if flag not in self._wanted:
            return
        count, future = self._wanted[flag]
        if self._seen.get(flag, 0) >= count or future.cancelled():
            del self._wanted[flag]
            self._seen.pop(flag, None)
            if not future.done():
                future.set_result(None)
