"""Nodes of a timing fabric without an engine, and the slow model that it must agree with.

The owner here is the simplest there is: it polls whenever it is woken, and notes what it is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np

from tep.backends.base import Access, Kind, WriteBatch, new_completions
from tep.memory.source import adapt
from tep.sim.clock import FabricEnv
from tep.sim.ledger import Agenda
from tep.sim.profile import Profile, load_profile
from tep.sim.row_log import RowLog
from tep.sim.timing import TimingFabric

US = 10**6
FAR = 1 << 40  # an address that nothing is mapped at

# One NIC, no jitter, and a worker that never turns away from posting: what the slow model knows.
PLAIN = replace(
    load_profile("cx7_400"), turn_rows=1 << 40, post_first_ps=90_001, post_next_ps=33_001
)


class Owner:
    """A node, polled at every wake."""

    def __init__(
        self, fabric: TimingFabric, name: str, nbytes: int, profile: Profile | str | None = None
    ) -> None:
        self.fabric = fabric
        self.node = fabric.node(name, profile)
        self.nics = self.node.domains
        self.seen: list[tuple[int, int, int, int, int, int]] = []
        self.real = None
        memory = (FAR, nbytes, "cpu")
        if fabric.move_bytes:
            self.real = np.zeros(nbytes, np.uint8)
            memory = self.real
        self.keys = [nic.register(adapt(memory), Access.SOURCE_AND_TARGET) for nic in self.nics]
        self._out = new_completions(64)
        for nic in self.nics:
            nic.set_waker(self.poll)

    def poll(self) -> None:
        for nic in self.nics:
            while filled := nic.poll(self._out):
                for kind, status, count, imm, row, ctx, _ in self._out[:filled].tolist():
                    self.seen.append((self.fabric.env.now, kind, status, count, imm or ctx, row))

    def of(self, kind: Kind) -> list[tuple[int, int]]:
        """(time, immediate or ctx) of all completions of a kind, once for each it counts."""
        return [(s[0], s[4]) for s in self.seen if s[1] == kind for _ in range(s[3])]

    def post(
        self,
        targets: list[Owner],
        nbytes: list[int],
        *,
        imm: int | None = 1,
        ctx: int = 1,
        nic: int = 0,
        offset: int = 0,
    ) -> int:
        """Post a row to each target, as one batch on one NIC."""
        mine = self.nics[nic]
        peers = [mine.connect(target.nics[nic].address) for target in targets]
        rkeys = [target.keys[nic].rkey for target in targets]
        bases = [target.keys[nic].base + offset for target in targets]
        one = len({*peers}) == 1
        batch = WriteBatch(
            len(targets),
            peers[0] if one else np.array(peers, np.uint64),
            self.keys[nic].base,
            self.keys[nic].lkey,
            np.array(bases, np.uint64),
            np.array(rkeys, np.uint64),
            np.array(nbytes, np.uint64),
            imm,
            ctx,
        )
        return mine.post(batch, 0, len(targets))


class Seam:
    """Owners on one fabric."""

    def __init__(
        self,
        profile: Profile | str | list[Profile] = PLAIN,
        nodes: int = 2,
        *,
        seed: int = 0,
        row_log: bool = False,
        move_bytes: bool = False,
        nbytes: int = 1 << 34,
    ) -> None:
        self.env = FabricEnv()
        self.row_log = RowLog(on=row_log)
        self.fabric = TimingFabric(
            self.env,
            profile,
            seed=seed,
            row_log=self.row_log,
            move_bytes=move_bytes,
        )
        machines = profile if isinstance(profile, list) else [profile] * nodes
        self.owners = [Owner(self.fabric, f"n{k}", nbytes, machines[k]) for k in range(nodes)]

    def run(self) -> None:
        self.env.run()
        for owner in self.owners:
            owner.poll()


def watch_landings(owners: list[Owner]) -> dict[int, int]:
    """Note when each row landed, by its number, as the fabric books it."""
    landed: dict[int, int] = {}

    class ControlDomain(Agenda):
        __slots__ = ("receive_ps",)

        def add(self, times: np.ndarray, numbers: np.ndarray) -> None:
            found = (times - self.receive_ps).tolist()
            landed.update(zip(numbers.tolist(), found, strict=True))
            super().add(times, numbers)

    for owner in owners:
        for nic in owner.nics:
            nic.inbox = ControlDomain()
            nic.inbox.receive_ps = nic.profile.receive_ps
    return landed


Machines = Profile | list[Profile]
"""One for all nodes, or one a node."""

Network = dict[str, int] | None
"""The numbers of a network, which all machines of a fabric have alike."""


def within(network: Network, machines: Machines) -> Machines:
    """The machines in a network."""
    if isinstance(machines, list):
        return [replace(machine, **network or {}) for machine in machines]
    return replace(machines, **network or {})


def of(machines: Machines, node: int) -> Profile:
    """The machine that a node is."""
    return machines[node] if isinstance(machines, list) else machines


def latency_of(machines: Machines, source: int, target: int) -> int:
    """Half of either end's."""
    one, other = of(machines, source).latency_ps, of(machines, target).latency_ps
    return one // 2 + other - other // 2


def held(profile: Profile, size: int, first: bool) -> int:
    """Return the time that a NIC takes for one quantum."""
    work = _ps(size, profile.dma_bps) + (profile.op_ps if first else 0)
    return max(work, _ps(size, profile.wire_bps))


Posted = tuple[int, int, list[int], list[int]]
"""When, by which node, to which nodes, and how many bytes each row has."""


def ready_rows(
    machines: Machines, posts: Iterable[Posted]
) -> dict[int, list[tuple[int, int, int, int]]]:
    """Return the rows of each source: time at which it is ready, target, bytes, number."""
    cpu: dict[int, int] = {}
    rows: dict[int, list[tuple[int, int, int, int]]] = {}
    number = 0
    for now, source, targets, sizes in posts:
        free, before, profile = max(now, cpu.get(source, 0)), None, of(machines, source)
        for target, nbytes in zip(targets, sizes, strict=True):
            free += profile.post_next_ps if target == before else profile.post_first_ps
            before = target
            fill = _ps(min(nbytes, profile.fill_bytes), profile.dma_bps)
            rows.setdefault(source, []).append((free + fill, target, nbytes, number))
            number += 1
        cpu[source] = free
    return rows


def slow_model(machines: Machines, posts: Iterable[Posted], network: Network = None) -> list[int]:
    """When each row lands, one quantum after the other, with all posts known beforehand."""
    machines = within(network, machines)
    rows = ready_rows(machines, posts)
    arrivals = [
        arrival for source in sorted(rows) for arrival in _send(machines, source, rows[source])
    ]
    landed = [0] * sum(map(len, rows.values()))
    all_ = machines if isinstance(machines, list) else [machines]
    if network is not None or any(profile.bus_bps for profile in all_):
        _pass(machines, arrivals, landed)
        return landed
    free_at: dict[int, int] = {}
    for arrive, _, _, target, work, hold, row, last, _ in sorted(arrivals):
        free_at[target] = max(arrive, free_at.get(target, 0)) + hold
        if last:
            landed[row] = max(arrive + work, free_at[target])
    return landed


def _ps(nbytes: int, bps: int) -> int:
    return nbytes * (((8 * 10**12 << 20) + bps // 2) // bps) >> 20


def _send(
    machines: Machines, source: int, rows: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int, int, int, int, bool, int]]:
    """Quanta of one NIC in the order they leave; the same active list as a NIC's arbiter has."""
    profile = of(machines, source)
    waiting: dict[int, list[tuple[int, int, int, int, bool, int]]] = {}
    order: dict[int, int] = {}
    for place, (ready, target, nbytes, number) in enumerate(rows):
        left, first = nbytes, True
        while True:
            size = min(left, profile.quantum_bytes)
            left -= size
            work, hold = held(profile, size, first), held(of(machines, target), size, first)
            waiting.setdefault(target, []).append((ready, work, hold, number, left == 0, size))
            order.setdefault(target, place)
            first = False
            if left == 0:
                break
    free, turn, ended, found = 0, len(rows), {}, []
    while waiting:
        joins = {
            target: (max(queue[0][0], ended.get(target, -1)), queue[0][0] <= ended.get(target, -1))
            for target, queue in waiting.items()
        }
        target = min(waiting, key=lambda t: (*joins[t], order[t], t))
        _, work, hold, number, last, size = waiting[target].pop(0)
        start = max(free, joins[target][0])
        free = ended[target] = start + work
        turn += 1
        order[target] = turn
        arrive = start + latency_of(machines, source, target)
        found.append((arrive, source, turn, target, work, hold, number, last, size))
        if not waiting[target]:
            del waiting[target]
    return found


def _pass(machines: Machines, arrivals, landed: list[int]) -> None:
    """Let quanta pass the servers of a network, an event for each arrival at a server."""
    network = of(machines, 0)
    leaves = network.leaf_nodes or 1 << 30
    free: dict[tuple[str, int, int], int] = {}
    heap = []
    for arrive, source, turn, target, work, *rest in arrivals:
        start = arrive - latency_of(machines, source, target)
        heap.append((start, source, turn, "bus", target, start + work, *rest))
    heapify(heap)

    def serve(server, at: int, work: int, tail: int) -> tuple[int, int]:
        begin = max(at, free.get(server, 0))
        free[server] = begin + work
        return begin, max(tail, begin + work)

    while heap:
        at, source, turn, stage, target, tail, hold, row, last, size = heappop(heap)
        leaf, other = source // leaves, target // leaves
        link = _ps(size, network.uplink_bps) if network.uplink_bps else 0
        way = latency_of(machines, source, target)
        bus_bps = of(machines, source if stage == "bus" else target).bus_bps
        bus = _ps(size, bus_bps) if bus_bps else 0
        if stage == "bus":
            if bus_bps:
                at, tail = serve(("bus", source, 0), at, bus, tail)
            heappush(heap, (at, source, turn, "leave", target, tail, hold, row, last, size))
            continue
        if stage == "near":
            if bus_bps:
                at, tail = serve(("bus", target, 1), at, bus, tail)
            _, tail = serve(("nic", target, 0), at, hold, tail)
            if last:
                landed[row] = tail
            continue
        if leaf == other or stage == "below":
            if leaf != other and network.uplink_bps:
                at, tail = serve(("down", other, 0), at, link, tail)
            at, tail, stage = at + way, tail + way, "near"
        else:
            if network.uplink_bps:
                at, tail = serve(("up", leaf, 0), at, link, tail)
            at, tail, stage = at + network.spine_ps, tail + network.spine_ps, "below"
        heappush(heap, (at, source, turn, stage, target, tail, hold, row, last, size))
