"""tep.cuda on the real cuda-python, 12 and 13, over the fake driver (tests/cuda_fake)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fake_cuda
from tests.support.here import need_fake_cuda

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("major", [13, 12])
def test_gpus_under_cuda_python(major):
    """All of tests/cuda, in a process that the loader gives the fake driver to."""
    folder = fake_cuda.BINDINGS[major]
    if folder is not None and not folder.is_dir():
        pytest.skip(f"not here: cuda-python {major}, which scripts/setup could not install")
    env = os.environ | need_fake_cuda(major)
    shown = "import cuda.bindings; print(cuda.bindings.__version__)"
    version = subprocess.run(
        [sys.executable, "-c", shown], env=env, capture_output=True, text=True, check=True
    ).stdout
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "--color=no", "--tb=short"]
    # scripts/gpu_check takes most of the time, and with 13 it is tried on a driver of CUDA 12, too.
    whole = os.environ.get("TEP_PROFILE") != "fast" and (major == 13 or "TEP_LONG" in os.environ)
    command += [] if whole else ["-m", "not slow"]
    done = subprocess.run(
        [*command, "tests/cuda"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    passed = re.search(r"(\d+) passed", done.stdout)

    assert version.startswith(f"{major}.")
    assert 0 == done.returncode, done.stdout[-6000:] + done.stderr[-2000:]
    assert passed is not None, done.stdout[-500:]
    assert int(passed[1]) >= 35, done.stdout[-500:]
    skips = re.findall(r"^SKIPPED .*", done.stdout, re.MULTILINE)
    assert ("skipped" in done.stdout) == bool(skips), done.stdout[-500:]
    known = re.compile("not here: (no <infiniband/|.venv, which scripts/setup makes)")
    assert all(known.search(line) for line in skips), skips
