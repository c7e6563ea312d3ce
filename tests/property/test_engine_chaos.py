"""The engine under any mixture of transfers, chaos and faults that Hypothesis can think of."""

from __future__ import annotations

from hypothesis import given

from tep.testing.oracle import run_scenario
from tep.testing.scenario import Scenario
from tep.testing.strategies import scenarios


@given(scenarios())
def test_engine_keeps_its_promises(scenario: Scenario) -> None:
    """Whatever is asked, and whatever breaks: the promises listed in tep.testing.oracle hold."""
    run_scenario(scenario)


@given(scenarios())
def test_scenario_prints_as_itself(scenario: Scenario) -> None:
    """A failing scenario is reported as a literal; one that reads otherwise replays another run."""
    from tep.sim.faults import Chaos, KillNic, Restart, Revoke
    from tep.testing.scenario import TransferSpec

    names = {
        kind.__name__: kind for kind in (Chaos, KillNic, Restart, Revoke, Scenario, TransferSpec)
    }
    assert scenario == eval(repr(scenario), names)  # noqa: S307  # a literal of our own records
