"""The way between two NICs when it is not one perfect switch: leaves, uplinks, circuits, distances.

A quantum passes its servers one behind the other: its node's bus, if all NICs of a node share one,
the uplink of its sender's leaf and the downlink of its receiver's (or the optical circuit between
the two), the receiving node's bus, then the receiving NIC. A bus is two servers, one each way. Each
serves in order of arrival of first bytes. Bytes flow through: the next server begins a latency
after this one began, and a quantum has landed when its last byte is through the slowest.

Rule (lookahead): what is not known yet starts at the limit or later, so it cannot arrive at a
server before the limit plus the shortest way there. What arrives later than that waits in a pool.
The answers are those of an event for each arrival; tests/unit/test_timing_paths.py holds them
against a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

import numpy as np

from tep.base.errors import UsageError
from tep.sim.profile import Profile
from tep.sim.queues import Ints, Rate, fifo_grouped, spans_ps
from tep.sim.sendqueue import Units

__all__ = [
    "LAST",
    "NETWORK",
    "NUMBER",
    "Network",
    "Passing",
    "Paths",
    "flights",
    "network_of",
    "no_flights",
]

NUMBER: Final = 0
LAST: Final = 1
TARGET, SERVICE, NBYTES, SOURCE, START, FIRST, TAIL, HOLDS = range(2, 10)
_COLUMNS: Final = 10
_NONE: Final = np.empty((0, _COLUMNS), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What stands between the NICs; as it is by default, nothing does.

    Attributes:
        leaf_nodes: nodes below one leaf switch, in the order they are started; 0: all of them.
        rails: leaves are rails instead: NIC k of every node is on rail k.
        uplink_bps: of each leaf to the spine, and from the spine to it; 0: as much as is wanted.
        spine_ps: what the spine adds to the latency.
        circuit_up_ps, circuit_down_ps: an optical spine: leaf i has a circuit of uplink_bps to leaf
            i + 1, then i + 2, ... in turn, each for circuit_up_ps after a reconfiguration of
            circuit_down_ps. 0: packets are switched.
        leaves: how many there are; needed for circuits.
        extra_ps: (node, node) -> what the way from one to the other adds to the latency.
    """

    leaf_nodes: int = 0
    rails: bool = False
    uplink_bps: int = 0
    spine_ps: int = 0
    circuit_up_ps: int = 0
    circuit_down_ps: int = 0
    leaves: int = 0
    extra_ps: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        numbers = (self.leaf_nodes, self.uplink_bps, self.spine_ps, self.leaves)
        if min(*numbers, self.circuit_up_ps, self.circuit_down_ps, *self.extra_ps.values()) < 0:
            raise UsageError(f"{self}: a number below 0")
        if self.rails and self.leaf_nodes:
            raise UsageError(f"{self}: rails, or leaves of so many nodes, not both")
        if self.circuit_up_ps and (self.leaves < 2 or not self.uplink_bps):
            raise UsageError(
                f"{self}: circuits need two leaves or more, and uplink_bps, their rate"
            )


NETWORK: Final = tuple(one.name for one in fields(Network) if one.name != "extra_ps")
"""What a profile says of its network, in fields of the same names."""


def network_of(profile: Profile) -> Network | None:
    """The network that a profile says it stands in; None: one perfect switch, and no bus to share.

    Raises:
        UsageError: its numbers contradict each other.
    """
    network = Network(**{name: getattr(profile, name) for name in NETWORK})
    return None if network == Network() and not profile.bus_bps else network


@dataclass(slots=True)
class Passing:
    """What one pass would do; `Paths.keep` makes it so.

    Attributes:
        flights: quanta whose landing is known, a row each.
        done: when each has landed.
        receivers: when each receiver is free afterwards.
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
        network: what it is.
        latency_ps: of every way, or of the shortest, without what the network adds.
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

    def due_ps(self) -> int | None:
        """When the first quantum in a pool can land; None: there is none."""
        times = [int(self._near[:, FIRST].min())] if len(self._near) else []
        if len(self._below):
            times.append(int(self._below[:, FIRST].min()) + self._latency_ps)
        if len(self._out):
            times.append(int(self._out[:, FIRST].min()) + self._latency_ps)
        return min(times, default=None)

    def advance(self, new: Ints, limit_ps: int, receivers: Ints) -> Passing:
        """Say what lands, if nothing unknown starts before the limit.

        Args:
            new: quanta that start before the limit, as `flights` makes them.
            limit_ps: see the rule above.
            receivers: when each receiving NIC is free; not changed.
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
        """Let a pass have happened."""
        self._ups, self._downs = passing._ups, passing._downs
        self._below, self._near = passing._below, passing._near
        self._buses, self._out = passing._buses, passing._out

    def waited(self, passing: Passing) -> Ints:
        """How long each quantum that landed stood behind others, or before a circuit."""
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

        Their scale is that of a Rate, one for all or of each row's server; 0: no server, for all.
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
        # Of each circuit: how long it has been up, at a time; and back.
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
        """On the way to the receiver: the latency of the pair."""
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
    """In order of arrival; of those that arrive together by sender, then as they left it."""
    return np.lexsort((rows[:, START], rows[:, SOURCE], rows[:, FIRST]))


def _in_order(rows: Ints) -> Ints:
    found: Ints = rows[_order(rows)]
    return found
