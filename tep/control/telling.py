"""Tell peers which immediates of failed or cancelled transfers do not come: the sender's half.

The receiver's half is `failures`. A peer is told as soon as it can be reached, by lists of
immediates: how many of each were to come, and how many came, which it does not count any more.
Rule 1: a list keeps its serial however often it is sent, so that it is applied once. Rule 2: a
later transfer of an immediate to that peer is held until the peer knows of the failure, since it
could not tell the arrivals apart, nor whether they came before the news. If nothing arrived, and
the news is not on its way, the later transfer goes at once, and the news is dropped. Rule 3: if
rows of the failed one may still land, it is held until the peer has fenced their paths, has said
what landed, and has opened them again. Rule 4: it is not held for ever: if the peer does not answer
it fails, as its rows would.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from tep.api import EngineOptions
from tep.control.channel import Channel, sooner
from tep.control.failover import Failover
from tep.control.messages import SHORTFALL_BYTES, WHY_MAX, Answer, Missing, encode
from tep.control.messages import Shortfall as Entry
from tep.core.group import DomainGroup
from tep.core.path import Link, Path, PathState
from tep.core.read_requests import ReadJob
from tep.core.region import Job, Remote
from tep.core.shortfall import Shortfall, shortfalls
from tep.core.transfer import Transfer
from tep.errors import FabricError

__all__ = ["Telling"]

_log = logging.getLogger("tep")

_IMMS_MAX: Final = 1 << 16
"""Immediates of one peer that it has not been told of; it never learns of further ones."""

_LISTS_MAX: Final = 8
"""Lists that one peer is asked to take at once."""

_WINDOW: Final = 64
"""Serials from the first list that a peer has not taken to the last one that was sent."""

_RETRY_S: Final = 0.001
"""Time from a refusal to the next try; usually the receiver has not counted everything yet."""

_REFUSED_MAX: Final = 100
"""So often a peer may refuse a list because sums differ; then it is sent without sums."""

_TRIES_MAX: Final = 30
"""So often a peer that does not answer is tried again. Then it is tried when it is heard, or when
something is sent to it."""

_NAME_BYTES: Final = 120
_REASON_BYTES: Final = 150


class _List:
    """Immediates that a peer is to be told of in one message.

    Attributes:
        imms: for each how many were to come, came, and may still come.
        out: whether it was sent, and there is no answer yet.
        refused: how often the peer refused it.
    """

    __slots__ = ("imms", "out", "reason", "refused", "serial")

    def __init__(self, serial: int, reason: str, imms: dict[int, tuple[int, int, int]]) -> None:
        self.serial = serial
        self.reason = reason
        self.imms = imms
        self.out = False
        self.refused = 0


class _Owed:
    """What one peer has not been told yet.

    Attributes:
        new: immediates that are in no list yet, each with the reason and the numbers.
        lists: lists that the peer has not taken, by serial.
        window: the serials since the first of them.
        paths: paths on which rows of failed transfers may still land: for each immediate of these
            how often the path had been fenced by then.
        clearing: those of them that are to be fenced and opened again, and whether the peer was
            asked to open it.
        held: later transfers that wait for that, or until the peer was told.
        due_s: when to go on; None: when an answer comes, or when the peer is heard.
        wait_s: from a try to reach it to the next one.
        tries: how many there were.
        why: the error of the first transfer that failed.
    """

    __slots__ = (
        "clearing", "due_s", "held", "lists", "new", "paths", "tries", "wait_s", "why",
        "window",
    )  # fmt: skip

    def __init__(self, wait_s: float) -> None:
        self.new: dict[int, tuple[str, int, int, int]] = {}
        self.lists: dict[int, _List] = {}
        self.window: deque[int] = deque()
        self.paths: dict[Path, dict[int, int]] = {}
        self.clearing: dict[Path, bool] = {}
        self.held: dict[Transfer, None] = {}
        self.due_s: float | None = None
        self.wait_s = wait_s
        self.tries = 0
        self.why = ""

    @property
    def asks(self) -> bool:
        """Whether an answer of the peer is awaited."""
        return any(each.out for each in self.lists.values())

    def is_to_wait(self, imm: int) -> bool:
        """Whether a later transfer of an immediate has to wait until the peer was told.

        If nothing of it came or may come, the later one makes up for it: then the news is dropped,
        unless it is on its way.
        """
        numbers = self.new.get(imm)
        wait = numbers is not None and any(numbers[2:])
        if numbers is not None and not wait:
            del self.new[imm]
        for each in self.lists.values():
            if imm not in each.imms:
                continue
            if each.out or any(each.imms[imm][1:]):
                wait = True
            else:
                del each.imms[imm]
        return wait

    def close(self, each: _List) -> None:
        """A list has been taken, or is empty."""
        del self.lists[each.serial]
        while self.window and self.window[0] not in self.lists:
            self.window.popleft()


class Telling:
    """What the failed transfers of one engine owe to their targets.

    Args:
        name: the name of this engine and its incarnation.
        group: its NICs.
        channel: control messages to the peers.
        failover: asks peers to fence lost paths.
        start: deals out a transfer that was held.
        reopen: asks a peer to open a path again that it has fenced.
        options: whether peers are told at all; and a peer that does not answer is asked again
            after `probe_first_s`, then after twice as long, and so on.
        now_s: the clock.

    Attributes:
        owed: what peers have not been told yet, or cannot know yet.
        busy: whether step() has something to do, now or later.
        dropped: immediates that a peer is never told of, because there were too many.
    """

    def __init__(
        self,
        name: str,
        group: DomainGroup,
        channel: Channel,
        failover: Failover,
        start: Callable[[Transfer], object],
        reopen: Callable[[Path], object],
        options: EngineOptions,
        now_s: Callable[[], float],
    ) -> None:
        self.owed: dict[Link, _Owed] = {}
        self.dropped = 0
        self.busy = False
        self.on = options.tell_failures
        self._name = _cut(name, _NAME_BYTES)
        self._group, self._channel, self._failover = group, channel, failover
        self._start, self._reopen, self._now_s = start, reopen, now_s
        self._first_s, self._longest_s = options.probe_first_s, options.probe_max_s
        self._serials = itertools.count(1)

    # ------------------------------------------------------------------ what is owed

    def gave_up(self, transfer: Transfer) -> None:
        """A transfer failed or was cancelled: note what its targets have to be told."""
        on = self.on and transfer.job.routing.tell_failures
        if not on or not self._channel.able or not any(self._group.alive):
            return
        failure = transfer.failure
        reason = "it was cancelled" if failure is None else str(failure)
        for link, imms in shortfalls(transfer, len(self._group.domains)).items():
            if link.current:
                text = f"{link.addr.name} is told that {len(imms)} immediates do not come: {reason}"
                self._group.journal.say("shortfall", text)
                owed = self._at(link)
                owed.why = owed.why or reason
                for imm, short in imms.items():
                    self._add(owed, imm, reason, short)

    def cleared(self, path: Path, landed: dict[int, int]) -> None:
        """Of rows in doubt on a path so many of each immediate had landed."""
        if not self.on or not path.link.current or not self._channel.able:
            return
        owed = self._at(path.link)
        for imm, came in landed.items():
            if came:
                short = Shortfall(0)
                short.came = came
                self._add(owed, imm, "", short)

    def _at(self, link: Link) -> _Owed:
        owed = self.owed.get(link)
        if owed is None:
            owed = self.owed[link] = _Owed(self._first_s)
        self._wake(owed)
        return owed

    def _wake(self, owed: _Owed, after_s: float = 0.0) -> None:
        """Go on with a peer after some time."""
        owed.due_s = sooner(owed.due_s, self._now_s() + after_s)
        self.busy = self._channel.busy = True

    def _add(self, owed: _Owed, imm: int, reason: str, short: Shortfall) -> None:
        known = owed.new.get(imm)
        if known is None and len(owed.new) >= _IMMS_MAX:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:
                _log.warning("%d immediates that failed are not told to peers", self.dropped)
            return
        was, sent, came, late = known or (reason, 0, 0, 0)
        numbers = sent + short.sent, came + short.came, late + short.late
        owed.new[imm] = was or reason, *numbers
        for path in short.paths if self._failover.able else ():
            owed.paths.setdefault(path, {})[imm] = path.fences

    def _may_land(self, owed: _Owed, path: Path, imm: int) -> bool:
        """Whether rows of an immediate may still land on a path, and fencing it can help."""
        fences = owed.paths.get(path, {}).get(imm)
        if fences is None:
            return False
        if fences == path.fences or (path.sums.doubt[imm] and self._failover.can_clear(path)):
            return True
        del owed.paths[path][imm]
        return False

    # ------------------------------------------------------------------ transfers that are held

    def holds(self, transfer: Transfer) -> bool:
        """Whether a transfer has to wait until a peer knows of an earlier failure; it is kept."""
        for _, known, _ in self._owing(transfer):
            if known.due_s is None and (known.new or known.lists) and not known.asks:
                self._wake(known)  # it was given up; perhaps the peer can be reached now
        owed = self._hold(transfer)
        if owed is not None and not owed.asks:
            self._wake(owed)  # whatever the time of the next try
        return owed is not None

    def _hold(self, transfer: Transfer) -> _Owed | None:
        for link, owed, imms in self._owing(transfer):
            if self._must_wait(link, owed, imms):
                owed.held[transfer] = None
                return owed
        return None

    def _owing(self, transfer: Transfer) -> Iterator[tuple[Link, _Owed, Iterable[int]]]:
        """The targets of a transfer to whom something is owed, with the immediates for them."""
        for link, imms in _towards(transfer.job):
            owed = self.owed.get(link)
            if owed is not None and link.current:
                yield link, owed, imms

    def _must_wait(self, link: Link, owed: _Owed, imms: Iterable[int]) -> bool:
        """Whether a transfer with these immediates has to wait for a peer."""
        if not any(self._group.alive):
            return False
        # In order, as a set is not: fences are asked for in it, and runs must be repeatable.
        unsure = dict.fromkeys(
            path for path in owed.paths for imm in imms if self._may_land(owed, path, imm)
        )
        for path in unsure:
            if path not in owed.clearing:
                owed.clearing[path] = False
                self._wake(owed)
        owed.paths = {path: left for path, left in owed.paths.items() if left}
        if unsure or any(owed.is_to_wait(imm) for imm in imms):
            return True
        # While the last path is fenced nothing can be sent, whatever its immediate.
        ours = [nic for nic, alive in enumerate(self._group.alive) if alive]
        return bool(owed.clearing) and not link.has_way(ours)

    def let_go(self, transfer: Transfer) -> bool:
        """Forget a transfer that is held; False: it is not."""
        found = [owed for owed in self.owed.values() if transfer in owed.held]
        for owed in found:
            del owed.held[transfer]
        return bool(found)

    def _release(self, owed: _Owed) -> None:
        """Start the transfers that need not be held any more."""
        held, owed.held = owed.held, {}
        for transfer in held:
            if self._hold(transfer) is None:
                self._start(transfer)

    # ------------------------------------------------------------------ turning

    def step(self) -> bool:
        """Send what is due; True: there was work."""
        work, now_s = False, self._now_s()
        for link, owed in tuple(self.owed.items()):
            # It has restarted or is removed, or this engine has lost all its NICs.
            if not link.current or not any(self._group.alive):
                del self.owed[link]
                work |= bool(owed.held)
                self._release(owed)
            elif owed.due_s is not None and owed.due_s <= now_s:
                owed.due_s = None
                self._send(link, owed)
                work = True
        self.busy = any(owed.due_s is not None for owed in self.owed.values())
        return work

    def due_s(self) -> float | None:
        """When step() must be called even if nothing happens; None: never."""
        return min((o.due_s for o in self.owed.values() if o.due_s is not None), default=None)

    def heard(self, link: Link) -> None:
        """A peer that did not answer does again."""
        owed = self.owed.get(link)
        if owed is not None:
            owed.tries, owed.wait_s = 0, self._first_s
            self._wake(owed)

    def last_words(self, dropped: Iterable[Transfer]) -> None:
        """The engine is being closed: say once what it dropped, and what peers do not know yet.

        Nobody waits for an answer. Rows that are in flight count as arrived.
        """
        for transfer in dropped:
            self.gave_up(transfer)
        for link, owed in self.owed.items():
            lists = list(owed.lists.values())
            while owed.new and len(lists) < _LISTS_MAX:
                lists.append(self._list(owed))
            for each in lists if link.current else ():
                self._channel.say_once(link, self._maker(each, each.serial, None))

    def describe(self) -> list[str]:
        """Lines for reports."""
        lines = [
            f"{link.addr.name} has not been told of {len(owed.new)} immediates that failed, and of "
            f"{len(owed.lists)} lists of them; {len(owed.held)} transfers wait for that"
            for link, owed in list(self.owed.items())
            if owed.new or owed.lists or owed.held
        ]
        more = f"{self.dropped} immediates that failed are not told to peers: there were too many"
        return [*lines, more] if self.dropped else lines

    def _send(self, link: Link, owed: _Owed) -> None:
        for path in tuple(owed.clearing):
            self._clear(link, owed, path)
        while owed.new and len(owed.lists) < _LISTS_MAX and len(owed.window) < _WINDOW:
            fresh = self._list(owed)
            owed.lists[fresh.serial] = fresh
            owed.window.append(fresh.serial)
        for each in tuple(owed.lists.values()):
            if not each.imms:
                owed.close(each)
            elif not each.out:
                each.out = True
                self._ask(link, owed, each)
        self._settle(link, owed)

    def _list(self, owed: _Owed) -> _List:
        """The next list: immediates with the same reason, as many as fit into a message."""
        _, (reason, *_) = next(iter(owed.new.items()))
        reason = _cut(reason, _REASON_BYTES)[:WHY_MAX]
        room = self._channel.control_bytes - len(encode(_message(0, 0, 0, self._name, reason, ())))
        most = max(1, (room - 60) // SHORTFALL_BYTES)
        alike = (
            imm
            for imm, (why, *_) in owed.new.items()
            if _cut(why, _REASON_BYTES)[:WHY_MAX] == reason
        )
        mine = {imm: owed.new.pop(imm)[1:] for imm in list(itertools.islice(alike, most))}
        return _List(next(self._serials), reason, mine)

    def _ask(self, link: Link, owed: _Owed, each: _List) -> None:
        done = min(owed.lists)
        totals = None if each.refused > _REFUSED_MAX else self._totals(link, each.imms)

        def told(answer: Answer) -> None:
            each.out = False
            owed.tries, owed.wait_s = 0, self._first_s
            if answer.why:
                each.refused += 1
                self._wake(owed, _RETRY_S)
                return
            owed.close(each)
            if owed.new or not all(other.out for other in owed.lists.values()):
                self._wake(owed)  # a list that got lost meanwhile is not booked anywhere
            self._settle(link, owed)

        def lost(why: str) -> None:
            each.out = False
            self._missed(link, owed, why)

        self._channel.ask(link, self._maker(each, done, totals), told, lost)

    def _maker(
        self, each: _List, done: int, totals: tuple[int, dict[int, int]] | None
    ) -> Callable[[int], Missing]:
        """A function that makes the message of a list, given its number."""
        pruned, sums = (0, {}) if totals is None else totals
        imms = sorted(each.imms.items())
        entries = [(imm, 1, *numbers, sums.get(imm, -1)) for imm, numbers in imms]
        return lambda n: _message(n, each.serial, done, self._name, each.reason, entries, pruned)

    def _totals(self, link: Link, imms: Iterable[int]) -> tuple[int, dict[int, int]] | None:
        """The generations of all paths to a peer, and how many of each immediate it acknowledged.

        None: that is not known.
        """
        paths = link.paths()
        if self._group.acks is None or any(path.sums.sent.forgot for path in paths):
            return None
        sums = dict.fromkeys(imms, 0)
        for path in paths:
            for imm, count in self._failover.acknowledged(path, sums).items():
                sums[imm] += count
        return sum(path.sums.pruned for path in paths), sums

    def _clear(self, link: Link, owed: _Owed, path: Path) -> None:
        """Have a path fenced, once nothing is in flight there, learn what landed, and open it."""
        if any(self._may_land(owed, path, imm) for imm in tuple(owed.paths.get(path, ()))):
            owed.clearing[path] = False  # it may have been opened for an earlier failure
            if path.is_up:
                self._group.suspect(path)
            if path.asking or not self._failover.is_clear(path):
                self._wake(owed, _RETRY_S)  # rows that are in flight end in time (C17)
                return

            def told(why: str) -> None:
                if why:
                    owed.paths.pop(path, None)  # the peer cannot fence it, and nobody knows
                self._wake(owed)

            self._failover.clear(path, told, lambda why: self._missed(link, owed, why))
        elif path.asking:
            self._wake(owed, _RETRY_S)
        elif path.state is PathState.FENCED and owed.clearing.get(path) is False:
            owed.clearing[path] = True
            self._wake(owed, _RETRY_S)
            self._reopen(path)
        else:
            owed.clearing.pop(path, None)  # it is open, or cannot be opened

    def _missed(self, link: Link, owed: _Owed, why: str) -> None:
        """A peer did not answer: try again later, and fail the transfers that wait for it."""
        if not self._channel.able or self.owed.get(link) is not owed:
            return  # the engine is being closed, or there is nothing left to say
        if not link.current:  # removed, or replaced, while it was asked
            self._wake(owed)  # step() forgets it, and starts what was held
            return
        name = link.addr.name
        text = f"{name} could not be told that earlier transfers with this immediate failed"
        text += f" ({owed.why}): {why}"
        held, owed.held = owed.held, {}
        for transfer in held:
            if any(self._must_wait(*each) for each in self._owing(transfer)):
                error = FabricError(f"{transfer.job.kind}: {text}", code="UNREACHABLE", peer=name)
                self._group.lose(transfer, transfer.rows, error)
            else:
                self._start(transfer)
        # A path that the peer is still asked to fence is opened again once it has answered.
        owed.clearing = {path: False for path in owed.clearing if path.asking}
        if owed.asks:
            return  # another list may arrive
        owed.tries += 1
        owed.due_s = None
        if owed.tries <= _TRIES_MAX:
            self._wake(owed, owed.wait_s)
        owed.wait_s = min(2 * owed.wait_s, self._longest_s)

    def _settle(self, link: Link, owed: _Owed) -> None:
        """Release what need not be held any more; forget a peer to whom nothing is owed."""
        self._release(owed)
        nothing = not (owed.new or owed.lists or owed.paths or owed.clearing or owed.held)
        if nothing and self.owed.get(link) is owed:
            del self.owed[link]


def _message(
    number: int,
    serial: int,
    done: int,
    who: str,
    reason: str,
    entries: Iterable[tuple[int, ...]],
    pruned: int = 0,
) -> Missing:
    """A list as a message, with neighbours that have the same numbers as one entry."""
    runs: list[list[int]] = []
    for first, n, *numbers in entries:
        if runs and runs[-1][0] + runs[-1][1] == first and runs[-1][2:] == numbers:
            runs[-1][1] += n
        else:
            runs.append([first, n, *numbers])
    found: list[Entry] = [(a, b, c, d, e, f) for a, b, c, d, e, f in runs]
    return Missing(number, serial, done, who, reason, pruned, tuple(found))


def _towards(job: Job) -> list[tuple[Link, Iterable[int]]]:
    """The immediates of a job, by peer."""
    imm, remotes = job.owner_imm if isinstance(job, ReadJob) else job.imm, job.remotes
    if imm is None:
        return []
    imms: Iterable[int] = (imm,) if isinstance(imm, int) else imm.tolist()
    if isinstance(remotes, Remote):
        return [(remotes.link, imms)]
    return [(remote.link, imms) for remote in remotes.remotes]


def _cut(text: str, nbytes: int) -> str:
    """The beginning of a text, on one line."""
    line = text.split("\n", 1)[0].encode()
    return line[:nbytes].decode(errors="ignore")
