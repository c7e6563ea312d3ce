"""The verbs handshake under loss, doubling, delay and new attempts: invariants as sentences."""

from __future__ import annotations

import contextlib
import itertools
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tep.backends.verbs.handshake import Address, Hello, Kind, Negotiation, Phase
from tep.base.errors import BadDescriptor

PATIENCE_S = 4.0
RESEND_S = 0.02


class End:
    """One side: what the negotiation asks for is written down and checked."""

    def __init__(self, net, name):
        self.net = net
        self.name = name
        self.other = None
        self.qps = None  # (our attempt, attempt of the peer that ours receive from or None)
        self.sends = False
        self.asked = (
            None  # the queue pairs of which it was asked whether the peer has their other end
        )
        self.gave_up = 0
        self.negotiation = Negotiation(
            self, itertools.count(1), patience_s=PATIENCE_S, resend_s=RESEND_S
        )

    def begin(self):
        self.qps = (self.negotiation.attempt, None)
        self.sends = False

    def ready(self, hello):
        mine, theirs = self.qps
        assert theirs is None, "queue pairs are readied once"
        self.qps = (mine, hello.qps[0][0])

    def up(self):
        mine, theirs = self.qps
        assert theirs is not None, "only what can receive may send"
        # Rule 1, unless the peer has begun anew since: then what is sent here fails, and is lost.
        there = self.other.qps
        if there is not None and there[0] == theirs:
            assert there[1] == mine, f"{self.name} sends before its peer can receive"
        assert self.qps != self.asked, "the peer had dropped this before it was asked"
        self.sends = True

    def say(self, kind, attempt, echo, payload=b""):
        number = 0 if self.qps is None else self.qps[0]
        qps = ((number, 0), (number, 0)) if kind in {Kind.REQ, Kind.REP} else ()
        self.net.send(
            self.other,
            Hello(
                kind=kind,
                sender=ADDRESS,
                target=0,
                attempt=attempt,
                echo=echo,
                qps=qps,
                payload=payload,
            ),
        )

    def give_up(self):
        self.gave_up += 1

    def drop(self):
        """Lose the connection, as behind a fence, and say nothing."""
        self.negotiation.lose()
        self.qps, self.sends = None, False

    def check(self):
        """Ask whether the connection stands, if there is one."""
        if self.negotiation.connected:
            mine, theirs = self.qps
            self.asked = None if self.other.qps in {(theirs, mine), (theirs, None)} else self.qps
            self.sends = False
            self.negotiation.check(self.net.now_s)


ADDRESS = Address(link=2, lid=0, gid=bytes(16), gid_type=2, ud_qpn=17, qkey=1, epoch=1, identity=1)


class Net:
    """Datagrams between two ends, in the hands of a list of fates."""

    def __init__(self, fates):
        self.fates = iter(fates)
        self.now_s = 0.0
        self.flying = []
        self.sent = []
        self.order = itertools.count()
        self.left, self.right = End(self, "left"), End(self, "right")
        self.left.other, self.right.other = self.right, self.left

    def send(self, to, hello):
        hello = Hello.decode(hello.encode())
        self.sent.append((to, hello))
        lost, copies, delay_ms = next(self.fates, (False, 1, 1))
        for copy in range(0 if lost else copies):
            due_s = self.now_s + (delay_ms + 7 * copy) / 1000
            self.flying.append((due_s, next(self.order), to, hello))

    def run(self, until_s):
        while True:
            events = [(due_s, order) for due_s, order, _, _ in self.flying]
            ends = (self.left, self.right)
            events += [(e.negotiation.next_s, -1) for e in ends if e.negotiation.next_s is not None]
            if not events or min(events)[0] > until_s:
                self.now_s = until_s
                return
            self.now_s = max(self.now_s, min(events)[0])
            for flight in sorted(self.flying):
                if flight[0] <= self.now_s:
                    self.flying.remove(flight)
                    flight[2].negotiation.hear(flight[3], self.now_s)
            for end in ends:
                end.negotiation.tick(self.now_s)

    @property
    def joined(self):
        """Return True if both ends send on queue pairs that belong together."""
        left, right = self.left, self.right
        return left.sends and right.sends and left.qps == right.qps[::-1]


FATES = st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(1, 120)), max_size=24)


@given(FATES, st.sampled_from(["left", "right", "both"]), st.integers(0, 60))
def test_two_ends_always_come_together(fates, who, gap_ms):
    """Whatever the network does to the first datagrams, both ends end up on one connection."""
    net = Net(fates)
    if who != "right":
        net.left.negotiation.start(net.now_s)
    net.run(gap_ms / 1000)
    if who != "left" and net.right.negotiation.phase is Phase.IDLE:
        net.right.negotiation.start(net.now_s)
    net.run(PATIENCE_S + 1)

    assert net.joined
    assert 0 == net.left.gave_up + net.right.gave_up


@given(
    FATES, st.lists(st.tuples(st.sampled_from(["left", "right"]), st.integers(0, 200)), max_size=5)
)
@example([], [("right", 0), ("right", 0), ("left", 0)])  # each answers what the other has left
def test_a_lost_connection_is_made_anew(fates, breaks):
    """After any number of breaks at either end, asking again brings both ends together again."""
    net = Net(fates)
    net.left.negotiation.start(net.now_s)
    for name, after_ms in breaks:
        net.run(net.now_s + after_ms / 1000)
        end = getattr(net, name)
        end.negotiation.lose()
        end.sends = False
        end.negotiation.start(net.now_s)
    net.run(net.now_s + PATIENCE_S + 1)

    assert net.joined


DEEDS = st.tuples(
    st.sampled_from(["left", "right"]),
    st.sampled_from(["drop", "check", "start"]),
    st.integers(0, 200),
)


LATE_REQUEST = [(False, 1, 1)] * 17  # it is answered when who asked has dropped what it asked for
LATE_REQUEST[1], LATE_REQUEST[11], LATE_REQUEST[12] = (False, 1, 21), (False, 1, 20), (False, 1, 3)
LATE_REQUEST[2] = LATE_REQUEST[16] = (True, 1, 1)


@given(FATES, st.lists(DEEDS, max_size=8), st.integers(0, 60))
@example(
    LATE_REQUEST,
    [("right", "start", 0), ("left", "drop", 23), ("right", "start", 0), ("right", "drop", 22)],
    0,
)
def test_a_fence_is_lifted_at_both_ends(fates, deeds, gap_ms):
    """Whatever was dropped and asked before, and whatever of that is late: both ends come together.

    And nobody takes an old answer for one to its question, and sends to queue pairs that are gone.
    """
    net = Net(fates)
    net.left.negotiation.start(net.now_s)
    for name, deed, after_ms in deeds:
        net.run(net.now_s + after_ms / 1000)
        end = getattr(net, name)
        if deed == "check":
            end.check()
        else:
            end.drop()
        if deed == "start":
            end.negotiation.start(net.now_s)
    net.left.drop()
    net.left.negotiation.start(net.now_s)
    net.run(net.now_s + gap_ms / 1000)
    net.right.check()
    net.run(net.now_s + PATIENCE_S + 1)

    assert net.joined


def test_an_old_answer_is_none():
    """A peer's answer from before its fence must not open the connection that it has dropped."""
    net = Net([])
    net.left.negotiation.start(net.now_s)
    net.run(1)
    net.left.check()
    net.run(2)
    assert net.joined
    net.right.drop()
    net.left.check()
    old = [hello for to, hello in net.sent if to is net.left]
    assert {Kind.REP, Kind.CHECKED} == {hello.kind for hello in old}
    for hello in old:
        net.left.negotiation.hear(hello, net.now_s)
        assert not net.left.sends, hello.kind
    net.run(3)
    assert net.joined


def test_an_old_question_changes_nothing():
    """A question that comes late broke the connection that was made since, with rows out on it."""
    net = Net([])
    net.left.negotiation.start(net.now_s)
    net.run(1)
    net.right.check()
    net.run(2)
    (old,) = [hello for _, hello in net.sent if hello.kind is Kind.CHECK]
    net.right.drop()
    net.right.negotiation.start(net.now_s)
    net.run(3)
    before = net.left.qps
    net.left.negotiation.hear(old, net.now_s)
    assert net.joined
    assert before == net.left.qps
    net.left.drop()
    net.left.negotiation.start(net.now_s)
    asking = net.left.qps
    net.left.negotiation.hear(old, net.now_s)

    assert asking == net.left.qps, "a request that is out is not made anew"


@pytest.mark.parametrize("lost", range(3))
def test_questions_to_a_peer_that_asks_do_not_drown_the_answer(lost):
    """If each third datagram is lost, it would be the third of a request and two answers."""
    net = Net((k % 3 == lost, 1, 1) for k in itertools.count())
    net.left.negotiation.start(net.now_s)
    while not net.right.negotiation.connected:
        net.run(net.now_s + 0.001)
    net.right.check()
    net.run(net.now_s + PATIENCE_S + 1)

    assert net.joined


@given(st.integers(0, 120), st.integers(0, 120))
def test_what_stands_is_left_alone(first_ms, second_ms):
    """A question at each end, at whatever time, makes no new queue pairs: rows are out on them."""
    net = Net([])
    net.left.negotiation.start(net.now_s)
    net.run(1)
    before = net.left.qps
    for after_ms, end in ((first_ms, net.left), (second_ms, net.right), (0, net.left)):
        net.run(net.now_s + after_ms / 10_000)
        end.check()
    net.run(net.now_s + 1)

    assert net.joined
    assert before == net.left.qps


@given(FATES)
def test_a_silent_peer_is_given_up_in_time(fates):
    """Nobody at the other end: within the patience, and a pause more, what waits is told."""
    net = Net(fates)
    net.right.negotiation.hear = lambda hello, now_s: None
    net.left.negotiation.start(net.now_s)
    net.run(PATIENCE_S + 0.3)

    assert 1 == net.left.gave_up
    assert Phase.IDLE is net.left.negotiation.phase
    assert net.left.negotiation.next_s is None


def test_a_short_patience_too_has_tries_enough():
    """With each third datagram lost, one try in two fails: seven were too few now and then."""
    end = End(mock.Mock(), "left")
    end.negotiation = Negotiation(end, itertools.count(1), patience_s=0.2, resend_s=0.002)
    end.negotiation.start(0.0)
    while not end.gave_up:
        end.negotiation.tick(end.negotiation.next_s)

    assert end.net.send.call_count >= 16


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else(data):
    """Anybody can send a datagram: decoding raises one kind of error, or returns a Hello."""
    for raw in (data, b"VHSK\x02\x01\x01\x02" + data):
        with contextlib.suppress(BadDescriptor):
            assert Hello.decode(raw).encode() == raw
