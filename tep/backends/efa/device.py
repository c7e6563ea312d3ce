"""The objects of one EFA NIC: context, protection domain, queues, address handles, registrations.

Each call that may fail passes through the library's checker, with the NIC's name. Nothing here
knows a row, a peer's state or a message.

Rule 1: close order is queue pair, registrations, address handles, completion queue, channel,
domain, context. Rule 2: after a fork the child calls nothing of what it inherited.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import platform
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple

from tep.backends.common import keep_at_fork, orphan_at_fork
from tep.backends.ffi.efa import SESSION_OFFSETS, Dv, Efa
from tep.backends.ffi.ibverbs import ENUMS, C, Context, Events, Struct, link_bps, qp_number
from tep.base.errors import BackendUnavailable, FabricError
from tep.memory.source import DmabufExport, Memory

__all__ = [
    "Endpoint", "Handle", "Nic", "Place", "Sizes", "efa_devices",
]  # fmt: skip

# efadv.h, EFADV_DEVICE_ATTR_CAPS_*
_CAP_READ, _CAP_RNR_RETRY, _CAP_WRITE = 1 << 0, 1 << 1, 1 << 3
_QPT_DRIVER: Final = 0xFF  # verbs.h, IBV_QPT_DRIVER
_SRD: Final = 0  # efadv.h, EFADV_QP_DRIVER_TYPE_SRD
_RNR_FOR_EVER: Final = 7


class Sizes(NamedTuple):
    """The entries of the queues: requests out, receives posted, completions kept."""

    send: int
    receive: int
    completions: int


_FATAL: Final = {
    ENUMS["IBV_EVENT_CQ_ERR"]: "its completion queue overran or failed",
    ENUMS["IBV_EVENT_QP_FATAL"]: "its queue pair failed",
    ENUMS["IBV_EVENT_DEVICE_FATAL"]: "the device is gone",
}


class Place(NamedTuple):
    """A peer's queue pair, and our address handle to its NIC: a pointer, and as entries name it."""

    ah: int
    ahn: int
    qpn: int
    qkey: int


class Handle:
    """One registration."""

    __slots__ = ("__weakref__", "_mr", "_nic", "lkey", "rkey")

    def __init__(self, nic: Nic, mr: Struct) -> None:
        self._nic = nic
        self._mr = mr
        self.lkey, self.rkey = int(mr.lkey), int(mr.rkey)

    def close(self) -> None:
        """Deregister once; what a lost NIC says to it does not matter."""
        mr, self._mr = self._mr, None
        if mr is not None:
            self._nic.dereg_mr(mr)

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        self._mr = None


def efa_devices(lib: Efa) -> list[str]:
    """Names of the EFA devices here."""
    found = []
    for name, _ in lib.devices():
        with contextlib.suppress(FabricError, LookupError):
            context, _ = lib.open_device(name)
            if lib.is_efa(context) is not None:
                found.append(name)
            lib.ok("ibv_close_device", context)
    return found


class Endpoint:
    """The queue pair of a NIC under the name that the shared parts know it by."""

    writemsg = readmsg = None  # rows go by the NIC's way

    def __init__(self, nic: Nic) -> None:
        self._nic = nic
        self.address = self.ready = nic.qp

    def name(self) -> bytes:
        return self._nic.raw()

    def close(self) -> None:
        self.address = 0
        self._nic.close_pair()


class Nic(Context):
    """One NIC with one SRD queue pair, ready to post.

    Attributes:
        efa: what the device can do, its efadv_device_attr.
        sizes: of its queues: what was wished, or the less that the device has.
        closed: whether it was closed, or belongs to the parent of this process.
        failure: why it is lost; "" = it lives.
        armed: a wake-up has been asked for, and nothing was found since.
        ask_wake: asks for one; set by who reads the completion queue.
        wait_fds: of these one becomes readable, once armed, when there may be news.
    """

    ask_wake: Callable[[], None]

    def __init__(self, lib: Efa, name: str, sizes: Sizes) -> None:
        super().__init__(lib, name)
        self.closed = False
        self.failure = ""
        self.qp = self.cq = 0
        self._news: Events | None = None
        self._regions: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._handles: dict[bytes, list[int]] = {}  # GID: handle, its number, peers there
        self._places: dict[int, tuple[bytes, Place]] = {}  # by a peer's number
        self._numbers = itertools.count(1)
        self.wait_fds: tuple[int, ...] = ()
        self.events = 0
        self.armed = False
        orphan_at_fork(self)
        try:
            self._open(lib, sizes)
        except BaseException:
            self.close()
            raise

    def _open(self, lib: Efa, sizes: Sizes) -> None:
        self.link_bps = link_bps(self.sysfs, 1)
        attr = lib.is_efa(self.pointer)
        if attr is None:
            raise BackendUnavailable(f"{self.name} is not an EFA device", ())
        self.efa: Struct = attr
        if not attr.device_caps & _CAP_WRITE:
            raise BackendUnavailable(
                f"{self.name}: this EFA device has no RDMA write (p4d has none; p5, p5en, p6 and "
                "trn2 do)",
                (),
            )
        completions = min(sizes.completions, self.limits.max_cqe)
        half = completions // 2  # both queues' requests have their places in it
        self.sizes = Sizes(
            min(sizes.send, attr.max_sq_wr, half),
            min(sizes.receive, attr.max_rq_wr, half),
            completions,
        )
        self.gid = lib.query_gid(self.pointer)
        self.qkey = int.from_bytes(os.urandom(4), "little") & 0x7FFFFFFF
        self._news = Events(lib, self.pointer)
        self.wait_fds = self._news.fds
        self.cq = self._make_queue(self._news.channel)
        self.qp = self._make_pair()
        self._bring_up()
        self.qpn = qp_number(self.qp)

    def _make_queue(self, channel: int) -> int:
        """Make the completion queue, which wakes by a channel; a pointer to its extended form."""
        # Byte length and immediate: IBV_WC_EX_WITH_BYTE_LEN, IBV_WC_EX_WITH_IMM of verbs.h.
        attr = Dv.ibv_cq_init_attr_ex(
            cqe=self.sizes.completions, channel=channel, wc_flags=1 << 0 | 1 << 1
        )
        return self._make_direct("efadv_create_cq", attr, Dv.efadv_cq_init_attr())

    def _make_pair(self) -> int:
        attr = C.ibv_qp_init_attr_ex(
            send_cq=self.cq, recv_cq=self.cq, pd=self.pd, qp_type=_QPT_DRIVER
        )
        attr.cap.max_send_wr, attr.cap.max_recv_wr = self.sizes.send, self.sizes.receive
        attr.cap.max_send_sge = attr.cap.max_recv_sge = 1
        attr.comp_mask = ENUMS["IBV_QP_INIT_ATTR_PD"] | ENUMS["IBV_QP_INIT_ATTR_SEND_OPS_FLAGS"]
        ops = ["RDMA_WRITE", "RDMA_WRITE_WITH_IMM", "SEND"] + self.can_read * ["RDMA_READ"]
        attr.send_ops_flags = sum(ENUMS[f"IBV_QP_EX_WITH_{op}"] for op in ops)
        # No unsolicited receives (EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV): writes that need none are
        # acknowledged even when the completion queue is full, and their immediates lost. Where each
        # takes a receive, a target that is slow says "not ready", and the device tries again.
        direct = Dv.efadv_qp_init_attr(driver_qp_type=_SRD)
        return self._make_direct("efadv_create_qp_ex", attr, direct)

    def _make_direct(self, name: str, attr: Struct, direct: Struct) -> int:
        pointers = (ctypes.byref(attr), ctypes.byref(direct), ctypes.sizeof(direct))
        return self.make(name, self.pointer, *pointers, sizes=self.sizes)

    def _bring_up(self) -> None:
        modify, qp = self.lib.modify_qp, self.qp
        can_retry = self.efa.device_caps & _CAP_RNR_RETRY
        modify(qp, "INIT", pkey_index=0, port_num=1, qkey=self.qkey)
        modify(qp, "RTR")
        modify(qp, "RTS", sq_psn=0, **({"rnr_retry": _RNR_FOR_EVER} if can_retry else {}))

    @property
    def can_read(self) -> bool:
        return bool(self.efa.device_caps & _CAP_READ)

    def session_calls(self) -> tuple[Callable[[int], object], Callable[[int], object]]:
        """ibv_wr_start and ibv_wr_abort, which go through the queue pair's table of calls."""
        pair = self.lib.make("ibv_qp_to_qp_ex", self.qp)
        of = SESSION_OFFSETS[platform.machine()]
        start, abort = (ctypes.c_void_p.from_address(pair + at).value or 0 for at in of)
        return _SESSION(start), _SESSION(abort)

    strerror = staticmethod(os.strerror)

    # --- what `FabricDomain` asks of a NIC

    def open_endpoint(self, _options: tuple[object, ...] = ()) -> Endpoint:
        """The queue pair, as what rows and frames go through; there is one."""
        return Endpoint(self)

    def read_event(self) -> str:
        """Look whether the device has gone; a completion's wake-up is kept for the next trywait."""
        if self.take_events():
            self.armed = False
        return ""

    # --- where queues are mapped

    def work_queues(self) -> tuple[Struct, Struct]:
        send, receive = Dv.efadv_wq_attr(), Dv.efadv_wq_attr()
        pointers = (ctypes.byref(send), ctypes.byref(receive), ctypes.sizeof(send))
        self.ok("efadv_query_qp_wqs", self.qp, *pointers)
        return send, receive

    def completion_queue(self) -> Struct:
        attr = Dv.efadv_cq_attr()
        self.ok("efadv_query_cq", self.cq, ctypes.byref(attr), ctypes.sizeof(attr))
        return attr

    # --- peers

    def raw(self) -> bytes:
        """This queue pair's address: GID, number, 2 bytes, Q_Key, 8 bytes."""
        number = self.qpn.to_bytes(4, "little") + self.qkey.to_bytes(4, "little")
        return self.gid + number + bytes(8)

    def insert(self, raw: bytes) -> int:
        """Make a peer known, and return its number; its NIC gets an address handle if it has none.

        The device takes no write from a NIC for which it has no handle. FabricError: none is left.
        """
        gid = raw[:16]
        if gid not in self._handles:
            self._handles[gid] = [*self._make_handle(gid), 0]
        ah, ahn, _ = self._handles[gid]
        self._handles[gid][2] += 1
        qpn, qkey = int.from_bytes(raw[16:18], "little"), int.from_bytes(raw[20:24], "little")
        number = next(self._numbers)
        self._places[number] = gid, Place(ah, ahn, qpn, qkey)
        return number

    def place(self, number: int) -> Place:
        return self._places[number][1]

    def remove(self, number: int) -> None:
        """Forget a peer; the last one at a NIC takes the handle along."""
        gid, _ = self._places.pop(number)
        handle = self._handles[gid]
        handle[2] -= 1
        if not handle[2]:
            del self._handles[gid]
            self.free("ibv_destroy_ah", handle[0])

    def _make_handle(self, gid: bytes) -> tuple[int, int]:
        attr = C.ibv_ah_attr(is_global=1, port_num=1)
        attr.grh.dgid.raw[:] = gid
        ah = self.make("ibv_create_ah", self.pd, ctypes.byref(attr))
        found = Dv.efadv_ah_attr()
        self.ok("efadv_query_ah", ah, ctypes.byref(found), ctypes.sizeof(found))
        return ah, int(found.ahn)

    # --- memory

    def hold(self, memory: Memory, access: int, export: DmabufExport | None = None) -> Handle:
        """Register memory; close() ends what is left."""
        handle = Handle(self, self.register(memory, access, export))
        self._regions.add(handle)
        return handle

    # --- events

    def trywait(self) -> bool:
        """Whether it is safe to sleep on wait_fds; False = poll first, then ask again.

        What came before a wake-up was asked for is not told: one more look has to find nothing.
        """
        if self.take_events():
            self.armed = False
        if self.armed or self.failure:
            return not self.failure
        self.armed = True
        self.ask_wake()
        return False

    def take_events(self) -> bool:
        """Take what woke us off both descriptors; True if a completion did."""
        assert self._news is not None
        woken = self._news.take_completions()
        self.events += woken
        for kind, _ in self._news.take_device():
            if kind in _FATAL:
                self.lose(f"event {kind}: {_FATAL[kind]}")
        return woken > 0

    # --- ends

    def lose(self, why: str) -> None:
        self.failure = self.failure or why
        self.dead = True

    def close_pair(self) -> None:
        """Destroy the queue pair: nothing more is carried out, or taken in, through it."""
        qp, self.qp = self.qp, 0
        if qp:
            self.free("ibv_destroy_qp", qp)

    def close(self) -> None:
        """Close everything, in order. Idempotent."""
        keep_at_fork(self)
        if self.closed:
            return
        self.closed = True
        self.close_pair()
        for region in list(self._regions):
            region.close()
        for ah, _, _ in self._handles.values():
            self.free("ibv_destroy_ah", ah)
        if self.cq:
            if self.events:
                self.lib.do("ibv_ack_cq_events", self.cq, self.events)
            self.free("ibv_destroy_cq", self.cq)
        if self._news is not None:
            self.free("ibv_destroy_comp_channel", self._news.channel)
        super().close()

    def orphan(self) -> None:
        """In a forked child: forget everything, call nothing."""
        self.closed = True
        self.qp = self.cq = 0
        for region in self._regions:
            region.forget()


_SESSION: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
