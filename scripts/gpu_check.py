"""The program of scripts/gpu_check, for a GPU; each check prints a line, the last is the verdict.

Kernels are compiled by NVRTC through cuda-python. Without a GPU it says so and ends with 2.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tep import BackendUnavailable, TransferEngine, alloc
from tep.base.units import KiB, MiB
from tep.cuda import GpuFlag, Staged, export_dmabuf, flush, inspect, needs_flush
from tep.host import cuda as cuda_driver
from tep.host.cuda import Driver, device_number
from tep.host.topology import detect
from tep.memory.source import adapt, exported

__all__ = ["KERNELS", "MAPPED", "Check", "fill", "main", "mapped"]

MAPPED = 2 * MiB
"""The granularity of mappings on every GPU so far."""

KERNELS = r"""
extern "C" __global__ void advance(volatile unsigned long long *word) {
    *word = *word + 1;
    __threadfence_system();
}
__device__ unsigned long long now_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}
extern "C" __global__ void ask(volatile unsigned long long *word,
                               volatile unsigned long long *answer,
                               volatile unsigned long long *took_ns, unsigned long long spins) {
    unsigned long long value = *word + 1, started = now_ns();
    *word = value;
    __threadfence_system();
    while (*answer != value && spins) spins--;
    *took_ns = spins ? now_ns() - started : 0;
    __threadfence_system();
}
extern "C" __global__ void wait_for(volatile unsigned long long *flag, unsigned long long value,
                                    const unsigned char *bytes, unsigned char *out,
                                    unsigned long long n, unsigned long long spins) {
    while (*flag != value && spins) spins--;
    __threadfence_system();
    for (unsigned long long k = 0; k < n; k++) out[k] = bytes[k];
    out[n] = spins != 0;
}
"""
"""`ask` and `wait_for` give up after some spins: a word that is never set must not hang the GPU."""

_SPINS = 1 << 28
_RUNNING = 2**64 - 1  # in place of the time that a kernel will have taken
_LOOK_S = 50e-6
_PORTABLE_MAPPED = 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL
_WAIT_S = 20.0
_STAGED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("local", {}),
    ("libfabric", {"provider": "tcp"}),
)
_PUBLISHED = {"avg": 9.8, "min": 6.1, "p50": 9.3, "p90": 11.1, "p99": 20.4, "p999": 41.7}
"""Microseconds from a GPU's store to a Python callback: arXiv 2510.27656, Table 4."""


class Check:
    """One GPU, and the checks on it.

    Args:
        device: "cuda:N".
        cuda: the driver.
        nvrtc: cuda.bindings.nvrtc; None = only checks without kernels.
        launches: number of launches of each timed kernel.
    """

    def __init__(self, device: str, cuda: Driver, nvrtc: Any | None, launches: int = 2_000) -> None:
        self.device = device
        self.index = device_number(device)
        self.cuda = cuda
        self.nvrtc = nvrtc
        self.launches = launches
        self.figures: dict[str, object] = {}

    def facts(self) -> str:
        """Describe the GPU and its driver."""
        names = (
            "COMPUTE_CAPABILITY_MAJOR", "DMA_BUF_SUPPORTED", "GPU_DIRECT_RDMA_SUPPORTED",
            "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", "GPU_DIRECT_RDMA_WRITES_ORDERING",
            "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS", "CAN_USE_64_BIT_STREAM_MEM_OPS",
        )  # fmt: skip
        found = {name: self.cuda.attribute(self.index, name) for name in names}
        self.figures["attributes"] = found
        self.figures["cuda-python"] = bindings = import_module("cuda.bindings").__version__
        self.figures["driver"] = version = int(self.cuda.call("cuDriverGetVersion"))
        shown = ", ".join(f"{name} {value}" for name, value in found.items())
        return f"cuda-python {bindings}, driver's CUDA {version / 1000:.2f}, {shown}"

    def pointers(self) -> str:
        """Check that each kind of memory is told from the others."""
        host = bytearray(4096)
        with alloc(3 * 4096, self.device) as arena:
            found = inspect(arena.ptr + 5000)
            assert (found.kind, found.device) == ("device", self.index), found
            assert found.start <= arena.ptr < arena.ptr + 3 * 4096 <= found.start + found.nbytes
        pageable = inspect(adapt(host).ptr)
        assert pageable.kind == "pageable", pageable
        with self.cuda.on(self.index):
            pinned = int(self.cuda.call("cuMemHostAlloc", 4096, _PORTABLE_MAPPED))
            assert inspect(pinned).kind == "pinned"
            self.cuda.call("cuMemFreeHost", pinned)
            managed = int(self.cuda.call("cuMemAllocManaged", 4096, _ATTACH_GLOBAL))
            assert inspect(managed).kind == "managed"
            self.cuda.call("cuMemFree", managed)
        return "device, pinned, managed and pageable"

    def dmabufs(self) -> str:
        """Check dma-bufs of memory at, and not at, the start of an allocation and of a page."""
        sizes = []
        with alloc(4 * MiB, self.device) as arena:
            for start, nbytes in ((0, 4 * MiB), (64 * KiB, MiB), (5000, 100), (4095, 4098)):
                memory = adapt((arena.ptr + start, nbytes, self.device))
                with exported(export_dmabuf, memory) as (fd, offset):
                    assert offset == (arena.ptr + start) % 4096, offset
                    sizes.append(os.lseek(fd, 0, os.SEEK_END))
        return f"4 exported, {sizes} bytes long"

    def mappings(self) -> str:
        """Check a dma-buf across two mappings of cuMemCreate, as in torch's expandable segments."""
        with mapped(self.cuda, 2, self.index) as start:
            memory = adapt((start + MAPPED // 2 + 100, MAPPED, self.device))
            raw = os.urandom(MAPPED)
            with exported(export_dmabuf, memory) as (fd, _), self.cuda.on(self.index):
                size = os.lseek(fd, 0, os.SEEK_END)
                there = ctypes.create_string_buffer(raw, MAPPED)
                self.cuda.call("cuMemcpyHtoD", memory.ptr, ctypes.addressof(there), MAPPED)
                back = ctypes.create_string_buffer(MAPPED)
                self.cuda.call("cuMemcpyDtoH", ctypes.addressof(back), memory.ptr, MAPPED)
                flags = int(self.cuda.call("cuCtxGetFlags"))
            assert back.raw == raw, "bytes differ"
        return f"memory of cuMemCreate exported, {size} bytes long; flags of the context {flags:#x}"

    def flushed(self) -> str:
        """Check that a flush works, and say whether one is needed."""
        needed = needs_flush(self.index)
        assert flush(self.index) is needed
        return "needed before kernels read" if needed else "not needed: the GPU orders NICs' writes"

    def copies(self) -> str:
        """Move GPU to GPU memory over a host-only backend, by staged copies; compare all bytes."""
        held = []
        for backend, options in _STAGED:
            name = " ".join((backend, *options.values()))
            try:
                self._copied(backend, options)
                held.append(f"{name} 4 MiB, bytes equal")
            except BackendUnavailable as error:
                held.append(f"{name} is not here ({str(error).splitlines()[0]})")
        return "; ".join(held)

    def _copied(self, backend: str, options: dict[str, Any]) -> None:
        with (
            TransferEngine.open(backend, **options) as a,
            TransferEngine.open(backend, **options) as b,
            alloc(4 * MiB, self.device) as source,
            alloc(4 * MiB, self.device) as target,
            Staged(a, source) as out,
            Staged(b, target) as into,
        ):
            raw = os.urandom(4 * MiB)
            source.write(raw)
            out.push()
            got = b.expect_imm_count(1, 1)
            a.submit_single_write(4 * MiB, (out.mr, 0), (into.desc, 0), 1).wait(_WAIT_S)
            got.wait(_WAIT_S)
            into.pull()
            assert target.read() == raw, f"{backend}: bytes differ"

    def nics(self) -> str:
        """Move GPU to GPU memory over the NICs beside the GPU, by dma-bufs; compare all bytes."""
        place = detect().place(self.device)
        if not place.nics:
            return "no NIC here: not tried"
        how: dict[str, Any] = {"provider": "efa"} if place.is_efa else {}
        backend = "libfabric" if place.is_efa else "verbs"
        with (
            TransferEngine.open(backend, device=self.device, **how) as a,
            TransferEngine.open(backend, device=self.device, **how) as b,
            alloc(4 * MiB, self.device) as source,
            alloc(4 * MiB, self.device) as target,
        ):
            raw = os.urandom(4 * MiB)
            source.write(raw)
            mr, _ = a.reg_mr(source)
            _, desc = b.reg_mr(target)
            got = b.expect_imm_count(1, 1)
            # One shard to one NIC, from a place that is no page's start.
            a.submit_single_write(MiB - 24, (mr, 24), (desc, 4104), 1).wait(_WAIT_S)
            got.wait(_WAIT_S)
            flush(self.index)
            assert target.read(4104, MiB - 24) == raw[24:MiB], "bytes differ"
        return f"1 MiB over {', '.join(place.nics)} ({backend}), bytes equal"

    def compiled(self) -> bytes:
        """Compile the kernels for this GPU."""
        nvrtc = self.nvrtc
        assert nvrtc is not None
        numbers = (
            self.cuda.attribute(self.index, f"COMPUTE_CAPABILITY_{part}")
            for part in ("MAJOR", "MINOR")
        )
        arch = "--gpu-architecture=sm_{}{}".format(*numbers).encode()

        def call(name: str, *args: object) -> Any:
            try:
                code, *values = getattr(nvrtc, name)(*args)
            except RuntimeError as error:  # cuda-python found no libnvrtc
                raise BackendUnavailable(
                    "NVRTC is not here: pip install nvidia-cuda-nvrtc, for cuda-python 12 "
                    "nvidia-cuda-nvrtc-cu12; --no-kernels leaves out what needs it",
                    ((name, str(error)),),
                ) from error
            assert int(code) == 0, f"{name}: {code}"
            return values[0] if values else None

        program = call("nvrtcCreateProgram", KERNELS.encode(), b"gpu_check.cu", 0, [], [])
        call("nvrtcCompileProgram", program, 1, [arch])
        image = b" " * call("nvrtcGetCUBINSize", program)
        call("nvrtcGetCUBIN", program, image)
        return bytes(image)

    def _module(self) -> Any:
        return self.cuda.call("cuModuleLoadData", self.compiled())

    def _launch(self, function: Any, stream: Any, *values: int) -> None:
        """Launch one thread of a kernel; all its arguments have 64 bits."""
        kinds = (ctypes.c_uint64,) * len(values)
        self.cuda.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, (values, kinds), 0)

    def watched(self) -> str:
        """Time from launch to callback while a kernel in a CUDA graph advances a watched word."""
        seen = threading.Event()
        with TransferEngine.open("local", device=self.device) as engine, self.cuda.on(self.index):
            word = engine.alloc_uvm_watcher(lambda _old, _new: seen.set())
            module = self._module()
            function = self.cuda.call("cuModuleGetFunction", module, b"advance")
            stream = self.cuda.call("cuStreamCreate", 1)
            mode = self.cuda.m.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            self.cuda.call("cuStreamBeginCapture", stream, mode)
            self._launch(function, stream, word.device_ptr)
            graph = self.cuda.call("cuStreamEndCapture", stream)
            ready = self.cuda.call("cuGraphInstantiate", graph, 0)
            times_us = []
            for _ in range(self.launches):
                seen.clear()
                started = time.perf_counter()
                self.cuda.call("cuGraphLaunch", ready, stream)
                assert seen.wait(_WAIT_S), "the callback was not called"
                times_us.append(1e6 * (time.perf_counter() - started))
            assert int(word.word[0]) == self.launches, word.word
            self.cuda.call("cuStreamSynchronize", stream)
        return self._beside_published("from launch to callback", times_us)

    def answered(self) -> str:
        """Time a kernel's store, the callback's answer and its arrival, by the GPU's own clock.

        The time includes the way back, so from store to callback it is less. The clock of some GPUs
        ticks once a microsecond.
        """
        with TransferEngine.open("local", device=self.device) as engine, self.cuda.on(self.index):
            pinned = int(self.cuda.call("cuMemHostAlloc", 4096, _PORTABLE_MAPPED))
            ours = (ctypes.c_uint64 * 2).from_address(pinned)
            ours[0] = 0

            def answer(_old: int, new: int) -> None:
                ours[0] = new

            word = engine.alloc_uvm_watcher(answer)
            theirs = int(self.cuda.call("cuMemHostGetDevicePointer", pinned, 0))
            function = self.cuda.call("cuModuleGetFunction", self._module(), b"ask")
            stream = self.cuda.call("cuStreamCreate", 1)
            times_us = []
            for _ in range(self.launches):
                ours[1] = _RUNNING
                self._launch(function, stream, word.device_ptr, theirs, theirs + 8, _SPINS)
                while ours[1] == _RUNNING:
                    # Not cuStreamSynchronize, which may keep the interpreter from the callback.
                    time.sleep(_LOOK_S)
                assert ours[1], "the kernel gave up: nobody answered"
                times_us.append(ours[1] / 1e3)
            self.cuda.call("cuStreamSynchronize", stream)
            self.cuda.call("cuMemFreeHost", pinned)
        return self._beside_published("from store to callback and back", times_us)

    def _beside_published(self, what: str, times_us: list[float]) -> str:
        times_us = sorted(times_us)
        found = {"avg": statistics.fmean(times_us), "min": times_us[0]}
        for name, part in _QUANTILES.items():
            found[name] = times_us[int(part * (len(times_us) - 1))]
        self.figures[f"{what}, us"] = found
        pairs = (f"{name} {value:.1f} ({_PUBLISHED[name]})" for name, value in found.items())
        return f"us {what}; published from store to callback: {', '.join(pairs)}"

    def flag(self) -> str:
        """Check a kernel that spins on a flag, set by a counted immediate, then reads the data."""
        with (
            TransferEngine.open("local", device=self.device) as a,
            TransferEngine.open("local", device=self.device) as b,
            alloc(64, self.device) as target,
            alloc(65, self.device) as out,
            Staged(b, target) as into,
            GpuFlag(self.device) as flag,
            self.cuda.on(self.index),
        ):
            mr, _ = a.reg_mr(bytearray(range(64)))
            module = self._module()
            function = self.cuda.call("cuModuleGetFunction", module, b"wait_for")
            stream = self.cuda.call("cuStreamCreate", 1)
            self._launch(function, stream, flag.ptr, 7, target.ptr, out.ptr, 64, _SPINS)
            got = b.expect_imm_count(1, 1)
            a.submit_single_write(64, (mr, 0), (into.desc, 0), 1).wait(_WAIT_S)
            got.wait(_WAIT_S)
            into.pull()
            told = flag.set_on_count(b, imm=2, count=1, value=7)
            a.submit_single_write(8, (mr, 0), (into.desc, 0), 2).wait(_WAIT_S)
            told.wait(_WAIT_S)
            self.cuda.call("cuStreamSynchronize", stream)
            seen = out.read()
        assert seen[64] == 1, "the kernel gave up: it did not see the flag"
        assert seen[:64] == bytes(range(64)), "the kernel saw the flag before the bytes"
        return "seen by a spinning kernel, and the bytes with it"


def fill(cuda: Driver, start: int, pieces: int, device: int, *, capable: bool = True) -> None:
    """Map several separate pieces of GPU memory at an address, one behind the other."""
    m = cuda.m
    prop = m.CUmemAllocationProp()
    prop.type = m.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = m.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device
    prop.allocFlags.gpuDirectRDMACapable = int(capable)
    access = m.CUmemAccessDesc()
    access.location = prop.location
    access.flags = m.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    for k in range(pieces):
        handle = cuda.call("cuMemCreate", MAPPED, prop, 0)
        cuda.call("cuMemMap", start + k * MAPPED, MAPPED, 0, handle, 0)
        cuda.call("cuMemRelease", handle)  # the mapping keeps it
    cuda.call("cuMemSetAccess", start, pieces * MAPPED, [access], 1)


@contextlib.contextmanager
def mapped(cuda: Driver, pieces: int, device: int = 0, *, capable: bool = True) -> Iterator[int]:
    """Reserve addresses, and map GPU memory there meanwhile."""
    start = int(cuda.call("cuMemAddressReserve", pieces * MAPPED, 0, 0, 0))
    fill(cuda, start, pieces, device, capable=capable)
    yield start
    cuda.call("cuMemUnmap", start, pieces * MAPPED)
    cuda.call("cuMemAddressFree", start, pieces * MAPPED)


_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


def main(argv: Sequence[str]) -> int:
    """Run all checks; return 0 if every one held, 1 if not, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("device", nargs="?", default="cuda:0")
    parser.add_argument("--json", type=Path, help="write lines and figures here")
    parser.add_argument("--no-kernels", action="store_true", help="leave out what NVRTC compiles")
    parser.add_argument("--launches", type=int, default=2_000, help="of each kernel that is timed")
    given = parser.parse_args(argv)
    try:
        cuda = cuda_driver.driver()
        cuda.device(device_number(given.device))
        nvrtc = None if given.no_kernels else import_module("cuda.bindings.nvrtc")
    except (BackendUnavailable, ImportError) as error:
        sys.stdout.write(f"no GPU: {error}\nNothing was checked.\n")
        return 2
    check = Check(given.device, cuda, nvrtc, given.launches)
    runs: list[Callable[[], str]] = [
        check.facts, check.pointers, check.dmabufs, check.mappings, check.flushed, check.copies,
        check.nics,
    ]  # fmt: skip
    runs += [] if given.no_kernels else [check.watched, check.answered, check.flag]
    lines, failed = [], 0
    for run in runs:
        try:
            line = f"ok      {run.__name__}: {run()}"
        except Exception as error:  # noqa: BLE001  # the other checks are still worth a GPU's time
            failed += 1
            line = f"FAILED  {run.__name__}: {type(error).__name__}: {error}"
        lines.append(line)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{given.device}: {failed} checks failed, {len(runs) - failed} held\n")
    if given.json:
        text = json.dumps({"lines": lines, "figures": check.figures}, indent=1)
        given.json.write_text(text + "\n", encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
