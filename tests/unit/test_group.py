"""A group of NICs under scripted trouble: full queues, dead NICs on both sides, fairness."""

from __future__ import annotations

import pytest

from tep.api import EngineOptions, Pages, Routing, ScatterDst
from tep.backends.base import Status
from tep.errors import Cancelled, FabricError
from tep.units import KiB
from tests.support.script import Posted, Scripted, memory, scripted

PTR = 1 << 30
IMM = 0x01020304


class Ends:
    """An engine, a source, and descriptors of peers with their NICs."""

    def __init__(self, nlocal: int, nremotes: tuple[int, ...] = (1,), **kw) -> None:
        self.own = scripted(nlocal, **kw)
        self.engine, self.nics = self.own.engine, self.own.nics
        self.mr, _ = self.engine.reg_mr(memory(1 << 30, PTR))
        self.peers = [scripted(n, name=f"p{k}") for k, n in enumerate(nremotes)]
        self.descs = [
            p.engine.reg_mr(memory(1 << 30, (k + 2) << 40))[1] for k, p in enumerate(self.peers)
        ]

    def pages(self, npages: int, imm: int | None = IMM, **kw):
        pages = Pages(range(npages))
        return self.engine.submit_paged_writes(
            KiB, (self.mr, pages), (self.descs[0], pages), imm, **kw
        )

    def scatter(self, **kw):
        dsts = [ScatterDst(KiB, k * KiB, (d, 7 * k)) for k, d in enumerate(self.descs)]
        return self.engine.submit_scatter(self.mr, dsts, IMM, **kw)

    def meant(self, nic: int, posted: Posted) -> tuple[int, int, int, int]:
        """(peer, its NIC, source offset, target offset); fails on keys that do not belong."""
        row = posted.row
        address = self.nics[nic].peers[row.peer - 10 * nic]
        peer, remote = (int(part) for part in address.decode()[1:].split("/"))
        desc = self.descs[peer]
        assert desc.rkeys[remote] == row.rkey, "a key of another NIC"
        assert self.mr.keys[nic].lkey == row.lkey, "a local key of another NIC"
        return peer, remote, row.src - PTR, row.dst - desc.bases[remote]

    def places(self) -> list[tuple[int, int]]:
        """(source offset, target offset) of every row ever posted."""
        found = (self.meant(k, row) for k, nic in enumerate(self.nics) for row in nic.posted)
        return sorted((src, dst) for _, _, src, dst in found)


def finish_all(own: Scripted) -> None:
    """Let every NIC return what it holds, until nothing moves."""
    for _ in range(20):
        for nic in own.nics:
            nic.finish()
        own.turn()


def test_full_queue_keeps_the_rest_and_order_of_rows() -> None:
    """A short post that is taken for a full one loses the rest, silently."""
    e = Ends(1)
    e.nics[0].room = 3
    sent = e.pages(8)
    e.own.turn(4)
    assert 3 == len(e.nics[0].posted)
    assert (3, 5) == (e.engine.stats().rows_outstanding[0], e.engine.stats().rows_backlog)
    for _ in range(5):
        e.nics[0].room = 1
        e.own.turn()
    assert [(k * KiB, k * KiB) for k in range(8)] == e.places()
    assert not sent.settled
    finish_all(e.own)
    assert sent.done
    assert (0,) == e.engine.stats().rows_outstanding


def test_done_needs_the_last_row_of_every_nic() -> None:
    """Done on the first NIC's last row: the user overwrites what the other still reads."""
    e = Ends(2)
    sent = e.pages(4)
    e.own.turn()
    e.nics[0].finish()
    e.nics[1].finish(1)
    e.own.turn()
    assert not sent.settled
    e.nics[1].finish()
    e.own.turn()
    assert sent.done


def test_small_transfer_overtakes_a_huge_one_in_bounded_time() -> None:
    """A paged write of 100,000 rows would delay a 1-row message to a decoder by milliseconds."""
    e = Ends(1, options=EngineOptions(post_rows_max=1024))
    e.nics[0].room = 1000
    huge = e.pages(100_000, imm=None)
    e.own.turn()
    small = e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0))
    steps = 0
    while small.stats().rows_posted == 0:
        e.nics[0].room = 1000
        e.own.turn()
        steps += 1
    assert steps <= 3
    assert huge.stats().rows_posted <= 4 * 1024


def test_wide_queue_takes_large_transfers_in_turns_while_others_wait() -> None:
    """One post of 50,000 rows keeps its neighbour waiting as long as a narrow queue would."""
    e = Ends(1, options=EngineOptions(post_rows_max=10))
    alone = e.pages(500, imm=None)
    e.own.turn()
    assert [500] == e.nics[0].calls
    first, second = e.pages(500, imm=None), e.pages(500, imm=None)
    e.own.turn()
    assert [10] * 64 == e.nics[0].calls[1:]
    assert [320, 320] == [transfer.stats().rows_posted for transfer in (first, second)]
    e.own.turn(2)
    finish_all(e.own)
    assert alone.done
    assert second.done


def test_many_transfers_share_a_narrow_queue_evenly() -> None:
    """First come, all served: with a queue of 10 rows nobody waits for a neighbour to end."""
    e = Ends(1, options=EngineOptions(post_rows_max=10))
    e.nics[0].room = 0
    sent = [e.pages(1000, imm=None) for _ in range(10)]
    for _ in range(100):
        e.nics[0].room = 10
        e.own.turn()
    posted = [transfer.stats().rows_posted for transfer in sent]

    assert 1000 == sum(posted)
    assert max(posted) - min(posted) <= 10


def test_error_waits_for_every_posted_row_and_drops_the_rest() -> None:
    """An error confirmed early lets the user free memory that a NIC still reads."""
    e = Ends(2)
    e.nics[0].room, e.nics[1].room = 3, 2
    sent = e.pages(20)
    e.own.turn()
    e.nics[0].finish(1, Status.REMOTE_KEY)
    e.own.turn()
    assert not sent.settled
    e.nics[0].room = e.nics[1].room = 100
    e.own.turn(3)
    assert 5 == len(e.own.posted), "posted a row of a transfer that has failed"
    e.nics[0].finish()
    e.own.turn()
    assert not sent.settled
    e.nics[1].finish()
    e.own.turn()
    assert sent.error is not None
    with pytest.raises(FabricError, match=r"paged to p0 NIC 0 failed on NIC 0 \(a/0\) at row 0: "):
        sent.result()
    assert ("REMOTE_KEY", 0, "p0 NIC 0", 0) == (
        sent.error.code,
        sent.error.domain,
        sent.error.peer,
        sent.error.row,
    )
    assert str(sent.error).endswith("REMOTE_KEY: as scripted")
    stats = sent.stats()
    assert (20, 5, 5, 1, 15) == (
        stats.rows,
        stats.rows_posted,
        stats.rows_back,
        stats.rows_failed,
        stats.rows_dropped,
    )
    assert 0 == e.engine.stats().rows_backlog


def test_first_error_is_reported_unless_it_was_only_a_flush() -> None:
    """FLUSHED names a consequence; the cause comes later on an RC queue pair."""
    e = Ends(1)
    sent = e.pages(3)
    e.own.turn()
    for status in (Status.FLUSHED, Status.REMOTE_RANGE, Status.LENGTH):
        e.nics[0].finish(1, status)
    e.own.turn()

    assert "REMOTE_RANGE" == sent.error.code
    assert 3 == sent.stats().rows_failed


def test_dead_nic_hands_its_waiting_rows_to_the_living() -> None:
    """Rows left in a dead NIC's queue hang their transfer; with its keys they write elsewhere."""
    e = Ends(2, (3,))
    e.nics[0].room = 0
    sent = e.pages(12)
    e.own.turn()
    e.nics[0].go_down()
    e.own.turn(2)
    finish_all(e.own)

    assert sent.done
    assert [(k * KiB, k * KiB) for k in range(12)] == e.places()
    assert [] == e.nics[0].posted
    later = e.pages(12)
    e.own.turn()
    finish_all(e.own)
    assert later.done
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
    assert other.done
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
    second = e.pages(4)
    e.own.turn()
    finish_all(e.own)
    assert second.done
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
    later = e.pages(4)
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
    assert waiting.done
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
        e.pages(1)
        e.own.turn()
        e.nics[0].finish(status=Status.UNREACHABLE)
        e.own.turn()
    assert [True, True] == e.engine._peers.resolve(e.descs[0], "test").link.alive
    again = [e.pages(2), e.pages(2)]
    e.own.turn()
    assert {0, 1} == {e.meant(0, row)[1] for row in e.nics[0].posted[2:]}
    finish_all(e.own)
    assert [True, True] == [transfer.done for transfer in again]


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
    assert warm.done
    for nic in e.nics:
        nic.posted.clear()
    e.nics[1].room = 0
    sent = e.scatter(group=group)
    e.own.turn()
    e.nics[1].go_down()
    e.own.turn(2)
    finish_all(e.own)
    assert sent.done
    assert expected == e.places()
    e.nics[0].posted.clear()
    after = e.scatter(group=group)
    e.own.turn()
    finish_all(e.own)
    assert after.done
    assert expected == e.places(), "templates of dead routes"


@pytest.mark.parametrize("round_", range(2))
def test_scatter_avoids_the_one_dead_nic_of_the_one_peer(round_) -> None:
    """Half posted, one NIC of a peer dead: its row alone moves, with that peer's other key."""
    e = Ends(1, (2, 2, 2))
    if round_:  # another cursor
        e.pages(1)
    probes = [e.engine.submit_single_write(8, (e.mr, 0), (e.descs[1], 0)) for _ in range(2)]
    e.own.turn()
    e.nics[0].room = 1
    sent = e.scatter()
    e.own.turn()
    before = len(e.nics[0].posted)
    dead = e.engine._worker.group._queues[0][0].nics[1]
    for row in list(e.nics[0].out):
        failed = e.meant(0, row)[:2] == (1, dead)
        e.nics[0].finish(1, Status.UNREACHABLE if failed else Status.OK)
    e.own.turn()
    e.nics[0].room = 9
    finish_all(e.own)

    assert sent.done
    assert ["UNREACHABLE"] == [probe.error.code for probe in probes if probe.error]
    late = [e.meant(0, row) for row in e.nics[0].posted[before:]]
    assert [(1, 1 - dead, KiB, 7), (2, late[1][1], 2 * KiB, 14)] == late


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
    """What is found out on the worker's side reaches the user by the handle."""
    e = Ends(2, (2, 2))
    error = FabricError("scripted: no route", code="UNREACHABLE")
    e.nics[1].refuse_connect[e.peers[0].nics[1].address] = error
    sent = e.pages(8)
    fine = e.engine.submit_single_write(64, (e.mr, 0), (e.descs[1], 0))
    e.own.turn()
    finish_all(e.own)

    assert error is sent.error
    assert fine.done
    assert (0, 8) == (sent.stats().rows_posted, sent.stats().rows_dropped)
    assert 0 == e.mr.inflight


def test_cancel_before_the_first_row() -> None:
    """Nothing is posted of what was cancelled in time."""
    e = Ends(2)
    sent = e.pages(8)
    sent.cancel()
    e.own.turn()

    with pytest.raises(Cancelled, match="cancelled: paged of 8 rows, 8192 bytes to p0: .* 8 drop"):
        sent.result()
    assert [] == e.own.posted
    assert sent.cancelled
    assert 0 == e.engine.stats().rows_backlog


def test_cancel_half_way_waits_for_what_is_posted() -> None:
    """Confirmed early, the user reuses memory that a NIC still reads."""
    e = Ends(1)
    e.nics[0].room = 3
    sent = e.pages(8)
    e.own.turn()
    sent.cancel()
    sent.cancel()
    e.nics[0].room = 100
    e.own.turn(2)
    assert not sent.settled
    assert 3 == len(e.own.posted), "a cancelled row was posted"
    finish_all(e.own)
    assert sent.cancelled
    assert (3, 5) == (sent.stats().rows_back, sent.stats().rows_dropped)
    sent.cancel()
    e.own.turn()
    assert sent.cancelled


def test_cancel_after_the_last_row_is_posted_changes_nothing() -> None:
    """All rows are on their way and will land: done is the truth."""
    e = Ends(1)
    sent = e.pages(8)
    e.own.turn()
    sent.cancel()
    e.own.turn()
    assert not sent.settled
    finish_all(e.own)
    assert sent.done
    sent.cancel()
    e.own.turn()
    assert sent.done


def test_error_after_cancel_is_an_error() -> None:
    """A failed row weighs more than the wish to stop: memory at the target is in doubt."""
    e = Ends(1)
    e.nics[0].room = 3
    sent = e.pages(8)
    e.own.turn()
    sent.cancel()
    e.own.turn()
    e.nics[0].finish(status=Status.REMOTE_RANGE)
    e.own.turn()

    assert "REMOTE_RANGE" == sent.error.code


def test_columns_of_odd_nic_counts_do_not_fill_the_memory() -> None:
    """Targets with 1 to 13 NICs repeat their pattern only after 360,360 requests."""
    e = Ends(1, tuple(range(1, 14)))
    group = e.engine.add_peer_group([p.engine.main_address for p in e.peers])
    for _ in range(600):
        e.scatter(group=group)
        e.own.turn()
        e.nics[0].out.clear()
    assert len(group.targets(e.descs, "test").templates) <= 257
