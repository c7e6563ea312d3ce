"""Combine with sums at the sender: one result a token and node crosses the network, not eight.

The experts of one node that a token chose hand their weighted results to a leader by the node's
link; the leader adds them up and sends one row. For a token's rank s the leader on another node is
the rank with the same place in it. One node after the other, so that stores, sums and the NIC work
at the same time. Rule: each sum runs in a fixed order and is rounded to combine_format where it
travels: within a rank by expert, in a node by rank, at the end own choices first, then by node.
So results are the same on every fabric, but not those of the plain combine, which rounds once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

import tep
from tep.apps.moe.config import NOWHERE, PARTIAL_HEAD_BYTES, Batch, Ints
from tep.apps.moe.group import Move, NvlinkPort
from tep.apps.moe.kernels import spend
from tep.apps.moe.payload import F32, Bytes, from_f32, like, to_f32, weighted_sum
from tep.apps.moe.proxy import COMBINE, Turn, Word, imm_of

if TYPE_CHECKING:
    from tep.apps.moe.proxy import Proxy

__all__ = ["NodeSums"]

_BY_BYTES: Final = tep.Routing(scatter_by="bytes")

_Partial = tuple[Ints, Bytes | None]
"""Weighted results of one rank for one source: tokens, and a row for each if bytes are moved."""


class NodeSums:
    """One rank's part in it.

    Args:
        proxy: of its all-to-all.
        link: of its node.
    """

    def __init__(self, proxy: Proxy, link: NvlinkPort) -> None:
        self._proxy = proxy
        self._link = link
        self._payload = payload = proxy.payload
        self._kernels, self._guard = proxy.kernels, proxy.guard
        config = payload.config
        self._size = config.node_size
        self._nodes = config.world // config.node_size
        self._node, self._local = divmod(payload.rank, config.node_size)
        self._width = config.hidden * config.combine_format.nbytes
        value = ("value", np.uint8, (config.combine_stride,))
        self._row = np.dtype([("token", np.int64), ("", "V8"), value])
        assert self._row.itemsize == config.combine_stride + PARTIAL_HEAD_BYTES
        self._block = PARTIAL_HEAD_BYTES + config.max_tokens * self._row.itemsize
        self._ready = Word(proxy.engine)
        self._sums: list[int] = []

    def _others(self) -> list[int]:
        """The other nodes, from the next one on."""
        return [(self._node + k) % self._nodes for k in range(1, self._nodes)]

    def _node_of(self, batch: Batch) -> Ints:
        """The node of each copy's expert."""
        return batch.experts // (self._payload.config.local_experts * self._size)

    def _far(self, batch: Batch) -> list[tuple[int, Ints]]:
        """The other nodes that tokens chose an expert of, and those tokens; ascending both."""
        of = self._node_of(batch)
        chosen = [(node, np.unique(batch.tokens[of == node])) for node in range(self._nodes)]
        return [(node, tokens) for node, tokens in chosen if node != self._node and len(tokens)]

    # ------------------------------------------------------------------ kernel

    async def send(self, turn: Turn, results: Bytes | None) -> None:
        """Weigh, hand to leaders and add up, node by node, a node ahead of what is added."""
        config, kernels = self._payload.config, self._kernels
        routes = turn.routes.result()
        self._sums = []
        before: int | None = None
        for node in [*self._others(), None]:
            if node is not None:
                sources = range(node * self._size, (node + 1) * self._size)
                partials = [self._partial(turn, s, results) for s in sources]
                copies = sum(int(routes.copies[s, self._payload.rank]) for s in sources)
                rows = sum(len(tokens) for tokens, _ in partials)
                await spend(kernels.sum_s(copies, rows, config.combine_stride))
                await self._hand_over(turn, node, partials)
            if before is not None:
                await self._add_up(turn, before)
            before = node

    def _partial(self, turn: Turn, source: int, results: Bytes | None) -> _Partial:
        """The weighted results of this rank's experts for one source's tokens."""
        payload, arrivals = self._payload, turn.arrivals
        if results is None or turn.received is None or arrivals is None:
            return self._proxy.tokens_of(turn, source, payload.rank), None
        config = payload.config
        at = arrivals.row[arrivals.source == source]  # by expert
        tokens, where = np.unique(turn.received.tokens[at], return_inverse=True)
        values = to_f32(results[at], config.combine_format).reshape(len(at), config.hidden)
        total = np.zeros((len(tokens), config.hidden), np.float32)
        # One after the other, in the order of experts: the same token may stand there again.
        np.add.at(total, where, turn.received.weights[at][:, None] * values)
        return tokens, from_f32(total, config.combine_format)

    async def _hand_over(self, turn: Turn, node: int, partials: list[_Partial]) -> None:
        layout = self._payload.layout
        mine, moves = self._node * self._size, []
        for local, (tokens, rows) in enumerate(partials):
            there = layout.partials_in + (self._local * self._nodes + node) * self._block
            here = layout.partials_out + local * self._block
            if rows is not None:
                count, block = self._rows_at(here if local != self._local else there)
                count[0] = len(tokens)
                block["token"][: len(tokens)] = tokens
                block["value"][: len(tokens), : self._width] = rows
            if local != self._local:
                nbytes = PARTIAL_HEAD_BYTES + len(tokens) * self._row.itemsize
                moves.append(Move(mine + local, here, there, nbytes))
        await self._link.move(moves, pushes=True)
        self._link.signal([move.peer for move in moves], (turn.number, node))

    def _rows_at(self, at: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[Any]]:
        """A block of partial sums: how many rows it has, and the rows."""
        arena = self._payload.arena
        assert arena is not None
        rows = arena[at + PARTIAL_HEAD_BYTES : at + self._block]
        return arena[at : at + 8].view(np.uint64), rows.view(self._row)

    async def _add_up(self, turn: Turn, node: int) -> None:
        """Leader: add all ranks' rows for the source of a node, and have it sent."""
        payload, config = self._payload, self._payload.config
        what = f"partial sums of turn {turn.number} for node {node}"
        flags = self._link.expect((turn.number, node), self._size - 1)
        await self._guard.wait(flags, what)
        if payload.arena is None:
            source, first = node * self._size + self._local, self._node * self._size
            found = [self._proxy.tokens_of(turn, source, first + k) for k in range(self._size)]
            tokens = np.unique(np.concatenate(found))
        else:
            at = payload.layout.partials_in + node * self._block
            step = self._nodes * self._block
            blocks = [self._rows_at(at + local * step) for local in range(self._size)]
            partials = [rows[: int(count[0])] for count, rows in blocks]
            found = [rows["token"] for rows in partials]
            tokens = np.unique(np.concatenate(found))
            total = np.zeros((len(tokens), config.hidden), np.float32)
            for rows in partials:
                values = to_f32(rows["value"][:, : self._width], config.combine_format)
                total[np.searchsorted(tokens, rows["token"])] += values
            out = self._sums_at(payload.layout.nodes_out, node, len(tokens))
            out[:] = from_f32(total, config.combine_format)
        rows_in = sum(len(one) for one in found)
        await spend(self._kernels.sum_s(rows_in, len(tokens), config.combine_stride))
        self._sums.append(len(tokens))
        self._ready.store(turn.number * self._nodes + len(self._sums))

    def _sums_at(self, area: int, node: int, count: int) -> Bytes:
        """The sums of a node in an area: u8[count, width]."""
        arena, stride = self._payload.arena, self._payload.config.combine_stride
        assert arena is not None
        at = area + node * self._payload.config.max_tokens * stride
        return arena[at : at + count * stride].reshape(-1, stride)[:, : self._width]

    # ------------------------------------------------------------------ proxy

    async def drive(self, turn: Turn) -> None:
        """Proxy: send each node's sums when they are there; see the own ones arrive."""
        config, layout, proxy = self._payload.config, self._payload.layout, self._proxy
        imm = imm_of(config.imm_base, turn.number, COMBINE)
        expected = proxy.engine.expect_imm_count(imm, self._imms(turn))
        stride = config.combine_stride
        for done, node in enumerate(self._others()):
            word = self._ready.reach(turn.number * self._nodes + done + 1)
            await self._guard.wait(word, f"sums of turn {turn.number} for node {node}")
            await spend(self._kernels.watch_s())
            rows = self._sums[done]
            if rows:
                here = layout.nodes_out + node * config.max_tokens * stride
                there = layout.nodes_in + self._node * config.max_tokens * stride
                desc = proxy.peers.descs[node * self._size + self._local]
                dst = tep.ScatterDst(rows * stride, here, (desc, there))
                sent = proxy.engine.submit_scatter(proxy.mr, [dst], imm, routing=_BY_BYTES)
                self._guard.watch(sent)
                turn.sent_results.append(sent)
                proxy.mark("posted")
        await self._guard.wait(expected, f"sums of turn {turn.number}")
        await spend(self._kernels.flag_s())
        turn.returned.set_result(None)

    def _imms(self, turn: Turn) -> int:
        peers, total = self._proxy.peers, 0
        for node, tokens in self._far(turn.batch):
            nics = peers.nics(node * self._size + self._local), peers.nics(self._payload.rank)
            shape = tep.Scatter(len(tokens) * self._payload.config.combine_stride, _BY_BYTES)
            total += tep.count_imms(shape, *nics)
        return total

    # ------------------------------------------------------------------ the end

    def sum(self, turn: Turn) -> Any:
        """Own node's results by choice, then one row a node, by node."""
        payload, config, batch = self._payload, self._payload.config, turn.batch
        if payload.arena is None:
            return None
        far = self._node_of(batch) != self._node
        place = batch.place.copy()
        place[batch.tokens[far], batch.slots[far]] = NOWHERE
        fmt = config.combine_format
        total: F32 = weighted_sum(payload.results_in(), place, turn.weights, fmt, config.hidden)
        for node, tokens in self._far(batch):
            rows = self._sums_at(payload.layout.nodes_in, node, len(tokens))
            total[tokens] += to_f32(rows, fmt)
        return like(from_f32(total, fmt), turn.sample, fmt)

    def rows_in(self, turn: Turn) -> int:
        """The number of rows that the final sum reads."""
        near = int((self._node_of(turn.batch) == self._node).sum())
        return near + sum(len(tokens) for _, tokens in self._far(turn.batch))

    def close(self) -> None:
        """Watch no words any more."""
        self._ready.close()
