"""Drawn lives of a watched peer under traffic: no false alarm, none missing, none told twice."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.lives import FATES, live, swarm


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """What the lives have seen; none of them may end in anything that must not be."""
    return swarm(range(100))


@pytest.mark.slow
def test_lives_go_as_they_must(seen: Counter[str]) -> None:
    """Each property is in `lives`; here is only whether the swarm has met what it is about."""
    assert sum(seen[fate] for fate in FATES) > 90


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [*FATES, "lost", "back", "restarted", "NIC lost", "NIC back", "refused", "met again"],
)
def test_sometimes(seen: Counter[str], what: str) -> None:
    """A swarm that never saw a case says nothing about it."""
    assert seen[what] >= 3


@pytest.mark.parametrize("seed", [10092, 11535])
def test_lives_that_went_wrong_once(seed: int) -> None:
    """A send that waited for ever for news to a peer that was removed; a path that stayed fenced,
    since it was fenced again while its opening for an earlier failure was still noted.
    """
    live(seed)


@pytest.mark.long
def test_lives_at_length() -> None:
    """The rare orders."""
    swarm(range(10_000, 20_000))
