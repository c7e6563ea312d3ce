"""The host proxy of one rank: waits for words of the kernels, drives the engine, sets their flags.

It never touches payload. At most two payload writes go to each peer for dispatch (a private burst
before the routes are known, the rest behind it) and one for combine; with several NICs a write by
bytes is one row on each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

import tep
from tep.apps.moe.config import MoeConfig
from tep.apps.moe.group import Board
from tep.apps.moe.kernels import Kernels, spend
from tep.apps.moe.payload import Payload
from tep.apps.moe.recovery import Guard
from tep.apps.moe.routing import Ints, Routes, private_limits
from tep.apps.moe.turn import (
    COMBINE,
    COMBINED,
    DISPATCH,
    DISPATCHED,
    ROUTE,
    Peers,
    Turn,
    Word,
    cut,
    imm_of,
    parts_of,
)

__all__ = ["Proxy"]

_BY_PEERS: Final = tep.Routing()
_FIRST_NIC: Final = tep.Routing(domain=0)

Slice = tuple[int, int, int, int]
"""Peer, offset here, offset there, bytes."""


class Proxy:
    """Drives one engine for one all-to-all.

    Attributes:
        barrier_s: how long the last barrier of each kind took, seconds.

    Args:
        engine: the rank's.
        config: of the all-to-all.
        kernels: what the stages cost.
        mr, payload: its arena.
        guard: how to wait.
        board: where routes are learnt if no bytes are moved.
        mark: called with the name of each stage once it is through.
    """

    def __init__(
        self,
        engine: tep.TransferEngine,
        config: MoeConfig,
        kernels: Kernels,
        mr: tep.MrHandle,
        payload: Payload,
        guard: Guard,
        board: Board | None,
        mark: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.config = config
        self.kernels = kernels
        self.layout = payload.layout
        self.counted, self.staged, self.read, self.computed, self.summed = (
            Word(engine) for _ in range(5)
        )
        self.mr = mr
        self.payload = payload
        self.guard = guard
        self._board = board
        self.mark = mark
        self.barrier_s: dict[int, float] = {}
        self._groups: dict[str, tep.PeerGroup] = {}
        self._ready: dict[str, tep.Prepared] = {}  # what is the same in every turn
        self._pinned = [_FIRST_NIC]
        self._spread_private = config.private_scatter == "bytes"
        self._peers: Peers | None = None
        self._limits = private_limits(config, None)

    def meet(self, peers: Peers) -> None:
        """Work with these peers from now on."""
        self._peers = peers
        self._limits = private_limits(self.config, None)
        addresses = [peers.descs[p].addr for p in peers.others]
        # One a scatter: a group remembers the targets of its last request.
        names = ("routes", "private", "rest", "results", "barrier")
        self._groups = {name: self.engine.add_peer_group(addresses) for name in names}
        self._ready = {}
        self._pinned = [tep.Routing(domain=nic) for nic in range(peers.nics(peers.rank))]

    # ------------------------------------------------------------------ a turn

    async def dispatch(self, turn: Turn) -> None:
        """Send this rank's copies and see all others' arrive; settles the turn's futures."""
        peers, kernels, config = self.peers, self.kernels, self.config
        await self._told(self.counted, turn.number, "routes of its own kernel")
        self._scatter_routes(turn)
        routes_in = self._expect(turn, ROUTE, len(peers.sources))
        await self._told(self.staged, turn.number, "tokens of its own kernel")
        if self._scatter_private(turn):
            self.mark("posted")
        await self.guard.wait(routes_in, f"routes of turn {turn.number}")
        routes = Routes(config, self.read_routes(turn), self._limits)
        late = [p for p in peers.targets if routes.rest[peers.group, p] and not peers.near(p)]
        await spend(kernels.routes_s(config.groups * config.num_experts, len(late)))
        payload_in = self._expect(turn, DISPATCH, self.dispatch_imms(routes))
        self._scatter_rest(turn, routes, late)
        await spend(kernels.flag_s())
        turn.routes.set_result(routes)
        await self.guard.wait(payload_in, f"tokens of turn {turn.number}")
        await spend(kernels.flag_s())
        self._limits = private_limits(config, routes)
        turn.landed.set_result(None)

    async def dispatched(self, turn: Turn) -> None:
        """Tell everybody, and learn from everybody, that dispatch buffers may be used again."""
        await self._told(self.read, turn.number, "its own receive kernel")
        await self._barrier(turn, DISPATCHED)

    async def combine(self, turn: Turn) -> None:
        """Send results back and see the own ones arrive."""
        routes = turn.routes.result()
        results_in = self._expect(turn, COMBINE, self.combine_imms(routes))
        await self._told(self.computed, turn.number, "results of its own kernel")
        if self._scatter_results(turn, routes):
            self.mark("posted")
        await self.guard.wait(results_in, f"results of turn {turn.number}")
        await spend(self.kernels.flag_s())
        turn.returned.set_result(None)

    async def combined(self, turn: Turn) -> None:
        """The same as dispatched(), for the buffers of combine."""
        await self._told(self.summed, turn.number, "its own sum")
        await self._barrier(turn, COMBINED)

    async def _told(self, word: Word, number: int, what: str) -> None:
        await self.guard.wait(word.reach(number), what)
        await spend(self.kernels.watch_s())

    def _expect(self, turn: Turn, kind: int, count: int) -> tep.Expectation:
        return self.engine.expect_imm_count(self._imm(turn, kind), count)

    def _imm(self, turn: Turn, kind: int) -> int:
        return imm_of(self.config.imm_base, turn.number, kind)

    @property
    def peers(self) -> Peers:
        """The ranks that it works with."""
        assert self._peers is not None, "start() comes first"
        return self._peers

    # ------------------------------------------------------------------ what is sent

    def _scatter_routes(self, turn: Turn) -> None:
        peers, layout = self.peers, self.layout
        if not peers.targets:
            return
        ready = self._ready.get("routes")
        if ready is None:
            there, n = layout.routes_in + peers.group * layout.route_bytes, layout.route_bytes
            dsts = [
                tep.ScatterDst(n, layout.routes_out, (peers.descs[p], there)) for p in peers.targets
            ]
            ready = self._ready["routes"] = self.engine.prepare_scatter(
                self.mr, dsts, group=self._groups["routes"]
            )
        sent = ready.submit(self._imm(turn, ROUTE))
        self.guard.watch(sent)
        turn.sent_tokens.append(sent)

    def private(self, peer: int, copies: int) -> tuple[int, int]:
        """Number of copies that fit this group's private area at a peer, and the area's offset."""
        group = self.peers.group
        first = int(self._limits[:group, peer].sum())
        there = self.layout.private + first * self.layout.stride
        return min(copies, int(self._limits[group, peer])), there

    def _scatter_private(self, turn: Turn) -> bool:
        peers, layout = self.peers, self.layout
        blocks = turn.batch.counts.reshape(self.config.world, -1).sum(axis=1)
        starts = np.cumsum(blocks) - blocks
        slices = []
        for p in peers.targets:
            copies, there = self.private(p, int(blocks[p]))
            if copies and not peers.near(p):
                slices.append((p, int(starts[p]) * layout.stride, there, copies * layout.stride))
        return self._scatter(turn, DISPATCH, "private", slices, spread=self._spread_private)

    def _scatter_rest(self, turn: Turn, routes: Routes, late: list[int]) -> None:
        peers, layout = self.peers, self.layout
        group = peers.group
        slices = []
        for p in late:
            first = int(routes.starts[group, p] + routes.private[group, p])
            there = layout.shared + int(routes.shared_at[group, p]) * layout.stride
            nbytes = int(routes.rest[group, p]) * layout.stride
            slices.append((p, first * layout.stride, there, nbytes))
        self._scatter(turn, DISPATCH, "rest", slices, spread=True)

    def _scatter_results(self, turn: Turn, routes: Routes) -> bool:
        peers, layout = self.peers, self.layout
        starts, size = routes.result_starts(peers.rank), layout.result_stride
        slices = []
        for p in peers.others:
            group = self.config.group_of(p)
            copies = int(routes.copies[group, peers.rank])
            if copies and not peers.near(p):
                here = layout.results_out + int(starts[group]) * size
                there = layout.results_in + int(routes.starts[group, peers.rank]) * size
                slices.append((p, here, there, copies * size))
        return self._scatter(turn, COMBINE, "results", slices, spread=True)

    def _scatter(
        self, turn: Turn, kind: int, group: str, slices: Sequence[Slice], *, spread: bool
    ) -> bool:
        """Submit, unless there is nothing to send; say which.

        Spread slices go out as one scatter a NIC, pinned to it, so that the rows of all peers make
        one batch there; the engine's own scatter by bytes would make a batch of each row.
        """
        nics = self.peers.nics(self.peers.rank) if spread else 1
        for nic in range(nics):
            dsts = []
            for peer, here, there, nbytes in slices:
                parts = parts_of(nbytes, nics)
                if nic < parts:
                    start, stop = cut(nbytes, parts, nic)
                    dst = self.peers.descs[peer], there + start
                    dsts.append(tep.ScatterDst(stop - start, here + start, dst))
            if dsts:
                sent = self.engine.submit_scatter(
                    self.mr,
                    dsts,
                    self._imm(turn, kind),
                    group=self._groups[group],
                    routing=self._pinned[nic] if nics > 1 else _BY_PEERS,
                )
                self.guard.watch(sent)
                (turn.sent_results if kind == COMBINE else turn.sent_tokens).append(sent)
        return bool(slices)

    # ------------------------------------------------------------------ what is counted

    def read_routes(self, turn: Turn) -> Ints:
        """All groups' counts, once their immediates are counted; a dead group has none."""
        peers, config = self.peers, self.config
        counts = np.zeros((config.groups, config.num_experts), np.int64)
        counts[peers.group] = turn.batch.counts
        for group in peers.sources:
            if self.payload.arena is None:
                assert self._board is not None
                counts[group] = self._board.batches[turn.number, group].counts
            else:
                counts[group] = self.payload.read_route(turn.number, group)
        return counts

    def tokens_of(self, turn: Turn, source: int, rank: int) -> Ints:
        """Tokens of a source that chose an expert of a rank; for runs that move no bytes."""
        assert self._board is not None
        batch = self._board.batches[turn.number, source]
        first = rank * self.config.local_experts
        ends = np.searchsorted(batch.experts, (first, first + self.config.local_experts))
        return np.unique(batch.tokens[ends[0] : ends[1]])

    def dispatch_imms(self, routes: Routes) -> int:
        """Immediates that vouch for all copies that come here by NIC."""
        peers, stride, total = self.peers, self.layout.stride, 0
        for group, source in peers.sources.items():
            if not peers.near(source):
                nics = peers.nics(source)
                burst = int(routes.private[group, peers.rank]) * stride
                rest = int(routes.rest[group, peers.rank]) * stride
                total += _imms(burst, nics if self._spread_private else 1) + _imms(rest, nics)
        return total

    def combine_imms(self, routes: Routes) -> int:
        """Immediates that vouch for all results that come here by NIC."""
        peers, stride, total = self.peers, self.layout.result_stride, 0
        for p in peers.others:
            if not peers.near(p):
                total += _imms(int(routes.copies[peers.group, p]) * stride, peers.nics(p))
        return total

    # ------------------------------------------------------------------ buffers are free

    async def _barrier(self, turn: Turn, kind: int) -> None:
        """Everybody has sent and read: RDMA barrier once the own writes are acknowledged."""
        peers = self.peers
        what = "tokens" if kind == DISPATCHED else "results"
        for transfer in turn.sent_tokens if kind == DISPATCHED else turn.sent_results:
            await self.guard.wait(
                transfer, f"acknowledgement of its own {what} of turn {turn.number}"
            )
        if not peers.others:
            return
        begun_s = asyncio.get_running_loop().time()
        came = self._expect(turn, kind, len(peers.others))
        ready = self._ready.get("barrier")
        if ready is None:
            ready = self._ready["barrier"] = self.engine.prepare_barrier(
                [peers.descs[p] for p in peers.others],
                group=self._groups["barrier"],
                routing=_FIRST_NIC,
            )
        barrier = ready.submit(self._imm(turn, kind))
        self.guard.watch(barrier)
        await self.guard.wait(came, f"barrier of turn {turn.number}, {what}")
        self.barrier_s[kind] = asyncio.get_running_loop().time() - begun_s
        await self.guard.wait(barrier, f"acknowledgement of its own barrier of turn {turn.number}")

    def close(self) -> None:
        """Watch no words any more."""
        for word in (self.counted, self.staged, self.read, self.computed, self.summed):
            word.close()


def _imms(nbytes: int, nics: int) -> int:
    """Immediates of one slice that is spread over so many NICs; none if there is nothing in it."""
    return parts_of(nbytes, nics) if nbytes else 0
