"""The addresses that tcp opens: named ones, interfaces, networks; and the default."""

from __future__ import annotations

import re

import pytest

import tep
from tep.backends import libfabric
from tep.backends.ffi.libc import Interface, interfaces
from tep.backends.libfabric import address, default_addresses, node_and_service
from tep.base.errors import FabricError, UsageError
from tests.support.here import require

HERE = [
    Interface("lo", "127.0.0.1"),
    Interface("lo", "::1"),
    Interface("eth0", "fe80::1%eth0"),
    Interface("eth0", "10.1.2.3"),
    Interface("eth0", "fd00::7"),
    Interface("eth1", "fd00::8"),
]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A host with two cards, and nothing that a launcher or NCCL's user has set."""
    for name in ("NCCL_SOCKET_IFNAME", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(libfabric, "interfaces", lambda: HERE)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("10.1.2.3:4000", "10.1.2.3:4000"),
        ("fd00::7", "fd00::7"),
        ("[fd00::7]:4000", "[fd00::7]:4000"),
        ("eth0", "10.1.2.3"),
        ("eth0:4000", "10.1.2.3:4000"),
        ("eth1:4000", "[fd00::8]:4000"),
        ("10.0.0.0/8", "10.1.2.3"),
        ("10.1.0.9/16", "10.1.2.3"),
        ("fd00::/64", "fd00::7"),
        ("[fd00::/64]:4000", "[fd00::7]:4000"),
    ],
)
def test_one_list_says_it_for_all_hosts(name, found):
    """An address differs from host to host; an interface or a network is the same in all."""
    assert found == address(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("0.0.0.0:0", "names no host, and peers are given it.*eth0 10.1.2.3"),
        ("[::]:4000", "names no host"),
        ("192.168.0.0/16", "no address of this host is in 192.168.0.0/16"),
        ("10.1.2.3/", "is no network"),
        ("", "is no address"),
        ("10.1.2.3:99999", "is no port"),
        ("no-such-card0.invalid", "no interface of this host"),
    ],
)
def test_what_no_peer_could_reach_is_refused_at_open(name, why):
    """0.0.0.0 opened, and every peer that wrote got libfabric's "Invalid argument"."""
    with pytest.raises(UsageError, match=why):
        address(name)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("10.0.0.1", ("10.0.0.1", "")),
        ("[::1]", ("::1", "")),
        ("[::1]:9", ("::1", "9")),
        ("::1", ("::1", "")),
    ],
)
def test_brackets_tell_a_port_from_the_rest_of_an_address(name, found):
    """::1:4000 is an address."""
    assert found == node_and_service(name)


def test_nccls_interface_is_taken_where_none_is_named(monkeypatch):
    """A job script that names the fabric's interface for NCCL means all traffic between ranks."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    names, about = default_addresses(2)

    assert ["10.1.2.3", "fd00::8"] == names
    assert "NCCL_SOCKET_IFNAME=eth" in about
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^lo,eth1")
    assert ["10.1.2.3"] == default_addresses(None)[0]
    with pytest.raises(UsageError, match=r"NCCL_SOCKET_IFNAME=\^lo,eth1 leaves 1 .* wanted: 2"):
        default_addresses(2)


@pytest.mark.parametrize(
    ("variables", "loopback"),
    [
        ({}, True),
        ({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}, True),
        ({"MASTER_ADDR": "OWN", "WORLD_SIZE": "1"}, True),
        ({"MASTER_ADDR": "OWN", "WORLD_SIZE": "2"}, False),
    ],
)
def test_ranks_of_other_hosts_are_given_an_address_that_they_reach(
    monkeypatch, variables, loopback
):
    """127.0.0.1 by default: peers wrote to themselves until the time-out."""
    own = [one.address for one in interfaces() if one.name != "lo" and "." in one.address]
    if not own:
        pytest.skip("not here: an interface beside lo")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("OWN", own[0]))
    names, about = default_addresses(None)

    assert (["127.0.0.1"] == names) if loopback else (names[0] in own)
    assert ("only this host reaches" in about) == loopback


def test_an_engine_says_that_only_its_host_reaches_it(monkeypatch):
    """The time-out over there named no cause."""
    require("tcp")
    monkeypatch.setattr(libfabric, "interfaces", interfaces)
    options = {"provider": "tcp", "peer_timeout_s": 0.5}
    with (
        tep.TransferEngine.open("libfabric", **options) as a,
        tep.TransferEngine.open("libfabric", nics=["lo"], **options) as b,
    ):
        assert 'name interfaces or networks for others: nics=["eth0"]' in a.explain()
        assert "only this host reaches" not in b.explain()
        mr, _ = a.reg_mr(bytearray(64))
        _, desc = b.reg_mr(bytearray(64))
        b.close()
        with pytest.raises(FabricError, match=re.escape('nics=["10.0.0.0/8"]')):
            a.submit_single_write(64, (mr, 0), (desc, 0)).wait(20)
