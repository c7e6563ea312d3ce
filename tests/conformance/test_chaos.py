"""The contract on the chaos fabric, under knobs drawn from several seeds."""

from __future__ import annotations

import pytest

from tep.sim.faults import Chaos
from tep.testing.contract import DomainContract
from tests.support.worlds import ChaosWorld

SLOW = pytest.mark.slow
"""The fast run keeps the first two records."""


class TestChaos(DomainContract):
    """Twelve drawn records: both orders, every burst and refusal among them."""

    @pytest.fixture(params=[*range(2), *(pytest.param(k, marks=SLOW) for k in range(2, 12))])
    def world(self, request):
        with ChaosWorld(Chaos.draw(request.param)) as world:
            yield world


def test_the_drawn_records_differ_in_what_matters() -> None:
    """Twelve seeds that all drew an ordered fabric would leave half of the contract untried."""
    drawn = [Chaos.draw(seed) for seed in range(12)]

    for knob in ("ordered", "short_post", "refuse_post", "dup_place", "merge_cqes", "offsets"):
        assert {False, True} == {getattr(chaos, knob) for chaos in drawn}, knob
    assert {0} < {chaos.burst_ps for chaos in drawn}
    assert 1 in {chaos.sq_depth for chaos in drawn}
    assert 1 in {chaos.cqe_limit for chaos in drawn}
