"""Engines that register GPU memory by dma-bufs: the NICs of the stub provider map the files."""

from __future__ import annotations

import os

import numpy as np
import pytest

import tep
from scripts.gpu_check import MAPPED, mapped
from tep import TransferEngine
from tep.cuda import export_dmabuf
from tests.support.here import need_stub

NBYTES = 1 << 20


@pytest.fixture
def engines():
    """A source and a target whose one NIC reaches GPU memory."""
    options = {"library": need_stub().path, "dmabuf_export": export_dmabuf}
    with (
        TransferEngine.open("verbs", nics=["stub0"], **options) as a,
        TransferEngine.open("verbs", nics=["stub1"], **options) as b,
    ):
        yield a, b


def test_bytes_go_from_gpu_to_gpu_through_the_descriptors(fake, engines):
    """The offset of a tensor in its pages, on both sides, and when the source was written."""
    a, b = engines
    fake.set(late_us=60_000_000)
    raw = os.urandom(NBYTES)
    with tep.alloc(2 * NBYTES, "cuda:0") as source, tep.alloc(2 * NBYTES, "cuda:1") as target:
        mr, _ = a.reg_mr((source.ptr + 1000, NBYTES + 24, "cuda:0"))
        _, desc = b.reg_mr((target.ptr + 4104, NBYTES, "cuda:1"))
        source.write(raw, 1024)
        got = b.expect_imm_count(1, 1)
        a.submit_single_write(NBYTES, (mr, 24), (desc, 0), 1).wait(20)
        got.wait(20)

        assert raw == fake.peek(target.ptr + 4104, NBYTES)
        assert bytes(4104) == fake.peek(target.ptr, 4104)


def test_pages_land_in_mapped_memory(fake, cuda, engines):
    """KV caches of vLLM with expandable segments: pages on either side of a mapping's end."""
    a, b = engines
    npages, page = 64, 32 << 10
    pages = np.random.default_rng(1).integers(0, 256, (npages, page), np.uint8)
    with mapped(cuda, 2, 1) as start, tep.alloc(npages * page, "cuda:0") as source:
        source.write(pages)
        at = start + MAPPED - npages * page // 2
        mr, _ = a.reg_mr(source)
        there, desc = b.reg_mr((at, npages * page, "cuda:1"))
        order = np.random.default_rng(2).permutation(npages)
        got = b.expect_imm_count(1, npages)
        into = tep.Pages(np.arange(npages))
        a.submit_paged_writes(page, (mr, tep.Pages(order)), (desc, into), 1).wait(20)
        got.wait(20)

        assert pages[order].tobytes() == fake.peek(at, npages * page)
        b.deregister(there)


def test_memory_that_goes_by_nvidia_peermem_has_copies_wait_as_well(
    fake, cuda, monkeypatch, tmp_path
):
    """No export marks it there: a NIC would send what the memory held before a cudaMemcpy."""
    monkeypatch.setattr("tep.backends.verbs._PEER_MEMORY", tmp_path)
    with cuda.on(1):
        ptr = int(cuda.call("cuMemAlloc", 8192))
    with TransferEngine.open("verbs", nics=["stub0"], library=need_stub().path) as engine:
        engine.reg_mr((ptr, 8192, "cuda:1"))
        (marked,) = fake.calls("cuPointerSetAttribute")
    with cuda.on(1):
        cuda.call("cuMemFree", ptr)

    assert ("6", hex(ptr)) == marked.args
    assert 1 == marked.device
