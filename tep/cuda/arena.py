"""Memory for transfers on the host or on a GPU; and copies where NICs cannot reach the GPU."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Any, Self

from tep.base.checks import check_int, unpicklable
from tep.base.errors import BadRequest, ClosedError
from tep.cuda.memory import set_sync_memops
from tep.host.cuda import Driver, device_number, driver
from tep.memory.source import Buffer, Memory, adapt, copied

if TYPE_CHECKING:
    from tep.backends.base import Access
    from tep.base.wire import MrDesc
    from tep.core.regions import MrHandle
    from tep.engine import TransferEngine

__all__ = ["Arena", "Staged", "alloc"]

_BYTES_MAX = 1 << 46


class Arena:
    """Memory on one device, from `alloc`, that reg_mr takes.

    Attributes:
        ptr: address of the first byte, at the start of a page.
        nbytes: length.
        device: "cpu" or "cuda:N".
    """

    def __init__(
        self, ptr: int, nbytes: int, device: str, kept: object, cuda: Driver | None
    ) -> None:
        self.ptr, self.nbytes, self.device = ptr, nbytes, device
        self._kept = kept
        self._cuda = cuda
        self._closed = False

    __reduce__ = unpicklable("it is memory of this process; register it, and send the descriptor")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"at {self.ptr:#x}"
        return f"Arena({self.nbytes} bytes on {self.device}, {state})"

    def __tep_memory__(self) -> Memory:
        """The memory for reg_mr; it keeps the bytes alive."""
        self._check(0, 0)
        return Memory(self.ptr, self.nbytes, self.device, readonly=False, owner=self._kept)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface by which torch, cupy and numba use it without a copy; not on the host."""
        if self.device == "cpu":
            raise AttributeError("host memory: use view()")
        where = (self.__tep_memory__().ptr, False)
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": where, "version": 3}

    def write(self, data: Buffer, offset: int = 0) -> None:
        """Copy the bytes of a buffer, array or tensor in CPU memory into the arena."""
        raw = copied("Arena.write", data)
        self._check(offset, len(raw))
        if not raw:
            return
        if self._cuda is None:
            ctypes.memmove(self.ptr + offset, raw, len(raw))
            return
        with self._cuda.on(device_number(self.device)):
            where = ctypes.create_string_buffer(raw, len(raw))
            self._cuda.call("cuMemcpyHtoD", self.ptr + offset, ctypes.addressof(where), len(raw))

    def read(self, offset: int = 0, nbytes: int = -1) -> bytes:
        """Copy bytes out of the arena; -1: to its end."""
        nbytes = self.nbytes - offset if nbytes == -1 else nbytes
        self._check(offset, nbytes)
        if self._cuda is None:
            return ctypes.string_at(self.ptr + offset, nbytes)
        out = ctypes.create_string_buffer(max(1, nbytes))
        with self._cuda.on(device_number(self.device)):
            if nbytes:
                self._cuda.call("cuMemcpyDtoH", ctypes.addressof(out), self.ptr + offset, nbytes)
        return out.raw[:nbytes]

    def _check(self, offset: int, nbytes: int) -> None:
        if self._closed:
            raise ClosedError("this arena is closed")
        check_int("Arena: nbytes", nbytes, 0, self.nbytes)
        check_int("Arena: offset", offset, 0, self.nbytes - nbytes)

    def close(self) -> None:
        """Release the memory; it is freed when no engine uses it any more. Idempotent."""
        self._closed = True
        self._kept = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Device:
    """An allocation on a GPU, freed with its last reference."""

    def __init__(self, cuda: Driver, index: int, nbytes: int) -> None:
        # The driver starts small allocations anywhere in a page, so allocate one page more.
        with cuda.on(index):
            base = int(cuda.call("cuMemAlloc", nbytes + mmap.PAGESIZE))
        self.ptr = -(-base // mmap.PAGESIZE) * mmap.PAGESIZE
        cuda.free_with(self, index, "cuMemFree", base)


def alloc(nbytes: int, device: str = "cpu") -> Arena:
    """Allocate zeroed bytes for transfers on "cpu" or "cuda:N", in whole pages.

    Raises:
        BadRequest: no such length or device.
        BackendUnavailable: no CUDA driver, or no such GPU.
    """
    nbytes = check_int("alloc: nbytes", nbytes, 1, _BYTES_MAX)
    if device == "cpu":
        pages = mmap.mmap(-1, nbytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        return Arena(start, nbytes, device, pages, None)
    index, cuda = device_number(device), driver()
    cuda.device(index)
    # Whole pages, so that its dma-buf shows a NIC no other allocation.
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    kept = _Device(cuda, index, whole)
    # Else the memset below, and the copies of `write`, may return before they are done.
    set_sync_memops(Memory(kept.ptr, whole, device, readonly=False, owner=kept))
    with cuda.on(index):
        cuda.call("cuMemsetD8", kept.ptr, 0, whole)
    return Arena(kept.ptr, nbytes, device, kept, cuda)


class Staged:
    """GPU memory with a registered copy in pinned host memory, for NICs that cannot reach the GPU.

    The caller copies: `push` before bytes are sent, `pull` after they were counted. Both use
    bandwidth of PCIe and of the host's memory again. `explain` names every such region.

    Args:
        engine: the engine that registers the copy.
        buffer: memory on a GPU that reg_mr takes.
        access: as for reg_mr; None = peers may write.

    Attributes:
        mr, desc: the copy's, for submits here and for the peers.
    """

    def __init__(
        self, engine: TransferEngine, buffer: Buffer, access: Access | None = None
    ) -> None:
        self._there = adapt(buffer)
        if self._there.kind != "cuda":
            raise BadRequest(f"Staged: the buffer is on {self._there.device}: register it as it is")
        self._cuda = driver()
        self._index = device_number(self._there.device)
        self._engine: TransferEngine | None = engine
        with self._cuda.on(self._index):
            self._host = int(self._cuda.call("cuMemHostAlloc", self._there.nbytes, 1))  # PORTABLE
        owner = _Pinned()
        self._cuda.free_with(owner, self._index, "cuMemFreeHost", self._host)
        text = f"a copy of {self._there.nbytes} bytes on {self._there.device}, by push() and pull()"
        here = Memory(self._host, self._there.nbytes, "cpu", False, owner, text)
        options = {} if access is None else {"access": access}
        self.mr: MrHandle
        self.desc: MrDesc
        self.mr, self.desc = engine.reg_mr(here, **options)

    def push(self, offset: int = 0, nbytes: int = -1) -> None:
        """Copy bytes from the GPU, so that the next submit sends them; returns when it is done."""
        offset, nbytes = self._range(offset, nbytes)
        with self._cuda.on(self._index):
            self._cuda.call("cuMemcpyDtoH", self._host + offset, self._there.ptr + offset, nbytes)

    def pull(self, offset: int = 0, nbytes: int = -1) -> None:
        """Copy bytes that have arrived to the GPU; kernels started afterwards see them."""
        offset, nbytes = self._range(offset, nbytes)
        with self._cuda.on(self._index):
            self._cuda.call("cuMemcpyHtoD", self._there.ptr + offset, self._host + offset, nbytes)

    def _range(self, offset: int, nbytes: int) -> tuple[int, int]:
        if self._engine is None:
            raise ClosedError("this staged region is closed")
        offset = check_int("Staged: offset", offset, 0, self._there.nbytes)
        nbytes = self._there.nbytes - offset if nbytes == -1 else nbytes
        return offset, check_int("Staged: nbytes", nbytes, 0, self._there.nbytes - offset)

    def close(self) -> None:
        """Deregister and free the copy. Idempotent.

        Raises:
            BusyError: transfers still read from it; nothing has happened then.
        """
        if self._engine is not None:
            self._engine.deregister(self.mr)
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Pinned:
    """Page-locked host memory; it is freed with this object."""
