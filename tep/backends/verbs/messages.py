"""All that is no row: messages on queue pairs, and datagrams with the routes that they take.

Messages are copied into registered slots on the way out, into a rotating pool on the way in. One
that finds no buffer at its target waits there, in the NIC (RNR), until one is posted. Datagrams
have one UD queue pair and slots of their own; they may be lost, and never wait.

A route is an address handle, made without holding up the worker. On RoCE the kernel asks for the
neighbour's Ethernet address inside ibv_create_ah, and waits up to a second for its answer,
uninterruptibly (Linux, drivers/infiniband/core/addr.c, rdma_addr_find_l2_eth_by_grh). A host that
is off never answers, and one worker serves all peers. So a helper thread makes the call. The worker
waits for it for as long as a neighbour takes that is there; one that did not answer is not asked
again at once.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

import numpy as np

from tep.backends.base import Entry, Kind, Status
from tep.backends.ffi.ibverbs import fail
from tep.backends.ffi.ibverbs_structs import ENUMS, RECV_WR, SEND_WR, SGE, Mr
from tep.backends.verbs.conns import (
    DATAGRAM_IN,
    DATAGRAM_OUT,
    MESSAGE_IN,
    MESSAGE_OUT,
    NUMBER_SHIFT,
    Conn,
    create_ud,
    qp_number,
    tag,
)
from tep.backends.verbs.device import DATAGRAMS_IN, DATAGRAMS_OUT, MESSAGES_OUT, Device
from tep.backends.verbs.handshake import DATAGRAM_BYTES_MAX, Address
from tep.base.errors import FabricError

__all__ = ["Datagrams", "Messages", "Routes"]


_SLOT_BYTES: Final = 4096
"""Longer messages are registered one by one; that costs tens of microseconds (guessed)."""

_SENT, _RECV = int(Kind.SENT), int(Kind.RECV)
_OK: Final = int(Status.OK)


class _Region:
    """Anonymous memory, registered with the NIC."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        self.ptr = int(np.frombuffer(self.memory, np.uint8).ctypes.data)
        self.mr: Mr = device.reg_mr(self.ptr, nbytes, ENUMS["IBV_ACCESS_LOCAL_WRITE"])


class _In(NamedTuple):
    """One receive buffer."""

    region: _Region
    offset: int
    nbytes: int


class _Out:
    """One message on its way; `large` is its own region if it has one."""

    __slots__ = ("conn", "ctx", "large", "nbytes")

    def __init__(self, ctx: int, nbytes: int) -> None:
        self.ctx = ctx
        self.nbytes = nbytes
        self.conn: Conn | None = None
        self.large: _Region | None = None


class Messages:
    """The messages of one NIC.

    Args:
        device: where.
        recvs_max: receive buffers posted at a time.
        ready: where entries for poll() go.
    """

    def __init__(self, device: Device, recvs_max: int, ready: deque[Entry]) -> None:
        self.srq = device.make_srq(recvs_max)
        self._device = device
        self._recvs_max = recvs_max
        self._ready = ready
        self._regions: list[_Region] = []
        self._in: list[_In] = []
        self._idle: deque[int] = deque()  # buffers not posted
        self._posted = 0
        self._lengths: dict[int, int] = {}
        self._senders: dict[int, int] = {}
        self._out: dict[int, _Out] = {}
        self._free: deque[int] = deque(range(MESSAGES_OUT))
        self._slots: _Region | None = None
        self._sge = np.zeros(1, SGE)
        self._recv_wr = np.zeros(1, RECV_WR)
        self._send_wr = np.zeros(1, SEND_WR)
        for wr in (self._recv_wr, self._send_wr):
            wr["sg_list"] = self._sge.ctypes.data
        self._recv_wr["num_sge"] = 1
        self._send_wr["opcode"] = ENUMS["IBV_WR_SEND"]
        self._send_wr["send_flags"] = ENUMS["IBV_SEND_SIGNALED"]
        self._bad = ctypes.c_void_p()
        self._closed = False

    # --- out

    def reserve(self, payload: bytes, ctx: int) -> int | None:
        """Copy a message into a slot; None = all are in use."""
        if not self._free:
            return None
        if self._slots is None:
            self._slots = self._region(MESSAGES_OUT * _SLOT_BYTES)
        slot = self._free.popleft()
        out = self._out[slot] = _Out(ctx, len(payload))
        if len(payload) > _SLOT_BYTES:
            out.large = _Region(self._device, len(payload))
            out.large.memory[:] = payload
        else:
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
        wr["wr_id"] = tag(MESSAGE_OUT, slot)
        wr["num_sge"] = 1 if out.nbytes else 0
        rc = self._device.data.post_send(
            conn.msg_qp, int(wr.ctypes.data), ctypes.addressof(self._bad)
        )
        if rc == 0:
            out.conn = conn
        return rc == 0

    def sent(self, slot: int, status: int) -> None:
        """A message has ended."""
        out = self._out.pop(slot)
        if out.large is not None:
            self._device.dereg_mr(out.large.mr)
        self._free.append(slot)
        self._ready.append((_SENT, status, 1, 0, 0, out.ctx, 0))

    def fail_all(self, status: int, conn: Conn | None = None) -> None:
        """End every message, or every one posted on a connection, that will not complete."""
        for slot, out in list(self._out.items()):
            if conn is None or out.conn is conn:
                self.sent(slot, status)

    # --- in

    def add(self, nbytes: int, count: int) -> None:
        """Add receive buffers."""
        region = self._region(nbytes * count)
        first = len(self._in)
        self._in.extend(_In(region, k * nbytes, nbytes) for k in range(count))
        self._idle.extend(range(first, first + count))
        self._fill()

    def received(self, slot: int, nbytes: int, peer: int) -> None:
        """A message of a peer, by its PeerId, has arrived in a buffer."""
        self._posted -= 1
        self._lengths[slot] = nbytes
        self._senders[slot] = peer
        self._ready.append((_RECV, _OK, 1, 0, 0, slot, nbytes))
        self._fill()

    def view(self, slot: int) -> memoryview:
        """The message in a buffer."""
        region, at, _ = self._in[slot]
        return memoryview(region.memory)[at : at + self._lengths[slot]].toreadonly()

    def sender(self, slot: int) -> int:
        """The PeerId of who sent the message in a buffer."""
        return self._senders[slot]

    def done(self, slot: int) -> None:
        """A buffer's message was read."""
        del self._lengths[slot], self._senders[slot]
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
            self._recv_wr["wr_id"] = tag(MESSAGE_IN, slot)
            if self._device.data.post_srq_recv(
                self.srq, int(self._recv_wr.ctypes.data), ctypes.addressof(self._bad)
            ):
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


_GRH_BYTES: Final = 40
"""What stands before each datagram's payload: the routing header, or as many unused bytes."""

_SLOT: Final = 1024
assert _GRH_BYTES + DATAGRAM_BYTES_MAX <= _SLOT


class Datagrams:
    """The UD queue pair of one NIC.

    Args:
        device: where.
        cq: completion queue.
        qkey: that others must know to reach it.
    """

    def __init__(self, device: Device, cq: int, qkey: int) -> None:
        self._device = device
        self._memory = mmap.mmap(-1, (DATAGRAMS_IN + DATAGRAMS_OUT) * _SLOT)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._base = int(self._bytes.ctypes.data)
        access = ENUMS["IBV_ACCESS_LOCAL_WRITE"]
        self._mr = device.reg_mr(self._base, len(self._memory), access)
        self._qp = create_ud(device, cq, qkey, max(DATAGRAMS_IN, DATAGRAMS_OUT))
        self.number = qp_number(self._qp)
        self._routes = Routes(device)
        self._free: deque[int] = deque(range(DATAGRAMS_IN, DATAGRAMS_IN + DATAGRAMS_OUT))
        self._sge = np.zeros(1, SGE)
        self._recv_wr = np.zeros(1, RECV_WR)
        self._send_wr = np.zeros(1, SEND_WR)
        for wr in (self._recv_wr, self._send_wr):
            wr["sg_list"] = self._sge.ctypes.data
            wr["num_sge"] = 1
        self._send_wr["opcode"] = ENUMS["IBV_WR_SEND"]
        self._send_wr["send_flags"] = ENUMS["IBV_SEND_SIGNALED"]
        self._bad = ctypes.c_void_p()
        self._post_all()

    def _post_all(self) -> None:
        """Post a receive into every slot, as one chain."""
        slots = np.arange(DATAGRAMS_IN, dtype=np.uint64)
        sge, wr = np.zeros(DATAGRAMS_IN, SGE), np.zeros(DATAGRAMS_IN, RECV_WR)
        sge["addr"] = slots * np.uint64(_SLOT) + np.uint64(self._base)
        sge["length"], sge["lkey"] = _SLOT, self._mr.lkey
        wr["wr_id"] = (slots << np.uint64(NUMBER_SHIFT)) + np.uint64(tag(DATAGRAM_IN))
        wr["sg_list"] = slots * np.uint64(SGE.itemsize) + np.uint64(sge.ctypes.data)
        wr["num_sge"] = 1
        first = int(wr.ctypes.data)
        wr["next"][:-1] = slots[1:] * np.uint64(RECV_WR.itemsize) + np.uint64(first)
        rc = self._device.data.post_recv(self._qp, first, ctypes.addressof(self._bad))
        if rc:
            fail("ibv_post_recv UD", rc, device=self._device.name, receives=DATAGRAMS_IN)

    def send(self, to: Address, payload: bytes) -> None:
        """Send one datagram, or lose it where the queue is full: who waits repeats it."""
        if not self._free:
            return
        route = self._routes.find(to)
        if not route:  # e.g. no such neighbour: as good as lost
            return
        slot = self._free.popleft()
        at = slot * _SLOT
        self._memory[at : at + len(payload)] = payload
        self._sge[0] = (self._base + at, len(payload), self._mr.lkey)
        wr = self._send_wr
        wr["wr_id"] = tag(DATAGRAM_OUT, slot)
        wr["ah"] = route
        wr["remote_qpn"] = to.ud_qpn
        wr["remote_qkey"] = to.qkey
        if self._device.data.post_send(self._qp, int(wr.ctypes.data), ctypes.addressof(self._bad)):
            self._free.append(slot)

    def sent(self, slot: int) -> None:
        """A datagram has left."""
        self._free.append(slot)

    @property
    def in_flight(self) -> int:
        """Datagrams that have not left yet."""
        return DATAGRAMS_OUT - len(self._free)

    def payload(self, slot: int, nbytes: int) -> bytes:
        """What arrived in a slot; `nbytes` counts the routing header, as the completion does."""
        at = slot * _SLOT
        return self._memory[at + _GRH_BYTES : at + nbytes]

    def give_back(self, slot: int) -> None:
        """Receive into a slot again."""
        self._sge[0] = (
            self._base + slot * _SLOT,
            _SLOT,
            self._mr.lkey,
        )
        self._recv_wr["wr_id"] = tag(DATAGRAM_IN, slot)
        self._device.data.post_recv(
            self._qp, int(self._recv_wr.ctypes.data), ctypes.addressof(self._bad)
        )

    def forget(self, to: Address) -> None:
        """Drop the route to a peer that is gone."""
        self._routes.forget(to)

    def close(self) -> None:
        """Give everything back."""
        self._device.free("ibv_destroy_qp", self._qp)
        self._routes.close()
        self._device.dereg_mr(self._mr)


_NEIGHBOUR_S: Final = 0.05
"""The worker waits so long: far more than a neighbour takes that is there (guessed)."""

_PAUSE_S: Final = 1.0
_PAUSE_MAX_S: Final = 8.0
_HELPERS_MAX: Final = 16  # neighbours that are waited for at a time
_CLOSE_S: Final = 5.0
"""close() waits so long for a call of the kernel, which ends after one second (quoted)."""


class _Helper(threading.Thread):
    """Calls ibv_create_ah for whoever is put into `asked`; None ends it. An answer of 0: failed."""

    def __init__(self, device: Device) -> None:
        super().__init__(name="tep-route", daemon=True)
        self._device = device
        self.asked: SimpleQueue[Address | None] = SimpleQueue()
        self.answer: SimpleQueue[int] = SimpleQueue()

    def run(self) -> None:
        while (to := self.asked.get()) is not None:
            self.answer.put(_create(self._device, to))


def _create(device: Device, to: Address) -> int:
    attr = device.route(to.gid, to.lid)
    try:
        return device.lib.make("ibv_create_ah", device.pd, ctypes.byref(attr), to=to)
    except FabricError:  # no such neighbour: the datagram is lost, and whoever waits repeats it
        return 0


class Routes:
    """The address handles of one NIC.

    Args:
        device: where.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: dict[Address, int] = {}
        self._asked: dict[Address, _Helper] = {}
        self._silent: dict[Address, tuple[float, float]] = {}  # until when, and the next pause
        self._idle: list[_Helper] = []
        self._helpers: list[_Helper] = []

    def find(self, to: Address) -> int:
        """The handle for a peer; 0: there is none, now or at all."""
        found = self._made.get(to)
        return self._make(to) if found is None else found

    def _make(self, to: Address) -> int:
        if self._device.is_ib:  # no neighbour to be asked
            return self._settle(to, _create(self._device, to))
        if to not in self._asked:
            until_s, _ = self._silent.get(to, (0.0, 0.0))
            helper = None if time.monotonic() < until_s else self._take_helper()
            if helper is None:
                return 0
            self._asked[to] = helper
            helper.asked.put(to)
            return self._look(to, _NEIGHBOUR_S)
        return self._look(to, 0.0)

    def _look(self, to: Address, wait_s: float) -> int:
        """The handle that a helper was asked for, if its call has returned."""
        helper = self._asked[to]
        try:
            handle = helper.answer.get(wait_s > 0, wait_s)
        except Empty:
            return 0
        del self._asked[to]
        self._idle.append(helper)
        return self._settle(to, handle)

    def _settle(self, to: Address, handle: int) -> int:
        _, pause_s = self._silent.pop(to, (0.0, _PAUSE_S))
        if handle:
            self._made[to] = handle
        else:
            self._silent[to] = time.monotonic() + pause_s, min(2 * pause_s, _PAUSE_MAX_S)
        return handle

    def _take_helper(self) -> _Helper | None:
        """A helper that is idle; None: all wait for neighbours."""
        if not self._idle:
            for to in tuple(self._asked):  # some may have been forgotten
                self._look(to, 0.0)
        if not self._idle and len(self._helpers) < _HELPERS_MAX:
            helper = _Helper(self._device)
            helper.start()
            self._helpers.append(helper)
            return helper
        return self._idle.pop() if self._idle else None

    def forget(self, to: Address) -> None:
        """Drop the handle for a peer that is gone; close() drops one that is in the making."""
        self._silent.pop(to, None)
        handle = self._made.pop(to, None)
        if handle is not None:
            self._device.free("ibv_destroy_ah", handle)

    def close(self) -> None:
        """Give all back; waits for calls of the kernel that have not returned."""
        for helper in self._helpers:
            helper.asked.put(None)
        for helper in self._helpers:
            helper.join(_CLOSE_S)
        handles = [*self._made.values()]
        handles += [one.answer.get() for one in self._asked.values() if not one.answer.empty()]
        for handle in filter(None, handles):
            self._device.free("ibv_destroy_ah", handle)
        self._made.clear()
        self._asked.clear()
        self._helpers.clear()
        self._idle.clear()
