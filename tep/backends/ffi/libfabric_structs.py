"""libfabric's objects, attributes, descriptors and completions as ctypes mirrors: layouts only.

Each is made of its C declaration; tests/abi compares every layout with the compiler's. Everything
hot in libfabric is `static inline` in its headers: a call goes through a table of function pointers
that hangs off each object; libfabric.py makes the calls.

Releases differ only by appended fields (1.17 to 2.6). The objects, their tables, and fi_info with
what hangs off it are allocated by the library alone: here is the prefix that all releases share.
Descriptors, completions, memory attributes and the attributes of queues and address vectors are
ours to allocate: each of these is as long as the longest header makes it, and zeroed. The data path
fills and reads them by numpy, with the dtypes at the end.
"""

from __future__ import annotations

from ctypes import Structure
from typing import Final

import numpy as np

from tep.backends.ffi.load import mirror, mirrors

__all__ = [
    "CQ_DATA_ENTRY", "DTYPES", "IOVEC", "MIRRORED", "MSG_RMA", "RMA_IOV", "fi_av_attr",
    "fi_bus_attr", "fi_cq_attr", "fi_cq_data_entry", "fi_cq_err_entry", "fi_device_attr",
    "fi_domain_attr", "fi_ep_attr", "fi_eq_attr", "fi_eq_err_entry", "fi_fabric_attr",
    "fi_info", "fi_link_attr", "fi_mr_attr", "fi_mr_dmabuf", "fi_msg_rma", "fi_ops",
    "fi_ops_av", "fi_ops_cm", "fi_ops_cq", "fi_ops_domain", "fi_ops_ep", "fi_ops_eq",
    "fi_ops_fabric", "fi_ops_mr", "fi_ops_msg", "fi_ops_rma", "fi_pci_attr", "fi_rma_iov",
    "fi_rx_attr", "fi_tx_attr", "fid", "fid_av", "fid_cq", "fid_domain", "fid_ep", "fid_eq",
    "fid_fabric", "fid_mr", "fid_nic", "iovec",
]  # fmt: skip


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fid {
    size_t fclass;
    void *context;
    struct fi_ops *ops;
};
""")
class fid(Structure):
    """The head of every object."""


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fi_ops {
    size_t size;
    int (*close)(struct fid *fid);
    int (*bind)(struct fid *fid, struct fid *bfid, uint64_t flags);
    int (*control)(struct fid *fid, int command, void *arg);
    int (*ops_open)(struct fid *fid, const char *name,
    uint64_t flags, void **ops, void *context);
    int (*tostr)(const struct fid *fid, char *buf, size_t len);
    int (*ops_set)(struct fid *fid, const char *name, uint64_t flags,
    void *ops, void *context);
};
""")
class fi_ops(Structure):
    """A table of calls."""


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fi_ops_fabric {
    size_t size;
    int (*domain)(struct fid_fabric *fabric, struct fi_info *info,
    struct fid_domain **dom, void *context);
    int (*passive_ep)(struct fid_fabric *fabric, struct fi_info *info,
    struct fid_pep **pep, void *context);
    int (*eq_open)(struct fid_fabric *fabric, struct fi_eq_attr *attr,
    struct fid_eq **eq, void *context);
    int (*wait_open)(struct fid_fabric *fabric, struct fi_wait_attr *attr,
    struct fid_wait **waitset);
    int (*trywait)(struct fid_fabric *fabric, struct fid **fids,
    int count);
    int (*domain2)(struct fid_fabric *fabric, struct fi_info *info,
    struct fid_domain **dom, uint64_t flags, void *context);
};
""")
class fi_ops_fabric(Structure):
    """A table of calls."""


# <rdma/fi_domain.h>, 1.17:
@mirror("""
struct fi_ops_domain {
    size_t size;
    int (*av_open)(struct fid_domain *domain, struct fi_av_attr *attr,
    struct fid_av **av, void *context);
    int (*cq_open)(struct fid_domain *domain, struct fi_cq_attr *attr,
    struct fid_cq **cq, void *context);
    int (*endpoint)(struct fid_domain *domain, struct fi_info *info,
    struct fid_ep **ep, void *context);
    int (*scalable_ep)(struct fid_domain *domain, struct fi_info *info,
    struct fid_ep **sep, void *context);
    int (*cntr_open)(struct fid_domain *domain, struct fi_cntr_attr *attr,
    struct fid_cntr **cntr, void *context);
    int (*poll_open)(struct fid_domain *domain, struct fi_poll_attr *attr,
    struct fid_poll **pollset);
    int (*stx_ctx)(struct fid_domain *domain,
    struct fi_tx_attr *attr, struct fid_stx **stx,
    void *context);
    int (*srx_ctx)(struct fid_domain *domain,
    struct fi_rx_attr *attr, struct fid_ep **rx_ep,
    void *context);
    int (*query_atomic)(struct fid_domain *domain,
    enum fi_datatype datatype, enum fi_op op,
    struct fi_atomic_attr *attr, uint64_t flags);
    int (*query_collective)(struct fid_domain *domain,
    enum fi_collective_op coll,
    struct fi_collective_attr *attr, uint64_t flags);
    int (*endpoint2)(struct fid_domain *domain, struct fi_info *info,
    struct fid_ep **ep, uint64_t flags, void *context);
};
""")
class fi_ops_domain(Structure):
    """A table of calls."""


# <rdma/fi_domain.h>, 1.17:
@mirror("""
struct fi_ops_mr {
    size_t size;
    int (*reg)(struct fid *fid, const void *buf, size_t len,
    uint64_t access, uint64_t offset, uint64_t requested_key,
    uint64_t flags, struct fid_mr **mr, void *context);
    int (*regv)(struct fid *fid, const struct iovec *iov,
    size_t count, uint64_t access,
    uint64_t offset, uint64_t requested_key,
    uint64_t flags, struct fid_mr **mr, void *context);
    int (*regattr)(struct fid *fid, const struct fi_mr_attr *attr,
    uint64_t flags, struct fid_mr **mr);
};
""")
class fi_ops_mr(Structure):
    """A table of calls."""


# <rdma/fi_domain.h>, 1.17:
@mirror("""
struct fi_ops_av {
    size_t size;
    int (*insert)(struct fid_av *av, const void *addr, size_t count,
    fi_addr_t *fi_addr, uint64_t flags, void *context);
    int (*insertsvc)(struct fid_av *av, const char *node,
    const char *service, fi_addr_t *fi_addr,
    uint64_t flags, void *context);
    int (*insertsym)(struct fid_av *av, const char *node, size_t nodecnt,
    const char *service, size_t svccnt, fi_addr_t *fi_addr,
    uint64_t flags, void *context);
    int (*remove)(struct fid_av *av, fi_addr_t *fi_addr, size_t count,
    uint64_t flags);
    int (*lookup)(struct fid_av *av, fi_addr_t fi_addr, void *addr,
    size_t *addrlen);
    const char * (*straddr)(struct fid_av *av, const void *addr,
    char *buf, size_t *len);
    int (*av_set)(struct fid_av *av, struct fi_av_set_attr *attr,
    struct fid_av_set **av_set, void *context);
};
""")
class fi_ops_av(Structure):
    """A table of calls."""


# <rdma/fi_endpoint.h>, 1.17:
@mirror("""
struct fi_ops_ep {
    size_t size;
    ssize_t (*cancel)(fid_t fid, void *context);
    int (*getopt)(fid_t fid, int level, int optname,
    void *optval, size_t *optlen);
    int (*setopt)(fid_t fid, int level, int optname,
    const void *optval, size_t optlen);
    int (*tx_ctx)(struct fid_ep *sep, int index,
    struct fi_tx_attr *attr, struct fid_ep **tx_ep,
    void *context);
    int (*rx_ctx)(struct fid_ep *sep, int index,
    struct fi_rx_attr *attr, struct fid_ep **rx_ep,
    void *context);
    ssize_t (*rx_size_left)(struct fid_ep *ep);
    ssize_t (*tx_size_left)(struct fid_ep *ep);
};
""")
class fi_ops_ep(Structure):
    """A table of calls."""


# <rdma/fi_cm.h>, 1.17:
@mirror("""
struct fi_ops_cm {
    size_t size;
    int (*setname)(fid_t fid, void *addr, size_t addrlen);
    int (*getname)(fid_t fid, void *addr, size_t *addrlen);
    int (*getpeer)(struct fid_ep *ep, void *addr, size_t *addrlen);
    int (*connect)(struct fid_ep *ep, const void *addr,
    const void *param, size_t paramlen);
    int (*listen)(struct fid_pep *pep);
    int (*accept)(struct fid_ep *ep, const void *param, size_t paramlen);
    int (*reject)(struct fid_pep *pep, fid_t handle,
    const void *param, size_t paramlen);
    int (*shutdown)(struct fid_ep *ep, uint64_t flags);
    int (*join)(struct fid_ep *ep, const void *addr, uint64_t flags,
    struct fid_mc **mc, void *context);
};
""")
class fi_ops_cm(Structure):
    """A table of calls."""


# <rdma/fi_endpoint.h>, 1.17:
@mirror("""
struct fi_ops_msg {
    size_t size;
    ssize_t (*recv)(struct fid_ep *ep, void *buf, size_t len, void *desc,
    fi_addr_t src_addr, void *context);
    ssize_t (*recvv)(struct fid_ep *ep, const struct iovec *iov, void **desc,
    size_t count, fi_addr_t src_addr, void *context);
    ssize_t (*recvmsg)(struct fid_ep *ep, const struct fi_msg *msg,
    uint64_t flags);
    ssize_t (*send)(struct fid_ep *ep, const void *buf, size_t len, void *desc,
    fi_addr_t dest_addr, void *context);
    ssize_t (*sendv)(struct fid_ep *ep, const struct iovec *iov, void **desc,
    size_t count, fi_addr_t dest_addr, void *context);
    ssize_t (*sendmsg)(struct fid_ep *ep, const struct fi_msg *msg,
    uint64_t flags);
    ssize_t (*inject)(struct fid_ep *ep, const void *buf, size_t len,
    fi_addr_t dest_addr);
    ssize_t (*senddata)(struct fid_ep *ep, const void *buf, size_t len, void *desc,
    uint64_t data, fi_addr_t dest_addr, void *context);
    ssize_t (*injectdata)(struct fid_ep *ep, const void *buf, size_t len,
    uint64_t data, fi_addr_t dest_addr);
};
""")
class fi_ops_msg(Structure):
    """A table of calls."""


# <rdma/fi_rma.h>, 1.17:
@mirror("""
struct fi_ops_rma {
    size_t size;
    ssize_t (*read)(struct fid_ep *ep, void *buf, size_t len, void *desc,
    fi_addr_t src_addr, uint64_t addr, uint64_t key, void *context);
    ssize_t (*readv)(struct fid_ep *ep, const struct iovec *iov, void **desc,
    size_t count, fi_addr_t src_addr, uint64_t addr, uint64_t key,
    void *context);
    ssize_t (*readmsg)(struct fid_ep *ep, const struct fi_msg_rma *msg,
    uint64_t flags);
    ssize_t (*write)(struct fid_ep *ep, const void *buf, size_t len, void *desc,
    fi_addr_t dest_addr, uint64_t addr, uint64_t key, void *context);
    ssize_t (*writev)(struct fid_ep *ep, const struct iovec *iov, void **desc,
    size_t count, fi_addr_t dest_addr, uint64_t addr, uint64_t key,
    void *context);
    ssize_t (*writemsg)(struct fid_ep *ep, const struct fi_msg_rma *msg,
    uint64_t flags);
    ssize_t (*inject)(struct fid_ep *ep, const void *buf, size_t len,
    fi_addr_t dest_addr, uint64_t addr, uint64_t key);
    ssize_t (*writedata)(struct fid_ep *ep, const void *buf, size_t len, void *desc,
    uint64_t data, fi_addr_t dest_addr, uint64_t addr, uint64_t key,
    void *context);
    ssize_t (*injectdata)(struct fid_ep *ep, const void *buf, size_t len,
    uint64_t data, fi_addr_t dest_addr, uint64_t addr, uint64_t key);
};
""")
class fi_ops_rma(Structure):
    """A table of calls."""


# <rdma/fi_eq.h>, 1.17:
@mirror("""
struct fi_ops_cq {
    size_t size;
    ssize_t (*read)(struct fid_cq *cq, void *buf, size_t count);
    ssize_t (*readfrom)(struct fid_cq *cq, void *buf, size_t count,
    fi_addr_t *src_addr);
    ssize_t (*readerr)(struct fid_cq *cq, struct fi_cq_err_entry *buf,
    uint64_t flags);
    ssize_t (*sread)(struct fid_cq *cq, void *buf, size_t count,
    const void *cond, int timeout);
    ssize_t (*sreadfrom)(struct fid_cq *cq, void *buf, size_t count,
    fi_addr_t *src_addr, const void *cond, int timeout);
    int (*signal)(struct fid_cq *cq);
    const char * (*strerror)(struct fid_cq *cq, int prov_errno,
    const void *err_data, char *buf, size_t len);
};
""")
class fi_ops_cq(Structure):
    """A table of calls."""


# <rdma/fi_eq.h>, 1.17:
@mirror("""
struct fi_ops_eq {
    size_t size;
    ssize_t (*read)(struct fid_eq *eq, uint32_t *event,
    void *buf, size_t len, uint64_t flags);
    ssize_t (*readerr)(struct fid_eq *eq, struct fi_eq_err_entry *buf,
    uint64_t flags);
    ssize_t (*write)(struct fid_eq *eq, uint32_t event,
    const void *buf, size_t len, uint64_t flags);
    ssize_t (*sread)(struct fid_eq *eq, uint32_t *event,
    void *buf, size_t len, int timeout, uint64_t flags);
    const char * (*strerror)(struct fid_eq *eq, int prov_errno,
    const void *err_data, char *buf, size_t len);
};
""")
class fi_ops_eq(Structure):
    """A table of calls."""


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fid_fabric {
    struct fid fid;
    struct fi_ops_fabric *ops;
    uint32_t api_version;
};
""")
class fid_fabric(Structure):
    """One network."""


# <rdma/fi_domain.h>, 1.17:
@mirror("""
struct fid_domain {
    struct fid fid;
    struct fi_ops_domain *ops;
    struct fi_ops_mr *mr;
};
""")
class fid_domain(Structure):
    """One NIC, opened."""


# <rdma/fi_domain.h>, 1.17:
@mirror("""
struct fid_av {
    struct fid fid;
    struct fi_ops_av *ops;
};
""")
class fid_av(Structure):
    """An address vector: peers' addresses as numbers."""


# <rdma/fi_eq.h>, 1.17:
@mirror("""
struct fid_cq {
    struct fid fid;
    struct fi_ops_cq *ops;
};
""")
class fid_cq(Structure):
    """A completion queue."""


# <rdma/fi_eq.h>, 1.17:
@mirror("""
struct fid_eq {
    struct fid fid;
    struct fi_ops_eq *ops;
};
""")
class fid_eq(Structure):
    """An event queue."""


# <rdma/fi_domain.h>, 1.17:
@mirror("""
struct fid_mr {
    struct fid fid;
    void *mem_desc;
    uint64_t key;
};
""")
class fid_mr(Structure):
    """A registered region."""


# <rdma/fi_endpoint.h>, 1.17:
@mirror("""
struct fid_ep {
    struct fid fid;
    struct fi_ops_ep *ops;
    struct fi_ops_cm *cm;
    struct fi_ops_msg *msg;
    struct fi_ops_rma *rma;
    struct fi_ops_tagged *tagged;
    struct fi_ops_atomic *atomic;
    struct fi_ops_collective *collective;
};
""")
class fid_ep(Structure):
    """An endpoint."""


"""Every structure above whose layout the C headers name."""


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fi_tx_attr {
    uint64_t caps;
    uint64_t mode;
    uint64_t op_flags;
    uint64_t msg_order;
    uint64_t comp_order;
    size_t inject_size;
    size_t size;
    size_t iov_limit;
    size_t rma_iov_limit;
    uint32_t tclass;
};
""")
class fi_tx_attr(Structure):
    """The sending side of an endpoint."""


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fi_rx_attr {
    uint64_t caps;
    uint64_t mode;
    uint64_t op_flags;
    uint64_t msg_order;
    uint64_t comp_order;
    size_t total_buffered_recv;
    size_t size;
    size_t iov_limit;
};
""")
class fi_rx_attr(Structure):
    """The receiving side of an endpoint."""


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fi_ep_attr {
    enum fi_ep_type type;
    uint32_t protocol;
    uint32_t protocol_version;
    size_t max_msg_size;
    size_t msg_prefix_size;
    size_t max_order_raw_size;
    size_t max_order_war_size;
    size_t max_order_waw_size;
    uint64_t mem_tag_format;
    size_t tx_ctx_cnt;
    size_t rx_ctx_cnt;
    size_t auth_key_size;
    uint8_t *auth_key;
};
""")
class fi_ep_attr(Structure):
    """An endpoint's kind and limits."""


# <rdma/fabric.h>, 1.17:
# Later releases append fields (max_ep_auth_key 1.20, max_group_id 2.0, ...): this is their common
# prefix, so tep never allocates one. `name` is void *: strings of hints come from strdup().
@mirror("""
struct fi_domain_attr {
    struct fid_domain *domain;
    char *name;
    enum fi_threading threading;
    enum fi_progress control_progress;
    enum fi_progress data_progress;
    enum fi_resource_mgmt resource_mgmt;
    enum fi_av_type av_type;
    int mr_mode;
    size_t mr_key_size;
    size_t cq_data_size;
    size_t cq_cnt;
    size_t ep_cnt;
    size_t tx_ctx_cnt;
    size_t rx_ctx_cnt;
    size_t max_ep_tx_ctx;
    size_t max_ep_rx_ctx;
    size_t max_ep_stx_ctx;
    size_t max_ep_srx_ctx;
    size_t cntr_cnt;
    size_t mr_iov_limit;
    uint64_t caps;
    uint64_t mode;
    uint8_t *auth_key;
    size_t auth_key_size;
    size_t max_err_data;
    size_t mr_cnt;
    uint32_t tclass;
};
""")
class fi_domain_attr(Structure):
    """A NIC's limits and demands."""


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fi_fabric_attr {
    struct fid_fabric *fabric;
    char *name;
    char *prov_name;
    uint32_t prov_version;
    uint32_t api_version;
};
""")
class fi_fabric_attr(Structure):
    """The network, and its provider."""


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fi_link_attr {
    char *address;
    size_t mtu;
    size_t speed;
    enum fi_link_state state;
    char *network_type;
};
""")
class fi_link_attr(Structure):
    """A NIC's link."""


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fi_device_attr {
    char *name;
    char *device_id;
    char *device_version;
    char *vendor_id;
    char *driver;
    char *firmware;
};
""")
class fi_device_attr(Structure):
    """A NIC as a device."""


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fi_pci_attr {
    uint16_t domain_id;
    uint8_t bus_id;
    uint8_t device_id;
    uint8_t function_id;
};
""")
class fi_pci_attr(Structure):
    """The place of a device on PCI."""


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fi_bus_attr {
    enum fi_bus_type bus_type;
    union {
    struct fi_pci_attr pci;
    } attr;
};
""")
class fi_bus_attr(Structure):
    """The place of a device; the union has one member."""


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fid_nic {
    struct fid fid;
    struct fi_device_attr *device_attr;
    struct fi_bus_attr *bus_attr;
    struct fi_link_attr *link_attr;
    void *prov_attr;
};
""")
class fid_nic(Structure):
    """The attributes of a NIC."""


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fi_info {
    struct fi_info *next;
    uint64_t caps;
    uint64_t mode;
    uint32_t addr_format;
    size_t src_addrlen;
    size_t dest_addrlen;
    void *src_addr;
    void *dest_addr;
    fid_t handle;
    struct fi_tx_attr *tx_attr;
    struct fi_rx_attr *rx_attr;
    struct fi_ep_attr *ep_attr;
    struct fi_domain_attr *domain_attr;
    struct fi_fabric_attr *fabric_attr;
    struct fid_nic *nic;
};
""")
class fi_info(Structure):
    """One offer of a provider, or our hints."""


# <rdma/fi_domain.h>, 1.17:
@mirror("""
struct fi_av_attr {
    enum fi_av_type type;
    int rx_ctx_bits;
    size_t count;
    size_t ep_per_node;
    const char *name;
    void *map_addr;
    uint64_t flags;
};
""")
class fi_av_attr(Structure):
    """The attributes of an address vector that is opened."""


# <rdma/fi_eq.h>, 1.17:
@mirror("""
struct fi_cq_attr {
    size_t size;
    uint64_t flags;
    enum fi_cq_format format;
    enum fi_wait_obj wait_obj;
    int signaling_vector;
    enum fi_cq_wait_cond wait_cond;
    struct fid_wait *wait_set;
};
""")
class fi_cq_attr(Structure):
    """The attributes of a completion queue that is opened."""


# <rdma/fi_eq.h>, 1.17:
@mirror("""
struct fi_eq_attr {
    size_t size;
    uint64_t flags;
    enum fi_wait_obj wait_obj;
    int signaling_vector;
    struct fid_wait *wait_set;
};
""")
class fi_eq_attr(Structure):
    """The attributes of an event queue that is opened."""


"""Every structure above whose layout the C headers name."""


# <rdma/fi_eq.h>, 1.17:
@mirror("""
struct fi_cq_data_entry {
    void *op_context;
    uint64_t flags;
    size_t len;
    void *buf;
    /* data depends on operation and/or flags - e.g. remote EQ data */
    uint64_t data;
};
""")
class fi_cq_data_entry(Structure):
    """One completion."""


# <rdma/fi_eq.h>, 1.17:
# Since 2.0 the inline fi_cq_readerr() presets src_addr to -1, which we must do ourselves. We own
# this struct: it is as long as the longest header's.
@mirror("""
struct fi_cq_err_entry {
    void *op_context;
    uint64_t flags;
    size_t len;
    void *buf;
    uint64_t data;
    uint64_t tag;
    size_t olen;
    int err;
    int prov_errno;
    /* err_data is available until the next time the CQ is read */
    void *err_data;
    size_t err_data_size;
    fi_addr_t src_addr; /* 1.20 */
};
""")
class fi_cq_err_entry(Structure):
    """One failed completion."""


# <rdma/fi_eq.h>, 1.17:
@mirror("""
struct fi_eq_err_entry {
    fid_t fid;
    void *context;
    uint64_t data;
    int err;
    int prov_errno;
    /* err_data is available until the next time the EQ is read */
    void *err_data;
    size_t err_data_size;
};
""")
class fi_eq_err_entry(Structure):
    """An error of an endpoint that belongs to no operation."""


# <rdma/fi_rma.h>, 1.17:
@mirror("""
struct fi_rma_iov {
    uint64_t addr;
    size_t len;
    uint64_t key;
};
""")
class fi_rma_iov(Structure):
    """A range of the target."""


# <rdma/fi_rma.h>, 1.17:
@mirror("""
struct fi_msg_rma {
    const struct iovec *msg_iov;
    void **desc;
    size_t iov_count;
    fi_addr_t addr;
    const struct fi_rma_iov *rma_iov;
    size_t rma_iov_count;
    void *context;
    uint64_t data;
};
""")
class fi_msg_rma(Structure):
    """One write, spelled out."""


# <rdma/fi_domain.h>, 1.17:
# (since 1.20)
@mirror("""
struct fi_mr_dmabuf {
    int fd;
    uint64_t offset;
    size_t len;
    void *base_addr;
};
""")
class fi_mr_dmabuf(Structure):
    """A range of a dma-buf."""


# <rdma/fi_domain.h>, 1.17:
# Since 1.20 mr_iov shares its place with `const struct fi_mr_dmabuf *dmabuf`. We own this struct:
# it is as long as the longest header's.
@mirror("""
struct fi_mr_attr {
    const struct iovec *mr_iov;
    size_t iov_count;
    uint64_t access;
    uint64_t offset;
    uint64_t requested_key;
    void *context;
    size_t auth_key_size;
    uint8_t *auth_key;
    enum fi_hmem_iface iface;
    union {
    uint64_t reserved;
    int cuda;
    int ze;
    int neuron;
    int synapseai;
    } device;
    void *hmem_data; /* 1.20 */
    size_t page_size; /* 1.22 */
    const struct fid_mr *base_mr; /* 2.0 */
    size_t sub_mr_cnt; /* 2.0 */
};
""")
class fi_mr_attr(Structure):
    """The attributes of a region that is registered."""


# Behind those that point to it: rows and registrations hold addresses.
# <sys/uio.h>:
@mirror("""
struct iovec {
    void *iov_base;
    size_t iov_len;
};
""")
class iovec(Structure):
    """A range of ours."""


MIRRORED: Final = tuple(mirrors(__name__).values())
"""Every structure above whose layout the C headers name."""

# The same as numpy dtypes, for filling and reading by columns.
CQ_DATA_ENTRY: Final = np.dtype(
    [("op_context", "<u8"), ("flags", "<u8"), ("len", "<u8"), ("buf", "<u8"), ("data", "<u8")]
)
MSG_RMA: Final = np.dtype(
    [
        ("msg_iov", "<u8"),
        ("desc", "<u8"),
        ("iov_count", "<u8"),
        ("addr", "<u8"),
        ("rma_iov", "<u8"),
        ("rma_iov_count", "<u8"),
        ("context", "<u8"),
        ("data", "<u8"),
    ]
)
IOVEC: Final = np.dtype([("iov_base", "<u8"), ("iov_len", "<u8")])
RMA_IOV: Final = np.dtype([("addr", "<u8"), ("len", "<u8"), ("key", "<u8")])
DTYPES: Final = {
    fi_cq_data_entry: CQ_DATA_ENTRY,
    fi_msg_rma: MSG_RMA,
    iovec: IOVEC,
    fi_rma_iov: RMA_IOV,
}
"""Each dtype by the structure that it mirrors; tests/abi compares them."""
