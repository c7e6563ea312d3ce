"""Send and receive control messages between engines, over any pair of NICs that works.

A message is sent once, or repeated until it is answered. `messages` defines the messages; the
handler of a type is registered here with `hear`. Rule 1: a question ends exactly once, in an answer
or in a reason why there is none. Rule 2: no control message of a peer ends this engine. A message
that is malformed, speaks for another engine, finds no room, or makes its handler raise is dropped,
counted and logged.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Protocol, TypeVar, cast

from tep.backends.base import ControlDomain, Status
from tep.control.messages import WHY_MAX, Answer, ControlMessage, decode, encode
from tep.core.events import PeerRestarted
from tep.core.group import DomainGroup
from tep.core.path import Link
from tep.errors import BadDescriptor, TepError

__all__ = ["CONTROL_CTX", "Channel", "Drop", "sooner"]

_log = logging.getLogger("tep")

CONTROL_CTX: Final = 1 << 62
"""The ctx of the first control message: users' messages have smaller ones."""

ROUNDS_MAX: Final = 5
"""A question counts as unanswered after it was sent so often."""

DEAF_MAX: Final = 3
"""The same where no NIC of the peer could be reached in any round."""

ANSWERS_MAX: Final = 1024
"""Answers to one engine that may wait for a NIC; further ones are dropped, and it asks again."""

QUEUE_MAX: Final = 16 * ANSWERS_MAX
"""Control messages that may wait for a NIC; with more of them no answer is queued."""

N = TypeVar("N", bound=ControlMessage)


class Errand(Protocol):
    """What is due at times of its own, beside questions; see `tep.control.telling`."""

    @property
    def busy(self) -> bool:
        """Whether step() has something to do, now or later."""

    def step(self) -> bool:
        """Do what is due; True: there was work."""

    def due_s(self) -> float | None:
        """When step() must be called even if nothing happens; None: never."""


class Drop(Enum):
    """Why a control message of a peer was dropped."""

    MALFORMED = "malformed"
    FOREIGN = "it speaks for another engine"
    UNASKED = "an answer that nobody waits for"
    FULL = "no room for what it asks"
    FAILED = "its handler raised"


def sooner(one_s: float | None, other_s: float | None) -> float | None:
    """The earlier of two times; None stands for never."""
    if one_s is None:
        return other_s
    return one_s if other_s is None or one_s < other_s else other_s


class _Delivery:
    """One control message on its way: to a link, or back to the sender of a question.

    Attributes:
        message: what is said.
        way: (our NIC, address) over which it goes.
        link, remote: the peer, and its NIC at that address; None for an answer.
        question, round: the question that it asks, and the round in which it asks.
    """

    __slots__ = ("link", "message", "question", "remote", "round", "way")

    def __init__(
        self, message: ControlMessage, way: tuple[int, bytes], link: Link | None, remote: int = 0
    ) -> None:
        self.message = message
        self.way = way
        self.link = link
        self.remote = remote
        self.question: _Question | None = None
        self.round = 0


class _Question:
    """A control message that is repeated until it is answered.

    The first round asks over one path, and, if that fails, over all others at once. Later rounds
    ask over all paths at once, because a NIC needs a long time to find that nobody answers, and
    asking one path after the other would add these times up.

    Attributes:
        message, link: what is asked, and the peer.
        told: is called with the answer.
        lost: is called with the reason why there is no answer.
        due_s: when to ask again; None while the message is on its way.
        why: the result of the last try.
        round: the number of this round.
        others: paths over which this round has not asked yet.
        out: deliveries of this round that have not failed.
        deaf: whether all that failed so far found nobody at the other end.
    """

    __slots__ = (
        "deaf", "due_s", "link", "lost", "message", "others", "out", "round", "told", "why",
    )  # fmt: skip

    def __init__(
        self,
        message: ControlMessage,
        link: Link,
        told: Callable[[Answer], object],
        lost: Callable[[str], object],
    ) -> None:
        self.message = message
        self.link = link
        self.told = told
        self.lost = lost
        self.why = ""
        self.due_s: float | None = None
        self.round = self.out = 0
        self.others: list[tuple[int, int]] = []
        self.deaf = True


class Channel:
    """The control messages of one engine.

    Args:
        group: its NICs.
        now_s: the clock.

    Attributes:
        able: whether its NICs can send control messages, and the engine is not being closed.
        busy: whether a message is on its way or a question is open; else step() has nothing to do.
        dropped: control messages of peers that were dropped, by reason.
        errand: what else step() does; None: nothing.
    """

    def __init__(self, group: DomainGroup, now_s: Callable[[], float]) -> None:
        domains = group.domains
        self.able = all(domain.caps.control_bytes for domain in domains)
        self.busy = False
        self.dropped: Counter[Drop] = Counter()
        self.errand: Errand | None = None
        self._nics = [cast("ControlDomain", domain) for domain in domains]
        self._alive = group.alive
        self._events, self._far_ends = group.events, group.far_ends
        self._now_s = now_s
        self._wait_s = max(domain.caps.peer_timeout_s for domain in domains)
        self._numbers = itertools.count(1)
        self._ctxs = itertools.count(CONTROL_CTX)
        self._queue: deque[_Delivery] = deque()
        self._out: dict[int, _Delivery] = {}
        self._questions: dict[int, _Question] = {}
        self._hears: dict[type, Callable[[int, bytes, ControlMessage], object]] = {}
        self._answers: Counter[bytes] = Counter()  # that wait for a NIC, by engine

    @property
    def control_bytes(self) -> int:
        """The size of the longest control message that every NIC takes."""
        return min(domain.caps.control_bytes for domain in self._nics)

    def hear(self, kind: type[N], callback: Callable[[int, bytes, N], object]) -> None:
        """Call callback(our NIC, sender's address, message) for each control message of a type."""
        self._hears[kind] = cast("Callable[[int, bytes, ControlMessage], object]", callback)

    # ------------------------------------------------------------------ out

    def ask(
        self,
        link: Link,
        message: Callable[[int], ControlMessage],
        told: Callable[[Answer], object],
        lost: Callable[[str], object],
    ) -> None:
        """Ask a peer until it answers, over any path; message(number) makes the question."""
        number = next(self._numbers)
        self._questions[number] = question = _Question(message(number), link, told, lost)
        self._put(question)

    @property
    def queued(self) -> int:
        """How many control messages no NIC has taken yet."""
        return len(self._queue)

    @property
    def is_sending(self) -> bool:
        """Whether a control message waits for a NIC, or is on its way."""
        return bool(self._queue or self._out)

    def say_once(self, link: Link, message: Callable[[int], ControlMessage]) -> None:
        """Send message(number) once, over the path that comes first."""
        for path in self._paths(link)[:1]:
            self.say(link, message(next(self._numbers)), path)

    def say(self, link: Link, message: ControlMessage, path: tuple[int, int]) -> None:
        """Send a control message once, over one path; nobody learns whether it arrived."""
        self._send(self._over(link, message, path))

    def answer(self, nic: int, address: bytes, message: ControlMessage) -> None:
        """Answer over the NIC that received the question; if that fails, the peer asks again."""
        engine = self.engine_of(nic, address)
        if self._answers[engine] >= ANSWERS_MAX or len(self._queue) >= QUEUE_MAX:
            self.drop(Drop.FULL, address, "too many answers wait for a NIC")
            return
        self._answers[engine] += 1
        self._send(_Delivery(message, (nic, address), None))

    def tell(
        self,
        nic: int,
        address: bytes,
        number: int,
        why: str | None = None,
        counts: Sequence[int] = (),
        pruned: int = 0,
    ) -> None:
        """Answer a question: why it failed, cut to WHY_MAX characters, or None and the counts."""
        self.answer(nic, address, Answer(number, (why or "")[:WHY_MAX], tuple(counts), pruned))

    def _send(self, delivery: _Delivery) -> None:
        if self.able:  # else the engine is being closed, and answers no questions any more
            self._queue.append(delivery)
            self.busy = True

    def _over(self, link: Link, message: ControlMessage, path: tuple[int, int]) -> _Delivery:
        nic, remote = path
        return _Delivery(message, (nic, link.addr.domains[remote]), link, remote)

    def _put(self, question: _Question) -> None:
        """Begin a round."""
        paths = self._paths(question.link)
        question.round += 1
        question.due_s = None
        question.deaf = True
        first = 1 if question.round == 1 else len(paths)
        question.others = paths[first:]
        self._ask_over(question, paths[:first])

    def _ask_over(self, question: _Question, paths: list[tuple[int, int]]) -> None:
        question.out = len(paths)
        for path in paths:
            delivery = self._over(question.link, question.message, path)
            delivery.question, delivery.round = question, question.round
            self._queue.append(delivery)
        self.busy = True
        if not paths:
            self._lose(question, "no NIC of ours is alive")

    def _paths(self, link: Link) -> list[tuple[int, int]]:
        """The paths to try, in order: NICs that are up first, and equal NIC numbers first."""
        here = [i for i, alive in enumerate(self._alive) if alive]
        paths = itertools.product(here, range(len(link.alive)))
        return sorted(paths, key=lambda path: (not link.alive[path[1]], path[0] != path[1], path))

    def step(self) -> bool:
        """Post queued messages, repeat late questions; True if one was taken or has failed."""
        errand, work = self.errand, False
        if errand is not None and errand.busy:
            work = errand.step()
        for _ in range(len(self._queue)):
            delivery = self._queue.popleft()
            work |= self._post(delivery)
            if delivery.link is None and (not self._queue or self._queue[-1] is not delivery):
                self._gone(*delivery.way)
        if self._questions:
            now_s = self._now_s()
            late = [q for q in self._questions.values() if q.due_s is not None and q.due_s <= now_s]
            for question in late:
                work = True
                self._again(question)
        self.busy = bool(self._queue or self._out or self._questions)
        if errand is not None and errand.busy:
            self.busy = True
        return work

    def _gone(self, nic: int, address: bytes) -> None:
        """Count an answer that is not queued any more."""
        engine = self.engine_of(nic, address)
        self._answers[engine] -= 1
        if not self._answers[engine]:
            del self._answers[engine]

    def due_s(self) -> float | None:
        """When step() must be called even if nothing happens; None: never."""
        asked = (q.due_s for q in self._questions.values() if q.due_s is not None)
        errand_s = None if self.errand is None else self.errand.due_s()
        return sooner(min(asked, default=None), errand_s)

    def _post(self, delivery: _Delivery) -> bool:
        nic, address = delivery.way
        try:
            if delivery.link is None:
                peer = self._nics[nic].connect(address)
            else:
                peer = delivery.link.peer(nic, delivery.remote)
            ctx = next(self._ctxs)
            taken = self._alive[nic] and self._nics[nic].post_control(
                peer, encode(delivery.message), ctx
            )
        except (TepError, OSError, MemoryError) as error:  # another NIC may be able to
            self._failed(delivery, str(error))
            return True
        if taken:
            self._out[ctx] = delivery
            return True
        if self._alive[nic]:
            self._queue.append(delivery)
            return False
        self._failed(delivery, "its NIC is down")
        return True

    def _again(self, question: _Question) -> None:
        if question.round == ROUNDS_MAX:
            self._lose(question, f"asked {ROUNDS_MAX} times, at last: {question.why}")
            return
        self._put(question)

    def _failed(self, delivery: _Delivery, why: str, *, deaf: bool = False) -> None:
        """A path failed: try others; then ask again, unless nobody answers on any path."""
        question = delivery.question
        if question is None or delivery.round != question.round:
            return
        if question.message.number not in self._questions:
            return
        question.why = why
        question.deaf &= deaf
        question.out -= 1
        if question.out:
            return
        others, question.others = question.others, []
        if others:
            self._ask_over(question, others)
        elif question.deaf and question.round >= DEAF_MAX:
            self._lose(question, f"asked {DEAF_MAX} times, and none of its NICs was there: {why}")
        else:
            question.due_s = self._now_s()

    def _lose(self, question: _Question, why: str) -> None:
        if self._questions.pop(question.message.number, None) is not None:
            question.lost(why)

    # ------------------------------------------------------------------ in

    def sent(self, ctx: int, status: int) -> None:
        """Take a NIC's completion of a control message."""
        delivery = self._out.pop(ctx)
        question = delivery.question
        if status in (Status.OK, Status.UNREACHABLE):  # another error says nothing of the peer
            self._far_ends.control_heard(*delivery.way, heard=status == Status.OK)
        if status == Status.OK:
            if question is not None and delivery.round == question.round:
                question.why = "no answer"
                question.due_s = self._now_s() + self._wait_s
        elif status == Status.STALE_PEER:
            if question is not None:
                self._lose(question, "it has restarted")
            if delivery.link is not None:
                self._events.append(PeerRestarted(delivery.link))
        else:
            self._failed(delivery, Status(status).name, deaf=status == Status.UNREACHABLE)

    def lost(self, nic: int) -> None:
        """A NIC is gone: its control messages will not complete."""
        for ctx, delivery in tuple(self._out.items()):
            if delivery.way[0] == nic:
                self.sent(ctx, Status.NIC_DOWN)

    def engine_of(self, nic: int, address: bytes) -> bytes:
        """An id of the engine that has the NIC at an address, as our NIC `nic` knows it."""
        return self._nics[nic].engine_of(address)

    def take(self, nic: int, slot: int) -> None:
        """Decode and handle a control message that was received."""
        payload, address = self._nics[nic].take_control(slot)
        try:
            message = decode(payload)
        except BadDescriptor as error:
            self.drop(Drop.MALFORMED, address, str(error))
            return
        self.guard(address, self._take, nic, address, message)

    def _take(self, nic: int, address: bytes, message: ControlMessage) -> None:
        claimed = message.claimed
        if claimed and self.engine_of(nic, claimed) != self.engine_of(nic, address):
            self.drop(Drop.FOREIGN, address, f"{type(message).__name__} for {claimed!r}")
        elif isinstance(message, Answer):
            self._take_answer(address, message)
        else:
            self._hears[type(message)](nic, address, message)

    def _take_answer(self, address: bytes, message: Answer) -> None:
        question = self._questions.get(message.number)
        if question is None or address not in question.link.addr.domains:
            self.drop(Drop.UNASKED, address, f"answer {message.number}")
            return
        del self._questions[message.number]
        try:
            question.told(message)
        except Exception as error:
            question.lost(f"its answer could not be used: {error!r}")
            raise

    def guard(self, address: bytes, handler: Callable[..., object], *args: object) -> None:
        """Call the handler of a control message from an address; if it raises, drop the message."""
        try:
            handler(*args)
        except Exception as error:  # noqa: BLE001  # only its message is dropped
            self.drop(Drop.FAILED, address, repr(error), error)

    def drop(self, reason: Drop, address: bytes, what: str, error: Exception | None = None) -> None:
        """Count a dropped control message, and log the 1st, 2nd, 4th, 8th ... of each reason."""
        self.dropped[reason] += 1
        times = self.dropped[reason]
        if times & (times - 1) == 0:
            level = logging.DEBUG if reason is Drop.UNASKED else logging.WARNING
            text = "control message from %r dropped (%s, %d so far): %s"
            _log.log(level, text, address, reason.value, times, what, exc_info=error)

    def close(self) -> None:
        """End every question, and forget the control messages that are on their way."""
        self.able = False
        self._queue.clear()
        self._answers.clear()
        for question in list(self._questions.values()):
            self._lose(question, "the engine was closed")
