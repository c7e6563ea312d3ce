"""The table of immediates against a naive one, and its columns against its scalars."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tep.base.errors import BadRequest, BusyError
from tep.core.imm import ImmTable

IMMS = st.sampled_from([0, 1, 0x10001, 0x7FFFFFFF, 0xFFFFFFFF])
BURSTS = st.one_of(
    st.lists(st.one_of(IMMS, st.integers(0, 200)), min_size=1, max_size=300),
    # Neighbours, here and there over a border: what pages are for.
    st.builds(lambda at, n: list(range(at, at + n)), st.integers(0xFF80, 0x10040), st.just(70)),
)
OPS = st.one_of(
    st.tuples(st.just("expect"), IMMS, st.integers(0, 4)),
    st.tuples(st.just("add"), IMMS, st.integers(1, 5)),
    st.tuples(st.just("burst"), st.lists(IMMS, min_size=1, max_size=80), st.none()),
    st.tuples(st.just("cancel"), st.integers(0, 30), st.none()),
    st.tuples(st.just("remove"), IMMS, st.none()),
)


@dataclass(eq=False)
class Want:
    imm: int
    count: int


class Naive:
    """Every arrival is an entry of a list, every look goes over everything."""

    def __init__(self) -> None:
        self.arrived: list[int] = []
        self.line: list[Want] = []
        self.reached: list[Want] = []

    def settle(self) -> None:
        again = True
        while again:
            again = False
            for imm in {want.imm for want in self.line}:
                first = next(want for want in self.line if want.imm == imm)
                if self.arrived.count(imm) >= first.count:
                    for _ in range(first.count):
                        self.arrived.remove(imm)
                    self.line.remove(first)
                    self.reached.append(first)
                    again = True


def _play(table: ImmTable[Want], naive: Naive, ops) -> None:
    made: list[Want] = []
    for op, what, count in ops:
        match op:
            case "expect":
                want = Want(what, count)
                made.append(want)
                naive.line.append(want)
                table.expect(want)
            case "add":
                naive.arrived += [what] * count
                table.add(what, count)
            case "burst":
                naive.arrived += what
                table.add_many(np.array(what, np.uint32).tobytes())
            case "cancel" if what < len(made):
                assert (made[what] in naive.line) == table.cancel(made[what])
                if made[what] in naive.line:
                    naive.line.remove(made[what])
            case "remove":
                waited = any(want.imm == what for want in naive.line)
                try:
                    found = table.remove(what)
                except BusyError:
                    assert waited
                else:
                    assert not waited
                    assert naive.arrived.count(what) == found
                    naive.arrived = [imm for imm in naive.arrived if imm != what]
        naive.settle()
        _compare(table, naive)


def _compare(table: ImmTable[Want], naive: Naive) -> None:
    assert {imm: naive.arrived.count(imm) for imm in naive.arrived} == dict(table.counts)
    assert len(naive.line) == table.waiting
    # Between immediates no order is promised; of one immediate, first come first served.
    for imm in (0, 1, 0x10001, 0x7FFFFFFF, 0xFFFFFFFF):
        expected = [want for want in naive.reached if want.imm == imm]
        assert expected == [want for want in table.reached if want.imm == imm]


@given(st.lists(OPS, max_size=60))
def test_table_agrees_with_a_naive_one_after_every_operation(ops) -> None:
    """Nothing is lost, nothing fires twice, early or out of line, whatever the order of events."""
    _play(ImmTable(), Naive(), ops)


def loose(table: ImmTable[Want]) -> Counter[int]:
    """Arrivals that claims took, by value."""
    found: Counter[int] = Counter()
    for callback, imm, count in table.loose:
        assert callback is print
        found[imm] += count
    return found


@given(
    st.lists(st.tuples(IMMS, st.integers(0, 40)), max_size=12),
    st.lists(BURSTS, min_size=1, max_size=4),
    st.booleans(),
)
def test_columns_count_as_scalars_do(wants, bursts, claim) -> None:
    """Bursts counted by columns leave the table as the same arrivals one by one."""
    tables: list[ImmTable[Want]] = [ImmTable(), ImmTable()]
    for table in tables:
        if claim:
            table.claim(range(100, 110), print)
        for imm, count in wants:
            table.expect(Want(imm, count))
    for burst in bursts:
        tables[0].add_many(np.array(burst, np.uint32).tobytes())
        for imm in burst:
            tables[1].add(imm, 1)

    columns, scalars = tables
    assert scalars.counts == columns.counts
    assert scalars.total == columns.total
    assert scalars.waiting == columns.waiting
    assert loose(scalars) == loose(columns)  # equal arrivals may come in one call
    for table in tables:
        table.reached.sort(key=lambda want: want.imm)  # stable: each line keeps its order
    assert [(w.imm, w.count) for w in scalars.reached] == [
        (w.imm, w.count) for w in columns.reached
    ]


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(1, 2**31))
def test_claims_partition_the_values(start, other, size) -> None:
    """A second claim is refused exactly if the two ranges share a value."""
    table: ImmTable[Want] = ImmTable()
    first = range(start, min(start + size, 2**32))
    second = range(other, min(other + size, 2**32))
    table.claim(first, print)
    shared = max(first.start, second.start) < min(first.stop, second.stop)
    try:
        table.claim(second, print)
    except BadRequest:
        assert shared
    else:
        assert not shared
