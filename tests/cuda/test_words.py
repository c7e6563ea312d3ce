"""Words between host and GPU: flags that kernels read, words that kernels write."""

from __future__ import annotations

import gc
import mmap

import pytest

from tep import BadRequest, ClosedError, FabricError, TransferEngine
from tep.cuda import GpuFlag, memory
from tests.support.inside import worker_of

PAGE = mmap.PAGESIZE


def test_a_flag_that_is_set_at_once_is_not_cleared_afterwards(fake, cuda):
    """The word is cleared by the GPU, late; a flag that is set before would be lost for good."""
    fake.set(late_us=60_000_000)
    with GpuFlag("cuda:0") as flag, cuda.on(0):
        flag.set(5)
        cuda.call("cuStreamSynchronize", flag._stream)
        cuda.call("cuCtxSynchronize")

        assert 5 == fake.word(flag.ptr)


@pytest.mark.parametrize("ordering", [0, 200])
def test_a_flag_is_set_after_the_bytes_are_visible_and_only_when_all_have_come(fake, ordering):
    """A kernel that sees the flag reads the bytes at once."""
    fake.set(ordering=ordering)
    ranges = fake.ranges()
    with (
        TransferEngine.open("loopback") as a,
        TransferEngine.open("loopback") as b,
        GpuFlag("cuda:1") as flag,
    ):
        mr, _ = a.reg_mr(bytearray(64))
        _, desc = b.reg_mr(bytearray(64))
        handle = flag.set_on_count(b, 7, 2, value=5)
        a.submit_single_write(8, (mr, 0), (desc, 0), 7).wait(10)
        b.driver.call(lambda: None)
        before = fake.calls("cuStreamWriteValue64")
        a.submit_single_write(8, (mr, 0), (desc, 0), 7).wait(10)
        handle.wait(10)
        b.driver.call(lambda: None)
        b.close()  # its callbacks are over
        order = [call.name for call in fake.calls()]
        fake.wait_word(flag.ptr, 5)  # nobody waits for its stream, and it is set all the same

    assert [] == before
    write = order.index("cuStreamWriteValue64")
    assert (ordering == 0) is ("cuFlushGPUDirectRDMAWrites" in order[:write])
    assert ranges == fake.ranges()
    assert {1} == {call.device for call in fake.calls("cuStreamWriteValue64", "cuMemAlloc")}
    with pytest.raises(ClosedError):
        flag.set(1)


def test_a_flag_is_not_set_when_the_count_is_never_reached(fake):
    """A kernel would read what has not arrived."""
    with TransferEngine.open("loopback") as engine, GpuFlag("cuda:0") as flag:
        handle = flag.set_on_count(engine, 7, 1)
        handle.cancel()
        engine.driver.call(lambda: None)
        engine.close()

    assert [] == fake.calls("cuStreamWriteValue64")


def test_a_gpu_without_memory_operations_of_streams_has_no_flags(fake):
    """It must be told at the start, not in a callback."""
    fake.set(memops=0)
    with pytest.raises(FabricError, match="no 64-bit writes"):
        GpuFlag("cuda:0")
    with pytest.raises(BadRequest, match="'gpu:0'"):
        GpuFlag("gpu:0")


def test_watched_words_are_pinned_once_and_given_back(fake):
    """A kernel can write only what is mapped for it; a page registered twice is an error."""
    engine = TransferEngine.open("loopback")
    worker_of(engine).watch.pin = memory.pinner("cuda:1")
    first = engine.alloc_uvm_watcher(lambda *_: None)
    second = engine.alloc_uvm_watcher(lambda *_: None)
    (registered,) = fake.calls("cuMemHostRegister")

    assert "0x3" == registered.args[1], "portable and mapped"
    assert 1 == registered.device, "in the context of cuda:1"
    assert 0 == first.ptr % PAGE
    assert (first.ptr, first.ptr + 8) == (first.device_ptr, second.device_ptr)
    assert "pinned memory; kernels write them" in engine.explain()
    engine.close()
    del engine, first, second
    gc.collect()
    assert 1 == len(fake.calls("cuMemHostUnregister"))
