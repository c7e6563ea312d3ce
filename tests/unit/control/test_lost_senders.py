"""Expectations that name their sender: they end with it, and with nobody else."""

from __future__ import annotations

import pytest

from tep.base.errors import BadDescriptor, FabricError, StaleEpoch
from tep.base.units import PS_PER_US
from tep.control.membership import PeerState
from tep.sim.faults import Clog
from tests.support.couple import BEAT, LOST, kinds, pair, pass_time, regions_of, write


def test_an_expectation_ends_with_its_lost_sender_and_no_other_does() -> None:
    """Whoever only receives from a dead peer would wait until its timeout, and learn no reason."""
    cluster, told = pair()
    with cluster:
        a, b = cluster.engines
        a.watch_peer(b.main_address, every_s=BEAT, lost_after_s=LOST)
        write(b, regions_of(b, a)).wait()  # 8 immediates 7
        who = b.main_address
        waits = [a.expect_imm_count(7, count, sender=who) for count in (9, 8)]
        other = a.expect_imm_count(9, 1)
        order = []
        waits[0].add_done_callback(lambda _: order.append(kinds(told)))
        cluster.fabric.crash("b")
        for waiting in waits:
            with pytest.raises(FabricError, match="its sender b was lost: no answer for") as caught:
                waiting.wait()
            assert ("PEER_LOST", "b") == (caught.value.code, caught.value.peer)
        assert "8 of 9 came" in str(waits[0].error)
        assert [kinds(told)] == order, "told of the loss first"
        assert (0, False) == (dict(a.stats().imms_unexpected).get(7, 0), other.finished)


def test_a_lost_sender_is_refused_until_it_is_back() -> None:
    """A wait for rows that have arrived succeeds; a wait for missing ones must fail at once."""
    cluster, _ = pair()
    with cluster:
        a, b = cluster.engines
        regions, who = regions_of(b, a), b.main_address
        watch = a.watch_peer(who, every_s=BEAT, lost_after_s=LOST)
        write(b, regions).wait()
        for nic in range(2):
            cluster.at(cluster.now_us, Clog("b", nic, 300 * PS_PER_US))
        pass_time(cluster, 100)
        a.expect_imm_count(7, 5, sender=who).wait()
        with pytest.raises(FabricError, match="its sender b is lost; 3 of 8 came"):
            a.expect_imm_count(7, 8, sender=who).wait()
        pass_time(cluster, 500)
        assert PeerState.ALIVE is watch.state
        late = a.expect_imm_count(8, 8, sender=who)
        write(b, regions, imm=8).wait()
        late.wait()


def test_an_expectation_ends_with_the_incarnation_that_it_named() -> None:
    """The next one knows nothing of what the former owed."""
    cluster, _ = pair()
    with cluster:
        a, b = cluster.engines
        old = b.main_address
        a.watch_peer(old, every_s=BEAT, lost_after_s=LOST)
        waiting = a.expect_imm_count(7, 1, sender=old)
        fresh = cluster.restart("b")
        with pytest.raises(FabricError, match="its sender b restarted: a later"):
            waiting.wait()
        a.add_peer_group([fresh.main_address])
        with pytest.raises(StaleEpoch):
            a.expect_imm_count(7, 1, sender=old)
        again = a.expect_imm_count(8, 8, sender=fresh.main_address)
        write(fresh, regions_of(fresh, a), imm=8).wait()
        again.wait()


def test_an_expectation_ends_with_the_removal_of_its_sender() -> None:
    """Nobody would tell of the sender any more; nor may its receiver hold the removal up."""
    cluster, _ = pair()
    with cluster:
        a, b = cluster.engines
        waiting = a.expect_imm_count(7, 1, sender=b.main_address)
        late = a.expect_imm_count(8, 1, sender=b.main_address)
        a.remove_peer(b.main_address).wait()
        for handle in (waiting, late):
            assert "its sender b was removed" in str(handle.error)
        with pytest.raises(BadDescriptor, match="not a NetAddr"):
            a.expect_imm_count(7, 1, sender="b")
