"""Small messages: copied into registered slots on the way out, into a rotating pool on the way in.

A message that finds no buffer at its target waits there, in the NIC (RNR), until one is posted.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from tep.backends.base import Entry, Kind, Status
from tep.backends.ffi.ibverbs_structs import ENUMS, RECV_WR, SEND_WR, SGE, Mr
from tep.backends.verbs.depths import MESSAGES_OUT
from tep.backends.verbs.receives import create_srq
from tep.backends.verbs.tags import MESSAGE_IN, MESSAGE_OUT, tag

if TYPE_CHECKING:
    from tep.backends.verbs.conns import Conn
    from tep.backends.verbs.device import Device

__all__ = ["Messages"]

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
        self.srq = create_srq(device, recvs_max)
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
