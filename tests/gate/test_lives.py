"""The gate of the lifecycle: each planted bug is found by few lives, and the engine by none."""

from __future__ import annotations

import pytest

from tests.gate.bugs_lives import LIVES, tells
from tests.gate.registry import changed
from tests.support.lives import FATES, live


def first_found(seeds: range, fates: tuple[str, ...] = FATES, **knobs: object) -> int | None:
    """Which of these lives ends in something that must not be."""
    for seed in seeds:
        try:
            live(seed, fates, **knobs)
        except Exception:  # noqa: BLE001  # a broken engine breaks in any way
            return seed
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", LIVES)
def test_planted_bug_is_found(name: str) -> None:
    """A bug that survives the search could be in the product, and nobody would know."""
    bug, fates, knobs = LIVES[name]
    assert bug.plant.__doc__
    with changed(bug.plant()):
        assert first_found(range(bug.budget), fates, **knobs) is not None


@pytest.mark.slow
def test_tools_of_the_planters_are_harmless() -> None:
    """A bug that is found for the patch around it, and not for itself, proves nothing."""
    with changed(tells(lambda _: True)):
        assert first_found(range(20)) is None
