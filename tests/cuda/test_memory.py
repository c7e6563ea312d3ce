"""Pointers and dma-bufs: the questions to the driver, and what is made of its answers."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tep
from scripts.gpu_check import MAPPED, fill, mapped
from tep import BackendUnavailable, BadRequest, FabricError
from tep.cuda import export_dmabuf, flush, inspect, set_sync_memops
from tep.host.cuda import driver
from tep.memory.source import Memory, adapt, exported

PAGE = mmap.PAGESIZE


def memory(ptr, nbytes=64, device="cuda:0"):
    return Memory(int(ptr), nbytes, device, False, None)


def test_kinds_of_pointers(cuda):
    """A pointer taken for a GPU's by mistake fails in the NIC, with EFAULT and no reason."""
    host = bytearray(64)
    with cuda.on(1), mapped(cuda, 2, 1) as vmm:
        pinned = cuda.call("cuMemHostAlloc", 64, 3)
        managed = cuda.call("cuMemAllocManaged", 64, 1)
        pooled = cuda.call("cuMemAllocAsync", 64, 0)
        plain = int(cuda.call("cuMemAlloc", 300))

        assert "pageable" == inspect(adapt(host).ptr).kind
        assert "pinned" == inspect(int(pinned)).kind
        assert "managed" == inspect(int(managed)).kind
        assert ("device", 1, plain, 300, False) == inspect(plain + 299)[:5]
        assert ("device", 1, vmm + MAPPED, MAPPED, False) == inspect(vmm + MAPPED + 5)[:5]
        assert inspect(int(pooled)).is_pooled
        cuda.call("cuMemFreeHost", int(pinned))
        for ptr in (managed, pooled, plain):
            cuda.call("cuMemFree", ptr)


@pytest.mark.parametrize("busy", [-1, 0])
def test_only_the_gpu_of_the_memory_gets_a_context(fake, busy):
    """Each of 8 ranks would take half a gigabyte of GPU 0, or fail where that is held alone."""
    fake.set(busy=busy)
    with tep.alloc(PAGE, "cuda:1") as arena:
        assert "device" == inspect(arena.ptr).kind
        with exported(export_dmabuf, adapt(arena)):
            pass

    assert {("1",)} == {call.args for call in fake.calls("cuDevicePrimaryCtxRetain")}


OF_ANOTHER_LIBRARY = """
import cuda.bindings.driver as m
m.cuInit(0)
m.cuDevicePrimaryCtxRetain(1)
"""


@pytest.mark.parametrize(("before", "settings"), [(OF_ANOTHER_LIBRARY, "busy=0"), ("", "busy=1")])
def test_a_pointer_is_looked_at_in_a_context_that_is_there(before, settings):
    """The context that torch has made will do; the first GPU gets one where there is none."""
    code = before + "from tep.cuda import inspect; print(inspect(4096).kind)"
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TEP_FAKE_CUDA": settings},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ("pageable", "") == (said.stdout.strip(), said.stderr)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(inside=st.integers(0, 3 * PAGE), nbytes=st.integers(1, 3 * PAGE), skip=st.integers(0, 9))
def test_exported_bytes_are_those_of_the_tensor_wherever_it_begins(fake, inside, nbytes, skip):
    """Offset 0 is the rare case: tensors lie anywhere in an allocator's segments."""
    cuda = driver()
    raw = np.random.default_rng(inside).integers(0, 256, 6 * PAGE, np.uint8)
    with cuda.on(0):
        before = cuda.call("cuMemAlloc", 512 * skip + 1)  # so that it begins in mid-page
        start = int(cuda.call("cuMemAlloc", 6 * PAGE))
        cuda.call("cuMemcpyHtoD", start, raw.ctypes.data, 6 * PAGE)
        cuda.call("cuCtxSynchronize")
    with exported(export_dmabuf, memory(start + inside, nbytes)) as (fd, offset):
        assert raw.tobytes()[inside : inside + nbytes] == os.pread(fd, nbytes, offset)
        assert 0 == os.fstat(fd).st_size % PAGE
        assert 0 <= offset < PAGE
    with cuda.on(0):
        for ptr in (start, before):
            cuda.call("cuMemFree", ptr)
    assert 0 == int(cuda.call("cuCtxGetCurrent"))


def test_bytes_are_in_exported_memory_when_the_copy_returns(fake, cuda):
    """A NIC that reads right after cudaMemcpy would send old bytes: SYNC_MEMOPS ends that."""
    fake.set(late_us=60_000_000)
    raw = ctypes.create_string_buffer(b"new", 4)
    with cuda.on(0):
        ptr = int(cuda.call("cuMemAlloc", 2 * PAGE))
        with exported(export_dmabuf, memory(ptr, 4)) as (fd, offset):
            cuda.call("cuMemcpyHtoD", ptr, ctypes.addressof(raw), 4)
            assert raw.raw == os.pread(fd, 4, offset)
        cuda.call("cuMemFree", ptr)


def test_whole_pages_that_leave_the_allocation_are_named_where_they_are_refused(fake, cuda):
    """A small cudaMalloc shares its pages: INVALID_VALUE alone names neither pages nor a cure."""
    fake.set(exact=1)
    with cuda.on(0):
        before = cuda.call("cuMemAlloc", 100)
        small = int(cuda.call("cuMemAlloc", 5000))
        whole = int(cuda.call("cuMemAlloc", 4 * MAPPED))
    with pytest.raises(FabricError, match=r"reach beyond the allocation, .*tep\.alloc") as caught:
        export_dmabuf(memory(small + 8, 100))
    assert hex(small + 5000) in str(caught.value)
    with exported(export_dmabuf, memory(whole + 8, 100)), cuda.on(0):
        for ptr in (before, small, whole):
            cuda.call("cuMemFree", ptr)


def test_a_mapping_by_pcie_is_asked_for_by_name(fake):
    """Grace: the driver maps by the chip-to-chip link unless it is told otherwise."""
    with tep.alloc(PAGE, "cuda:0") as arena:
        for export in (export_dmabuf, functools.partial(export_dmabuf, by_pcie=True)):
            with exported(export, adapt(arena)):
                pass

    asked = [call.args[2] for call in fake.calls("cuMemGetHandleForAddressRange")]
    assert ["0", "1"] == asked


def test_mapped_memory_is_exported_over_several_pieces(fake, cuda):
    """torch's expandable segments are mapped piece by piece, and a tensor lies across them."""
    raw = ctypes.create_string_buffer(os.urandom(MAPPED), MAPPED)
    fake.set(late_us=60_000_000)
    with mapped(cuda, 3) as start:
        inside = memory(start + MAPPED // 2 + 100, MAPPED)
        for _ in range(2):
            with exported(export_dmabuf, inside) as (fd, offset), cuda.on(0):
                cuda.call("cuMemcpyHtoD", inside.ptr, ctypes.addressof(raw), MAPPED)
                assert raw.raw == os.pread(fd, MAPPED, offset), "the copy is done when it returns"
        (flags,) = fake.calls("cuCtxSetFlags")

    assert int(flags.args[0], 16) & 0x80
    assert 0 == flags.device


def test_other_flags_of_the_context_stay(fake, cuda):
    """cuCtxSetFlags overwrites: how threads wait for the GPU is the program's choice."""
    with cuda.on(1):
        cuda.call("cuCtxSetFlags", 4)  # CU_CTX_SCHED_BLOCKING_SYNC
        with mapped(cuda, 1, 1) as start:
            set_sync_memops(memory(start, device="cuda:1"))
        assert 0x84 == int(cuda.call("cuCtxGetFlags"))


def test_memory_that_slept_is_another_when_it_wakes(fake, cuda):
    """vLLM's sleep mode maps new memory at the old address; it has to be registered again."""
    with mapped(cuda, 1) as start:
        first, _ = export_dmabuf(memory(start))
        os.pwrite(first, b"old", 0)
        cuda.call("cuMemUnmap", start, MAPPED)
        with pytest.raises(BadRequest, match="this is pageable memory"):
            export_dmabuf(memory(start))
        fill(cuda, start, 1, 0)
        again, _ = export_dmabuf(memory(start))
        os.pwrite(again, b"new", 0)

        assert b"new" == fake.peek(start, 3)
        assert b"old" == os.pread(first, 3, 0)
        for fd in (first, again):
            os.close(fd)


def test_a_driver_that_cannot_have_copies_wait_is_told_with_a_cure():
    """CUDA 12.0 has no cuCtxSetFlags: old bytes would be sent now and then."""
    code = """
import os
from scripts.gpu_check import mapped
from tep import FabricError
from tep.cuda import export_dmabuf
from tep.host.cuda import driver
from tep.memory.source import Memory
with mapped(driver(), 1) as start:
    try:
        export_dmabuf(Memory(start, 64, "cuda:0", False, None))
    except FabricError as error:
        print(error)
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    held = [os.readlink(link) for link in links if os.path.islink(link)]
    assert 1 == sum("dmabuf" in one for one in held), "the driver's own only"
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TEP_FAKE_CUDA": "version=12000"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert not done.stderr
    assert "cuCtxSetFlags" in done.stdout
    assert "CUDA 12.1" in done.stdout
    assert "expandable_segments:False" in done.stdout


def test_memory_that_cannot_be_exported_is_refused_with_the_setting_that_helps(fake, cuda):
    """EINVAL of a registration names nothing; the allocator is nearly always the reason."""
    with cuda.on(1):
        far = cuda.call("cuMemAlloc", PAGE)
    with cuda.on(0):
        pinned = cuda.call("cuMemHostAlloc", PAGE, 3)
        managed = cuda.call("cuMemAllocManaged", PAGE, 1)
        plain = int(cuda.call("cuMemAlloc", PAGE))
        pooled = cuda.call("cuMemAllocAsync", PAGE, 0)
        for one, message in (
            (memory(pinned), "this is pinned memory"),
            (memory(managed), "this is managed memory"),
            (memory(far), "it is on cuda:1, not on cuda:0"),
            (memory(plain, 999 * PAGE), f"its allocation ends at {plain + PAGE:#x}"),
        ):
            with pytest.raises(BadRequest, match=message):
                export_dmabuf(one)
        with mapped(cuda, 1, capable=False) as vmm:
            for one, message in (
                (memory(pooled), "backend:native.*MemoryPool"),
                (memory(vmm), "expandable_segments:False"),
            ):
                with pytest.raises(FabricError, match=message):
                    export_dmabuf(one)
        fake.set(dmabuf=0)
        with pytest.raises(BackendUnavailable, match="makes no dma-bufs") as caught:
            export_dmabuf(memory(plain))
        assert "nvidia_peermem" in str(caught.value)
        cuda.call("cuMemFreeHost", int(pinned))
        for ptr in (far, managed, plain, pooled):
            cuda.call("cuMemFree", ptr)


@pytest.mark.parametrize(("ordering", "flushes"), [(0, True), (100, False), (200, False)])
def test_a_flush_is_made_where_the_gpu_does_not_order_writes_itself(fake, ordering, flushes):
    """Before Hopper a kernel may read old bytes although the immediate was counted."""
    fake.set(ordering=ordering)

    assert flushes is flush(1)
    assert [1] * flushes == [call.device for call in fake.calls("cuFlushGPUDirectRDMAWrites")]


def test_a_gpu_that_can_neither_order_nor_flush_is_an_error(fake):
    """To go on without would be wrong bytes now and then."""
    fake.set(ordering=0, flush=0)
    with pytest.raises(FabricError, match="cannot flush"):
        flush(0)
