"""The flow fabric: paged writes as flows in closed form, for clusters of a thousand engines.

It keeps time and counts and moves no bytes. A batch of rows is one flow: it leaves at the slower of
the worker's posting rate and the wire, crosses, and is served by the receiving NIC in order of
arrival. A flow costs three events at the most, whatever its rows, where the timing fabric costs
some for every burst. The price: flows of one NIC follow one another whole, where a NIC would share
the wire out in quanta, so single flows that meet finish earlier or later than they would, and all
of them together when they should. Numbers are those of the timing fabric's profiles.

Rule 1: receivers serve in order of arrival, not of posting. Rule 2: rows are never looked at one by
one. Ranges and page lists have been checked by the engine; keys are checked here. Rule 3: what
happens to several flows at one instant is one event: at 1,000 engines events are most of the cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tep.backends.base import Access, Completions, DomainKey, Entry, Kind, Status, WriteBatch
from tep.base.errors import BadDescriptor, ClosedError
from tep.base.units import PS_PER_S
from tep.memory.source import Memory
from tep.sim.clock import FOREVER_PS, FabricEnv, in_one_process
from tep.sim.driver import SimNic, SimNode
from tep.sim.machines import Machines, ack_ps, latency_ps
from tep.sim.profile import Profile

__all__ = ["FlowFabric", "FlowNic", "FlowNode"]

_WRITE, _IMM, _SENT, _RECV = (int(k) for k in (Kind.WRITE, Kind.IMM, Kind.SENT, Kind.RECV))
_OK: Final = int(Status.OK)
_COSTS_MAX: Final = 4096


class FlowFabric:
    """A switched network of machines, equal ones or of one transport.

    Args:
        env: the clock.
        profile: the machine, or the name of one that comes with tep; or several: see `node`.
        ack_gather_s: a sender learns of rows that went well at most this late; it bounds how long
            pages stay held, and saves a turn of the engine for every flow.

    Attributes:
        env, profile: as given; of several profiles the first.
        machines: those there are.
        flows, rows, nbytes: carried so far.
        rows_cost: by the id of a machine's profile: results of `FlowNic._cost`, by rows and bytes.
    """

    def __init__(
        self,
        env: FabricEnv,
        profile: Profile | str | Sequence[Profile | str],
        *,
        ack_gather_s: float = 0.0,
    ) -> None:
        self.env = env
        self.machines = Machines(profile, 0, None)
        self.profile = self.machines.first.profile
        self.ack_gather_ps = round(ack_gather_s * PS_PER_S)
        self.flows = self.rows = self.nbytes = 0
        self.nics: list[FlowNic] = []
        self.numbers: dict[bytes, int] = {}
        self.rows_cost: dict[int, dict[tuple[int, int], tuple[int, int, int]]] = {}
        self._epochs: dict[str, int] = {}

    __reduce__ = in_one_process

    def __repr__(self) -> str:
        return f"FlowFabric({self.machines.names}; {len(self._epochs)} nodes, {self.rows} rows)"

    def node(self, name: str, profile: Profile | str | None = None) -> FlowNode:
        """Start a host; a name used before is a later incarnation.

        Args:
            name: of its engine.
            profile: of its machine, one of the fabric's; None: the first of them.
        """
        machine = self.machines.find(profile).profile
        epoch = self._epochs[name] = self._epochs.get(name, 0) + 1
        return FlowNode(self, name, epoch, machine)


class FlowNode(SimNode):
    """One host with one device: its NICs, and the CPU of its worker.

    Attributes:
        profile: of its machine.
        busy_until_ps: time of the worker's next turn.
        cpu_free_ps: time when the worker has posted all rows that it was given.
    """

    def __init__(self, fabric: FlowFabric, name: str, epoch: int, profile: Profile) -> None:
        super().__init__(name, epoch)
        self.profile = profile
        self.cpu_free_ps = 0
        self._fabric = fabric
        self._step_delay_ps = profile.step_delay_ps
        self._turn_ps = profile.turn_rows * profile.post_first_ps
        self._reports: dict[int, list[FlowNic]] = {}  # the NICs that report completions, by time
        self._posts: list[tuple[FlowNic, WriteBatch, int, int, int]] = []
        self.domains = tuple(FlowNic(fabric, self, k) for k in range(profile.nics))

    def step_delay_ps(self) -> int:
        """The delay from a kick, or a completion, to the worker's turn."""
        return self._step_delay_ps

    def charge(self, n: int) -> tuple[int, int]:
        """Give the worker n rows to post; return when it begins and ends."""
        profile, now = self.profile, self._fabric.env.now
        begin_ps = max(self.cpu_free_ps, now)
        end_ps = begin_ps + profile.post_first_ps + (n - 1) * profile.post_next_ps
        self.cpu_free_ps = end_ps
        self.busy_until_ps = min(end_ps, now + self._turn_ps)
        return begin_ps, end_ps

    def post(self, nic: FlowNic, batch: WriteBatch, peer: int, start: int, n: int) -> None:
        """Have the worker post rows. A real one serves its NICs in turn: what is posted at one
        instant is launched in rounds, and a round ends together.
        """
        if not self._posts:
            self._fabric.env.call_at(self._fabric.env.now, self._launch)
        self._posts.append((nic, batch, peer, start, n))

    def _launch(self, _: object) -> None:
        posts, self._posts = self._posts, []
        call_at = self._fabric.env.call_at
        while posts:  # in rounds: of each NIC the next of its batches
            turn = {id(post[0]): post for post in reversed(posts)}.values()
            if len(turn) == len(posts):  # nearly always: one batch a NIC
                posts = []
            else:
                posts = [post for post in posts if not any(post is one for one in turn)]
            cpu_ps = self.charge(sum([post[4] for post in turn]))
            arriving: dict[int, list[_Flow]] = {}
            for nic, batch, peer, start, n in turn:
                flow = nic.launch(batch, peer, start, n, cpu_ps)
                if flow.arrive_ps in arriving:
                    arriving[flow.arrive_ps].append(flow)
                else:
                    arriving[flow.arrive_ps] = [flow]
            for arrive_ps, flows in arriving.items():
                call_at(arrive_ps, _arrive, flows)

    def report_at(self, at_ps: int, nic: FlowNic) -> None:
        """Have a NIC report at a time which of its flows have ended."""
        nics = self._reports.setdefault(at_ps, [])
        if not nics:
            self._fabric.env.call_at(at_ps, self._report, at_ps)
        nics.append(nic)

    def _report(self, at_ps: int) -> None:
        for nic in self._reports.pop(at_ps):
            nic.report_acks()


@dataclass(slots=True, eq=False)
class _Flow:
    """Rows of one batch that were posted at one time, on their way.

    Attributes:
        source, target, batch, start, n: which rows, from where, to where.
        wire_ps, holds_ps: the time that they take on the wire, and hold their receiver.
        arrive_ps: when the first byte arrives.
    """

    source: FlowNic
    target: FlowNic
    batch: WriteBatch
    start: int
    n: int
    wire_ps: int
    holds_ps: int
    arrive_ps: int


class FlowNic(SimNic):
    """One NIC; see `tep.backends.base.Domain` for its methods.

    Attributes:
        caps, address, closed: of the seam.
        node: whose.
    """

    def __init__(self, fabric: FlowFabric, node: FlowNode, index: int) -> None:
        super().__init__()
        profile = node.profile
        nic = f"{node.name}/{index}"
        caps = profile.caps(nic, moves_bytes=False, control_bytes=0)
        self.caps = replace(caps, reads_addresses=False)
        self.address = f"flow:{node.name}/{index}#{node.epoch}".encode()
        self.node = node
        self._fabric, self._env, self._profile = fabric, fabric.env, profile
        self._gather_ps = fabric.ack_gather_ps
        self._costs = fabric.rows_cost.setdefault(id(profile), {})
        self._ready: deque[Entry] = deque()
        self._acks: list[tuple[int, _Flow]] = []  # when they are due, in no order
        self._report_ps = FOREVER_PS  # time of the next report
        self._keys: set[int] = set()
        self._key = len(fabric.nics) << 24
        self._open = 0
        self._tx_free_ps = self._rx_free_ps = 0
        self._refused = self.closed = False
        self._flying: set[_Flow] = set()
        self._sends: dict[int, None] = {}  # messages that have not ended
        self._mail: deque[tuple[FlowNic, bytes, int]] = deque()
        fabric.numbers[self.address] = len(fabric.nics)
        fabric.nics.append(self)

    # ------------------------------------------------------------------ memory and peers

    def register(self, memory: Memory, access: Access) -> DomainKey:
        self._check_open()
        self._key += 2
        self._keys.add(self._key + 1)
        if access.target:
            self._keys.add(self._key)
        return DomainKey(lkey=self._key + 1, rkey=self._key, base=memory.ptr)

    def deregister(self, key: DomainKey) -> None:
        self._keys -= {key.lkey, key.rkey}

    def connect(self, peer: bytes) -> int:
        self._check_open()
        number = self._fabric.numbers.get(bytes(peer))
        if number is None:
            raise BadDescriptor(f"{peer!r} is no address of a NIC of this flow fabric")
        return number

    # ------------------------------------------------------------------ sending

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        self._check_open()
        n = min(stop - start, self.caps.sq_depth - self._open)
        if n < stop - start:
            self._refuse()
        if n <= 0:
            return 0
        self._open += n
        if not isinstance(batch.peer, int):  # a scatter: every row a flow of its own
            for row in range(start, start + n):
                self.node.post(self, batch, int(batch.peer[row]), row, 1)
        else:
            self.node.post(self, batch, batch.peer, start, n)
        return n

    def _refuse(self) -> None:
        """The owner waits for room: report gathered completions now."""
        self._refused = True
        if self._acks:
            self._report_at(min(due_ps for due_ps, _ in self._acks))

    def launch(
        self, batch: WriteBatch, peer: int, start: int, n: int, cpu_ps: tuple[int, int]
    ) -> _Flow:
        """Send rows off that the worker posts in this time; the caller has them arrive."""
        nbytes = batch.nbytes
        total = nbytes * n if isinstance(nbytes, int) else int(nbytes[start : start + n].sum())
        fabric = self._fabric
        leave_ps, wire_ps = self._occupy(n, total, cpu_ps)
        fabric.flows += 1
        fabric.rows += n
        fabric.nbytes += total
        target = fabric.nics[peer]
        profile = self._profile
        arrive_ps = leave_ps + profile.latency_ps
        flow = _Flow(self, target, batch, start, n, wire_ps, wire_ps, arrive_ps)
        if target._profile is not profile:
            flow.arrive_ps = leave_ps + latency_ps(profile, target._profile)
            flow.holds_ps = _taking_ps(target._profile, n, total)
        self._flying.add(flow)
        return flow

    def _occupy(self, n: int, nbytes: int, cpu_ps: tuple[int, int]) -> tuple[int, int]:
        """Give the wire n rows; when they begin to leave, and for how long."""
        cost = self._costs.get((n, nbytes))
        first_ps, wire_ps, last_ps = self._cost(n, nbytes) if cost is None else cost
        begin_ps, end_ps = cpu_ps
        leave_ps = max(begin_ps + first_ps, self._tx_free_ps)
        # The last row is posted at the end of the worker's time, and leaves then at the earliest.
        wire_ps = max(wire_ps, end_ps + last_ps - leave_ps)
        self._tx_free_ps = leave_ps + wire_ps
        return leave_ps, wire_ps

    def _cost(self, n: int, nbytes: int) -> tuple[int, int, int]:
        """From the first row's posting to its leaving; all rows' time on the wire; from the last
        row's posting to its end. Kept, since the batches of a run are mostly of a few sizes.
        """
        profile = self._profile
        fill_ps = min(nbytes // n, profile.fill_bytes) * 8 * PS_PER_S // profile.dma_bps
        dma_ps = n * profile.op_ps + nbytes * 8 * PS_PER_S // profile.dma_bps
        wire_ps = max(nbytes * 8 * PS_PER_S // profile.wire_bps, dma_ps)
        if len(self._costs) >= _COSTS_MAX:
            self._costs.clear()
        found = profile.post_first_ps + fill_ps, wire_ps, fill_ps + wire_ps // n
        self._costs[n, nbytes] = found
        return found

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        self._check_open()
        if self._open >= self.caps.sq_depth:
            self._refuse()
            return False
        self._open += 1
        self._sends[ctx] = None
        leave_ps, wire_ps = self._occupy(1, len(payload), self.node.charge(1))
        target = self._fabric.nics[peer]
        at_ps = leave_ps + wire_ps + latency_ps(self._profile, target._profile)
        self._env.call_at(at_ps, target._deliver, (self, bytes(payload), ctx))
        return True

    # ------------------------------------------------------------------ receiving

    def _serve(self, flow: _Flow) -> int:
        """Take a flow whose first bytes are here; return when its last row is in."""
        self._rx_free_ps = done_ps = max(flow.arrive_ps, self._rx_free_ps) + flow.holds_ps
        if flow.holds_ps < flow.wire_ps:  # a slower sender: not before it was sent
            done_ps = max(done_ps, flow.arrive_ps + flow.wire_ps)
        return done_ps

    def _deliver(self, letter: tuple[FlowNic, bytes, int]) -> None:
        """Take a message; it waits until there is a buffer."""
        self._mail.append(letter)
        if self.closed:
            self._return_mail()
        else:
            self._hand_out()

    def _return_mail(self) -> None:
        """Fail the messages that wait at this closed NIC, after their senders' timeout."""
        while self._mail:
            source, _, ctx = self._mail.popleft()
            at_ps = self._env.now + source._profile.peer_timeout_ps
            self._env.call_at(at_ps, source._end_send, (ctx, int(Status.UNREACHABLE)))

    def _hand_out(self) -> None:
        seen_ps = self._env.now - self._profile.receive_ps
        while self._mail:
            source, payload, ctx = self._mail[0]
            fits = not self.pool.never_fits(len(payload))
            found = self.pool.take(len(payload), source.address) if fits else None
            if fits and found is None:
                return
            self._mail.popleft()
            acked_ps = seen_ps + ack_ps(source._profile, self._profile)
            status = _OK if fits else int(Status.LENGTH)
            self._env.call_at(acked_ps, source._end_send, (ctx, status))
            if found is not None:
                slot, buffer = found
                buffer[: len(payload)] = payload
                self._ready.append((_RECV, _OK, 1, 0, 0, slot, len(payload)))
                self.waker()

    def post_recvs(self, nbytes: int, count: int) -> None:
        self._check_open()
        self.pool.add(nbytes, count)
        self._hand_out()

    def recv_done(self, slot: int) -> None:
        self.pool.give_back(slot)
        self._hand_out()

    # ------------------------------------------------------------------ completions

    def _ack(self, flow: _Flow, due_ps: int) -> None:
        """Report at a time, or together with later ones, that a flow of ours has ended well."""
        self._acks.append((due_ps, flow))
        report_ps = due_ps if self._refused else due_ps + self._gather_ps
        if report_ps < self._report_ps:
            self._report_at(report_ps)

    def _report_at(self, at_ps: int) -> None:
        at_ps = max(at_ps, self._env.now)
        if at_ps < self._report_ps:
            self._report_ps = at_ps
            self.node.report_at(at_ps, self)

    def report_acks(self) -> None:
        """Report the flows that have ended well by now."""
        now = self._env.now
        self._report_ps = FOREVER_PS
        later: list[tuple[int, _Flow]] = []
        found = False
        for due_ps, flow in self._acks:
            if due_ps > now:
                later.append((due_ps, flow))
            elif flow in self._flying:
                self._flying.remove(flow)
                self._open -= flow.n
                self._ready.append((_WRITE, _OK, flow.n, 0, 0, flow.batch.ctx, 0))
                found = True
        self._acks = later
        if found:
            self._refused = False
            self.waker()
        if later and not self.closed:
            gather_ps = 0 if self._refused else self._gather_ps
            self._report_at(min(due_ps for due_ps, _ in later) + gather_ps)

    def _fail(self, flow_status: tuple[_Flow, Status]) -> None:
        flow, status = flow_status
        if flow not in self._flying:
            return
        self._flying.remove(flow)
        self._open -= flow.n
        for row in range(flow.start, flow.start + flow.n):
            self._ready.append((_WRITE, int(status), 1, 0, row, flow.batch.ctx, 0))
        self.waker()

    def _end_send(self, ctx_status: tuple[int, int]) -> None:
        if self.closed:
            return
        ctx, status = ctx_status
        self._open -= 1
        del self._sends[ctx]
        self._ready.append((_SENT, status, 1, 0, 0, ctx, 0))
        self.waker()

    def poll(self, out: Completions) -> int:
        ready = self._ready
        if not ready:  # most of the time
            return 0
        n = min(len(ready), len(out))
        for k in range(n):
            out[k] = ready.popleft()
        if ready:
            self.waker()
        return n

    def status_text(self, status: int) -> str:  # noqa: ARG002  # the seam's signature
        return ""

    def arm(self) -> bool:
        return not self._ready

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.report_acks()
        for flow in sorted(self._flying, key=lambda flow: flow.arrive_ps):
            self._fail((flow, Status.FLUSHED))
        flushed = int(Status.FLUSHED)
        self._ready += [(_SENT, flushed, 1, 0, 0, ctx, 0) for ctx in self._sends]
        self._sends.clear()
        self._keys.clear()
        self._return_mail()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.caps.nic}: this NIC was closed")


def _arrive(flows: list[_Flow]) -> None:
    """Have targets serve flows whose first bytes arrive at this instant, in this order."""
    env = flows[0].source._env
    counted: dict[int, list[_Flow]] = {}
    for flow in flows:
        source, target, rkey = flow.source, flow.target, flow.batch.rkey
        profile, other = source._profile, target._profile
        if source.closed:
            continue
        if target.closed:
            late_ps = env.now + profile.peer_timeout_ps
            env.call_at(late_ps, source._fail, (flow, Status.UNREACHABLE))
            continue
        if (rkey if isinstance(rkey, int) else int(rkey[flow.start])) not in target._keys:
            late_ps = env.now + ack_ps(profile, other)
            env.call_at(late_ps, source._fail, (flow, Status.REMOTE_KEY))
            continue
        done_ps = target._serve(flow)
        counted.setdefault(done_ps + other.receive_ps, []).append(flow)
        way_ps = profile.ack_ps if other is profile else ack_ps(profile, other)
        source._ack(flow, done_ps + way_ps)
    for count_ps, mine in counted.items():
        env.call_at(count_ps, _count, mine)


def _count(flows: list[_Flow]) -> None:
    """Deliver the immediates of flows whose rows are all in."""
    for flow in flows:
        nic, imm = flow.target, flow.batch.imm
        if nic.closed or imm is None:
            continue
        if isinstance(imm, int):
            nic._ready.append((_IMM, _OK, flow.n, imm, 0, 0, 0))
        else:
            mine = imm[flow.start : flow.start + flow.n].tolist()
            nic._ready += [(_IMM, _OK, 1, value, 0, 0, 0) for value in mine]
        nic.waker()


def _taking_ps(profile: Profile, n: int, nbytes: int) -> int:
    """The time that a NIC of a machine takes for n rows from an unlike one."""
    dma_ps = n * profile.op_ps + nbytes * 8 * PS_PER_S // profile.dma_bps
    return max(nbytes * 8 * PS_PER_S // profile.wire_bps, dma_ps)
