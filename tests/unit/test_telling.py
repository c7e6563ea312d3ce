"""Transfers that fail or are cancelled tell their targets, and a retry starts from zero."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

import tep
from tep.api import Pages, Routing, ScatterDst
from tep.control.channel import Channel
from tep.control.telling import Telling
from tep.errors import FabricError
from tep.sim.cluster import Cluster
from tep.sim.faults import Chaos
from tep.sim.faults_at import revoke
from tep.units import PS_PER_NS
from tests.support.pairs import pair
from tests.support.script import scripted
from tests.support.senders import PAGE, PAGES, World, world


def test_an_expectation_of_a_cancelled_transfer_fails_at_once() -> None:
    """It would wait for its whole timeout, while its sender lives and knows better."""
    with world() as w:
        expectation = w.c.expect_imm_count(7, PAGES)
        came = w.cut_off(w.write(w.a))
        began_s = w.c.driver.now_s()
        with pytest.raises(FabricError, match=r"a .epoch 1. gave it up: it was cancelled") as found:
            expectation.wait()

        assert w.c.driver.now_s() - began_s < 1e-3
        assert ("PEER_FAILED", "a (epoch 1)") == (found.value.code, found.value.peer)
        assert f"{came} of {PAGES} came" in str(found.value)
        assert came == expectation.arrived
        assert 7 not in dict(w.c.stats().imms_unexpected), "it counts for no other attempt"


def test_a_retry_counts_from_zero() -> None:
    """What came of the first attempt would release the reader before the second is there."""
    with world() as w:
        w.c.expect_imm_count(7, PAGES)
        w.cut_off(w.write(w.a))
        again = w.write(w.a)  # its target has not heard of the failure yet
        assert "1 transfers wait for that" in w.a.stall_report() or not again.finished
        w.rest()
        assert again.ok
        assert w.c.expect_imm_count(7, PAGES).wait().ok
        assert 7 not in dict(w.c.stats().imms_unexpected)


def test_what_came_before_sums_were_pruned_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruned sums say nothing of it, and the retry's reader would be released early."""
    monkeypatch.setattr("tep.core.sums.PRUNE_AT", 0)
    with world() as w:
        w.c.expect_imm_count(7, PAGES)
        assert 0 < w.cut_off(w.write(w.a))
        w.rest()
        assert 7 not in dict(w.c.stats().imms_unexpected)


def test_a_list_that_got_lost_is_sent_once_another_one_arrives() -> None:
    """It was booked for no time, since the other's answer was awaited: its reader hung."""
    with world() as w:
        asked: list[tuple] = []
        ask = Channel.ask
        with mock.patch.object(Channel, "ask", lambda *those: asked.append(those)):
            waits = [w.c.expect_imm_count(imm, PAGES) for imm in (7, 8)]
            for imm in (7, 8):
                w.cut_off(w.write(w.a, imm))
                w.rest()
        (*_, lost), second = asked
        lost("nobody answered")
        ask(*second)
        w.a.driver.kick()
        w.rest()
        assert [True, True] == [wait.failed for wait in waits]


def test_news_that_was_given_up_goes_with_the_next_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that was cut off, and of which no row was lost, would never be told."""
    monkeypatch.setattr("tep.control.telling._TRIES_MAX", 0)
    with world() as w:
        wait = w.c.expect_imm_count(7, PAGES)
        with mock.patch.object(Channel, "ask", lambda *those: those[-1]("nobody answered")):
            w.cut_off(w.write(w.a))
            w.rest()
        assert not wait.finished
        w.write(w.a, 9)
        w.rest()
        assert wait.failed


def test_bytes_that_may_come_late_are_fenced_off_before_a_retry() -> None:
    """A row that lost its source's key brings no immediate, but perhaps bytes, over the retry's."""
    with world() as w:
        w.cluster.at(0, revoke("a", 0))
        sent = w.write(w.a)
        w.rest()
        assert sent.error.code == "LOCAL_KEY"
        doubtful = sent.doubtful_paths()
        w.mrs["a"], _ = w.a.reg_mr(np.ones(PAGE * PAGES, np.uint8))
        w.write(w.a).wait()
        assert [1] * len(doubtful) == [path.fences for path in doubtful]
        assert doubtful
        w.rest()
        assert all(path.is_up for path in doubtful)
        assert not sent.in_doubt


def test_an_expectation_that_is_stated_later_fails_once() -> None:
    """Nobody can tell a late reader of the first attempt from one of the second: it asks again."""
    with world() as w:
        w.cut_off(w.write(w.a))
        w.rest()
        with pytest.raises(FabricError, match="it was cancelled"):
            w.c.expect_imm_count(7, PAGES).wait()
        assert w.write(w.a).wait().ok
        assert w.c.expect_imm_count(7, PAGES).wait().ok


def test_a_retry_that_has_begun_is_not_failed() -> None:
    """The word about the first attempt would end the second, of which all has come."""
    with world() as w:
        w.cut_off(w.write(w.a))
        assert w.write(w.a).wait().ok
        w.rest()
        assert w.c.expect_imm_count(7, PAGES).wait().ok


def test_counts_that_several_senders_share_stay_right() -> None:
    """One sender fails: who waits for both learns of it, and what the other sent still counts."""
    with world() as w:
        both = w.c.expect_imm_count(7, 2 * PAGES)
        w.cut_off(w.write(w.a))
        assert w.write(w.b).wait().ok
        with pytest.raises(FabricError, match=r"a .epoch 1. gave it up"):
            both.wait()
        w.rest()
        assert dict(w.c.stats().imms_unexpected).get(7, 0) == PAGES, "those of b"
        again = w.c.expect_imm_count(7, 2 * PAGES)
        assert w.write(w.a).wait().ok
        assert again.wait().ok
        assert 7 not in dict(w.c.stats().imms_unexpected)


def test_what_an_expectation_used_up_stays_used() -> None:
    """A reader that takes pages by tens has read the first ten: they are not taken from others."""
    with world() as w:
        tens = [w.c.expect_imm_count(7, 2) for _ in range(PAGES // 2)]
        came = w.cut_off(w.write(w.a))
        w.rest()
        assert came // 2 == sum(ten.ok for ten in tens)
        assert PAGES // 2 - came // 2 == sum(ten.failed for ten in tens)
        assert 7 not in dict(w.c.stats().imms_unexpected)


@pytest.mark.parametrize("failover", [True, False])
def test_a_list_says_how_many_came_and_how_many_may_come(*, failover: bool) -> None:
    """A retry that does not wait for rows that may come late is taken for them, or they for it."""
    asked: list[tuple] = []
    with world(failover=failover) as w:
        sent = w.write(w.a)
        w.cluster.env.run_until(lambda: 0 < sent.stats().rows_back < PAGES // 2)
        with mock.patch.object(Channel, "ask", lambda *those: asked.append(those)):
            if failover:
                sent.cancel()
            else:
                w.cluster.kill_nic("a", 0)
            w.rest()
            assert (
                "c has not been told of 0 immediates that failed, and of 1 lists of them; 0 "
                in (w.a.stall_report())
            )
        came = sent.stats().rows_back - sent.stats().rows_failed
        ((_, _, message, *_),) = asked
        (entry,) = message(1).imms
        assert (7, 1, PAGES, came) == entry[:4]
        assert ((0, came) if failover else (sent.stats().rows_failed, -1)) == entry[4:]
        assert sent.failed or sent.cancelled


def test_immediates_beyond_the_bound_are_told_to_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that is gone for an hour must not fill the memory; the operator learns of it."""
    monkeypatch.setattr("tep.control.telling._IMMS_MAX", 2)
    with world() as w:
        waits = [w.c.expect_imm_count(imm, 1) for imm in range(PAGES)]
        assert "not told to peers" not in w.a.stall_report()
        w.write(w.a, np.arange(PAGES, dtype=np.uint32)).cancel()
        w.rest()
        assert 2 == sum(wait.failed for wait in waits)
        lost = f"{PAGES - 2} immediates that failed are not told to peers: there were too many"
        assert lost in w.a.stall_report()
    told = [r.getMessage().split()[0] for r in caplog.records if "not told" in r.getMessage()]
    assert ["1", "2", "4", "8", "16", "32"] == told


def test_a_peer_that_does_not_answer_is_asked_when_it_is_due() -> None:
    """Each transfer to it would send the lists again, and use up all tries in a moment."""
    asked: list[tuple] = []

    def unheard(*those: object) -> None:
        asked.append(those)
        those[-1]("nobody answered")

    with world() as w, mock.patch.object(Channel, "ask", unheard):
        w.cut_off(w.write(w.a))
        for imm in (8, 9):
            w.write(w.a, imm).wait()
        assert 1 == len(asked)
        began_s = w.a.driver.now_s()
        with pytest.raises(FabricError, match=r"transfers with .* failed \(it was cancelled\): n"):
            w.write(w.a).wait()
        assert 2 == len(asked), "one that waits for the answer asks"
        assert w.a.driver.now_s() - began_s < 1e-6


@pytest.mark.parametrize(("each", "lists"), [(1, 8), (1, 1), (2, 1)])
def test_of_many_immediates_only_those_that_are_missing_fail(
    each: int, lists: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that arrived are complete, and their readers right; what came of the others is not.

    All are told of, even if a peer takes one list after the other.
    """
    monkeypatch.setattr("tep.control.telling._LISTS_MAX", lists)
    monkeypatch.setattr("tep.control.telling._WINDOW", lists)
    with world() as w:
        imms = np.arange(100, 100 + PAGES // each, dtype=np.uint32)
        waits = [w.c.expect_imm_count(imm, each) for imm in imms.tolist()]
        came = w.cut_off(w.write(w.a, np.tile(imms[::-1], each)))
        w.rest()
        assert came // each >= sum(wait.ok for wait in waits) >= (came if each == 1 else 0)
        assert len(imms) == sum(wait.ok or wait.failed for wait in waits)
        assert {0} == {dict(w.c.stats().imms_unexpected).get(imm, 0) for imm in imms.tolist()}


def test_a_scatter_tells_only_whom_it_did_not_reach() -> None:
    """Whose slice arrived has nothing to fear."""
    with world() as w:
        _, there = w.b.reg_mr(np.zeros(64, np.uint8))
        w.cluster.kill_nic("c", 0)
        w.cluster.kill_nic("c", 1)
        dsts = [ScatterDst(16, 0, (there, 0)), ScatterDst(16, 0, (w.desc, 0))]
        sent = w.a.submit_scatter(w.mrs["a"], dsts, 9)
        good = w.b.expect_imm_count(9, 1)
        with pytest.raises(FabricError):
            sent.wait()
        assert good.wait().ok
        assert not w.b._worker.failures.broken


@pytest.mark.parametrize("how", ["options", "routing"])
def test_peers_are_not_told_if_that_is_not_wanted(how: str) -> None:
    """A protocol of its own counts what arrived, and would count wrongly."""
    kw = {"tell_failures": False}
    with world(**(kw if how == "options" else {})) as w:
        waits = w.c.expect_imm_count(7, PAGES)
        routing = {"routing": Routing(**kw)} if how == "routing" else {}
        came = w.cut_off(w.write(w.a, **routing))
        w.rest()
        assert not waits.finished
        assert came == waits.arrived
        told = "peers are not told of transfers that fail, because EngineOptions("
        assert (how == "options") == (told in w.a.explain())


def test_a_backend_without_control_messages_says_so() -> None:
    """Its users have to tell their receivers themselves."""
    with scripted().engine as engine:
        assert "peers are not told of transfers that fail, because the" in engine.explain()


def test_claimed_immediates_are_left_alone() -> None:
    """on_imm has handed them out already; there is no count to correct."""
    with world() as w:
        seen = []
        w.c.on_imm(range(7, 8), lambda _, count: seen.append(count))
        came = w.cut_off(w.write(w.a))
        w.rest()
        assert came == sum(seen)
        assert not w.c._worker.failures.broken


def test_a_failed_read_tells_the_owner() -> None:
    """Its memory was not read, and nobody will say that it was."""
    with pair(sq_depth=2) as p:
        mr, _ = p.a.reg_mr(np.zeros(1 << 12, np.uint8))
        read = p.b.expect_imm_count(5, 1)
        pages = Pages(range(64))
        sent = p.a.submit_paged_reads(64, (p.desc, pages), (mr, pages), 5)
        sent.cancel()
        p.settle(sent, read)
        assert (True, True) == (sent.cancelled, read.failed)


def test_close_says_what_it_drops() -> None:
    """An engine that goes away in good order leaves nobody waiting for what it never sent."""
    with pair(sq_depth=2) as p:
        waits = p.b.expect_imm_count(7, 64)
        pages = Pages(range(64))
        p.a.submit_paged_writes(16, (p.mr, pages), (p.desc, pages), 7)
        p.a.driver.turn()
        p.a.close()
        with pytest.raises(FabricError, match="gave it up: the engine was closed"):
            waits.wait(10)


def test_what_forgotten_engines_gave_up_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines come and go; what each of them had given up would stay for ever."""
    monkeypatch.setattr("tep.control.failures._ENGINES_MAX", 1)
    with world() as w:
        for engine, imm in ((w.a, 7), (w.b, 8)):
            w.cut_off(w.write(engine, imm))
            w.cut_off(w.write(engine, 9))
            w.rest()
            assert [imm, 9] == list(w.c._worker.failures.broken)
            with pytest.raises(FabricError, match="gave it up"):  # once
                w.c.expect_imm_count(9, PAGES).wait()
        assert () == w.c.stats().control_dropped


@pytest.mark.parametrize("after_ns", range(0, 500, 50))
def test_who_is_removed_while_it_is_told_holds_up_nothing(after_ns: int) -> None:
    """The news is lost, and nobody is left to tell: a retry that was held goes on, and ends."""
    with world(probe_first_s=20e-6, probe_max_s=40e-6) as w:
        w.cut_off(w.write(w.a))
        w.cluster.restart("c")
        again = w.write(w.a)
        w.cluster.env.run(until=w.cluster.env.now + after_ns * PS_PER_NS)
        removal = w.a.remove_peer(w.c.main_address)
        w.rest()

        assert again.finished, again.describe()
        assert removal.ok, removal.describe()


def test_a_lease_is_over_only_after_a_retry_that_waits_under_it() -> None:
    """Its owner was told that nothing under the lease is open, while a retry was held for the news.

    Found by a search of drawn runs. Nothing of the retry was written; it ended later.
    """
    with world() as w:
        w.cut_off(w.write(w.a))
        grant = w.c.lease(w.mr, w.a.main_address, for_s=1)
        pages = Pages(range(PAGES))
        again = w.a.submit_paged_writes(PAGE, (w.mrs["a"], pages), (grant.lease, pages), 7)
        ended = []
        grant.over.add_done_callback(lambda _: ended.append(again.finished))
        grant.revoke()
        w.rest()

        assert [True] == ended
        assert 0 == again.stats().rows_back
        with pytest.raises(tep.LeaseError, match="asked back by its owner"):
            again.wait()


def test_rows_that_wait_leave_a_path_that_is_to_be_fenced() -> None:
    """A retry has a path fenced, and rows of other transfers waited for room on it.

    Found by a search of drawn runs. The fence stopped them; one of them was taken for a row that
    had landed there before, and its transfer failed.
    """
    with world() as w:
        sent = w.write(w.a)
        w.cluster.env.run_until(lambda: 0 < sent.stats().rows_back < PAGES // 2)
        group = w.a._worker.group
        path = w.a._peers.link(w.c.main_address, "test").path(0, 0)
        waits = [b for b in group.batches.values() if b.domain == 0 and b.at < b.stop]
        assert any(b.target(row)[1] == 0 for b in waits for row in range(b.at, b.stop))
        group.suspect(path)
        waits = [b for b in group.batches.values() if b.domain == 0 and b.at < b.stop]
        assert not any(b.target(row)[1] == 0 for b in waits for row in range(b.at, b.stop))
        w.rest()
        assert sent.ok


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_retry_cannot_overtake_the_news(seed: int, prepared: bool) -> None:
    """What came of the retry is not taken for what had come when its sender gave up.

    Nothing of the first transfer was posted, so there is nothing to tell apart; but the news and
    the rows of the retry would be under way together, and who expects the immediate afterwards is
    to get it.
    """
    with Cluster(3, 2, chaos=Chaos(), seed=seed) as cluster:
        w = World(cluster)
        pages = Pages(range(PAGES))
        ready = w.a.prepare_paged_writes(PAGE, (w.mrs["a"], pages), (w.desc, pages))
        if prepared:  # the first submit learns how the rows are dealt out
            ready.submit(8).wait()
        first = w.write(w.a)
        first.cancel()
        again = ready.submit(7) if prepared else w.write(w.a)
        w.rest()
        assert first.cancelled
        assert 0 == first.stats().rows_back
        again.wait()

        w.c.expect_imm_count(7, PAGES).wait()
        assert 7 not in dict(w.c.stats().imms_unexpected)


def test_a_retry_waits_for_each_list_that_has_its_immediate() -> None:
    """A list about another immediate was sent before: the news would overtake the retry."""
    with world() as w, mock.patch.object(Channel, "ask"):
        for imm in (7, 8):
            w.cut_off(w.write(w.a, imm))
            w.rest()
        again = w.write(w.a, 8)
        w.rest()
        assert 0 == again.stats().rows_posted


def test_neighbours_with_other_numbers_have_entries_of_their_own() -> None:
    """One of them would be taken back as often as the other, and lists must fit into a message."""
    with world() as w, mock.patch.object(Channel, "ask") as ask:
        half, values = PAGES // 2 - 2, np.array([6, 7, 8, 9, 10, 12], np.uint32)
        w.write(w.a, np.repeat(values, [1, 1, half, half, 1, 1])).cancel()
        w.rest()
    ((_, message, *_),) = (call.args for call in ask.call_args_list)
    found = [entry[:3] for entry in message(1).imms]
    assert [(6, 2, 1), (8, 2, half), (10, 1, 1), (12, 1, 1)] == found


def test_what_landed_of_doubts_goes_with_the_news_and_its_reason() -> None:
    """What landed late would stay in the count of a retry, and the error would give no reason."""
    with world() as w:
        with mock.patch.object(Telling, "step", return_value=False):
            came = w.cut_off(w.write(w.a))
        telling = w.a._worker.telling
        telling.cleared(w.a._peers.link(w.c.main_address, "test").path(0, 0), {7: 2, 8: 0})
        with mock.patch.object(Channel, "ask") as ask:
            w.a.driver.kick()
            w.rest()
        (call,) = ask.call_args_list
        message = call.args[1](1)
        assert "it was cancelled" == message.reason
        assert [(7, 1, PAGES, came + 2)] == [entry[:4] for entry in message.imms]


def test_close_ends_what_waits_for_news_as_closed() -> None:
    """It would say that a peer could not be told, which is not why it failed."""
    with world() as w, mock.patch.object(Channel, "_post", return_value=False):
        w.cut_off(w.write(w.a))
        again = w.write(w.a)
        w.cluster.env.run(until=w.cluster.env.now + 10**6)
        assert not again.finished
        w.a.close()
        assert isinstance(again.error, tep.errors.ClosedError)
