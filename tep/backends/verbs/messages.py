"""All that is no row: messages on queue pairs, and datagrams with the routes that they take.

Messages are copied into registered slots on the way out, into a rotating pool on the way in. One
that finds no buffer at its target waits there, in the NIC (RNR), until one is posted. Datagrams
have one UD queue pair and slots of their own; they may be lost, and never wait.

A route is an address handle. On RoCE the kernel asks for the neighbour's Ethernet address inside
ibv_create_ah, and waits up to a second for its answer, uninterruptibly (Linux, drivers/infiniband/
core/addr.c, rdma_addr_find_l2_eth_by_grh). A host that is off never answers, and one worker serves
all peers. So a helper thread makes the call; the worker waits for as long as a neighbour takes that
is there, and does not ask one again at once that did not answer.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from tep.backends.base import Entry, Kind, Status
from tep.backends.ffi.ibverbs import (
    ENUMS,
    RECV_WR,
    SEND_WR,
    SGE,
    Struct,
    fail,
    qp_number,
    ref,
)
from tep.backends.verbs.conns import NUMBER_SHIFT, Conn, Tag, create_ud, tag
from tep.backends.verbs.device import DATAGRAMS_IN, DATAGRAMS_OUT, MESSAGES_OUT, Device
from tep.backends.verbs.handshake import DATAGRAM_BYTES_MAX, Address
from tep.base.errors import FabricError
from tep.memory.source import adapt

__all__ = ["Datagrams", "Messages", "Routes"]

_SLOT_BYTES: Final = 4096
"""Longer messages are registered one by one; that costs tens of microseconds (guessed)."""

_GRH_BYTES: Final = 40
"""The bytes before each datagram's payload: the routing header, or as many unused bytes."""

_SLOT: Final = 1024
assert _GRH_BYTES + DATAGRAM_BYTES_MAX <= _SLOT

_NEIGHBOUR_S: Final = 0.05
"""The worker waits so long: far more than a neighbour takes that is there (guessed)."""

_PAUSE_S: Final = 1.0
_PAUSE_MAX_S: Final = 8.0
_HELPERS_MAX: Final = 16  # neighbours that are waited for at a time
_CLOSE_S: Final = 5.0
"""close() waits so long for a call of the kernel, which ends after one second (quoted)."""

_SENT, _RECV = int(Kind.SENT), int(Kind.RECV)
_OK: Final = int(Status.OK)


class _Region:
    """Anonymous memory, registered with the NIC."""

    def __init__(self, device: Device, nbytes: int) -> None:
        try:
            self.memory = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise MemoryError(f"{nbytes} bytes for messages: {error}") from error
        source = adapt(self.memory)
        self.ptr = source.ptr
        self.mr: Struct = device.register(source, ENUMS["IBV_ACCESS_LOCAL_WRITE"])


class _In(NamedTuple):
    region: _Region
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class _Out:
    """One message on its way; `large` is its own region if it has one."""

    ctx: int
    nbytes: int
    conn: Conn | None = None
    large: _Region | None = None


class _Requests:
    """One request to send with its scatter entry, filled anew for each post."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sge = np.zeros(1, SGE)
        self._send_wr = np.zeros(1, SEND_WR)
        self._send_wr["sg_list"] = self._sge.ctypes.data
        self._send_wr["num_sge"] = 1
        self._send_wr["opcode"] = ENUMS["IBV_WR_SEND"]
        self._send_wr["send_flags"] = ENUMS["IBV_SEND_SIGNALED"]
        self._send_ref = ref(self._send_wr.ctypes.data)
        self._bad = ctypes.c_void_p()
        self._bad_ptr = ctypes.addressof(self._bad)
        self._bad_ref = ref(self._bad_ptr)


class Messages(_Requests):
    """The messages of one NIC; `recvs_max` receive buffers are posted at a time."""

    def __init__(self, device: Device, recvs_max: int, ready: deque[Entry]) -> None:
        super().__init__(device)
        self._recv_wr = np.zeros(1, RECV_WR)
        self._recv_wr["sg_list"] = self._sge.ctypes.data
        self._recv_wr["num_sge"] = 1
        self._recv_ptr = self._recv_wr.ctypes.data
        self.srq = device.make_srq(recvs_max)
        self._recvs_max = recvs_max
        self._ready = ready
        self._regions: list[_Region] = []
        self._in: list[_In] = []
        self._idle: deque[int] = deque()  # buffers not posted
        self._posted = 0
        self._came: dict[int, tuple[int, int]] = {}  # by buffer: length, and sender's PeerId
        self._out: dict[int, _Out] = {}
        self._free: deque[int] = deque(range(MESSAGES_OUT))
        self._slots: _Region | None = None
        self._closed = False

    # --- out

    def reserve(self, payload: bytes, ctx: int) -> int | None:
        """Copy a message into a slot; None = all are in use. FabricError: no memory for it."""
        if not self._free:
            return None
        if self._slots is None:
            self._slots = self._region(MESSAGES_OUT * _SLOT_BYTES)
        out = _Out(ctx, len(payload))
        if len(payload) > _SLOT_BYTES:
            out.large = _Region(self._device, len(payload))
            out.large.memory[:] = payload
        slot = self._free[0]
        self._out[slot] = out
        self._free.popleft()
        if out.large is None:
            at = slot * _SLOT_BYTES
            self._slots.memory[at : at + len(payload)] = payload
        return slot

    def post(self, slot: int, conn: Conn) -> bool:
        """Send a slot's message; False = the queue is full, ask again."""
        out = self._out[slot]
        assert self._slots is not None
        region, at = (out.large, 0) if out.large else (self._slots, slot * _SLOT_BYTES)
        self._sge[0] = (region.ptr + at, out.nbytes, region.mr.lkey)
        wr = self._send_wr
        wr["wr_id"] = tag(Tag.MESSAGE_OUT, slot)
        wr["num_sge"] = 1 if out.nbytes else 0
        rc = self._device.data.post_send(conn.msg_ref, self._send_ref, self._bad_ref)
        if rc == 0:
            out.conn = conn
        return rc == 0

    def sent(self, slot: int, status: int) -> None:
        out = self._out.pop(slot)
        if out.large is not None:
            self._device.dereg_mr(out.large.mr)
        self._free.append(slot)
        self._ready.append((_SENT, status, 1, 0, 0, out.ctx, 0))

    def holds(self, conn: Conn) -> bool:
        """Whether messages on a connection have not come back."""
        return any(out.conn is conn for out in self._out.values())

    def fail_all(self, status: int, conn: Conn | None = None) -> None:
        """End every message, or every one posted on a connection, that will not complete."""
        for slot, out in list(self._out.items()):
            if conn is None or out.conn is conn:
                self.sent(slot, status)

    # --- in

    def add(self, nbytes: int, count: int) -> None:
        region = self._region(nbytes * count)
        first = len(self._in)
        self._in.extend(_In(region, k * nbytes, nbytes) for k in range(count))
        self._idle.extend(range(first, first + count))
        self._fill()

    def received(self, slot: int, nbytes: int, peer: int) -> None:
        """A message of a peer, by its PeerId, has arrived in a buffer."""
        self._posted -= 1
        self._came[slot] = nbytes, peer
        self._ready.append((_RECV, _OK, 1, 0, 0, slot, nbytes))
        self._fill()

    def view(self, slot: int) -> memoryview:
        region, at, _ = self._in[slot]
        return memoryview(region.memory)[at : at + self._came[slot][0]].toreadonly()

    def sender(self, slot: int) -> int:
        return self._came[slot][1]

    def done(self, slot: int) -> None:
        """Post a buffer again, whose message was read."""
        del self._came[slot]
        self._idle.append(slot)
        self._fill()

    def returned(self, slot: int) -> None:
        """A buffer came back without a message: its queue pair failed."""
        self._posted -= 1
        self._idle.append(slot)
        self._fill()

    def _fill(self) -> None:
        """Post idle buffers, as many as the queue takes."""
        while self._idle and self._posted < self._recvs_max and not self._closed:
            slot = self._idle[0]
            region, at, nbytes = self._in[slot]
            self._sge[0] = (region.ptr + at, nbytes, region.mr.lkey)
            self._recv_wr["wr_id"] = tag(Tag.MESSAGE_IN, slot)
            if self._device.data.post_srq_recv(self.srq, self._recv_ptr, self._bad_ptr):
                return
            self._idle.popleft()
            self._posted += 1

    def _region(self, nbytes: int) -> _Region:
        region = _Region(self._device, nbytes)
        self._regions.append(region)
        return region

    def close(self) -> None:
        """Withdraw the buffers; what arrived can still be read."""
        self._closed = True
        for region in self._regions:
            self._device.dereg_mr(region.mr)
        self._regions.clear()


class Datagrams(_Requests):
    """The UD queue pair of one NIC; others must know its `qkey` to reach it."""

    def __init__(self, device: Device, cq: int, qkey: int) -> None:
        super().__init__(device)
        self._slots = _Region(device, (DATAGRAMS_IN + DATAGRAMS_OUT) * _SLOT)
        self._qp = create_ud(device, cq, qkey, max(DATAGRAMS_IN, DATAGRAMS_OUT))
        self.number, self._qp_ref = qp_number(self._qp), ref(self._qp)
        self.routes = Routes(device)
        self._free: deque[int] = deque(range(DATAGRAMS_IN, DATAGRAMS_IN + DATAGRAMS_OUT))
        slots = np.arange(DATAGRAMS_IN, dtype=np.uint64)
        self._recv_sges = np.zeros(DATAGRAMS_IN, SGE)
        self._recv_sges["addr"] = self._slots.ptr + slots * _SLOT
        self._recv_sges["length"] = _SLOT
        self._recv_sges["lkey"] = self._slots.mr.lkey
        self._recv_wrs = np.zeros(DATAGRAMS_IN, RECV_WR)
        self._recv_wrs["wr_id"] = tag(Tag.DATAGRAM_IN) | slots << NUMBER_SHIFT
        self._recv_wrs["sg_list"] = self._recv_sges.ctypes.data + slots * SGE.itemsize
        self._recv_wrs["num_sge"] = 1
        self._recvs_ptr = self._recv_wrs.ctypes.data
        # The first post takes all as one chain: 1,024 calls take a third of a NIC's opening.
        self._recv_wrs["next"][:-1] = self._recvs_ptr + slots[1:] * RECV_WR.itemsize
        rc = self.give_back(0)
        self._recv_wrs["next"] = 0
        if rc:
            fail("ibv_post_recv UD", rc, device=device.name, receives=DATAGRAMS_IN)

    def send(self, to: Address, payload: bytes) -> None:
        """Send one datagram, or lose it where the queue is full: who waits repeats it."""
        if not self._free:
            return
        route = self.routes.find(to)
        if not route:  # e.g. no such neighbour: as good as lost
            return
        slot = self._free.popleft()
        at = slot * _SLOT
        self._slots.memory[at : at + len(payload)] = payload
        self._sge[0] = (self._slots.ptr + at, len(payload), self._slots.mr.lkey)
        wr = self._send_wr
        wr["wr_id"] = tag(Tag.DATAGRAM_OUT, slot)
        wr["ah"] = route
        wr["remote_qpn"] = to.ud_qpn
        wr["remote_qkey"] = to.qkey
        if self._device.data.post_send(self._qp_ref, self._send_ref, self._bad_ref):
            self._free.append(slot)

    def sent(self, slot: int) -> None:
        self._free.append(slot)

    @property
    def in_flight(self) -> int:
        return DATAGRAMS_OUT - len(self._free)

    def payload(self, slot: int, nbytes: int) -> bytes:
        """The datagram in a slot; `nbytes` counts the routing header, as the completion does."""
        at = slot * _SLOT
        return self._slots.memory[at + _GRH_BYTES : at + nbytes]

    def give_back(self, slot: int) -> int:
        """Receive into a slot again; return 0 or an errno."""
        wr_ptr = self._recvs_ptr + slot * RECV_WR.itemsize
        return self._device.data.post_recv(self._qp, wr_ptr, self._bad_ptr)

    def close(self) -> None:
        self._device.free("ibv_destroy_qp", self._qp)
        self.routes.close()
        self._device.dereg_mr(self._slots.mr)


class Routes:
    """The address handles of one NIC."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: dict[Address, int] = {}
        self._asked: dict[Address, Future[int]] = {}
        self._silent: dict[Address, tuple[float, float]] = {}  # until when, and the next pause
        self._helpers = ThreadPoolExecutor(_HELPERS_MAX, "tep-route")

    def find(self, to: Address) -> int:
        """The handle for a peer; 0: there is none, now or at all."""
        found = self._made.get(to)
        if found is not None:
            return found
        if self._device.is_ib:  # no neighbour to be asked
            return self._settle(to, self._create(to))
        asked, wait_s = self._asked.get(to), 0.0
        if asked is None:
            until_s, _ = self._silent.get(to, (0.0, 0.0))
            busy = sum(not each.done() for each in self._asked.values())
            if time.monotonic() < until_s or busy >= _HELPERS_MAX:
                return 0
            asked, wait_s = self._helpers.submit(self._create, to), _NEIGHBOUR_S
            self._asked[to] = asked
        try:
            handle = asked.result(wait_s)
        except TimeoutError:
            return 0
        del self._asked[to]
        return self._settle(to, handle)

    def _create(self, to: Address) -> int:
        attr, device = self._device.route(to.gid, to.lid), self._device
        try:
            return device.lib.make("ibv_create_ah", device.pd, ctypes.byref(attr), to=to)
        except FabricError:  # no such neighbour: the datagram is lost, and whoever waits repeats it
            return 0

    def _settle(self, to: Address, handle: int) -> int:
        _, pause_s = self._silent.pop(to, (0.0, _PAUSE_S))
        if handle:
            self._made[to] = handle
        else:
            self._silent[to] = time.monotonic() + pause_s, min(2 * pause_s, _PAUSE_MAX_S)
        return handle

    def forget(self, to: Address) -> None:
        """Drop the handle for a peer that is gone; close() drops one that is in the making."""
        self._silent.pop(to, None)
        handle = self._made.pop(to, None)
        if handle is not None:
            self._device.free("ibv_destroy_ah", handle)

    def close(self) -> None:
        """Give all back; waits for calls of the kernel that have not returned."""
        done, late = wait(self._asked.values(), _CLOSE_S)
        self._helpers.shutdown(wait=not late)
        for handle in filter(None, [*self._made.values(), *(each.result() for each in done)]):
            self._device.free("ibv_destroy_ah", handle)
        self._made.clear()
        self._asked.clear()
