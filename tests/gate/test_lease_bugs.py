"""The gate of leases: each planted bug is found by drawn runs, and leases as they are by none.

Most bugs are looked for in those of the oracle's runs that lease. Four need what these do not
have, or have too rarely: a writer that restarts, NICs that cannot fence, and bytes that land long
after their NIC died or a fence was given up. `lease_trials` has them.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Final

import pytest

from tep.testing.scenario import Scenario
from tests.gate.bugs_leases import LEASE_BUGS
from tests.gate.registry import changed
from tests.gate.test_planted_bugs import search
from tests.support.lease_trials import play
from tests.support.planted import first_shown

SEEDS = 20_000 if os.environ.get("TEP_LONG") else 200

OF_TRIALS: Final[dict[str, bool]] = {
    "restart_is_an_end": True,
    "failed_fence_is_a_fence": False,
    "given_up_and_forgotten": True,
    "own_death_is_an_end": True,
}
"""Bugs that the oracle's runs do not show, and whether the NICs of a trial can fence."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize("name", LEASE_BUGS)
def test_planted_bug_is_found(name: str) -> None:
    """Memory that is freed under a writer is found here, or by a user."""
    bug = LEASE_BUGS[name]
    with changed(bug.plant()):
        if name in OF_TRIALS:
            trial = partial(play, fences=OF_TRIALS[name])
            found = first_shown(name, trial, range(bug.budget))
        else:
            found = search(f"leases.{name}", bug.budget, _leases)

    assert found is not None, f"{name} survived {bug.budget} seeds"


def _leases(scenario: Scenario) -> bool:
    return any(spec.leased for spec in scenario.transfers)


@pytest.mark.parametrize("fences", [True, False])
def test_leases_are_clean(fences: bool) -> None:
    """What is free stays free, everything granted ends, and the runs meet what they are about."""
    seen = sum((play(seed, fences=fences).seen for seed in range(SEEDS)), start=play(SEEDS).seen)

    wanted = {"free", "LeaseError", "deregister refused", "in doubt", "ended for certain"}
    wanted |= {"landed after its error", "message lost", "ClosedError", "quarantine in stats"}
    wanted |= {"fenced", "opened again", "keys again"} if fences else {"quarantined"}
    assert {} == {what: seen[what] for what in wanted if seen[what] < SEEDS // 50}
