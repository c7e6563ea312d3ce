"""The CUDA driver by cuda-python: the one place that imports it, and turns its codes into errors.

Every call goes through `Driver.call`. Contexts are the devices' primary ones, which torch and cupy
use as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

from tep.base.api import CudaDevice
from tep.base.distribution import install
from tep.base.errors import BackendUnavailable, BadRequest, FabricError

__all__ = ["CURE", "Driver", "device_number", "driver", "list_devices"]

_CTX_SYNC_MEMOPS: Final = 0x80  # CU_CTX_SYNC_MEMOPS, of cuda.h 12.1
CURE: Final = f"{install('cuda')}, and NVIDIA's driver (libcuda.so.1) with a GPU"


class Driver:
    """The calls that tep makes, each checked.

    Args:
        module: cuda.bindings.driver, or a fake of it.

    Raises:
        BackendUnavailable: the driver cannot be started, e.g. since there is no GPU.
    """

    def __init__(self, module: ModuleType | Any) -> None:
        self.m = module
        self._contexts: dict[int, Any] = {}
        self._waiting: set[int] = set()
        try:
            self.call("cuInit", 0)
        except FabricError as error:
            raise BackendUnavailable(
                f"the CUDA driver cannot be started; {CURE}", (("cuInit", str(error)),)
            ) from error

    def call(self, name: str, *args: object) -> Any:
        """Make one call; return its results without the code: None, one value or a tuple.

        Raises:
            FabricError: any other code than CUDA_SUCCESS; names the call and the code. Or there is
                no such driver, or it is older than the call.
        """
        try:
            code, *values = getattr(self.m, name)(*args)
        except RuntimeError as error:  # cuda-python found no libcuda.so.1, or not the call in it
            raise FabricError(f"{name}: {error}", code="PROVIDER") from error
        if int(code) != 0:
            shown = ", ".join(hex(arg) if type(arg) is int else str(arg) for arg in args)
            raise FabricError(f"{name}({shown}): {getattr(code, 'name', code)}", code="PROVIDER")
        return None if not values else values[0] if len(values) == 1 else tuple(values)

    def count(self) -> int:
        return int(self.call("cuDeviceGetCount"))

    def attribute(self, index: int, name: str) -> int:
        """Return one CU_DEVICE_ATTRIBUTE_... of a GPU, named without that prefix."""
        enum = getattr(self.m.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", enum, self.device(index)))

    def device(self, index: int) -> Any:
        """Return the driver's handle of a GPU.

        Raises:
            BackendUnavailable: there is no such GPU.
        """
        if not 0 <= index < self.count():
            raise BackendUnavailable(
                f"cuda:{index}: the CUDA driver shows {self.count()} GPUs here",
                (("CUDA_VISIBLE_DEVICES hides others, or the container was not given them", ""),),
            )
        return self.call("cuDeviceGet", index)

    def somewhere(self) -> int:
        """Return a GPU that has a context in this process; if there is none, the first GPU.

        A context takes some hundred MB of its GPU, and fails if another process has it exclusively.
        """
        for index in self._contexts:
            return index
        for index in range(self.count()):
            _, is_active = self.call("cuDevicePrimaryCtxGetState", self.device(index))
            if is_active:
                return index
        return 0

    def wait_for_copies(self, index: int) -> None:
        """Make synchronous copies in a GPU's primary context return only when they are done.

        It is set once a GPU, and not if others have set it: the call takes the context's lock, and
        can deadlock with a thread that launches with that lock (openucx/ucx pull 11705).

        Raises:
            FabricError: the driver is older than 12.1.
        """
        if index in self._waiting:
            return
        with self.on(index):
            flags = int(self.call("cuCtxGetFlags"))
            if not flags & _CTX_SYNC_MEMOPS:
                self.call("cuCtxSetFlags", flags | _CTX_SYNC_MEMOPS)
        self._waiting.add(index)

    def free_with(self, owner: object, index: int, call: str, ptr: int) -> None:
        """Make a call that frees `ptr` on a GPU once nothing refers to `owner` any more."""

        def free() -> None:
            with self.on(index):
                self.call(call, ptr)

        weakref.finalize(owner, free).atexit = False

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        """Make a GPU's primary context current in this thread meanwhile."""
        context = self._contexts.get(index)
        if context is None:
            context = self.call("cuDevicePrimaryCtxRetain", self.device(index))
            self._contexts[index] = context  # kept for the life of the process, as runtimes do
        self.call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")


@functools.cache
def driver() -> Driver:
    """Return the driver of this process, loaded at the first call.

    Raises:
        BackendUnavailable: no cuda-python, no driver or no GPU; says which.
    """
    tried = []
    for name in ("cuda.bindings.driver", "cuda.cuda"):  # the second: cuda-python before 12.6
        try:
            return Driver(importlib.import_module(name))
        except ImportError as error:
            tried.append((f"import {name}", str(error)))
    raise BackendUnavailable(f"cuda-python is not installed; {CURE}", tuple(tried))


def device_number(device: str) -> int:
    """Return N of "cuda:N".

    Raises:
        BadRequest: not such a name.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdigit():
        raise BadRequest(f"device {device!r} is not 'cuda:N'")
    return int(number)


def list_devices() -> list[CudaDevice]:
    """List every GPU that the driver shows, in its order.

    Raises:
        BackendUnavailable: same as for `driver`.
    """
    found = []
    cuda = driver()
    for index in range(cuda.count()):
        device = cuda.device(index)
        raw = cuda.call("cuDeviceGetPCIBusId", 32, device)
        name = cuda.call("cuDeviceGetName", 128, device)
        found.append(CudaDevice(index, _text(raw).lower(), _text(name)))
    return found


def _text(raw: bytes | str) -> str:
    plain = raw if isinstance(raw, str) else raw.decode("ascii", "replace")
    return plain.split("\0")[0].strip()
