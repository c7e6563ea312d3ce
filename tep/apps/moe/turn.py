"""One turn: what a dispatch and its combine share between the kernels and the host proxy.

Futures and values; nothing here posts or copies.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from tep.apps.moe.numerics import F32, Bytes
from tep.apps.moe.routing import Arrivals, Batch, Routes

if TYPE_CHECKING:
    from tep import Transfer
    from tep.apps.moe.payload import Received

__all__ = [
    "COMBINE",
    "COMBINED",
    "DISPATCH",
    "DISPATCHED",
    "PULL",
    "PUSHED",
    "ROUTE",
    "TURNS",
    "Turn",
    "imm_of",
    "partial_flag",
]

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
