"""A lease that is asked back around a write and a NIC's death, in one order of events. Not a test.

What must come out each time: the lease is over, and once it is nothing lands in its bytes, however
late a row that failed comes after all.
"""

from __future__ import annotations

import numpy as np

from tep.api import Pages
from tep.testing.explore import Choices
from tep.wire import Lease
from tests.support.orders import Fabric

__all__ = ["play"]

PAGE = 8
FREE = 0xEE


def play(chooser: Choices, rows: int, nics: tuple[int, int], failover: bool, **knobs: int) -> str:
    """A write under a lease that is revoked, in one order; say how it and the lease ended.

    Args:
        chooser: of the order.
        rows: of the write.
        nics: of the writer and of the owner; one of them all dies.
        failover: whether the writer makes lost rows good.
        knobs: losses, copies and flush, as `Fabric` has them.
    """
    fabric = Fabric(chooser, nics, doomed=tuple(range(sum(nics))), **knobs)
    writer, owner = fabric.engines
    writer._worker.group.failover = failover
    target = np.zeros(rows * PAGE, np.uint8)
    mr, _ = owner.reg_mr(target)
    src, _ = writer.reg_mr(np.full(rows * PAGE, 7, np.uint8))
    grant = owner.lease(mr, writer.main_address, for_s=1e6)
    grant.over.add_done_callback(lambda _: target.fill(FREE))
    lease = Lease.from_bytes(grant.lease.to_bytes())
    pages = Pages(range(rows))
    fabric.state = lambda: (grant.over.finished, sent.finished)
    sent = writer.submit_paged_writes(PAGE, (src, pages), (lease, pages))
    posted = chooser.pick(2)
    if posted:
        fabric._rest()  # the rows are posted first
    grant.revoke()
    fabric.note(1, ("revoke", posted))
    for _ in range(8):
        fabric.run()
        fabric.now_s += 2  # a question whose answer was lost is put again
        for owner in range(2):
            fabric.note(owner, "wait")
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
