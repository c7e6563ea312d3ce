"""The libraries, the RDMA devices and the backends of this machine; none of it can be captured.

Each device is opened, asked and closed. Each backend that opens then moves bytes between two
engines of this process: a NIC sends to itself. Bytes and counts are checked, and the NIC's own
counters are read before and after, to see whether the bytes went through it.

Between each GPU and the NICs beside it bytes go there and back, and checksums are compared. Where a
switch or a virtual machine breaks GPUDirect nothing fails: a NIC reads or writes other bytes than
the GPU's kernels see, and a model answers with garbage.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np

from tep.backends import BACKENDS, libfabric, load_backend
from tep.backends.ffi import efa, ibverbs
from tep.backends.ffi.ibverbs import C, Struct
from tep.base.api import Pages
from tep.base.errors import BackendUnavailable, FabricError, TepError
from tep.base.units import GiB, KiB, MiB
from tep.cuda.arena import alloc
from tep.cuda.checksum import checksum
from tep.engine import TransferEngine
from tep.host.cuda import list_devices
from tep.host.doctor import Finding, bad, good, note, version_of, warn
from tep.host.doctor.nics import read_counters
from tep.host.hostfiles import HostFiles
from tep.host.topology import detect

__all__ = [
    "check_devices", "check_gpu_libraries", "check_gpus", "check_libraries", "self_test", "ways",
]  # fmt: skip

_ENDLESS: Final = 1 << 60  # libraries without a limit return this
_AMAZON: Final = 0x1D0F

# Source: enum in providers/efa/efadv.h of rdma-core 64, EFADV_DEVICE_ATTR_CAPS_*.
_READ: Final = 1 << 0
_RNR_RETRY: Final = 1 << 1
_WRITE: Final = 1 << 3

_PAGE: Final = 64 * KiB
_PAGES: Final = 64
_PINGS: Final = 50
_WAIT_S: Final = 20.0
_SENT: Final = ("rdma_write_bytes", "port_xmit_data", "sent_pkts", "tx_bytes")
"""Counters of sent bytes: EFA, mlx5 (in words of 4 bytes), Soft-RoCE (packets), EFA's all."""

_TOUCH: Final = (
    "sysctl kernel.yama.ptrace_scope=0 (3 lasts until the next boot); docker: "
    "--cap-add=SYS_PTRACE; or register memory of tep.alloc_shared()"
)

Way = tuple[str, dict[str, Any]]


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
        parts.append(f"{name} {file}")
    try:
        facts = libfabric.facts()
        parts.append(f"libfabric {facts['version']} ({facts['library']})")
    except BackendUnavailable:
        parts.append("no usable libfabric")
    cuda = version_of("cuda-python")
    parts.append(f"cuda-python {cuda}" if cuda else "no cuda-python")
    yield good("libraries", "; ".join(parts))


def check_gpu_libraries(files: HostFiles) -> Iterator[Finding]:
    """Check, if there is a GPU: does libfabric take its memory on EFA, can kernels be compiled."""
    if files.read("/sys/module/nvidia/version") is None:
        return
    if any(nic.is_efa for nic in detect(files).nics):
        yield from _efa_cuda()
    packages = [f"nvidia-cuda-nvrtc{end}" for end in ("", "-cu12", "-cu13")]
    if not ctypes.util.find_library("nvrtc") and not any(map(version_of, packages)):
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


def _mapped(soname: str) -> str:
    """Return the file that the loader took for a name without a folder."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if path.rpartition("/")[2].startswith(soname):
            return path
    return soname


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
            attr = C.ibv_device_attr()
            lib.ok("ibv_query_device", context, ctypes.byref(attr), device=name)
            yield good(area, _sizes(lib, context, attr))
            if attr.vendor_id == _AMAZON:
                yield from _efa(name, area)
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


def _sizes(lib: ibverbs.Library, context: int, attr: Struct) -> str:
    longest = []
    for port in range(1, max(1, attr.phys_port_cnt) + 1):
        found = C.ibv_port_attr()
        lib.ok("ibv_query_port", context, port, ctypes.byref(found))
        longest.append(f"messages to {size_text(found.max_msg_sz)} on port {port}")
    firmware = attr.fw_ver.decode(errors="replace")
    return (
        f"firmware {firmware or 'unknown'}; {', '.join(longest)}; registrations to "
        f"{size_text(attr.max_mr_size)}, {attr.max_mr} of them; {attr.max_qp} queue pairs of "
        f"{attr.max_qp_wr} entries and {attr.max_qp_init_rd_atom} reads at a time; completion "
        f"queues of {attr.max_cqe}"
    )


def _efa(name: str, area: str) -> Iterator[Finding]:
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
    if not attr.device_caps & _RNR_RETRY:
        yield warn(
            area,
            "no retry after RNR: writes fail while their target has no receive posted",
            "a newer efa driver: AWS's EFA installer brings one (modinfo efa says which is here)",
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


def ways() -> Iterator[tuple[str, Way | str]]:
    """List (name, arguments to open it or reason why not) of all that could move bytes here."""
    for name in BACKENDS:
        if name == "auto":  # another's name
            continue
        try:
            module = load_backend(name)
            module.probe()
        except BackendUnavailable as error:
            tried = "; ".join(f"{what}: {why}" for what, why in error.tried)
            yield name, f"{str(error).splitlines()[0]}{f' ({tried})' if tried else ''}"
            continue
        if name != "libfabric":
            yield name, (name, {})
            continue
        facts = getattr(module, "facts")()  # noqa: B009  # not every backend has it
        for provider in ("tcp", "efa"):
            what = f"libfabric {provider}"
            if provider in facts["providers"]:
                yield what, (name, {"provider": provider})
            else:
                yield what, f"{facts['library']} offers no provider {provider} here"


def self_test(files: HostFiles) -> Iterator[Finding]:
    """Try every backend; make one finding for each, and one for the NICs' counters."""
    for what, way in ways():
        if isinstance(way, str):
            cure = BACKENDS.get(what.split()[-1], BACKENDS["libfabric"]).cure  # "libfabric efa"
            yield note(f"backend {what}", f"not here: {way}", cure)
            continue
        before = read_counters(files)
        find = getattr(load_backend(way[0]), "restriction", None)  # local has it
        restricted = find() if find is not None else ""
        try:
            text = _move(*way, shared=bool(restricted))
        except (TepError, AssertionError, OSError) as error:
            yield bad(
                f"backend {what}",
                f"self-test failed: {type(error).__name__}: {error}",
                "tep info says what it found; attach the bundle (--bundle FILE) to a report",
            )
            continue
        yield good(f"backend {what}", text)
        if restricted:
            yield warn(f"backend {what}", restricted, _TOUCH)
        if way[0] == "verbs" or "efa" in what:
            yield from _counted(what, before, read_counters(files))


def _counted(
    what: str, before: dict[tuple[str, str], int], after: dict[tuple[str, str], int]
) -> Iterator[Finding]:
    """Report if the NICs' counters show that the bytes went through them."""
    grown = {
        key: after[key] - before.get(key, 0) for key in after if after[key] > before.get(key, 0)
    }
    sent = {key: value for key, value in grown.items() if key[1] in _SENT}
    if not after:
        yield note(f"backend {what}", "the NICs have no hw_counters here: not known which way")
    elif sent:
        shown = ", ".join(f"{nic} {counter} +{value}" for (nic, counter), value in sent.items())
        yield good(f"backend {what}", f"bytes went through the NICs: {shown}")
    else:
        yield warn(
            f"backend {what}",
            f"no counter of sent bytes moved: the NICs may not have been used ({len(after)} read)",
            "are the driver's hw_counters supported?",
        )


def _move(backend: str, options: dict[str, Any], *, shared: bool = False) -> str:
    """Move pages in another order, then single immediates back and forth; return the speeds.

    `shared`: into memory of alloc_shared().
    """
    from tep.backends.local import alloc_shared

    rng = np.random.default_rng(7)
    source = rng.integers(0, 256, _PAGE * _PAGES, np.uint8)
    target = alloc_shared(source.nbytes) if shared else np.zeros_like(source)
    order = rng.permutation(_PAGES)
    with TransferEngine.open(backend, **options) as a, TransferEngine.open(backend, **options) as b:
        mr, _ = a.reg_mr(source)
        _, desc = b.reg_mr(target)
        started = time.perf_counter()
        got = b.expect_imm_count(1, _PAGES)
        sent = a.submit_paged_writes(_PAGE, (mr, Pages(np.arange(_PAGES))), (desc, Pages(order)), 1)
        got.wait(_WAIT_S)
        sent.wait(_WAIT_S)
        took_s = time.perf_counter() - started
        placed = target.reshape(_PAGES, _PAGE)[order]
        assert bool((placed == source.reshape(_PAGES, _PAGE)).all()), "bytes differ"
        assert not b.stats().imms_unexpected, "more immediates than pages"
        pings = [
            _ping(lambda: a.submit_single_write(8, (mr, 0), (desc, 0), 2), b) for _ in range(_PINGS)
        ]
        caps = [domain.caps for domain in a._domains]
        longest = min(one.max_write_bytes for one in caps)
        return (
            f"{len(caps)} NIC{'s' * (len(caps) > 1)} ({', '.join(one.nic for one in caps[:4])}), "
            f"{source.nbytes / took_s / 1e9:.2f} GB/s to itself, write to count "
            f"{statistics.median(pings) * 1e6:.0f} us, rows "
            f"to {size_text(longest)}, messages to {size_text(caps[0].max_msg_bytes)}, "
            f"memory {'/'.join(caps[0].memory_kinds)}"
        )


def _ping(submit: Callable[[], object], receiver: TransferEngine) -> float:
    started = time.perf_counter()
    submit()
    receiver.expect_imm_count(2, 1).wait(_WAIT_S)
    return time.perf_counter() - started


# ---------------------------------------------------------------------- GPUs

_ROUNDS: Final = 2
"""The second round's bytes differ: what a NIC moves late or from elsewhere is the first's."""

_PCIE_CURE: Final = (
    "PCIe: ACS off on the bridges (tep doctor names them), the IOMMU off or in pass-through mode; "
    "in a virtual machine ATS and ACS as its host's vendor says. Until then hold what NICs move in "
    "host memory (tep.cuda.Staged)"
)


def _beside(device: str) -> TransferEngine:
    return TransferEngine.open("auto", device=device)


def check_gpus(open_engine: Callable[[str], TransferEngine] = _beside) -> Iterator[Finding]:
    """Make a finding for each GPU that the driver shows; none where there is no driver."""
    try:
        devices = list_devices()
    except BackendUnavailable:
        return
    for device in [f"cuda:{index}" for index, _ in enumerate(devices)]:
        area = f"{device} and its NICs"
        try:
            with open_engine(device) as a, open_engine(device) as b:
                caps = [domain.caps for domain in a._domains]
                names = ", ".join(cap.nic for cap in caps)
                if all("cuda" in cap.memory_kinds for cap in caps):
                    wrong = _there_and_back(a, b, device)
                else:
                    text = f"NICs {names} cannot reach the GPU's memory"
                    yield note(area, text, "tep.cuda.Staged copies it through host memory")
                    continue
        except (TepError, OSError) as error:
            yield bad(
                area, f"{type(error).__name__}: {error}", "docs/howto/gpus.md says what is needed"
            )
            continue
        if wrong:
            yield bad(area, f"through {names}: {wrong}", _PCIE_CURE)
        else:
            text = f"{_PAGES * _PAGE // KiB} KiB through {names} to host memory and back are equal"
            yield good(area, text)


def _there_and_back(a: TransferEngine, b: TransferEngine, device: str) -> str:
    """Move pages from a GPU to the host and back; return what did not arrive whole, or ""."""
    dice, every = np.random.default_rng(5), Pages(np.arange(_PAGES))
    with alloc(_PAGE * _PAGES, device) as gpu, alloc(_PAGE * _PAGES) as host:
        ends = [(device, a, gpu, a.reg_mr(gpu)[0]), ("host memory", b, host, b.reg_mr(host)[0])]
        for (source, sender, memory, mr), (sink, receiver, _, there) in (ends, ends[::-1]):
            for _ in range(_ROUNDS):
                pages = dice.integers(0, 256, (_PAGES, _PAGE), np.uint8)
                memory.write(pages)
                got = receiver.expect_imm_count(1, _PAGES)
                sender.submit_paged_writes(_PAGE, (mr, every), (there.desc, every), 1).wait(_WAIT_S)
                got.wait(_WAIT_S)
                # The source's are computed here: a copy from the GPU would wait for what it does.
                wrong = [
                    f"offset {start}: {sent:#010x} was written, {arrived:#010x} is there"
                    for start, page in zip(range(0, _PAGE * _PAGES, _PAGE), pages)
                    for sent, arrived in [(crc32(page, start), checksum(there, [start], _PAGE))]
                    if sent != arrived
                ]
                if wrong:
                    count = f"{len(wrong)} of {_PAGES} pages of {source} did not reach {sink}"
                    return f"{count}; the checksum of the first, at {wrong[0]}"
    return ""
