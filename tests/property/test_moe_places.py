"""The places of copies, against a brute-force walk over every token; no engine."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tep.apps.moe.config import Layout, MoeConfig, Routes, sort_copies
from tep.apps.moe.payload import Payload

# Each example walks through every copy of every rank.
SOME = settings(max_examples=max(10, settings().max_examples // 4))


@st.composite
def routings(draw) -> tuple[MoeConfig, list[np.ndarray]]:
    world = draw(st.integers(1, 6))
    experts = world * draw(st.integers(1, 4))
    config = MoeConfig(
        num_experts=experts,
        topk=draw(st.integers(1, min(5, experts))),
        hidden=4,
        max_tokens=draw(st.integers(0, 8)),
        world=world,
        private_tokens=draw(st.integers(0, 6)),
        expert_padding=draw(st.sampled_from([1, 1, 2, 8])),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = draw(st.sampled_from([0.0, 1.0, 4.0]))
    bias = (1.0 + np.arange(experts)) ** -skew
    batches = []
    for _ in range(config.world):
        n = int(rng.integers(0, config.max_tokens + 1))
        keys = rng.random((n, experts)) * bias
        chosen = np.argsort(-keys, axis=1)[:, : config.topk].astype(np.int64)
        chosen[rng.random(chosen.shape) < draw(st.sampled_from([0.0, 0.3]))] = -1
        batches.append(chosen.reshape(n, config.topk))
    return config, batches


def routes_of(config: MoeConfig, batches: list[np.ndarray]) -> Routes:
    """The routes of a turn."""
    return Routes(config, np.array([sort_copies(b, config).counts for b in batches]))


def copies_of(config: MoeConfig, chosen: np.ndarray, rank: int) -> list[tuple[int, int]]:
    """(expert, token) of the copies for one rank, in the order they are sent."""
    first = rank * config.local_experts
    return [
        (expert, token)
        for expert in range(first, first + config.local_experts)
        for token in range(len(chosen))
        if expert in chosen[token]
    ]


@SOME
@given(routings())
def test_sending_order_is_by_expert_then_token(drawn) -> None:
    """Both ends derive places from this order; one that differs reads another token's bytes."""
    config, batches = drawn
    for chosen in batches:
        batch = sort_copies(chosen, config)
        expected = [
            pair for rank in range(config.world) for pair in copies_of(config, chosen, rank)
        ]

        assert expected == list(zip(batch.experts.tolist(), batch.tokens.tolist(), strict=True))
        for token, choice in np.ndindex(chosen.shape):
            place = batch.place[token, choice]
            assert (chosen[token, choice] < 0) == (place < 0)
            if place >= 0:
                assert chosen[token, choice] == batch.experts[place]
                assert token == batch.tokens[place]


@SOME
@given(routings())
def test_every_copy_has_its_own_place_and_is_read_from_it(drawn) -> None:
    """Senders must write the slots that receivers read, and none twice."""
    config, batches = drawn
    layout = Layout.of(config)
    routes = routes_of(config, batches)
    for rank in range(config.world):
        payload = Payload(config, rank, None)
        written: dict[int, tuple[int, int, int]] = {}
        for source, chosen in enumerate(batches):
            for index, (expert, token) in enumerate(copies_of(config, chosen, rank)):
                if source == rank:
                    at = layout.send + (int(routes.starts[source, rank]) + index) * layout.stride
                elif index < int(routes.private[source, rank]):
                    slot = source * config.private_tokens + index
                    at = layout.private + slot * layout.stride
                    assert at + layout.stride <= layout.shared
                else:
                    early = int(routes.private[source, rank])
                    rest = int(routes.shared_at[source, rank]) + index - early
                    at = layout.shared + rest * layout.stride
                    assert at + layout.stride <= layout.results_out
                assert at not in written
                written[at] = (source, expert, token)
        arrivals = routes.arrivals(rank)
        read = (payload.where(routes, arrivals) * layout.stride).tolist()

        assert sorted(written) == sorted(read)
        rows = sorted(zip(arrivals.row.tolist(), (written[at] for at in read), strict=True))
        by_expert = sorted((e, g, t) for g, e, t in written.values())
        assert by_expert == [(e, g, t) for _, (g, e, t) in rows]
        for local in range(config.local_experts):
            assert 0 == int(arrivals.starts[local]) % config.expert_padding
            count = sum(e == rank * config.local_experts + local for e, _, _ in by_expert)
            assert count == int(arrivals.counts[local])


@SOME
@given(routings())
def test_results_come_back_to_the_place_of_their_copy(drawn) -> None:
    """A result one slot off is added to another token."""
    config, batches = drawn
    routes = routes_of(config, batches)
    for source, chosen in enumerate(batches):
        batch = sort_copies(chosen, config)
        for rank in range(config.world):
            first = int(routes.starts[source, rank])
            back = [
                (int(batch.experts[first + k]), int(batch.tokens[first + k]))
                for k in range(int(routes.copies[source, rank]))
            ]
            assert copies_of(config, chosen, rank) == back
