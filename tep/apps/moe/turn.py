"""One turn: what its kernels and its host proxy share, who takes part, and what moves where.

Futures, values, and the watched words by which kernels tell the host proxy how far they are; a word
holds the number of the last turn that got there. Nothing here posts or copies.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tep import BadDescriptor, MrDesc, UsageError
from tep.apps.moe.config import Layout, MoeConfig
from tep.apps.moe.group import Move
from tep.apps.moe.payload import F32, Bytes
from tep.apps.moe.routing import NOWHERE, Arrivals, Batch, Ints, Routes

if TYPE_CHECKING:
    from tep import Transfer, TransferEngine, Watcher
    from tep.apps.moe.payload import Received

__all__ = [
    "COMBINE", "COMBINED", "DISPATCH", "DISPATCHED", "PULL", "PUSHED", "ROUTE", "TURNS", "Peers",
    "Turn", "Word", "cut", "imm_of", "living_places", "near_rest", "near_results", "near_tokens",
    "pack_hello", "partial_flag", "parts_of", "unpack_hellos",
]  # fmt: skip


# What an immediate says: routes, payload, buffers free, results, buffers free; then flags of the
# node's link (the rest may be pulled, results are pushed).
ROUTE: Final = 0
DISPATCH: Final = 1
DISPATCHED: Final = 2
COMBINE: Final = 3
COMBINED: Final = 4
PULL: Final = 5
PUSHED: Final = 6

TURNS: Final = 1 << 23
"""Turns are numbered modulo this."""


def imm_of(base: int, turn: int, kind: int) -> int:
    """The immediate of one kind in one turn: bits 31-28 base, 25-3 turn, 2-0 kind.

    Each turn has its own, so that what a broken turn left behind is never taken for the next.
    """
    return base | (turn % TURNS) << 3 | kind


def partial_flag(base: int, turn: int, node: int) -> int:
    """The flag of partial sums for one node: bits 27 and 26 set, 25-10 turn, 9-0 node."""
    return base | 3 << 26 | (turn & 0xFFFF) << 10 | node


class Turn:
    """One dispatch with its combine.

    Attributes:
        number: of this turn, equal on all ranks.
        batch: own copies.
        weights: f32[n, R].
        sample: the caller's x, for the type of what is given back.
        routes: settled once all routes are here, with them.
        landed: settled once all copies that come by NIC are here.
        returned: settled once all results that come by NIC are here.
        sent_tokens, sent_results: transfers whose source must not be touched yet.
        arrivals: what this rank got, in output order.
        received: the same with tokens and weights.
        results: what the own experts made of it, as bytes.
    """

    def __init__(self, number: int, batch: Batch, weights: F32, sample: Any) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.batch = batch
        self.weights = weights
        self.sample = sample
        self.routes: asyncio.Future[Routes] = loop.create_future()
        self.landed: asyncio.Future[None] = loop.create_future()
        self.returned: asyncio.Future[None] = loop.create_future()
        self.sent_tokens: list[Transfer] = []
        self.sent_results: list[Transfer] = []
        self.arrivals: Arrivals | None = None
        self.received: Received | None = None
        self.results: Bytes | None = None

    def fail(self, error: BaseException) -> None:
        """Tell all who wait."""
        for future in (self.routes, self.landed, self.returned):
            if not future.done():
                future.set_exception(error)
            future.exception()  # taken note of, whether or not anybody waits


# ---------------------------------------------------------------------- peers


_HELLO: Final = struct.Struct("<III")  # checksum of the configuration, bytes of descriptor and link


def pack_hello(config: MoeConfig, desc: MrDesc, link: bytes) -> bytes:
    """Pack a rank's message to the others at the start: configuration, arena, node's link."""
    raw, mark = desc.to_bytes(), zlib.crc32(repr(config).encode())
    return _HELLO.pack(mark, len(raw), len(link)) + raw + link


def unpack_hellos(
    config: MoeConfig, rank: int, hellos: Sequence[bytes]
) -> tuple[list[MrDesc], dict[int, bytes]]:
    """Arenas of all ranks, and link hellos of the other ranks of the node.

    Raises:
        UsageError: a rank has another configuration.
        BadDescriptor: what a rank sent is no hello.
    """
    mark, descs, links = zlib.crc32(repr(config).encode()), [], {}
    for other, hello in enumerate(hellos):
        if len(hello) < _HELLO.size:
            raise BadDescriptor(f"rank {other}: {len(hello)} bytes are no hello")
        theirs, ndesc, nlink = _HELLO.unpack_from(hello)
        if theirs != mark:
            raise UsageError(f"rank {other} has another configuration than rank {rank}: {config}")
        at = _HELLO.size
        descs.append(MrDesc.from_bytes(hello[at : at + ndesc]))
        if other != rank and config.same_node(other, rank):
            links[other] = hello[at + ndesc : at + ndesc + nlink]
    return descs, links


class Peers:
    """The ranks that live, as one of them sees them.

    Attributes:
        rank, group: of this rank.
        alive: bool[world].
        descs: arena of each rank.
        others: living ranks but this one, from the next one on round the world, so that not all
            ranks of a node begin with the same peer.
        targets: those of `others` that this rank brings its group's tokens to.
        sources: group -> rank that brings its tokens here; not the own group.
        near_targets, near_sources: those of them that are reached over the node's link.
    """

    def __init__(
        self,
        config: MoeConfig,
        rank: int,
        descs: list[MrDesc],
        alive: npt.NDArray[np.bool_],
        *,
        linked: bool,
    ) -> None:
        self.config = config
        self.rank = rank
        self.group = config.group_of(rank)
        self.alive = alive
        self.descs = descs
        self._linked = linked
        world = config.world
        self.others = [p for k in range(1, world) if alive[p := (rank + k) % world]]
        self.targets = [p for p in self.others if self.sender(self.group, p) == rank]
        self.targets = [p for p in self.targets if config.group_of(p) != self.group]
        found = {g: self.sender(g, rank) for g in range(config.groups) if g != self.group}
        self.sources = {g: p for g, p in found.items() if p is not None}
        self.near_targets = [p for p in self.targets if self.near(p)]
        self.near_sources = {g: p for g, p in self.sources.items() if self.near(p)}

    def sender(self, group: int, target: int) -> int | None:
        """Which rank of a group brings its tokens to a rank; None: all of the group are dead.

        Members have the same tokens and share the ranks of the world among each other.
        """
        living = [p for p in self.config.members(group) if self.alive[p]]
        return living[target % len(living)] if living else None

    def near(self, rank: int) -> bool:
        """Whether payload to or from a rank goes over the node's link."""
        return self._linked and self.config.same_node(self.rank, rank)

    def nics(self, rank: int) -> int:
        """NICs of a rank."""
        return len(self.descs[rank].rkeys)


# ---------------------------------------------------------------------- moves


_PART_BYTES_MIN: Final = 8192  # as the engine's and fabric-lib's shards
_PART_ALIGN: Final = 64


def parts_of(nbytes: int, nics: int) -> int:
    """In how many parts a slice goes out over a sender's NICs: one each, but none below 8 KiB.

    Also how many immediates its receiver counts, one a part.
    """
    return max(1, min(nics, nbytes // _PART_BYTES_MIN))


def cut(nbytes: int, parts: int, k: int) -> tuple[int, int]:
    """Start and stop of part k; the parts tile the slice."""
    start = nbytes * k // parts // _PART_ALIGN * _PART_ALIGN
    last = k == parts - 1
    return start, nbytes if last else nbytes * (k + 1) // parts // _PART_ALIGN * _PART_ALIGN


def near_tokens(
    peers: Peers, layout: Layout, batch: Batch, private: Callable[[int, int], tuple[int, int]]
) -> tuple[int, list[Move]]:
    """First burst within the node.

    Args:
        peers: of this rank.
        layout: of the arena.
        batch: own copies.
        private: (peer, copies) -> how many of them fit its private area, and where that is.

    Returns:
        Copies that are staged for the NIC or for others to fetch, and what is pushed at once.
    """
    config = peers.config
    blocks = batch.counts.reshape(config.world, -1).sum(axis=1)
    starts = np.cumsum(blocks) - blocks
    staged, moves = sum(int(blocks[p]) for p in peers.targets), []
    for p in peers.near_targets:
        pushed, there = private(p, int(blocks[p]))
        if pushed:
            here = int(starts[p]) * layout.stride
            moves.append(Move(p, here, there, pushed * layout.stride))
            staged -= pushed
    return staged, moves


def near_rest(peers: Peers, layout: Layout, routes: Routes) -> list[Move]:
    """The bytes pulled from send buffers of ranks of the node, behind their first burst."""
    moves, rank = [], peers.rank
    for group, p in peers.near_sources.items():
        rest = int(routes.rest[group, rank])
        if rest:
            first = int(routes.starts[group, rank] + routes.private[group, rank])
            here = layout.shared + int(routes.shared_at[group, rank]) * layout.stride
            moves.append(Move(p, here, first * layout.stride, rest * layout.stride))
    return moves


def near_results(peers: Peers, layout: Layout, routes: Routes) -> list[Move]:
    """Results for ranks of the node."""
    starts, size, moves = routes.result_starts(peers.rank), layout.result_stride, []
    for p in peers.others:
        group = peers.config.group_of(p)
        copies = int(routes.copies[group, peers.rank])
        if copies and peers.near(p):
            here = layout.results_out + int(starts[group]) * size
            there = layout.results_in + int(routes.starts[group, peers.rank]) * size
            moves.append(Move(p, here, there, copies * size))
    return moves


def living_places(batch: Batch, config: MoeConfig, alive: npt.NDArray[np.bool_]) -> Ints:
    """The place of each choice's result; choices of ranks that died since have none."""
    if alive.all():
        return batch.place
    lost = ~alive[batch.experts // config.local_experts]
    place = batch.place.copy()
    place[batch.tokens[lost], batch.slots[lost]] = NOWHERE
    return place


# ---------------------------------------------------------------------- words


class Word:
    """One word, watched while somebody waits for it.

    Args:
        engine: whose watcher it is.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._value = 0
        self._watcher: Watcher | None = None
        self._seen: asyncio.Future[None] | None = None
        self._wanted = 0

    def store(self, value: int) -> None:
        """Kernel: tell the proxy."""
        self._value = value
        if self._watcher is not None:
            self._watcher.store(value)

    def reach(self, value: int) -> asyncio.Future[None]:
        """Proxy: wait until the word holds this value."""
        loop = asyncio.get_running_loop()
        seen = self._seen = loop.create_future()
        self._wanted = value
        self._watcher = self._engine.alloc_uvm_watcher(
            lambda _, new: loop.call_soon_threadsafe(self._look, new)
        )
        if self._value >= value:  # stored before anybody watched
            self._watcher.store(self._value)
        return seen

    def _look(self, value: int) -> None:
        seen = self._seen
        if seen is not None and value >= self._wanted:
            self.close()
            if not seen.done():
                seen.set_result(None)

    def close(self) -> None:
        """Watch no more. Idempotent."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()
