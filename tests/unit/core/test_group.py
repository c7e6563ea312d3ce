"""A group of NICs by hand: full queues, fairness, errors, cancels."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from tep.backends.base import Status
from tep.base.api import EngineOptions, Pages, Routing
from tep.base.errors import Cancelled, FabricError
from tep.base.units import KiB
from tep.core.handles import Pace
from tests.support.ends import Ends, finish_all
from tests.support.inside import worker_of


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
    assert not sent.finished
    finish_all(e.own)
    assert sent.ok
    assert (0,) == e.engine.stats().rows_outstanding


def test_what_a_slow_nic_took_is_kept_in_few_numbers() -> None:
    """Millions of rows that leave a few at a time would keep an entry for each try."""
    e = Ends(1)
    sent = e.pages(60)
    for _ in range(60):
        e.nics[0].room = 1
        e.own.turn()
    assert len(sent.took) <= 24
    assert ((60, 60 * KiB),) == sent.stats().nics


def test_a_nic_that_falls_behind_gets_one_piece_at_a_time() -> None:
    """Pieces that wait for a slow NIC are what the others end without, and wait for."""
    pace = Pace(3)
    for nic, rows in enumerate((4, 3, 1)):
        pace.end(nic, rows)
    pace.out = [1, 1, 1]
    assert [False, False, True] == [pace.is_full(nic) for nic in range(3)]


@pytest.mark.parametrize("taken", [-1, 9])
def test_a_nic_that_takes_what_cannot_be_is_a_bug_that_is_named(taken: int) -> None:
    """The row after the last would be posted, or one row twice."""
    e = Ends(1)
    with mock.patch.object(e.nics[0], "post", return_value=taken):
        e.pages(8)
        with pytest.raises(AssertionError, match=rf"\({taken}, 0, 8\)"):
            e.own.turn()


def test_done_needs_the_last_row_of_every_nic() -> None:
    """Done on the first NIC's last row: the user overwrites what the other still reads."""
    e = Ends(2)
    sent = e.pages(4)
    e.own.turn()
    e.nics[0].finish()
    e.nics[1].finish(1)
    e.own.turn()
    assert not sent.finished
    e.nics[1].finish()
    e.own.turn()
    assert sent.ok


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
    assert alone.ok
    assert second.ok


def test_scatters_that_start_at_other_nics_are_not_posted_in_turns() -> None:
    """In turns go the batches of one transfer; more posts of fewer rows cost more, for nothing."""
    e = Ends(1, (4, 5) * 9)
    for _ in range(2):
        e.scatter()
    e.own.turn()

    assert [18, 18] == e.nics[0].calls


def test_scatters_to_few_peers_take_the_nics_in_turn() -> None:
    """One of them would carry everything, and the others be idle."""
    e = Ends(2, (2,))
    for _ in range(4):
        e.scatter()
    e.own.turn()

    assert [2, 2] == [len(nic.posted) for nic in e.nics]


def test_a_transfer_goes_to_the_nics_of_its_peer_in_turn_while_others_wait() -> None:
    """Slower NICs would be busy one behind the other."""
    e = Ends(1, (2,))
    for _ in range(2):
        e.pages(200)
    e.own.turn()

    assert [16] * 4 == e.nics[0].calls[:4]


def test_short_slices_that_nics_share_go_over_all_of_them() -> None:
    """All would go over the first one, and the others be idle."""
    e = Ends(3, (3,) * 3)
    for _ in range(3):
        e.scatter(routing=Routing(scatter_by="bytes"))
    e.own.turn()

    assert [3, 3, 3] == [len(nic.posted) for nic in e.nics]


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


def test_a_peer_that_holds_its_rows_up_holds_up_no_other() -> None:
    """A NIC that is not full and takes nothing speaks of one peer; the others wait behind it."""
    e = Ends(1, (1, 1, 1))
    stuck = e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0))
    e.own.turn()
    refused = e.nics[0].peers.index(b"p0/0")
    e.nics[0].refuse_peers.add(refused)
    late = [e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 8 * k)) for k in (1, 2)]
    others = [e.engine.submit_single_write(8, (e.mr, 0), (desc, 0)) for desc in e.descs[1:]]
    e.own.turn()

    assert [1, 0, 0, 1, 1] == [t.stats().rows_posted for t in (stuck, *late, *others)]
    finish_all(e.own)
    assert all(transfer.ok for transfer in (stuck, *others))
    e.nics[0].refuse_peers.clear()
    finish_all(e.own)
    assert all(transfer.ok for transfer in late)


def test_a_full_nic_is_not_asked_again_for_every_transfer() -> None:
    """Full is full for all: asking sixty times a step would cost more than posting."""
    e = Ends(1)
    e.nics[0].caps = replace(e.nics[0].caps, sq_depth=3)
    e.nics[0].room = 3
    sent = [e.pages(2, imm=None) for _ in range(10)]
    e.own.turn()

    assert [2, 2] == e.nics[0].calls
    e.nics[0].room = 100
    finish_all(e.own)
    assert all(transfer.ok for transfer in sent)


def test_error_waits_for_every_posted_row_and_drops_the_rest() -> None:
    """An error confirmed early lets the user free memory that a NIC still reads."""
    e = Ends(2)
    e.nics[0].room, e.nics[1].room = 3, 2
    sent = e.pages(20)
    e.own.turn()
    e.nics[0].finish(1, Status.REMOTE_KEY)
    e.own.turn()
    assert not sent.finished
    e.nics[0].room = e.nics[1].room = 100
    e.own.turn(3)
    assert 5 == len(e.own.posted), "posted a row of a transfer that has failed"
    e.nics[0].finish()
    e.own.turn()
    assert not sent.finished
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
    assert not sent.finished
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
    assert not sent.finished
    finish_all(e.own)
    assert sent.ok
    sent.cancel()
    e.own.turn()
    assert sent.ok


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


def test_a_nic_that_takes_over_writes_to_the_nic_of_the_peer_that_is_idle_too() -> None:
    """Both would write to one NIC of the peer, and be no faster than one."""
    e = Ends(2, (2,))
    e.nics[0].room = 3
    pages = Pages(range(96))
    e.engine.submit_paged_writes(1 << 20, (e.mr, pages), (e.descs[0], pages), 7)
    for _ in range(300):
        e.own.turn()
        e.nics[1].finish()

    assert 48 < len(e.nics[1].posted)
    assert {1} == {e.meant(1, row)[1] for row in e.nics[1].posted}


def test_a_long_write_that_waits_asks_no_other_peer_again() -> None:
    """Rows that one peer refuses would be offered to it dozens of times in each step."""
    e = Ends(2, (1, 1))
    e.engine.submit_single_write(8, (e.mr, 0), (e.descs[1], 0), routing=Routing(domain=0))
    e.own.turn()
    e.nics[0].refuse_peers.add(e.nics[0].out[0].row.peer)
    pages = Pages(range(256))
    e.engine.submit_paged_writes(1 << 20, (e.mr, pages), (e.descs[0], pages), 7)
    e.own.turn(9)
    e.engine.submit_single_write(8, (e.mr, 0), (e.descs[1], 0), routing=Routing(domain=0))
    e.nics[0].calls.clear()
    e.own.turn()

    assert [1] == e.nics[0].calls


def test_a_row_that_a_nic_refuses_is_offered_once_a_step() -> None:
    """A NIC that is full would be asked again as often as there are ways to it."""
    e = Ends(2)
    e.nics[0].room = 0
    e.engine.submit_single_write(8, (e.mr, 0), (e.descs[0], 0))
    for step in (1, 2, 3):
        e.own.turn()
        assert [1] * step == e.nics[0].calls


def test_a_batch_of_which_the_rest_is_posted_in_pieces_is_over_with_them() -> None:
    """It would be kept for ever, and looked at whenever a path fails."""
    e = Ends(2)
    e.nics[0].room = 300
    pages = Pages(range(1200))
    sent = e.engine.submit_paged_writes(32 * KiB, (e.mr, pages), (e.descs[0], pages), 7)
    e.own.turn()
    assert [300, 600] == [len(nic.posted) for nic in e.nics]
    e.nics[0].finish()
    e.own.turn(3)
    assert 600 < len(e.nics[1].posted), "the rest is not shared"
    e.nics[0].room = 1200
    finish_all(e.own)

    assert sent.ok
    assert {} == worker_of(e.engine).group.batches
