"""The network: quanta that wait for others on their way, at uplinks, downlinks and receivers.

A quantum passes its servers one behind the other: the uplink of its sender's leaf and the downlink
of its receiver's, if these are two leaves, then the receiving NIC. Each serves in order of arrival
of first bytes. Bytes flow through: the next server begins a latency after this one began, and a
quantum has landed when its last byte is through the slowest.

Rule 1 (lookahead): what is not known yet starts at the limit or later, so it cannot arrive at a
server before the limit plus the shortest way there. What arrives later than that waits in a pool.
The answers are those of an event for each arrival; tests/unit/sim/test_timing_paths.py holds them
against a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tep.sim.profile import Profile
from tep.sim.queues import NEVER_PS, Ints, Rate, Units, fifo_grouped, has_all

__all__ = ["LAST", "NUMBER", "Passing", "Paths", "flights", "no_flights"]

NUMBER: Final = 0
LAST: Final = 1
TARGET, NBYTES, SOURCE, START, FIRST, TAIL, HOLDS = range(2, 9)
_COLUMNS: Final = 9
_NONE: Final = np.empty((0, _COLUMNS), np.int64)


@dataclass(slots=True)
class Passing:
    """The outcome of one pass; `Paths.keep` makes it effective.

    Attributes:
        flights: quanta whose landing is known, a row each.
        served: when the receiver has taken each.
        done: the landing time of each: no byte lands before its sender has sent it.
        receivers: the time from which each receiver is free.
    """

    flights: Ints
    served: Ints
    done: Ints
    receivers: Ints
    _ups: Ints
    _downs: Ints
    _below: Ints
    _near: Ints


def no_flights() -> Ints:
    """No quanta."""
    return _NONE


def flights(units: Units, starts: Ints, source: int) -> Ints:
    """Put quanta into rows, which leave a NIC at their starts."""
    rows = np.empty((len(starts), _COLUMNS), np.int64)
    rows[:, NUMBER], rows[:, LAST], rows[:, TARGET] = units.number, units.last, units.target
    rows[:, NBYTES], rows[:, SOURCE], rows[:, START] = units.nbytes, source, starts
    rows[:, FIRST], rows[:, TAIL] = starts, starts + units.service
    rows[:, HOLDS] = units.service if units.holds is None else units.holds
    return rows


class Paths:
    """The servers of one network, and the quanta between them.

    Args:
        profile: of a machine; all of one fabric have the same network.
        latency_ps: of every route, or of the shortest, without the network's own.
        receiving: (sources, targets, holds) -> how long each holds its receiver.
        ways: (sources, targets) -> the latency of each; None: `latency_ps`.
    """

    def __init__(
        self,
        profile: Profile,
        latency_ps: int,
        receiving: Callable[[Ints, Ints, Ints], Ints],
        ways: Callable[[Ints, Ints], Ints] | None,
    ) -> None:
        self._leaf_nodes = profile.leaf_nodes
        self._spine_ps = profile.spine_ps
        self._link = Rate(profile.uplink_bps) if profile.uplink_bps else None
        self._latency_ps = latency_ps
        self._receiving = receiving
        self._ways = ways
        self._nodes: dict[str, int] = {}
        self._leaf = np.zeros(16, np.int64)
        self._ups = np.zeros(16, np.int64)
        self._downs = np.zeros(16, np.int64)
        self._below = _NONE  # on their way to a downlink
        self._near = _NONE  # on their way to a receiver

    def place(self, number: int, node: str) -> None:
        """Say on which node a NIC is: nodes stand below leaves in the order they are started."""
        turn = self._nodes.setdefault(node, len(self._nodes))
        leaf = turn // self._leaf_nodes if self._leaf_nodes else 0
        self._leaf = _longer(self._leaf, number)
        self._leaf[number] = leaf
        self._ups, self._downs = _longer(self._ups, leaf), _longer(self._downs, leaf)

    def due_ps(self) -> int:
        """The time when the first quantum in a pool can land; NEVER_PS: there is none."""
        near_ps = int(self._near[:, FIRST].min(initial=NEVER_PS))
        return min(near_ps, int(self._below[:, FIRST].min(initial=NEVER_PS)) + self._latency_ps)

    def advance(self, new: Ints, limit_ps: int, receivers: Ints) -> Passing:
        """Compute the landings, provided that nothing unknown starts before the limit.

        Args:
            new: quanta that start before the limit, as `flights` makes them.
            limit_ps: see the rule above.
            receivers: the time from which each receiving NIC is free; not changed.
        """
        ups, downs, below = self._ups, self._downs, self._below
        near = [self._near]
        if self._leaf_nodes:
            ups, downs = ups.copy(), downs.copy()
            far = self._leaf[new[:, SOURCE]] != self._leaf[new[:, TARGET]]
            new, crossing = new[~far], new[far]
            crossing = self._cross(crossing, SOURCE, ups)
            crossing[:, [FIRST, TAIL]] += self._spine_ps
            below = np.concatenate((below, crossing))
            known = below[:, FIRST] < limit_ps + self._spine_ps
            coming, below = below[known], below[~known]
            near.append(self._leave(self._cross(coming, TARGET, downs)))
        near.append(self._leave(new))
        rows, waiting = np.concatenate(near), _NONE
        known = rows[:, FIRST] < limit_ps + self._latency_ps
        if not has_all(known):
            rows, waiting = rows[known], rows[~known]
        rows = _in_order(rows)
        served = done = rows[:, TAIL]
        free = receivers
        if len(rows):
            service = self._receiving(rows[:, SOURCE], rows[:, TARGET], rows[:, HOLDS])
            served = fifo_grouped(rows[:, FIRST], service, rows[:, TARGET], receivers)
            free = receivers.copy()
            np.maximum.at(free, rows[:, TARGET], served)
            done = np.maximum(done, served)
        return Passing(rows, served, done, free, ups, downs, below, waiting)

    def shorten(self, passing: Passing, limit_ps: int, receivers: Ints) -> Passing | None:
        """Do as `advance` with an earlier limit; None: these servers need a pass of its own."""
        if self._leaf_nodes or self._ways is not None:
            return None
        stop = int(passing.flights[:, FIRST].searchsorted(limit_ps + self._latency_ps))
        rows, served = passing.flights[:stop], passing.served[:stop]
        free = receivers.copy()
        np.maximum.at(free, rows[:, TARGET], served)
        return replace(
            passing, flights=rows, served=served, done=passing.done[:stop], receivers=free
        )

    def keep(self, passing: Passing) -> None:
        """Make a pass effective."""
        self._ups, self._downs = passing._ups, passing._downs
        self._below, self._near = passing._below, passing._near

    def _cross(self, rows: Ints, end: int, free: Ints) -> Ints:
        """Pass uplinks (end: SOURCE) or downlinks (TARGET); `free` is brought forward."""
        if self._link is None or not len(rows):
            return rows.copy()
        rows = rows[_order(rows)]
        link = self._leaf[rows[:, end]]
        service = self._link.ps(rows[:, NBYTES])
        done = fifo_grouped(rows[:, FIRST], service, link, free)
        np.maximum.at(free, link, done)
        rows[:, FIRST] = done - service
        rows[:, TAIL] = np.maximum(rows[:, TAIL], done)
        return rows

    def _leave(self, rows: Ints) -> Ints:
        """Add the latency of each pair: the rows are on their way to the receiver."""
        rows = rows.copy()
        way: Ints | int = self._latency_ps
        if self._ways is not None:
            way = self._ways(rows[:, SOURCE], rows[:, TARGET])
        rows[:, FIRST] += way
        rows[:, TAIL] += way
        return rows


def _longer(column: Ints, index: int) -> Ints:
    if index < len(column):
        return column
    return np.concatenate((column, np.zeros(index + 1, np.int64)))


def _order(rows: Ints) -> Ints:
    """Sort by arrival; rows that arrive together by sender, then by departure."""
    return np.lexsort((rows[:, START], rows[:, SOURCE], rows[:, FIRST]))


def _in_order(rows: Ints) -> Ints:
    first = rows[:, FIRST]
    if has_all(first[1:] > first[:-1]):
        return rows
    found: Ints = rows[_order(rows)]
    return found
