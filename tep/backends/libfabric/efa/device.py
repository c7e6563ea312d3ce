"""What is special about AWS EFA: options of an endpoint, refusals, and what its errors mean.

Read from the provider's source and manual (libfabric 1.22 to 2.6) and not yet run on hardware;
scripts/verify_efa runs it. Nothing here posts or polls.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

from tep.backends.base import Status
from tep.backends.ffi import libfabric as fi
from tep.backends.libfabric.objects import Option
from tep.base.errors import BackendUnavailable

__all__ = [
    "ROW_BYTES_MAX",
    "STATUSES",
    "check_device",
    "check_version",
    "endpoint_options",
    "same_host_way",
]

_VERSION_MIN: Final = (1, 21)
"""Before 1.18 device RDMA may stay off (its manual); before 1.21 no option of an endpoint keeps the
provider from shared memory."""

ROW_BYTES_MAX: Final = 1 << 30
"""What EFA devices write in one go (quoted: AWS). The fabric `efa` takes longer ones, cuts them and
gives the immediate to every part (2.5.1, efa_rdm_pke_write)."""

# enum efa_io_comp_status, efa_io_defs.h of the EFA driver and of the provider; fi_cq_err_entry has
# it as prov_errno. From 4096 on they are the provider's own (efa_errno.h, 2.x).
STATUSES: Final[Mapping[int, Status]] = MappingProxyType(
    {
        1: Status.FLUSHED,  # FLUSHED
        5: Status.LOCAL_KEY,  # LOCAL_ERROR_INVALID_LKEY
        6: Status.LENGTH,  # LOCAL_ERROR_BAD_LENGTH
        7: Status.REMOTE_KEY,  # REMOTE_ERROR_BAD_ADDRESS: the key, or the range under it
        9: Status.UNREACHABLE,  # REMOTE_ERROR_BAD_DEST_QPN: the peer's endpoint is gone
        10: Status.RNR,  # REMOTE_ERROR_RNR
        11: Status.LENGTH,  # REMOTE_ERROR_BAD_LENGTH
        13: Status.UNREACHABLE,  # LOCAL_ERROR_UNRESP_REMOTE
        14: Status.UNREACHABLE,  # REMOTE_ERROR_UNKNOWN_PEER: it has not inserted our address
        15: Status.UNREACHABLE,  # LOCAL_ERROR_UNREACH_REMOTE
        4124: Status.UNREACHABLE,  # FI_EFA_ERR_ESTABLISHED_RECV_UNRESP: 13, after the handshake
        4126: Status.UNREACHABLE,  # FI_EFA_ERR_UNESTABLISHED_RECV_UNRESP: 13, before it
    }
)


class HasOptions(Protocol):
    """An endpoint, as far as its options go."""

    def option(self, option: int) -> bool | None:
        """A boolean option; None where the provider does not know it."""


def endpoint_options(*, cuda: bool, same_host_shm: bool) -> tuple[Option, ...]:
    """Options to set before an endpoint is enabled.

    Args:
        cuda: whether CUDA memory will be registered. Only then the provider may be told to leave
            CUDA's API alone: without CUDA that is refused (-22).
        same_host_shm: let the provider send to peers of this host by shared memory. By default all
            goes by the NIC, so that no row takes a way that nobody asked for.

    Immediates take a receive each: a target that is slow is then met with "receiver not ready", and
    the sender's device tries again. Those that take none are acknowledged even when the target's
    completion queue is full, and are lost. Before 2.3.1 the environment alone says so, see
    tep.backends.ffi.libfabric.load().
    """
    options = [
        Option(fi.FI_OPT_SHARED_MEMORY_PERMITTED, same_host_shm),
        Option(fi.FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV, False, needed=False),
    ]
    if cuda:
        options.append(Option(fi.FI_OPT_CUDA_API_PERMITTED, False))
    return tuple(options)


def same_host_way(*, same_host_shm: bool) -> str:
    """Say which way rows to peers of this host go, for `explain`."""
    if same_host_shm:
        return (
            "peers of this host by shared memory, past the NIC (same_host_shm=True); "
            "all others by the NIC"
        )
    return "all peers by the NIC, those of this host too (same_host_shm=False)"


def check_version(nic: str, version: tuple[int, int]) -> None:
    """Refuse a library that is too old for device RDMA.

    Raises:
        BackendUnavailable: with what was found and what is needed.
    """
    if version < _VERSION_MIN:
        raise BackendUnavailable(
            f"{nic}: libfabric {version[0]}.{version[1]} is too old for EFA: it may leave device "
            "RDMA off (before 1.18), and cannot be kept from shared memory (before 1.21); 1.21 or "
            "later is needed, best the one of AWS's EFA installer"
        )


def check_device(endpoint: HasOptions, nic: str) -> None:
    """Refuse a device that cannot write and read remotely by itself, such as p4d's.

    There the provider would imitate that by messages, at a fraction of the speed, with the peer's
    processor, and reads without asking the key. Without RDMA read it does not write by RDMA either.

    Raises:
        BackendUnavailable: the provider says that it imitates writes or reads.
    """
    imitated = [
        word
        for word, option in (
            ("write", fi.FI_OPT_EFA_EMULATED_WRITE),
            ("read", fi.FI_OPT_EFA_EMULATED_READ),
        )
        if endpoint.option(option)
    ]
    if imitated:
        raise BackendUnavailable(
            f"{nic}: this EFA device lacks RDMA write or RDMA read (p4d has no write; p5, p5en, p6 "
            f"and trn2 have both), so that libfabric would imitate {' and '.join(imitated)} by "
            "messages; use provider='tcp' if that is what you want"
        )
