"""The gate of leases: those of the oracle's runs that lease find each planted bug."""

from __future__ import annotations

import pytest

from tep.testing.scenario import Scenario
from tests.gate.bugs_leases import LEASE_BUGS
from tests.gate.registry import changed
from tests.gate.test_planted_bugs import search

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize("name", LEASE_BUGS)
def test_planted_bug_is_found(name: str) -> None:
    """Memory that is freed under a writer is found here, or by a user."""
    bug = LEASE_BUGS[name]
    with changed(bug.plant()):
        found = search(f"leases.{name}", bug.budget, _leases)

    assert found is not None, f"{name} survived {bug.budget} seeds"


def _leases(scenario: Scenario) -> bool:
    return scenario.leased
