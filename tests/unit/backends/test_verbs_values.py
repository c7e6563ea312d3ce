"""The verbs backend's pure rooms: addresses, GID ranking, settings, statuses, ids."""

from __future__ import annotations

import ipaddress

import pytest

from tep.backends.base import Status
from tep.backends.verbs.conns import Tag, number_of, tag
from tep.backends.verbs.device import Settings, rank_gids
from tep.backends.verbs.handshake import (
    DATAGRAM_BYTES_MAX,
    Address,
    Hello,
    Kind,
    control_bytes,
    engine_of,
    gid_text,
    identity_of,
)
from tep.backends.verbs.receive import STATUS_TEXT, send_status, write_status
from tep.base.errors import BadDescriptor, UsageError


def gid(text):
    """The GID of an IP address."""
    found = ipaddress.ip_address(text)
    return b"\0" * 10 + b"\xff\xff" + found.packed if found.version == 4 else found.packed


def address(**changes):
    """An address, changed here and there."""
    values = {
        "link": 2,
        "lid": 0,
        "gid": gid("10.1.2.3"),
        "gid_type": 2,
        "ud_qpn": 0x123456,
        "qkey": 0x7FFFFFFF,
        "epoch": 2**63,
        "identity": identity_of("engine", 3),
    }
    return Address(**{**values, **changes})


def test_nics_of_one_incarnation_are_known_by_their_addresses():
    """Rows of an engine that has restarted would count for the one before."""
    first, second = (address(ud_qpn=n).encode() for n in (1, 2))
    assert engine_of(first) == engine_of(second) != engine_of(b"no address")
    for epoch in (2**63 + 1, 2**63 + 2**8, 2**62):
        assert engine_of(first) != engine_of(address(epoch=epoch).encode())


def test_an_address_survives_bytes_and_has_golden_ones():
    """Peers of another build must read the same bytes."""
    raw = address(identity=0x1122334455667788).encode()
    golden = (
        "99a55645524232" + "0200c41000000000000000000000ffff0a010203" + "02ce00123456ce7fffffff"
        "cf8000000000000000" + "cf1122334455667788"
    )

    assert golden == raw.hex()
    assert address(identity=0x1122334455667788) == Address.decode(raw)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "0 bytes"),
        (b"LOOP" + bytes(44), "is not the address of a verbs NIC"),
        (address().encode()[:-1], "55 bytes"),
        (address().encode().replace(b"VERB2", b"VERB1"), "VERB1"),
        (address(link=9).encode(), "<= 2"),
        (address(ud_qpn=1 << 24).encode(), "<= 16777215"),
        (address(gid=bytes(15)).encode(), "length >= 16"),
    ],
)
def test_bytes_that_are_no_address_are_refused(raw, why):
    """Hostile bytes must not become a route."""
    with pytest.raises(BadDescriptor, match=why):
        Address.decode(raw)


@pytest.mark.parametrize("kind", [Kind.REQ, Kind.REP, Kind.ACK])
def test_a_handshake_names_queue_pairs_where_they_belong(kind):
    """A request without any would take the message queue pair for one of rows."""
    qps = () if kind is not Kind.ACK else ((1, 2),)
    hello = Hello(kind=kind, sender=address(), target=1, attempt=1, qps=qps)

    with pytest.raises(BadDescriptor, match=f"{kind.name}: queue pairs"):
        Hello.decode(hello.encode())


def test_the_longest_datagrams_fit():
    """One that is longer than its slot would end in the next one."""
    most = address(lid=0xFFFF, qkey=2**32 - 1, epoch=2**64 - 1, identity=2**64 - 1)
    head = {"sender": most, "target": 2**64 - 1, "attempt": 2**32 - 1, "echo": 2**32 - 1}
    control = Hello(kind=Kind.CONTROL, mtu=5, payload=bytes(control_bytes(5)), **head)
    ends = {"reads": 255, "qps": ((2**24 - 1,) * 2,) * 2}
    request = Hello(kind=Kind.REQ, mtu=5, **ends, **head)

    assert request == Hello.decode(request.encode())
    assert max(len(each.encode()) for each in (control, request)) <= DATAGRAM_BYTES_MAX
    assert len(control.encode()) <= 1024  # of an MTU of 1,024 bytes


@pytest.mark.parametrize(("there", "why"), [(5, ""), (4, "subnet"), (6, "subnet")])
def test_an_infiniband_subnet_is_reached_from_within_it_alone(there, why):
    """A LID means another port in another subnet: rows would go to a stranger."""
    one, two = (address(link=1, gid=bytes(7) + bytes([k]) + bytes(8)) for k in (5, there))

    assert (why, why) == tuple(
        "subnet" if a.why_unreachable(b) else "" for a, b in ((one, two), (two, one))
    )


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (address(gid=gid("10.9.9.9")), ""),
        (address(link=1), "InfiniBand"),
        (address(gid_type=1), "RoCE v1"),
        (address(gid=gid("fe80::1")), "link-local"),
        (address(gid=gid("169.254.7.7")), "link-local"),
        (address(gid=gid("2001:db8::1")), "IPv6"),
    ],
)
def test_peers_out_of_reach_are_named_before_anything_is_sent(other, why):
    """Else the handshake times out, and nobody knows that the address was link-local."""
    assert why in address().why_unreachable(other)
    for one, two in ((address(), other), (other, address())):
        assert bool(why) == bool(one.why_unreachable(two))


def test_gids_are_ranked_routable_roce_v2_first():
    """A fixed index 0 is link-local or RoCE v1 on most machines."""
    table = [
        (0, gid("fe80::1"), 1),
        (1, gid("fe80::1"), 2),
        (2, gid("10.0.0.1"), 1),
        (3, gid("169.254.1.1"), 2),
        (4, gid("2001:db8::1"), 2),
        (5, gid("10.0.0.1"), 2),
        (6, gid("10.0.0.2"), 2),
    ]
    ranked = rank_gids(table)

    assert [5, 6, 4, 3, 1, 2, 0] == [choice.entry for choice in ranked]
    assert "GID 5 10.0.0.1: RoCE v2, routable IPv4 (rank 0)" == str(ranked[0])
    assert "fe80::1" == gid_text(gid("fe80::1"))


def test_the_identity_outlives_a_restart_and_tells_nics_apart():
    """Without it the former incarnation's rows would wait for a timeout."""
    assert identity_of("a", 0) == identity_of("a", 0)
    assert 3 == len({identity_of("a", 0), identity_of("a", 1), identity_of("b", 0)})


def test_the_promised_timeout_follows_the_settings():
    """C17: a promise that does not move with the retry count is a lie."""
    short = Settings(timeout=10, retry_cnt=2, handshake_s=0.5, drain_s=0.1)

    assert 0.5 + 0.1 + 4 * 4.096e-6 * 1024 * 3 == pytest.approx(short.peer_timeout_s)
    assert Settings().peer_timeout_s < 7


def test_settings_out_of_range_are_refused():
    """The NIC would truncate them without a word."""
    with pytest.raises(UsageError, match="retry_cnt=8; 0 to 7"):
        Settings(retry_cnt=8)


def test_every_status_has_a_meaning():
    """A status that falls through would be reported as success, or as nothing."""
    expected = {
        0: Status.OK,
        1: Status.LENGTH,
        4: Status.LOCAL_KEY,
        5: Status.FLUSHED,
        10: Status.REMOTE_KEY,
        12: Status.UNREACHABLE,
        13: Status.RNR,
        19: Status.PROVIDER,
        99: Status.PROVIDER,
    }

    assert expected == {code: write_status(code) for code in expected}
    assert Status.LENGTH == send_status(9) == send_status(11)
    assert Status.REMOTE_RANGE == write_status(9)
    assert set(Status) - {Status.OK} == set(STATUS_TEXT)


def test_ids_keep_kind_and_object_apart():
    """An error's id is all that is known of it."""
    assert 3 == len({tag(kind) >> 60 for kind in (Tag.RUN, Tag.LOOSE, Tag.IMM)})
    assert (1 << 44) - 1 == number_of(tag(Tag.LOOSE, (1 << 44) - 1) + 0xFFFF)
    assert tag(Tag.LOOSE) > max(tag(kind, (1 << 44) - 1) + 0xFFFF for kind in (Tag.RUN, Tag.IMM))
