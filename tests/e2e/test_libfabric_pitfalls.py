"""What libfabric does to a process, met in one of its own: signals, shared memory, sleep, fork."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tep
from tep.backends import libfabric
from tep.backends.base import Access
from tep.backends.ffi import libfabric as fi
from tep.backends.libfabric.software import seats
from tep.backends.libfabric.software.process import sweep_shm
from tep.base.errors import BackendUnavailable, ClosedError, FabricError, UsageError, WaitTimeout
from tep.memory.source import adapt
from tests.support.children import wait_until
from tests.support.descriptors import open_descriptors
from tests.support.here import need_libfabric

OPEN = """
import os, signal, sys
from tep.backends import libfabric
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
opened = libfabric.open_domains(provider={provider!r})
"""


@pytest.fixture(autouse=True)
def _here():
    need_libfabric()


def run(body, provider="shm", *, before=(), **options):
    """Run a program in a process of its own."""
    return subprocess.run(
        [*before, sys.executable, "-c", OPEN.format(provider=provider) + body],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def shm_files(pid):
    """What a process has in /dev/shm."""
    folder = Path("/dev/shm")  # noqa: S108  # POSIX's own
    return [path.name for path in folder.glob(f"{pid}:*")]


@pytest.mark.parametrize("provider", ["shm", "tcp"])
def test_ctrl_c_is_still_an_exception(provider):
    """The shm provider takes SIGINT over: Python's own handler would never see it again."""
    ended = run(
        """
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(10**7): pass
except KeyboardInterrupt:
    print("interrupted")
for domain in opened.domains: domain.close()
""",
        provider,
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
        before=(),
        env=os.environ | {"PYTHONFAULTHANDLER": "1"},
    )
    sweep_shm()

    assert "True\n" == ended.stdout
    assert -signal.SIGSEGV == ended.returncode
    assert "Fatal Python error: Segmentation fault" in ended.stderr


def test_an_exit_without_close_leaves_nothing_in_shared_memory():
    """Thirteen MiB an endpoint, for ever, after each script that forgot to close."""
    ended = run("print(os.getpid())")

    assert 0 == ended.returncode, ended.stderr
    assert [] == shm_files(int(ended.stdout))


def test_what_a_killed_process_left_is_swept():
    """A killed process cannot clean up; the next one does, and leaves the living alone."""
    ended = run("print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    dead = int(ended.stdout)
    assert [] != shm_files(dead), "the file that there is to sweep"
    mine = libfabric.open_domains(provider="shm")

    assert [] == shm_files(dead)
    assert [] != shm_files(os.getpid())
    for domain in mine.domains:
        domain.close()
    assert [] == shm_files(os.getpid())


def test_a_full_shared_memory_is_an_error_and_not_a_bus_error():
    """Without a check the first touch of a page that is not there ends the process."""
    unshare, mount = shutil.which("unshare"), shutil.which("mount")
    if os.geteuid() != 0 or unshare is None or mount is None:
        pytest.skip("needs root, to mount a small /dev/shm of its own")
    script = f'{mount} -t tmpfs -o size=40m tmpfs /dev/shm && exec "$0" "$@"'
    body = """
try:
    more = [libfabric.open_domains(provider="shm") for _ in range(9)]
except Exception as error:
    print(type(error).__name__, error)
"""
    ended = run(body, before=(unshare, "-m", shutil.which("sh"), "-c", script))
    if ended.returncode == 1 and "mount" in ended.stderr:
        pytest.skip("this machine does not let root mount")

    assert 0 == ended.returncode, ended.stderr
    assert re.match(r"(BackendUnavailable|FabricError) .*MiB", ended.stdout), ended.stdout


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
        ({"provider": "ucx"}, "tep drives: tcp, tcp;ofi_rxm, shm, efa, efa-direct"),
        ({"nics": 65}, "1 to 64 are possible"),
        ({"nics": "127.0.0.1"}, "give a list"),
        ({"nics": []}, "give a list"),
        ({"peer_timeout_s": 0}, "more than 0"),
        ({"window_rows": 0}, "rows are 1 to 65536"),
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


def test_shared_memory_meets_no_more_peers_than_its_table_holds(monkeypatch):
    """The provider gives a place in its table again without clearing it: the 257th peer crashed."""
    monkeypatch.setattr(seats, "SEATS", 4)  # of peers of this process, which take two each
    source = np.zeros(64, np.uint8)
    with tep.TransferEngine.open("libfabric", provider="shm", name="lasting") as here:
        mr, _ = here.reg_mr(source)
        codes = []
        for _ in range(3):
            with tep.TransferEngine.open("libfabric", provider="shm", name="passing") as there:
                _, desc = there.reg_mr(np.zeros(64, np.uint8))
                try:
                    here.submit_single_write(64, (mr, 0), (desc, 0), 1).wait(20)
                    codes.append("done")
                except FabricError as error:
                    codes.append(error.code)
                    text = str(error)

    assert ["done", "done", "UNREACHABLE"] == codes
    assert "has no more places" in text
    assert "open that engine anew" in text


def test_a_place_in_a_table_belongs_to_one_name():
    """All who want a seat must agree on who has one; who asks twice must not take two."""
    name = f"{os.getpid()}:{os.geteuid()}:4711"
    assert seats.take_seat(name, "a"), "there is no list: nothing is known of that endpoint"
    seats.open_seats(name)
    try:
        taken = [seats.take_seat(name, f"peer{k // 2}") for k in range(2 * seats.SEATS + 4)]
        assert [True] * 2 * seats.SEATS + [False] * 4 == taken
        assert seats.take_seat(name, "peer0")
        seats.open_seats(name)
        assert seats.take_seat(name, "another"), "a new endpoint of the same name has a new table"
    finally:
        seats.close_seats(name)
    assert [] == shm_files(os.getpid())


@pytest.mark.parametrize("nbytes", [64, 500, 5000, 100_000])
def test_two_engines_of_a_process_write_both_ways_by_shared_memory(nbytes):
    """The second direction was a segmentation fault in libfabric 2.5."""
    done = run(
        f"""
import numpy as np, tep
opened.domains[0].close()
a, b = (tep.TransferEngine.open("libfabric", provider="shm", name=x) for x in "ab")
source, target = np.full({nbytes}, 7, np.uint8), np.zeros({nbytes}, np.uint8)
for here, there, imm in ((a, b, 1), (b, a, 2), (a, b, 3), (a, a, 4)):
    target[:] = 0
    mr, _ = here.reg_mr(source)
    _, desc = there.reg_mr(target)
    here.submit_single_write({nbytes}, (mr, 0), (desc, 0), imm).wait(20)
    there.expect_imm_count(imm, 1).wait(20)
    assert (target == 7).all(), (here, there)
a.close()
b.close()
print("done")
"""
    )

    assert (0, "done") == (done.returncode, done.stdout.strip()), done.stderr[-2000:]


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_NOFILE"])
def test_limits_of_the_process_are_an_error_and_not_a_segmentation_fault(limit):
    """The provider does not look whether it could make its file in /dev/shm.

    And without descriptors nobody can ask which processes live: the files of living ones stay.
    """
    with tep.TransferEngine.open("libfabric", provider="shm", name="living"):
        before = sorted(shm_files(os.getpid()))
        done = run(
            f"""
import os, resource
from tep.base.errors import TepError
small = {{"RLIMIT_FSIZE": 65536, "RLIMIT_NOFILE": len(os.listdir("/proc/self/fd"))}}
_, hard = resource.getrlimit(resource.{limit})
resource.setrlimit(resource.{limit}, (small["{limit}"], hard))
try:
    libfabric.open_domains(provider="shm")
except TepError as error:
    print(error)
"""
        )
        assert before
        assert before == sorted(shm_files(os.getpid()))

    assert 0 == done.returncode, done.stderr[-2000:]
    assert "ulimit" in done.stdout or "Too many open files" in done.stdout, done.stdout


PASSING = """
import os, sys
import numpy as np, tep
engine = tep.TransferEngine.open("libfabric", provider=sys.argv[1], name="passing" + sys.argv[3])
mr, mine = engine.reg_mr(np.ones(64, np.uint8))
theirs = tep.MrDesc.from_bytes(bytes.fromhex(sys.argv[2]))
engine.submit_single_write(64, (mr, 0), (theirs, 0), 7).wait(20)
print(mine.to_bytes().hex(), flush=True)
engine.expect_imm_count(8, 1).wait(20)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("provider", ["shm", "tcp"])
def test_killed_peers_leave_nothing_behind(provider):
    """A server outlives thousands of clients: a socket, or 13 MiB, of each would end it."""

    def meet(number):
        with subprocess.Popen(
            [sys.executable, "-c", PASSING, provider, desc.to_bytes().hex(), str(number)],
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            theirs = tep.MrDesc.from_bytes(bytes.fromhex(child.stdout.readline().strip()))
            engine.submit_single_write(64, (mr, 0), (theirs, 0), 8).wait(20)
        engine.remove_peer(theirs.addr).wait(20)

    def held():
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        return open_descriptors(), maps.count("/dev/shm/")  # noqa: S108  # POSIX's own

    with tep.TransferEngine.open("libfabric", provider=provider, name="lasting") as engine:
        mr, desc = engine.reg_mr(np.zeros(64, np.uint8))
        before = held()
        for number in range(3):
            meet(number)
        wait_until(lambda: held() <= before, f"{before} again")
    sweep_shm()


def test_rows_that_shared_memory_loses_are_an_error_in_time():
    """A peer that lives and polls, and returns no rows: waiting for it is waiting for ever."""
    source = np.zeros(64, np.uint8)
    options = {"provider": "shm", "peer_timeout_s": 0.5}
    with (
        tep.TransferEngine.open("libfabric", **options) as here,
        tep.TransferEngine.open("libfabric", **options) as there,
    ):
        mr, _ = here.reg_mr(source)
        _, desc = there.reg_mr(np.zeros(64, np.uint8))
        here.submit_single_write(64, (mr, 0), (desc, 0), 1).wait(20)
        main = here._domains[0]._main
        writemsg, main.writemsg = main.writemsg, lambda *_: 0  # taken, and never heard of again
        lost = here.submit_single_write(64, (mr, 0), (desc, 0), 2)
        with pytest.raises(FabricError, match="PROVIDER.*whether the row landed is unknown"):
            lost.wait(20)
        main.writemsg = writemsg

        def again():
            try:
                here.submit_single_write(64, (mr, 0), (desc, 0), 3).wait(20)
            except FabricError:
                return False
            return True

        start_s = time.monotonic()
        while not again():  # for a second it is not asked again
            assert time.monotonic() - start_s < 20, "waited 20 s for the peer to be reached again"
        here.deregister(mr)


def test_a_failed_insert_is_an_error_and_never_an_address():
    """To post to what a failed insert leaves, FI_ADDR_UNSPEC, is a segmentation fault on tcp."""
    domain = libfabric.open_domains().domains[0]
    try:
        for answer in (0, -22, -12):  # it returns how many it took, or an error
            domain._nic._insert = lambda *_, answer=answer: answer
            with pytest.raises(FabricError, match=r"fi_av_insert"):
                domain._nic.insert(domain._book.raw)
    finally:
        domain.close()


def test_a_nic_is_bound_to_the_address_that_names_it():
    """Without a node libfabric binds to the first interface, and all NICs are one."""
    opened = libfabric.open_domains(nics=["127.0.0.3", "127.0.0.2"])
    try:
        assert [b"\x7f\0\0\3", b"\x7f\0\0\2"] == [d._book.raw[4:8] for d in opened.domains]
        assert ["127.0.0.3", "127.0.0.2"] == [d.caps.nic for d in opened.domains]
    finally:
        for domain in opened.domains:
            domain.close()


def test_rows_on_tcp_wait_for_the_target():
    """Without FI_DELIVERY_COMPLETE tcp calls rows done that never arrive, and loses the next."""
    for options, wanted in (({}, True), ({"delivery_complete": False}, False)):
        domain = libfabric.open_domains(**options).domains[0]
        info = domain._nic.info.contents.tx_attr.contents.op_flags
        try:
            assert wanted == bool(domain._slots.flags & fi.FI_DELIVERY_COMPLETE)
            assert wanted == bool(info & fi.FI_DELIVERY_COMPLETE)
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
        steps = engine._worker.steps
        with pytest.raises(WaitTimeout):
            never.wait(0.5)

        assert engine._worker.steps - steps <= 2


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
