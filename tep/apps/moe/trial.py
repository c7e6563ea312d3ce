"""One MoE layer, run on all ranks of a simulated cluster and compared with the dense reference.

A trial is a frozen record: it prints as the line that runs it again. Used by tests, notebooks and
`tep moe --check`. Experts here are plain arithmetic, row by row, different for every expert. The
reference is the same layer on one rank, in loops; bytes are compared, not numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

import tep
from tep import sim
from tep.apps.moe.alltoall import AllToAll
from tep.apps.moe.config import NOWHERE, Format, Ints, MoeConfig
from tep.apps.moe.group import Group, Nvlink, local_groups
from tep.apps.moe.payload import F32, Bytes, Received, as_rows, from_f32, to_f32

__all__ = [
    "Expert", "Mismatch", "Tokens", "Trial", "Wrong", "apply_experts", "dense", "dense_layer",
    "draw_trial", "run_ranks", "run_trial", "run_turn",
]  # fmt: skip


Routing = Literal["even", "skewed", "one_rank", "one_expert", "holes"]

_SHAPES: Final = (
    *((2, 1), (3, 1), (4, 1), (4, 2), (4, 1), (4, 2), (4, 4)),
    *((6, 3), (6, 2), (8, 1), (8, 4), (8, 4), (1, 1), (5, 5)),
)
"""(world, node_size) that layers are drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens that one rank brings to one turn."""

    x: Bytes
    scales: F32 | None
    indices: Ints
    weights: F32


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A rank whose output differs from the dense reference."""

    rank: int
    turn: int
    tokens: tuple[int, ...]


class Mismatch(AssertionError):
    """Outputs differ from the dense reference; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(MoeConfig):
    """A drawn layer: a small MoeConfig, and how it is tried.

    Attributes:
        turns: dispatches and combines, one after the other.
        routing: how indices are drawn.
        nics: of each rank.
        seed: of tokens, routing and the chaos fabric.
    """

    num_experts: int = 8
    topk: int = 2
    hidden: int = 24
    max_tokens: int = 6
    world: int = 4
    private_tokens: int = 2
    num_scales: int = 2
    timeout_s: float = 5.0
    turns: int = 2
    routing: Routing = "even"
    nics: int | tuple[int, ...] = 2
    seed: int = 0

    @property
    def shape(self) -> dict[str, Any]:
        """The arguments of AllToAll."""
        names = {knob.name for knob in fields(MoeConfig)} - {"world", "node_size"}
        return {name: getattr(self, name) for name in names}

    def tokens(self, rank: int, turn: int) -> Tokens:
        """Draw a rank's tokens for a turn from the seed: 0 to max_tokens of them."""
        rng = np.random.default_rng([self.seed, rank, turn])
        n = int(rng.integers(0, self.max_tokens + 1))
        if self.routing in {"one_rank", "one_expert"}:
            n = self.max_tokens
        chosen = np.array([self._choose(rng) for _ in range(n)], np.int64)
        width = self.hidden * self.dispatch_format.nbytes
        if self.dispatch_format is Format.FP8:
            x = rng.integers(0, 256, (n, width)).astype(np.uint8)
        else:
            x = from_f32(rng.normal(size=(n, self.hidden)).astype(np.float32), self.dispatch_format)
        return Tokens(
            x=x,
            scales=rng.random((n, self.num_scales), np.float32) if self.num_scales else None,
            indices=chosen.reshape(n, self.topk),
            weights=rng.random((n, self.topk), np.float32),
        )

    def _choose(self, rng: np.random.Generator) -> Ints:
        experts = self.num_experts
        order = rng.permutation(experts)
        if self.routing == "skewed":
            order = np.argsort(rng.random(experts) * (1 + np.arange(experts)) ** 1.5)
        elif self.routing == "one_rank":  # as many as fit go to the last rank
            order = np.roll(np.arange(experts), self.local_experts)
        elif self.routing == "one_expert":
            order = np.concatenate(([0], 1 + rng.permutation(experts - 1)))
        chosen = order[: self.topk].astype(np.int64)
        if self.routing == "holes":
            chosen[rng.random(self.topk) < 0.5] = NOWHERE
        return chosen

    def cluster(self, **options: Any) -> sim.Cluster:
        """The chaos cluster that this trial runs on."""
        nics = list(self.nics) if isinstance(self.nics, tuple) else self.nics
        return sim.Cluster(self.world, nics=nics, seed=self.seed, **options)

    def groups(self) -> list[Group]:
        """One group a rank; nodes are linked by a hostile NVLink."""
        link = Nvlink(chaos=self.seed)
        return local_groups(self.world, node_size=self.node_size, links=link.port)


def expert(trial: Trial, number: int, x: Bytes, scales: F32 | None) -> Bytes:
    """Apply an expert to its rows: bytes or floats to f32, times its own factor, scaled."""
    if trial.dispatch_format is Format.FP8:
        values = x.astype(np.float32) - np.float32(128)
    else:
        values = to_f32(x, trial.dispatch_format).reshape(len(x), trial.hidden)
    values = values * np.float32(0.5 + 0.37 * number)
    if scales is not None:
        share = np.arange(trial.hidden) * trial.num_scales // trial.hidden
        values = values * scales[:, share]
    return from_f32(values, trial.combine_format)


def apply_experts(trial: Trial, rank: int, got: Received) -> Bytes:
    """The local experts of a rank over what it received; padding stays as rubbish."""
    width = trial.hidden * trial.combine_format.nbytes
    results = np.full((int(got.starts[-1]), width), 0xFF, np.uint8)
    for local in range(trial.local_experts):
        first = int(got.starts[local])
        rows = slice(first, first + int(got.counts[local]))
        scales = None if got.scales is None else got.scales[rows]
        x = np.ascontiguousarray(got.x[rows]).view(np.uint8)
        results[rows] = expert(trial, rank * trial.local_experts + local, x, scales)
    return results


def dense(trial: Trial, tokens: Tokens) -> Bytes:
    """The output that a rank's tokens must have."""

    def of(number: int, x: Bytes, scales: F32 | None) -> Any:
        return expert(trial, number, x, scales).view(trial.combine_format.dtype)

    return dense_layer(
        tokens.x,
        tokens.scales,
        tokens.indices,
        tokens.weights,
        of,
        hidden=trial.hidden,
        combine_format=trial.combine_format,
    )


async def run_turn(trial: Trial, alltoall: AllToAll, turn: int) -> Wrong | None:
    """One turn of one rank, compared."""
    mine = trial.tokens(alltoall.rank, turn)
    x, scales = mine.x.copy(), None if mine.scales is None else mine.scales.copy()
    typed = x.view(trial.dispatch_format.dtype)
    await alltoall.dispatch_send(typed, scales, mine.indices, mine.weights)
    x[:] = 0xEE  # it was promised that x may be changed now
    got = await alltoall.dispatch_recv()
    results = apply_experts(trial, alltoall.rank, got)
    await alltoall.combine_send(results.view(trial.combine_format.dtype))
    results[:] = 0xDD
    out = np.ascontiguousarray(await alltoall.combine_recv()).view(np.uint8)
    expected = dense(trial, mine)
    bad = np.flatnonzero((out.reshape(expected.shape) != expected).any(axis=1))
    if len(bad):
        return Wrong(rank=alltoall.rank, turn=turn, tokens=tuple(bad.tolist()))
    return None


async def run_ranks(
    trial: Trial,
    engines: list[tep.TransferEngine],
    work: Callable[[AllToAll], Awaitable[None]],
) -> None:
    """Open an all-to-all on every engine and run a coroutine on each, to the end of all."""
    groups = trial.groups()

    async def rank(number: int) -> None:
        async with AllToAll(engines[number], groups[number], **trial.shape) as alltoall:
            await work(alltoall)

    ended = await asyncio.gather(
        *(rank(number) for number in range(trial.world)), return_exceptions=True
    )
    for error in ended:
        if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
            raise error


def draw_trial(seed: int) -> Trial:
    """Draw a small layer: ranks, nodes, formats, options, routing."""
    rng = np.random.default_rng([seed, 1])
    world, node = _SHAPES[int(rng.integers(len(_SHAPES)))]
    local = int(rng.integers(1, 4))

    def one_of(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    return Trial(
        world=world,
        node_size=node,
        num_experts=world * local,
        topk=int(rng.integers(1, min(4, world * local) + 1)),
        hidden=one_of(1, 8, 24),
        max_tokens=int(rng.integers(1, 9)),
        private_tokens=int(rng.integers(0, 10)),
        num_scales=one_of(0, 1, 3),
        expert_padding=one_of(1, 4, 7),
        dispatch_format=one_of(*Format),
        combine_format=one_of(Format.BF16, Format.FP32),
        private_scatter=one_of("peers", "bytes"),
        routing=one_of(*get_args(Routing)),
        nics=one_of(1, 2, 4),
        turns=int(rng.integers(1, 4)),
        seed=seed,
    )


def run_trial(trial: Trial) -> None:
    """Run all turns on the chaos fabric and compare every byte.

    Raises:
        Mismatch: outputs differ.
        TepError: a rank failed.
    """
    wrong: list[Wrong] = []

    async def work(alltoall: AllToAll) -> None:
        for turn in range(trial.turns):
            found = await run_turn(trial, alltoall, turn)
            if found is not None:
                wrong.append(found)

    with trial.cluster() as cluster:
        cluster.run(run_ranks(trial, cluster.engines, work))
        left = {e.name: e.stall_report() for e in cluster.engines if e.stats().imms_unexpected}
    if wrong:
        raise Mismatch(f"{trial}: {wrong}")
    assert not left, f"{trial}: immediates that nobody expected: {left}"


# ---------------------------------------------------------------------- reference


Expert = Callable[[int, Any, F32 | None], Any]
"""(expert, x[n, hidden], scales[n, s] or None) -> results[n, hidden] of the combine format."""


def dense_layer(
    x: Any,
    x_scale: F32 | None,
    indices: npt.NDArray[np.integer],
    weights: F32,
    expert: Expert,
    *,
    hidden: int,
    combine_format: Format,
) -> Bytes:
    """Send each token through its experts, one by one, and sum in the order of its choices.

    The first four arguments are those of AllToAll.dispatch. Experts work row by row, so that
    grouping cannot change a result. Returns u8[n, hidden * bytes of the format].
    """

    def result(token: int, number: int) -> F32:
        scale = None if x_scale is None else x_scale[token : token + 1]
        found = expert(number, x[token : token + 1], scale)
        rows = as_rows(found, hidden, combine_format.nbytes, "results")
        return to_f32(rows, combine_format).reshape(hidden)

    total = np.zeros((len(x), hidden), np.float32)
    for token in range(len(x)):
        for choice, number in enumerate(indices[token].tolist()):
            if number != NOWHERE:
                total[token] += np.float32(weights[token, choice]) * result(token, number)
    return from_f32(total, combine_format)
