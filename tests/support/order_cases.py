"""Small cases whose orders of events are all tried, and the search for a planted bug in them.

Each case is a run as a function of its choices. Not a test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from tests.support import burnt_orders, failover_orders, reopening
from tests.support.orders import explored
from tests.support.planted import shows
from tests.world.explore import Choices

__all__ = ["BURNT", "FAILOVER", "REOPENING", "Cases", "first_case"]

Cases = dict[str, Callable[[Choices], object]]


def _failover(rows: int, nics: tuple[int, int], *doomed: int, **knobs: int) -> partial:
    return partial(
        failover_orders.Play, **{"kind": "page"} | knobs, rows=rows, nics=nics, doomed=doomed
    )


FAILOVER: Final[Cases] = {
    "a NIC dies": _failover(2, (2, 2), 0, 1, 2, 3),
    "two share a path and the immediate": _failover(1, (2, 1), 0, sharing=2, kind="pinned"),
    "an immediate a row": _failover(2, (2, 1), 0, 1, kind="imms"),
    "a message is lost": _failover(2, (2, 1), 0, losses=1),
    "a message comes twice": _failover(1, (2, 1), 0, copies=1, losses=1),
    "a queued row is cancelled": _failover(3, (2, 1), 0, cancels=1, depth=1),
    "cancelled, with one NIC left": _failover(2, (1, 2), 1, cancels=1, depth=1),
    "two on a path that is flushed": _failover(1, (2, 1), 0, sharing=2, kind="pinned", flush=True),
    "rows are flushed": _failover(3, (2, 1), 1, flush=True),
    "the sender restarts": _failover(1, (2, 1), 0, restarts=1, rounds=2),
    "two share the immediate": _failover(1, (2, 1), 0, 1, sharing=2),
    "two share it, and are cut off": _failover(1, (1, 2), sharing=2, cuts=1),
    "rounds under one immediate": _failover(2, (1, 2), cuts=2, rounds=2, heal=True),
    "after a cancelled round": _failover(
        2, (1, 2), cuts=2, rounds=2, heal=True, cancels=1, depth=1
    ),
    "four rows, and a NIC dies": _failover(4, (2, 1), 0),
}

BURNT: Final[Cases] = {
    "a queued row is cancelled": partial(
        burnt_orders.Play, nics=(1, 1), rows=2, cancels=1, depth=1
    ),
    "its notice is lost": partial(
        burnt_orders.Play, nics=(1, 1), rows=2, cancels=1, depth=1, losses=1
    ),
    "its notice comes twice": partial(
        burnt_orders.Play, nics=(1, 1), rows=2, cancels=1, depth=1, copies=1, reuse=True
    ),
    "a path is cut": partial(burnt_orders.Play, nics=(1, 2), cuts=1),
    "the only path is cut": partial(burnt_orders.Play, nics=(1, 1), cuts=1),
    "no failover": partial(burnt_orders.Play, nics=(1, 2), cuts=1, failover=False),
    "cut and cancelled": partial(
        burnt_orders.Play, nics=(1, 2), rows=2, cuts=1, cancels=1, depth=1
    ),
}

REOPENING: Final[Cases] = {
    "one row": partial(reopening.Play, rows=1),
    "a message comes twice": partial(reopening.Play, rows=1, copies=1),
    "cut twice": partial(reopening.Play, rows=1, cuts=2, rounds=2),
    "both ways": partial(reopening.Play, rows=1, both=True),
    "two rounds": partial(reopening.Play, rows=2, rounds=2),
}


def first_case(cases: Cases, runs_max: int) -> str | None:
    """The first case in which some order breaks a promise; None: no order of so many a case."""
    for name, play in cases.items():
        if shows(lambda _, play=play: explored(lambda c: bool(play(c)), runs_max=runs_max), 0):
            return name
    return None
