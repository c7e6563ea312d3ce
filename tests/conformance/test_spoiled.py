"""The suite must bite: each spoiled loopback fails its clause, and a healthy one fails none."""

from __future__ import annotations

import pytest

from tep.testing.contract import first_failure
from tep.testing.loopback_world import LoopbackWorld
from tep.testing.spoiled import SPOILED

CLAUSES = range(1, 35)


@pytest.mark.parametrize("spoiled", SPOILED, ids=lambda spoiled: spoiled.name)
def test_a_spoiled_backend_fails_its_clause(spoiled):
    """A clause whose tests pass a backend that breaks it protects nobody."""
    assert first_failure(spoiled.world, spoiled.clause)


@pytest.mark.parametrize("clause", CLAUSES)
def test_a_healthy_backend_passes_every_clause(clause):
    """A suite that fails everything also fails the spoiled ones."""
    assert "" == first_failure(LoopbackWorld, clause)


def test_every_clause_has_a_spoiled_backend():
    """A clause that nothing here breaks has tests nobody has seen fail."""
    assert set(CLAUSES) == {spoiled.clause for spoiled in SPOILED}
