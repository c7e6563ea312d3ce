"""Whole layers on the chaos fabric: every output byte equals the dense reference's."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tep.apps.moe.config import Format
from tep.apps.moe.trial import Trial, run_trial
from tests.support.effort import fresh

# A layer takes as long as twenty plain examples; fewer of them, but each has hundreds of writes.
FEW = settings(max_examples=max(5, settings().max_examples // 12))


@st.composite
def trials(draw) -> Trial:
    """A small layer; all that is drawn by the seed alone (chaos knobs, tokens) varies with it."""
    world, node = draw(
        st.sampled_from(
            [(2, 1), (3, 1), (4, 1), (4, 2), (4, 4), (6, 3), (6, 2), (8, 1), (8, 4), (1, 1), (5, 5)]
        )
    )
    local = draw(st.integers(1, 3))
    fmt = draw(st.sampled_from(list(Format)))
    return Trial(
        world=world,
        node_size=node,
        num_experts=world * local,
        topk=draw(st.integers(1, min(4, world * local))),
        hidden=draw(st.sampled_from([1, 8, 24])),
        max_tokens=draw(st.integers(1, 8)),
        private_tokens=draw(st.integers(0, 9)),
        num_scales=draw(st.sampled_from([0, 1, 3])),
        expert_padding=draw(st.sampled_from([1, 4, 7])),
        dispatch_format=fmt,
        combine_format=draw(st.sampled_from([Format.BF16, Format.FP32])),
        private_scatter=draw(st.sampled_from(["peers", "bytes"])),
        routing=draw(st.sampled_from(["even", "skewed", "one_rank", "one_expert", "holes"])),
        nics=draw(st.sampled_from([1, 2, 4])),
        turns=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.slow
@FEW
@given(trials())
def test_every_byte_equals_the_dense_reference(trial) -> None:
    """Reordered, cut, delayed and repeated writes must not show in a single bit of the output."""
    run_trial(trial)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_with_different_nics(seed) -> None:
    """The counts of immediates depend on both sides' NICs; the reference cannot do this at all."""
    run_trial(Trial(nics=(1, 2, 4, 3), seed=seed, hidden=4096, combine_format=Format.FP32))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "node"), [(16, 1), (64, 8)])
def test_many_ranks(world, node) -> None:
    """Counts, offsets and barriers grow with the ranks; an overflow shows only there."""
    trial = Trial(world=world, node_size=node, topk=6, num_experts=world, turns=1, seed=world)

    run_trial(trial)


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_thousands_of_random_routings(part) -> None:
    """Rare orders are found by numbers, not by luck."""
    for seed in fresh(2_000)[part::4]:
        routing = ("even", "skewed", "one_rank", "holes")[seed % 4]
        node = (1, 2, 4)[seed % 3]
        run_trial(
            dataclasses.replace(
                Trial(seed=seed, routing=routing), node_size=node, private_tokens=seed % 5
            )
        )
