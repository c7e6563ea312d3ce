"""The suite must bite: each spoiled loopback fails its clause, and a healthy one fails none."""

from __future__ import annotations

import pytest

from tep.testing.contract import DomainContract, first_failure, tests_of
from tep.testing.world import Net
from tests.spoiled import control, life, messages, reads, rows
from tests.spoiled.base import SPOILED, ByRow, Spoiled, SpoiledWorld

ROOMS = (rows, life, messages, control, reads)  # importing them fills the list
CLAUSES = range(1, 35)
TESTS = [name for clause in CLAUSES for name in tests_of(clause)]


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", SPOILED, ids=lambda spoiled: spoiled.name)
def test_a_spoiled_backend_fails_its_clause(spoiled):
    """A clause whose tests pass a backend that breaks it protects nobody."""
    assert first_failure(spoiled.world, spoiled.clause)


@pytest.mark.parametrize("clause", CLAUSES)
def test_a_healthy_backend_passes_every_clause(clause):
    """A suite that fails everything also fails the spoiled ones."""
    assert "" == first_failure(lambda: SpoiledWorld(ByRow), clause)


def test_every_clause_has_a_spoiled_backend():
    """A clause that nothing here breaks has tests nobody has seen fail."""
    assert set(CLAUSES) == {spoiled.clause for spoiled in SPOILED}


def fails(name: str, spoiled: Spoiled) -> bool:
    """Return True if a test of the contract fails on a spoiled backend by an assertion."""
    with spoiled.world() as world:
        try:
            getattr(DomainContract(), name)(Net(world))
        except (AssertionError, pytest.fail.Exception):
            return True
        except (Exception, pytest.skip.Exception):  # noqa: BLE001  # it breaks down, or skips
            return False
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTS)
def test_every_test_is_seen_to_fail(name):
    """A test that nothing here fails may pass whatever a backend does."""
    own = [spoiled for spoiled in SPOILED if spoiled.clause == int(name[6:8])]
    # From the last on: WaitsForNewsInPoll stops the tests that are meant for WaitsForRoomInPost.
    assert any(fails(name, spoiled) for spoiled in reversed(own))
