"""Sweeps: a function of a simulation at every point of a grid, with intervals, on all cores.

Nothing is simulated here. Rule: a row depends on its point, the seeds and the guessed numbers
alone; how many processes there are, and what an earlier sweep left behind, changes only the time.
"""

from __future__ import annotations

import csv
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, NamedTuple

from tep.base.checks import check_int
from tep.base.errors import UsageError
from tep.observe.progress import progress
from tep.observe.shown import Shown
from tep.sim.profile import FIELDS, Profile, load_profile

__all__ = ["GUESSED", "Table", "doubts", "interval", "kind_of", "sweep"]

Values = Mapping[str, float]

GUESSED: Final = 1.5
"""The factor by which guessed numbers are varied, where nobody names another; itself a guess."""

_EITHER: Final = ("quantum_", "pause_", "ecn_")  # more may be slow, or fast
_NETWORK: Final = ("pause_", "ecn_", "loss_", "tail_")  # what goes wrong in a network


class Run(NamedTuple):
    """One call: its point, its seed, and the end at which guessed numbers are, if at one."""

    point: dict[str, Any]
    seed: int
    doubt: str = ""

    @property
    def key(self) -> str:
        """The run as text, for the file of runs; a profile is all of its numbers."""
        return json.dumps([self.point, self.seed, self.doubt], default=repr)


Work = Callable[[Run], Values]
Ended = Callable[[Run, Values], None]
Calls = Callable[[Work, Sequence[Run], Ended], None]
"""Makes all calls, in any order, and tells of each that has ended."""


@dataclass(frozen=True, slots=True)
class Table(Shown):
    """The results of a sweep, or of a question of `tep.sim`.

    Attributes:
        rows: one a point: its values by name, a Profile as its name, and its figures. A figure is
            the median over the seeds; where there are several runs, "NAME low" and "NAME high" are
            the least and the most of them, and `runs` is their number. `kind`: see `kind_of`.
        missing: runs that an interrupt left out, with their points.
    """

    rows: tuple[dict[str, Any], ...]
    missing: int = 0

    def __repr__(self) -> str:
        left = f"; {self.missing} runs are missing: interrupted" if self.missing else ""
        names = "; ".join(self.rows[0]) if self.rows else "nothing"
        return f"Table({len(self.rows)} rows: {names}{left})"

    def table(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows."""
        return self.rows

    def write(self, path: str | PathLike[str]) -> None:
        """Write a .csv or a .json.

        Raises:
            UsageError: another kind of file.
        """
        path = Path(path)
        if path.suffix not in {".csv", ".json"}:
            raise UsageError(f"table {path}: .csv or .json is asked for")
        with path.open("w", encoding="utf-8", newline="") as file:
            if path.suffix == ".json":
                json.dump(self.rows, file, indent=1, default=repr)
            else:
                table = csv.DictWriter(file, list(self.rows[0]))
                table.writeheader()
                table.writerows(self.rows)


def sweep(
    function: Callable[..., float | Values],
    grid: Mapping[str, Sequence[Any]],
    *,
    seeds: int = 1,
    guessed: float = 1.0,
    processes: int | None = None,
    calls: Calls | None = None,
    path: str | PathLike[str] | None = None,
    done: Callable[[int, int], object] | None = None,
) -> Table:
    """Call a function at every point of a grid, for every seed.

    Ctrl-C, or a notebook's stop, ends it with the points that are complete, if there are any.

    Args:
        function: takes the names of the grid and `seed` by name; returns one figure, or several by
            name. It is pickled for other processes: a function of a module, not a lambda.
        grid: name -> its values.
        seeds: so many, from 0 on.
        guessed: more than 1: each point is also run with all numbers that its profile, or another
            of its values, calls guessed so many times off: once for the slow, once for the fast
            (see `doubts`), with a seed of its own. That widens its interval.
        processes: how many work; None: one a core; 1: this one.
        calls: another way to make the calls, such as `tep.integrations.ray.cluster.calls()`; None:
            in these processes.
        path: a file that gets each run as it ends; runs that it has are not made again.
        done: called with the number of runs that have ended, and of all; None: a progress bar.

    Raises:
        UsageError: an empty grid, numbers that cannot be, or two profiles of one name.
    """
    plans = _plans(grid, seeds, guessed)
    several = any(len(plan) > 1 for plan in plans)
    runs = [run for plan in plans for run in plan]
    found = _read(path)
    missing = [run for run in runs if run.key not in found]
    with ExitStack() as stack:
        log = None if path is None else stack.enter_context(Path(path).open("a", encoding="utf-8"))
        bar = stack.enter_context(progress("runs", len(runs), quiet=done is not None))
        tell = done or (lambda count, _: bar.update(bar.task_ids[0], completed=count))
        counts = itertools.count(len(runs) - len(missing))
        tell(next(counts), len(runs))

        def ended(run: Run, values: Values) -> None:
            found[run.key] = values
            if log is not None:
                log.write(json.dumps({"run": run.key, "values": values}) + "\n")
                log.flush()
            tell(next(counts), len(runs))

        try:
            make = calls or partial(_call, processes=processes)
            make(partial(_values, function), missing, ended)
        except KeyboardInterrupt:
            plans = [plan for plan in plans if all(run.key in found for run in plan)]
            if not plans:
                raise
    left = sum(run.key not in found for run in runs)
    return Table(tuple(_row(plan, found, several=several) for plan in plans), left)


def _check_names(grid: Mapping[str, Sequence[Any]]) -> None:
    """Refuse profiles that a table could not tell apart."""
    for column in grid.values():
        names = [value.name for value in column if isinstance(value, Profile)]
        if len(names) > len(set(names)):
            raise UsageError(
                f"sweep: of {', '.join(names)} two have one name; give each its own: "
                "dataclasses.replace(profile, name=...)"
            )


def _plans(grid: Mapping[str, Sequence[Any]], seeds: int, guessed: float) -> list[list[Run]]:
    """The runs of each point."""
    check_int("sweep: seeds", seeds, 1)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if not points:
        raise UsageError(f"sweep: no point: {dict(grid)}")
    _check_names(grid)
    return [[Run(p, s) for s in range(seeds)] + _doubted(p, guessed, seeds) for p in points]


def interval(
    function: Callable[..., float | Values], values: Values, guessed: float = GUESSED, **point: Any
) -> dict[str, tuple[float, float]]:
    """Return the least and the most of each figure of a point whose figures are known.

    Args:
        function: as of `sweep`; it is called here.
        values: its figures at the point; of one figure {"value": it}.
        guessed: as of `sweep`; 1: the interval is the figure alone.
        point: its arguments.
    """
    runs = _doubted(point, guessed, 1)
    found = [values, *(_values(function, run) for run in runs)]
    return {name: (min(v[name] for v in found), max(v[name] for v in found)) for name in values}


def doubts(profile: Profile, factor: float) -> Iterator[tuple[str, Profile]]:
    """Yield the machine as slow, and as fast, as its guessed numbers may make it.

    Times, the bytes of a lone write's fill, and shares of what goes wrong are `factor` times as
    large for the slow one, all else is so many times as small. Counts stay, so does a number that
    would contradict another, and so do numbers that are not plainly slow or fast at one end: the
    quantum, and those of pauses and congestion control (`ecn_*`).
    """
    for end in ("slow", "fast"):
        found = profile
        for field, number in profile.numbers.items():
            unit = FIELDS[field].unit
            larger = (unit in {"ps", "ppm"} or field == "fill_bytes") == (end == "slow")
            value = getattr(profile, field) * (factor if larger else 1 / factor)
            varied = unit != "count" and not field.startswith(_EITHER)
            if number.confidence == "guessed" and varied:
                with suppress(UsageError):
                    found = replace(found, **{field: max(FIELDS[field].least, round(value))})
        if found != profile:
            yield end, found


def kind_of(*machines: Profile) -> Literal["fitted", "predicted", "extrapolated"]:
    """Say how the times of simulated machines are made; of several, what is least sure.

    extrapolated: the rate of a NIC is guessed, or a number of losses, tails, pauses or congestion
    control that is in use. fitted: the rate is fitted to published transfers. predicted: neither.
    """
    confidences = {
        number.confidence
        for machine in machines
        for field, number in machine.numbers.items()
        if field == "wire_bps" or (field.startswith(_NETWORK) and getattr(machine, field))
    }
    if "guessed" in confidences:
        return "extrapolated"
    return "fitted" if "fitted" in confidences else "predicted"


def _machine(name: str, value: Any) -> Any:
    """Load the profile that a value names; another value is returned as it is."""
    if name in {"machine", "profile"} and isinstance(value, str | PathLike):
        return load_profile(value)
    return value


def _doubted(point: Mapping[str, Any], factor: float, seed: int) -> list[Run]:
    """The two ends of every value of a point that has guessed numbers."""
    if factor < 1:
        raise UsageError(f"guessed={factor}; a factor of 1 or more")
    runs: dict[str, dict[str, Any]] = {}
    for name, given in point.items() if factor > 1 else ():
        value = _machine(name, given)
        ends = doubts if isinstance(value, Profile) else getattr(type(value), "doubts", None)
        for end, other in ends(value, factor) if ends else ():
            runs.setdefault(end, dict(point))[name] = other
    return [Run(one, seed + k, end) for k, (end, one) in enumerate(runs.items())]


def _read(path: str | PathLike[str] | None) -> dict[str, Values]:
    """Read the runs that a file has; a line that was not written to its end is none."""
    found: dict[str, Values] = {}
    if path is not None and Path(path).exists():
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
                found[entry["run"]] = entry["values"]
            except (ValueError, KeyError, TypeError):
                continue
    return found


def _call(work: Work, runs: Sequence[Run], ended: Ended, processes: int | None) -> None:
    """Make the calls in so many processes."""
    count = min(len(runs), processes or os.cpu_count() or 1)
    if count < 2:
        for run in runs:
            ended(run, work(run))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        begun = {pool.submit(work, run): run for run in runs}
        try:
            for one in as_completed(begun):
                ended(begun[one], one.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _values(function: Callable[..., float | Values], run: Run) -> dict[str, float]:
    found = function(**run.point, seed=run.seed)
    return dict(found) if isinstance(found, Mapping) else {"value": found}


def _row(plan: Sequence[Run], found: Mapping[str, Values], *, several: bool) -> dict[str, Any]:
    """Return the row of a point; all have an interval where `several` runs make up some of them."""
    all_values = [found[run.key] for run in plan]
    seeded = [found[run.key] for run in plan if not run.doubt]
    point = plan[0].point
    row = {k: v.name if isinstance(v, Profile) else v for k, v in point.items()}
    machines = [
        one for one in itertools.starmap(_machine, point.items()) if isinstance(one, Profile)
    ]
    for name in all_values[0]:
        row[name] = median(values[name] for values in seeded)
        if several:
            row[f"{name} low"] = min(values[name] for values in all_values)
            row[f"{name} high"] = max(values[name] for values in all_values)
    if machines:
        row["kind"] = kind_of(*machines)
    return row | ({"runs": len(plan)} if several else {})
