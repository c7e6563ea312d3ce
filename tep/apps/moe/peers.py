"""Who is who for one rank: hellos, and look-ups among the ranks that live. Pure."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tep import BadDescriptor, MrDesc, UsageError
from tep.apps.moe.config import MoeConfig

__all__ = ["Peers", "pack_hello", "unpack_hellos"]

_HELLO: Final = struct.Struct("<III")  # checksum of the configuration, bytes of descriptor and link


def pack_hello(config: MoeConfig, desc: MrDesc, link: bytes) -> bytes:
    """What a rank tells the others at the start: configuration, arena, node's link."""
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
    """Who is who for one rank, among those that live.

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
