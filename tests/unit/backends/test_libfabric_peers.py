"""What a NIC of libfabric does about a peer that takes nothing, and about answers of strangers."""

from __future__ import annotations

import errno
import struct
import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from tep.backends.base import Column, DomainKey, Status, WriteBatch
from tep.backends.ffi.libfabric import FI_EAGAIN, ready
from tep.backends.libfabric import frames
from tep.backends.libfabric.objects import Region
from tep.backends.libfabric.peer import Peer, State
from tep.backends.libfabric.peers import Outgoing, Peers
from tep.backends.libfabric.rows import Rows
from tep.backends.libfabric.rules import RULES, NicAddress
from tep.backends.libfabric.slots import Slots
from tep.base.errors import FabricError
from tep.memory.source import adapt

TIMEOUT_S = 1.0


def address(port: int) -> NicAddress:
    raw = struct.pack("<H", 2) + struct.pack(">H", port) + bytes([127, 0, 0, 1]) + bytes(8)
    return NicAddress("tcp", 1, "lo", raw)


class Nic:
    """A NIC whose next frame goes as `send` says, if it has an endpoint at all."""

    failure = ""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.has_endpoints = True

    def insert(self, raw: bytes) -> int:
        return raw[3]

    def open_endpoint(self) -> SimpleNamespace:
        if not self.has_endpoints:
            raise FabricError("no descriptor is left", code="PROVIDER")
        return SimpleNamespace(close=lambda: None)

    def send(self, _peer: Peer, _endpoint: object, _data: bytes) -> bool:
        if self.fault is not None:
            raise self.fault
        return False


class End:
    """The peers of such a NIC, and one that has just answered."""

    def __init__(self) -> None:
        self.nic, self.over = Nic(), list[Peer]()
        self.parts = SimpleNamespace(
            nic=self.nic, mailbox=self.nic, rules=RULES["tcp"], timeout_s=TIMEOUT_S
        )
        self.peers = Peers(self.parts, address(1), object(), self.over.append)
        self.peer = self.peers.find(address(2).to_bytes())
        self.peers.is_ready(self.peer, 1.0)


@pytest.mark.parametrize("has_endpoints", [True, False])
def test_a_peer_to_whom_nothing_leaves_is_over_in_time(has_endpoints: bool) -> None:
    """Frames to it waited for ever, and with them the rows that a greeting goes before."""
    end = End()
    end.nic.has_endpoints = has_endpoints
    end.peers.say(end.peer, frames.Welcome(end.peers.me))
    for now_s in (5.0, 5.5, 5.0 + TIMEOUT_S):
        assert not end.peers.flush(end.peer, now_s)
        end.peers.look(end.peer, None, now_s)
        assert [] == end.over
    end.peers.look(end.peer, None, 5.1 + TIMEOUT_S)

    assert [end.peer] == end.over
    assert State.SILENT is end.peer.state


def test_a_peer_that_has_rows_is_given_the_time_of_its_rows() -> None:
    """A long row to it keeps frames back: all that went there failed, though it moved."""
    end = End()
    end.peers.say(end.peer, frames.Welcome(end.peers.me))
    assert not end.peers.flush(end.peer, 5.0)
    end.peer.open = 1
    end.peers.look(end.peer, 99.0, 5.1 + TIMEOUT_S)
    assert [] == end.over
    end.peers.look(end.peer, 5.0, 5.1 + TIMEOUT_S)
    assert [end.peer] == end.over


def test_a_frame_that_is_refused_makes_the_nic_ask_whether_its_peer_lives() -> None:
    """An error of one connection ended the worker, and with it every transfer."""
    end = End()
    end.nic.fault = ConnectionResetError("reset")
    end.peers.say(end.peer, frames.Welcome(end.peers.me))

    assert not end.peers.flush(end.peer, 2.0)
    assert State.CONNECTING is end.peer.state
    assert isinstance(end.peer.outbox[0], frames.Hello)


@pytest.mark.parametrize("what", ["open", "outbox", "sends", "lost"])
def test_a_peer_is_forgotten_when_nothing_goes_to_it_any_more(what: str) -> None:
    """Its endpoint was closed under what it had to send: a message that nobody answered for."""
    end = End()
    end.peers.endpoint(end.peer)
    end.peer.forget_s = 10.0
    busy = {"open": 1, "sends": 1, "outbox": deque([b"frame"]), "lost": [(1, 0, 7)]}[what]
    quiet = getattr(end.peer, what)
    setattr(end.peer, what, busy)
    end.peers.let_go(end.peer, 9.0)
    assert State.READY is end.peer.state
    setattr(end.peer, what, quiet)
    end.peers.let_go(end.peer, 9.0)

    assert State.SILENT is end.peer.state
    assert end.peer.endpoint is None


def test_a_peer_that_was_forgotten_and_has_rows_again_is_kept() -> None:
    """The engine has met it anew; these rows would fail as those of a peer that is silent."""
    end = End()
    end.peer.forget_s = 10.0
    end.peer.held.append(("a batch", 0, 99.0))
    end.peers.let_go(end.peer, 11.0)
    assert (State.READY, 0.0, []) == (end.peer.state, end.peer.forget_s, end.over)


def test_only_its_peer_answers_for_a_message() -> None:
    """A stranger, or an answer that came twice, ended a message of somebody else."""
    sent: deque[tuple[int, ...]] = deque()
    said: list[frames.Frame] = []
    parts = SimpleNamespace(done=sent, timeout_s=1.0)
    wire = SimpleNamespace(me=b"a", say=lambda _, frame: said.append(frame), parts=parts)
    outgoing = Outgoing(wire)
    peer = SimpleNamespace(data=b"b", over=False)
    assert outgoing.send(peer, b"text", 7, 0.0, is_control=False)
    (data,) = said
    assert isinstance(data, frames.Data)
    for sender, number in ((b"c", data.number), (b"b", data.number + 1)):
        outgoing.take_ack(frames.Ack(sender, number, Status.OK))
        outgoing.balance(frames.Wait(sender, number), 0.0)
        outgoing.balance(frames.Go(sender, number), 0.0)
    assert ([], [data]) == (list(sent), said)
    outgoing.take_ack(frames.Ack(b"b", data.number, Status.OK))

    assert [(int(Status.OK), 7)] == [(entry[1], entry[5]) for entry in sent]


# ---------------------------------------------------------------- rows to a peer


class Wire(Nic):
    """A NIC that takes rows, and frames, as long as `full` is false."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.refuses = 0
        self.tried = 0

    def open_endpoint(self) -> SimpleNamespace:
        return SimpleNamespace(writemsg=self.write, ready=ready(1), close=lambda: None)

    def write(self, *_: object) -> int:
        self.tried += 1
        return -self.refuses or (-FI_EAGAIN if self.full else 0)


class RowsEnd(End):
    """The rows of one NIC, to a peer that has just answered, from a region of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        parts = self.parts
        self.nic = parts.nic = Wire()
        self.slots = parts.slots = Slots(1024, flags=1)
        self.done = parts.done = deque[tuple[int, ...]]()
        memory = adapt(bytearray(1 << 20))
        self.at = memory.ptr
        self.region = Region([], memory, DomainKey(1, 1, 0), 0, False)
        parts.regions = SimpleNamespace(by_lkey={1: self.region})
        parts.caps = SimpleNamespace(sq_depth=1024, max_write_bytes=1 << 20)
        parts.mailbox = SimpleNamespace(region=self.region)
        self.rows = Rows(self.peers, lambda _: None)

    def post(self, n: int = 1, lkey: int = 1) -> int:
        at: Column = self.at
        dst: Column = 4096
        if n > 1:
            dst = np.arange(n, dtype=np.uint64)
            at = dst + np.uint64(self.at)
        return self.rows.post(WriteBatch(n, self.peer.index, at, lkey, dst, 7, 1, None, 9), 0, n)

    def statuses(self) -> list[int]:
        return [entry[1] for entry in self.done]


@pytest.mark.parametrize("n", [1, 40])
def test_rows_from_memory_that_was_withdrawn_fail_and_go_nowhere(n: int) -> None:
    """A peer that is ready took them the short way: an exception ended the worker."""
    end = RowsEnd()
    assert n == end.post(n, lkey=2)

    assert [Status.LOCAL_KEY] * n == end.statuses()
    assert 0 == end.nic.tried == end.slots.open


def test_rows_of_one_key_to_one_peer_are_posted_together() -> None:
    """One by one they cost ten times as much."""
    end = RowsEnd()

    assert 40 == end.post(40) == end.slots.open
    assert [40] == [ticket.open for ticket in end.slots.tickets.values()]


def test_a_row_waits_for_those_in_flight_and_else_for_its_peers_word() -> None:
    """Where nothing is in flight, nothing would tell when to offer the row again."""
    end = RowsEnd()
    end.nic.full = True
    assert 1 == end.post(), "it is held"
    assert 1 == end.rows.waiting
    assert State.CONNECTING is end.peer.state, "it is asked whether it lives"

    end = RowsEnd()
    assert 1 == end.post()
    end.nic.full = True
    assert 0 == end.post(), "it is offered again once the first is back"
    assert State.READY is end.peer.state


def test_a_row_that_is_refused_fails_and_says_with_which_errno() -> None:
    """PROVIDER alone tells nobody what to mend."""
    end = RowsEnd()
    assert 0 == end.rows.refusal, "none was refused yet"
    end.nic.refuses = errno.EINVAL

    assert 1 == end.post()
    assert [Status.PROVIDER] == end.statuses()
    assert errno.EINVAL == end.rows.refusal


def test_rows_behind_those_that_failed_in_time_fail_with_them() -> None:
    """A thousand rows to a dead peer would each wait for a time of its own, one after another."""
    end = RowsEnd()
    end.peer.state = State.SILENT
    assert 1 == end.post()
    end.rows.expire(end.peer, time.monotonic())
    assert [] == end.statuses(), "its time has not come"
    end.rows.expire(end.peer, time.monotonic() + 2 * TIMEOUT_S)
    assert 1 == end.post()
    assert [Status.UNREACHABLE] * 2 == end.statuses()

    end.rows.said()
    assert 1 == end.post()
    assert 1 == end.rows.waiting, "who posts it knows of the failure, and wants another try"
    end.rows.expire(end.peer, time.monotonic() + 2 * TIMEOUT_S)
    end.peers.is_ready(end.peer, 2.0)
    assert 1 == end.post()
    assert 1 == end.slots.open, "it has answered meanwhile"
