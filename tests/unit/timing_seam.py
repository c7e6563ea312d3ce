"""Nodes of a timing fabric without an engine, and the slow model that it must agree with.

The owner here is the simplest there is: it polls whenever it is woken, and notes what it is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np

from tep.backends.base import Access, Kind, WriteBatch, new_completions
from tep.memory import adapt
from tep.sim.clock import FabricEnv
from tep.sim.ledger import Agenda
from tep.sim.paths import Network
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

    def __init__(self, fabric: TimingFabric, name: str, nbytes: int) -> None:
        self.fabric = fabric
        self.node = fabric.node(name)
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
        profile: Profile | str = PLAIN,
        nodes: int = 2,
        *,
        seed: int = 0,
        row_log: bool = False,
        move_bytes: bool = False,
        nbytes: int = 1 << 34,
        network: Network | None = None,
    ) -> None:
        self.env = FabricEnv()
        self.row_log = RowLog(on=row_log)
        self.fabric = TimingFabric(
            self.env,
            profile,
            seed=seed,
            row_log=self.row_log,
            move_bytes=move_bytes,
            network=network,
        )
        self.owners = [Owner(self.fabric, f"n{k}", nbytes) for k in range(nodes)]

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
            nic.inbox.receive_ps = owner.fabric.profile.receive_ps
    return landed


Posted = tuple[int, int, list[int], list[int]]
"""When, by which node, to which nodes, and how many bytes each row has."""


def ready_rows(
    profile: Profile, posts: Iterable[Posted]
) -> dict[int, list[tuple[int, int, int, int]]]:
    """What each source has posted: when the row is ready to leave, target, bytes, number."""
    cpu: dict[int, int] = {}
    rows: dict[int, list[tuple[int, int, int, int]]] = {}
    number = 0
    for now, source, targets, sizes in posts:
        free, before = max(now, cpu.get(source, 0)), None
        for target, nbytes in zip(targets, sizes, strict=True):
            free += profile.post_next_ps if target == before else profile.post_first_ps
            before = target
            fill = _ps(min(nbytes, profile.fill_bytes), profile.dma_bps)
            rows.setdefault(source, []).append((free + fill, target, nbytes, number))
            number += 1
        cpu[source] = free
    return rows


def slow_model(
    profile: Profile, posts: Iterable[Posted], network: Network | None = None
) -> list[int]:
    """When each row lands, one quantum after the other, with all posts known beforehand."""
    rows = ready_rows(profile, posts)
    arrivals = [
        arrival for source in sorted(rows) for arrival in _send(profile, source, rows[source])
    ]
    landed = [0] * sum(map(len, rows.values()))
    if network is not None or profile.bus_bps:
        network = network or Network()
        _pass(network, profile, arrivals, landed)
        return landed
    free_at: dict[int, int] = {}
    for arrive, _, _, target, work, row, last, _ in sorted(arrivals):
        free_at[target] = max(arrive, free_at.get(target, 0)) + work
        if last:
            landed[row] = free_at[target]
    return landed


def _ps(nbytes: int, bps: int) -> int:
    return nbytes * (((8 * 10**12 << 20) + bps // 2) // bps) >> 20


def _send(
    profile: Profile, source: int, rows: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int, int, int, bool, int]]:
    """Quanta of one NIC in the order they leave; the same active list as a NIC's arbiter has."""
    waiting: dict[int, list[tuple[int, int, int, bool, int]]] = {}
    order: dict[int, int] = {}
    for place, (ready, target, nbytes, number) in enumerate(rows):
        left, first = nbytes, True
        while True:
            size = min(left, profile.quantum_bytes)
            left -= size
            work = _ps(size, profile.dma_bps) + (profile.op_ps if first else 0)
            work = max(work, _ps(size, profile.wire_bps))
            waiting.setdefault(target, []).append((ready, work, number, left == 0, size))
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
        _, work, number, last, size = waiting[target].pop(0)
        start = max(free, joins[target][0])
        free = ended[target] = start + work
        turn += 1
        order[target] = turn
        arrive = start + profile.latency_ps
        found.append((arrive, source, turn, target, work, number, last, size))
        if not waiting[target]:
            del waiting[target]
    return found


def _pass(network: Network, profile: Profile, arrivals, landed: list[int]) -> None:
    """Let quanta pass the servers of a network, an event for each arrival at a server."""
    latency, leaves = profile.latency_ps, network.leaf_nodes or 1 << 30
    free: dict[tuple[str, int, int], int] = {}
    heap = []
    for arrive, source, turn, target, work, row, last, size in arrivals:
        start = arrive - latency
        heap.append((start, source, turn, "bus", target, work, row, last, size, start + work))
    heapify(heap)

    def serve(server, at: int, work: int, tail: int) -> tuple[int, int]:
        begin = max(at, free.get(server, 0))
        free[server] = begin + work
        return begin, max(tail, begin + work)

    while heap:
        at, source, turn, stage, target, work, row, last, size, tail = heappop(heap)
        leaf, other = source // leaves, target // leaves
        link = _ps(size, network.uplink_bps) if network.uplink_bps else 0
        way = latency + network.extra_ps.get((f"n{source}", f"n{target}"), 0)
        bus = _ps(size, profile.bus_bps) if profile.bus_bps else 0
        if stage == "bus":
            if profile.bus_bps:
                at, tail = serve(("bus", source, 0), at, bus, tail)
            heappush(heap, (at, source, turn, "leave", target, work, row, last, size, tail))
            continue
        if stage == "near":
            if profile.bus_bps:
                at, tail = serve(("bus", target, 1), at, bus, tail)
            _, tail = serve(("nic", target, 0), at, work, tail)
            if last:
                landed[row] = tail
            continue
        if leaf == other or stage == "below":
            if leaf != other and network.uplink_bps:
                at, tail = serve(("down", other, 0), at, link, tail)
            at, tail, stage = at + way, tail + way, "near"
        elif network.circuit_up_ps:
            at, end = _circuit(network, free, leaf, other, at, link)
            at, tail = at + network.spine_ps, max(tail, end) + network.spine_ps
            at, tail, stage = at + way, tail + way, "near"
        else:
            if network.uplink_bps:
                at, tail = serve(("up", leaf, 0), at, link, tail)
            at, tail, stage = at + network.spine_ps, tail + network.spine_ps, "below"
        heappush(heap, (at, source, turn, stage, target, work, row, last, size, tail))


def _circuit(network: Network, free, leaf: int, other: int, at: int, work: int) -> tuple[int, int]:
    """Serve on an optical circuit, slot by slot: when the service begins, and when it ends."""
    slot = network.circuit_up_ps + network.circuit_down_ps
    turn = (other - leaf) % network.leaves - 1
    at = max(at, free.get(("circuit", leaf, other), 0))
    begin = None
    while True:
        cycle = at // (slot * (network.leaves - 1)) * slot * (network.leaves - 1)
        opens = cycle + turn * slot + network.circuit_down_ps
        closes = opens + network.circuit_up_ps
        if at >= closes:
            at = cycle + slot * (network.leaves - 1)
            continue
        at = max(at, opens)
        begin = at if begin is None else begin
        if at + work <= closes:
            free["circuit", leaf, other] = at + work
            return begin, at + work
        work -= closes - at
        at = closes
