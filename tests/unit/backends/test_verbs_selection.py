"""The NICs taken when none are named: captured machines, and the stub with such devices."""

from __future__ import annotations

import ctypes
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tep.backends.base import Access, Status, WriteBatch, new_completions
from tep.backends.ffi.ibverbs import ENUMS, Library, load
from tep.backends.verbs import facts, open_domains, probe, survey
from tep.backends.verbs.device import Device, Settings
from tep.base.errors import BackendUnavailable, UsageError
from tep.host.hostfiles import Capture
from tep.host.nics import Found, choose, gpu_paths
from tep.memory.source import adapt
from tests.support.verbs_stub import Knob

IB = ENUMS["IBV_LINK_LAYER_INFINIBAND"]
A, B = "fec0000000000001", "fec0000000000002"
GBPS = 10**9


def nic(number, gbps=400, *, ib=True, subnet=A, path="", usable=True):
    name = f"mlx5_{number}"
    text = f"{name} is here"
    return Found(name, text, usable, gbps * GBPS, ib, subnet if ib else "", path)


def switched(bus, function=0):
    """A PCI device behind a switch of its own root complex."""
    return (
        f"/sys/devices/pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0/"
        f"0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.{function}"
    )


COMPUTE = [0, 3, 4, 5, 6, 9, 10, 11]
BUSES = [0x15, 0x37, 0x48, 0x59, 0x97, 0xB7, 0xC7, 0xD7]
GPUS = [switched(bus).replace(":00.0/0000", ":00.0/0001") for bus in BUSES]


def dgx_h100(storage_ib=(1, 2, 7, 8), subnet=A):
    """Eight NICs for computing, each beside a GPU, and the four ports of two cards for storage."""
    compute = zip(COMPUTE, BUSES, strict=True)
    found = [nic(number, path=switched(bus)) for number, bus in compute]
    for number, (bus, port) in zip((1, 2, 7, 8), ((0x25, 0), (0x25, 1), (0xA5, 0), (0xA5, 1))):
        path = f"/sys/devices/pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.{port}"
        found.append(nic(number, ib=number in storage_ib, subnet=subnet, path=path))
    return sorted(found, key=lambda seen: seen.name)


def names(choice):
    return sorted(int(seen.name.removeprefix("mlx5_")) for seen in choice.taken)


@pytest.mark.parametrize("gpus", [GPUS, []])
@pytest.mark.parametrize("storage_ib", [(), (1, 7), (1, 2, 7, 8)])
def test_a_dgx_h100_computes_on_its_eight_and_not_on_the_storage_ports(gpus, storage_ib):
    """Storage ports are as fast: by the rate alone they join, and InfiniBand meets Ethernet."""
    choice = choose(dgx_h100(storage_ib), gpus)
    why = dict(choice.left)

    assert COMPUTE == names(choice)
    assert {"mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"} == set(why)
    for number in (1, 2, 7, 8):
        said = why[f"mlx5_{number}"]
        if number not in storage_ib:
            assert "not InfiniBand" in said
        else:
            assert ("PCIe switch" if gpus else "its card has 2 ports") in said


@pytest.mark.parametrize(("given", "expected"), [({}, 106), ({"traffic_class": 0}, 0)])
def test_packets_of_roce_v2_go_into_the_class_of_lossless_networks(stub, given, expected):
    """In class 0 they are dropped under load, and a path ends as UNREACHABLE for no fault of it."""
    (domain,) = open_domains(["stub0"], library=stub.path, **given).domains
    route, told = domain.device.route(bytes(16), 0), domain.describe()
    domain.close()

    assert expected == route.grh.traffic_class
    assert f"traffic class {expected}, service level 0" in told


def test_a_virtual_function_beside_its_physical_one_is_no_second_nic():
    """One port counted twice: shards of a row race each other, and no byte goes faster."""
    pf, vf = nic(0, path=switched(0x15)), nic(1, path=switched(0x15, 1))
    alone = nic(2, path=switched(0x37, 1))._replace(physical=switched(0x37))
    vf = vf._replace(physical=pf.path)
    choice = choose([pf, vf, alone], GPUS)

    assert [0, 2] == names(choice)
    assert "virtual function" in dict(choice.left)["mlx5_1"]


def test_storage_in_a_subnet_of_its_own_is_left_out_and_rails_are_not():
    """Eight rails are eight subnets, and all of them are the fabric."""
    two = [nic(k) for k in range(8)] + [nic(8, subnet=B), nic(9, subnet=B)]
    rails = [nic(k, subnet=f"fec00000000000{k:02x}") for k in range(8)]

    assert list(range(8)) == names(choose(two, []))
    assert f"in InfiniBand subnet {B}, and most are in {A}" == dict(choose(two, []).left)["mlx5_9"]
    assert list(range(8)) == names(choose(rails, []))


@pytest.mark.parametrize(
    ("lone", "cards", "taken"),
    [(2, 1, [0, 1]), (3, 1, [0, 1, 2]), (2, 2, [0, 1, 10, 11, 12, 13])],
)
def test_ports_of_one_card_are_left_out_where_as_many_are_alone(lone, cards, taken):
    """A card for storage has two ports; of many such cards most are for computing."""
    alone = [nic(k, path=switched(BUSES[k])) for k in range(lone)]
    pairs = [
        nic(10 + 2 * card + port, path=switched(0x21 + 4 * card, port))
        for card in range(cards)
        for port in range(2)
    ]

    assert taken == names(choose(alone + pairs, []))


def test_slower_ones_and_what_cannot_be_used_are_left_out_with_the_reason():
    """Every NIC that is not used needs a reason for the user."""
    choice = choose([nic(0), nic(1, 100), nic(2, usable=False), nic(3, 400, ib=False)], [])

    assert [0] == names(choice)
    assert {
        "mlx5_1": "100 Gb/s, and others have 400",
        "mlx5_2": "mlx5_2 is here",
        "mlx5_3": "not InfiniBand, as those with most of the bandwidth are",
    } == dict(choice.left)
    assert ([], []) == choose([], [])


PATHS = st.sampled_from(["", *map(switched, BUSES), *(switched(bus, 1) for bus in BUSES)])
NICS = st.builds(
    nic,
    st.integers(0, 99),
    st.sampled_from([0, 100, 400]),
    ib=st.booleans(),
    subnet=st.sampled_from([A, B]),
    path=PATHS,
    usable=st.booleans(),
)


@given(st.lists(NICS, max_size=12, unique_by=lambda seen: seen.name), st.lists(PATHS, max_size=3))
def test_every_nic_is_taken_or_left_with_a_reason_and_none_for_nothing(found, gpus):
    """No rule may leave an engine without a NIC, mix two link layers, or forget a NIC."""
    choice = choose(found, gpus)
    left = [name for name, why in choice.left if why]

    assert sorted(seen.name for seen in found) == sorted([*left, *(s.name for s in choice.taken)])
    assert bool(choice.taken) == any(seen.usable for seen in found)
    assert 1 >= len({(seen.is_ib, seen.link_bps) for seen in choice.taken})
    assert all(seen.usable for seen in choice.taken)


def test_gpus_are_found_by_class_and_vendor():
    """The BMC's display is no GPU."""
    kinds = [("0x030200", "0x10de"), ("0x030000", "0x1a03"), ("0x020000", "0x15b3")]
    top, names = "/sys/bus/pci/devices", [f"0000:0{k}:00.0" for k in range(4)]
    files = Capture(
        {}, {f"{top}/{name}": f"/sys/devices/{name}" for name in names}, {top: names}, {}
    )
    for name, (kind, vendor) in zip(names, kinds):
        files.texts |= {f"{top}/{name}/class": kind, f"{top}/{name}/vendor": vendor}

    assert [f"/sys/devices/{names[0]}"] == gpu_paths(files)


@pytest.fixture
def machine(stub, tmp_path, monkeypatch):
    """The stub as a machine of devices that are (link layer, subnet, Gb/s)."""

    def make(*devices):
        for number, (link, subnet, gbps) in enumerate(devices):
            folder = tmp_path / str(number)
            (folder / "ports" / "1").mkdir(parents=True)
            (folder / "ports" / "1" / "rate").write_text(f"{gbps} Gb/sec (4X NDR)\n")
            stub.device(number, link, subnet, str(folder))
        monkeypatch.setenv("TEP_LIBIBVERBS", stub.path)
        monkeypatch.setattr("tep.backends.verbs.gpu_paths", list)

    return make


def test_devices_are_seen_as_they_are_and_the_rest_is_told(stub, machine):
    """From the library's answers to what an engine opens, and to what `tep info` shows."""
    a, b = int(A, 16), int(B, 16)
    machine(*[(IB, a, 400)] * 4, (IB, b, 400), (IB, a, 200), (0, 0, 400), (0, 0, 400))
    taken = [f"stub{k}" for k in range(4)]
    domains = open_domains(name="x").domains
    opened = [domain.caps.nic for domain in domains]
    for domain in domains:
        domain.close()
    seen = {one.name: one for one in survey(load(stub.path), Settings())}
    told = facts()

    assert taken == opened == told["nics"]
    assert (True, B, 400 * GBPS) == (
        seen["stub4"].is_ib,
        seen["stub4"].subnet,
        seen["stub4"].link_bps,
    )
    assert {"stub4", "stub5", "stub6", "stub7"} == {name for name, _ in told["tried"]}
    assert 4 == len(re.findall("InfiniBand, 400 Gb/s", probe()))


def test_an_efa_device_is_left_to_its_own_backends(stub, machine):
    """It has no reliable connections: opening it ended in an errno of ibv_create_qp."""
    machine((-1, 0, 100), *[(0, 0, 100)] * 7)
    with pytest.raises(BackendUnavailable, match="stub0: its link layer is 0.*the backend efa"):
        open_domains(["stub0"])
    opened = open_domains().domains
    for domain in opened:
        domain.close()

    assert "stub0" not in [domain.caps.nic for domain in opened]
    assert "no reliable connections" in dict(facts()["tried"])["stub0"]


def test_more_than_belong_together_are_refused_and_two_layers_never_opened(stub, machine):
    """A transfer over both would end in a time-out, or in an error far from its cause."""
    machine(*[(IB, 1, 400)] * 2, *[(0, 0, 400)] * 6)
    with pytest.raises(BackendUnavailable, match="6 usable RDMA devices that belong together, 7"):
        open_domains(7)
    with pytest.raises(UsageError, match=r"two link layers.*stub1 port 1: InfiniBand.*Ethernet"):
        open_domains(["stub1", "stub2"])
    opened = open_domains(["stub0", "stub1"]).domains
    for domain in opened:
        domain.close()


def test_ends_in_two_infiniband_subnets_are_told_so_at_once(stub, machine):
    """No packet passes: the handshake would wait for its time-out, and name no cause."""
    machine((IB, int(A, 16), 400), (IB, int(B, 16), 400))
    one, other = (open_domains([f"stub{k}"]).domains[0] for k in range(2))
    with pytest.raises(UsageError, match=f"subnet {A}, the other in {B}; where each rail"):
        one.connect(other.address)
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("table", "options", "expected"),
    [
        ((), {}, (0, 0xFFFF)),
        ((0x7FFF, 0x8042), {}, (1, 0x8042)),
        ((0x7FFF,), {}, (0, 0x7FFF)),
        ((0xFFFF, 0x8001, 0x8002), {"pkey": 0x8002}, (2, 0x8002)),
        ((0xFFFF, 0x8001), {"pkey": 1}, (1, 0x8001)),
    ],
)
def test_the_partition_is_chosen_by_its_key_and_not_by_its_place(stub, table, options, expected):
    """On Azure the first entry is a limited member of the default partition: nothing passes."""
    stub.pkeys(0, *table)
    domain = open_domains(["stub0"], library=stub.path, **options).domains[0]
    found, told = (domain.device.pkey_index, domain.device.pkey), domain.describe()
    domain.close()

    assert expected == found
    assert (expected[1] == 0xFFFF) == ("P_Key" not in told)


def test_a_library_that_is_too_old_says_which_would_do():
    """An undefined symbol tells nobody what to install."""
    with pytest.raises(BackendUnavailable, match=r"rdma-core 34 or later[^!]*has no ibv_fork_init"):
        load("libc.so.6")


def test_memory_that_was_registered_before_us_is_no_reason_to_refuse(stub):
    """NCCL or libfabric were first: on Linux 5.10 no verbs engine could be opened after them."""
    stub.set(Knob.LATE_FORK_INIT, 1)
    lib = Library(ctypes.CDLL(stub.path, use_errno=True), stub.path)
    device = Device(lib, "stub0", Settings())
    told = device.describe()
    device.close()

    assert not lib.fork_safe
    assert "a fork may take registered pages away" in told


def test_a_partition_that_is_not_there_is_refused_and_ends_in_two_never_meet(stub):
    """A wrong key is silence on the wire: the handshake's error has to come from somewhere."""
    options = {"library": stub.path, "handshake_s": 0.1, "resend_s": 0.005}
    stub.pkeys(0, 0xFFFF, 0x8001)
    stub.pkeys(1, 0x8001, 0x8002)
    with pytest.raises(UsageError, match=r"pkey=0x8003 is not in stub0's table: 0xffff, 0x8001"):
        open_domains(["stub0"], pkey=0x8003, **options)
    out = new_completions(16)
    for pkey, reached in ((None, False), (0x8001, True)):
        one, other = (open_domains([f"stub{k}"], pkey=pkey, **options).domains[0] for k in range(2))
        key = one.register(adapt(bytearray(8)), Access.SOURCE_AND_TARGET)
        peer = one.connect(other.address)
        row = WriteBatch(1, peer, key.base, key.lkey, key.base, key.rkey, 0, 1, 1)
        one.post(row, 0, 1)
        ended, end_s = [], time.monotonic() + 60
        while not ended:
            other.poll(out)
            ended = out["status"][: one.poll(out)].tolist()
            assert time.monotonic() < end_s, "the row does not come back"
        one.close()
        other.close()

        assert [Status.OK if reached else Status.UNREACHABLE] == ended
