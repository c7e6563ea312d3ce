"""Congestion: queue pairs that are held back by what their receivers tell them. Credit, or ECN.

Credit: a queue pair has at most so many bytes under way; a receiver gives them back when it has
taken them. ECN: what waits longer than a threshold is marked, the receiver tells the sender of it
now and then, and the sender halves the rate of the queue pair, which then comes back in steps.

Rule: what a receiver says of a quantum reaches its sender two latencies after the quantum began to
leave, or later. So a plan made up to one latency after the earliest start is never made again.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Final, NamedTuple

import numpy as np

from tep.sim.ledger import NEVER_PS
from tep.sim.machines import Pairs
from tep.sim.profile import Profile
from tep.sim.queues import Ints, Rate
from tep.sim.sendqueue import SendQueue, Units

__all__ = ["Marks", "PacedQueue", "is_paced"]

_FULL: Final = 1 << 20
"""The rate of a queue pair that nobody holds back."""
_LEAST: Final = _FULL >> 10
_FAST: Final = 5  # steps that halve the distance to the old rate, before that is raised: DCQCN
_PERIODS_MAX: Final = 4096  # after so many steps any rate is back
_SERVED: Final = 1 << 40  # places of queue pairs that were served, behind all others


def is_paced(profile: Profile) -> bool:
    """Whether receivers hold senders back."""
    return bool(profile.credit_bytes or profile.ecn_bytes)


class _Quantum(NamedTuple):
    ready_ps: int
    service_ps: int
    number: int
    last: bool
    nbytes: int
    holds_ps: int


class _Pair:
    """One queue pair: what it has to send, and what holds it back."""

    def __init__(self, place: int) -> None:
        self.waiting: deque[_Quantum] = deque()
        self.place = place
        self.ended_ps = -1
        self.freed_ps = 0  # when the credit came that it waited for
        self.paced_ps = 0  # not before, by its rate
        self.open_bytes = 0
        self.rate = self.goal = _FULL
        self.steps = 0
        self.since_ps = 0


class PacedQueue(SendQueue):
    """The plan of one NIC, made only as far as it is asked for; see the rule of this room.

    Of `starts`, the last stands for the rest: no quantum that is not planned leaves before it.

    Args:
        profile: of its machine.
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self._credit_bytes = profile.credit_bytes
        self._recover_ps = profile.ecn_recover_ps
        self._grow = profile.ecn_grow_bps * _FULL // profile.wire_bps
        self._pairs: dict[int, _Pair] = {}
        self._news: list[tuple[int, int, int, bool]] = []
        self._turn = _SERVED
        self._rows = 0
        self._wire_ps = 0

    def add(self, units: Units, now_ps: int) -> None:  # noqa: ARG002  # the plan is behind it
        """Take more units."""
        for number, target, ready, service, last, nbytes, holds in units.rows():
            pair = self._pairs.get(target)
            if pair is None:
                pair = self._pairs[target] = _Pair(self._rows)
            pair.waiting.append(_Quantum(ready, service, number, last, nbytes, holds))
            self._rows += 1
        self.foresee()

    def tell(self, time_ps: int, target: int, nbytes: int, *, marked: bool) -> None:
        """At `time_ps` the NIC learns that a receiver took so many bytes, or that it was marked.

        `foresee()` is to follow.
        """
        heappush(self._news, (time_ps, target, nbytes, marked))

    def before(self, limit_ps: int) -> int:
        """Plan what leaves before the limit; the number of units that do, from `at` = 0 on."""
        found: list[_Row] = []
        starts: list[int] = []
        while True:
            start_ps, target = self._first()
            if self._news and self._news[0][0] <= min(start_ps, limit_ps - 1):
                self._hear(*heappop(self._news))
            elif start_ps < limit_ps:
                starts.append(start_ps)
                found.append(self._send(start_ps, target))
            else:
                break
        self.units = _units(found)
        self.starts = np.array(starts, np.int64)
        self.at = 0
        planned = len(starts)
        self.foresee()
        return planned

    def drop_waiting(self, now_ps: int) -> Units:  # noqa: ARG002  # as in add()
        """Give up what is not planned; return it."""
        rows = [
            (quantum.number, target, quantum.ready_ps, quantum.service_ps, *quantum[3:])
            for target, pair in self._pairs.items()
            for quantum in pair.waiting
        ]
        self._pairs.clear()
        self.foresee()
        return _units(rows)

    def foresee(self) -> None:
        """Write down the earliest that the rest may leave, if there is a rest."""
        planned = self.starts[: len(self.units.number)]
        if any(pair.waiting for pair in self._pairs.values()):
            first_ps = self._first()[0]
            if self._news:
                first_ps = min(first_ps, self._news[0][0])
            planned = np.append(planned, first_ps)
        self.starts = planned

    # ------------------------------------------------------------------ one step

    def _first(self) -> tuple[int, int]:
        """When the next quantum leaves if nothing is heard before, and where it goes."""
        best = (NEVER_PS, False, 0, 0)
        for target, pair in self._pairs.items():
            if not pair.waiting:
                continue
            if self._is_held(pair):
                continue
            head = pair.waiting[0]
            heads_ps = max(head.ready_ps, pair.paced_ps, pair.freed_ps)
            waited = heads_ps <= pair.ended_ps
            best = min(best, (max(heads_ps, pair.ended_ps), waited, pair.place, target))
        return max(best[0], self._wire_ps), best[3]

    def _is_held(self, pair: _Pair) -> bool:
        """Whether its head waits for credit; one quantum may always be under way."""
        room = self._credit_bytes - pair.waiting[0].nbytes
        return bool(self._credit_bytes) and 0 < pair.open_bytes > room

    def _send(self, start_ps: int, target: int) -> _Row:
        pair = self._pairs[target]
        quantum = pair.waiting.popleft()
        self._recover(pair, start_ps)
        pair.paced_ps = start_ps + quantum.service_ps * _FULL // pair.rate
        pair.open_bytes += quantum.nbytes
        pair.ended_ps = self._wire_ps = start_ps + quantum.service_ps
        self._turn += 1
        pair.place = self._turn
        return quantum.number, target, quantum.ready_ps, quantum.service_ps, *quantum[3:]

    def _hear(self, time_ps: int, target: int, nbytes: int, marked: bool) -> None:
        pair = self._pairs.get(target)
        if pair is None:
            return
        if pair.waiting and self._is_held(pair):
            pair.freed_ps = time_ps
        pair.open_bytes -= nbytes
        if marked:
            self._recover(pair, time_ps)
            pair.goal, pair.rate = pair.rate, max(_LEAST, pair.rate // 2)
            pair.steps, pair.since_ps = 0, time_ps

    def _recover(self, pair: _Pair, now_ps: int) -> None:
        """Take the steps back to the full rate that are due by now."""
        if pair.rate == _FULL:
            return
        periods = (now_ps - pair.since_ps) // self._recover_ps
        pair.since_ps += periods * self._recover_ps
        for _ in range(min(periods, _PERIODS_MAX)):
            pair.steps += 1
            if pair.steps > _FAST:
                pair.goal = min(_FULL, pair.goal + self._grow)
            pair.rate = (pair.rate + pair.goal + 1) // 2


_Row = tuple[int, int, int, int, bool, int, int]
"""One quantum, in the order of the columns of `Units`."""


def _units(rows: list[_Row]) -> Units:
    number, target, ready, service, last, nbytes, holds = np.array(rows, np.int64).reshape(-1, 7).T
    return Units(number, target, ready, service, last.astype(np.bool_), nbytes, holds)


class Marks:
    """Which quanta a receiver tells its senders of.

    Args:
        profile: of the machines.
        pairs: where they are not all alike.
    """

    def __init__(self, profile: Profile, pairs: Pairs | None = None) -> None:
        self._pairs = pairs
        self._waits_ps = int(Rate(profile.wire_bps).ps(np.array([profile.ecn_bytes]))[0])
        self._every_ps = profile.ecn_every_ps
        self._on = bool(profile.ecn_bytes)
        self._told_ps: dict[tuple[int, int], int] = {}

    def told(self, source: Ints, target: Ints, waited: Ints, done: Ints) -> list[bool]:
        """Of each quantum, whether its sender is told that it waited too long.

        Args:
            source: the NIC that sent it.
            target: the NIC that took it.
            waited: how long each stood behind others.
            done: when each was taken, in order for each pair.
        """
        found = [False] * len(done)
        if not self._on:
            return found
        waits = self._waits_ps if self._pairs is None else self._pairs.waits_ps(target)
        for place in (waited > waits).nonzero()[0].tolist():
            pair, now = (int(source[place]), int(target[place])), int(done[place])
            if now >= self._told_ps.get(pair, -self._every_ps) + self._every_ps:
                self._told_ps[pair] = now
                found[place] = True
        return found
