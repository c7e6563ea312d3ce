"""The fences of the backend `efa` by columns, by processor."""

from __future__ import annotations

import ctypes
import platform

import pytest

from tep.backends.efa import ways
from tep.base.errors import BackendUnavailable


class Nic:
    """A NIC that notes its posting sessions."""

    qp = 7

    def __init__(self):
        self.calls = []

    def session_calls(self):
        return tuple(
            lambda qp, name=name: self.calls.append((name, qp)) for name in ("start", "abort")
        )


def test_aarch64_needs_no_library_for_its_fences(monkeypatch):
    """libatomic.so.1 is not on every image."""

    def refuse(name, *_, **__):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    nic = Nic()
    store, load, name = ways.fences(nic)
    store()
    load()

    assert [("start", 7), ("abort", 7)] == nic.calls
    assert "posting session" in name


def test_an_unknown_processor_is_refused(monkeypatch):
    """A wrong fence loses rows, one in a million."""
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(BackendUnavailable, match="no store fence is known for riscv64"):
        ways.fences(Nic())
