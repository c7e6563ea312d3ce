"""The timing fabric: what takes how long, in which order, and what can be seen when."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest.mock import call, patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tep.backends.base import Kind, Status, WriteBatch
from tep.base.errors import UsageError
from tep.sim import timing
from tep.sim.clock import FabricEnv
from tep.sim.profile import load_profile
from tep.sim.timing import TimingFabric
from tests.unit.sim.timing_seam import PLAIN, US, Seam, slow_model, watch_landings

KiB = 1024
POSTS = st.lists(
    st.tuples(
        st.integers(0, 60 * US),
        st.integers(0, 3),
        st.lists(
            st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 5000, 65_536, 70_000, 300_000])),
            min_size=1,
            max_size=8,
        ),
    ),
    min_size=1,
    max_size=8,
    unique_by=(lambda post: post[0]),
)


def scatter(seam: Seam, post: tuple[int, int, list[tuple[int, int]]]) -> None:
    _, source, rows = post
    targets = [seam.owners[target] for target, _ in rows]
    owner = seam.owners[source]
    assert len(rows) == owner.post(targets, [nbytes for _, nbytes in rows], ctx=len(owner.seen) + 1)


# ---------------------------------------------------------------- times


@given(POSTS)
@example([(0, 0, [(2, 300_000)]), (1, 1, [(2, 300_000)]), (10 * US, 0, [(2, 5000)])])
def test_lands_when_the_slow_model_says(posts) -> None:
    """Windows, plans made again and closed forms must be exact: each row, to the picosecond."""
    seam = Seam(PLAIN, 4)
    landed = watch_landings(seam.owners)
    posts = sorted(posts)
    for post in posts:
        seam.env.call_at(post[0], lambda post: scatter(seam, post), post)
    seam.run()

    columns = [(t, who, [r[0] for r in rows], [r[1] for r in rows]) for t, who, rows in posts]
    assert dict(enumerate(slow_model(PLAIN, columns))) == landed


@given(POSTS)
def test_the_window_of_a_pass_changes_no_time(posts) -> None:
    """The number of quanta settled in one pass may change the speed only."""
    with patch.object(timing, "_WINDOW_MIN", 2):
        test_lands_when_the_slow_model_says.hypothesis.inner_test(posts)


@given(POSTS)
def test_posts_from_outside_the_run_meet_the_same_times(posts) -> None:
    """A coroutine's sleep is no event: the fabric must not settle what it may still change."""
    seam = Seam(PLAIN, 4)
    landed = watch_landings(seam.owners)
    posts = sorted(posts)
    for post in posts:
        seam.env.run(post[0])
        scatter(seam, post)
    seam.run()

    columns = [(t, who, [r[0] for r in rows], [r[1] for r in rows]) for t, who, rows in posts]
    assert dict(enumerate(slow_model(PLAIN, columns))) == landed


def test_single_write_is_the_sum_of_its_parts() -> None:
    """The time of one lone row, spelled out: CPU, fill, wire, latency, then the way back."""
    seam = Seam(PLAIN)
    landed = watch_landings(seam.owners)
    seam.owners[0].post([seam.owners[1]], [256 * KiB])
    seam.run()

    fill = 192 * KiB * 8e12 / 504.123e9
    wire = 256 * KiB * 8e12 / 377.4e9
    expected = 90_001 + fill + wire + 3 * US
    assert expected == pytest.approx(landed[0], abs=10)
    assert [(landed[0] + 200_000, 1)] == seam.owners[1].of(Kind.IMM)
    assert [(landed[0] + PLAIN.ack_ps, 1)] == seam.owners[0].of(Kind.WRITE)


def test_small_row_does_not_wait_for_a_large_one_to_another_peer() -> None:
    """A NIC serves its queue pairs in turn. With a FIFO of whole rows combine was 29 % too slow."""
    times = {}
    for quantum in (64 * KiB, 1 << 30):
        seam = Seam(replace(PLAIN, quantum_bytes=quantum), 3)
        sender, large, small = seam.owners
        sender.post([large], [32 << 20])
        seam.env.call_at(20 * US, lambda _, s=sender, t=small: s.post([t], [4 * KiB], ctx=2))
        seam.run()
        times[quantum] = small.of(Kind.IMM)[0][0]

    assert times[64 * KiB] < 27 * US
    assert times[1 << 30] > 700 * US


def test_receiver_serves_in_order_of_arrival() -> None:
    """Reserved in order of posting, the early row would wait for the late one's place."""
    profile = replace(PLAIN, fill_bytes=0)
    seam = Seam(profile, 4)
    one, two, busy, target = seam.owners
    seam.env.call_at(0, lambda _: one.post([busy] * 20, [64 * KiB] * 20, imm=None))
    seam.env.call_at(1000, lambda _: one.post([target], [64 * KiB], imm=11, ctx=2))
    seam.env.call_at(5 * US, lambda _: two.post([target], [64 * KiB], imm=22))
    seam.run()

    (first, imm), (second, last) = target.of(Kind.IMM)
    assert [22, 11] == [imm, last] or first < second
    lone = 5 * US + 90_001 + 65_536 * 8e12 / 377.4e9 + 3 * US + 200_000
    assert lone == pytest.approx(next(t for t, k in target.of(Kind.IMM) if k == 22), abs=10)


@pytest.mark.slow
def test_post_order_would_overstate_an_all_to_all() -> None:
    """Receivers reserved while posting: 64 ranks with 56 peers each would seem 1.8 times slower."""
    ranks, node, nbytes = 64, 8, 16 * 7408
    peers = {
        r: [p % ranks for p in range(r + 1, r + ranks) if p % ranks // node != r // node]
        for r in range(ranks)
    }
    seam = Seam(PLAIN, ranks)
    landed = watch_landings(seam.owners)
    for rank, owner in enumerate(seam.owners):
        owner.post([seam.owners[peer] for peer in peers[rank]], [nbytes] * 56)
    seam.run()
    posts = [(0, rank, peers[rank], [nbytes] * 56) for rank in range(ranks)]

    assert slow_model(PLAIN, posts) == [landed[k] for k in range(ranks * 56)]
    work = nbytes * 8e12 / PLAIN.wire_bps
    free = [0.0] * ranks
    for rank in range(ranks):
        for place, peer in enumerate(peers[rank]):
            arrive = PLAIN.latency_ps + max((place + 1) * PLAIN.post_first_ps, place * work)
            free[peer] = max(arrive, free[peer]) + work
    assert 1.78 == pytest.approx(max(free) / max(landed.values()), rel=0.05)


def test_rows_of_one_instant_take_turns_on_the_nics() -> None:
    """The worker posts a row on each NIC, then a turn's rows on one: the next NIC starts late."""
    seam = Seam(replace(PLAIN, nics=2, turn_rows=32, op_ps=0))
    landed = watch_landings(seam.owners)
    a, b = seam.owners
    for nic in (0, 1):
        a.post([b] * 100, [0] * 100, nic=nic)
    seam.run()

    order = sorted(landed, key=landed.get)
    assert [0, 100, *range(1, 33), *range(101, 133), 33] == order[:67]


def test_worker_with_a_backlog_takes_a_small_request_at_its_next_turn() -> None:
    """A huge paged write must not keep a message waiting until all its pages are posted."""
    seam = Seam(replace(load_profile("efa_2x200"), jitter_ps=0), 3)
    a, b, c = seam.owners
    assert 4000 == a.post([b] * 4000, [64] * 4000)
    seam.env.call_at(10 * US, lambda _: a.post([c], [64], ctx=2))
    seam.run()

    assert c.of(Kind.IMM)[0][0] < 60 * US
    assert b.of(Kind.IMM)[-1][0] > 4000 * 479_000


# ---------------------------------------------------------------- what is kept


@given(POSTS)
def test_everything_sent_arrives_and_no_nic_beats_its_rate(posts) -> None:
    """Bytes lost, doubled or faster than the wire would make every bandwidth figure worthless."""
    seam = Seam(PLAIN, 4, row_log=True)
    for post in sorted(posts):
        seam.env.call_at(post[0], lambda post: scatter(seam, post), post)
    seam.run()

    rows = [(source, target, nbytes) for _, source, pairs in posts for target, nbytes in pairs]
    for k, owner in enumerate(seam.owners):
        total = sum(nbytes for _, target, nbytes in rows if target == k)
        assert total == seam.fabric.landed_bytes[owner.nics[0].number]
        assert len([1 for _, target, _ in rows if target == k]) == len(owner.of(Kind.IMM))
        assert len([1 for source, _, _ in rows if source == k]) == len(owner.of(Kind.WRITE))
        placed = seam.row_log.columns("place", owner.node.name)
        if len(placed):
            span = int(placed["t_ps"].max()) - min(post[0] for post in posts)
            assert total * 8e12 / PLAIN.wire_bps <= span
    assert 0 == len(seam.fabric.payloads)
    assert not seam.fabric.active


def digest(seed: int) -> str:
    seam = Seam(load_profile("efa_2x200"), 3, seed=seed, row_log=True)
    a, b, c = seam.owners
    for nic in (0, 1):
        a.post([b, c] * 200, [3000] * 400, nic=nic, imm=5)
        c.post([b] * 300, [9000] * 300, nic=nic, imm=6)
    seam.run()
    return seam.row_log.digest()


@pytest.mark.slow
def test_same_seed_same_trace() -> None:
    """A run that cannot be repeated cannot be debugged."""
    assert digest(3) == digest(3)
    assert digest(3) != digest(4)


def test_unordered_profile_reorders_and_ordered_does_not() -> None:
    """An engine that leans on order passes on an in-order model and fails on SRD."""
    for name, reorders in (("efa_2x200", True), ("cx7_400", False)):
        seam = Seam(load_profile(name))
        landed = watch_landings(seam.owners)
        seam.owners[0].post([seam.owners[1]] * 200, [64] * 200)
        seam.run()
        times = [landed[k] for k in range(200)]
        assert reorders == (times != sorted(times))


# ---------------------------------------------------------------- what can be seen when


def test_bytes_are_there_with_their_immediate_and_not_before_they_arrive() -> None:
    """A reader released by an immediate must find its bytes, and no byte may come early."""
    seam = Seam(PLAIN, move_bytes=True, nbytes=1 << 20)
    a, b = seam.owners
    landed = watch_landings(seam.owners)
    a.real[:] = 7
    a.post([b] * 3, [1000] * 3, imm=9, offset=4096)
    states = []

    def peek(_: object) -> None:
        b.poll()
        states.append((seam.env.now, bool(b.real[4096:5096].all()), len(b.of(Kind.IMM))))

    for time in range(0, 8 * US, 50_000):
        seam.env.call_at(time, peek)
    seam.run()

    for now, there, count in states:
        assert not there or now >= min(landed.values()) + PLAIN.receive_ps
        assert there or count == 0
    assert states[-1][1:] == (True, 3)
    assert 0 == b.real[:4096].sum() + b.real[5096:].sum()


def test_sender_done_means_placed() -> None:
    """After `done` the source may be overwritten: its bytes must have been taken by then."""
    seam = Seam(PLAIN, move_bytes=True, nbytes=1 << 16)
    a, b = seam.owners
    a.real[:] = 3
    a.post([b] * 50, [100] * 50, imm=None)
    for nic in b.nics:
        nic.set_waker(lambda: None)  # this reader never looks
    while not a.of(Kind.WRITE):
        seam.env.run(seam.env.next_ps())
    a.real[:] = 0

    assert [3] * 100 == b.real[:100].tolist()


def test_last_of_a_batch_wakes_at_its_exact_time_and_the_rest_seldom() -> None:
    """The time of a counter is the time of its last immediate; an event a row would be too slow."""
    seam = Seam(PLAIN)
    landed = watch_landings(seam.owners)
    a, b = seam.owners
    assert 4096 == a.post([b] * 4096, [64 * KiB] * 4096)
    seam.run()

    looks = Counter(time for time, _ in b.of(Kind.IMM))
    assert 4096 == sum(looks.values())
    assert max(landed.values()) + PLAIN.receive_ps == max(looks)
    assert max(landed.values()) + PLAIN.ack_ps == a.of(Kind.WRITE)[-1][0]
    assert len(looks) < 40


def test_owner_that_never_polls_is_not_woken_for_ever() -> None:
    """A simulation must come to its end even if somebody has stopped looking."""
    seam = Seam(PLAIN)
    a, b = seam.owners
    wakes = []
    b.nics[0].set_waker(lambda: wakes.append(seam.env.now))
    a.post([b] * 1000, [64 * KiB] * 1000)
    seam.env.run()

    assert 1 <= len(wakes) <= 3


def test_refused_sender_is_woken_when_there_is_room() -> None:
    """A full queue says no once; without a wake the rest of the transfer would never be posted."""
    seam = Seam(replace(PLAIN, sq_depth=64))
    a, b = seam.owners
    left = [1000 - a.post([b] * 1000, [64 * KiB] * 1000)]

    def refill() -> None:
        a.poll()
        if left[0]:
            left[0] -= a.post([b] * left[0], [64 * KiB] * left[0])

    a.nics[0].set_waker(refill)
    landed = watch_landings(seam.owners)
    seam.run()

    assert 0 == left[0]
    assert 1000 == len(a.of(Kind.WRITE)) == len(b.of(Kind.IMM))
    # The wire never ran dry: all rows back to back.
    work = 64 * KiB * 8e12 / PLAIN.wire_bps
    assert max(landed.values()) == pytest.approx(1000 * work, rel=0.01)


# ---------------------------------------------------------------- failures


def test_rows_without_a_source_fail_here_and_leave_the_others_alone() -> None:
    """One bad row of a batch must be named, and must neither arrive nor hold up the rest."""
    seam = Seam(PLAIN)
    a, b = seam.owners
    mine = a.nics[0]
    src = np.array([a.keys[0].base, 5, a.keys[0].base], np.uint64)
    peer = mine.connect(b.nics[0].address)
    key = b.keys[0]
    batch = WriteBatch(3, peer, src, a.keys[0].lkey, key.base, key.rkey, 64, 1, 77)
    assert 3 == mine.post(batch, 0, 3)
    seam.run()

    bad = [(ctx, row) for _, kind, status, _, ctx, row in a.seen if status == Status.LOCAL_KEY]
    assert [(77, 1)] == bad
    assert 2 == len(b.of(Kind.IMM))
    assert 3 == len(a.of(Kind.WRITE))


def test_rows_of_one_instant_are_each_held_against_their_own_region() -> None:
    """They are checked together, but each has its own key and length."""
    seam = Seam(PLAIN, nbytes=4096)
    a, b = seam.owners
    mine, key = a.nics[0], b.keys[0]
    peer, (base, lkey) = mine.connect(b.nics[0].address), (a.keys[0].base, a.keys[0].lkey)
    lengths = np.array([64, 4097], np.uint64)
    for instant in ([(1, lkey, lengths)], [(2, lkey, 64), (3, lkey + 2, 64)]):
        for ctx, own_key, nbytes in instant:
            batch = WriteBatch(2, peer, base, own_key, key.base, key.rkey, nbytes, 1, ctx)
            assert 2 == mine.post(batch, 0, 2)
        seam.run()

    bad = [(ctx, row) for _, kind, status, _, ctx, row in a.seen if status == Status.LOCAL_KEY]
    assert [(1, 1), (3, 0), (3, 1)] == sorted(bad)
    assert 3 == len(b.of(Kind.IMM))


def test_restarted_peer_is_told_apart_from_a_dead_one() -> None:
    """Keys of an earlier incarnation must never touch the memory of a later one."""
    seam = Seam(PLAIN, 3)
    a, b, c = seam.owners
    for nic in (*b.nics, *c.nics):
        nic.close()
    seam.fabric.node("n1")
    a.post([b, c], [64, 64])
    seam.run()

    fails = {row: status for _, kind, status, _, _, row in a.seen if status}
    assert {0: Status.STALE_PEER, 1: Status.UNREACHABLE} == fails
    assert seam.env.now >= PLAIN.peer_timeout_ps


def test_nodes_are_named_once() -> None:
    """Two live nodes of one name would share addresses, and rows would go to either."""
    fabric = TimingFabric(FabricEnv(), "cx7_400", move_bytes=False)
    fabric.node("a")
    with pytest.raises(UsageError, match="node 'a' is open; close its NICs"):
        fabric.node("a")
    with pytest.raises(UsageError, match="1 to 64 characters"):
        fabric.node("a/b")


@pytest.mark.slow
def test_a_long_write_looks_at_each_quantum_a_few_times(monkeypatch) -> None:
    """A write of 256 GiB is 256 rows and 4 million quanta: each row must not look at them all."""
    seen = 0

    def count(fabric, taken, limit_ps):
        nonlocal seen
        seen += sum(stop - nic.queue.at for nic, stop in taken)
        settle(fabric, taken, limit_ps)

    settle = TimingFabric._settle
    monkeypatch.setattr(TimingFabric, "_settle", count)
    seam = Seam(PLAIN)
    rows, quanta = 64, 64 * PLAIN.max_write_bytes // PLAIN.quantum_bytes
    seam.owners[0].post([seam.owners[1]] * rows, [PLAIN.max_write_bytes] * rows)
    seam.run()

    assert quanta <= seen <= 4 * quanta


@pytest.mark.slow
def test_a_thousand_nodes() -> None:
    """Books that are scanned for every row would make large clusters quadratic."""
    seam = Seam(PLAIN, 1000)
    for k, owner in enumerate(seam.owners):
        peers = [seam.owners[(k + step) % 1000] for step in (1, 7, 31)]
        owner.post(peers, [256 * KiB] * 3)
    seam.run()

    assert 3000 == sum(len(owner.of(Kind.IMM)) for owner in seam.owners)


@pytest.mark.parametrize("looks", [False, True])
def test_two_events_of_one_instant_wake_a_receiver_alike_in_either_order(looks) -> None:
    """A sender learns of a row and has it placed before the receiver looks. If the receiver looks
    at this very instant, it must not be woken once more, as it is not in the other order.
    """
    fabric = TimingFabric(FabricEnv(), PLAIN)
    node = fabric.node("receiver")
    nic, wakes = node.domains[0], node.wakes
    wakes._floor_ps = 5 * US  # it looked a moment ago
    nic.inbox.add(np.array([US]), np.array([0]))
    if looks:
        wakes.wake_at(US)
    with patch.object(nic._inlet, "take"), patch.object(wakes, "wake_at") as wake_at:
        nic.take_landed(US)

    assert [] == wake_at.mock_calls if looks else [call(5 * US)] == wake_at.mock_calls
