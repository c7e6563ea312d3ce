"""The doctor: what it says of machines that nobody here has, and of this one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep import BackendUnavailable, FabricError
from tep.backends import local
from tep.cli import main
from tep.host.doctor import Level
from tep.host.doctor import devices as probes
from tep.host.doctor.devices import _counted, check_devices, check_libraries, self_test
from tep.host.doctor.nics import acs_control, read_counters
from tep.host.doctor.report import bundle, examine, passed
from tep.host.hostfiles import Capture, LiveFiles, Recorder
from tests.support.here import need_stub
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
    "closed driver": (
        "/proc/driver/nvidia/version",
        "NVIDIA UNIX x86_64 Kernel Module",
        "GPU driver",
        "BAD",
        "cannot reach the GPU",
        "nvidia_peermem",
    ),
    "old kernel": (
        "/proc/sys/kernel/osrelease",
        "5.10.210-201.852.amzn2.x86_64",
        "GPU driver",
        "BAD",
        "no dma-bufs of RDMA",
        "modprobe nvidia_peermem",
    ),
    "fork": ("/proc/sys/kernel/osrelease", "5.4.0-150", "kernel", "NOTE", "at fork", "spawn"),
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


def test_a_nic_without_its_device_file_is_bad():
    """The machine has it and this container does not: half of the bandwidth is gone."""
    built = healthy(dgx_h100())
    built.folders["/dev/infiniband"].remove("uverbs3")
    (mine,) = (one for one in look(built) if one.level is Level.BAD)

    assert "mlx5_5" == mine.area
    assert "there is no /dev/infiniband/uverbs3" in mine.text
    assert "docker: --device=/dev/infiniband" in mine.remedy


def test_every_bad_or_doubtful_finding_has_a_remedy():
    """Every bad finding needs a remedy, even if nearly nothing of the machine can be read."""
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


def of(area, built):
    return [one.text for one in look(built) if one.area == area]


def test_a_port_that_is_well_is_told_in_whole():
    """People compare these lines between two hosts: a wrong one sends them after a good NIC."""
    built = roce()
    top, path = "/sys/class/infiniband/mlx5_0", built.links["/sys/class/infiniband/mlx5_0/device"]
    for which in ("current", "max"):
        built.texts[f"{path}/{which}_link_speed"] = "32.0 GT/s PCIe"
        built.texts[f"{path}/{which}_link_width"] = "16"
    for entry in range(5):
        built.texts[f"{top}/ports/1/gids/{entry}"] = f"{'0000:' * 5}ffff:0a00:000{entry + 1}"
        built.texts[f"{top}/ports/1/gid_attrs/types/{entry}"] = "RoCE v2"
    gids = [f"GID {k} 10.0.0.{k + 1}: RoCE v2, routable IPv4 (rank 0)" for k in range(4)]

    assert [
        "port 1: 4: ACTIVE, 400 Gb/sec (4X), Ethernet",
        f"address {'; then '.join(gids)}",
        "PCIe 32.0 GT/s PCIe x16",
    ] == of("mlx5_0", built)
    del built.texts[f"{top}/ports/1/rate"]
    assert "port 1: 4: ACTIVE, rate unknown, Ethernet" == of("mlx5_0", built)[0]


@pytest.mark.parametrize(
    ("driver", "kernel", "words", "forks"),
    [
        ("515.43.04", "5.12.0", "memory goes to NICs by dma-buf", True),
        ("514.99", "5.12.0", "neither open modules nor nvidia_peermem", True),
        ("515.43.04", "5.11.22", "a kernel before 5.12", False),
        ("515.43.04", "6.1.0", "memory goes to NICs by dma-buf", True),
    ],
)
def test_the_first_driver_and_kernel_with_dmabufs_are_enough(driver, kernel, words, forks):
    """A machine that is just new enough would be sent to an upgrade."""
    built = healthy(dgx_h100())
    built.texts["/sys/module/nvidia/version"] = driver
    built.texts["/proc/sys/kernel/osrelease"] = kernel

    assert words in of("GPU driver", built)[0]
    assert forks == ([] == of("kernel", built))


def acs(built):
    return [one for one in look(built) if one.area == "PCIe ACS"]


@pytest.mark.parametrize("machine", [p5, p5en, dgx_h100, shared_nics])
def test_bridges_that_redirect_are_named(machine):
    """Transfers to GPUs take half of their speed then, and no error shows."""
    built = healthy(machine())
    bridges = built.bridges(0x1D)  # as Linux sets it for an IOMMU: SV, RR, CR and UF
    (found,) = acs(built)

    assert Level.WARN is found.level
    more = f" and {len(bridges) - 4} more" if len(bridges) > 4 else ""
    assert f"{more} of {len(bridges)} bridges redirect" in found.text
    assert 1 + found.text.count(", ") == min(4, len(bridges))
    assert bridges[0].rpartition("/")[2] in found.text
    assert f"setpci -s {bridges[0].rpartition('/')[2]} ECAP_ACS+6.w=0000" in found.remedy


def test_one_bridge_that_redirects_is_enough():
    """A firmware update resets one slot."""
    built = healthy(dgx_h100())
    bridges = built.bridges(0x1D)
    built.bridges(0x11)  # without the two redirects
    one = next(path for path in bridges if path.endswith("0000:17:00.0"))
    config = bytearray(built.binaries[f"{one}/config"])
    config[0x14E] |= 0x08
    built.binaries[f"{one}/config"] = bytes(config)
    (found,) = acs(built)

    assert found.text.startswith(f"0000:17:00.0 of {len(bridges)} bridges")


@pytest.mark.parametrize("control", [None, 0, 0x11])
def test_bridges_without_redirects_are_well(control):
    """ACS absent, off, or on without what matters."""
    built = healthy(dgx_h100())
    built.bridges(control)

    assert [Level.GOOD] == [one.level for one in acs(built)]


@pytest.mark.parametrize("room", [64, 256])  # what all may read, and a host without the rest
def test_what_only_root_may_read_is_not_known(room):
    """Silence would read as "no ACS"."""
    built = healthy(dgx_h100())
    bridges = built.bridges(0x1D, room=room)
    (found,) = acs(built)

    assert Level.NOTE is found.level
    assert f"not known at {len(bridges)} of {len(bridges)} bridges" in found.text
    assert "as root" in found.remedy


def test_a_machine_without_bridges_leaves_it_to_its_host():
    """Virtual machines often show GPUs and NICs on one flat bus."""
    flat = Builder()
    flat.cores(1, 4)
    flat.gpu("pci0000:00/0000:00:04.0")
    flat.nic("mlx5_0", "pci0000:00/0000:00:05.0")

    assert ["the host of this machine decides"] == [one.text[-32:] for one in acs(healthy(flat))]


@given(st.binary(max_size=600).map(lambda tail: bytes(256) + tail))
def test_any_configuration_space_can_be_read(config):
    """A broken device answers with ones, or with circles of capabilities."""
    control = acs_control(config)

    assert control is None or 0 <= control <= 0xFFFF


def test_capabilities_in_a_circle_end():
    """Each names the next; here two name each other."""
    config = bytearray(512)
    config[0x100:0x104] = (0x1 | 0x140 << 20).to_bytes(4, "little")
    config[0x140:0x144] = (0x2 | 0x100 << 20).to_bytes(4, "little")

    assert None is acs_control(bytes(config))
    assert None is acs_control(b"\xff" * 4096)


def test_a_capture_keeps_configuration_spaces(tmp_path):
    """A bug report of a slow GPU needs them."""
    built = healthy(dgx_h100())
    built.bridges(0x1D)
    recorder = Recorder(built.capture())
    before = list(examine(recorder, try_backends=False))
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(bundle(recorder, before)))

    assert before == list(examine(Capture.load(path), try_backends=False))
    assert path.stat().st_size < 100_000


def devices(monkeypatch, stub):
    monkeypatch.setenv("TEP_LIBIBVERBS", stub.path)
    return [one for one in check_devices() if one.area == "device stub0"]


def test_devices_are_asked_for_their_sizes(monkeypatch):
    """A user who plans with reads, or with writes of 4 GiB, must know before the first job."""
    stub = need_stub()
    stub.reset()
    (sizes,) = devices(monkeypatch, stub)

    assert "messages to 2 GiB on port 1; registrations to 1 TiB" in sizes.text
    assert "queue pairs of 32768 entries and 16 reads at a time" in sizes.text


def test_libraries_are_named_with_their_versions(monkeypatch):
    """A program that worked yesterday and fails today has most often loaded another library.

    The library that the user named is reported, though the process has mapped another.
    """
    stub = need_stub()
    with contextlib.suppress(OSError):  # where there is none, there is none to be confused with
        ctypes.CDLL("libibverbs.so.1")
    monkeypatch.setenv("TEP_LIBIBVERBS", stub.path)
    (found,) = check_libraries()

    named = re.escape(os.path.realpath(stub.path))
    assert re.search(rf"libibverbs {named}; .*libefa.*; .*libfabric.*; .*cuda-python", found.text)


def test_a_library_that_is_missing_hides_no_other(monkeypatch):
    """Most machines have one of the two; whoever asks for help copies this line."""
    monkeypatch.setattr(probes.ibverbs, "load", _unavailable)
    monkeypatch.setattr(probes.efa, "load", _unavailable)
    (found,) = check_libraries()

    assert "no usable libibverbs; no usable libefa; " in found.text


def test_efa_without_its_library_is_a_note(monkeypatch):
    """The doctor itself would end in an error on an instance without the EFA installer."""
    monkeypatch.setattr(probes.efa, "load", _unavailable)
    (found,) = probes._efa("rdmap0s6", "rdmap0s6")

    assert Level.NOTE is found.level
    assert "not known: libefa: it is not here" in found.text


def _unavailable():
    raise BackendUnavailable("libefa: it is not here")


def test_counters_of_every_kind_are_read():
    """The self-test tells by them which NIC has sent: with none of them it says nothing."""
    machine, top = p5(), "/sys/class/infiniband"
    name = machine.folders[top][0]
    machine.within(f"{top}/{name}/ports", "1")
    folders = "hw_counters", "ports/1/hw_counters", "ports/1/counters"
    for value, folder in enumerate(folders):
        for counter, text in ((f"of_{value}", str(value)), (f"text_{value}", "N/A")):
            machine.within(f"{top}/{name}/{folder}", counter)
            machine.texts[f"{top}/{name}/{folder}/{counter}"] = text
    found = read_counters(machine.capture())

    assert {(name, f"of_{value}"): value for value in range(3)} == found


def test_without_devices_nothing_is_said_of_them(monkeypatch):
    """The self-test says already why there is no library."""
    monkeypatch.setenv("TEP_LIBIBVERBS", "/no/such.so")

    assert [] == list(check_devices())


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
    assert re.match(r"1 NIC \(.*write to count", tried["backend loopback"]["text"])
    assert {"backend local", "backend loopback"} <= tried.keys()
    assert found["findings"] == report["findings"]
    again = list(examine(Capture(*_parts(report["machine"])), try_backends=False))
    here = [
        one
        for one in found["findings"]
        if not one["area"].startswith(("backend", "device ", "libraries"))
    ]
    assert here == [one.to_json() for one in again]


def _parts(machine):
    return (*(machine[part] for part in ("texts", "links", "folders", "variables")), None)


def test_a_captured_machine_is_examined_without_trying_anything(tmp_path, capsys):
    """Somebody else's machine must not be judged by this one's backends."""
    path = tmp_path / "dgx.json"
    built = healthy(dgx_h100())
    built.texts["/proc/self/limits"] = GOOD.replace("unlimited", "65536")
    path.write_text(json.dumps(bundle(Recorder(built.capture()), [])))
    status = main(["doctor", "--machine", str(path)])
    out = capsys.readouterr().out

    assert 1 == status
    assert "memlock" in out
    assert "self" not in out
    assert "1 bad" in out


def test_every_backend_is_named_though_none_is_here(monkeypatch):
    """A missing library would hide all backends behind it."""

    def missing(name):
        raise BackendUnavailable(f"{name} is not here", ((name, "no library"),))

    monkeypatch.setattr(probes, "load_backend", missing)
    found = dict(probes.ways())

    assert set(probes.BACKENDS) - {"auto", "sim"} == found.keys()
    assert "local is not here (local: no library)" == found["local"]


def test_a_backend_that_fails_its_test_is_bad(monkeypatch):
    """A library that loads and moves nothing is the worst case."""

    def fail(backend, options, shared):
        raise FabricError("it broke", code="PROVIDER")

    monkeypatch.setattr(probes, "_move", fail)
    monkeypatch.setattr(probes, "ways", lambda: iter([("verbs", ("verbs", {}))]))
    found = list(self_test(LiveFiles()))

    assert [Level.BAD] == [one.level for one in found]
    assert "it broke" in found[0].text


def test_a_kernel_that_forbids_copies_between_processes_is_named(monkeypatch):
    """One process reaches itself even then: without this the first row to another one tells."""
    monkeypatch.setattr(local, "can_reach", lambda *_: errno.EPERM)
    monkeypatch.setattr(probes, "ways", lambda: iter([("local", ("local", {}))]))
    moved, limited = self_test(LiveFiles())

    assert Level.GOOD is moved.level
    assert Level.WARN is limited.level
    assert "memory of tep.alloc_shared() only" in limited.text
    assert "EPERM" in limited.text
    assert "--cap-add=SYS_PTRACE" in limited.remedy


def test_counters_tell_whether_the_nic_was_used():
    """Emulation by another transport is several hundred times slower, and silent."""
    key, other = ("rdmap0s0", "rdma_write_bytes"), ("rdmap0s0", "lifespan")
    moved = list(_counted("efa", {key: 5}, {key: 4101}))
    idle = list(_counted("efa", {key: 5, other: 1}, {key: 5, other: 2}))
    none = list(_counted("efa", {}, {}))
    new = list(_counted("efa", {}, {key: 1}))

    assert "rdma_write_bytes +4096" in moved[0].text
    assert Level.GOOD is moved[0].level
    assert Level.WARN is idle[0].level
    assert Level.NOTE is none[0].level
    assert "rdma_write_bytes +1" in new[0].text, "a counter that came with the first byte"


def test_the_bundle_holds_no_secret(monkeypatch):
    """People attach it to public reports."""
    monkeypatch.setenv("TEP_TOKEN", "hunter2")
    monkeypatch.setenv("FI_LOG_LEVEL", "warn")
    text = json.dumps(bundle(Recorder(LiveFiles()), []))

    assert "hunter2" not in text
    assert "FI_LOG_LEVEL" in text
