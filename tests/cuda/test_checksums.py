"""Checksums of GPU memory, and the doctor's way between GPUs and NICs, which are the stub's."""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest

import tep
from tep import TransferEngine
from tep.cuda import arena, export_dmabuf, memory
from tep.host.doctor import Level
from tep.host.doctor.devices import check_gpus
from tests.support.here import need_stub


def open_stub(device: str = "cuda:0") -> TransferEngine:
    """An engine whose NIC reaches GPU memory."""
    nic = f"stub{device[-1]}"
    options = {"library": need_stub().path, "dmabuf_export": export_dmabuf}
    return TransferEngine.open("verbs", nics=[nic], **options)


def test_the_checksum_of_gpu_memory_is_that_of_its_bytes(fake):
    """Rows are copied one by one; a wrong offset would compare other rows than were sent."""
    raw = os.urandom(1 << 16)
    with open_stub() as engine, tep.alloc(len(raw), "cuda:1") as gpu:
        mr, _ = engine.reg_mr(gpu)
        gpu.write(raw)
        rows = [5, 4096, 60_000]
        expected = sum(zlib.crc32(raw[at : at + 1000], at) for at in rows) & 0xFFFFFFFF

        assert expected == tep.checksum(mr, rows, 1000)
        assert not fake.calls("cuFlushGPUDirectRDMAWrites")


def test_what_nics_wrote_is_flushed_first(fake):
    """On a GPU that does not order it, a copy to the host could miss what kernels will see."""
    fake.set(ordering=0)
    with open_stub() as engine, tep.alloc(4096, "cuda:0") as gpu:
        mr, _ = engine.reg_mr(gpu)
        tep.checksum(mr, [0], 4096)

        assert 1 == len(fake.calls("cuFlushGPUDirectRDMAWrites"))


def test_the_doctor_sends_pages_of_each_gpu_to_the_host_and_back(fake):
    """A GPU that was left out is the one whose way is broken."""
    found = list(check_gpus(open_stub))

    assert [
        (
            Level.GOOD,
            "cuda:0 and its NICs",
            "4096 KiB through stub0 to host memory and back are equal",
        ),
        (
            Level.GOOD,
            "cuda:1 and its NICs",
            "4096 KiB through stub1 to host memory and back are equal",
        ),
    ] == [one[:3] for one in found]


def test_the_doctor_finds_a_nic_that_reads_what_a_copy_has_not_written_yet(fake, monkeypatch):
    """The first kind of garbage: without SYNC_MEMOPS cudaMemcpy returns before it is done."""
    for room in (arena, memory):
        monkeypatch.setattr(room, "set_sync_memops", lambda _memory: None)
    fake.set(late_us=60_000_000)
    found = next(check_gpus(open_stub))

    assert Level.BAD is found.level
    assert "64 of 64 pages of cuda:0 did not reach host memory" in found.text
    assert "was written" in found.text
    assert "ACS off" in found.remedy


def test_the_doctor_finds_a_nic_that_writes_beside_the_gpu(fake, monkeypatch):
    """The second kind: the write is acknowledged and counted, and the GPU's memory is as before."""
    with tep.alloc(1 << 22, "cuda:0") as other:

        def export(region, **how):
            beside = region.__class__(other.ptr, region.nbytes, region.device, False, other)
            return export_dmabuf(beside, **how)

        def broken(device):
            options = {"library": need_stub().path, "dmabuf_export": export}
            return TransferEngine.open("verbs", nics=["stub0"], **options)

        found = next(check_gpus(broken))

    assert Level.BAD is found.level
    assert "64 of 64 pages of cuda:0 did not reach host memory" in found.text


def test_nics_that_cannot_reach_a_gpu_are_no_fault(fake):
    """On a machine without RDMA `auto` takes tcp or local, which never touch a GPU."""
    found = list(check_gpus(lambda _: TransferEngine.open("loopback")))

    assert {Level.NOTE} == {one.level for one in found}
    assert "tep.cuda.Staged" in found[0].remedy


def test_a_gpu_whose_memory_nobody_exports_is_bad(fake):
    """The driver's refusal is a finding, not the end of the doctor."""
    fake.set(dmabuf=0)
    found = list(check_gpus(open_stub))

    assert {Level.BAD} == {one.level for one in found}
    assert "makes no dma-bufs" in found[0].text


class GpuTensor:
    """A tensor of torch on a GPU, as KvBlocks looks at it."""

    def __init__(self, gpu: tep.cuda.Arena, shape: tuple[int, ...]) -> None:
        self.gpu, self.shape, self.device = gpu, shape, gpu.device

    def data_ptr(self) -> int:
        return self.gpu.ptr

    def element_size(self) -> int:
        return 1

    def stride(self) -> tuple[int, ...]:
        return tuple(int(np.prod(self.shape[k + 1 :])) for k in range(len(self.shape)))


@pytest.mark.parametrize("late", [False, True])
def test_kv_blocks_between_gpus_are_checked_on_both(fake, monkeypatch, late):
    """Both caches are on GPUs, as vLLM's are; with a copy that is late the load fails."""
    from tep.apps.kvcache import KvBlocks, KvReceiver, KvSender

    shape = (8, 2, 16, 64)
    if late:
        for room in (arena, memory):
            monkeypatch.setattr(room, "set_sync_memops", lambda _memory: None)
    with (
        open_stub("cuda:0") as a,
        open_stub("cuda:1") as b,
        tep.alloc(int(np.prod(shape)), "cuda:0") as here,
        tep.alloc(int(np.prod(shape)), "cuda:1") as there,
    ):
        caches = []
        for engine, gpu in ((a, here), (b, there)):
            caches.append(KvBlocks(engine))
            caches[-1].add("k", 0, GpuTensor(gpu, shape), "bhtd")
        sender, receiver = KvSender(caches[0], checksums=True), KvReceiver(caches[1])
        sender.connect(caches[1].card())
        there.read()  # it is zeroed by now
        fake.set(late_us=60_000_000 * late)
        here.write(os.urandom(here.nbytes))
        load = receiver.expect("r", [[1, 5]], timeout_s=20)
        send = sender.begin("r", [[0, 7]], load.ticket)
        send.layer_done(0)
        while not (load.finished and send.finished):
            receiver.poll()
            sender.poll()

        assert load.ok is not late, load.reason
        assert ("checksums of 'k' differ" in load.reason) is late
