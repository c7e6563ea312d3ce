"""The gate of paths that come back: each planted bug is found by few drawn cases."""

from __future__ import annotations

import pytest

from tests.gate.bugs_reopening import REOPENING
from tests.gate.registry import changed
from tests.support.planted import first_shown
from tests.support.reopening import swarm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize("name", REOPENING)
def test_planted_bug_is_found(name: str) -> None:
    """A row that lands where its reader was released is found here, or by a user."""
    bug = REOPENING[name]
    assert bug.plant.__doc__
    with changed(bug.plant()):
        found = first_shown(name, lambda seed: swarm(range(seed, seed + 1)), range(bug.budget))

    assert found is not None, f"{name} survived {bug.budget} seeds"
