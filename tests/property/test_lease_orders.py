"""A lease is asked back around a write and a NIC's death: every order of a few events is tried.

What must come out each time: the lease is over, and once it is nothing lands in its bytes, however
late a row that failed comes after all.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tep.api import Pages
from tep.testing.explore import Choices
from tep.wire import Lease
from tests.gate.bugs_leases import LEASE_BUGS
from tests.gate.registry import changed
from tests.support.orders import Drawn, Fabric, every

PAGE = 8
FREE = 0xEE


def play(chooser: Choices, rows: int, nics: tuple[int, int], failover: bool) -> str:
    """A write under a lease that is revoked, in one order; say how it and the lease ended."""
    fabric = Fabric(chooser, nics, doomed=tuple(range(sum(nics))))
    writer, owner = fabric.engines
    writer._worker.group.failover = failover
    target = np.zeros(rows * PAGE, np.uint8)
    mr, _ = owner.reg_mr(target)
    src, _ = writer.reg_mr(np.full(rows * PAGE, 7, np.uint8))
    grant = owner.lease(mr, writer.main_address, for_s=1e6)
    grant.over.add_done_callback(lambda _: target.fill(FREE))
    lease = Lease.from_bytes(grant.lease.to_bytes())
    pages = Pages(range(rows))
    sent = writer.submit_paged_writes(PAGE, (src, pages), (lease, pages))
    if chooser.pick(2):
        fabric._rest()  # the rows are posted first
    grant.revoke()
    for _ in range(8):
        fabric.run()
        fabric.now_s += 2  # a question whose answer was lost is put again
    for flight in fabric.flights:
        fenced = flight.barred or flight.here.address in flight.there.fenced
        if not (flight.landed or flight.there.dead or fenced):
            fabric._land(flight)

    assert sent.finished, sent.describe()
    assert grant.over.ok, grant.over.describe()
    assert {FREE} == set(target.tolist()), "written to after it was free"
    for engine in fabric.engines:
        engine.close()
    return f"{sent.state.value}, {'fenced off' if grant.why else 'answered'}"


def in_every_order(rows: int, nics: tuple[int, int], failover: bool) -> Counter[str]:
    """Play all orders; return how they ended."""
    return Counter(play(chooser, rows, nics, failover) for chooser in every())


@pytest.mark.slow
@pytest.mark.parametrize("failover", [pytest.param(True, marks=pytest.mark.long), False])
def test_any_nic_of_either_side_dies(failover: bool) -> None:
    """The owner's next use of the memory must wait for the last row, and for no more than that."""
    orders_end_well(in_every_order(1, (2, 1), failover), failover)


def test_any_nic_dies_where_rows_are_made_good() -> None:
    """Some of the orders that `scripts/test --long` tries all."""
    ends = Counter(play(Drawn(seed), 1, (2, 1), failover=True) for seed in range(1000))

    orders_end_well(ends, failover=True)


def orders_end_well(ends: Counter[str], failover: bool) -> None:
    """Each way to end is met, and none that must not be."""
    assert {"done, answered", "failed, fenced off"} <= set(ends)
    assert ("failed, answered" in ends) is not failover, "who can make rows good fails none"
    assert 100 < sum(ends.values())


@pytest.mark.slow
def test_a_writer_that_cannot_answer() -> None:
    """Its only NIC is gone: what it has sent comes or does not come, and nobody says so."""
    ends = in_every_order(1, (1, 2), failover=True)

    assert {"done, answered", "failed, fenced off"} == set(ends)
    assert 1000 < sum(ends.values())


@pytest.mark.parametrize("name", ["answered_at_once", "silence_is_consent", "doubts_kept_back"])
def test_a_planted_bug_is_found(name: str) -> None:
    """An exploration that finds nothing in wrong leases is no proof of right ones."""
    nics = (1, 2) if name == "silence_is_consent" else (2, 1)
    with (
        changed(LEASE_BUGS[name].plant()),
        pytest.raises(AssertionError, match="after it was free"),
    ):
        in_every_order(1, nics, failover=False)
