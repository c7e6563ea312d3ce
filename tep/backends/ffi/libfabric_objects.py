"""libfabric's objects and their tables of functions as ctypes, made of their C declarations.

Everything hot in libfabric is `static inline` in its headers: a call goes through a table of
function pointers that hangs off each object. Layouts only; libfabric.py makes the calls.
Releases differ only by appended fields (1.17 to 2.6), and the library allocates all of these: here
is the prefix that they share. tests/abi compares every layout with the compiler's.
"""

from __future__ import annotations

from ctypes import Structure
from typing import Final

from tep.backends.ffi.declare import mirror, mirrors

__all__ = [
    "MIRRORED",
    "fi_ops",
    "fi_ops_av",
    "fi_ops_cm",
    "fi_ops_cq",
    "fi_ops_domain",
    "fi_ops_ep",
    "fi_ops_eq",
    "fi_ops_fabric",
    "fi_ops_mr",
    "fi_ops_msg",
    "fi_ops_rma",
    "fid",
    "fid_av",
    "fid_cq",
    "fid_domain",
    "fid_ep",
    "fid_eq",
    "fid_fabric",
    "fid_mr",
]


# <rdma/fabric.h>, 1.17:
@mirror("""
struct fid {
    size_t fclass;
    void *context;
    struct fi_ops *ops;
};
""")
class fid(Structure):
    """What every object begins with."""


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


MIRRORED: Final = tuple(mirrors(__name__).values())
"""Every structure above whose layout the C headers name."""
