"""libibverbs by ctypes: its structs, finding it, its control calls, and the data path of a device.

Structs and calls are made of their C declarations (<infiniband/verbs.h> of rdma-core 44.0). Sizes,
offsets and enum values are compared with the compiler's in tests/abi. What the data path moves by
the thousand (work requests, completions) are numpy dtypes. imm_data is big-endian in all of them:
'>u4' makes numpy swap it, and nobody else has to.

post_send, post_recv, post_srq_recv, poll_cq and req_notify_cq are inline functions in C that go
through the context's table of operations; no library exports them, so DataPath reads that table.
Nothing here decides anything: which device, which address, which queue is the backend's business.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import numpy as np

from tep.backends.base import Access
from tep.backends.ffi.load import (
    call_of,
    check,
    find,
    give_types,
    lacks,
    mirror,
    prototypes,
)
from tep.base.errors import BackendUnavailable, FabricError
from tep.memory.source import DmabufExport, Memory, exported

__all__ = [
    "ABI_COMPAT_OFFSETS", "ENUMS", "NOT_FORK_SAFE", "PROTOTYPES", "RECV_WR", "SEND_WR",
    "SGE", "WC", "C", "Context", "CreateQp", "DataPath", "Events", "Library", "Ref", "Struct",
    "fail", "layout", "link_bps", "load", "qp_number", "ref", "rights",
]  # fmt: skip

_SONAME: Final = "libibverbs.so.1"
_VARIABLE: Final = "TEP_LIBIBVERBS"
_CURE: Final = "install rdma-core 34 or later (Debian: apt install libibverbs1 ibverbs-providers)"

_P, _INT = ctypes.c_void_p, ctypes.c_int

# ibv_gid is aligned to 8 and not to 1, since the union holds __be64: taken for a plain array of
# bytes it would make ibv_qp_attr 4 bytes too short. The table ibv_context_ops holds the data path;
# its order is the ABI, and slots named _compat_* are dead. A struct that the library allocates ends
# here with the last member that is used, and ibv_port_attr with what ibv_query_port fills.
# ibv_qp_init_attr_ex begins as ibv_qp_init_attr, so ibv_create_qp takes it too. verbs_context
# stands around an ibv_context and grows at its front: here are its last members.
C: Final = mirror("""
struct _ibv_device_ops {
    struct ibv_context * (*_dummy1)(struct ibv_device *device, int cmd_fd);
    void (*_dummy2)(struct ibv_context *context);
};
struct ibv_device {
    struct _ibv_device_ops _ops;
    enum ibv_node_type node_type;
    enum ibv_transport_type transport_type;
    char name[IBV_SYSFS_NAME_MAX];
    char dev_name[IBV_SYSFS_NAME_MAX];
    char dev_path[IBV_SYSFS_PATH_MAX];
    char ibdev_path[IBV_SYSFS_PATH_MAX];
};
struct ibv_context_ops {
    int (*_compat_query_device)(struct ibv_context *context,
        struct ibv_device_attr *device_attr);
    int (*_compat_query_port)(struct ibv_context *context, uint8_t port_num,
        struct _compat_ibv_port_attr *port_attr);
    void *(*_compat_alloc_pd)(void);
    void *(*_compat_dealloc_pd)(void);
    void *(*_compat_reg_mr)(void);
    void *(*_compat_rereg_mr)(void);
    void *(*_compat_dereg_mr)(void);
    struct ibv_mw * (*alloc_mw)(struct ibv_pd *pd, enum ibv_mw_type type);
    int (*bind_mw)(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *mw_bind);
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
    int (*post_srq_recv)(struct ibv_srq *srq, struct ibv_recv_wr *recv_wr,
        struct ibv_recv_wr **bad_recv_wr);
    void *(*_compat_create_qp)(void);
    void *(*_compat_query_qp)(void);
    void *(*_compat_modify_qp)(void);
    void *(*_compat_destroy_qp)(void);
    int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
    int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
    void *(*_compat_create_ah)(void);
    void *(*_compat_destroy_ah)(void);
    void *(*_compat_attach_mcast)(void);
    void *(*_compat_detach_mcast)(void);
    void *(*_compat_async_event)(void);
};
struct ibv_context {
    struct ibv_device *device;
    struct ibv_context_ops ops;
    int cmd_fd;
    int async_fd;
};
union ibv_gid {
    uint8_t raw[16];
    struct {
        __be64 subnet_prefix;
        __be64 interface_id;
    } global;
};
struct ibv_gid_entry {
    union ibv_gid gid;
    uint32_t gid_index;
    uint32_t port_num;
    uint32_t gid_type; /* enum ibv_gid_type */
    uint32_t ndev_ifindex;
};
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
};
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
struct ibv_mr {
    struct ibv_context *context;
    struct ibv_pd *pd;
    void *addr;
    size_t length;
    uint32_t handle;
    uint32_t lkey;
    uint32_t rkey;
};
struct ibv_comp_channel {
    struct ibv_context *context;
    int fd;
};
struct ibv_srq_attr {
    uint32_t max_wr;
    uint32_t max_sge;
    uint32_t srq_limit;
};
struct ibv_srq_init_attr {
    void *srq_context;
    struct ibv_srq_attr attr;
};
struct ibv_qp_cap {
    uint32_t max_send_wr;
    uint32_t max_recv_wr;
    uint32_t max_send_sge;
    uint32_t max_recv_sge;
    uint32_t max_inline_data;
};
struct ibv_rx_hash_conf {
    uint8_t rx_hash_function;
    uint8_t rx_hash_key_len;
    uint8_t *rx_hash_key;
    uint64_t rx_hash_fields_mask;
};
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
    uint64_t send_ops_flags;
};
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
    size_t sz;
    struct ibv_context context;
};
struct ibv_qp {
    struct ibv_context *context;
    void *qp_context;
    struct ibv_pd *pd;
    struct ibv_cq *send_cq;
    struct ibv_cq *recv_cq;
    struct ibv_srq *srq;
    uint32_t handle;
    uint32_t qp_num;
};
struct ibv_global_route {
    union ibv_gid dgid;
    uint32_t flow_label;
    uint8_t sgid_index;
    uint8_t hop_limit;
    uint8_t traffic_class;
};
struct ibv_ah_attr {
    struct ibv_global_route grh;
    uint16_t dlid;
    uint8_t sl;
    uint8_t src_path_bits;
    uint8_t static_rate;
    uint8_t is_global;
    uint8_t port_num;
};
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
"""Each struct above by its own name, e.g. C.ibv_mr; tests/abi goes through all of them."""

Struct = Any
"""One of them; its members are attributes."""


def layout(itemsize: int, fields: str) -> np.dtype[np.void]:
    """Make a dtype of fields, each "name format offset"."""
    names, formats, offsets = zip(*(field.split() for field in fields.split(",")), strict=True)
    places = [int(offset) for offset in offsets]
    return np.dtype({"names": names, "formats": formats, "offsets": places, "itemsize": itemsize})


# Of the unions of ibv_send_wr: imm_data, and `rdma` and `ud` of `wr`.
SEND_WR: Final = layout(
    128,
    "wr_id <u8 0, next <u8 8, sg_list <u8 16, num_sge <i4 24, opcode <u4 28, send_flags <u4 32, "
    "imm_data >u4 36, remote_addr <u8 40, rkey <u4 48, ah <u8 40, remote_qpn <u4 48, "
    "remote_qkey <u4 52",
)

RECV_WR: Final = layout(32, "wr_id <u8 0, next <u8 8, sg_list <u8 16, num_sge <i4 24")

SGE: Final = layout(16, "addr <u8 0, length <u4 8, lkey <u4 12")

WC: Final = layout(
    48,
    "wr_id <u8 0, status <u4 8, opcode <u4 12, vendor_err <u4 16, byte_len <u4 20, "
    "imm_data >u4 24, qp_num <u4 28, src_qp <u4 32, wc_flags <u4 36, pkey_index <u2 40, "
    "slid <u2 42, sl u1 44, dlid_path_bits u1 45",
)

_ENUMS: Final = """
IBV_WR_RDMA_WRITE 0   IBV_WR_RDMA_WRITE_WITH_IMM 1   IBV_WR_SEND 2   IBV_WR_RDMA_READ 4
IBV_SEND_SIGNALED 2   IBV_SEND_INLINE 8   IBV_QP_INIT_ATTR_PD 1
IBV_QP_INIT_ATTR_SEND_OPS_FLAGS 64   IBV_QP_EX_WITH_RDMA_WRITE 1
IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM 2   IBV_QP_EX_WITH_SEND 4   IBV_QP_EX_WITH_RDMA_READ 16
IBV_WC_SUCCESS 0   IBV_WC_LOC_LEN_ERR 1   IBV_WC_LOC_QP_OP_ERR 2   IBV_WC_LOC_PROT_ERR 4
IBV_WC_WR_FLUSH_ERR 5   IBV_WC_LOC_ACCESS_ERR 8   IBV_WC_REM_INV_REQ_ERR 9
IBV_WC_REM_ACCESS_ERR 10   IBV_WC_REM_OP_ERR 11   IBV_WC_RETRY_EXC_ERR 12
IBV_WC_RNR_RETRY_EXC_ERR 13   IBV_WC_RESP_TIMEOUT_ERR 20   IBV_ACCESS_LOCAL_WRITE 1
IBV_ACCESS_REMOTE_WRITE 2   IBV_ACCESS_REMOTE_READ 4   IBV_ACCESS_RELAXED_ORDERING 1048576
IBV_QPT_RC 2   IBV_QPT_UD 4   IBV_QPS_INIT 1   IBV_QPS_RTR 2   IBV_QPS_RTS 3   IBV_QPS_ERR 6
IBV_QP_STATE 1   IBV_QP_ACCESS_FLAGS 8   IBV_QP_PKEY_INDEX 16   IBV_QP_PORT 32   IBV_QP_QKEY 64
IBV_QP_AV 128   IBV_QP_PATH_MTU 256   IBV_QP_TIMEOUT 512   IBV_QP_RETRY_CNT 1024
IBV_QP_RNR_RETRY 2048   IBV_QP_RQ_PSN 4096   IBV_QP_MAX_QP_RD_ATOMIC 8192
IBV_QP_MIN_RNR_TIMER 32768   IBV_QP_SQ_PSN 65536   IBV_QP_MAX_DEST_RD_ATOMIC 131072
IBV_QP_DEST_QPN 1048576   IBV_LINK_LAYER_INFINIBAND 1   IBV_LINK_LAYER_ETHERNET 2
IBV_PORT_ACTIVE 4   IBV_QPF_GRH_REQUIRED 1   IBV_GID_TYPE_ROCE_V1 1
IBV_GID_TYPE_ROCE_V2 2   IBV_WC_RECV_RDMA_WITH_IMM 129   IBV_EVENT_CQ_ERR 0
IBV_EVENT_QP_FATAL 1   IBV_EVENT_DEVICE_FATAL 8   IBV_EVENT_SRQ_ERR 14
"""
ENUMS: Final = dict(zip(_ENUMS.split()[::2], map(int, _ENUMS.split()[1::2]), strict=True))
"""The enum values that tep uses, by their C names."""

PROTOTYPES: Final = prototypes("""
int ibv_fork_init(void);
struct ibv_device **ibv_get_device_list(int *num_devices);
void ibv_free_device_list(struct ibv_device **list);
struct ibv_context *ibv_open_device(struct ibv_device *device);
int ibv_close_device(struct ibv_context *context);
int ibv_query_device(struct ibv_context *context,
                 struct ibv_device_attr *device_attr);
int ibv_query_port(struct ibv_context *context, uint8_t port_num,
               struct _compat_ibv_port_attr *port_attr);
/* What the inline ibv_query_gid_table calls: all entries of all ports that are not empty. */
ssize_t _ibv_query_gid_table(struct ibv_context *context,
                             struct ibv_gid_entry *entries, size_t max_entries,
                             uint32_t flags, size_t entry_size);
int ibv_query_pkey(struct ibv_context *context, uint8_t port_num,
               int index, __be16 *pkey);
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
int ibv_dealloc_pd(struct ibv_pd *pd);
/* What the macro ibv_reg_mr calls when optional access bits are set; it masks the bits that an
   old kernel does not know. The exported ibv_reg_mr does not know IBV_ACCESS_RELAXED_ORDERING. */
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length,
                            uint64_t iova, unsigned int access);
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length,
                             uint64_t iova, int fd, int access);
int ibv_dereg_mr(struct ibv_mr *mr);
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context);
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel);
struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe,
                         void *cq_context,
                         struct ibv_comp_channel *channel,
                         int comp_vector);
int ibv_destroy_cq(struct ibv_cq *cq);
int ibv_get_cq_event(struct ibv_comp_channel *channel,
                 struct ibv_cq **cq, void **cq_context);
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int nevents);
struct ibv_srq *ibv_create_srq(struct ibv_pd *pd,
                           struct ibv_srq_init_attr *srq_init_attr);
int ibv_destroy_srq(struct ibv_srq *srq);
struct ibv_qp *ibv_create_qp(struct ibv_pd *pd,
                         struct ibv_qp_init_attr *qp_init_attr);
int ibv_destroy_qp(struct ibv_qp *qp);
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr,
              int attr_mask);
struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr);
int ibv_destroy_ah(struct ibv_ah *ah);
int ibv_get_async_event(struct ibv_context *context,
                    struct ibv_async_event *event);
void ibv_ack_async_event(struct ibv_async_event *event);
const char *ibv_wc_status_str(enum ibv_wc_status status);
""")

NOT_FORK_SAFE: Final = (
    "; a fork may take registered pages away from the NIC: memory was registered in this process "
    "before tep was loaded, on a kernel before 5.12"
)
"""The words for `Library.fork_safe` being False."""


class Library:
    """libibverbs with its calls typed; pointers travel as plain ints, 0 for NULL.

    Attributes:
        path: what was loaded.
        fork_safe: whether children that are forked leave registered pages alone.
    """

    def __init__(self, lib: ctypes.CDLL, path: str) -> None:
        self.path = path
        self._lib = lib
        give_types(lib, PROTOTYPES)
        self.fork_safe = self._fork_init()

    def _fork_init(self) -> bool:
        """Call ibv_fork_init, before any other call; False: it came too late.

        Kernels from 5.12 on copy pinned pages at fork; there the library does nothing. On older
        ones it keeps registered pages out of children, and answers EINVAL where something in this
        process has registered memory first (libfabric's provider, NCCL).
        """
        rc = self.ask("ibv_fork_init")
        if rc not in {0, errno.EINVAL}:
            fail("ibv_fork_init", rc)
        return rc == 0

    def ok(self, name: str, *arguments: object, what: str = "", **context: object) -> None:
        """Make a call that returns 0 or an errno; raise FabricError, code "PROVIDER", if it failed.

        Its message has `what`, the step in words, and `context`, values that help, e.g. qpn=7.
        """
        rc = int(getattr(self._lib, name)(*arguments))
        if rc:
            fail(f"{name} {what}".rstrip(), rc if rc > 0 else ctypes.get_errno(), **context)

    def make(self, name: str, *arguments: object, what: str = "", **context: object) -> int:
        """Make a call that returns a pointer, or NULL and sets errno; arguments as `ok`."""
        found = getattr(self._lib, name)(*arguments)
        if not found:
            fail(f"{name} {what}".rstrip(), ctypes.get_errno(), **context)
        return int(found)

    def ask(self, name: str, *arguments: object) -> int:
        """Make a call whose non-zero result is an answer and no failure; return it."""
        return int(getattr(self._lib, name)(*arguments))

    def do(self, name: str, *arguments: object) -> None:
        getattr(self._lib, name)(*arguments)

    def modify_qp(self, qp: int, state: str, **fields: object) -> None:
        """Bring a queue pair into a state, e.g. "RTR", and set these members of its ibv_qp_attr."""
        mask = ENUMS["IBV_QP_STATE"]
        for field in fields:
            mask |= ENUMS[f"IBV_QP_{_MASKS.get(field, field.upper())}"]
        attr = C.ibv_qp_attr(qp_state=ENUMS[f"IBV_QPS_{state}"], **fields)
        what = f"to {state}"
        self.ok("ibv_modify_qp", qp, ctypes.byref(attr), mask, what=what, qpn=qp_number(qp))

    def extended_create(self, context: int) -> CreateQp | None:
        """create_qp_ex of an open device, as the inline ibv_create_qp_ex finds it; None: not there.

        It takes a pointer to an ibv_qp_init_attr_ex; it returns a queue pair, or 0 and errno.
        """
        after_mutex = ABI_COMPAT_OFFSETS.get(platform.machine())
        if after_mutex is None:
            return None
        if ctypes.c_void_p.from_address(context + after_mutex).value != _ABI_IS_EXTENDED:
            return None
        whole = C.verbs_context.from_address(context - C.verbs_context.context.offset)
        call = whole.create_qp_ex
        # `sz` counts the context too, to the end of abi_compat, beyond the mirror's end.
        if not call or whole.sz < C.verbs_context.context.offset + after_mutex + 8:
            return None
        create = ctypes.CFUNCTYPE(_P, _P, _P, use_errno=True)(call)
        return lambda attr: create(context, attr) or 0

    def status_str(self, status: int) -> str:
        """Name a completion's status as the library does."""
        return bytes(self._lib.ibv_wc_status_str(status)).decode()

    def devices(self) -> list[tuple[str, str]]:
        """List the RDMA devices: (name, folder in sysfs); empty where the kernel has no RDMA."""
        with self._listed() as found:
            return [(name, path) for name, path, _ in found]

    def open_device(self, name: str) -> tuple[int, str]:
        """Open a device by name; return the context and the device's folder in sysfs.

        FabricError: the library cannot open it. LookupError: there is none.
        """
        with self._listed() as found:
            for each, path, pointer in found:
                if each == name:
                    return self.make("ibv_open_device", pointer, device=name), path
        raise LookupError(name)

    @contextlib.contextmanager
    def _listed(self) -> Iterator[list[tuple[str, str, int]]]:
        """The devices, with the pointer to each, as long as the library lists them."""
        count = ctypes.c_int()
        listed = self._lib.ibv_get_device_list(ctypes.byref(count))
        if not listed:  # no RDMA in this kernel: ENOSYS
            yield []
            return
        try:
            found = []
            for pointer in (_P * count.value).from_address(listed):
                assert pointer is not None
                device = C.ibv_device.from_address(pointer)
                found.append((device.name.decode(), device.ibdev_path.decode(), int(pointer)))
            yield found
        finally:
            self._lib.ibv_free_device_list(listed)


class Context:
    """An open device with a protection domain.

    Attributes:
        pointer, pd, limits: its ibv_context, ibv_pd and ibv_device_attr.
        sysfs: its folder.
        dead: it has failed for good: what is given back may be refused, and that is no error.
    """

    def __init__(self, lib: Library, name: str) -> None:
        self.lib = lib
        self.name = name
        self.dead = False
        try:
            self.pointer, self.sysfs = lib.open_device(name)
        except LookupError:
            there = ", ".join(name for name, _ in lib.devices()) or "none"
            raise BackendUnavailable(f"no RDMA device {name!r}; there are: {there}") from None
        self.limits = C.ibv_device_attr()
        with contextlib.ExitStack() as undo:
            undo.callback(lib.ask, "ibv_close_device", self.pointer)
            self.ok("ibv_query_device", self.pointer, ctypes.byref(self.limits))
            self.pd = self.make("ibv_alloc_pd", self.pointer)
            undo.pop_all()

    def ok(self, name: str, *arguments: object, **values: Any) -> None:
        """Make a call that returns 0 or an errno; the error names the device."""
        self.lib.ok(name, *arguments, device=self.name, **values)

    def make(self, name: str, *arguments: object, **values: Any) -> int:
        """Make a call that returns a pointer or NULL; the error names the device."""
        return self.lib.make(name, *arguments, device=self.name, **values)

    def free(self, name: str, *arguments: object) -> None:
        """Give something back."""
        try:
            self.ok(name, *arguments)
        except FabricError:
            if not self.dead:
                raise

    def register(self, memory: Memory, access: int, export: DmabufExport | None = None) -> Struct:
        """Register memory, a device's as a dma-buf if there is an export; return the ibv_mr.

        Peers call the first byte by its address here. The caller keeps it mapped.
        """
        ptr, nbytes = memory.ptr, memory.nbytes
        about = {"ptr": hex(ptr), "nbytes": nbytes}
        if export is None or memory.kind == "cpu":
            found = self.make("ibv_reg_mr_iova2", self.pd, ptr, nbytes, ptr, access, **about)
        else:
            with exported(export, memory) as (fd, offset):
                where = (self.pd, offset, nbytes, ptr, fd, access)
                found = self.make("ibv_reg_dmabuf_mr", *where, **about)
        return C.ibv_mr.from_address(found)

    def dereg_mr(self, mr: Struct) -> None:
        self.free("ibv_dereg_mr", ctypes.addressof(mr))

    def close(self) -> None:
        """Let go. What was made on the device must be gone: EBUSY says that something is left."""
        self.free("ibv_dealloc_pd", self.pd)
        self.free("ibv_close_device", self.pointer)


CreateQp = Callable[[int], int]

_MASKS: Final = {
    "ah_attr": "AV",
    "dest_qp_num": "DEST_QPN",
    "max_rd_atomic": "MAX_QP_RD_ATOMIC",
    "port_num": "PORT",
    "qp_access_flags": "ACCESS_FLAGS",
}
"""The names of bits of a mask, IBV_QP_..., where the member of ibv_qp_attr has another name."""


def qp_number(qp: int) -> int:
    """A queue pair's number."""
    return int(C.ibv_qp.from_address(qp).qp_num)


_ABI_IS_EXTENDED: Final = 2**64 - 1  # __VERBS_ABI_IS_EXTENDED

ABI_COMPAT_OFFSETS: Final = {"x86_64": 320, "aarch64": 328}
"""Offsets of `abi_compat` in struct ibv_context, behind a mutex of 40 bytes, or 48 on aarch64."""


def _held(member: str) -> Any:
    """The type of a call of the data path, which keeps the interpreter's lock."""
    back, taken = call_of(f"ibv_context_ops.{member}")
    return ctypes.PYFUNCTYPE(back, *taken)


# One type for all devices: each PYFUNCTYPE is a new class, garbage once its device is closed.
_POST: Final = _held("post_recv")
_POST_REFS: Final = ctypes.PYFUNCTYPE(_INT)
_POLL: Final = _held("poll_cq")
_NOTIFY: Final = _held("req_notify_cq")

Post = Callable[[int, int, int], int]
Ref = object
"""A pointer that was made ready for a call, by `ref`."""


def ref(pointer: int) -> Ref:
    """Make a pointer ready for `DataPath.post_send`; nothing keeps alive what it points to."""
    return ctypes.byref(ctypes.c_char.from_address(pointer))


class DataPath:
    """The hot calls of one open device; pointers are plain ints, except for `post_send`.

    The calls keep the interpreter's lock: they are shorter than what giving it up would cost (243
    against 281 ns a call, measured with a provider that does nothing, CPython 3.11).
    """

    def __init__(self, context: int) -> None:
        ops = C.ibv_context.from_address(context).ops
        # For pointers that were made ready by ref(). Without argtypes ctypes hands such on as they
        # are; converting three ints costs 100 of 250 ns a call (measured, CPython 3.11). Anything
        # but refs would be cut to 32 bits here.
        self.post_send = cast("Callable[[Ref, Ref, Ref], int]", _POST_REFS(ops.post_send))
        self.post_recv = cast("Post", _POST(ops.post_recv))
        self.post_srq_recv = cast("Post", _POST(ops.post_srq_recv))
        self.poll_cq = cast("Post", _POLL(ops.poll_cq))
        self.req_notify_cq = cast("Callable[[int, int], int]", _NOTIFY(ops.req_notify_cq))


def fail(what: str, code: int, **context: object) -> NoReturn:
    """Raise a FabricError for an errno, with the values at hand."""
    check(-(code or errno.EIO), what, describe=_describe, **context)
    raise AssertionError(code)


def _describe(code: int) -> str:
    hint = _HINTS.get(code)
    return os.strerror(code) + (f"; {hint}" if hint else "")


_HINTS: Final = {
    errno.EPERM: "may this user open /dev/infiniband, and is the memory limit high enough?",
    errno.ENOMEM: "most often locked memory: `ulimit -l` should be unlimited",
    errno.EACCES: "may this user open /dev/infiniband?",
    errno.EFAULT: "is all of this memory mapped, and writable if peers may write to it?",
    errno.EOPNOTSUPP: "this provider does not offer it",
}


def load(path: str | None = None) -> Library:
    """Load libibverbs; the same object each time.

    Args:
        path: of another library; None = the environment variable TEP_LIBIBVERBS, or else
            libibverbs.so.1 where the dynamic linker finds it.

    Raises:
        BackendUnavailable: it cannot be loaded, or lacks a call.
    """
    named = (_VARIABLE, os.environ.get(_VARIABLE)) if path is None else ("library option", path)
    places = {"system": [_SONAME]}
    return _typed(find("libibverbs", named, places, lambda lib: lacks(lib, PROTOTYPES), _CURE).path)


@cache
def _typed(path: str) -> Library:
    return Library(ctypes.CDLL(path, use_errno=True), path)


def link_bps(sysfs: str, port: int) -> int:
    """The nominal rate of a port, bits a second, by its device's folder; 0 = it does not say."""
    try:
        text = Path(sysfs, "ports", str(port), "rate").read_text("ascii")
        return round(float(text.split()[0]) * 1e9)
    except (OSError, ValueError, IndexError):
        return 0


def rights(access: Access) -> int:
    """The rights to a region, as ibv_reg_mr takes them."""
    local = ENUMS["IBV_ACCESS_LOCAL_WRITE"] if access.sink else 0
    remote = ENUMS["IBV_ACCESS_REMOTE_WRITE"] if access.target else 0
    return local | remote | (ENUMS["IBV_ACCESS_REMOTE_READ"] if access.readable else 0)


class Events:
    """The news of an open device: of its completion queue, and of itself.

    Attributes:
        channel: for ibv_create_cq; who made this object destroys it, after the completion queue.
        fds: of the channel and of the device; readable while there is news.
    """

    def __init__(self, lib: Library, context: int) -> None:
        self._lib = lib
        self._context = context
        self.channel = lib.make("ibv_create_comp_channel", context)
        channel_fd = int(C.ibv_comp_channel.from_address(self.channel).fd)
        self.fds = channel_fd, int(C.ibv_context.from_address(context).async_fd)
        for fd in self.fds:
            os.set_blocking(fd, False)

    def take_completions(self) -> int:
        """Take completion events off the channel; return how many, to be acknowledged."""
        found, context, taken = ctypes.c_void_p(), ctypes.c_void_p(), 0
        arguments = (self.channel, ctypes.byref(found), ctypes.byref(context))
        while self._lib.ask("ibv_get_cq_event", *arguments) == 0:
            taken += 1
        return taken

    def take_device(self) -> list[tuple[int, int]]:
        """Take what the device itself reports: (type, the queue's pointer or the port's number)."""
        event, found = C.ibv_async_event(), []
        while self._lib.ask("ibv_get_async_event", self._context, ctypes.byref(event)) == 0:
            found.append((int(event.event_type), int(event.element.cq or 0)))
            self._lib.do("ibv_ack_async_event", ctypes.byref(event))
        return found
