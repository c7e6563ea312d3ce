"""The same tests on the other libfabric of this machine: the system's, beside the wheel's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OTHER = os.environ | {"TEP_LIBFABRIC": "libfabric.so.1"}
"""The name alone: the system's loader finds it (Debian's libfabric1 is 1.17)."""

ASK = "from tep.backends.ffi.libfabric import load; print(*load().version)"


def version(env):
    """Major and minor of the libfabric that this environment leads to; None = there is none."""
    asked = subprocess.run(
        [sys.executable, "-c", ASK],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        timeout=60,
    )
    return tuple(map(int, asked.stdout.split())) if asked.returncode == 0 else None


@pytest.fixture(scope="module")
def other():
    """The version of the other one; skip where there is only one."""
    found, usual = version(OTHER), version(os.environ)
    if found is None:
        pytest.skip("no system-wide libfabric here (Debian: libfabric1)")
    if found == usual:
        pytest.skip(f"the usual libfabric is the system's: {found}")
    return found


def passes(*arguments):
    """Run pytest on the other libfabric."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=OTHER, cwd=ROOT, timeout=300
    )

    assert 0 == done.returncode, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


TCP = "(TestTcp and not Narrow)"


@pytest.mark.parametrize(
    "clauses",
    [
        pytest.param("c03 or c08 or c09 or c11 or c17 or c31", marks=pytest.mark.slow),
        pytest.param("c0 or c1 or c2 or c3", marks=pytest.mark.long),
    ],
)
def test_the_contract_holds_on_the_other_release(other, clauses):
    """Releases differ in flags, lengths and what a dead peer looks like; 1.17 says OK on lost rows.

    In every run the clauses where they do; in the long one all of them.
    """
    passes("tests/conformance/test_libfabric.py", "-k", f"{TCP} and ({clauses})")


@pytest.mark.slow
def test_signals_and_dead_peers_on_the_other_release(other):
    """Debian's build takes six signals over as soon as it is loaded, and errors differ."""
    passes(
        "tests/e2e/test_libfabric_pitfalls.py",
        "tests/e2e/test_libfabric_two_processes.py",
        "-k",
        "ctrl_c or handlers or killed_peer",
    )
