"""Datagrams between nodes: how protocols tell each other descriptors where nothing is promised.

Some are lost, some come twice, and they overtake each other (F20), as on UDP, or on an RDMA NIC's
unreliable queue pairs. Not part of the seam: engines neither send nor see them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from tep.base.errors import UsageError
from tep.base.hashing import below
from tep.base.units import PS_PER_NS
from tep.sim.chaos import ChaosFabric

__all__ = ["DATAGRAM_BYTES", "Datagrams"]

DATAGRAM_BYTES: Final = 65_507
"""The longest; of UDP over IPv4: 65,535 bytes without the two headers (RFC 768, RFC 791)."""

_FLIGHT_PS: Final = 300 * PS_PER_NS
_SPREAD_PS: Final = 3000 * PS_PER_NS


class Datagrams:
    """All mailboxes of one cluster; `cluster.datagrams`.

    Attributes:
        sent, lost, doubled: how many so far.
    """

    def __init__(self, fabric: ChaosFabric) -> None:
        self.sent = self.lost = self.doubled = 0
        self._fabric = fabric
        self._draw = fabric.draws.message
        self._boxes: dict[str, deque[tuple[str, bytes]]] = {}
        self._waiting: dict[str, deque[asyncio.Future[tuple[str, bytes]]]] = {}

    def send(self, source: str, target: str, payload: bytes) -> None:
        """Send one datagram from a node to a node: it arrives once, twice, or not at all.

        Raises:
            UsageError: no such node, or too long a payload.
        """
        for name in (source, target):
            if name not in self._fabric.nodes:
                raise UsageError(f"no node {name!r}; there are: {', '.join(self._fabric.nodes)}")
        if len(payload) > DATAGRAM_BYTES:
            raise UsageError(f"a datagram of {len(payload)} bytes; {DATAGRAM_BYTES} at the most")
        chaos, healed = self._fabric.chaos, self._fabric.healed
        self.sent += 1
        # Odd entities: even ones belong to the messages of the seam.
        bits = self._draw(2 * self.sent + 1, 5)
        if not healed and bits & 15 < chaos.datagram_loss:
            self.lost += 1
            return
        copies = 1 + (not healed and bits >> 4 & 15 < chaos.datagram_dup)
        self.doubled += copies - 1
        epoch = self._fabric.nodes[target].epoch
        for copy in range(copies):
            drawn = self._draw(2 * self.sent + 1, 6 + copy)
            due = self._fabric.env.now + _FLIGHT_PS + below(drawn, _SPREAD_PS)
            what = (target, epoch, source, bytes(payload))
            self._fabric.env.call_at(due, self._arrive, what)

    async def receive(self, node: str) -> tuple[str, bytes]:
        """Wait for the next datagram to a node; return who sent it, and its bytes."""
        box = self._boxes.get(node)
        if box:
            return box.popleft()
        future: asyncio.Future[tuple[str, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(node, deque()).append(future)
        return await future

    def forget(self, node: str) -> None:
        """Empty a node's mailbox: it crashed."""
        self._boxes.pop(node, None)

    def _arrive(self, what: tuple[str, int, str, bytes]) -> None:
        target, epoch, source, payload = what
        if self._fabric.nodes[target].epoch != epoch:
            return  # it was on its way to a node that crashed
        waiting = self._waiting.get(target, deque())
        while waiting:
            future = waiting.popleft()
            if not future.done():
                future.set_result((source, payload))
                return
        self._boxes.setdefault(target, deque()).append((source, payload))
