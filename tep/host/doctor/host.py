"""Checks of a machine's limits, kernel and GPUs from files; nothing is opened or changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tep.base.units import GiB
from tep.host.doctor import Finding, bad, good, note, warn
from tep.host.hostfiles import HostFiles
from tep.host.topology import number

__all__ = ["check_host"]

_CAPABILITIES: Final = {"CAP_IPC_LOCK": 14, "CAP_SYS_PTRACE": 19, "CAP_SYS_NICE": 23}
"""The capabilities that matter to transfers, with their bits (linux/capability.h)."""


_DMABUF_KERNEL: Final = (5, 12)
"""The first Linux in which RDMA takes dma-bufs, and fork copies pinned pages (quoted)."""

_NEW_KERNEL: Final = (1 << 16, 0)

_NCCL: Final = {
    "NCCL_IB_HCA": "nics",
    "NCCL_IB_GID_INDEX": "gid_index",
    "NCCL_IB_TC": "traffic_class",
    "NCCL_IB_SL": "service_level",
    "NCCL_SOCKET_IFNAME": "nics of tcp",
}


def check_host(files: HostFiles) -> Iterator[Finding]:
    """Check everything that is no NIC."""
    has_nic = bool(files.names("/sys/class/infiniband"))
    yield from _limits(files, has_nic=has_nic)
    yield from _container(files)
    yield from _gpus(files, has_nic=has_nic)
    yield from _kernel(files, has_nic=has_nic)
    yield from _environment(files)


def _limits(files: HostFiles, *, has_nic: bool) -> Iterator[Finding]:
    limits = files.read("/proc/self/limits") or ""
    for area, title, enough, cure in (
        (
            "memlock",
            "Max locked memory",
            64 * GiB,
            "ulimit -l unlimited (limits.conf: * - memlock unlimited; docker: --ulimit memlock=-1)",
        ),
        ("open files", "Max open files", 4096, "ulimit -n 65536"),
    ):
        found = re.search(rf"^{title}\s+(\S+)", limits, re.MULTILINE)
        if found is None:
            yield note(area, "unknown: /proc/self/limits cannot be read")
        elif found[1] == "unlimited" or number(found[1]) >= enough:
            yield good(area, f"limit {found[1]}")
        elif area == "memlock" and has_nic:
            what = f"limit {found[1]} bytes: a NIC can register no more than that"
            yield bad(area, what, cure)
        elif area == "memlock":
            yield note(area, f"limit {found[1]} bytes; it matters once there is an RDMA NIC")
        else:
            yield warn(area, f"limit {found[1]}: each peer and NIC costs some", cure)


def _container(files: HostFiles) -> Iterator[Finding]:
    marks = [path for path in ("/.dockerenv", "/run/.containerenv") if files.read(path) is not None]
    groups = files.read("/proc/1/cgroup") or ""
    inside = bool(marks) or any(word in groups for word in ("docker", "kubepods", "containerd"))
    status = files.read("/proc/self/status") or ""
    found = re.search(r"^CapEff:\s+([0-9a-f]+)", status, re.MULTILINE)
    if found is None:
        yield note("capabilities", "unknown: /proc/self/status cannot be read")
        return
    mask = int(found[1], 16)
    lacks = [name for name, bit in _CAPABILITIES.items() if not mask >> bit & 1]
    where = "in a container" if inside else "not in a container"
    if lacks and inside:
        yield note(
            "capabilities",
            f"{where}, without {', '.join(lacks)}",
            "docker: --cap-add=IPC_LOCK where memlock is limited, --cap-add=SYS_PTRACE for the "
            "backend local between containers, --device=/dev/infiniband for NICs",
        )
    else:
        yield good("capabilities", where + (f"; without {', '.join(lacks)}" if lacks else ""))


def _gpus(files: HostFiles, *, has_nic: bool) -> Iterator[Finding]:
    version = files.read("/sys/module/nvidia/version")
    if version is None:
        yield note("GPU driver", "the module nvidia is not loaded: no NVIDIA GPU can be used")
        return
    is_open = "Open Kernel Module" in (files.read("/proc/driver/nvidia/version") or "")
    peer = bool(files.names("/sys/module/nvidia_peermem"))
    major = number(version.split(".")[0])
    new = kernel_version(files) >= _DMABUF_KERNEL
    if is_open and major >= 515 and new:
        yield good("GPU driver", f"nvidia {version}, open modules: memory goes to NICs by dma-buf")
    elif peer:
        why = "" if is_open and new else ", by peermem: this driver and kernel make no dma-bufs"
        yield good(
            "GPU driver", f"nvidia {version} with nvidia_peermem: NICs can read GPU memory{why}"
        )
    elif has_nic and is_open and major >= 515:
        yield bad(
            "GPU driver",
            f"nvidia {version}, open modules, and a kernel before 5.12, which has no dma-bufs of "
            "RDMA: NICs cannot reach the GPU",
            "a kernel of 5.12 or later, or modprobe nvidia_peermem",
        )
    elif has_nic:
        yield bad(
            "GPU driver",
            f"nvidia {version}, neither open modules nor nvidia_peermem: NICs cannot reach the GPU",
            "install the open kernel modules (driver 515 or later), or modprobe nvidia_peermem",
        )
    else:
        yield good("GPU driver", f"nvidia {version}")


def kernel_version(files: HostFiles) -> tuple[int, int]:
    """Read (major, minor) of the kernel; if it cannot be read, return a new one."""
    found = re.match(r"(\d+)\.(\d+)", files.read("/proc/sys/kernel/osrelease") or "")
    return (int(found[1]), int(found[2])) if found else _NEW_KERNEL


def _kernel(files: HostFiles, *, has_nic: bool) -> Iterator[Finding]:
    major, minor = kernel_version(files)
    if has_nic and (major, minor) < _DMABUF_KERNEL:
        yield note(
            "kernel",
            f"Linux {major}.{minor} does not copy pinned pages at fork: a fork may take registered "
            "memory away from the NIC",
            "open tep's engines before NCCL or libfabric registers memory, or start processes "
            "without fork (multiprocessing: spawn); Linux 5.12 and later need nothing",
        )


def _environment(files: HostFiles) -> Iterator[Finding]:
    """Check variables left by other jobs that change transfers without a message."""
    if (files.environ("FI_EFA_USE_DEVICE_RDMA") or "1").strip() == "0":
        yield bad(
            "environment",
            "FI_EFA_USE_DEVICE_RDMA=0: libfabric makes writes of messages, which tep refuses",
            "unset FI_EFA_USE_DEVICE_RDMA",
        )
    if provider := files.environ("FI_PROVIDER"):
        yield note(
            "environment",
            f"FI_PROVIDER={provider}: libfabric offers no other provider",
            "unset FI_PROVIDER where tep is to choose",
        )
    for name, option in _NCCL.items():
        if value := files.environ(name):
            text = f"{name}={value} counts for tep too, where {option} is unset"
            yield note("environment", text)
