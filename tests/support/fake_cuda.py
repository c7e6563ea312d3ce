"""A stand-in for cuda.bindings.driver: the calls that tep makes, as NVIDIA documents them.

GPU memory is host memory of this process, so that copies and loads work. Streams are done at once.
Calls without a current context fail, as do lengths and addresses that the documents forbid. Which
calls and constants there are is held against the real package in tests/abi/cuda_python.json.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from dataclasses import dataclass, field
from enum import IntEnum
from threading import Thread
from types import SimpleNamespace

__all__ = ["Allocation", "CUresult", "FakeCuda", "FakeKernels", "FakeNvrtc"]


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713
    CUDA_ERROR_NOT_SUPPORTED = 801


OK, BAD = CUresult.CUDA_SUCCESS, CUresult.CUDA_ERROR_INVALID_VALUE


class CUpointer_attribute(IntEnum):
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2
    CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6
    CU_POINTER_ATTRIBUTE_IS_MANAGED = 8
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9
    CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE = 15
    CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS = 117
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122
    CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124


class CUmemRangeHandleType(IntEnum):
    CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1


class CUflushGPUDirectRDMAWritesTarget(IntEnum):
    CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX = 0


class CUflushGPUDirectRDMAWritesScope(IntEnum):
    CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER = 100


class CUstreamCaptureMode(IntEnum):
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


class CUstream_flags(IntEnum):
    CU_STREAM_NON_BLOCKING = 1


@dataclass
class Allocation:
    """A run of memory that CUDA knows."""

    start: int
    nbytes: int
    device: int
    kind: int = 2  # CU_MEMORYTYPE_DEVICE; 1 is HOST
    pool: int = 0
    capable: bool = True
    managed: bool = False
    sync: bool = False
    kept: object = None


@dataclass
class FakeCuda:
    """One process's driver; construct it with what the GPUs are."""

    gpus: int = 2
    ordering: int = 100  # of NICs' writes: 0 none, 100 for the owner, 200 for all
    flush_options: int = 1
    dmabuf: int = 1
    memops: int = 1
    calls: list[tuple] = field(default_factory=list)
    known: dict[int, Allocation] = field(default_factory=dict)
    stack: list[int] = field(default_factory=list)

    CUpointer_attribute = CUpointer_attribute
    CUdevice_attribute = CUdevice_attribute
    CUmemRangeHandleType = CUmemRangeHandleType
    CUflushGPUDirectRDMAWritesTarget = CUflushGPUDirectRDMAWritesTarget
    CUflushGPUDirectRDMAWritesScope = CUflushGPUDirectRDMAWritesScope
    CUstream_flags = CUstream_flags

    def _log(self, name: str, *args: object) -> bool:
        """Note a call that needs a current context; whether there is one."""
        self.calls.append((name, *args, self.stack[-1] if self.stack else None))
        return bool(self.stack)

    def find(self, ptr: int) -> Allocation | None:
        hits = (one for one in self.known.values() if 0 <= ptr - one.start < one.nbytes)
        return next(hits, None)

    def make(self, nbytes: int, device: int = 0, *, skip: int = 0, **facts: object) -> Allocation:
        """Memory whose first byte is `skip` behind the start of a page."""
        pages = mmap.mmap(-1, nbytes + skip + mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + skip
        one = self.known[start] = Allocation(start, nbytes, device, kept=pages, **facts)
        return one

    def _in_page(self, start: int) -> Allocation | None:
        """What has bytes in a page: the rest of it is backed as well."""
        end = start + mmap.PAGESIZE
        hits = (k for k in self.known.values() if k.start < end and start < k.start + k.nbytes)
        return next(hits, None)

    # --- the calls

    def cuInit(self, flags):
        return ((OK if self.gpus else CUresult.CUDA_ERROR_NO_DEVICE),)

    def cuDeviceGetCount(self):
        return OK, self.gpus

    def cuDeviceGet(self, ordinal):
        if ordinal < self.gpus:
            return OK, ordinal
        return CUresult.CUDA_ERROR_INVALID_DEVICE, None

    def cuDeviceGetPCIBusId(self, length, dev):
        return OK, f"0000:{0x1B + dev:02X}:00.0".encode().ljust(length, b"\0")

    def cuDeviceGetName(self, length, dev):
        return OK, b"Fake H100".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attrib, dev):
        name = attrib.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        return OK, {
            "COMPUTE_CAPABILITY_MAJOR": 9,
            "COMPUTE_CAPABILITY_MINOR": 0,
            "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": 1,
            "GPU_DIRECT_RDMA_SUPPORTED": 1,
            "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS": self.flush_options,
            "GPU_DIRECT_RDMA_WRITES_ORDERING": self.ordering,
            "CAN_USE_64_BIT_STREAM_MEM_OPS": self.memops,
            "DMA_BUF_SUPPORTED": self.dmabuf,
        }[name]

    def cuDevicePrimaryCtxRetain(self, dev):
        return OK, SimpleNamespace(device=dev)

    def cuCtxPushCurrent(self, ctx):
        self.stack.append(ctx.device)
        return (OK,)

    def cuCtxPopCurrent(self):
        return OK, self.stack.pop()

    def cuPointerGetAttributes(self, count, attributes, ptr):
        if not self._log("cuPointerGetAttributes", ptr):
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, None
        assert count == len(attributes)
        one = self.find(ptr)
        if one is None:  # answered with zeros, and success
            return OK, [0] * count
        facts = {
            CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: one.kind,
            CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: one.device,
            CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED: one.managed,
            CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: one.pool,
            CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: one.capable,
        }
        return OK, [facts[which] for which in attributes]

    def cuPointerSetAttribute(self, value, attribute, ptr):
        one = self.find(ptr)
        if not self._log("cuPointerSetAttribute", ptr) or one is None:
            return (BAD,)
        assert attribute is CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        one.sync = bool(value)
        return (OK,)

    def cuMemGetAddressRange(self, dptr):
        one = self.find(dptr)
        if not self._log("cuMemGetAddressRange", dptr) or one is None or one.kind != 2:
            return BAD, None, None
        return OK, one.start, one.nbytes

    def cuMemGetHandleForAddressRange(self, dptr, size, handle_type, flags):
        page = mmap.PAGESIZE
        self._log("cuMemGetHandleForAddressRange", dptr, size)
        if not self.stack or dptr % page or size % page or not size or flags:
            return BAD, None
        edge = [self._in_page(at) for at in (dptr, dptr + size - page)]
        if None in edge or any(one.device != edge[0].device for one in edge):
            return BAD, None
        if any(one.kind != 2 or one.pool or one.managed or not one.capable for one in edge):
            return CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        fd = os.memfd_create("dmabuf")
        os.write(fd, ctypes.string_at(dptr, size))
        return OK, fd

    def cuFlushGPUDirectRDMAWrites(self, target, scope):
        return ((OK if self._log("flush", int(scope)) else CUresult.CUDA_ERROR_INVALID_CONTEXT),)

    def cuMemAlloc(self, bytesize):
        if not self._log("cuMemAlloc", bytesize):
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, None
        return OK, self.make(bytesize, self.stack[-1]).start

    def cuMemFree(self, dptr):
        self._log("cuMemFree", dptr)
        return ((OK if self.known.pop(dptr, None) else BAD),)

    def cuMemHostAlloc(self, bytesize, flags):
        if not self._log("cuMemHostAlloc", bytesize):
            return CUresult.CUDA_ERROR_INVALID_CONTEXT, None
        return OK, self.make(bytesize, self.stack[-1], kind=1).start

    def cuMemFreeHost(self, p):
        self._log("cuMemFreeHost", p)
        return ((OK if self.known.pop(p, None) else BAD),)

    def cuMemAllocManaged(self, bytesize, flags):
        if not self._log("cuMemAllocManaged", bytesize) or flags != 1:
            return BAD, None
        return OK, self.make(bytesize, self.stack[-1], managed=True).start

    def cuMemHostRegister(self, p, bytesize, flags):
        if not self._log("cuMemHostRegister", p, flags):
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if self.find(p):
            return (CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        self.known[p] = Allocation(p, bytesize, self.stack[-1], kind=1)
        return (OK,)

    def cuMemHostUnregister(self, p):
        self._log("cuMemHostUnregister", p)
        if self.known.pop(p, None) is None:
            return (CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,)
        return (OK,)

    def cuMemHostGetDevicePointer(self, p, flags):
        one = self.find(p)
        return (BAD, None) if one is None or one.kind != 1 or flags else (OK, p)

    def cuMemsetD8(self, dst, uc, n):
        return self._copy("cuMemsetD8", dst, lambda: ctypes.memset(dst, uc, n), n)

    def cuMemcpyHtoD(self, dst, src, nbytes):
        def copy():
            return ctypes.memmove(dst, src, nbytes)

        return self._copy("cuMemcpyHtoD", dst, copy, nbytes)

    def cuMemcpyDtoH(self, dst, src, nbytes):
        def copy():
            return ctypes.memmove(dst, src, nbytes)

        return self._copy("cuMemcpyDtoH", src, copy, nbytes)

    def _copy(self, name, device_side, copy, nbytes):
        one = self.find(device_side)
        self._log(name, device_side, nbytes)
        if one is None or device_side + nbytes > one.start + one.nbytes or not self.stack:
            return (BAD,)
        copy()
        return (OK,)

    def cuStreamCreate(self, flags):
        return (OK, SimpleNamespace()) if self.stack else (BAD, None)

    def cuStreamSynchronize(self, stream):
        return (OK,)

    def cuStreamDestroy(self, stream):
        return (OK,)

    def cuStreamWriteValue64(self, stream, addr, value, flags):
        def write():
            ctypes.c_uint64.from_address(addr).value = value

        return self._copy("cuStreamWriteValue64", addr, write, 8)


class FakeKernels(FakeCuda):
    """Also runs the kernels of scripts/gpu_check, as Python functions."""

    CUstreamCaptureMode = CUstreamCaptureMode
    spinning: Thread | None = None
    captured: tuple | None = None
    capturing = False

    def cuModuleLoadData(self, image):
        return (OK, "module") if image == b"cubin" else (BAD, None)

    def cuModuleGetFunction(self, hmod, name):
        return OK, getattr(self, f"_{name.decode()}")

    def cuStreamBeginCapture(self, stream, mode):
        self.capturing = True
        return (OK,)

    def cuStreamEndCapture(self, stream):
        self.capturing = False
        return OK, self.captured

    def cuGraphInstantiate(self, graph, flags):
        return OK, graph

    def cuGraphLaunch(self, ready, stream):
        function, values = ready
        function(*values)
        return (OK,)

    def cuLaunchKernel(self, f, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
        values, kinds = params
        assert len(values) == len(kinds)
        if self.capturing:
            self.captured = f, values
        else:
            self.spinning = Thread(target=f, args=values)
            self.spinning.start()
        return (OK,)

    def cuStreamSynchronize(self, stream):
        if self.spinning is not None:
            self.spinning.join(20)
            self.spinning = None
        return (OK,)

    def _advance(self, word):
        ctypes.c_uint64.from_address(word).value += 1

    def _ask(self, word, answer, took_ns, spins):
        value, started = ctypes.c_uint64.from_address(word).value + 1, time.perf_counter_ns()
        ctypes.c_uint64.from_address(word).value = value
        theirs = ctypes.c_uint64.from_address(answer)
        while theirs.value != value and spins:
            spins -= 1
            os.sched_yield()  # the callback needs the interpreter as well
        took = time.perf_counter_ns() - started if spins else 0
        ctypes.c_uint64.from_address(took_ns).value = took

    def _wait_for(self, flag, value, source, out, nbytes, spins):
        word = ctypes.c_uint64.from_address(flag)
        while word.value != value and spins:
            spins -= 1
        ctypes.memmove(out, source, nbytes)
        ctypes.c_ubyte.from_address(out + nbytes).value = spins != 0


class FakeNvrtc:
    """Compiles nothing."""

    def nvrtcCreateProgram(self, src, name, count, headers, names):
        return OK, src

    def nvrtcCompileProgram(self, prog, count, options):
        return ((OK if options == [b"--gpu-architecture=sm_90"] else BAD),)

    def nvrtcGetCUBINSize(self, prog):
        return OK, 5

    def nvrtcGetCUBIN(self, prog, cubin):
        ctypes.memmove(cubin, b"cubin", 5)
        return (OK,)
