"""Small constants: runs of a few rows reach the branches that are made for thousands of rows."""

from __future__ import annotations

import importlib
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tep.base.errors import BadRequest
from tep.core.group import DomainGroup
from tests.world.oracle import run_scenario
from tests.world.scenario import Scenario
from tests.world.sizes import SIZES, set_sizes

BRANCHES = ("_cut_piece", "_share_backlog")
"""Methods of a DomainGroup that do something only beyond a threshold; then they return True."""


def test_every_size_is_a_constant_of_the_engine() -> None:
    """A constant that was renamed, or that is no longer larger, would be drawn for nothing."""
    for name, values in SIZES.items():
        module, _, constant = name.rpartition(".")
        room = importlib.import_module(f"tep.{module}")
        own = getattr(room, constant)
        assert own not in values, name
        with set_sizes(((name, values[0]),)):
            assert values[0] == getattr(room, constant)
        assert own == getattr(room, constant)


def test_other_sizes_are_refused() -> None:
    """A scenario that is pasted into a test must mean what it says."""
    drawn: Any = Scenario.draw(0)
    for sizes in ((("core.posting.NO", 1),), (("core.path.PRUNE_AT", 0),), ("x",), 5):
        with pytest.raises(BadRequest, match="sizes: "):
            replace(drawn, sizes=sizes)


def test_small_sizes_reach_what_only_large_runs_reached() -> None:
    """In 1,500 seeds no batch was cut into pieces, and no rows were given to an idle NIC."""
    reached: Counter[str] = Counter()

    def counting(name: str) -> Any:
        method = getattr(DomainGroup, name)

        def counted(*args: object) -> object:
            found = method(*args)
            reached[name] += bool(found)
            return found

        return mock.patch.object(DomainGroup, name, counted)

    with ExitStack() as stack:
        for name in BRANCHES:
            stack.enter_context(counting(name))
        for seed in range(350):
            if Scenario.draw(seed).sizes:
                run_scenario(Scenario.draw(seed))
    assert set(BRANCHES) == set(+reached)
