"""libfabric's descriptors, completions and memory attributes, as ctypes mirrors.

We allocate these, so each is as long as the longest header (2.6) makes it, and zeroed. The data
path fills and reads them by numpy, with the dtypes at the end. tests/abi compares every layout.
"""

from __future__ import annotations

from ctypes import Structure, Union, c_int, c_size_t, c_uint64, c_void_p
from typing import Final

import numpy as np

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
#   struct fi_cq_data_entry {
#       void *op_context;
#       uint64_t flags;
#       size_t len;
#       void *buf;
#       /* data depends on operation and/or flags - e.g. remote EQ data */
#       uint64_t data;
#   };
class fi_cq_data_entry(Structure):
    """One completion."""

    _fields_ = (
        ("op_context", c_void_p),
        ("flags", c_uint64),
        ("len", c_size_t),
        ("buf", c_void_p),
        ("data", c_uint64),
    )


# <rdma/fi_eq.h>, 1.17:
#   struct fi_cq_err_entry {
#       void *op_context;
#       uint64_t flags;
#       size_t len;
#       void *buf;
#       uint64_t data;
#       uint64_t tag;
#       size_t olen;
#       int err;
#       int prov_errno;
#       /* err_data is available until the next time the CQ is read */
#       void *err_data;
#       size_t err_data_size;
#   };
# 1.20 appends: fi_addr_t src_addr;  Since 2.0 the inline fi_cq_readerr() presets it to -1, which
# we must do ourselves. We own this struct: it is as long as the longest header's.
class fi_cq_err_entry(Structure):
    """One failed completion."""

    _fields_ = (
        ("op_context", c_void_p),
        ("flags", c_uint64),
        ("len", c_size_t),
        ("buf", c_void_p),
        ("data", c_uint64),
        ("tag", c_uint64),
        ("olen", c_size_t),
        ("err", c_int),
        ("prov_errno", c_int),
        ("err_data", c_void_p),
        ("err_data_size", c_size_t),
        ("src_addr", c_uint64),
    )


# <rdma/fi_eq.h>, 1.17:
#   struct fi_eq_err_entry {
#       fid_t fid;
#       void *context;
#       uint64_t data;
#       int err;
#       int prov_errno;
#       /* err_data is available until the next time the EQ is read */
#       void *err_data;
#       size_t err_data_size;
#   };
class fi_eq_err_entry(Structure):
    """What went wrong on an endpoint and belongs to no operation."""

    _fields_ = (
        ("fid", c_void_p),
        ("context", c_void_p),
        ("data", c_uint64),
        ("err", c_int),
        ("prov_errno", c_int),
        ("err_data", c_void_p),
        ("err_data_size", c_size_t),
    )


# <rdma/fi_rma.h>, 1.17:
#   struct fi_rma_iov {
#       uint64_t addr;
#       size_t len;
#       uint64_t key;
#   };
class fi_rma_iov(Structure):
    """A range of the target."""

    _fields_ = (
        ("addr", c_uint64),
        ("len", c_size_t),
        ("key", c_uint64),
    )


# <rdma/fi_rma.h>, 1.17:
#   struct fi_msg_rma {
#       const struct iovec *msg_iov;
#       void **desc;
#       size_t iov_count;
#       fi_addr_t addr;
#       const struct fi_rma_iov *rma_iov;
#       size_t rma_iov_count;
#       void *context;
#       uint64_t data;
#   };
class fi_msg_rma(Structure):
    """One write, spelled out."""

    _fields_ = (
        ("msg_iov", c_void_p),
        ("desc", c_void_p),
        ("iov_count", c_size_t),
        ("addr", c_uint64),
        ("rma_iov", c_void_p),
        ("rma_iov_count", c_size_t),
        ("context", c_void_p),
        ("data", c_uint64),
    )


# <sys/uio.h>:
#   struct iovec {
#       void *iov_base;
#       size_t iov_len;
#   };
class iovec(Structure):
    """A range of ours."""

    _fields_ = (
        ("iov_base", c_void_p),
        ("iov_len", c_size_t),
    )


# <rdma/fi_domain.h>, 1.17:
#   struct fi_mr_dmabuf {
#       int fd;
#       uint64_t offset;
#       size_t len;
#       void *base_addr;
#   };
# (since 1.20)
class fi_mr_dmabuf(Structure):
    """A range of a dma-buf."""

    _fields_ = (
        ("fd", c_int),
        ("offset", c_uint64),
        ("len", c_size_t),
        ("base_addr", c_void_p),
    )


# The anonymous `union { uint64_t reserved; int cuda; ... } device` below.
class hmem_device(Union):
    """Which device memory is on."""

    _fields_ = (("reserved", c_uint64), ("cuda", c_int))


# <rdma/fi_domain.h>, 1.17:
#   struct fi_mr_attr {
#       const struct iovec *mr_iov;
#       size_t iov_count;
#       uint64_t access;
#       uint64_t offset;
#       uint64_t requested_key;
#       void *context;
#       size_t auth_key_size;
#       uint8_t *auth_key;
#       enum fi_hmem_iface iface;
#       union {
#       uint64_t reserved;
#       int cuda;
#       int ze;
#       int neuron;
#       int synapseai;
#       } device;
#   };
# Since 1.20 mr_iov shares its place with `const struct fi_mr_dmabuf *dmabuf`. Appended later:
# void *hmem_data (1.20), size_t page_size (1.22), const struct fid_mr *base_mr and
# size_t sub_mr_cnt (2.0). We own this struct: it is as long as the longest header's.
class fi_mr_attr(Structure):
    """How to register a region."""

    _fields_ = (
        ("mr_iov", c_void_p),
        ("iov_count", c_size_t),
        ("access", c_uint64),
        ("offset", c_uint64),
        ("requested_key", c_uint64),
        ("context", c_void_p),
        ("auth_key_size", c_size_t),
        ("auth_key", c_void_p),
        ("iface", c_int),
        ("device", hmem_device),
        ("hmem_data", c_void_p),
        ("page_size", c_size_t),
        ("base_mr", c_void_p),
        ("sub_mr_cnt", c_size_t),
    )


MIRRORED: Final[tuple[type[Structure], ...]] = (
    fi_cq_data_entry,
    fi_cq_err_entry,
    fi_eq_err_entry,
    fi_rma_iov,
    fi_msg_rma,
    iovec,
    fi_mr_dmabuf,
    fi_mr_attr,
)
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
