"""The structs, work requests, completions and numbers of libibverbs: layouts only, no calls.

Each is made of its C declaration, word for word (<infiniband/verbs.h> of rdma-core 44.0). Sizes,
offsets and enum values are compared with the compiler's in tests/abi. Structs are ctypes mirrors;
what the data path moves by the thousand (work requests, completions) are numpy dtypes. imm_data is
big-endian in all of them: '>u4' makes numpy swap it, and nobody else has to.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np

from tep.backends.ffi.load import mirror, mirrors

__all__ = [
    "DTYPES", "ENUMS", "MEMBERS", "RECV_WR", "SEND_WR", "SGE", "STRUCTS", "WC", "AhAttr",
    "AsyncEvent", "CompChannel", "Context", "ContextOps", "Device", "DeviceAttr", "Ece", "Gid",
    "GidEntry", "GlobalRoute", "Mr", "PortAttr", "Qp", "QpAttr", "QpCap", "QpInitAttr",
    "QpInitAttrEx", "RxHashConf", "SrqAttr", "SrqInitAttr", "VerbsContext",
]  # fmt: skip


@mirror("""
struct _ibv_device_ops {
    struct ibv_context * (*_dummy1)(struct ibv_device *device, int cmd_fd);
    void (*_dummy2)(struct ibv_context *context);
};
""")
class _DeviceOps(ctypes.Structure):
    """Two pointers that the library keeps to itself."""


@mirror("""
struct ibv_device {
    struct _ibv_device_ops _ops;
    enum ibv_node_type node_type;
    enum ibv_transport_type transport_type;
    /* Name of underlying kernel IB device, eg "mthca0" */
    char name[IBV_SYSFS_NAME_MAX];
    /* Name of uverbs device, eg "uverbs0" */
    char dev_name[IBV_SYSFS_NAME_MAX];
    /* Path to infiniband_verbs class device in sysfs */
    char dev_path[IBV_SYSFS_PATH_MAX];
    /* Path to infiniband class device in sysfs */
    char ibdev_path[IBV_SYSFS_PATH_MAX];
};
""")
class Device(ctypes.Structure):
    """One RDMA device as listed; `_ops` are two pointers that the library keeps to itself."""


@mirror("""
struct ibv_context_ops {
    int (*_compat_query_device)(struct ibv_context *context,
                                struct ibv_device_attr *device_attr);
    int (*_compat_query_port)(struct ibv_context *context,
                              uint8_t port_num,
                              struct _compat_ibv_port_attr *port_attr);
    void *(*_compat_alloc_pd)(void);
    void *(*_compat_dealloc_pd)(void);
    void *(*_compat_reg_mr)(void);
    void *(*_compat_rereg_mr)(void);
    void *(*_compat_dereg_mr)(void);
    struct ibv_mw * (*alloc_mw)(struct ibv_pd *pd, enum ibv_mw_type type);
    int (*bind_mw)(struct ibv_qp *qp, struct ibv_mw *mw,
                                       struct ibv_mw_bind *mw_bind);
    int (*dealloc_mw)(struct ibv_mw *mw);
    void *(*_compat_create_cq)(void);
    int (*poll_cq)(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
    int (*req_notify_cq)(struct ibv_cq *cq, int solicited_only);
    void *(*_compat_cq_event)(void);
    void *(*_compat_resize_cq)(void);
    void *(*_compat_destroy_cq)(void);
    void *(*_compat_create_srq)(void);
    void *(*_compat_modify_srq)(void);
    void *(*_compat_query_srq)(void);
    void *(*_compat_destroy_srq)(void);
    int (*post_srq_recv)(struct ibv_srq *srq,
                                             struct ibv_recv_wr *recv_wr,
                                             struct ibv_recv_wr **bad_recv_wr);
    void *(*_compat_create_qp)(void);
    void *(*_compat_query_qp)(void);
    void *(*_compat_modify_qp)(void);
    void *(*_compat_destroy_qp)(void);
    int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *wr,
                                         struct ibv_send_wr **bad_wr);
    int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr,
                                         struct ibv_recv_wr **bad_wr);
    void *(*_compat_create_ah)(void);
    void *(*_compat_destroy_ah)(void);
    void *(*_compat_attach_mcast)(void);
    void *(*_compat_detach_mcast)(void);
    void *(*_compat_async_event)(void);
};
""")
class ContextOps(ctypes.Structure):
    """The table that holds the data path. The order is the ABI; slots named _compat_* are dead."""


@mirror("""
struct ibv_context {
    struct ibv_device *device;
    struct ibv_context_ops ops;
    int cmd_fd;
    int async_fd;
    int num_comp_vectors;
    pthread_mutex_t mutex;
    void *abi_compat;
};
""")
class Context(ctypes.Structure):
    """An open device, up to the mutex, whose size differs between machines."""


@mirror("""
union ibv_gid {
    uint8_t raw[16];
    struct {
            __be64 subnet_prefix;
            __be64 interface_id;
    } global;
};
""")
class Gid(ctypes.Union):
    """16 bytes, aligned to 8 and not to 1, because the union holds __be64.

    Taken for a plain array of bytes it makes ibv_qp_attr 4 bytes too short; the planted case in
    tests/abi keeps the check able to see that.
    """


@mirror("""
struct ibv_gid_entry {
    union ibv_gid gid;
    uint32_t gid_index;
    uint32_t port_num;
    uint32_t gid_type; /* enum ibv_gid_type */
    uint32_t ndev_ifindex;
};
""")
class GidEntry(ctypes.Structure):
    """One entry of a port's table of addresses."""


@mirror("""
struct ibv_port_attr {
    enum ibv_port_state state;
    enum ibv_mtu max_mtu;
    enum ibv_mtu active_mtu;
    int gid_tbl_len;
    uint32_t port_cap_flags;
    uint32_t max_msg_sz;
    uint32_t bad_pkey_cntr;
    uint32_t qkey_viol_cntr;
    uint16_t pkey_tbl_len;
    uint16_t lid;
    uint16_t sm_lid;
    uint8_t lmc;
    uint8_t max_vl_num;
    uint8_t sm_sl;
    uint8_t subnet_timeout;
    uint8_t init_type_reply;
    uint8_t active_width;
    uint8_t active_speed;
    uint8_t phys_state;
    uint8_t link_layer;
    uint8_t flags;
    uint16_t port_cap_flags2;
};
""")
class PortAttr(ctypes.Structure):
    """A port. The exported ibv_query_port fills everything up to and including `flags`."""


@mirror("""
struct ibv_device_attr {
    char fw_ver[64];
    __be64 node_guid;
    __be64 sys_image_guid;
    uint64_t max_mr_size;
    uint64_t page_size_cap;
    uint32_t vendor_id;
    uint32_t vendor_part_id;
    uint32_t hw_ver;
    int max_qp;
    int max_qp_wr;
    unsigned int device_cap_flags;
    int max_sge;
    int max_sge_rd;
    int max_cq;
    int max_cqe;
    int max_mr;
    int max_pd;
    int max_qp_rd_atom;
    int max_ee_rd_atom;
    int max_res_rd_atom;
    int max_qp_init_rd_atom;
    int max_ee_init_rd_atom;
    enum ibv_atomic_cap atomic_cap;
    int max_ee;
    int max_rdd;
    int max_mw;
    int max_raw_ipv6_qp;
    int max_raw_ethy_qp;
    int max_mcast_grp;
    int max_mcast_qp_attach;
    int max_total_mcast_qp_attach;
    int max_ah;
    int max_fmr;
    int max_map_per_fmr;
    int max_srq;
    int max_srq_wr;
    int max_srq_sge;
    uint16_t max_pkeys;
    uint8_t local_ca_ack_delay;
    uint8_t phys_port_cnt;
};
""")
class DeviceAttr(ctypes.Structure):
    """A device's limits."""


@mirror("""
struct ibv_async_event {
    union {
            struct ibv_cq *cq;
            struct ibv_qp *qp;
            struct ibv_srq *srq;
            struct ibv_wq *wq;
            int port_num;
    } element;
    enum ibv_event_type event_type;
};
""")
class AsyncEvent(ctypes.Structure):
    """An event outside the queues; `element` points to a queue, or holds a port number."""


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
    """The channel that completion events are read from."""


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
    """The argument of ibv_create_srq."""


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
    """The argument of ibv_create_qp."""


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
    """The argument of create_qp_ex; it begins as QpInitAttr, so ibv_create_qp takes it too."""


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
    """The abilities of two NICs of one vendor, with each other, beyond the standard."""


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
    """The destination of packets: a LID on InfiniBand, a GID on Ethernet."""


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
    """The argument of ibv_modify_qp; the mask says which fields count."""


STRUCTS: Final = {
    name: struct for name, struct in mirrors(__name__).items() if struct is not _DeviceOps
}
"""Each mirror by the name of its C struct; tests/abi goes through all of them."""


def layout(itemsize: int, **fields: tuple[str, int]) -> np.dtype[np.void]:
    """Make a dtype of (format, offset) fields."""
    return np.dtype(
        {
            "names": list(fields),
            "formats": [form for form, _ in fields.values()],
            "offsets": [offset for _, offset in fields.values()],
            "itemsize": itemsize,
        }
    )


# struct ibv_send_wr {
#     uint64_t wr_id;
#     struct ibv_send_wr *next;
#     struct ibv_sge *sg_list;
#     int num_sge;
#     enum ibv_wr_opcode opcode;
#     unsigned int send_flags;
#     /* When opcode is *_WITH_IMM: Immediate data in network byte order.
#      * When opcode is *_INV: Stores the rkey to invalidate
#      */
#     union {
#             __be32 imm_data;
#             uint32_t invalidate_rkey;
#     };
#     union {
#             struct {
#                     uint64_t remote_addr;
#                     uint32_t rkey;
#             } rdma;
#             struct {
#                     uint64_t remote_addr;
#                     uint64_t compare_add;
#                     uint64_t swap;
#                     uint32_t rkey;
#             } atomic;
#             struct {
#                     struct ibv_ah *ah;
#                     uint32_t remote_qpn;
#                     uint32_t remote_qkey;
#             } ud;
#     } wr;
#     union {
#             struct {
#                     uint32_t remote_srqn;
#             } xrc;
#     } qp_type;
#     union {
#             struct {
#                     struct ibv_mw *mw;
#                     uint32_t rkey;
#                     struct ibv_mw_bind_info bind_info;
#             } bind_mw;
#             struct {
#                     void *hdr;
#                     uint16_t hdr_sz;
#                     uint16_t mss;
#             } tso;
#     };
# };
SEND_WR: Final = layout(
    128,
    wr_id=("<u8", 0),
    next=("<u8", 8),
    sg_list=("<u8", 16),
    num_sge=("<i4", 24),
    opcode=("<u4", 28),
    send_flags=("<u4", 32),
    imm_data=(">u4", 36),
    remote_addr=("<u8", 40),
    rkey=("<u4", 48),
    ah=("<u8", 40),
    remote_qpn=("<u4", 48),
    remote_qkey=("<u4", 52),
)

# struct ibv_recv_wr {
#     uint64_t wr_id;
#     struct ibv_recv_wr *next;
#     struct ibv_sge *sg_list;
#     int num_sge;
# };
RECV_WR: Final = layout(
    32, wr_id=("<u8", 0), next=("<u8", 8), sg_list=("<u8", 16), num_sge=("<i4", 24)
)

# struct ibv_sge {
#     uint64_t addr;
#     uint32_t length;
#     uint32_t lkey;
# };
SGE: Final = layout(16, addr=("<u8", 0), length=("<u4", 8), lkey=("<u4", 12))

# struct ibv_wc {
#     uint64_t wr_id;
#     enum ibv_wc_status status;
#     enum ibv_wc_opcode opcode;
#     uint32_t vendor_err;
#     uint32_t byte_len;
#     /* When (wc_flags & IBV_WC_WITH_IMM): Immediate data in network byte order.
#      * When (wc_flags & IBV_WC_WITH_INV): Stores the invalidated rkey.
#      */
#     union {
#             __be32 imm_data;
#             uint32_t invalidated_rkey;
#     };
#     uint32_t qp_num;
#     uint32_t src_qp;
#     unsigned int wc_flags;
#     uint16_t pkey_index;
#     uint16_t slid;
#     uint8_t sl;
#     uint8_t dlid_path_bits;
# };
WC: Final = layout(
    48,
    wr_id=("<u8", 0),
    status=("<u4", 8),
    opcode=("<u4", 12),
    vendor_err=("<u4", 16),
    byte_len=("<u4", 20),
    imm_data=(">u4", 24),
    qp_num=("<u4", 28),
    src_qp=("<u4", 32),
    wc_flags=("<u4", 36),
    pkey_index=("<u2", 40),
    slid=("<u2", 42),
    sl=("u1", 44),
    dlid_path_bits=("u1", 45),
)

DTYPES: Final[dict[str, np.dtype[np.void]]] = {
    "ibv_send_wr": SEND_WR,
    "ibv_recv_wr": RECV_WR,
    "ibv_sge": SGE,
    "ibv_wc": WC,
}
"""Each dtype by the name of its C struct."""

MEMBERS: Final[dict[tuple[str, str], str]] = {
    ("ibv_send_wr", "remote_addr"): "wr.rdma.remote_addr",
    ("ibv_send_wr", "rkey"): "wr.rdma.rkey",
    ("ibv_send_wr", "ah"): "wr.ud.ah",
    ("ibv_send_wr", "remote_qpn"): "wr.ud.remote_qpn",
    ("ibv_send_wr", "remote_qkey"): "wr.ud.remote_qkey",
}
"""C's way to a field, where a union stands in between."""

ENUMS: Final[dict[str, int]] = {
    "IBV_WR_RDMA_WRITE": 0,
    "IBV_WR_RDMA_WRITE_WITH_IMM": 1,
    "IBV_WR_SEND": 2,
    "IBV_WR_RDMA_READ": 4,
    "IBV_SEND_SIGNALED": 1 << 1,
    "IBV_SEND_INLINE": 1 << 3,
    "IBV_QP_INIT_ATTR_PD": 1 << 0,
    "IBV_QP_INIT_ATTR_SEND_OPS_FLAGS": 1 << 6,
    "IBV_QP_EX_WITH_RDMA_WRITE": 1 << 0,
    "IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM": 1 << 1,
    "IBV_QP_EX_WITH_SEND": 1 << 2,
    "IBV_QP_EX_WITH_RDMA_READ": 1 << 4,
    "IBV_WC_SUCCESS": 0,
    "IBV_WC_LOC_LEN_ERR": 1,
    "IBV_WC_LOC_QP_OP_ERR": 2,
    "IBV_WC_LOC_PROT_ERR": 4,
    "IBV_WC_WR_FLUSH_ERR": 5,
    "IBV_WC_LOC_ACCESS_ERR": 8,
    "IBV_WC_REM_INV_REQ_ERR": 9,
    "IBV_WC_REM_ACCESS_ERR": 10,
    "IBV_WC_REM_OP_ERR": 11,
    "IBV_WC_RETRY_EXC_ERR": 12,
    "IBV_WC_RNR_RETRY_EXC_ERR": 13,
    "IBV_WC_REM_ABORT_ERR": 16,
    "IBV_WC_FATAL_ERR": 19,
    "IBV_WC_RESP_TIMEOUT_ERR": 20,
    "IBV_WC_GENERAL_ERR": 21,
    "IBV_ACCESS_LOCAL_WRITE": 1,
    "IBV_ACCESS_REMOTE_WRITE": 1 << 1,
    "IBV_ACCESS_REMOTE_READ": 1 << 2,
    "IBV_ACCESS_RELAXED_ORDERING": 1 << 20,
    "IBV_QPT_RC": 2,
    "IBV_QPT_UD": 4,
    "IBV_QPS_INIT": 1,
    "IBV_QPS_RTR": 2,
    "IBV_QPS_RTS": 3,
    "IBV_QPS_ERR": 6,
    "IBV_QP_STATE": 1 << 0,
    "IBV_QP_ACCESS_FLAGS": 1 << 3,
    "IBV_QP_PKEY_INDEX": 1 << 4,
    "IBV_QP_PORT": 1 << 5,
    "IBV_QP_QKEY": 1 << 6,
    "IBV_QP_AV": 1 << 7,
    "IBV_QP_PATH_MTU": 1 << 8,
    "IBV_QP_TIMEOUT": 1 << 9,
    "IBV_QP_RETRY_CNT": 1 << 10,
    "IBV_QP_RNR_RETRY": 1 << 11,
    "IBV_QP_RQ_PSN": 1 << 12,
    "IBV_QP_MAX_QP_RD_ATOMIC": 1 << 13,
    "IBV_QP_MIN_RNR_TIMER": 1 << 15,
    "IBV_QP_SQ_PSN": 1 << 16,
    "IBV_QP_MAX_DEST_RD_ATOMIC": 1 << 17,
    "IBV_QP_DEST_QPN": 1 << 20,
    "IBV_LINK_LAYER_INFINIBAND": 1,
    "IBV_LINK_LAYER_ETHERNET": 2,
    "IBV_PORT_ACTIVE": 4,
    "IBV_QPF_GRH_REQUIRED": 1,
    "IBV_GID_TYPE_IB": 0,
    "IBV_GID_TYPE_ROCE_V1": 1,
    "IBV_GID_TYPE_ROCE_V2": 2,
    "IBV_WC_RECV_RDMA_WITH_IMM": 129,
    "IBV_EVENT_CQ_ERR": 0,
    "IBV_EVENT_QP_FATAL": 1,
    "IBV_EVENT_DEVICE_FATAL": 8,
    "IBV_EVENT_SRQ_ERR": 14,
    "IBV_EVENT_QP_LAST_WQE_REACHED": 16,
}
"""The enum values that tep uses, by their C names."""
