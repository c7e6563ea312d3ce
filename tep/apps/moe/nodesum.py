"""Combine with sums at the sender: one result a token and node crosses the network, not eight.

The experts of one node that a token chose hand their weighted results to a leader by the node's
link; the leader adds them up and sends one row. For a token's rank s the leader on another node is
the rank with the same place in it. One node after the other, so that stores, sums and the NIC work
at the same time. Rule: each sum runs in a fixed order and is rounded to combine_format where it
travels: within a rank by expert, in a node by rank, at the end own choices first, then by node.
So results are the same on every fabric, but not those of the plain combine, which rounds once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

import tep
from tep.apps.moe.config import NOWHERE, PARTIAL_HEAD_BYTES, Batch, Ints
from tep.apps.moe.group import Move, NodeLink
from tep.apps.moe.kernels import spend
from tep.apps.moe.payload import F32, Bytes, from_f32, like, to_f32, weighted_sum
from tep.apps.moe.proxy import COMBINE, Turn, Word, imm_of, partial_flag

if TYPE_CHECKING:
    from tep.apps.moe.proxy import Proxy

__all__ = ["NodeSums", "chosen_nodes"]

_BY_BYTES: Final = tep.Routing(scatter_by="bytes")


class _Partial(NamedTuple):
    """Weighted results of one rank for one source: a row for each token."""

    tokens: Ints
    rows: Bytes | None


def chosen_nodes(batch: Batch, experts_of_node: int, nodes: int) -> list[Ints]:
    """Tokens that chose an expert of each node, ascending; by node."""
    node = batch.experts // experts_of_node
    return [np.unique(batch.tokens[node == k]) for k in range(nodes)]


class NodeSums:
    """One rank's part in it.

    Args:
        proxy: of its all-to-all.
        link: of its node.
    """

    def __init__(self, proxy: Proxy, link: NodeLink) -> None:
        self._proxy = proxy
        self._link = link
        self._payload = payload = proxy.payload
        self._kernels, self._guard = proxy.kernels, proxy.guard
        config = payload.config
        self._size = config.node_size
        self._nodes = config.world // config.node_size
        self._node, self._local = divmod(payload.rank, config.node_size)
        self._row = config.combine_stride + PARTIAL_HEAD_BYTES
        self._block = PARTIAL_HEAD_BYTES + config.max_tokens * self._row
        self._ready = Word(proxy.engine)
        self._sums: list[int] = []

    def _others(self) -> list[int]:
        """The other nodes, from the next one on."""
        return [(self._node + k) % self._nodes for k in range(1, self._nodes)]

    # ------------------------------------------------------------------ kernel

    async def send(self, turn: Turn, results: Bytes | None) -> None:
        """Weigh, hand to leaders and add up, node by node, a node ahead of what is added."""
        assert turn.arrivals is not None
        config, kernels = self._payload.config, self._kernels
        routes = turn.routes.result()
        self._sums = []
        before: int | None = None
        for node in [*self._others(), None]:
            if node is not None:
                sources = range(node * self._size, (node + 1) * self._size)
                partials = [self._partial(turn, s, results) for s in sources]
                copies = sum(int(routes.copies[s, self._payload.rank]) for s in sources)
                rows = sum(len(partial.tokens) for partial in partials)
                await spend(kernels.sum_s(copies, rows, config.combine_stride))
                await self._hand_over(turn, node, partials)
            if before is not None:
                await self._add_up(turn, before)
            before = node

    def _partial(self, turn: Turn, source: int, results: Bytes | None) -> _Partial:
        """The weighted results of this rank's experts for one source's tokens."""
        payload, arrivals = self._payload, turn.arrivals
        assert arrivals is not None
        if results is None or turn.received is None:
            return _Partial(self._proxy.tokens_of(turn, source, payload.rank), None)
        config = payload.config
        at = arrivals.row[arrivals.group == source]  # by expert
        tokens, where = np.unique(turn.received.tokens[at], return_inverse=True)
        values = to_f32(results[at], config.combine_format).reshape(len(at), config.hidden)
        total = np.zeros((len(tokens), config.hidden), np.float32)
        # One after the other, in the order of experts: the same token may stand there again.
        np.add.at(total, where, turn.received.weights[at][:, None] * values)
        return _Partial(tokens, from_f32(total, config.combine_format))

    async def _hand_over(self, turn: Turn, node: int, partials: list[_Partial]) -> None:
        payload, layout = self._payload, self._payload.layout
        mine, moves = self._node * self._size, []
        for local, partial in enumerate(partials):
            nbytes = PARTIAL_HEAD_BYTES + len(partial.tokens) * self._row
            there = layout.partials_in + (self._local * self._nodes + node) * self._block
            here = layout.partials_out + local * self._block
            if payload.arena is not None:
                self._write(here if local != self._local else there, partial)
            if local != self._local:
                moves.append(Move(mine + local, here, there, nbytes))
        await self._link.move(moves, pushes=True)
        flag = partial_flag(payload.config.imm_base, turn.number, node)
        self._link.signal([move.peer for move in moves], flag)

    def _write(self, at: int, partial: _Partial) -> None:
        arena = self._payload.arena
        assert arena is not None
        assert partial.rows is not None
        arena[at : at + 8].view(np.uint64)[0] = len(partial.tokens)
        block = arena[at + PARTIAL_HEAD_BYTES :][: len(partial.tokens) * self._row].reshape(
            -1, self._row
        )
        block[:, :8] = partial.tokens.astype(np.uint64).reshape(-1, 1).view(np.uint8)
        block[:, PARTIAL_HEAD_BYTES : PARTIAL_HEAD_BYTES + partial.rows.shape[1]] = partial.rows

    async def _add_up(self, turn: Turn, node: int) -> None:
        """Leader: add all ranks' rows for the source of a node, and have it sent."""
        payload, config = self._payload, self._payload.config
        flag = partial_flag(config.imm_base, turn.number, node)
        if self._size > 1:
            what = f"partial sums of turn {turn.number} for node {node}"
            await self._guard.wait(self._link.expect(flag, self._size - 1), what)
        source = node * self._size + self._local
        if payload.arena is None:
            first = self._node * self._size
            found = [self._proxy.tokens_of(turn, source, first + k) for k in range(self._size)]
            tokens = np.unique(np.concatenate(found))
        else:
            blocks = [self._read(local, node) for local in range(self._size)]
            found = [block.tokens for block in blocks]
            tokens = np.unique(np.concatenate(found))
            total = np.zeros((len(tokens), config.hidden), np.float32)
            for block in blocks:
                assert block.rows is not None
                values = to_f32(block.rows, config.combine_format)
                total[np.searchsorted(tokens, block.tokens)] += values
            rows = from_f32(total, config.combine_format)
            at = payload.layout.nodes_out + node * config.max_tokens * config.combine_stride
            out = payload.arena[at:][: len(tokens) * config.combine_stride]
            out.reshape(-1, config.combine_stride)[:, : rows.shape[1]] = rows
        rows_in = sum(len(one) for one in found)
        await spend(self._kernels.sum_s(rows_in, len(tokens), config.combine_stride))
        self._sums.append(len(tokens))
        self._ready.store(turn.number * self._nodes + len(self._sums))

    def _read(self, local: int, node: int) -> _Partial:
        arena, config = self._payload.arena, self._payload.config
        assert arena is not None
        at = self._payload.layout.partials_in + (local * self._nodes + node) * self._block
        count = int(arena[at : at + 8].view(np.uint64)[0])
        block = arena[at + PARTIAL_HEAD_BYTES :][: count * self._row].reshape(-1, self._row)
        tokens = np.ascontiguousarray(block[:, :8]).view(np.int64).reshape(count)
        width = config.hidden * config.combine_format.nbytes
        return _Partial(
            tokens, np.ascontiguousarray(block[:, PARTIAL_HEAD_BYTES : PARTIAL_HEAD_BYTES + width])
        )

    # ------------------------------------------------------------------ proxy

    async def drive(self, turn: Turn) -> None:
        """Proxy: send each node's sums when they are there; see the own ones arrive."""
        config, layout = self._payload.config, self._payload.layout
        expected = self._proxy.engine.expect_imm_count(
            imm_of(config.imm_base, turn.number, COMBINE), self._imms(turn)
        )
        stride = config.combine_stride
        for done, node in enumerate(self._others()):
            word = self._ready.reach(turn.number * self._nodes + done + 1)
            await self._guard.wait(word, f"sums of turn {turn.number} for node {node}")
            await spend(self._kernels.watch_s())
            rows = self._sums[done]
            if rows:
                here = layout.nodes_out + node * config.max_tokens * stride
                there = layout.nodes_in + self._node * config.max_tokens * stride
                desc = self._proxy.peers.descs[node * self._size + self._local]
                imm = imm_of(config.imm_base, turn.number, COMBINE)
                dst = tep.ScatterDst(rows * stride, here, (desc, there))
                sent = self._proxy.engine.submit_scatter(
                    self._proxy.mr, [dst], imm, routing=_BY_BYTES
                )
                self._guard.watch(sent)
                turn.sent_results.append(sent)
                self._proxy.mark("posted")
        await self._guard.wait(expected, f"sums of turn {turn.number}")
        await spend(self._kernels.flag_s())
        turn.returned.set_result(None)

    def _imms(self, turn: Turn) -> int:
        config, total = self._payload.config, 0
        here = self._proxy.peers.nics(self._payload.rank)
        for node, tokens in enumerate(self._nodes_of(turn.batch)):
            if node != self._node and len(tokens):
                leader = node * self._size + self._local
                shape = tep.Scatter(
                    len(tokens) * config.combine_stride, tep.Routing(scatter_by="bytes")
                )
                total += tep.count_imms(shape, self._proxy.peers.nics(leader), here)
        return total

    def _nodes_of(self, batch: Batch) -> list[Ints]:
        return chosen_nodes(batch, self._payload.config.local_experts * self._size, self._nodes)

    # ------------------------------------------------------------------ the end

    def sum(self, turn: Turn) -> Any:
        """Own node's results by choice, then one row a node, by node."""
        payload, config = self._payload, self._payload.config
        if payload.arena is None:
            return None
        batch = turn.batch
        far = batch.experts // (config.local_experts * self._size) != self._node
        place = batch.place.copy()
        place[batch.tokens[far], batch.slots[far]] = NOWHERE
        fmt = config.combine_format
        total: F32 = weighted_sum(payload.results_in(), place, turn.weights, fmt, config.hidden)
        width = config.hidden * fmt.nbytes
        for node, tokens in enumerate(self._nodes_of(batch)):
            if node != self._node and len(tokens):
                at = payload.layout.nodes_in + node * config.max_tokens * config.combine_stride
                rows = payload.arena[at:][: len(tokens) * config.combine_stride]
                values = rows.reshape(-1, config.combine_stride)[:, :width]
                total[tokens] += to_f32(values, fmt)
        return like(from_f32(total, fmt), turn.sample, fmt)

    def rows_in(self, turn: Turn) -> int:
        """The number of rows that the final sum reads."""
        found = self._nodes_of(turn.batch)
        mine = turn.batch.experts // (self._payload.config.local_experts * self._size)
        far = sum(len(tokens) for node, tokens in enumerate(found) if node != self._node)
        return int((mine == self._node).sum()) + far

    def close(self) -> None:
        """Watch no words any more."""
        self._ready.close()
