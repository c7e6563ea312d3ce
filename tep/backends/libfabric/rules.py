"""The needs of each provider, as data; what EFA alone needs; and a NIC's address as bytes.

Every line was learnt by experiment on libfabric 1.17 to 2.5, except EFA's, which is read from the
provider's source and manual (1.22 to 2.6) and not yet run on hardware; scripts/verify_efa runs it.
Nothing here opens, posts or polls.

An address is a MessagePack array: a tag with the layout's version, which tells releases apart whose
frames differ, then the fields of `NicAddress` in order: provider, incarnation, and the provider's
own name of the endpoint (what fi_getname gave).

Rule: raw bytes reach fi_av_insert only through `parse`. On tcp one address of a wrong family would
be taken in silence and make every later insert fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final

import msgspec

from tep.backends.base import Status
from tep.backends.common import read_message
from tep.backends.ffi import libfabric as fi
from tep.backends.ffi.libc import SOCKADDR_BYTES
from tep.backends.libfabric.objects import Endpoint, Option
from tep.base.errors import BackendUnavailable, BadDescriptor
from tep.base.units import KiB, MiB

__all__ = [
    "ROW_BYTES_MAX", "RULES", "STATUSES", "NicAddress", "Rules", "check_device", "check_version",
    "efa_place", "endpoint_options", "engine_of", "parse",
]  # fmt: skip

_NEVER: Final = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The way in which one provider is driven.

    Attributes:
        provider: as the user names it, and addresses carry it.
        names: what libfabric calls it; the first that it offers is taken.
        software: it is no device, its NICs are named by IP addresses, each peer has an endpoint of
            its own, so that a dead one can be cut off, and it says nothing useful of a bad key: the
            target is asked for a region's bounds before the first row to it, see tcp.py. A local
            completion must wait for the target (FI_DELIVERY_COMPLETE): without it tcp completes
            writes that never arrive.
        caps, mr_mode: of the hints, besides FI_MSG | FI_RMA.
        turn_bytes: posted between two polls: what was copied inside the post should be taken while
            it is in the cache.
        window_rows, window_bytes: rows and bytes in flight; small, to keep them in the cache.
        tx_entries, rx_entries: of each endpoint's queues; 0 = the provider's own choice.
        frames_in, frames_out: buffers for messages that come in, and that go out.
        ordered: rows to one peer land in posting order.
        msg_bytes_max: longest message.
    """

    provider: str
    names: tuple[str, ...]
    software: bool = False
    caps: int = 0
    mr_mode: int = fi.FI_MR_LOCAL | fi.FI_MR_VIRT_ADDR | fi.FI_MR_ALLOCATED | fi.FI_MR_PROV_KEY
    turn_bytes: int = 1 << 62
    window_rows: int = 1024
    window_bytes: int = _NEVER
    tx_entries: int = 0
    rx_entries: int = 0
    frames_in: int = 64
    frames_out: int = 64
    ordered: bool = True
    msg_bytes_max: int = 64 * KiB


_TCP: Final = Rules(
    provider="tcp",
    # "net" is what 1.17 calls today's tcp; asked for "tcp" it would give another provider.
    names=("net", "tcp"),
    software=True,
    turn_bytes=2 * MiB,  # 64 KiB rows cost a tenth less CPU than with a window at a time
    window_bytes=4 * MiB,
)

_EFA: Final = Rules(
    provider="efa",
    names=("efa",),
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
    {rules.provider: rules for rules in (_TCP, _EFA)}
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


def endpoint_options(*, cuda: bool) -> tuple[Option, ...]:
    """Options to set before an endpoint is enabled.

    Args:
        cuda: whether CUDA memory will be registered. Only then the provider may be told to leave
            CUDA's API alone: without CUDA that is refused (-22).

    No row to a peer of this host goes by shared memory, a way that nobody asked for.
    Immediates take a receive each: a target that is slow is then met with "receiver not ready", and
    the sender's device tries again. Those that take none are acknowledged even when the target's
    completion queue is full, and are lost. Before 2.3.1 the environment alone says so, see
    tep.backends.ffi.libfabric.load().
    """
    wanted: tuple[Option, ...] = (
        (fi.FI_OPT_SHARED_MEMORY_PERMITTED, False, True),
        (fi.FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV, False, False),
    )
    return (*wanted, (fi.FI_OPT_CUDA_API_PERMITTED, False, True)) if cuda else wanted


def check_version(nic: str, version: tuple[int, int]) -> None:
    """Raise BackendUnavailable for a library that is too old for device RDMA."""
    if version < _VERSION_MIN:
        raise BackendUnavailable(
            f"{nic}: libfabric {version[0]}.{version[1]} is too old for EFA: it may leave device "
            "RDMA off (before 1.18), and cannot be kept from shared memory (before 1.21); 1.21 or "
            "later is needed, best the one of AWS's EFA installer"
        )


def check_device(endpoint: Endpoint, nic: str) -> None:
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


# ------------------------------------------------------------------ addresses

_BYTES_MAX: Final = 256  # of the field that carries an address in NetAddr
_AROUND_BYTES: Final = 24
"""The most bytes that an address takes beside its texts and the endpoint's name."""


class NicAddress(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="OFI3"
):
    """The address of one NIC in one incarnation.

    Attributes:
        provider: as the user names it; peers must agree.
        epoch: of its engine.
        nic: for people to read.
        raw: the endpoint's name in the provider's format.
    """

    provider: str
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    nic: str
    raw: bytes

    def to_bytes(self) -> bytes:
        """Write the address down. The NIC's name, for people only, gives way where it is long."""
        room = _BYTES_MAX - _AROUND_BYTES - len(self.provider.encode()) - len(self.raw)
        name = self.nic.encode()[:room].decode(errors="ignore")
        return msgspec.msgpack.encode(msgspec.structs.replace(self, nic=name))


_ADDRESS: Final = msgspec.msgpack.Decoder(NicAddress)


def parse(data: bytes, provider: str) -> NicAddress:
    """Read an address; BadDescriptor for no such one, or one that the provider would choke on."""
    found = read_message(_ADDRESS, data, "the address of a libfabric NIC")
    if found.provider != provider:
        raise BadDescriptor(
            f"the peer's NIC {found.nic!r} is driven by provider {found.provider!r}, this one by "
            f"{provider!r}; open both ends with the same provider"
        )
    complaint = _CHECKS[provider](found.raw)
    if complaint:
        text = f"{complaint}: {found.raw.hex() or 'empty'}"
        raise BadDescriptor(f"libfabric address of {found.nic!r}: {text}")
    # One copy of a NIC's name: peers that come and go a thousand times are all kept.
    return msgspec.structs.replace(found, nic=sys.intern(found.nic))


def engine_of(data: bytes) -> bytes:
    """Return what the addresses of all NICs of one engine share: the epoch, a time in ns."""
    try:
        found = read_message(_ADDRESS, data, "the address of a libfabric NIC")
    except BadDescriptor:
        return data
    return found.epoch.to_bytes(8, "little")


def efa_place(raw: bytes) -> bytes:
    """The GID and the number of the queue pair in an EFA address: endpoints get numbers again."""
    return raw[:18]


def _check_socket(raw: bytes) -> str:
    """Complain unless this is a sockaddr_in or sockaddr_in6 with a port."""
    if len(raw) < 4:
        return f"{len(raw)} bytes are too few for a socket address"
    family = int.from_bytes(raw[:2], sys.byteorder)
    size = SOCKADDR_BYTES.get(family)
    if size is None:
        return f"socket family {family} is neither IPv4 nor IPv6"
    if len(raw) != size:
        return f"{len(raw)} bytes, a socket address of family {family} has {size}"
    if raw[2:4] == b"\0\0":
        return "port 0"
    return ""


def _check_efa(raw: bytes) -> str:
    """Complain unless this is GID, queue pair number, connection id: 32 bytes."""
    if len(raw) != 32:
        return f"{len(raw)} bytes, an EFA address has 32"
    return "" if any(raw[:16]) else "its GID is zero"


_CHECKS: Final[Mapping[str, Callable[[bytes], str]]] = MappingProxyType(
    {
        "tcp": _check_socket,
        "efa": _check_efa,
        "srd": _check_efa,  # of the backend `efa`
    }
)
