"""Congestion: rows that wait for others on their way, and queue pairs that receivers hold back.

A quantum passes its servers one behind the other: its node's bus, if all NICs of a node share one,
the uplink of its sender's leaf and the downlink of its receiver's (or the optical circuit between
the two), the receiving node's bus, then the receiving NIC. A bus is two servers, one each way. Each
serves in order of arrival of first bytes. Bytes flow through: the next server begins a latency
after this one began, and a quantum has landed when its last byte is through the slowest.

Receivers hold back by credit or ECN. Credit: a queue pair has at most so many bytes under way; a
receiver gives them back when it has taken them. ECN: a quantum that waits longer than a threshold
is marked, the receiver notifies the sender now and then, and the sender halves the rate of the
queue pair, which then comes back in steps.

Rule 1 (lookahead): what is not known yet starts at the limit or later, so it cannot arrive at a
server before the limit plus the shortest way there. What arrives later than that waits in a pool.
The answers are those of an event for each arrival; tests/unit/sim/test_timing_paths.py holds them
against a loop. Rule 2: what a receiver says of a quantum reaches its sender two latencies after the
quantum began to leave, or later. So a plan made up to one latency after the earliest start is never
made again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, NamedTuple

import numpy as np

from tep.base.errors import UsageError
from tep.sim.machines import Network, Pairs
from tep.sim.profile import Profile
from tep.sim.queues import NEVER_PS, Ints, Rate, SendQueue, Units, fifo_grouped, spans_ps

__all__ = [
    "LAST", "NUMBER", "Marks", "PacedQueue", "Passing", "Paths", "flights", "is_paced",
    "no_flights",
]  # fmt: skip

NUMBER: Final = 0
LAST: Final = 1
TARGET, SERVICE, NBYTES, SOURCE, START, FIRST, TAIL, HOLDS = range(2, 10)
_COLUMNS: Final = 10
_NONE: Final = np.empty((0, _COLUMNS), np.int64)


@dataclass(slots=True)
class Passing:
    """The outcome of one pass; `Paths.keep` makes it effective.

    Attributes:
        flights: quanta whose landing is known, a row each.
        done: the landing time of each.
        receivers: the time from which each receiver is free.
    """

    flights: Ints
    done: Ints
    receivers: Ints
    _ups: Ints
    _downs: Ints
    _below: Ints
    _near: Ints
    _buses: Ints
    _out: Ints


def no_flights() -> Ints:
    """No quanta."""
    return _NONE


def flights(units: Units, starts: Ints, source: int) -> Ints:
    """Put quanta into rows, which leave a NIC at their starts."""
    rows = np.empty((len(starts), _COLUMNS), np.int64)
    rows[:, NUMBER], rows[:, LAST], rows[:, TARGET] = units.number, units.last, units.target
    rows[:, NBYTES], rows[:, SOURCE], rows[:, START] = units.nbytes, source, starts
    rows[:, FIRST], rows[:, TAIL] = starts, starts + units.service
    rows[:, SERVICE] = units.service
    rows[:, HOLDS] = units.service if units.holds is None else units.holds
    return rows


class Paths:
    """The servers of one network, and the quanta between them.

    Args:
        network: its leaves, rates and distances.
        latency_ps: of every route, or of the shortest, without the network's own.
        receiving: (sources, targets, holds) -> how long each holds its receiver.
        ways: (sources, targets) -> the latency of each; None: `latency_ps`.
    """

    def __init__(
        self,
        network: Network,
        latency_ps: int,
        receiving: Callable[[Ints, Ints, Ints], Ints],
        ways: Callable[[Ints, Ints], Ints] | None = None,
    ) -> None:
        self.network = network
        self._latency_ps = latency_ps
        self._receiving = receiving
        self._ways = ways
        self._rate = Rate(network.uplink_bps) if network.uplink_bps else None
        self._scale = 0 if self._rate is None else self._rate.scale
        self._nodes: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._leaf = np.zeros(16, np.int64)
        self._ups = np.zeros(16, np.int64)
        self._downs = np.zeros(16, np.int64)
        self._below = _NONE  # on their way to a downlink
        self._near = _NONE  # on their way to a receiver
        self._out = _NONE  # behind their node's bus
        self._has_bus = False
        self._host = np.zeros(16, np.int64)
        self._buses = np.zeros(16, np.int64)  # outwards, inwards, of each node
        self._bus_scale = np.zeros(16, np.int64)  # as of Rate, of each node; 0: no bus

    def place(self, number: int, node: str, index: int, bus_bps: int = 0) -> None:
        """Say where a NIC stands: which node, which of its NICs, and what its node's bus carries.

        A bus carries so much each way; 0: as much as the NICs of the node want.

        Raises:
            UsageError: more leaves than the network has.
        """
        turn = self._nodes.setdefault(node, len(self._nodes))
        self._names[number] = node
        network = self.network
        leaf = index if network.rails else turn // network.leaf_nodes if network.leaf_nodes else 0
        if network.leaves and leaf >= network.leaves:
            raise UsageError(f"node {node!r}, NIC {index} is below leaf {leaf} of {network.leaves}")
        self._leaf = _longer(self._leaf, number)
        self._leaf[number] = leaf
        self._host = _longer(self._host, number)
        self._host[number] = turn
        self._buses = _longer(self._buses, 2 * turn + 1)
        self._bus_scale = _longer(self._bus_scale, turn)
        self._bus_scale[turn] = Rate(bus_bps).scale if bus_bps else 0
        self._has_bus |= bus_bps > 0
        if network.circuit_up_ps:
            leaf = network.leaves**2
        self._ups, self._downs = _longer(self._ups, leaf), _longer(self._downs, leaf)

    def due_ps(self) -> int:
        """The time when the first quantum in a pool can land; NEVER_PS: there is none."""
        ways = (self._near, 0), (self._below, self._latency_ps), (self._out, self._latency_ps)
        return min(int(pool[:, FIRST].min(initial=NEVER_PS)) + way for pool, way in ways)

    def advance(self, new: Ints, limit_ps: int, receivers: Ints) -> Passing:
        """Compute the landings, provided that nothing unknown starts before the limit.

        Args:
            new: quanta that start before the limit, as `flights` makes them.
            limit_ps: see the rule above.
            receivers: the time from which each receiving NIC is free; not changed.
        """
        ups, downs, below = self._ups.copy(), self._downs.copy(), self._below
        buses, out = self._buses, self._out
        if self._has_bus:
            buses = buses.copy()
            host = self._host[new[:, SOURCE]]
            new = self._serve(new, 2 * host, buses, self._bus_scale[host])
            new = np.concatenate((out, new))
            early = new[:, FIRST] < limit_ps
            new, out = new[early], new[~early]
        far = self._leaf[new[:, SOURCE]] != self._leaf[new[:, TARGET]]
        near = [self._near, self._leave(new[~far])]
        if self.network.circuit_up_ps:
            near.append(self._leave(self._switch(new[far], ups)))
        else:
            crossing = self._serve(new[far], self._leaf[new[far][:, SOURCE]], ups, self._scale)
            crossing[:, [FIRST, TAIL]] += self.network.spine_ps
            below = np.concatenate((below, crossing))
            known = below[:, FIRST] < limit_ps + self.network.spine_ps
            coming, below = below[known], below[~known]
            served = self._serve(coming, self._leaf[coming[:, TARGET]], downs, self._scale)
            near.append(self._leave(served))
        rows = np.concatenate(near)
        known = rows[:, FIRST] < limit_ps + self._latency_ps
        rows, waiting = _in_order(rows[known]), rows[~known]
        if self._has_bus:
            host = self._host[rows[:, TARGET]]
            rows = self._serve(rows, 2 * host + 1, buses, self._bus_scale[host])
        done, free = rows[:, TAIL], receivers
        if len(rows):
            service = self._receiving(rows[:, SOURCE], rows[:, TARGET], rows[:, HOLDS])
            served = fifo_grouped(rows[:, FIRST], service, rows[:, TARGET], receivers)
            free = receivers.copy()
            np.maximum.at(free, rows[:, TARGET], served)
            done = np.maximum(done, served)
        return Passing(rows, done, free, ups, downs, below, waiting, buses, out)

    def keep(self, passing: Passing) -> None:
        """Make a pass effective."""
        self._ups, self._downs = passing._ups, passing._downs
        self._below, self._near = passing._below, passing._near
        self._buses, self._out = passing._buses, passing._out

    def waited(self, passing: Passing) -> Ints:
        """The time that each landed quantum spent behind others, or before a circuit."""
        rows = passing.flights
        far = self._leaf[rows[:, SOURCE]] != self._leaf[rows[:, TARGET]]
        slowest = np.maximum(rows[:, SERVICE], rows[:, HOLDS])
        if self._rate is not None:
            slowest = np.maximum(slowest, np.where(far, self._rate.ps(rows[:, NBYTES]), 0))
        if self._has_bus:
            for end in (SOURCE, TARGET):
                scale = self._bus_scale[self._host[rows[:, end]]]
                slowest = np.maximum(slowest, spans_ps(rows[:, NBYTES], scale))
        begun = self._leave(rows)[:, FIRST] - rows[:, FIRST] + rows[:, START]
        found: Ints = passing.done - begun - slowest - np.where(far, self.network.spine_ps, 0)
        return found

    @staticmethod
    def _serve(rows: Ints, server: Ints, free: Ints, scale: Ints | int) -> Ints:
        """Pass buses, uplinks or downlinks; `free` is brought forward.

        The scale is a Rate's, one for all or one a row; 0: there are no servers.
        """
        if (isinstance(scale, int) and not scale) or not len(rows):
            return rows.copy()
        order = _order(rows)
        rows, server = rows[order], server[order]
        scales = scale if isinstance(scale, int) else scale[order]
        service = spans_ps(rows[:, NBYTES], scales)
        done = fifo_grouped(rows[:, FIRST], service, server, free)
        np.maximum.at(free, server, done)
        rows[:, FIRST] = done - service
        rows[:, TAIL] = np.maximum(rows[:, TAIL], done)
        return rows

    def _switch(self, rows: Ints, free: Ints) -> Ints:
        """Pass optical circuits, which count time only while they are up."""
        if not len(rows):
            return rows
        assert self._rate is not None, "checked by Network"
        rows = _in_order(rows)
        network, leaves = self.network, self.network.leaves
        source, target = self._leaf[rows[:, SOURCE]], self._leaf[rows[:, TARGET]]
        up_ps = network.circuit_up_ps
        slot_ps = up_ps + network.circuit_down_ps
        cycle_ps = (leaves - 1) * slot_ps
        opens = ((target - source) % leaves - 1) * slot_ps + network.circuit_down_ps
        server = source * leaves + target
        # Times are counted while a circuit is up, and then turned back.
        cycles, within = rows[:, FIRST] // cycle_ps, rows[:, FIRST] % cycle_ps
        was_up = cycles * up_ps + np.clip(within - opens, 0, up_ps)
        service = self._rate.ps(rows[:, NBYTES])
        done = fifo_grouped(was_up, service, server, free)
        np.maximum.at(free, server, done)
        begin = done - service
        rows[:, FIRST] = begin // up_ps * cycle_ps + opens + begin % up_ps
        last = np.maximum(done - 1, begin)  # the last moment of service, not the next opening
        ends = last // up_ps * cycle_ps + opens + last % up_ps + (done - last)
        rows[:, TAIL] = np.maximum(rows[:, TAIL], ends)
        rows[:, [FIRST, TAIL]] += network.spine_ps
        return rows

    def _leave(self, rows: Ints) -> Ints:
        """Add the latency of each pair: the rows are on their way to the receiver."""
        rows = rows.copy()
        way: Ints | int = self._latency_ps
        if self._ways is not None:
            way = self._ways(rows[:, SOURCE], rows[:, TARGET])[:, None]
        if self.network.extra_ps and len(rows):
            pairs = zip(rows[:, SOURCE].tolist(), rows[:, TARGET].tolist(), strict=True)
            more = [self._extra_ps(*pair) for pair in pairs]
            way = way + np.array(more, np.int64)[:, None]
        rows[:, [FIRST, TAIL]] += way
        return rows

    def _extra_ps(self, source: int, target: int) -> int:
        pair = self._names.get(source, ""), self._names.get(target, "")
        return self.network.extra_ps.get(pair, 0)


def _longer(column: Ints, index: int) -> Ints:
    if index < len(column):
        return column
    return np.concatenate((column, np.zeros(index + 1, np.int64)))


def _order(rows: Ints) -> Ints:
    """Sort by arrival; rows that arrive together by sender, then by departure."""
    return np.lexsort((rows[:, START], rows[:, SOURCE], rows[:, FIRST]))


def _in_order(rows: Ints) -> Ints:
    found: Ints = rows[_order(rows)]
    return found


_FULL: Final = 1 << 20
"""The rate of a queue pair without congestion."""
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


@dataclass(slots=True)
class _Pair:
    """One queue pair: its unsent quanta, and the credit and rate that limit it."""

    place: int
    waiting: deque[_Quantum] = field(default_factory=deque)
    ended_ps: int = -1
    freed_ps: int = 0  # when the credit came that it waited for
    paced_ps: int = 0  # not before, by its rate
    open_bytes: int = 0
    rate: int = _FULL
    goal: int = _FULL
    steps: int = 0
    since_ps: int = 0


class PacedQueue(SendQueue):
    """The plan of one NIC, made only as far as it is asked for: rule 2.

    The last of `starts` stands for the rest: no quantum that is not planned leaves before it.

    Args:
        profile: of its machine.
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self._credit_bytes = profile.credit_bytes
        self._recover_ps = profile.ecn_recover_ps
        self._grow = profile.ecn_grow_bps * _FULL // profile.wire_bps
        self._pairs: dict[int, _Pair] = {}
        self._notices: list[tuple[int, int, int, bool]] = []
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

    def notify(self, time_ps: int, target: int, nbytes: int, *, marked: bool) -> None:
        """Let the NIC learn at `time_ps` that a receiver took so many bytes, and of a mark.

        `foresee()` is to follow.
        """
        heappush(self._notices, (time_ps, target, nbytes, marked))

    def before(self, limit_ps: int) -> int:
        """Plan the units that leave before the limit; return their number, from `at` = 0 on."""
        found: list[_Row] = []
        starts: list[int] = []
        while True:
            start_ps, target = self._first()
            if self._notices and self._notices[0][0] <= min(start_ps, limit_ps - 1):
                self._take_notice(*heappop(self._notices))
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
        """Give up the units that are not planned; return them."""
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
            if self._notices:
                first_ps = min(first_ps, self._notices[0][0])
            planned = np.append(planned, first_ps)
        self.starts = planned

    # ------------------------------------------------------------------ one step

    def _first(self) -> tuple[int, int]:
        """The time and target of the next quantum, if no notice comes before."""
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

    def _take_notice(self, time_ps: int, target: int, nbytes: int, marked: bool) -> None:
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
    """Decides which quanta a receiver reports as congested to their senders.

    Args:
        profile: of the machines.
        pairs: of the machines, if they are not all alike.
    """

    def __init__(self, profile: Profile, pairs: Pairs | None = None) -> None:
        self._pairs = pairs
        self._waits_ps = int(Rate(profile.wire_bps).ps(np.array([profile.ecn_bytes]))[0])
        self._every_ps = profile.ecn_every_ps
        self._on = bool(profile.ecn_bytes)
        self._notified_ps: dict[tuple[int, int], int] = {}

    def notices(self, source: Ints, target: Ints, waited: Ints, done: Ints) -> list[bool]:
        """Decide for each quantum whether its sender is notified that it waited too long.

        Args:
            source: the NIC that sent it.
            target: the NIC that took it.
            waited: the time that each spent behind others.
            done: the time when each was taken, in order for each pair.
        """
        found = [False] * len(done)
        if not self._on:
            return found
        waits = self._waits_ps if self._pairs is None else self._pairs.waits_ps(target)
        for place in (waited > waits).nonzero()[0].tolist():
            pair, now = (int(source[place]), int(target[place])), int(done[place])
            if now >= self._notified_ps.get(pair, -self._every_ps) + self._every_ps:
                self._notified_ps[pair] = now
                found[place] = True
        return found
