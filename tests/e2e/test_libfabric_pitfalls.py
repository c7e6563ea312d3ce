"""What libfabric does to a process, met in one of its own: signals, shared memory, sleep, fork."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tep
from tep.backends import libfabric
from tep.backends.libfabric.process import sweep_shm
from tep.errors import BackendUnavailable, ClosedError, FabricError, UsageError, WaitTimeout

OPEN = """
import os, signal, sys
from tep.backends import libfabric
opened = libfabric.open_domains(provider={provider!r})
"""


@pytest.fixture(autouse=True)
def _here():
    try:
        libfabric.probe()
    except BackendUnavailable as error:
        pytest.skip(f"not here: {error}")


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


@pytest.mark.parametrize("provider", ["tcp", "shm"])
def test_the_verification_script_runs_where_there_is_no_efa(provider):
    """A script that nobody can try before the instance is paid for is wrong on the instance."""
    script = Path(__file__).parents[2] / "scripts" / "verify_efa.py"
    ended = subprocess.run(
        [sys.executable, str(script), provider],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert 0 == ended.returncode, ended.stdout + ended.stderr
    assert f"{provider}: all checks held" == ended.stdout.splitlines()[-1]
