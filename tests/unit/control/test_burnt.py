"""Immediates under which something failed: burnt at both ends, and counted for nobody."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import tep
from tep.base.api import EngineOptions, Pages, ScatterDst
from tep.base.errors import BurntImm, ClosedError, FabricError
from tep.core import imm as imm_table
from tep.sim.cluster import Cluster
from tep.sim.faults import Chaos
from tests.support.couple import BEAT, LOST, pass_time, regions_of
from tests.support.couple import pair as couple
from tests.support.pairs import pair
from tests.support.script import scripted
from tests.support.senders import PAGES, World, world


def unexpected(w: World, imm: int = 7) -> int:
    """Immediates at c that no expectation has used."""
    return dict(w.c.stats().imms_unexpected).get(imm, 0)


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
        w.rest()
        assert 0 == unexpected(w), "it counts for no other attempt"


def test_each_expectation_that_is_stated_later_fails_at_once() -> None:
    """The news may be quicker than the reader, and a reader may ask twice."""
    with world() as w:
        w.cut_off(w.write(w.a))
        w.rest()
        for count in (1, PAGES):
            with pytest.raises(FabricError, match=r"cancelled; the immediate is burnt.*remove_imm"):
                w.c.expect_imm_count(7, count).wait(1)
        assert (1, 1) == (w.a.stats().imms_burnt, w.c.stats().imms_burnt)


VERBS: dict[str, Callable[[World], object]] = {
    "paged": lambda w: w.write(w.a),
    "an imm a row": lambda w: w.write(w.a, np.arange(PAGES, dtype=np.uint32)),
    "single": lambda w: w.a.submit_single_write(8, (w.mrs["a"], 0), (w.desc, 0), 7),
    "scatter": lambda w: w.a.submit_scatter(w.mrs["a"], [ScatterDst(8, 0, (w.desc, 0))], 7),
    "barrier": lambda w: w.a.submit_barrier([w.desc], 7),
    "prepared": lambda w: w.a.prepare_barrier([w.desc]).submit(7),
    "read": lambda w: w.a.submit_single_read(8, (w.desc, 0), (w.mrs["a"], 0), 7),
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_uses_a_burnt_immediate(verb: str) -> None:
    """Its rows would count for nobody, and their reader would wait for its whole timeout."""
    with world(readable=True) as w:
        before = VERBS[verb](w)
        w.rest()
        w.cut_off(w.write(w.a, 7))
        with pytest.raises(BurntImm, match="0x7 is burnt at c.*it was cancelled.*remove_imm"):
            VERBS[verb](w)
        assert before.ok


def test_a_transfer_that_was_queued_before_the_failure_fails() -> None:
    """It was submitted in good faith, but nothing of it may be posted any more."""
    with world() as w:
        first = w.write(w.a)
        first.cancel()  # both commands are taken in the same step
        second, prepared = w.write(w.a), w.a.prepare_barrier([w.desc]).submit(7)
        w.rest()
        assert first.cancelled
        for late in (second, prepared):
            assert isinstance(late.error, BurntImm)
            assert 0 == late.stats().rows_posted
        assert 0 == unexpected(w)


def test_a_fresh_immediate_and_another_target_are_not_concerned() -> None:
    """An immediate is burnt for a pair of engines, not for the world."""
    with world() as w:
        _, there = w.b.reg_mr(np.zeros(64, np.uint8))
        w.cut_off(w.write(w.a))
        w.rest()
        assert w.write(w.a, 8).wait().ok
        assert w.c.expect_imm_count(8, PAGES).wait().ok
        assert w.a.submit_single_write(8, (w.mrs["a"], 0), (there, 0), 7).wait().ok
        assert w.b.expect_imm_count(7, 1).wait().ok


def test_an_immediate_that_senders_share_is_burnt_for_all_of_them() -> None:
    """The receiver cannot tell one sender's rows from the other's."""
    with world() as w:
        both = w.c.expect_imm_count(7, 2 * PAGES)
        w.cut_off(w.write(w.a))
        with pytest.raises(FabricError, match=r"a .epoch 1. gave it up"):
            both.wait()
        assert w.write(w.b).wait().ok
        w.rest()
        with pytest.raises(FabricError, match=r"a .epoch 1. gave it up"):
            w.c.expect_imm_count(7, 1, sender=w.b.main_address).wait(1)
        assert PAGES == w.c.remove_imm(7), "what came since then is dropped with the record"


@pytest.mark.parametrize("expected", [3, 4])
@pytest.mark.parametrize("late", [False, True])
def test_of_layers_that_share_an_immediate_one_is_cancelled(expected: int, *, late: bool) -> None:
    """A sum of layers was complete without the bytes of one, or waited for its whole timeout.

    Layer 2 is cancelled while it is queued, and the sender goes on with the others at once.
    """
    with world() as w:
        waits = None if late else w.c.expect_imm_count(7, expected * PAGES)
        more: list[BaseException] = []

        def goes_on(_: object) -> None:
            with pytest.raises(BurntImm) as caught:
                w.write(w.a)
            more.append(caught.value)

        first = w.write(w.a)
        second = w.write(w.a, on_done=goes_on)
        second.cancel()
        third = w.write(w.a)
        w.rest()
        waits = waits or w.c.expect_imm_count(7, expected * PAGES)
        with pytest.raises(FabricError, match="gave it up: it was cancelled"):
            waits.wait(1)
        assert (True, True, 1) == (first.ok, isinstance(third.error, BurntImm), len(more))


def test_what_an_expectation_used_up_stays_used() -> None:
    """A reader that takes pages two by two has read the first ones, and keeps them."""
    with world() as w:
        twos = [w.c.expect_imm_count(7, 2) for _ in range(PAGES // 2)]
        came = w.cut_off(w.write(w.a))
        w.rest()
        done = sum(two.ok for two in twos)
        assert 0 < done <= came // 2
        assert PAGES // 2 - done == sum(two.failed for two in twos)


@pytest.mark.parametrize("ends", ["both", "sender", "receiver"])
def test_an_immediate_is_used_again_once_both_ends_have_removed_it(ends: str) -> None:
    """Only both ends together can know that no row is in flight any more."""
    with world() as w:
        w.cut_off(w.write(w.a))
        w.rest()
        if ends != "receiver":
            w.a.remove_imm(7)
        if ends != "sender":
            w.c.remove_imm(7)
        if ends == "receiver":
            with pytest.raises(BurntImm):
                w.write(w.a)
            return
        assert w.write(w.a).wait().ok
        again = w.c.expect_imm_count(7, PAGES)
        w.rest()
        assert (ends == "both", ends == "sender") == (again.ok, again.failed)


def test_claimed_immediates_are_left_alone_by_their_receiver() -> None:
    """on_imm has handed them out already; there is no count to correct. The sender burns them."""
    with world() as w:
        seen: list[int] = []
        w.c.on_imm(range(7, 8), lambda _, count: seen.append(count))
        came = w.cut_off(w.write(w.a))
        w.rest()
        assert came == sum(seen)
        assert (1, 0) == (w.a.stats().imms_burnt, w.c.stats().imms_burnt)
        with pytest.raises(BurntImm):
            w.write(w.a)


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


def test_every_target_of_a_failed_scatter_is_told() -> None:
    """A target that has counted its slice keeps it; one that still waits must be notified."""
    with world() as w:
        _, there = w.b.reg_mr(np.zeros(64, np.uint8))
        w.cluster.kill_nic("c", 0)
        w.cluster.kill_nic("c", 1)
        dsts = [ScatterDst(16, 0, (there, 0)), ScatterDst(16, 0, (w.desc, 0))]
        good, more = w.b.expect_imm_count(9, 1), w.b.expect_imm_count(9, 1)
        sent = w.a.submit_scatter(w.mrs["a"], dsts, 9)
        with pytest.raises(FabricError):
            sent.wait()
        w.rest()
        assert (True, "PEER_FAILED") == (good.ok, more.error.code)


def test_of_many_immediates_all_that_are_open_fail() -> None:
    """Pages that were counted are complete; of the others nobody knows."""
    with world() as w:
        imms = np.arange(100, 100 + PAGES, dtype=np.uint32)
        waits = [w.c.expect_imm_count(imm, 1) for imm in imms.tolist()]
        came = w.cut_off(w.write(w.a, imms[::-1]))
        w.rest()
        assert 0 < sum(wait.ok for wait in waits) <= came
        assert PAGES == sum(wait.ok or wait.failed for wait in waits)
        assert PAGES == w.a.stats().imms_burnt == w.c.stats().imms_burnt


def test_no_transfer_of_its_kind_needs_an_immediate() -> None:
    """One without any burns nothing, and is refused by nothing that is burnt."""
    with world() as w:
        w.cut_off(w.write(w.a, None))
        w.cut_off(w.write(w.a))
        assert w.write(w.a, None).wait().ok
        assert 1 == w.a.stats().imms_burnt


def test_closing_tells_what_it_drops() -> None:
    """An engine that goes away in good order leaves nobody waiting for what it never sent."""
    with pair(sq_depth=2) as p:
        waits = p.b.expect_imm_count(7, 64)
        pages = Pages(range(64))
        p.a.submit_paged_writes(16, (p.mr, pages), (p.desc, pages), 7)
        p.a.driver.turn()
        p.a.close()
        with pytest.raises(FabricError, match="gave it up: the engine was closed"):
            waits.wait(10)


def test_a_backend_without_control_messages_says_so() -> None:
    """Its users have to tell their receivers themselves."""
    own = scripted()
    with own.engine as engine:
        assert "peers are not told of transfers that fail, because the" in engine.explain()


# ---------------------------------------------------------------------- lost senders


def test_counts_of_a_lost_sender_serve_no_other() -> None:
    """A second sender's count was complete, with pages missing that the first had been counted for.

    Found by a review: the arrivals of a sender that died stayed.
    """
    with Cluster(3, 2, chaos=Chaos.calm(sq_depth=2), seed=5) as cluster:
        w = World(cluster)
        w.c.watch_peer(w.a.main_address, every_s=BEAT, lost_after_s=LOST)
        got = w.c.expect_imm_count(7, PAGES, sender=w.a.main_address)
        sent = w.write(w.a)
        cluster.env.run_until(lambda: 0 < got.arrived < PAGES // 2)
        for nic in range(2):
            cluster.kill_nic("a", nic)
        with pytest.raises(FabricError, match="its sender a was lost") as caught:
            got.wait(1)
        assert "PEER_LOST" == caught.value.code
        assert 0 < got.arrived < PAGES
        assert w.write(w.b).wait(1).ok
        with pytest.raises(FabricError, match="its sender a was lost.*the immediate is burnt"):
            w.c.expect_imm_count(7, PAGES, sender=w.b.main_address).wait(1)
        assert w.write(w.b, 8).wait(1).ok
        assert w.c.expect_imm_count(8, PAGES, sender=w.b.main_address).wait(1).ok
        assert not sent.ok


def test_what_came_before_its_sender_was_lost_is_still_here() -> None:
    """All of it is here: a reader that asks for it in two parts gets both."""
    cluster, _ = couple()
    with cluster:
        a, b = cluster.engines
        regions, who = regions_of(b, a), b.main_address
        a.watch_peer(who, every_s=BEAT, lost_after_s=LOST)
        pages = Pages(range(8))
        b.submit_paged_writes(64, (regions[0], pages), (regions[1], pages), 7).wait()
        cluster.fabric.crash("b")
        pass_time(cluster, 100)
        for count in (3, 5):
            assert a.expect_imm_count(7, count, sender=who).wait().ok
        with pytest.raises(FabricError, match="its sender b is lost; 0 of 1 came"):
            a.expect_imm_count(7, 1, sender=who).wait()


# ---------------------------------------------------------------------- what is remembered


def test_the_record_of_a_removed_peer_is_dropped() -> None:
    """Peers come and go for months, and each fails now and then."""
    with world() as w:
        w.cut_off(w.write(w.a))
        w.rest()
        assert 1 == w.a.stats().imms_burnt
        w.a.remove_peer(w.c.main_address).wait()
        assert 0 == w.a.stats().imms_burnt


def test_beyond_the_bound_the_largest_owner_forgets_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A record without bound fills the memory; one that forgets silently promises too much."""
    monkeypatch.setattr(imm_table, "BURNT_MAX", 10)
    with world() as w:
        w.cut_off(w.write(w.b, 6))
        w.cut_off(w.write(w.a, np.arange(100, 100 + PAGES, dtype=np.uint32)))
        w.rest()
        for engine, known in ((w.a, 10), (w.c, 10)):
            stats = engine.stats()
            assert stats.imms_burnt <= known
            assert 0 < stats.imms_burnt_forgotten
        assert "burnt immediates were forgotten: too many" in w.a.stall_report()
        assert "burnt immediates were forgotten: too many" in w.a.explain()
        with pytest.raises(FabricError, match="burnt"):
            w.c.expect_imm_count(6, 1).wait(1)  # the other sender's is not forgotten


def test_of_a_record_the_largest_owner_loses_the_older_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that fails ever new immediates must not push out the records of other peers."""
    monkeypatch.setattr(imm_table, "BURNT_MAX", 4)
    record: imm_table.Burnt[int, str] = imm_table.Burnt()
    record.add("small", 1, "first")
    record.add("small", 1, "second")
    for imm in range(10, 14):
        record.add("large", imm, "why")
    assert ({1: "first", 12: "why", 13: "why"}, 2) == (record.why, record.forgotten)
    record.remove(1)
    record.remove(99)
    assert ["large"] == list(record._owned)
    record.drop("large")
    record.drop("nobody")
    assert ({}, [], 2) == (record.why, list(record._owned), record.forgotten)


def test_what_a_closed_engine_had_burnt_refuses_nothing_else() -> None:
    """The reason that a closed engine gives is that it is closed."""
    with world() as w:
        w.cut_off(w.write(w.a))
        w.a.close()
        with pytest.raises(ClosedError):
            w.write(w.a)


def test_an_engine_without_failover_burns_as_well() -> None:
    """Rows of a NIC that died may have landed: nobody asks, so nobody counts them."""
    with world(failover=False) as w:
        waits = w.c.expect_imm_count(7, PAGES)
        sent = w.write(w.a)
        w.cluster.env.run_until(lambda: 0 < sent.stats().rows_back < PAGES // 2)
        w.cluster.kill_nic("a", 0)
        with pytest.raises(FabricError, match="gave it up: .*NIC_DOWN"):
            waits.wait(1)
        with pytest.raises(BurntImm):
            w.write(w.a)


def test_options_are_of_the_engine() -> None:
    """There is no way to keep failures to oneself: a count must have all its bytes."""
    with pytest.raises(TypeError):
        # A type checker refuses it as well.
        EngineOptions(tell_failures=False)  # type: ignore[call-arg]
    assert not hasattr(tep, "InDoubt")
