"""Channels of tep.compat.nixl over a net that loses, repeats in doubt, and mixes up: by drawn runs.

Law: what arrives is what was sent, in order, once each; who is told that a message arrived is told
the truth; and every message gets exactly one verdict.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tep
from tep.compat.nixl import channel
from tep.compat.nixl.channel import Channel, Channels

FATES = st.sampled_from(["arrives"] * 5 + ["lost"] * 2 + ["in doubt"])


class Net:
    """Two engines whose messages wait until a fate is drawn for each, and then for a callback."""

    def __init__(self):
        self.waiting, self.landed, self.ends = [], [], {}

    def engine(self, name):
        return Engine(self, tep.NetAddr("loopback", name, 1, (name.encode(),), (1,)))

    def end(self, at, fate):
        """One message that waits ends, and is handed to its receiver."""
        self.land(at, fate)
        while self.landed:
            self.hand(0)

    def land(self, at, fate):
        """One message that waits ends: it is in a buffer of its receiver, or lost."""
        who, to, raw, on_done = self.waiting.pop(at)
        if fate != "lost":
            self.landed.append((who, to, raw))
        on_done(SimpleNamespace(error=None if fate == "arrives" else "it was lost"))

    def hand(self, at):
        """A receiver is called with one message that it has."""
        who, to, raw = self.landed.pop(at)
        sender = tep.Sender(who.domains[0], who.domains[0], None, bytes)
        self.ends[to.domains[0]](raw, sender)


class Engine:
    def __init__(self, net, addr):
        self._net, self.main_address, self.refuses = net, addr, False

    def submit_send(self, to, raw, on_done):
        if self.refuses:
            raise tep.BusyError("refused")
        self._net.waiting.append((self.main_address, to, raw, on_done))

    def submit_recvs(self, nbytes, count, callback, *, with_sender):
        self._net.ends[self.main_address.domains[0]] = callback

    def on_peer(self, callback):
        self.heard = callback


class Pair:
    """An agent that sends to another one."""

    def __init__(self):
        self.net = Net()
        self.got, self.verdicts, self.sent = [], {}, 0
        self.engine, there = self.net.engine("a"), self.net.engine("b")
        self.here = Channels(self.engine, "A", lambda *_: None, lambda *_: None)
        self.there = Channels(there, "B", lambda _, body: self.got.append(body), lambda *_: None)
        self.channel = self.here.to("B", there.main_address.by_address())

    def send(self, npieces=1):
        number, self.sent = self.sent, self.sent + 1
        body = f"{number} {npieces} ".encode().ljust((npieces - 1) * channel.PIECE + 8, b".")
        told = self.verdicts.setdefault(number, [])
        self.channel.send(body, lambda: told.append(""), told.append)

    def numbers(self):
        for body in self.got:
            _, npieces, _ = body.split(b" ", 2)
            assert len(body) == (int(npieces) - 1) * channel.PIECE + 8
        return [int(body.split()[0]) for body in self.got]

    def check(self):
        numbers = self.numbers()
        assert sorted(set(numbers)) == numbers, "twice, or in another order"
        assert all(len(told) <= 1 for told in self.verdicts.values())
        if self.net.landed:
            return
        arrived = {number for number, told in self.verdicts.items() if told == [""]}
        assert arrived <= set(numbers), "it was told to have arrived"


def step(data, net):
    """A message ends, or is handed to its receiver; the draw says which."""
    at = data.draw(st.integers(0, len(net.waiting) + len(net.landed) - 1))
    if at < len(net.waiting):
        net.land(at, data.draw(FATES))
    else:
        net.hand(at - len(net.waiting))


def test_a_later_message_overtakes_one_that_its_sender_knows_to_be_there():
    """Callbacks of messages have no order; one that was overtaken was dropped silently."""
    pair = Pair()
    pair.send()
    pair.net.land(0, "arrives")
    pair.send()
    pair.net.land(0, "arrives")
    pair.net.hand(1)
    assert [] == pair.numbers()
    pair.net.hand(0)

    assert [0, 1] == pair.numbers()
    assert {0: [""], 1: [""]} == pair.verdicts


def test_what_was_given_up_takes_nothing_along_that_is_there():
    """A gap is skipped in its turn only: what came before it may be handed over after it."""
    pair = Pair()
    pair.send()
    pair.net.land(0, "arrives")
    pair.send()
    while len(pair.verdicts[1]) == 0:
        pair.net.land(0, "lost")
    pair.send()
    pair.net.land(0, "arrives")
    pair.net.hand(1)
    assert [] == pair.numbers()
    pair.net.hand(0)

    assert [0, 2] == pair.numbers()
    assert {0: [""], 1: ["it was lost"], 2: [""]} == pair.verdicts


@given(data=st.data())
def test_each_message_arrives_in_order_or_is_told_to_be_lost(data):
    """A notification that vanished was a request that waited for ever."""
    pair = Pair()
    for _ in range(data.draw(st.integers(1, 60))):
        if data.draw(st.booleans()) or not (pair.net.waiting or pair.net.landed):
            pair.send(data.draw(st.sampled_from([1, 1, 2, 5])))
        else:
            step(data, pair.net)
        pair.check()
    while pair.net.waiting or pair.net.landed:
        step(data, pair.net)
        pair.check()

    assert all(pair.verdicts.values()), "a message without a verdict"
    pair.send()
    while pair.net.waiting:
        pair.net.end(0, "arrives")
    pair.check()
    assert pair.sent - 1 == pair.numbers()[-1], "what was lost takes nothing along"
    assert not pair.channel._sending
    assert pair.there.garbled == pair.there.foreign == 0


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_what_is_on_its_way_and_out_of_order_is_bounded(order):
    """A sender that never begins filled the receiver's memory."""
    pair = Pair()
    for _ in range(3 * channel.WINDOW):
        pair.send()
    assert channel.WINDOW == len(pair.net.waiting)
    early = 0
    while pair.net.waiting:
        at = 0 if order > 0 else min(len(pair.net.waiting), channel.WINDOW) - 1
        pair.net.end(at, "arrives")
        (theirs,) = pair.there._known.values()
        early = max(early, len(theirs.early))
    pair.check()

    assert early <= channel.WINDOW
    assert list(range(3 * channel.WINDOW)) == pair.numbers()


def test_a_message_that_cannot_be_sent_is_told_at_once_and_alone():
    """The engine may refuse one; those before and after are another matter."""
    pair = Pair()
    pair.send()
    pair.net.end(0, "arrives")
    pair.engine.refuses = True
    for _ in range(2000):  # none of them inside the other
        pair.send()
    pair.engine.refuses = False
    pair.send()
    while pair.net.waiting:
        pair.net.end(0, "arrives")
    pair.check()

    assert [0, 2001] == pair.numbers()
    assert all(told == ["refused"] for k, told in pair.verdicts.items() if 0 < k <= 2000)
    with pytest.raises(tep.UsageError, match="are possible"):
        pair.channel.send(bytes(channel.BODY_MAX + 1))


def test_the_name_of_an_agent_that_was_forgotten_is_free(monkeypatch):
    """An agent that is started again, with another address, would be heard no more."""
    monkeypatch.setattr(channel, "AGENTS_MAX", 2)
    net, got = Net(), []
    engine = net.engine("b")
    Channels(engine, "B", lambda one, body: got.append((one.name, body)), lambda *_: None)
    for address, name in (("e0", "A"), ("e1", "C"), ("e2", "D"), ("e3", "A"), ("e2", "D")):
        own = Channels(net.engine(address), name, lambda *_: None, lambda *_: None)
        one = own.to("B", engine.main_address.by_address())
        one.send(address.encode(), lambda: None, lambda _: None)
        net.end(0, "arrives")

    assert [("A", b"e0"), ("C", b"e1"), ("D", b"e2"), ("A", b"e3")] == got[:4]


def test_nobody_takes_the_name_of_the_agent_itself():
    """It may be told to forget its own name; whoever spoke under it then would be believed."""
    net, got = Net(), []
    engine = net.engine("b")
    there = Channels(engine, "B", lambda one, body: got.append((one.name, body)), lambda *_: None)
    there.forget("B")
    forger = Channels(net.engine("e"), "B", lambda *_: None, lambda *_: None)
    one = forger.to("B", engine.main_address.by_address())
    one.send(b"forged", lambda: None, lambda _: None)
    net.end(0, "arrives")
    assert [] == got


def test_pieces_of_two_messages_are_never_joined():
    """The end of one message, whose beginning was given up, went on the beginning of another."""
    one = Channel(SimpleNamespace(garbled=0), "A", tep.NetAddr("loopback", "a", 1, (b"a",), (1,)))

    def take(seq, *gaps, last=True, body=b""):
        return list(one.take(channel.Frame("A", b"", seq, 0, gaps, last, body)))

    assert [] == take(0, last=False, body=b"A0") + take(1, last=False, body=b"A1")
    assert [] == take(5, body=b"B1")
    assert [] == take(-1, (2, 6))
    assert [b"C"] == take(6, body=b"C")


def test_what_cannot_be_said_to_be_lost_has_one_verdict():
    """A caller that is told twice fails a request of later."""
    pair = Pair()
    pair.send()
    pair.send()
    pair.net.end(1, "arrives")  # and stays behind the first
    for _ in range(50):
        if pair.net.waiting:
            pair.net.end(0, "lost")

    assert {0: ["it was lost"], 1: ["it was lost"]} == pair.verdicts
    assert not pair.net.waiting


def test_gaps_of_a_frame_are_few():
    """A frame has to fit into a datagram; beyond, what is between two gaps is given up too."""
    pair = Pair()
    for _ in range(3 * channel.GAPS_MAX):
        pair.send()
        pair.send()
        while not pair.verdicts[pair.sent - 1]:
            pair.net.land(len(pair.net.waiting) - 1, "lost")
        assert len(pair.channel._gaps) <= channel.GAPS_MAX
        pair.check()
    pair.send()
    while pair.net.waiting:
        pair.net.end(0, "arrives")
    pair.check()

    assert all(pair.verdicts.values())
    assert [0, 2, 4, 6, 8, 10, 12] == pair.numbers()[:7], "each told apart while there is room"
    assert pair.sent - 1 == pair.numbers()[-1]
    assert not pair.channel._gaps


NUMBERS = st.integers(-1, 9) | st.sampled_from([2**62, 2**63 - 1, channel.WINDOW, 4095])


@pytest.mark.slow
@given(
    frames=st.lists(st.tuples(*[NUMBERS] * 3, st.booleans(), st.binary(max_size=3)), max_size=60)
)
def test_any_frames_of_a_peer_are_bounded(frames):
    """They come from another process: gaps without an end, a message that never ends."""
    owner = SimpleNamespace(garbled=0)
    one = Channel(owner, "A", tep.NetAddr("loopback", "a", 1, (b"a",), (1,)))
    for seq, start, stop, last, body in frames:
        gap = (max(0, start), max(0, stop))
        list(one.take(channel.Frame("A", b"", seq, 0, (gap,), last, body)))

        assert all(stop > one.next for _, stop in one.gaps)
    for _ in range(2 * channel.PIECES_MAX + 1):
        list(one.take(channel.Frame("A", b"", one.next, 0, (), False, b"x")))

        assert len(one.part) <= channel.PIECES_MAX


@pytest.mark.slow
def test_pieces_and_gaps_that_a_peer_never_lets_begin_are_bounded():
    """Only the piece that is waited for is taken when there is no room; then all are in order."""
    owner = SimpleNamespace(garbled=0)
    one = Channel(owner, "A", tep.NetAddr("loopback", "a", 1, (b"a",), (1,)))
    most = channel.EARLY_MAX

    def take(seq, *gaps):
        return list(one.take(channel.Frame("A", b"", seq, 0, gaps, True, b"%d" % seq)))

    assert not take(2)
    assert [] == take(-1, (0, 5)), "it was told to be lost"
    assert (5, {}) == (one.next, one.early), "what is passed over would be kept for ever"
    one.next = 0
    for seq in range(1, 3 * most):
        assert not take(seq, (10 * seq, 10 * seq + 1))
        assert max(len(one.early), len(one.gaps)) <= most
    assert owner.garbled
    assert b"0" == take(0)[0]
    assert not one.early
    for far in range(3 * most):
        assert take(one.next, (10**9 + 2 * far, 10**9 + 2 * far + 1))
        assert len(one.gaps) <= most
    assert not take(-1, (one.next, 2 * 10**9))
    assert not one.gaps
