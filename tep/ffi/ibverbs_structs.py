"""The structs that make queues, queue pairs and routes in libibverbs, as ctypes mirrors.

Above each stands its C declaration, word for word (<infiniband/verbs.h> of rdma-core 44.0). Layouts
only: devices are in ibverbs_device.py; what the data path touches by the thousand (work requests,
completions) is in ibverbs_wr.py, as numpy dtypes.
"""

from __future__ import annotations

import ctypes
from typing import Final

from tep.ffi.ibverbs_device import Context, Gid

__all__ = [
    "QUEUE_STRUCTS",
    "AhAttr",
    "CompChannel",
    "Ece",
    "GlobalRoute",
    "Mr",
    "Qp",
    "QpAttr",
    "QpCap",
    "QpInitAttr",
    "QpInitAttrEx",
    "RxHashConf",
    "SrqAttr",
    "SrqInitAttr",
    "VerbsContext",
]

_U8, _U16, _U32, _U64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64
_INT, _PTR = ctypes.c_int, ctypes.c_void_p


# struct ibv_mr {
#     struct ibv_context *context;
#     struct ibv_pd *pd;
#     void *addr;
#     size_t length;
#     uint32_t handle;
#     uint32_t lkey;
#     uint32_t rkey;
# };
class Mr(ctypes.Structure):
    """A registered region."""

    _fields_ = (
        ("context", _PTR),
        ("pd", _PTR),
        ("addr", _PTR),
        ("length", ctypes.c_size_t),
        ("handle", _U32),
        ("lkey", _U32),
        ("rkey", _U32),
    )


# struct ibv_comp_channel {
#     struct ibv_context *context;
#     int fd;
#     int refcnt;
# };
class CompChannel(ctypes.Structure):
    """Where completion events are read from."""

    _fields_ = (("context", _PTR), ("fd", _INT), ("refcnt", _INT))


# struct ibv_srq_attr {
#     uint32_t max_wr;
#     uint32_t max_sge;
#     uint32_t srq_limit;
# };
class SrqAttr(ctypes.Structure):
    """Size of a shared receive queue."""

    _fields_ = (("max_wr", _U32), ("max_sge", _U32), ("srq_limit", _U32))


# struct ibv_srq_init_attr {
#     void *srq_context;
#     struct ibv_srq_attr attr;
# };
class SrqInitAttr(ctypes.Structure):
    """What ibv_create_srq takes."""

    _fields_ = (("srq_context", _PTR), ("attr", SrqAttr))


# struct ibv_qp_cap {
#     uint32_t max_send_wr;
#     uint32_t max_recv_wr;
#     uint32_t max_send_sge;
#     uint32_t max_recv_sge;
#     uint32_t max_inline_data;
# };
class QpCap(ctypes.Structure):
    """Size of a queue pair."""

    _fields_ = (
        ("max_send_wr", _U32),
        ("max_recv_wr", _U32),
        ("max_send_sge", _U32),
        ("max_recv_sge", _U32),
        ("max_inline_data", _U32),
    )


# struct ibv_qp_init_attr {
#     void *qp_context;
#     struct ibv_cq *send_cq;
#     struct ibv_cq *recv_cq;
#     struct ibv_srq *srq;
#     struct ibv_qp_cap cap;
#     enum ibv_qp_type qp_type;
#     int sq_sig_all;
# };
class QpInitAttr(ctypes.Structure):
    """What ibv_create_qp takes."""

    _fields_ = (
        ("qp_context", _PTR),
        ("send_cq", _PTR),
        ("recv_cq", _PTR),
        ("srq", _PTR),
        ("cap", QpCap),
        ("qp_type", _INT),
        ("sq_sig_all", _INT),
    )


# struct ibv_rx_hash_conf {
#     /* enum ibv_rx_hash_function_flags */
#     uint8_t rx_hash_function;
#     uint8_t rx_hash_key_len;
#     uint8_t *rx_hash_key;
#     /* enum ibv_rx_hash_fields */
#     uint64_t rx_hash_fields_mask;
# };
class RxHashConf(ctypes.Structure):
    """A part of QpInitAttrEx that stays zero here."""

    _fields_ = (
        ("rx_hash_function", _U8),
        ("rx_hash_key_len", _U8),
        ("rx_hash_key", _PTR),
        ("rx_hash_fields_mask", _U64),
    )


# struct ibv_qp_init_attr_ex {
#     void *qp_context;
#     struct ibv_cq *send_cq;
#     struct ibv_cq *recv_cq;
#     struct ibv_srq *srq;
#     struct ibv_qp_cap cap;
#     enum ibv_qp_type qp_type;
#     int sq_sig_all;
#
#     uint32_t comp_mask;
#     struct ibv_pd *pd;
#     struct ibv_xrcd *xrcd;
#     uint32_t create_flags;
#     uint16_t max_tso_header;
#     struct ibv_rwq_ind_table *rwq_ind_tbl;
#     struct ibv_rx_hash_conf rx_hash_conf;
#     uint32_t source_qpn;
#     /* See enum ibv_qp_create_send_ops_flags */
#     uint64_t send_ops_flags;
# };
class QpInitAttrEx(ctypes.Structure):
    """What create_qp_ex takes; it begins as QpInitAttr, so ibv_create_qp takes it too."""

    _fields_ = (
        *QpInitAttr._fields_,
        ("comp_mask", _U32),
        ("pd", _PTR),
        ("xrcd", _PTR),
        ("create_flags", _U32),
        ("max_tso_header", _U16),
        ("rwq_ind_tbl", _PTR),
        ("rx_hash_conf", RxHashConf),
        ("source_qpn", _U32),
        ("send_ops_flags", _U64),
    )


# struct ibv_ece {
#     /*
#      * Unique identifier of the provider vendor on the network.
#      * The providers will set IEEE OUI here to distinguish
#      * itself in non-homogenius network.
#      */
#     uint32_t vendor_id;
#     /*
#      * Provider specific attributes which are supported or
#      * needed to be enabled by ECE users.
#      */
#     uint32_t options;
#     uint32_t comp_mask;
# };
class Ece(ctypes.Structure):
    """What two NICs of one vendor can do with each other beyond the standard."""

    _fields_ = (("vendor_id", _U32), ("options", _U32), ("comp_mask", _U32))


class VerbsContext(ctypes.Structure):
    """The end of struct verbs_context, which stands around an ibv_context and grows at its front.

    Its members in the header, from the first one here: int (*create_qp_ex)(...), get_srq_num,
    create_srq_ex, open_xrcd, close_xrcd, uint64_t _ABI_placeholder3, size_t sz, and the context.
    """

    _fields_ = (
        ("create_qp_ex", _PTR),
        ("get_srq_num", _PTR),
        ("create_srq_ex", _PTR),
        ("open_xrcd", _PTR),
        ("close_xrcd", _PTR),
        ("_ABI_placeholder3", _U64),
        ("sz", ctypes.c_size_t),
        ("context", Context),
    )


# struct ibv_qp {
#     struct ibv_context *context;
#     void *qp_context;
#     struct ibv_pd *pd;
#     struct ibv_cq *send_cq;
#     struct ibv_cq *recv_cq;
#     struct ibv_srq *srq;
#     uint32_t handle;
#     uint32_t qp_num;
#     enum ibv_qp_state state;
#     enum ibv_qp_type qp_type;
#
#     pthread_mutex_t mutex;
#     pthread_cond_t cond;
#     uint32_t events_completed;
# };
class Qp(ctypes.Structure):
    """A queue pair, up to the mutex, whose size differs between machines; its number is read."""

    _fields_ = (
        ("context", _PTR),
        ("qp_context", _PTR),
        ("pd", _PTR),
        ("send_cq", _PTR),
        ("recv_cq", _PTR),
        ("srq", _PTR),
        ("handle", _U32),
        ("qp_num", _U32),
        ("state", _INT),
        ("qp_type", _INT),
    )


# struct ibv_global_route {
#     union ibv_gid dgid;
#     uint32_t flow_label;
#     uint8_t sgid_index;
#     uint8_t hop_limit;
#     uint8_t traffic_class;
# };
class GlobalRoute(ctypes.Structure):
    """The routed half of an address."""

    _fields_ = (
        ("dgid", Gid),
        ("flow_label", _U32),
        ("sgid_index", _U8),
        ("hop_limit", _U8),
        ("traffic_class", _U8),
    )


# struct ibv_ah_attr {
#     struct ibv_global_route grh;
#     uint16_t dlid;
#     uint8_t sl;
#     uint8_t src_path_bits;
#     uint8_t static_rate;
#     uint8_t is_global;
#     uint8_t port_num;
# };
class AhAttr(ctypes.Structure):
    """Where packets go: a LID on InfiniBand, a GID on Ethernet."""

    _fields_ = (
        ("grh", GlobalRoute),
        ("dlid", _U16),
        ("sl", _U8),
        ("src_path_bits", _U8),
        ("static_rate", _U8),
        ("is_global", _U8),
        ("port_num", _U8),
    )


# struct ibv_qp_attr {
#     enum ibv_qp_state qp_state;
#     enum ibv_qp_state cur_qp_state;
#     enum ibv_mtu path_mtu;
#     enum ibv_mig_state path_mig_state;
#     uint32_t qkey;
#     uint32_t rq_psn;
#     uint32_t sq_psn;
#     uint32_t dest_qp_num;
#     unsigned int qp_access_flags;
#     struct ibv_qp_cap cap;
#     struct ibv_ah_attr ah_attr;
#     struct ibv_ah_attr alt_ah_attr;
#     uint16_t pkey_index;
#     uint16_t alt_pkey_index;
#     uint8_t en_sqd_async_notify;
#     uint8_t sq_draining;
#     uint8_t max_rd_atomic;
#     uint8_t max_dest_rd_atomic;
#     uint8_t min_rnr_timer;
#     uint8_t port_num;
#     uint8_t timeout;
#     uint8_t retry_cnt;
#     uint8_t rnr_retry;
#     uint8_t alt_port_num;
#     uint8_t alt_timeout;
#     uint32_t rate_limit;
# };
class QpAttr(ctypes.Structure):
    """What ibv_modify_qp takes; the mask says which fields count."""

    _fields_ = (
        ("qp_state", _INT),
        ("cur_qp_state", _INT),
        ("path_mtu", _INT),
        ("path_mig_state", _INT),
        ("qkey", _U32),
        ("rq_psn", _U32),
        ("sq_psn", _U32),
        ("dest_qp_num", _U32),
        ("qp_access_flags", _U32),
        ("cap", QpCap),
        ("ah_attr", AhAttr),
        ("alt_ah_attr", AhAttr),
        ("pkey_index", _U16),
        ("alt_pkey_index", _U16),
        ("en_sqd_async_notify", _U8),
        ("sq_draining", _U8),
        ("max_rd_atomic", _U8),
        ("max_dest_rd_atomic", _U8),
        ("min_rnr_timer", _U8),
        ("port_num", _U8),
        ("timeout", _U8),
        ("retry_cnt", _U8),
        ("rnr_retry", _U8),
        ("alt_port_num", _U8),
        ("alt_timeout", _U8),
        ("rate_limit", _U32),
    )


QUEUE_STRUCTS: Final[dict[str, type[ctypes.Structure]]] = {
    "ibv_mr": Mr,
    "ibv_comp_channel": CompChannel,
    "ibv_srq_attr": SrqAttr,
    "ibv_srq_init_attr": SrqInitAttr,
    "ibv_qp_cap": QpCap,
    "ibv_qp_init_attr": QpInitAttr,
    "ibv_rx_hash_conf": RxHashConf,
    "ibv_qp_init_attr_ex": QpInitAttrEx,
    "ibv_ece": Ece,
    "verbs_context": VerbsContext,
    "ibv_qp": Qp,
    "ibv_global_route": GlobalRoute,
    "ibv_ah_attr": AhAttr,
    "ibv_qp_attr": QpAttr,
}
"""Each mirror by the name of its C struct; tests/abi goes through all of them."""
