"""Each knob of the chaos fabric does what it says, and each fault is told as the seam asks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from tep.backends.base import Kind, Status, new_completions
from tep.base.errors import UsageError
from tep.sim import faults as faults_room
from tep.sim.chaos import ChaosFabric
from tep.sim.clock import FabricEnv
from tep.sim.faults import (
    GROUPS,
    KNOBS,
    Chaos,
    Clog,
    Fault,
    Faults,
    Mute,
    Slow,
    Swizzle,
    groups_of,
)
from tep.sim.row_log import RowLog
from tests.unit.sim.sim_seam import CALM, NS, Seam

PAGES = [(256 * k, 256 * k, 256) for k in range(12)]


def _landing_orders(chaos: Chaos, runs: int = 20) -> list[list[int]]:
    """The order of immediates 0..11 in several runs."""
    orders = []
    for seed in range(runs):
        seam = Seam(replace(chaos, seed=seed))
        seam.write(PAGES, list(range(12)))
        seam.run()
        assert (seam.a.src[:3072] == seam.b.dst[:3072]).all()
        orders.append([seen.imm for seen in seam.of(Kind.IMM)])
    return orders


# ---------------------------------------------------------------- knobs


def test_calm_fabric_is_in_order() -> None:
    """The baseline: whatever a test sees beyond this comes from the knob it turned."""
    assert all(order == sorted(order) for order in _landing_orders(CALM, 3))


def test_f1_rows_overtake_each_other() -> None:
    """Without it, code that assumes order passes every test and fails on EFA."""
    orders = _landing_orders(replace(CALM, reorder_ps=400 * NS))

    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) > 15


def test_ordered_fabric_keeps_the_order_against_every_other_knob() -> None:
    """caps.ordered would be a lie, and code for RC would be blamed for it."""
    wild = Chaos.draw(3, ordered=True, reorder_ps=3000 * NS, fragments=5, burst_ps=0)
    wild = replace(wild, last_late_ps=1500 * NS, dup_place=True, tie_shuffle=True, merge_cqes=False)

    assert all(order == sorted(order) for order in _landing_orders(wild))


@pytest.mark.parametrize("late_ps", [0, 1500 * NS])
def test_f2_f3_bytes_of_one_row_land_apart_and_in_any_order(late_ps: int) -> None:
    """A reader that polls the last byte instead of the immediate must be caught."""
    last_first = torn = 0
    for seed in range(40):
        chaos = replace(CALM, seed=seed, fragments=5, reorder_ps=400 * NS, last_late_ps=late_ps)
        row_log = RowLog()
        seam = Seam(chaos, row_log=row_log)
        seam.write([(0, 64, 1000)], 1)
        seam.run()
        places = row_log.columns("place", "b")
        imm_ps = row_log.columns("imm", "b")["t_ps"][0]
        assert 1000 == places["nbytes"].sum()
        assert set(range(64, 1064)) == {
            byte for p in places for byte in range(p["offset"], p["offset"] + p["nbytes"])
        }
        assert imm_ps >= places["t_ps"].max()
        torn += len(places) > 1
        last = places[places["offset"] + places["nbytes"] == 1064]
        last_first += bool(last["t_ps"][0] < places["t_ps"].max())
        if late_ps:
            assert np.ptp(places["t_ps"]) > 1000 * NS or len(places) == 1

    assert torn > 20
    assert last_first > 10


def test_cuts_fall_at_any_byte() -> None:
    """Cuts at multiples of 4 or 64 would hide a reader that trusts in aligned words."""
    odd = set()
    for seed in range(30):
        row_log = RowLog()
        seam = Seam(replace(CALM, seed=seed, fragments=5), row_log=row_log)
        seam.write([(0, 0, 777)])
        seam.run()
        odd |= {int(p["offset"]) % 4 for p in row_log.columns("place")}

    assert {0, 1, 2, 3} == odd


def test_f4_nics_run_apart() -> None:
    """One slow NIC of a group is the common case on real machines."""
    seam = Seam(replace(CALM, skew_ps=(4000 * NS, 0)), nics=2)
    slow = seam.write([(0, 0, 64)], 1, nic=0)
    fast = seam.write([(64, 64, 64)] * 3, 2, nic=1)
    seam.run()
    done = {seen.ctx: seen.t_ps for seen in seam.of(Kind.WRITE)}

    assert done[slow] - done[fast] > 3000 * NS


def test_f5_bytes_may_be_placed_twice_but_counted_once() -> None:
    """A retransmission writes again: only the completion says that the page is at rest."""
    row_log = RowLog()
    seam = Seam(replace(CALM, dup_place=True, fragments=3), row_log=row_log)
    seam.write(PAGES, 5)
    seam.run()

    assert row_log.columns("place")["nbytes"].sum() > 12 * 256
    assert {5: 12} == seam.imms()
    assert {Status.OK: 12} == seam.ended()


def test_f6_the_source_is_read_late() -> None:
    """Reusing a buffer before `done` sends the new bytes; a copy at post would hide that."""

    def sent(*, late: bool) -> set[int]:
        found = set()
        for seed in range(20):
            seam = Seam(replace(CALM, seed=seed, late_read=late))
            seam.a.src[:] = 1
            seam.write([(0, 0, 64)])
            seam.run(us=0.15)  # posted, not landed
            seam.a.src[:] = 2
            seam.run()
            found |= set(seam.b.dst[:64].tolist())
        return found

    assert {1, 2} == sent(late=True), "most fragments are read late, some early"
    assert {1} == sent(late=False)


def test_f7_f8_posts_are_short_and_queues_full() -> None:
    """An engine that believes a batch posted whole loses its tail."""
    short = 0
    for seed in range(10):
        seam = Seam(replace(CALM, seed=seed, sq_depth=4, short_post=True, refuse_post=True))
        nic = seam.a.node.domains[0]
        batch = seam.batch(PAGES)
        taken = [nic.post(batch, 0, 12) for _ in range(20)]
        short += any(0 < n < 4 for n in taken)
        assert 4 == sum(taken)
        assert 0 == nic.post(batch, 4, 12)
        seam.run()
        assert 4 == seam.ended(batch.ctx)[Status.OK]

    assert short > 3


def test_f7_a_refusal_without_reason_is_followed_by_a_wake() -> None:
    """Without the wake an engine with an empty queue would sleep for ever."""
    seam = Seam(replace(CALM, refuse_post=True))
    for _ in range(30):
        seam.write(PAGES)
    seam.run()

    assert {Status.OK: 360} == seam.ended()


def test_f10_immediates_beyond_the_receives_wait() -> None:
    """RC without receives stops the sender; no immediate may be lost for it."""
    chaos = replace(CALM, ordered=True, imm_credits=2)
    seam = Seam(chaos)
    seam.poll_after_ps = 3000 * NS
    seam.write(PAGES, list(range(12)))
    seam.run()
    times = sorted({seen.t_ps for seen in seam.of(Kind.IMM)})

    assert list(range(12)) == [seen.imm for seen in seam.of(Kind.IMM)]
    assert 5 <= len(times) <= 7, "two at a time"


def test_f10_nothing_passes_a_row_that_waits_for_a_receive() -> None:
    """On RC a write without immediate behind one that waits must wait too: order is promised."""
    row_log = RowLog()
    seam = Seam(replace(CALM, ordered=True, imm_credits=1), row_log=row_log)
    seam.poll_after_ps = 5000 * NS
    seam.write(PAGES[:3], 1)
    seam.write(PAGES[3:6])
    seam.run()
    order = [r.row for r in row_log.records() if r.what == "place"]
    imm_ps = row_log.columns("imm", "b")["t_ps"]

    assert [1, 2, 3, 4, 5, 6] == order
    assert np.diff(imm_ps).min() > 5000 * NS, "each waits for the one before to be polled"
    assert row_log.columns("place")["t_ps"][3] > imm_ps[1]


def test_f10_finite_retries_end_in_rnr_and_let_the_rest_through() -> None:
    """A target that never polls must end the sender's wait in an error, not in silence."""
    chaos = replace(CALM, ordered=True, imm_credits=1, rnr_retries=3)
    seam = Seam(chaos)
    late = seam.side("late", 1, 4096)
    seam.poll_after_ps = 20_000 * NS
    ctx = seam.write(PAGES, 9, to=late)
    free = seam.write([(0, 0, 64)], to=seam.b)
    seam.run()
    ended = seam.ended(ctx)

    assert 12 == ended.total()
    assert ended[Status.RNR] >= 3
    assert seam.imms()[9] == ended[Status.OK]
    assert {Status.OK: 1} == seam.ended(free)


def test_f23_poll_returns_few_at_a_time_and_bursts_hold_back() -> None:
    """Code that polls once a wake, or expects one completion a wake, must be caught."""
    seam = Seam(replace(CALM, cqe_limit=3, burst_ps=2000 * NS))
    nic = seam.a.node.domains[0]
    nic.set_waker(lambda: None)
    batch = seam.batch(PAGES)
    assert 12 == nic.post(batch, 0, 12)
    seam.run()
    out = new_completions(64)

    assert [3, 3, 3, 3, 0] == [nic.poll(out) for _ in range(5)]


def test_f23_equal_completions_come_as_one_with_a_count() -> None:
    """`count` is part of the seam; an engine that counts entries must be caught."""
    chaos = replace(CALM, merge_cqes=True, burst_ps=800 * NS, reorder_ps=400 * NS)
    seam = Seam(chaos)
    ctx = seam.write(PAGES, 7)
    seam.run()

    assert ({Status.OK: 12}, {7: 12}) == (seam.ended(ctx), seam.imms())
    assert max(seen.count for seen in seam.of(Kind.WRITE)) > 1
    assert max(seen.count for seen in seam.of(Kind.IMM)) > 1
    assert 12 * 256 == sum(seen.nbytes for seen in seam.of(Kind.WRITE))


def test_f19_steps_come_late_and_sometimes_very_late() -> None:
    """A worker that pauses for milliseconds is Python's daily life."""
    chaos = Chaos(poll_delay_ps=400 * NS, pause_ps=3_000_000 * NS)
    node = ChaosFabric(FabricEnv(), chaos).node("a", 1)
    delays = [node.step_delay_ps() for _ in range(1000)]

    assert 1 <= min(delays)
    assert 0 < sum(delay > 400 * NS for delay in delays) < 50
    assert max(delays) <= 3_000_400 * NS


def test_draw_is_stable_and_reaches_every_choice() -> None:
    """Seeds in bug reports must mean the same knobs; a choice never drawn is never tried."""
    drawn = [Chaos.draw(seed) for seed in range(300)]

    assert drawn[7] == Chaos.draw(7)
    assert {True, False} == {chaos.ordered for chaos in drawn}
    assert {1, 2, 3, 4, 5} == {chaos.fragments for chaos in drawn}
    assert {0, 50 * NS, 400 * NS, 3000 * NS} == {chaos.reorder_ps for chaos in drawn}
    assert 5 == Chaos.draw(7, sq_depth=5).sq_depth
    assert replace(Chaos.draw(7), sq_depth=5) == Chaos.draw(7, sq_depth=5)
    assert Chaos.draw(7) == eval(str(Chaos.draw(7)), {"Chaos": Chaos})  # noqa: S307  # its purpose


def test_faults_are_drawn_within_their_bounds() -> None:
    """A kill after the end of every transfer would test nothing."""
    drawn = [Faults.draw(seed, {"a": 2, "b": 4}, to_ps=900) for seed in range(300)]
    events = [event for faults in drawn for event in faults.events]

    assert 200 < len(events) < 600
    assert 100 < sum(not faults.events for faults in drawn) < 170
    assert all(1 <= t_ps <= 900 for t_ps, _ in events)
    assert set(get_args(Fault)) == {type(fault) for _, fault in events}
    assert drawn[3] == Faults.draw(3, {"b": 4, "a": 2}, to_ps=900), "no order of a dict matters"
    names = {name: getattr(faults_room, name) for name in faults_room.__all__}
    again = [eval(str(faults), names) for faults in drawn[:20]]  # noqa: S307  # as above
    assert drawn[:20] == again


def test_a_swarm_can_be_restricted() -> None:
    """A swarm of link faults must have no restart in it; a misspelt group is refused."""
    drawn = [Faults.draw(seed, {"a": 2}, kinds="links, order") for seed in range(100)]

    assert {Slow, Clog, Mute, Swizzle} == {type(f) for faults in drawn for _, f in faults.events}
    assert {False, True} == {faults.chaos.ordered for faults in drawn}
    assert {64} == {faults.chaos.sq_depth for faults in drawn}
    assert Faults((), Chaos.calm(5)) == Faults.draw(5, {"a": 2}, kinds="none")
    assert groups_of(["nics", "keys"]) == groups_of("nics keys")
    for wrong in ("linx", "", "all nics", ["none", "keys"]):
        with pytest.raises(UsageError, match="is no group; there are: all, none, order"):
            groups_of(wrong)


def test_the_catalogue_is_whole() -> None:
    """A fault without a knob or a record is forgotten, and so is a knob of no group."""
    causes = " ".join(kind.__doc__ for kind in (Chaos, *get_args(Fault)))
    drawn = [knob.number for knob in KNOBS.values() if knob.number]
    scenarios = {"F17", "F18"}
    assert {f"F{k}" for k in range(1, 34)} - scenarios == set(re.findall(r"F\d+", causes))
    assert len(drawn) == len(set(drawn)), "rule 1"
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(kind.__name__ for kind in get_args(Fault)) == sorted(grouped)
    for knob in KNOBS.values():
        assert bool(knob.number) == (knob.group in GROUPS) == bool(knob.choices)
