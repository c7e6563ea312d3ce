"""A worker that a bug has stopped: all ends, and what its NICs still do is said to be unknown."""

from __future__ import annotations

import pytest

import tep
from tests.support.ends import Ends
from tests.support.inside import machine_of
from tests.support.pairs import hostile_pair


def test_a_stopped_worker_leaves_its_memory_in_quarantine() -> None:
    """After a bug nobody knows what the NICs hold, and who waits must not wait for ever."""
    with hostile_pair(seed=3) as p:
        sent = p.a.submit_single_write(64, (p.mr, 0), (p.desc, 0))
        p.env.run_until(lambda: any(p.a.stats().rows_outstanding))
        assert not sent.finished
        machine_of(p.a).crash(RuntimeError("scripted"))

        assert "stopped by a bug" in p.mr.quarantined[0].why
        assert sent.failed


def test_all_that_is_open_fails_and_says_that_nothing_is_known() -> None:
    """Whoever waits would wait for ever, and whoever reuses the memory must be warned."""
    e = Ends(1)
    e.nics[0].room = 2
    posted, queued = e.pages(2), e.pages(2)
    waits = e.engine.expect_imm_count(7, 1)
    e.own.turn()
    not_taken = e.pages(2)
    machine_of(e.engine).crash(RuntimeError("scripted"))

    for handle in (posted, queued, waits, not_taken):
        with pytest.raises(tep.ClosedError, match="what NICs hold is unknown, keep memory mapped"):
            handle.result()
