"""Devices that the backend `efa` does not take, and what it says of them; without one."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from tep.backends import efa
from tep.backends.efa.device import Nic, Sizes
from tep.base.errors import BackendUnavailable, FabricError


@pytest.mark.parametrize("caps", [0, 1, 2, 7])
def test_a_device_without_rdma_write_is_refused_with_the_way_out(caps):
    """p4d has none: what is posted there would fail row by row."""
    lib = mock.MagicMock()
    lib.open_device.return_value = 1, "rdmap0s6"
    lib.is_efa.return_value = SimpleNamespace(device_caps=caps)
    with pytest.raises(BackendUnavailable, match="rdmap0s6: this EFA device has no RDMA write"):
        Nic(lib, "rdmap0s6", Sizes(64, 64, 128))


def test_a_device_that_cannot_be_opened_is_named(monkeypatch):
    """`auto` tries the next backend then; an error of the fabric would end the program."""

    def refuse(*_):
        raise FabricError("ibv_open_device failed", code="PROVIDER")

    monkeypatch.setattr(efa, "Nic", refuse)
    with pytest.raises(BackendUnavailable, match="NIC 'rdmap0s6' cannot be opened"):
        efa._open(None, "rdmap0s6", 1, 1.0, None)
