"""Leases and quarantine, case by case: what is refused, what is told, and what ends what."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import tep
from tep.api import EngineOptions
from tep.backends.base import Status
from tep.control.messages import Answer
from tep.errors import (
    BadDescriptor,
    BadRequest,
    BusyError,
    ClosedError,
    FabricError,
    LeaseError,
    UsageError,
)
from tep.sim.chaos_nic import ChaosNic
from tep.sim.faults import Clog
from tep.wire import Lease
from tests.support.lease_pair import BYTES, Pair, cannot_fence


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_lease_is_a_descriptor_of_its_bytes_alone(pair: Pair) -> None:
    """A holder that writes beyond its range writes over somebody else's page."""
    _, lease = pair.lease(offset=100, nbytes=50)
    pair.write(lease, 50).wait(1)

    assert {7} == set(pair.memory[100:150])
    assert 50 == np.count_nonzero(pair.memory)
    with pytest.raises(BadRequest, match=r"target bytes 1 \.\. 51 are outside the 50 bytes"):
        pair.write(lease, 50, at=1)


def test_every_verb_takes_a_lease(pair: Pair) -> None:
    """A verb that takes descriptors only is one that cannot be used on leased memory."""
    _, lease = pair.lease()
    pages, group = tep.Pages([1, 2]), pair.b.add_peer_group([pair.a.main_address])
    pair.b.submit_paged_writes(8, (pair.src, pages), (lease, pages)).wait(1)
    pair.b.submit_scatter(pair.src, [tep.ScatterDst(8, 0, (lease, 40))], group=group).wait(1)
    pair.b.submit_barrier([lease], 5).wait(1)

    assert [8, 40] == [int(np.flatnonzero(pair.memory)[k]) for k in (0, 16)]
    assert 1 == dict(pair.a.stats().imms_unexpected).get(5, 0)


def test_a_revoked_lease_is_refused_before_anything_is_posted(pair: Pair) -> None:
    """The owner has been told that nobody writes any more."""
    grant, lease = pair.lease()
    group = pair.b.add_peer_group([pair.a.main_address])
    slices = [tep.ScatterDst(8, 0, (lease, 0))]
    pair.b.submit_scatter(pair.src, slices, group=group).wait(1)
    grant.revoke().wait(1)

    posted = pair.b.stats().nics
    with pytest.raises(LeaseError, match="was asked back by its owner"):
        pair.write(lease)
    with pytest.raises(LeaseError, match="was asked back by its owner"):
        pair.b.submit_scatter(pair.src, slices, group=group)
    assert posted == pair.b.stats().nics
    assert grant.revoke() is grant.over
    assert grant.over.ok


def test_a_submit_that_met_the_end_on_its_way_fails(pair: Pair) -> None:
    """Between a submit and its step the owner may have been told that nothing is open."""
    grant, lease = pair.lease()
    remote = pair.b._peers.resolve(lease, "test")
    late = pair.write(lease)
    remote.held_lease.over = True

    with pytest.raises(LeaseError, match="asked back"):
        late.wait(1)
    assert not pair.memory.any()
    grant.revoke().wait(1)


def test_a_lease_runs_out_by_its_holders_clock_less_a_margin(pair: Pair) -> None:
    """A holder that writes to the last moment writes after it, by the owner's clock."""
    grant, lease = pair.lease(for_s=0.8)
    pair.write(lease).wait(1)
    pair.pass_s(0.65)
    pair.write(lease).wait(1)
    pair.pass_s(0.1)  # 0.75 s, beyond 7/8 of 0.8

    with pytest.raises(LeaseError, match=r"ran out 0\.05.* s ago"):
        pair.write(lease)
    assert not grant.over.finished
    grant.over.wait(1)
    assert (True, 0) == (grant.over.ok, grant.left_s)


def test_a_renewed_lease_lasts(pair: Pair) -> None:
    """Long work under short leases is what they are for."""
    grant, lease = pair.lease(for_s=0.8)
    for _ in range(3):
        pair.write(lease).wait(1)
        pair.pass_s(0.5)
        grant.renew(0.8)
    pair.pass_s(0.5)
    pair.write(lease).wait(1)

    grant.revoke().wait(1)
    with pytest.raises(LeaseError, match="renew: .* was asked back, or is over"):
        grant.renew(1)


def test_posted_rows_are_awaited_and_queued_ones_dropped() -> None:
    """An answer while a row is posted frees memory under it; waiting for a queue takes for ever."""
    pair = Pair(nics=1, sq_depth=1)
    grant, lease = pair.lease()
    pages = tep.Pages(range(64))
    sent = pair.b.submit_paged_writes(8, (pair.src, pages), (lease, pages))
    pair.cluster.env.run_until(lambda: sent.stats().rows_back > 3)
    over = grant.revoke()
    over.wait(1)

    assert over.ok
    with pytest.raises(LeaseError, match="asked back by its owner before this was posted"):
        sent.result()
    assert 0 < np.count_nonzero(pair.memory) < 64 * 8


def test_a_leased_region_is_not_given_back(pair: Pair) -> None:
    """Who frees memory under a writer must learn whose it is, and for how long."""
    grant, _ = pair.lease(for_s=2.0)

    with pytest.raises(BusyError, match=r"lease 1 of .* to b is not over \(for another 2\.000 s\)"):
        pair.a.deregister(pair.mr)
    channel = pair.a._worker.channel
    with mock.patch.object(channel, "ask", side_effect=channel.ask) as ask:
        over = grant.revoke()
        assert grant.revoke() is over
        with pytest.raises(BusyError, match="asked back"):
            pair.a.deregister(pair.mr)
        with pytest.raises(LeaseError, match="renew: .* was asked back, or is over"):
            grant.renew(1)
        over.wait(1)
    assert 1 == ask.call_count, "its holder is asked once"
    pair.a.deregister(pair.mr)


def test_a_lease_is_for_one_incarnation_of_one_engine(pair: Pair) -> None:
    """A lease that is passed on, or outlives a restart, has a writer whom nobody asks back."""
    grant, lease = pair.lease()
    with pytest.raises(LeaseError, match="not to this engine"):
        pair.a.submit_barrier([lease], 1)

    pair.b = pair.cluster.restart("b")
    pair.src, _ = pair.b.reg_mr(np.full(BYTES, 7, np.uint8))
    with pytest.raises(LeaseError, match="before it restarted"):
        pair.write(lease)
    pair.a.add_peer_group([pair.b.main_address])  # now the owner knows
    grant.over.wait(1)
    assert grant.over.ok


def test_a_silent_writer_is_fenced_off(pair: Pair) -> None:
    """A stopped process may go on at any time: its rows must not."""
    grant, lease = pair.lease(for_s=1e-3)
    pair.write(lease).wait(1)
    pair.pass_s(1e-4)  # so that no step is booked
    pair.b.driver.node.pause(10**12)
    late = pair.write(lease)
    pair.a.driver.wait(grant.over, 0.9)
    assert grant.over.ok
    assert "did not say that it had stopped" in grant.why
    pair.memory[:] = 9

    with pytest.raises(tep.TepError):
        late.wait(10)
    assert {9} == set(pair.memory)


def test_paths_are_kept_shut_until_their_silent_writer_has_gone(pair: Pair) -> None:
    """Until then it may use its lease; afterwards a record of each path would stay for good."""
    grant, _ = pair.lease(for_s=1e-3)
    pair.b.driver.node.pause(10**12)
    grant.over.wait(0.9)
    fencing, addresses = pair.a._worker.fencing, pair.b.main_address.domains
    pair.a.remove_peer(pair.a.main_address).wait(1)  # it keeps no path shut
    assert "a lease that its holder has not let go of keeps this path shut" == fencing.lift(
        addresses[0], 0
    )
    pair.b = pair.cluster.restart("b")
    pair.a.add_peer_group([pair.b.main_address])
    pair.pass_s(1e-3)
    assert [None] * 4 == [fencing.lift(at, nic) for at in addresses for nic in range(2)]


@pytest.mark.parametrize("failover", [True, False])
def test_a_writer_that_was_fenced_off_comes_back(*, failover: bool) -> None:
    """Without failover nobody asked to have the path opened: its rows failed for ever."""
    pair = Pair(nics=1, options=EngineOptions(failover=failover, probe_first_s=1e-3))
    grant, lease = pair.lease(for_s=1e-3)
    pair.write(lease).wait(1)
    pair.b.driver.node.pause(10**11)
    grant.over.wait(1)
    assert "did not say that it had stopped" in grant.why
    pair.pass_s(0.2)

    _, desc = pair.a.reg_mr(np.zeros(8, np.uint8))
    tries = []
    for _ in range(5):  # a NIC is asked in the steps that a submit causes
        tries.append(pair.b.submit_single_write(8, (pair.src, 0), (desc, 0)))
        pair.pass_s(0.1)
    assert tries[0].failed
    assert tries[-1].ok, tries[-1].describe()


def test_a_fence_that_failed_keeps_no_path_shut(pair: Pair) -> None:
    """A path was lifted, and the answer got lost; then a fence failed for a lease that is over.

    Found by a search of drawn runs: its sender asked to have it opened, and was refused for ever.
    """
    fencing, source = pair.a._worker.fencing, pair.b.main_address.domains[0]
    ends: list[int] = []
    with mock.patch.object(ChaosNic, "fence", cannot_fence):
        fencing.fence(source, 0, ends.append)
        pair.pass_s(1e-3)

    assert [Status.PROVIDER] == ends
    assert fencing.lift(source, 0) is None


def test_what_cannot_be_known_is_quarantined_and_lifted(pair: Pair) -> None:
    """An end that guesses is a page that changes; one that never ends is a page that is lost."""
    grant, lease = pair.lease(for_s=1e-3, offset=64, nbytes=64)
    pair.write(lease).wait(1)
    pair.b.driver.node.pause(10**11)
    with mock.patch.object(ChaosNic, "fence", cannot_fence):
        with pytest.raises(FabricError, match="b may still write there: b did not say .* PROVIDER"):
            grant.over.wait(0.09)

        (found,) = pair.mr.quarantined
        assert (64, 128) == found[:2]
        assert 64 == pair.a.stats().bytes_quarantined
        assert "bytes 64 .. 128 of region 1 are in quarantine" in pair.a.stall_report()
        assert repr(grant).endswith("to b: in quarantine)")
        for part in ({"offset": 127}, {"nbytes": 65}, {}, {"offset": 80, "nbytes": 8}):
            with pytest.raises(BusyError, match=r"lease: bytes 64 \.\. 128 are not free"):
                pair.lease(**part)
        beside = [pair.lease(nbytes=64)[0], pair.lease(offset=128)[0]]
        pair.pass_s(0.2)
        grant.revoke().wait(1)  # the writer is back, and answers

    assert () == pair.mr.quarantined
    assert grant.over.ok
    for other in beside:
        other.revoke().wait(1)


def test_paths_that_are_not_to_be_fenced_stay_usable() -> None:
    """A fence is for life: where there is one path, a link that flapped would cost all of it."""
    pair = Pair(nics=1)
    grant = pair.a.lease(pair.mr, pair.b.main_address, for_s=1, fence=False)
    sent = pair.write(grant.lease)
    pair.cluster.fabric.inflict(Clog("a", 0, 3 * 10**6))
    with pytest.raises(FabricError, match="UNREACHABLE"):
        sent.wait(1)
    with pytest.raises(FabricError, match="QUARANTINED|were not to be fenced off"):
        grant.revoke().wait(1)

    other, desc = pair.a.reg_mr(np.zeros(8, np.uint8))
    pair.b.submit_single_write(8, (pair.src, 0), (desc, 0)).wait(1)
    pair.a.deregister(pair.mr)
    assert () == pair.mr.quarantined
    pair.a.deregister(other)


def test_only_the_paths_that_the_writer_names_are_fenced() -> None:
    """Else each lease that ends badly costs all paths until they are opened again."""
    pair = Pair(options=EngineOptions(failover=False))
    grant, lease = pair.lease()
    sent = pair.write(lease)
    pair.cluster.fabric.inflict(Clog("a", 0, 3 * 10**6))
    with pytest.raises(FabricError, match="UNREACHABLE"):
        sent.wait(1)
    with mock.patch.object(pair.a._worker.leases, "_fence") as fence:
        grant.revoke()
        pair.pass_s(1e-3)

    fence.assert_called_once_with(grant, [(0, 0)])
    assert "did not say" not in grant.why


@pytest.mark.parametrize("path", [(2, 0), (0, 2)])
def test_a_writer_that_names_a_nic_that_is_not_there_has_not_answered(
    pair: Pair, path: tuple[int, int]
) -> None:
    """Its answer would be used as an index, by whoever holds the memory."""
    grant, lease = pair.lease()
    pair.b._peers.resolve(lease, "test").held_lease.paths.add(path)
    grant.revoke().wait(1)

    assert grant.over.ok, "all its paths are fenced off"
    assert grant.why.endswith("it named a NIC that is not there")


def test_a_holder_that_keeps_a_path_shut_is_asked_one_thing_at_a_time(pair: Pair) -> None:
    """It wants its paths back over each of them, repeatedly: each time it would be asked anew."""
    grant, _ = pair.lease()
    leases, addresses = pair.a._worker.leases, pair.b.main_address.domains
    asked: list[tuple] = []

    def wanted() -> int:
        """How often it was asked so far, when all paths are wanted back."""
        for nic in range(2):
            for address in addresses:
                leases.ask_again(nic, address)
        return len(asked)

    with mock.patch.object(leases._channel, "ask", lambda *question: asked.append(question[2:])):
        leases._silent(grant, "no answer")
        assert [1, 1] == [wanted(), wanted()]
        asked[0][1]("no answer again")
        assert 2 == wanted()
        asked[1][0](Answer(2, "", (), 0))
        assert 2 == wanted(), "it has let go of all paths"
        leases._silent(grant, "no answer after it was asked for back once more")
        assert 3 == wanted()


def test_a_nic_that_can_begin_no_fence_says_why(pair: Pair) -> None:
    """The end of a lease that raises ends the engine; one that ends as free is a guess."""
    grant, _ = pair.lease(for_s=1e-3)
    pair.b.driver.node.pause(10**11)
    full = FabricError("no queue pair is left", code="PROVIDER")
    why = pytest.raises(FabricError, match="is in quarantine: .* no queue pair is left")
    with mock.patch.object(ChaosNic, "fence", side_effect=full), why:
        grant.over.wait(0.09)


def test_deregistering_ends_a_quarantine(pair: Pair) -> None:
    """Withdrawing the key is a fence against everybody (C16)."""
    grant, _ = pair.lease(for_s=1e-3)
    pair.cluster.kill_nic("b", 0)
    pair.b.close()
    with mock.patch.object(ChaosNic, "fence", cannot_fence), pytest.raises(FabricError):
        grant.over.wait(1)
    assert pair.mr.quarantined

    pair.a.deregister(pair.mr)
    assert () == pair.mr.quarantined
    assert 0 == pair.a.stats().bytes_quarantined
    assert {} == pair.a._worker.leases.held_back, "kept for ever, or begun again by revoke()"


def test_deregistering_ends_no_quarantine_where_rows_go_on_landing(pair: Pair) -> None:
    """On tcp a row that is being received lands to its end: memory let go of would change.

    So would the next region, if a NIC gave it the same keys.
    """
    for domain in pair.a._domains:
        domain.caps = replace(domain.caps, deregister_fences=False)
    bare, _ = pair.a.reg_mr((pair.memory.ctypes.data, BYTES, "cpu"))
    grants = [pair.lease(for_s=1e-3)[0], pair.a.lease(bare, pair.b.main_address, for_s=1e-3)]
    pair.cluster.kill_nic("b", 0)
    pair.b.close()
    with mock.patch.object(ChaosNic, "fence", cannot_fence):
        for grant in grants:
            with pytest.raises(FabricError, match=r"PROVIDER; close the engine, or revoke\(\)"):
                grant.over.wait(1)

    with mock.patch.object(ChaosNic, "deregister") as given_back:
        pair.a.deregister(pair.mr)
    assert not given_back.called, "the NIC may give its keys to the next region"
    with pytest.raises(BusyError, match="b may still write there"):
        pair.a.deregister(bare)
    assert BYTES == pair.mr.quarantined[0].stop
    assert {pair.mr: None} == pair.a._machine.kept, "who holds the memory?"
    pair.a.close()
    assert () == pair.mr.quarantined


def test_closing_ends_all_leases(pair: Pair) -> None:
    """After close nothing is written (C14): whoever waits for the end of a lease has it."""
    grant, lease = pair.lease()
    other, _ = pair.lease()
    other.revoke()
    pair.a.close()

    assert (True, True) == (grant.over.ok, other.over.ok)
    assert grant.revoke() is grant.over
    with pytest.raises(tep.TepError):
        pair.write(lease).wait(1)


def test_leases_that_cannot_be(pair: Pair) -> None:
    """Each refusal before anything is granted, with its reason."""
    lease = pair.a.lease
    peer = pair.b.main_address
    private, _ = pair.a.reg_mr(bytes(64), access=tep.Access.SOURCE)
    for kw in ({"offset": -1}, {"nbytes": 0}, {"offset": 1, "nbytes": BYTES}):
        with pytest.raises(BadRequest, match="are outside .* or none|offset=-1 is outside"):
            lease(pair.mr, peer, for_s=1, **kw)
    for for_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(BadRequest, match="for_s=.* is "):
            lease(pair.mr, peer, for_s=for_s)
    with pytest.raises(BadRequest, match="nobody may write"):
        lease(private, peer, for_s=1)
    with pytest.raises(BadDescriptor):
        Lease.from_bytes(pair.desc.to_bytes())
    pair.a._worker.channel.able = False
    with pytest.raises(UsageError, match="has no control messages"):
        lease(pair.mr, peer, for_s=1)
    pair.a.close()
    with pytest.raises(ClosedError):
        lease(pair.mr, peer, for_s=1)


def test_reports_name_the_leases(pair: Pair) -> None:
    """Who waits for memory wants to know who has it."""
    grant, _ = pair.lease(for_s=3)
    line = f"lease 1 of bytes 0 .. {BYTES} of region 1 to b: granted, for another 3.000 s"

    assert line in pair.a.explain()
    assert line in pair.a.stall_report()
    assert 1 == pair.a.stats().leases
    assert (0, 0) == (pair.a.stats().transfers_submitted, pair.a.stats().transfers_done)
    grant.over.cancel()
    assert "to b: asked back; its holder has not answered yet" in pair.a.stall_report()
    grant.over.wait(1)
    assert 0 == pair.a.stats().leases
    assert repr(grant).endswith("to b: free)")


# ---------------------------------------------------------------------- quarantine without leases


def test_a_failed_write_names_what_is_in_doubt() -> None:
    """A retry into the same page may be overwritten by the write that failed."""
    pair = Pair(nics=1)
    sent = pair.b.submit_single_write(8, (pair.src, 0), (pair.desc, 0))
    pair.cluster.kill_nic("a", 0)
    with pytest.raises(FabricError, match="bytes may still land in region 1 of a") as caught:
        sent.wait(1)

    assert (("a", 1, (0, 0), "UNREACHABLE"),) == sent.in_doubt == caught.value.in_doubt
    assert sent.describe().endswith("; bytes may still land in region 1 of a")
    assert 1 == pair.b.stats().transfers_in_doubt
    assert "1 transfers settled with bytes in doubt" in pair.b.stall_report()
    fresh = pair.cluster.restart("a")
    pair.b.add_peer_group([fresh.main_address])
    assert () == sent.in_doubt, "the memory's owner is gone"
    assert sent.describe().endswith(" dropped")


def test_a_refused_write_leaves_nothing_in_doubt(pair: Pair) -> None:
    """The target's NIC has said that it changed nothing (C11)."""
    pair.a.deregister(pair.mr)
    sent = pair.b.submit_single_write(8, (pair.src, 0), (pair.desc, 0))
    with pytest.raises(FabricError, match="REMOTE_KEY") as caught:
        sent.wait(1)

    assert () == sent.in_doubt == caught.value.in_doubt


def test_memory_that_a_dead_nic_knows_is_held_until_close(pair: Pair) -> None:
    """Nobody can ask a NIC that is down what it still does to the memory."""
    raw, _ = pair.a.reg_mr((pair.memory.ctypes.data, BYTES, "cpu"))
    source, _ = pair.a.reg_mr(bytes(64), access=tep.Access.SOURCE)
    pair.cluster.kill_nic("a", 1)
    pair.cluster.env.run_until(lambda: not pair.a._worker.group.alive[1])

    assert "NIC 1 (a/1) is down" in pair.mr.quarantined[0].why
    assert () == source.quarantined, "nothing of it was on its way"
    pair.a.deregister(source)
    pair.a.deregister(pair.mr)
    assert pair.mr.quarantined
    assert [pair.mr] == list(pair.a._machine.kept)
    with pytest.raises(BusyError, match="the engine cannot hold its memory for you"):
        pair.a.deregister(raw)
    pair.a.close()
    assert () == pair.mr.quarantined
    assert {} == pair.a._machine.kept


def test_a_source_on_a_dead_nic_is_held(pair: Pair) -> None:
    """The NIC may be reading still; what it reads goes nowhere, but the bytes must stay mapped."""
    _, desc = pair.b.reg_mr(np.zeros(BYTES, np.uint8))
    source, _ = pair.a.reg_mr(bytes(BYTES), access=tep.Access.SOURCE)
    sent = pair.a.submit_single_write(BYTES, (source, 0), (desc, 0))
    pair.cluster.env.run_until(lambda: sent.stats().rows_posted == sent.rows)
    pair.cluster.kill_nic("a", 0)
    sent.wait(1)

    assert "NIC 0 (a/0) is down" in source.quarantined[0].why
    assert () == sent.in_doubt, "the path is fenced, and the other NIC has carried it"
