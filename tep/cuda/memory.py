"""The kinds of CUDA memory, and a NIC's access to them: dma-bufs, SYNC_MEMOPS, flushes; and words
between host and GPU: host memory that kernels can write, and flags in GPU memory.

Facts are from the documents of the driver API and of GPUDirect RDMA:

- A dma-buf can be made of memory of cuMemAlloc, and of reserved addresses mapped by cuMemMap.
  Start and length must be multiples of the host's page.
- Memory of a stream-ordered pool (cuMemAllocAsync) and managed memory are not among them.
- Mapped memory reaches a NIC only if it was made with gpuDirectRDMACapable.

So torch's default allocator exports, and so does expandable_segments where it makes capable
memory; `backend:cudaMallocAsync` does not. cupy's default pool exports; `MemoryAsyncPool` does not.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from tep.base.checks import U64_MAX, check_int
from tep.base.errors import BackendUnavailable, BadRequest, ClosedError, FabricError
from tep.host.cuda import device_number, driver
from tep.memory.source import Memory

if TYPE_CHECKING:
    from tep.core.handles import Expectation
    from tep.engine import TransferEngine

__all__ = [
    "GpuFlag", "Pointer", "export_dmabuf", "flush", "inspect", "needs_flush", "pinner",
    "set_sync_memops",
]  # fmt: skip

_DEVICE, _HOST = 2, 1  # CUmemorytype
_ORDERED_FOR_OWNER: Final = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
_FLUSH_BY_HOST: Final = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_NO_DMABUF: Final = (
    "0: it needs the open kernel modules of NVIDIA's driver 515 or later, Linux 5.12, and a GPU "
    "since Turing"
)
_CAPABLE: Final = "IS_GPU_DIRECT_RDMA_CAPABLE"


class Pointer(NamedTuple):
    """The driver's answer about an address.

    Attributes:
        kind: "device", "pinned", "managed", or "pageable" for memory that CUDA does not know.
        device: number of its GPU; -1 for pageable memory.
        start, nbytes: the allocation that it is in, or the mapped part of it; 0: none.
        is_pooled: it comes from a stream-ordered pool.
        is_capable: the driver gives NICs access to it.
    """

    kind: str
    device: int
    start: int
    nbytes: int
    is_pooled: bool
    is_capable: bool


def inspect(ptr: int) -> Pointer:
    """Ask the driver about an address.

    Raises:
        BackendUnavailable: no driver.
    """
    return _inspect(ptr, driver().somewhere())


def _inspect(ptr: int, index: int) -> Pointer:
    """Ask in the context of one GPU, which knows the memory of the others as well."""
    cuda = driver()
    names = ("MEMORY_TYPE", "DEVICE_ORDINAL", "IS_MANAGED", "MEMPOOL_HANDLE", _CAPABLE)
    enum = cuda.m.CUpointer_attribute
    wanted = [getattr(enum, f"CU_POINTER_ATTRIBUTE_{name}") for name in names]
    with cuda.on(index):
        # This call answers for any address, with zeros for memory that CUDA does not know.
        kind, device, managed, pool, capable = cuda.call(
            "cuPointerGetAttributes", len(wanted), wanted, ptr
        )
    kind = int(kind)
    if kind not in {_DEVICE, _HOST}:
        return Pointer("pageable", -1, 0, 0, is_pooled=False, is_capable=False)
    start = nbytes = 0
    if kind == _DEVICE and not managed:
        with cuda.on(int(device)):
            base, size = cuda.call("cuMemGetAddressRange", ptr)
        start, nbytes = int(base), int(size)
    text = "managed" if managed else "device" if kind == _DEVICE else "pinned"
    return Pointer(text, int(device), start, nbytes, bool(int(pool)), bool(capable))


def export_dmabuf(memory: Memory, *, by_pcie: bool = False) -> tuple[int, int]:
    """Export GPU memory as a new dma-buf, and make synchronous copies to it complete.

    Args:
        memory: memory on a GPU.
        by_pcie: let NICs reach it by PCIe, on machines where the GPU has another link to the host
            as well (Grace; NICs with data-direct); driver 570 or later. False: the driver's choice.

    Returns:
        The descriptor, which belongs to the caller, and the offset in it at which the memory
        begins: only whole pages can be exported, so it is the distance to the start of a page.

    Raises:
        BadRequest: not memory of that GPU, or not all of it.
        FabricError: the driver refused; says which setting of the allocator helps.
        BackendUnavailable: no driver, or this GPU makes no dma-bufs.
    """
    cuda = driver()
    what = f"dma-buf of {memory.nbytes} bytes at {memory.ptr:#x}"
    found = _check_exportable(what, memory)
    page = mmap.PAGESIZE
    start = memory.ptr // page * page
    end = -(-(memory.ptr + memory.nbytes) // page) * page
    kind = cuda.m.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    with cuda.on(found.device):
        try:
            flags = int(by_pcie)  # CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE
            fd = int(cuda.call("cuMemGetHandleForAddressRange", start, end - start, kind, flags))
        except FabricError as error:
            raise FabricError(
                f"{what}: {error}{_cure(found, start, end)}", code="LOCAL_KEY"
            ) from error
    try:
        set_sync_memops(memory)
    except FabricError:
        os.close(fd)
        raise
    return fd, memory.ptr - start


def _check_exportable(what: str, memory: Memory) -> Pointer:
    index = device_number(memory.device)
    found = _inspect(memory.ptr, index)
    if found.kind != "device":
        raise BadRequest(
            f"{what}: this is {found.kind} memory; only device memory of cuMemAlloc (cudaMalloc) "
            "or cuMemMap can be exported"
        )
    if memory.device != f"cuda:{found.device}":
        raise BadRequest(f"{what}: it is on cuda:{found.device}, not on {memory.device}")
    last = _inspect(memory.ptr + memory.nbytes - 1, index)
    if (last.kind, last.device) != (found.kind, found.device):
        raise BadRequest(f"{what}: its allocation ends at {found.start + found.nbytes:#x}")
    if not driver().attribute(found.device, "DMA_BUF_SUPPORTED"):
        raise BackendUnavailable(
            f"cuda:{found.device} makes no dma-bufs here",
            (
                ("CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED", _NO_DMABUF),
                ("otherwise", "modprobe nvidia_peermem, and open verbs without dmabuf_export"),
            ),
        )
    return found


def _cure(found: Pointer, start: int, end: int) -> str:
    """Say what may help if the driver refuses to export whole pages."""
    if found.is_pooled:
        return (
            "; it comes from a stream-ordered pool (cudaMallocAsync); torch: "
            "PYTORCH_CUDA_ALLOC_CONF=backend:native; cupy: "
            "cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)"
        )
    if not found.is_capable:
        return (
            "; the driver says that NICs cannot reach it: gpuDirectRDMACapable was not set when it "
            "was made; torch: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        )
    last = found.start + found.nbytes
    if start < found.start or (last < end and last % mmap.PAGESIZE):
        return (
            f"; whole pages, {start:#x} to {end:#x}, reach beyond the allocation, {found.start:#x} "
            f"to {last:#x}: allocate whole pages, as tep.alloc does"
        )
    return ""


def set_sync_memops(memory: Memory) -> None:
    """Make synchronous CUDA calls on an allocation return only when they are done.

    cudaMemcpy and cudaMemset may return before they are; a NIC that reads then sends old bytes.
    Memory of cuMemCreate cannot be marked, so all copies of its GPU's primary context wait then.

    Raises:
        FabricError: neither can be had; says what helps.
    """
    cuda = driver()
    attribute = cuda.m.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    index = device_number(memory.device)
    try:
        with cuda.on(index):
            cuda.call("cuPointerSetAttribute", 1, attribute, memory.ptr)
    except FabricError as refused:
        # The answer for memory of cuMemCreate on real drivers: openucx/ucx issue 9895.
        if "CUDA_ERROR_NOT_SUPPORTED" not in str(refused):
            raise
        try:
            cuda.wait_for_copies(index)
        except FabricError as error:
            raise FabricError(
                f"copies to memory of cuMemCreate at {memory.ptr:#x} may return before they are "
                f"done, and a NIC would send old bytes: {error}; install NVIDIA's driver 530 "
                "(CUDA 12.1) or later; torch: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
                code="PROVIDER",
            ) from error


def needs_flush(device: int) -> bool:
    """Return True if a NIC's writes need `flush` before a kernel of this GPU reads them."""
    return driver().attribute(device, "GPU_DIRECT_RDMA_WRITES_ORDERING") < _ORDERED_FOR_OWNER


def flush(device: int) -> bool:
    """Make all writes of NICs to a GPU visible to its kernels; False: nothing was needed.

    Call it after the immediates are counted, and before the kernel is started or signalled.

    Raises:
        FabricError: it is needed, and this GPU cannot do it for the host.
        BackendUnavailable: no driver, or no such GPU.
    """
    cuda = driver()
    if not needs_flush(device):
        return False
    if not cuda.attribute(device, "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS") & _FLUSH_BY_HOST:
        raise FabricError(
            f"cuda:{device} does not order what NICs write, and cannot flush it for the host; "
            "receive in host memory, and copy (tep.cuda.Staged)",
            code="PROVIDER",
        )
    target = cuda.m.CUflushGPUDirectRDMAWritesTarget
    scope = cuda.m.CUflushGPUDirectRDMAWritesScope
    with cuda.on(device):
        cuda.call(
            "cuFlushGPUDirectRDMAWrites",
            target.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
            scope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
        )
    return True


_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP
_FLAG_BYTES = 8


def pinner(device: str) -> Callable[[Memory], int]:
    """Make a function that maps host memory for a GPU's kernels until its owner is freed."""
    index = device_number(device)

    def pin(memory: Memory) -> int:
        cuda = driver()
        with cuda.on(index):
            cuda.call("cuMemHostRegister", memory.ptr, memory.nbytes, _PORTABLE | _MAPPED)
            cuda.free_with(memory.owner, index, "cuMemHostUnregister", memory.ptr)
            return int(cuda.call("cuMemHostGetDevicePointer", memory.ptr, 0))

    return pin


class GpuFlag:
    """A 64-bit word in GPU memory that the host sets and kernels spin on.

    The earlier writes of NICs are flushed before it is set, so a kernel that sees the flag (a load
    with acquire order, of system scope) sees these bytes as well. It is set on its own stream, so
    that a spinning kernel does not block it.

    Args:
        device: "cuda:N".

    Attributes:
        ptr: its address, for kernels.

    Raises:
        BackendUnavailable: no driver, or no such GPU.
        FabricError: this GPU has no 64-bit writes in streams.
    """

    def __init__(self, device: str) -> None:
        self._cuda = cuda = driver()
        self._index = device_number(device)
        self._closed = True
        if not cuda.attribute(self._index, "CAN_USE_64_BIT_STREAM_MEM_OPS"):
            raise FabricError(f"{device} has no 64-bit writes in streams", code="PROVIDER")
        with cuda.on(self._index):
            self.ptr = int(cuda.call("cuMemAlloc", _FLAG_BYTES))
            non_blocking = cuda.m.CUstream_flags.CU_STREAM_NON_BLOCKING
            self._stream = cuda.call("cuStreamCreate", int(non_blocking))
            # On the stream that sets it: cuMemsetD8 returns early, and would clear a set flag.
            cuda.call("cuMemsetD8Async", self.ptr, 0, _FLAG_BYTES, self._stream)
        self._needs_flush = needs_flush(self._index)
        self._closed = False

    def set(self, value: int) -> None:
        """Make the writes of NICs visible, then write the word, 0 <= value < 2**64."""
        if self._closed:
            raise ClosedError("this flag is closed")
        value = check_int("GpuFlag.set: value", value, 0, U64_MAX)
        if self._needs_flush:
            flush(self._index)
        with self._cuda.on(self._index):
            # The default flags put a memory barrier of system scope before the write.
            self._cuda.call("cuStreamWriteValue64", self._stream, self.ptr, value, 0)

    def set_on_count(
        self, engine: TransferEngine, imm: int, count: int, value: int = 1
    ) -> Expectation:
        """Set it when `count` immediates `imm` have arrived; the expectation is also a handle.

        If it fails, the flag is not set: kernels that spin without end need another way out.
        """

        def done(handle: Expectation) -> None:
            if handle.ok:
                self.set(value)

        return engine.expect_imm_count(imm, count, on_done=done)

    def close(self) -> None:
        """Free it. No kernel may read it any more. Idempotent."""
        if not self._closed:
            self._closed = True
            with self._cuda.on(self._index):
                self._cuda.call("cuStreamSynchronize", self._stream)
                self._cuda.call("cuStreamDestroy", self._stream)
                self._cuda.call("cuMemFree", self.ptr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
