"""Device memory through verbs: dma-bufs of the stub are files, in which bytes can be looked up."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tep.backends.base import Access, Kind, Status, WriteBatch, new_completions
from tep.backends.verbs import open_domains
from tep.base.errors import BadRequest
from tep.memory.source import adapt
from tests.support.effort import effort

ALLOCATED = 1 << 16
GPU = 0x7F_0000_0000_0000  # nobody maps this: a provider that reads there crashes


class Gpu:
    """An allocation of a GPU, exported as a whole, as the driver does."""

    def __init__(self):
        self.file = os.memfd_create("gpu")
        os.ftruncate(self.file, ALLOCATED)
        self.given = []

    def tensor(self, offset, nbytes):
        return adapt((GPU + offset, nbytes, "cuda:0"))

    def export(self, memory):
        self.given.append(os.dup(self.file))
        return self.given[-1], memory.ptr - GPU

    def bytes(self):
        return np.frombuffer(os.pread(self.file, ALLOCATED, 0), np.uint8)


@pytest.fixture
def gpu():
    found = Gpu()
    yield found
    os.close(found.file)


def open_nic(stub, gpu, number=0):
    options = {"library": stub.path, "handshake_s": 1.0, "dmabuf_export": gpu.export}
    return open_domains([f"stub{number}"], name=f"n{number}", **options).domains[0]


def write(source, target, here, there, nbytes):
    """One row, with an immediate; return how it ended."""
    out, ended = new_completions(64), []
    row = (here.base, here.lkey, there.base, there.rkey)
    batch = WriteBatch(1, source.connect(target.address), *row, nbytes, 1, 1)
    source.post(batch, 0, 1)
    end_s = time.monotonic() + 60
    while not ended:
        ended = [entry[1] for entry in out[: source.poll(out)].tolist() if entry[0] == Kind.WRITE]
        target.poll(out)
        assert time.monotonic() < end_s, "the row does not come back"
    return ended


@settings(max_examples=effort(25, 6), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.tuples(st.integers(0, ALLOCATED - 64), st.integers(1, 64)),
    st.tuples(st.integers(0, ALLOCATED - 64), st.integers(64, 64)),
)
def test_bytes_land_where_the_tensor_is_in_its_allocation(stub, source, target):
    """An offset that is forgotten, or added twice, shifts every tensor but the first."""
    gpus = Gpu(), Gpu()
    for gpu in gpus:
        os.pwrite(gpu.file, np.random.default_rng(1).bytes(ALLOCATED), 0)
    (offset, nbytes), (at, room) = source, target
    a, b = (open_nic(stub, gpu, number) for number, gpu in enumerate(gpus))
    before, sent = gpus[1].bytes(), gpus[0].bytes()[offset : offset + nbytes]
    here = a.register(gpus[0].tensor(offset, nbytes), Access.SOURCE)
    there = b.register(gpus[1].tensor(at, room), Access.SOURCE_AND_TARGET)
    ended = write(a, b, here, there, nbytes)  # short ones too: none may be read by the CPU
    after = gpus[1].bytes()
    for nic in (a, b):
        nic.close()
    for gpu in gpus:
        os.close(gpu.file)

    assert [Status.OK] == ended
    assert GPU + at == there.base
    assert (sent == after[at : at + nbytes]).all()
    rest = np.s_[at : at + nbytes]
    assert (np.delete(before, rest) == np.delete(after, rest)).all()


def test_the_descriptor_is_the_backends_and_is_closed_once(stub, gpu):
    """One that stays open keeps GPU memory for good; one closed twice is somebody else's."""
    nics = [open_nic(stub, gpu, number) for number in range(2)]
    for nic in nics:
        key = nic.register(gpu.tensor(4096, 100), Access.SOURCE)
        nic.deregister(key)
    with pytest.raises(BadRequest, match=r"offset 65500 leaves the 65536 bytes"):
        nics[0].register(gpu.tensor(65500, 100), Access.SOURCE)
    for nic in nics:
        nic.close()

    assert 3 == len(gpu.given)
    for fd in gpu.given:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize("returned", [None, 5, (-1, 0), (3, -1), ("3", 0), (3, 0, 0)])
def test_what_an_exporter_returns_is_checked(stub, gpu, returned):
    """The error has to name the exporter, not the call that fails because of it."""
    gpu.export = lambda memory: returned
    nic = open_nic(stub, gpu)
    with pytest.raises(BadRequest, match=r"dma-buf export of 100 bytes .* returned"):
        nic.register(gpu.tensor(0, 100), Access.SOURCE)
    nic.close()
