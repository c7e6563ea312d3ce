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
    "NICs": ("NCCL_IB_HCA", "=mlx5_0", "environment", "NOTE", "where nics is unset", ""),
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


def bonded(built):
    path = built.links["/sys/class/infiniband/mlx5_0/device"]
    built.folders[f"{path}/net"] = ["ens1f0"]
    built.texts |= {
        f"{path}/net/ens1f0/mtu": "9000",
        f"{path}/net/ens1f0/master/bonding/slaves": "ens1f0 ens1f1",
        "/proc/net/arp": "IP address HW type Flags HW address Mask Device\n"
        "10.0.0.7 0x1 0x2 0c:42:a1:00:00:07 * ens1f0\n"
        "10.0.0.9 0x1 0x0 00:00:00:00:00:00 * ens1f0\n"
        "10.9.9.9 0x1 0x0 00:00:00:00:00:00 * eno1\n",
    }


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("a bond of 2 ports (ens1f0, ens1f1)", "nics=['mlx5_0', 'mlx5_0']"),
        ("10.0.0.9 on ens1f0 does not answer", "ip neigh show dev ens1f0"),
    ],
)
def test_a_bond_and_a_silent_neighbour_are_warned_of(words, cure):
    """Half of the bandwidth to any peer, and a peer that ends as UNREACHABLE: nothing said why."""
    built = roce()
    bonded(built)
    (found,) = (one for one in look(built) if words in one.text)

    assert (Level.WARN, "mlx5_0") == (found.level, found.area)
    assert cure in found.remedy
    assert not [one for one in look(built) if "10.9.9.9" in one.text or "10.0.0.7" in one.text]
    for path in [path for path in built.texts if path.endswith("bonding/slaves")]:
        built.texts[path] = "ens1f0"
    assert not [one for one in look(built) if "a bond" in one.text], "one port is no bond of two"


def test_a_class_that_the_driver_forces_is_named():
    """The driver then sends something else than the program asks for."""
    built = roce()
    built.texts["/sys/class/infiniband/mlx5_3/tc/1/traffic_class"] = "Global tclass=106"
    (found,) = (one for one in look(built) if one.area == "traffic class")

    assert "mlx5_3: its driver puts all packets into one class (Global tclass=106)" in found.text
    assert not [one for one in look(healthy(dgx_h100())) if one.area == "traffic class"]


def test_efa_has_the_security_group_named():
    """The most frequent reason why the first two instances do not talk."""
    (found,) = (one for one in look(healthy(p5())) if one.area == "security group")

    assert Level.NOTE is found.level
    assert "authorize-security-group-ingress" in found.remedy
    assert not [one for one in look(healthy(dgx_h100())) if one.area == "security group"]


def test_a_virtual_function_beside_its_nic_is_told():
    """It looks like a second NIC, and is the same port."""
    built = healthy(dgx_h100())
    parent = built.links["/sys/class/infiniband/mlx5_3/device"]
    path = parent.removeprefix("/sys/devices/").removesuffix(".0") + ".1"
    built.nic("mlx5_12", path)
    built.links[f"/sys/devices/{path}/physfn"] = parent
    told = [one.text for one in look(built) if one.area == "mlx5_12"]

    assert any("not taken by default: a virtual function" in one for one in told)


def test_a_libfabric_without_cuda_and_a_missing_nvrtc_are_told_where_a_gpu_is(monkeypatch):
    """Both look like something else at first: a missing provider, a traceback."""

    def refuse(**options):
        assert {"provider": "efa", "cuda": True} == options
        raise BackendUnavailable("libfabric 2.5 was built without CUDA: host memory only")

    monkeypatch.setattr("tep.backends.libfabric.open_domains", refuse)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr("tep.host.doctor.devices.version_of", lambda package: None)
    on_efa = list(check_gpu_libraries(healthy(p5()).capture()))
    on_ib = list(check_gpu_libraries(healthy(dgx_h100()).capture()))

    assert ["libfabric and CUDA", "NVRTC"] == [one.area for one in on_efa]
    assert "was built without CUDA" in on_efa[0].text
    assert "EFA installer" in on_efa[0].remedy
    assert "nvidia-cuda-nvrtc" in on_efa[1].remedy
    assert ["NVRTC"] == [one.area for one in on_ib]
    assert [] == list(check_gpu_libraries(p5().capture()))
