"""Machines that nobody here has, as captures: built from what is published of them.

p5 and p5en: AWS's instance pages (32 x 100 Gb/s and 16 x 200 Gb/s EFA, 8 GPUs, two sockets), with
NICs and a GPU below one switch each, as fabric-lib groups them. DGX H100: NVIDIA's user guide
(eight ConnectX-7 for computing, two cards of two ports for storage). Paths are made up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tep.host.hostfiles import Capture, CudaDevice
from tep.host.topology import detect

__all__ = ["Builder", "dgx_h100", "p5", "p5en", "shared_nics"]


@dataclass
class Builder:
    """Writes files as the kernel would have them."""

    texts: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: dict[str, list[str]] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    cuda: list[CudaDevice] | None = None
    binaries: dict[str, bytes] = field(default_factory=dict)

    def within(self, folder: str, name: str) -> None:
        names = self.folders.setdefault(folder, [])
        if name not in names:
            names.append(name)
            names.sort()

    def device(self, path: str, numa: int, kind: str, vendor: str, driver: str) -> str:
        """A PCI device at a path below /sys/devices."""
        where, pci = f"/sys/devices/{path}", path.rpartition("/")[2]
        self.within("/sys/bus/pci/devices", pci)
        self.links[f"/sys/bus/pci/devices/{pci}"] = where
        for folder in (where, f"/sys/bus/pci/devices/{pci}"):
            self.texts[f"{folder}/class"] = kind
            self.texts[f"{folder}/vendor"] = vendor
            self.texts[f"{folder}/numa_node"] = str(numa)
            self.links[f"{folder}/driver"] = f"/sys/bus/pci/drivers/{driver}"
        return where

    def gpu(self, path: str, numa: int = 0, *, given: bool = True) -> None:
        where = self.device(path, numa, "0x030200", "0x10de", "nvidia")
        if given:
            pci = where.rpartition("/")[2]
            self.within("/proc/driver/nvidia/gpus", pci)
            about = f"/proc/driver/nvidia/gpus/{pci}/information"
            self.texts[about] = "Model: \t\t NVIDIA H100 80GB HBM3"

    def nic(
        self,
        name: str,
        path: str,
        numa: int = 0,
        *,
        gbps: int = 400,
        driver: str = "mlx5_core",
        layer: str = "InfiniBand",
        state: str = "4: ACTIVE",
        given: bool = True,
    ) -> None:
        vendor = "0x1d0f" if driver == "efa" else "0x15b3"
        where = self.device(path, numa, "0x020000", vendor, driver)
        top = f"/sys/class/infiniband/{name}"
        number = len(self.folders.get("/sys/class/infiniband", []))
        self.within("/sys/class/infiniband", name)
        self.links[f"{top}/device"] = where
        self.within(f"{top}/ports", "1")
        self.texts |= {
            f"{top}/ports/1/state": state,
            f"{top}/ports/1/rate": f"{gbps} Gb/sec (4X)",
            f"{top}/ports/1/link_layer": layer,
            f"{top}/ports/1/gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001",
            f"/sys/class/infiniband_verbs/uverbs{number}/ibdev": name,
        }
        self.within("/sys/class/infiniband_verbs", f"uverbs{number}")
        if given:
            self.within("/dev/infiniband", f"uverbs{number}")

    def cores(self, sockets: int, cores: int, threads: int = 2) -> None:
        """Sockets of cores; the second threads are numbered after all first ones."""
        total = sockets * cores
        for node in range(sockets):
            lists = [
                f"{t * total + node * cores}-{t * total + (node + 1) * cores - 1}"
                for t in range(threads)
            ]
            self.within("/sys/devices/system/node", f"node{node}")
            self.texts[f"/sys/devices/system/node/node{node}/cpulist"] = ",".join(lists)
        for cpu in range(total * threads):
            core = cpu % total
            mates = ",".join(str(core + t * total) for t in range(threads))
            where = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            self.texts[where] = mates
        self.texts["/proc/self/status"] = f"Cpus_allowed_list:\t0-{total * threads - 1}"

    def capture(self) -> Capture:
        packed = {path: (len(data), data.hex()) for path, data in self.binaries.items()}
        return Capture(self.texts, self.links, self.folders, self.variables, self.cuda, packed)

    def bridges(self, control: int | None, *, room: int = 4096) -> list[str]:
        """Give each bridge above a GPU or its NICs a configuration space, with ACS so; their paths.

        Args:
            control: of ACS; None: a bridge without ACS.
            room: how much of it may be read: 64 bytes unless one is root.
        """
        tops = set()
        seen = detect(self.capture())
        ends = [gpu.path for gpu in seen.gpus]
        for where in ends + [nic.path for nics in seen.shares().values() for nic in nics]:
            above = where.rpartition("/")[0]
            while not above.rpartition("/")[2].startswith("pci"):
                tops.add(above)
                above = above.rpartition("/")[0]
        for path in tops:
            config = bytearray(4096)
            # Two extended capabilities: AER (1) at 0x100, and the next at 0x148.
            config[0x100:0x104] = (0x1 | 2 << 16 | 0x148 << 20).to_bytes(4, "little")
            kind = 0x19 if control is None else 0xD  # secondary PCI Express, or ACS
            config[0x148:0x14C] = (kind | 1 << 16).to_bytes(4, "little")
            config[0x14C:0x14E] = (0x5F).to_bytes(2, "little")  # what it could do
            config[0x14E:0x150] = (control or 0).to_bytes(2, "little")
            self.binaries[f"{path}/config"] = bytes(config[:room])
        return sorted(tops)


def _ec2(nics_a_gpu: int, gbps: int, *, gpus_given: range = range(8)) -> Builder:
    built = Builder()
    built.cores(2, 48)
    for k in range(8):
        port = f"pci0000:{0x40 + k:02x}/0000:{0x40 + k:02x}:01.0/0000:{0x50 + 0x10 * k:02x}:00.0"
        for j in range(nics_a_gpu):
            bus = 0x51 + 0x10 * k + j
            path = f"{port}/0000:{0x50 + 0x10 * k:02x}:{j:02x}.1/0000:{bus:02x}:00.0"
            name = f"rdmap{bus}s0"
            built.nic(name, path, k // 4, gbps=gbps, driver="efa", layer="Unspecified")
        bus = 0x5D + 0x10 * k
        path = f"{port}/0000:{0x50 + 0x10 * k:02x}:1f.1/0000:{bus:02x}:00.0"
        built.gpu(path, k // 4, given=k in gpus_given)
    return built


def p5() -> Builder:
    """p5.48xlarge: 8 GPUs, 32 EFA NICs of 100 Gb/s."""
    return _ec2(4, 100)


def p5en(gpus_given: range = range(8)) -> Builder:
    """p5en.48xlarge: 8 GPUs, 16 EFA NICs of 200 Gb/s; a container may be given a part."""
    return _ec2(2, 200, gpus_given=gpus_given)


def dgx_h100() -> Builder:
    """8 GPUs each with a ConnectX-7, two cards of two ports for storage, two Ethernet ports."""
    built = Builder()
    built.cores(2, 56)
    compute = [0, 3, 4, 5, 6, 9, 10, 11]
    for k, (number, bus) in enumerate(
        zip(compute, [0x15, 0x37, 0x48, 0x59, 0x97, 0xB7, 0xC7, 0xD7], strict=True)
    ):
        top = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        built.nic(
            f"mlx5_{number}", f"{top}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0", k // 4
        )
        built.gpu(f"{top}/0000:{bus + 2:02x}:01.0/0000:{bus + 6:02x}:00.0", k // 4)
    for number, bus, port in ((1, 0x25, 0), (2, 0x25, 1), (7, 0xA5, 0), (8, 0xA5, 1)):
        path = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.{port}"
        layer = "InfiniBand" if port == 0 else "Ethernet"
        built.nic(f"mlx5_{number}", path, bus // 0x80, layer=layer)
    for k in range(2):
        path = f"pci0000:00/0000:00:1c.0/0000:03:00.{k}"
        built.nic(f"irdma{k}", path, 0, gbps=100, driver="irdma", layer="Ethernet")
    return built


def shared_nics() -> Builder:
    """8 GPUs in pairs, a NIC for each pair."""
    built = Builder()
    built.cores(2, 32)
    for k in range(4):
        top = (
            f"pci0000:{0x10 * (k + 1):02x}/0000:{0x10 * (k + 1):02x}:01.0/0000:{k + 0x51:02x}:00.0"
        )
        built.nic(f"mlx5_{k}", f"{top}/0000:{k + 0x61:02x}:00.0/0000:{k + 0x71:02x}:00.0", k // 2)
        for j in range(2):
            path = f"{top}/0000:{k + 0x61:02x}:0{j + 1}.0/0000:{0x80 + 2 * k + j:02x}:00.0"
            built.gpu(path, k // 2)
    return built
