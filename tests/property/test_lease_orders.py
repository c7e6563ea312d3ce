"""A lease is asked back around a write and a NIC's death: every order of a few events is tried.

`tests.support.lease_orders` says what must come out each time.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.lease_orders import play
from tests.support.orders import Drawn, explored


def in_every_order(rows: int, nics: tuple[int, int], failover: bool) -> Counter[str]:
    """Play all orders; return how they ended."""
    return Counter(explored(lambda chooser: play(chooser, rows, nics, failover)))


@pytest.mark.slow
@pytest.mark.parametrize("failover", [pytest.param(True, marks=pytest.mark.long), False])
def test_any_nic_of_either_side_dies(failover: bool) -> None:
    """The owner's next use of the memory must wait for the last row, and for no more than that."""
    orders_end_well(in_every_order(1, (2, 1), failover), failover)


@pytest.mark.slow
def test_any_nic_dies_where_rows_are_made_good() -> None:
    """Some of the orders that `scripts/test --long` tries all."""
    ends = Counter(play(Drawn(seed), 1, (2, 1), failover=True) for seed in range(1000))

    orders_end_well(ends, failover=True)


def orders_end_well(ends: Counter[str], failover: bool) -> None:
    """Each way to end is met, and none that must not be."""
    assert {"done, answered", "failed, fenced off"} <= set(ends)
    assert ("failed, answered" in ends) is not failover, "who can make rows good fails none"
    assert 40 < sum(ends.values())


@pytest.mark.slow
def test_a_writer_that_cannot_answer() -> None:
    """Its only NIC is gone: what it has sent comes or does not come, and nobody says so."""
    ends = in_every_order(1, (1, 2), failover=True)

    assert {"done, answered", "failed, fenced off"} == set(ends)
    assert 100 < sum(ends.values())
