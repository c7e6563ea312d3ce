"""Two nodes of a chaos fabric driven at the seam, with no engine: what their tests share.

Not a test. Every NIC is polled a fixed while after its waker was called, and offered its rows then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tep.backends.base import Access, Kind, Status, WriteBatch, new_completions
from tep.base.units import PS_PER_NS
from tep.memory.source import adapt
from tep.sim.chaos import ChaosFabric, ChaosNic, ChaosNode
from tep.sim.clock import FabricEnv
from tep.sim.faults import Chaos
from tep.sim.row_log import RowLog

NS = PS_PER_NS

CALM = Chaos(
    reorder_ps=0,
    fragments=1,
    late_read=False,
    short_post=False,
    sq_depth=64,
    cqe_limit=64,
    imm_credits=1000,
)
"""The most harmless settings: a test adds only the fault that it is about."""


class Seen(NamedTuple):
    """One completion, as polled."""

    t_ps: int
    where: str
    kind: Kind
    status: Status
    count: int
    imm: int
    row: int
    ctx: int
    nbytes: int


class Side:
    """One node with a source and a target region, known to all its NICs."""

    def __init__(self, node: ChaosNode, nbytes: int) -> None:
        self.node = node
        self.src = (np.arange(nbytes) * 7 % 251 + 1).astype(np.uint8)
        self.dst = np.zeros(nbytes, np.uint8)
        both = Access.SOURCE_AND_TARGET
        self.sources = [nic.register(adapt(self.src), both) for nic in node.domains]
        self.targets = [nic.register(adapt(self.dst), both) for nic in node.domains]


class Seam:
    """Nodes "a" and "b", and whatever was seen at their NICs.

    Attributes:
        seen: every completion, in the order polled.
        on_seen: called with each completion as it is polled.
        accepted: rows accepted of each batch, by ctx.
    """

    def __init__(
        self,
        chaos: Chaos = CALM,
        *,
        nics: int = 1,
        nbytes: int = 4096,
        row_log: RowLog | None = None,
    ) -> None:
        self.env = FabricEnv()
        self.fabric = ChaosFabric(self.env, chaos, row_log=row_log)
        self.seen: list[Seen] = []
        self.on_seen: Callable[[Seen], object] = lambda _: None
        self.accepted: Counter[int] = Counter()
        self.poll_after_ps = 100 * NS
        self._out = new_completions(256)
        self._booked: dict[str, bool] = {}
        self._queues: dict[str, deque[tuple[WriteBatch, int]]] = {}
        self.a = self.side("a", nics, nbytes)
        self.b = self.side("b", nics, nbytes)
        self._ctx = 0

    def side(self, name: str, nics: int, nbytes: int) -> Side:
        """Add a node."""
        return self.adopt(self.fabric.node(name, nics), nbytes)

    def adopt(self, node: ChaosNode, nbytes: int) -> Side:
        """Drive a node that the fabric has made, e.g. a new incarnation."""
        for nic in node.domains:
            self._queues[nic.caps.nic] = deque()
            self._booked[nic.caps.nic] = False
            nic.set_waker(lambda nic=nic: self._kick(nic))
        return Side(node, nbytes)

    def batch(
        self,
        rows: list[tuple[int, int, int]],
        imm: int | list[int] | None = None,
        *,
        nic: int = 0,
        remote: int | None = None,
        to: Side | None = None,
    ) -> WriteBatch:
        """Rows from a's source (offset, offset, nbytes) to b's, or another side's, target."""
        to = to or self.b
        remote = nic if remote is None else remote
        domain, key = self.a.node.domains[nic], to.targets[remote]
        peer = domain.connect(to.node.domains[remote].address)
        self._ctx += 1
        columns = [np.array(column, np.uint64) for column in zip(*rows, strict=True)]
        imms = np.array(imm, np.uint32) if isinstance(imm, list) else imm
        src = columns[0] + np.uint64(self.a.src.ctypes.data)
        dst = columns[1] + np.uint64(key.base)
        lkey = self.a.sources[nic].lkey
        return WriteBatch(len(rows), peer, src, lkey, dst, key.rkey, columns[2], imms, self._ctx)

    def write(
        self,
        rows: list[tuple[int, int, int]],
        imm: int | list[int] | None = None,
        *,
        nic: int = 0,
        remote: int | None = None,
        to: Side | None = None,
    ) -> int:
        """Queue a batch; return its ctx."""
        batch = self.batch(rows, imm, nic=nic, remote=remote, to=to)
        self.offer(batch, nic)
        return batch.ctx

    def offer(self, batch: WriteBatch, nic: int = 0) -> None:
        """Queue a batch on one of a's NICs."""
        domain = self.a.node.domains[nic]
        self._queues[domain.caps.nic].append((batch, 0))
        self._kick(domain)

    def run(self, us: float | None = None) -> None:
        """Let time pass: to the end of all events, or for some microseconds."""
        self.env.run(None if us is None else self.env.now + round(us * 1_000_000))

    def of(self, kind: Kind, ctx: int | None = None) -> list[Seen]:
        """The completions of one kind, and of one batch."""
        return [seen for seen in self.seen if seen.kind == kind and ctx in (None, seen.ctx)]

    def ended(self, ctx: int | None = None) -> Counter[Status]:
        """Count the rows of a batch by their final status."""
        found: Counter[Status] = Counter()
        for seen in self.of(Kind.WRITE, ctx):
            found[seen.status] += seen.count
        return found

    def imms(self) -> Counter[int]:
        """Count the arrivals of each immediate."""
        found: Counter[int] = Counter()
        for seen in self.of(Kind.IMM):
            found[seen.imm] += seen.count
        return found

    def _kick(self, nic: ChaosNic) -> None:
        if not self._booked[nic.caps.nic]:
            self._booked[nic.caps.nic] = True
            self.env.call_at(self.env.now + self.poll_after_ps, self._turn, nic)

    def _turn(self, nic: ChaosNic) -> None:
        name = nic.caps.nic
        self._booked[name] = False
        while n := nic.poll(self._out):
            for kind, status, count, imm, row, ctx, nbytes in self._out[:n].tolist():
                entry = (Kind(kind), Status(status), count, imm, row, ctx, nbytes)
                self.seen.append(Seen(self.env.now, name, *entry))
                self.on_seen(self.seen[-1])
        queue = self._queues[name]
        while queue:
            batch, start = queue[0]
            taken = nic.post(batch, start, batch.n)
            self.accepted[batch.ctx] += taken
            if taken == 0:
                break
            if start + taken == batch.n:
                queue.popleft()
            else:
                queue[0] = (batch, start + taken)
