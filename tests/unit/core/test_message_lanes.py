"""Messages where NICs have died: over those that live, each at most once."""

from __future__ import annotations

import errno
import os
from unittest import mock

import pytest

from tep.base.errors import FabricError
from tests.support.couple import pair
from tests.support.inside import machine_of
from tests.support.script import scripted


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


@pytest.mark.parametrize("number", [errno.ENOMEM, None, errno.EINTR])
def test_a_nic_that_raises_is_left_unless_a_signal_came(number: int | None) -> None:
    """The message has not left: it goes over the next NIC, or over the same one after a signal."""
    error = MemoryError("no") if number is None else OSError(number, os.strerror(number))
    own, other = scripted(2), scripted(2, name="b")
    with mock.patch.object(own.nics[0], "post_send", side_effect=[error, True]):
        sent = own.engine.submit_send(other.engine.main_address, b"x")
        own.turn()
    signal = number == errno.EINTR
    assert (not signal) == len(own.nics[1].sent)
    assert "posted" in sent.describe()
    assert (signal, True) == own.engine.stats().nics_up


def test_messages_that_find_no_connection_all_fail_at_once() -> None:
    """One that fails is work like one that leaves: the others to that peer need not wait for it."""
    own, other = scripted(), scripted(name="b")
    error = FabricError("out of queue pairs", code="PROVIDER")
    own.nics[0].refuse_connect[other.nics[0].address] = error
    sent = [own.engine.submit_send(other.engine.main_address, b"x") for _ in range(3)]
    own.turn()
    assert [error] * 3 == [message.error for message in sent]


def test_messages_of_a_nic_that_cannot_be_polled_end() -> None:
    """Nobody hands out their completions any more: who waits for one would wait for ever."""
    own, other = scripted(2), scripted(2, name="b")
    first = own.engine.submit_send(other.engine.main_address, b"x")
    own.turn()
    assert 1 == len(own.nics[0].sent)
    with mock.patch.object(own.nics[0], "poll", side_effect=OSError(errno.EIO, "gone")):
        own.turn()
        second = own.engine.submit_send(other.engine.main_address, b"y")
        own.turn(20)
    with pytest.raises(FabricError, match="failed on NIC 0: NIC_DOWN"):
        first.result()
    assert not second.finished, "it is on the other NIC"
    own.nics[1].acknowledge()
    own.turn()
    assert second.ok


def test_nics_forget_a_removed_peer_where_they_had_met_it() -> None:
    """A connection that is kept for a peer that left fills the NIC in time."""
    own, other = scripted(2), scripted(2, name="b")
    own.engine.submit_send(other.engine.main_address, b"x")
    own.turn()
    own.nics[0].acknowledge()
    own.turn()
    [(peer, _, _)] = own.nics[0].sent
    with (
        mock.patch.object(own.nics[0], "forget") as forgets,
        mock.patch.object(own.nics[1], "forget") as none,
    ):
        removal = own.engine.remove_peer(other.engine.main_address)
        own.turn(2)
    assert removal.ok
    forgets.assert_called_once_with(peer)
    none.assert_not_called()


def test_a_message_that_finds_no_room_is_no_work() -> None:
    """An engine that always has work never sleeps; one that had some looks again before it does."""
    own = scripted()
    own.nics[0].send_room = 0
    own.engine.submit_send(own.engine.main_address, b"x")
    own.turn()
    assert not own.driver.turn()
    own.nics[0].send_room = 1
    assert own.driver.turn()
    assert not own.driver.turn()


def test_a_message_that_was_taken_back_leaves_one_place() -> None:
    """An engine that miscounts what waits goes to sleep with messages in its queue."""
    own = scripted()
    own.nics[0].send_room = 0
    first, second = (own.engine.submit_send(own.engine.main_address, x) for x in (b"x", b"y"))
    own.turn()
    first.cancel()
    own.turn()
    assert machine_of(own.engine).busy()
    own.nics[0].send_room = 1
    own.turn()
    assert [b"y"] == [payload for _, payload, _ in own.nics[0].sent]
    own.nics[0].acknowledge()
    own.turn()
    assert second.ok
