"""The verbs backend: ConnectX and every other RC-capable NIC, through libibverbs.

`open_domains` and `probe` are what the registry asks for; the rest of the room is private.

    domain.py     one NIC behind the seam: its parts, memory, waking, the end
    send.py       rows on their way: requests in memory, posts, what is open
    receive.py    completions and immediates
    peers.py      the peers of a NIC, what waits for each, control messages
    conns.py      queue pairs, the ids of what is posted on them, draining, fences
    messages.py   messages, datagrams and their routes
    handshake.py  addresses, and how two NICs agree on queue pairs; no I/O
    device.py     one RDMA device, its address, the depth of its queues, and what a user may set

It needs rdma-core 34 or later. A peer takes 132 KiB of send queues on each NIC of ConnectX; a
smaller `sq_depth` makes it less.

Tested on Soft-RoCE with the real library (contract, loss, slow NICs, killed peers, two processes,
pulled cables) and on a stub provider (queues that fail, partitions, InfiniBand subnets, depths,
dma-bufs, many peers at once). Not tested, for want of the hardware: mlx5's doorbells and rates, its
fatal errors, InfiniBand's link layer, GPU memory, the effect of relaxed ordering, PFC and ECN.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from tep.backends.base import Opened
from tep.backends.common import all_or_none, identity
from tep.backends.ffi.ibverbs import Library, load
from tep.backends.verbs.device import MEANT, Device, Settings
from tep.backends.verbs.domain import VerbsDomain
from tep.base.checks import nearest
from tep.base.errors import BackendUnavailable, FabricError, UsageError
from tep.host.nics import HCA, Found, NameList, choose, gpu_paths, natural, read_list, said
from tep.memory.source import DmabufExport

__all__ = ["Settings", "facts", "open_domains", "probe", "survey"]

_NICS_MAX: Final = 64
_PEER_MEMORY: Final = Path("/sys/module/nvidia_peermem")


def open_domains(
    nics: int | str | Sequence[str] | None = None,
    *,
    name: str | None = None,
    epoch: int | None = None,
    library: str | None = None,
    dmabuf_export: DmabufExport | None = None,
    **settings: Any,
) -> Opened:
    """Open the NICs of one engine.

    Args:
        nics: device names, e.g. ["mlx5_0", "mlx5_1"]; None = all that belong together by the rules
            of tep.host.nics; a number = as many of these. A device that bonds two ports is named
            twice, since a queue pair uses one of them.
        name: for reports, and the identity of a restart: peers drop the former incarnation of the
            same name once they hear of the new one.
        epoch: of this incarnation; None = the time in nanoseconds, so that later ones are larger.
        library: path of libibverbs; None = TEP_LIBIBVERBS, or where the linker finds it.
        dmabuf_export: exports CUDA memory as a dma-buf, see `tep.memory.source.DmabufExport`;
            without it CUDA memory can be registered only where the kernel module nvidia_peermem is
            loaded.
        **settings: fields of Settings.

    Raises:
        UsageError: an impossible number or name, or a setting that does not exist.
        BackendUnavailable: no library, or no usable device; says what was tried.
    """
    known = {field.name for field in fields(Settings)}
    if unknown := sorted(set(settings) - known):
        names = ["nics", "name", "epoch", "library", "dmabuf_export", *sorted(known)]
        raise UsageError(
            f"verbs: no option {', '.join(unknown)}; there are: {', '.join(names)}"
            f"{nearest(unknown[0], names)}"
        )
    chosen = Settings(**settings)
    lib = load(library)
    names = _names(lib, nics, chosen)
    name, epoch = identity("verbs", name, epoch)
    cuda = dmabuf_export is not None or _PEER_MEMORY.exists()

    def opening() -> Iterator[VerbsDomain]:
        devices = []
        for nic, device in enumerate(names):
            devices.append(Device(lib, device, chosen))
            yield VerbsDomain(
                devices[-1], name=name, nic=nic, epoch=epoch, export=dmabuf_export, cuda=cuda
            )
        if len({device.is_ib for device in devices}) > 1:
            layers = ", ".join(device.describe() for device in devices)
            raise UsageError(
                f"verbs: nics={names} are of two link layers, which never reach each other: "
                f"{layers}; open an engine for each"
            )

    domains = all_or_none(opening())
    for domain in domains:
        domain.spares = tuple(other.device for other in domains if other is not domain)
    hca = [_hca()] if nics is None or isinstance(nics, int) else []
    return Opened(domains, epoch, name, about=said([*hca, *chosen.hints()], MEANT))


def _hca() -> NameList:
    """NCCL's variable that says which NICs are taken where none are named."""
    return read_list(HCA, os.environ.get)


def _names(lib: Library, nics: int | str | Sequence[str] | None, settings: Settings) -> list[str]:
    """Name the devices that are meant: those named, or the first that belong together."""
    wanted = 1 if nics is None else nics
    if not isinstance(wanted, int):
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        wanted = len(names)
    if not 1 <= wanted <= _NICS_MAX:
        raise UsageError(f"verbs: nics={nics}; 1 to {_NICS_MAX} are possible")
    if not (nics is None or isinstance(nics, int)):
        return names
    choice = choose(survey(lib, settings), gpu_paths(), _hca())
    if len(choice.taken) < wanted:
        tried = [*((seen.name, seen.text) for seen in choice.taken), *choice.left]
        raise BackendUnavailable(
            f"{len(choice.taken)} usable RDMA devices that belong together, "
            f"{nics or 'at least 1'} wanted; name the devices to take others (nics=[...]); on a "
            "machine without an RDMA NIC, scripts/rxe runs a command beside software ones",
            tuple(tried) or (("list devices", "there is none"),),
        )
    return [seen.name for seen in choice.taken[:nics]]


def probe() -> str:
    """Say which devices would be taken, with the address of each, or BackendUnavailable."""
    found = survey(load(), Settings())
    if not any(seen.usable for seen in found):
        raise BackendUnavailable(
            "libibverbs is here, but no usable RDMA device",
            tuple((seen.name, seen.text) for seen in found)
            or (("list devices", "the kernel knows none"),),
        )
    return "; ".join(seen.text for seen in choose(found, gpu_paths(), _hca()).taken)


def facts() -> dict[str, object]:
    """Say which devices would be taken, and why not the others."""
    found = choose(survey(load(), Settings()), gpu_paths(), _hca())
    return {
        "nics": [seen.name for seen in found.taken],
        "tried": found.left,
    }


def survey(lib: Library, settings: Settings) -> list[Found]:
    """Look at every device, fastest first; unusable ones last, with the reason."""
    found = []
    for name, folder in lib.devices():
        physical = Path(folder, "device", "physfn")
        path = os.path.realpath(Path(folder, "device")) if Path(folder, "device").exists() else ""
        try:
            device = Device(lib, name, settings)
        except (BackendUnavailable, FabricError, UsageError) as error:
            found.append(Found(name, f"{error}", usable=False, path=path))
            continue
        others = "".join(f"; then {choice}" for choice in device.gids if choice != device.gid)
        found.append(
            Found(
                name,
                device.describe() + others,
                usable=True,
                link_bps=device.link_bps,
                is_ib=device.is_ib,
                subnet=device.gid.gid[:8].hex() if device.is_ib else "",
                path=path,
                physical=os.path.realpath(physical) if physical.exists() else "",
            )
        )
        device.close()
    return sorted(found, key=lambda seen: (not seen.usable, -seen.link_bps, natural(seen.name)))
