"""Searches for bugs that are spread over workers: shares of seeds out, findings back.

One loop over the seeds and many workers find the same, in the order of the seeds. What is here
decides who does what; a `Pool` runs it, on Ray (`tep.integrations.ray`) or on a fake in tests.

Rule 1: the result depends on the seeds and the judge alone. How many workers there are, in what
order they answer and which of them die changes only how long it takes.
"""

from __future__ import annotations

import json
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Final, NamedTuple
from typing import Protocol as Interface

from tep.base.checks import check_int, check_seconds
from tep.base.errors import RendezvousError, UsageError, WaitTimeout
from tep.base.waiting import system_s
from tep.rendezvous import Group
from tep.sim.row_log import RowLog
from tep.testing.case import HEAL_US, Case, Nics, Violation
from tep.testing.hunting import Protocol, load_protocol, run

__all__ = [
    "Finding", "Judge", "Judged", "Pool", "ProtocolJudge", "Share", "Spread", "confirm",
    "judge_share", "search", "spread",
]  # fmt: skip

SHARE_MAX: Final = 4096
"""Seeds of one share. Workers stop by the clock, so this bounds only what a message says."""

TURN_MAX: Final = 256
"""Seeds that a rank of torchrun or srun judges before it tells the others."""

LOSSES_MAX: Final = 5
"""So many workers in a row may die of one seed before the search gives up."""


class Finding(NamedTuple):
    """A seed that breaks a promise, and which."""

    seed: int
    violation: str


class Judge(Interface):
    """Runs one seed; None if nothing was found, else the violation in words.

    It must be a function of the seed, and be pickled where it is spread.
    """

    def __call__(self, seed: int, row_log: RowLog | None = None) -> str | None: ...


@dataclass(frozen=True)
class ProtocolJudge:
    """A user's protocol in the case drawn from a seed.

    Pickled it is the place; each process loads the protocol for itself.

    Attributes:
        place: FILE.py:NAME of an async function of a Cluster.
        nodes, nics, faults, heal_us: as for Case.draw().
        literal: a case in place of those that are drawn, as `repr` printed it.
        may_fail: as for run().
        protocol: the function that stands there.
    """

    place: str
    nodes: int = 2
    nics: Nics = (1, 4)
    faults: str | Sequence[str] = "all"
    heal_us: float = HEAL_US
    literal: str = ""
    may_fail: bool = True
    protocol: Protocol[Any] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "protocol", load_protocol(self.place))

    def __reduce__(self) -> tuple[object, ...]:
        shape = (self.place, self.nodes, self.nics, self.faults, self.heal_us)
        return type(self), (*shape, self.literal, self.may_fail)

    def case(self, seed: int) -> Case:
        """The case of a seed."""
        if self.literal:
            return Case.parse(self.literal)
        return Case.draw(
            seed, nodes=self.nodes, nics=self.nics, faults=self.faults, heal_us=self.heal_us
        )

    def moved(self) -> tuple[ProtocolJudge, Path]:
        """The same for a worker that runs in a copy of the protocol's folder; and this folder."""
        path, _, name = self.place.rpartition(":")
        moved = copy(self)
        object.__setattr__(moved, "place", f"{Path(path).name}:{name}")
        return moved, Path(path).resolve().parent

    def play(self, seed: int, row_log: RowLog | None = None) -> None:
        """Run a seed. Raises Violation."""
        run(self.protocol, self.case(seed), may_fail=self.may_fail, row_log=row_log)

    def __call__(self, seed: int, row_log: RowLog | None = None) -> str | None:
        return _told(self.play, seed, row_log)


def _told(play: Callable[..., None], seed: int, row_log: RowLog | None) -> str | None:
    try:
        play(seed, row_log)
    except Violation as found:
        return str(found)
    return None


@dataclass(frozen=True, slots=True, order=True)
class Share:
    """Consecutive seeds for one worker."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Judged:
    """The answer of a worker: the number of seeds that it judged, from its share's first on."""

    count: int
    findings: tuple[Finding, ...]


def judge_share(
    judge: Judge, share: Share, most: int, late: Callable[[], bool] = lambda: False
) -> Judged:
    """Judge seeds one after another: all, or until `most` have findings, or until it is late.

    At least one seed is judged. This is the whole search where there are no workers.
    """
    findings: list[Finding] = []
    for count in range(1, share.count + 1):
        seed = share.first + count - 1
        violation = judge(seed)
        if violation is not None:
            findings.append(Finding(seed, violation))
        if len(findings) == most or late():
            return Judged(count, tuple(findings))
    return Judged(share.count, tuple(findings))


def search(
    judge: Judge,
    seeds: range,
    *,
    group: Group | None = None,
    most: int = 1,
    timeout_s: float = 600.0,
    judged: Callable[[int], object] = lambda _count: None,
) -> tuple[Sequence[Finding], RowLog]:
    """Search seeds here, or in processes that torchrun or srun has started; each calls this alike.

    In each turn every rank judges some seeds, and all tell each other what they found.

    Args:
        judge: judges one seed, the same in all ranks.
        seeds: consecutive seeds, the same in all ranks.
        group: all ranks, from `tep.rendezvous.join`; None: this process alone.
        most: number of findings at which the search ends.
        timeout_s: time limit for a turn of the slowest rank.
        judged: called with the number of seeds that all ranks together have judged in a turn.

    Returns:
        The findings, at most so many; and, at rank 0, the rows of the first one's run, or of the
        last run.

    Raises:
        WaitTimeout, RendezvousError: a rank was late, or is lost.
    """
    rank, size = (group.rank, group.size) if group is not None else (0, 1)
    count = min(max(len(seeds) // (8 * size), 1), TURN_MAX if size > 1 else 1)
    findings: list[Finding] = []
    for turn in range(seeds.start, seeds.stop, count * size):
        first = turn + rank * count
        left = min(count, seeds.stop - first)
        found = judge_share(judge, Share(first, left), most).findings if left > 0 else ()
        if group is None:
            findings += found
        else:
            told = json.dumps([(one.seed, one.violation[:300]) for one in found]).encode()
            for raw in group.all_gather(told, timeout_s=timeout_s):
                findings += [Finding(seed, text) for seed, text in json.loads(raw)]
        judged(min(count * size, seeds.stop - turn))
        if len(findings) >= most:
            break
    findings = sorted(findings)[:most]
    return confirm(judge, findings, seeds) if rank == 0 else (findings, RowLog())


def confirm(
    judge: Judge, findings: Sequence[Finding], seeds: range
) -> tuple[Sequence[Finding], RowLog]:
    """Play findings again; without any, the last seed. As `search` returns them.

    Raises:
        UsageError: one of them is none here.
    """
    first = RowLog()
    again: list[Finding] = []
    for found in findings:
        violation = judge(found.seed, None if again else first)
        if violation is None:
            raise UsageError(
                f"seed {found.seed} breaks no promise in this process, and it did where it was "
                "found: what is searched is no function of the seed. It was found that "
                f"{found.violation}"
            )
        again.append(Finding(found.seed, violation))
    if seeds and not findings:
        judge(seeds[-1], first)
    return again, first


class Pool(Interface):
    """Workers that may die. Calls come from one thread."""

    def room(self) -> int:
        """The number of shares to have in progress now; at least 1, even without a worker."""
        ...

    def start(self, share: Share) -> None:
        """Have a worker judge a share, as soon as one is free."""
        ...

    def ended(self, timeout_s: float) -> Iterable[tuple[Share, Judged | str]]:
        """Shares that have ended, or none in time. A string says why a worker was lost."""
        ...

    def drop(self, share: Share) -> None:
        """Nobody needs this share any more; `ended` does not name it again."""
        ...


@dataclass(frozen=True, slots=True)
class Spread:
    """The result of a spread search.

    Attributes:
        findings: in the order of the seeds, no more than were asked for.
        again: number of shares that were assigned again because their worker was lost.
    """

    findings: tuple[Finding, ...]
    again: int


def spread(
    seeds: range,
    pool: Pool,
    *,
    most: int = 1,
    timeout_s: float = 600.0,
    judged: Callable[[int], object] = lambda _count: None,
) -> Spread:
    """Search seeds on the workers of a pool.

    The share of a lost worker is cut in two and assigned again, so that a seed that kills workers
    is soon alone in its share. Seeds behind the last finding that is asked for may be judged as
    well; findings there are not returned.

    Args:
        seeds: consecutive seeds.
        pool: judges shares with `judge_share` and the same `most`.
        most: number of findings at which the search ends.
        timeout_s: longest time without an answer of any worker.
        judged: called with the number of seeds that a worker has judged, each time one answers.

    Raises:
        WaitTimeout: no worker answered in time; says which shares are open, and what was found.
        RendezvousError: several workers in a row were lost while they judged one seed.
    """
    most = check_int("spread: most", most, 1)
    timeout_s = system_s(check_seconds("spread: timeout_s", timeout_s))
    search = _Search(seeds, most)
    try:
        while True:
            search.hand_out(pool)
            if not search.under_way:
                return Spread(tuple(search.findings[:most]), search.again)
            answers = list(pool.ended(timeout_s))
            if not answers:
                open_ = ", ".join(_named(share) for share in sorted(search.under_way)[:4])
                raise WaitTimeout(
                    f"spread: no worker has answered for {timeout_s:g} s; "
                    f"{len(search.under_way)} shares are open: {open_}; {search.told()}"
                )
            for share, answer in answers:
                judged(search.take_in(share, answer))
    finally:
        for share in search.under_way:
            pool.drop(share)


@dataclass(slots=True, eq=False)
class _Search:
    """The seeds that are judged, in progress, or still to be assigned."""

    seeds: range
    most: int
    findings: list[Finding] = field(default_factory=list)
    under_way: set[Share] = field(default_factory=set)
    again: int = 0
    _parts: list[Share] = field(default_factory=list)  # a heap: what came back unjudged
    _next: int = 0  # of `seeds`, in the order of their places: never given out
    _losses: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        assert self.seeds.step == 1, self.seeds
        self._next = self.seeds.start

    @property
    def end(self) -> int:
        """The end of the search, as known now: seeds from here on are not needed."""
        enough = len(self.findings) >= self.most
        return self.findings[self.most - 1].seed + 1 if enough else self.seeds.stop

    def hand_out(self, pool: Pool) -> None:
        """Drop what is not needed any more; fill the workers with what is."""
        for share in [share for share in self.under_way if share.first >= self.end]:
            pool.drop(share)
            self.under_way.discard(share)
        room = pool.room()
        while len(self.under_way) < room and (given := self._take(room)) is not None:
            self.under_way.add(given)
            pool.start(given)

    def _take(self, room: int) -> Share | None:
        """The next share: first what came back, since it holds up the order."""
        if self._parts and self._parts[0].first < self.end:
            return heappop(self._parts)
        left = self.end - self._next
        if left <= 0:
            return None
        share = Share(self._next, min(max(left // (4 * room), 1), SHARE_MAX))
        self._next += share.count
        return share

    def take_in(self, share: Share, answer: Judged | str) -> int:
        """Take in an answer; how many seeds it has judged."""
        self.under_way.remove(share)
        if isinstance(answer, str):
            self._lost(share, answer)
            return 0
        assert 1 <= answer.count <= share.count, (share, answer.count)
        for found in answer.findings:
            assert share.first <= found.seed < share.first + answer.count, (share, found.seed)
            insort(self.findings, found)
        if answer.count < share.count:
            heappush(self._parts, Share(share.first + answer.count, share.count - answer.count))
        return answer.count

    def _lost(self, share: Share, why: str) -> None:
        self.again += 1
        half = share.count // 2
        if half:
            heappush(self._parts, Share(share.first, half))
        else:
            self._losses[share.first] += 1
            if self._losses[share.first] == LOSSES_MAX:
                raise RendezvousError(
                    f"spread: {LOSSES_MAX} workers were lost while they judged seed {share.first}, "
                    f"the last because: {why}. Run this seed alone; {self.told()}"
                )
        heappush(self._parts, Share(share.first + half, share.count - half))

    def told(self) -> str:
        """Describe the findings so far, for a message that ends the search."""
        seeds = ", ".join(str(found.seed) for found in self.findings[: self.most])
        return f"found so far: {f'seeds {seeds}' if seeds else 'nothing'}"


def _named(share: Share) -> str:
    last = share.first + share.count - 1
    return f"seed {last}" if share.count == 1 else f"seeds {share.first} to {last}"
