"""The gate of failures that peers are told of: drawn runs find each planted bug, and no other."""

from __future__ import annotations

import os

import pytest

from tests.gate.bugs_telling import TELLING
from tests.gate.registry import changed
from tests.support.planted import first_shown
from tests.support.telling_trials import play

SEEDS = 20_000 if os.environ.get("TEP_LONG") else 600

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize("name", TELLING)
def test_planted_bug_is_found(name: str) -> None:
    """A receiver that is told wrongly reads bytes of two attempts, or waits for its timeout."""
    bug = TELLING[name]
    assert bug.plant.__doc__
    with changed(bug.plant()):
        found = first_shown(name, play, range(bug.budget))

    assert found is not None, f"{name} survived {bug.budget} seeds"


def test_telling_is_clean() -> None:
    """Nobody is left waiting, no count is left over, and no two attempts are mixed."""
    seen = sum((play(seed).seen for seed in range(SEEDS)), start=play(SEEDS).seen)

    wanted = {"failed", "cancelled", "PEER_FAILED", "held", "reached after a failure", "cleared"}
    wanted |= {"in doubt", "landed after its error", "message lost", "too many attempts"}
    assert {} == {what: seen[what] for what in wanted if seen[what] < SEEDS // 50}
