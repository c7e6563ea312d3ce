"""The gate of the lifecycle: each planted bug is found by the oracle's runs."""

from __future__ import annotations

import pytest

from tests.gate.bugs_lives import COMPANY
from tests.gate.registry import changed
from tests.gate.test_planted_bugs import search
from tests.world.scenario import Scenario


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", COMPANY)
def test_planted_bug_of_company_is_found(name: str) -> None:
    """A peer that is lost without a cause, or never, is found here, or by a user."""
    bug = COMPANY[name]
    assert bug.plant.__doc__
    with changed(bug.plant()):
        found = search(f"company.{name}", bug.budget, _has_company)

    assert found is not None, f"{name} survived {bug.budget} seeds"


def _has_company(scenario: Scenario) -> bool:
    return scenario.watched or scenario.remove_ps is not None
