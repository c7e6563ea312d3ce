"""Opening a backend for one device: the NICs beside a GPU, its cores, its memory.

What each backend calls these things is said here once. The topology finds them.
"""

from __future__ import annotations

from typing import Final

from tep.backends import open_backend
from tep.backends.auto import choose
from tep.backends.base import Opened
from tep.base.errors import BackendUnavailable
from tep.host.environment import HCA, read_list, said
from tep.host.hostfiles import HostFiles, LiveFiles
from tep.host.topology import Place, detect

__all__ = ["open_at", "options_at"]

_PEER_MEMORY: Final = "/sys/module/nvidia_peermem"


def open_at(backend: str, device: str, options: dict[str, object]) -> Opened:
    """Open a backend where a device is.

    Raises:
        BackendUnavailable: no such GPU here, no NIC, or the backend cannot run.
        UsageError: as open_backend.
    """
    if backend == "auto":
        chosen = choose()
        backend, options = chosen.backend, {**chosen.options, **options}
    files = LiveFiles()
    place = detect(files).place(device)
    mine = options_at(backend, place, options, files)
    opened = open_backend(backend, **{**mine, **options})
    names = ", ".join(domain.caps.nic for domain in opened.domains)
    how = "named" if "nics" in options or "nics" not in mine else place.why
    about = f"device {device}: NICs {names} ({how})"
    pin = None
    if device != "cpu":
        from tep.cuda.words import pinner

        pin = pinner(device)
        if "cuda" not in opened.domains[0].caps.memory_kinds:
            about += "; its memory is out of reach of these NICs: copies by tep.cuda.Staged"
        elif backend == "verbs" and "dmabuf_export" not in {**mine, **options}:
            about += "; its memory by nvidia_peermem, since this driver makes no dma-bufs"
    hca = ""
    if backend == "verbs" and "nics" in mine:
        hca = said([read_list(HCA, files.environ)], {HCA: "which NICs are taken"})
    about = "; ".join(filter(None, (about, hca, opened.about)))
    return opened._replace(cpus=place.cpus, about=about, pin=pin)


def options_at(
    backend: str, place: Place, given: dict[str, object], files: HostFiles
) -> dict[str, object]:
    """What a backend has to be told to open the NICs of a place and register its memory.

    Memory goes to NICs as dma-bufs. NVIDIA's closed kernel modules, and kernels before 5.12, make
    none; where nvidia_peermem is loaded, verbs then registers addresses of the GPU's memory.

    Raises:
        BackendUnavailable: it drives NICs, and the place has none that it can drive.
    """
    provider = str(given.get("provider", "tcp"))
    is_efa = backend == "efa" or (backend == "libfabric" and provider.startswith("efa"))
    if backend != "verbs" and not is_efa:
        return {}  # no NIC to choose: software, or one host
    found: dict[str, object] = {}
    if "nics" not in given:
        if not place.nics or place.is_efa != is_efa:
            kind = "EFA" if is_efa else "InfiniBand or RoCE"
            raise BackendUnavailable(
                f"device={place.device!r}: {backend} wants {kind} NICs, and beside it are: "
                f"{', '.join(place.nics) or 'none'}{' (EFA)' if place.is_efa else ''}",
                (("tep info --topology", "shows which there are, and why not the others"),),
            )
        found["nics"] = list(place.nics)
    if place.device != "cpu":
        from tep.cuda.memory import export_dmabuf

        if backend == "efa":
            found["dmabuf"] = export_dmabuf
        elif is_efa:
            found |= {"cuda": True, "dmabuf": export_dmabuf}
        elif not (files.names(_PEER_MEMORY) and not _makes_dmabufs(place.device)):
            found["dmabuf_export"] = export_dmabuf
    return found


def _makes_dmabufs(device: str) -> bool:
    from tep.cuda.driver import driver

    index = int(device.removeprefix("cuda:"))
    return bool(driver().attribute(index, "DMA_BUF_SUPPORTED"))
