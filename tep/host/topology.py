"""The NICs and cores beside each GPU, from sysfs or a captured file.

The NICs that belong together (nics.py) are assigned to the GPUs: each GPU gets the ones that
share most of its PCIe path, and GPUs that are equally near to the same NICs share these evenly.
Nothing here opens a device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from tep.base.errors import BackendUnavailable, UsageError
from tep.host.hostfiles import CudaDevice, HostFiles, LiveFiles
from tep.host.nics import HCA, Choice, Found, choose, gpu_paths, natural, read_list

__all__ = [
    "FILES_CURE", "Gpu", "Place", "Topology", "check_files", "cpus_in", "detect", "number",
    "survey",
]  # fmt: skip

FILES_CURE: Final = "docker: --device=/dev/infiniband; kubernetes: the device plugin of the NIC"

_NICS: Final = "/sys/class/infiniband"
_VERBS: Final = "/sys/class/infiniband_verbs"
_NODES: Final = "/sys/devices/system/node"
_NVIDIA: Final = frozenset({"0x10de"})
_GPUS_GIVEN: Final = "/proc/driver/nvidia/gpus"
_FILES: Final = "/dev/infiniband"
_NO_PORT: Final = "no port is ACTIVE: the cable, the switch or the subnet manager"
_UNKNOWN: Final = -1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the machine.

    Attributes:
        index: N of "cuda:N"; None: this process cannot use it.
        name: model name; "" if only the CUDA driver knows it.
        path: sysfs path of its PCI device; "" if the container hides it.
        numa: its NUMA node, -1 if unknown.
    """

    index: int | None
    pci: str
    name: str
    path: str
    numa: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The NICs and CPUs for an engine of one device.

    Attributes:
        device: "cuda:N" or "cpu".
        cpus: the CPUs for its threads, one a physical core; () = anywhere.
        why: the reason for this choice of NICs, in words.
    """

    device: str
    nics: tuple[str, ...]
    cpus: tuple[int, ...]
    is_efa: bool
    why: str


@dataclass(frozen=True, slots=True)
class Topology:
    """A machine's GPUs, NICs and cores.

    Attributes:
        gpus: all GPUs, those of this process first, by index.
        nics: the NICs that belong together, by PCI address.
        left: (name, reason) of the other NICs.
        cores: CPUs on which this process may run, one a physical core, by NUMA node.
        numa_of: the NUMA node of each NIC, -1 if unknown.
    """

    gpus: tuple[Gpu, ...]
    nics: tuple[Found, ...]
    left: tuple[tuple[str, str], ...]
    cores: dict[int, tuple[int, ...]]
    numa_of: dict[str, int]

    def place(self, device: str) -> Place:
        """Return the place of an engine for "cuda:N" or "cpu".

        Raises:
            UsageError: not such a name.
            BackendUnavailable: no such GPU here; the error lists those that are.
        """
        is_efa = any(nic.is_efa for nic in self.nics)
        if device == "cpu":
            names = tuple(nic.name for nic in self.nics)
            why = "all NICs that belong together"
            return Place(device=device, nics=names, cpus=(), is_efa=is_efa, why=why)
        if not re.fullmatch(r"cuda:[0-9]+", device):
            raise UsageError(f"device={device!r} is not 'cpu' or 'cuda:N'")
        gpu = next((gpu for gpu in self.gpus if f"cuda:{gpu.index}" == device), None)
        if gpu is None:
            here = ", ".join(f"cuda:{gpu.index}" for gpu in self.gpus if gpu.index is not None)
            hidden = ", ".join(gpu.pci for gpu in self.gpus if gpu.index is None)
            raise BackendUnavailable(
                f"device={device!r}: this process has {here or 'no GPU'}"
                + (f"; not given to it: {hidden}" if hidden else ""),
                (("tep info --topology", "shows what is here"),),
            )
        nics = self.shares()[gpu.pci]
        return Place(
            device=device,
            nics=tuple(nic.name for nic in nics),
            cpus=self._cpus(gpu),
            is_efa=is_efa,
            why=self.relation(gpu, nics[0]) if nics else "no NIC",
        )

    def shares(self) -> dict[str, tuple[Found, ...]]:
        """Return the NICs of each GPU, by the GPU's PCI address.

        GPUs of other containers count as well: two processes must not take the same NICs while
        others idle.
        """
        groups: dict[tuple[str, ...], list[Gpu]] = {}
        for gpu in sorted(self.gpus, key=lambda gpu: gpu.pci):
            near = tuple(nic.name for nic in self.nearest(gpu))
            groups.setdefault(near, []).append(gpu)
        by_name = {nic.name: nic for nic in self.nics}
        return {
            gpu.pci: tuple(by_name[name] for name in _deal(near, k, len(gpus)))
            for near, gpus in groups.items()
            for k, gpu in enumerate(gpus)
        }

    def nearest(self, gpu: Gpu) -> list[Found]:
        """Return the NICs sharing most of a GPU's PCIe path; else its NUMA node's; else all."""
        rank = {nic.name: self._nearness(gpu, nic) for nic in self.nics}
        best = max(rank.values(), default=(0, False))
        return [nic for nic in self.nics if rank[nic.name] == best]

    def _nearness(self, gpu: Gpu, nic: Found) -> tuple[int, bool]:
        same = gpu.numa != _UNKNOWN and gpu.numa == self.numa_of.get(nic.name, _UNKNOWN)
        return _shared_steps(gpu.path, nic.path), same

    def relation(self, gpu: Gpu, nic: Found) -> str:
        """Say in words how near a NIC is to a GPU."""
        steps, same = self._nearness(gpu, nic)
        if steps > 1:
            return "behind the same PCIe switch"
        if steps == 1 and not same:
            return "at the same root complex"
        return "of the same NUMA node" if same else "anywhere in the machine"

    def _cpus(self, gpu: Gpu) -> tuple[int, ...]:
        cores = self.cores.get(gpu.numa, ())
        mates = sorted(other.pci for other in self.gpus if other.numa == gpu.numa)
        return _deal(cores, mates.index(gpu.pci), len(mates))

    def picture(self) -> str:
        """Draw the machine as text: NUMA nodes with GPUs, NICs and cores, and the NICs left out."""
        shares = self.shares()
        lines = []
        idle = ", nearest to no GPU" if self.gpus else ""
        nodes = {gpu.numa for gpu in self.gpus} | set(self.numa_of.values()) | set(self.cores)
        shared = {nic.name for nics in shares.values() for nic in nics}
        for node in sorted(nodes):
            cores = self.cores.get(node, ())
            title = f"NUMA node {node}" if node != _UNKNOWN else "NUMA node unknown"
            lines.append(
                f"{title}: {len(cores)} cores{f', CPUs {_ranges(cores)}' if cores else ''}"
            )
            for gpu in (gpu for gpu in self.gpus if gpu.numa == node):
                device = f"cuda:{gpu.index}" if gpu.index is not None else "(not given to us)"
                cpus = f", CPUs {_ranges(self._cpus(gpu))}" if self._cpus(gpu) else ""
                lines.append(f"  {device}  {gpu.pci}  {gpu.name}{cpus}".rstrip())
                lines += [
                    f"    {nic.name}  {nic.link_bps / 1e9:g} Gb/s, {self.relation(gpu, nic)}"
                    for nic in shares[gpu.pci]
                ]
            lines += [
                f"  {nic.name}  {nic.link_bps / 1e9:g} Gb/s{idle}"
                for nic in self.nics
                if nic.name not in shared and self.numa_of[nic.name] == node
            ]
        if not self.gpus:
            lines.append("no GPU")
        if not self.nics:
            lines.append("no RDMA NIC can be used")
        lines += [f"missing: {nic.missing} of {nic.name}" for nic in self.nics if nic.missing]
        return "\n".join([*lines, *(f"not taken: {name}: {why}" for name, why in self.left)])

    def to_json(self) -> dict[str, object]:
        shares = self.shares()
        return {
            "gpus": [
                {
                    "device": None if gpu.index is None else f"cuda:{gpu.index}",
                    "pci": gpu.pci,
                    "name": gpu.name,
                    "numa": gpu.numa,
                    "nics": [nic.name for nic in shares[gpu.pci]],
                    "cpus": list(self._cpus(gpu)),
                }
                for gpu in self.gpus
            ],
            "nics": [
                {"name": nic.name, "link_bps": nic.link_bps, "numa": self.numa_of[nic.name]}
                for nic in self.nics
            ],
            "left": [list(pair) for pair in self.left],
            "cores": {str(node): list(cores) for node, cores in self.cores.items()},
        }


def detect(files: HostFiles | None = None) -> Topology:
    """Look at this machine (None), or at a captured one."""
    files = files or LiveFiles()
    choice = survey(files)
    return Topology(
        tuple(_gpus(files)),
        tuple(choice.taken),
        tuple(choice.left),
        _cores(files),
        {nic.name: number(files.read(f"{nic.path}/numa_node")) for nic in choice.taken},
    )


def survey(files: HostFiles) -> Choice:
    """Choose the NICs that belong together, from files; a device file may be missing."""
    found = [_nic(files, name) for name in files.names(_NICS)]
    found.sort(key=lambda nic: (nic.path.rpartition("/")[2], natural(nic.name)))
    return choose(found, gpu_paths(files), read_list(HCA, files.environ))


def check_files(nics: Iterable[Found]) -> None:
    """Refuse NICs whose device files are missing.

    Raises:
        BackendUnavailable: names these NICs and files.
    """
    missing = tuple((nic.name, f"there is no {nic.missing}") for nic in nics if nic.missing)
    if missing:
        raise BackendUnavailable(
            f"{len(missing)} of the NICs that belong together have no device file: the container "
            f"was not given them. {FILES_CURE}; or take the others by name: nics=[...]",
            missing,
        )


def _deal(things: Sequence[_T], index: int, parts: int) -> tuple[_T, ...]:
    """Return part `index` of things divided evenly; if there are fewer things, some share one."""
    n = len(things)
    if 0 < n < parts:
        return (things[index * n // parts],)
    return tuple(things[index * n // parts : (index + 1) * n // parts])


def _shared_steps(one: str, other: str) -> int:
    """Count the steps from the root complex that two PCI devices share; 0: not even that."""
    here, there = (path.partition("/pci")[2].split("/") for path in (one, other))
    steps = 0
    for ours, theirs in zip(here[:-1], there[:-1]):  # the last is the device itself
        if not ours or ours != theirs:
            break
        steps += 1
    return steps


def _nic(files: HostFiles, name: str) -> Found:
    folder = f"{_NICS}/{name}"
    path = files.real(f"{folder}/device")
    driver = files.real(f"{path}/driver").rpartition("/")[2] if path else ""
    ports = [f"{folder}/ports/{port}" for port in files.names(f"{folder}/ports")]
    port = next((port for port in ports if "ACTIVE" in (files.read(f"{port}/state") or "")), "")
    rate = (files.read(f"{port or ports[0]}/rate") or "") if ports else ""
    gbps = re.match(r"([0-9]+(?:\.[0-9]+)?) Gb/sec", rate)
    layer = (files.read(f"{port}/link_layer") or "") if port else ""
    gid = (files.read(f"{port}/gids/0") or "") if port else ""
    is_ib = layer == "InfiniBand"
    return Found(
        name,
        f"{name}: {driver or 'no driver'}, {layer}, {rate}" if port else _NO_PORT,
        usable=bool(port),
        link_bps=int(float(gbps[1]) * 1e9) if gbps else 0,
        is_ib=is_ib,
        subnet="".join(gid.split(":")[:4]) if is_ib else "",
        path=path,
        is_efa=driver == "efa",
        physical=files.real(f"{path}/physfn") if path else "",
        missing=_missing(files, name),
    )


def _missing(files: HostFiles, name: str) -> str:
    """Name a NIC's device file if it is not there; "" also where the kernel lists no uverbs."""
    for uverbs in files.names(_VERBS):
        if files.read(f"{_VERBS}/{uverbs}/ibdev") == name:
            return "" if uverbs in files.names(_FILES) else f"{_FILES}/{uverbs}"
    return ""


def _gpus(files: HostFiles) -> Iterable[Gpu]:
    """List the GPUs of the machine, with the CUDA driver's numbers if it can be asked."""
    paths = {path.rpartition("/")[2]: path for path in sorted(gpu_paths(files, _NVIDIA))}
    cuda = files.cuda()
    if cuda is None:
        given = files.names(_GPUS_GIVEN) or sorted(paths)
        uuids = {pci: _about(files, pci, "GPU UUID") for pci in given}
        cuda = _numbered(given, uuids, files.environ("CUDA_VISIBLE_DEVICES"))
    numbers = {device.pci: device for device in cuda}
    for pci in [*numbers, *sorted(paths.keys() - numbers.keys())]:
        device, path = numbers.get(pci), paths.get(pci, "")
        numa = number(files.read(f"{path}/numa_node")) if path else _UNKNOWN
        index, name = (device.ordinal, device.name) if device else (None, "")
        yield Gpu(index, pci, name or _about(files, pci, "Model"), path, numa)


def _about(files: HostFiles, pci: str, field: str) -> str:
    """Read a field of the kernel module's information on a GPU; "" = it is not there."""
    text = files.read(f"{_GPUS_GIVEN}/{pci}/information") or ""
    found = re.search(rf"^{field}:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _numbered(given: list[str], uuids: dict[str, str], visible: str | None) -> list[CudaDevice]:
    """Number the visible GPUs as the driver numbers equal ones: by PCI address.

    CUDA_VISIBLE_DEVICES lists numbers, or UUIDs by their beginnings; the first that means no GPU
    ends the list (quoted: CUDA's programming guide). Files say nothing about a part of a GPU
    (MIG-...): then none is numbered, and cuda-python has to be asked.
    """
    order = sorted(given)
    if visible is None:
        return [CudaDevice(index, pci, "") for index, pci in enumerate(order)]
    found = []
    for entry in filter(None, map(str.strip, visible.split(","))):
        if entry.startswith("MIG-"):
            return []
        named = order[int(entry) : int(entry) + 1] if entry.isdecimal() else []
        if entry.startswith("GPU-"):
            named = [pci for pci in order if uuids[pci].startswith(entry)]
        if len(named) != 1:
            break
        found += named
    return [CudaDevice(index, pci, "") for index, pci in enumerate(found)]


def _cores(files: HostFiles) -> dict[int, tuple[int, ...]]:
    """List the first CPU of each physical core this process may run on, by NUMA node."""
    status = files.read("/proc/self/status") or ""
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.MULTILINE)
    may = set(cpus_in(allowed[1])) if allowed else None
    nodes = {
        number(name.removeprefix("node")): files.read(f"{_NODES}/{name}/cpulist") or ""
        for name in files.names(_NODES)
        if re.fullmatch("node[0-9]+", name)
    } or {_UNKNOWN: files.read("/sys/devices/system/cpu/online") or ""}
    found = {}
    for node, text in nodes.items():
        mine = [cpu for cpu in cpus_in(text) if may is None or cpu in may]
        seen: set[int] = set()
        cores = []
        for cpu in mine:
            where = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            if cpu not in seen:
                cores.append(cpu)
            seen.update(cpus_in(files.read(where) or ""))
        found[node] = tuple(cores)
    return found


def cpus_in(text: str) -> list[int]:
    """Parse a list of CPUs as the kernel writes it: "0-3,8"."""
    found: list[int] = []
    for first, last in re.findall(r"([0-9]{1,5})(?:-([0-9]{1,5}))?(?:,|$)", text.strip()):
        found += range(int(first), int(last or first) + 1)
    return found


def _ranges(cpus: Sequence[int]) -> str:
    """Write a list of CPUs as the kernel does."""
    parts: list[str] = []
    first = None
    for cpu, after in zip(cpus, [*cpus[1:], None]):
        first = cpu if first is None else first
        if after != cpu + 1:
            parts.append(f"{first}-{cpu}" if cpu != first else f"{cpu}")
            first = None
    return ",".join(parts)


def number(text: str | None) -> int:
    """Read a number of sysfs; -1 if there is none."""
    try:
        return int(text or _UNKNOWN)
    except ValueError:
        return _UNKNOWN
