"""A worker that a bug has stopped: what its NICs held is in doubt, and is told so."""

from __future__ import annotations

import numpy as np

import tep
from tep.backends.loopback import Hub
from tep.drivers import InlineDriver
from tests.support.ends import Ends


def test_a_stopped_worker_leaves_everything_in_doubt() -> None:
    """After a bug nobody knows what the NICs hold."""
    hub = Hub(token=1)
    ring: list = []
    a, b = (
        tep.TransferEngine.open("loopback", name=n, hub=hub, driver=InlineDriver(ring), seed=3)
        for n in "ab"
    )
    memory, target = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    mr, _ = a.reg_mr(memory)
    _, desc = b.reg_mr(target)
    sent = a.submit_single_write(64, (mr, 0), (desc, 0))
    for _ in range(100):
        a._machine.step()
        if sent.stats().rows_posted:
            break
    assert not sent.finished
    a._machine.crash(RuntimeError("scripted"))

    assert "stopped by a bug" in mr.quarantined[0].why
    assert "UNKNOWN" == sent.in_doubt[0].code
    b.close()


def test_a_stopped_worker_leaves_the_rows_to_all_peers_in_doubt() -> None:
    """One batch may go to several peers: whoever looks at its first row alone reuses the others."""
    hub = Hub(token=1)
    ring: list = []
    a, b, c = (
        tep.TransferEngine.open("loopback", name=n, hub=hub, driver=InlineDriver(ring), seed=3)
        for n in "abc"
    )
    mr, _ = a.reg_mr(np.zeros(64, np.uint8))
    descs = [peer.reg_mr(np.zeros(64, np.uint8))[1] for peer in (b, c)]
    sent = a.submit_scatter(mr, [tep.ScatterDst(32, 0, (desc, 0)) for desc in descs])
    for _ in range(100):
        a._machine.step()
        if sent.stats().rows_posted == sent.rows:
            break
    assert not sent.finished
    a._machine.crash(RuntimeError("scripted"))

    assert {"b", "c"} == {doubt.peer for doubt in sent.in_doubt}
    b.close()
    c.close()


def test_what_no_nic_had_is_not_in_doubt() -> None:
    """Its bytes cannot land: who waits for them to be safe would wait in vain."""
    e = Ends(1)
    e.nics[0].room = 2
    posted, waits = e.pages(2), e.pages(2)
    e.own.turn()
    e.engine._machine.crash(RuntimeError("scripted"))

    assert "UNKNOWN" == posted.in_doubt[0].code
    assert not waits.in_doubt
