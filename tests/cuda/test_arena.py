"""Memory that tep allocates on GPUs, and copies where NICs cannot reach it."""

from __future__ import annotations

import gc
import mmap

import pytest

import tep
from tep import BackendUnavailable, BadRequest, ClosedError, TransferEngine, UsageError, sim
from tep.bench.two_nodes import Plan, measure
from tep.cuda import Arena, Staged, export_dmabuf, inspect
from tep.memory.source import adapt, exported

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_arenas_are_alike_on_every_device(fake, device):
    """Code that is written once must run on both."""
    ranges = fake.ranges()
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
    assert ranges == fake.ranges()


def test_the_work_on_an_arena_is_done_when_the_call_returns(fake):
    """A peer's bytes would be zeroed, or a NIC send old ones: the GPU is late, a NIC may not be."""
    fake.set(late_us=60_000_000)
    with tep.alloc(2 * PAGE, "cuda:0") as arena:
        assert bytes(2 * PAGE) == fake.peek(arena.ptr, 2 * PAGE)
        arena.write(b"hello", offset=100)
        assert b"hello" == fake.peek(arena.ptr + 100, 5)


def test_an_arena_has_whole_pages_of_its_own_beside_small_allocations(fake, cuda):
    """cuMemAlloc begins small memory anywhere; a NIC would be shown a neighbour's bytes."""
    fake.set(exact=1)
    with cuda.on(0):
        small = [cuda.call("cuMemAlloc", 8) for _ in range(3)]
    with tep.alloc(100, "cuda:0") as arena, exported(export_dmabuf, adapt(arena)) as (_, offset):
        assert (0, 0) == (arena.ptr % PAGE, offset)
        assert arena.ptr + PAGE <= sum(inspect(arena.ptr)[2:4])
    with cuda.on(0):
        for ptr in small:
            cuda.call("cuMemFree", ptr)


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
    ranges = fake.ranges()
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
            assert b"x" * 100 + bytes(PAGE - 100) == fake.peek(target.ptr, PAGE)
            assert "a copy of 4096 bytes on cuda:0, by push() and pull()" in a.explain()
            with pytest.raises(UsageError):
                out.push(PAGE, 1)
        with pytest.raises(ClosedError):
            out.push()
        with pytest.raises(BadRequest, match="register it as it is"):
            Staged(a, bytearray(8))
    del source, target, out, into
    gc.collect()
    assert ranges == fake.ranges(), "all of it is given back"


def test_buffers_of_the_benchmark_may_be_on_a_gpu(fake):
    """The published figures are between GPUs; this fabric keeps time only."""
    with sim.Cluster(nodes=2, profile="cx7_400", move_bytes=False) as cluster:
        measure(cluster.engines, Plan.short(), memory="cuda:1")

    assert [1, 1] == [call.device for call in fake.calls("cuMemAlloc")]
