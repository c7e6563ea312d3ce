"""The efa backend: AWS EFA's SRD through libibverbs and libefa, without libfabric; opened here.

README.md in this folder says how it posts, and what nobody has verified yet on a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tep.backends.base import DomainCaps, Opened
from tep.backends.common import all_or_none, check_timeout, identity
from tep.backends.efa.device import Nic, Sizes, efa_devices
from tep.backends.efa.domain import EfaDomain
from tep.backends.efa.ways import Columns
from tep.backends.ffi.efa import Efa, load
from tep.backends.ffi.ibverbs import NOT_FORK_SAFE
from tep.backends.libfabric.peers import CONTROL_BYTES_MAX
from tep.backends.libfabric.rules import ROW_BYTES_MAX, RULES, Rules
from tep.base.errors import BackendUnavailable, FabricError, UsageError
from tep.base.units import KiB
from tep.memory.source import DmabufExport

__all__ = ["EfaDomain", "facts", "open_domains", "probe"]

_RULES: Final = replace(
    RULES["efa"], provider="srd", frames_in=2048, frames_out=64, msg_bytes_max=4 * KiB
)
_SEND: Final = 4096
"""Requests that the send queue holds where the device has so many; request ids have 16 bits, and a
row that was given up keeps its id, so that there are eight times as many ids as rows."""


_READS: Final = 1024
"""Reads that may be out; they share the send queue with the writes."""


def open_domains(
    *,
    nics: Sequence[str] | int | None = None,
    name: str | None = None,
    epoch: int | None = None,
    peer_timeout_s: float = 5.0,
    dmabuf: DmabufExport | None = None,
) -> Opened:
    """Open the NICs of one engine.

    Args:
        nics: devices' names, or how many. None: all EFA devices.
        name: for reports, and the identity of a restart; None = host, pid and a number.
        epoch: this incarnation's number; None = the time in nanoseconds.
        peer_timeout_s: how long a peer may be silent before rows to it fail.
        dmabuf: exports CUDA memory as a dma-buf, see tep.memory.source; None = host memory only.

    Raises:
        UsageError: impossible names or numbers.
        BackendUnavailable: no library, no device, or one whose queues cannot be mapped.
    """
    check_timeout("efa", peer_timeout_s)
    name, epoch = identity("efa", name, epoch)
    lib = load()
    domains = all_or_none(
        _open(lib, nic, epoch, peer_timeout_s, dmabuf) for nic in _names(lib, nics)
    )
    return Opened(domains, epoch, name)


def _names(lib: Efa, nics: Sequence[str] | int | None) -> list[str]:
    found = efa_devices(lib)
    if not found:
        raise BackendUnavailable(
            "efa: no EFA device here", ((lib.path, "ibv_get_device_list has none of EFA's"),)
        )
    if nics is None:
        return found
    if isinstance(nics, int):
        if not 1 <= nics <= len(found):
            raise UsageError(f"efa: nics={nics}; there are {len(found)}: {', '.join(found)}")
        return found[:nics]
    wanted = list(nics)
    if not wanted or len(set(wanted)) != len(wanted) or not set(wanted) <= set(found):
        raise UsageError(f"efa: nics={wanted}; there are {', '.join(found)}, each once")
    return wanted


def _open(
    lib: Efa, name: str, epoch: int, peer_timeout_s: float, dmabuf: DmabufExport | None
) -> EfaDomain:
    wished = Sizes(_SEND, _RULES.frames_in, 2 * _SEND)
    with contextlib.ExitStack() as undo:
        try:
            nic = Nic(lib, name, wished)
            undo.callback(nic.close)
            way = Columns(nic)
            most = nic.sizes.send - _RULES.frames_out
            if most < _RULES.frames_out:
                raise BackendUnavailable(
                    f"{name}: its queues hold {nic.sizes.send} requests; {_RULES.frames_out} are "
                    "for messages, and as many are needed for rows",
                    (),
                )
            rules = replace(_RULES, window_rows=most, frames_in=nic.sizes.receive)
            caps = _caps(nic, rules, peer_timeout_s, cuda=dmabuf is not None)
            about = f"SRD through libibverbs and libefa; entries by columns, {way.name}; "
            about += "all peers by the NIC" + ("" if lib.fork_safe else NOT_FORK_SAFE)
            found = EfaDomain(nic, way, rules, caps, epoch=epoch, dmabuf=dmabuf, about=about)
        except FabricError as error:
            raise BackendUnavailable(
                f"efa: NIC {name!r} cannot be opened", ((name, str(error)),)
            ) from error
        undo.pop_all()
    return found


def _caps(nic: Nic, rules: Rules, peer_timeout_s: float, *, cuda: bool) -> DomainCaps:
    return DomainCaps(
        backend="efa",
        nic=nic.name,
        link_bps=nic.link_bps,
        sq_depth=2 * rules.window_rows,
        max_write_bytes=min(ROW_BYTES_MAX, nic.efa.max_rdma_size or ROW_BYTES_MAX),
        max_msg_bytes=rules.msg_bytes_max,
        ordered=False,
        memory_kinds=("cpu", "cuda") if cuda else ("cpu",),
        peer_timeout_s=peer_timeout_s,
        wakes=bool(nic.wait_fds),
        control_bytes=CONTROL_BYTES_MAX,
        reads=min(_READS, rules.window_rows) if nic.can_read else 0,
        no_reads="" if nic.can_read else f"the device {nic.name} has no RDMA read",
    )


def facts() -> dict[str, object]:
    """Report libraries and devices, by name, for `tep info`; BackendUnavailable: no library."""
    lib = load()
    return {"libibverbs": lib.path, "libefa": lib.efa_path, "devices": efa_devices(lib)}


def probe() -> str:
    """Say which libraries and devices are here; BackendUnavailable: one of them is missing."""
    lib = load()
    return f"{lib.path}, {lib.efa_path}; {', '.join(_names(lib, None))}"
