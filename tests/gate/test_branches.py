"""The list of branches that the oracle's runs never take: it says why, and may only shrink."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gate.branches import LIST, NEW, listed


def test_each_branch_that_is_never_taken_has_its_reason() -> None:
    """A list without reasons is a list of what nobody has looked at."""
    assert LIST.exists()
    assert NEW not in listed()


@pytest.mark.long
def test_no_other_branch_is_never_taken() -> None:
    """A search that gets worse at meeting what the engine can do would go on to be green."""
    command = [sys.executable, "-m", "tests.gate.branches"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert 0 == done.returncode, done.stdout + done.stderr
