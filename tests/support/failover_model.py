"""A model of sums, fences and burnt immediates, small enough to be checked whole. Not a test.

One path of NICs, one immediate, a few transfers over it, and a second path on which everything
arrives. The engine is `Failover`, `Fencing` and `Notices`, in a few lines each; the fabric may do
all that C17, C24, C26 and C27 allow. `check` visits every state that can be reached.

It proves, for the given numbers of transfers, rows, cuts and lost or doubled messages:
 1. When no transfer is open, as many immediates are here as the done ones have rows, and those of
    failed ones that landed; and none comes later. So no count is short, and none is reached twice.
 2. The receiver's sum never contradicts the sender's, where no row has failed for good.
 3. There is no state from which nothing goes on while a transfer or the expectation is open.
 4. When the receiver's count of all transfers is complete, all their bytes are there.

It leaves out: rows that are written again one by one (their immediates follow at once), several
NICs, pruned sums, answers in several messages, restarts, more than one immediate, and time.
`tests.support.orders` runs the engine itself through every order of a few rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Contradiction", "Model", "State", "check"]

# What the sender knows of a row; of one that is gone nobody will know more.
OUT, OK, LOST, GONE, OVER = "out", "ok", "lost", "gone", "over"
# How a transfer is: ending ones were cancelled, failing ones have an error.
NEW, OPEN, ENDING, FAILING = "new", "open", "ending", "failing"
DONE, FAILED, REFUSED = "done", "failed", "refused"
# How the receiver's expectation of all transfers is.
LATER, WAITS, COMPLETE, TOLD = "later", "waits", "complete", "told"


class Contradiction(AssertionError):
    """A state that must not be, and how it came about."""


class Row(NamedTuple):
    """One row on the path: its transfer, its sender's knowledge, and the truth."""

    of: int
    known: str
    landed: bool = False
    barred: bool = False
    again: bool = False


class State(NamedTuple):
    """All of it.

    Attributes:
        rows: those posted on the path.
        transfers: how each is.
        other: immediates that came by the other path.
        acked: what the sender has counted as arrived on the path.
        unsure: whether a row has failed for good, so that the sums may differ.
        cut: whether rows may fail. cuts: how often it may still be cut.
        down: whether the sender has seen a row fail, and posts no more.
        shut: whether the fence is there. fencing: questions that wait for it.
        number: of the last question. asking: whether it is open. since: of the last reopening.
        messages: what is on its way. losses, copies: how many may still be lost, or doubled.
        cancels: how many transfers may still be cancelled, or fail elsewhere.
        notice: "" = nothing is burnt, "open" = the receiver is being told, "told" = it answered.
        burnt: whether the receiver knows. expectation: how it is.
    """

    rows: tuple[Row, ...]
    transfers: tuple[str, ...]
    other: int
    acked: int
    unsure: bool
    cut: bool
    cuts: int
    down: bool
    shut: bool
    fencing: frozenset[int]
    number: int
    asking: str
    since: int
    messages: tuple[tuple[str, int, int], ...]
    losses: int
    copies: int
    cancels: int
    notice: str = ""
    burnt: bool = False
    expectation: str = LATER


Step = tuple[str, State]


@dataclass(frozen=True)
class Model:
    """The protocol, and what may go wrong.

    Attributes:
        transfers: how many there are, all under one immediate.
        rows: of each.
        cuts, losses, copies, cancels: how many of each may happen.
        mistakes: names of mistakes that are made, which `check` must find: "sums before the fence",
            "asked while rows are out", "failed rows forgotten", "judged rows not counted",
            "what is out comes in", "partial sums are guessed", "cancels burn nothing", "notices
            are sent once", "late expectations wait"; and "late questions count", which breaks no
            promise of these.
    """

    transfers: int = 2
    rows: int = 1
    cuts: int = 1
    losses: int = 1
    copies: int = 1
    cancels: int = 1
    mistakes: frozenset[str] = frozenset()

    def start(self) -> State:
        """Nothing has happened."""
        return State(
            rows=(),
            transfers=(NEW,) * self.transfers,
            other=0,
            acked=0,
            unsure=False,
            cut=False,
            cuts=self.cuts,
            down=False,
            shut=False,
            fencing=frozenset(),
            number=0,
            asking="",
            since=0,
            messages=(),
            losses=self.losses,
            copies=self.copies,
            cancels=self.cancels,
        )

    def steps(self, s: State) -> Iterator[Step]:
        """Everything that may happen next."""
        yield from self._of_the_users(s)
        yield from self._of_the_wire(s)
        yield from self._of_the_sender(s)
        for k, message in enumerate(s.messages):
            rest = s._replace(messages=s.messages[:k] + s.messages[k + 1 :])
            yield f"{message} comes", self._settled(self._heard(rest, *message))
            if s.losses:
                yield f"{message} is lost", rest._replace(losses=s.losses - 1)
            if s.copies:
                both = _sorted((*s.messages, message))
                yield f"{message} is doubled", s._replace(messages=both, copies=s.copies - 1)
        if s.fencing:
            shut = s._replace(shut=True, fencing=frozenset())
            for number in sorted(s.fencing):
                shut = self._answer(shut, number)
            yield "FENCED", shut

    # ------------------------------------------------------------------ users, and the wire

    def _of_the_users(self, s: State) -> Iterator[Step]:
        for k, how in enumerate(s.transfers):
            if how == NEW and NEW not in s.transfers[:k] and s.notice:
                yield f"transfer {k} is refused", _with(s, k, REFUSED)
            elif how == NEW and NEW not in s.transfers[:k]:
                opened = _with(s, k, OPEN)
                if s.down:  # it goes another way
                    opened = opened._replace(other=s.other + self.rows)
                else:
                    opened = opened._replace(rows=_rows((*s.rows, *[Row(k, OUT)] * self.rows)))
                yield f"transfer {k} is sent", self._settled(opened)
            if how == OPEN and s.cancels:
                for ending in (ENDING, FAILING):
                    ended = _with(s, k, ending)._replace(cancels=s.cancels - 1)
                    yield f"{k} is {ending}", self._settled(ended)
        if s.expectation == LATER:
            refused = s.burnt and "late expectations wait" not in self.mistakes
            stated = s._replace(expectation=TOLD if refused else WAITS)
            yield "the receiver expects", self._settled(stated)

    def _of_the_wire(self, s: State) -> Iterator[Step]:
        if s.cuts and not s.cut:
            yield "the path is cut", s._replace(cut=True, cuts=s.cuts - 1)
        for k, row in enumerate(s.rows):
            if not row.landed and not row.barred and not s.shut:
                yield f"row {k} lands", self._settled(_row(s, k, row._replace(landed=True)))
            if row.known == OUT and row.landed:
                acked = _row(s, k, row._replace(known=OK))
                yield f"row {k} is acknowledged", self._settled(acked._replace(acked=s.acked + 1))
            if row.known == OUT and (s.cut or s.shut or row.barred):
                yield f"row {k} fails", self._settled(self._fails(s, k, row))

    def _fails(self, s: State, k: int, row: Row) -> State:
        s = s._replace(down=True)
        if s.transfers[row.of] in (FAILED, FAILING):
            unsure = "failed rows forgotten" not in self.mistakes
            return _row(s, k, row._replace(known=GONE))._replace(unsure=unsure or s.unsure)
        return _row(s, k, row._replace(known=LOST))

    # ------------------------------------------------------------------ the sender

    def _of_the_sender(self, s: State) -> Iterator[Step]:
        known = [row.known for row in s.rows]
        quiet = OUT not in known or "asked while rows are out" in self.mistakes
        if s.down and LOST in known and quiet and not s.asking:
            yield "asks", _send(s, "ask")
        elif s.down and LOST not in known and OUT not in known and not s.asking and not s.cut:
            yield "asks for the path", _send(s, "open")
        if s.cut and s.down:
            yield "the path is healed", s._replace(cut=False)
        if s.asking and not s.fencing and not any(m[1] == s.number for m in s.messages):
            yield "asks again", s._replace(messages=_sorted((*s.messages, (s.asking, s.number, 0))))
        quiet = not any(what in ("failed", "heard") for what, _, _ in s.messages)
        if s.notice == "open" and quiet and "notices are sent once" not in self.mistakes:
            yield "tells again", s._replace(messages=_sorted((*s.messages, ("failed", -1, 0))))

    def _judged(self, s: State, count: int) -> State:
        """The answer to a question is here."""
        lost = [k for k, row in enumerate(s.rows) if row.known == LOST]
        live = [k for k in lost if s.transfers[s.rows[k].of] == OPEN]
        total, landed = len(lost), count - s.acked
        unknown = s.unsure
        if not unknown and not 0 <= landed <= total:
            raise Contradiction(f"{count} came, {s.acked} are acknowledged, {total} are lost")
        if "partial sums are guessed" not in self.mistakes:
            unknown = unknown or (len(live) < total and 0 < landed < total)
        if unknown:
            for k in lost:
                s = _row(s, k, s.rows[k]._replace(known=GONE))
            for k in live:
                s = _with(s, s.rows[k].of, FAILING)
            return s._replace(unsure=True)
        missing = len(live[: max(0, total - landed)])
        for k in lost:
            again = missing > 0 and k in live
            s = _row(s, k, s.rows[k]._replace(known=OVER, again=again))
        acked = s.acked + (0 if "judged rows not counted" in self.mistakes else landed)
        return s._replace(acked=acked, other=s.other + missing)

    # ------------------------------------------------------------------ messages

    def _heard(self, s: State, what: str, number: int, count: int) -> State:
        match what:
            case "ask":
                if number <= s.since and "late questions count" not in self.mistakes:
                    return s
                if s.shut:
                    return self._answer(s, number)
                if "sums before the fence" in self.mistakes:
                    return self._answer(s, number)._replace(shut=False, fencing=frozenset({-1}))
                return s._replace(fencing=s.fencing | {number})
            case "open":
                if number <= s.since or s.fencing:
                    again = (*s.messages, ("opened", number, 0))
                    return s._replace(messages=_sorted(again)) if number == s.since else s
                out = "what is out comes in" in self.mistakes
                rows = tuple(row._replace(barred=row.barred or not out) for row in s.rows)
                messages = _sorted((*s.messages, ("opened", number, 0)))
                return s._replace(shut=False, rows=rows, since=number, messages=messages)
            case "answer" if s.asking == "ask" and number == s.number:
                return self._judged(s._replace(asking=""), count)
            case "opened" if s.asking == "open" and number == s.number:
                return s._replace(asking="", down=False)
            case "failed":
                told = TOLD if s.expectation == WAITS else s.expectation
                messages = _sorted((*s.messages, ("heard", -1, 0)))
                return s._replace(burnt=True, expectation=told, messages=messages)
            case "heard":
                return s._replace(notice="told")
        return s

    def _answer(self, s: State, number: int) -> State:
        if number < 0:
            return s
        came = sum(row.landed for row in s.rows)
        return s._replace(messages=_sorted((*s.messages, ("answer", number, came))))

    # ------------------------------------------------------------------ what ends

    def _settled(self, s: State) -> State:
        """Transfers end whose rows are all known about; a count that is complete is taken."""
        for k, how in enumerate(s.transfers):
            if how not in (OPEN, ENDING, FAILING):
                continue
            if any(row.of == k and row.known in (OUT, LOST) for row in s.rows):
                continue
            s = _with(s, k, DONE if how == OPEN else FAILED)
            if how != OPEN and not s.notice and self._burns(how):
                messages = _sorted((*s.messages, ("failed", -1, 0)))
                s = s._replace(notice="open", messages=messages)
        if s.expectation == WAITS:
            came = s.other + sum(row.landed for row in s.rows)
            if came >= self.transfers * self.rows:
                s = s._replace(expectation=COMPLETE)
                self._check_bytes(s)
        rows = _rows(s.rows)
        return s if rows == s.rows else s._replace(rows=rows)

    def _burns(self, how: str) -> bool:
        return how == FAILING or "cancels burn nothing" not in self.mistakes

    def _check_bytes(self, s: State) -> None:
        if NEW in s.transfers or REFUSED in s.transfers:
            raise Contradiction("the count is complete, and a transfer was never sent")
        if not all(row.landed or row.again for row in s.rows):
            raise Contradiction("the count is complete, and bytes are missing")

    # ------------------------------------------------------------------ what must hold

    def judge(self, s: State, *, last: bool) -> None:
        """Raise Contradiction where a promise is broken; `last`: nothing can happen any more."""
        going = [how for how in s.transfers if how in (OPEN, ENDING, FAILING)]
        if last and (going or NEW in s.transfers):
            raise Contradiction("nothing goes on, and a transfer is open")
        if last and s.expectation == WAITS:
            raise Contradiction("nothing goes on, and the receiver waits")
        if not going:
            came = s.other + sum(row.landed for row in s.rows)
            failed = sum(row.landed for row in s.rows if s.transfers[row.of] == FAILED)
            due = self.rows * s.transfers.count(DONE) + failed
            if came != due:
                raise Contradiction(f"{came} immediates came, {due} are due")


def _rows(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Equal rows are interchangeable: one order of them stands for all."""
    return tuple(sorted(rows))


def _sorted(messages: tuple[tuple[str, int, int], ...]) -> tuple[tuple[str, int, int], ...]:
    return tuple(sorted(messages))


def _row(s: State, k: int, row: Row) -> State:
    return s._replace(rows=(*s.rows[:k], row, *s.rows[k + 1 :]))


def _with(s: State, k: int, how: str) -> State:
    return s._replace(transfers=(*s.transfers[:k], how, *s.transfers[k + 1 :]))


def _send(s: State, what: str) -> State:
    number = s.number + 1
    messages = _sorted((*s.messages, (what, number, 0)))
    return s._replace(number=number, asking=what, messages=messages)


def check(model: Model, states_max: int = 5_000_000) -> int:
    """Visit every state; return how many there are. Raises Contradiction, with the way there."""
    start = model.start()
    came: dict[State, tuple[str, State] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        try:
            steps = list(model.steps(state))
            model.judge(state, last=not steps)
        except Contradiction as found:
            raise Contradiction(f"{found}: {'; '.join(_way(came, state))}") from None
        for name, after in steps:
            if after not in came:
                came[after] = (name, state)
                queue.append(after)
                assert len(came) <= states_max, "too many states to check them all"
    return len(came)


def _way(came: dict[State, tuple[str, State] | None], state: State) -> list[str]:
    found = []
    while (before := came[state]) is not None:
        found.append(before[0])
        state = before[1]
    return found[::-1]
