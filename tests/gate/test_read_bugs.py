"""The gate of reads: the oracle's runs that read find each planted bug."""

from __future__ import annotations

import pytest

from tests.gate.bugs_reads import READ_BUGS
from tests.gate.registry import changed
from tests.gate.test_planted_bugs import search

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize("name", READ_BUGS)
def test_planted_bug_is_found(name: str) -> None:
    """A page that is overwritten by an old read is found here, or by a user."""
    bug = READ_BUGS[name]
    with changed(bug.plant()):
        found = search(f"reads.{name}", bug.budget, lambda scenario: bool(scenario.reads))

    assert found is not None, f"{name} survived {bug.budget} seeds"
