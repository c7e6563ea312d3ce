"""One all-to-all: shapes, formats and options, the sizes that follow from them, and the arena.

Values and arithmetic only; no memory, no engine. The bounds stated here are what buffers are sized
by, and tests/property/test_moe_bounds.py proves that they hold and are reached. All ranks have the
same layout, so that an offset computed here is valid at every peer. In order: own copies to send,
private areas by group, the shared area (these three in slots of one size, so that one gather reads
all), results to send, results received, routes received, own routes, votes, and, where a node adds
up what it sends back, partial sums and sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, Self

from tep import UsageError

__all__ = [
    "HEADER_BYTES", "PARTIAL_HEAD_BYTES", "ROUTE_HEAD_BYTES", "VOTE_BYTES", "Format", "Layout",
    "MoeConfig", "OnDead",
]  # fmt: skip


HEADER_BYTES: Final = 16
"""Behind each token on the wire: turn, token, expert (u32 each) and weight (f32).

Source: fabric-lib's token stride has 16 bytes beyond activations and scales; what they hold there
is not published.
"""

_ALIGN: Final = 16  # fabric-lib rounds activations and scales up to 16 bytes each
_RANKS_MAX: Final = 1024

OnDead = Literal["error", "mask"]
"""The consequence of a dead rank for its peers: a DeadRank error, or no experts of it."""


class Format(Enum):
    """The format of an activation: (name, bytes)."""

    FP8 = ("fp8", 1)
    BF16 = ("bf16", 2)
    FP32 = ("fp32", 4)

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return self.value[1]

    @classmethod
    def named(cls, name: str) -> Format:
        """Find by name: "fp8", "bf16" or "fp32".

        Raises:
            UsageError: none has this name.
        """
        for found in cls:
            if found.value[0] == name:
                return found
        raise UsageError(f"format {name!r} is unknown; there are: fp8, bf16, fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """One all-to-all; equal on all ranks.

    Ranks are numbered 0 .. world-1; rank r holds experts r*L .. r*L+L-1, L = num_experts / world.
    `dp_size` neighbouring ranks form a DP group, whose members have the same tokens; `node_size`
    neighbouring ranks share a node, within which payload goes over the node's own link.

    Attributes:
        num_experts: E, a multiple of world.
        topk: R, experts of a token, all distinct.
        hidden: elements of a token.
        max_tokens: T, the most tokens a DP group brings to one dispatch.
        world: ranks.
        private_tokens: token copies that go to each peer before the routes are known.
        dp_size: ranks of a DP group.
        node_size: ranks of a node; 1 = everything goes through the engine.
        dispatch_format, combine_format: how tokens travel there and back.
        num_scales: f32 scales of a token; None = one for 128 elements of fp8, else none.
        expert_padding: rows of each expert are padded to a multiple of this.
        private_sizes: "equal", or "adaptive": a receiver's private slots are shared out anew in
            every turn, to those that sent it most in the turn before; all ranks know these routes.
        private_scatter: "peers" as the reference: a peer's burst goes whole over one NIC; "bytes":
            every NIC carries a part of each.
        sums: "token": each result travels, and its token's rank adds up, in one fixed order, with
            one rounding. "node": a node adds up what it sends back; fewer bytes, more roundings.
        on_dead: what a dead rank means.
        timeout_s: how long a phase may last before dead ranks are looked for, seconds.
        imm_base: the highest four bits of all immediates of this all-to-all; another one on the
            same engine needs another.
    """

    num_experts: int
    topk: int
    hidden: int
    max_tokens: int
    world: int
    private_tokens: int = 32
    dp_size: int = 1
    node_size: int = 1
    dispatch_format: Format = Format.FP8
    combine_format: Format = Format.BF16
    num_scales: int | None = None
    expert_padding: int = 1
    private_sizes: Literal["equal", "adaptive"] = "equal"
    private_scatter: Literal["peers", "bytes"] = "peers"
    sums: Literal["token", "node"] = "token"
    on_dead: OnDead = "error"
    timeout_s: float = 30.0
    imm_base: int = 0x8000_0000

    def __post_init__(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            UsageError: with the values.
        """
        least = {
            "num_experts": 1,
            "topk": 1,
            "hidden": 1,
            "max_tokens": 0,
            "world": 1,
            "private_tokens": 0,
            "dp_size": 1,
            "node_size": 1,
            "expert_padding": 1,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(f"MoeConfig: {name}={getattr(self, name)}; {low} at the least")
        if self.world > _RANKS_MAX:
            raise UsageError(f"MoeConfig: world={self.world}; {_RANKS_MAX} ranks at the most")
        for name in ("dp_size", "node_size"):
            if self.world % getattr(self, name):
                raise UsageError(
                    f"MoeConfig: world={self.world} is no multiple of {name}={getattr(self, name)}"
                )
        if self.num_experts % self.world:
            raise UsageError(
                f"MoeConfig: num_experts={self.num_experts} is no multiple of world={self.world}"
            )
        if self.topk > self.num_experts:
            raise UsageError(
                f"MoeConfig: topk={self.topk} of num_experts={self.num_experts} distinct experts"
            )
        if self.combine_format is Format.FP8:
            raise UsageError("MoeConfig: combine_format fp8: results come back as bf16 or fp32")
        if self.sums == "node" and (
            self.dp_size > 1 or self.node_size == 1 or self.on_dead == "mask"
        ):
            raise UsageError(
                "MoeConfig: sums='node' needs node_size > 1, dp_size=1 and on_dead='error', not "
                f"{self.node_size}, {self.dp_size} and {self.on_dead!r}"
            )
        if self.imm_base & 0x0FFF_FFFF or not 0 <= self.imm_base < 2**32:
            raise UsageError(
                f"MoeConfig: imm_base={self.imm_base:#x}; only its highest four bits may be set"
            )

    # ------------------------------------------------------------------ who is who

    @property
    def local_experts(self) -> int:
        """L, experts of a rank."""
        return self.num_experts // self.world

    @property
    def groups(self) -> int:
        """G, DP groups."""
        return self.world // self.dp_size

    def group_of(self, rank: int) -> int:
        """DP group of a rank."""
        return rank // self.dp_size

    def members(self, group: int) -> range:
        """Ranks of a DP group."""
        return range(group * self.dp_size, (group + 1) * self.dp_size)

    def same_node(self, a: int, b: int) -> bool:
        """Whether two ranks share a node."""
        return a // self.node_size == b // self.node_size

    # ------------------------------------------------------------------ bytes

    @property
    def scales(self) -> int:
        """f32 scales of a token on the wire."""
        if self.num_scales is not None:
            return self.num_scales
        return -(-self.hidden // 128) if self.dispatch_format is Format.FP8 else 0

    @property
    def x_bytes(self) -> int:
        """Activation bytes of a token on its way to an expert."""
        return self.hidden * self.dispatch_format.nbytes

    @property
    def scales_at(self) -> int:
        """Offset of a token's scales in its slot."""
        return _up(self.x_bytes, _ALIGN)

    @property
    def header_at(self) -> int:
        """Offset of a token's header in its slot."""
        return self.scales_at + _up(4 * self.scales, _ALIGN)

    @property
    def dispatch_stride(self) -> int:
        """Bytes of a token copy on its way to an expert; 7408 for DeepSeek-V3 in fp8."""
        return self.header_at + HEADER_BYTES

    @property
    def combine_stride(self) -> int:
        """Bytes of a result on its way back; 14336 for DeepSeek-V3 in bf16."""
        return _up(self.hidden * self.combine_format.nbytes, _ALIGN)

    # ------------------------------------------------------------------ bounds, in token copies

    @property
    def copies_per_token(self) -> int:
        """Most copies of one token that one rank can get: min(R, L).

        A token's experts are distinct, so a rank of L experts can be chosen L times at the most,
        and never more than R times. (The paper prints max(R, E/N) here; its code has min.)
        """
        return min(self.topk, self.local_experts)

    @property
    def sent_copies_max(self) -> int:
        """Most token copies that a DP group sends: T * R. Reached by every full batch."""
        return self.max_tokens * self.topk

    @property
    def received_copies_max(self) -> int:
        """Most token copies that a rank gets: G * T * min(R, L), if all tokens go to it."""
        return self.groups * self.max_tokens * self.copies_per_token

    @property
    def shared_copies_max(self) -> int:
        """Most token copies in the shared area: what does not fit the private areas.

        (G - 1) * max(0, T * min(R, L) - private_tokens): the own group's tokens need no buffer.
        """
        beyond = self.max_tokens * self.copies_per_token - self.private_tokens
        return (self.groups - 1) * max(0, beyond)

    @property
    def rows_max(self) -> int:
        """Most rows of a received, padded batch: p * min(j * ceil(C/p), (N + j*(p-1)) // p).

        N copies in all, C = G*T of one expert at the most, in blocks of p, over j = min(L, N)
        experts: a block needs one copy, and an expert's next block p more.
        """
        pad, each = self.expert_padding, self.groups * self.max_tokens
        copies = self.received_copies_max
        experts = min(self.local_experts, copies)
        blocks = min(experts * -(-each // pad), (copies + experts * (pad - 1)) // pad)
        return pad * blocks


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


# ---------------------------------------------------------------------- layout


ROUTE_HEAD_BYTES: Final = 16
PARTIAL_HEAD_BYTES: Final = 16  # of a block: how many rows follow; of a row: its token
VOTE_BYTES: Final = 192  # four u64 and a bitmap of 1,024 ranks, rounded up
_AREA_ALIGN: Final = 256


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
        results_out = _area(shared + config.shared_copies_max * stride)
        results_in = _area(results_out + config.received_copies_max * result)
        routes_in = _area(results_in + config.sent_copies_max * result)
        routes_out = routes_in + config.groups * route
        votes = _area(routes_out + route)
        partials_out = _area(votes + (2 * config.world + 1) * VOTE_BYTES)
        nodes, summed = config.world // config.node_size, config.sums == "node"
        block = PARTIAL_HEAD_BYTES + config.max_tokens * (result + PARTIAL_HEAD_BYTES)
        partials_in = _area(partials_out + summed * config.node_size * block)
        nodes_out = _area(partials_in + summed * config.world * block)
        nodes_in = _area(nodes_out + summed * nodes * config.max_tokens * result)
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
            nbytes=_area(nodes_in + summed * nodes * config.max_tokens * result),
        )


def _area(value: int) -> int:
    return _up(value, _AREA_ALIGN)
