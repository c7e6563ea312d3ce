"""Links that stall, limp and lose answers; queues that overrun; what lands after its error."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tep.backends.base import Kind, Status
from tep.base.errors import UsageError
from tep.sim import Cluster, Faults, run
from tep.sim.chaos import ChaosFabric
from tep.sim.clock import FabricEnv
from tep.sim.faults import Chaos, Clog, KillNic, Mute, Pause, Slow, Swizzle
from tests.unit.sim.sim_seam import CALM, NS, Seam

PAGES = [(256 * k, 256 * k, 256) for k in range(12)]
LONG = 10_000 * NS


def test_f12_a_flap_costs_time_and_nothing_else() -> None:
    """A link that is back before the timers have run out is no error on any transport."""
    for ordered in (False, True):
        seam = Seam(replace(CALM, ordered=ordered, dead_after_ps=50_000 * NS))
        seam.fabric.inflict(Clog("b", 0, LONG))
        seam.write(PAGES, list(range(12)))
        seam.run(5)
        assert [] == seam.seen
        seam.run()

        assert {Status.OK: 12} == seam.ended()
        assert min(seen.t_ps for seen in seam.of(Kind.IMM)) >= LONG
        assert list(range(12)) == [seen.imm for seen in seam.of(Kind.IMM)]


@pytest.mark.parametrize("node", ["a", "b"])
def test_f12_a_link_that_stays_away_is_an_error_in_time(node: str) -> None:
    """Silence for ever would be a hang."""
    seam = Seam(replace(CALM, dead_after_ps=300 * NS))
    seam.fabric.inflict(Clog(node, 0))
    seam.write(PAGES, 5)
    seam.run()

    assert {Status.UNREACHABLE: 12} == seam.ended()
    assert not seam.b.dst.any()
    seam.fabric.heal()
    seam.write(PAGES, 6)
    seam.run()
    assert {5: 0, 6: 12} == {imm: seam.imms()[imm] for imm in (5, 6)}


def test_f12_a_slow_link_is_slow_for_its_time_only() -> None:
    """Shards that follow a link's speed need a link that changes it."""

    def takes(seam: Seam) -> int:
        start = seam.env.now
        seam.write([(0, 0, 4096)], 1)
        seam.run()
        return seam.seen[-1].t_ps - start

    seam = Seam()
    usual = takes(seam)
    seam.fabric.inflict(Slow("b", 0, 5, LONG))
    seam.fabric.inflict(Slow("b", 0, 20, LONG // 2))
    assert takes(seam) > 9 * usual
    assert takes(seam) < 2 * usual
    assert 1 == seam.b.node.domains[0].link.factor


def test_f21_data_arrives_and_nobody_says_so() -> None:
    """An error tells nothing about the data: who sends a failed immediate again counts twice."""
    seam = Seam(replace(CALM, dead_after_ps=300 * NS))
    seam.fabric.inflict(Mute("a", 0))
    seam.write(PAGES, 5)
    seam.run()

    assert {Status.UNREACHABLE: 12} == seam.ended()
    assert {5: 12} == seam.imms()
    assert (seam.a.src[:3072] == seam.b.dst[:3072]).all()


def test_f21_answers_held_for_a_short_while_are_heard() -> None:
    """A mute that ends in time must leave no trace."""
    seam = Seam(replace(CALM, dead_after_ps=50_000 * NS))
    seam.fabric.inflict(Mute("a", 0, LONG))
    seam.write(PAGES, 5)
    seam.run()

    assert {Status.OK: 12} == seam.ended()
    assert max(seen.t_ps for seen in seam.of(Kind.IMM)) < LONG


def test_answers_wait_for_the_links_of_both_ends() -> None:
    """An answer held at the receiver's link has to find its way to the sender's row again."""
    for ends in ("ab", "ba", "b", "a"):
        seam = Seam(replace(CALM, dead_after_ps=50_000 * NS))
        seam.write([(0, 0, 8)], 5)
        for k, node in enumerate(ends):
            fault = Clog(node, 0, (2000 + 1000 * k) * NS)
            seam.env.call_at(350 * NS, seam.fabric.inflict, fault)
            seam.fabric.inflict(Mute("b", 0))  # deaf itself, it holds back nobody else's answer
        seam.run()
        assert {Status.OK: 1} == seam.ended()
        assert seam.of(Kind.WRITE)[0].t_ps > 2000 * NS


@pytest.mark.parametrize("nics", [1, 2, 3, 4])
def test_f22_links_stop_and_go_in_different_orders(nics: int) -> None:
    """Released in the order they were clogged, NICs would never be seen to run apart."""
    for seed in range(20):
        clogs = Swizzle("a", nics, 900 * NS, seed).clogs()
        stops = [one.nic for _, one in clogs]
        goes = sorted(stops, key=lambda nic: next(t + c.for_ps for t, c in clogs if c.nic == nic))
        assert list(range(nics)) == sorted(stops)
        assert stops != goes or nics == 1
        assert max(t + c.for_ps for t, c in clogs) == 900 * NS
    seam = Seam(replace(CALM, dead_after_ps=50_000 * NS), nics=nics)
    seam.fabric.inflict(Swizzle("a", nics, 2000 * NS, seed=1))
    for nic in range(nics):
        seam.write(PAGES, 5, nic=nic)
    seam.run()
    assert {Status.OK: 12 * nics} == seam.ended()


def test_f19_a_worker_pauses_and_is_back() -> None:
    """A stopped process takes no step, and takes them all afterwards."""
    node = ChaosFabric(FabricEnv(), CALM).node("a", 1)
    node.fabric.inflict(Pause("a", LONG))
    assert LONG == node.step_delay_ps()
    node.fabric.heal()
    assert CALM.poll_delay_ps >= node.step_delay_ps()


def test_f9_too_many_unsolicited_immediates_kill_the_nic() -> None:
    """A queue that overruns takes the NIC along: it must not be a quiet loss."""
    seam = Seam(replace(CALM, cq_depth=4))
    seam.poll_after_ps = LONG
    seam.write(PAGES, 5)
    seam.run()

    assert [KillNic("b", 0)] == seam.fabric.happened
    assert 4 == seam.imms()[5]
    assert [("b/0", Status.NIC_DOWN)] == [(s.where, s.status) for s in seam.of(Kind.DOWN)]
    ended = seam.ended()
    assert ended[Status.UNREACHABLE] >= 8
    assert 12 == sum(ended.values())


def test_f20_messages_fail_whether_they_arrived_or_not() -> None:
    """A sender that takes an error for "not delivered" says everything twice."""
    seam = Seam(replace(CALM, message_loss=8))
    inbox, out = seam.b.node.domains[0], seam.a.node.domains[0]
    inbox.post_recvs(16, 64)
    peer = out.connect(inbox.address)
    assert all(out.post_send(peer, b"m%d" % k, k) for k in range(40))
    seam.run()

    lost = {seen.ctx for seen in seam.of(Kind.SENT) if seen.status is Status.UNREACHABLE}
    came = {int(bytes(inbox.recv_view(seen.ctx))[1:]) for seen in seam.of(Kind.RECV)}
    assert 40 == len(seam.of(Kind.SENT))
    assert 8 < len(lost) < 32
    assert set(range(40)) - lost < came, "one that is acknowledged has arrived"
    assert came & lost, "some arrived and were not acknowledged"
    assert lost - came, "some never arrived"
    assert len(seam.of(Kind.RECV)) == len(came), "and none twice"


@pytest.mark.parametrize("late_land", [0, 1, 2])
def test_f25_a_row_lands_after_its_error(late_land: int) -> None:
    """A path that is dead for its sender may go on delivering: only a fence ends that."""
    late_bytes = late_imms = 0
    for seed in range(60):
        chaos = replace(CALM, seed=seed, fragments=4, reorder_ps=3000 * NS, late_land=late_land)
        seam = Seam(chaos)
        seam.write([(0, 0, 1024)], 5)
        seam.env.call_at(800 * NS, lambda _, seam=seam: seam.fabric.inflict(KillNic("a", 0)))
        at_error = []
        seam.on_seen = lambda s, seam=seam, at=at_error: (
            at.append(bytes(seam.b.dst)) if s.status is Status.NIC_DOWN else None
        )
        seam.run()
        if at_error and at_error[0] != bytes(seam.b.dst):
            late_bytes += 1
            late_imms += seam.imms()[5]
            assert set(seam.b.dst[:1024]) <= {0, *seam.a.src[:1024]}, "and what lands is the row's"

    assert (late_land > 0) == (late_bytes > 0)
    assert (late_land > 1) == (late_imms > 0)


def test_nothing_lands_behind_a_fence() -> None:
    """The fence is what makes an unknown row known: it landed before it, or never."""
    for late_land in (0, 2):
        seam = Seam(replace(CALM, fragments=4, reorder_ps=3000 * NS, late_land=late_land))
        inbox = seam.b.node.domains[0]
        seam.write(PAGES, 5)
        before = []

        def fence(_: object, seam=seam, inbox=inbox, before=before) -> None:
            inbox.fence(seam.a.node.domains[0].address, 77)
            before.append(bytes(seam.b.dst))
            seam.fabric.kill_nic("a", 0)

        seam.env.call_at(1500 * NS, fence)
        seam.run()

        assert before == [bytes(seam.b.dst)]
        [fenced] = seam.of(Kind.FENCED)
        assert (77, Status.OK) == (fenced.ctx, fenced.status)
        assert all(s.t_ps <= fenced.t_ps for s in seam.of(Kind.IMM)), "they come out before"
        assert 0 < seam.imms()[5] < 12


def test_a_row_that_waits_for_a_receive_is_behind_the_fence() -> None:
    """Its bytes are there and its immediate is not: out of the fence, it would count too late."""
    seam = Seam(replace(CALM, ordered=True, imm_credits=1))
    inbox, source = seam.b.node.domains[0], seam.a.node.domains[0].address
    seam.write(PAGES, 5)
    seam.env.call_at(500 * NS, lambda _: inbox.fence(source, 77))
    seam.run()

    [fenced] = seam.of(Kind.FENCED)
    assert seam.fabric.seen["row without a receive"]
    assert 0 < seam.imms()[5] < 12
    assert all(seen.t_ps <= fenced.t_ps for seen in seam.of(Kind.IMM))


@pytest.mark.parametrize("late_land", [0, 2])
def test_nothing_of_before_lands_after_a_fence_is_lifted(late_land: int) -> None:
    """Rows of the old life of a path were made good: in its new one they would count twice."""
    refused = 0
    for seed in range(20):
        chaos = replace(CALM, seed=seed, fragments=4, reorder_ps=3000 * NS, late_land=late_land)
        seam = Seam(chaos)
        inbox, source = seam.b.node.domains[0], seam.a.node.domains[0].address
        ctx = seam.write(PAGES, 5)
        before = []

        def fence(_: object, seam=seam, inbox=inbox, source=source, before=before) -> None:
            inbox.fence(source, 77)
            before.append(bytes(seam.b.dst))

        def lift(_: object, inbox=inbox, source=source) -> None:
            inbox.unfence(source)
            inbox.unfence(source)

        seam.env.call_at(500 * NS, fence)
        seam.env.call_at(1500 * NS, lift)
        seam.run()

        [fenced] = seam.of(Kind.FENCED)
        assert before == [bytes(seam.b.dst)]
        assert all(seen.t_ps <= fenced.t_ps for seen in seam.of(Kind.IMM))
        refused += seam.ended(ctx)[Status.UNREACHABLE]
        again = seam.write(PAGES, 6)
        seam.run()
        assert {Status.OK: 12} == seam.ended(again)
        assert 12 == seam.imms()[6]
    assert refused > 100


def test_notes_reach_the_engine_and_name_their_sender() -> None:
    """They take no buffer of the users, and an immediate says which NIC it came from."""
    seam = Seam(nics=2)
    out, inbox = seam.a.node.domains[1], seam.b.node.domains[0]
    assert out.post_control(out.connect(inbox.address), b"fence me", 9)
    seam.write([(0, 0, 8)], 3, nic=1, remote=0)
    seam.run()

    [note] = seam.of(Kind.CONTROL)
    assert (b"fence me", out.address) == inbox.take_control(note.ctx)
    assert [9] == [seen.ctx for seen in seam.of(Kind.SENT)]
    [imm] = seam.of(Kind.IMM)
    assert out.address == inbox.source(imm.ctx)


# ---------------------------------------------------------------- the cluster's view


def test_scripted_faults_stand_beside_drawn_ones() -> None:
    """A scenario with a name needs a fault at its time; a swarm draws the rest."""
    faults = Faults(((2_000_000, KillNic("b", 0)),), Chaos.calm(3))
    with Cluster(nics=2, faults=faults) as cluster:
        cluster.at(1, Clog("a", 0, 500 * NS))
        cluster.at(3, Mute("b", 1))
        cluster.at(4, Slow("b", 1, 7))
        cluster.at(5, Pause("a", 1000 * NS))
        cluster.at(9, KillNic("a", 1))
        cluster.at(8, cluster.heal)
        cluster.env.run()
        kinds = [type(fault) for fault in cluster.happened]
        assert [Clog, KillNic, Mute, Slow, Pause] == kinds, "after heal() nothing happens any more"
        assert "faults=Faults(events=((2000000, KillNic(" in repr(cluster)
    with pytest.raises(UsageError, match="chaos or faults, not both"):
        Cluster(chaos=Chaos(), faults=faults)


def test_f20_datagrams_are_lost_doubled_and_overtaken() -> None:
    """A handshake that takes its channel for TCP must be caught."""

    async def main(cluster: Cluster) -> list[int]:
        for k in range(200):
            cluster.datagrams.send("a", "b", b"%d" % k)
        total = cluster.datagrams.sent - cluster.datagrams.lost + cluster.datagrams.doubled
        return [int((await cluster.datagrams.receive("b"))[1]) for _ in range(total)]

    with Cluster(chaos=Chaos.calm(1, datagram_loss=4, datagram_dup=4)) as cluster:
        came = cluster.run(main(cluster))
        mail = cluster.datagrams
        assert 20 < mail.lost < 90
        assert 20 < mail.doubled < 90
        assert 200 - mail.lost == len(set(came))
        assert sorted(came) != came
        cluster.heal()
        mail.send("a", "b", b"sure")
        assert ("a", b"sure") == cluster.run(mail.receive("b"))
        with pytest.raises(UsageError, match="no node 'z'"):
            mail.send("a", "z", b"")
        with pytest.raises(UsageError, match="65507 at the most"):
            mail.send("a", "b", bytes(65508))


def test_a_crash_empties_the_mailbox() -> None:
    """The new incarnation must not get the messages of the old one."""

    async def main() -> str:
        with Cluster(chaos=Chaos.calm()) as cluster:
            cluster.datagrams.send("a", "b", b"before")
            cluster.env.call_at(5_000_000, lambda _: cluster.restart("b"))
            cluster.env.call_at(6_000_000, lambda _: cluster.datagrams.send("a", "b", b"after"))
            cluster.env.call_at(4_900_000, lambda _: cluster.datagrams.send("a", "b", b"between"))
            cluster.env.call_at(20_000_000, lambda _: cluster.datagrams.send("a", "b", b"end"))
            await asyncio.sleep(7e-6)
            return (await cluster.datagrams.receive("b"))[1].decode()

    assert "after" == run(main())
