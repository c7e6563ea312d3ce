"""The closed forms of the timing fabric equal, to the picosecond, a loop over single arrivals."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep.sim import queues
from tep.sim.ledger import Agenda, Batches, Hold, Ledger
from tep.sim.queues import (
    NEVER_PS,
    Rate,
    SendQueue,
    Units,
    cut_quanta,
    fifo,
    fifo_grouped,
    round_robin,
)

TIMES = st.integers(0, 300)
ITEMS = st.lists(st.tuples(TIMES, st.integers(0, 40), st.integers(0, 6)), min_size=1, max_size=60)


def columns(items: list[tuple[int, int, int]]) -> list[np.ndarray]:
    return [np.array(column, np.int64) for column in zip(*items, strict=True)]


def loop_fifo(arrive: list[int], service: list[int], free: int) -> list[int]:
    done = []
    for time, work in zip(arrive, service, strict=True):
        free = max(time, free) + work
        done.append(free)
    return done


def loop_turns(
    items: list[tuple[int, int, int]], free: int, ended: dict[int, int]
) -> tuple[list[int], list[int]]:
    """A server and its active list, one decision after the other; items are (ready, work, flow)."""
    waiting: dict[int, list[int]] = {}
    for index, (_, _, flow) in enumerate(items):
        waiting.setdefault(flow, []).append(index)
    ended = dict(ended)
    since = {flow: queue[0] for flow, queue in waiting.items()}
    order, starts = [], []

    def joins(flow: int) -> tuple[int, bool, int, int]:
        ready = items[waiting[flow][0]][0]
        served = ended.get(flow, -1)
        return max(ready, served), ready <= served, since[flow], flow

    while waiting:
        joined, _, _, flow = min(joins(flow) for flow in waiting)
        item = waiting[flow].pop(0)
        start = max(free, joined)
        free = ended[flow] = start + items[item][1]
        since[flow] = len(items) + len(order) + 1
        order.append(item)
        starts.append(start)
        if not waiting[flow]:
            del waiting[flow]
    return order, starts


@given(ITEMS, TIMES)
def test_fifo_is_the_loop(items, free) -> None:
    """A wrong recursion would let two rows share a wire, or leave it idle."""
    arrive, service, _ = columns(items)

    assert (
        loop_fifo(arrive.tolist(), service.tolist(), free) == fifo(arrive, service, free).tolist()
    )


@given(ITEMS, st.lists(TIMES, min_size=7, max_size=7))
def test_fifo_grouped_is_a_loop_for_each_server(items, free) -> None:
    """Receivers must not see each other, and must serve in order of arrival, not of the array."""
    arrive, service, group = columns(items)
    expected = [0] * len(items)
    left = list(free)
    for index in sorted(range(len(items)), key=lambda i: (items[i][0], i)):
        time, work, server = items[index]
        left[server] = expected[index] = max(time, left[server]) + work

    assert expected == fifo_grouped(arrive, service, group, np.array(free)).tolist()


@given(ITEMS, TIMES, st.dictionaries(st.integers(0, 6), TIMES))
def test_round_robin_is_the_active_list(items, later, ended) -> None:
    """If they differ, a queue pair gets more or less than its share of the wire."""
    free = max([0, *ended.values()]) + later
    ready, service, flow = columns(items)

    order, starts = round_robin(flow, ready, service, free, ended)

    assert loop_turns(items, free, ended) == (order.tolist(), starts.tolist())


@pytest.mark.parametrize("many", [0, 1000])
@given(items=ITEMS, gaps=st.lists(st.integers(0, 60), min_size=1, max_size=60))
def test_planning_again_changes_nothing_but_what_is_new(many, items, gaps) -> None:
    """A send queue that hears of rows one by one must send as if it had known all of them."""
    # The order of items that become ready at one instant is free: no two of these do.
    scale, now, posts = len(items), 0, []
    for index, (ready, work, flow) in enumerate(items):
        now += gaps[index % len(gaps)] * scale
        posts.append((now, (now // scale + 1 + ready) * scale + index, (work + 1) * scale, flow))
    queue = SendQueue()
    with mock.patch.object(queues, "_MANY", many):  # with 0, what changes nothing yet waits
        for index, (posted, ready, work, flow) in enumerate(posts):
            row = [np.array([value]) for value in (index, flow, ready, work)]
            queue.add(Units(*row, np.array([True]), row[3]), posted)
            queue.at = queue.before(posted)  # the receivers have taken over what started
    queue.before(NEVER_PS)

    order, starts = loop_turns([(ready, work, flow) for _, ready, work, flow in posts], 0, {})
    left = len(queue.starts)
    assert order[-left:] == queue.units.number.tolist()
    assert starts[-left:] == queue.starts.tolist()


def test_a_full_queue_is_not_planned_again_for_each_refill(monkeypatch) -> None:
    """A NIC is refilled row by row, to several peers: to plan thousands anew is a cliff."""
    planned = added = 0

    def count(flow, *rest):
        nonlocal planned
        planned += len(flow)
        return round_robin(flow, *rest)

    def units(n: int) -> Units:
        nonlocal added
        added += n
        zeros = np.zeros(n, np.int64)
        last = np.ones(n, np.bool_)
        return Units(zeros, np.arange(n) % 8, zeros, zeros + 10, last, zeros)

    monkeypatch.setattr(queues, "round_robin", count)
    queue = SendQueue()
    queue.add(units(800), 0)
    for now in range(80, 40_000, 80):
        queue.at = queue.before(now)
        queue.add(units(8), now)

    assert added <= planned <= 2 * added


@given(st.lists(st.integers(0, 500), min_size=1, max_size=30), st.integers(1, 100))
def test_quanta_tile_their_rows(sizes, quantum) -> None:
    """A byte lost here arrives early; a row without a last quantum never arrives."""
    row, nbytes, last = cut_quanta(np.array(sizes), quantum)

    assert sizes == np.bincount(row, nbytes).astype(int).tolist()
    assert list(range(len(sizes))) == row[last].tolist()
    assert quantum >= nbytes.max()
    assert [quantum] * int((~last).sum()) == nbytes[~last].tolist()


@given(st.integers(1, 2**36), st.sampled_from([97_130_000_000, 179 * 10**9, 400 * 10**9]))
def test_rate_is_exact_to_a_millionth(nbytes, bps) -> None:
    """Rounding each byte to whole picoseconds would be off by a fortieth at 400 Gb/s."""
    exact = nbytes * 8 * 10**12 / bps

    assert abs(int(Rate(bps).ps(np.array([nbytes]))[0]) - exact) <= 1 + exact * 1e-6


@given(st.lists(st.lists(TIMES, min_size=1, max_size=8), max_size=8), st.lists(TIMES, max_size=5))
def test_agenda_hands_out_each_row_once_in_order(bunches, looks) -> None:
    """A row forgotten here hangs its reader; one handed out early shows bytes not there yet."""
    agenda, number, added, taken = Agenda(), 0, [], []
    for bunch in bunches:
        agenda.add(np.array(bunch), np.arange(number, number + len(bunch)))
        added += [(time, number + k) for k, time in enumerate(bunch)]
        number += len(bunch)
    for now in [*sorted(looks), NEVER_PS]:
        first = min((time for time, row in added if (time, row) not in taken), default=NEVER_PS)
        assert first == agenda.first_ps
        times, numbers = agenda.take(now)
        got = list(zip(times.tolist(), numbers.tolist(), strict=True))
        assert sorted(e for e in added if e[0] <= now and e not in taken) == got
        taken += got
    assert 0 == len(agenda)


def test_ledger_finds_rows_that_stand_together_and_those_that_do_not() -> None:
    """Rows between those of a NIC belong to another NIC, and must not change."""
    ledger = Ledger()
    ledger.open_rows(9)

    assert slice(3, 6) == ledger.where(np.array([3, 4, 5]))
    assert [3, 5] == ledger.where(np.array([3, 5])).tolist()


def test_ledger_keeps_rows_that_somebody_needs() -> None:
    """The ledger drops old rows to stay small; one that is still under way must survive that."""
    ledger = Ledger()
    kept = None
    for turn in range(40):
        where = ledger.open_rows(1000)
        ledger.nbytes[where] = np.arange(1000) + turn
        ledger.hold[where] = 0
        if turn == 20:
            kept = ledger.base + where.start + 7
            ledger.hold[kept - ledger.base] = Hold.WIRE

    assert 27 == ledger.nbytes[kept - ledger.base]
    assert 40_000 == ledger.end
    assert len(ledger.nbytes) < 65_536


def test_batch_numbers_are_used_again() -> None:
    """A long run would otherwise grow by a record for every batch it ever posted."""
    batches = Batches()
    for turn in range(1000):
        number = batches.begin(turn)
        assert 0 == batches.left[number]
        batches.left[number] = 5
        batches.end(number)

    assert len(batches.left) <= 64
