"""The doctor: what it says of machines that nobody here has, and of this one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep import FabricError
from tep.cli import main
from tep.doctor import selftest
from tep.doctor.finding import Level
from tep.doctor.report import bundle, examine, passed
from tep.doctor.selftest import _counted, self_test
from tep.hostfiles import Capture, LiveFiles, Recorder
from tests.support.trees import Builder, dgx_h100, p5, p5en, shared_nics

GOOD = """Max locked memory         unlimited            unlimited            bytes
Max open files            1048576              1048576              files
"""


def healthy(built):
    """A machine on which everything is as it should be."""
    built.texts |= {
        "/proc/self/limits": GOOD,
        "/proc/meminfo": "HugePages_Total: 5128\nHugePages_Free: 5000\nHugepagesize: 2048 kB",
        "/proc/self/status": built.texts["/proc/self/status"] + "\nCapEff:\t000001ffffffffff",
        "/proc/sys/kernel/yama/ptrace_scope": "0",
        "/proc/sys/kernel/numa_balancing": "0",
        "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
        "/sys/module/nvidia/version": "550.90.07",
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64",
    }
    return built


def look(built):
    return list(examine(built.capture(), try_backends=False))


def said(findings, level=None):
    return [f"{one.area}: {one.text}" for one in findings if level in {None, one.level}]


@pytest.mark.parametrize("machine", [p5, p5en, dgx_h100, shared_nics])
def test_nothing_is_wrong_with_a_healthy_machine(machine):
    """A doctor who warns of nothing is not read when there is something."""
    found = look(healthy(machine()))

    assert [] == said(found, Level.BAD)
    assert [] == said(found, Level.WARN)
    assert passed(found)
    assert 8 == sum(one.area.startswith("cuda:") for one in found)


AILMENTS = {
    # name: (path, text, area, level, words of the finding, words of the remedy)
    "memlock": (
        "/proc/self/limits",
        GOOD.replace("unlimited", "8388608"),
        "memlock",
        "BAD",
        "8388608 bytes",
        "ulimit -l unlimited",
    ),
    "files": (
        "/proc/self/limits",
        GOOD.replace("1048576", "1024"),
        "open files",
        "WARN",
        "limit 1024",
        "ulimit -n",
    ),
    "ptrace": ("/proc/sys/kernel/yama/ptrace_scope", "1", "ptrace", "NOTE", "is 1", "allow_tracer"),
    "no ptrace": ("/proc/sys/kernel/yama/ptrace_scope", "3", "ptrace", "NOTE", "is 3", "next boot"),
    "clock": (
        "/sys/devices/system/clocksource/clocksource0/current_clocksource",
        "hpet",
        "clock",
        "WARN",
        "hpet",
        "tsc",
    ),
    "governor": (
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
        "powersave",
        "CPU governor",
        "WARN",
        "powersave",
        "cpupower",
    ),
    "balancing": (
        "/proc/sys/kernel/numa_balancing",
        "1",
        "NUMA balancing",
        "NOTE",
        "moves pages",
        "numa_balancing=0",
    ),
    "closed driver": (
        "/proc/driver/nvidia/version",
        "NVIDIA UNIX x86_64 Kernel Module",
        "GPU driver",
        "BAD",
        "cannot reach the GPU",
        "nvidia_peermem",
    ),
    "container": ("/proc/1/cgroup", "0::/kubepods/x", "capabilities", None, "in a container", ""),
    "cable": (
        "/sys/class/infiniband/mlx5_3/ports/1/state",
        "1: DOWN",
        "mlx5_3",
        "BAD",
        "1: DOWN",
        "cable",
    ),
}


@pytest.mark.parametrize("name", AILMENTS)
def test_each_ailment_is_found_with_its_remedy(name):
    """A finding without a remedy sends people to a search engine."""
    path, text, area, level, words, cure = AILMENTS[name]
    built = healthy(dgx_h100())
    built.texts[path] = text
    mine = [one for one in look(built) if one.area == area and words in one.text]

    assert 1 == len(mine)
    assert level in {None, mine[0].level.name}
    assert cure in mine[0].remedy


def test_every_bad_or_doubtful_finding_has_a_remedy():
    """Also on a machine of which nearly nothing can be read."""
    for built in (Builder(), dgx_h100(), p5()):
        for one in look(built):
            assert one.level in {Level.GOOD, Level.NOTE} or one.remedy, one


def test_an_infiniband_port_without_a_subnet_manager_is_told_from_a_bad_cable():
    """Both are DOWN or INIT; nobody looks for a subnet manager after swapping cables."""
    built = healthy(dgx_h100())
    top = "/sys/class/infiniband/mlx5_0/ports/1"
    built.texts |= {f"{top}/state": "2: INIT", f"{top}/phys_state": "5: LinkUp"}
    found = next(one for one in look(built) if "2: INIT" in one.text)

    assert "subnet manager" in found.remedy


def roce():
    built = healthy(dgx_h100())
    for name in built.folders["/sys/class/infiniband"]:
        built.texts[f"/sys/class/infiniband/{name}/ports/1/link_layer"] = "Ethernet"
    return built


@pytest.mark.parametrize(
    ("gid", "kind", "level", "words"),
    [
        ("0000:0000:0000:0000:0000:ffff:0a00:0007", "RoCE v2", Level.GOOD, "routable IPv4"),
        ("fe80:0000:0000:0000:0e42:a1ff:fe00:0007", "RoCE v2", Level.WARN, "link-local"),
        ("0000:0000:0000:0000:0000:ffff:0a00:0007", "IB/RoCE v1", Level.WARN, "never routed"),
        ("0000:0000:0000:0000:0000:0000:0000:0000", "", Level.BAD, "no address"),
    ],
)
def test_addresses_of_ethernet_ports_are_ranked(gid, kind, level, words):
    """An automatic choice of a link-local one times out across subnets, without a word."""
    built = roce()
    top = "/sys/class/infiniband/mlx5_0/ports/1"
    built.texts |= {f"{top}/gids/0": gid, f"{top}/gid_attrs/types/0": kind}
    mine = [one for one in look(built) if one.area == "mlx5_0" and words in one.text]

    assert [level] == [one.level for one in mine]


def test_a_slow_slot_a_small_mtu_and_a_far_nic_are_warned_of():
    """Each costs half of the bandwidth or more, and no error shows."""
    built = roce()
    path = built.links["/sys/class/infiniband/mlx5_0/device"]
    built.texts |= {
        f"{path}/current_link_speed": "16.0 GT/s PCIe",
        f"{path}/current_link_width": "16",
        f"{path}/max_link_speed": "32.0 GT/s PCIe",
        f"{path}/max_link_width": "16",
        f"{path}/net/eth0/mtu": "1500",
    }
    built.folders[f"{path}/net"] = ["eth0"]
    near = look(built)
    warned = said(near, Level.WARN)

    assert any(
        "mlx5_0: PCIe 16.0 GT/s PCIe x16, and the NIC can 32.0 GT/s" in one for one in warned
    )
    assert any("mlx5_0: MTU 1500 of eth0" in one for one in warned)
    flat = Builder()
    flat.cores(1, 4)
    flat.gpu("pci0000:00/0000:00:04.0")
    flat.nic("mlx5_0", "pci0000:00/0000:00:05.0")
    assert any(
        "cuda:0" in one and "bytes cross the CPU" in one for one in said(look(healthy(flat)))
    )


paths = st.sampled_from(
    sorted({entry[0] for entry in AILMENTS.values()} | set(healthy(dgx_h100()).texts))
)


@given(st.dictionaries(paths, st.one_of(st.text(max_size=20), st.none()), max_size=6))
def test_no_file_however_odd_stops_the_examination(spoilt):
    """The doctor is run where things are broken."""
    built = healthy(dgx_h100())
    for path, text in spoilt.items():
        if text is None:
            built.texts.pop(path, None)
        else:
            built.texts[path] = text

    assert look(built)


def test_this_machine_is_examined_and_its_backends_are_tried(tmp_path, capsys):
    """End to end, with the exit status, the JSON and the bundle."""
    path = tmp_path / "bundle.json"
    status = main(["doctor", "--json", "--bundle", str(path)])
    found = json.loads(capsys.readouterr().out)
    report = json.loads(path.read_text())
    tried = {one["area"]: one for one in found["findings"] if one["area"].startswith("backend")}

    assert int(not found["passed"]) == status
    assert "ok" == tried["backend loopback"]["level"]
    assert "write to count" in tried["backend loopback"]["text"]
    assert found["findings"] == report["findings"]
    again = list(examine(Capture(*_parts(report["machine"])), try_backends=False))
    here = [one for one in found["findings"] if not one["area"].startswith("backend")]
    assert here == [one.to_json() for one in again]


def _parts(machine):
    return machine["texts"], machine["links"], machine["folders"], machine["variables"]


def test_a_captured_machine_is_examined_without_trying_anything(tmp_path, capsys):
    """Somebody else's machine must not be judged by this one's backends."""
    path = tmp_path / "dgx.json"
    built = healthy(dgx_h100())
    built.texts["/proc/self/limits"] = GOOD.replace("unlimited", "65536")
    path.write_text(json.dumps(built.capture().to_json()))
    status = main(["doctor", "--machine", str(path)])
    out = capsys.readouterr().out

    assert 1 == status
    assert "memlock" in out
    assert "self" not in out
    assert "1 bad" in out


def test_a_backend_that_fails_its_test_is_bad(monkeypatch):
    """A library that loads and moves nothing is the worst case."""

    def fail(backend, options):
        raise FabricError("it broke", code="PROVIDER")

    monkeypatch.setattr(selftest, "_move", fail)
    monkeypatch.setattr(selftest, "ways", lambda: iter([("verbs", ("verbs", {}))]))
    found = list(self_test(LiveFiles()))

    assert [Level.BAD] == [one.level for one in found]
    assert "it broke" in found[0].text


def test_counters_tell_whether_the_nic_was_used():
    """Emulation by another transport is several hundred times slower, and silent."""
    key, other = ("rdmap0s0", "rdma_write_bytes"), ("rdmap0s0", "lifespan")
    moved = list(_counted("efa", {key: 5}, {key: 4101}))
    idle = list(_counted("efa", {key: 5, other: 1}, {key: 5, other: 2}))
    none = list(_counted("efa", {}, {}))

    assert "rdma_write_bytes +4096" in moved[0].text
    assert Level.GOOD is moved[0].level
    assert Level.WARN is idle[0].level
    assert Level.NOTE is none[0].level


def test_the_bundle_holds_no_secret(monkeypatch):
    """People attach it to public reports."""
    monkeypatch.setenv("TEP_TOKEN", "hunter2")
    monkeypatch.setenv("FI_LOG_LEVEL", "warn")
    text = json.dumps(bundle(Recorder(LiveFiles()), []))

    assert "hunter2" not in text
    assert "FI_LOG_LEVEL" in text
