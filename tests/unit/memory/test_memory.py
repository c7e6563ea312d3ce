"""The memory that reg_mr takes and refuses, adapter by adapter; no engine."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref

import ml_dtypes
import numpy as np
import pytest

import tep
from tep.base.errors import BadRequest
from tep.memory.source import Memory, adapt
from tests.support.pairs import pair


def test_bytearray_is_writable_and_shared() -> None:
    """A copy instead of a view would send old bytes and lose received ones."""
    buffer = bytearray(b"abcdef")
    memory = adapt(buffer)
    memory.bytes_view()[1] = ord("X")

    assert b"aXcdef" == bytes(buffer)
    assert (6, "cpu", "cpu", False) == (memory.nbytes, memory.device, memory.kind, memory.readonly)


def test_bytes_are_read_only() -> None:
    """A NIC that writes into an immutable object changes constants of the program."""
    assert adapt(b"abc").readonly
    assert adapt(memoryview(bytearray(3)).toreadonly()).readonly


@pytest.mark.parametrize(
    "dtype", ["u1", "<f4", ">i8", "?", "c16", "V5", "S3", "f2", "m8[s]", "M8[ns]"]
)
def test_numpy_arrays_of_any_dtype(dtype: str) -> None:
    """Some dtypes (dates) have no buffer format; their bytes move like any others."""
    data = np.zeros((3, 4), dtype)
    memory = adapt(data)

    assert data.nbytes == memory.nbytes
    assert data.ctypes.data == memory.ptr
    assert not memory.readonly


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4])
def test_numpy_arrays_of_model_dtypes(dtype: type) -> None:
    """Weights and KV caches are bfloat16 and float8, which the buffer protocol cannot spell."""
    data = np.zeros((2, 3, 8), dtype)
    memory = adapt(data)

    assert (data.ctypes.data, data.nbytes) == (memory.ptr, memory.nbytes)


def test_read_only_numpy_arrays_say_so() -> None:
    """A frozen array must not become a target, whatever its dtype."""
    for dtype in ("u1", ml_dtypes.bfloat16):
        data = np.zeros(4, dtype)
        data.flags.writeable = False
        assert adapt(data).readonly


def test_scalars_of_an_array_and_zero_dimensions() -> None:
    """A counter of eight bytes is a zero-dimensional array."""
    data = np.array(7, np.uint64)
    memory = adapt(data)

    assert (data.ctypes.data, 8) == (memory.ptr, memory.nbytes)


def test_mmap_is_shared_and_cannot_be_unmapped_under_us() -> None:
    """Unmapping memory that a NIC may touch ends in a segmentation fault."""
    mapped = mmap.mmap(-1, 8192)
    memory = adapt(mapped)
    memory.bytes_view()[5] = 9

    assert 9 == mapped[5]
    with pytest.raises(BufferError):
        mapped.close()
    del memory
    gc.collect()
    mapped.close()


def test_a_registered_bytearray_cannot_be_resized() -> None:
    """Growing may move the bytes and leave the NIC with a stale address."""
    buffer = bytearray(100)
    memory = adapt(buffer)

    with pytest.raises(BufferError):
        buffer.extend(b"more")
    assert 100 == memory.nbytes


def test_array_array_and_ctypes() -> None:
    """Anything with a buffer, whatever its item size, counts in bytes."""
    assert 24 == adapt(array.array("d", [1, 2, 3])).nbytes
    assert 40 == adapt((ctypes.c_uint64 * 5)()).nbytes


def test_memoryview_slices_keep_their_place() -> None:
    """A contiguous slice registers its own range, not its parent's."""
    buffer = np.arange(100, dtype=np.uint8)
    memory = adapt(memoryview(buffer)[10:30])

    assert (buffer.ctypes.data + 10, 20) == (memory.ptr, memory.nbytes)


@pytest.mark.slow
def test_the_owner_lives_as_long_as_the_memory() -> None:
    """`reg_mr(np.zeros(...))` without another reference must not register freed memory."""
    for make in (lambda: np.ones(1000, np.uint8), lambda: np.ones(1000, ml_dtypes.bfloat16)):
        data = make()
        alive = weakref.ref(data)
        memory = adapt(data)
        view = memory.bytes_view()
        del data
        gc.collect()
        assert alive() is not None
        del memory
        gc.collect()
        assert alive() is not None, "the view alone keeps the bytes, too"
        del view
        gc.collect()
        assert alive() is None


def test_memory_passes_through() -> None:
    """A Memory made by a backend's own allocator is taken as it is."""
    memory = Memory(4096, 64, "cuda:1", False, None)

    assert memory is adapt(memory)
    assert "cuda" == memory.kind


# --- DLPack --------------------------------------------------------------------------------------


class OldTensor:
    """An exporter from before DLPack 1.0, over a numpy array."""

    def __init__(self, data: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.data = data
        self.device = device

    def __dlpack__(self, *, stream: object = None) -> object:
        return self.data.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class NewTensor(OldTensor):
    """An exporter of DLPack 1.0, which can say that it is read-only."""

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None) -> object:
        return self.data.__dlpack__(max_version=max_version)


@pytest.mark.parametrize("tensor", [OldTensor, NewTensor])
def test_dlpack_tensors_on_the_cpu(tensor: type[OldTensor]) -> None:
    """numpy reads old exporters as read-only: such a tensor could never be a target."""
    data = np.arange(24, dtype=np.float32).reshape(4, 6)
    memory = adapt(tensor(data[1:3]))

    assert (data.ctypes.data + 24, 48) == (memory.ptr, memory.nbytes)
    assert ("cpu", False) == (memory.device, memory.readonly)
    memory.bytes_view()[:4] = 0
    assert 0 == data[1, 0]


def test_dlpack_read_only_flag() -> None:
    """An exporter that forbids writing is believed."""
    data = np.zeros(4)
    data.flags.writeable = False

    assert adapt(NewTensor(data)).readonly


def test_dlpack_keeps_the_tensor_alive() -> None:
    """The capsule holds the storage, also when the tensor object lets go of it."""
    data = np.ones(10)
    alive = weakref.ref(data)
    tensor = NewTensor(data)
    memory = adapt(tensor)
    tensor.data = None
    del data, tensor
    gc.collect()

    assert alive() is not None
    del memory
    gc.collect()
    assert alive() is None


class Capsule:
    """An exporter of one hand-made DLTensor (dlpack.h 1.0), for devices this machine lacks."""

    class Struct(ctypes.Structure):
        _fields_ = (
            ("data", ctypes.c_void_p),
            ("device_type", ctypes.c_int32),
            ("device_id", ctypes.c_int32),
            ("ndim", ctypes.c_int32),
            ("code", ctypes.c_uint8),
            ("bits", ctypes.c_uint8),
            ("lanes", ctypes.c_uint16),
            ("shape", ctypes.c_void_p),
            ("strides", ctypes.c_void_p),
            ("byte_offset", ctypes.c_uint64),
            ("manager_ctx", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
        )

    def __init__(self, ptr, shape, strides, device, bits=16, offset=0) -> None:
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = (ctypes.c_int64 * len(shape))(*strides)
        self.device = device
        address = ctypes.addressof
        kind, index = device
        self.tensor = self.Struct(
            ptr, kind, index, len(shape), 4, bits, 1, address(self.shape), address(self.strides),
            offset, None, None,
        )  # fmt: skip

    def __dlpack__(self, *, stream: object = None) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def test_dlpack_on_cuda_without_a_driver() -> None:
    """A GPU tensor is named by pointer and device; nothing of CUDA has to be installed for that."""
    memory = adapt(Capsule(0x7F0000000000, (2, 1, 8), (8, 99, 1), (2, 3), offset=64))

    assert (0x7F0000000040, 32) == (memory.ptr, memory.nbytes)
    assert ("cuda:3", "cuda") == (memory.device, memory.kind)


def test_dlpack_refusals() -> None:
    """A strided tensor would be registered with its gaps; a TPU's address means nothing here."""
    with pytest.raises(BadRequest, match=r"shape \(2, 8\) with strides \(16, 1\) \(in elements\)"):
        adapt(Capsule(4096, (2, 8), (16, 1), (1, 0)))
    with pytest.raises(BadRequest, match="DLPack device type 8 of the Capsule is neither CPU nor"):
        adapt(Capsule(4096, (8,), (1,), (8, 0)))
    with pytest.raises(BadRequest, match="the Capsule has 0 bytes"):
        adapt(Capsule(4096, (0,), (1,), (1, 0)))


def test_dlpack_exporter_that_refuses() -> None:
    """A tensor that requires gradients says no; the user must read why."""

    class Refusing(OldTensor):
        def __dlpack__(self, *, stream: object = None) -> object:
            raise BufferError("call detach() first")

    class NotACapsule(OldTensor):
        def __dlpack__(self, *, stream: object = None) -> object:
            return object()

    with pytest.raises(BadRequest, match=r"the Refusing cannot be exported: call detach\(\) first"):
        adapt(Refusing(np.zeros(1)))
    with pytest.raises(BadRequest, match="the NotACapsule cannot be exported: .*not a DLPack"):
        adapt(NotACapsule(np.zeros(1)))


# --- __cuda_array_interface__ --------------------------------------------------------------------


class CudaArray:
    """An object as CuPy and Numba make it, without a GPU."""

    def __init__(
        self, shape, typestr="<f2", strides=None, *, readonly=False, ptr=0x70000000
    ) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (ptr, readonly),
            "strides": strides,
            "version": 3,
        }


class Device:
    """The device of an array, in CuPy's form."""

    id = 2


def test_cuda_array_interface() -> None:
    """The pointer is passed on untouched; no byte of it can be read here."""
    data = CudaArray((4, 8), "<f2", (16, 2), readonly=True)
    memory = adapt(data)

    assert (0x70000000, 64, "cuda:0", True) == (
        memory.ptr,
        memory.nbytes,
        memory.device,
        memory.readonly,
    )
    assert memory.owner is data
    data.device = Device()
    assert "cuda:2" == adapt(data).device


def test_cuda_array_with_an_extent_of_one() -> None:
    """Libraries put any number as the stride of an extent of 1; it is dense all the same."""
    assert 16 == adapt(CudaArray((1, 8), "<f2", (999, 2))).nbytes


def test_cuda_array_refusals() -> None:
    """Gaps and emptiness are refused on the device as on the host."""
    with pytest.raises(BadRequest, match=r"CUDA array of shape \(4, 8\) with strides \(32, 2\)"):
        adapt(CudaArray((4, 8), "<f2", (32, 2)))
    with pytest.raises(BadRequest, match="the CUDA array has 0 bytes"):
        adapt(CudaArray((0, 8)))


def test_a_cuda_view_as_cpu_bytes_is_a_bug() -> None:
    """Reading device memory on the host is a segmentation fault; the assertion comes first."""
    with pytest.raises(AssertionError, match="cuda:0"):
        adapt(CudaArray((4,))).bytes_view()


def test_a_property_that_raises_is_not_an_interface() -> None:
    """Tensor libraries have the property on every tensor, and raise from it on CPU ones."""

    class CpuTensor:
        @property
        def __cuda_array_interface__(self) -> dict[str, object]:
            raise AttributeError("not on CUDA")

    with pytest.raises(BadRequest, match="a CpuTensor has neither a buffer, DLPack nor"):
        adapt(CpuTensor())


# --- raw pointers and refusals -------------------------------------------------------------------


def test_raw_pointers() -> None:
    """Memory of another library can be named by (pointer, nbytes, device)."""
    memory = adapt((0x1000, 64, "cuda:7"))

    assert (0x1000, 64, "cuda:7", False) == (
        memory.ptr,
        memory.nbytes,
        memory.device,
        memory.readonly,
    )
    assert "cpu" == adapt((0x1000, 64, "cpu")).device


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        ((4096, 64), r"a tuple must be \(pointer, nbytes, device\), .* not \(4096, 64\)"),
        ((4096, "64", "cpu"), "nbytes='64' is not an integer"),
        ((4096.0, 64, "cpu"), "pointer=4096.0 is not an integer"),
        ((4096, 64, 0), "a tuple must be"),
        ((4096, 64, "gpu"), "device 'gpu' is not 'cpu' or 'cuda:N'"),
        ((4096, 64, "cuda:"), "device 'cuda:' is not 'cpu' or 'cuda:N'"),
        ((4096, 64, "cuda"), "device 'cuda' is not 'cpu' or 'cuda:N'"),
        ((4096, 64, "cpu:x"), "device 'cpu:x' is not"),
        ((0, 64, "cpu"), "pointer 0 with 64 bytes is not a range of addresses"),
        ((4096, 0, "cpu"), "pointer 4096 with 0 bytes"),
        ((4096, -1, "cpu"), "pointer 4096 with -1 bytes"),
        ((2**64 - 10, 11, "cpu"), "is not a range of addresses"),
        (np.array([object()]), "a ndarray of Python objects holds pointers and no data"),
        (np.zeros(2, [("O", "i4"), ("b", "O")]), "a ndarray of Python objects"),
        ((ctypes.py_object * 2)(), "of Python objects holds pointers"),
        (object(), "a object has neither a buffer, DLPack nor __cuda_array_interface__; give an"),
        ([1, 2, 3], "a list has neither a buffer"),
        ("text", "a str has neither a buffer"),
        (None, "a NoneType has neither a buffer"),
        (bytearray(), "the buffer has 0 bytes"),
        (np.zeros((4, 0)), "the buffer has 0 bytes"),
        (np.zeros((4, 0), ml_dtypes.bfloat16), "the buffer has 0 bytes"),
        (np.zeros((4, 4))[:, 1], r"shape \(4,\) with strides \(32,\) is not contiguous; register"),
        (np.zeros((4, 4), ml_dtypes.bfloat16).T[1:], r"with strides \(2, 8\) is not contiguous"),
        (np.zeros((4, 4)).T, "is not contiguous"),
        (memoryview(bytearray(10))[::2], r"shape \(5,\) with strides \(2,\) is not contiguous"),
    ],
)
def test_refused_by_message(buffer: object, message: str) -> None:
    """Each refusal names the values and what to give instead, before any NIC is asked."""
    with pytest.raises(BadRequest, match=f"reg_mr: .*{message}"):
        adapt(buffer)


def test_a_released_memoryview_is_refused() -> None:
    """Its buffer may be gone."""
    view = memoryview(bytearray(4))
    view.release()

    with pytest.raises(BadRequest, match="memoryview: operation forbidden on released"):
        adapt(view)


class Lists:
    """A list of integers that has DLPack and nothing else, as a tensor of a foreign library."""

    def __init__(self, values: list[int]) -> None:
        self.data = np.array(values, np.int64)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None) -> object:
        return self.data.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()


def test_page_lists_immediates_and_messages_may_be_tensors() -> None:
    """Block tables live in tensors; to list them costs more than the request."""
    seen: list[bytes] = []
    with pair() as p:
        p.b.submit_recvs(64, 2, lambda view: seen.append(bytes(view)))
        pages = tep.Pages(Lists([1, 0]))
        assert [1, 0] == pages.indices.tolist()
        sent = p.a.submit_paged_writes(64, (p.mr, pages), (p.desc, pages), Lists([5, 6]))
        message = p.a.submit_send(p.b.main_address, Lists([1, 2]))
        p.settle(sent, message)
        p.quiet(3)
        assert [1, 1] == [dict(p.b.stats().imms_unexpected).get(imm, 0) for imm in (5, 6)]
        assert [np.array([1, 2], np.int64).tobytes()] == seen
        with pytest.raises(BadRequest, match="submit_send: the payload is no bytes: .*'int'"):
            p.a.submit_send(p.b.main_address, 5)


def test_a_message_on_a_gpu_is_refused_by_name() -> None:
    """Its address means nothing to the CPU that copies messages."""

    class Gpu:
        @property
        def __cuda_array_interface__(self) -> dict[str, object]:
            return {"data": (4096, False), "shape": (4,), "typestr": "|u1"}

    with pair() as p, pytest.raises(BadRequest, match="payload is on cuda:0; copy it to the host"):
        p.a.submit_send(p.b.main_address, Gpu())
