"""libfabric's descriptors, completions and memory attributes, as ctypes mirrors.

We allocate these, so each is as long as the longest header (2.6) makes it, and zeroed. The data
path fills and reads them by numpy, with the dtypes at the end. tests/abi compares every layout.
"""

from __future__ import annotations

from ctypes import Structure
from typing import Final

import numpy as np

from tep.backends.ffi.declare import mirror, mirrors

__all__ = [
    "CQ_DATA_ENTRY",
    "DTYPES",
    "IOVEC",
    "MIRRORED",
    "MSG_RMA",
    "RMA_IOV",
    "fi_cq_data_entry",
    "fi_cq_err_entry",
    "fi_eq_err_entry",
    "fi_mr_attr",
    "fi_mr_dmabuf",
    "fi_msg_rma",
    "fi_rma_iov",
    "iovec",
]


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
    """What went wrong on an endpoint and belongs to no operation."""


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
    """How to register a region."""


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
"""Which dtype mirrors which structure; tests/abi compares them."""
