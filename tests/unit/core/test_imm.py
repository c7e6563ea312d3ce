"""The table of immediates by hand: early, late, surplus, in line, cancelled, claimed, removed."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import numpy as np
import pytest

from tep.base.errors import BadRequest, BusyError, FabricError
from tep.core import imm as room
from tep.core.imm import ImmTable, check_imm

COLLIDING = (0, 1, 0x10001, 0x01020304, 0xFFFFFFFF)
"""Values that a table keyed by 16 bits, by byte-swapped bits, or by signed numbers would mix up."""


@dataclass(eq=False)
class Want:
    imm: int
    count: int


def expect(table: ImmTable[Want], count: int, imm: int = 7) -> Want:
    want = Want(imm, count)
    table.expect(want)
    return want


def fired(table: ImmTable[Want]) -> list[Want]:
    found, table.reached = table.reached, []
    return found


@pytest.fixture
def table() -> ImmTable[Want]:
    return ImmTable()


def test_late_expectation_is_reached_by_what_came_early(table) -> None:
    """Counters exist before expectations; an early immediate dropped hangs the reader for ever."""
    table.add(7, 3)
    want = expect(table, 3)

    assert [want] == fired(table)
    assert {} == table.counts


def test_early_expectation_fires_once_at_its_count(table) -> None:
    """Firing one short releases the reader before the bytes are there; twice releases the next."""
    want = expect(table, 3)
    table.add(7, 2)
    assert [] == fired(table)
    table.add(7, 1)
    assert [want] == fired(table)
    table.add(7, 1)
    assert [] == fired(table)
    assert {7: 1} == table.counts


def test_surplus_is_carried_to_the_next_expectation(table) -> None:
    """Zeroing the counter on firing loses what belongs to the next round."""
    first, second = expect(table, 2), expect(table, 3)
    table.add(7, 4)
    assert [first] == fired(table)
    table.add(7, 1)
    assert [second] == fired(table)
    assert {} == table.counts


def test_line_is_first_in_first_out_also_when_a_later_one_needs_less(table) -> None:
    """Otherwise a small request takes the arrivals that an earlier one was promised."""
    big, small = expect(table, 5), expect(table, 1)
    table.add(7, 4)
    assert [] == fired(table)
    table.add(7, 2)
    assert [big, small] == fired(table)


def test_one_burst_may_reach_several_in_line(table) -> None:
    """A loop that fires one a burst leaves the rest waiting for an arrival that never comes."""
    wants = [expect(table, n) for n in (1, 2, 3)]
    table.add(7, 6)

    assert wants == fired(table)


@pytest.mark.parametrize(("leaves", "reached"), [(0, [1, 2]), (1, [0]), (2, [0, 1])])
def test_cancelled_one_leaves_what_arrived_to_the_others(table, leaves, reached) -> None:
    """First, middle or last: the line closes up, and nobody waits for one that left."""
    wants = [expect(table, n) for n in (4, 2, 1)]
    table.add(7, 3)
    assert table.cancel(wants[leaves])
    found = fired(table)
    if leaves != 0:
        assert [] == found
        table.add(7, {1: 1, 2: 3}[leaves])
        found = fired(table)

    assert [wants[k] for k in reached] == found
    assert not table.cancel(wants[leaves])


def test_cancelled_ones_behind_another_are_let_go(table) -> None:
    """Repeated expectations that are cancelled behind one long wait would fill the memory."""
    for _ in range(1000):  # those that the line has passed need no clearing
        first, second = expect(table, 1), expect(table, 1)
        assert table.cancel(second)
        table.add(7, 1)
        assert [first] == fired(table)
    first, gone = expect(table, 2), []
    for _ in range(1000):
        want = expect(table, 1)
        gone.append(weakref.ref(want))
        assert table.cancel(want)
    last = expect(table, 1)
    del want
    gc.collect()

    assert sum(ref() is not None for ref in gone) < 100
    assert 2 == table.waiting
    table.add(7, 3)
    assert [first, last] == fired(table)


def test_many_cancels_look_at_each_other_a_few_times(table) -> None:
    """A service that gives up a thousand requests at once would stand still meanwhile."""
    looks = 0

    class Counted(Want):
        def __hash__(self) -> int:
            nonlocal looks
            looks += 1
            return id(self)

    wants = [Counted(7, 1) for _ in range(1000)]
    for want in wants:
        table.expect(want)
    for want in wants[:0:-1]:
        assert table.cancel(want)
    assert looks < 20 * len(wants)
    assert 1 == table.waiting


def test_cancel_after_reaching_says_no(table) -> None:
    """A handle that is done must not become cancelled."""
    want = expect(table, 1)
    table.add(7, 1)

    assert not table.cancel(want)
    assert [want] == fired(table)


def test_count_zero_is_reached_at_once_but_waits_its_turn_in_line(table) -> None:
    """A request without pages expects nothing; behind others it still keeps the order."""
    assert [expect(table, 0)] == fired(table)
    big, nothing = expect(table, 1), expect(table, 0)
    assert [] == fired(table)
    table.add(7, 1)
    assert [big, nothing] == fired(table)


@pytest.mark.parametrize("imm", COLLIDING)
def test_neighbouring_values_do_not_touch_each_other(table, imm) -> None:
    """An immediate cut to 16 bits, swapped or signed counts for a stranger."""
    wants = {value: expect(table, 2, value) for value in COLLIDING}
    table.add(imm, 1)
    table.add_many(np.array([imm], np.uint32).tobytes())

    assert [wants[imm]] == fired(table)
    assert len(COLLIDING) - 1 == table.waiting


def test_claimed_range_goes_to_its_callback_and_is_never_counted(table) -> None:
    """Loose immediates (one a message) would fill the table of counts for ever."""
    seen = print
    table.claim(range(0x100, 0x200), seen)
    table.add(0x0FF, 1)
    table.add(0x100, 2)
    table.add_many(np.array([0x1FF, 0x200, 0x1FF], np.uint32).tobytes())

    assert [(seen, 0x100, 2), (seen, 0x1FF, 1), (seen, 0x1FF, 1)] == table.loose
    assert {0x0FF: 1, 0x200: 1} == table.counts
    assert 6 == table.total


@pytest.mark.parametrize(
    "imms",
    [
        *(range(0), range(0, 10, 2), range(0, 10, -1), range(-1, 5)),
        *(range(2**32, 2**32 + 1), range(5, 2**32 + 1), 7),
    ],
)
def test_claim_refuses_what_is_no_range_of_immediates(table, imms) -> None:
    """A range that can never match would swallow a user's callback silently."""
    with pytest.raises(BadRequest, match="is not a range of 32-bit immediates with step 1"):
        table.claim(imms, print)


def test_claims_may_touch_and_not_overlap(table) -> None:
    """Two owners of one immediate: which of them gets it would be a matter of order."""
    table.claim(range(10, 20), print)
    table.claim(range(20, 30), print)
    with pytest.raises(
        BadRequest, match=r"on_imm: range\(19, 21\) overlaps range\(10, 20\), which is claimed"
    ):
        table.claim(range(19, 21), print)


@pytest.mark.parametrize("early", [True, False])
def test_claim_refuses_an_immediate_in_use(table, early) -> None:
    """An expectation of a claimed immediate would wait for ever, a count of it never be handed."""
    if early:
        table.add(12, 1)
    else:
        expect(table, 1, 12)
    with pytest.raises(BadRequest, match=r"imm=0xc in range\(10, 20\) is expected or counted"):
        table.claim(range(10, 20), print)


def test_expecting_a_claimed_immediate_is_refused(table) -> None:
    """It could never be reached."""
    table.claim(range(10, 20), print)
    with pytest.raises(BadRequest, match=r"imm=0xb is claimed by on_imm\(range\(10, 20\)\)"):
        expect(table, 1, 11)
    assert 0 == table.waiting


def test_remove_forgets_count_or_claim(table) -> None:
    """An application that ends a request gives its immediate back, to be used anew."""
    table.add(7, 5)
    for start in (8, 10, 20):
        table.claim(range(start, start + 2), print)

    assert 5 == table.remove(7)
    assert 0 == table.remove(7)
    assert 0 == table.remove(10)
    table.add(11, 1)
    assert {11: 1} == table.counts
    assert [True, False, True] == [table.is_claimed(imm) for imm in (9, 11, 21)]


def test_remove_refuses_what_somebody_waits_for(table) -> None:
    """The waiter would hang."""
    expect(table, 5)
    table.add(7, 2)
    with pytest.raises(BusyError, match=r"imm=0x7 is expected \(2 of 5 are here\)"):
        table.remove(7)
    expect(table, 9)
    with pytest.raises(BusyError, match=r"imm=0x7 is expected \(2 of 5 are here\)"):
        table.remove(7)


def test_a_burnt_immediate_gives_up_its_line_and_its_count(table) -> None:
    """Whoever stands in line waits for ever, and a count that stays is somebody else's later."""
    wants = [expect(table, 4), expect(table, 1), expect(table, 2), expect(table, 3)]
    other = expect(table, 2, 8)
    table.cancel(wants[1])
    table.add(7, 3)
    error = FabricError("gone", code="PEER_FAILED")

    assert ([wants[0], wants[2], wants[3]], 3) == table.burn(7, "a", error)
    assert ([], 0) == table.burn(9, "a", error), "nothing of it is here"
    assert ({}, 1) == (table.counts, table.waiting)
    table.add(7, 9)
    for imm in (7, 9):
        with pytest.raises(FabricError, match=rf"gone; the immediate is burnt.*{imm:#x}"):
            expect(table, 1, imm)
    assert 9 == table.remove(7)
    again = expect(table, 1)
    table.add(7, 1)
    table.add(8, 2)
    assert [again, other] == table.reached
    assert 0 == table.waiting


def test_give_up_empties_the_lines_and_keeps_the_counts(table) -> None:
    """On close every waiter is told, once; what arrived stays in the statistics."""
    wants = [expect(table, 2), expect(table, 2), expect(table, 1, 8)]
    table.add(7, 1)

    assert wants == table.give_up()
    assert 0 == table.waiting
    assert {7: 1} == table.counts
    assert [] == table.give_up()


def test_counts_back_at_zero_leave_the_table(table) -> None:
    """Fresh immediates for ever would otherwise fill the memory of a long-lived engine."""
    for imm in range(1000):
        expect(table, 1, imm)
        table.add(imm, 1)

    assert 1000 == len(fired(table))
    assert {} == table.counts
    assert 0 == table.waiting


@pytest.mark.parametrize("imm", [-1, 2**32, "7", 1.0, None])
def test_check_imm_refuses_what_is_no_32_bit_number(imm) -> None:
    """A float or a 33rd bit would be cut on the wire and count for somebody else."""
    with pytest.raises(BadRequest, match="is not an integer of 32 bits"):
        check_imm(imm)


def test_bursts_of_neighbours_count_with_what_came_before_and_after(table) -> None:
    """A count that moves from the dict to a page must not be lost, doubled, or in both."""
    table.add(0x10005, 3)
    table.add(0x20005, 1)
    want, late = expect(table, 6, 0x10005), expect(table, 2, 0x10007)
    table.add_many(np.arange(0x10000, 0x10100, dtype=np.uint32).tobytes())
    assert (4, 1, 1) == tuple(table.counts.get(imm) for imm in (0x10005, 0x100FF, 0x20005))
    table.add(0x10005, 1)
    assert [] == fired(table)
    table.add_many(np.arange(0x10000, 0x10100, dtype=np.uint32).tobytes())

    assert [want, late] == sorted(fired(table), key=lambda found: found.imm)
    assert 254 + 1 == len(table.counts)  # both were used up; 0x20005 is there
    assert 2 * 254 + 1 == sum(table.counts.values())
    assert 2 == table.remove(0x10001)
    assert 0x10001 not in table.counts


def test_a_burst_over_a_border_is_counted_too(table) -> None:
    """Its upper halves differ: no page takes it, and none of it may fall between."""
    table.add_many(np.arange(0x1FFC0, 0x20040, dtype=np.uint32).tobytes())

    assert dict.fromkeys(range(0x1FFC0, 0x20040), 1) == table.counts


def test_a_burst_over_the_border_of_a_page_goes_to_both_sides(table) -> None:
    """A value that has a page and is counted in the dict is never seen again."""
    border = np.arange(0x1FFC0, 0x20040, dtype=np.uint32)
    table.add_many(np.arange(0x20000, 0x20080, dtype=np.uint32).tobytes())
    want = expect(table, 2, 0x20001)
    table.add_many(border.tobytes())

    assert [want] == fired(table)
    assert (2, 1, 0, 1) == tuple(table.counts[imm] for imm in (0x20000, 0x1FFFF, 0x20001, 0x20041))
    table.add_many(np.arange(0x1FF80, 0x20000, dtype=np.uint32).tobytes())
    table.add_many(border.tobytes())
    assert (3, 3, 1, 1) == tuple(table.counts[imm] for imm in (0x20000, 0x1FFFF, 0x20001, 0x20041))


def test_pages_are_limited_and_what_finds_none_is_counted(table) -> None:
    """Bursts all over 32 bits would else take half a megabyte for each 64 Ki of values."""
    for high in range(200):
        table.add_many(np.arange(high << 16, (high << 16) + 40, dtype=np.uint32).tobytes())

    assert 200 * 40 == len(table.counts) == sum(table.counts.values())


def test_check_imm_makes_plain_ints_of_numpy_ones() -> None:
    """A numpy integer as key of a dict is slow, and wraps in arithmetic."""
    for imm in (np.uint32(0xFFFFFFFF), np.int64(3), 5):
        found = check_imm(imm)
        assert int(imm) == found
        assert type(found) is int


@pytest.mark.parametrize("burst", [1, 100])
def test_a_flood_of_values_is_bounded_and_no_count_is_ever_short(table, burst, monkeypatch) -> None:
    """A peer chooses the values: memory must not grow with them, nor a reader wait in vain."""
    monkeypatch.setattr(room, "REST_MAX", 1000)
    known, waits = expect(table, 2, imm=0x50000), expect(table, 3, imm=0x60001)
    flood = np.random.default_rng(0).permutation(np.arange(1 << 16, dtype=np.uint32)) << 16 | 5
    table.add(9, 4)
    for start in range(0, 20_000, burst):
        table.add_many(flood[start : start + burst].tobytes())
    table.add_many(np.array([0x50000, 0x60001] * 2, np.uint32).tobytes())

    assert len(table.counts) <= 1002 + burst
    assert 20_000 + 4 + 4 == table.total
    assert table.counts.dropped + sum(table.counts.values()) + known.count == table.total
    assert [known] == fired(table)
    table.add(0x60001, 1)
    assert [waits] == fired(table), "what was expected is never dropped"
    table.add(9, 1)
    expect(table, 5, imm=9)
    assert 1 == len(fired(table)), "what came before the flood is exact"
    table.add(10, 1)
    assert 10 not in table.counts, "of what comes after it nobody knows what is missing"
    with pytest.raises(FabricError, match="19... arrivals of immediates that nobody expected"):
        expect(table, 1, imm=int(flood[19_999]))
