"""The address by which others reach this host, also where its own name stands for loopback."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tep import rendezvous
from tep.backends.ffi import libc
from tep.backends.ffi.libc import Interface
from tep.host import ways
from tep.rendezvous.launch import own_address
from tep.rendezvous.wire import listen

ALL = socket.inet_ntoa(bytes(4))
TOKEN = "of this job"  # noqa: S105  # a secret of a test
LOOPBACK = Interface("lo", "127.0.0.1")


@pytest.fixture
def debian(monkeypatch):
    """A host that Debian's installer has set up: its own name is 127.0.1.1."""
    find = socket.getaddrinfo

    def found(host, *args, **how):
        return find("127.0.1.1" if host == "nodea" else host, *args, **how)

    monkeypatch.setattr(socket, "getaddrinfo", found)


def no_route(monkeypatch):
    """No default route: only addresses that are here lead anywhere."""

    def on_the_way(host):
        if host in ways._ELSEWHERE:
            raise OSError("no route to host")
        return "127.0.0.1"

    monkeypatch.setattr(ways, "_on_the_way_to", on_the_way)


@pytest.mark.parametrize(
    ("host", "addresses", "expected"),
    [
        ("nodea", ["127.0.1.1"], True),
        ("nodea.example.com", ["127.0.0.1", "::1"], True),
        ("nodea", ["127.0.1.1", "10.0.0.7"], False),
        ("nodea", ["10.0.0.7"], False),
        ("localhost", ["127.0.0.1"], False),
        ("localhost.localdomain", ["::1"], False),
        ("127.0.0.1", ["127.0.0.1"], False),
        ("::1", ["::1"], False),
        ("fe80::1%eth0", ["fe80::1%eth0"], False),
    ],
)
def test_a_name_that_stands_for_loopback_means_this_host(host, addresses, expected):
    """Who writes localhost means it; who writes his name means an address that others reach."""
    assert expected is ways.names_this_host(host, addresses)


@pytest.mark.usefixtures("debian")
def test_a_rank_0_that_is_127_0_1_1_gives_others_an_address_that_they_reach(monkeypatch):
    """It gave them loopback, where each of them met itself."""
    others = [Interface("eth0", "fe80::1%eth0"), Interface("eth0", "fd00::7")]
    no_route(monkeypatch)
    place = rendezvous.Place(rank=0, size=2, host="nodea", port=1, token=TOKEN)
    for here, expected in (
        ([LOOPBACK, *others, Interface("eth0", "10.77.0.1")], "10.77.0.1"),
        ([LOOPBACK, *others], "fd00::7"),
        ([LOOPBACK], "127.0.0.1"),
    ):
        monkeypatch.setattr(libc, "interfaces", lambda here=here: here)
        assert expected == own_address(place)


def test_the_default_route_comes_first(monkeypatch):
    """A host of many interfaces has one that leads elsewhere."""
    ways_to = {"nodea": "127.0.1.1", ways._ELSEWHERE[0]: "10.0.0.7"}
    monkeypatch.setattr(ways, "_on_the_way_to", ways_to.__getitem__)

    assert "10.0.0.7" == ways.own_address("nodea")


@pytest.mark.usefixtures("debian")
@pytest.mark.parametrize(
    ("host", "expected"), [("nodea", {ALL, "::"}), ("localhost", {"127.0.0.1", "::1"})]
)
def test_rank_0_listens_where_others_come_to(host, expected):
    """It listened at 127.0.1.1, and every other rank waited until its time was up."""

    async def bound():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        found = await listen(host, port)
        names = {sock.getsockname()[0] for sock in found}
        for sock in found:
            sock.close()
        return names

    assert asyncio.run(bound()) <= expected
