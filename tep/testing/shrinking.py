"""Shrinking: from the run in which something was found to the simplest one that shows it.

A run is a record: a Case of a user's protocol. It is made simpler field by field, and then draw by
draw: of all that the fabric drew, the few draws are kept that matter, and the others come out tame.
Nothing is drawn anew, so a finding cannot get lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, Final

from tep.base.checks import check_int
from tep.base.errors import UsageError
from tep.base.units import PS_PER_US
from tep.sim.draws import Label, Recorder, describe
from tep.sim.faults import Chaos
from tep.sim.row_log import RowLog
from tep.testing.case import Case, Violation

__all__ = ["shrink", "story"]

RUNS_MAX: Final = 3000
"""Some seconds: a run takes one to five milliseconds."""

_HALVINGS: Final = 6
"""Number of times that the step by which a number gets smaller is halved."""


def shrink(finding: Violation, *, runs_max: int = RUNS_MAX) -> Violation:
    """Find the simplest run that shows a finding, and return what is found there.

    The same every time.

    Args:
        finding: what `run` or `hunt` raised.
        runs_max: at most so many runs are tried; then the simplest one so far is returned.

    Raises:
        UsageError: it does not say how it is run again, or is not found again.
    """
    runs_max = check_int("shrink: runs_max", runs_max, 1)
    if finding.case is None or finding.again is None:
        raise UsageError("shrink: this finding does not know its run; shrink what run() raised")
    search = _Search(finding, runs_max)
    record = finding.case
    if search.found(record) is None:
        raise UsageError(f"shrink: it is not found again: {str(finding).splitlines()[0]}")
    before = None
    while before != record:
        before = record
        record = _settle(record, search)
        record = _keep_few(record, search)
    found = search.found(record)
    assert found is not None
    return found


class _Search:
    """Runs records, as long as there are runs left; remembers what they showed."""

    def __init__(self, finding: Violation, runs_max: int) -> None:
        assert finding.again is not None
        self._again: Callable[..., object] = finding.again
        self._kind = _kind(finding)
        self._left = runs_max
        self._known: dict[Any, Violation | None] = {}

    def found(self, record: Any) -> Violation | None:
        """The same finding, in this record; None if it is not there, or no run is left."""
        if record not in self._known:
            if self._left <= 0:
                return None
            self._left -= 1
            self._known[record] = self._run(record)
        return self._known[record]

    def _run(self, record: Any) -> Violation | None:
        try:
            self._again(record)
        except Violation as found:
            return found if _kind(found) == self._kind else None
        except Exception:  # noqa: BLE001  # a record cut to what cannot be run shows nothing
            return None
        return None


def _kind(finding: Violation) -> str:
    """Return the fault without the numbers and names of one run."""
    return re.split(r"[0-9:(]", str(finding), maxsplit=1)[0]


def _settle(record: Any, search: _Search) -> Any:
    """Take any simpler record that shows the finding, until none does."""
    simpler = True
    while simpler:
        simpler = False
        for candidate in _simpler(record):
            if search.found(candidate) is not None:
                record, simpler = candidate, True
                break
    return record


def _simpler(record: Any) -> Iterator[Any]:
    """Records with one thing less or smaller, the large steps first."""
    tame = Chaos.calm(record.seed) if isinstance(record, Chaos) else None
    drawn = {"drawn": ""} if isinstance(record, Case) else {}  # no seed draws it any more
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name in ("seed", "kept", "drawn", "heal_us"):
            continue
        goal = MISSING if isinstance(value, Chaos) else field.default
        goal = goal if tame is None else getattr(tame, field.name)
        for smaller in _smaller(value, goal):
            try:
                yield replace(record, **{field.name: smaller}, **drawn)
            except (AssertionError, ValueError):  # fields that do not go together
                continue


def _smaller(value: Any, goal: Any) -> Iterator[Any]:
    """Values that are simpler than one; `goal`: the simplest, where it is known."""
    if value == goal:
        return
    if goal is not MISSING:
        yield goal
    if is_dataclass(value):
        yield from _simpler(value)
    elif isinstance(value, tuple):
        half = len(value) // 2
        if half > 1:
            yield from (value[:half], value[half:])
        yield from (value[:k] + value[k + 1 :] for k in range(len(value)))
        for k, one in enumerate(value):
            for smaller in _smaller(one, MISSING):
                yield (*value[:k], smaller, *value[k + 1 :])
    elif isinstance(value, int) and not isinstance(value, bool):
        least = goal if isinstance(goal, int) else min(value, 1)
        steps = ((value - least) >> k for k in range(_HALVINGS))
        yield from (value - step for step in steps if step > 0)


def _keep_few(record: Any, search: _Search) -> Any:
    """Keep as few draws as show the finding: halves, quarters, ... of them are left out in turn."""
    kept = record.chaos.kept
    if isinstance(kept, tuple):
        labels = list(kept)
    else:
        recorder = Recorder()
        search.found(_with_kept(record, recorder))
        labels = list(recorder.labels)
    tame = _with_kept(record, ())
    if search.found(tame) is not None:
        return tame
    chunk = len(labels)
    while chunk:
        at = 0
        while at < len(labels):
            fewer = labels[:at] + labels[at + chunk :]
            if search.found(_with_kept(record, tuple(fewer))) is None:
                at += chunk
            else:
                labels = fewer
        chunk //= 2
    simplest = _with_kept(record, tuple(labels))
    return simplest if search.found(simplest) is not None else record


def _with_kept(record: Any, kept: Container[Label]) -> Any:
    return record.with_chaos(replace(record.chaos, kept=kept))


def story(finding: Violation) -> str:
    """Tell what happened in the run of a finding, one event a line, in the order of time.

    Raises:
        UsageError: it does not say how it is run again.
    """
    if finding.case is None or finding.again is None:
        raise UsageError("story: this finding does not know its run; tell what run() raised")
    log = RowLog()
    try:
        finding.again(finding.case, row_log=log)
    except Violation as found:
        what = str(found).rpartition("\nreplay: ")[0]
    else:
        what = "nothing was found this time"
    events, chaos = finding.case.events, finding.case.chaos
    told = [(one.t_ps, f"{one.node}/{one.nic}", one.sentence()) for one in log.records()]
    told += [(t_ps, "faults", str(fault)) for t_ps, fault in events]
    told.sort(key=lambda line: line[0])
    lines = [f"{t_ps / PS_PER_US:12.3f} us  {where:8} {text}" for t_ps, where, text in told]
    if isinstance(chaos.kept, tuple):
        nodes = dict.fromkeys(one.node for one in log.records())
        lines = [f"drawn: {text}" for text in describe(chaos.kept, sorted(nodes))] + lines
    return "\n".join([*lines, what])
