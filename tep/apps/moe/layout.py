"""Where everything lies in a rank's one region, the arena. Pure arithmetic.

All ranks have the same layout, so that an offset computed here is valid at every peer. In order:
own copies to send, private areas by group, the shared area (these three in slots of one size, so
that one gather reads all), results to send, results received, routes received, own routes, votes,
and, where a node adds up what it sends back, partial sums and sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from tep.apps.moe.config import MoeConfig

__all__ = ["PARTIAL_HEAD_BYTES", "ROUTE_HEAD_BYTES", "VOTE_BYTES", "Layout"]

ROUTE_HEAD_BYTES: Final = 16
PARTIAL_HEAD_BYTES: Final = 16  # of a block: how many rows follow; of a row: its token
VOTE_BYTES: Final = 192  # four u64 and a bitmap of 1,024 ranks, rounded up
_ALIGN: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Byte offsets in the arena.

    Attributes:
        stride, result_stride: bytes of a copy, and of a result.
        send, private, shared: copies.
        results_out, results_in: results.
        routes_in, routes_out: a row of `route_bytes` for each group, and the own one.
        partials_out, partials_in: blocks of partial sums, by rank of the node; in: and by node.
        nodes_out, nodes_in: sums by node, max_tokens rows each.
        votes: a row of VOTE_BYTES for each rank and parity, and the own one behind them.
        nbytes: of the arena.
    """

    stride: int
    result_stride: int
    route_bytes: int
    send: int
    private: int
    shared: int
    results_out: int
    results_in: int
    routes_in: int
    routes_out: int
    votes: int
    partials_out: int
    partials_in: int
    nodes_out: int
    nodes_in: int
    nbytes: int

    @classmethod
    def of(cls, config: MoeConfig) -> Self:
        """Lay a configuration out."""
        stride, result = config.dispatch_stride, config.combine_stride
        route = ROUTE_HEAD_BYTES + 4 * config.num_experts
        private = config.sent_copies_max * stride
        shared = private + config.groups * config.private_tokens * stride
        results_out = _up(shared + config.shared_copies_max * stride)
        results_in = _up(results_out + config.received_copies_max * result)
        routes_in = _up(results_in + config.sent_copies_max * result)
        routes_out = routes_in + config.groups * route
        votes = _up(routes_out + route)
        partials_out = _up(votes + (2 * config.world + 1) * VOTE_BYTES)
        nodes, summed = config.world // config.node_size, config.sums == "node"
        block = PARTIAL_HEAD_BYTES + config.max_tokens * (result + PARTIAL_HEAD_BYTES)
        partials_in = _up(partials_out + summed * config.node_size * block)
        nodes_out = _up(partials_in + summed * config.world * block)
        nodes_in = _up(nodes_out + summed * nodes * config.max_tokens * result)
        return cls(
            stride=stride,
            result_stride=result,
            route_bytes=route,
            send=0,
            private=private,
            shared=shared,
            results_out=results_out,
            results_in=results_in,
            routes_in=routes_in,
            routes_out=routes_out,
            votes=votes,
            partials_out=partials_out,
            partials_in=partials_in,
            nodes_out=nodes_out,
            nodes_in=nodes_in,
            nbytes=_up(nodes_in + summed * nodes * config.max_tokens * result),
        )


def _up(value: int) -> int:
    return -(-value // _ALIGN) * _ALIGN
