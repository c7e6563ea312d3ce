"""The ranks of one all-to-all as one of them sees them: its number, and how hellos are exchanged.

Used once, at the start; afterwards everything goes through the engine or the node's link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tep import UsageError
from tep.apps.moe.link import NodeLink
from tep.apps.moe.routing import Batch

__all__ = ["Board", "Exchange", "Group", "local_groups"]

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
    """What the ranks of one process share.

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
