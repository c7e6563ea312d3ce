"""GPU memory where there is no GPU: what is said then, and what goes on without one.

What needs a driver is in tests/cuda, on one of the project's own.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import subprocess
import sys

import pytest

import tep
from tep import BackendUnavailable, FabricError, TransferEngine
from tests.support.inside import worker_of

CUDA = importlib.import_module("tep.host.cuda")


def test_without_cuda_python_the_error_names_the_extra(monkeypatch):
    """`import tep` and everything on the host must work without it."""

    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(CUDA.importlib, "import_module", missing)
    with pytest.raises(BackendUnavailable, match=r"pip install 'tep-engine\[cuda\]'"):
        CUDA.driver.__wrapped__()


@pytest.mark.slow
def test_without_a_driver_the_error_says_so(tmp_path):
    """cuda-python installs anywhere; libcuda.so.1 comes with NVIDIA's driver only."""
    (tmp_path / "libcuda.so.1").write_text("no library")
    code = (
        "import tep, tep.host.cuda as d\n"
        "try: d.driver()\n"
        "except tep.BackendUnavailable as error: print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert "the CUDA driver cannot be started" in said
    assert "libcuda.so.1) with a GPU" in said


def test_pageable_words_say_so():
    """A kernel that writes there ends its process; and the engine works without."""
    with TransferEngine.open("loopback") as engine:
        word = engine.alloc_uvm_watcher(lambda *_: None)
        with pytest.raises(BackendUnavailable, match="without device='cuda:N'"):
            word.device_ptr  # noqa: B018  # it raises
        assert "pageable memory, written by the host only" in engine.explain()


def test_a_failed_pinning_leaves_pageable_words_and_the_reason():
    """memlock or a driver may refuse; the host's words must go on."""

    def refuse(memory):
        raise FabricError("cuMemHostRegister: CUDA_ERROR_NOT_PERMITTED", code="PROVIDER")

    with TransferEngine.open("loopback") as engine:
        worker_of(engine).watch.pin = refuse
        word = engine.alloc_uvm_watcher(lambda *_: None)
        with pytest.raises(BackendUnavailable, match="NOT_PERMITTED"):
            word.device_ptr  # noqa: B018  # it raises


def test_an_arena_that_an_engine_holds_outlives_its_close():
    """A NIC may still write there."""
    with TransferEngine.open("loopback") as engine:
        arena = tep.alloc(64)
        engine.reg_mr(arena)
        start = arena.ptr
        arena.close()
        gc.collect()
        assert bytes(64) == ctypes.string_at(start, 64)
