"""DLPack capsules, read for what registration needs: pointer, length, device, read-only flag.

numpy's reader knows neither bfloat16 nor devices, and calls every old-style tensor read-only, so
the few fields are read here. Nothing is copied; a capsule that is never consumed frees its tensor
when it is dropped, so holding the capsule holds the memory.
"""

from __future__ import annotations

import ctypes
import math
from typing import Final, NamedTuple, Protocol, runtime_checkable

__all__ = ["KDL_CPU", "KDL_CUDA", "Exporter", "Tensor", "is_dense", "read_dlpack"]

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
    """The fields of a capsule.

    Attributes:
        ptr: address of the first element, `byte_offset` included.
        nbytes: elements times their size.
        shape, strides: in elements; strides is None for a C-contiguous tensor.
        device: (DLDeviceType, device_id).
        readonly: True if the exporter forbids writing.
        capsule: keeps the memory alive.
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
