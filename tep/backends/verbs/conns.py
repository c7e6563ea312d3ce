"""Queue pairs: made, connected, failed, drained, destroyed; and the ids of what is posted on them.

Rule 1: only this file changes a queue pair's state. Rule 2: a failed queue pair is destroyed only
after everything it held has come back. Its last request, the marker, tells this of what was posted
on it; the device tells it of what it received. Rule 3: a connection counts as drained once its
markers are back, its queue pairs receive no more, and the completion queue was read to its end
after that. Rule 4: a fence is said to hold only when all connections with its peer have drained.

A work request's id says what its completion is about: kind, object, row. On an error a completion's
opcode is undefined (Soft-RoCE reports a SEND for a failed write), so the id is all there is to go
by, together with the queue pair's number.

    bits 60..63  kind
    bits 16..59  object: set of loose rows, slot, or connection; 0 for runs
    bits  0..15  row within the run or set
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tep.backends.base import Entry, Kind, Status
from tep.backends.ffi.ibverbs import ENUMS, C, ref
from tep.backends.verbs.device import MARKERS_MAX, MESSAGES_OUT, SPARE_WRS, Depths, Device
from tep.backends.verbs.handshake import NO_ECE, Ece, Hello, QpId
from tep.base.errors import FabricError

__all__ = [
    "KIND_SHIFT", "NUMBER_MASK", "NUMBER_SHIFT", "ROW_MASK", "Conn", "Draining", "Queues",
    "Run", "Sources", "Tag", "create_ud", "number_of", "qp_number", "tag",
]  # fmt: skip

KIND_SHIFT: Final = 60
NUMBER_SHIFT: Final = 16
NUMBER_MASK: Final = (1 << 44) - 1
ROW_MASK: Final = 0xFFFF


class Tag:
    """The kinds of requests, as ids name them."""

    RUN: Final = 1  # row of the oldest run on its queue pair
    TAIL: Final = 2  # stands behind rows of a run that asked for no completion of their own
    LOOSE: Final = 9  # row of a loose set; the object is the set
    MARKER: Final = 3  # last request of a failed queue pair; the object is the connection
    IMM: Final = 4  # receive without a buffer, used up by an immediate
    MESSAGE_OUT: Final = 5
    MESSAGE_IN: Final = 6
    DATAGRAM_OUT: Final = 7
    DATAGRAM_IN: Final = 8


def tag(kind: int, number: int = 0) -> int:
    """The id of row 0 of an object; add the row."""
    return kind << KIND_SHIFT | number << NUMBER_SHIFT


def number_of(wr_id: int) -> int:
    """The object that an id names."""
    return wr_id >> NUMBER_SHIFT & NUMBER_MASK


_LAST_S: Final = 0.1
"""A failed queue pair receives no more after so many seconds, also if the device does not say so.
A device has to say it (InfiniBand specification 1.4, section 11.6.3.4, "last WQE reached"; quoted),
but Soft-RoCE of Linux 6.1 does not (measured); what that was taking in as it failed is through
within microseconds (guessed)."""


def _step(state: str, fields: str = "") -> tuple[int, int]:
    """A state of queue pairs, and the mask of what is set on the way to it."""
    mask = sum(ENUMS[f"IBV_QP_{name}"] for name in ("STATE", *fields.split()))
    return ENUMS[f"IBV_QPS_{state}"], mask


_STEPS: Final = {
    "RESET->INIT": _step("INIT", "PKEY_INDEX PORT ACCESS_FLAGS"),
    "INIT->RTR": _step("RTR", "AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER"),
    "RTR->RTS": _step("RTS", "TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC"),
    "->ERR": _step("ERR"),
    "UD RESET->INIT": _step("INIT", "PKEY_INDEX PORT QKEY"),
    "UD INIT->RTR": _step("RTR"),
    "UD RTR->RTS": _step("RTS", "SQ_PSN"),
}
_ACCESS: Final = (
    ENUMS["IBV_ACCESS_LOCAL_WRITE"]
    | ENUMS["IBV_ACCESS_REMOTE_WRITE"]
    | ENUMS["IBV_ACCESS_REMOTE_READ"]
)
"""The rights that queue pairs give; a region gives those that it was registered for."""


class Queues(NamedTuple):
    """The queues that all queue pairs of one NIC share.

    Attributes:
        cq: completion queue of everything.
        imm_srq: shared receive queue for immediates; its receives have no buffers.
        msg_srq: shared receive queue for messages.
        depths: of all of them.
    """

    cq: int
    imm_srq: int
    msg_srq: int
    depths: Depths


Run = tuple[int, int, int, int]
"""(kind, ctx, start, n): rows of one batch, posted as one chain on one queue pair; they come back
first to last."""


class Conn:
    """The queue pairs of one attempt with one peer: one for messages, one or more for rows.

    Two kinds, since both messages and immediates use up receives in the order in which these were
    posted: on one queue pair an immediate would eat a message's buffer.

    Args:
        peer: PeerId of who it is with.
        number: of this connection on its NIC; markers carry it.
        rows: False = for messages only.
        rng: draws packet sequence numbers.

    Attributes:
        reads: reads on the wire at a time, on each of its queue pairs; 0 = the peer answers none.
        qp, qps: those for rows; `qp` is the first, and `ref` is it, ready for a call.
        msg_qp: the one for messages.
        ece: what its queue pairs can do beyond the standard; once they receive, what is in use.
        runs: chains on `qp` that have not come back, oldest first.
        back: rows of the oldest run that have.
        lost: nothing more can be posted.
    """

    def __init__(
        self,
        device: Device,
        queues: Queues,
        peer: int,
        number: int,
        rng: random.Random,
        *,
        rows: bool,
    ) -> None:
        self.peer = peer
        self.number = number
        self.lost = False
        self.reads = 0
        self.runs: deque[Run] = deque()
        self.back = 0
        self.deadline_s = 0.0
        self._device = device
        self._turn = 0
        self._unmarked: list[int] = []
        self._markers = 0
        self._sending = False
        self._stuck = False
        self._last_s = 0.0
        self._receiving: set[int] = set()
        self._made: list[int] = []
        settings, depths = device.settings, queues.depths
        with contextlib.ExitStack() as undo:
            undo.callback(self.destroy)
            self.msg_qp = self._make(queues.cq, queues.msg_srq, MESSAGES_OUT)
            self.qps = [
                self._make(queues.cq, queues.imm_srq, depths.rows + depths.reads)
                for _ in range(settings.qps_per_peer if rows else 0)
            ]
            for qp in self._made:
                self._modify(
                    qp,
                    "RESET->INIT",
                    pkey_index=device.pkey_index,
                    port_num=settings.port,
                    qp_access_flags=_ACCESS,
                )
            undo.pop_all()
        self.qp = self.qps[0] if rows else 0
        self.ref = ref(self.qp)
        self.ids: tuple[QpId, ...] = tuple(
            (qp_number(qp), rng.getrandbits(24)) for qp in self._made
        )
        self.ece = self._query_ece()

    def _make(self, cq: int, srq: int, depth: int) -> int:
        qp = self._device.make_rc(cq, srq, depth + SPARE_WRS)
        self._made.append(qp)
        return qp

    def _modify(self, qp: int, what: str, **fields: object) -> None:
        state, mask = _STEPS[what]
        attr = C.ibv_qp_attr(qp_state=state, **fields)
        number = qp_number(qp)
        self._device.lib.ok("ibv_modify_qp", qp, ctypes.byref(attr), mask, what=what, qpn=number)

    def _query_ece(self) -> Ece:
        """Ask the device about the queue pairs, which are all alike."""
        found = C.ibv_ece()
        if not self._device.settings.ece or self._device.lib.ask(
            "ibv_query_ece", self.msg_qp, ctypes.byref(found)
        ):
            return NO_ECE  # this provider has none
        return int(found.vendor_id), int(found.options), int(found.comp_mask)

    def _accept_ece(self, offered: Ece) -> None:
        """Use of the peer's what ours can do, if they are of one vendor."""
        vendor, options, _ = self.ece
        if options and offered[1] and vendor == offered[0]:
            for qp in self._made:
                ece = C.ibv_ece(*offered)
                # A refusal leaves the queue pair as the standard has it, at both ends: what is
                # answered is what is in use.
                self._device.lib.ask("ibv_set_ece", qp, ctypes.byref(ece))

    def pick(self) -> int:
        """The queue pair for the next row."""
        self._turn += 1
        return self.qps[self._turn % len(self.qps)]

    def to_rtr(self, hello: Hello) -> None:
        """Let all receive from the peer's queue pairs."""
        device = self._device
        route = device.route(hello.sender.gid, hello.sender.lid)
        self._accept_ece(hello.ece)
        self.reads = min(device.reads_asked, hello.reads)
        del self.qps[len(hello.qps) - 1 :]  # the peer has fewer for writes, or none: use as many
        for qp, (number, psn) in zip(self._made, hello.qps, strict=False):
            self._modify(
                qp,
                "INIT->RTR",
                ah_attr=route,
                path_mtu=min(device.port.active_mtu, hello.mtu),
                dest_qp_num=number,
                rq_psn=psn,
                max_dest_rd_atomic=device.reads_served,
                min_rnr_timer=device.settings.min_rnr_timer,
            )
        self.ece = self._query_ece()

    def to_rts(self) -> None:
        """Let all send. Idempotent."""
        if self._sending:
            return
        settings = self._device.settings
        for qp, (_, psn) in zip(self._made, self.ids, strict=True):
            if qp == self.msg_qp or qp in self.qps:
                self._modify(
                    qp,
                    "RTR->RTS",
                    timeout=settings.timeout,
                    retry_cnt=settings.retry_cnt,
                    rnr_retry=settings.rnr_retry,
                    sq_psn=psn,
                    max_rd_atomic=self.reads,
                )
        self._sending = True

    def fail(self, now_s: float) -> None:
        """Stop: everything that is out comes back flushed, and then the markers."""
        self.lost = True
        self.deadline_s = now_s + self._device.settings.drain_s
        self._last_s = min(now_s + _LAST_S, self.deadline_s)
        self._receiving = set(self._made)
        for qp in self._made:
            try:
                self._modify(qp, "->ERR")
            except FabricError:
                self._stuck = True  # the deadline ends it
        if self._sending:
            self._unmarked = [self.msg_qp, *self.qps]
            self._markers = len(self._unmarked)

    def mark(self, post: Callable[[int, int], bool], room: int) -> int:
        """Post up to `room` of the markers that are still to be posted; return how many.

        A full queue pair takes its own later.
        """
        wr_id, before = tag(Tag.MARKER, self.number), len(self._unmarked)
        self._unmarked = [
            qp for k, qp in enumerate(self._unmarked) if k >= room or not post(qp, wr_id)
        ]
        return before - len(self._unmarked)

    @property
    def markers_out(self) -> int:
        """Markers that were posted and have not come back."""
        return self._markers - len(self._unmarked)

    def take_marker(self) -> None:
        """A marker has come back."""
        self._markers -= 1

    def take_last(self, qp: int) -> None:
        """A queue pair has used its last receive."""
        self._receiving.discard(qp)

    def holds(self, qp: int) -> bool:
        """Whether a queue pair is one of these."""
        return qp in self._made

    def is_drained(self, now_s: float) -> bool:
        """Whether every completion is in the queue, or was read."""
        through = not self._receiving or now_s >= self._last_s
        return self._markers == 0 and through and not self._stuck

    @property
    def next_s(self) -> float:
        """The time when a failed connection may have drained though nothing came."""
        return self.deadline_s if self._markers or self._stuck else self._last_s

    def destroy(self) -> None:
        """Give the queue pairs back. No completion of theirs comes after that. Idempotent."""
        self.lost = True
        while self._made:
            self._device.free("ibv_destroy_qp", self._made.pop())


class Sources:
    """The queue pairs of one NIC, by number.

    Attributes:
        of: the PeerId at the far end of each.
    """

    def __init__(self) -> None:
        self.of: dict[int, int] = {}
        self._columns: tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]] | None = None

    def add(self, numbers: Iterable[int], peer: int) -> None:
        """Take note of a peer's queue pairs; numbers are used again."""
        self.of.update(dict.fromkeys(numbers, peer))
        self._columns = None

    def remove(self, numbers: Iterable[int]) -> None:
        """Forget queue pairs whose completions were all read."""
        for number in numbers:
            del self.of[number]
        self._columns = None

    def of_many(self, numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """The same for a column."""
        if self._columns is None:
            known = sorted(self.of)
            self._columns = (
                np.array(known, np.uint32),
                np.array([self.of[number] for number in known], np.uint64),
            )
        known_numbers, peers = self._columns
        return peers[known_numbers.searchsorted(numbers)]


def create_ud(device: Device, cq: int, qkey: int, depth: int) -> int:
    """Make a queue pair for datagrams, ready to send and receive."""
    lib = device.lib
    attr = C.ibv_qp_init_attr(send_cq=cq, recv_cq=cq, qp_type=ENUMS["IBV_QPT_UD"])
    attr.cap.max_send_wr = attr.cap.max_recv_wr = depth
    attr.cap.max_send_sge = attr.cap.max_recv_sge = 1
    qp = lib.make("ibv_create_qp", device.pd, ctypes.byref(attr), what="UD", device=device.name)
    for what in ("UD RESET->INIT", "UD INIT->RTR", "UD RTR->RTS"):
        state, mask = _STEPS[what]
        step = C.ibv_qp_attr(
            qp_state=state, pkey_index=device.pkey_index, port_num=device.settings.port, qkey=qkey
        )
        lib.ok("ibv_modify_qp", qp, ctypes.byref(step), mask, what=what, device=device.name)
    return qp


def qp_number(qp: int) -> int:
    """A queue pair's number."""
    return int(C.ibv_qp.from_address(qp).qp_num)


class Draining:
    """The failed connections of one NIC.

    Args:
        post_marker: puts a last request on a queue pair, see `Conn.mark`.
        ready: where entries for poll() go.
        depth: completions that the queue holds.
        retire: what to do with a connection that has drained (True), or did not in time (False).

    Attributes:
        conns: by their own number.
        fences: (peer, ctx) of those that do not hold yet: FENCED is said once nothing of the peer
            is left. It has no connection for rows any more.
        blurred: numbers of peers whose rows have landed here or not, nobody knows.
    """

    def __init__(
        self,
        post_marker: Callable[[int, int], bool],
        ready: deque[Entry],
        depth: int,
        retire: Callable[[Conn, bool], object],
    ) -> None:
        self.conns: dict[int, Conn] = {}
        self.blurred: set[int] = set()
        self._post_marker = post_marker
        self._ready = ready
        self._depth = depth
        self._retire = retire
        self._rounds = 0  # how often the completion queue was read to its end
        self._left = depth
        self._due: dict[int, int] = {}  # the round in which a connection may go
        self.fences: list[tuple[int, int]] = []
        self._markers_left = MARKERS_MAX  # the completion queue has room for so many

    def add(self, conn: Conn, now_s: float) -> None:
        """Let a connection fail."""
        conn.fail(now_s)
        self.conns[conn.number] = conn
        self._mark(conn)

    def _mark(self, conn: Conn) -> None:
        if self._markers_left:
            self._markers_left -= conn.mark(self._post_marker, self._markers_left)

    def take_marker(self, number: int) -> None:
        """A failed queue pair has returned all that was posted on it."""
        conn = self.conns.get(number)
        if conn is not None:
            conn.take_marker()
            self._markers_left += 1

    def take_last(self, qp: int) -> None:
        """The device says that a failed queue pair has used its last receive."""
        for conn in self.conns.values():
            conn.take_last(qp)

    def progress(self, now_s: float, n: int, *, whole: bool) -> None:
        """Take note of a read of `n` completions, `whole` if that was all there were."""
        self._left -= n
        if whole or self._left <= 0:
            self._rounds += 1
            self._left = self._depth
        for conn in list(self.conns.values()):
            self._mark(conn)
            drained = conn.is_drained(now_s)
            if not drained and now_s < conn.deadline_s:
                continue
            # This round may have begun before the last completion came: read another.
            if self._rounds >= self._due.setdefault(conn.number, self._rounds + 2):
                del self.conns[conn.number], self._due[conn.number]
                self._markers_left += conn.markers_out
                self._retire(conn, drained)
        if self.fences:
            self._say_fenced()

    def _say_fenced(self) -> None:
        open_ = {conn.peer for conn in self.conns.values()}
        for peer, ctx in self.fences[:]:
            if peer not in open_:
                self.fences.remove((peer, ctx))
                status = int(Status.PROVIDER if peer in self.blurred else Status.OK)
                self._ready.append((int(Kind.FENCED), status, 1, 0, 0, ctx, 0))

    def next_s(self, now_s: float) -> list[float]:
        """The times when progress() has something to do though nothing came."""
        if self._due or (self.fences and not self.conns):
            return [now_s]
        return [conn.next_s for conn in self.conns.values()]
