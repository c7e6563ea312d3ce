"""The gate of burnt immediates and of removals: the oracle's runs find each planted bug.

Those that no run shows are found by `test_orders`, or by one order of events.
"""

from __future__ import annotations

import pytest

from tests.gate.bugs_burnt import BARRING, BURNT, DIRECTED
from tests.gate.bugs_failover import can_show
from tests.gate.registry import changed
from tests.gate.test_planted_bugs import search
from tests.property import test_burnt_orders as directed
from tests.world.scenario import Scenario

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

RARE = ("rows_under_an_unsure_immediate_are_guessed",)
"""Bugs that need a path to die."""


@pytest.mark.parametrize("name", [*BURNT, *BARRING])
def test_planted_bug_is_found(name: str) -> None:
    """A count without its bytes, or a removed peer that goes on writing, is found here."""
    bug = (BURNT | BARRING)[name]
    assert bug.plant.__doc__
    wanted = _bars if name in BARRING else can_show if name in RARE else None
    with changed(bug.plant()):
        found = search(f"burnt.{name}", bug.budget, wanted)

    assert found is not None, f"{name} survived {bug.budget} seeds"


def _bars(scenario: Scenario) -> bool:
    return scenario.bar_ps is not None


@pytest.mark.parametrize("name", DIRECTED)
def test_planted_bug_is_found_by_one_order(name: str) -> None:
    """The order that it needs would no longer show it."""
    with changed(DIRECTED[name].plant()), pytest.raises(AssertionError):
        directed.test_an_immediate_that_may_stand_for_bytes_that_never_came_is_not_sent()
