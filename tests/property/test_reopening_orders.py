"""Paths are cut, fenced off, healed and taken into use again, in many orders of events."""

from __future__ import annotations

import pytest

from tests.support.orders import explored
from tests.support.reopening import Play
from tests.world.explore import Choices


@pytest.mark.parametrize(("rows", "least"), [(1, 2), pytest.param(2, 100, marks=pytest.mark.long)])
def test_a_path_is_taken_into_use_again_in_every_order(rows: int, least: int) -> None:
    """A row of before the fence that lands after it was lifted overwrites what its reader wrote."""

    def play(chooser: Choices) -> tuple[bool, int]:
        played = Play(chooser, rows=rows)
        return played.made_good > 0, played.failed

    plays = explored(play)
    assert least < len(plays)
    assert len(plays) // 2 < sum(good for good, _ in plays), "hardly anything was lost"
    assert 0 == sum(failed for _, failed in plays)
