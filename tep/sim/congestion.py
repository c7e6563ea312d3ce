"""Congestion: rows that wait for others on their way, and queue pairs that receivers hold back.

A quantum passes its servers one behind the other: its node's bus, if all NICs of a node share one,
the uplink of its sender's leaf and the downlink of its receiver's, the receiving node's bus, then
the receiving NIC. A bus is two servers, one each way. Each serves in order of arrival of first
bytes. Bytes flow through: the next server begins a latency after this one began, and a quantum has
landed when its last byte is through the slowest.

Receivers hold back by pauses and ECN. Pause (PFC, and the credit of InfiniBand's links): a link
sends nothing while too many bytes that passed it were not taken by their receivers, so flows to
other receivers stand still, too. A NIC's port is such a link, and so is each uplink and downlink.
Real switches count the bytes in their own buffers; here each link counts all that is ahead of it.
ECN: DCQCN (SIGCOMM 2015). A quantum is marked by chance, which grows with the queue that it found;
the receiver notifies the sender now and then; the sender cuts the rate of the queue pair by half of
its average of notices (alpha), and lets it come back in steps, by a timer and by bytes. The third
phase of coming back (hyper increase) is left out.

Rule 1 (lookahead): what is not known yet starts at the limit or later, so it cannot arrive at a
server before the limit plus the shortest way there. What arrives later than that waits in a pool.
The answers are those of an event for each arrival; tests/unit/sim/test_timing_paths.py holds them
against a loop. Rule 2: what a receiver says of a quantum reaches its sender two latencies after the
quantum began to leave, or later. So a plan made up to one latency after the earliest start is never
made again.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Final, NamedTuple

import numpy as np

from tep.base.errors import UsageError
from tep.base.hashing import below_array, draw_array, stream_key
from tep.sim.draws import Stream
from tep.sim.machines import PACKET_BYTES, Pairs
from tep.sim.profile import Profile
from tep.sim.queues import (
    NEVER_PS,
    Bools,
    Ints,
    Rate,
    SendQueue,
    Units,
    by_value,
    fifo_grouped,
    has_all,
    spans_ps,
)

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
        served: when the receiver has taken each.
        done: when each has landed: no byte lands before its sender has sent it.
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
        profile: of a machine; all of a fabric have the same network.
        latency_ps: of every route, or of the shortest, without the network's own.
        receiving: (sources, targets, holds) -> how long each holds its receiver.
        ways: (sources, targets) -> the latency of each; None: `latency_ps`.
        seed: of the hash that chooses paths.
    """

    def __init__(
        self,
        profile: Profile,
        latency_ps: int,
        receiving: Callable[[Ints, Ints, Ints], Ints],
        ways: Callable[[Ints, Ints], Ints] | None,
        seed: int,
    ) -> None:
        self._profile = profile
        self._paths = max(1, profile.paths) if profile.ordered else 1
        self._key = stream_key(seed, Stream.TIMING)
        pausing = profile.pause_bytes and profile.uplink_bps
        ends = (SOURCE, TARGET) if pausing else ()
        self._gates = {end: _Gates(profile.pause_bytes) for end in ends}  # uplinks, downlinks
        self._latency_ps = latency_ps
        self._receiving = receiving
        self._ways = ways
        uplink_bps = profile.uplink_bps // self._paths
        self._rate = Rate(uplink_bps) if uplink_bps else None
        self._scale = 0 if self._rate is None else self._rate.scale
        self._nodes: dict[str, int] = {}
        self._leaf = np.zeros(16, np.int64)
        self._ups = np.zeros(16, np.int64)
        self._downs = np.zeros(16, np.int64)
        self._below = _NONE  # on their way to a downlink
        self._near = _NONE  # on their way to a receiver
        self._out = _NONE  # behind their node's bus
        self._has_bus = False
        self._is_flat = not (profile.leaf_nodes or profile.rails)
        self._host = np.zeros(16, np.int64)
        self._buses = np.zeros(16, np.int64)  # outwards, inwards, of each node
        self._bus_scale = np.zeros(16, np.int64)  # as of Rate, of each node; 0: no bus

    def place(self, number: int, node: str, index: int, nics: int, bus_bps: int = 0) -> None:
        """Say where a NIC stands: which node, which of its NICs, and what its node's bus carries.

        A bus carries so much each way; 0: as much as its NICs want.

        Raises:
            UsageError: a switch that limits nothing.
        """
        turn = self._nodes.setdefault(node, len(self._nodes))
        profile = self._profile
        leaf = turn // profile.leaf_nodes if profile.leaf_nodes else 0
        if profile.rails:
            leaf = turn % max(1, profile.host_gpus) * nics + index
        if profile.switch_gpus and not bus_bps:
            raise UsageError(
                f"node {node!r}: switch_gpus={profile.switch_gpus}, but its profile has no "
                "node.bus, so a PCIe switch would limit nothing"
            )
        turn //= max(1, profile.switch_gpus)
        self._leaf = _longer(self._leaf, number)
        self._leaf[number] = leaf
        self._host = _longer(self._host, number)
        self._host[number] = turn
        self._buses = _longer(self._buses, 2 * turn + 1)
        self._bus_scale = _longer(self._bus_scale, turn)
        self._bus_scale[turn] = Rate(bus_bps).scale if bus_bps else 0
        self._has_bus |= bus_bps > 0
        link = (leaf + 1) * self._paths
        self._ups, self._downs = _longer(self._ups, link), _longer(self._downs, link)

    def due_ps(self) -> int:
        """The time when the first quantum in a pool can land; NEVER_PS: there is none."""
        ways = (self._near, 0), (self._below, self._latency_ps), (self._out, self._latency_ps)
        due = [int(pool[:, FIRST].min(initial=NEVER_PS)) + way for pool, way in ways]
        due += [gates.due_ps() + self._latency_ps for gates in self._gates.values()]
        return min(due)

    def _links(self, rows: Ints, end: int) -> Ints:
        """The uplink (end: SOURCE) or downlink (TARGET) that each row takes."""
        found: Ints = self._leaf[rows[:, end]]
        if self._paths > 1:
            pairs = (rows[:, SOURCE] << 32 | rows[:, TARGET]).view(np.uint64)
            path = below_array(draw_array(self._key, _PATH, pairs), self._paths)
            found = found * self._paths + path
        return found

    def advance(self, new: Ints, limit_ps: int, receivers: Ints) -> Passing:
        """Compute the landings, provided that nothing unknown starts before the limit.

        Args:
            new: quanta that start before the limit, as `flights` makes them.
            limit_ps: see the rule above.
            receivers: the time from which each receiving NIC is free; not changed.
        """
        ups, downs, below = self._ups, self._downs, self._below
        buses, out = self._buses, self._out
        if self._has_bus:
            buses = buses.copy()
            host = self._host[new[:, SOURCE]]
            new = self._serve(new, 2 * host, buses, self._bus_scale[host])
            new = np.concatenate((out, new))
            early = new[:, FIRST] < limit_ps
            new, out = new[early], new[~early]
        near = [self._near]
        if not self._is_flat:
            ups, downs = ups.copy(), downs.copy()
            far = self._leaf[new[:, SOURCE]] != self._leaf[new[:, TARGET]]
            new, crossing = new[~far], new[far]
            crossing = self._cross(crossing, SOURCE, ups, limit_ps)
            crossing[:, [FIRST, TAIL]] += self._profile.spine_ps
            below = np.concatenate((below, crossing))
            beyond_ps = limit_ps + self._profile.spine_ps
            known = below[:, FIRST] < beyond_ps
            coming, below = below[known], below[~known]
            near.append(self._leave(self._cross(coming, TARGET, downs, beyond_ps)))
        near.append(self._leave(new))
        rows, waiting = np.concatenate(near), _NONE
        known = rows[:, FIRST] < limit_ps + self._latency_ps
        if not has_all(known):
            rows, waiting = rows[known], rows[~known]
        rows = _in_order(rows)
        if self._has_bus:
            host = self._host[rows[:, TARGET]]
            rows = self._serve(rows, 2 * host + 1, buses, self._bus_scale[host])
        served = done = rows[:, TAIL]
        free = receivers
        if len(rows):
            service = self._receiving(rows[:, SOURCE], rows[:, TARGET], rows[:, HOLDS])
            served = fifo_grouped(rows[:, FIRST], service, rows[:, TARGET], receivers)
            free = receivers.copy()
            np.maximum.at(free, rows[:, TARGET], served)
            done = np.maximum(done, served)
        return Passing(rows, served, done, free, ups, downs, below, waiting, buses, out)

    def shorten(self, passing: Passing, limit_ps: int, receivers: Ints) -> Passing | None:
        """Do as `advance` with an earlier limit; None: these servers need a pass of its own."""
        if not self._is_flat or self._has_bus or self._ways is not None:
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
        self._buses, self._out = passing._buses, passing._out
        for end, gates in self._gates.items():
            rows = passing.flights
            far = self._leaf[rows[:, SOURCE]] != self._leaf[rows[:, TARGET]]
            rows, done = rows[far], passing.done[far]
            gates.give_back(self._links(rows, end), rows[:, NBYTES], done + self._latency_ps)

    def _cross(self, rows: Ints, end: int, free: Ints, limit_ps: int) -> Ints:
        """Pass uplinks (end: SOURCE) or downlinks (TARGET), which may be paused."""
        gates = self._gates.get(end)
        if gates is None:
            return self._serve(rows, self._links(rows, end), free, self._scale)
        rows = np.concatenate((gates.held, _in_order(rows)))
        return gates.serve(rows, self._links(rows, end), self._scale, free, limit_ps)

    def waited(self, passing: Passing) -> Ints:
        """The time that each landed quantum spent behind others."""
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
        found: Ints = passing.done - begun - slowest - np.where(far, self._profile.spine_ps, 0)
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


class _Gates:
    """Links of a stage that pause while too many bytes that passed them were not taken.

    Attributes:
        held: quanta that wait at a paused link, in order of arrival.
    """

    def __init__(self, pause_bytes: int) -> None:
        self.held = _NONE
        self._pause_bytes = pause_bytes
        self._open: Counter[int] = Counter()
        self._freed: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._paused: set[int] = set()

    def due_ps(self) -> int:
        """The earliest time when a quantum that is held may leave, as far as that is known."""
        return min([self._freed[k][0][0] for k in self._paused if self._freed[k]], default=NEVER_PS)

    def give_back(self, links: Ints, nbytes: Ints, times: Ints) -> None:
        """Let each link learn at its time that so many bytes were taken."""
        for link, size, time_ps in zip(links.tolist(), nbytes.tolist(), times.tolist()):
            heappush(self._freed[link], (time_ps, size))

    def serve(self, rows: Ints, links: Ints, scale: int, free: Ints, limit_ps: int) -> Ints:
        """Pass the links in order; what a pause that ends at the limit or later holds stays here.

        A link that pauses holds up all rows behind, wherever they go: head-of-line blocking.
        """
        self._paused = paused = set()
        begins: list[int] = []
        spans = spans_ps(rows[:, NBYTES], scale).tolist()
        columns = (links.tolist(), rows[:, FIRST].tolist(), rows[:, NBYTES].tolist())
        for link, first_ps, size, span_ps in zip(*columns, spans):
            begin_ps = NEVER_PS
            if link not in paused:
                begin_ps = self._begin_ps(link, max(first_ps, free.item(link)), limit_ps)
            begins.append(begin_ps)
            if begin_ps == NEVER_PS:
                paused.add(link)
                continue
            self._open[link] += size
            free[link] = begin_ps + span_ps
        begin = np.array(begins, np.int64)
        left = begin < NEVER_PS
        self.held, rows, begin = rows[~left], rows[left], begin[left]
        rows[:, FIRST] = begin
        rows[:, TAIL] = np.maximum(rows[:, TAIL], begin + spans_ps(rows[:, NBYTES], scale))
        return rows

    def _begin_ps(self, link: int, begin_ps: int, limit_ps: int) -> int:
        """The time from `begin_ps` on when a link is not paused; NEVER_PS: not known yet."""
        freed = self._freed[link]
        while freed and freed[0][0] <= begin_ps:
            self._open[link] -= heappop(freed)[1]
        while self._open[link] >= self._pause_bytes:
            if not freed or freed[0][0] >= limit_ps:
                return NEVER_PS
            begin_ps, size = heappop(freed)
            self._open[link] -= size
        return begin_ps


_MARK, _PATH = 4, 5
"""Entities of the draws of Stream.TIMING; `machines.Late` has 0 to 3."""
_FULL: Final = 1.0
"""The rate of a queue pair without congestion."""
_LEAST, _NEARLY = 1 / 1024, 1 - 1e-6
_FAST: Final = 5  # steps that halve the distance to the old rate, before that is raised: DCQCN
_PERIODS_MAX: Final = 4096  # after so many steps any rate is back
_SERVED: Final = 1 << 40  # places of queue pairs that were served, behind all others


def is_paced(profile: Profile) -> bool:
    """Whether receivers hold senders back."""
    return bool(profile.pause_bytes or profile.ecn_bytes)


class _Quantum(NamedTuple):
    """One quantum, in the order of the columns of `Units`."""

    number: int
    target: int
    ready_ps: int
    service_ps: int
    last: bool
    nbytes: int
    holds_ps: int


@dataclass(slots=True)
class _Pair:
    """One queue pair: its unsent quanta, and the rate that limits it.

    Attributes:
        place: its turn among equals.
        ended_ps: the end of its latest service.
        paced_ps: not before, by its rate.
        rate, goal, alpha: RC, RT and alpha of DCQCN.
        turns, counts: steps back so far, by the timer and by bytes.
        since_ps, faded_ps, left_bytes: where timer, average and byte counter began.
    """

    place: int
    left_bytes: int
    waiting: deque[_Quantum] = field(default_factory=deque)
    ended_ps: int = -1
    paced_ps: int = 0
    rate: float = _FULL
    goal: float = _FULL
    alpha: float = 1.0
    turns: int = 0
    counts: int = 0
    since_ps: int = 0
    faded_ps: int = 0


class PacedQueue(SendQueue):
    """The plan of one NIC, made only as far as it is asked for: rule 2.

    The last of `starts` stands for the rest: no quantum that is not planned leaves before it.
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self._pause_bytes = profile.pause_bytes
        self._open_bytes = 0
        self._freed_ps = 0  # when the pause ended
        self._fade_ps = profile.ecn_fade_ps
        self._recover_ps = profile.ecn_recover_ps
        self._count_bytes = profile.ecn_count_bytes or NEVER_PS
        self._gain = profile.ecn_gain_ppm * 1e-6
        self._grow = profile.ecn_grow_bps / profile.wire_bps
        self._pairs: dict[int, _Pair] = {}
        self._notices: list[tuple[int, int, int, bool]] = []
        self._turn = _SERVED
        self._rows = 0
        self._wire_ps = 0

    def add(self, units: Units, now_ps: int) -> None:  # noqa: ARG002  # the plan is behind it
        """Take more units."""
        for quantum in map(_Quantum._make, units.rows()):
            pair = self._pairs.get(quantum.target)
            if pair is None:
                pair = self._pairs[quantum.target] = _Pair(self._rows, self._count_bytes)
            pair.waiting.append(quantum)
            self._rows += 1
        self.foresee()

    def notify(self, time_ps: int, target: int, nbytes: int, *, marked: bool) -> None:
        """Let the NIC learn at `time_ps` that a receiver took so many bytes, or of a mark.

        `foresee()` is to follow.
        """
        heappush(self._notices, (time_ps, target, nbytes, marked))

    def before(self, limit_ps: int) -> int:
        """Plan the units that leave before the limit; return their number, from `at` = 0 on."""
        found: list[_Quantum] = []
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
        rows = [quantum for pair in self._pairs.values() for quantum in pair.waiting]
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
        if 0 < self._pause_bytes <= self._open_bytes:
            return NEVER_PS, 0
        for target, pair in self._pairs.items():
            if not pair.waiting:
                continue
            head = pair.waiting[0]
            heads_ps = max(head.ready_ps, pair.paced_ps)
            waited = heads_ps <= pair.ended_ps
            best = min(best, (max(heads_ps, pair.ended_ps), waited, pair.place, target))
        return max(best[0], self._wire_ps, self._freed_ps), best[3]

    def _send(self, start_ps: int, target: int) -> _Quantum:
        pair = self._pairs[target]
        quantum = pair.waiting.popleft()
        self._recover(pair, start_ps)
        pair.paced_ps = start_ps + int(quantum.service_ps / pair.rate)
        self._open_bytes += quantum.nbytes
        pair.left_bytes -= quantum.nbytes
        while pair.left_bytes <= 0:
            pair.left_bytes += self._count_bytes
            pair.counts += 1
            self._rise(pair)
        pair.ended_ps = self._wire_ps = start_ps + quantum.service_ps
        self._turn += 1
        pair.place = self._turn
        return quantum

    def _take_notice(self, time_ps: int, target: int, nbytes: int, marked: bool) -> None:
        if 0 < self._pause_bytes <= self._open_bytes:
            self._freed_ps = time_ps
        self._open_bytes -= nbytes
        pair = self._pairs.get(target)
        if marked and pair is not None:
            self._recover(pair, time_ps)
            faded = max(0, (time_ps - pair.faded_ps) // self._fade_ps)
            pair.alpha *= (1 - self._gain) ** faded
            pair.goal, pair.rate = pair.rate, max(_LEAST, pair.rate * (1 - pair.alpha / 2))
            pair.alpha += self._gain * (1 - pair.alpha)
            pair.since_ps = pair.faded_ps = time_ps
            pair.turns = pair.counts = 0
            pair.left_bytes = self._count_bytes

    def _recover(self, pair: _Pair, now_ps: int) -> None:
        """Take the steps back to the full rate that the timer has made due by now."""
        if pair.rate == _FULL:
            return
        periods = (now_ps - pair.since_ps) // self._recover_ps
        pair.since_ps += periods * self._recover_ps
        for _ in range(min(periods, _PERIODS_MAX)):
            pair.turns += 1
            self._rise(pair)

    def _rise(self, pair: _Pair) -> None:
        """Take one step back to the full rate."""
        if max(pair.turns, pair.counts) > _FAST:
            pair.goal = min(_FULL, pair.goal + self._grow)
        pair.rate = (pair.rate + pair.goal) / 2
        if pair.rate > _NEARLY:
            pair.rate = _FULL


def _units(rows: list[_Quantum]) -> Units:
    number, target, ready, service, last, nbytes, holds = np.array(rows, np.int64).reshape(-1, 7).T
    return Units(number, target, ready, service, last.astype(np.bool_), nbytes, holds)


class Marks:
    """Chooses the quanta that receivers send notices of, since one of their packets was marked.

    Packets are marked when they leave a port, by the bytes that stand there then, so the arrivals
    until then have to be known: quanta wait here for that.

    """

    def __init__(self, profile: Profile, pairs: Pairs | None, seed: int) -> None:
        self._profile = profile
        self._pairs = pairs
        self._scale: Ints | int = Rate(profile.wire_bps).scale
        self._every_ps = profile.ecn_every_ps
        self._key = stream_key(seed, Stream.TIMING)
        self._notified_ps: dict[tuple[int, int], int] = {}
        self._rows, self._served, self._before = _NONE, _NONE[:, 0], _NONE[:, 0]

    def due_ps(self) -> int:
        """The time when the first quantum of those that wait here leaves its port."""
        return int(self._served.min(initial=NEVER_PS))

    def notices(self, passing: Passing, waited: Ints, known_ps: int) -> tuple[Ints, Ints]:
        """Take quanta; return those that receivers send a notice of, and when they send it.

        Args:
            passing: what came, in order of arrival.
            waited: the time that each spent behind others, on its whole way.
            known_ps: all arrivals before this are known.
        """
        if not self._profile.ecn_bytes:
            return _NONE, _NONE[:, 0]
        rows, served = passing.flights, passing.served
        before = np.maximum(waited - (served - rows[:, FIRST] - rows[:, HOLDS]), 0)
        rows = np.concatenate((self._rows, rows))
        served = np.concatenate((self._served, served))
        before = np.concatenate((self._before, before))
        queued = before.copy()
        for _, which in by_value(rows[:, TARGET]):
            # What stands before the last arrival, of which little more than the head may be here.
            last = rows[which, FIRST].searchsorted(served[which], "right") - 1
            begin = served[which] - rows[which, HOLDS]
            queued[which] += np.maximum(begin[last] - served[which], 0)
        known = served < known_ps
        self._rows, self._served, self._before = rows[~known], served[~known], before[~known]
        told = [
            place
            for place in (known & self._are_marked(rows, queued)).nonzero()[0].tolist()
            if self._is_told(rows.item(place, SOURCE), rows.item(place, TARGET), served.item(place))
        ]
        return rows[told], served[told]

    def _is_told(self, source: int, target: int, time_ps: int) -> bool:
        """Whether the receiver's latest notice to this sender is long enough ago."""
        told = time_ps >= self._notified_ps.get((source, target), -self._every_ps) + self._every_ps
        if told:
            self._notified_ps[source, target] = time_ps
        return told

    def _are_marked(self, rows: Ints, queued: Ints) -> Bools:
        """Whether a packet of each quantum is marked: a draw for each, by the queue it leaves."""
        profile, pairs = self._profile, self._pairs
        scale = self._scale if pairs is None else pairs.scale(rows[:, TARGET])
        least = spans_ps(np.array(profile.ecn_min_bytes), scale)
        most = spans_ps(np.array(profile.ecn_bytes), scale)
        over: Bools = queued > most
        if not profile.ecn_ppm:
            return over
        chance = profile.ecn_ppm * 1e-6 * (queued - least) / (most - least)
        packets = np.maximum(1, -(-rows[:, NBYTES] // PACKET_BYTES))
        several = 1 - (1 - np.clip(chance, 0, 1)) ** packets
        sent = (rows[:, START] << 16 | rows[:, SOURCE]).view(np.uint64)
        drawn = draw_array(self._key, _MARK, sent).astype(np.float64) / 2.0**64
        return over | (drawn < several)
