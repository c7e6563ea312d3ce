"""The NICs and cores of each GPU: captured machines, and drawn ones."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tep
from tep import BackendUnavailable, TransferEngine, UsageError
from tep.backends import auto, open_backend
from tep.backends.base import Opened
from tep.cli import main
from tep.host.doctor.report import bundle
from tep.host.hostfiles import Capture, CudaDevice, LiveFiles, Recorder
from tep.host.nics import natural
from tep.host.topology import check_files, cpus_in, detect
from tests.support.trees import Builder, dgx_h100, p5, p5en, shared_nics


@pytest.mark.parametrize(("machine", "each"), [(p5, 4), (p5en, 2)])
def test_each_gpu_of_a_p5_gets_the_nics_of_its_own_switch(machine, each):
    """A NIC across the sockets costs half of the bandwidth, and nobody sees why."""
    seen = detect(machine().capture())
    places = [seen.place(f"cuda:{k}") for k in range(8)]
    all_cpus = [cpu for place in places for cpu in place.cpus]

    assert [each] * 8 == [len(place.nics) for place in places]
    assert 8 * each == len({nic for place in places for nic in place.nics})
    assert all(place.is_efa and "same PCIe switch" in place.why for place in places)
    assert tuple(f"rdmap{0x51 + 0x30 + j}s0" for j in range(each)) == places[3].nics
    assert sorted(set(all_cpus)) == sorted(all_cpus) == list(range(96))
    assert tuple(range(36, 48)) == places[3].cpus
    assert () == seen.left


def test_storage_and_management_nics_of_a_dgx_are_left_out_and_told_why():
    """They are as fast, and bytes over them meet the file system's."""
    seen = detect(dgx_h100().capture())
    why = dict(seen.left)

    assert [("mlx5_0",), ("mlx5_3",), ("mlx5_11",)] == [
        seen.place(f"cuda:{k}").nics for k in (0, 1, 7)
    ]
    assert {"mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8", "irdma0", "irdma1"} == set(why)
    assert "PCIe switch" in why["mlx5_1"]
    assert "not InfiniBand" in why["mlx5_2"]


def test_a_gpu_gets_no_nic_twice_where_virtual_functions_are_up():
    """The physical function and its virtual one are one port."""
    built = dgx_h100()
    parent = built.links["/sys/class/infiniband/mlx5_3/device"]
    path = parent.removeprefix("/sys/devices/").removesuffix(".0") + ".1"
    built.nic("mlx5_12", path)
    built.links[f"/sys/devices/{path}/physfn"] = parent
    machine = detect(built.capture())

    assert ("mlx5_3",) == machine.place("cuda:1").nics
    assert "virtual function" in dict(machine.left)["mlx5_12"]


def test_pairs_of_gpus_share_a_nic():
    """The third GPU must not end up with the first pair's NIC."""
    seen = detect(shared_nics().capture())

    assert [(f"mlx5_{k // 2}",) for k in range(8)] == [
        seen.place(f"cuda:{k}").nics for k in range(8)
    ]


def test_a_container_numbers_the_gpus_it_was_given_and_leaves_the_others_their_nics():
    """Two containers of one machine would else both take the first NICs."""
    seen = detect(p5en(gpus_given=range(4, 6)).capture())

    assert (f"rdmap{0x51 + 0x40}s0", f"rdmap{0x52 + 0x40}s0") == seen.place("cuda:0").nics
    assert tuple(range(60, 72)) == seen.place("cuda:1").cpus
    with pytest.raises(BackendUnavailable, match=r"cuda:0, cuda:1; not given to it: 0000:5d"):
        seen.place("cuda:2")


def test_a_nic_whose_device_file_is_missing_is_not_left_out_in_silence():
    """The job ran at 7/8 of its bandwidth, and nothing said so."""
    built = dgx_h100()
    built.folders["/dev/infiniband"].remove("uverbs3")
    seen = detect(built.capture())

    assert "mlx5_5" in {nic.name for nic in seen.nics} - set(dict(seen.left))
    assert "missing: /dev/infiniband/uverbs3 of mlx5_5" in seen.picture()
    with pytest.raises(BackendUnavailable, match="1 of the NICs that belong together") as error:
        check_files(seen.nics)
    assert (("mlx5_5", "there is no /dev/infiniband/uverbs3"),) == error.value.tried


def test_the_drivers_numbers_count_where_it_can_be_asked():
    """CUDA_DEVICE_ORDER and CUDA_VISIBLE_DEVICES renumber: cuda:0 may be any GPU."""
    built = shared_nics()
    built.cuda = [CudaDevice(0, "0000:87:00.0", "H100"), CudaDevice(1, "0000:80:00.0", "H100")]
    asked = detect(built.capture())
    built.cuda, built.variables = None, {"CUDA_VISIBLE_DEVICES": "7,0"}
    read = detect(built.capture())

    for seen in (asked, read):
        assert ("mlx5_3",) == seen.place("cuda:0").nics
        assert ("mlx5_0",) == seen.place("cuda:1").nics


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("GPU-00000007-aaaa,GPU-00000000", ["0000:87:00.0", "0000:80:00.0"]),
        ("GPU-00000003,GPU-99,GPU-00000004", ["0000:83:00.0"]),
        ("2,17,3", ["0000:82:00.0"]),
        ("GPU-0000000", []),
        ("MIG-11111111", []),
    ],
)
def test_gpus_that_are_named_by_uuid_are_numbered(visible, gpus):
    """Schedulers name them so; a rank then had no cuda:0 where cuda-python was missing."""
    built = shared_nics()
    for k in range(8):
        about = f"/proc/driver/nvidia/gpus/0000:8{k}:00.0/information"
        built.texts[about] += f"\nIRQ: \t\t 42\nGPU UUID: \t GPU-0000000{k}-aaaa-bbbb"
    built.variables = {"CUDA_VISIBLE_DEVICES": visible}
    seen = detect(built.capture())

    assert gpus == [gpu.pci for gpu in seen.gpus if gpu.index is not None]


def test_no_gpu_and_no_nic_are_said():
    """A machine without either is the usual one, and not an error until a device is named."""
    built = Builder()
    built.cores(1, 2, 1)
    seen = detect(built.capture())

    assert ["no GPU", "no RDMA NIC can be used"] == seen.picture().splitlines()[1:]
    assert () == seen.place("cpu").nics
    with pytest.raises(BackendUnavailable, match="this process has no GPU"):
        seen.place("cuda:0")
    with pytest.raises(UsageError, match="'gpu0' is not"):
        seen.place("gpu0")


def test_a_nic_of_the_other_socket_is_not_said_to_be_near():
    """Bytes that cross between sockets cost a third: the report must not hide it."""
    built = Builder()
    built.cores(2, 2)
    built.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", 0)
    built.nic("mlx5_0", "pci0000:80/0000:80:01.0/0000:81:00.0", 1)
    built.nic("mlx5_1", "pci0000:90/0000:90:01.0/0000:91:00.0", 0)
    seen = detect(built.capture())
    (gpu,), far, near = seen.gpus, *sorted(seen.nics, key=lambda nic: nic.name)

    assert "anywhere in the machine" == seen.relation(gpu, far)
    assert "of the same NUMA node" == seen.relation(gpu, near)
    assert ["mlx5_1"] == [nic.name for nic in seen.nearest(gpu)]


@st.composite
def machines(draw):
    """Trees of switches with GPUs and NICs on them, some NICs slow, down or of another layer."""
    built = Builder()
    built.cores(2, draw(st.integers(1, 6)))
    bus = iter(range(1, 255))
    names = iter(range(64))
    for root in range(draw(st.integers(1, 4))):
        numa = draw(st.sampled_from([-1, 0, 1]))
        for switch in range(draw(st.integers(1, 3))):
            top = f"pci0000:{root:02x}/0000:{root:02x}:{switch:02x}.0/0000:{next(bus):02x}:00.0"
            for _ in range(draw(st.integers(0, 3))):
                built.gpu(f"{top}/0000:{next(bus):02x}:00.0", numa, given=draw(st.booleans()))
            for _ in range(draw(st.integers(0, 3))):
                built.nic(
                    f"mlx5_{next(names)}",
                    f"{top}/0000:{next(bus):02x}:00.0",
                    numa,
                    gbps=draw(st.sampled_from([400, 400, 100])),
                    layer=draw(st.sampled_from(["InfiniBand", "InfiniBand", "Ethernet"])),
                    state=draw(st.sampled_from(["4: ACTIVE", "4: ACTIVE", "1: DOWN"])),
                    given=draw(st.sampled_from([True, True, False])),
                )
    return built.capture()


@given(machines())
def test_every_gpu_gets_its_nearest_nics_and_nics_are_dealt_out_evenly(capture):
    """The rule in one sentence, on trees that nobody has drawn by hand."""
    seen = detect(capture)
    shares = seen.shares()
    listed = [nic.name for nic in seen.nics] + [name for name, why in seen.left if why]
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for gpu in seen.gpus:
        near = tuple(nic.name for nic in seen.nearest(gpu))
        mine = tuple(nic.name for nic in shares[gpu.pci])
        groups.setdefault(near, []).append(mine)

        assert set(mine) <= set(near)
        assert bool(mine) == bool(seen.nics)
    for near, dealt in groups.items():
        sizes = [len(mine) for mine in dealt]
        uses = Counter(name for mine in dealt for name in mine)
        assert max(sizes) - min(sizes) <= 1
        assert not near or max(uses.values()) - min(uses[name] for name in near) <= 1

    assert sorted(listed) == sorted(capture.names("/sys/class/infiniband"))
    assert seen.picture()
    json.dumps(seen.to_json())


@given(machines())
def test_a_capture_says_what_the_machine_said(capture):
    """A bug report with a captured file must show the reporter's machine."""
    recorder = Recorder(capture)
    there = detect(recorder)
    text = json.loads(json.dumps(recorder.capture.to_json()))
    again = detect(Capture(text["texts"], text["links"], text["folders"], text["variables"]))

    assert there == again


def test_a_capture_of_this_machine_shows_its_topology(tmp_path):
    """A machine without a NIC has GPUs and cores all the same."""
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(bundle(Recorder(LiveFiles()), [])))

    assert detect(LiveFiles()) == detect(Capture.load(path))
    assert detect(LiveFiles()).cores


def test_a_file_that_is_no_capture_is_refused(tmp_path):
    """A wrong file must not be taken for a machine without NICs."""
    path = tmp_path / "x.json"
    for text in ("{", "[]", '{"machine": {"format": "tep-machine-1"}}', '{"format": "other"}'):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"x\.json"):
            Capture.load(path)


def test_devices_may_be_listed_elsewhere_as_for_rdma_core(tmp_path, monkeypatch):
    """rdma-core would see other NICs than the doctor."""
    (tmp_path / "class/infiniband/mlx5_7").mkdir(parents=True)
    monkeypatch.setenv("SYSFS_PATH", str(tmp_path))

    assert ["mlx5_7"] == LiveFiles().names("/sys/class/infiniband")


def test_info_shows_a_captured_machine(tmp_path, capsys):
    """The picture is what people send when they ask why a NIC idles."""
    path = tmp_path / "dgx.json"
    path.write_text(json.dumps(bundle(Recorder(dgx_h100().capture()), [])))

    assert 0 == main(["info", "--machine", str(path)])
    out = capsys.readouterr().out
    assert "cuda:7  0000:dd:00.0  NVIDIA H100 80GB HBM3, CPUs 98-111" in out
    assert "mlx5_11  400 Gb/s, behind the same PCIe switch" in out
    assert "not taken: mlx5_1: it shares no PCIe switch with a GPU" in out


def test_open_for_a_device_takes_its_nics_cores_and_memory(monkeypatch):
    """By hand it is a map of GPUs, NICs and CPUs in every launcher."""
    asked = {}

    def opened(backend, /, **options):
        asked[backend] = options
        return open_backend("loopback", nics=2)

    monkeypatch.setattr(auto, "open_backend", opened)
    monkeypatch.setattr(auto, "LiveFiles", lambda: dgx_h100().capture())
    found = auto.open_at("verbs", "cuda:1", {"name": "x"})

    assert ["mlx5_3"] == asked["verbs"]["nics"]
    assert callable(asked["verbs"]["dmabuf_export"])
    assert tuple(range(14, 28)) == found.cpus
    assert "NICs loopback" in found.about or "cuda:1: NICs" in found.about
    assert "copies by tep.cuda.Staged" in found.about
    with pytest.raises(BackendUnavailable, match="wants EFA NICs"):
        auto.open_at("libfabric", "cuda:0", {"provider": "efa"})
    monkeypatch.setattr(auto, "LiveFiles", lambda: p5en().capture())
    auto.open_at("libfabric", "cuda:0", {"provider": "efa"})
    assert ["rdmap81s0", "rdmap82s0"] == asked["libfabric"]["nics"]
    assert asked["libfabric"]["cuda"] is True
    auto.open_at("libfabric", "cuda:0", {"provider": "efa", "nics": ["rdmap99s0"]})
    assert ["rdmap99s0"] == asked["libfabric"]["nics"]
    auto.open_at("efa", "cuda:0", {})
    assert ["rdmap81s0", "rdmap82s0"] == asked["efa"]["nics"]
    assert {"nics", "dmabuf"} == set(asked["efa"])
    assert callable(asked["efa"]["dmabuf"])
    for domain in found.domains:
        domain.close()


@pytest.mark.parametrize(("peermem", "dmabufs"), [(1, 0), (1, 1), (0, 0)])
def test_a_gpu_whose_driver_makes_no_dmabufs_is_reached_by_peermem(monkeypatch, peermem, dmabufs):
    """NVIDIA's closed modules export nothing: memory that peermem can pin would be refused."""
    asked = {}

    def opened(backend, /, **options):
        asked.update(options)
        return open_backend("loopback")

    built = dgx_h100()
    if peermem:
        built.within("/sys/module/nvidia_peermem", "refcnt")
    cuda = SimpleNamespace(attribute=lambda device, name: {"DMA_BUF_SUPPORTED": dmabufs}[name])
    monkeypatch.setattr("tep.host.cuda.driver", lambda: cuda)
    monkeypatch.setattr(auto, "open_backend", opened)
    monkeypatch.setattr(auto, "LiveFiles", built.capture)
    for domain in auto.open_at("verbs", "cuda:1", {}).domains:
        domain.close()

    assert (not peermem or bool(dmabufs)) == ("dmabuf_export" in asked)


def test_an_engine_for_a_device_says_where_it_is_and_runs_there(monkeypatch):
    """explain() must say why a NIC or a core was taken."""
    here = min(
        cpus_in(
            (LiveFiles().read("/proc/self/status") or "").split("Cpus_allowed_list:")[1].split()[0]
        )
    )

    def at(backend, device, options):
        opened = open_backend(backend, **options)
        return Opened(
            opened.domains, opened.epoch, opened.name, None, (here,), f"device {device}: why"
        )

    monkeypatch.setattr(auto, "open_at", at)
    with TransferEngine.open("local", device="cuda:0") as engine:
        said = f"  device cuda:0: why; worker on CPUs {here}"
        assert said in engine.explain().splitlines()
        assert frozenset({here}) == engine.driver._cpus
    with TransferEngine.open("local", device="cuda:0", driver=tep.ThreadDriver()) as engine:
        assert "worker on" not in engine.explain()


def test_a_device_that_is_not_here_is_an_error_at_open():
    """cuda:0 on a machine without a GPU must not silently become host memory."""
    if any(gpu.index is not None for gpu in detect().gpus):
        pytest.skip("this machine has a GPU")
    with pytest.raises(BackendUnavailable, match="this process has no GPU"):
        TransferEngine.open("local", device="cuda:0")
    with TransferEngine.open("local", device="cpu") as engine:
        assert "device cpu" in engine.explain()
    assert tep.__version__


def test_names_are_ordered_by_their_numbers():
    """NIC 10 would be counted before NIC 9, and one without a number behind the first of them."""
    found = sorted(["ib10", "mlx5_2", "ib9", "ib", "ib0"], key=natural)

    assert ["ib", "ib0", "ib9", "ib10", "mlx5_2"] == found
