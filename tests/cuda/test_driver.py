"""The fake driver under the real cuda-python, and what `Driver` makes of its answers."""

from __future__ import annotations

import ast
import ctypes
import errno
import importlib
import os
from pathlib import Path

import pytest

from scripts.gpu_check import MAPPED, mapped
from tep import BackendUnavailable, FabricError
from tep.host.cuda import Driver, list_devices
from tep.host.hostfiles import CudaDevice, LiveFiles

ROOT = Path(__file__).parents[2]
LATE = 60_000_000  # nothing is done in this test's time unless somebody waits for it


# --- the calls


def made():
    """Return every call that tep and scripts/gpu_check make, with its number of arguments."""
    found = {}
    for path in sorted([*(ROOT / "tep/cuda").glob("*.py"), ROOT / "scripts/gpu_check.py"]):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "func", None)
            if getattr(name, "attr", getattr(name, "id", "")) == "call":
                first = node.args[0]
                if isinstance(first, ast.Constant):
                    found[first.value] = len(node.args) - 1
    return found


def test_every_call_that_tep_makes_is_one_of_cuda_python_with_as_many_arguments(fake):
    """A misspelt call would be found by the first GPU only."""
    real = [importlib.import_module(f"cuda.bindings.{name}") for name in ("driver", "nvrtc")]
    for name, nargs in made().items():
        call = getattr(real[name.startswith("nvrtc")], name)
        inside = call.__doc__.splitlines()[0].partition("(")[2].rpartition(")")[0]
        assert nargs == len([part for part in inside.split(", ") if part.strip()]), name


def test_every_call_that_tep_makes_is_one_of_the_fake_driver(fake):
    """A call that it lacks is a call that no test has made."""
    assert [] == [name for name in made() if name.startswith("cu") and not fake.has(name)]


def test_an_error_names_the_call_and_the_code(cuda):
    """CUDA_ERROR_INVALID_VALUE alone could be any of a hundred calls."""
    with pytest.raises(FabricError, match=r"cuMemFree\(0x7\): CUDA_ERROR_INVALID_VALUE"):
        cuda.call("cuMemFree", 7)


def test_without_a_gpu_the_error_says_so(fake):
    """cuda-python installs anywhere; the driver then refuses."""
    fake.set(gpus=0)
    with pytest.raises(BackendUnavailable, match=r"cannot be started.*\n.*NO_DEVICE"):
        Driver(importlib.import_module("cuda.bindings.driver"))


def test_a_child_of_fork_cannot_use_its_parents_driver(fake, cuda):
    """A real driver refuses it as well; it must be an error with a name, and not a hang."""
    child = os.fork()
    if not child:
        try:
            cuda.call("cuDeviceGetCount")
        except FabricError as error:
            os._exit("CUDA_ERROR_NOT_INITIALIZED" in str(error))
        os._exit(3)

    assert 1 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- devices and contexts


def test_devices_are_listed_by_pci_address_as_sysfs_writes_it(fake):
    """The driver writes it in capitals; sysfs does not, and topology compares them."""
    expected = [
        CudaDevice(0, "0000:1b:00.0", "Fake H100 0"),
        CudaDevice(1, "0000:1c:00.0", "Fake H100 1"),
    ]

    assert expected == list_devices() == LiveFiles().cuda()


@pytest.mark.parametrize(
    ("given", "numbers"),
    [("1,0", [1, 0]), ("GPU-f0000001", [1]), ("0,7,1", [0]), ("1", [1])],
)
def test_the_driver_shows_the_devices_that_the_environment_leaves(
    fake, monkeypatch, given, numbers
):
    """CUDA_VISIBLE_DEVICES renumbers: cuda:0 is then another GPU, with other NICs beside it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)

    assert [f"Fake H100 {number}" for number in numbers] == [one.name for one in list_devices()]


def test_contexts_are_put_back_also_after_an_error(cuda):
    """A context left behind moves the user's next kernel to another GPU."""
    with pytest.raises(FabricError), cuda.on(1):
        cuda.call("cuMemFree", 7)

    assert 0 == int(cuda.call("cuCtxGetCurrent"))


# --- the mistakes that memory of the host would hide


def test_the_cpu_cannot_touch_gpu_memory(cuda):
    """A load from it ends the process on a machine with a GPU, and so it does here."""
    with cuda.on(0):
        ptr = int(cuda.call("cuMemAlloc", 64))
        libc = ctypes.CDLL(None, use_errno=True)
        pipe = os.pipe()
        wrote = libc.write(pipe[1], ctypes.c_void_p(ptr), 64)

        assert (-1, errno.EFAULT) == (wrote, ctypes.get_errno())
        for fd in pipe:
            os.close(fd)
        cuda.call("cuMemFree", ptr)


def test_copies_return_before_they_are_done_unless_the_memory_says_otherwise(fake, cuda):
    """NVIDIA's "API synchronization behavior": a NIC that reads then sends old bytes."""
    fake.set(late_us=LATE)
    raw = ctypes.create_string_buffer(b"new bytes", 16)
    attribute = cuda.m.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    with cuda.on(0):
        ptr = int(cuda.call("cuMemAlloc", 16))
        cuda.call("cuMemsetD8", ptr, 0, 16)
        before = fake.peek(ptr, 16)
        cuda.call("cuCtxSynchronize")
        zeroed = fake.peek(ptr, 16)
        cuda.call("cuMemcpyHtoD", ptr, ctypes.addressof(raw), 16)
        early = fake.peek(ptr, 16)
        cuda.call("cuPointerSetAttribute", 1, attribute, ptr)
        cuda.call("cuMemcpyHtoD", ptr, ctypes.addressof(raw), 16)
        synced = fake.peek(ptr, 16)
        cuda.call("cuMemFree", ptr)

    assert bytes(16) != before, "fresh memory is not zero"
    assert bytes(16) == zeroed == early
    assert raw.raw == synced


def test_streams_and_events_are_late_until_somebody_waits(fake, cuda):
    """A missing synchronise passes on a stream that is done at once."""
    fake.set(late_us=LATE)
    with cuda.on(0):
        ptr = int(cuda.call("cuMemAlloc", 8))
        first, second = (cuda.call("cuStreamCreate", 1) for _ in range(2))
        event = cuda.call("cuEventCreate", 0)
        cuda.call("cuStreamWriteValue64", first, ptr, 5, 0)
        cuda.call("cuEventRecord", event, first)
        with pytest.raises(FabricError, match="NOT_READY"):
            cuda.call("cuEventQuery", event)
        with pytest.raises(FabricError, match="NOT_READY"):
            cuda.call("cuStreamQuery", first)
        early = fake.word(ptr)
        cuda.call("cuStreamWaitEvent", second, event, 0)
        cuda.call("cuStreamSynchronize", second)  # waits for the first one's write
        cuda.call("cuEventQuery", event)
        late = fake.word(ptr)
        for stream in (first, second):
            cuda.call("cuStreamDestroy", stream)
        cuda.call("cuMemFree", ptr)

    assert early != 5
    assert 5 == late


def test_work_that_nobody_waits_for_is_done_a_little_later(fake, cuda):
    """A kernel that spins on a flag must see it although the host goes on."""
    with cuda.on(0):
        ptr = int(cuda.call("cuMemAlloc", 8))
        stream = cuda.call("cuStreamCreate", 1)
        cuda.call("cuStreamWriteValue64", stream, ptr, 5, 0)
        fake.wait_word(ptr, 5)
        cuda.call("cuStreamDestroy", stream)
        cuda.call("cuMemFree", ptr)


def test_sync_memops_is_refused_as_real_drivers_refuse_it(cuda):
    """Memory of cuMemCreate (openucx/ucx issue 9895) says NOT_SUPPORTED; cuMemAlloc's takes it."""
    attribute = cuda.m.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    with cuda.on(0), mapped(cuda, 1) as ptr:
        with pytest.raises(FabricError, match="CUDA_ERROR_NOT_SUPPORTED"):
            cuda.call("cuPointerSetAttribute", 1, attribute, ptr)
        with pytest.raises(FabricError, match="CUDA_ERROR_INVALID_VALUE"):
            cuda.call("cuPointerSetAttribute", 1, attribute, ptr + MAPPED)


def test_a_descriptor_shows_the_memory_itself(fake, cuda):
    """A kernel reads what a NIC writes there, and the other way round."""
    with cuda.on(0):
        ptr = int(cuda.call("cuMemAlloc", 2 * MAPPED))
        kind = cuda.m.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        first, again = (
            cuda.call("cuMemGetHandleForAddressRange", ptr + 8192, 4096, kind, 0) for _ in range(2)
        )
        os.pwrite(first, b"from a NIC", 100)

        assert b"from a NIC" == fake.peek(ptr + 8292, 10) == os.pread(again, 10, 100)
        cuda.call("cuMemsetD8", ptr, 7, MAPPED)
        cuda.call("cuCtxSynchronize")
        assert bytes([7] * 4096) == os.pread(first, 5000, 0)
        for fd in (first, again):
            os.close(fd)
        cuda.call("cuMemFree", ptr)
