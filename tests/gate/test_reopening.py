"""The gate of paths that come back: each planted bug is found by the seeds in which links flap."""

from __future__ import annotations

import pytest

from tests.gate.bugs_reopening import PRUNING, REOPENING
from tests.gate.registry import changed
from tests.gate.test_planted_bugs import search

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize("name", [*REOPENING, *PRUNING])
def test_planted_bug_is_found(name: str) -> None:
    """A row that lands where its reader was released is found here, or by a user."""
    bug = (REOPENING | PRUNING)[name]
    assert bug.plant.__doc__
    with changed(bug.plant()):
        found = search(name, bug.budget, lambda scenario: scenario.steady)

    assert found is not None, f"{name} survived {bug.budget} seeds"
