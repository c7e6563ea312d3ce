"""The choice of NICs: the backend "auto" for this host's, and any backend for those beside a GPU.

The rule of "auto" is one line, and `explain` shows it: an RDMA device means its own backend, no
device means `local`. There is no second choice. If what the rule names cannot be opened, that is an
error which says so; and an address that the chosen backend cannot reach is refused by it, by name.

For a device, what each backend calls its NICs, cores and memory is said here once; the topology
finds them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from tep.backends import open_backend
from tep.backends.base import Opened
from tep.base.errors import BackendUnavailable
from tep.host.hostfiles import HostFiles, LiveFiles
from tep.host.nics import HCA, read_list, said
from tep.host.topology import Place, check_files, detect, survey

__all__ = ["Choice", "check_all", "choose", "open_at", "open_domains", "options_at", "probe"]

_PEER_MEMORY: Final = "/sys/module/nvidia_peermem"
_DEVICES: Final = Path("/sys/class/infiniband")
"""Every device that a verbs driver of the kernel has made; EFA's are among them."""


class Choice(NamedTuple):
    """The meaning of "auto" on this host: a backend, its options, and why."""

    backend: str
    options: dict[str, object]
    why: str


def choose(devices: Path = _DEVICES) -> Choice:
    """Apply the rule: EFA: libfabric, provider "efa"; any other device: verbs; none: local."""
    try:
        found = sorted(devices.iterdir())
    except OSError:
        found = []
    drivers = {path.name: (path / "device" / "driver").resolve().name for path in found}
    listed = ", ".join(f"{name} ({driver})" for name, driver in drivers.items())
    if "efa" in drivers.values():
        return Choice("libfabric", {"provider": "efa"}, f"EFA devices: {listed}")
    if drivers:
        return Choice("verbs", {}, f"RDMA devices: {listed}")
    return Choice("local", {}, f"no RDMA device in {devices}; only this host can be reached")


def open_domains(**options: object) -> Opened:
    """Open what choose() says, or raise BackendUnavailable: nothing else is tried."""
    choice = choose()
    try:
        return open_backend(choice.backend, **{**choice.options, **options})
    except BackendUnavailable as error:
        raise BackendUnavailable(
            f"auto: chose {choice.backend} ({choice.why}), which cannot run here; another backend "
            "has to be asked for by name",
            error.tried or ((choice.backend, str(error)),),
        ) from error


def probe() -> str:
    """Say what "auto" means here, and why."""
    choice = choose()
    return f"{choice.backend}: {choice.why}"


def check_all(backend: str, options: dict[str, object]) -> None:
    """Refuse a NIC without a device file, where a backend takes all NICs that belong together."""
    if "nics" not in options and (backend in {"auto", "verbs"} or _is_efa(backend, options)):
        check_files(survey(LiveFiles()).taken)


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
    seen = detect(files)
    place = seen.place(device)
    mine = options_at(backend, place, options, files)
    if "nics" in mine:
        check_files(nic for nic in seen.nics if nic.name in place.nics)
    opened = open_backend(backend, **{**mine, **options})
    names = ", ".join(domain.caps.nic for domain in opened.domains)
    how = "named" if "nics" in options or "nics" not in mine else place.why
    about = f"device {device}: NICs {names} ({how})"
    pin = None
    if device != "cpu":
        from tep.cuda.memory import pinner

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
    """Return the options by which a backend opens the NICs of a place and registers its memory.

    Memory goes to NICs as dma-bufs. NVIDIA's closed kernel modules, and kernels before 5.12, make
    none; where nvidia_peermem is loaded, verbs then registers addresses of the GPU's memory.

    Raises:
        BackendUnavailable: it drives NICs, and the place has none that it can drive.
    """
    is_efa = _is_efa(backend, given)
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


def _is_efa(backend: str, options: dict[str, object]) -> bool:
    """Whether a backend with these options drives EFA's NICs."""
    return backend == "efa" or (backend == "libfabric" and options.get("provider") == "efa")


def _makes_dmabufs(device: str) -> bool:
    from tep.host.cuda import driver

    index = int(device.removeprefix("cuda:"))
    return bool(driver().attribute(index, "DMA_BUF_SUPPORTED"))
