"""Hunting bugs in protocols of your own: run one in a case, hunt through seeds, shrink a finding.

A protocol is `async def protocol(cluster)`: it uses the engines of a `tep.sim.Cluster`, asserts
what it promises, and returns. The fabric does its worst until `case.heal_us`, the safety phase;
then all trouble ends, and the protocol has to come to an end: the liveness phase.

A finding is made simpler field by field, and then draw by draw: of all that the fabric drew, the
few draws are kept that matter, and the others come out tame. Nothing is drawn anew, so a finding
cannot get lost. Its story takes at most 30 lines.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import linecache
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import tep
from tep.backends.base import Status
from tep.base.checks import check_int, check_kind, check_seconds
from tep.base.errors import (
    BurntImm,
    Cancelled,
    ClosedError,
    FabricError,
    StaleEpoch,
    StallError,
    TepError,
    UsageError,
    WaitTimeout,
)
from tep.base.units import PS_PER_S, PS_PER_US
from tep.observe.shown import Shown
from tep.sim.chaos import ChaosFabric
from tep.sim.cluster import Cluster
from tep.sim.draws import Label, Recorder, describe
from tep.sim.faults import GROUPS, Chaos, Restart
from tep.sim.row_log import Record, RowLog
from tep.testing.case import HEAL_US, Case, Nics, Violation

__all__ = [
    "DEADLINE_S", "Protocol", "Ran", "Trial", "Tried", "hunt", "load_protocol", "run", "shrink",
    "sights", "story", "verify",
]  # fmt: skip

T = TypeVar("T")

Protocol = Callable[[Cluster], Awaitable[T]]

_EVENTS_MAX: Final = 500_000
_LOOK: Final = 0.999
"""The part of a protocol's time after which its tasks are looked at, before any is over."""

DEADLINE_S: Final = 60.0
"""Simulated seconds, which cost nothing: what a protocol may take after healing if not told."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A run in which nothing was found.

    Attributes:
        result: what the protocol returned; None if it ended in an error that had a cause.
        error: that error, or group of errors.
        end_us: simulated time when all was quiet.
        seen: how often each thing worth seeing happened, by name; see `hunting.sights`.
    """

    result: Any
    error: Exception | None
    end_us: float
    seen: Counter[str]


class Trial(Cluster):
    """The cluster of one case, and the judgement of what a protocol does there.

    What `run()` and the fixture `tep_cluster` have in common: trouble ends at the case's `heal_us`,
    the method `run` limits the time that a protocol may take after that, and `judge` tells a
    finding from an error that a fault has caused. The arguments are those of `run()`.
    """

    def __init__(
        self,
        case: Case,
        *,
        may_fail: bool = True,
        deadline_s: float = DEADLINE_S,
        row_log: RowLog | None = None,
    ) -> None:
        super().__init__(nodes=case.nodes, nics=case.nics, faults=case.faults)
        self._case = case
        self._may_fail = may_fail
        self.stood: list[str] = []
        self._limit_s = case.heal_us * PS_PER_US / PS_PER_S + deadline_s
        assert isinstance(self.fabric, ChaosFabric)
        if row_log is not None:
            self.fabric.watch(row_log)
        self.at(case.heal_us, self.heal)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in simulated time. Raises Violation if it does not end after healing."""
        __tracebackhide__ = True
        if not asyncio.iscoroutine(main):
            return super().run(main)  # it says what is wrong
        return super().run(self._within(main))

    async def _within(self, main: Coroutine[Any, Any, T]) -> T:
        __tracebackhide__ = True
        loop = asyncio.get_running_loop()
        last_look = loop.call_later(self._limit_s * _LOOK, self._look)
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                return await main
        except TimeoutError as late:
            if not limit.expired():
                self._look()
                raise
            text = f"it has not ended {self._limit_s:.3f} simulated seconds after its start"
            raise Violation(f"{text}.\n{self.env.stall_report()}") from late
        except Exception:
            self._look()
            raise
        finally:
            last_look.cancel()

    def _look(self) -> None:
        """Note where each task stands."""
        self.stood = [line for task in asyncio.all_tasks() if (line := _standing(task))]

    def judge(self, error: Exception) -> None:
        """Return if a protocol may end so, here and by now. Raises Violation."""
        __tracebackhide__ = True
        for one in _leaves(error):
            what = self._finding(one)
            if what:
                raise Violation(what) from error

    def _finding(self, error: Exception) -> str:
        """Describe the fault of ending in this error; "" if a fault of the network excuses it."""
        if isinstance(error, Violation):
            return str(error)
        if isinstance(error, StallError):
            return f"it hangs: {error}"
        if not isinstance(error, TepError):
            return _told(error)  # an assertion of the protocol, or a mistake in it
        ended = f"it ended in {_name(error)}"
        excused = isinstance(error, _EXCUSED)
        if isinstance(error, ClosedError):  # a crash closes engines, and nobody else
            excused = any(isinstance(fault, Restart) for fault in self.happened)
        if not excused:
            return f"{ended}, which no fault excuses: {_told(error)}"
        if not self._may_fail:
            return f"{ended}: {error}"
        if not (self.happened or self._case.without_events().may_fail):
            return f"{ended}, though nothing broke: {error}"
        return ""


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
    it raises a TepError that only a mistake in it can cause, as BadRequest; if it raises another
    one and nothing broke that could have caused it; if it does not end after healing; if a transfer
    or message that it posted never ends; if it posts on a NIC that it was told is dead; or if a
    callback raised.

    Args:
        protocol: an async function of a Cluster.
        case: who is there, and what breaks.
        may_fail: whether it may end in a TepError if something broke; False: it must survive.
        deadline_s: simulated seconds after healing in which it must come to an end.
        row_log: takes everything that happens on the fabric.

    Raises:
        Violation: what is wrong; the last line of the message runs it again.
    """
    __tracebackhide__ = True
    check_kind("run: case", case, Case)
    deadline_s = check_seconds("run: deadline_s", deadline_s)
    result, error = None, None
    try:
        with Trial(case, may_fail=may_fail, deadline_s=deadline_s, row_log=row_log) as trial:
            try:
                result = trial.run(_start(protocol, trial))
            except Exception as raised:  # noqa: BLE001  # whatever it is, it is judged
                trial.judge(raised)
                error = raised
            verify(trial)
            return Ran(result, error, trial.now_us, sights(trial))
    except Violation as found:
        text = f"{found}\n{_again(protocol, case, may_fail=may_fail)}"
        again = partial(run, protocol, may_fail=may_fail, deadline_s=deadline_s)
        raise Violation(text, case, again, sorted(trial.stood)) from (found.__cause__ or None)


async def _start(protocol: Protocol[T], cluster: Cluster) -> T:
    __tracebackhide__ = True
    return await protocol(cluster)


_EXCUSED: Final = (FabricError, StaleEpoch, BurntImm, Cancelled, WaitTimeout)
"""The errors that a correct protocol can get from a fault, beside a crashed engine's ClosedError.
All others say that a call was wrong, or came too early: no fault excuses these."""


def _leaves(error: Exception) -> Iterator[Exception]:
    """Yield the exceptions of a group, or the only one."""
    if isinstance(error, ExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error


def verify(cluster: Cluster) -> None:
    """Let a cluster come to rest, and look whether everything posted has ended.

    Raises:
        Violation: something is open, or a callback raised, or a dead NIC was posted on.
    """
    __tracebackhide__ = True
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
    """Count the events of a cluster that a suite should have met, by name.

    "short post", "post refused", "row without a receive", "row X" for each status X that rows and
    messages failed with, and the name of each kind of fault.
    """
    fabric = cluster.fabric
    assert isinstance(fabric, ChaosFabric)
    seen = Counter(fabric.seen)
    seen.update(f"row {status.name}" for _, _, _, status in fabric.failed)
    seen.update(type(fault).__name__ for fault in cluster.happened)
    return seen


class Tried(Counter[str], Shown):
    """The result of a hunt without a finding: what was met, by name, and `str()` says it in words.

    Attributes:
        cases: how many were run.
        seconds: of real time that they took.
    """

    cases = 0
    seconds = 0.0

    def table(self) -> list[dict[str, str | int]]:
        """Return a row for each thing that was met."""
        return [{"met": what, "times": n} for what, n in sorted(self.items())]

    def __str__(self) -> str:
        faults = {kind: self[kind] for kinds in GROUPS.values() for kind in kinds if self[kind]}
        others = {what: n for what, n in sorted(self.items()) if n and what not in faults}
        said = [f"{self.cases} cases in {self.seconds:.1f} s, and no promise was broken"]
        for title, counts in (("faults", faults), ("met", others)):
            told = ", ".join(f"{what} {n}" for what, n in counts.items())
            said.append(f"{title}: {told or 'none'}")
        return "\n".join(said)


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
) -> Tried:
    """Run a protocol in many drawn cases; seeds find faster, Hypothesis explains better.

    Args:
        protocol: as for run().
        runs: number of seeds, from `seed` on.
        seed: the first.
        nodes: as for Case.draw().
        nics: as for Case.draw().
        faults: as for Case.draw().
        heal_us: as for Case.draw().
        may_fail: as for run().

    Returns:
        What was tried and met, over all runs; "ended in an error" among it.

    Raises:
        Violation: of the first seed that found something.
    """
    __tracebackhide__ = True
    runs = check_int("hunt: runs", runs, 0)
    seed = check_int("hunt: seed", seed, 0, 2**63 - 1)
    tried, started_s = Tried(), time.perf_counter()
    for one in range(seed, seed + runs):
        case = Case.draw(one, nodes=nodes, nics=nics, faults=faults, heal_us=heal_us)
        ran = run(protocol, case, may_fail=may_fail)
        tried.update(ran.seen)
        tried["ended in an error"] += ran.error is not None
        tried.cases += 1
    tried.seconds = time.perf_counter() - started_s
    return tried


def load_protocol(place: str) -> Protocol[Any]:
    """Import FILE.py:NAME, as `tep sim --protocol` does.

    Raises:
        UsageError: there is no such file, or no such async function in it.
    """
    path, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("tep_protocol", path) if path else None
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise UsageError(f"--protocol {place!r}: FILE.py:NAME is asked for, and a file that exists")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    for folder in (str(Path.cwd()), str(Path(path).resolve().parent)):
        if folder not in sys.path:  # as `python -m pytest` and `python FILE.py` would
            sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    found: Protocol[object] | None = getattr(module, name, None)
    if not inspect.iscoroutinefunction(found):
        raise UsageError(f"--protocol {place!r}: {name} is no async function of {path}")
    assert found is not None
    return found


_OURS: Final = (str(Path(tep.__file__).parent) + os.sep, str(Path(asyncio.__file__).parent))


def _name(error: BaseException) -> str:
    return type(error).__name__


def _standing(task: asyncio.Task[Any]) -> str:
    """Find the innermost line of a protocol that a task waits in; "" if there is none."""
    frame: FrameType | None = None
    inner: Any = task.get_coro()
    while inner is not None:
        found = getattr(inner, "cr_frame", None)
        if found is not None and not found.f_code.co_filename.startswith(_OURS):
            frame = found
        inner = getattr(inner, "cr_await", None)
    if frame is None:
        return ""
    code, line = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, line).strip()
    return f"{task.get_name()} waits in line {line} of {code.co_name}: {text}"


def _told(error: BaseException) -> str:
    """Tell an exception with the line of the protocol that raised it, or called what raised it."""
    found = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in found if not frame.filename.startswith(_OURS)] or found
    where = f" (line {frames[-1].lineno} of {frames[-1].name}: {frames[-1].line})" if frames else ""
    return f"{_name(error)}: {error}{where}"


def _again(protocol: Protocol[T], case: Case, *, may_fail: bool) -> str:
    """Make the line that runs it again, in a shell if the protocol stands in a file."""
    place = _place(protocol)
    if not place:
        name = getattr(protocol, "__name__", "protocol")
        how = "" if may_fail else ", may_fail=False"
        literal = f"tep.testing.Case.parse({repr(case)!r})"
        return f"replay: import tep; tep.testing.run({name}, {literal}{how})"
    which = case.drawn or f'--case "{case!r}"'
    which += "" if may_fail else " --must-survive"
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


# ---------------------------------------------------------------------- shrinking


RUNS_MAX: Final = 3000
"""Some seconds: a run takes one to five milliseconds."""

_HALVINGS: Final = 6
"""Number of times that the step by which a number gets smaller is halved."""


def shrink(finding: Violation, *, runs_max: int = RUNS_MAX) -> Violation:
    """Find the simplest run that shows a finding; return what is found there, the same each time.

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
        """Look for the finding in a record; None if it is not there, or no run is left."""
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
    for one in fields(record):
        value = getattr(record, one.name)
        if one.name in ("seed", "kept", "drawn", "heal_us"):
            continue
        goal = MISSING if isinstance(value, Chaos) else one.default
        goal = goal if tame is None else getattr(tame, one.name)
        for smaller in _smaller(value, goal):
            try:
                yield replace(record, **{one.name: smaller}, **drawn)
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


# ---------------------------------------------------------------- the story of a finding

_ROWS_MAX: Final = 9
_PIECES_MAX: Final = 3
_EACH_MAX: Final = 4  # lines of each of the other parts


@dataclass(slots=True)
class _Row:
    """The records of one row or message.

    Attributes:
        pieces: (time in ps, first byte, bytes) of what landed.
        end: its end at the sender.
    """

    post: Record
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    imm: Record | None = None
    end: Record | None = None

    @property
    def landed(self) -> bool:
        """Return True if all of it is there; a piece that landed twice counts once."""
        places = {start: nbytes for _, start, nbytes in self.pieces}
        return self.imm is not None or sum(places.values()) >= self.post.nbytes

    def told(self) -> str:
        """Tell its life in one line."""
        post = self.post
        what = "message" if post.what == "send" else "row"
        said = [f"{what} {post.row}, {post.node}/{post.nic} to {post.peer}, {post.nbytes} B"]
        said.append(f"posted at {_us(post.t_ps)}")
        for t_ps, start, nbytes in self.pieces[:_PIECES_MAX]:
            said.append(f"{nbytes} B at byte {start} land at {_us(t_ps)}")
        if len(self.pieces) > _PIECES_MAX:
            said.append(f"{len(self.pieces) - _PIECES_MAX} more pieces land")
        if not self.landed and post.what == "post":
            said.append("THE REST HAS NOT LANDED" if self.pieces else "HAS NOT LANDED")
        if self.imm is not None:
            said.append(f"its immediate {self.imm.value} is handed out at {_us(self.imm.t_ps)}")
        if self.end is None:
            said.append("not acknowledged")
        else:
            failed = self.end.what == "fail" or (self.end.what == "sent" and self.end.value)
            ended = f"fails, {Status(self.end.value).name}" if failed else "acknowledged"
            said.append(f"{ended} at {_us(self.end.t_ps)}")
        return "; ".join(said)


def story(finding: Violation) -> str:
    """Tell what came before what should have waited, in the run of a finding.

    First the case, which is the smallest one after `shrink`, and what was drawn in it; then the
    faults, the rows that matter, which of them overtook which, and where the code stood.

    Raises:
        UsageError: it does not say how it is run again.
    """
    if finding.case is None or finding.again is None:
        raise UsageError("story: this finding does not know its run; tell what run() raised")
    log, stood, what = RowLog(), tuple[str, ...](), "nothing was found this time"
    try:
        finding.again(finding.case, row_log=log)
    except Violation as found:
        what, stood = str(found).rpartition("\nreplay: ")[0], found.stood
    records, kept = list(log.records()), finding.case.chaos.kept
    faults = [f"{_us(t_ps)}: {fault}" for t_ps, fault in finding.case.events]
    rows = _rows(records)
    lines = [f"case: {finding.case!r}"]
    if isinstance(kept, tuple):
        nodes = sorted(dict.fromkeys(one.node for one in records))
        lines += [f"drawn: {text}" for text in describe(kept, nodes)[:_EACH_MAX]]
    lines += [f"fault at {text}" for text in faults[:_EACH_MAX]]
    lines += [row.told() for row in _that_matter(rows)]
    lines += [f"out of order: {text}" for text in islice(_overtakes(rows), _EACH_MAX)]
    lines += stood[:_EACH_MAX]
    return "\n".join([*lines, *what.splitlines()[:_EACH_MAX]])


def _us(t_ps: int) -> str:
    return f"{t_ps / PS_PER_US:.3f} us"


def _rows(records: Sequence[Record]) -> list[_Row]:
    """Collect the rows and messages of a log, in the order of posting."""
    rows: dict[int, _Row] = {}
    last_ps = records[-1].t_ps if records else 0
    for one in records:
        if one.what in ("post", "send"):
            rows[one.row] = _Row(one)
            continue
        row = rows.get(one.row)
        if row is None:
            continue
        if one.what in ("place", "recv"):
            row.pieces.append((one.t_ps, one.offset, one.nbytes))
        elif one.what == "imm":
            row.imm = one
        elif one.t_ps < last_ps or one.value != Status.FLUSHED:  # else the cluster was closed
            row.end = one
    return list(rows.values())


def _that_matter(rows: Sequence[_Row]) -> list[_Row]:
    """Select the rows that have not landed or ended, then the latest others, as posted."""
    ranked = sorted(rows, key=lambda row: (row.landed, row.end is not None, -row.post.row))
    return sorted(ranked[:_ROWS_MAX], key=lambda row: row.post.row)


def _overtakes(rows: Sequence[_Row]) -> Iterator[str]:
    """Find what landed before something that was posted earlier, between the same two nodes."""
    written = [row for row in rows if row.post.what == "post" and row.post.nbytes]
    for at, later in enumerate(written):
        if not later.pieces or not later.landed:
            continue
        when = f"row {later.post.row} is there at {_us(later.pieces[-1][0])}"
        for earlier in written[:at]:
            if (earlier.post.node, earlier.post.peer) != (later.post.node, later.post.peer):
                continue
            if earlier.end is not None and earlier.end.what == "fail":
                continue
            if not earlier.landed:
                yield f"{when}, and row {earlier.post.row}, posted before it, is not"
            elif earlier.pieces and earlier.pieces[-1][0] > later.pieces[-1][0]:
                there = _us(earlier.pieces[-1][0])
                yield f"{when}, row {earlier.post.row}, posted before it, at {there}"
    for row in written:
        starts = [start for _, start, _ in row.pieces]
        if starts != sorted(starts):
            yield f"the bytes of row {row.post.row} do not land from the first to the last"
