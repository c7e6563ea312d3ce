"""What of a failed transfer did not come, for each of its peers."""

from __future__ import annotations

import pytest

from tep.api import Routing, ScatterDst
from tep.backends.base import Status
from tep.core.shortfall import shortfalls
from tep.units import KiB
from tests.support.ends import Ends


def test_of_lost_rows_those_may_come_late_of_which_nobody_knows() -> None:
    """One that a key or a length ended has brought no immediate, and never will."""
    e = Ends(1)
    sent = e.pages(5)
    e.own.turn()
    for status in (Status.OK, Status.UNREACHABLE, Status.LOCAL_KEY, Status.LENGTH, Status.OK):
        e.nics[0].finish(1, status)
    e.own.turn()
    ((short,),) = (found.values() for found in shortfalls(sent, 1).values())
    assert (5, 2, 1) == (short.sent, short.came, short.late)


@pytest.mark.parametrize(("by", "rows"), [("peers", 1), ("bytes", 2)])
def test_of_a_scatter_each_peer_misses_what_it_was_to_get(by: str, rows: int) -> None:
    """A peer that is told of fewer would end its wait early, and one that is told of more never."""
    e = Ends(2, (2, 2))
    dsts = [ScatterDst(32 * KiB, 0, (desc, 0)) for desc in e.descs]
    sent = e.engine.submit_scatter(e.mr, dsts, 7, routing=Routing(scatter_by=by))
    e.own.turn()
    for nic in e.nics:
        nic.finish(status=Status.REMOTE_KEY)
    e.own.turn()
    found = [imms[7] for imms in shortfalls(sent, 2).values()]

    assert [(rows, 0, 0)] * 2 == [(each.sent, each.came, each.late) for each in found]
