"""The control side of a chaos NIC: who it is, its regions, its peers, and its lines in the row log.

What moves rows is `chaos_nic`. Rule: no address of the process, and no `id`, reaches a draw or the
row_log; keys and bases are made up here.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final

from tep.backends.base import Access, DomainCaps, DomainKey, Status
from tep.backends.checks import check_memory
from tep.base.errors import ClosedError, FabricError
from tep.base.units import PS_PER_MS, PS_PER_S, GiB, KiB
from tep.memory.source import Memory
from tep.sim.chaos_parts import (
    CompletionQueue,
    Fabric,
    Flight,
    Host,
    NicState,
    Peer,
    Region,
)
from tep.sim.row_log import Record, RowLog, What

__all__ = ["CONTROL_BYTES", "ChaosPort"]

CONTROL_BYTES: Final = KiB
"""The longest control message."""

_LINK_BPS: Final = 256_000_000_000
"""Nominal, and what chaos_nic's 32 bytes a ns make; no machine's figure."""

_TEXTS: Final = {
    int(Status.LOCAL_KEY): "the source's key is unknown here, revoked, or its range too short",
    int(Status.REMOTE_KEY): "the target's NIC does not know the key; was it deregistered?",
    int(Status.REMOTE_RANGE): "the row ends outside the target's region",
    int(Status.RNR): "the peer posted no receive for rnr_retries tries",
    int(Status.UNREACHABLE): "the peer's NIC is dead or closed, or nobody has that address",
    int(Status.STALE_PEER): "the peer restarted; ask it for its new address and descriptors",
    int(Status.NIC_DOWN): "this NIC was killed; whether the row landed is unknown",
}


class ChaosPort:
    """One NIC without its data path.

    Attributes:
        state: how much of it is left.
        rows: rows and messages accepted so far.
        entries: what poll() can return now.
    """

    def __init__(self, fabric: Fabric, node: Host, number: int) -> None:
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
            imm_eats_recv=chaos.ordered,
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

    def watch(self, row_log: RowLog) -> None:
        """Record from now on."""
        self._row_log = row_log

    @property
    def regions(self) -> int:
        """How many regions are registered."""
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

    def forget(self, peer: int) -> None:
        """Nothing is kept of a peer that could be given back."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._cq.waker = waker

    def wakeup_fd(self) -> int | None:
        return None

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
