"""Messages where NICs have died: over those that live, each at most once."""

from __future__ import annotations

import pytest

from tep.errors import FabricError
from tests.support.couple import pair


def send(cluster, text: bytes):
    a, b = cluster.engines
    return a.submit_send(b.main_address, text)


def test_messages_reach_a_peer_that_has_lost_its_first_nic() -> None:
    """The pool was on NIC 0 alone: a peer that lost it could never be told anything again."""
    cluster, _ = pair()
    with cluster:
        got: list[bytes] = []
        cluster.engines[1].submit_recvs(64, 4, lambda view: got.append(bytes(view)))
        send(cluster, b"before").wait()
        cluster.fabric.kill_nic("b", 0)
        with pytest.raises(FabricError, match="UNREACHABLE"):
            send(cluster, b"lost").wait()  # whether it got there is not known: not sent again
        for k in range(8):
            send(cluster, b"%d" % k).wait()

    assert [b"before", *(b"%d" % k for k in range(8))] == got


def test_messages_leave_over_a_nic_of_ours_that_lives() -> None:
    """Our own dead NIC says so itself, and nothing is lost with it."""
    cluster, _ = pair()
    with cluster:
        got: list[bytes] = []
        cluster.engines[1].submit_recvs(64, 4, lambda view: got.append(bytes(view)))
        cluster.fabric.kill_nic("a", 0)
        cluster.env.run(until=cluster.env.now + 10_000_000)
        send(cluster, b"over the other").wait()

    assert [b"over the other"] == got


def test_a_pool_opened_after_a_nic_died_is_on_the_others() -> None:
    """Buffers given to a dead NIC receive nothing."""
    cluster, _ = pair()
    with cluster:
        got: list[bytes] = []
        cluster.fabric.kill_nic("b", 0)
        cluster.env.run(until=cluster.env.now + 10_000_000)
        cluster.engines[1].submit_recvs(64, 4, lambda view: got.append(bytes(view)))
        with pytest.raises(FabricError, match="UNREACHABLE"):
            send(cluster, b"lost").wait()
        send(cluster, b"found").wait()

    assert [b"found"] == got
