"""Faults known from real fabrics: late fences, rows of the dead, one-way cuts, doubled messages."""

from __future__ import annotations

import errno
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest

from tep.backends.base import Access, Kind, Status
from tep.base.errors import FabricError
from tep.memory.source import adapt
from tep.sim.chaos import ChaosFabric
from tep.sim.chaos_target import Trouble
from tep.sim.clock import FabricEnv
from tep.sim.faults import Clog, Cut, KillNic, Mute
from tests.unit.sim.sim_seam import CALM, NS, Seam

PAGES = [(256 * k, 256 * k, 256) for k in range(12)]
SPREAD = replace(CALM, fragments=4, reorder_ps=3000 * NS)


@pytest.mark.parametrize("late", [False, True])
def test_f26_rows_land_until_the_fence_is_confirmed(late: bool) -> None:
    """Sums taken at the request for a fence, and not at its confirmation, are too small."""
    between = 0
    for seed in range(20):
        seam = Seam(replace(SPREAD, seed=seed, late_fence=late))
        inbox, source = seam.b.node.domains[0], seam.a.node.domains[0].address
        seam.write(PAGES, 5)
        states = []

        def fence(_: object, seam=seam, inbox=inbox, source=source, states=states) -> None:
            inbox.fence(source, 77)
            states.append(bytes(seam.b.dst))

        seam.env.call_at(1500 * NS, fence)
        seam.on_seen = lambda s, seam=seam, states=states: (
            states.append(bytes(seam.b.dst)) if s.kind is Kind.FENCED else None
        )
        seam.run()

        at_call, at_entry = states
        assert at_entry == bytes(seam.b.dst), "nothing lands afterwards"
        [fenced] = seam.of(Kind.FENCED)
        assert all(seen.t_ps <= fenced.t_ps for seen in seam.of(Kind.IMM))
        between += at_call != at_entry
    assert late == (between > 0)


def test_f26_a_fence_that_is_lifted_before_its_entry_does_not_bite() -> None:
    """A question that is put twice has two fences; the second may be under way at the lifting."""
    seam = Seam(replace(CALM, late_fence=True))
    inbox, source = seam.b.node.domains[0], seam.a.node.domains[0].address
    inbox.fence(source, 77)
    inbox.unfence(source)
    seam.run()
    assert [77] == [seen.ctx for seen in seam.of(Kind.FENCED)]
    ctx = seam.write(PAGES, 5)
    seam.run()

    assert {Status.OK: 12} == seam.ended(ctx)


@pytest.mark.parametrize("late_ps", [0, 100_000 * NS])
def test_f25_rows_of_a_crashed_host_land(late_ps: int) -> None:
    """A packet on the way does not know that its sender is gone, and may take long."""
    changed = last_ps = 0
    for seed in range(20):
        seam = Seam(replace(SPREAD, seed=seed, late_land=2, late_ps=late_ps))
        seam.write(PAGES, 5)
        at_crash = []

        def crash(_: object, seam=seam, at_crash=at_crash) -> None:
            at_crash.append(bytes(seam.b.dst))
            seam.fabric.restart("a")

        seam.env.call_at(1000 * NS, crash)
        seam.run()
        changed += at_crash[0] != bytes(seam.b.dst)
        last_ps = max(last_ps, seam.env.now)
    assert changed > 10
    assert (last_ps > 50_000 * NS) == (late_ps > 0)


def test_f25_flushed_rows_land() -> None:
    """An error flushes what the other side may have in its hands already."""
    late = 0
    for seed in range(40):
        chaos = replace(SPREAD, seed=seed, ordered=True, flush_on_error=True, late_land=2)
        seam = Seam(chaos)
        key = seam.b.targets[0]
        wrong = seam.batch(PAGES[:1])
        wrong.rkey = key.rkey + (1 << 20)
        seam.offer(wrong)
        ctx = seam.write(PAGES, 5)
        seam.run()
        assert {Status.FLUSHED} >= set(seam.ended(ctx)) - {Status.OK}
        late += seam.imms()[5] > seam.ended(ctx)[Status.OK]
    assert late > 10


def test_f12_a_cut_of_one_direction() -> None:
    """Half a broken cable: what a NIC says arrives, and it hears nothing, answers included."""
    for inward_at in "ab":
        seam = Seam(replace(CALM, dead_after_ps=300 * NS))
        seam.fabric.inflict(Clog(inward_at, 0, inward=True))
        seam.write(PAGES, 5)
        seam.run()
        assert {Status.UNREACHABLE: 12} == seam.ended()
        assert (12 if inward_at == "a" else 0) == seam.imms()[5], "a's rows get out"
        seam.fabric.heal()
        ctx = seam.write(PAGES, 6)
        seam.run()
        assert {Status.OK: 12} == seam.ended(ctx)


def test_f12_a_short_cut_of_one_direction_is_no_error() -> None:
    """Delayed rows arrive after the cut, and no error is reported."""
    for inward_at in "ab":
        seam = Seam(replace(CALM, dead_after_ps=50_000 * NS))
        seam.fabric.inflict(Clog(inward_at, 0, 5000 * NS, inward=True))
        seam.fabric.inflict(Mute("a", 0, 2000 * NS))
        seam.write(PAGES, 5)
        seam.run()
        assert {Status.OK: 12} == seam.ended()
        assert 12 == seam.imms()[5]


@pytest.mark.parametrize("one_way", [False, True])
def test_f28_two_nics_do_not_reach_each_other_and_both_reach_others(one_way: bool) -> None:
    """A fault that takes a whole NIC never shows an engine that takes paths for NICs."""
    for mine, (node, peer) in enumerate(("ab", "ba")):
        seam = Seam(replace(CALM, dead_after_ps=300 * NS), nics=2)
        for for_ps in (None, 5000 * NS):  # the end of the second one is not that of the first
            seam.fabric.inflict(Cut(node, 0, peer, 1, for_ps, one_way))
        lost = seam.write(PAGES, 5, nic=mine, remote=1 - mine)
        others = [seam.write(PAGES, 6 + k, nic=k) for k in range(2)]
        seam.run()
        assert {Status.UNREACHABLE: 12} == seam.ended(lost)
        assert (12 if one_way and node == "b" else 0) == seam.imms()[5], "a's rows get there"
        assert [{Status.OK: 12}] * 2 == [seam.ended(ctx) for ctx in others]
        seam.fabric.heal()
        again = seam.write(PAGES, 8, nic=mine, remote=1 - mine)
        seam.run()
        assert {Status.OK: 12} == seam.ended(again)


def test_f28_a_short_cut_is_no_error() -> None:
    """Delayed rows arrive when both NICs reach each other again, and their answers too."""
    for ends in ("ab", "ba"):
        seam = Seam(replace(CALM, dead_after_ps=50_000 * NS))
        for for_ps, one_way in ((2000 * NS, False), (4000 * NS, True)):
            seam.fabric.inflict(Cut(ends[0], 0, ends[1], 0, for_ps, one_way))
        seam.write(PAGES, 5)
        seam.run()
        assert {Status.OK: 12} == seam.ended()
        assert min(seen.t_ps for seen in seam.of(Kind.WRITE)) >= 4000 * NS
        assert {} == seam.b.node.domains[0].link.troubles


@pytest.mark.parametrize("key_again", [False, True])
def test_f31_a_key_comes_back_for_other_memory(key_again: bool) -> None:
    """A row under an old key would land in the next memory: nobody may send it."""
    seam = Seam(replace(CALM, key_again=key_again))
    nic, old = seam.b.node.domains[0], seam.b.targets[0]
    seam.write(PAGES, 5)
    seam.run()
    nic.deregister(old)
    tenant = bytearray(4096)
    key = nic.register(adapt(tenant), Access.SOURCE_AND_TARGET)
    assert key_again == (key == old)
    ctx = seam.write(PAGES, 6)
    seam.run()

    assert {Status.OK if key_again else Status.REMOTE_KEY: 12} == seam.ended(ctx)
    assert key_again == any(tenant)
    nic.deregister(key)
    nic.deregister(key)  # twice: its number comes back once
    fresh = [nic.register(adapt(bytearray(8)), Access.SOURCE) for _ in range(2)]
    assert 2 == len(set(fresh))


def test_f29_calls_raise_for_want_of_resources() -> None:
    """An engine that takes what was raised for taken, or for the end of it all, must be shown."""
    for seed in range(20):
        chaos = replace(CALM, seed=seed, post_fails=200, connect_fails=128, register_fails=128)
        fabric = ChaosFabric(FabricEnv(), chaos)
        nic = fabric.node("a", 1).domains[0]
        raised: Counter[object] = Counter()
        for _ in range(20):
            before = nic.regions
            try:
                nic.register(adapt(bytearray(8)), Access.SOURCE)
            except FabricError:
                raised["register"] += 1
                assert before == nic.regions
            try:
                peer = nic.connect(nic.address)
            except OSError as error:
                raised[error.errno] += 1
                continue
            try:
                nic.post_send(peer, b"x", 1)
            except (OSError, MemoryError) as error:
                raised["post"] += 1
                raised[getattr(error, "errno", MemoryError)] += 1
            with suppress(OSError):
                nic.post_control(peer, b"x", 1)
        seen = fabric.seen
        failed = (seen["post failed"], seen["post interrupted"])
        assert raised["register"] == seen["register failed"] > 0
        assert raised[errno.EMFILE] == seen["connect failed"]
        assert (sum(failed), failed[1]) == (raised["post"], raised[errno.EINTR])
        assert len(fabric.happened) == failed[0] > 0
        assert (
            fabric.rows
            == 20 + 20 - sum(failed) - seen["control post failed"] - 2 * seen["connect failed"]
        )


def test_troubles_of_a_link_are_counted_apart() -> None:
    """The end of one trouble must not end another."""
    link = Seam().a.node.domains[0].link
    kinds: tuple[Trouble, ...] = ("clog", "deaf", "mute")
    for kind in kinds:
        link.trouble(kind, None)
    assert {"clog": 1, "deaf": 1, "mute": 1} == link.troubles
    link.heal()
    assert {} == link.troubles


@pytest.mark.parametrize("control_dup", [0, 4, 16])
def test_f20_control_messages_come_twice(control_dup: int) -> None:
    """A datagram that was sent again since its answer was late comes twice, and its sender's
    engine hears of one.
    """
    seam = Seam(replace(CALM, control_dup=control_dup))
    sender = seam.a.node.domains[0]
    peer = sender.connect(seam.b.node.domains[0].address)
    for ctx in range(1, 41):
        assert sender.post_control(peer, b"%d" % ctx, ctx)
        seam.run()
    taken = Counter(
        seam.b.node.domains[0].take_control(seen.ctx)[0] for seen in seam.of(Kind.CONTROL)
    )

    assert 40 == len(seam.of(Kind.SENT)) == len(taken)
    doubled = sum(times == 2 for times in taken.values())
    assert {1, 2} >= set(taken.values())
    assert {0: doubled == 0, 4: 0 < doubled < 40, 16: doubled == 40}[control_dup]


def test_f27_a_row_that_landed_ends_in_an_odd_error() -> None:
    """An error of the provider's own says nothing about the row."""
    seam = Seam(replace(CALM, odd_errors=128))
    seam.write(PAGES, 5)
    seam.run()

    assert 12 == seam.imms()[5]
    assert {Status.OK, Status.PROVIDER} == set(seam.ended())
    seam.fabric.heal()
    ctx = seam.write(PAGES, 6)
    seam.run()
    assert {Status.OK: 12} == seam.ended(ctx)
    assert not any(isinstance(fault, KillNic) for fault in seam.fabric.happened)
