"""A worker that a bug has stopped: all ends, and what its NICs still do is said to be unknown."""

from __future__ import annotations

import numpy as np
import pytest

import tep
from tep.backends.loopback import Hub
from tep.drivers.threads import InlineDriver
from tests.support.ends import Ends


def test_a_stopped_worker_leaves_its_memory_in_quarantine() -> None:
    """After a bug nobody knows what the NICs hold, and who waits must not wait for ever."""
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
    assert sent.failed
    b.close()


def test_all_that_is_open_fails_and_says_that_nothing_is_known() -> None:
    """Whoever waits would wait for ever, and whoever reuses the memory must be warned."""
    e = Ends(1)
    e.nics[0].room = 2
    posted, queued = e.pages(2), e.pages(2)
    waits = e.engine.expect_imm_count(7, 1)
    e.own.turn()
    not_taken = e.pages(2)
    e.engine._machine.crash(RuntimeError("scripted"))

    for handle in (posted, queued, waits, not_taken):
        with pytest.raises(tep.ClosedError, match="what NICs hold is unknown, keep memory mapped"):
            handle.result()
