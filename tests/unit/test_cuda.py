"""GPU memory, on a fake of the driver's calls: what is asked, and what is made of the answers.

What this cannot show is named in README; scripts/gpu_check shows it on a GPU.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import importlib
import importlib.util
import inspect as python
import json
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tep
from tep import (
    BackendUnavailable,
    BadRequest,
    ClosedError,
    FabricError,
    TransferEngine,
    UsageError,
)
from tep.cuda import Arena, GpuFlag, Staged, export_dmabuf, flush, inspect, words
from tep.cuda.driver import Driver, list_devices
from tep.hostfiles import CudaDevice, LiveFiles
from tep.memory import Memory, adapt, exported
from tests.support.fake_cuda import CUresult, FakeCuda, FakeKernels, FakeNvrtc

PAGE = mmap.PAGESIZE
ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests/abi/cuda_python.json").read_text())
CUDA = importlib.import_module("tep.cuda.driver")


@pytest.fixture
def fake(monkeypatch):
    """A driver with two GPUs that are Hoppers in what they say of themselves."""
    found = FakeCuda()
    cuda = Driver(found)
    for module in ("driver", "memory", "arena", "words"):
        monkeypatch.setattr(f"tep.cuda.{module}.driver", lambda: cuda)
    found.driver = cuda
    return found


def names(fake):
    return [call[0] for call in fake.calls]


# --- the fake, and what is called


def test_the_fake_has_the_real_packages_calls_and_constants():
    """A fake that drifts from the package tests nothing."""
    mine = {
        name: len(python.signature(call).parameters) - 1
        for fake in (FakeCuda, FakeKernels, FakeNvrtc)
        for name, call in vars(fake).items()
        if name.startswith(("cu", "nvrtc"))
    }

    assert RECORDED["calls"] == mine
    for name, enum in vars(importlib.import_module("tests.support.fake_cuda")).items():
        if isinstance(enum, type) and name.startswith("CU"):
            assert [RECORDED["constants"][one.name] for one in enum] == [int(one) for one in enum]


def test_every_call_that_tep_makes_is_recorded_with_its_number_of_arguments():
    """A misspelt call would be found by the first GPU only."""
    made = {}
    for path in sorted([*(ROOT / "tep/cuda").glob("*.py"), ROOT / "scripts/gpu_check.py"]):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "func", None)
            if getattr(name, "attr", getattr(name, "id", "")) == "call":
                first = node.args[0]
                if isinstance(first, ast.Constant):
                    made[first.value] = len(node.args) - 1

    assert set(made) == set(RECORDED["calls"])
    assert made == {name: RECORDED["calls"][name] for name in made}


def test_the_record_is_that_of_the_installed_package():
    """Where cuda-python is installed, the record must still be true of it."""
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-python is not installed")
    maker = importlib.import_module("tests.abi.make_cuda_python")
    names = ("cuda.bindings.driver", "cuda.bindings.nvrtc")
    real = maker.facts(*map(importlib.import_module, names))

    assert {name: RECORDED[name] for name in ("calls", "constants")} == real


def test_without_cuda_python_the_error_names_the_extra(monkeypatch):
    """`import tep` and everything on the host must work without it."""

    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(CUDA.importlib, "import_module", missing)
    with pytest.raises(BackendUnavailable, match=r"pip install 'tep-engine\[cuda\]'"):
        CUDA.driver.__wrapped__()


def test_without_a_gpu_the_error_says_so():
    """cuda-python installs anywhere; the driver then refuses, or is not there at all."""

    class NoLibrary(FakeCuda):
        def cuInit(self, flags):
            raise RuntimeError("no libcuda.so.1")

    for broken in (FakeCuda(gpus=0), NoLibrary()):
        with pytest.raises(BackendUnavailable, match="cannot be started"):
            Driver(broken)


def test_an_error_names_the_call_and_the_code(fake):
    """CUDA_ERROR_INVALID_VALUE alone could be any of a hundred calls."""
    with pytest.raises(FabricError, match=r"cuMemFree\(0x7\): CUDA_ERROR_INVALID_VALUE"):
        fake.driver.call("cuMemFree", 7)


def test_contexts_are_put_back_also_after_an_error(fake):
    """A context left behind moves the user's next kernel to another GPU."""
    with pytest.raises(FabricError), fake.driver.on(1):
        fake.driver.call("cuMemFree", 7)

    assert [] == fake.stack


def test_devices_are_listed_by_pci_address_as_sysfs_writes_it(fake, monkeypatch):
    """The driver writes it in capitals; sysfs does not, and topology compares them."""
    expected = [
        CudaDevice(0, "0000:1b:00.0", "Fake H100"),
        CudaDevice(1, "0000:1c:00.0", "Fake H100"),
    ]

    assert expected == list_devices() == LiveFiles().cuda()


# --- pointers and dma-bufs


def test_kinds_of_pointers(fake):
    """What is registered by mistake as GPU memory fails in the NIC, with EFAULT and no reason."""
    host = bytearray(64)
    pinned = fake.make(64, kind=1)
    managed = fake.make(64, managed=True)
    on_1 = fake.make(300, 1)

    assert "pageable" == inspect(adapt(host).ptr).kind
    assert "pinned" == inspect(pinned.start).kind
    assert "managed" == inspect(managed.start).kind
    assert ("device", 1, on_1.start, 300) == inspect(on_1.start + 299)[:4]


@given(
    skip=st.sampled_from([0, 256, 512, PAGE - 256]),
    inside=st.integers(0, 3 * PAGE),
    nbytes=st.integers(1, 3 * PAGE),
)
def test_exported_bytes_are_those_of_the_tensor_wherever_it_begins(skip, inside, nbytes):
    """Offset 0 is the rare case: tensors lie anywhere in an allocator's segments."""
    fake = FakeCuda()
    one = fake.make(6 * PAGE, skip=skip)
    raw = np.random.default_rng(inside).integers(0, 256, 6 * PAGE, np.uint8).tobytes()
    ctypes.memmove(one.start, raw, len(raw))
    memory = Memory(one.start + inside, nbytes, "cuda:0", False, None)
    cuda = Driver(fake)
    with exported(lambda memory: export_dmabuf(memory, cuda), memory) as (fd, offset):
        assert raw[inside : inside + nbytes] == os.pread(fd, nbytes, offset)
        assert 0 == os.fstat(fd).st_size % PAGE
        assert 0 <= offset < PAGE
    assert one.sync
    assert [] == fake.stack


def test_memory_that_cannot_be_exported_is_refused_with_the_setting_that_helps(fake):
    """EINVAL of a registration names nothing; the allocator is nearly always the reason."""

    def of(one, nbytes=64, device="cuda:0"):
        return Memory(one.start, nbytes, device, False, None)

    for one, message in (
        (of(fake.make(PAGE, kind=1)), "this is pinned memory"),
        (of(fake.make(PAGE, managed=True)), "this is managed memory"),
        (of(fake.make(PAGE, 1)), "it is on cuda:1, not on cuda:0"),
        (of(fake.make(PAGE), 9 * PAGE), "its allocation ends at"),
    ):
        with pytest.raises(BadRequest, match=message):
            export_dmabuf(one)
    for one, message in (
        (of(fake.make(PAGE, pool=7)), "backend:native.*MemoryPool"),
        (of(fake.make(PAGE, capable=False)), "expandable_segments:False"),
    ):
        with pytest.raises(FabricError, match=message):
            export_dmabuf(one)
    fake.dmabuf = 0
    with pytest.raises(BackendUnavailable, match="makes no dma-bufs") as caught:
        export_dmabuf(of(fake.make(PAGE)))
    assert "nvidia_peermem" in str(caught.value)


# --- what kernels see


@pytest.mark.parametrize(("ordering", "flushes"), [(0, True), (100, False), (200, False)])
def test_a_flush_is_made_where_the_gpu_does_not_order_writes_itself(fake, ordering, flushes):
    """Before Hopper a kernel may read old bytes although the immediate was counted."""
    fake.ordering = ordering

    assert flushes is flush(0)
    assert flushes is ("flush" in names(fake))


def test_a_gpu_that_can_neither_order_nor_flush_is_an_error(fake):
    """To go on without would be wrong bytes now and then."""
    fake.ordering = fake.flush_options = 0
    with pytest.raises(FabricError, match="cannot flush"):
        flush(0)


@pytest.mark.parametrize("ordering", [0, 200])
def test_a_flag_is_set_after_the_bytes_are_visible_and_only_when_all_have_come(fake, ordering):
    """A kernel that sees the flag reads the bytes at once."""
    fake.ordering = ordering
    with (
        TransferEngine.open("loopback") as a,
        TransferEngine.open("loopback") as b,
        GpuFlag("cuda:1") as flag,
    ):
        mr, _ = a.reg_mr(bytearray(64))
        _, desc = b.reg_mr(bytearray(64))
        word = ctypes.c_uint64.from_address(flag.ptr)
        handle = flag.set_on_count(b, 7, 2, value=5)
        a.submit_single_write(8, (mr, 0), (desc, 0), 7).wait(10)
        before = word.value
        a.submit_single_write(8, (mr, 0), (desc, 0), 7).wait(10)
        handle.wait(10)
        b.driver.call(lambda: None)
        b.close()  # its callbacks are over
        after, order = word.value, names(fake)

    assert (0, 5) == (before, after)
    write = order.index("cuStreamWriteValue64")
    assert (ordering == 0) is ("flush" in order[:write])
    assert {} == fake.known
    with pytest.raises(ClosedError):
        flag.set(1)


def test_a_flag_is_not_set_when_the_count_is_never_reached(fake):
    """A kernel would read what has not arrived."""
    with TransferEngine.open("loopback") as engine, GpuFlag("cuda:0") as flag:
        handle = flag.set_on_count(engine, 7, 1)
        handle.cancel()
        engine.driver.call(lambda: None)
        engine.close()
        assert 0 == ctypes.c_uint64.from_address(flag.ptr).value


def test_a_gpu_without_memory_operations_of_streams_has_no_flags(fake):
    """It must be told at the start, not in a callback."""
    fake.memops = 0
    with pytest.raises(FabricError, match="no 64-bit writes"):
        GpuFlag("cuda:0")
    with pytest.raises(BadRequest, match="'gpu:0'"):
        GpuFlag("gpu:0")


# --- watched words


def test_watched_words_are_pinned_once_and_given_back(fake):
    """A kernel can write only what is mapped for it; a page registered twice is an error."""
    engine = TransferEngine.open("loopback")
    engine._worker.watch.pin = words.pinner("cuda:1")
    seen = []
    first = engine.alloc_uvm_watcher(lambda old, new: seen.append((old, new)))
    second = engine.alloc_uvm_watcher(lambda *_: None)
    registered = [call for call in fake.calls if call[0] == "cuMemHostRegister"]

    assert 1 == len(registered)
    assert 3 == registered[0][2], "portable and mapped"
    assert 1 == registered[0][3], "in the context of cuda:1"
    assert 0 == first.ptr % PAGE
    assert (first.ptr, first.ptr + 8) == (first.device_ptr, second.device_ptr)
    assert "pinned memory; kernels write them" in engine.explain()
    engine.close()
    del engine, first, second
    gc.collect()
    assert "cuMemHostUnregister" in names(fake)


def test_pageable_words_say_so():
    """A kernel that writes there ends its process; and the engine works without."""
    with TransferEngine.open("loopback") as engine:
        word = engine.alloc_uvm_watcher(lambda *_: None)
        with pytest.raises(BackendUnavailable, match="without device='cuda:N'"):
            word.device_ptr  # noqa: B018  # it raises
        assert "pageable memory, written by the host only" in engine.explain()


def test_a_failed_pinning_leaves_pageable_words_and_the_reason():
    """memlock or a driver may refuse; the host's words must go on."""

    def refuse(memory):
        raise FabricError("cuMemHostRegister: CUDA_ERROR_NOT_PERMITTED", code="PROVIDER")

    with TransferEngine.open("loopback") as engine:
        engine._worker.watch.pin = refuse
        word = engine.alloc_uvm_watcher(lambda *_: None)
        with pytest.raises(BackendUnavailable, match="NOT_PERMITTED"):
            word.device_ptr  # noqa: B018  # it raises


# --- arenas and copies


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_arenas_are_alike_on_every_device(fake, device):
    """Code that is written once must run on both."""
    with tep.alloc(3 * PAGE + 5, device) as arena:
        assert isinstance(arena, Arena)
        assert 0 == arena.ptr % PAGE
        assert bytes(8) == arena.read(PAGE, 8)
        arena.write(b"hello", offset=3 * PAGE)
        assert b"hello" == arena.read(3 * PAGE)
        memory = adapt(arena)
        assert (arena.ptr, 3 * PAGE + 5, device) == (memory.ptr, memory.nbytes, memory.device)
        for offset, nbytes in ((-1, 1), (0, 3 * PAGE + 6), (3 * PAGE + 5, 1)):
            with pytest.raises(UsageError):
                arena.read(offset, nbytes)
    with pytest.raises(ClosedError):
        arena.read()
    del arena, memory
    gc.collect()
    assert {} == fake.known


def test_an_arena_that_an_engine_holds_outlives_its_close(fake):
    """A NIC may still write there."""
    with TransferEngine.open("loopback") as engine:
        arena = tep.alloc(64)
        engine.reg_mr(arena)
        start = arena.ptr
        arena.close()
        gc.collect()
        assert bytes(64) == ctypes.string_at(start, 64)


def test_impossible_arenas_are_refused(fake):
    """With the values, before anything is allocated."""
    for nbytes, device, error in (
        (0, "cpu", UsageError),
        (8, "gpu", BadRequest),
        (8, "cuda:2", BackendUnavailable),
    ):
        with pytest.raises(error):
            tep.alloc(nbytes, device)


def test_staged_memory_moves_by_push_and_pull_only_and_is_told(fake):
    """A silent copy would be the 500 times slower path that nobody asked for."""
    with (
        TransferEngine.open("local") as a,
        TransferEngine.open("local") as b,
        tep.alloc(PAGE, "cuda:0") as source,
        tep.alloc(PAGE, "cuda:1") as target,
    ):
        with pytest.raises(BadRequest, match="reaches only: cpu"):
            a.reg_mr(source)
        with Staged(a, source) as out, Staged(b, target) as into:
            source.write(b"x" * PAGE)
            out.push(0, 100)
            got = b.expect_imm_count(1, 1)
            a.submit_single_write(PAGE, (out.mr, 0), (into.desc, 0), 1).wait(10)
            got.wait(10)
            assert bytes(PAGE) == target.read()
            into.pull()
            assert b"x" * 100 + bytes(PAGE - 100) == target.read()
            assert "a copy of 4096 bytes on cuda:0, by push() and pull()" in a.explain()
            with pytest.raises(UsageError):
                out.push(PAGE, 1)
        with pytest.raises(ClosedError):
            out.push()
        with pytest.raises(BadRequest, match="register it as it is"):
            Staged(a, bytearray(8))


# --- the script for a GPU


def gpu_check(monkeypatch, fake, *args):
    """Run scripts/gpu_check.py on a fake; its status."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts/gpu_check.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    cuda = Driver(fake)
    for module in ("driver", "memory", "arena", "words"):
        monkeypatch.setattr(f"tep.cuda.{module}.driver", lambda: cuda)
    monkeypatch.setattr(script, "import_module", lambda name: FakeNvrtc())
    monkeypatch.setattr(script, "_LAUNCHES", 20)
    return script.main(list(args))


def test_the_kernels_of_the_script_compile():
    """NVRTC needs no GPU. It is no part of cuda-python: pip install nvidia-cuda-nvrtc."""
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-python is not installed")
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts/gpu_check.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    check = script.Check("cuda:1", Driver(FakeKernels()), nvrtc)
    image = check.compiled()

    assert image.startswith(b"\x7fELF")
    assert all(name in image for name in (b"advance", b"ask", b"wait_for"))


def test_the_script_for_a_gpu_runs_on_the_fake(monkeypatch, capsys, tmp_path):
    """It is run first where a GPU is lent by the hour: its own mistakes must be gone by then."""
    path = tmp_path / "gpu.json"
    status = gpu_check(monkeypatch, FakeKernels(), "cuda:1", "--json", str(path))
    out = capsys.readouterr().out

    assert 0 == status, out
    assert "cuda:1: 0 checks failed, 9 held" in out
    assert "flag: seen by a spinning kernel" in out
    assert "pointers: device, pinned, managed and pageable" in out
    assert "copies: local 4 MiB, bytes equal" in out
    figures = json.loads(path.read_text())["figures"]
    for what in ("from launch to callback, us", "from store to callback and back, us"):
        assert {"avg", "min", "p50", "p90", "p99", "p999"} == figures[what].keys()
        assert figures[what]["min"] > 0


def test_the_script_for_a_gpu_finds_what_is_wrong(monkeypatch, capsys):
    """A check that cannot fail checks nothing."""

    class Broken(FakeKernels):
        def cuMemcpyDtoH(self, dst, src, nbytes):
            return (CUresult.CUDA_SUCCESS,)

        def cuMemAllocManaged(self, bytesize, flags):
            return self.cuMemAlloc(bytesize)

        def cuMemGetHandleForAddressRange(self, dptr, size, handle_type, flags):
            return CUresult.CUDA_SUCCESS, os.memfd_create("empty")

    status = gpu_check(monkeypatch, Broken(), "--no-kernels")
    out = capsys.readouterr().out

    assert 1 == status
    assert "FAILED  pointers: AssertionError" in out
    assert "FAILED  copies: AssertionError: local: bytes differ" in out
    assert "FAILED  dmabufs: BadRequest" in out


def test_the_script_for_a_gpu_finds_kernels_that_nobody_answers(monkeypatch, capsys):
    """A watched word that is not seen, and a flag that is never set, must end in words."""

    class Deaf(FakeKernels):
        def _ask(self, word, answer, took_ns, spins):
            ctypes.c_uint64.from_address(took_ns).value = 0

        def _wait_for(self, flag, value, source, out, nbytes, spins):
            ctypes.c_ubyte.from_address(out + nbytes).value = 0

    assert 1 == gpu_check(monkeypatch, Deaf())
    out = capsys.readouterr().out
    assert "FAILED  answered: AssertionError: the kernel gave up: nobody answered" in out
    assert "FAILED  flag: AssertionError: the kernel gave up: it did not see the flag" in out
    assert "ok      watched" in out


def test_the_script_for_a_gpu_says_that_there_is_none(monkeypatch, capsys):
    """Its status differs from a failure's: CI may pass over it, and says why."""
    assert 2 == gpu_check(monkeypatch, FakeKernels(), "cuda:7")
    assert "no GPU: cuda:7" in capsys.readouterr().out
