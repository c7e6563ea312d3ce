"""An SRD queue pair and its completion queue, made and brought to where they send.

Nothing here is kept: `Nic` owns what comes back.
"""

from __future__ import annotations

import ctypes
from typing import Final, NamedTuple

from tep.backends.ffi.efa import CqInitAttr, CqInitAttrEx, DeviceAttrDv, Efa, QpInitAttrDv
from tep.backends.ffi.ibverbs_structs import ENUMS, PortAttr, QpAttr, QpInitAttrEx

__all__ = ["CAP_READ", "Sizes", "link_bps", "make_pair", "make_queue"]

CAP_READ: Final = 1 << 0  # efadv.h, EFADV_DEVICE_ATTR_CAPS_*
_CAP_RNR_RETRY: Final = 1 << 1
_QPT_DRIVER: Final = 0xFF  # verbs.h, IBV_QPT_DRIVER
_SRD: Final = 0  # efadv.h, EFADV_QP_DRIVER_TYPE_SRD
_RNR_FOR_EVER: Final = 7
_QP_EX_WITH_RDMA_READ: Final = 1 << 4  # verbs.h


class Sizes(NamedTuple):
    """Of the queues: requests out, receives posted, completions kept; and how many requests at the
    least are of any use.
    """

    send: int
    receive: int
    completions: int
    send_min: int = 1


def link_bps(lib: Efa, context: int) -> int:
    """A device's nominal rate, bits a second; 0 where its codes are unknown."""
    port = PortAttr()
    lib.ok("ibv_query_port", context, 1, ctypes.byref(port))
    # ibv_query_port(3) documents the codes: lanes, and Gbit/s of each.
    lanes = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}.get(port.active_width, 0)
    speeds = {1: 2.5, 2: 5, 4: 10, 8: 10, 16: 14, 32: 25, 64: 50, 128: 100}
    return int(lanes * speeds.get(port.active_speed, 0) * 1e9)


def make_queue(lib: Efa, context: int, channel: int, entries: int) -> int:
    """Make a completion queue that wakes by a channel; a pointer to its extended form."""
    # Byte length and immediate: IBV_WC_EX_WITH_BYTE_LEN, IBV_WC_EX_WITH_IMM of verbs.h.
    attr = CqInitAttrEx(cqe=entries, channel=channel, wc_flags=1 << 0 | 1 << 1)
    direct = CqInitAttr()
    pointers = (ctypes.byref(attr), ctypes.byref(direct))
    return lib.make("efadv_create_cq", context, *pointers, ctypes.sizeof(direct), entries=entries)


def make_pair(
    lib: Efa, context: int, pd: int, cq: int, sizes: Sizes, has: DeviceAttrDv, qkey: int
) -> int:
    """Make a queue pair, ready to send and to receive; a pointer to its extended form."""
    attr = QpInitAttrEx(send_cq=cq, recv_cq=cq, pd=pd, qp_type=_QPT_DRIVER)
    attr.cap.max_send_wr, attr.cap.max_recv_wr = sizes.send, sizes.receive
    attr.cap.max_send_sge = attr.cap.max_recv_sge = 1
    attr.comp_mask = ENUMS["IBV_QP_INIT_ATTR_PD"] | ENUMS["IBV_QP_INIT_ATTR_SEND_OPS_FLAGS"]
    ops = ("IBV_QP_EX_WITH_RDMA_WRITE", "IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM")
    attr.send_ops_flags = sum(ENUMS[op] for op in (*ops, "IBV_QP_EX_WITH_SEND"))
    if has.device_caps & CAP_READ:
        attr.send_ops_flags |= _QP_EX_WITH_RDMA_READ
    # No unsolicited receives (EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV): writes that need none are
    # acknowledged even when the completion queue is full, and their immediates lost. Where each
    # takes a receive, a target that is slow says "not ready", and the device tries again.
    direct = QpInitAttrDv(driver_qp_type=_SRD)
    pointers = (ctypes.byref(attr), ctypes.byref(direct))
    pair = lib.make("efadv_create_qp_ex", context, *pointers, ctypes.sizeof(direct), sizes=sizes)
    try:
        _bring_up(lib, pair, qkey, retries=bool(has.device_caps & _CAP_RNR_RETRY))
        return lib.make("ibv_qp_to_qp_ex", pair)
    except BaseException:
        lib.ask("ibv_destroy_qp", pair)
        raise


def _bring_up(lib: Efa, pair: int, qkey: int, *, retries: bool) -> None:
    steps = (
        ("IBV_QPS_INIT", ("PKEY_INDEX", "PORT", "QKEY")),
        ("IBV_QPS_RTR", ()),
        ("IBV_QPS_RTS", ("SQ_PSN", "RNR_RETRY") if retries else ("SQ_PSN",)),
    )
    for state, fields in steps:
        to = QpAttr(qp_state=ENUMS[state], port_num=1, qkey=qkey, rnr_retry=_RNR_FOR_EVER)
        mask = ENUMS["IBV_QP_STATE"] | sum(ENUMS[f"IBV_QP_{name}"] for name in fields)
        lib.ok("ibv_modify_qp", pair, ctypes.byref(to), mask, what=state)
