"""libfabric's attributes (what can be asked for, what a NIC offers) as ctypes mirrors.

fi_info and what hangs off it are allocated by the library alone (fi_dupinfo), because later
releases append fields: here is the prefix that all from 1.17 to 2.6 share. The two *_attr of queues
and address vectors we allocate ourselves. tests/abi compares every layout with the compiler's.
"""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Final

from tep.ffi.libfabric_objects import fid

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
#   struct fi_tx_attr {
#       uint64_t caps;
#       uint64_t mode;
#       uint64_t op_flags;
#       uint64_t msg_order;
#       uint64_t comp_order;
#       size_t inject_size;
#       size_t size;
#       size_t iov_limit;
#       size_t rma_iov_limit;
#       uint32_t tclass;
#   };
class fi_tx_attr(Structure):
    """What an endpoint sends with."""

    _fields_ = (
        ("caps", c_uint64),
        ("mode", c_uint64),
        ("op_flags", c_uint64),
        ("msg_order", c_uint64),
        ("comp_order", c_uint64),
        ("inject_size", c_size_t),
        ("size", c_size_t),
        ("iov_limit", c_size_t),
        ("rma_iov_limit", c_size_t),
        ("tclass", c_uint32),
    )


# <rdma/fabric.h>, 1.17:
#   struct fi_rx_attr {
#       uint64_t caps;
#       uint64_t mode;
#       uint64_t op_flags;
#       uint64_t msg_order;
#       uint64_t comp_order;
#       size_t total_buffered_recv;
#       size_t size;
#       size_t iov_limit;
#   };
class fi_rx_attr(Structure):
    """What an endpoint receives with."""

    _fields_ = (
        ("caps", c_uint64),
        ("mode", c_uint64),
        ("op_flags", c_uint64),
        ("msg_order", c_uint64),
        ("comp_order", c_uint64),
        ("total_buffered_recv", c_size_t),
        ("size", c_size_t),
        ("iov_limit", c_size_t),
    )


# <rdma/fabric.h>, 1.17:
#   struct fi_ep_attr {
#       enum fi_ep_type type;
#       uint32_t protocol;
#       uint32_t protocol_version;
#       size_t max_msg_size;
#       size_t msg_prefix_size;
#       size_t max_order_raw_size;
#       size_t max_order_war_size;
#       size_t max_order_waw_size;
#       uint64_t mem_tag_format;
#       size_t tx_ctx_cnt;
#       size_t rx_ctx_cnt;
#       size_t auth_key_size;
#       uint8_t *auth_key;
#   };
class fi_ep_attr(Structure):
    """An endpoint's kind and limits."""

    _fields_ = (
        ("type", c_int),
        ("protocol", c_uint32),
        ("protocol_version", c_uint32),
        ("max_msg_size", c_size_t),
        ("msg_prefix_size", c_size_t),
        ("max_order_raw_size", c_size_t),
        ("max_order_war_size", c_size_t),
        ("max_order_waw_size", c_size_t),
        ("mem_tag_format", c_uint64),
        ("tx_ctx_cnt", c_size_t),
        ("rx_ctx_cnt", c_size_t),
        ("auth_key_size", c_size_t),
        ("auth_key", c_void_p),
    )


# <rdma/fabric.h>, 1.17:
#   struct fi_domain_attr {
#       struct fid_domain *domain;
#       char *name;
#       enum fi_threading threading;
#       enum fi_progress control_progress;
#       enum fi_progress data_progress;
#       enum fi_resource_mgmt resource_mgmt;
#       enum fi_av_type av_type;
#       int mr_mode;
#       size_t mr_key_size;
#       size_t cq_data_size;
#       size_t cq_cnt;
#       size_t ep_cnt;
#       size_t tx_ctx_cnt;
#       size_t rx_ctx_cnt;
#       size_t max_ep_tx_ctx;
#       size_t max_ep_rx_ctx;
#       size_t max_ep_stx_ctx;
#       size_t max_ep_srx_ctx;
#       size_t cntr_cnt;
#       size_t mr_iov_limit;
#       uint64_t caps;
#       uint64_t mode;
#       uint8_t *auth_key;
#       size_t auth_key_size;
#       size_t max_err_data;
#       size_t mr_cnt;
#       uint32_t tclass;
#   };
# Later releases append fields (max_ep_auth_key 1.20, max_group_id 2.0, ...): this is their common
# prefix, so tep never allocates one. `name` is void *: strings of hints come from strdup().
class fi_domain_attr(Structure):
    """A NIC's limits and demands."""

    _fields_ = (
        ("domain", c_void_p),
        ("name", c_void_p),
        ("threading", c_int),
        ("control_progress", c_int),
        ("data_progress", c_int),
        ("resource_mgmt", c_int),
        ("av_type", c_int),
        ("mr_mode", c_int),
        ("mr_key_size", c_size_t),
        ("cq_data_size", c_size_t),
        ("cq_cnt", c_size_t),
        ("ep_cnt", c_size_t),
        ("tx_ctx_cnt", c_size_t),
        ("rx_ctx_cnt", c_size_t),
        ("max_ep_tx_ctx", c_size_t),
        ("max_ep_rx_ctx", c_size_t),
        ("max_ep_stx_ctx", c_size_t),
        ("max_ep_srx_ctx", c_size_t),
        ("cntr_cnt", c_size_t),
        ("mr_iov_limit", c_size_t),
        ("caps", c_uint64),
        ("mode", c_uint64),
        ("auth_key", c_void_p),
        ("auth_key_size", c_size_t),
        ("max_err_data", c_size_t),
        ("mr_cnt", c_size_t),
        ("tclass", c_uint32),
    )


# <rdma/fabric.h>, 1.17:
#   struct fi_fabric_attr {
#       struct fid_fabric *fabric;
#       char *name;
#       char *prov_name;
#       uint32_t prov_version;
#       uint32_t api_version;
#   };
class fi_fabric_attr(Structure):
    """Which network, by which provider."""

    _fields_ = (
        ("fabric", c_void_p),
        ("name", c_void_p),
        ("prov_name", c_void_p),
        ("prov_version", c_uint32),
        ("api_version", c_uint32),
    )


# <rdma/fabric.h>, 1.17:
#   struct fi_link_attr {
#       char *address;
#       size_t mtu;
#       size_t speed;
#       enum fi_link_state state;
#       char *network_type;
#   };
class fi_link_attr(Structure):
    """A NIC's link."""

    _fields_ = (
        ("address", c_char_p),
        ("mtu", c_size_t),
        ("speed", c_size_t),
        ("state", c_int),
        ("network_type", c_char_p),
    )


# <rdma/fabric.h>, 1.17:
#   struct fi_device_attr {
#       char *name;
#       char *device_id;
#       char *device_version;
#       char *vendor_id;
#       char *driver;
#       char *firmware;
#   };
class fi_device_attr(Structure):
    """A NIC as a device."""

    _fields_ = (
        ("name", c_char_p),
        ("device_id", c_char_p),
        ("device_version", c_char_p),
        ("vendor_id", c_char_p),
        ("driver", c_char_p),
        ("firmware", c_char_p),
    )


# <rdma/fabric.h>, 1.17:
#   struct fi_pci_attr {
#       uint16_t domain_id;
#       uint8_t bus_id;
#       uint8_t device_id;
#       uint8_t function_id;
#   };
class fi_pci_attr(Structure):
    """Where a device sits on PCI."""

    _fields_ = (
        ("domain_id", c_uint16),
        ("bus_id", c_uint8),
        ("device_id", c_uint8),
        ("function_id", c_uint8),
    )


# <rdma/fabric.h>, 1.17:
#   struct fi_bus_attr {
#       enum fi_bus_type bus_type;
#       union {
#       struct fi_pci_attr pci;
#       } attr;
#   };
class fi_bus_attr(Structure):
    """Where a device sits; the union has one member."""

    _fields_ = (
        ("bus_type", c_int),
        ("attr", fi_pci_attr),
    )


# <rdma/fabric.h>, 1.17:
#   struct fid_nic {
#       struct fid fid;
#       struct fi_device_attr *device_attr;
#       struct fi_bus_attr *bus_attr;
#       struct fi_link_attr *link_attr;
#       void *prov_attr;
#   };
class fid_nic(Structure):
    """What is known of a NIC."""

    _fields_ = (
        ("fid", fid),
        ("device_attr", POINTER(fi_device_attr)),
        ("bus_attr", POINTER(fi_bus_attr)),
        ("link_attr", POINTER(fi_link_attr)),
        ("prov_attr", c_void_p),
    )


# <rdma/fabric.h>, 1.17:
#   struct fi_info {
#       struct fi_info *next;
#       uint64_t caps;
#       uint64_t mode;
#       uint32_t addr_format;
#       size_t src_addrlen;
#       size_t dest_addrlen;
#       void *src_addr;
#       void *dest_addr;
#       fid_t handle;
#       struct fi_tx_attr *tx_attr;
#       struct fi_rx_attr *rx_attr;
#       struct fi_ep_attr *ep_attr;
#       struct fi_domain_attr *domain_attr;
#       struct fi_fabric_attr *fabric_attr;
#       struct fid_nic *nic;
#   };
class fi_info(Structure):
    """One offer of a provider, or our hints."""


fi_info._fields_ = (
    ("next", POINTER(fi_info)),
    ("caps", c_uint64),
    ("mode", c_uint64),
    ("addr_format", c_uint32),
    ("src_addrlen", c_size_t),
    ("dest_addrlen", c_size_t),
    ("src_addr", c_void_p),
    ("dest_addr", c_void_p),
    ("handle", c_void_p),
    ("tx_attr", POINTER(fi_tx_attr)),
    ("rx_attr", POINTER(fi_rx_attr)),
    ("ep_attr", POINTER(fi_ep_attr)),
    ("domain_attr", POINTER(fi_domain_attr)),
    ("fabric_attr", POINTER(fi_fabric_attr)),
    ("nic", POINTER(fid_nic)),
)


# <rdma/fi_domain.h>, 1.17:
#   struct fi_av_attr {
#       enum fi_av_type type;
#       int rx_ctx_bits;
#       size_t count;
#       size_t ep_per_node;
#       const char *name;
#       void *map_addr;
#       uint64_t flags;
#   };
class fi_av_attr(Structure):
    """How to open an address vector."""

    _fields_ = (
        ("type", c_int),
        ("rx_ctx_bits", c_int),
        ("count", c_size_t),
        ("ep_per_node", c_size_t),
        ("name", c_char_p),
        ("map_addr", c_void_p),
        ("flags", c_uint64),
    )


# <rdma/fi_eq.h>, 1.17:
#   struct fi_cq_attr {
#       size_t size;
#       uint64_t flags;
#       enum fi_cq_format format;
#       enum fi_wait_obj wait_obj;
#       int signaling_vector;
#       enum fi_cq_wait_cond wait_cond;
#       struct fid_wait *wait_set;
#   };
class fi_cq_attr(Structure):
    """How to open a completion queue."""

    _fields_ = (
        ("size", c_size_t),
        ("flags", c_uint64),
        ("format", c_int),
        ("wait_obj", c_int),
        ("signaling_vector", c_int),
        ("wait_cond", c_int),
        ("wait_set", c_void_p),
    )


# <rdma/fi_eq.h>, 1.17:
#   struct fi_eq_attr {
#       size_t size;
#       uint64_t flags;
#       enum fi_wait_obj wait_obj;
#       int signaling_vector;
#       struct fid_wait *wait_set;
#   };
class fi_eq_attr(Structure):
    """How to open an event queue."""

    _fields_ = (
        ("size", c_size_t),
        ("flags", c_uint64),
        ("wait_obj", c_int),
        ("signaling_vector", c_int),
        ("wait_set", c_void_p),
    )


MIRRORED: Final[tuple[type[Structure], ...]] = (
    fi_eq_attr,
    fi_tx_attr,
    fi_rx_attr,
    fi_ep_attr,
    fi_domain_attr,
    fi_fabric_attr,
    fi_link_attr,
    fi_device_attr,
    fi_pci_attr,
    fi_bus_attr,
    fid_nic,
    fi_info,
    fi_av_attr,
    fi_cq_attr,
)
"""Every structure above whose layout the C headers name."""
