"""libfabric's own EFA provider on the fake device: the script for instances, and two processes."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tep.base.units import KiB, MiB
from tests.support.children import Child, transfer
from tests.support.fake_efa import fabric
from tests.support.here import need_fake_efa

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WAYS = ["efa", "srd"]


@pytest.fixture
def run():
    """Two NICs a host, in an order of their own."""
    need_fake_efa()
    with fabric({"nics": 2, "seed": 1, "log": 1}) as run:
        yield run


@pytest.mark.parametrize("provider", WAYS)
def test_verify_efa_holds(run, provider):
    """A new user of an instance starts with this script: each of its checks has to hold."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/verify_efa.py", provider],
        env=os.environ | run.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert 0 == done.returncode, done.stdout + done.stderr
    assert "all checks held" in done.stdout


_MUTED = """
import sys, tep
options = {"peer_timeout_s": 0.5, "nics": 1}
backend, provider = sys.argv[1:]
options |= {"provider": provider} if provider else {}
engine = lambda: tep.TransferEngine.open(backend, **options)
with engine() as a, engine() as b:
    (here, _), (_, there) = a.reg_mr(bytearray(64)), b.reg_mr(bytearray(64))
    for fails in (False, True):
        if fails: sys.stdin.readline()
        try:
            a.submit_single_write(64, (here, 0), (there, 0)).wait(20)
        except tep.FabricError as error:
            print(error, flush=True)
        else:
            print("done", flush=True)
"""


@pytest.mark.parametrize("how", [("efa", ""), ("libfabric", "efa")])
def test_a_nic_that_nobody_has_ever_answered_names_the_security_group(run, how):
    """Without its rule for itself nothing passes, and the message blamed the peer."""

    def write(*muted):
        for fault in muted:
            run.fault(fault)
        with subprocess.Popen(
            [sys.executable, "-c", _MUTED, *how],
            env=os.environ | run.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            first = process.stdout.readline()
            run.fault("mute")
            return first, process.communicate("\n", timeout=60)[0]

    first, later = write()

    assert "done\n" == first
    assert "security group" not in later
    assert "UNREACHABLE" in later
    first, _ = write("mute")

    assert "security group that allows all traffic within itself" in first


def test_what_is_set_for_the_provider_is_named_by_explain(run):
    """A variable of last year's job script turns RDMA off, and nothing says why it is slow."""
    program = "import tep; print(tep.TransferEngine.open('libfabric', provider='efa').explain())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | run.environment() | {"FI_EFA_TX_SIZE": "4096"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = [line for line in done.stdout.splitlines() if "environment" in line]

    assert ["  libfabric reads from the environment: FI_EFA_TX_SIZE=4096"] == told


def test_a_libfabric_without_cuda_is_named_as_the_cause(run):
    """The wheel's offers no FI_HMEM. It has a provider efa: nobody shall install EFA once more."""
    program = "import tep; tep.TransferEngine.open('libfabric', provider='efa', cuda=True)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | run.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert "was built without CUDA" in done.stderr
    assert "TEP_LIBFABRIC" in done.stderr
    assert "offers no provider 'efa' that takes CUDA memory" in done.stderr


@pytest.mark.parametrize(("name", "tests"), [("contract", 105), ("processes", 20), ("direct", 85)])
def test_tests_on_fake_nics(name, tests):
    """The contract, and processes that are killed, stopped, or run an application: tests/efa."""
    need_fake_efa()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--color=no", "--tb=short"]
    command += [] if os.environ.get("TEP_LONG") else ["-m", "not long"]
    # A hang inside a provider call lets no alarm through: a worker that hangs is ended.
    command += ["--timeout=50", "--timeout-method=thread", "-o", "faulthandler_timeout=0"]
    with fabric({"nics": 8, "seed": 3}) as run:
        done = subprocess.run(
            [*command, "-p", "no:randomly", f"tests/efa/test_{name}.py"],
            cwd=ROOT,
            env=os.environ | run.environment(),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    passed = re.search(r"(\d+) passed", done.stdout)

    assert 0 == done.returncode, done.stdout[-6000:] + done.stderr[-2000:]
    assert passed is not None, done.stdout[-500:]
    assert int(passed[1]) >= tests, done.stdout[-500:]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not here: a fault tells no read")
def test_the_contract_on_queues_mapped_as_a_device_maps_them():
    """No store without its fence, no load of a register, no batch too long, in any clause."""
    need_fake_efa()
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-k", "TestDomain", "--tb=short"]
    command += ["--timeout=50", "--timeout-method=thread"]
    # A store costs a fault: the tests that fill a queue take a short one.
    with fabric({"nics": 8, "mapped": 1, "sq": 256}) as run:
        done = subprocess.run(
            [*command, "tests/efa/test_direct.py"],
            cwd=ROOT,
            env=os.environ | run.environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        counters = run.total()
    names = ("mapped_reads", "unfenced", "overlong", "malformed")

    assert 0 == done.returncode, done.stdout[-6000:] + done.stderr[-2000:]
    assert [0] * 4 == [counters[name] for name in names]
    assert 1000 < counters["doorbells"]


IMMS = 1_000_000 if os.environ.get("TEP_LONG") else 20_000


@pytest.mark.parametrize("settings", [{}, {"rq": 4096, "sq": 2048}], ids=["", "short queues"])
@pytest.mark.parametrize("provider", WAYS)
def test_no_immediate_is_lost(provider, settings):
    """10^6 immediates through one NIC (20,000 in a normal run): exactly as many, whatever slows."""
    need_fake_efa()
    how = {"page_bytes": 8, "npages": IMMS, "seed": 5}
    with fabric({"nics": 1, "seed": 7, **settings}) as run:
        a, b = children = [Child(run.environment(host)) for host in (0, 1)]
        try:
            for child, name in ((a, "a"), (b, "b")):
                child.do("open", provider=provider, nics=1, name=name, timeout_s=30)
            a.do("reg", nbytes=8 * IMMS, seed=5)
            desc = b.do("reg", nbytes=8 * IMMS)
            for imm, fault in enumerate(["", "rnr p=0.05", "slow us=20 p=0.1"], start=1):
                if fault:
                    run.fault(fault)
                b.do("clear")
                b.do("expect", imm=imm, count=IMMS)
                a.do("write", tag="w", desc=desc, imm=imm, **how)
                ends = [
                    child.do("wait", tag=tag, timeout_s=250)
                    for child, tag in ((a, "w"), (b, f"imm{imm}"))
                ]
                run.clear()

                assert ["done", "done"] == ends, fault
                assert b.do("check", **how), fault
                assert 0 == b.do("count", imm=imm), fault
                assert imm * IMMS == run.total()["imms_landed"], fault
                assert 0 == run.total()["overruns"], fault
                if fault.startswith("rnr"):
                    assert run.total()["rnrs"] > IMMS // 100
        finally:
            for child in children:
                child.end()


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=["one host", "two hosts"])
@pytest.mark.parametrize("provider", WAYS)
def test_two_processes_move_every_byte(run, provider, hosts):
    """Rows of two processes over two NICs each: bytes, counts, and whom they went through."""
    npages = 1024
    children = [Child(run.environment(host)) for host in hosts]
    try:
        a, b = children
        for child, name in ((a, "a"), (b, "b")):
            child.address = child.do("open", provider=provider, nics=2, name=name)
        a.do("reg", nbytes=4 * MiB, seed=5)
        desc = b.do("reg", nbytes=4 * MiB)
        ends = transfer(a, b, desc, page_bytes=4 * KiB, npages=npages, seed=5, imm=7)

        assert ("done", "done") == ends
        assert b.do("check", page_bytes=4 * KiB, npages=npages, seed=5)
        assert 0 == b.do("count", imm=7), "more immediates than pages"
    finally:
        for child in children:
            child.end()
    rows = [call for call in run.calls() if call.get("op") == "write_imm"]
    total = run.total()

    assert {"4096"} == {call["len"] for call in rows}
    assert [npages // 2] * 2 == [
        sum(call["to"] == str(32 * hosts[1] + nic) for call in rows) for nic in range(2)
    ]
    assert npages == total["imms_landed"]
    assert 0 == total["overruns"]
