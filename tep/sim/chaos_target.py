"""The fabric and its nodes as NICs see them, rows and links, and the target side of a NIC.

Fragments are placed, immediates come out, messages find buffers, fences keep rows out. `chaos`
has the other side: what is posted here, and how it ends. Rule 1: the immediate of a row comes after
all its bytes. Rule 2: no address of the process, and no `id`, reaches a draw or the row log; keys
and bases are made up here.
"""

from __future__ import annotations

import errno
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from tep.backends.base import Access, Completions, DomainCaps, DomainKey, Kind, Status
from tep.backends.common import check_memory
from tep.base.errors import BadDescriptor, ClosedError, FabricError
from tep.base.hashing import below
from tep.base.units import PS_PER_MS, PS_PER_NS, PS_PER_S, GiB, KiB
from tep.memory.source import Memory
from tep.sim.chaos_parts import CompletionQueue, NicState, Region
from tep.sim.clock import FabricEnv
from tep.sim.draws import Draws
from tep.sim.driver import SimNic, SimNode
from tep.sim.faults import Chaos, Fault, KillNic
from tep.sim.row_log import Record, RowLog, What

__all__ = [
    "ACK_PS", "CONTROL_BYTES", "ChaosNode", "ChaosTarget", "Fabric", "Flight", "Fragment", "Link",
    "Peer", "Trouble", "is_address", "reach",
]  # fmt: skip

_ADDRESS: Final = re.compile(rb"sim:([^\0]{1,200})/(\d{1,3})#(\d{1,18})")

ACK_PS: Final = 100 * PS_PER_NS
"""The shortest way of an answer; a choice, as all sizes of an undisturbed row."""

_RNR_PS: Final = 300 * PS_PER_NS
"""The wait between two tries of a row without a receive; a choice."""

CONTROL_BYTES: Final = KiB
"""The longest control message."""

_LINK_BPS: Final = 256_000_000_000
"""Nominal: the 32 bytes a ns of `chaos`; no machine's figure."""

_OK: Final = int(Status.OK)
_IMM: Final = int(Kind.IMM)
_RECV: Final = int(Kind.RECV)
_CONTROL: Final = int(Kind.CONTROL)
_FENCED: Final = int(Kind.FENCED)
_ALL: Final = 1 << 62  # more rows than any fabric sees

_TEXTS: Final = {
    int(Status.LOCAL_KEY): "the source's key is unknown here, revoked, or its range too short",
    int(Status.REMOTE_KEY): "the target's NIC does not know the key; was it deregistered?",
    int(Status.REMOTE_RANGE): "the row ends outside the target's region",
    int(Status.RNR): "the peer posted no receive for rnr_retries tries",
    int(Status.UNREACHABLE): "the peer's NIC is dead or closed, or nobody has that address",
    int(Status.STALE_PEER): "the peer restarted; ask it for its new address and descriptors",
    int(Status.NIC_DOWN): "this NIC was killed; whether the row landed is unknown",
}


Trouble = Literal["clog", "deaf", "mute"]


class Link:
    """The link of one NIC: slow, clogged, deaf, cut off from some, or without acknowledgements.

    It holds what cannot pass and releases it in the order it came.

    Attributes:
        troubles: number of current faults of each kind, never 0: "clog" lets nothing pass, "deaf"
            nothing in, "mute" no acknowledgement in, a link nothing in that comes from it.
        factor: everything takes so many times as long as usual.
        fragments: held until the clog is gone.
        acks: rows whose acknowledgements are held until they can pass.
    """

    def __init__(self, env: FabricEnv) -> None:
        self.troubles: dict[Trouble | Link, int] = {}
        self.factor = 1
        self.fragments: list[Fragment] = []
        self.acks: list[Flight] = []
        self._env = env
        self._slows: list[int] = []
        self._healed = 0

    def lets_in(self, source: Link) -> bool:
        """Whether fragments from another link come in here now."""
        mine = self.troubles
        if not (mine or source.troubles):
            return True
        return not ("clog" in mine or "deaf" in mine or "clog" in source.troubles or source in mine)

    def lets_acks_in(self, target: Link) -> bool:
        """Whether answers from another link come in here now."""
        return "mute" not in self.troubles and self.lets_in(target)

    def trouble(self, what: Trouble | Link, for_ps: int | None) -> None:
        """Begin a clog, deafness, muteness, or a cut from another link."""
        self.troubles[what] = self.troubles.get(what, 0) + 1
        self._until(for_ps, self._ends, what)

    def slow(self, factor: int, for_ps: int | None) -> None:
        """Take `factor` times as long; of several the slowest counts."""
        self._slows.append(factor)
        self.factor = max(self._slows)
        self._until(for_ps, self._hurries, factor)

    def _until(self, for_ps: int | None, ends: Callable[[Any], None], what: object) -> None:
        """End a trouble after a time, unless the link was healed before; None: it stays."""
        if for_ps is None:
            return
        healed = self._healed

        def end(_: object) -> None:
            if healed == self._healed:
                ends(what)

        self._env.call_at(self._env.now + for_ps, end)

    def heal(self) -> None:
        self._healed += 1
        self.troubles.clear()
        self._slows.clear()
        self.factor = 1
        self._let_go()

    def _ends(self, what: Trouble | Link) -> None:
        self.troubles[what] -= 1
        if not self.troubles[what]:
            del self.troubles[what]
        if not isinstance(what, Link) or what not in self.troubles:
            self._let_go()

    def _hurries(self, factor: int) -> None:
        self._slows.remove(factor)
        self.factor = max(self._slows, default=1)

    def _let_go(self) -> None:
        if "clog" in self.troubles:
            return
        fragments, self.fragments = self.fragments, []
        for fragment in fragments:
            reach(fragment)
        acks, self.acks = self.acks, []
        for row in acks:  # one that cannot pass yet is held again, at the sender's link
            row.nic.acknowledge(row)


@dataclass(slots=True, eq=False)
class Peer:
    """One address that a NIC has connected to.

    Attributes:
        target: the NIC at that address; None until somebody opens it.
        landed_ps: ordered fabrics: when the last fragment lands that was sent so far.
        held: ordered fabrics: fragments behind a row that waits for a receive; None: none waits.
        rows: to that address that have not ended, messages not counted.
    """

    name: str
    nic: int
    epoch: int
    target: ChaosTarget | None = None
    landed_ps: int = 0
    held: list[Fragment] | None = None
    rows: int = 0


@dataclass(slots=True, eq=False)
class Flight:
    """One write, read or message, from its post to its completion.

    Attributes:
        nic: the NIC that posted it.
        number: in order of posting, over the whole fabric.
        bits: drawn once; separate fields of it serve separate decisions.
        kind: Kind.WRITE, READ or SENT.
        flying: False once it is acknowledged or doomed; its fragments then change nothing.
        left: fragments that have not landed, of a read those that are not placed yet. A write has
            -1 once its target has answered, a read until its owner has.
        parked: whether it has waited for a receive.
        stuck_ps: since when it is stuck on a link, while its time for that runs; else -1.
        ack_lost: a message whose acknowledgement is lost on the way.
        is_control: whether its payload is for the peer's engine, not for a user's buffer.
        ghost: the bytes of a write that has failed, while more of them may land. A read has b""
            while more of it may be placed after its end. None: nothing may.
        payload: None where it is no message.
        region: memory here: a write's source, or a read's sink; None for 0 bytes.
        at: first byte in that region.
        remote, rkey: address and key at the peer.
    """

    nic: ChaosTarget
    peer: Peer
    number: int
    bits: int
    ctx: int
    kind: int
    index: int = 0
    flying: bool = True
    left: int = 1
    parked: bool = False
    stuck_ps: int = -1
    ack_lost: bool = False
    is_control: bool = False
    ghost: bytes | None = None
    payload: bytes | None = None
    region: Region | None = None
    at: int = 0
    remote: int = 0
    rkey: int = 0
    nbytes: int = 0
    imm: int | None = None


Fragment = tuple[Flight, int, int, bytes | None]
"""Bytes from..to of a row, and the bytes if they were read early. A message is one fragment."""


def reach(fragment: Fragment) -> None:
    """Bring a fragment to its target, or hold it on a link that lets nothing through."""
    row = fragment[0]
    target = row.peer.target
    assert target is not None, "a row without a target never leaves"
    its, mine = target.link, row.nic.link
    if its.lets_in(mine):
        target.land(fragment)
        return
    at_target = {"clog", "deaf"} & its.troubles.keys() or "clog" not in mine.troubles
    (its if at_target else mine).fragments.append(fragment)
    row.nic.stuck(row)


def is_address(address: bytes) -> bool:
    """Return True if these bytes can be the address of a simulated NIC."""
    return _ADDRESS.fullmatch(address) is not None


class Fabric:
    """Nodes on one clock, as their NICs see them.

    Attributes:
        row_log: None: nothing is recorded.
        nodes: the incarnation of each host that runs now.
        rows: rows and messages posted so far.
        failed: (NIC, ctx, row, status) of every row and message that ended in an error.
        violations: things that no correct engine does, in words.
        happened: faults that nobody asked for: those that the fabric's own load brought about.
        seen: name -> count of events that a suite should have met.
        healed: True after heal(): nothing of the fabric's own will goes wrong any more.
    """

    def __init__(self, env: FabricEnv, chaos: Chaos, row_log: RowLog | None) -> None:
        self.env = env
        self.chaos = chaos
        self.row_log = row_log if row_log is not None and row_log.on else None
        self.draws = Draws.of(chaos.seed, chaos.kept)
        self.nodes: dict[str, ChaosNode] = {}
        self.rows = 0
        self.failed: list[tuple[str, int, int, Status]] = []
        self.violations: list[str] = []
        self.happened: list[Fault] = []
        self.seen: Counter[str] = Counter()
        self.healed = False

    def parse(self, address: bytes) -> tuple[str, int, int]:
        """Read an address: name, NIC, epoch. Raises BadDescriptor."""
        found = _ADDRESS.fullmatch(address)
        try:
            if found is not None:
                return found[1].decode(), int(found[2]), int(found[3])
        except UnicodeDecodeError:
            pass
        raise BadDescriptor(f"{address[:80]!r} is not the address of a simulated NIC")

    def find(self, name: str, nic: int, epoch: int) -> ChaosTarget | None:
        """Find the NIC of an address, if that incarnation is the one that runs."""
        node = self.nodes.get(name)
        if node is None or node.epoch != epoch or nic >= len(node.nics):
            return None
        return node.nics[nic]

    def why_lost(self, name: str, epoch: int) -> Status:
        """Say why an address cannot be reached."""
        node = self.nodes.get(name)
        return Status.STALE_PEER if node and node.epoch > epoch else Status.UNREACHABLE

    def lost(self, target: ChaosTarget, status: Status, *, acks_lost: bool) -> None:
        """Notify every other NIC that one is gone."""
        for node in self.nodes.values():
            for nic in node.nics:
                if nic is not target and nic.state in (NicState.UP, NicState.DEAD):
                    nic.peer_lost(target, status, acks_lost=acks_lost)


class ChaosNode(SimNode):
    """One incarnation of one host; the first has epoch 1.

    A worker is never charged for its time, and every completion wakes it.

    Attributes:
        uid: number of the host on its fabric; part of every draw.
        nics: made by the fabric; `domains` to its engine.
    """

    nics: tuple[ChaosTarget, ...]

    def __init__(self, fabric: Fabric, name: str, uid: int, epoch: int) -> None:
        super().__init__(name, epoch)
        self.fabric = fabric
        self.uid = uid
        self._paused_ps = 0
        self._steps = uid << 32  # of this incarnation; part of every draw
        self._next_step = fabric.draws.steps(self._steps + 1)
        self._delay_ps, self._pause_ps = fabric.chaos.poll_delay_ps, fabric.chaos.pause_ps
        self._first_key = uid << 24
        if not fabric.chaos.key_reuse:
            self._first_key += (epoch & 0xFF) << 16

    def next_key(self) -> int:
        """Number the next region; with `key_reuse` each incarnation starts from the first."""
        self._first_key += 1
        return self._first_key

    def step_delay_ps(self) -> int:
        """Draw how long this kick takes to become a step."""
        self._steps = entity = self._steps + 1
        bits = self._next_step()
        delay_ps = 1 + below(bits, self._delay_ps)
        if self._pause_ps and bits & 0x3F == 0 and not self.fabric.healed:
            delay_ps += below(self.fabric.draws.step(entity, 1), self._pause_ps)
        if self._paused_ps:
            return max(delay_ps, self._paused_ps - self.fabric.env.now)
        return delay_ps

    def pause(self, for_ps: int) -> None:
        """Have the worker's next steps wait; 0 ends a pause."""
        self._paused_ps = self.fabric.env.now + for_ps


class ChaosTarget(SimNic):
    """One NIC as far as others reach it; `ChaosNic` adds what it posts, and its death.

    Attributes:
        rows: rows and messages accepted so far.
    """

    link: Link

    def __init__(self, fabric: Fabric, node: ChaosNode, number: int) -> None:
        super().__init__()
        chaos = fabric.chaos
        self.fabric = fabric
        self.node = node
        self.number = number
        self.state = NicState.UP
        self.rows = 0
        self._calls = 0
        self._given_back: list[int] = []  # numbers of regions, with `key_again`
        self.address = f"sim:{node.name}/{number}#{node.epoch}".encode()
        self.caps = DomainCaps(
            backend="sim",
            nic=f"{node.name}/{number}",
            link_bps=_LINK_BPS,
            sq_depth=chaos.sq_depth,
            max_write_bytes=2 * GiB,
            max_msg_bytes=8 * KiB,
            ordered=chaos.ordered,
            peer_timeout_s=(chaos.dead_after_ps + chaos.pause_ps + PS_PER_MS) / PS_PER_S,
            control_bytes=CONTROL_BYTES,
            imm_source=True,
            reads=chaos.sq_depth,
        )
        self._uid = (node.uid * 64 + number) << 32
        self._chaos = chaos
        self._env = fabric.env
        self._row_log = fabric.row_log
        self._draws = fabric.draws
        self._cq = CompletionQueue(fabric.env, chaos, fabric.draws.post, self._uid)
        self.entries = self._cq.entries
        self._lkeys: dict[int, Region] = {}
        self._rkeys: dict[int, Region] = {}
        self._sinks: dict[int, Region] = {}
        self._readable: dict[int, Region] = {}
        self._peers: list[Peer] = []
        self._peer_ids: dict[bytes, int] = {}
        self._credits = chaos.imm_credits
        self._waiting: list[Flight] = []
        self._serving = False
        self._controls: dict[int, tuple[bytes, bytes]] = {}
        self._controls_seen = 0
        self._sources: dict[bytes, int] = {}
        self._barred: dict[bytes, int] = {}  # by sender, the last row that may not land
        self._fencing: dict[bytes, set[int]] = {}  # by sender, the fences that are not confirmed

    def watch(self, row_log: RowLog) -> None:
        self._row_log = row_log

    @property
    def regions(self) -> int:
        """Count the registered regions."""
        return len(self._lkeys)

    def register(self, memory: Memory, access: Access) -> DomainKey:
        """Give a region keys that no other region or NIC here has now."""
        self._check_open()
        check_memory(self.caps, memory, access)
        if self._fails(self._chaos.register_fails, 2):
            self.fabric.seen["register failed"] += 1
            raise FabricError(f"{self.caps.nic}: no memory for a key (F29)", code="PROVIDER")
        number = self._given_back.pop() if self._given_back else self.node.next_key()
        key = (number << 6 | self.number) << 1
        region = Region(memory, 0 if self._chaos.offsets else (number & 0xFFFF) << 40 | 0x1000)
        self._lkeys[key] = region
        if access.target:
            self._rkeys[key + 1] = region
        if access.sink:
            self._sinks[key] = region
        if access.readable:
            self._readable[key + 1] = region
        return DomainKey(key, key + 1, region.base)

    def deregister(self, key: DomainKey) -> None:
        region = self._lkeys.pop(key.lkey, None)
        self._rkeys.pop(key.rkey, None)
        self._sinks.pop(key.lkey, None)
        self._readable.pop(key.rkey, None)
        if region is not None:
            region.alive = False
            if self._chaos.key_again:
                self._given_back.append(key.lkey >> 7)

    def revoke(self) -> None:
        """Lose every registration of this moment."""
        self._control_fault("revoke")
        for region in self._lkeys.values():
            region.alive = False
        for keys in (self._lkeys, self._rkeys, self._sinks, self._readable):
            keys.clear()

    def connect(self, peer: bytes) -> int:
        self._check_open()
        known = self._peer_ids.get(peer)
        if known is None:
            name, nic, epoch = self.fabric.parse(peer)
            if self._fails(self._chaos.connect_fails, 3):
                self.fabric.seen["connect failed"] += 1
                raise OSError(errno.EMFILE, f"{self.caps.nic}: no descriptor for a peer (F29)")
            known = self._peer_ids[peer] = len(self._peers)
            self._peers.append(Peer(name, nic, epoch))
        return known

    def _fails(self, often: int, index: int) -> int:
        """Draw whether a call finds too few resources, `often` of 256 times; 0: it does not."""
        if not often or self.fabric.healed:
            return 0
        self._calls += 1
        bits = self._draws.post(self._uid + self._calls, index)
        return 1 + (bits >> 8 & 3) if 255 - (bits & 0xFF) < often else 0

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._cq.waker = waker

    def arm(self) -> bool:
        return True

    def status_text(self, status: int) -> str:
        return _TEXTS.get(status, "")

    def _check_open(self) -> None:
        if self.state in (NicState.CLOSED, NicState.GONE):
            raise ClosedError(f"{self.caps.nic} is closed")

    def _note(
        self,
        what: What,
        row: Flight,
        peer: str,
        offset: int = 0,
        nbytes: int = -1,
        value: int = 0,
    ) -> None:
        assert self._row_log is not None
        nbytes = row.nbytes if nbytes < 0 else nbytes
        now, name, number = self._env.now, self.node.name, self.number
        self._row_log.add(
            Record(now, what, name, number, peer, row.number, row.ctx, offset, nbytes, value)
        )

    def _control_fault(self, fault: str) -> None:
        if self._row_log is not None:
            self._row_log.add(Record(self._env.now, "fault", self.node.name, self.number, fault))

    # ------------------------------------------------------------------ landing

    # The sending side, `ChaosNic`, knows how to do these.

    def kill(self) -> None:
        """Die."""
        raise NotImplementedError

    def vanish(self, status: Status) -> None:
        """Crash with the host."""
        raise NotImplementedError

    def peer_lost(self, target: ChaosTarget, status: Status, *, acks_lost: bool) -> None:
        """Learn that another NIC is gone."""
        raise NotImplementedError

    def acknowledge(self, row: Flight) -> None:
        """Learn that a row of this NIC has landed."""
        raise NotImplementedError

    def refuse(self, row: Flight, status: Status) -> None:
        """Learn that the target refused a row of this NIC."""
        raise NotImplementedError

    def stuck(self, row: Flight) -> None:
        """Learn that a row of this NIC, or its answer, waits on a link."""
        raise NotImplementedError

    def land(self, fragment: Fragment) -> None:
        """Take a fragment of a row that arrives at its target."""
        row, start, stop, early = fragment
        if not row.flying:
            if row.ghost is not None and self._chaos.late_ps:
                late_ps = below(row.bits, self._chaos.late_ps)
                self._env.call_at(self._env.now + late_ps, self._land_late, fragment)
            else:
                self._land_late(fragment)
            return
        peer = row.peer
        if peer.held is not None:
            peer.held.append(fragment)
            return
        if row.payload is not None:
            self._take_message(row)
            return
        if self._barred and self._is_barred(row):
            row.nic.refuse(row, Status.UNREACHABLE)
            return
        region = self._rkeys.get(row.rkey)
        if region is None and row.nbytes == 0:  # the immediate after a read (C9)
            region = self._readable.get(row.rkey)
        if region is None:
            row.nic.refuse(row, Status.REMOTE_KEY)
            return
        offset = row.remote - region.base
        if offset < 0 or offset + row.nbytes > region.nbytes:
            row.nic.refuse(row, Status.REMOTE_RANGE)
            return
        if stop > start:
            data: bytes | memoryview
            if early is not None:
                data = early
            else:
                source = row.region
                assert source is not None
                if not source.alive:  # deregistered while the row was on its way
                    row.nic.refuse(row, Status.LOCAL_KEY)
                    return
                data = source.view[row.at + start : row.at + stop]
            region.view[offset + start : offset + stop] = data
            if self._chaos.corrupt:
                self._turn_bit(row, region.view[offset + start : offset + stop], start)
            if self._row_log is not None:
                name = row.nic.node.name
                self._note("place", row, name, offset + start, stop - start, zlib.crc32(data))
        row.left -= 1
        if row.left == 0:
            self._arrive(row)

    def _turn_bit(self, row: Flight, placed: memoryview, start: int) -> None:
        """Turn a bit of a row on its way, if it is one of those, and this fragment has the byte."""
        if 255 - (row.bits >> 32 & 0xFF) >= self._chaos.corrupt or self.fabric.healed:
            return
        at = below(row.bits, row.nbytes) - start
        if 0 <= at < len(placed):
            placed[at] ^= 1 << (row.bits & 7)
            self.fabric.seen["bit turned"] += 1

    def readable_at(
        self, rkey: int, address: int, nbytes: int, reader: bytes, number: int
    ) -> memoryview | Status:
        """Return the bytes that row `number` of a reader asks for, or why it may not have them."""
        if self.state is not NicState.UP or number <= self._barred.get(reader, 0):
            return Status.UNREACHABLE
        if nbytes == 0:
            return memoryview(b"")
        region = self._readable.get(rkey)
        if region is None:
            return Status.REMOTE_KEY
        offset = address - region.base
        if offset < 0 or offset + nbytes > region.nbytes:
            return Status.REMOTE_RANGE
        return region.view[offset : offset + nbytes]

    def _land_late(self, fragment: Fragment) -> None:
        """Place a fragment of a row that has failed already."""
        row, start, stop, _ = fragment
        ghost, region = row.ghost, self._rkeys.get(row.rkey)
        if ghost is None or row.payload is not None or self.state is not NicState.UP:
            return
        if self._is_barred(row):
            return
        offset = 0 if region is None else row.remote - region.base
        if region is None or offset < 0 or offset + row.nbytes > region.nbytes:
            return
        region.view[offset + start : offset + stop] = ghost[start:stop]
        self.fabric.seen["landed after its error"] += 1
        if self._row_log is not None and stop > start:
            crc = zlib.crc32(ghost[start:stop])
            name = row.nic.node.name
            self._note("place", row, name, offset + start, stop - start, crc)
        row.left -= 1
        imm = row.imm
        if row.left == 0 and imm is not None and self._chaos.late_land > 1 and self._credits:
            self._credits -= self._chaos.ordered
            self._announce(row, imm)

    def _overruns(self) -> bool:
        """Die if one more unsolicited immediate is too much for the completion queue."""
        depth = self._chaos.cq_depth
        if not depth or self._chaos.ordered or self._cq.held < depth or self.fabric.healed:
            return False
        self.fabric.happened.append(KillNic(self.node.name, self.number))
        self.fabric.seen["completion queue overrun"] += 1
        self.kill()
        return True

    def _arrive(self, row: Flight) -> None:
        """Show the immediate of a row whose bytes are all here."""
        imm = row.imm
        if imm is not None:
            if self._overruns():
                return
            if self._chaos.ordered:
                if self._credits == 0:
                    self._park(row)
                    return
                self._credits -= 1
            self._announce(row, imm)
        self._answer(row)

    def _announce(self, row: Flight, imm: int) -> None:
        if self._row_log is not None:
            self._note("imm", row, row.nic.node.name, value=imm)
        self._cq.push((_IMM, _OK, 1, imm, 0, self._source_of(row.nic.address), 0))

    def _answer(self, row: Flight) -> None:
        row.left = -1
        delay_ps = ACK_PS + ((row.bits >> 16) & 0xFFFF) * ACK_PS // 0x10000
        self._env.call_at(self._env.now + delay_ps, row.nic.acknowledge, row)

    def _take_message(self, row: Flight) -> None:
        assert row.payload is not None
        if row.is_control:
            self._hear(row)
            self._answer(row)
            return
        if self.pool.never_fits(row.nbytes):
            row.nic.refuse(row, Status.LENGTH)
            return
        found = self.pool.take(row.nbytes, row.nic.address)
        if found is None:
            self._park(row)
            return
        slot, buffer = found
        buffer[: row.nbytes] = row.payload
        if self._row_log is not None:
            self._note("recv", row, row.nic.node.name, value=slot)
        self._cq.push((_RECV, _OK, 1, 0, 0, slot, row.nbytes))
        self._answer(row)

    def _hear(self, row: Flight) -> None:
        assert row.payload is not None
        self._controls_seen += 1
        self._controls[self._controls_seen] = (row.payload, row.nic.address)
        self._cq.push((_CONTROL, _OK, 1, 0, 0, self._controls_seen, row.nbytes))

    def take_copy(self, row: Flight) -> None:
        """Take a control message that arrives a second time."""
        self.fabric.seen["control message doubled"] += 1
        self._hear(row)

    def _park(self, row: Flight) -> None:
        """Let a row wait for a receive; on an ordered fabric all behind it wait too."""
        self._waiting.append(row)
        self.fabric.seen["row without a receive"] += 1
        if self._chaos.ordered:
            row.peer.held = []
        if self._chaos.rnr_retries >= 0 and not row.parked:
            tries_ps = (self._chaos.rnr_retries + 1) * _RNR_PS
            self._env.call_at(self._env.now + tries_ps, self._give_up, row)
        row.parked = True

    def _give_up(self, row: Flight) -> None:
        if row.flying and row in self._waiting:
            self._waiting.remove(row)
            row.nic.refuse(row, Status.RNR)
            self._release(row.peer)

    def _release(self, peer: Peer) -> None:
        """Release the fragments that were held behind a row."""
        held, peer.held = peer.held or [], None
        for fragment in held:
            self.land(fragment)

    def _has_receives(self) -> None:
        """Receives were posted: retry waiting rows at their sender's next try."""
        if self._waiting and not self._serving:
            self._serving = True
            drawn = self._draws.error(self._uid, self.fabric.rows)
            delay_ps = 1 + below(drawn, _RNR_PS)
            self._env.call_at(self._env.now + delay_ps, self._serve)

    def _serve(self, _: object) -> None:
        self._serving = False
        waiting, self._waiting = self._waiting, []
        for row in waiting:
            held, row.peer.held = row.peer.held or [], None
            if row.flying:
                if row.payload is not None:
                    self._take_message(row)
                elif self._is_barred(row):  # it was fenced off while it waited
                    row.nic.refuse(row, Status.UNREACHABLE)
                else:
                    self._arrive(row)
            if row.peer.held is None:
                row.peer.held = held
                self._release(row.peer)
            else:
                row.peer.held = held

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        return self._controls.pop(slot)

    def source(self, number: int) -> bytes:
        return list(self._sources)[number]

    def _source_of(self, address: bytes) -> int:
        return self._sources.setdefault(address, len(self._sources))

    def fence(self, source: bytes, ctx: int) -> None:
        """Refuse rows of one NIC, now or soon; messages and control messages are no rows."""
        self._check_open()
        if self._fails(self._chaos.fence_fails, 5):
            self.fabric.seen["fence failed"] += 1
            failed = source, ctx, int(Status.PROVIDER)
            self._env.call_at(self._env.now + ACK_PS, self._end_fence, failed)
            return
        if not self._chaos.late_fence:
            self._barred[source] = _ALL
        self._fencing.setdefault(source, set()).add(ctx)
        delay_ps = 1 + below(self._draws.error(self._uid, ctx), ACK_PS * 4)
        self._env.call_at(self._env.now + delay_ps, self._end_fence, (source, ctx, _OK))

    def unfence(self, source: bytes) -> None:
        """Take rows that a NIC posts from now on; what is still flying here was posted before."""
        self._check_open()
        self._fencing.pop(source, None)
        if source in self._barred:
            self._barred[source] = min(self._barred[source], self.fabric.rows)

    def _is_barred(self, row: Flight) -> bool:
        return row.number <= self._barred.get(row.nic.address, 0)

    def _end_fence(self, fence: tuple[bytes, int, int]) -> None:
        source, ctx, status = fence
        if ctx in self._fencing.get(source, ()):  # it was not lifted meanwhile
            self._fencing[source].remove(ctx)
            self._barred[source] = _ALL
        if self.state in (NicState.UP, NicState.DEAD):
            self._cq.push((_FENCED, status, 1, 0, 0, ctx, 0))

    def post_recvs(self, nbytes: int, count: int) -> None:
        self._check_open()
        self.pool.add(nbytes, count)
        self._has_receives()

    def recv_done(self, slot: int) -> None:
        self.pool.give_back(slot)
        self._has_receives()

    def poll(self, out: Completions) -> int:
        if not self.entries:
            return 0
        cq = self._cq
        before = cq.imms_polled
        found = cq.poll(out)
        self._credits += cq.imms_polled - before
        if self._waiting:
            self._has_receives()
        return found
