"""Transfers over libfabric's own EFA provider, seen at the fake device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_efa import fabric
from tests.support.here import need_fake_efa

pytestmark = pytest.mark.slow

BEGIN = """
import os, sys, time, mmap
import numpy as np
import tep
from tep.backends import libfabric
from tep.backends.base import Access, Status
from tep.memory.source import adapt
def engine(name, **options):
    options = {"nics": 1, "peer_timeout_s": 10.0, **options}
    return tep.TransferEngine.open("libfabric", provider="efa", name=name, **options)
"""


@pytest.fixture(autouse=True)
def _device():
    need_fake_efa()


def run(fake, body, within_s=60):
    """Run a program on the fake device; what it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + body],
        env=os.environ | fake.environment(),
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert 0 == done.returncode, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout.strip()


def test_memory_that_is_mapped_read_only_can_be_a_source():
    """Weights are mapped from files; asking the NIC for write access refused them."""
    with fabric({"nics": 1}) as fake:
        out = run(
            fake,
            """
import tempfile
with tempfile.TemporaryFile() as file:
    file.write(bytes(range(256)) * 64)
    file.flush()
    source = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    target = np.zeros(len(source), np.uint8)
    with engine("a") as a, engine("b") as b:
        mr, _ = a.reg_mr(source, access=tep.Access.SOURCE)
        _, desc = b.reg_mr(target)
        a.submit_single_write(len(source), (mr, 0), (desc, 0), 1).wait(20)
        b.expect_imm_count(1, 1).wait(20)
    print((source == target).all())
""",
        )
    assert "True" == out


READS = """
with engine("a") as a, engine("b") as b:
    npages = 1024
    there = np.random.default_rng(0).integers(0, 255, npages * 4096, dtype=np.uint8)
    here = np.zeros_like(there)
    mr, _ = a.reg_mr(here, access=tep.Access.SINK)
    _, desc = b.reg_mr(there, access=tep.Access.READABLE)
    a.submit_single_read(100, (desc, 4096), (mr, 0)).wait(20)
    assert (here[:100] == there[4096:4196]).all()
    pages = tep.Pages(np.arange(npages))
    a.submit_paged_reads(4096, (desc, pages), (mr, pages)).wait(20)
    print((here == there).all())
"""


def test_the_device_reads():
    """Reads by messages would cost the owner's processor, and ask no key."""
    with fabric({"nics": 1}) as fake:
        out = run(fake, READS)
        total = fake.total()
    assert "True" == out
    assert 1025 == total["reads"]


@pytest.mark.parametrize("caps", [14, 7], ids=["no RDMA read", "no RDMA write"])
def test_a_device_that_cannot_write_and_read_is_refused(caps):
    """The provider would imitate it by messages: slow, and reads ask no key of the region."""
    with fabric({"nics": 1, "caps": caps}) as fake:
        out = run(
            fake,
            """
try:
    engine("a")
except tep.BackendUnavailable as error:
    print(error)
""",
        )
    assert "RDMA" in out


def test_memory_in_use_is_shut_to_peers_and_stays_registered_for_its_rows():
    """The provider may post a row again: a registration that went away would be read from."""
    with fabric({"nics": 1}, ["slow us=3000"]) as fake:
        out = run(
            fake,
            """
from tep.backends.base import ReadBatch, WriteBatch, new_completions
a, b = (
    libfabric.open_domains(provider="efa", nics=1, name=x, peer_timeout_s=10.0).domains[0]
    for x in "ab"
)
seen = {"a": [], "b": []}
def turn():
    for name, domain in (("a", a), ("b", b)):
        out = new_completions(64)
        n = domain.poll(out)
        seen[name] += [(int(e["kind"]), int(e["status"])) for e in out[:n]]
def until(done):
    limit_s = time.monotonic() + 20
    while not done() and time.monotonic() < limit_s:
        turn()
    assert done(), seen
mine, other = np.full(4096, 7, np.uint8), np.zeros(8192, np.uint8)
key = b.register(adapt(mine), Access.SOURCE_AND_TARGET | Access.READABLE)
into = a.register(adapt(other), Access.SOURCE_AND_TARGET)
peer, back = a.connect(b.address), b.connect(a.address)
row = lambda domain, at, k, to, far, ctx: domain.post(
    WriteBatch(1, at, k[0], k[1], to[0], to[1], 64, None, ctx), 0, 1
)
row(b, back, (mine.ctypes.data, key.lkey), (other.ctypes.data, into.rkey), 0, 1)
until(lambda: (1, 0) in seen["b"])
row(b, back, (mine.ctypes.data, key.lkey), (other.ctypes.data + 64, into.rkey), 0, 2)
b.deregister(key)
mine[:] = 9
batch = ReadBatch(
    1, peer, other.ctypes.data + 4096, into.lkey, mine.ctypes.data, key.rkey, 64, None, 3
)
assert a.post_read(batch, 0, 1) == 1
until(lambda: seen["b"].count((1, 0)) == 2 and any(kind == 8 for kind, _ in seen["a"]))
print([Status(status).name for kind, status in seen["a"] if kind == 8], other[4096:].any())
print(len(b._regions.dying))
a.close()
b.close()
""",
        )
    assert ["['REMOTE_KEY'] False", "0"] == out.splitlines()


def test_one_long_row_is_one_immediate():
    """`efa` cuts rows above the device's maximum, and each part has the immediate."""
    with fabric({"nics": 1, "max_rdma": 1 << 20}) as fake:
        out = run(
            fake,
            """
with engine("a") as a, engine("b") as b:
    source = np.arange(5 << 18, dtype=np.uint32).view(np.uint8)
    target = np.zeros(len(source), np.uint8)
    mr, _ = a.reg_mr(source)
    _, desc = b.reg_mr(target)
    longest = a._domains[0].caps.max_write_bytes
    try:
        a.submit_single_write(longest + 1, (mr, 0), (desc, 0), 1).wait(20)
    except tep.BadRequest as error:
        assert str(longest) in str(error)
        print("refused", end=" ")
    a.submit_single_write(longest, (mr, 0), (desc, 0), 1).wait(20)
    b.expect_imm_count(1, 1).wait(20)
    print(longest, (source[:longest] == target[:longest]).all())
""",
        )
        imms = fake.total()["imms_landed"]
    assert f"refused {1 << 20} True" == out
    assert 1 == imms


@pytest.mark.parametrize("faults", [(), ("rnr p=0.02",)], ids=["", "rnr"])
def test_no_immediate_is_lost_by_a_target_that_sleeps(faults):
    """Far more than its queues hold: they wait at the sender, and are not acknowledged unseen."""
    with fabric({"nics": 1, "seed": 3}, faults) as fake:
        out = run(
            fake,
            """
found = [libfabric.open_domains(provider="efa", nics=1, name=x, peer_timeout_s=30) for x in "ab"]
ring = []
a, b = (
    tep.TransferEngine(x.domains, driver=tep.InlineDriver(ring), name=x.name, epoch=x.epoch)
    for x in found
)
total = 30_000
source, target = np.ones(64 * total, np.uint8), np.zeros(64 * total, np.uint8)
mr, _ = a.reg_mr(source)
_, desc = b.reg_mr(target)
a.submit_single_write(64, (mr, 0), (desc, 0), 1).wait(20)
pages = tep.Pages(np.arange(total))
got = b.expect_imm_count(2, total)
sent = a.submit_paged_writes(64, (mr, pages), (desc, pages), 2)
deaf = b._domains[0].poll
until_s = time.monotonic() + 0.5
b._domains[0].poll = lambda out: deaf(out) if time.monotonic() > until_s else 0
sent.wait(50)
got.wait(50)
print(got.arrived, target.all())
""",
        )
        total = fake.total()
    assert "30000 True" == out
    assert 0 == total["overruns"]
    assert 30_001 == total["imms_landed"]


def test_eight_engines_on_each_nic_of_a_p5_fit_into_4_gb():
    """The provider's own choice is 111 MB a NIC: 28 GB for 8 engines of 32 NICs."""
    with fabric({"nics": 1}) as fake:
        run(
            fake,
            """
with engine("a") as a:
    time.sleep(0.1)
""",
        )
        assert fake.total()["mr_bytes"] <= 4e9 / (8 * 32)


def test_an_engine_that_cannot_sleep_says_so():
    """The wheel's provider has no descriptor: an idle engine looks twice a millisecond."""
    with fabric({"nics": 1}) as fake:
        out = run(
            fake,
            """
with engine("a") as a:
    print(a._domains[0].caps.wakes, a.explain())
""",
        )
    assert out.startswith("False")
    assert "looks again and again: there is no descriptor to sleep on" in out


def test_nics_are_named_as_the_system_names_them():
    """`ibv_devices` says rdmap79s0; libfabric says rdmap79s0-rdm."""
    with fabric({"nics": 2}) as fake:
        out = run(
            fake,
            """
for names in (["rdmap80s0"], ["rdmap80s0-rdm", "rdmap79s0"]):
    with engine("a", nics=names) as a:
        print([domain.caps.nic for domain in a._domains], end=" ")
for names in (["rdmap1s0"], ["rdmap79s0", "rdmap79s0-rdm"]):
    try:
        engine("a", nics=names)
    except tep.UsageError as error:
        print(error, end=" ")
""",
        )
    assert "['rdmap80s0-rdm'] ['rdmap80s0-rdm', 'rdmap79s0-rdm']" in out
    assert "no NIC 'rdmap1s0'; there are: rdmap79s0-rdm, rdmap80s0-rdm" in out
    assert "names one NIC twice" in out


def test_rows_to_a_peer_that_closes_give_back_what_they_hold():
    """The provider drops the completions of a peer that is removed while rows to it are out."""
    with fabric({"nics": 1}, ["slow us=500"]) as fake:
        out = run(
            fake,
            """
a = engine("a", peer_timeout_s=2.0)
NBYTES = 2000 * 4096
mr, _ = a.reg_mr(np.ones(NBYTES, np.uint8))
pages = tep.Pages(np.arange(2000))
for life in range(4):
    b = engine("b")
    _, desc = b.reg_mr(np.zeros(NBYTES, np.uint8))
    a.submit_single_write(64, (mr, 0), (desc, 0), 1).wait(20)
    sent = a.submit_paged_writes(4096, (mr, pages), (desc, pages), 2)
    time.sleep(0.02)
    b.close()
    try:
        sent.wait(20)
    except tep.FabricError as error:
        pass
slots = a._domains[0]._slots
until_s = time.monotonic() + 20
while (slots.adrift or slots.open or a._domains[0].peers.departed) and time.monotonic() < until_s:
    time.sleep(0.01)
print(slots.adrift, slots.open, len(slots._free) - slots._top, a._domains[0].peers.departed)
a.close()
""",
        )
    assert "0 0 0 []" == out


def test_memory_behind_an_offset_of_its_dma_buf_is_where_it_should_be():
    """Tensors lie somewhere in an allocation: rows went to its start, or to nowhere."""
    with fabric({"nics": 1}) as fake:
        out = run(
            fake,
            """
from dataclasses import replace
from tep.backends.ffi import libfabric as fi
from tep.testing.world import Net
fi.FI_HMEM_CUDA = 0  # FI_HMEM_SYSTEM: the wheel's libfabric knows no CUDA
fd = os.memfd_create("allocation")
os.ftruncate(fd, 1 << 20)
whole = np.frombuffer(mmap.mmap(fd, 1 << 20), np.uint8)
OFFSET, NBYTES = 3 * 4096 + 512, 40_000
fds = []
def export(memory):
    fds.append(os.dup(fd))
    return fds[-1], memory.ptr - whole.ctypes.data
found = [
    libfabric.open_domains(provider="efa", nics=1, name=x, dmabuf=export) for x in "ab"
]
for opened in found:
    (domain,) = opened.domains
    domain.caps = replace(domain.caps, memory_kinds=("cpu", "cuda"))
ring = []
a, b = (
    tep.TransferEngine(x.domains, driver=tep.InlineDriver(ring), name=x.name, epoch=x.epoch)
    for x in found
)
host = np.arange(NBYTES, dtype=np.uint32).astype(np.uint8)
mr, mine = a.reg_mr(host)
device, desc = b.reg_mr((whole.ctypes.data + OFFSET, NBYTES, "cuda:0"))
a.submit_single_write(NBYTES - 100, (mr, 100), (desc, 100), 1).wait(20)
b.expect_imm_count(1, 1).wait(20)
inside = whole[OFFSET : OFFSET + NBYTES]
print((inside[100:] == host[100:]).all(), np.count_nonzero(whole) == np.count_nonzero(host[100:]))
host[:] = 0
b.submit_single_write(NBYTES - 100, (device, 100), (mine, 100), 2).wait(20)
a.expect_imm_count(2, 1).wait(20)
print((inside[100:] == host[100:]).all())
for one in fds:
    try:
        os.fstat(one)
        print("left open")
    except OSError:
        print("closed")
""",
        )
    assert ["True True", "True", "closed"] == out.splitlines()


def test_an_answer_that_finds_nobody_does_not_abort_the_process():
    """The provider aborts where an error belongs to no operation, and no event queue is bound."""
    with fabric({"nics": 1}, ["fail op=send status=12 skip=1"]) as fake:
        out = run(
            fake,
            """
a, b = engine("a", peer_timeout_s=1.0), engine("b", peer_timeout_s=1.0)
source = np.ones(4096, np.uint8)
mr, _ = a.reg_mr(source)
_, desc = b.reg_mr(np.zeros(4096, np.uint8))
try:
    a.submit_single_write(64, (mr, 0), (desc, 0), 1).wait(20)
except tep.FabricError as error:
    print(error.code)
""",
        )
    assert "UNREACHABLE" == out


def test_the_bench_compares_with_c():
    """A figure without its reference, or of another device, says nothing."""
    need_fake_efa()
    with fabric({"nics": 1}) as fake:
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.bench_efa", "--rounds", "1", "--json"],
            cwd=Path(__file__).parents[2],
            env=os.environ | fake.environment(),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    if "cannot be built" in done.stderr:
        pytest.skip("no headers of libfabric (Debian: libfabric-dev)")
    assert 0 == done.returncode, done.stderr[-2000:]
    figures = json.loads(done.stdout)["figures"][-2:]  # behind those of the backend `efa`

    assert ["efa", "efa"] == [x["what"].split()[0] for x in figures]
    assert all(0 < figure["value"] for figure in figures)
    assert all(0 < figure["reference"] for figure in figures)
