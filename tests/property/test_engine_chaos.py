"""The engine under any mixture of transfers, chaos and faults that Hypothesis can think of."""

from __future__ import annotations

from hypothesis import given

import tep.testing
from tep.testing import Scenario, engine_scenarios, run_scenario


@given(engine_scenarios())
def test_engine_keeps_its_promises(scenario: Scenario) -> None:
    """Whatever is asked, and whatever breaks: the promises listed in tep.testing.oracle hold."""
    run_scenario(scenario)


@given(engine_scenarios())
def test_scenario_prints_as_itself(scenario: Scenario) -> None:
    """A failing scenario is reported as a literal; one that reads otherwise replays another run."""
    names = {name: getattr(tep.testing, name) for name in tep.testing.__all__}
    assert scenario == eval(repr(scenario), names)  # noqa: S307  # a literal of our own records
