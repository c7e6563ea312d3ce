"""The gate of reads: each planted bug is found by drawn runs, and reads as they are by none."""

from __future__ import annotations

import os

import pytest

from tests.gate.bugs_reads import READ_BUGS
from tests.gate.registry import changed
from tests.support.read_trials import run, swarm

SEEDS = 20_000 if os.environ.get("TEP_LONG") else 400

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize("name", READ_BUGS)
def test_planted_bug_is_found(name: str) -> None:
    """A page that is overwritten by an old read is found here, or by a user."""
    bug = READ_BUGS[name]
    with changed(bug.plant()):
        for seed in range(bug.budget):
            try:
                run(seed)
            except Exception:  # noqa: BLE001  # whatever a broken engine raises is a finding
                return
    pytest.fail(f"{name} survived {bug.budget} seeds")


def test_reads_are_clean() -> None:
    """Bytes are right or the read fails, memory is free when it says so, owners are told once."""
    tale = swarm(range(SEEDS))

    assert tale.done > 2 * tale.failed
    assert tale.told > tale.done // 3, "the runs must meet what they are about"
    assert tale.again > SEEDS // 2
    assert min(tale.cancelled, tale.quarantined, tale.failed) > SEEDS // 20


def test_troubled_links_cost_no_read() -> None:
    """Where every row that is late ends for certain, another try brings it."""
    tale = swarm(range(10_000, 10_000 + SEEDS), harm=False, late_land=0, dead_after_ps=10**7)

    assert [] == [text for text in tale.errors if "cancelled" not in text]
