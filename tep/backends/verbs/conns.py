"""Queue pairs: made, connected, failed, drained, destroyed; and the ids of what is posted on them.

Rule 1: only this file changes a queue pair's state. Rule 2: a failed queue pair is destroyed only
after everything it held has come back. Rule 3: a connection counts as drained once all that was
posted on it is back, its queue pairs receive no more, and the completion queue was read to its end
after that. Rule 4: a fence is said to hold only when all connections with its peer have drained.

A work request's id says what its completion is about: kind, object, row. On an error a completion's
opcode is undefined (Soft-RoCE reports a SEND for a failed write), so the id is all there is to go
by, together with the queue pair's number.

    bits 60..63  kind
    bits 16..59  object: set of loose rows, or slot; 0 for runs
    bits  0..15  row within the run or set
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from tep.backends.base import Entry, Kind, Status
from tep.backends.ffi.ibverbs import ENUMS, C, Ref, qp_number, ref
from tep.backends.verbs.device import MESSAGES_OUT, Depths, Device
from tep.backends.verbs.handshake import Hello, QpId
from tep.base.errors import FabricError

__all__ = [
    "KIND_SHIFT", "NUMBER_MASK", "NUMBER_SHIFT", "ROW_MASK", "Conn", "Draining", "Queues",
    "Tag", "create_ud", "number_of", "tag",
]  # fmt: skip

KIND_SHIFT: Final = 60
NUMBER_SHIFT: Final = 16
NUMBER_MASK: Final = (1 << 44) - 1
ROW_MASK: Final = 0xFFFF


class Tag:
    """The kinds of requests, as ids name them."""

    RUN: Final = 1  # row of the oldest run on its queue pair
    LOOSE: Final = 9  # row of a loose set; the object is the set
    IMM: Final = 4  # receive without a buffer, used up by an immediate
    MESSAGE_OUT: Final = 5
    MESSAGE_IN: Final = 6
    DATAGRAM_OUT: Final = 7
    DATAGRAM_IN: Final = 8


_MIN_RNR_TIMER: Final = 12
"""The code of what a peer waits when it finds no receive here: 0.64 ms. Source: fabric-lib."""


def tag(kind: int, number: int = 0) -> int:
    """The id of an object's row 0; add the row."""
    return kind << KIND_SHIFT | number << NUMBER_SHIFT


def number_of(wr_id: int) -> int:
    """The object that an id names."""
    return wr_id >> NUMBER_SHIFT & NUMBER_MASK


_QUIET_S: Final = 0.1
"""A failed queue pair receives no more after so many seconds: what it was taking in as it failed is
through within microseconds (guessed). A device says when ("last WQE reached" of the InfiniBand
specification 1.4, section 11.6.3.4; quoted), but Soft-RoCE of Linux 6.1 does not (measured)."""


_ACCESS: Final = (
    ENUMS["IBV_ACCESS_LOCAL_WRITE"]
    | ENUMS["IBV_ACCESS_REMOTE_WRITE"]
    | ENUMS["IBV_ACCESS_REMOTE_READ"]
)
"""The rights that queue pairs give; a region gives those that it was registered for."""


class Queues(NamedTuple):
    """The queues that all queue pairs of one NIC share; receives for immediates have no buffers."""

    cq: int
    imm_srq: int
    msg_srq: int
    depths: Depths


Run = tuple[int, int, int, int]
"""(kind, ctx, start, n): rows of one batch, posted as one chain on one queue pair; they come back
first to last."""


class Conn:
    """The queue pairs of one attempt with one peer: one for messages, one for rows.

    Two, since both messages and immediates use up receives in the order in which these were
    posted: on one queue pair an immediate would eat a message's buffer.

    Attributes:
        reads: reads on the wire at a time, on each of its queue pairs; 0 = the peer answers none.
        msg_ref, row_ref: its queue pairs, ready for a call; no row_ref: for messages only.
        runs, back: chains of rows that have not come back, oldest first; rows of the oldest that
            have.
        ids: number and first packet sequence number of each: messages, then rows.
        lost, gone: nothing more can be posted; its queue pairs are destroyed.
        quiet_s, deadline_s: once it is lost: when its queue pairs receive no more, and when they
            are destroyed whether or not they have drained.
    """

    def __init__(
        self,
        device: Device,
        queues: Queues,
        peer: int,
        rng: random.Random,
        *,
        rows: bool,
    ) -> None:
        self.peer = peer
        self.lost = self.gone = False
        self.reads = 0
        self.quiet_s = self.deadline_s = 0.0
        self._device = device
        self._sending = False
        self._made: list[int] = []
        self.row_ref: Ref | None = None
        self.runs: deque[Run] = deque()
        self.back = 0
        depths = queues.depths
        with contextlib.ExitStack() as undo:
            undo.callback(self.destroy)
            self.msg_ref = self._make(queues.cq, queues.msg_srq, MESSAGES_OUT)
            if rows:
                self.row_ref = self._make(queues.cq, queues.imm_srq, depths.rows + depths.reads)
            undo.pop_all()
        self.ids: tuple[QpId, ...] = tuple(
            (qp_number(qp), rng.getrandbits(24)) for qp in self._made
        )

    def _make(self, cq: int, srq: int, depth: int) -> Ref:
        device = self._device
        qp = device.make_rc(cq, srq, depth)
        self._made.append(qp)
        device.lib.modify_qp(
            qp,
            "INIT",
            pkey_index=device.pkey_index,
            port_num=device.settings.port,
            qp_access_flags=_ACCESS,
        )
        return ref(qp)

    def to_rtr(self, hello: Hello) -> None:
        """Let them receive from the peer's queue pairs."""
        device = self._device
        route = device.route(hello.sender.gid, hello.sender.lid)
        self.reads = min(device.reads_asked, hello.reads)
        if len(hello.qps) == 1:
            self.row_ref = None
        for qp, (number, psn) in zip(self._made, hello.qps, strict=False):
            device.lib.modify_qp(
                qp,
                "RTR",
                ah_attr=route,
                path_mtu=min(device.port.active_mtu, hello.mtu),
                dest_qp_num=number,
                rq_psn=psn,
                max_dest_rd_atomic=device.reads_served,
                min_rnr_timer=_MIN_RNR_TIMER,
            )

    def to_rts(self) -> None:
        """Let them send. Idempotent."""
        if self._sending:
            return
        settings = self._device.settings
        receiving = self._made if self.row_ref else self._made[:1]
        for qp, (_, psn) in zip(receiving, self.ids, strict=False):
            self._device.lib.modify_qp(
                qp,
                "RTS",
                timeout=settings.timeout,
                retry_cnt=settings.retry_cnt,
                rnr_retry=settings.rnr_retry,
                sq_psn=psn,
                max_rd_atomic=self.reads,
            )
        self._sending = True

    def fail(self, now_s: float) -> None:
        """Stop: everything that is out comes back flushed."""
        self.lost = True
        self.deadline_s = now_s + self._device.settings.drain_s
        self.quiet_s = min(now_s + _QUIET_S, self.deadline_s)
        for qp in self._made:
            try:
                self._device.lib.modify_qp(qp, "ERR")
            except FabricError:
                self.quiet_s = math.inf  # the deadline ends it

    def holds(self, qp: int) -> bool:
        return qp in self._made

    def destroy(self) -> None:
        """Give the queue pairs back. No completion of theirs comes after that. Idempotent."""
        self.lost = self.gone = True
        while self._made:
            self._device.free("ibv_destroy_qp", self._made.pop())


def create_ud(device: Device, cq: int, qkey: int, depth: int) -> int:
    """Make a queue pair for datagrams, ready to send and receive."""
    lib = device.lib
    attr = C.ibv_qp_init_attr_ex(send_cq=cq, recv_cq=cq, qp_type=ENUMS["IBV_QPT_UD"])
    attr.cap.max_send_wr = attr.cap.max_recv_wr = depth
    attr.cap.max_send_sge = attr.cap.max_recv_sge = 1
    qp = lib.make("ibv_create_qp", device.pd, ctypes.byref(attr), what="UD", device=device.name)
    settings = device.settings
    lib.modify_qp(qp, "INIT", pkey_index=device.pkey_index, port_num=settings.port, qkey=qkey)
    lib.modify_qp(qp, "RTR")
    lib.modify_qp(qp, "RTS", sq_psn=0)
    return qp


class Draining:
    """The failed connections of one NIC.

    Args:
        holds: whether something that was posted on a connection has not come back.
        depth: completions that the queue holds.
        retire: what to do with a connection that has drained (True), or did not in time (False).

    Attributes:
        conns: with the round of reading the queue in which each may go; inf = it has not drained.
        fences: (peer, ctx) of those that do not hold yet: FENCED is said once nothing of the peer
            is left. It has no connection for rows any more.
        blurred: numbers of peers whose rows have landed here or not, nobody knows.
    """

    def __init__(
        self,
        holds: Callable[[Conn], bool],
        ready: deque[Entry],
        depth: int,
        retire: Callable[[Conn, bool], object],
    ) -> None:
        self.conns: dict[Conn, float] = {}
        self.blurred: set[int] = set()
        self._holds = holds
        self._ready = ready
        self._depth = depth
        self._retire = retire
        self._rounds = 0  # how often the completion queue was read to its end
        self._left = depth
        self.fences: list[tuple[int, int]] = []

    def add(self, conn: Conn, now_s: float) -> None:
        conn.fail(now_s)
        self.conns[conn] = math.inf

    def progress(self, now_s: float, n: int, *, whole: bool) -> None:
        """Count a read of `n` completions, `whole` if there were no more; end what may end."""
        self._left -= n
        if whole or self._left <= 0:
            self._rounds += 1
            self._left = self._depth
        for conn, due in list(self.conns.items()):
            drained = now_s >= conn.quiet_s and not self._holds(conn)
            if not drained and now_s < conn.deadline_s:
                continue
            if due == math.inf:  # this round may have begun before the last completion came
                self.conns[conn] = self._rounds + 2
            elif self._rounds >= due:
                del self.conns[conn]
                self._retire(conn, drained)
        if self.fences:
            self._say_fenced()

    def _say_fenced(self) -> None:
        open_ = {conn.peer for conn in self.conns}
        for peer, ctx in self.fences[:]:
            if peer not in open_:
                self.fences.remove((peer, ctx))
                status = int(Status.PROVIDER if peer in self.blurred else Status.OK)
                self._ready.append((int(Kind.FENCED), status, 1, 0, 0, ctx, 0))

    def next_s(self, now_s: float) -> list[float]:
        """The times when progress() has something to do though nothing came."""
        if any(due < math.inf for due in self.conns.values()) or (self.fences and not self.conns):
            return [now_s]
        return [conn.quiet_s if now_s < conn.quiet_s else conn.deadline_s for conn in self.conns]
