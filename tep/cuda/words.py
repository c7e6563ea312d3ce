"""Words between host and GPU: host memory that kernels can write, and flags in GPU memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from tep.base.checks import U64_MAX, check_int
from tep.base.errors import ClosedError, FabricError
from tep.cuda.memory import flush, needs_flush
from tep.host.cuda import device_number, driver
from tep.memory.source import Memory

if TYPE_CHECKING:
    from tep.core.handles import Expectation
    from tep.engine import TransferEngine

__all__ = ["GpuFlag", "pinner"]

_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP
_FLAG_BYTES = 8


def pinner(device: str) -> Callable[[Memory], int]:
    """Make a function that maps host memory for a GPU's kernels until its owner is freed.

    That function raises FabricError or BackendUnavailable if the memory cannot be mapped.
    """
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
