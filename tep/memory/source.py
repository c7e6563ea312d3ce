"""The adapters that bring all memory a user may register to one form, `Memory`.

They take the buffer protocol (numpy, mmap, bytearray, memoryview, array), DLPack,
`__cuda_array_interface__` and raw (pointer, length, device). The export of device memory as a
dma-buf is here too. Nothing here knows a NIC; no CUDA library is loaded.

DLPack capsules are read for what registration needs. numpy's reader knows neither bfloat16 nor
devices, and calls every old-style tensor read-only, so the few fields are read here. Nothing is
copied; a capsule that is never consumed frees its tensor when it is dropped, so holding the capsule
holds the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tep.base.checks import U64_MAX, check_int, shown
from tep.base.errors import BadRequest

__all__ = [
    "KDL_CPU", "KDL_CUDA", "Buffer", "DmabufExport", "Exporter", "Memory", "Tensor", "adapt",
    "exported", "is_dense", "read_dlpack",
]  # fmt: skip

Buffer = object
"""Anything `adapt` takes: a buffer, a DLPack or CUDA array, or (pointer, nbytes, device)."""

_FIELD_NAME: Final = re.compile(r":[^:]*:")
"""A name in a format of the buffer protocol, as in `T{l:a:O:b:}`."""

_DEVICE: Final = re.compile(r"cpu|cuda:[0-9]+")


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A run of bytes on one device.

    Attributes:
        ptr: virtual address of the first byte.
        nbytes: length, 1 or more.
        device: "cpu" or "cuda:N".
        readonly: True if nobody may write there.
        owner: the object that keeps the bytes mapped while it lives; this record references it.
        stands_for: names the memory that these bytes are a copy of, for `explain`; "" = none.
        buffer: exactly these bytes, if they came by the buffer protocol; else None.
    """

    ptr: int
    nbytes: int
    device: str
    readonly: bool
    owner: object
    stands_for: str = ""
    buffer: memoryview | None = None

    @property
    def kind(self) -> str:
        """The device without its number: "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    def bytes_view(self) -> npt.NDArray[np.uint8]:
        """The bytes as a writable uint8 array that keeps the owner alive. CPU memory only."""
        if self.buffer is not None and not self.readonly:
            return np.frombuffer(self.buffer, np.uint8)
        assert self.kind == "cpu", self.device
        raw = (ctypes.c_ubyte * self.nbytes).from_address(self.ptr)
        # The array's base is `raw`, and through it the owner: the memory stays mapped with it.
        raw._tep_owner = self.owner  # type: ignore[attr-defined]  # our own mark
        return np.frombuffer(memoryview(raw), np.uint8)


DmabufExport = Callable[[Memory], tuple[int, int]]
"""Exports device memory as a dma-buf: -> (file descriptor, offset of the first byte in it).

Each call returns a new descriptor (one for each NIC). The backend owns it from then on: it
registers the memory and closes the descriptor. An exporter of whole allocations, such as
cuMemGetHandleForAddressRange, returns the offset at which the memory begins.
"""


@contextlib.contextmanager
def exported(export: DmabufExport, memory: Memory) -> Iterator[tuple[int, int]]:
    """Give (descriptor, offset) of device memory for its registration; always close it after.

    Raises BadRequest if the exporter returned no such pair, or the memory is not in the dma-buf.
    """
    found = export(memory)
    match found:
        case (int(fd), int(offset)) if fd >= 0 and offset >= 0:
            pass
        case _:
            raise BadRequest(
                f"dma-buf export of {memory.nbytes} bytes at {memory.ptr:#x} returned {found!r}; "
                "it has to be (file descriptor, offset), both 0 or more"
            )
    try:
        with contextlib.suppress(OSError):  # not every exporter's file has a length
            length = os.lseek(fd, 0, os.SEEK_END)
            if offset + memory.nbytes > length:
                raise BadRequest(
                    f"dma-buf export of {memory.nbytes} bytes at {memory.ptr:#x}: offset {offset} "
                    f"leaves the {length} bytes of the dma-buf"
                )
        yield fd, offset
    finally:
        os.close(fd)


def adapt(buffer: Buffer) -> Memory:
    """Bring anything with bytes to a Memory.

    Args:
        buffer: an arena of `tep.alloc`, an object with the buffer protocol, DLPack or
            `__cuda_array_interface__`, contiguous; or a tuple (pointer, nbytes, device) for memory
            that the caller keeps mapped until deregister().

    Raises:
        BadRequest: not such an object, not contiguous, empty, or on a device that tep does not
            know.
    """
    if isinstance(buffer, Memory):
        return buffer
    own = getattr(buffer, "__tep_memory__", None)  # an arena of tep.alloc
    if own is not None:
        found = own()
        assert isinstance(found, Memory)
        return found
    if isinstance(buffer, tuple):
        return _from_raw(buffer)
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]  # TypeError is the answer
    except TypeError:
        return _from_foreign(buffer)
    except ValueError as error:  # e.g. a numpy dtype that the buffer protocol cannot spell
        if isinstance(buffer, np.ndarray):
            return _from_array(buffer)
        raise BadRequest(f"reg_mr: {type(buffer).__name__}: {error}") from error
    if "O" in _FIELD_NAME.sub("", view.format):
        raise _no_bytes(buffer)
    _check_whole("buffer", view.shape, view.strides, view.nbytes, dense=view.c_contiguous)
    owner, nbytes = (buffer, view), view.nbytes
    if view.readonly:
        ptr = int(np.frombuffer(view, np.uint8).ctypes.data)
    else:  # the same result in a fifth of the time
        ptr = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return Memory(ptr, nbytes, "cpu", view.readonly, owner, buffer=view)


def copied(what: str, payload: Buffer) -> bytes:
    """Copy the bytes of a buffer, an array or a tensor in CPU memory.

    Raises:
        BadRequest: it has no bytes, or they are on a GPU.
    """
    try:
        return bytes(memoryview(payload))  # type: ignore[arg-type]  # TypeError is the answer
    except TypeError as error:
        if isinstance(payload, tuple) or not (
            isinstance(payload, Exporter) or hasattr(payload, "__cuda_array_interface__")
        ):
            raise BadRequest(f"{what}: the payload is no bytes: {error}") from error
    memory = _from_foreign(payload)
    if memory.kind != "cpu":
        raise BadRequest(
            f"{what}: the payload is on {memory.device}; copy it to the host first, or write it "
            "from registered memory"
        )
    return memory.bytes_view().tobytes()


def _no_bytes(buffer: object) -> BadRequest:
    """Make the error for memory of Python objects: a peer's write there would crash the process."""
    return BadRequest(
        f"reg_mr: a {type(buffer).__name__} of Python objects holds pointers and no data; register "
        "the objects' own bytes, or an array of numbers"
    )


def _check_whole(what: str, shape: object, strides: object, nbytes: int, *, dense: bool) -> None:
    """Refuse what is no run of bytes, or an empty one; strides are in its own unit."""
    if not dense:
        raise BadRequest(
            f"reg_mr: the {what} of shape {shape} with strides {strides} is not contiguous; "
            "register the whole array and select with offsets and strides of Pages"
        )
    if nbytes == 0:
        raise BadRequest(f"reg_mr: the {what} has 0 bytes")


def _from_array(array: npt.NDArray[Any]) -> Memory:
    if array.dtype.hasobject:
        raise _no_bytes(array)
    dense = array.flags.c_contiguous
    _check_whole("buffer", array.shape, array.strides, array.nbytes, dense=dense)
    ptr = int(array.ctypes.data)
    return Memory(ptr, array.nbytes, "cpu", not array.flags.writeable, array)


def _from_raw(raw: tuple[object, ...]) -> Memory:
    match raw:
        case (pointer, length, str(device)):
            ptr = check_int("reg_mr: pointer", pointer)
            nbytes = check_int("reg_mr: nbytes", length)
        case _:
            raise BadRequest(
                "reg_mr: a tuple must be (pointer, nbytes, device), e.g. (ptr, 4096, 'cuda:0'), "
                f"not {shown(raw)}"
            )
    if not _DEVICE.fullmatch(device):
        raise BadRequest(f"reg_mr: device {device!r} is not 'cpu' or 'cuda:N'")
    if ptr <= 0 or nbytes <= 0 or ptr + nbytes - 1 > U64_MAX:
        raise BadRequest(
            f"reg_mr: pointer {shown(ptr)} with {shown(nbytes)} bytes is not a range of addresses"
        )
    return Memory(ptr, nbytes, device, False, None)


def _from_foreign(buffer: object) -> Memory:
    """Adapt an object without the buffer protocol: DLPack first, since it names the device."""
    if isinstance(buffer, Exporter):
        return _from_dlpack(buffer)
    # Not isinstance() with a protocol: from Python 3.12 on that looks at the class alone, where CPU
    # tensors have this property too; reading it there raises AttributeError.
    face = getattr(buffer, "__cuda_array_interface__", None)
    if face is not None:
        return _from_cuda(buffer, face)
    raise BadRequest(
        f"reg_mr: a {type(buffer).__name__} has neither a buffer, DLPack nor "
        "__cuda_array_interface__; give an array, or (pointer, nbytes, device)"
    )


def _from_dlpack(exporter: Exporter) -> Memory:
    name = type(exporter).__name__
    try:
        tensor = read_dlpack(exporter)
    except Exception as error:  # whatever a foreign exporter raises
        raise BadRequest(f"reg_mr: the {name} cannot be exported: {error}") from error
    kind, index = tensor.device
    if kind not in (*KDL_CPU, *KDL_CUDA):
        raise BadRequest(f"reg_mr: DLPack device type {kind} of the {name} is neither CPU nor CUDA")
    strides = f"{tensor.strides} (in elements)"
    _check_whole(name, tensor.shape, strides, tensor.nbytes, dense=tensor.contiguous)
    device = "cpu" if kind in KDL_CPU else f"cuda:{index}"
    owner = (exporter, tensor.capsule)
    return Memory(tensor.ptr, tensor.nbytes, device, tensor.readonly, owner)


def _from_cuda(buffer: object, face: dict[str, Any]) -> Memory:
    try:
        ptr, readonly = face["data"]
        shape, strides = tuple(map(int, face["shape"])), face.get("strides")
        itemsize = np.dtype(face["typestr"]).itemsize
        ptr = int(ptr)
    except Exception as error:  # whatever a foreign record raises
        raise BadRequest(
            f"reg_mr: the __cuda_array_interface__ of a {type(buffer).__name__} cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    nbytes = math.prod(shape) * itemsize
    dense = strides is None or is_dense(shape, tuple(strides), itemsize)
    _check_whole("CUDA array", shape, strides, nbytes, dense=dense)
    device = getattr(buffer, "device", None)
    index = getattr(device, "index", getattr(device, "id", 0))
    return Memory(ptr, nbytes, f"cuda:{index or 0}", bool(readonly), buffer)


KDL_CPU: Final = (1, 3, 11)
"""kDLCPU, kDLCUDAHost, kDLROCMHost: addresses that a CPU may touch."""

KDL_CUDA: Final = (2, 13)
"""kDLCUDA, kDLCUDAManaged."""

_READ_ONLY: Final = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


@runtime_checkable
class Exporter(Protocol):
    """An object with a DLPack export."""

    def __dlpack__(self, *, stream: object = None) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


class Tensor(NamedTuple):
    """The fields of a capsule, which keeps the memory alive.

    Attributes:
        ptr: address of the first element, `byte_offset` included.
        strides: in elements; None for a C-contiguous tensor.
        device: (DLDeviceType, device_id).
    """

    ptr: int
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device: tuple[int, int]
    readonly: bool
    capsule: object

    @property
    def contiguous(self) -> bool:
        """True if the elements lie in C order without gaps."""
        return self.strides is None or is_dense(self.shape, self.strides, 1)


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> bool:
    """Return True if the strides are C order; `step` is one element in the strides' unit.

    The stride of an axis of length 1 has no meaning and is not looked at.
    """
    if 0 in shape:
        return True
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


# dlpack.h 1.0:
#   typedef struct {
#     void* data; DLDevice device; int32_t ndim; DLDataType dtype;
#     int64_t* shape; int64_t* strides; uint64_t byte_offset;
#   } DLTensor;
#   typedef struct { DLDeviceType device_type; int32_t device_id; } DLDevice;
#   typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# dlpack.h 1.0:
#   struct DLManagedTensorVersioned {
#     DLPackVersion version; void *manager_ctx;
#     void (*deleter)(struct DLManagedTensorVersioned *self);
#     uint64_t flags; DLTensor dl_tensor;
#   };
#   typedef struct { uint32_t major; uint32_t minor; } DLPackVersion;
class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    )


# pycapsule.h, CPython 3.11:
#   const char *PyCapsule_GetName(PyObject *capsule);
#   void *PyCapsule_GetPointer(PyObject *capsule, const char *name);
_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.argtypes = (ctypes.py_object,)
_get_name.restype = ctypes.c_char_p
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_get_pointer.restype = ctypes.c_void_p


def read_dlpack(exporter: Exporter) -> Tensor:
    """Export, and read the capsule.

    Raises:
        BufferError: the exporter refuses, or speaks a major version other than 1.
    """
    try:
        capsule = exporter.__dlpack__(max_version=(1, 0))  # type: ignore[call-arg]  # since 1.0
    except TypeError:  # an exporter from before version 1, which has no read-only flag either
        capsule = exporter.__dlpack__()
    try:
        name = _get_name(capsule)
    except ValueError as error:
        raise BufferError(f"{type(capsule).__name__} is not a DLPack capsule") from error
    pointer = _get_pointer(capsule, name)
    readonly = False
    if name == b"dltensor_versioned":
        versioned = _Versioned.from_address(pointer)
        if versioned.major != 1:
            raise BufferError(f"DLPack version {versioned.major}.{versioned.minor} is not 1.x")
        readonly = bool(versioned.flags & _READ_ONLY)
        tensor = versioned.dl_tensor
    elif name == b"dltensor":
        # `DLTensor dl_tensor;` is the first field of DLManagedTensor.
        tensor = _DLTensor.from_address(pointer)
    else:
        raise BufferError(f"a capsule named {name!r} is not a DLPack tensor")
    shape = tuple(tensor.shape[k] for k in range(tensor.ndim))
    strides = tuple(tensor.strides[k] for k in range(tensor.ndim)) if tensor.strides else None
    return Tensor(
        ptr=(tensor.data or 0) + tensor.byte_offset,
        nbytes=(math.prod(shape) * tensor.bits * tensor.lanes + 7) // 8,
        shape=shape,
        strides=strides,
        device=(tensor.device_type, tensor.device_id),
        readonly=readonly,
        capsule=capsule,
    )
