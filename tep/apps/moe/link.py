"""What an all-to-all asks of the link within a node: NVLink, its simulation, or shared memory.

A link moves bytes between arenas of one node by loads and stores, and counts flags. Rule: whoever
has seen a flag sees all that its sender pushed before (release and acquire); nothing else is
promised, neither order nor that bytes arrive whole.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tep.apps.moe.numerics import Bytes

if TYPE_CHECKING:
    from tep import MrDesc, TransferEngine

__all__ = ["Move", "NodeLink", "Settles"]


class Move(NamedTuple):
    """Bytes between the own arena and a peer's: `here` and `there` are offsets."""

    peer: int
    here: int
    there: int
    nbytes: int


class Settles(Protocol):
    """What the proxy can wait for: a handle of the engine, or a future."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object: ...

    def result(self) -> object: ...

    def cancel(self) -> object: ...


class NodeLink(Protocol):
    """One rank's end of its node's link."""

    def allocate(self, nbytes: int) -> Bytes | None:
        """Allocate the arena where peers of the node reach it; None where no bytes are moved."""

    def hello(self) -> bytes:
        """What peers of the node need to reach it."""

    def connect(
        self, engine: TransferEngine, hellos: Mapping[int, bytes], descs: Mapping[int, MrDesc]
    ) -> None:
        """Meet the peers of the node: rank -> hello and arena descriptor."""

    def push(self, moves: Sequence[Move]) -> Awaitable[None]:
        """Store bytes into peers' arenas; done once they are all there."""

    def pull(self, moves: Sequence[Move]) -> Awaitable[None]:
        """Load bytes from peers' arenas."""

    def signal(self, peers: Sequence[int], flag: int) -> None:
        """Add one to a flag (an immediate's value) at each peer, behind all pushes so far."""

    def expect(self, flag: int, count: int) -> Settles:
        """Wait for `count` signals of a flag."""

    def close(self) -> None:
        """Let go. Idempotent."""
