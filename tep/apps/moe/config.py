"""One all-to-all: shapes, formats and options, the sizes that follow, the arena, and all places.

Values and arithmetic only; no memory, no engine. The bounds stated here are what buffers are sized
by, and tests/property/test_moe_bounds.py proves that they hold and are reached. All ranks have the
same layout, so that an offset computed here is valid at every peer. In order: own copies to send,
private areas by source, the shared area (these three in slots of one size, so that one gather reads
all), results to send, results received, routes received, own routes.

A *copy* is one (token, expert) pair; its *source* is the rank of its token. A source's copies are
ordered by expert, then token, so that those for one rank, and for one expert, stand together: a
block. Rule 1: every place is a function of the routes alone (counts of copies by source and
expert), so all ranks compute the same.
Rule 2: how many immediates a rank counts is computed from the routes too, never measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tep import BadRequest, UsageError

__all__ = [
    "HEADER_BYTES", "NOWHERE", "RANKS_MAX", "ROUTE_HEAD_BYTES", "Arrivals",
    "Batch", "Format", "Ints", "Layout", "MoeConfig", "Routes", "sort_copies",
]  # fmt: skip


HEADER_BYTES: Final = 16
"""Behind each token on the wire: turn, token, expert (u32 each) and weight (f32).

Source: fabric-lib's token stride has 16 bytes beyond activations and scales; what they hold there
is not published.
"""

_ALIGN: Final = 16  # fabric-lib rounds activations and scales up to 16 bytes each
RANKS_MAX: Final = 1024
"""Most ranks of one all-to-all."""


class Format(Enum):
    """The format of an activation: (name, bytes)."""

    FP8 = ("fp8", 1)
    BF16 = ("bf16", 2)
    FP32 = ("fp32", 4)

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return self.value[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of an element for numpy, which has no fp8 and no bf16."""
        return np.dtype((np.uint8, np.uint16, np.float32)[self.nbytes // 2])


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """One all-to-all; equal on all ranks.

    Ranks are numbered 0 .. world-1; rank r holds experts r*L .. r*L+L-1, L = num_experts / world.
    `node_size` neighbouring ranks share a node, within which payload goes over the node's own link.

    Attributes:
        num_experts: E, a multiple of world.
        topk: R, experts of a token, all distinct.
        hidden: elements of a token.
        max_tokens: T, the most tokens a rank brings to one dispatch.
        world: ranks.
        private_tokens: token copies that go to each peer before the routes are known.
        node_size: ranks of a node; 1 = everything goes through the engine.
        num_scales: f32 scales of a token; None = one for 128 elements of fp8, else none.
        expert_padding: rows of each expert are padded to a multiple of this.
        private_scatter: "peers" as the reference: a peer's burst goes whole over one NIC; "bytes":
            every NIC carries a part of each.
        timeout_s: how long one wait may last before dead ranks are looked for, seconds.
        imm_base: the highest four bits of all immediates of this all-to-all; another one on the
            same engine needs another.
    """

    num_experts: int
    topk: int
    hidden: int
    max_tokens: int
    world: int
    private_tokens: int = 32
    node_size: int = 1
    dispatch_format: Format = Format.FP8
    combine_format: Format = Format.BF16
    num_scales: int | None = None
    expert_padding: int = 1
    private_scatter: Literal["peers", "bytes"] = "peers"
    timeout_s: float = 30.0
    imm_base: int = 0x8000_0000

    def __post_init__(self) -> None:
        """Refuse what contradicts itself: UsageError."""
        least = {
            "num_experts": 1,
            "topk": 1,
            "hidden": 1,
            "max_tokens": 0,
            "world": 1,
            "private_tokens": 0,
            "node_size": 1,
            "expert_padding": 1,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(f"MoeConfig: {name}={getattr(self, name)}; {low} at the least")
        if self.world > RANKS_MAX:
            raise UsageError(f"MoeConfig: world={self.world}; {RANKS_MAX} ranks at the most")
        for name, part in (("world", "node_size"), ("num_experts", "world")):
            whole, size = getattr(self, name), getattr(self, part)
            if whole % size:
                raise UsageError(f"MoeConfig: {name}={whole} is no multiple of {part}={size}")
        if self.topk > self.num_experts:
            raise UsageError(
                f"MoeConfig: topk={self.topk} of num_experts={self.num_experts} distinct experts"
            )
        if self.combine_format is Format.FP8:
            raise UsageError("MoeConfig: combine_format fp8: results come back as bf16 or fp32")
        if self.imm_base & 0x0FFF_FFFF or not 0 <= self.imm_base < 2**32:
            raise UsageError(
                f"MoeConfig: imm_base={self.imm_base:#x}; only its highest four bits may be set"
            )

    # ------------------------------------------------------------------ who is who

    @property
    def local_experts(self) -> int:
        """The L experts of a rank."""
        return self.num_experts // self.world

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
        """Activation bytes of a token."""
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
        """Most token copies that a rank sends: T * R. Reached by every full batch."""
        return self.max_tokens * self.topk

    @property
    def received_copies_max(self) -> int:
        """Most token copies that a rank gets: N * T * min(R, L), if all tokens go to it."""
        return self.world * self.max_tokens * self.copies_per_token

    @property
    def shared_copies_max(self) -> int:
        """Most token copies in the shared area: what does not fit the private areas.

        (N - 1) * max(0, T * min(R, L) - private_tokens): the own tokens need no buffer.
        """
        beyond = self.max_tokens * self.copies_per_token - self.private_tokens
        return (self.world - 1) * max(0, beyond)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


# ---------------------------------------------------------------------- layout


ROUTE_HEAD_BYTES: Final = 16
_AREA_ALIGN: Final = 256
_PACKED: Final = {"private", "shared", "routes_out"}  # follow the area before without a gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Byte offsets in the arena.

    Attributes:
        stride, result_stride: bytes of a copy, and of a result.
        send, private, shared: copies.
        results_out, results_in: results.
        routes_in, routes_out: a row of `route_bytes` for each rank, and the own one.
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
    nbytes: int

    @classmethod
    def of(cls, config: MoeConfig) -> Self:
        """Lay a configuration out."""
        stride, result = config.dispatch_stride, config.combine_stride
        route = ROUTE_HEAD_BYTES + 4 * config.num_experts
        sizes = {
            "send": config.sent_copies_max * stride,
            "private": config.world * config.private_tokens * stride,
            "shared": config.shared_copies_max * stride,
            "results_out": config.received_copies_max * result,
            "results_in": config.sent_copies_max * result,
            "routes_in": config.world * route,
            "routes_out": route,
        }
        at, areas = 0, {}
        for name, nbytes in sizes.items():
            areas[name] = at if name in _PACKED else _up(at, _AREA_ALIGN)
            at = areas[name] + nbytes
        end = _up(at, _AREA_ALIGN)
        return cls(stride=stride, result_stride=result, route_bytes=route, nbytes=end, **areas)


# ---------------------------------------------------------------------- places


Ints = npt.NDArray[np.int64]

NOWHERE: Final = -1
"""An index that chooses no expert."""


class Batch(NamedTuple):
    """The copies of one rank's tokens, in sending order.

    Attributes:
        tokens: i64[copies], token of each copy.
        slots: i64[copies], which of the token's R choices it is.
        experts: i64[copies].
        counts: i64[E], copies of each expert.
        place: i64[n, R], position of each choice in sending order, or NOWHERE.
    """

    tokens: Ints
    slots: Ints
    experts: Ints
    counts: Ints
    place: Ints


def sort_copies(indices: npt.NDArray[np.integer], config: MoeConfig) -> Batch:
    """Order the copies of a batch by expert, then token.

    Args:
        indices: int[n, R], expert of each choice, or NOWHERE; a token's choices are distinct.
        config: of the all-to-all.

    Raises:
        BadRequest: wrong shape, too many tokens, an unknown expert, or one chosen twice.
    """
    found = np.asarray(indices)
    if found.ndim != 2 or found.shape[1] != config.topk or found.dtype.kind not in "iu":
        raise BadRequest(
            f"indices of shape {found.shape} {found.dtype}; integers [tokens, {config.topk}]"
        )
    if len(found) > config.max_tokens:
        raise BadRequest(f"{len(found)} tokens, but max_tokens={config.max_tokens}")
    chosen = found.astype(np.int64)
    if chosen.size and not NOWHERE <= int(chosen.min()) <= int(chosen.max()) < config.num_experts:
        raise BadRequest(
            f"indices from {int(chosen.min())} to {int(chosen.max())}; experts are 0 to "
            f"{config.num_experts - 1}, and {NOWHERE} is none"
        )
    _refuse_twice(chosen)
    tokens, slots = np.nonzero(chosen != NOWHERE)
    experts = chosen[tokens, slots]
    order = np.argsort(experts, kind="stable")
    tokens, slots, experts = tokens[order], slots[order], experts[order]
    place = np.full(chosen.shape, NOWHERE, np.int64)
    place[tokens, slots] = np.arange(len(order))
    counts = np.bincount(experts, minlength=config.num_experts)
    return Batch(tokens, slots, experts, counts, place)


def _refuse_twice(chosen: Ints) -> None:
    ordered = np.sort(chosen, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NOWHERE)
    if twice.any():
        token, at = (int(found[0]) for found in np.nonzero(twice))
        raise BadRequest(f"token {token} chooses expert {int(ordered[token, at])} more than once")


class Arrivals(NamedTuple):
    """Every copy that one rank gets, in the order of its output: by expert, source, position.

    Attributes:
        source: i64[copies], where it comes from.
        place: i64[copies], position among the copies from that source to this rank.
        row: i64[copies], where it stands in the padded output.
        counts: i64[L], copies of each expert.
        starts: i64[L + 1], first row of each expert, and the end.
    """

    source: Ints
    place: Ints
    row: Ints
    counts: Ints
    starts: Ints


class Routes:
    """The counts of one turn, and all places that follow from them.

    Args:
        config: of the all-to-all.
        counts: i64[world, E], copies by source and expert.

    Attributes:
        copies: i64[world, world], copies from each source to each rank; so the others.
        starts: where a rank's block starts in the source's sending order.
        private: copies that go to the private area.
        rest: copies that go to the shared area.
        shared_at: where the rest of a source starts in a rank's shared area.
    """

    def __init__(self, config: MoeConfig, counts: Ints) -> None:
        assert counts.shape == (config.world, config.num_experts), counts.shape
        self.config = config
        self.counts = counts
        shape = (config.world, config.world, config.local_experts)
        self.copies: Ints = counts.reshape(shape).sum(axis=2)
        self.starts: Ints = np.cumsum(self.copies, axis=1) - self.copies
        foreign = ~np.eye(config.world, dtype=np.bool_)
        self.private: Ints = np.minimum(self.copies, config.private_tokens) * foreign
        self.rest: Ints = (self.copies - self.private) * foreign
        self.shared_at: Ints = np.cumsum(self.rest, axis=0) - self.rest

    def result_starts(self, rank: int) -> Ints:
        """Start of each source's block in a rank's results to send; i64[world]."""
        mine = self.copies[:, rank]
        return np.cumsum(mine) - mine

    def arrivals(self, rank: int) -> Arrivals:
        """Every copy that a rank gets."""
        config = self.config
        first = rank * config.local_experts
        mine = self.counts[:, first : first + config.local_experts]
        before = np.cumsum(mine, axis=1) - mine  # in the block of its source
        totals = mine.sum(axis=0)
        padded = -(-totals // config.expert_padding) * config.expert_padding
        starts = np.concatenate(([0], np.cumsum(padded)))
        rows = starts[:-1] + np.cumsum(mine, axis=0) - mine  # first row of (source, expert)
        lengths = mine.T.ravel()  # expert by expert, source by source
        run = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        source = np.tile(np.arange(config.world), config.local_experts)
        return Arrivals(
            np.repeat(source, lengths),
            np.repeat(before.T.ravel(), lengths) + run,
            np.repeat(rows.T.ravel(), lengths) + run,
            totals,
            starts,
        )
