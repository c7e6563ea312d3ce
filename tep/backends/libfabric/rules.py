"""The needs of each provider: a table of data, asked once at opening; and what EFA alone needs.

Every line was learnt by experiment on libfabric 1.17 to 2.5, except EFA's, which is read from the
provider's source and manual (1.22 to 2.6) and not yet run on hardware; scripts/verify_efa runs it.
Nothing here opens, posts or polls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Protocol

from tep.backends.base import Status
from tep.backends.ffi import libfabric as fi
from tep.backends.libfabric.objects import Option
from tep.base.errors import BackendUnavailable
from tep.base.units import KiB, MiB

__all__ = [
    "ROW_BYTES_MAX", "RULES", "STATUSES", "Rules", "check_device", "check_version",
    "endpoint_options", "same_host_way",
]  # fmt: skip

_NEVER: Final = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The way in which one provider is driven.

    Attributes:
        provider: as the user names it, and addresses carry it.
        names: what libfabric calls it; the first that it offers is taken.
        fabric: which of its fabrics, where it has several; "" = any.
        software: it is no device, its NICs are named by IP addresses, and it says nothing useful of
            a bad key: the target is asked for a region's bounds before the first row to it, see
            tcp.py.
        caps, mr_mode: of the hints, besides FI_MSG | FI_RMA.
        delivery_complete: a local completion must wait for the target. Without it tcp completes
            writes that never arrive.
        copies_from: rows of this many bytes are copied inside the post.
        releases_from: rows of this many bytes take long enough to post to drop the interpreter's
            lock meanwhile, so that the user's own thread can have it. It costs 0.03 us a row.
        turn_rows: rows posted between two polls.
        turn_bytes: the same in bytes, for rows that are copied inside the post: what was copied
            should be taken while it is in the cache.
        window_rows, window_bytes: rows and bytes in flight; small, to keep them in the cache.
        tx_entries, rx_entries: of each endpoint's queues; 0 = the provider's own choice.
        frames_in, frames_out: buffers for messages that come in, and that go out.
        imm_takes_receive: an immediate takes one of `frames_in`, comes with the context of that
            receive, and it is posted again.
        more: the provider gathers writes that say FI_MORE, and rings its doorbell once.
        ordered: rows to one peer land in posting order.
        msg_bytes_max: longest message.
        endpoint_per_peer: post to each peer through an endpoint of its own, so that a dead one can
            be cut off, and its errors flush nobody else's rows.
    """

    provider: str
    names: tuple[str, ...]
    fabric: str = ""
    software: bool = False
    caps: int = 0
    mr_mode: int = fi.FI_MR_LOCAL | fi.FI_MR_VIRT_ADDR | fi.FI_MR_ALLOCATED | fi.FI_MR_PROV_KEY
    delivery_complete: bool = False
    copies_from: int = _NEVER
    releases_from: int = _NEVER
    turn_rows: int = 1 << 30
    turn_bytes: int = 1 << 62
    window_rows: int = 1024
    window_bytes: int = _NEVER
    tx_entries: int = 0
    rx_entries: int = 0
    frames_in: int = 64
    frames_out: int = 64
    imm_takes_receive: bool = False
    more: bool = False
    ordered: bool = True
    msg_bytes_max: int = 64 * KiB
    endpoint_per_peer: bool = False


_TCP: Final = Rules(
    provider="tcp",
    # "net" is what 1.17 calls today's tcp; asked for "tcp" it would give "tcp;ofi_rxm".
    names=("net", "tcp"),
    software=True,
    delivery_complete=True,
    copies_from=32 * KiB,
    releases_from=0,  # each is a system call of 5 us: 512 held it for 2.5 ms
    turn_rows=512,  # with 128 a write of 4 KiB costs a tenth more
    turn_bytes=MiB,  # 64 KiB rows cost a tenth less CPU than with a window at a time
    window_bytes=4 * MiB,
    endpoint_per_peer=True,
)

_EFA: Final = Rules(
    provider="efa",
    names=("efa",),
    fabric="efa",
    caps=fi.FI_LOCAL_COMM | fi.FI_REMOTE_COMM,
    # The provider registers a packet of 9 KB for each place in its queues: 111 MB a NIC if it may
    # choose, 28 GB for 8 engines that open all 32 NICs of a p5. With these sizes it is 14 MB, with
    # the frames' buffers 15, 3.8 GB in all. 512 rows of 4 KiB are four times what a NIC of
    # 100 Gbit/s has in flight within 20 us.
    tx_entries=512,
    rx_entries=1024,
    frames_in=8,
    frames_out=8,
    window_rows=512,
    ordered=False,
)

RULES: Final[Mapping[str, Rules]] = MappingProxyType(
    {
        rules.provider: rules
        for rules in (
            _TCP,
            replace(
                _TCP,
                provider="tcp;ofi_rxm",
                names=("tcp;ofi_rxm",),
                turn_bytes=1 << 62,
                tx_entries=256,  # its own choice costs 17 MB and 0.1 s a connection
                rx_entries=256,
                endpoint_per_peer=False,
            ),
            _EFA,
            replace(
                _EFA,
                provider="efa-direct",
                fabric="efa-direct",
                msg_bytes_max=4 * KiB,  # its messages are one packet of about 8 KiB (its manual)
                # It registers no packets here. Each immediate takes a receive: 2,048 (9 MB a NIC)
                # last for 2 ms at a million a second; then the sender's device waits and retries.
                # The window and the frames fit into the queue: a chain of FI_MORE is never refused.
                tx_entries=1024 + 64,
                rx_entries=2048,
                frames_in=2048,
                frames_out=64,
                window_rows=1024,
                imm_takes_receive=True,
                more=True,
            ),
        )
    }
)
"""The providers that tep drives, by the name that the user gives."""


# ------------------------------------------------------------------ EFA

_VERSION_MIN: Final = (1, 21)
"""Before 1.18 device RDMA may stay off (its manual); before 1.21 no option of an endpoint keeps the
provider from shared memory."""

ROW_BYTES_MAX: Final = 1 << 30
"""The most that EFA devices write in one go (quoted: AWS). The fabric `efa` takes longer ones, cuts
them and gives the immediate to every part (2.5.1, efa_rdm_pke_write)."""

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
