"""Reads in the engine, on NICs that do what a test says: ends, retries, immediates, quarantine."""

from __future__ import annotations

import itertools

import pytest

import tep
from tep.backends.base import Access, ReadRow, Row, Status
from tep.base.errors import BadRequest, BusyError, Cancelled, FabricError, UsageError
from tep.core.path import PathEvent
from tests.support.inside import link_of
from tests.support.reading import HERE, PAGE, Reading
from tests.support.script import Scripted, memory, scripted


@pytest.fixture
def r() -> Reading:
    return Reading()


def test_rows_name_both_ends_by_the_keys_of_their_nics(r) -> None:
    """A row with another NIC's key reads other memory, or none."""
    r.paged(8)
    found = [(nic.nic, posted.row) for nic in r.me.nics for posted in nic.posted]

    assert 8 == len(found)
    for nic, row in found:
        assert isinstance(row, ReadRow)
        far = nic  # lanes 0 and 1 join equal numbers
        page = (row.local - HERE) // PAGE
        assert r.mr.keys[nic].lkey == row.lkey
        assert r.desc.rkeys[far] == row.rkey
        assert r.desc.bases[far] + page * PAGE == row.remote
        assert PAGE == row.nbytes
    assert set(range(8)) == {(row.local - HERE) // PAGE for _, row in found}


def test_short_reads_of_a_narrow_owner_use_all_nics_here() -> None:
    """All would wait for one NIC, or read beside the place, where a region starts anywhere."""
    me, owner = scripted(3, name="me", reads=1 << 20), scripted(1, name="owner", reads=1)
    _, desc = owner.engine.reg_mr(memory(PAGE, (1 << 20) + 8), access=Access.READABLE)
    mr, _ = me.engine.reg_mr(memory(PAGE, HERE), access=Access.SINK)
    used = []
    for _ in range(10):
        me.engine.submit_single_read(8, (desc, 8), (mr, 0))
        me.turn()
        used += [(nic.nic, nic.out.pop().row.remote) for nic in me.nics if nic.out]

    assert [(nic, desc.bases[0] + 8) for nic in (0, 1, 2, 0, 1, 2, 0, 1, 2, 0)] == used


def test_shards_of_a_read_follow_each_other_in_the_owners_memory(r) -> None:
    """Later ones would bring what lies elsewhere, where a read does not begin at a round place."""
    r.me.engine.submit_single_read(
        2 * PAGE, (r.desc, PAGE), (r.mr, 0), routing=tep.Routing(num_shards=2)
    )
    r.me.turn()

    found = {
        (posted.row.local - HERE, posted.row.remote - r.desc.bases[nic.nic], posted.row.nbytes)
        for nic in r.me.nics
        for posted in nic.posted
    }
    assert {(0, PAGE, PAGE), (PAGE, 2 * PAGE, PAGE)} == found


def test_a_short_read_from_far_behind_is_no_long_row() -> None:
    """It would be refused by a NIC with a limit, or go out in too long rows."""
    me = scripted(1, name="me", reads=1 << 20, max_write_bytes=PAGE)
    owner = scripted(1, name="owner", reads=1)
    _, desc = owner.engine.reg_mr(memory(4 * PAGE), access=Access.READABLE)
    mr, _ = me.engine.reg_mr(memory(4 * PAGE, HERE), access=Access.SINK)
    me.engine.submit_single_read(PAGE, (desc, 2 * PAGE), (mr, 0))
    with pytest.raises(BadRequest, match="rows of 4097 bytes, but a NIC here takes 4096 at the m"):
        me.engine.submit_single_read(PAGE + 1, (desc, 0), (mr, 0))


def test_a_read_is_done_when_all_rows_are_back(r) -> None:
    """One that is done early is memory that changes under its user."""
    sent = r.paged(8)
    r.me.nics[0].finish()
    r.me.turn()
    assert not sent.finished
    r.me.nics[1].finish()
    r.me.turn()

    assert sent.ok
    stats = r.me.engine.stats()
    assert [4, 4] == [nic.rows for nic in stats.reads]
    assert [0, 0] == [nic.rows for nic in stats.nics]
    assert 8 == sent.stats().rows_back


def test_the_owners_immediate_follows_all_rows(r) -> None:
    """The owner frees its memory on it: one row too early, and that row reads the next contents."""
    sent = r.paged(8, imm=7)
    r.me.nics[0].finish()
    r.me.nics[1].finish(3)
    r.me.turn(3)
    assert 8 == len(r.rows())
    r.me.nics[1].finish()
    r.me.turn(2)
    last = [row for row in r.rows() if isinstance(row, Row)]

    assert [(0, 7)] == [(row.nbytes, row.imm) for row in last]
    assert last[0].rkey in r.desc.rkeys
    assert not sent.finished
    for nic in r.me.nics:
        nic.finish()
    r.me.turn()
    assert sent.ok
    assert 9 == sent.stats().rows == sent.stats().rows_back


def test_a_read_whose_owner_cannot_be_told_fails(r) -> None:
    """Its bytes are here, but the owner waits for the immediate: who sees it done would not ask."""
    sent = r.paged(2, imm=7)
    link = link_of(r.me.engine, r.owner.engine)
    for here, there in itertools.product(range(2), repeat=2):
        for event in (PathEvent.LOST, PathEvent.ASKED, PathEvent.FENCED):
            link.path(here, there).to(event)
    for nic in r.me.nics:
        nic.finish()
    r.me.turn(2)

    with pytest.raises(FabricError, match="every path to owner is fenced off"):
        sent.result()
    assert 2 == len(r.rows())
    assert (1, 0) == (sent.stats().rows_failed, sent.stats().rows_dropped)


@pytest.mark.parametrize("status", [Status.REMOTE_KEY, Status.PROVIDER, Status.NIC_DOWN])
def test_a_read_that_fails_tells_its_owner_nothing(r, status) -> None:
    """The owner would free what the reader will ask for again."""
    sent = r.paged(8, imm=7)
    r.me.nics[0].finish(1, status)
    r.me.turn()
    for nic in r.me.nics:
        nic.finish()
    r.me.turn(3)

    assert 8 == len(r.rows())
    with pytest.raises(FabricError, match=f"paged read from owner NIC 0 failed.*{status.name}"):
        sent.result()
    assert 1 == sent.stats().rows_dropped


@pytest.mark.parametrize("nic", [0, 2])
@pytest.mark.parametrize("status", [Status.FLUSHED, Status.UNREACHABLE])
def test_a_row_that_is_over_is_posted_again_on_another_path(status, nic) -> None:
    """The bytes are still at the owner, and the memory here is still the transfer's."""
    r = Reading(3)
    sent, to = r.paged(3), (nic + 1) % 3
    lost = r.me.nics[nic].posted[0].row
    r.me.nics[nic].finish(1, status)
    r.me.turn(2)
    again = r.me.nics[to].posted[-1].row

    assert (lost.local, lost.nbytes) == (again.local, again.nbytes)
    assert r.desc.rkeys[to] == again.rkey
    assert r.desc.bases[to] - r.desc.bases[nic] == again.remote - lost.remote
    assert r.mr.keys[to].lkey == again.lkey
    for each in r.me.nics:
        each.finish()
    r.me.turn()
    assert sent.ok
    assert 1 == sent.stats().rows_again == r.me.engine.stats().reads_again
    assert 4 == sent.stats().rows_back


def test_a_row_that_its_batch_does_not_have_is_its_last(r) -> None:
    """A NIC that reports one would stop the worker, and with it all transfers."""
    r.paged(4)
    nic, other = r.me.nics
    nic.out.append(nic.out.pop()._replace(index=99))
    nic.finish(1)
    nic.finish(1, Status.FLUSHED)
    r.me.turn(2)
    lost, again = nic.posted[-1].row, other.posted[-1].row
    assert (lost.local, lost.nbytes) == (again.local, again.nbytes)


@pytest.mark.parametrize("status", [Status.NIC_DOWN, Status.GIVEN_UP])
def test_a_row_that_may_not_be_over_is_not_posted_again(r, status) -> None:
    """The old posting would write over the new one's bytes, or over what comes after."""
    sent = r.paged(2)
    r.me.nics[0].finish(1, status)
    r.me.turn(2)
    r.me.nics[1].finish()
    r.me.turn()

    assert 2 == len(r.rows())
    assert sent.failed
    (found,) = r.mr.quarantined
    assert (0, 16 * PAGE) == (found.start, found.stop)
    assert 16 * PAGE == r.me.engine.stats().bytes_quarantined
    with pytest.raises(BusyError, match="may still be touched"):
        r.me.engine.deregister(r.mr)


def test_tries_are_limited(r) -> None:
    """A row that every path loses would go round for ever."""
    sent = r.paged(1)
    for _ in range(20):
        for nic in r.me.nics:
            nic.finish(status=Status.FLUSHED)
        r.me.turn()

    with pytest.raises(FabricError, match=r"FLUSHED.*it was tried 4 times before"):
        sent.result()


def test_an_owner_that_is_silent_on_every_path_is_not_asked_for_each_row_again(r) -> None:
    """Each silence takes as long as the backend waits: a long read would fail only after hours."""
    askings = 0
    for nic in r.me.nics:
        nic.room = 1
    sent = r.paged(16)
    while not sent.finished and askings < 20:
        askings += 1
        for nic in r.me.nics:
            nic.finish(status=Status.UNREACHABLE)
            nic.room = 1
        r.me.turn(2)

    with pytest.raises(FabricError, match=r"UNREACHABLE.*no other path is left that may answer"):
        sent.result()
    assert askings < 8


def test_a_path_that_was_silent_once_is_used_again_when_others_answer(r) -> None:
    """A row that comes back shows that the owner lives: one lost packet is no dead path."""
    sent = r.paged(16)
    for nic in r.me.nics:
        nic.finish(1, Status.UNREACHABLE)
    r.me.turn(2)
    for nic in r.me.nics:
        nic.finish()
    r.me.turn(2)
    for nic in r.me.nics:
        nic.finish()
    r.me.turn()

    assert sent.ok
    assert 2 == sent.stats().rows_again


def test_a_read_outlives_a_lost_row_on_every_path_if_others_come_back(r) -> None:
    """Each path may lose a row now and then: counted together they look like a silent owner."""
    sent, lost = r.paged(8), set()
    for losses, back in (((2, 2), (0, 0)), ((2, 0), (0, 2)), ((2, 1), (0, 0))):
        for nic, n, done in zip(r.me.nics, losses, back, strict=True):
            lost |= {(nic.nic, nic.out[k].row.rkey) for k in range(n)}
            nic.finish(n, Status.UNREACHABLE)
            nic.finish(done)
        r.me.turn(2)
    for nic in r.me.nics:
        nic.finish()
    r.me.turn()

    assert sent.ok, sent.error
    assert 4 == len(lost), "not every path lost one: this shows nothing"


def test_a_row_is_not_read_again_over_paths_that_are_shut(r) -> None:
    """Each may cost a silence more, after one that was open."""
    sent = r.paged(1)
    link = link_of(r.me.engine, r.owner.engine)
    for here, there in ((0, 1), (1, 0), (1, 1)):
        link.path(here, there).to(PathEvent.LOST)
    r.me.nics[0].finish(status=Status.UNREACHABLE)
    r.me.turn(2)

    with pytest.raises(FabricError, match="no other path is left that may answer"):
        sent.result()


@pytest.mark.parametrize("statuses", [["FLUSHED", "REMOTE_KEY"], ["REMOTE_KEY", "FLUSHED"]])
def test_the_error_of_a_read_is_the_one_that_flushed_the_others(statuses) -> None:
    """FLUSHED makes a user look for a fault of the network, although the key was wrong."""
    r = Reading(1, failover=False)
    sent = r.paged(2)
    for status in statuses:
        r.me.nics[0].finish(1, Status[status])
    r.me.turn(2)

    with pytest.raises(FabricError, match="REMOTE_KEY: as scripted"):
        sent.result()


def test_without_failover_nothing_is_posted_again() -> None:
    """EngineOptions(failover=False) promises that a request fails at once."""
    r = Reading(failover=False)
    sent = r.paged(2)
    r.me.nics[0].finish(1, Status.FLUSHED)
    r.me.nics[1].finish()
    r.me.turn(2)

    assert sent.failed
    assert 2 == len(r.rows())


def test_a_cancel_settles_when_no_nic_holds_a_row(r) -> None:
    """Memory of a cancelled read goes elsewhere at once."""
    r.me.nics[0].room = 1
    r.me.nics[1].room = 0
    sent = r.paged(8, imm=7)
    sent.cancel()
    r.me.turn(2)
    assert not sent.finished
    assert 1 == r.mr.inflight
    r.me.nics[0].finish()
    r.me.turn()

    with pytest.raises(Cancelled):
        sent.result()
    assert 0 == r.mr.inflight
    assert 1 == len(r.rows())
    assert (8, 1) == (sent.stats().rows_dropped, sent.stats().rows_back)


def test_a_cancel_of_a_posted_read_stops_the_immediate(r) -> None:
    """The reader gave the read up: the owner must not take its memory for used."""
    sent = r.paged(2, imm=7)
    sent.cancel()
    r.me.turn()
    for nic in r.me.nics:
        nic.finish()
    r.me.turn(2)

    with pytest.raises(Cancelled):
        sent.result()
    assert 2 == len(r.rows())


def test_close_ends_reads(r) -> None:
    """A read that is open at close() would never settle; a retry would go to a closed NIC."""
    r.me.nics[0].room = 1
    one, two = r.paged(8, imm=7), r.paged(2)
    r.me.engine.close()

    assert one.failed
    assert two.failed
    assert len(r.rows()) == sum(s.stats().rows_posted for s in (one, two))


def test_memory_of_a_read_cannot_be_deregistered(r) -> None:
    """A NIC would write to memory that is somebody else's."""
    sent = r.paged(2)
    with pytest.raises(BusyError, match="in use by 1 transfers"):
        r.me.engine.deregister(r.mr)
    for nic in r.me.nics:
        nic.finish()
    r.me.turn()
    assert sent.ok
    r.me.engine.deregister(r.mr)


def test_rights_are_checked_with_their_names(r) -> None:
    """A wrong right is found at the call that is wrong, not as REMOTE_KEY."""
    me, owner = r.me.engine, r.owner.engine
    private, shut = owner.reg_mr(memory(64))[1], owner.reg_mr(memory(64), access=Access.SOURCE)[1]
    source, _ = me.reg_mr(memory(64), access=Access.SOURCE)
    for desc in (private, shut):
        with pytest.raises(BadRequest, match=r"registered without Access\.READABLE"):
            me.submit_single_read(8, (desc, 0), (r.mr, 0))
    with pytest.raises(BadRequest, match=r"without Access\.TARGET; peers may not write there"):
        me.submit_single_write(8, (r.mr, 0), (r.desc, 0))
    for _ in range(2):  # what reads have resolved is no target either
        me.submit_single_read(8, (r.desc, 0), (r.mr, 0))
        with pytest.raises(BadRequest, match=r"without Access\.TARGET"):
            me.submit_barrier([r.desc], 1)
    with pytest.raises(BadRequest, match=r"bytes are read into memory of Access\.SINK"):
        me.submit_single_read(8, (r.desc, 0), (source, 0))
    with pytest.raises(BadRequest, match="access=.* is no right"):
        me.reg_mr(memory(64), access=Access(0))


def test_a_backend_without_reads_says_why() -> None:
    """A silent fallback to writes is not possible, and a hang is worse."""
    plain: Scripted = scripted(1, name="plain")
    with pytest.raises(UsageError, match="has no reads: this backend does not offer them"):
        plain.engine.reg_mr(memory(64), access=Access.READABLE)
    mr, desc = plain.engine.reg_mr(memory(64))
    with pytest.raises(
        UsageError, match="submit_single_read: NIC plain/0 of backend 'script' has no"
    ):
        plain.engine.submit_single_read(8, (desc, 0), (mr, 0))


def test_the_backlog_is_limited() -> None:
    """Reads without end would fill the reader's memory."""
    r = Reading(backlog_rows_max=10)
    for nic in r.me.nics:
        nic.room = 0
    r.paged(8)
    with pytest.raises(BusyError, match="8 rows wait for NICs already, 3 more"):
        r.paged(3)


def test_reports_know_reads(r) -> None:
    """The report of a stall must show the reads that it waits for."""
    sent = r.paged(8, imm=7)

    assert "paged read of 9 rows, 32768 bytes from owner: pending; 8 posted" in repr(sent)
    report = r.me.engine.stall_report()
    assert "NIC 0 (me/0, alive): 0 rows outstanding, 4 reads" in report
    assert "1 rows wait for a NIC" in report
    assert "reads 1048576" in r.me.engine.explain()
