"""What moves where: over the node's link in each half, and in how many parts over NICs. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.apps.moe.config import MoeConfig
from tep.apps.moe.layout import Layout
from tep.apps.moe.link import Move
from tep.apps.moe.peers import Peers
from tep.apps.moe.routing import NOWHERE, Batch, Ints, Routes

__all__ = [
    "cut",
    "living_places",
    "near_rest",
    "near_results",
    "near_tokens",
    "parts_of",
]

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
    """What is pulled out of the send buffers of ranks of the node, behind their first burst."""
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
    """Where each choice's result is; choices of ranks that died since have none."""
    if alive.all():
        return batch.place
    lost = ~alive[batch.experts // config.local_experts]
    place = batch.place.copy()
    place[batch.tokens[lost], batch.slots[lost]] = NOWHERE
    return place
