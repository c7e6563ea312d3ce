"""scripts/gpu_check whole, as a program of its own: the first command where a GPU is lent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import gpu_check as script
from tests.support.fake_cuda import BINDINGS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def gpu_check(*args, command=(sys.executable, ROOT / "scripts/gpu_check.py"), env=None, **settings):
    """Run it on fake GPUs; its status, and what it printed."""
    pairs = {"late_us": 20, **settings}
    done = subprocess.run(
        [*command, *args],
        cwd=ROOT,
        env=os.environ
        | {"TEP_FAKE_CUDA": " ".join(f"{k}={v}" for k, v in pairs.items())}
        | (env or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_all_of_it_holds_on_the_fake_driver(tmp_path):
    """Its own mistakes must be gone before it meets a GPU that is lent by the hour."""
    path = tmp_path / "gpu.json"
    status, out = gpu_check("cuda:1", "--launches=100", "--json", str(path))

    assert 0 == status, out
    assert "cuda:1: 0 checks failed, 10 held" in out
    assert "mappings: memory of cuMemCreate exported, 2101248 bytes long; flags" in out
    assert "of the context 0x80" in out
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
    status, out = gpu_check("--launches=100", deaf=1)

    assert 1 == status
    assert "FAILED  answered: AssertionError: the kernel gave up: nobody answered" in out
    assert "FAILED  flag: AssertionError: the kernel gave up: it did not see the flag" in out
    assert "ok      watched" in out


@pytest.mark.parametrize("version", [13000, 12080])
def test_the_command_takes_the_generation_of_the_driver(version):
    """A kernel that NVRTC 13 compiles does not load on a driver of CUDA 12."""
    if not (ROOT / ".venv/tep-setup.stamp").is_file():
        pytest.skip("not here: .venv, which scripts/setup makes; the command would install it")
    major = version // 1000 if BINDINGS[12].is_dir() else 13
    command, env = [ROOT / "scripts/gpu_check"], {"PYTHONPATH": ""}  # it finds cuda-python itself
    status, out = gpu_check("--launches=20", command=command, env=env, version=version)

    assert 0 == status, out
    assert f"facts: cuda-python {major}." in out
    assert f"driver's CUDA {version / 1000:.2f}," in out


WITHOUT_NVRTC = """
import sys
from scripts import gpu_check
class NoLibrary:
    def nvrtcCreateProgram(*args):
        raise RuntimeError('Failure finding "libnvrtc.so"')
real = gpu_check.import_module
gpu_check.import_module = lambda name: NoLibrary() if name.endswith("nvrtc") else real(name)
sys.exit(gpu_check.main([]))
"""


def test_the_checks_without_kernels_run_where_nvrtc_is_missing():
    """It is no part of cuda-python: a traceback would end a report that has hardly begun."""
    status, out = gpu_check(command=[sys.executable, "-c", WITHOUT_NVRTC])

    assert 1 == status
    assert "3 checks failed, 7 held" in out
    for name in ("watched", "answered", "flag"):
        assert f"FAILED  {name}: BackendUnavailable: NVRTC is not here: pip install" in out
    assert "Traceback" not in out


def test_an_error_of_any_kind_ends_one_check_only(fake, monkeypatch, capsys):
    """An exception of cuda-python itself is no error of tep's."""

    def broken(self):
        raise KeyError("a mistake in one check")

    monkeypatch.setattr(script.Check, "pointers", broken)
    status = script.main(["--no-kernels"])
    out = capsys.readouterr().out

    assert 1 == status
    assert "FAILED  broken: KeyError: 'a mistake in one check'" in out
    assert "1 checks failed, 6 held" in out


def test_it_says_that_there_is_no_gpu():
    """Its status differs from a failure's: CI may pass over it, and says why."""
    status, out = gpu_check("cuda:7")

    assert 2 == status
    assert "no GPU: cuda:7" in out


def test_a_driver_of_cuda_12_fails_one_check_and_says_what_helps():
    """It has no way to have copies to mapped memory wait; all else of it is the same."""
    status, out = gpu_check("--no-kernels", version=12000)

    assert 1 == status
    assert "1 checks failed, 6 held" in out
    assert "FAILED  mappings: FabricError: copies to memory of cuMemCreate" in out
    assert "install NVIDIA's driver 530" in out
