"""Receives without buffers, which immediates use up; put back by the batch.

Rule: as many are put back as a poll found used, so that the queue's depth never drifts.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from tep.backends.ffi.ibverbs_structs import RECV_WR, SrqInitAttr
from tep.backends.verbs.tags import IMM, tag

if TYPE_CHECKING:
    from tep.backends.verbs.device import Device

__all__ = ["IMM_ID", "ImmReceives", "create_srq"]

IMM_ID = tag(IMM)
"""The id of every such receive: they are all alike."""


class ImmReceives:
    """The shared receive queue for immediates.

    Args:
        device: where.
        depth: receives that wait at a time.
    """

    def __init__(self, device: Device, depth: int) -> None:
        self.srq = create_srq(device, depth)
        self._n = depth
        self._wr = np.zeros(depth, RECV_WR)
        self._ptr = int(self._wr.ctypes.data)
        self._wr["wr_id"] = IMM_ID
        # One chain, linked once: its last k requests are a chain of k.
        nexts = self._ptr + np.arange(1, depth, dtype=np.uint64) * np.uint64(RECV_WR.itemsize)
        self._wr["next"][:-1] = nexts
        self._ends = self._ptr + depth * RECV_WR.itemsize
        self._post = device.data.post_srq_recv
        self._bad = ctypes.c_void_p()
        self._bad_ptr = ctypes.addressof(self._bad)
        self._owed = 0
        self.put(depth)

    def put(self, count: int) -> None:
        """Put `count` receives back; what does not fit now follows with the next call."""
        count += self._owed
        self._owed = 0
        while count:
            part = min(count, self._n)
            rc = self._post(self.srq, self._ends - part * RECV_WR.itemsize, self._bad_ptr)
            if rc:
                bad = self._bad.value or self._ends - part * RECV_WR.itemsize
                self._owed = count - part + (self._ends - bad) // RECV_WR.itemsize
                return
            count -= part


def create_srq(device: Device, depth: int) -> int:
    """Make a shared receive queue."""
    attr = SrqInitAttr()
    attr.attr.max_wr = depth
    attr.attr.max_sge = 1
    return device.lib.make(
        "ibv_create_srq", device.pd, ctypes.byref(attr), device=device.name, max_wr=depth
    )
