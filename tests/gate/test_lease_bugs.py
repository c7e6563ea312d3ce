"""The gate of leases: each planted bug is found by drawn runs, and leases as they are by none."""

from __future__ import annotations

import os
from functools import partial

import pytest

from tests.gate.bugs_leases import LEASE_BUGS
from tests.gate.registry import changed
from tests.support.lease_trials import play
from tests.support.planted import first_shown

SEEDS = 20_000 if os.environ.get("TEP_LONG") else 400

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


def knobs_of(name: str) -> dict[str, bool]:
    """The fabric on which a bug is looked for: one of them shows where no NIC can fence."""
    return {"fences": name != "failed_fence_is_a_fence"}


@pytest.mark.parametrize("name", LEASE_BUGS)
def test_planted_bug_is_found(name: str) -> None:
    """Memory that is freed under a writer is found here, or by a user."""
    bug = LEASE_BUGS[name]
    with changed(bug.plant()):
        found = first_shown(name, partial(play, **knobs_of(name)), range(bug.budget))

    assert found is not None, f"{name} survived {bug.budget} seeds"


@pytest.mark.parametrize("fences", [True, False])
def test_leases_are_clean(fences: bool) -> None:
    """What is free stays free, everything granted ends, and the runs meet what they are about."""
    seen = sum((play(seed, fences=fences).seen for seed in range(SEEDS)), start=play(SEEDS).seen)

    wanted = {"free", "LeaseError", "deregister refused", "in doubt", "ended for certain"}
    wanted |= {"landed after its error", "message lost", "ClosedError", "quarantine in stats"}
    wanted |= {"fenced", "opened again", "keys again"} if fences else {"quarantined"}
    assert {} == {what: seen[what] for what in wanted if seen[what] < SEEDS // 50}
