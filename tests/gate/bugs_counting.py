"""Planted bugs: how immediates are counted, expected and claimed."""

from __future__ import annotations

from collections.abc import Callable

from tep.backends.base import Kind
from tep.core.imm import ImmTable
from tep.engine.worker import Worker
from tests.gate.registry import IMM, WORKER, Change, bug, mistake

# ---------------------------------------------------------------------- counting


def expects(change: Callable[[ImmTable, object], None]) -> list[Change]:
    expect = ImmTable.expect

    def changed(self, want):
        change(self, want)
        expect(self, want)

    return [(ImmTable, "expect", changed)]


@bug()
def expect_counts_transfers() -> list[Change]:
    """One immediate is taken for one transfer, however many rows it has."""

    def change(_, want):
        want.count = min(want.count, 1)

    return expects(change)


@bug()
def expect_off_by_one() -> list[Change]:
    """The last immediate is not waited for."""

    def change(_, want):
        want.count = max(1, want.count - 1)

    return expects(change)


@bug()
def early_imm_lost() -> list[Change]:
    """An immediate that arrives before it is expected is forgotten."""
    return mistake(
        IMM,
        "        have = self.counts.get(want.imm)\n        if have >=",
        "        have = 0 * self.counts.pop(want.imm)\n        if have >=",
    )


@bug()
def expect_equal_not_ge() -> list[Change]:
    """A count fires when it is exactly reached, not when it is passed."""
    return mistake(IMM, "while line and have >= (want", "while line and have == (want")


@bug()
def count_zeroed_on_fire() -> list[Change]:
    """Firing sets the count to zero: the surplus is lost."""
    return mistake(IMM, "have -= want.count", "have = 0")


@bug()
def count_kept_on_fire() -> list[Change]:
    """Firing leaves the count as it is: the next expectation finds what was used up."""
    return mistake(IMM, "have -= want.count", "pass")


@bug()
def imm_truncated() -> list[Change]:
    """Immediates are 16 bits wide for the receiver."""
    add = ImmTable.add

    def short(self, imm, count):
        add(self, imm & 0xFFFF, count)

    def change(_, want):
        want.imm &= 0xFFFF

    return [(ImmTable, "add", short), *expects(change)]


@bug()
def completion_count_ignored() -> list[Change]:
    """An entry that stands for several immediates counts as one."""
    return mistake(
        IMM,
        "        self.total += count\n        if self._claims and",
        "        count = min(count, 1)\n        if self._claims and",
    )


@bug()
def claim_also_counted() -> list[Change]:
    """A claimed immediate is handed over, and counted as well."""
    return mistake(
        IMM, "count))\n                return True", "count))\n                return False"
    )


@bug()
def newest_expectation_first() -> list[Change]:
    """Expectations of one immediate stand on a stack, not in a line."""

    def expect(self, want):
        line = self._lines[want.imm] = {want: None} | self._lines.get(want.imm, {})
        self._fire(want.imm, line, self.counts.get(want.imm))

    return [(ImmTable, "expect", expect)]


@bug(budget=1500)
def cancelled_expectation_eats() -> list[Change]:
    """A cancelled expectation takes along the immediates that had arrived for it."""
    cancel = ImmTable.cancel

    def eat(self, want):
        left = cancel(self, want)
        if left:
            self.counts.pop(want.imm)
        return left

    return [(ImmTable, "cancel", eat)]


# ---------------------------------------------------------------------- counting by columns

BY_COLUMNS: Change = ("tep.engine.worker", "_SCALAR_MAX", 0)
"""Small runs would count row by row: with this the columns do it, however few the rows."""


@bug()
def column_counts_ignored() -> list[Change]:
    """In a column of completions each counts as one, whatever its count."""
    return [
        BY_COLUMNS,
        *mistake(
            WORKER,
            "            self.imms.add(imm, count)\n            if",
            "            self.imms.add(imm, 1)\n            if",
        ),
    ]


@bug()
def mixed_columns_dropped() -> list[Change]:
    """When immediates and finished rows come in one burst, only the immediates are taken."""
    take = Worker._take_columns

    def drop(self, domain, n):
        kinds = self._out["kind"][:n]
        if (kinds != kinds[0]).any():
            mine = kinds == Kind.IMM
            columns = (self._out[name][:n][mine] for name in ("imm", "count", "ctx"))
            self._count(domain, *columns)
        else:
            take(self, domain, n)

    return [BY_COLUMNS, (Worker, "_take_columns", drop)]


@bug()
def column_errors_missed() -> list[Change]:
    """The statuses of a column of completions are not looked at."""
    begin = "        kinds, counts, imms, ctxs = self._columns"
    return [BY_COLUMNS, *mistake(WORKER, begin, f'        self._out["status"][:n] = 0\n{begin}')]
