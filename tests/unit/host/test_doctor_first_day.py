"""The doctor on the first day on an instance: what stops transfers there, or slows them; cures."""

from __future__ import annotations

import pytest

from tep import BackendUnavailable
from tep.host.doctor import Level
from tep.host.doctor.devices import check_gpu_libraries
from tests.support.trees import dgx_h100, p5
from tests.unit.host.test_doctor import healthy, look, roce

VARIABLES = {
    "no device RDMA": ("FI_EFA_USE_DEVICE_RDMA", "0", "environment", "BAD", "refuses", "unset"),
    "one provider": ("FI_PROVIDER", "tcp", "environment", "NOTE", "no other provider", "unset"),
    "lossy": ("NCCL_IB_TC", "0", "traffic class", "WARN", "dropped under load", "106"),
    "class": ("NCCL_IB_TC", "160", "traffic class", "NOTE", "carry 160 (NCCL_IB_TC)", "mlnx_qos"),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_of_other_jobs_are_named(name):
    """They decide in silence; nobody remembers who has set them."""
    variable, value, area, level, words, cure = VARIABLES[name]
    built = roce()
    built.variables[variable] = value
    mine = [one for one in look(built) if one.area == area and words in one.text]

    assert [level] == [one.level.name for one in mine]
    assert cure in mine[0].remedy


def test_peermem_is_said_to_be_the_way_where_the_driver_makes_no_dmabufs():
    """The closed modules export nothing, and `open(device=...)` then registers by peermem."""
    built = healthy(dgx_h100())
    built.texts["/proc/driver/nvidia/version"] = "NVIDIA UNIX x86_64 Kernel Module"
    built.within("/sys/module/nvidia_peermem", "refcnt")
    (found,) = (one for one in look(built) if one.area == "GPU driver")

    assert Level.GOOD is found.level
    assert "by peermem: this driver and kernel make no dma-bufs" in found.text


def test_a_class_that_the_driver_forces_is_named():
    """The driver then sends something else than the program asks for."""
    built = roce()
    built.texts["/sys/class/infiniband/mlx5_3/tc/1/traffic_class"] = "Global tclass=106"
    (found,) = (one for one in look(built) if one.area == "traffic class")

    assert "mlx5_3: its driver puts all packets into one class (Global tclass=106)" in found.text
    assert not [one for one in look(healthy(dgx_h100())) if one.area == "traffic class"]


def test_a_virtual_function_beside_its_nic_is_told():
    """It looks like a second NIC, and is the same port."""
    built = healthy(dgx_h100())
    parent = built.links["/sys/class/infiniband/mlx5_3/device"]
    path = parent.removeprefix("/sys/devices/").removesuffix(".0") + ".1"
    built.nic("mlx5_12", path)
    built.links[f"/sys/devices/{path}/physfn"] = parent
    told = [one.text for one in look(built) if one.area == "mlx5_12"]

    assert any("not taken by default: a virtual function" in one for one in told)


def test_a_libfabric_without_cuda_is_told_where_a_gpu_is(monkeypatch):
    """It looks like a missing provider at first."""

    def refuse(**options):
        assert {"provider": "efa", "cuda": True} == options
        raise BackendUnavailable("libfabric 2.5 was built without CUDA: host memory only")

    monkeypatch.setattr("tep.backends.libfabric.open_domains", refuse)
    (found,) = check_gpu_libraries(healthy(p5()).capture())

    assert "libfabric and CUDA" == found.area
    assert "was built without CUDA" in found.text
    assert "EFA installer" in found.remedy
    assert [] == list(check_gpu_libraries(healthy(dgx_h100()).capture()))
    assert [] == list(check_gpu_libraries(p5().capture()))
