"""libfabric's attributes (what can be asked for, what a NIC offers) as ctypes mirrors.

fi_info and what hangs off it are allocated by the library alone (fi_dupinfo), because later
releases append fields: here is the prefix that all from 1.17 to 2.6 share. The two *_attr of queues
and address vectors we allocate ourselves. tests/abi compares every layout with the compiler's.
"""

from __future__ import annotations

from ctypes import Structure
from typing import Final

from tep.backends.ffi import libfabric_objects as _objects  # noqa: F401  # which structs point to
from tep.backends.ffi.declare import mirror, mirrors

__all__ = [
    "MIRRORED",
    "fi_av_attr",
    "fi_bus_attr",
    "fi_cq_attr",
    "fi_device_attr",
    "fi_domain_attr",
    "fi_ep_attr",
    "fi_eq_attr",
    "fi_fabric_attr",
    "fi_info",
    "fi_link_attr",
    "fi_pci_attr",
    "fi_rx_attr",
    "fi_tx_attr",
    "fid_nic",
]


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
    """What an endpoint sends with."""


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
    """What an endpoint receives with."""


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
    """Which network, by which provider."""


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
    """Where a device sits on PCI."""


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
    """Where a device sits; the union has one member."""


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
    """What is known of a NIC."""


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
    """How to open an address vector."""


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
    """How to open a completion queue."""


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
    """How to open an event queue."""


MIRRORED: Final = tuple(mirrors(__name__).values())
"""Every structure above whose layout the C headers name."""
