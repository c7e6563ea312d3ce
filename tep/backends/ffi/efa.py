"""libibverbs and libefa by ctypes, as an EFA device needs them: calls, and the structs they take.

Structs of libibverbs are those of <infiniband/verbs.h> of rdma-core 44.0, libefa's those of
providers/efa/efadv.h of rdma-core 64. An older libefa takes the shorter ones: it goes by the length
that it is given. tests/abi compares all of them with the compiler. Nothing here decides anything.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from functools import cache
from typing import Final

from tep.backends.ffi.ibverbs import Library, Struct, fail
from tep.backends.ffi.load import find, give_types, lacks, mirror, prototypes

__all__ = ["SESSION_OFFSETS", "Dv", "Efa", "load"]

# Structs that others have made longer since: the library goes by the length that it is given. Of
# ibv_cq_init_attr_ex the members up to wc_flags are used.
Dv: Final = mirror("""
struct ibv_cq_init_attr_ex {
    uint32_t cqe; void *cq_context; void *channel; uint32_t comp_vector;
    uint64_t wc_flags; uint32_t comp_mask; uint32_t flags; struct ibv_pd *parent_domain;
};
struct efadv_device_attr {
    uint64_t comp_mask; uint32_t max_sq_wr; uint32_t max_rq_wr; uint16_t max_sq_sge;
    uint16_t max_rq_sge; uint16_t inline_buf_size; uint16_t inline_buf_size_ex;
    uint32_t device_caps; uint32_t max_rdma_size;
};
struct efadv_ah_attr {
    uint64_t comp_mask; uint16_t ahn; uint8_t reserved[6];
};
struct efadv_qp_init_attr {
    uint64_t comp_mask; uint32_t driver_qp_type; uint16_t flags; uint8_t sl; uint8_t reserved;
};
struct efadv_cq_init_attr {
    uint64_t comp_mask; uint64_t wc_flags;
};
struct efadv_wq_attr {
    uint64_t comp_mask; uint8_t *buffer; uint32_t entry_size; uint32_t num_entries;
    uint32_t *doorbell; uint32_t max_batch; uint16_t caps; uint8_t reserved[2];
};
struct efadv_cq_attr {
    uint64_t comp_mask; uint8_t *buffer; uint32_t entry_size; uint32_t num_entries;
    uint32_t *doorbell;
};
""")
"""Each struct by its own name; tests/abi goes through all of them."""

SESSION_OFFSETS: Final = {"x86_64": (320, 336), "aarch64": (328, 344)}
"""Offsets of wr_start and wr_abort in struct ibv_qp_ex, behind a mutex and a condition."""

_MORE: Final = prototypes("""
int ibv_query_gid(struct ibv_context *context, uint8_t port_num, int index,
                  union ibv_gid *gid);
struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp);
""")

_DIRECT: Final = prototypes("""
int efadv_query_device(struct ibv_context *, struct efadv_device_attr *, uint32_t inlen);
int efadv_query_ah(struct ibv_ah *, struct efadv_ah_attr *, uint32_t inlen);
struct ibv_cq_ex *efadv_create_cq(struct ibv_context *, struct ibv_cq_init_attr_ex *,
                                  struct efadv_cq_init_attr *, uint32_t inlen);
struct ibv_qp *efadv_create_qp_ex(struct ibv_context *, struct ibv_qp_init_attr_ex *,
                                  struct efadv_qp_init_attr *, uint32_t inlen);
/* Version EFA_1.4 of libefa's symbols. */
int efadv_query_qp_wqs(struct ibv_qp *, struct efadv_wq_attr *sq_attr,
                       struct efadv_wq_attr *rq_attr, uint32_t inlen);
int efadv_query_cq(struct ibv_cq *, struct efadv_cq_attr *, uint32_t inlen);
""")


class Efa(Library):
    """Both libraries with the calls that EFA needs; `Library` says how they are made."""

    def __init__(self, verbs_path: str, efa_path: str) -> None:
        # libefa is the provider itself under another name: there is one copy of it in the process.
        super().__init__(ctypes.CDLL(verbs_path, use_errno=True), verbs_path)
        self.efa_path = efa_path
        give_types(self._lib, _MORE)
        direct = ctypes.CDLL(efa_path, use_errno=True)
        give_types(direct, _DIRECT)
        for name in _DIRECT:
            setattr(self._lib, name, getattr(direct, name))  # where ok() and make() look

    def query_gid(self, context: int) -> bytes:
        """The address of an EFA device: it has one port and one GID."""
        gid = ctypes.create_string_buffer(16)
        if self.ask("ibv_query_gid", context, 1, 0, gid):
            fail("ibv_query_gid", ctypes.get_errno() or errno.EIO)
        return gid.raw

    def is_efa(self, context: int) -> Struct | None:
        """Ask what the device can do; None: it is not an EFA device."""
        attr = Dv.efadv_device_attr()
        rc = self.ask("efadv_query_device", context, ctypes.byref(attr), ctypes.sizeof(attr))
        return None if rc else attr


def load() -> Efa:
    """Load both libraries, the same object each time; BackendUnavailable: one is missing.

    TEP_LIBIBVERBS and TEP_LIBEFA name others than those that the dynamic linker finds.
    """
    verbs = _find("libibverbs", "TEP_LIBIBVERBS", _MORE)
    return _opened(verbs, _find("libefa", "TEP_LIBEFA", _DIRECT))


def _find(what: str, variable: str, names: Iterable[str]) -> str:
    named, places = (variable, os.environ.get(variable)), {"system": [f"{what}.so.1"]}
    return find(f"{what} for EFA", named, places, lambda lib: lacks(lib, names), _CURE).path


_CURE: Final = (
    "install rdma-core 60 or later with its EFA provider, best by AWS's EFA installer; or the "
    "backend libfabric with provider='efa'"
)
_opened = cache(Efa)
