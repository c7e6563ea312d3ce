"""The number of copies a rank can get: the bound for buffer sizes holds, and is reached."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tep.apps.moe.config import MoeConfig, Routes, private_limits, sort_copies


@st.composite
def configs(draw) -> MoeConfig:
    dp = draw(st.sampled_from([1, 1, 2]))
    world = dp * draw(st.integers(1, 5))
    local = draw(st.integers(1, 5))
    return MoeConfig(
        num_experts=world * local,
        topk=draw(st.integers(1, min(6, world * local))),
        hidden=16,
        max_tokens=draw(st.integers(0, 7)),
        world=world,
        dp_size=dp,
        private_tokens=draw(st.integers(0, 9)),
        expert_padding=draw(st.integers(1, 9)),
    )


def routes_of(config: MoeConfig, chosen: list[np.ndarray]) -> Routes:
    counts = np.array([sort_copies(one, config).counts for one in chosen])
    return Routes(config, counts, private_limits(config, None))


def worst_case(config: MoeConfig, rank: int) -> list[np.ndarray]:
    """Every token of every group chooses as many experts of one rank as it can, in turn.

    Taking them in turn makes the experts' counts as equal as they can be, so that as many blocks
    of padding as possible are begun.
    """
    first, local = rank * config.local_experts, config.local_experts
    others = [e for e in range(config.num_experts) if not first <= e < first + local]
    chosen = []
    for group in range(config.groups):
        rows = []
        for token in range(config.max_tokens):
            number = group * config.max_tokens + token
            take = config.copies_per_token
            mine = [first + (number * take + k) % local for k in range(take)]
            rows.append(mine + others[: config.topk - take])
        chosen.append(np.array(rows, np.int64).reshape(-1, config.topk))
    return chosen


@given(configs(), st.data())
def test_no_routing_exceeds_the_bounds(config, data) -> None:
    """One copy beyond the bound overwrites the neighbour's memory on another machine."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    bias = rng.random(config.num_experts) ** rng.integers(0, 9)
    chosen = [
        np.array(
            [
                np.argsort(-bias * rng.random(config.num_experts))[: config.topk]
                for _ in range(rng.integers(0, config.max_tokens + 1))
            ],
            np.int64,
        ).reshape(-1, config.topk)
        for _ in range(config.groups)
    ]
    routes = routes_of(config, chosen)

    for rank in range(config.world):
        assert int(routes.copies[:, rank].sum()) <= config.received_copies_max
        assert int(routes.rest[:, rank].sum()) <= config.shared_copies_max
        assert int(routes.arrivals(rank).starts[-1]) <= config.rows_max
    assert int(routes.copies.sum(axis=1).max(initial=0)) <= config.sent_copies_max


@given(configs(), st.integers(0, 2**32 - 1))
def test_adaptive_areas_fit_the_same_memory(config, seed) -> None:
    """Areas that are shared out anew must neither overlap nor leave more for the shared area."""
    config = dataclasses.replace(config, private_sizes="adaptive")
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, config.max_tokens + 1, (config.groups, config.num_experts))
    limits = private_limits(config, Routes(config, counts, private_limits(config, None)))
    most = config.max_tokens * config.copies_per_token

    assert (limits >= 0).all()
    assert (limits.sum(axis=0) <= config.groups * config.private_tokens).all()
    for rank in range(config.world):
        foreign = [g for g in range(config.groups) if g != config.group_of(rank)]
        left = sum(max(0, most - int(limits[g, rank])) for g in foreign)
        assert left <= config.shared_copies_max


@given(configs(), st.data())
def test_the_bounds_on_copies_are_reached(config, data) -> None:
    """A bound that is never reached wastes memory that grows with the square of the ranks."""
    rank = data.draw(st.integers(0, config.world - 1))
    routes = routes_of(config, worst_case(config, rank))

    assert config.received_copies_max == int(routes.copies[:, rank].sum())
    if config.dp_size == 1:  # with more, the own group's share is in the bound of one rank only
        assert config.shared_copies_max == int(routes.rest[:, rank].sum())


@given(configs(), st.integers(0, 2**32 - 1))
def test_the_bound_on_rows_is_reached(config, seed) -> None:
    """The padded batch is what the experts' kernels allocate; tight means no more than needed.

    Counts need not come from tokens here: any counts c of one rank with c[l] <= G*T and a sum of at
    most G*T*min(R, L) can be routed, each group taking its experts in turn.
    """
    each, pad = config.groups * config.max_tokens, config.expert_padding
    copies, experts = config.received_copies_max, config.local_experts
    counts = np.zeros(experts, np.int64)
    left = copies
    while True:  # begin a new block wherever it is cheapest, as long as copies last
        cost = np.where(counts == 0, 1, (-(-counts // pad) * pad + 1) - counts)
        cost = np.where(counts + cost <= each, cost, left + 1)
        at = int(np.argmin(cost))
        if experts == 0 or cost[at] > left:
            break
        counts[at] += cost[at]
        left -= int(cost[at])

    assert config.rows_max == int((-(-counts // pad) * pad).sum())


def test_the_printed_formula_is_not_the_bound() -> None:
    """The paper prints N*T*max(R, E/N), its code has min: for its model that is half as much."""
    config = MoeConfig(num_experts=256, topk=8, hidden=7168, max_tokens=128, world=64)

    assert 64 * 128 * 4 == config.received_copies_max
    assert 64 * 128 * max(8, 256 // 64) == 2 * config.received_copies_max


def test_strides_of_deepseek() -> None:
    """These are the bytes on the wire that every prediction is made with."""
    config = MoeConfig(num_experts=256, topk=8, hidden=7168, max_tokens=128, world=64)

    assert 7408 == config.dispatch_stride
    assert 14_336 == config.combine_stride
