"""Messages over libfabric: frames between an outgoing side and a pool of receive buffers."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from tep.backends.libfabric import frames
from tep.backends.libfabric.peers import Inbox, Outgoing


class Wire:
    """The messages that one end says; takes the place of Peers."""

    def __init__(self, me, out, done):
        self.me = me
        self.out = out
        self.parts = SimpleNamespace(done=done, timeout_s=1.0)

    def say(self, peer, frame):
        self.out.append((peer, frame))

    def doubt(self, peer, now_s):
        """Ask nobody."""


@given(st.data(), st.integers(1, 3), st.integers(1, 12))
def test_messages_pass_whatever_order_their_frames_arrive_in(data, buffers, count):
    """EFA delivers a Go before the Wait that it answers: the message waited for ever."""
    out, sent, received, texts = [], deque(), deque(), []
    a, b = (SimpleNamespace(data=name, over=False) for name in (b"a", b"b"))
    outgoing, inbox = Outgoing(Wire(b"a", out, sent)), Inbox(Wire(b"b", out, received))
    for k in range(count):
        assert outgoing.send(b, b"%d" % k, k, 0.0, is_control=False)
    inbox.add(16, buffers)
    while out or received:
        if received and (not out or data.draw(st.booleans())):
            slot = received.popleft()[5]
            texts.append(bytes(inbox.view(slot)))
            inbox.give_back(slot)
            continue
        _, frame = out.pop(data.draw(st.integers(0, len(out) - 1)))
        match frame:
            case frames.Data():
                inbox.take_data(a, frame)
            case frames.Ack():
                outgoing.take_ack(frame)
            case frames.Wait() | frames.Go():
                outgoing.balance(frame, 0.0)

    assert sorted(b"%d" % k for k in range(count)) == sorted(texts)
    assert {} == outgoing.open


def test_a_message_that_is_offered_again_waits_for_one_buffer():
    """It was told twice of a buffer, and another one, for which there was the second, never."""
    out, received = [], deque()
    a, inbox = SimpleNamespace(data=b"a"), Inbox(Wire(b"b", out, received))
    for number in (1, 1, 2):
        inbox.take_data(a, frames.Data(b"a", number, b"text"))
    out.clear()
    inbox.add(16, 2)
    assert [frames.Go(b"b", 1), frames.Go(b"b", 2)] == [frame for _, frame in out]


def test_a_message_whose_go_was_lost_is_offered_anew():
    """A connection that broke took the Go along: its sender waited for a buffer for ever."""
    out, sent, received = [], deque(), deque()
    b = SimpleNamespace(data=b"b", over=False)
    outgoing, inbox = Outgoing(Wire(b"a", out, sent)), Inbox(Wire(b"b", out, received))
    outgoing.send(b, b"text", 1, 0.0, is_control=False)
    inbox.take_data(b, out.pop()[1])
    outgoing.balance(out.pop()[1], 0.0)
    inbox.add(16, 1)
    out.clear()  # the Go
    outgoing.look(2.0)
    inbox.take_data(b, out.pop()[1])

    assert 1 == len(received)
