"""The gate of failures that receivers are told of: the oracle's runs that tell find each bug.

That they find nothing in the engine as it is, `test_planted_bugs` says of all runs.
"""

from __future__ import annotations

import pytest

from tests.gate.bugs_telling import TELLING
from tests.gate.registry import changed
from tests.gate.test_planted_bugs import search

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


@pytest.mark.parametrize("name", TELLING)
def test_planted_bug_is_found(name: str) -> None:
    """A receiver that is told wrongly reads bytes of two tries, or waits for its timeout."""
    bug = TELLING[name]
    assert bug.plant.__doc__
    with changed(bug.plant()):
        found = search(f"telling.{name}", bug.budget, lambda scenario: scenario.tell_failures)

    assert found is not None, f"{name} survived {bug.budget} seeds"
