"""What the rooms of the timing fabric ask of one another: the faces of fabric, node and NIC.

Types only. `timing`, `timing_nic`, `receiving` and `wakes` know one another by these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tep.backends.base import DomainCaps
from tep.backends.hostcopy import HostRegion
from tep.memory.source import Memory
from tep.sim.clock import FabricEnv
from tep.sim.ledger import Agenda, Batches, Ledger
from tep.sim.machines import Machine, Pairs
from tep.sim.profile import Profile
from tep.sim.queues import Ints
from tep.sim.row_log import RowLog
from tep.sim.sendqueue import SendQueue

__all__ = ["Entry", "Fabric", "Host", "Nic", "Region", "Wakeful"]

Entry = tuple[int, int, int, int, int, int, int] | npt.NDArray[np.void]
"""One completion in the order of COMPLETION's fields, or an array of them."""


class Region:
    """Registered memory.

    Attributes:
        ptr: address of the first byte.
        nbytes: length.
        writable: whether peers may write here.
        host: the bytes; None where the fabric moves none, so that the memory need not exist.
    """

    __slots__ = ("host", "memory", "nbytes", "ptr", "writable")

    def __init__(self, memory: Memory, *, writable: bool, host: bool) -> None:
        self.memory = memory
        self.ptr = memory.ptr
        self.nbytes = memory.nbytes
        self.writable = writable
        self.host = HostRegion(memory, memory.ptr, writable=writable) if host else None


class Wakeful(Protocol):
    """What wakes the owner of a node; `wakes.Wakes` is one."""

    nics: list[Nic]

    def must(self, time_ps: int) -> None: ...

    def book(self) -> None: ...

    def poll(self) -> None: ...

    def is_due(self, now: int) -> bool: ...

    def gather(self) -> None: ...

    def refuse(self, nic: Nic) -> None: ...

    def room_ps(self, nic: Nic, acked: Ints = ...) -> int: ...


class Host(Protocol):
    """A node as its NICs see it; `timing_node.Node` is one."""

    name: str
    epoch: int
    on_news: Callable[[], object]
    machine: Machine

    @property
    def wakes(self) -> Wakeful: ...

    def post(self, nic: Nic, numbers: Ints, costs: Ints) -> None:
        """Have the worker post rows."""

    def charge(self, cost_ps: int) -> None:
        """Give the worker work."""


class Nic(Protocol):
    """A NIC as the others see it; `timing_nic.TimingNic` is one."""

    number: int
    index: int
    address: bytes
    caps: DomainCaps
    profile: Profile
    inbox: Agenda
    outbox: Agenda
    ready: deque[Entry]
    sources: dict[int, Region]
    queue: SendQueue
    open_rows: int
    waker: Callable[[], None]

    @property
    def node(self) -> Host: ...

    @property
    def fabric(self) -> Fabric: ...

    def launch(self, numbers: Ints, ready: Ints) -> None:
        """Queue rows for the wire."""

    def take_in(self, now: int) -> None:
        """Take in everything that is here by now."""

    def take_landed(self, now: int) -> None:
        """Place what has landed here by now."""


class Fabric(Protocol):
    """The fabric as its NICs see it; `timing.TimingFabric` is one, and says what these are."""

    env: FabricEnv
    pairs: Pairs | None
    row_log: RowLog | None
    move_bytes: bool
    mortal: bool
    ledger: Ledger
    batches: Batches
    payloads: dict[int, bytes]
    controls: set[int]
    slow: dict[int, int]
    refused: dict[int, Nic]
    soft: Ints
    soft_acks: Ints
    gone: npt.NDArray[np.bool_]
    landed_bytes: Ints
    cut_ps: Ints

    def attach(self, nic: Nic) -> int: ...

    def number_of(self, address: bytes) -> int: ...

    def nic(self, number: int) -> Nic: ...

    def name_of(self, number: int) -> str: ...

    def sending(self, nic: Nic) -> None: ...
