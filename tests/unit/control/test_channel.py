"""Control messages over NICs on strings: their way, their end, and whom an engine believes."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tep.backends.base import Status
from tep.base.wire import NetAddr
from tep.control import channel as channels
from tep.control.channel import Channel, Drop
from tep.control.messages import Answer, Ping, Pong, decode, encode
from tep.core.path import FarEnds, Link


class Nic:
    """The NIC as a channel uses it; `posted` has (address, ctx) of the rows it took."""

    def __init__(self) -> None:
        self.caps = SimpleNamespace(control_bytes=1024, peer_timeout_s=1.0, nic="n")
        self.posted: list[tuple[bytes, int]] = []
        self.received: tuple[bytes, bytes] = (b"", b"")
        self.room = 1 << 10

    def connect(self, address: bytes) -> bytes:
        return address

    def engine_of(self, address: bytes) -> bytes:
        return address.partition(b"/")[0]

    def post_control(self, peer: bytes, _: bytes, ctx: int) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        self.posted.append((peer, ctx))
        return True

    def take_control(self, _: int) -> tuple[bytes, bytes]:
        return self.received


class Own:
    """A channel over two NICs to a peer p with two, and what became of its questions."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.nics = [Nic(), Nic()]
        self.group = SimpleNamespace(
            domains=self.nics, alive=[True, True], events=[], far_ends=FarEnds()
        )
        self.channel = Channel(self.group, lambda: self.now_s)
        self.link = Link(NetAddr("script", "p", 1, (b"p/0", b"p/1"), (0, 0)), tuple(self.nics))
        self.told: list[Answer] = []
        self.lost: list[str] = []

    def ask(self) -> None:
        self.channel.ask(self.link, Ping, self.told.append, self.lost.append)
        self.channel.step()

    def answer(self, number: int, address: bytes) -> None:
        self.nics[0].received = encode(Answer(number, "", (), 0)), address
        self.channel.take(0, 0)

    def posted(self) -> list[tuple[int, bytes]]:
        """(our NIC, address) of all that was posted since the last call."""
        found = [(k, address) for k, nic in enumerate(self.nics) for address, _ in nic.posted]
        for nic in self.nics:
            nic.posted.clear()
        return sorted(found)

    def out(self) -> list[int]:
        """The numbers of the messages that were posted since the last call of posted()."""
        return sorted(ctx for nic in self.nics for _, ctx in nic.posted)


ALL = [(0, b"p/0"), (0, b"p/1"), (1, b"p/0"), (1, b"p/1")]


def test_a_message_waits_for_room_and_is_on_its_way_until_its_nic_says_so() -> None:
    """Else an engine turns for ever while a NIC is full, or is closed before its last words."""
    own = Own()
    own.nics[0].room = 0
    own.channel.say(own.link, Pong(1), (0, 1))
    assert not own.channel.step(), "a NIC that is full is no work"
    assert own.channel.busy
    assert (1, True) == (own.channel.queued, own.channel.is_sending)

    own.nics[0].room = 1
    assert own.channel.step()
    assert (0, True) == (own.channel.queued, own.channel.is_sending)
    ((address, ctx),) = own.nics[0].posted
    own.channel.sent(ctx, Status.OK)
    assert (b"p/1", False) == (address, own.channel.is_sending)

    own.nics[0].room = 0
    own.channel.say(own.link, Pong(2), (0, 1))
    own.group.alive[0] = False
    assert own.channel.step(), "what a dead NIC had is asked over others in the next step"


def test_a_full_nic_is_asked_once_a_step_for_each_peer() -> None:
    """Hundreds of messages to a peer that takes none cost each step of the engine a millisecond."""
    own = Own()
    refused: list[bytes] = []
    own.nics[0].post_control = lambda peer, *_: refused.append(peer)
    for number in range(100):
        own.channel.say(own.link, Pong(number), (0, number % 2))
    own.channel.step()
    assert [b"p/0", b"p/1"] == refused
    assert 100 == own.channel.queued

    del own.nics[0].post_control
    own.channel.step()
    assert 0 == own.channel.queued
    assert 100 == len(own.posted())


def test_the_newest_heartbeat_alone_waits_for_a_full_nic() -> None:
    """A peer that took nothing for a while was sent 256 of them, all but the last too old."""
    own = Own()
    nic, sent = own.nics[0], []
    nic.post_control = lambda _, payload, __: bool(nic.room) and not sent.append(decode(payload))
    nic.room = 0
    for number in range(1, 11):
        own.channel.beat(own.link, Ping(number), (0, 0))
        own.channel.beat(own.link, Ping(number), (1, 0))
        own.channel.step()
    assert 1 == own.channel.queued
    assert 10 == len(own.posted()), "the other NIC has room"

    nic.room = 1
    own.channel.step()
    own.channel.beat(own.link, Ping(11), (0, 0))
    own.channel.step()
    assert [Ping(10), Ping(11)] == sent


def test_a_word_goes_to_the_nic_across_if_it_can() -> None:
    """NICs of one number are those that are cabled together."""
    own = Own()
    own.group.alive[0] = False
    own.channel.say_once(own.link, Pong)
    own.channel.step()
    assert [(1, b"p/1")] == own.posted()
    own.link.alive[1] = False
    own.channel.say_once(own.link, Pong)
    own.channel.step()
    assert [(1, b"p/0")] == own.posted()
    own.group.alive[1] = False
    own.channel.say_once(own.link, Pong)
    assert 0 == own.channel.queued


def test_a_nic_that_dies_takes_its_own_questions_along_and_no_others() -> None:
    """A question that it had would have no end; one that another has is asked over it twice."""
    own = Own()
    own.ask()
    assert ALL[:1] == own.posted()
    own.group.alive[0] = False
    own.channel.lost(0)
    own.channel.step()
    assert ALL[2:] == own.posted()
    own.channel.lost(0)
    own.channel.step()
    assert [] == own.posted()


def test_what_an_earlier_round_comes_to_is_no_news_of_this_one() -> None:
    """A question was given up, or asked again, while its copies were on their way."""
    own = Own()
    own.ask()
    (first,) = own.out()
    own.channel.sent(first, Status.UNREACHABLE)
    own.posted()
    own.channel.step()
    one, *late = own.out()
    own.channel.sent(one, Status.OK)
    own.posted()
    own.now_s = 2.0
    own.channel.step()
    own.channel.step()
    *those, last = own.out()
    assert ALL == own.posted()
    for ctx in (*late, *those):
        own.channel.sent(ctx, Status.UNREACHABLE)
    own.channel.step()
    own.channel.step()
    assert [] == own.posted(), "a copy of this round is on its way"

    own.channel.sent(last, Status.UNREACHABLE)
    own.channel.step()
    own.channel.step()
    assert (ALL, []) == (own.posted(), own.lost)


def test_a_peer_that_is_not_there_is_not_asked_again_for_long() -> None:
    """A caller that waits for the answer would wait for two more rounds of a timeout each."""
    own = Own()
    own.ask()
    for _ in range(20):
        for ctx in own.out():
            own.channel.sent(ctx, int(Status.UNREACHABLE))
        own.posted()
        own.channel.step()
    assert ["asked 3 times, and none of its NICs was there: UNREACHABLE"] == own.lost


def test_a_peer_that_our_nics_cannot_send_to_may_be_there() -> None:
    """It would be given up sooner, and for a reason that is not its own."""
    own = Own()
    for nic in own.nics:
        nic.post_control = Mock(side_effect=MemoryError("no memory"))
    own.ask()
    for _ in range(20):
        own.channel.step()
    assert ["asked 5 times, at last: no memory"] == own.lost


def test_a_peer_one_of_whose_nics_takes_the_question_is_there() -> None:
    """It is slow. Its other NIC is dead, and it was taken for a peer that is gone."""
    own = Own()
    own.ask()
    rounds = 0
    for _ in range(7):
        for nic in own.nics:
            for address, ctx in nic.posted:
                own.channel.sent(ctx, Status.OK if address == b"p/0" else Status.UNREACHABLE)
        rounds += bool(own.posted())
        for wait_s in (0.0, 0.0, 2.0, 0.0):
            assert [] == own.out(), "it is asked again only after a while"
            own.now_s += wait_s
            own.channel.step()
    assert (5, ["asked 5 times, at last: no answer"]) == (rounds, own.lost)


def test_a_far_end_is_unheard_while_messages_to_it_get_lost() -> None:
    """Rows would be sent to a NIC that does not answer, or a path that works would be left."""
    own = Own()
    unheard = []
    for status in (Status.LENGTH, Status.UNREACHABLE, Status.LENGTH, Status.OK, Status.LENGTH):
        own.channel.say(own.link, Pong(1), (0, 0))
        own.channel.step()
        own.channel.sent(*own.out(), status)
        own.posted()
        unheard.append(own.group.far_ends.at(0, b"p/0").unheard)
    assert [False, True, True, False, False] == unheard


def test_an_answer_that_cannot_be_used_ends_the_question() -> None:
    """The caller would wait for ever: the number is gone, and no other answer is taken."""
    own = Own()
    own.channel.ask(own.link, Ping, lambda _: 1 // 0, own.lost.append)
    own.answer(1, b"p/0")
    assert ["its answer could not be used: ZeroDivisionError"] == [
        why.partition("(")[0] for why in own.lost
    ]
    assert {Drop.FAILED: 1} == own.channel.dropped


def test_only_the_peer_that_was_asked_answers(caplog: pytest.LogCaptureFixture) -> None:
    """Numbers can be guessed: a stranger would say that a path is fenced off."""
    own = Own()
    own.ask()
    with caplog.at_level(logging.DEBUG, "tep"):
        for number, address in ((1, b"q/0"), (2, b"p/0"), (1, b"p/1"), *[(1, b"p/0")] * 3):
            own.answer(number, address)
        own.nics[0].received = b"junk", b"q/0"
        own.channel.take(0, 0)

    assert [Answer(1, "", (), 0)] == own.told
    assert {Drop.UNASKED: 5, Drop.MALFORMED: 1} == own.channel.dropped
    levels = [record.levelno for record in caplog.records]
    usual = [logging.DEBUG] * 3  # of late answers the first, the second and the fourth
    assert [*usual, logging.WARNING] == levels
    (first,) = own.out()
    own.posted()
    own.channel.sent(first, Status.UNREACHABLE)
    own.channel.step()
    assert [] == own.posted(), "it was answered"


def test_answers_that_wait_are_bounded_for_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions of one peer would fill the memory while a NIC takes nothing."""
    monkeypatch.setattr(channels, "ANSWERS_MAX", 3)
    own = Own()
    own.nics[0].room = 0
    for _ in range(5):
        own.channel.tell(0, b"p/0", 1)
    own.channel.tell(0, b"q/0", 1)
    assert (4, 2) == (own.channel.queued, own.channel.dropped[Drop.FULL])
    own.nics[0].room = 1
    own.channel.step()
    for _ in range(5):
        own.channel.tell(0, b"p/0", 1)
    assert (4, 6) == (own.channel.queued, own.channel.dropped[Drop.FULL])


def test_a_channel_that_is_closed_says_nothing_more() -> None:
    """Its NICs are being closed, and what it knows is not true for long."""
    own = Own()
    own.ask()
    own.channel.tell(0, b"p/0", 1)
    own.channel.close()
    own.channel.tell(0, b"p/0", 2)
    own.channel.say_once(own.link, Pong)
    assert (["the engine was closed"], 0) == (own.lost, own.channel.queued)
