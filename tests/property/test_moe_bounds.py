"""The number of copies a rank can get: the bound for buffer sizes holds, and is reached."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tep.apps.moe.config import MoeConfig, Routes, sort_copies


@st.composite
def configs(draw) -> MoeConfig:
    world = draw(st.integers(1, 10))
    local = draw(st.integers(1, 5))
    return MoeConfig(
        num_experts=world * local,
        topk=draw(st.integers(1, min(6, world * local))),
        hidden=16,
        max_tokens=draw(st.integers(0, 7)),
        world=world,
        private_tokens=draw(st.integers(0, 9)),
    )


def routes_of(config: MoeConfig, chosen: list[np.ndarray]) -> Routes:
    counts = np.array([sort_copies(one, config).counts for one in chosen])
    return Routes(config, counts)


def worst_case(config: MoeConfig, rank: int) -> list[np.ndarray]:
    """Every token of every rank chooses as many experts of one rank as it can."""
    first, local = rank * config.local_experts, config.local_experts
    others = [e for e in range(config.num_experts) if not first <= e < first + local]
    take = config.copies_per_token
    one = [first + k for k in range(take)] + others[: config.topk - take]
    each = np.array([one] * config.max_tokens, np.int64).reshape(-1, config.topk)
    return [each] * config.world


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
        for _ in range(config.world)
    ]
    routes = routes_of(config, chosen)

    for rank in range(config.world):
        assert int(routes.copies[:, rank].sum()) <= config.received_copies_max
        assert int(routes.rest[:, rank].sum()) <= config.shared_copies_max
    assert int(routes.copies.sum(axis=1).max(initial=0)) <= config.sent_copies_max


@given(configs(), st.data())
def test_the_bounds_on_copies_are_reached(config, data) -> None:
    """A bound that is never reached wastes memory that grows with the square of the ranks."""
    rank = data.draw(st.integers(0, config.world - 1))
    routes = routes_of(config, worst_case(config, rank))

    assert config.received_copies_max == int(routes.copies[:, rank].sum())
    assert config.shared_copies_max == int(routes.rest[:, rank].sum())


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
