"""Datagrams: one UD queue pair, its buffers, its routes. May lose, never waits."""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from tep.backends.ffi.ibverbs import fail
from tep.backends.ffi.ibverbs_structs import ENUMS, RECV_WR, SEND_WR, SGE
from tep.backends.verbs.address import Address
from tep.backends.verbs.conns import create_ud, qp_number
from tep.backends.verbs.depths import DATAGRAMS_IN, DATAGRAMS_OUT
from tep.backends.verbs.handshake import DATAGRAM_BYTES_MAX
from tep.backends.verbs.routes import Routes
from tep.backends.verbs.tags import DATAGRAM_IN, DATAGRAM_OUT, NUMBER_SHIFT, tag

if TYPE_CHECKING:
    from tep.backends.verbs.device import Device

__all__ = ["Datagrams"]

_GRH_BYTES: Final = 40
"""What stands before each datagram's payload: the routing header, or as many unused bytes."""

_SLOT_BYTES: Final = 1024
assert _GRH_BYTES + DATAGRAM_BYTES_MAX <= _SLOT_BYTES


class Datagrams:
    """The UD queue pair of one NIC.

    Args:
        device: where.
        cq: completion queue.
        qkey: that others must know to reach it.
    """

    def __init__(self, device: Device, cq: int, qkey: int) -> None:
        self._device = device
        self._memory = mmap.mmap(-1, (DATAGRAMS_IN + DATAGRAMS_OUT) * _SLOT_BYTES)
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
        sge["addr"] = slots * np.uint64(_SLOT_BYTES) + np.uint64(self._base)
        sge["length"], sge["lkey"] = _SLOT_BYTES, self._mr.lkey
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
        at = slot * _SLOT_BYTES
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
        at = slot * _SLOT_BYTES
        return self._memory[at + _GRH_BYTES : at + nbytes]

    def give_back(self, slot: int) -> None:
        """Receive into a slot again."""
        self._sge[0] = (self._base + slot * _SLOT_BYTES, _SLOT_BYTES, self._mr.lkey)
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
