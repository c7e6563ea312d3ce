"""The meaning of "auto": one rule, reported, and no second choice."""

from __future__ import annotations

import numpy as np
import pytest

import tep
from tep import backends
from tep.backends import auto
from tep.backends.auto import Choice, choose
from tep.base.errors import BackendUnavailable
from tests.support.trees import dgx_h100


def devices(tmp_path, **drivers):
    """A directory like the kernel's, with a device for each driver."""
    listed = tmp_path / "infiniband"
    listed.mkdir()
    for name, driver in drivers.items():
        (tmp_path / driver).mkdir(exist_ok=True)
        (listed / name / "device").mkdir(parents=True)
        (listed / name / "device" / "driver").symlink_to(tmp_path / driver)
    return listed


@pytest.mark.parametrize(
    ("drivers", "backend", "options"),
    [
        ({}, "local", {}),
        ({"mlx5_0": "mlx5_core", "mlx5_1": "mlx5_core"}, "verbs", {}),
        ({"efa_0": "efa"}, "libfabric", {"provider": "efa"}),
    ],
)
def test_the_devices_decide(tmp_path, drivers, backend, options) -> None:
    """Another backend than the documented one sends a job over the wrong wire."""
    choice = choose(devices(tmp_path, **drivers))

    assert (backend, options) == choice[:2]
    for name, driver in drivers.items():
        assert f"{name} ({driver})" in choice.why


def test_a_host_without_the_kernels_list_has_no_device(tmp_path) -> None:
    """Machines without RDMA in the kernel do not even have the directory."""
    assert "local" == choose(tmp_path / "absent").backend


def test_what_was_chosen_and_why_can_be_read(monkeypatch) -> None:
    """`tep info` prints the probe; `explain` names the backend of every NIC."""
    monkeypatch.setattr(auto, "choose", lambda: Choice("local", {}, "because"))
    assert "local: because" == auto.probe()
    with tep.TransferEngine.open("auto", nics=2) as engine, tep.TransferEngine.open("auto") as peer:
        assert engine.explain().count(" on local, ") == 2
        mr, _ = engine.reg_mr(np.full(8, 7, np.uint8))
        target = tep.alloc_shared(8)
        _, desc = peer.reg_mr(target)
        engine.submit_single_write(8, (mr, 0), (desc, 0), imm=1).wait(20)
        peer.expect_imm_count(1, tep.count_imms(tep.Single(8), 2, 1)).wait(20)
        assert 7 == target[0]


@pytest.mark.parametrize(
    ("backend", "options"), [("verbs", {}), ("auto", {}), ("verbs", {"device": "cuda:3"})]
)
def test_nics_without_device_files_are_refused_unless_others_are_named(
    monkeypatch, backend, options
) -> None:
    """An engine with fewer NICs than the machine has opened without a word."""
    built = dgx_h100()
    built.folders["/dev/infiniband"].remove("uverbs3")
    opened = []
    monkeypatch.setattr(auto, "LiveFiles", built.capture)
    monkeypatch.setattr(auto, "choose", lambda: Choice("verbs", {}, "RDMA devices"))

    def opens(*_, nics):
        opened.append(nics)
        raise BackendUnavailable("a fake", ())

    for room in (auto, backends):
        monkeypatch.setattr(room, "open_backend", opens)
    with pytest.raises(BackendUnavailable, match="no device file: the container was not given"):
        tep.TransferEngine.open(backend, **options)
    assert [] == opened
    with pytest.raises(BackendUnavailable, match="a fake"):
        tep.TransferEngine.open("verbs", nics=["mlx5_0"])
    assert [["mlx5_0"]] == opened


def test_a_chosen_backend_that_cannot_run_is_an_error(monkeypatch) -> None:
    """A silent fallback would be found out by its slowness, weeks later."""

    def refuse(backend, **options):
        assert ("libfabric", {"provider": "efa", "nics": 2}) == (backend, options)
        raise BackendUnavailable("no library", (("libfabric.so.1", "not found"),))

    monkeypatch.setattr(auto, "choose", lambda: Choice("libfabric", {"provider": "efa"}, "EFA: x"))
    monkeypatch.setattr(auto, "open_backend", refuse)
    with pytest.raises(BackendUnavailable, match=r"auto: chose libfabric \(EFA: x\)") as error:
        tep.TransferEngine.open("auto", nics=2)
    assert (("libfabric.so.1", "not found"),) == error.value.tried
