"""Send and receive control messages between engines, over any pair of NICs that works.

A message is sent once, or repeated until it is answered. `messages` defines the messages; the
handler of a type is registered here with `hear`. `Notices` tells peers which immediates are burnt.
Rule 1: a question ends exactly once, in an answer or in a reason why there is none. Rule 2: no
control message of a peer ends this engine. A message that is malformed, speaks for another engine,
finds no room, or makes its handler raise is dropped, counted and logged. Rule 3: a notice keeps its
serial however often it is sent, so that a late copy burns nothing again.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeVar, cast

from tep.backends.base import ControlDomain, Status
from tep.base.api import EngineOptions
from tep.base.errors import BadDescriptor, TepError
from tep.control.messages import (
    IMM_RUN_BYTES,
    PRUNED_MAX,
    WHY_MAX,
    Answer,
    ControlMessage,
    Failed,
    ImmRun,
    Ping,
    decode,
    encode,
)
from tep.core.group import DomainGroup
from tep.core.handles import Transfer
from tep.core.imm import Burnt
from tep.core.path import Link, PeerRestarted, runs_of

__all__ = ["CONTROL_CTX", "Channel", "Drop", "Notices", "sooner"]

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

_NOTICES_MAX: Final = 8
"""Notices that one peer is asked to take at once."""

_WAITING_MAX: Final = 1 << 16
"""Burnt immediates of one peer that are in no notice yet; the peer never learns of further ones."""

_TRIES_MAX: Final = 30
"""The number of times that a silent peer is sent its notices. Then they are sent only when it is
heard, or when the engine is turned anyway."""

_NAME_BYTES: Final = 120
_REASON_BYTES: Final = 150

N = TypeVar("N", bound=ControlMessage)


class Drop(Enum):
    """Why a control message of a peer was dropped."""

    MALFORMED = "malformed"
    FOREIGN = "it speaks for another engine"
    UNASKED = "an answer that nobody waits for"
    FULL = "no room for what it asks"
    FAILED = "its handler raised"


def sooner(one_s: float | None, other_s: float | None) -> float | None:
    """Return the earlier of two times; None stands for never."""
    if one_s is None:
        return other_s
    return one_s if other_s is None or one_s < other_s else other_s


@dataclass(slots=True, eq=False)
class _Delivery:
    """One control message on its way: to NIC `remote` of a link, or back to who asked.

    `way` is (our NIC, address). It may ask a question, in one of the question's rounds.
    """

    message: ControlMessage
    way: tuple[int, bytes]
    link: Link | None
    remote: int = 0
    question: _Question | None = None
    round: int = 0


@dataclass(slots=True, eq=False)
class _Question:
    """A control message that is repeated until it is answered.

    The first round asks over one path, and, if that fails, over all others at once. Later rounds
    ask over all paths at once, because a NIC needs a long time to find that nobody answers, and
    asking one path after the other would add these times up.

    Attributes:
        told: is called with the answer.
        lost: is called with the reason why there is no answer.
        due_s: when to ask again; None while the message is on its way.
        why: the result of the last try.
        others: paths over which this round has not asked yet.
        out: deliveries of this round that have not failed.
        deaf: whether all that failed so far found nobody at the other end.
    """

    message: ControlMessage
    link: Link
    told: Callable[[Answer], object]
    lost: Callable[[str], object]
    why: str = ""
    due_s: float | None = None
    round: int = 0
    out: int = 0
    others: list[tuple[int, int]] = field(default_factory=list)
    deaf: bool = True


class Channel:
    """The control messages of one engine.

    Attributes:
        able: whether its NICs can send control messages, and the engine is not being closed.
        busy: whether a message is on its way or a question is open; else step() has nothing to do.
        dropped: control messages of peers that were dropped, by reason.
    """

    def __init__(self, group: DomainGroup, now_s: Callable[[], float]) -> None:
        domains = group.domains
        self.able = all(domain.caps.control_bytes for domain in domains)
        self.busy = False
        self.dropped: Counter[Drop] = Counter()
        self.notices: Notices | None = None
        self._nics = [cast("ControlDomain", domain) for domain in domains]
        self._alive = group.alive
        self._events, self._far_ends = group.events, group.far_ends
        self._now_s = now_s
        self._wait_s = max(domain.caps.peer_timeout_s for domain in domains)
        self._numbers = itertools.count(1)
        self._ctxs = itertools.count(CONTROL_CTX)
        self._queue: deque[_Delivery] = deque()
        self._beats: dict[tuple[int, bytes], _Delivery] = {}  # that wait for a NIC, by way
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
        """The number of control messages that no NIC has taken yet."""
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

    def beat(self, link: Link, message: Ping, path: tuple[int, int]) -> None:
        """Send a heartbeat once, over one path, in place of one that waits there for a NIC."""
        delivery = self._over(link, message, path)
        waiting = self._beats.setdefault(delivery.way, delivery)
        waiting.message = message
        if waiting is delivery:
            self._send(delivery)

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
        """List the paths to try: NICs that are up first, and equal NIC numbers first."""
        here = [i for i, alive in enumerate(self._alive) if alive]
        paths = itertools.product(here, range(len(link.alive)))
        return sorted(paths, key=lambda path: (not link.alive[path[1]], path[0] != path[1], path))

    def step(self) -> bool:
        """Post queued messages, repeat late questions; True if one was taken or has failed."""
        notices, work = self.notices, False
        if notices is not None and notices.busy:
            work = notices.step()
        full: set[tuple[int, bytes]] = set()
        for _ in range(len(self._queue)):
            delivery = self._queue.popleft()
            if delivery.way in full:  # what stands before it was not taken
                self._queue.append(delivery)
                continue
            work |= self._post(delivery)
            if self._queue and self._queue[-1] is delivery:
                full.add(delivery.way)
            elif delivery.link is None:
                self._gone(*delivery.way)
            elif isinstance(delivery.message, Ping):
                self._beats.pop(delivery.way, None)
        if self._questions:
            now_s = self._now_s()
            late = [q for q in self._questions.values() if q.due_s is not None and q.due_s <= now_s]
            for question in late:
                work = True
                self._again(question)
        self.busy = bool(self._queue or self._out or self._questions)
        if notices is not None and notices.busy:
            self.busy = True
        return work

    def _gone(self, nic: int, address: bytes) -> None:
        engine = self.engine_of(nic, address)
        self._answers[engine] -= 1
        if not self._answers[engine]:
            del self._answers[engine]

    def due_s(self) -> float | None:
        """When step() must be called even if nothing happens; None: never."""
        asked = (q.due_s for q in self._questions.values() if q.due_s is not None)
        notices_s = None if self.notices is None else self.notices.due_s()
        return sooner(min(asked, default=None), notices_s)

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
        """Take a NIC's completion of a control message.

        Where posting it raised, it may have been taken nevertheless; it counts as not sent then.
        """
        delivery = self._out.pop(ctx, None)
        if delivery is None:
            return
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
        """Return an id of the engine that has the NIC at an address, as our NIC `nic` knows it."""
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


@dataclass(slots=True, eq=False)
class _Peer:
    """The notices of one peer.

    Attributes:
        wait_s: the time from a try to the next one.
        waiting: immediates that are in no notice yet, each with the reason.
        unsent: notices that are to be sent, as functions of the number of the question.
        out: how many were sent and are not answered.
        tries: how many there were without an answer.
        due_s: when to send; None: when an answer comes.
    """

    wait_s: float
    waiting: dict[int, str] = field(default_factory=dict)
    unsent: list[Callable[[int], Failed]] = field(default_factory=list)
    out: int = 0
    tries: int = 0
    due_s: float | None = None


class Notices:
    """Tells the targets of failed and cancelled requests which immediates are burnt.

    A peer that does not answer is told again after `probe_first_s`, then after twice as long, and
    so on. `name` is this engine's, with its incarnation.

    Attributes:
        burnt: immediates that this engine does not send to a peer any more.
        busy: whether step() has something to do, now or later.
        dropped: immediates that a peer is never told of, because there were too many.
    """

    def __init__(
        self,
        name: str,
        group: DomainGroup,
        channel: Channel,
        options: EngineOptions,
        now_s: Callable[[], float],
    ) -> None:
        self.burnt: Burnt[tuple[Link, int], str] = Burnt()
        self.busy = False
        self.dropped = 0
        self._name = _cut(name, _NAME_BYTES)
        self._group, self._channel, self._now_s = group, channel, now_s
        self._first_s, self._longest_s = options.probe_first_s, options.probe_max_s
        self._serials = itertools.count(1)
        self._peers: dict[Link, _Peer] = {}
        channel.notices = self

    def burn(self, transfer: Transfer) -> None:
        """A request failed or was cancelled: burn its immediates, and have its targets told."""
        failure = transfer.failure
        reason = "it was cancelled" if failure is None else str(failure)
        for link, imms in transfer.job.imms_by_peer():
            fresh = [imm for imm in imms if (link, imm) not in self.burnt.why]
            if not (link.current and fresh):
                continue
            name = link.addr.name
            text = f"{len(fresh)} immediates to {name} are burnt: {reason}"
            level = logging.INFO if failure is None else logging.WARNING
            self._group.journal.say("burnt", text, level)
            for imm in fresh:
                self.burnt.add(link, (link, imm), reason)
            if self._channel.able and any(self._group.alive):
                self._tell(link, fresh, reason)

    def _tell(self, link: Link, imms: list[int], reason: str) -> None:
        peer = self._peers.get(link)
        if peer is None:
            peer = self._peers[link] = _Peer(self._first_s)
        room = _WAITING_MAX - len(peer.waiting)
        peer.waiting.update(dict.fromkeys(imms[:room], _cut(reason, _REASON_BYTES)))
        if len(imms) > room:
            self.dropped += len(imms) - room
            _log.warning("%d burnt immediates are not told to peers", self.dropped)
        self._wake(peer)

    def _wake(self, peer: _Peer, after_s: float = 0.0) -> None:
        peer.due_s = sooner(peer.due_s, self._now_s() + after_s)
        self.busy = self._channel.busy = True

    def forget(self, link: Link) -> None:
        """A peer was removed, or replaced by a later incarnation."""
        self.burnt.drop(link)
        self._peers.pop(link, None)

    def remove(self, imm: int) -> None:
        """Let an immediate be used again, towards every peer."""
        for key in [key for key in self.burnt.why if key[1] == imm]:
            self.burnt.remove(key)

    # ------------------------------------------------------------------ turning

    def step(self) -> bool:
        """Send what is due; True: there was work."""
        work, now_s = False, self._now_s()
        for link, peer in tuple(self._peers.items()):
            if not (link.current and any(self._group.alive)):
                del self._peers[link]
            elif peer.due_s is not None and peer.due_s <= now_s:
                peer.due_s, work = None, True
                self._send(link, peer)
        self.busy = any(peer.due_s is not None for peer in self._peers.values())
        return work

    def due_s(self) -> float | None:
        """When step() must be called even if nothing happens; None: never."""
        patient = (peer for peer in self._peers.values() if peer.tries <= _TRIES_MAX)
        return min((peer.due_s for peer in patient if peer.due_s is not None), default=None)

    def heard(self, link: Link) -> None:
        """A peer that did not answer does again."""
        peer = self._peers.get(link)
        if peer is not None:
            peer.tries, peer.wait_s = 0, self._first_s
            self._wake(peer)

    def last_words(self) -> None:
        """The engine is being closed: say once what peers have not been told."""
        for link, peer in self._peers.items():
            self._fill(peer)
            for make in peer.unsent if link.current else ():
                self._channel.say_once(link, make)

    def describe(self) -> list[str]:
        """Return lines for reports."""
        lines = [
            f"{link.addr.name} has not been told of {len(peer.waiting)} burnt immediates, and has "
            f"not answered {peer.out + len(peer.unsent)} notices of others"
            for link, peer in list(self._peers.items())
        ]
        if self.dropped:
            lines.append(f"{self.dropped} burnt immediates are not told to peers: too many at once")
        if self.burnt.forgotten:
            lines.append(f"{self.burnt.forgotten} burnt immediates were forgotten: too many")
        return lines

    def _fill(self, peer: _Peer) -> None:
        """Make notices of the immediates that are in none: those with the same reason together."""
        while peer.waiting and peer.out + len(peer.unsent) < _NOTICES_MAX:
            reason = next(iter(peer.waiting.values()))[:WHY_MAX]
            alike = (imm for imm, why in peer.waiting.items() if why[:WHY_MAX] == reason)
            empty = Failed(2**62, 2**62, self._name, reason, ((0, 1),))
            most = (self._channel.control_bytes - len(encode(empty))) // IMM_RUN_BYTES
            runs = runs_of(((imm, 1) for imm in itertools.islice(alike, PRUNED_MAX)), PRUNED_MAX)
            told = tuple((first, n) for first, n, _ in itertools.islice(runs, max(1, most)))
            for first, n in told:
                for imm in range(first, first + n):
                    del peer.waiting[imm]
            peer.unsent.append(self._maker(next(self._serials), reason, told))

    def _maker(self, serial: int, reason: str, runs: tuple[ImmRun, ...]) -> Callable[[int], Failed]:
        return lambda number: Failed(number, serial, self._name, reason, runs)

    def _send(self, link: Link, peer: _Peer) -> None:
        self._fill(peer)
        unsent, peer.unsent = peer.unsent, []
        for make in unsent:
            self._ask(link, peer, make)

    def _ask(self, link: Link, peer: _Peer, make: Callable[[int], Failed]) -> None:
        def told(_: Answer) -> None:
            peer.out -= 1
            peer.tries, peer.wait_s = 0, self._first_s
            if peer.waiting or peer.unsent:
                self._wake(peer)
            elif not peer.out and self._peers.get(link) is peer:
                del self._peers[link]

        def lost(_: str) -> None:
            peer.out -= 1
            peer.unsent.append(make)
            if peer.out or not self._channel.able or self._peers.get(link) is not peer:
                return
            peer.tries += 1
            self._wake(peer, peer.wait_s)
            peer.wait_s = min(2 * peer.wait_s, self._longest_s)

        peer.out += 1
        self._channel.ask(link, make, told, lost)


def _cut(text: str, nbytes: int) -> str:
    line = text.split("\n", 1)[0].encode()
    return line[:nbytes].decode(errors="ignore")
