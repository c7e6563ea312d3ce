"""Completions: read off the queue, told apart, turned into the seam's entries; and immediates.

Completions are told apart by the id of their work request and the number of their queue pair, never
by their opcode, which is undefined when the status is bad. Here alone an immediate is turned from
network byte order into a number.

Immediates use up receives without buffers. Rule: as many are put back as a poll found used, so that
the queue's depth never drifts.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import COMPLETION, Completions, Entry, Kind, Status, new_completions
from tep.backends.common import meaning
from tep.backends.ffi.ibverbs import ENUMS, RECV_WR, WC
from tep.backends.verbs.conns import KIND_SHIFT, Conn, Tag, number_of, tag
from tep.backends.verbs.device import Device
from tep.backends.verbs.peers import Peers

__all__ = ["POLL_MAX", "STATUS_TEXT", "ImmReceives", "Poller", "send_status", "write_status"]

IMM_ID = tag(Tag.IMM)
"""The id of every such receive: they are all alike."""

POLL_MAX: Final = 512
"""Completions read at a time."""

_SCALAR_MAX: Final = 8
_IMM, _OK, _FLUSHED = int(Kind.IMM), int(Status.OK), int(Status.FLUSHED)
_UNREACHABLE: Final = int(Status.UNREACHABLE)
_ROWS: Final = frozenset({Tag.RUN, Tag.LOOSE})
_RUNS_END: Final = tag(Tag.RUN + 1)  # the ids of rows of runs are less
_LOOSE_FROM: Final = tag(Tag.LOOSE)  # the ids of loose rows are the largest

_HEAD: Final = np.dtype({"names": ["head"], "formats": ["V16"], "offsets": [0], "itemsize": 48})
"""Id, status and opcode of a completion."""

_IMM_HEADS: Final = struct.pack("=QII", IMM_ID, 0, ENUMS["IBV_WC_RECV_RDMA_WITH_IMM"]) * POLL_MAX
"""The same of a burst of immediates that went well."""

_WHOLE: Final = np.dtype(f"V{COMPLETION.itemsize}")


def _imms_of(source: int) -> npt.NDArray[np.void]:
    """The entries of a burst of different immediates, but for the immediates."""
    found = new_completions(POLL_MAX)
    found["kind"], found["status"], found["count"], found["ctx"] = _IMM, _OK, 1, source
    return found.view(_WHOLE)


class Poller:
    """The completion queue of one NIC; `failed` is told why it cannot be read.

    Attributes:
        wc_ptr: where ibv_poll_cq puts up to POLL_MAX completions, for take().
        said: by the seam's status, what the provider said when it last met it.
    """

    def __init__(
        self,
        device: Device,
        cq: int,
        imms: ImmReceives,
        peers: Peers,
        ready: deque[Entry],
        failed: Callable[[str], None],
    ) -> None:
        self._failed = failed
        self.said: dict[int, str] = {}
        self._device = device
        self._cq = cq
        self._imms = imms
        self._peers = peers
        self._writer = peers.writer
        self._messages = peers.messages
        self._ready = ready
        self._wc = np.zeros(POLL_MAX, WC)
        self.wc_ptr = int(self._wc.ctypes.data)
        self._poll_cq = device.data.poll_cq
        # Views, made once. Bursts are compared as bytes: that costs a quarter of `(a == b).all()`.
        self._ids, self._statuses = self._wc["wr_id"], self._wc["status"]
        self._heads = self._wc.view(_HEAD)["head"]
        self._imm, self._qpn = self._wc["imm_data"], self._wc["qp_num"]
        fields = ["wr_id", "status", "byte_len", "imm_data", "qp_num", "vendor_err"]
        self._few = self._wc[fields]
        self._source = 0
        self._each = _imms_of(0)
        self._out = new_completions(0)  # the last that was filled
        self._out_whole, self._out_imms = self._out.view(_WHOLE), self._out["imm"]

    def fail(self, n: int) -> int:
        """Report that the queue could not be read; return how many completions were."""
        self._failed(f"its completion queue cannot be read (ibv_poll_cq returns {n})")
        return 0

    def take_all(self) -> int:
        """Read what is there and turn it into entries; return how many completions it was."""
        n = self._poll_cq(self._cq, POLL_MAX, self.wc_ptr)
        if n < 0:
            return self.fail(n)
        self._take_slowly(n)
        return n

    def _take_slowly(self, n: int) -> None:
        """Take completions one by one, for which next to no memory is needed."""
        for at in range(n):
            self._take_each([self._few[at].item()])

    def take(self, n: int, out: Completions, filled: int) -> int:
        """Tell `n` completions apart: bursts by columns, straight into `out`; else one by one.

        Returns how far `out` is filled then; there are more entries in `ready` perhaps.
        """
        if n <= _SCALAR_MAX:
            self._take_each(self._few[:n].tolist())
            return filled
        rows: list[tuple[int, ...]] = []
        loose: list[int] = []
        used = 0
        try:  # first what takes memory
            ids = self._ids[:n]
            if self._heads[:n].tobytes() == _IMM_HEADS[: 16 * n]:
                filled, used = self._count_imms(self._imm[:n], self._qpn[:n], out, filled), n
            elif self._statuses[:n].any():
                rows = self._few[:n].tolist()
            elif int(ids.min()) >= _LOOSE_FROM:
                loose = ids.tolist()
            else:
                # Both directions at once: immediates by columns, the rest one by one.
                mine = ids == IMM_ID
                rows, imms = self._few[:n][~mine].tolist(), self._imm[:n][mine]
                if used := len(imms):
                    filled = self._count_imms(imms, self._qpn[:n][mine], out, filled)
        except MemoryError:
            self._take_slowly(n)
            return filled
        if used:
            self._imms.put(used)
        if loose:
            self._writer.complete_many_loose(loose)
        if rows:
            self._take_each(rows)
        return filled

    def _count_imms(
        self,
        imms: npt.NDArray[np.unsignedinteger],
        numbers: npt.NDArray[np.uint32],
        out: Completions,
        filled: int,
    ) -> int:
        """Hand out immediates of queue pairs, equal ones of one as one entry; return as take()."""
        n = len(imms)
        raw, ends = imms.tobytes(), numbers.tobytes()
        first, end = raw[:4], ends[:4]
        alone = ends == end * n
        if alone:
            source = self._peers.conns[int.from_bytes(end, sys.byteorder)].peer
            if raw == first * n:
                out[filled] = (_IMM, _OK, n, int.from_bytes(first, "big"), 0, source, 0)
                return filled + 1
            if source != self._source:
                self._source, self._each = source, _imms_of(source)
        if out is not self._out:  # views of the whole, made once: of a part they cost 1 us
            self._out, self._out_whole, self._out_imms = out, out.view(_WHOLE), out["imm"]
        part = slice(filled, filled + n)
        self._out_whole[part] = self._each[:n]  # field by field it would take ten times as long
        self._out_imms[part] = imms
        if not alone:
            out["ctx"][part] = self._peers.sources_of(numbers)
        return filled + n

    def _take_each(self, rows: list[tuple[int, ...]]) -> None:
        used = 0
        ready, conns = self._ready, self._peers.conns
        for at, (wr_id, status, nbytes, imm, qpn, vendor) in enumerate(rows, 1):
            if wr_id == IMM_ID:
                used += 1
                if status == 0:
                    ready.append((_IMM, _OK, 1, imm, 0, conns[qpn].peer, 0))
            elif wr_id >> KIND_SHIFT in _ROWS:
                # Of rows of runs, most likely of one, the last that went well tells of all.
                if (
                    at == len(rows)
                    or not wr_id < (after := rows[at])[0] < _RUNS_END
                    or (status, after[1], after[4]) != (0, 0, qpn)
                ):
                    self._end_row(wr_id, status, qpn, vendor)
            else:
                self._take_other(wr_id, status, nbytes, qpn, vendor)
        if used:
            self._imms.put(used)

    def _end_row(self, wr_id: int, status: int, qpn: int, vendor: int) -> None:
        conn = self._peers.conns.get(qpn)
        if conn is None or conn.gone:
            return  # it did not drain in time, and its rows were ended then
        found = self._why(conn, int(write_status(status)), status, vendor) if status else _OK
        if wr_id >> KIND_SHIFT == Tag.LOOSE:
            self._writer.complete_loose(wr_id, found)
        else:
            self._writer.complete_run(conn, wr_id, found)
        if status:
            self._peers.fail(conn, found)

    def _take_other(self, wr_id: int, status: int, nbytes: int, qpn: int, vendor: int) -> None:
        kind, number = wr_id >> KIND_SHIFT, number_of(wr_id)
        if kind == Tag.DATAGRAM_IN:
            if status == 0:
                self._hear(number, nbytes)
            self._peers.datagrams.give_back(number)
        elif kind == Tag.DATAGRAM_OUT:
            self._peers.datagrams.sent(number)
        elif kind == Tag.MESSAGE_OUT:
            self._end_message(number, status, qpn, vendor)
        else:
            assert kind == Tag.MESSAGE_IN, f"completion of an unknown kind: {wr_id:#x}"
            if status == 0:
                self._messages.received(number, nbytes, self._peers.conns[qpn].peer)
                return
            self._messages.returned(number)
            # Most often a message longer than its buffer.
            self._peers.fail(self._peers.conns[qpn], int(send_status(status)))

    def _hear(self, slot: int, nbytes: int) -> None:
        with contextlib.suppress(MemoryError):  # as good as lost: who waits repeats it
            self._peers.hear(self._peers.datagrams.payload(slot, nbytes), time.monotonic())

    def _end_message(self, slot: int, status: int, qpn: int, vendor: int) -> None:
        conn = self._peers.conns.get(qpn)
        if conn is None or conn.gone:
            return  # as in _end_row
        found = self._why(conn, int(send_status(status)), status, vendor) if status else _OK
        self._messages.sent(slot, found)
        if found != _OK:
            self._peers.fail(conn, found)

    def _why(self, conn: Conn, found: int, status: int, vendor: int) -> int:
        """The seam's status for what failed, `found` by its completion's status; keep the text."""
        if found == _FLUSHED:
            return self._peers.lost_status(conn)
        text = self._device.lib.status_str(status)
        where = self._peers.table[conn.peer].where
        self.said[found] = f"{text} (status {status}, vendor error {vendor:#x}) towards {where}"
        return int(self._peers.why_silent()) if found == _UNREACHABLE else found


class ImmReceives:
    """The shared receive queue for immediates; `depth` receives wait at a time."""

    def __init__(self, device: Device, depth: int) -> None:
        self.srq = device.make_srq(depth)
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


_WRITE: Final[Mapping[int, Status]] = MappingProxyType(
    {
        ENUMS["IBV_WC_SUCCESS"]: Status.OK,
        ENUMS["IBV_WC_LOC_LEN_ERR"]: Status.LENGTH,
        ENUMS["IBV_WC_LOC_QP_OP_ERR"]: Status.LOCAL_KEY,
        ENUMS["IBV_WC_LOC_PROT_ERR"]: Status.LOCAL_KEY,
        ENUMS["IBV_WC_LOC_ACCESS_ERR"]: Status.LOCAL_KEY,
        ENUMS["IBV_WC_WR_FLUSH_ERR"]: Status.FLUSHED,
        ENUMS["IBV_WC_REM_INV_REQ_ERR"]: Status.REMOTE_RANGE,
        ENUMS["IBV_WC_REM_ACCESS_ERR"]: Status.REMOTE_KEY,
        ENUMS["IBV_WC_RETRY_EXC_ERR"]: Status.UNREACHABLE,
        ENUMS["IBV_WC_RESP_TIMEOUT_ERR"]: Status.UNREACHABLE,
        ENUMS["IBV_WC_RNR_RETRY_EXC_ERR"]: Status.RNR,
    }
)


def write_status(status: int) -> Status:
    """Translate the status of a write's completion."""
    return _WRITE.get(status, Status.PROVIDER)


def send_status(status: int) -> Status:
    """Translate the status of a message's completion: there, a refusal means too long."""
    return Status.LENGTH if status in _TOO_LONG else write_status(status)


_TOO_LONG: Final = frozenset(
    {
        ENUMS["IBV_WC_LOC_LEN_ERR"],
        ENUMS["IBV_WC_REM_INV_REQ_ERR"],  # what the specification asks for
        ENUMS["IBV_WC_REM_OP_ERR"],  # what Soft-RoCE says (measured)
    }
)


STATUS_TEXT: Final = meaning(
    FLUSHED="another row to this peer failed first and took the connection with it, or "
    "the engine was closed; the backend connects anew by itself",
    LOCAL_KEY="the memory here is not registered, or not for reads into it, or the row "
    "reaches beyond it",
    REMOTE_KEY="the peer refuses key or range: the region was deregistered, or peers "
    "may not write (read) there, or the row reaches beyond it, or the key is another NIC's",
    REMOTE_RANGE="the target's NIC calls the request invalid: too long for it? Between Soft-RoCE "
    "NICs of machines that stand still for tenths of a second, timeout=18 avoids it",
    RNR="the peer had no receive posted for too long: its engine is not being turned",
    UNREACHABLE="no answer within timeout and retries: the peer or its process is "
    "gone, or packets get lost: compare MTU, GID and PFC settings of both ends; or a failover "
    "has fenced rows between these two NICs off",
    PROVIDER="",
)
