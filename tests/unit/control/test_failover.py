"""NICs that die, here or at a peer: what waits moves with the right keys, what is out fails."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest

from tep.backends.base import Status
from tep.base.api import Pages, Routing
from tep.base.errors import FabricError
from tep.base.units import KiB
from tep.core.path import PathEvent
from tep.core.posting import LONG_BYTES, PIECE_BYTES
from tests.support.ends import Ends, finish_all
from tests.support.inside import link_of, machine_of, peers_of, worker_of


def test_dead_nic_hands_its_waiting_rows_to_the_living() -> None:
    """Rows left in a dead NIC's queue hang their transfer; with its keys they write elsewhere."""
    e = Ends(2, (3,))
    e.nics[0].room = 0
    sent = e.pages(12)
    e.own.turn()
    e.nics[0].go_down()
    e.own.turn(2)
    finish_all(e.own)

    assert sent.ok
    assert [(k * KiB, k * KiB) for k in range(12)] == e.places()
    assert [] == e.nics[0].posted
    assert {0: 4, 1: 4, 2: 4} == Counter(e.meant(1, row)[1] for row in e.nics[1].posted)
    later = e.pages(12)
    e.own.turn()
    finish_all(e.own)
    assert later.ok
    assert [] == e.nics[0].posted, "posted on a NIC known dead"
    assert 24 == later.rows * 2


def test_rows_posted_on_a_dead_nic_fail_and_are_not_replayed() -> None:
    """They may have landed: a second immediate would release the reader of the next round."""
    e = Ends(2)
    e.nics[0].room = 2
    sent = e.pages(12)
    other = e.pages(2)
    e.own.turn()
    before = len(e.own.posted)
    e.nics[0].go_down()
    e.own.turn(3)
    finish_all(e.own)

    with pytest.raises(FabricError, match="NIC_DOWN"):
        sent.result()
    assert other.ok
    places = e.places()
    assert before + 1 == len(places), "only the other transfer's waiting row may be posted"


def test_row_that_says_nic_down_is_as_good_as_the_nics_own_word() -> None:
    """Until DOWN comes, more rows would be thrown after the first."""
    e = Ends(2)
    first = e.pages(2)
    e.own.turn()
    e.nics[0].finish(status=Status.NIC_DOWN)
    e.own.turn()
    e.nics[1].finish()
    e.own.turn()
    assert "NIC_DOWN" == first.error.code
    second = e.pages(4, imm=8)
    e.own.turn()
    finish_all(e.own)
    assert second.ok
    assert 1 == len(e.nics[0].posted)


def test_last_nic_dead_fails_what_waits_and_what_comes() -> None:
    """Without a NIC nothing can ever end by itself."""
    e = Ends(2)
    e.nics[0].room = e.nics[1].room = 0
    waiting = e.pages(4)
    e.own.turn()
    for nic in e.nics:
        nic.go_down()
    e.own.turn(2)
    later = e.pages(4, imm=8)
    message = e.engine.submit_send(e.peers[0].engine.main_address, b"x")
    e.own.turn()
    for handle in (waiting, later, message):
        with pytest.raises(FabricError, match=r"no NIC of this engine is alive \(a/0, a/1\)"):
            handle.result()
    assert 0 == e.engine.stats().rows_backlog
    assert 0 == e.mr.inflight


def test_cancel_of_what_failed_in_the_same_step_is_harmless() -> None:
    """Settling a handle twice stops the worker, and with it every other transfer."""
    e = Ends(1)
    e.nics[0].go_down()
    e.own.turn()
    sent = e.pages(4)
    sent.cancel()
    e.own.turn(2)

    assert sent.error.code == "NIC_DOWN"


def test_unreachable_remote_nic_leaves_its_rows_to_the_others() -> None:
    """One cable pulled at the peer must not stop traffic that its other NICs can take."""
    e = Ends(1, (3,))
    e.nics[0].room = 4
    first = e.pages(3)
    e.own.turn()
    waiting = e.pages(12)
    e.own.turn()
    bad = e.meant(0, e.nics[0].posted[1])[1]
    e.nics[0].finish(1)
    e.nics[0].finish(1, Status.UNREACHABLE)
    e.own.turn()
    e.nics[0].room = 100
    finish_all(e.own)

    assert first.error.code == "UNREACHABLE"
    assert waiting.ok
    late = {e.meant(0, row)[1] for row in e.nics[0].posted[4:]}
    assert bad not in late
    assert {0, 1, 2} - {bad} == late
    expected = [(k * KiB, k * KiB) for k in (*range(3), *range(12))]
    assert sorted(expected) == e.places()
    assert "X" in e.engine.explain(e.descs[0])


def test_peer_all_of_whose_nics_failed_is_tried_again() -> None:
    """A peer behind a switch that restarted would stay unreachable for ever."""
    e = Ends(1, (2,))
    for _ in range(2):
        e.pages(1, imm=None)
        e.own.turn()
        e.nics[0].finish(status=Status.UNREACHABLE)
        e.own.turn()
    assert [True, True] == peers_of(e.engine).resolve(e.descs[0], "test").link.alive
    again = [e.pages(2), e.pages(2)]
    e.own.turn()
    assert {0, 1} == {e.meant(0, row)[1] for row in e.nics[0].posted[2:]}
    finish_all(e.own)
    assert [True, True] == [transfer.ok for transfer in again]


@pytest.mark.parametrize("grouped", [False, True])
def test_scatter_rows_are_rerouted_each_with_its_own_peer_keys(grouped) -> None:
    """The rows of one batch go to different peers: one shifted key writes into a stranger."""
    e = Ends(2, (2, 1, 3, 2, 4))
    group = None
    if grouped:
        group = e.engine.add_peer_group([p.engine.main_address for p in e.peers])
    expected = [(k * KiB, 7 * k) for k in range(5)]
    warm = e.scatter(group=group)
    e.own.turn()
    finish_all(e.own)
    assert warm.ok
    for nic in e.nics:
        nic.posted.clear()
    e.nics[1].room = 0
    sent = e.scatter(group=group)
    e.own.turn()
    e.nics[1].go_down()
    e.own.turn(2)
    finish_all(e.own)
    assert sent.ok
    assert expected == e.places()
    e.nics[0].posted.clear()
    after = e.scatter(group=group)
    e.own.turn()
    finish_all(e.own)
    assert after.ok
    assert expected == e.places(), "templates of dead routes"


@pytest.mark.parametrize("peer", [1, 2])
@pytest.mark.parametrize("round_", range(2))
def test_scatter_avoids_the_one_dead_nic_of_the_one_peer(round_, peer) -> None:
    """Half posted, one NIC of a peer dead: its row alone moves, with that peer's other key."""
    e = Ends(1, (2, 2, 2))
    if round_:  # another cursor
        e.pages(1)
    probes = [e.engine.submit_single_write(8, (e.mr, 0), (e.descs[peer], 0)) for _ in range(2)]
    e.own.turn()
    e.nics[0].room = 1
    sent = e.scatter()
    e.own.turn()
    before = len(e.nics[0].posted)
    dead = worker_of(e.engine).group._queues[0][0].nics[peer]
    for row in list(e.nics[0].out):
        failed = e.meant(0, row)[:2] == (peer, dead)
        e.nics[0].finish(1, Status.UNREACHABLE if failed else Status.OK)
    e.own.turn()
    e.nics[0].room = 9
    finish_all(e.own)

    assert sent.ok
    assert ["UNREACHABLE"] == [probe.error.code for probe in probes if probe.error]
    late = [e.meant(0, row) for row in e.nics[0].posted[before:]]
    assert [(1, KiB, 7), (2, 2 * KiB, 14)] == [(to, src, dst) for to, _, src, dst in late]
    assert 1 - dead == late[peer - 1][1]


def test_what_is_known_of_a_peers_nics_is_known_of_each() -> None:
    """A NIC that is back would not be used where it was missed, or one that is not would be."""
    e = Ends(1, (3,))
    link = link_of(e.engine, e.peers[0].engine)
    group = worker_of(e.engine).group
    for nic in (0, 1, 1):
        assert group.is_silent(0, link, nic)
        assert group.mark_down(link, nic), "the third one is up"
    assert [False, False, True] == link.alive
    group.mark_up(link, [False, True, True])

    assert [True, False] == [link.path(0, nic).silent for nic in range(2)]


def test_error_of_a_scatter_names_the_peer_of_its_row() -> None:
    """'One of 63 peers' is no help."""
    e = Ends(1, (1, 2, 1))
    sent = e.scatter()
    e.own.turn()
    e.nics[0].finish(1)
    e.nics[0].finish(1, Status.REMOTE_RANGE)
    e.nics[0].finish()
    e.own.turn()

    assert sent.error.peer.startswith("p1 NIC ")
    assert 1 == sent.error.row


def test_rows_that_cannot_move_take_the_rest_of_their_transfer_with_them() -> None:
    """It has failed: whatever else of it is posted only wastes the wire."""
    e = Ends(3, (3,))
    for nic in e.nics:
        nic.room = 0
    sent = e.pages(12)
    e.own.turn()
    error = FabricError("scripted: no route", code="UNREACHABLE")
    e.nics[1].refuse_connect[e.peers[0].nics[0].address] = error
    e.nics[0].go_down()
    e.own.turn()
    e.nics[1].room = e.nics[2].room = 100
    e.own.turn(2)

    assert error is sent.error
    assert [] == e.own.posted
    assert 0 == e.engine.stats().rows_backlog


def test_nic_that_cannot_connect_fails_the_rows_that_moved_to_it() -> None:
    """The error comes up in the middle of a poll: it must end one transfer, not the worker."""
    e = Ends(2)
    error = FabricError("scripted: no route", code="UNREACHABLE")
    e.nics[0].room = 0
    sent = e.engine.submit_single_write(64, (e.mr, 0), (e.descs[0], 0), routing=Routing(domain=0))
    e.own.turn()
    e.nics[1].refuse_connect[e.peers[0].nics[0].address] = error
    e.nics[0].go_down()
    e.own.turn(2)

    assert error is sent.error
    assert 0 == e.engine.stats().rows_backlog


def test_peer_that_cannot_be_connected_fails_its_transfer_only() -> None:
    """An error on the worker's side must reach the user by the handle."""
    e = Ends(2, (2, 2))
    error = FabricError("scripted: no route", code="UNREACHABLE")
    e.nics[1].refuse_connect[e.peers[0].nics[1].address] = error
    sent = e.pages(8)
    fine = e.engine.submit_single_write(64, (e.mr, 0), (e.descs[1], 0))
    e.own.turn()
    finish_all(e.own)

    assert error is sent.error
    assert fine.ok
    assert (0, 8) == (sent.stats().rows_posted, sent.stats().rows_dropped)
    assert 0 == e.mr.inflight


def test_a_nic_that_is_through_takes_over_what_waits_at_another() -> None:
    """A link that is slow, and not dead, would hold half of every large write back."""
    e = Ends(2, (3,))
    e.nics[1].room = 3
    pages = Pages(range(96))
    sent = e.engine.submit_paged_writes(1 << 20, (e.mr, pages), (e.descs[0], pages), 7)
    for _ in range(300):
        e.own.turn()
        e.nics[0].finish()
    mine = len(e.nics[0].posted)
    assert mine > 80, "all but the piece that the slow one has before it"
    e.nics[1].room = 100
    finish_all(e.own)

    assert 96 - mine == len(e.nics[1].posted)
    assert sent.ok
    assert 96 == sent.rows == sent.stats().rows_posted
    assert [(k << 20, k << 20) for k in range(96)] == e.places()


def test_what_is_pinned_to_a_nic_stays_there() -> None:
    """routing.domain is a promise: perhaps the other NIC is kept free for something."""
    e = Ends(2)
    e.nics[1].room = 3
    pages = Pages(range(96))
    routing = Routing(domain=1)
    e.engine.submit_paged_writes(1 << 20, (e.mr, pages), (e.descs[0], pages), 7, routing=routing)
    for _ in range(20):
        e.own.turn()
        e.nics[0].finish()

    assert (0, 3) == (len(e.nics[0].posted), len(e.nics[1].posted))


def test_a_long_write_does_not_hold_a_short_one_up() -> None:
    """Pieces are taken in turns with what others have queued."""
    e = Ends(2)
    pages = Pages(range(512))
    long = e.engine.submit_paged_writes(1 << 20, (e.mr, pages), (e.descs[0], pages), 7)
    short = e.pages(2)
    e.own.turn(2)

    assert 2 == short.stats().rows_posted
    assert [1, 1] == [nic.calls[1] for nic in e.nics], "behind more than one piece"
    assert 512 > long.stats().rows_posted


def test_pieces_of_a_long_write_are_no_shorter_than_it_is_said() -> None:
    """Many small posts cost more than the links can be unequal."""
    e = Ends(2)
    pages, nbytes = Pages(range(300)), PIECE_BYTES // 8
    sent = e.engine.submit_paged_writes(nbytes, (e.mr, pages), (e.descs[0], pages), 7)
    finish_all(e.own)

    assert sent.ok
    assert 300 * nbytes > 2 * LONG_BYTES
    assert [4, 4] == [nic.calls[-1] for nic in e.nics], "what is left"
    assert 8 == min(min(nic.calls[:-1]) for nic in e.nics)
    for nic in e.nics:
        nic.calls.clear()
    few, nbytes = Pages(range(22)), 2 * PIECE_BYTES
    e.engine.submit_paged_writes(nbytes, (e.mr, few), (e.descs[0], few), 7)
    finish_all(e.own)
    assert 1 == e.nics[1].calls[1] == min(e.nics[0].calls), "rows longer than a piece"


def test_rows_stay_where_they_are_if_the_nic_that_is_through_cannot_connect() -> None:
    """The error of a connection that nobody had to make would end the engine."""
    e = Ends(2, (2,))
    e.nics[0].room, e.nics[1].room = 3, 19
    pages = Pages(range(40))
    sent = e.engine.submit_paged_writes(1 << 20, (e.mr, pages), (e.descs[0], pages), 7)
    e.own.turn()
    link = link_of(e.engine, e.peers[0].engine)
    link.path(1, 1).to(PathEvent.LOST)
    e.nics[1].refuse_connect[b"p0/0"] = FabricError("out of queue pairs", code="PROVIDER")
    e.nics[1].room = 100
    e.own.turn()
    assert not machine_of(e.engine).step(), "it would turn for as long as the other NIC is full"
    e.nics[0].room = 100
    finish_all(e.own)

    assert sent.ok
    assert [20, 20] == [len(nic.posted) for nic in e.nics]


def test_a_peer_that_has_fenced_every_path_is_named() -> None:
    """A row on such a path may land after the peer has counted what landed."""
    e = Ends(1)
    path = link_of(e.engine, e.peers[0].engine).path(0, 0)
    path.to(PathEvent.LOST)
    path.to(PathEvent.ASKED)
    sent = e.pages(2)
    e.own.turn()

    with pytest.raises(FabricError, match="every path to p0 is fenced off; .* when p0 answers"):
        sent.result()
    assert ("UNREACHABLE", "p0") == (sent.error.code, sent.error.peer)
    assert [] == e.own.posted


def test_rows_of_a_nic_that_cannot_post_are_posted_by_another_in_the_next_step() -> None:
    """No completion and no command would wake the engine: the write would stand still."""
    e = Ends(2)
    e.nics[1].room = 0
    e.pages(3, routing=Routing(domain=1))
    e.own.turn()
    with mock.patch.object(e.nics[1], "post", side_effect=MemoryError):
        assert machine_of(e.engine).step()
    e.own.turn()

    assert 3 == len(e.nics[0].posted)


def test_rows_behind_one_that_moved_at_once_are_posted_in_their_step() -> None:
    """The step after it had nothing to do with it, and passed over what was queued."""
    e = Ends(2)
    with mock.patch.object(e.nics[0], "post", side_effect=OSError(5, "broken")):
        e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0))
        e.own.turn()
    assert 1 == len(e.nics[1].posted)
    for _ in range(2):
        e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0))
    e.own.turn()

    assert 3 == len(e.nics[1].posted)


def test_a_nic_that_cannot_be_polled_ends_its_own_rows_alone() -> None:
    """Another NIC's rows would be taken for lost while their memory is still read."""
    e = Ends(2)
    lone = e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0))
    e.own.turn()
    assert [1, 0] == [len(nic.posted) for nic in e.nics]
    sent = e.pages(4)
    e.own.turn()
    with mock.patch.object(e.nics[0], "poll", side_effect=OSError(5, "broken")):
        e.own.turn(20)
    assert lone.finished
    assert 1 == lone.stats().rows_back
    assert (2, 2) == (sent.stats().rows_failed, sent.stats().rows_back)
    assert not sent.finished
    e.nics[1].finish()
    e.own.turn()

    assert "NIC_DOWN" == sent.error.code
    assert 4 == sent.stats().rows_back


def test_a_nic_whose_polls_are_interrupted_lives() -> None:
    """After some signals it would be closed, and its rows be lost."""
    e = Ends(1)
    sent = e.pages(4)
    with mock.patch.object(e.nics[0], "poll", side_effect=InterruptedError(4, "a signal")):
        e.own.turn(40)
    finish_all(e.own)

    assert sent.ok


def test_rows_that_another_nic_takes_over_are_posted_in_the_next_step() -> None:
    """It had nothing to do, and no completion would wake the engine."""
    e = Ends(2, (1, 1))
    e.nics[1].room = 1
    pages = Pages(range(2))
    fails = e.engine.submit_paged_writes(
        8, (e.mr, pages), (e.descs[1], pages), routing=Routing(domain=1)
    )
    e.own.turn()
    e.nics[1].refuse_peers.add(e.nics[1].out[0].row.peer)
    e.nics[0].room, e.nics[1].room = 3, 100
    pages = Pages(range(40))
    e.engine.submit_paged_writes(1 << 20, (e.mr, pages), (e.descs[0], pages))
    e.own.turn()
    e.nics[1].finish(1, Status.REMOTE_KEY)
    e.own.turn()
    assert fails.finished
    assert [3, 21] == [len(nic.posted) for nic in e.nics]
    assert machine_of(e.engine).step()
    e.own.turn()

    assert 3 == len(e.nics[0].posted)
    assert 21 < len(e.nics[1].posted)


def test_an_engine_that_can_do_nothing_says_so() -> None:
    """It would turn for as long as one NIC is full, if the other has no path to the peer."""
    e = Ends(2, (1,))
    e.nics[0].room, e.nics[1].room = 3, 19
    pages = Pages(range(40))
    e.engine.submit_paged_writes(1 << 20, (e.mr, pages), (e.descs[0], pages), 7)
    e.own.turn()
    link = link_of(e.engine, e.peers[0].engine)
    link.path(1, 0).to(PathEvent.LOST)
    e.nics[1].room = 100
    e.own.turn(2)

    assert [3, 20] == [len(nic.posted) for nic in e.nics]
    assert not machine_of(e.engine).step()
