"""A NIC dies at any point, and events come in any order: every case of a few rows is tried.

`tests.support.failover_orders` says what must come out each time.
"""

from __future__ import annotations

from itertools import count
from unittest import mock

import pytest

from tests.support.failover_orders import KINDS, Play
from tests.support.order_cases import FAILOVER
from tests.support.orders import explored


def in_every_order(kind: str, rows: int, nics: tuple[int, int], doomed: tuple[int, ...]) -> int:
    """Play all orders; return how many there were that no other run went on from."""
    good = explored(lambda chooser: Play(chooser, kind, rows, nics, doomed).made_good)
    assert any(good), "nothing was ever lost"
    return len(good)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_rows_and_any_nic_of_either_side(kind: str) -> None:
    """An immediate twice releases the next reader early, one that is missing hangs this one."""
    assert 40 < in_every_order(kind, 2, (2, 2), (0, 1, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize(("nics", "doomed"), [((2, 1), (0, 1)), ((1, 2), (1, 2)), ((2, 3), (2,))])
def test_sides_with_different_numbers_of_nics(nics, doomed) -> None:
    """If a NIC dies, rows of all lanes that share it are lost."""
    assert 15 < in_every_order("page", 2, nics, doomed)


RUNS_MAX = 6_000
QUICK = (
    "a message is lost", "a message comes twice", "cancelled, with one NIC left",
    "the sender restarts", "two share a path and the immediate", "two share it, and are cut off",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAILOVER],
)
def test_every_order_of_a_small_case(case: str) -> None:
    """Lost messages, cancels, restarts, sharing and earlier rounds meet the failover there is.

    Of the largest cases these are the first orders: nobody knows how many more there are.
    """
    good = explored(lambda chooser: FAILOVER[case](chooser).made_good, runs_max=RUNS_MAX)

    assert any(good), "nothing was ever lost"
    assert 20 < len(good)


@pytest.mark.slow
def test_runs_that_end_at_a_known_state_miss_nothing() -> None:
    """A state that leaves something out would end runs that have more to show."""
    play = FAILOVER["cancelled, with one NIC left"]
    each, merged = explored(play, merge=False), explored(play)

    assert len(merged) < len(each)
    assert {(p.ends, p.made_good, *p.come.items()) for p in each} == {
        (p.ends, p.made_good, *p.come.items()) for p in merged
    }


@pytest.mark.slow
def test_a_machine_that_stalls_plays_the_same_orders() -> None:
    """A slow machine that asks twice would play other orders, and the odometer would miss some."""
    quick = in_every_order("page", 2, (2, 1), (0, 1))
    with mock.patch("tep.drivers.threads.time.monotonic", side_effect=count(step=5)):
        assert quick == in_every_order("page", 2, (2, 1), (0, 1))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["page", "imms", "silent", "scatter"])
@pytest.mark.parametrize("doomed", [(0,), (1,), (2,), (3,)])
def test_three_rows_and_any_nic_of_either_side(kind: str, doomed) -> None:
    """Two rows on one lane: of equal rows nobody can say which one landed."""
    assert 40 < in_every_order(kind, 3, (2, 2), doomed)


@pytest.mark.slow
def test_three_rows_of_one_kind_and_one_nic() -> None:
    """The same in little, for every run of the suite."""
    assert 300 < in_every_order("page", 3, (2, 2), (0,))
