"""Reads in their NICs' queues: whose turn it is, and what becomes of them when a NIC goes."""

from __future__ import annotations

from unittest import mock

import pytest

from tep.backends.base import Access
from tep.base.errors import FabricError
from tep.core.path import PathEvent
from tests.support.inside import link_of, worker_of
from tests.support.reading import PAGE, Reading
from tests.support.script import memory, scripted


@pytest.fixture
def r() -> Reading:
    return Reading()


def test_reads_on_one_nic_take_turns() -> None:
    """A long read that is posted whole makes every read behind it wait for its last row."""
    r = Reading(1, post_rows_max=3)
    r.me.nics[0].room = 0
    r.paged(7)
    r.paged(5)
    r.me.nics[0].room = 100
    r.me.turn()

    order = [posted.ctx for posted in r.me.posted]
    first, second = dict.fromkeys(order)
    assert [first] * 3 + [second] * 3 + [first] * 3 + [second] * 2 + [first] == order


def test_queued_rows_of_a_dead_nic_move(r) -> None:
    """They would wait for it for ever."""
    r.me.nics[0].room = 0
    sent = r.paged(8)
    assert 4 == len(r.rows())
    r.me.nics[0].go_down()
    r.me.turn(3)
    assert 8 == len(r.me.nics[1].posted)
    r.me.nics[1].finish()
    r.me.turn()

    assert sent.ok


def test_rows_of_a_nic_that_cannot_post_are_posted_by_another_in_the_next_turn(r) -> None:
    """No completion and no command would wake the engine: the read would stand still."""
    r.me.nics[1].room = 0
    for _ in range(2):
        r.me.engine.submit_single_read(PAGE, (r.desc, 0), (r.mr, 0))
        r.me.turn()
    assert 1 == len(r.rows())
    reads = worker_of(r.me.engine).reads
    with mock.patch.object(r.me.nics[1], "post_read", side_effect=MemoryError):
        assert reads.post()
        assert reads.post()

    assert 2 == len(r.rows())


def test_an_owner_whose_reads_are_not_taken_holds_up_no_other() -> None:
    """A NIC without room for one owner has room for the next: one crowded peer would stop all."""
    r = Reading(1)
    other = scripted(1, name="other", reads=1)
    _, desc = other.engine.reg_mr(memory(PAGE), access=Access.READABLE)
    r.me.nics[0].refuse_peers = {0}
    crowded = r.paged(1)
    sent = r.me.engine.submit_single_read(PAGE, (desc, 0), (r.mr, PAGE))
    r.me.turn()
    r.me.nics[0].finish()
    r.me.turn()

    assert sent.ok
    assert not crowded.finished
    assert desc.rkeys == tuple(row.rkey for row in r.rows())


def test_reads_of_a_nic_that_cannot_be_polled_any_more_end(r) -> None:
    """Nobody will say what became of them: who waits would wait for ever, and free no memory."""
    sent = r.paged(8, imm=7)
    with mock.patch.object(r.me.nics[0], "poll", side_effect=OSError("gone")):
        r.me.turn(20)
    r.me.nics[1].finish()
    r.me.turn(2)

    with pytest.raises(FabricError, match="NIC_DOWN"):
        sent.result()
    assert 9 == sent.stats().rows_back + sent.stats().rows_dropped
    assert r.mr.quarantined


def test_rows_that_leave_a_path_that_was_shut_are_posted_in_the_next_turn(r) -> None:
    """They went to a NIC whose turn was over, and the engine slept: the read never ended.

    Found by a search of drawn runs.
    """
    r.me.nics[1].room = 0
    for _ in range(2):
        r.me.engine.submit_single_read(PAGE, (r.desc, 0), (r.mr, 0))
        r.me.turn()
    link = link_of(r.me.engine, r.owner.engine)
    for there in range(2):
        link.path(1, there).to(PathEvent.LOST)
    reads = worker_of(r.me.engine).reads
    assert reads.post()
    assert 1 == len(r.rows())
    assert reads.post()

    assert [0, 0] == [nic.nic for nic in r.me.nics for _ in nic.posted]


def test_a_read_behind_many_that_were_cancelled_is_posted() -> None:
    """Those in front took all of the turn, and the engine slept."""
    r = Reading(1)
    r.me.nics[0].room = 0
    gone = [r.paged(1) for _ in range(200)]
    for sent in gone:
        sent.cancel()
    r.me.turn()
    r.me.nics[0].room = 1
    last = r.paged(1)
    reads = worker_of(r.me.engine).reads
    while reads.post():
        pass
    r.me.nics[0].finish()
    r.me.turn()

    assert all(sent.cancelled for sent in gone)
    assert last.ok


def test_no_nic_left_fails_the_read() -> None:
    """Nothing may wait for what cannot come."""
    r = Reading(nics=1)
    r.me.nics[0].room = 0
    sent = r.paged(3, imm=7)
    r.me.nics[0].go_down()
    r.me.turn(3)
    late = r.paged(3, imm=8)

    for failed in (sent, late):
        with pytest.raises(FabricError, match="no path is left|no NIC of this engine is alive"):
            failed.result()
    assert 0 == r.me.engine.stats().rows_backlog
