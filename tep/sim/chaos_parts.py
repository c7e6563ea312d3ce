"""The state of a chaos NIC: its link, regions, peers, rows on their way, and completions.

What the NIC does with them is `chaos_nic`'s matter.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Final, Literal, Protocol

from tep.backends.base import (
    COMPLETION_BYTES,
    Completions,
    DomainCaps,
    Entry,
    Kind,
    Status,
    put_completion,
)
from tep.base.hashing import below
from tep.memory.source import Memory
from tep.sim.clock import FabricEnv
from tep.sim.draws import Draw, Draws
from tep.sim.driver import nobody
from tep.sim.faults import Chaos, Fault
from tep.sim.row_log import RowLog

__all__ = [
    "CompletionQueue", "Fabric", "Flight", "Fragment", "Host", "Link", "Nic", "NicState", "Peer",
    "Region", "Trouble",
]  # fmt: skip

Trouble = Literal["clog", "deaf", "mute"]


class Link:
    """The link of one NIC: slow, clogged, deaf, cut off from some, or without acknowledgements.

    It holds what cannot pass and releases it in the order it came. How a row ends that waits too
    long is the NIC's matter.

    Attributes:
        clogs: number of current faults that let nothing pass.
        deafs: number of current faults that let nothing in.
        mutes: number of current faults that let no acknowledgement in.
        cuts: link -> number of current faults that let nothing in from it; never 0.
        factor: everything takes so many times as long as usual.

    Args:
        env: the clock.
        land: takes a fragment again that was held.
        acknowledge: takes a row again whose acknowledgement was held.
    """

    __slots__ = (
        "_acknowledge",
        "_acks",
        "_env",
        "_fragments",
        "_healed",
        "_land",
        "_slows",
        "clogs",
        "cuts",
        "deafs",
        "factor",
        "mutes",
    )

    def __init__(
        self,
        env: FabricEnv,
        land: Callable[[Fragment], None],
        acknowledge: Callable[[Flight], None],
    ) -> None:
        self.clogs = 0
        self.deafs = 0
        self.mutes = 0
        self.cuts: dict[Link, int] = {}
        self.factor = 1
        self._env = env
        self._land = land
        self._acknowledge = acknowledge
        self._slows: list[int] = []
        self._fragments: list[Fragment] = []
        self._acks: list[Flight] = []
        self._healed = 0

    def lets_in(self, source: Link) -> bool:
        """Whether fragments from another link come in here now."""
        return not (self.clogs or self.deafs or source.clogs or source in self.cuts)

    def lets_acks_in(self, target: Link) -> bool:
        """Whether answers of another link to what was sent from here come in now."""
        return not self.mutes and self.lets_in(target)

    def hold(self, fragment: Fragment) -> None:
        """Keep a fragment until the clog is gone."""
        self._fragments.append(fragment)

    def hold_ack(self, row: Flight) -> None:
        """Keep an acknowledgement until it can pass."""
        self._acks.append(row)

    def trouble(self, what: Trouble, for_ps: int | None) -> None:
        """Begin a clog, or deafness."""
        self._count(what, 1)
        if for_ps is not None:
            self._env.call_at(self._env.now + for_ps, self._ends, (what, self._healed))

    def cut(self, source: Link, for_ps: int | None) -> None:
        """Let nothing in that comes from another link."""
        self.cuts[source] = self.cuts.get(source, 0) + 1
        if for_ps is not None:
            self._env.call_at(self._env.now + for_ps, self._joins, (source, self._healed))

    def slow(self, factor: int, for_ps: int | None) -> None:
        """Take `factor` times as long; of several the slowest counts."""
        self._slows.append(factor)
        self.factor = max(self._slows)
        if for_ps is not None:
            self._env.call_at(self._env.now + for_ps, self._hurries, (factor, self._healed))

    def heal(self) -> None:
        """End every trouble at once."""
        self._healed += 1
        self.clogs = self.deafs = self.mutes = 0
        self.cuts.clear()
        self._slows.clear()
        self.factor = 1
        self._let_go()

    def _ends(self, which: tuple[Trouble, int]) -> None:
        what, healed = which
        if healed != self._healed:
            return
        self._count(what, -1)
        self._let_go()

    def _joins(self, which: tuple[Link, int]) -> None:
        source, healed = which
        if healed != self._healed:
            return
        self.cuts[source] -= 1
        if not self.cuts[source]:
            del self.cuts[source]
            self._let_go()

    def _count(self, what: Trouble, change: int) -> None:
        match what:
            case "clog":
                self.clogs += change
            case "deaf":
                self.deafs += change
            case "mute":
                self.mutes += change

    def _hurries(self, which: tuple[int, int]) -> None:
        factor, healed = which
        if healed == self._healed:
            self._slows.remove(factor)
            self.factor = max(self._slows, default=1)

    def _let_go(self) -> None:
        if self.clogs:
            return
        fragments, self._fragments = self._fragments, []
        for fragment in fragments:
            self._land(fragment)
        acks, self._acks = self._acks, []
        for row in acks:  # one that cannot pass yet is held again, at the sender's link
            self._acknowledge(row)


# Plain numbers: a look at a member of an Enum takes as long as all else in a short function.
_IMM: Final = int(Kind.IMM)
_DOWN: Final = int(Kind.DOWN)
_MERGED: Final = (int(Kind.WRITE), _IMM, int(Kind.READ))


class NicState(Enum):
    """The life of a NIC."""

    UP = auto()
    DEAD = auto()  # killed: it still hands out completions
    CLOSED = auto()  # by its owner
    GONE = auto()  # of an incarnation that crashed: nobody polls it any more


class Region:
    """Registered memory on one NIC."""

    __slots__ = ("alive", "base", "nbytes", "ptr", "view")

    def __init__(self, memory: Memory, base: int) -> None:
        self.view = memoryview(memory.bytes_view())  # type: ignore[arg-type]  # numpy below 3.12
        self.ptr = memory.ptr
        self.nbytes = memory.nbytes
        self.base = base
        self.alive = True


class Peer:
    """One address that a NIC has connected to.

    Attributes:
        name, nic, epoch: of the address.
        target: the NIC at that address; None until somebody opens it.
        landed_ps: ordered fabrics: when the last fragment lands that was sent so far.
        held: ordered fabrics: fragments behind a row that waits for a receive; None: none waits.
        rows: to that address that have not ended, messages not counted.
    """

    __slots__ = ("epoch", "held", "landed_ps", "name", "nic", "rows", "target")

    def __init__(self, name: str, nic: int, epoch: int) -> None:
        self.name = name
        self.nic = nic
        self.epoch = epoch
        self.target: Nic | None = None
        self.landed_ps = 0
        self.held: list[Fragment] | None = None
        self.rows = 0


class Flight:
    """One write, read or message, from its post to its completion.

    Attributes:
        nic: that posted it.
        peer: its other end.
        number: in order of posting, over the whole fabric.
        bits: drawn once; separate fields of it serve separate decisions.
        ctx, index: named by its completion.
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
        payload: of a message; None for others.
        region: memory here: a write's source, or a read's sink; None for 0 bytes.
        at: first byte in that region.
        remote, rkey: address and key at the peer.
        nbytes, imm: as posted.
    """

    __slots__ = (
        "ack_lost", "at", "bits", "ctx", "flying", "ghost", "imm", "index", "is_control", "kind",
        "left", "nbytes", "nic", "number", "parked", "payload", "peer", "region", "remote", "rkey",
        "stuck_ps",
    )  # fmt: skip

    def __init__(self, nic: Nic, peer: Peer, number: int, bits: int, ctx: int, kind: int) -> None:
        self.nic = nic
        self.peer = peer
        self.number = number
        self.bits = bits
        self.ctx = ctx
        self.kind = kind
        self.index = 0
        self.flying = True
        self.left = 1
        self.parked = False
        self.stuck_ps = -1
        self.ack_lost = False
        self.is_control = False
        self.ghost: bytes | None = None
        self.payload: bytes | None = None
        self.region: Region | None = None
        self.at = 0
        self.remote = 0
        self.rkey = 0
        self.nbytes = 0
        self.imm: int | None = None


Fragment = tuple[Flight, int, int, bytes | None]
"""Bytes from..to of a row, and the bytes if they were read early. A message is one fragment."""


class Host(Protocol):
    """The node of a NIC, as its NICs see it; `chaos.ChaosNode` is one."""

    @property
    def name(self) -> str: ...

    @property
    def uid(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def domains(self) -> Sequence[Nic]: ...

    def next_key(self) -> int:
        """Number the next region."""


class Nic(Protocol):
    """A NIC as other NICs see it; `chaos_nic.ChaosNic` is one."""

    state: NicState
    link: Link

    @property
    def address(self) -> bytes: ...

    @property
    def caps(self) -> DomainCaps: ...

    @property
    def node(self) -> Host: ...

    def land(self, fragment: Fragment) -> None:
        """Take a fragment that arrives here."""

    def readable_at(
        self, rkey: int, address: int, nbytes: int, reader: bytes, number: int
    ) -> memoryview | Status:
        """The bytes that a read asks for, or why it may not have them."""

    def take_copy(self, row: Flight) -> None:
        """Take a control message once more."""

    def acknowledge(self, row: Flight) -> None:
        """Learn that a row of this NIC has landed."""

    def refuse(self, row: Flight, status: Status) -> None:
        """Learn that the target refused a row of this NIC."""

    def stuck(self, row: Flight) -> None:
        """Learn that a row of this NIC, or its answer, waits on a link."""


class Fabric(Protocol):
    """The fabric as its NICs see it; `chaos.ChaosFabric` is one."""

    env: FabricEnv
    chaos: Chaos
    row_log: RowLog | None
    draws: Draws
    rows: int
    failed: list[tuple[str, int, int, Status]]
    violations: list[str]
    happened: list[Fault]
    seen: Counter[str]
    healed: bool

    @property
    def nodes(self) -> Mapping[str, Host]: ...

    def parse(self, address: bytes) -> tuple[str, int, int]:
        """Read an address: name, NIC, epoch. Raises BadDescriptor."""

    def find(self, name: str, nic: int, epoch: int) -> Nic | None:
        """The NIC of an address, if that incarnation is the one that runs."""

    def why_lost(self, name: str, epoch: int) -> Status:
        """Why an address cannot be reached."""

    def lost(self, target: Nic, status: Status, *, acks_lost: bool) -> None:
        """Notify every other NIC that one is gone."""


class CompletionQueue:
    """Entries that a NIC has finished and its owner has not polled.

    Attributes:
        entries: those that poll() can return now.
        waker: called when there is something new.
        imms_polled: immediates handed out so far.
        down_seen: whether the owner has polled that the NIC is gone.
    """

    def __init__(self, env: FabricEnv, chaos: Chaos, draw: Draw, uid: int) -> None:
        self.entries: deque[Entry] = deque()
        self.waker: Callable[[], object] = nobody
        self.imms_polled = 0
        self.down_seen = False
        self._env = env
        self._chaos = chaos
        self._draw = draw
        self._uid = uid
        self._hidden: list[Entry] = []
        self._bursts = 0

    @property
    def held(self) -> int:
        """The number of entries that nobody has polled."""
        return len(self.entries) + len(self._hidden)

    def push(self, entry: Entry) -> None:
        """Add one entry, visible now or with the next burst."""
        burst_ps = self._chaos.burst_ps
        if burst_ps == 0:
            self.entries.append(entry)
            self.waker()
            return
        self._hidden.append(entry)
        if len(self._hidden) == 1:
            self._bursts += 1
            delay_ps = below(self._draw(self._uid + self._bursts, 1), burst_ps)
            self._env.call_at(self._env.now + delay_ps, self._reveal)

    def _reveal(self, _: object) -> None:
        self.flush()
        self.waker()

    def flush(self) -> None:
        """Make everything visible at once."""
        self.entries.extend(self._hidden)
        self._hidden.clear()

    def wake(self, _: object) -> None:
        """Call the waker for another reason: there is room again."""
        self.waker()

    def poll(self, out: Completions) -> int:
        """Fill `out` with the oldest entries, at most `cqe_limit`; return how many."""
        entries = self.entries
        limit = min(len(out), self._chaos.cqe_limit)
        merge = self._chaos.merge_cqes
        found: list[Entry] = []
        while entries:
            entry = entries[0]
            both = _merged(found[-1], entry) if merge and found else None
            if both is not None:
                found[-1] = both
            elif len(found) < limit:
                found.append(entry)
            else:
                break
            entries.popleft()
            kind = entry[0]
            if kind == _IMM:
                self.imms_polled += 1
            elif kind == _DOWN:
                self.down_seen = True
        at = 0
        for entry in found:
            put_completion(out, at, *entry)
            at += COMPLETION_BYTES
        return len(found)


def _merged(first: Entry, second: Entry) -> Entry | None:
    """One entry for two that say the same, or None where they do not."""
    kind, status, count, imm, row, ctx, nbytes = first
    if status or kind not in _MERGED or (kind, status) != second[:2]:
        return None
    if imm != second[3] or ctx != second[5]:
        return None
    return (kind, status, count + second[2], imm, row, ctx, nbytes + second[6])
