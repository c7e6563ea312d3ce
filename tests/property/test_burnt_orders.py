"""Two transfers under one immediate, one fails, and late expectations, in every order.

`tests.support.burnt_orders` computes the expected result of each order.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tep.base.api import Pages
from tep.base.errors import FabricError
from tests.support.burnt_orders import Play
from tests.support.order_cases import BURNT
from tests.support.orders import Drawn, Fabric, explored
from tests.world.explore import Choices

QUICK = ("a queued row is cancelled", "no failover")
RUNS_MAX = 6_000


@pytest.mark.slow
@pytest.mark.parametrize("case", BURNT)
def test_a_count_that_is_complete_has_the_bytes_of_both(case: str) -> None:
    """A count of one whole transfer and half of another releases a reader of half of the bytes.

    Of the largest cases these are the first orders: nobody knows how many more there are.
    """
    runs_max = RUNS_MAX if case in QUICK else 1_000
    ends = Counter(explored(lambda c: BURNT[case](c).ends, runs_max=runs_max))

    assert any("done" == end[-1] for end in ends), "no count was ever reached"
    made_good = case == "a path is cut"
    assert made_good == all({"done"} == set(end) for end in ends)


@pytest.mark.long
@pytest.mark.parametrize("case", BURNT)
def test_a_count_that_is_complete_has_the_bytes_of_both_in_more_orders(case: str) -> None:
    """The same, further into the large cases."""
    assert explored(lambda c: BURNT[case](c).ends, runs_max=30_000)


@pytest.mark.slow
def test_all_paths_may_be_cut_in_turn() -> None:
    """Some of the orders in which rows are written again and lost once more."""
    ends = Counter(Play(Drawn(seed), (2, 1), cuts=3, pinned=True).ends for seed in range(500))
    assert {("done", "done", "done"), ("failed", "failed", "failed")} <= set(ends)


def test_an_immediate_that_may_stand_for_bytes_that_never_came_is_not_sent() -> None:
    """One of two lost rows had landed, nobody knows which; one is written again needlessly.

    The missing immediate may belong to the needless row. Sent for the other row, it would
    complete the count without the bytes of the first.
    """
    page, imm = 8, 7
    fabric = Fabric(Choices(), (1, 2), ())
    a, b = fabric.engines
    pages, sent = Pages(range(2)), []
    for number in (1, 2):
        mr, _ = a.reg_mr(np.full(2 * page, number, np.uint8))
        _, desc = b.reg_mr(np.zeros(2 * page, np.uint8))
        sent.append(a.submit_paged_writes(page, (mr, pages), (desc, pages), imm))
    got = b.expect_imm_count(imm, 4)
    fabric.rest()
    ours, near, far = fabric.nics
    first, second = ([f for f in fabric.flights if f.there is nic] for nic in (near, far))
    fabric.cuts.add((ours, near))
    fabric.land(first[1])
    for flight in (*first[::-1], *second):
        if flight in second:
            fabric.land(flight)
        fabric.events_of(flight)[-1]()
        fabric.rest()
    assert [False, False] == [handle.finished for handle in sent]

    _hear(fabric)  # the path is fenced, and both rows are written again
    again = [flight for flight in fabric.flights if not flight.ended]
    in_vain, other = sorted(again, key=lambda flight: flight.row.lkey)
    fabric.land(other)
    fabric.events_of(other)[-1]()
    fabric.cuts.add((ours, far))
    fabric.fail(in_vain)
    fabric.rest()
    fabric.cuts.clear()
    for _ in range(60):
        for flight in [flight for flight in fabric.flights if not flight.ended]:
            fabric.land(flight)
            fabric.events_of(flight)[-1]()
        _hear(fabric)
        fabric.now_s += 1.0

    assert ["failed", "failed"] == [handle.state.value for handle in sent]
    assert "another request with the same immediate failed" in str(sent[1].error)
    assert isinstance(got.error, FabricError)
    assert "PEER_FAILED" == got.error.code
    assert 3 == got.arrived
    for engine in fabric.engines:
        engine.close()


def _hear(fabric: Fabric) -> None:
    """Deliver all messages, and end all fences."""
    fabric.rest()
    while fabric.controls or fabric.fences:
        if fabric.controls:
            fabric.deliver(0)
        else:
            fabric.fence(0)
        fabric.rest()
