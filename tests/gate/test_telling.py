"""The gate of failures that receivers are told of: drawn runs find each planted bug, and no other.

Most bugs are looked for in those of the oracle's runs that tell. Two are too rare there: they need
a second sender under the same immediate, or a receiver that counts late. `telling_trials` has both.
"""

from __future__ import annotations

import os

import pytest

from tests.gate.bugs_telling import TELLING
from tests.gate.registry import changed
from tests.gate.test_planted_bugs import search
from tests.support.planted import first_shown
from tests.support.telling_trials import play

SEEDS = 20_000 if os.environ.get("TEP_LONG") else 300

OF_TRIALS = ("a_new_serial_each_time", "uncounted_arrivals_are_not_awaited")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize("name", TELLING)
def test_planted_bug_is_found(name: str) -> None:
    """A receiver that is told wrongly reads bytes of two tries, or waits for its timeout."""
    bug = TELLING[name]
    assert bug.plant.__doc__
    with changed(bug.plant()):
        if name in OF_TRIALS:
            found = first_shown(name, play, range(bug.budget))
        else:
            found = search(f"telling.{name}", bug.budget, lambda scenario: scenario.tell_failures)

    assert found is not None, f"{name} survived {bug.budget} seeds"


def test_telling_is_clean() -> None:
    """Nobody is left waiting, no count is left over, and no two attempts are mixed."""
    seen = sum((play(seed).seen for seed in range(SEEDS)), start=play(SEEDS).seen)

    wanted = {"failed", "cancelled", "PEER_FAILED", "held", "reached after a failure", "cleared"}
    wanted |= {"in doubt", "landed after its error", "message lost", "too many attempts"}
    assert {} == {what: seen[what] for what in wanted if seen[what] < SEEDS // 50}
