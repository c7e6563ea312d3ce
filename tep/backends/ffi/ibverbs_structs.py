"""The structs that make queues, queue pairs and routes in libibverbs, as ctypes mirrors.

Each is made of its C declaration, word for word (<infiniband/verbs.h> of rdma-core 44.0). Layouts
only: devices are in ibverbs_device.py; what the data path touches by the thousand (work requests,
completions) is in ibverbs_wr.py, as numpy dtypes.
"""

from __future__ import annotations

import ctypes
from typing import Final

from tep.backends.ffi import ibverbs_device as _device  # noqa: F401  # structs that stand in these
from tep.backends.ffi.declare import mirror, mirrors

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


@mirror("""
struct ibv_mr {
    struct ibv_context *context;
    struct ibv_pd *pd;
    void *addr;
    size_t length;
    uint32_t handle;
    uint32_t lkey;
    uint32_t rkey;
};
""")
class Mr(ctypes.Structure):
    """A registered region."""


@mirror("""
struct ibv_comp_channel {
    struct ibv_context *context;
    int fd;
    int refcnt;
};
""")
class CompChannel(ctypes.Structure):
    """Where completion events are read from."""


@mirror("""
struct ibv_srq_attr {
    uint32_t max_wr;
    uint32_t max_sge;
    uint32_t srq_limit;
};
""")
class SrqAttr(ctypes.Structure):
    """Size of a shared receive queue."""


@mirror("""
struct ibv_srq_init_attr {
    void *srq_context;
    struct ibv_srq_attr attr;
};
""")
class SrqInitAttr(ctypes.Structure):
    """What ibv_create_srq takes."""


@mirror("""
struct ibv_qp_cap {
    uint32_t max_send_wr;
    uint32_t max_recv_wr;
    uint32_t max_send_sge;
    uint32_t max_recv_sge;
    uint32_t max_inline_data;
};
""")
class QpCap(ctypes.Structure):
    """Size of a queue pair."""


@mirror("""
struct ibv_qp_init_attr {
    void *qp_context;
    struct ibv_cq *send_cq;
    struct ibv_cq *recv_cq;
    struct ibv_srq *srq;
    struct ibv_qp_cap cap;
    enum ibv_qp_type qp_type;
    int sq_sig_all;
};
""")
class QpInitAttr(ctypes.Structure):
    """What ibv_create_qp takes."""


@mirror("""
struct ibv_rx_hash_conf {
    /* enum ibv_rx_hash_function_flags */
    uint8_t rx_hash_function;
    uint8_t rx_hash_key_len;
    uint8_t *rx_hash_key;
    /* enum ibv_rx_hash_fields */
    uint64_t rx_hash_fields_mask;
};
""")
class RxHashConf(ctypes.Structure):
    """A part of QpInitAttrEx that stays zero here."""


@mirror("""
struct ibv_qp_init_attr_ex {
    void *qp_context;
    struct ibv_cq *send_cq;
    struct ibv_cq *recv_cq;
    struct ibv_srq *srq;
    struct ibv_qp_cap cap;
    enum ibv_qp_type qp_type;
    int sq_sig_all;

    uint32_t comp_mask;
    struct ibv_pd *pd;
    struct ibv_xrcd *xrcd;
    uint32_t create_flags;
    uint16_t max_tso_header;
    struct ibv_rwq_ind_table *rwq_ind_tbl;
    struct ibv_rx_hash_conf rx_hash_conf;
    uint32_t source_qpn;
    /* See enum ibv_qp_create_send_ops_flags */
    uint64_t send_ops_flags;
};
""")
class QpInitAttrEx(ctypes.Structure):
    """What create_qp_ex takes; it begins as QpInitAttr, so ibv_create_qp takes it too."""


@mirror("""
struct ibv_ece {
    /*
     * Unique identifier of the provider vendor on the network.
     * The providers will set IEEE OUI here to distinguish
     * itself in non-homogenius network.
     */
    uint32_t vendor_id;
    /*
     * Provider specific attributes which are supported or
     * needed to be enabled by ECE users.
     */
    uint32_t options;
    uint32_t comp_mask;
};
""")
class Ece(ctypes.Structure):
    """What two NICs of one vendor can do with each other beyond the standard."""


@mirror("""
struct verbs_context {
    struct ibv_qp *(*create_qp_ex)(struct ibv_context *context,
                                   struct ibv_qp_init_attr_ex *qp_init_attr_ex);
    int (*get_srq_num)(struct ibv_srq *srq, uint32_t *srq_num);
    struct ibv_srq * (*create_srq_ex)(struct ibv_context *context,
                                     struct ibv_srq_init_attr_ex *srq_init_attr_ex);
    struct ibv_xrcd * (*open_xrcd)(struct ibv_context *context,
                                  struct ibv_xrcd_init_attr *xrcd_init_attr);
    int (*close_xrcd)(struct ibv_xrcd *xrcd);
    uint64_t _ABI_placeholder3;
    size_t sz; /* Must be immediately before struct ibv_context */
    struct ibv_context context; /* Must be last field in the struct */
};
""")
class VerbsContext(ctypes.Structure):
    """The last members of what stands around an ibv_context, and grows at its front."""


@mirror("""
struct ibv_qp {
    struct ibv_context *context;
    void *qp_context;
    struct ibv_pd *pd;
    struct ibv_cq *send_cq;
    struct ibv_cq *recv_cq;
    struct ibv_srq *srq;
    uint32_t handle;
    uint32_t qp_num;
    enum ibv_qp_state state;
    enum ibv_qp_type qp_type;

    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t events_completed;
};
""")
class Qp(ctypes.Structure):
    """A queue pair, up to the mutex, whose size differs between machines; its number is read."""


@mirror("""
struct ibv_global_route {
    union ibv_gid dgid;
    uint32_t flow_label;
    uint8_t sgid_index;
    uint8_t hop_limit;
    uint8_t traffic_class;
};
""")
class GlobalRoute(ctypes.Structure):
    """The routed half of an address."""


@mirror("""
struct ibv_ah_attr {
    struct ibv_global_route grh;
    uint16_t dlid;
    uint8_t sl;
    uint8_t src_path_bits;
    uint8_t static_rate;
    uint8_t is_global;
    uint8_t port_num;
};
""")
class AhAttr(ctypes.Structure):
    """Where packets go: a LID on InfiniBand, a GID on Ethernet."""


@mirror("""
struct ibv_qp_attr {
    enum ibv_qp_state qp_state;
    enum ibv_qp_state cur_qp_state;
    enum ibv_mtu path_mtu;
    enum ibv_mig_state path_mig_state;
    uint32_t qkey;
    uint32_t rq_psn;
    uint32_t sq_psn;
    uint32_t dest_qp_num;
    unsigned int qp_access_flags;
    struct ibv_qp_cap cap;
    struct ibv_ah_attr ah_attr;
    struct ibv_ah_attr alt_ah_attr;
    uint16_t pkey_index;
    uint16_t alt_pkey_index;
    uint8_t en_sqd_async_notify;
    uint8_t sq_draining;
    uint8_t max_rd_atomic;
    uint8_t max_dest_rd_atomic;
    uint8_t min_rnr_timer;
    uint8_t port_num;
    uint8_t timeout;
    uint8_t retry_cnt;
    uint8_t rnr_retry;
    uint8_t alt_port_num;
    uint8_t alt_timeout;
    uint32_t rate_limit;
};
""")
class QpAttr(ctypes.Structure):
    """What ibv_modify_qp takes; the mask says which fields count."""


QUEUE_STRUCTS: Final = mirrors(__name__)
"""Each mirror by the name of its C struct; tests/abi goes through all of them."""
