"""scripts/gpu_check whole, as a program of its own: the first command where a GPU is lent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def gpu_check(*args, **settings):
    """Run it on fake GPUs; its status, and what it printed."""
    pairs = {"late_us": 20, **settings}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/gpu_check.py", "--launches=100", *args],
        env=os.environ | {"TEP_FAKE_CUDA": " ".join(f"{k}={v}" for k, v in pairs.items())},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_all_of_it_holds_on_the_fake_driver(tmp_path):
    """Its own mistakes must be gone before it meets a GPU that is lent by the hour."""
    path = tmp_path / "gpu.json"
    status, out = gpu_check("cuda:1", "--json", str(path))

    assert 0 == status, out
    assert "cuda:1: 0 checks failed, 9 held" in out
    assert "flag: seen by a spinning kernel" in out
    assert "pointers: device, pinned, managed and pageable" in out
    assert "copies: local 4 MiB, bytes equal" in out
    figures = json.loads(path.read_text())["figures"]
    for what in ("from launch to callback, us", "from store to callback and back, us"):
        assert {"avg", "min", "p50", "p90", "p99", "p999"} == figures[what].keys()
        assert figures[what]["min"] > 0


def test_it_finds_what_is_wrong():
    """A check that cannot fail checks nothing."""
    status, out = gpu_check("--no-kernels", lose_copies=1, no_managed=1, empty_dmabuf=1)

    assert 1 == status
    assert "FAILED  pointers: AssertionError" in out
    assert "FAILED  copies: AssertionError: local: bytes differ" in out
    assert "FAILED  dmabufs: BadRequest" in out


def test_it_finds_kernels_that_nobody_answers():
    """A watched word that is not seen, and a flag that is never set, must end in words."""
    status, out = gpu_check(deaf=1)

    assert 1 == status
    assert "FAILED  answered: AssertionError: the kernel gave up: nobody answered" in out
    assert "FAILED  flag: AssertionError: the kernel gave up: it did not see the flag" in out
    assert "ok      watched" in out


def test_it_says_that_there_is_no_gpu():
    """Its status differs from a failure's: CI may pass over it, and says why."""
    status, out = gpu_check("cuda:7")

    assert 2 == status
    assert "no GPU: cuda:7" in out
