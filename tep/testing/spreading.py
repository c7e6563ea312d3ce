"""Searches for bugs through seeds: in one process, or spread over the ranks of torchrun or srun.

One loop over the seeds and many ranks find the same, in the order of the seeds; so do the workers
of Ray (`tep.integrations.ray.cluster.search`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from typing import Protocol as Interface

from tep.base.errors import UsageError
from tep.rendezvous import Group
from tep.sim.row_log import RowLog
from tep.testing.case import HEAL_US, Case, Nics, Violation
from tep.testing.hunting import Protocol, load_protocol, run

__all__ = ["Finding", "Judge", "ProtocolJudge", "confirm", "judge_all", "search"]

TURN_MAX: Final = 256
"""Seeds that a rank of torchrun or srun judges before it tells the others."""


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
        try:
            self.play(seed, row_log)
        except Violation as found:
            return str(found)
        return None


def judge_all(judge: Judge, seeds: range, most: int) -> list[Finding]:
    """Judge seeds one after another: all, or until `most` have findings."""
    findings: list[Finding] = []
    for seed in seeds:
        violation = judge(seed)
        if violation is not None:
            findings.append(Finding(seed, violation))
        if len(findings) == most:
            break
    return findings


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
        found = judge_all(judge, range(first, min(first + count, seeds.stop)), most)
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
