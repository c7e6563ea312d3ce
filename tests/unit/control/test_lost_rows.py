"""Rows that a path has lost, and those that wait for it: which are which, and where they go."""

from __future__ import annotations

import pytest

from tep.backends.base import Status
from tep.base.api import Routing, ScatterDst
from tep.base.units import KiB
from tep.core.path import PathEvent
from tests.support.ends import Ends, finish_all
from tests.support.inside import link_of, worker_of


@pytest.mark.parametrize("why", ["", "shut", "marked down", "silent before"])
def test_a_flushed_row_is_lost_only_with_its_path(why: str) -> None:
    """It would be asked after where nothing is wrong with the path, or given up where it is.

    On a connection that an error flushes, the rows behind the one that failed are lost with it.
    """
    e = Ends(1, (2,))
    group = worker_of(e.engine).group
    link = link_of(e.engine, e.peers[0].engine)
    sent = e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0))
    e.own.turn()
    match why:
        case "shut":
            link.path(0, 0).to(PathEvent.LOST)
        case "marked down":
            group.mark_down(link, 0)
        case "silent before":
            group.is_silent(0, link, 0)
            group.mark_up(link, [True, True])
    e.nics[0].finish(status=Status.FLUSHED)
    e.own.turn()

    assert "FLUSHED" == sent.error.code
    assert (why != "") == ("could not be retransmitted on another path" in str(sent.error))


def test_rows_leave_a_nic_that_is_silent_although_it_was_marked_down() -> None:
    """They were sent there as no other path was up, and would wait for one that is silent."""
    e = Ends(1, (2,))
    group = worker_of(e.engine).group
    link = link_of(e.engine, e.peers[0].engine)
    link.path(0, 1).to(PathEvent.LOST)
    group.mark_down(link, 0)
    e.nics[0].room = 1
    e.pages(3)
    e.own.turn()
    assert [0] == [e.meant(0, row)[1] for row in e.nics[0].posted]
    group.is_silent(0, link, 0)
    e.nics[0].room = 9
    e.own.turn()

    assert [0, 1, 1] == [e.meant(0, row)[1] for row in e.nics[0].posted]


def test_rows_behind_those_of_a_failed_transfer_leave_a_dead_nic_too() -> None:
    """They would wait for ever in the queue of a NIC that nobody posts on."""
    e = Ends(2)
    e.nics[1].room = 0
    fails, sent = e.pages(4), e.pages(4)
    e.own.turn()
    e.nics[0].finish(1, Status.REMOTE_KEY)
    e.nics[1].go_down()  # in the same poll: what failed is still in the queue
    e.own.turn()
    finish_all(e.own)

    assert "REMOTE_KEY" == fails.error.code
    assert sent.ok


def test_each_row_of_a_scatter_leaves_a_path_for_one_that_works() -> None:
    """It would be posted on a path that its peer is to fence, since another peer's row is on it."""
    e = Ends(2, (1, 1, 1))
    e.nics[0].room = 0
    sent = e.scatter(routing=Routing(domain=0))
    e.own.turn()
    link = link_of(e.engine, e.peers[1].engine)
    worker_of(e.engine).group.suspect(link.path(0, 0))
    e.nics[0].room = 9
    finish_all(e.own)

    assert [[0, 2], [1]] == [[e.meant(k, r)[0] for r in n.posted] for k, n in enumerate(e.nics)]
    assert sent.ok
    assert [(k * KiB, 7 * k) for k in range(3)] == e.places()


def test_short_writes_leave_a_nic_that_they_have_used() -> None:
    """Their NIC is remembered, and they would wait at a dead NIC for ever."""
    e = Ends(2)
    sent = []
    for _ in range(2):
        for _ in range(2):
            sent.append(e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0)))
            finish_all(e.own)
        e.nics[0].go_down()
        e.own.turn()

    assert [True] * 4 == [transfer.ok for transfer in sent]
    assert [1, 3] == [len(nic.posted) for nic in e.nics]


def test_a_barrier_that_moves_names_no_memory_of_ours() -> None:
    """A NIC would refuse the key of a region that there is not."""
    e = Ends(2, (1, 1))
    e.nics[0].room = 0
    sent = e.engine.submit_barrier(e.descs, 7, routing=Routing(domain=0))
    e.own.turn()
    e.nics[0].go_down()
    finish_all(e.own)

    assert sent.ok
    assert [0, 0] == [posted.row.lkey for posted in e.nics[1].posted]


def test_what_need_not_leave_a_path_stays_there() -> None:
    """A way is looked for anew, and the rows fail where there is none at that time."""
    e = Ends(2, (1, 2))
    e.nics[0].room = 0
    sent = e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0), 7, routing=Routing(domain=0))
    e.own.turn()
    mine, other = (link_of(e.engine, p.engine) for p in e.peers)
    for domain in (0, 1):
        for event in (PathEvent.LOST, PathEvent.ASKED):
            mine.path(domain, 0).to(event)
    worker_of(e.engine).group.suspect(other.path(0, 0))
    e.nics[1].go_down()
    e.own.turn(2)
    e.nics[0].room = 9
    finish_all(e.own)

    assert sent.ok


def test_a_row_that_its_batch_does_not_have_is_its_last() -> None:
    """A NIC that reports one would stop the worker, and with it all transfers."""
    e = Ends(1, (1, 1))
    sent = e.engine.submit_scatter(e.mr, [ScatterDst(8, 0, (desc, 0)) for desc in e.descs], 7)
    e.own.turn()
    (nic,) = e.nics
    nic.out.append(nic.out.pop()._replace(index=99))
    nic.finish(1)
    nic.finish(1, Status.PROVIDER)
    e.own.turn(2)
    again = e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0))
    finish_all(e.own)
    assert sent.failed
    assert again.ok
