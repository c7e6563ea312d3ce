"""What a chaos NIC keeps: regions, peers, rows on their way, completions, keys of random streams.

State and its meaning; what the NIC does with it is `chaos_nic`'s matter.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Final, Protocol

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
from tep.sim.chaos_link import Link
from tep.sim.clock import FabricEnv
from tep.sim.draws import Draw, Draws
from tep.sim.faults import Chaos
from tep.sim.faults_at import Fault
from tep.sim.row_log import RowLog

__all__ = [
    "CompletionQueue",
    "Fabric",
    "Flight",
    "Fragment",
    "Host",
    "Nic",
    "NicState",
    "Peer",
    "Region",
    "nobody",
]


# Plain numbers: a look at a member of an Enum takes as long as all else in a short function.
_IMM: Final = int(Kind.IMM)
_DOWN: Final = int(Kind.DOWN)
_MERGED: Final = (int(Kind.WRITE), _IMM, int(Kind.READ))


class NicState(Enum):
    """How much of a NIC is left."""

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
        name, nic, epoch: what the address says.
        target: the NIC that is there; None until somebody opens it.
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
    """One row, or message, from its post to its completion.

    Attributes:
        nic: the sender's.
        peer: where it goes.
        number: in order of posting, over the whole fabric.
        bits: drawn once; separate fields of it serve separate decisions.
        ctx, index: what its completion names.
        flying: False once it is acknowledged or doomed; what is left of it then changes nothing.
        left: fragments that have not landed; -1 once the target has answered.
        parked: whether it has waited for a receive.
        timed: whether the time it may be stuck on a link runs already.
        is_control: whether its payload is for the peer's engine, not for a user's buffer.
        unheard: a message whose acknowledgement is lost on the way.
        ghost: the bytes of a row that has failed, and of which more may land; None: nothing may.
        payload: of a message; None for a write.
        region: source of a write; None for 0 bytes.
        src, dst: byte in the source region; address at the target.
    """

    __slots__ = (
        "bits",
        "ctx",
        "dst",
        "flying",
        "ghost",
        "imm",
        "index",
        "is_control",
        "left",
        "nbytes",
        "nic",
        "number",
        "parked",
        "payload",
        "peer",
        "region",
        "rkey",
        "src",
        "timed",
        "unheard",
    )

    def __init__(self, nic: Nic, peer: Peer, number: int, bits: int, ctx: int) -> None:
        self.nic = nic
        self.peer = peer
        self.number = number
        self.bits = bits
        self.ctx = ctx
        self.index = 0
        self.flying = True
        self.left = 1
        self.parked = False
        self.timed = False
        self.unheard = False
        self.is_control = False
        self.ghost: bytes | None = None
        self.payload: bytes | None = None
        self.region: Region | None = None
        self.src = 0
        self.dst = 0
        self.rkey = 0
        self.nbytes = 0
        self.imm: int | None = None


Fragment = tuple[Flight, int, int, bytes | None]
"""Bytes from..to of a row, and the bytes where they were read early. A message is one fragment."""


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
    link: Link[Fragment, Flight]

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
        """Tell every other NIC that one is gone."""


class CompletionQueue:
    """What a NIC has finished and its owner has not polled.

    Attributes:
        entries: what poll() can return now.
        waker: called when there is something new.
        imms_polled: immediates handed out so far.
        down_seen: whether the owner was told that the NIC is gone.
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
        """How many entries nobody has polled."""
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


def nobody() -> None:
    """Wake nobody: there is no owner yet, or none any more."""
