"""Hunting bugs in protocols of your own: run one in a case, hunt through seeds, shrink a finding.

A protocol is `async def protocol(cluster)`: it uses the engines of a `tep.sim.Cluster`, asserts
what it promises, and returns. The fabric does its worst until `case.heal_us`, the safety phase;
then all trouble ends, and the protocol has to come to an end: the liveness phase.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Final, TypeVar

from tep.checks import check_int, check_kind, check_seconds
from tep.errors import StallError, TepError
from tep.sim.chaos import ChaosFabric
from tep.sim.cluster import Cluster
from tep.sim.row_log import RowLog
from tep.testing.case import HEAL_US, Case, Nics
from tep.testing.stage import Violation
from tep.units import PS_PER_S, PS_PER_US

__all__ = ["DEADLINE_S", "Protocol", "Ran", "hunt", "run", "sights", "verify"]

T = TypeVar("T")

Protocol = Callable[[Cluster], Awaitable[T]]

_EVENTS_MAX: Final = 500_000
DEADLINE_S: Final = 60.0
"""Simulated seconds, which cost nothing: what a protocol may take after healing if not told."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A run in which nothing was found.

    Attributes:
        result: what the protocol returned; None if it ended in an error that had a cause.
        error: that error.
        end_us: simulated time when all was quiet.
        seen: how often each thing worth seeing happened, by name; see `sights`.
    """

    result: Any
    error: TepError | None
    end_us: float
    seen: Counter[str]


def run(
    protocol: Protocol[T],
    case: Case,
    *,
    may_fail: bool = True,
    deadline_s: float = DEADLINE_S,
    row_log: RowLog | None = None,
) -> Ran:
    """Run a protocol in one case, and judge it.

    It is found wrong if it raises an AssertionError, or any other exception that is no TepError; if
    it raises a TepError and nothing broke that could have caused one; if it does not end after
    healing; if a transfer or message that it posted never ends; if it posts on a NIC that it was
    told is dead; or if a callback raised.

    Args:
        protocol: an async function of a Cluster.
        case: who is there, and what breaks.
        may_fail: whether it may end in a TepError if something broke; False: it must survive.
        deadline_s: simulated seconds after healing in which it must come to an end.
        row_log: takes everything that happens on the fabric.

    Raises:
        Violation: what is wrong; the last line of the message runs it again.
    """
    check_kind("run: case", case, Case)
    deadline_s = check_seconds("run: deadline_s", deadline_s)
    try:
        with Cluster(nodes=case.nodes, nics=case.nics, faults=case.faults) as cluster:
            limit_s = case.heal_us * PS_PER_US / PS_PER_S + deadline_s
            return _run(protocol, cluster, case, limit_s, may_fail=may_fail, row_log=row_log)
    except Violation as found:
        text = f"{found}\n{_again(protocol, case)}"
        raise Violation(text, case) from (found.__cause__ or None)


def _run(
    protocol: Protocol[T],
    cluster: Cluster,
    case: Case,
    limit_s: float,
    *,
    may_fail: bool,
    row_log: RowLog | None,
) -> Ran:
    fabric = cluster.fabric
    assert isinstance(fabric, ChaosFabric)
    if row_log is not None:
        fabric.watch(row_log)
    cluster.at(case.heal_us, cluster.heal)
    result, error = None, None
    try:
        result = cluster.run(_within(protocol, cluster, limit_s))
    except StallError as stalled:
        raise Violation(f"it hangs: {stalled}") from stalled
    except TepError as failed:
        error = failed
        if not may_fail:
            raise Violation(f"it ended in {_name(failed)}: {failed}") from failed
        if not (cluster.happened or case.without_events().may_fail):
            text = f"it ended in {_name(failed)}, though nothing broke: {failed}"
            raise Violation(text) from failed
    except Violation:
        raise
    except Exception as wrong:  # an assertion of the protocol, or a mistake in it: a finding
        raise Violation(_told(wrong)) from wrong
    verify(cluster)
    return Ran(result, error, cluster.now_us, sights(cluster))


async def _within(protocol: Protocol[T], cluster: Cluster, limit_s: float) -> T:
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await protocol(cluster)
    except TimeoutError as late:
        if not limit.expired():
            raise
        reports = cluster.env.stall_report()
        text = f"it has not ended {limit_s:.3f} simulated seconds after its start"
        raise Violation(f"{text}.\n{reports}") from late


def verify(cluster: Cluster) -> None:
    """Let a cluster come to rest, and look whether everything posted has ended.

    Raises:
        Violation: something is open, or a callback raised, or a dead NIC was posted on.
    """
    fabric = cluster.fabric
    assert isinstance(fabric, ChaosFabric)
    try:
        cluster.env.run_until(repeat(False, _EVENTS_MAX).__next__)
    except StopIteration:
        raise Violation(f"still not quiet after {_EVENTS_MAX} events") from None
    wrong = list(fabric.violations)
    for engine in cluster.engines:
        stats = engine.stats()
        ended = stats.transfers_done + stats.transfers_cancelled + stats.transfers_failed
        if ended != stats.transfers_submitted or engine._machine.busy():
            wrong.append(
                f"{engine.name}: {stats.transfers_submitted} transfers and messages were "
                f"submitted, {ended} have ended.\n{engine.stall_report()}"
            )
        wrong += [f"{engine.name}: {error}" for error in engine.callback_errors]
    if wrong:
        raise Violation(wrong[0])


def sights(cluster: Cluster) -> Counter[str]:
    """What happened in a cluster that a suite should have met: by name, how often.

    "short post", "post refused", "row without a receive", "row X" for each status X that rows and
    messages failed with, and the name of each kind of fault.
    """
    fabric = cluster.fabric
    assert isinstance(fabric, ChaosFabric)
    seen = Counter(fabric.seen)
    seen.update(f"row {status.name}" for _, _, _, status in fabric.failed)
    seen.update(type(fault).__name__ for fault in cluster.happened)
    return seen


def hunt(
    protocol: Protocol[T],
    *,
    runs: int = 200,
    seed: int = 0,
    nodes: int = 2,
    nics: Nics = (1, 4),
    faults: str | Sequence[str] = "all",
    heal_us: float = HEAL_US,
    may_fail: bool = True,
) -> Counter[str]:
    """Run a protocol in many drawn cases; seeds find faster, Hypothesis explains better.

    Args:
        protocol: as for run().
        runs: so many seeds, from `seed` on.
        seed: the first.
        nodes: how many there are.
        nics: of each node, or the least and the most.
        faults: groups of faults, as for Case.draw().
        heal_us: when trouble ends.
        may_fail: as for run().

    Returns:
        What was seen, over all runs; "ended in an error" among it.

    Raises:
        Violation: of the first seed that found something.
    """
    runs = check_int("hunt: runs", runs, 0)
    seed = check_int("hunt: seed", seed, 0, 2**63 - 1)
    seen: Counter[str] = Counter()
    for one in range(seed, seed + runs):
        case = Case.draw(one, nodes=nodes, nics=nics, faults=faults, heal_us=heal_us)
        ran = run(protocol, case, may_fail=may_fail)
        seen += ran.seen
        seen["ended in an error"] += ran.error is not None
    return seen


def _name(error: BaseException) -> str:
    return type(error).__name__


def _told(error: BaseException) -> str:
    """An exception with the line of the protocol that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (line {frames[-1].lineno} of {frames[-1].name}: {frames[-1].line})" if frames else ""
    return f"{_name(error)}: {error}{where}"


def _again(protocol: Protocol[T], case: Case) -> str:
    """The line that runs it again: for a shell where the protocol can be found, else for Python."""
    place = _place(protocol)
    if not place:
        name = getattr(protocol, "__name__", "protocol")
        return f"replay: tep.testing.run({name}, tep.testing.{case!r})"
    which = case.drawn or f'--case "{case!r}"'
    return f"replay: tep sim --protocol {place} {which}"


def _place(protocol: Protocol[T]) -> str:
    """`file.py:name` of a function that stands at the top of a file; "" for any other."""
    name = getattr(protocol, "__qualname__", "")
    try:
        path = inspect.getsourcefile(protocol)
    except TypeError:
        return ""
    if path is None or not Path(path).is_file() or not name.isidentifier():
        return ""
    near = os.path.relpath(path)
    return f"{path if near.startswith('..') else near}:{name}"
