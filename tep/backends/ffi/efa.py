"""libibverbs and libefa by ctypes, as an EFA device needs them: calls, and the structs they take.

Structs of libibverbs are those of <infiniband/verbs.h> of rdma-core 44.0, libefa's those of
providers/efa/efadv.h of rdma-core 64. An older libefa takes the shorter ones: it goes by the length
that it is given. tests/abi compares all of them with the compiler. Calls that C makes by inline
functions go through the tables in QpEx and CqEx. Nothing here decides anything.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from functools import cache
from typing import Final

from tep.backends.ffi.ibverbs import OPTIONAL, PROTOTYPES, C, Library, fail
from tep.backends.ffi.load import env_step, find, prototypes, system_step
from tep.base.errors import BackendUnavailable

__all__ = [
    "CALLS", "EFA_STRUCTS", "VERBS_STRUCTS", "AhAttrDv", "CqAttr", "CqEx", "CqInitAttr",
    "CqInitAttrEx", "DeviceAttrDv", "Efa", "QpEx", "QpInitAttrDv", "WqAttr", "load",
]  # fmt: skip

_U8, _U16, _U32, _U64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64
_INT, _PTR = ctypes.c_int, ctypes.c_void_p

_MUTEX_WORDS: Final = {"x86_64": 5, "aarch64": 6}.get(platform.machine(), 5)
_LOCKS = (("mutex", _U64 * _MUTEX_WORDS), ("cond", _U64 * 6))  # glibc's pthread_mutex_t, _cond_t


def _fields(text: str) -> tuple[tuple[str, type], ...]:
    """Members from `name` (a pointer) and `name:type` words, in C's order."""
    kinds = {"p": _PTR, "u8": _U8, "u16": _U16, "u32": _U32, "u64": _U64, "int": _INT}
    found = []
    for word in text.split():
        name, _, kind = word.partition(":")
        kind, _, count = kind.partition("*")
        one = kinds[kind or "p"]
        found.append((name, one * int(count) if count else one))
    return tuple(found)


class QpEx(ctypes.Structure):
    """struct ibv_qp_ex: a queue pair with its table of calls."""

    _fields_ = (
        *C.ibv_qp._fields_,
        *_LOCKS,
        *_fields(
            "events_completed:u32 comp_mask:u64 wr_id:u64 wr_flags:u32 wr_atomic_cmp_swp "
            "wr_atomic_fetch_add wr_bind_mw wr_local_inv wr_rdma_read wr_rdma_write "
            "wr_rdma_write_imm wr_send wr_send_imm wr_send_inv wr_send_tso wr_set_ud_addr "
            "wr_set_xrc_srqn wr_set_inline_data wr_set_inline_data_list wr_set_sge "
            "wr_set_sge_list wr_start wr_complete wr_abort"
        ),
    )


class CqEx(ctypes.Structure):
    """struct ibv_cq_ex: a completion queue with its table of calls, as far as EFA fills it."""

    _fields_ = (
        *_fields("context channel cq_context handle:u32 cqe:int"),
        *_LOCKS,
        *_fields(
            "comp_events_completed:u32 async_events_completed:u32 comp_mask:u32 status:int "
            "wr_id:u64 start_poll next_poll end_poll read_opcode read_vendor_err read_byte_len "
            "read_imm_data read_qp_num read_src_qp read_wc_flags read_slid"
        ),
    )


class CqInitAttrEx(ctypes.Structure):
    """struct ibv_cq_init_attr_ex, up to wc_flags and what pads it."""

    _fields_ = _fields(
        "cqe:u32 cq_context channel comp_vector:u32 wc_flags:u64 comp_mask:u32 flags:u32 "
        "parent_domain"
    )


class DeviceAttrDv(ctypes.Structure):
    """struct efadv_device_attr."""

    _fields_ = _fields(
        "comp_mask:u64 max_sq_wr:u32 max_rq_wr:u32 max_sq_sge:u16 max_rq_sge:u16 "
        "inline_buf_size:u16 inline_buf_size_ex:u16 device_caps:u32 max_rdma_size:u32"
    )


class AhAttrDv(ctypes.Structure):
    """struct efadv_ah_attr: the number that entries and completions name a handle by."""

    _fields_ = _fields("comp_mask:u64 ahn:u16 reserved:u8*6")


class QpInitAttrDv(ctypes.Structure):
    """struct efadv_qp_init_attr without wr_flags, which only the newest have."""

    _fields_ = _fields("comp_mask:u64 driver_qp_type:u32 flags:u16 sl:u8 reserved:u8")


class CqInitAttr(ctypes.Structure):
    """struct efadv_cq_init_attr as it was first: what came later would be zero here."""

    _fields_ = _fields("comp_mask:u64 wc_flags:u64")


class WqAttr(ctypes.Structure):
    """struct efadv_wq_attr: where a work queue is mapped."""

    _fields_ = _fields(
        "comp_mask:u64 buffer entry_size:u32 num_entries:u32 doorbell max_batch:u32 caps:u16 "
        "reserved:u8*2"
    )


class CqAttr(ctypes.Structure):
    """struct efadv_cq_attr: where a completion queue is mapped; doorbell 0: none."""

    _fields_ = _fields("comp_mask:u64 buffer entry_size:u32 num_entries:u32 doorbell")


VERBS_STRUCTS: Final[dict[str, type[ctypes.Structure]]] = {
    "ibv_qp_ex": QpEx,
    "ibv_cq_ex": CqEx,
    "ibv_cq_init_attr_ex": CqInitAttrEx,
}
EFA_STRUCTS: Final[dict[str, type[ctypes.Structure]]] = {
    "efadv_device_attr": DeviceAttrDv,
    "efadv_ah_attr": AhAttrDv,
    "efadv_qp_init_attr": QpInitAttrDv,
    "efadv_cq_init_attr": CqInitAttr,
    "efadv_wq_attr": WqAttr,
    "efadv_cq_attr": CqAttr,
}
"""Each mirror by the name of its C struct; tests/abi goes through all of them."""

CALLS: Final[dict[str, tuple[object, tuple[object, ...]]]] = {
    "wr_start": (None, (_PTR,)),
    "wr_complete": (_INT, (_PTR,)),
    "wr_abort": (None, (_PTR,)),
    "wr_rdma_read": (None, (_PTR, _U32, _U64)),
    "wr_rdma_write": (None, (_PTR, _U32, _U64)),
    "wr_rdma_write_imm": (None, (_PTR, _U32, _U64, _U32)),
    "wr_send": (None, (_PTR,)),
    "wr_set_ud_addr": (None, (_PTR, _PTR, _U32, _U32)),
    "wr_set_sge": (None, (_PTR, _U32, _U64, _U32)),
    "start_poll": (_INT, (_PTR, _PTR)),
    "next_poll": (_INT, (_PTR,)),
    "end_poll": (None, (_PTR,)),
    "read_opcode": (_INT, (_PTR,)),
    "read_vendor_err": (_U32, (_PTR,)),
    "read_byte_len": (_U32, (_PTR,)),
    "read_imm_data": (_U32, (_PTR,)),
}
"""Members of QpEx and CqEx that are called: (result, arguments)."""

_NEEDED: Final = str.split(
    "ibv_fork_init ibv_get_device_list ibv_free_device_list ibv_open_device ibv_close_device "
    "ibv_query_device ibv_query_port ibv_alloc_pd ibv_dealloc_pd ibv_reg_mr_iova2 ibv_dereg_mr "
    "ibv_create_comp_channel ibv_destroy_comp_channel ibv_destroy_cq ibv_get_cq_event "
    "ibv_ack_cq_events ibv_destroy_qp ibv_modify_qp ibv_create_ah ibv_destroy_ah "
    "ibv_get_async_event ibv_ack_async_event"
)

_MORE: Final = prototypes("""
int ibv_query_gid(struct ibv_context *context, uint8_t port_num, int index,
                  union ibv_gid *gid);
struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp);
""")

_DIRECT: Final = prototypes("""
int efadv_query_device(struct ibv_context *, struct efadv_device_attr *, uint32_t inlen);
int efadv_query_ah(struct ibv_ah *, struct efadv_ah_attr *, uint32_t inlen);
struct ibv_cq_ex *efadv_create_cq(struct ibv_context *, struct ibv_cq_init_attr_ex *,
                                  struct efadv_cq_init_attr *, uint32_t inlen);
struct ibv_qp *efadv_create_qp_ex(struct ibv_context *, struct ibv_qp_init_attr_ex *,
                                  struct efadv_qp_init_attr *, uint32_t inlen);
""")
_QUERIES: Final = prototypes("""
/* Version EFA_1.4 of libefa's symbols. */
int efadv_query_qp_wqs(struct ibv_qp *, struct efadv_wq_attr *sq_attr,
                       struct efadv_wq_attr *rq_attr, uint32_t inlen);
int efadv_query_cq(struct ibv_cq *, struct efadv_cq_attr *, uint32_t inlen);
""")


class Efa(Library):
    """Both libraries with the calls that EFA needs; `Library` says how they are made.

    Attributes:
        efa_path: libefa's.
        has_queries: whether it can say where queues are mapped.
    """

    def __init__(self, verbs_path: str, efa_path: str) -> None:
        self.path, self.efa_path = verbs_path, efa_path
        # Opened for errno's sake, which ctypes keeps for calls of such handles only. libefa is the
        # provider itself under another name, so there is one copy of it in the process.
        self._lib = ctypes.CDLL(verbs_path, use_errno=True)
        direct = ctypes.CDLL(efa_path, use_errno=True)
        for name in _NEEDED:
            _type(getattr(self._lib, name), *PROTOTYPES[name])
        for name, prototype in _MORE.items():
            _type(getattr(self._lib, name), *prototype)
        call = getattr(self._lib, "ibv_reg_dmabuf_mr", None)
        self.has_dmabuf = call is not None
        if call is not None:
            _type(call, *OPTIONAL["ibv_reg_dmabuf_mr"])
        self.has_queries = all(hasattr(direct, name) for name in _QUERIES)
        for name, prototype in (_DIRECT | (_QUERIES if self.has_queries else {})).items():
            call = getattr(direct, name)
            _type(call, *prototype)
            setattr(self._lib, name, call)  # where ok() and make() look
        self.fork_safe = self._fork_init()

    def status_str(self, status: int) -> str:
        """Completions are named by the device's own status here."""
        return f"status {status}"

    def query_gid(self, context: int) -> bytes:
        """The address of an EFA device: it has one port and one GID."""
        gid = ctypes.create_string_buffer(16)
        if self.ask("ibv_query_gid", context, 1, 0, gid):
            fail("ibv_query_gid", ctypes.get_errno() or errno.EIO)
        return gid.raw

    def is_efa(self, context: int) -> DeviceAttrDv | None:
        """Ask what the device can do; None: it is not an EFA device."""
        attr = DeviceAttrDv()
        rc = self.ask("efadv_query_device", context, ctypes.byref(attr), ctypes.sizeof(attr))
        return None if rc else attr


def _type(call: object, result: object, arguments: object) -> None:
    call.restype, call.argtypes = result, arguments  # type: ignore[attr-defined]  # a ctypes call


def load() -> Efa:
    """Load both libraries; the same object each time.

    TEP_LIBIBVERBS and TEP_LIBEFA name others than those that the dynamic linker finds.

    Raises:
        BackendUnavailable: one of them is missing, or lacks a call.
    """
    cure = "install rdma-core 44 or later with its EFA provider, best by AWS's EFA installer"
    verbs = _find("libibverbs", "TEP_LIBIBVERBS", "libibverbs.so.1", [*_NEEDED, *_MORE], cure)
    direct = _find("libefa", "TEP_LIBEFA", "libefa.so.1", list(_DIRECT), cure)
    return _typed(verbs, direct)


def _find(what: str, variable: str, soname: str, names: list[str], cure: str) -> str:
    def accept(lib: ctypes.CDLL) -> str:
        if missing := [name for name in names if not hasattr(lib, name)]:
            raise LookupError(f"it has no {', '.join(missing)}")
        return ""

    named = os.environ.get(variable, "")
    what = f"{what} for EFA" + (f" ({named})" if named else "")
    return find(what, [env_step(variable), system_step(soname)], accept, cure).path


@cache
def _typed(verbs: str, direct: str) -> Efa:
    try:
        return Efa(verbs, direct)
    except OSError as error:
        raise BackendUnavailable("libibverbs cannot be opened", ((verbs, str(error)),)) from error
