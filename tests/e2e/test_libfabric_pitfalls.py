"""Side effects of libfabric on a process, each test in its own: signals, sleep, fork."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import tep
from tep.backends import libfabric
from tep.backends.base import Access
from tep.backends.ffi import libfabric as fi
from tep.backends.libfabric.rules import parse
from tep.base.errors import BackendUnavailable, ClosedError, FabricError, UsageError, WaitTimeout
from tep.memory.source import adapt
from tests.support.children import wait_until
from tests.support.descriptors import open_descriptors
from tests.support.here import need_libfabric
from tests.support.inside import worker_of

OPEN = """
import os, signal, sys
from tep.backends import libfabric
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
opened = libfabric.open_domains()
"""


@pytest.fixture(autouse=True)
def _here():
    need_libfabric()


def run(body, **options):
    """Run a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", OPEN + body],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def test_ctrl_c_is_still_an_exception():
    """Debian's libfabric takes SIGINT over: Python's own handler would never see it again."""
    ended = run(
        """
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(10**7): pass
except KeyboardInterrupt:
    print("interrupted")
for domain in opened.domains: domain.close()
"""
    )

    assert ("interrupted\n", 0) == (ended.stdout, ended.returncode), ended.stderr


def test_the_users_handlers_stay_in_place():
    """faulthandler's handlers are C functions, which the signal module does not see."""
    ended = run(
        """
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGSEGV)
""",
        env=os.environ | {"PYTHONFAULTHANDLER": "1"},
    )

    assert "True\n" == ended.stdout
    assert -signal.SIGSEGV == ended.returncode
    assert "Fatal Python error: Segmentation fault" in ended.stderr


def test_a_filter_in_the_environment_is_named(monkeypatch):
    """FI_PROVIDER hides providers; 'no data available' alone sends people to reinstall."""
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tep.backends import libfabric; libfabric.open_domains(provider='tcp')",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"FI_PROVIDER": "udp"},
    )

    assert "BackendUnavailable" in ended.stderr
    assert "FI_PROVIDER='udp' filters providers" in ended.stderr


def test_bad_options_say_what_there_is():
    """An error that lists the choices is the manual that people read."""
    for options, message in (
        ({"provider": "ucx"}, "tep drives: tcp, efa"),
        ({"nics": 65}, "1 to 64 are possible"),
        ({"nics": "127.0.0.1"}, "give a list"),
        ({"nics": []}, "give a list"),
        ({"peer_timeout_s": 0}, "more than 0"),
        ({"cuda": True}, "for EFA, not for 'tcp'"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            libfabric.open_domains(**options)
    with pytest.raises(BackendUnavailable, match=r"192\.0\.2\.1"):
        libfabric.open_domains(nics=["192.0.2.1"])


def test_unmapped_memory_is_refused_at_once():
    """Software providers register anything, and crash when the first row arrives."""
    opened = libfabric.open_domains()
    with tep.TransferEngine(
        opened.domains, driver=tep.InlineDriver(), name=opened.name, epoch=opened.epoch
    ) as engine:
        with pytest.raises(FabricError, match="not all mapped in this process"):
            engine.reg_mr((1 << 20, 4096, "cpu"))
        buffer = bytearray(8192)
        engine.reg_mr(buffer)


PASSING = """
import os, sys
import numpy as np, tep
engine = tep.TransferEngine.open("libfabric", name="passing" + sys.argv[2])
mr, mine = engine.reg_mr(np.ones(64, np.uint8))
theirs = tep.MrDesc.from_bytes(bytes.fromhex(sys.argv[1]))
engine.submit_single_write(64, (mr, 0), (theirs, 0), 7).wait(20)
print(mine.to_bytes().hex(), flush=True)
engine.expect_imm_count(8, 1).wait(20)
os.kill(os.getpid(), 9)
"""


def test_killed_peers_leave_nothing_behind():
    """A server outlives thousands of clients: a socket of each would end it."""

    def meet(number):
        with subprocess.Popen(
            [sys.executable, "-c", PASSING, desc.to_bytes().hex(), str(number)],
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            theirs = tep.MrDesc.from_bytes(bytes.fromhex(child.stdout.readline().strip()))
            engine.submit_single_write(64, (mr, 0), (theirs, 0), 8).wait(20)
        engine.remove_peer(theirs.addr).wait(20)

    with tep.TransferEngine.open("libfabric", name="lasting") as engine:
        mr, desc = engine.reg_mr(np.zeros(64, np.uint8))
        before = open_descriptors()
        for number in range(3):
            meet(number)
        wait_until(lambda: open_descriptors() <= before, f"{before} again")


def test_a_failed_insert_is_an_error_and_never_an_address():
    """To post to what a failed insert leaves, FI_ADDR_UNSPEC, is a segmentation fault on tcp."""
    domain = libfabric.open_domains().domains[0]
    try:
        for answer in (0, -22, -12):  # it returns how many it took, or an error
            domain.nic._insert = lambda *_, answer=answer: answer
            with pytest.raises(FabricError, match=r"fi_av_insert"):
                domain.nic.insert(parse(domain.address, "tcp").raw)
    finally:
        domain.close()


def test_a_nic_is_bound_to_the_address_that_names_it():
    """Without a node libfabric binds to the first interface, and all NICs are one."""
    opened = libfabric.open_domains(nics=["127.0.0.3", "127.0.0.2"])
    try:
        assert [b"\x7f\0\0\3", b"\x7f\0\0\2"] == [
            parse(d.address, "tcp").raw[4:8] for d in opened.domains
        ]
        assert ["127.0.0.3", "127.0.0.2"] == [d.caps.nic for d in opened.domains]
    finally:
        for domain in opened.domains:
            domain.close()


def test_rows_on_tcp_wait_for_the_target():
    """Without FI_DELIVERY_COMPLETE tcp calls rows done that never arrive, and loses the next."""
    domain = libfabric.open_domains().domains[0]
    info = domain.nic.info.contents.tx_attr.contents.op_flags
    try:
        assert domain._slots.flags & fi.FI_DELIVERY_COMPLETE
        assert info & fi.FI_DELIVERY_COMPLETE
    finally:
        domain.close()


def test_a_key_is_never_given_twice():
    """A key of an earlier registration, or incarnation, must open nothing of a later one."""
    keys = set()
    buffer = adapt(bytearray(64))
    for _ in range(3):
        domain = libfabric.open_domains().domains[0]
        try:
            for _ in range(4):
                key = domain.register(buffer, Access.SOURCE_AND_TARGET)
                domain.deregister(key)
                assert key.rkey not in keys
                assert key.rkey != key.lkey
                keys.add(key.rkey)
        finally:
            domain.close()


def test_an_idle_engine_costs_nothing():
    """A worker that polls while nothing is under way takes a core from the user."""
    opened = libfabric.open_domains(nics=2)
    with tep.TransferEngine(
        opened.domains, driver=tep.ThreadDriver("idle"), name=opened.name, epoch=opened.epoch
    ) as engine:
        never = engine.expect_imm_count(1, 1)
        with pytest.raises(WaitTimeout):
            never.wait(0.05)  # whatever opening has left to do
        steps = worker_of(engine).steps
        with pytest.raises(WaitTimeout):
            never.wait(0.5)

        assert worker_of(engine).steps - steps <= 2


def test_a_forked_child_may_open_its_own():
    """A data loader's worker is a process like any other; the parent's domains are not its own."""
    opened = libfabric.open_domains()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                opened.domains[0].connect(opened.domains[0].address)
            except ClosedError:
                for domain in libfabric.open_domains().domains:
                    domain.close()
                code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    for domain in opened.domains:
        domain.close()

    assert 0 == status
