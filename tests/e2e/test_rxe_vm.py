"""Real libibverbs without a NIC: the guest itself, and all of tests/verbs run inside it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.here import need_guest
from tests.support.vm.guest import TIMED_OUT, Options, run_in_guest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", autouse=True)
def guest():
    need_guest()


@pytest.mark.long  # a boot more
def test_status_output_and_logs_come_back():
    """Whoever runs a test in the guest has to see how it ended, and why."""
    found = run_in_guest(["sh", "-c", "echo hello; exit 7"], Options(nics=1, timeout_s=60))

    assert 7 == found.status
    assert "hello\n" == found.output
    assert found.kept is not None
    assert {"log", "console", "job.sh"} <= {file.name for file in found.kept.iterdir()}


@pytest.mark.long  # a boot more
def test_a_hanging_command_is_ended():
    """A hang in the guest must not hang the host's tests."""
    found = run_in_guest(["sleep", "1000"], Options(nics=1, timeout_s=3))

    assert TIMED_OUT == found.status


def test_verbs_in_the_guest():
    """The contract over four NICs, and the verbs tests, on the real library.

    What they are is in tests/verbs; here it counts that they ran, and that all of them passed.
    The contract over one and two NICs as well takes the emulated processor twice as long: it is
    for long runs.
    """
    long = bool(os.environ.get("TEP_LONG"))
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(root)]
    # The guest starts cold and slow: leave out what these tests do not use.
    command += ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:hypothesispytest"]
    command += ["--confcutdir", str(root / "tests/verbs"), str(root / "tests/verbs")]
    command += [] if long else ["-m", "not long"]
    found = run_in_guest(command, Options(nics=8, timeout_s=900))
    # Failures would stand before what passed, and errors behind it.
    passed = re.search(r"^(\d+) passed(?!.* error).* in ", found.output, re.MULTILINE)

    assert 0 == found.status, f"logs in {found.kept}:\n{found.output[-6000:]}"
    assert passed is not None, found.output[-500:]
    assert int(passed[1]) > (200 if long else 100), found.output[-500:]
