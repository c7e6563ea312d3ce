"""Exact queues without an event per item: numpy closed forms of FIFO and round-robin servers.

`SendQueue` is the plan of one NIC: quanta of its queue pairs, in turn. It is made anew when rows
are added, but only from then on: a quantum that has started stays. Times are integer ps in int64
arrays; no clock here. Every closed form equals, to the picosecond, the loop over single arrivals
that its docstring describes; tests/unit/sim/test_timing_queues.py holds both against each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import pairwise
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "NEVER_PS", "Bools", "Ints", "Quanta", "Rate", "SendQueue", "Units", "Which",
    "by_value", "cut_quanta", "fifo", "fifo_grouped", "has_all", "has_any", "is_alike",
    "round_robin", "spans_ps",
]  # fmt: skip

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Which = slice | Ints
"""Some entries of a column: a run of them, or their indices."""
Quanta = tuple[Ints, Ints, Bools]
"""Index of the row, bytes, and whether it is the row's last; one entry a quantum."""

NEVER_PS: Final = 1 << 62
"""Later than any event that an int64 column can hold."""

_FRACTION_BITS: Final = 20
_FEW: Final = 4  # so many masks are quicker than a sort
_MANY: Final = 64  # units of a plan; a shorter one is quickly made again


class Rate:
    """Turns bytes into ps without floats, so that arrays and single numbers agree bit for bit.

    A rate is held as ps a byte with 20 binary places: 64 KiB are 0.1 ps off at most.
    """

    __slots__ = ("scale",)

    def __init__(self, bps: int) -> None:
        assert bps > 0, bps
        self.scale = ((8 * 10**12 << _FRACTION_BITS) + bps // 2) // bps

    def ps(self, nbytes: Ints) -> Ints:
        """Time that `nbytes` take, each 0 .. 2**36."""
        found: Ints = nbytes * self.scale >> _FRACTION_BITS
        return found


def spans_ps(nbytes: Ints, scale: Ints | int) -> Ints:
    """Do as Rate.ps, with a scale for each; 0: no time at all."""
    found: Ints = nbytes * scale >> _FRACTION_BITS
    return found


# numpy's all() and any() take 1.4 us, however few entries there are; a search of bytes takes 0.1.


def has_any(flags: Bools) -> bool:
    """Whether one of them is true."""
    return 1 in flags.tobytes()


def has_all(flags: Bools) -> bool:
    """Whether none of them is false."""
    return 0 not in flags.tobytes()


def is_alike(column: npt.NDArray[np.generic]) -> bool:
    """Whether all entries are the same; true if there are none."""
    raw = column.tobytes()
    return raw == raw[: column.itemsize] * len(column)


def fifo(arrive: Ints, service: Ints, free_ps: int) -> Ints:
    """Departure times of one server that takes items in the order given.

    The loop: `free = max(arrive[i], free) + service[i]`, starting from free_ps. The closed form is
    Lindley's recursion as a cumulative sum and a running maximum. One item or more.
    """
    done = np.add.accumulate(service)  # cumsum() takes 1 us longer
    begin = arrive - (done - service)
    begin[0] = max(int(begin[0]), free_ps)
    found: Ints = np.maximum.accumulate(begin)
    found += done
    return found


def fifo_grouped(arrive: Ints, service: Ints, group: Ints, free: Ints) -> Ints:
    """Departure times of many servers at once, each taking its items in order of arrival.

    The loop: over items by (arrive, position), `free[g] = max(arrive, free[g]) + service`.

    Args:
        arrive: int64[n], n >= 1.
        service: int64[n].
        group: int64[n], the server's number, 0 .. len(free) - 1.
        free: int64[servers], when each server is free; not changed.
    """
    few = _few_values(group)
    if few is not None:
        return _fifo_few(arrive, service, few, free)
    order = np.lexsort((arrive, group))
    groups = group[order]
    heads = np.empty(len(order), np.bool_)
    heads[0] = True
    np.not_equal(groups[1:], groups[:-1], out=heads[1:])
    services = service[order]
    arrivals = arrive[order]
    np.copyto(arrivals, np.maximum(arrivals, free[groups]), where=heads)
    done = np.cumsum(services)
    # Within a group: done so far in this group only. `before` is the sum at the group's head.
    before = np.maximum.accumulate(np.where(heads, done - services, 0))
    done -= before
    begin = arrivals - (done - services)
    # One running maximum for all groups: each is lifted above all values of the group before it.
    low = int(begin.min())
    span = int(begin.max()) - low + 1
    lift = (np.cumsum(heads) - 1) * span
    assert span * (int(heads.sum()) + 1) < 1 << 62, "times too far apart for one pass"
    begin = np.maximum.accumulate(begin - low + lift) - lift + low
    found: Ints = np.empty_like(begin)
    found[order] = begin + done
    return found


def _fifo_few(arrive: Ints, service: Ints, groups: list[tuple[int, Which]], free: Ints) -> Ints:
    found = np.empty_like(arrive)
    for value, mine in groups:
        times, which = arrive[mine], mine
        if has_any(times[1:] < times[:-1]):
            order = np.argsort(times, kind="stable")
            which = mine[order] if isinstance(mine, np.ndarray) else order + mine.start
            times = arrive[which]
        found[which] = fifo(times, service[which], free.item(value))
    return found


def by_value(key: Ints, left_out: Bools | None = None) -> list[tuple[int, Which]]:
    """Find the entries of each value of `key`, by value, without those left out."""
    if left_out is not None and has_any(left_out):
        here = (~left_out).nonzero()[0]
        return [(value, here[mine]) for value, mine in by_value(key[here])]
    few = _few_values(key)
    if few is not None:
        return few
    counts = np.bincount(key)
    values = counts.nonzero()[0]
    order = np.argsort(key, kind="stable")
    cuts = np.cumsum(counts[values])[:-1]
    return list(zip(values.tolist(), np.split(order, cuts)))


def _few_values(key: Ints) -> list[tuple[int, Which]] | None:
    """The same if the values are few, else None. A value's only run is a slice: it costs least."""
    cuts = (key[1:] != key[:-1]).nonzero()[0][:_FEW].tolist()
    heads = [0, *[cut + 1 for cut in cuts], len(key)]
    if len(heads) <= _FEW + 1:
        runs = {key.item(head): slice(head, end) for head, end in pairwise(heads) if head < end}
        if len(runs) == len(heads) - 1:
            return sorted(runs.items(), key=itemgetter(0))
    values = np.bincount(key).nonzero()[0]
    if len(values) > _FEW:
        return None
    return [(value, (key == value).nonzero()[0]) for value in values.tolist()]


def cut_quanta(nbytes: Ints, quantum_bytes: int) -> Quanta:
    """Cut rows into quanta, each full but the last; an empty row is one empty quantum."""
    counts = np.maximum(-(-nbytes // quantum_bytes), 1)
    row = np.repeat(np.arange(len(nbytes)), counts)
    ends = np.cumsum(counts)
    last = np.zeros(len(row), np.bool_)
    last[ends - 1] = True
    sizes = np.full(len(row), quantum_bytes)
    sizes[ends - 1] = nbytes - (counts - 1) * quantum_bytes
    return row, sizes, last


def round_robin(
    flow: Ints, ready: Ints, service: Ints, free_ps: int, ended: Mapping[int, int]
) -> tuple[Ints, Ints]:
    """Serve the flows (queue pairs) of one server in turn, an item at a time.

    The loop keeps an active list: a flow joins its tail when its head item is ready, and again when
    it has been served and has another ready item. If several join at one instant, those that became
    ready stand before those that were served; ties go by `flow`, then by service.
    Within a flow items keep their order.

    Args:
        flow: int64[n], the flow of each item.
        ready: int64[n], time from which each item may be served.
        service: int64[n].
        free_ps: time from which the server is free.
        ended: flow -> end of its latest service, for flows that were served before.

    Returns:
        order: the items, as indices, in the order of service; starts: int64[n], when each of
        `order` starts.
    """
    flows, code = np.unique(flow, return_inverse=True)
    if len(flows) == 1:
        return np.arange(len(flow)), fifo(ready, service, free_ps) - service
    by_flow = np.argsort(code, kind="stable")
    counts = np.bincount(code)
    firsts = np.cumsum(counts) - counts
    previous = np.array([ended.get(k, -1) for k in flows.tolist()], np.int64)
    heads = ready[by_flow[firsts]]
    joined = np.maximum(heads, previous)
    waiting = heads <= previous
    if int(counts.max()) == 1:
        order = by_flow[np.lexsort((by_flow, waiting, joined))]
        joins = np.sort(joined)
        return order, fifo(joins, service[order], free_ps) - service[order]
    # Until everything is ready the order depends on the times: a loop. From then on it is turns.
    columns = (joined, waiting, by_flow[firsts], np.arange(len(flows)))
    queue: list[_Place] = list(zip(*(column.tolist() for column in columns)))
    served, starts, free_ps = _serve(queue, by_flow, firsts, counts, ready, service, free_ps)
    taken = np.bincount(code[np.array(served, np.int64)], minlength=len(flows))
    place = np.full(len(flows), len(flows))
    place[[entry[3] for entry in sorted(queue)]] = np.arange(len(queue))
    turn = np.arange(len(flow)) - firsts[code[by_flow]]
    left = turn >= taken[code[by_flow]]
    rest = by_flow[left]
    rest = rest[np.lexsort((place[code[rest]], (turn - taken[code[by_flow]])[left]))]
    ends = np.cumsum(service[rest]) + free_ps
    order = np.concatenate((np.array(served, np.int64), rest))
    return order, np.concatenate((np.array(starts, np.int64), ends - service[rest]))


_Place = tuple[int, bool, int, int]
"""A flow in the active list: when it joined, whether by service, its turn among equals, itself."""


def _serve(
    queue: list[_Place],
    by_flow: Ints,
    firsts: Ints,
    counts: Ints,
    ready: Ints,
    service: Ints,
    free_ps: int,
) -> tuple[list[int], list[int], int]:
    """Serve one item after the other until all are ready; `queue` is left as the active list."""
    heapify(queue)
    nexts = firsts.tolist()
    ends = (firsts + counts).tolist()
    all_ready_ps = int(ready.max())
    served: list[int] = []
    starts: list[int] = []
    while queue and (free_ps < all_ready_ps or queue[0][0] > free_ps):
        joined_ps, _, _, k = queue[0]
        item = int(by_flow[nexts[k]])
        nexts[k] += 1
        start_ps = max(joined_ps, free_ps)
        served.append(item)
        starts.append(start_ps)
        free_ps = start_ps + int(service[item])
        if nexts[k] == ends[k]:
            heappop(queue)
            continue
        head_ps = int(ready[by_flow[nexts[k]]])
        waited = head_ps <= free_ps
        heapreplace(queue, (free_ps if waited else head_ps, waited, len(ready) + len(served), k))
    return served, starts, free_ps


class Units(NamedTuple):
    """Quanta to send, as columns; those of one row stand together and in order. Times are ps.

    Attributes:
        number: the row.
        target: the NIC it goes to, which tells the queue pairs of a NIC apart.
        ready: earliest departure.
        service: time on the wire.
        last: whether the row ends with it.
        holds: time that it holds its receiver; None: `service`.
    """

    number: Ints
    target: Ints
    ready: Ints
    service: Ints
    last: npt.NDArray[np.bool_]
    nbytes: Ints
    holds: Ints | None = None

    def pick(self, which: slice | Ints) -> Units:
        return Units._make([None if column is None else column[which] for column in self])

    def rows(self) -> Iterator[tuple[int, int, int, int, bool, int, int]]:
        """All columns, a quantum each."""
        columns = (*self[:-1], self.service if self.holds is None else self.holds)
        return zip(*(column.tolist() for column in columns))

    @staticmethod
    def join(parts: list[Units]) -> Units:
        if len(parts) == 1:
            return parts[0]
        # Only a plan that nothing was added to so far, and that is empty, has no `holds`.
        if parts[-1].holds is not None:
            parts = [p if p.holds is not None else p._replace(holds=p.service) for p in parts]
        columns = zip(*parts)
        return Units._make([None if one[-1] is None else np.concatenate(one) for one in columns])


_NO_INTS = np.empty(0, np.int64)
_NOTHING = Units(_NO_INTS, _NO_INTS, _NO_INTS, _NO_INTS, np.empty(0, np.bool_), _NO_INTS)


class SendQueue:
    """The plan of one NIC.

    Attributes:
        units: in the order they leave.
        starts: departure of each, ps.
        at: the first that was not yet taken over by the receiving side.
    """

    def __init__(self) -> None:
        self.units = _NOTHING
        self.starts: Ints = np.empty(0, np.int64)
        self.at = 0
        self._free_ps = 0
        self._ended: dict[int, int] = {}
        self._later: list[Units] = []  # behind others of their queue pairs, and not planned yet
        self._later_ps = NEVER_PS  # they change nothing of the plan until then
        self._lasts: Ints | None = None  # by target, its last unit in the plan; None: not known

    def __len__(self) -> int:
        return len(self.starts) - self.at

    def before(self, limit_ps: int) -> int:
        """Index behind the last unit that leaves before the limit."""
        if limit_ps > self._later_ps:
            # What starts before stays: the wire and the turns stand as the latest plan left them.
            cut = max(self.at, int(self.starts.searchsorted(self._later_ps, "left")))
            self._plan(Units.join(self._take_later()), cut)
        return int(self.starts.searchsorted(limit_ps, "left"))

    def cut(self, now_ps: int) -> int:
        """Index of the first unit that can still be planned otherwise."""
        started = self.before(now_ps)  # first: it may plan again
        return max(self.at, started)

    def add(self, units: Units, now_ps: int) -> None:
        """Take more units, and plan again those that have not started once these change that.

        Units of a queue pair that has some waiting wait behind these, and until the last of them
        leaves, every other queue pair has its turns as planned.
        """
        cut = self.cut(now_ps)
        if len(self.starts) - cut > _MANY:
            at_once = []
            for target, which in by_value(units.target):
                last_ps = self._last_ps(target, cut)
                if last_ps < 0:
                    at_once.append(which)
                else:
                    self._later.append(units.pick(which))
                    self._later_ps = min(self._later_ps, last_ps)
            if not at_once:
                return
            units = Units.join([units.pick(which) for which in at_once])
        self._plan(Units.join([*self._take_later(), units]), cut)

    def _last_ps(self, target: int, cut: int) -> int:
        """The start of the last waiting unit of a queue pair, as planned; -1: none waits."""
        if self._lasts is None:
            targets = self.units.target
            self._lasts = np.full(int(targets.max()) + 1, -1)
            self._lasts[targets] = np.arange(len(targets))  # the last one of each stays
        last = self._lasts.item(target) if target < len(self._lasts) else -1
        return self.starts.item(last) if last >= cut else -1

    def _take_later(self) -> list[Units]:
        later, self._later, self._later_ps = self._later, [], NEVER_PS
        return later

    def _plan(self, units: Units, cut: int) -> None:
        self._lasts = None
        self._keep_ends(cut)
        waits = len(self.starts) - cut
        target = units.target.item(0) if is_alike(units.target) else -1
        if target >= 0 and (not waits or has_all(self.units.target[cut:] == target)):
            # One queue pair: waiting units keep their places, the new ones stand behind them.
            busy_ps = self._free_ps
            if waits:
                busy_ps = self.starts.item(-1) + self.units.service.item(-1)
            starts = fifo(units.ready, units.service, busy_ps) - units.service
            kept, planned = slice(self.at, None), units
        else:
            both = Units.join([self.units.pick(slice(cut, None)), units]) if waits else units
            order, starts = round_robin(
                both.target, both.ready, both.service, self._free_ps, self._ended
            )
            kept, planned = slice(self.at, cut), both.pick(order)
        if self.at == (len(self.starts) if kept.stop is None else cut):
            self.starts, self.units = starts, planned
        else:
            self.starts = np.concatenate((self.starts[kept], starts))
            self.units = Units.join([self.units.pick(kept), planned])
        self.at = 0

    def _keep_ends(self, cut: int) -> None:
        """Keep the time when the wire is free, and the last service of each waiting queue pair."""
        if not cut:
            return
        targets, services = self.units.target, self.units.service
        self._free_ps = self.starts.item(cut - 1) + services.item(cut - 1)
        # Without waiting units only the service that may still go on matters.
        last = targets.item(cut - 1)
        waiting = targets[cut:]
        if not len(waiting) or has_all(waiting == last):
            self._ended = {last: self._free_ps}
            return
        alive = {last, *waiting.tolist()}
        ends = self.starts[:cut] + services[:cut]
        latest = self._ended | dict(zip(targets[:cut].tolist(), ends.tolist()))
        self._ended = {target: end for target, end in latest.items() if target in alive}

    def drop_waiting(self, now_ps: int) -> Units:
        """Give up the units that have not started; return them."""
        cut = self.cut(now_ps)
        dropped = Units.join([self.units.pick(slice(cut, None)), *self._take_later()])
        self.units = self.units.pick(slice(0, cut))
        self.starts = self.starts[:cut]
        self._lasts = None
        return dropped
