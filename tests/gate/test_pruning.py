"""The gate of pruned sums: each planted bug is found by few drawn cases."""

from __future__ import annotations

import pytest

from tests.gate.bugs_pruning import PRUNING
from tests.gate.registry import changed
from tests.support.planted import first_shown
from tests.support.reopening import pruning_swarm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize("name", PRUNING)
def test_planted_bug_is_found(name: str) -> None:
    """Sums that are pruned differently judge the next failover wrongly."""
    bug = PRUNING[name]
    assert bug.plant.__doc__
    with changed(bug.plant()):
        found = first_shown(
            name, lambda seed: pruning_swarm(range(seed, seed + 1)), range(bug.budget)
        )

    assert found is not None, f"{name} survived {bug.budget} seeds"
