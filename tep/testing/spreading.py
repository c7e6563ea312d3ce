"""Searches for bugs through seeds, in this process or on workers: the findings are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from typing import Protocol as Interface

from tep.base.errors import UsageError
from tep.sim.row_log import RowLog
from tep.testing.case import HEAL_US, Case, Nics, Violation
from tep.testing.hunting import Protocol, load_protocol, run

__all__ = ["Finding", "Judge", "ProtocolJudge", "search"]

_SHARE_MAX: Final = 16
"""Most seeds of a share: a worker answers in time even if a seed takes half a minute."""


class Finding(NamedTuple):
    """A seed that breaks a promise, and which."""

    seed: int
    violation: str


class Judge(Interface):
    """Runs one seed; None if nothing was found, else the violation in words.

    It must be a function of the seed; for workers it is pickled.
    """

    def __call__(self, seed: int, row_log: RowLog | None = None) -> str | None: ...


@dataclass(frozen=True)
class ProtocolJudge:
    """A user's protocol in the case drawn from a seed.

    Pickled it is the name of the protocol's file without its folder: each worker stands in a copy
    of that folder and loads the protocol for itself.

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
        place = Path(self.place).name
        shape = (place, self.nodes, self.nics, self.faults, self.heal_us)
        return type(self), (*shape, self.literal, self.may_fail)

    @property
    def folder(self) -> Path:
        """The folder of the protocol's file."""
        return Path(self.place).resolve().parent

    def case(self, seed: int) -> Case:
        """The case of a seed."""
        if self.literal:
            return Case.parse(self.literal)
        return Case.draw(
            seed, nodes=self.nodes, nics=self.nics, faults=self.faults, heal_us=self.heal_us
        )

    def play(self, seed: int, row_log: RowLog | None = None) -> None:
        """Run a seed. Raises Violation."""
        run(self.protocol, self.case(seed), may_fail=self.may_fail, row_log=row_log)

    def __call__(self, seed: int, row_log: RowLog | None = None) -> str | None:
        try:
            self.play(seed, row_log)
        except Violation as found:
            return str(found)
        return None


Share = range
Work = Callable[[Share], list[Finding]]
Answered = Callable[[Share, list[Finding]], bool]
Calls = Callable[[Work, Sequence[Share], Answered], None]
"""Calls a function for each item, in any order, and passes on each item with its result as it
comes; ends early when that returns True."""


def search(
    judge: Judge,
    seeds: range,
    *,
    most: int = 1,
    calls: Calls | None = None,
    judged: Callable[[int], object] = lambda _count: None,
) -> tuple[Sequence[Finding], RowLog]:
    """Search seeds for those that break a promise.

    Each finding is judged again in this process before it is returned.

    Args:
        judge: judges one seed.
        seeds: consecutive seeds.
        most: number of findings at which the search ends.
        calls: makes the calls on workers, such as `tep.integrations.ray.cluster.calls()`; None:
            they are made here, one after the other.
        judged: called with the number of seeds of each share that has ended.

    Returns:
        The findings with the lowest seeds, at most `most`; and the rows of the first one's run, or
        of the last seed's.

    Raises:
        UsageError: a finding is none in this process.
    """
    size = min(max(len(seeds) // 64, 1), _SHARE_MAX)
    shares = [seeds[k : k + size] for k in range(0, len(seeds), size)]
    findings: list[Finding] = []
    early: dict[int, list[Finding]] = {}  # of shares behind one that has not ended
    behind = seeds.start

    def answered(share: Share, found: list[Finding]) -> bool:
        nonlocal behind
        judged(len(share))
        early[share.start] = found
        while behind in early:
            findings.extend(early.pop(behind))
            behind += size
        return len(findings) >= most

    (calls or _call)(partial(_judge_all, judge, most=most), shares, answered)
    return _confirm(judge, findings[:most], seeds)


def _call(work: Work, shares: Sequence[Share], answered: Answered) -> None:
    for share in shares:
        if answered(share, work(share)):
            return


def _judge_all(judge: Judge, share: Share, *, most: int) -> list[Finding]:
    """Judge seeds one after another: all, or until `most` have findings."""
    findings: list[Finding] = []
    for seed in share:
        violation = judge(seed)
        if violation is not None:
            findings.append(Finding(seed, violation))
        if len(findings) == most:
            break
    return findings


def _confirm(
    judge: Judge, findings: Sequence[Finding], seeds: range
) -> tuple[Sequence[Finding], RowLog]:
    """Play findings again; without any, the last seed."""
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
