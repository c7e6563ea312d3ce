"""Queue pairs: made, connected, failed, drained, destroyed.

Rule 1: only this file changes a queue pair's state. Rule 2: a failed queue pair is destroyed only
after everything it held has come back. Of what was posted on it, its last request tells, the
marker; of what it received, the device does.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from tep.backends.ffi.ibverbs import ref
from tep.backends.ffi.ibverbs_structs import ENUMS, Qp, QpAttr, QpInitAttr
from tep.backends.ffi.ibverbs_structs import Ece as EceMirror
from tep.backends.verbs.depths import SPARE_WRS
from tep.backends.verbs.handshake import NO_ECE, Ece, Hello, QpId
from tep.backends.verbs.tags import MARKER, tag
from tep.base.errors import FabricError

if TYPE_CHECKING:
    from tep.backends.verbs.device import Device

__all__ = ["Conn", "Queues", "Run", "create_ud", "qp_number"]

_LAST_S: Final = 0.1
"""When a failed queue pair receives no more although the device has not said so, seconds. A device
has to say it (InfiniBand specification 1.4, section 11.6.3.4, "last WQE reached"; quoted), but
Soft-RoCE of Linux 6.1 does not (measured); what that was taking in as it failed is through within
microseconds (guessed)."""

_UD: Final = ENUMS["IBV_QPT_UD"]
_INIT, _RTR = ENUMS["IBV_QPS_INIT"], ENUMS["IBV_QPS_RTR"]
_RTS, _ERR = ENUMS["IBV_QPS_RTS"], ENUMS["IBV_QPS_ERR"]


def _mask(names: str) -> int:
    return sum(ENUMS[f"IBV_QP_{name}"] for name in names.split())


_STATE: Final = _mask("STATE")
_INIT_RC: Final = _mask("STATE PKEY_INDEX PORT ACCESS_FLAGS")
_INIT_UD: Final = _mask("STATE PKEY_INDEX PORT QKEY")
_RTR_RC: Final = _mask("STATE AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER")
_RTS_RC: Final = _mask("STATE TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC")
_RTS_UD: Final = _mask("STATE SQ_PSN")
_ACCESS: Final = (
    ENUMS["IBV_ACCESS_LOCAL_WRITE"]
    | ENUMS["IBV_ACCESS_REMOTE_WRITE"]
    | ENUMS["IBV_ACCESS_REMOTE_READ"]
)
"""What queue pairs allow; a region allows what it was registered for."""


class Queues(NamedTuple):
    """What the queue pairs of one NIC share.

    Attributes:
        cq: completion queue of everything; it holds `depth` of them.
        imm_srq: shared receive queue for immediates; its receives have no buffers.
        msg_srq: shared receive queue for messages.
        row_depth, msg_depth: requests a queue pair for rows, or for messages, can hold.
    """

    cq: int
    depth: int
    imm_srq: int
    msg_srq: int
    row_depth: int
    msg_depth: int


class Run:
    """Rows of one batch, posted as one chain on one queue pair; they come back first to last."""

    __slots__ = ("back", "ctx", "kind", "n", "start")

    def __init__(self, kind: int, ctx: int, start: int, n: int) -> None:
        self.kind = kind
        self.ctx = ctx
        self.start = start
        self.n = n
        self.back = 0


class Conn:
    """The queue pairs of one attempt with one peer: one for messages, one or more for rows.

    Two kinds, since both messages and immediates use up receives in the order in which these were
    posted: on one queue pair an immediate would eat a message's buffer.

    Args:
        peer: PeerId of who it is with.
        number: of this connection on its NIC; markers carry it.
        rows: False = for messages only.
        rng: draws packet sequence numbers, and the queue pair of each row if rows are sprayed.

    Attributes:
        reads: reads on the wire at a time, on each of its queue pairs; 0 = the peer answers none.
        qp, qps: those for rows; `qp` is the first, and `ref` is it, ready for a call.
        msg_qp: the one for messages.
        ece: what its queue pairs can do beyond the standard; once they receive, what is in use.
        runs: chains on `qp` that have not come back, oldest first.
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
        self.deadline_s = 0.0
        self._device = device
        self._rng = rng
        self._turn = 0
        self._unmarked: list[int] = []
        self._markers = 0
        self._sending = False
        self._stuck = False
        self._last_s = 0.0
        self._receiving: set[int] = set()
        self._made: list[int] = []
        settings = device.settings
        with contextlib.ExitStack() as undo:
            undo.callback(self.destroy)
            self.msg_qp = self._make(queues.cq, queues.msg_srq, queues.msg_depth)
            self.qps = [
                self._make(queues.cq, queues.imm_srq, queues.row_depth)
                for _ in range(settings.qps_per_peer if rows else 0)
            ]
            for qp in self._made:
                self._modify(
                    qp,
                    _INIT_RC,
                    "RESET->INIT",
                    qp_state=_INIT,
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
        self._sprayed = settings.spray_seed is not None

    def _make(self, cq: int, srq: int, depth: int) -> int:
        qp = self._device.make_rc(cq, srq, depth + SPARE_WRS)
        self._made.append(qp)
        return qp

    def _modify(self, qp: int, mask: int, what: str, **fields: object) -> None:
        attr = QpAttr(**fields)
        self._device.lib.ok(
            "ibv_modify_qp", qp, ctypes.byref(attr), mask, what=what, qpn=qp_number(qp)
        )

    def _query_ece(self) -> Ece:
        """What the device says of the queue pairs, which are all alike."""
        found = EceMirror()
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
                ece = EceMirror(*offered)
                # A refusal leaves the queue pair as the standard has it, at both ends: what is
                # answered is what is in use.
                self._device.lib.ask("ibv_set_ece", qp, ctypes.byref(ece))

    def pick(self) -> int:
        """The queue pair for the next row."""
        qps = self.qps
        if len(qps) == 1:
            return self.qp
        if self._sprayed:
            return self._rng.choice(qps)
        self._turn += 1
        return qps[self._turn % len(qps)]

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
                _RTR_RC,
                "INIT->RTR",
                qp_state=_RTR,
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
                    _RTS_RC,
                    "RTR->RTS",
                    qp_state=_RTS,
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
                self._modify(qp, _STATE, "->ERR", qp_state=_ERR)
            except FabricError:
                self._stuck = True  # the deadline ends it
        if self._sending:
            self._unmarked = [self.msg_qp, *self.qps]
            self._markers = len(self._unmarked)

    def mark(self, post: Callable[[int, int], bool], room: int) -> int:
        """Post up to `room` of the markers that are still to be posted; return how many.

        A full queue pair takes its own later.
        """
        wr_id, before = tag(MARKER, self.number), len(self._unmarked)
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
        """When a failed connection may have drained though nothing came."""
        return self.deadline_s if self._markers or self._stuck else self._last_s

    def destroy(self) -> None:
        """Give the queue pairs back. No completion of theirs comes after that. Idempotent."""
        self.lost = True
        while self._made:
            self._device.free("ibv_destroy_qp", self._made.pop())


def create_ud(device: Device, cq: int, qkey: int, depth: int) -> int:
    """Make a queue pair for datagrams, ready to send and receive."""
    lib = device.lib
    attr = QpInitAttr(send_cq=cq, recv_cq=cq, qp_type=_UD)
    attr.cap.max_send_wr = attr.cap.max_recv_wr = depth
    attr.cap.max_send_sge = attr.cap.max_recv_sge = 1
    qp = lib.make("ibv_create_qp", device.pd, ctypes.byref(attr), what="UD", device=device.name)
    steps = (
        (
            "UD RESET->INIT",
            _INIT_UD,
            QpAttr(
                qp_state=_INIT,
                pkey_index=device.pkey_index,
                port_num=device.settings.port,
                qkey=qkey,
            ),
        ),
        ("UD INIT->RTR", _STATE, QpAttr(qp_state=_RTR)),
        ("UD RTR->RTS", _RTS_UD, QpAttr(qp_state=_RTS)),
    )
    for what, mask, step in steps:
        lib.ok("ibv_modify_qp", qp, ctypes.byref(step), mask, what=what, device=device.name)
    return qp


def qp_number(qp: int) -> int:
    """A queue pair's number."""
    return int(Qp.from_address(qp).qp_num)
