"""Peers that are lost, come back or restart, and their NICs: what a watch says, and who is told."""

from __future__ import annotations

import itertools
import queue
import time
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from tep.base.errors import BadRequest, BusyError, FabricError, StaleEpoch, UsageError
from tep.base.units import PS_PER_US
from tep.control.failover import Failover
from tep.control.membership import PeerChange, PeerState
from tep.control.messages import Pong
from tep.core.path import PathEvent, PathState
from tep.drivers.threads import ThreadDriver
from tep.drivers.turning import TurnDriver
from tep.engine import TransferEngine
from tep.sim.faults import Chaos, Clog, Pause
from tests.support.couple import (
    BEAT,
    LOST,
    QUICK,
    US,
    kinds,
    pair,
    pass_time,
    regions_of,
    write,
)
from tests.support.inside import link_of, peers_of, worker_of
from tests.support.script import scripted


def _ps(us: float) -> int:
    return round(us * PS_PER_US)


# ---------------------------------------------------------------------- heartbeats


def test_a_watched_peer_that_lives_is_alive_and_its_round_trip_known() -> None:
    """A heartbeat that needs the application over there finds a busy peer dead."""
    cluster, told = pair()
    with cluster:
        a, b = cluster.engines
        watch = a.watch_peer(b.main_address, every_s=BEAT, lost_after_s=LOST)
        pass_time(cluster, 1000)
        assert PeerState.ALIVE is watch.state
        assert 0.3 * US < watch.round_trip_s < 5 * US
        assert [] == told
        assert repr(watch).endswith("alive since 0.000000 s)")
        watch.close()
        cluster.env.run()  # nothing is asked any more: the clock runs out of events
        assert repr(watch).endswith("alive since 0.000000 s, closed)")


def test_a_dead_peer_is_lost_in_time_and_once() -> None:
    """Whoever waits for a dead peer longer than it said it would, hangs."""
    cluster, told = pair()
    with cluster:
        a, b = cluster.engines
        watch = a.watch_peer(b.main_address, every_s=BEAT, lost_after_s=LOST)
        pass_time(cluster, 105)
        died_s = cluster.env.now / 1e12
        cluster.fabric.crash("b")
        pass_time(cluster, 1000)
        assert PeerState.LOST is watch.state
        assert [PeerChange.LOST] == kinds(told)
        assert LOST - BEAT <= told[0][0] - died_s <= LOST + BEAT + 1 * US
        assert watch.since_s == pytest.approx(told[0][0], abs=1 * US)


@pytest.mark.parametrize(("us", "changes"), [(15, []), (300, [PeerChange.LOST, PeerChange.BACK])])
def test_a_peer_that_was_cut_off_comes_back(us: float, changes: list[PeerChange]) -> None:
    """A pause shorter than the limit is no loss; a longer one ends in the peer being back."""
    cluster, told = pair()
    with cluster:
        a, b = cluster.engines
        watch = a.watch_peer(b.main_address, every_s=BEAT, lost_after_s=LOST)
        for nic in range(2):
            cluster.at(100, Clog("b", nic, _ps(us)))
        pass_time(cluster, 1000)
        assert changes == kinds(told)
        assert PeerState.ALIVE is watch.state


def test_each_beat_asks_a_peer_of_which_no_nic_can_be_reached() -> None:
    """It is back after one beat, not at the end of a wait that has doubled again and again."""
    cluster, told = pair(options=replace(QUICK, probe_max_s=1))
    with cluster:
        a, b = cluster.engines
        regions = regions_of(a, b)
        a.watch_peer(b.main_address, every_s=BEAT, lost_after_s=LOST)
        for nic in range(2):
            cluster.at(cluster.now_us, Clog("b", nic, _ps(350)))
        write(a, regions)
        pass_time(cluster, 400)
        assert 1 == kinds(told).count(PeerChange.LOST)
        assert 1 == kinds(told).count(PeerChange.BACK)


@pytest.mark.parametrize("at", [103, 107, 109.9])
def test_time_in_which_the_watcher_slept_is_no_silence(at: float) -> None:
    """A process that was stopped would bury all its living peers when it goes on."""
    cluster, told = pair()
    with cluster:
        a, b = cluster.engines
        watch = a.watch_peer(b.main_address, every_s=BEAT, lost_after_s=2 * BEAT)
        for k in range(4):
            cluster.at(at + 100 * k, Pause("a", _ps(17 + 30 * k)))
        pass_time(cluster, 1000)
        assert [] == told
        assert PeerState.ALIVE is watch.state


def test_a_watch_needs_no_particular_nic() -> None:
    """With the first NIC of both sides silent the peer can still be spoken to."""
    cluster, told = pair((2, 2))
    with cluster:
        a, b = cluster.engines
        a.watch_peer(b.main_address, every_s=BEAT, lost_after_s=LOST)
        cluster.at(50, Clog("a", 0))
        pass_time(cluster, 500)
        cluster.at(cluster.now_us, Clog("b", 0))
        pass_time(cluster, 500)
        assert [] == told


def test_a_path_is_asked_for_soon_after_the_rows_on_it_have_ended() -> None:
    """A sender that tries again without pause has rows on it nearly whenever its peer answers."""
    cluster, _ = pair(1, options=replace(QUICK, probe_max_s=1.0))
    with cluster:
        a, b = cluster.engines
        b.watch_peer(a.main_address, every_s=BEAT, lost_after_s=1.0)  # turns both engines
        path = link_of(a, b).path(0, 0)
        with mock.patch.object(Failover, "is_clear", return_value=False):
            path.to(PathEvent.LOST)
            pass_time(cluster, 20)
            worker_of(a).members.peers[path.link].nics[0].wait_ns = 10**9  # it was long silent
            pass_time(cluster, 2000)
            assert not path.is_up
        pass_time(cluster, 50)
        assert path.is_up


def test_a_peer_to_which_every_path_is_shut_is_asked_all_the_same() -> None:
    """It is there, and answers messages; where nobody asks it counts as lost."""
    seldom = replace(QUICK, probe_first_s=1.0, probe_max_s=1.0)  # NICs are asked by the watch alone
    cluster, told = pair(1, options=seldom)
    with cluster:
        a, b = cluster.engines
        a.watch_peer(b.main_address, every_s=BEAT, lost_after_s=LOST)
        pass_time(cluster, 100)
        link = peers_of(a).links["sim", "b"]
        link.path(0, 0).to(PathEvent.LOST)
        pass_time(cluster, 500)
        assert [] == told
        assert not link.closed


def test_a_restart_is_told_once_and_ends_the_watch() -> None:
    """The descriptors of the dead incarnation are worthless; who does not know goes on trying."""
    cluster, told = pair()
    with cluster:
        a, b = cluster.engines
        regions = regions_of(a, b)
        old = b.main_address
        watch = a.watch_peer(old, every_s=BEAT, lost_after_s=LOST)
        write(a, regions).wait()
        pass_time(cluster, 100)
        fresh = cluster.restart("b").main_address
        sent = [write(a, regions) for _ in range(3)]
        pass_time(cluster, 500)
        assert ["STALE_PEER"] * 3 == [transfer.error.code for transfer in sent]
        assert [PeerChange.RESTARTED] == kinds(told)
        assert (PeerState.RESTARTED, True) == (watch.state, watch.closed)
        assert a.watch_peer(old).closed
        a.add_peer_group([fresh])
        pass_time(cluster, 500)
        assert [PeerChange.RESTARTED] == kinds(told)
        with pytest.raises(StaleEpoch):
            a.watch_peer(old)
        assert PeerState.ALIVE is a.watch_peer(fresh).state


def test_a_message_that_meets_a_later_incarnation_tells_of_the_restart() -> None:
    """An engine that only answers others never heard of it."""
    cluster, told = pair()
    with cluster:
        a, b = cluster.engines
        old = b.main_address
        write(a, regions_of(a, b)).wait()
        cluster.restart("b")
        sent = a.submit_send(old, b"late")
        pass_time(cluster, 100)
        assert "STALE_PEER" == sent.error.code
        assert [PeerChange.RESTARTED] == kinds(told)


def test_a_peer_that_has_restarted_is_not_asked_for_its_nics_any_more() -> None:
    """They do not come back, and whoever is there now would be asked for ever."""
    cluster, told = pair((1, 2))
    with cluster:
        a, b = cluster.engines
        regions = regions_of(a, b)
        cluster.at(cluster.now_us, Clog("b", 1))
        write(a, regions).wait()
        assert worker_of(a).members.busy, "NIC 1 is down, and asked whether it is back"
        cluster.restart("b")
        write(a, regions)
        pass_time(cluster, 500)
        assert [PeerChange.NIC_LOST, PeerChange.RESTARTED] == kinds(told)
        assert not worker_of(a).members.busy


def test_a_path_that_fails_after_a_restart_is_not_asked_for() -> None:
    """One row says that the peer has restarted, a later one only that nobody answers."""
    cluster, told = pair((1, 2))
    with cluster:
        a, b = cluster.engines
        regions = regions_of(a, b)
        write(a, regions).wait()
        link = peers_of(a).links["sim", "b"]
        cluster.kill_nic("b", 1)
        write(a, regions, 2)
        pass_time(cluster, 0.05)
        cluster.restart("b")
        pass_time(cluster, 500)
        assert [PeerChange.RESTARTED] == kinds(told)
        assert [(0, 1)] == link.shut()
        assert not worker_of(a).members.busy


def test_a_later_epoch_tells_of_the_restart() -> None:
    """Whoever hears of the new incarnation by other ways must not wait for a row to fail."""
    cluster, told = pair()
    with cluster:
        a, b = cluster.engines
        a.add_peer_group([b.main_address])
        a.add_peer_group([cluster.restart("b").main_address])
        cluster.env.run()
        assert [PeerChange.RESTARTED] == kinds(told)


def test_what_cannot_be_watched_is_refused() -> None:
    """Silence would be taken for a peer in good health."""
    own, other = scripted(1), scripted(1, name="b")
    with pytest.raises(
        UsageError, match="has no control messages between engines; ask the peer by"
    ):
        own.engine.watch_peer(other.engine.main_address)
    cluster, _ = pair()
    with cluster:
        a, b = cluster.engines
        for every_s, lost_after_s in ((0, 1), (-1, 1), (1, 1.9), (1, float("nan"))):
            with pytest.raises(BadRequest):
                a.watch_peer(b.main_address, every_s=every_s, lost_after_s=lost_after_s)
        watch = a.watch_peer(b.main_address)
        with pytest.raises(BusyError, match="watched already"):
            a.watch_peer(b.main_address)
        watch.close()
        a.watch_peer(b.main_address).close()


# ---------------------------------------------------------------------- NICs

FRESH = itertools.count(100)
"""Immediates, since one under which something failed is not used again."""

SAME = itertools.repeat(7)


def flap(cluster, regions, us: float, imms=SAME) -> None:
    """Cut the link of b's NIC 1 while a writes; go on until it has been back for a while."""
    a = cluster.engines[0]
    cluster.at(cluster.now_us, Clog("b", 1, _ps(us)))
    end = cluster.now_us + us + 1500
    while cluster.now_us < end:
        write(a, regions, imm=next(imms)).wait()
        pass_time(cluster, 5)


def rows_to(cluster, name: str, nic: int) -> int:
    """Immediates that came in on a NIC."""
    worker = worker_of(next(e for e in cluster.engines if e.name == name))
    return sum(count for _, count in worker.arrivals[nic].counted.items())


def test_an_old_answer_does_not_bring_a_nic_back() -> None:
    """Its question was sent before the NIC failed: it says nothing of the time after that."""
    cluster, told = pair((2, 2))
    with cluster:
        a, b = cluster.engines
        cluster.at(cluster.now_us, Clog("b", 1))
        write(a, regions_of(a, b)).wait()
        assert [PeerChange.NIC_LOST] == kinds(told)
        for late in (0, int(told[0][0] * 1e9)):
            worker_of(a).members._heard(0, b.main_address.domains[1], Pong(late))
        pass_time(cluster, 5)
        assert [PeerChange.NIC_LOST] == kinds(told)


def test_a_nic_that_is_down_is_asked_over_each_path_in_turn() -> None:
    """One of two paths may be broken: probed over that one alone, the NIC never comes back."""
    cluster, _ = pair((2, 1))
    with cluster:
        a, b = cluster.engines
        a.add_peer_group([b.main_address])
        with mock.patch.object(worker_of(a).channel, "beat") as beat:
            worker_of(a).members.nic_down(peers_of(a).links["sim", "b"], 0)
            for _ in range(4):
                pass_time(cluster, 200)
                worker_of(a).members.step()
        asked = [call.args[2] for call in beat.call_args_list]
        assert {(0, 0), (1, 0)} == set(asked[:2])
        assert asked[:2] == asked[2:4]


def test_each_beat_asks_over_another_path() -> None:
    """A peer whose one path is broken would be lost, though it answers over the other."""
    cluster, _ = pair((2, 1))
    with cluster:
        a, b = cluster.engines
        a.watch_peer(b.main_address, every_s=BEAT, lost_after_s=100 * BEAT)
        with mock.patch.object(worker_of(a).channel, "beat") as beat:
            pass_time(cluster, 6 * BEAT / US)
        asked = [call.args[2] for call in beat.call_args_list]
        assert {(0, 0), (1, 0)} == set(asked[:2])
        assert asked[:2] == asked[2:4]


def test_a_nic_that_flapped_is_used_again() -> None:
    """A cable that was out for a second must not halve a node's bandwidth for good."""
    cluster, told = pair((1, 2))
    with cluster:
        regions = regions_of(*cluster.engines)
        a, _ = cluster.engines
        worker_of(a).group.failover = False  # nothing is fenced
        cluster.at(cluster.now_us, Clog("b", 1, _ps(200)))
        lost = write(a, regions)
        pass_time(cluster, 20)
        assert "UNREACHABLE" == lost.error.code
        assert [(PeerChange.NIC_LOST, 1)] == [event[1:] for event in told]
        for _ in range(10):
            write(a, regions, imm=next(FRESH)).wait()
        assert 0 == rows_to(cluster, "b", 1)
        flap(cluster, regions, 1, FRESH)
        assert [PeerChange.NIC_LOST, PeerChange.NIC_BACK] == kinds(told)
        assert rows_to(cluster, "b", 1) > 10
        # The waits were 20, 40, 80, 160 us: the fourth question came when the link was back.
        assert 300 * US <= told[1][0] <= 330 * US
        assert not worker_of(a).members.busy, "a NIC that is back is asked for ever"


@pytest.mark.slow
@pytest.mark.parametrize("nics", [(1, 2), (2, 2), (3, 2)])
def test_a_path_that_was_fenced_off_is_used_again(nics: tuple[int, int]) -> None:
    """Each flap would cost two engines a path, until a restart of one is all that helps."""
    cluster, told = pair(nics)
    with cluster:
        a, b = cluster.engines
        regions = regions_of(a, b)
        for _ in range(5):
            flap(cluster, regions, 50)
        changes = [(PeerChange.NIC_LOST, 1), (PeerChange.NIC_BACK, 1)]
        assert changes * 5 == [event[1:] for event in told]
        assert worker_of(a).failover.rows > 5
        assert not peers_of(a).links["sim", "b"].closed
        assert not worker_of(a).members.busy, "a path that is open again is asked for, for ever"
        before = [rows_to(cluster, "b", nic) for nic in range(2)]
        sent = write(a, regions)
        sent.wait()
        after = [rows_to(cluster, "b", nic) for nic in range(2)]
        assert after[0] - before[0] == after[1] - before[1] > 0, "not shared as before"
        assert 0 == sent.stats().rows_again
        assert () == tuple(imm for imm in b.stats().imms_unexpected if imm[0] != 7)


def test_a_path_that_was_given_up_is_fenced_and_used_again() -> None:
    """Rows lost while the peer was cut off may still land: first the fence, then new rows."""
    cluster, _ = pair((1, 2))
    with cluster:
        a, b = cluster.engines
        regions = regions_of(a, b)
        write(a, regions).wait()
        for _ in range(2):
            for nic in range(2):
                cluster.at(cluster.now_us, Clog("b", nic, _ps(5_000)))
            lost = write(a, regions, imm=next(FRESH))
            pass_time(cluster, 4_000)
            assert lost.error is not None
            link = peers_of(a).links["sim", "b"]
            states = {path.state for path in link.paths()}
            assert PathState.SUSPECT in states, "nobody was there to fence it"
            pass_time(cluster, 2_000)
            for _ in range(40):
                write(a, regions, imm=next(FRESH))
                pass_time(cluster, 50)
            assert not link.closed
            assert write(a, regions, imm=next(FRESH)).wait().ok


def test_a_path_that_was_shut_at_a_removal_is_used_again() -> None:
    """After removing and meeting a peer with a flapping NIC, one path would be missing for good."""
    cluster, _ = pair((1, 2))
    with cluster:
        a, b = cluster.engines
        regions = regions_of(a, b)
        cluster.at(cluster.now_us, Clog("b", 1, _ps(400)))
        write(a, regions).wait()
        a.remove_peer(b.main_address).wait()
        write(a, regions).wait()
        link = peers_of(a).links["sim", "b"]
        assert [(0, 1)] == link.shut()
        for _ in range(20):
            write(a, regions).wait()
            pass_time(cluster, 50)
        assert [] == link.shut()
        assert rows_to(cluster, "b", 1) > 10


@pytest.mark.slow
def test_a_nic_that_fails_again_waits_longer() -> None:
    """A link that flaps all the time would cost each time what a dead one costs once."""
    cluster, told = pair((1, 1))
    with cluster:
        a, b = cluster.engines
        regions = regions_of(a, b)
        for k in range(400):
            if k % 4 == 0:
                cluster.at(cluster.now_us, Clog("b", 0, _ps(4.5)))
            write(a, regions, imm=None)
            pass_time(cluster, 5)
        times = [at for at, kind, _ in told if kind is PeerChange.NIC_LOST]
        waits = [late - early for early, late in itertools.pairwise(times)]
        assert 5 < len(waits) < 2000 / 100
        assert waits[0] < waits[1] < waits[2]
        both = [PeerChange.NIC_LOST, PeerChange.LOST, PeerChange.NIC_BACK, PeerChange.BACK]
        assert both * 5 == kinds(told)[:20]


def test_a_callback_that_raises_disturbs_nobody() -> None:
    """One subscriber's mistake must not keep an event from the others."""
    cluster, told = pair()
    with cluster:
        a, b = cluster.engines
        engine_told = []
        a.on_peer(lambda event: 1 / 0)
        a.on_peer(engine_told.append)
        cluster.at(0, Clog("b", 0))
        for _ in range(3):
            write(a, regions_of(a, b))
        pass_time(cluster, 50)
        assert [PeerChange.NIC_LOST] == kinds(told) == [event.kind for event in engine_told]
        assert ("b", 1) == (engine_told[0].peer, engine_told[0].epoch)
        assert "ZeroDivisionError" in str(a.callback_errors[0])


@pytest.mark.slow
@pytest.mark.parametrize("make", [ThreadDriver, TurnDriver])
def test_heartbeats_beat_in_real_time(make) -> None:
    """Nothing wakes an engine that sleeps but the time: a driver must not sleep through it."""
    changes: queue.Queue[tuple[str, PeerChange]] = queue.Queue()
    a, b = (TransferEngine.open("loopback", nics=2, driver=make()) for _ in range(2))
    with a:
        with b:
            a.on_peer(lambda event: changes.put((event.peer, event.kind)))
            watch = a.watch_peer(b.main_address, every_s=0.005, lost_after_s=0.15)
            _, desc = b.reg_mr(np.zeros(8, np.uint8))
            until_s = time.monotonic() + 30
            while watch.round_trip_s is None and time.monotonic() < until_s:
                a.submit_barrier([desc], 7).wait(30)
            assert watch.round_trip_s is not None, "none was answered in 30 s"
        while watch.state is not PeerState.LOST:  # from here on nothing but time wakes the engine
            changes.get(timeout=30)
        a.remove_peer(b.main_address).wait(30)


def test_a_flushed_row_whose_path_a_note_has_broken_is_made_good() -> None:
    """On a connection a failed heartbeat takes the rows with it; no transfer may fail for that."""
    chaos = Chaos.calm(ordered=True, flush_on_error=True, dead_after_ps=9_000_000)
    cluster, told = pair(chaos=chaos)
    with cluster:
        a, b = cluster.engines
        a.watch_peer(b.main_address, every_s=BEAT, lost_after_s=LOST)
        regions = regions_of(a, b)
        pass_time(cluster, 99)
        cluster.at(cluster.now_us, Clog("b", 1, _ps(30)))
        pass_time(cluster, 5)
        sent = write(a, regions)
        sent.wait()
        assert sent.stats().rows_again > 0
        assert PeerChange.LOST not in kinds(told)


def test_an_old_descriptor_takes_no_fence_down() -> None:
    """The fence of a removed peer stood; the engine forgot it when an earlier life was named."""
    cluster, _ = pair(1)
    with cluster:
        a, b = cluster.engines
        stale = regions_of(a, b)
        later = cluster.restart("b")
        write(a, regions_of(a, later)).wait()
        assert "" == a.remove_peer(later.main_address).wait().unfenced
        with pytest.raises(FabricError):
            write(a, stale).wait()

        assert peers_of(a).link(later.main_address, "a message").barred
