"""Planted bugs: peers are told wrongly, or not at all, which immediates do not come.

Their gate, `test_telling`, looks for them in those of the oracle's runs that tell: one in four.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tep.control import failures, telling
from tep.control.failures import Failures
from tep.control.telling import Telling
from tep.core import shortfall
from tep.core.imm import ImmTable
from tep.core.pending import Acks
from tests.gate.registry import Bug, Change

TELLING: dict[str, Bug] = {}

BUDGET = 20_000


def telling_bug(plant: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
    """Register a bug, with the seeds it may take to be found; one in four can show it."""
    TELLING[plant.__name__] = Bug(plant.__name__, plant, BUDGET)
    return plant


@telling_bug
def came_stays_counted() -> list[Change]:
    """What came of a transfer that failed counts for the next attempt."""
    return [(ImmTable, "take_back", lambda *_: None)]


@telling_bug
def retry_overtakes_the_word() -> list[Change]:
    """A retry is sent before its target knows of the failure."""
    return [(Telling, "holds", lambda *_: False)]


@telling_bug
def late_rows_are_not_fenced() -> list[Change]:
    """A retry is sent while rows of the failed attempt may still land."""
    return [(Telling, "_may_land", lambda *_: False)]


@telling_bug
def what_had_landed_is_not_told() -> list[Change]:
    """Rows in doubt that turn out to have landed stay in the count."""
    return [(Telling, "cleared", lambda *_: None)]


@telling_bug
def lists_are_applied_twice() -> list[Change]:
    """A list that is sent again, since its answer got lost, is applied again."""

    class Forgetful(failures._Heard):
        @property
        def serials(self):
            return set()

        @serials.setter
        def serials(self, _):
            pass

    return [(failures, "_Heard", Forgetful)]


@telling_bug
def a_new_serial_each_time() -> list[Change]:
    """A list that is sent again looks like another one."""
    ask, fresh = Telling._ask, itertools.count(1 << 20)

    def renamed(self, link, owed, each):
        del owed.lists[each.serial]
        each.serial = next(fresh)
        owed.lists[each.serial] = each
        ask(self, link, owed, each)

    return [(Telling, "_ask", renamed)]


@telling_bug
def uncounted_arrivals_are_not_awaited() -> list[Change]:
    """A list is applied before all that it speaks of has been counted."""
    return [(failures, "_not_yet", lambda *_: "")]


@telling_bug
def told_once() -> list[Change]:
    """A peer that cannot be reached is never told."""
    return [(telling, "_TRIES_MAX", 0)]


@telling_bug
def cancels_are_not_told() -> list[Change]:
    """Who expects what was cancelled waits for its timeout."""
    gave_up = Telling.gave_up

    def failed_only(self, transfer):
        if transfer.failure is not None:
            gave_up(self, transfer)

    return [(Telling, "gave_up", failed_only)]


@telling_bug
def posted_is_taken_for_arrived() -> list[Change]:
    """Rows that were lost count as if they had come."""
    count = shortfall._count

    def all_came(pending, found):
        lost, pending.lost = pending.lost, {}
        count(pending, found)
        pending.lost = lost

    return [(shortfall, "_count", all_came)]


@telling_bug
def no_expectation_fails() -> list[Change]:
    """The receiver corrects its counts, and lets everybody wait."""
    fail = Failures.fail

    def mute(self, meant, error, before=None):
        if before is None:
            return fail(self, meant, error)
        before()
        return set()

    return [(Failures, "fail", mute)]


@telling_bug
def later_expectations_do_not_fail() -> list[Change]:
    """Who states an expectation after the word came waits for its timeout."""
    return [(Failures, "_keep", lambda *_: None)]


@telling_bug
def failed_rows_are_not_in_doubt() -> list[Change]:
    """Rows of a failed transfer that landed are taken for those of its retry, once a path dies."""
    return [(Acks, "doubt", lambda *_: None)]


__all__ = ["TELLING"]
