"""NVLink in the simulator, a fabric of its own: ports, loads, stores, flags. No NIC, no engine.

Each GPU has one port; a port carries so many bytes a second in each direction, and the switch
between ports is perfect. With `chaos` the bytes come in pieces, in any order, late: what the rules
of a link promise, and no more.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from tep.apps.moe.link import Move
from tep.apps.moe.numerics import Bytes

if TYPE_CHECKING:
    from tep import MrDesc, TransferEngine

__all__ = ["Nvlink", "NvlinkPort", "NvlinkTimes"]

_LATE_S: Final = 3e-6  # of a piece under chaos; as late as the slowest of the chaos fabric's knobs
_PIECES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkTimes:
    """How fast.

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
        """How much later than usual something is seen."""
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

    async def push(self, moves: Sequence[Move]) -> None:
        await self._move(moves, pushes=True)

    async def pull(self, moves: Sequence[Move]) -> None:
        await self._move(moves, pushes=False)

    async def _move(self, moves: Sequence[Move], *, pushes: bool) -> None:
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
