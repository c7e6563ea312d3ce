"""Way (a): the public calls of libibverbs, row by row. The reference; works wherever EFA does.

`Columns` in columns.py offers the same methods. Nothing here knows whose rows they are.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tep.backends.base import Column
from tep.backends.columns import spread
from tep.backends.efa.device import Nic, Place
from tep.backends.efa.entries import COMPLETION_ENTRY, HAS_IMM, OP_READ, OP_WRITE
from tep.backends.ffi.efa import CqEx, QpEx
from tep.backends.ffi.ibverbs_structs import RECV_WR, SGE

__all__ = ["Entries", "Numbers", "RowWise", "Span"]

_OF_RECEIVES: Final = 1 << 32  # in wr_id: a request of the receive queue
_SENT, _RECEIVED = 1 << 1, 2 << 1  # of a completion's flags
_WRITE_FLAGS: Final = OP_WRITE << 4
_WC_WRITES: Final = frozenset({1, 129})  # IBV_WC_RDMA_WRITE, IBV_WC_RECV_RDMA_WITH_IMM
_WC_READ: Final = 2  # IBV_WC_RDMA_READ
_WC_IMM: Final = 129
_ENTRIES: Final = 256

Numbers = npt.NDArray[np.integer]
Entries = npt.NDArray[np.void]


class Span(NamedTuple):
    """Memory that messages are received in: buffers of one size, side by side."""

    address: int
    buffer_bytes: int
    buffers: int
    lkey: int


class RowWise:
    """The queues of one NIC through the library.

    Args:
        nic: whose.

    Attributes:
        more: the last poll stopped before the queue was empty.
        kind: None: entries may be of several kinds.
    """

    name: Final = "row by row, through libibverbs' calls"

    def __init__(self, nic: Nic) -> None:
        self._nic = nic
        self.more = False
        self.kind: int | None = None
        self._qp, self._cq = nic.qp, nic.cq
        self._pair, self._queue = QpEx.from_address(nic.qp), CqEx.from_address(nic.cq)
        self._start, self._complete = nic.call("wr_start"), nic.call("wr_complete")
        self._write, self._write_imm = nic.call("wr_rdma_write"), nic.call("wr_rdma_write_imm")
        self._send, self._to = nic.call("wr_send"), nic.call("wr_set_ud_addr")
        self._buffer = nic.call("wr_set_sge")
        # Where the device cannot read nobody posts a read.
        self._read_rows = nic.call("wr_rdma_read" if nic.can_read else "wr_rdma_write")
        self._first, self._next = (nic.call(n, of_cq=True) for n in ("start_poll", "next_poll"))
        self._end = nic.call("end_poll", of_cq=True)
        reads = ("read_opcode", "read_vendor_err", "read_byte_len", "read_imm_data")
        self._opcode, self._status, self._length, self._imm = (
            nic.call(name, of_cq=True) for name in reads
        )
        self._found = np.zeros(_ENTRIES, COMPLETION_ENTRY)
        self._post_recv = nic.post_recv()

    def lay_out(self, span: Span) -> None:
        """Say where messages are received; buffer i has the request id i."""
        n = span.buffers
        self._sges = np.zeros(n, SGE)
        self._sges["addr"] = span.address + span.buffer_bytes * np.arange(n)
        self._sges["length"], self._sges["lkey"] = span.buffer_bytes, span.lkey
        self._recvs = np.zeros(n, RECV_WR)
        self._recvs["wr_id"] = _OF_RECEIVES + np.arange(n)
        self._recvs["sg_list"] = self._sges.ctypes.data + SGE.itemsize * np.arange(n)
        self._recvs["num_sge"] = 1
        self._bad = np.zeros(1, np.uint64)

    # --- posting; all or none is taken

    def write(
        self,
        n: int,
        ids: Numbers,
        place: Place,
        src: Column,
        dst: Column,
        nbytes: Column,
        lkey: int,
        rkey: int,
        imm: Column | None,
        op: int = OP_WRITE,
    ) -> None:
        """Post n writes to one peer, one key, or reads; columns are ints or have n rows."""
        columns = [spread(column, n) for column in (src, dst, nbytes)]
        imms = [None] * n if imm is None else spread(imm, n)
        self._start(self._qp)
        numbers = ids.tolist()
        for number, at, to, length, one in zip(numbers, *columns, imms, strict=True):
            self._add(number, at, to, length, one, place, lkey, rkey, op)
        self._ring()

    def write_one(
        self,
        number: int,
        place: Place,
        src: int,
        dst: int,
        nbytes: int,
        lkey: int,
        rkey: int,
        imm: int | None,
        op: int = OP_WRITE,
    ) -> None:
        """Post one write, or one read."""
        self._start(self._qp)
        self._add(number, src, dst, nbytes, imm, place, lkey, rkey, op)
        self._ring()

    def _add(
        self,
        number: int,
        src: int,
        dst: int,
        nbytes: int,
        imm: int | None,
        place: Place,
        lkey: int,
        rkey: int,
        op: int,
    ) -> None:
        qp = self._qp
        self._pair.wr_id = number
        if op == OP_READ:
            self._read_rows(qp, rkey, dst)
        elif imm is None:
            self._write(qp, rkey, dst)
        else:
            self._write_imm(qp, rkey, dst, _swapped(imm))
        self._to(qp, place.ah, place.qpn, place.qkey)
        self._buffer(qp, lkey, src, nbytes)

    def send(self, number: int, place: Place, address: int, nbytes: int, lkey: int) -> None:
        """Post one message."""
        self._start(self._qp)
        self._pair.wr_id = number
        self._send(self._qp)
        self._to(self._qp, place.ah, place.qpn, place.qkey)
        self._buffer(self._qp, lkey, address, nbytes)
        self._ring()

    def _ring(self) -> None:
        rc = self._complete(self._qp)
        if rc:
            raise OSError(rc, "ibv_wr_complete")

    def receive(self, ids: bytearray) -> None:
        """Post receive buffers, named by u16."""
        indices = np.frombuffer(ids, np.uint16)
        at = self._recvs.ctypes.data + RECV_WR.itemsize * indices.astype(np.uint64)
        following = np.zeros_like(at)
        following[:-1] = at[1:]
        self._recvs["next"][indices] = following
        rc = self._post_recv(self._qp, int(at[0]), self._bad.ctypes.data)
        if rc:
            raise OSError(rc, "ibv_post_recv")

    # --- polling

    def poll(self, room: int) -> Entries:
        """What has completed, as the device itself would write it; at most `room` entries."""
        n, found, queue = 0, self._found, self._cq
        self.more = False
        if self._first(queue, None):
            return found[:0]
        room = min(room, _ENTRIES)
        while True:
            found[n] = self._read(queue)
            n += 1
            if n == room or self._next(queue):
                break
        self._end(queue)
        self.more = n == room
        return found[:n]

    def _read(self, queue: int) -> tuple[int, ...]:
        number, opcode = int(self._queue.wr_id), self._opcode(queue)
        flags = _RECEIVED if number & _OF_RECEIVES else _SENT
        length = imm = 0
        if opcode in _WC_WRITES:
            flags |= _WRITE_FLAGS
        elif opcode == _WC_READ:
            flags |= OP_READ << 4
        if number & _OF_RECEIVES:
            length = self._length(queue) & 0xFFFF
            if opcode == _WC_IMM:
                flags |= HAS_IMM >> 1
                imm = _swapped(self._imm(queue))
        return number & 0xFFFF, self._status(queue), flags, 0, length, 0, 0, imm

    def close(self) -> None:
        """Nothing is kept."""


def _swapped(imm: int) -> int:
    """A number in network byte order, and back."""
    return int.from_bytes(imm.to_bytes(4, "little"), "big")
