"""The libraries of this machine, and the abilities of its RDMA devices (libibverbs, libefa).

Each device is opened, asked and closed; nothing is sent and nothing is registered. These checks
need the devices, so none runs for a captured machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from tep.backends import libfabric
from tep.backends.ffi import efa, ibverbs
from tep.backends.ffi.ibverbs_structs import DeviceAttr, PortAttr
from tep.base.errors import BackendUnavailable, FabricError
from tep.base.units import GiB, KiB, MiB
from tep.host.doctor.finding import Finding, bad, good, note, warn
from tep.host.hostfiles import HostFiles
from tep.host.topology import detect

__all__ = ["check_devices", "check_gpu_libraries", "check_libraries", "size_text"]

_ENDLESS: Final = 1 << 60  # libraries without a limit return this
_AMAZON: Final = 0x1D0F

# Source: enum in providers/efa/efadv.h of rdma-core 64, EFADV_DEVICE_ATTR_CAPS_*.
_READ: Final = 1 << 0
_RNR_RETRY: Final = 1 << 1
_WRITE: Final = 1 << 3
_UNSOLICITED: Final = 1 << 4


def check_libraries() -> Iterator[Finding]:
    """Report the libraries this process would use, with versions, and those backends lack."""
    parts = []
    for name, load in (("libibverbs", ibverbs.load), ("libefa", efa.load)):
        try:
            lib: ibverbs.Library = load()
        except BackendUnavailable:
            parts.append(f"no usable {name}")
            continue
        path = lib.efa_path if isinstance(lib, efa.Efa) else lib.path
        file = os.path.realpath(path) if "/" in path else _mapped(path)
        parts.append(f"{name} {_with_version(file)}")
    try:
        facts = libfabric.facts()
        parts.append(f"libfabric {facts['version']} ({facts['library']})")
    except BackendUnavailable:
        parts.append("no usable libfabric")
    try:
        parts.append(f"cuda-python {metadata.version('cuda-python')}")
    except metadata.PackageNotFoundError:
        parts.append("no cuda-python")
    yield good("libraries", "; ".join(parts))


def check_gpu_libraries(files: HostFiles) -> Iterator[Finding]:
    """Check, if there is a GPU: does libfabric take its memory on EFA, can kernels be compiled."""
    if files.read("/sys/module/nvidia/version") is None:
        return
    if any(nic.is_efa for nic in detect(files).nics):
        yield from _efa_cuda()
    packages = [f"nvidia-cuda-nvrtc{end}" for end in ("", "-cu12", "-cu13")]
    if not ctypes.util.find_library("nvrtc") and not any(map(_is_installed, packages)):
        yield note(
            "NVRTC",
            "no libnvrtc was found, so scripts/gpu_check cannot compile its kernels",
            "pip install nvidia-cuda-nvrtc-cu12 (or -cu13, as the driver is), or the CUDA toolkit",
        )


def _efa_cuda() -> Iterator[Finding]:
    try:
        with contextlib.ExitStack() as stack:
            for domain in libfabric.open_domains(provider="efa", cuda=True).domains:
                stack.callback(domain.close)
        yield good("libfabric and CUDA", "its provider efa takes GPU memory")
    except BackendUnavailable as error:
        yield warn(
            "libfabric and CUDA",
            f"GPU memory cannot be registered on EFA: {str(error).splitlines()[0]}",
            "AWS's EFA installer brings a libfabric with CUDA; or the backend efa",
        )


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _mapped(soname: str) -> str:
    """Return the file that the loader took for a name without a folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if path.rpartition("/")[2].startswith(soname):
            return path
    return soname


def _with_version(path: str) -> str:
    """Name a library of rdma-core, with the version that its file's name ends with."""
    found = re.search(r"\.so(?:\.\d+){2}\.(\d+\.\d+)$", path)
    return f"{path} (rdma-core {found[1]})" if found else path


def check_devices() -> Iterator[Finding]:
    """Ask every device of this machine; find nothing if there is no library or no device."""
    lib = _library()
    if lib is None:  # the self-test of the backends says what is missing
        return
    for name, _ in lib.devices():
        area = f"device {name}"
        try:
            context, _ = lib.open_device(name)
        except (FabricError, LookupError) as error:
            cure = "may this user open /dev/infiniband? docker: --device=/dev/infiniband"
            yield bad(area, f"cannot be opened: {error}", cure)
            continue
        try:
            attr = DeviceAttr()
            lib.ok("ibv_query_device", context, ctypes.byref(attr), device=name)
            yield good(area, _sizes(lib, context, attr))
            if attr.vendor_id == _AMAZON:
                yield from _efa(name, area)
            else:
                yield _verbs(area, attr)
        except FabricError as error:
            yield bad(area, f"does not answer: {error}", "dmesg says what has become of it")
        finally:
            lib.ok("ibv_close_device", context)


def _library() -> ibverbs.Library | None:
    """Load libibverbs with the calls of either backend; EFA's needs fewer of them."""
    for load in (ibverbs.load, efa.load):
        with contextlib.suppress(BackendUnavailable):
            return load()
    return None


def _sizes(lib: ibverbs.Library, context: int, attr: DeviceAttr) -> str:
    """Describe a device's largest sizes, in words."""
    longest = []
    for port in range(1, max(1, attr.phys_port_cnt) + 1):
        found = PortAttr()
        lib.ok("ibv_query_port", context, port, ctypes.byref(found))
        longest.append(f"messages to {size_text(found.max_msg_sz)} on port {port}")
    firmware = attr.fw_ver.decode(errors="replace")
    return (
        f"firmware {firmware or 'unknown'}; {', '.join(longest)}; registrations to "
        f"{size_text(attr.max_mr_size)}, {attr.max_mr} of them; {attr.max_qp} queue pairs of "
        f"{attr.max_qp_wr} entries; completion queues of {attr.max_cqe}"
    )


def _verbs(area: str, attr: DeviceAttr) -> Finding:
    """Report if a device with reliable connections can read; all of these can write."""
    asked, served = attr.max_qp_init_rd_atom, attr.max_qp_rd_atom
    if asked > 0 and served > 0:
        return good(
            area,
            f"RDMA write, and RDMA read: each queue pair asks for {asked} at a time and answers "
            f"{served}",
        )
    return note(
        area,
        f"RDMA write and no RDMA read (max_qp_init_rd_atom {asked}, max_qp_rd_atom {served})",
        "nothing for writes; a virtual function may be denied reads: see the settings of its host",
    )


def _efa(name: str, area: str) -> Iterator[Finding]:
    """Report the abilities that EFA's own library states."""
    try:
        lib = efa.load()
    except BackendUnavailable as error:
        yield note(area, f"RDMA write and read are not known: {error}", _INSTALL)
        return
    context, _ = lib.open_device(name)
    try:
        attr = lib.is_efa(context)
    finally:
        lib.ok("ibv_close_device", context)
    if attr is None:
        yield warn(area, f"{lib.efa_path} does not know it as an EFA device", _INSTALL)
        return
    if attr.device_caps & _WRITE:
        yield good(area, f"RDMA write, rows to {size_text(attr.max_rdma_size)}")
    else:
        yield bad(
            area,
            "no RDMA write: libfabric would emulate it by messages, and the backend efa refuses",
            "an instance type whose EFA can write (p5, p5en and later), or a newer efa driver",
        )
    if attr.device_caps & _READ:
        yield good(area, f"RDMA read, to {size_text(attr.max_rdma_size)}")
    else:
        yield note(
            area, "no RDMA read", "nothing for writes; another instance type, or a newer efa driver"
        )
    if attr.device_caps & _UNSOLICITED:
        text = "unsolicited receives: an immediate needs no posted receive; tep posts them"
        yield good(area, text)
    else:
        yield note(
            area,
            "no unsolicited receives: each immediate takes a posted receive, as tep expects",
            "nothing; newer EFA devices and drivers have them",
        )
    if not attr.device_caps & _RNR_RETRY:
        yield warn(
            area,
            "no retry after RNR: writes fail while their target has no receive posted",
            "a newer efa driver: AWS's EFA installer brings one (modinfo efa says which is here)",
        )
    yield good(
        area,
        f"send queue of {attr.max_sq_wr} entries with {attr.max_sq_sge} parts, receive queue of "
        f"{attr.max_rq_wr}, {attr.inline_buf_size} bytes inline",
    )


_INSTALL: Final = "install rdma-core 44 or later with its EFA provider: AWS's EFA installer does"


def size_text(count: int) -> str:
    """Write a size as a whole number of the largest unit that fits."""
    if count >= _ENDLESS:
        return "any length"
    for unit, name in ((1024 * GiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"
