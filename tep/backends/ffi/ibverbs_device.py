"""What libibverbs says about devices, contexts, ports and addresses, as ctypes mirrors.

Each is made of its C declaration, word for word (<infiniband/verbs.h> of rdma-core 44.0). Sizes,
offsets and enum values are compared with the compiler's in tests/abi. Layouts only, no calls.
"""

from __future__ import annotations

import ctypes
from typing import Final

from tep.backends.ffi.declare import mirror, mirrors

__all__ = [
    "DEVICE_STRUCTS",
    "AsyncEvent",
    "Context",
    "ContextOps",
    "Device",
    "DeviceAttr",
    "Gid",
    "GidEntry",
    "PortAttr",
]


@mirror("""
struct _ibv_device_ops {
    struct ibv_context * (*_dummy1)(struct ibv_device *device, int cmd_fd);
    void (*_dummy2)(struct ibv_context *context);
};
""")
class _DeviceOps(ctypes.Structure):
    """What the library keeps to itself."""


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
    """What happened outside the queues; `element` points to a queue, or holds a port number."""


DEVICE_STRUCTS: Final = {
    name: struct for name, struct in mirrors(__name__).items() if struct is not _DeviceOps
}
"""Each mirror by the name of its C struct; tests/abi goes through all of them."""
