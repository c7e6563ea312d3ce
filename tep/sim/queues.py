"""Exact queues without an event per item: numpy closed forms of FIFO and round-robin servers.

Times are integer ps in int64 arrays. Nothing here knows a NIC, a row or a clock. Every closed form
equals, to the picosecond, the loop over single arrivals that its docstring describes;
tests/unit/test_timing_queues.py holds both against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heapreplace
from itertools import pairwise
from operator import itemgetter
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "Bools",
    "Ints",
    "Quanta",
    "Rate",
    "Which",
    "by_value",
    "cut_quanta",
    "fifo",
    "fifo_grouped",
    "has_all",
    "has_any",
    "is_alike",
    "round_robin",
    "spans_ps",
]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Which = slice | Ints
"""Some entries of a column: a run of them, or their indices."""
Quanta = tuple[Ints, Ints, Bools]
"""Index of the row, bytes, and whether it is the row's last; one entry a quantum."""

_FRACTION_BITS: Final = 20
_FEW: Final = 4  # so many masks are quicker than a sort


class Rate:
    """Turns bytes into ps without floats, so that arrays and single numbers agree bit for bit.

    Args:
        bps: bits a second. Held as ps a byte with 20 binary places: 64 KiB are 0.1 ps off at most.
    """

    __slots__ = ("bps", "scale")

    def __init__(self, bps: int) -> None:
        assert bps > 0, bps
        self.bps = bps
        self.scale = ((8 * 10**12 << _FRACTION_BITS) + bps // 2) // bps

    def ps(self, nbytes: Ints) -> Ints:
        """Time that `nbytes` take, each 0 .. 2**36."""
        found: Ints = nbytes * self.scale >> _FRACTION_BITS
        return found


def spans_ps(nbytes: Ints, scale: Ints | int) -> Ints:
    """As Rate.ps, with the scale of each; 0: no time at all."""
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
    """Where each value of `key` is, by value, but for those left out."""
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

    The loop is that of an active list: a flow joins its tail when its head item is ready, and again
    when it has been served and has another ready item. Of those that join at one instant, who got
    ready stands before who was served; else the order is that of `flow` first, then of service.
    Within a flow items keep their order.

    Args:
        flow: int64[n], which flow each item is of.
        ready: int64[n], when each item may be served.
        service: int64[n].
        free_ps: when the server is free.
        ended: when a flow's latest service ended, for flows that were served before.

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
