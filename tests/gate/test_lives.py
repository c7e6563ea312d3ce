"""The gate of the lifecycle: each planted bug is found by the oracle's runs."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.gate.bugs_lives import COMPANY, tells
from tests.gate.registry import changed
from tests.gate.test_planted_bugs import search
from tests.support.planted import shows
from tests.world.oracle import replay
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


@pytest.mark.slow
def test_tools_of_the_planters_are_harmless() -> None:
    """A bug that is found for the patch around it, and not for itself, proves nothing."""
    company = (seed for seed in range(2_000) if _has_company(Scenario.draw(seed)))
    with changed(tells(lambda _: True)):
        assert not any(shows(replay, seed) for seed in islice(company, 40))
