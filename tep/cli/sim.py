"""`tep sim`: run a protocol of yours in one drawn case, or in several; a failing seed is replayed
here. And simulate a machine of yours: fit a profile, and sweep over machines.
"""

from __future__ import annotations

import importlib
import json as jsonlib
import re
import runpy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tep.base.errors import UsageError
from tep.cli.show import (
    Guessed,
    Json,
    OutFile,
    Ray,
    emit_json,
    print_table,
    progress,
    refuse_unused,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tep.sim.row_log import RowLog
    from tep.testing.spreading import Finding, ProtocolJudge

__all__ = ["app"]

app = typer.Typer(
    help="Simulate: a protocol of yours, a machine of yours.",
    invoke_without_command=True,
)

_SILENCE_S: Final = 600.0
"""A search ends if no worker of Ray answers for so long."""

Seed = Annotated[int, typer.Option("--seed", help="The run: all in it is drawn from this number.")]
Runs = Annotated[int, typer.Option("--runs", min=1, help="Run this many seeds, from --seed on.")]
Place = Annotated[
    str, typer.Option("--protocol", help="FILE.py:NAME of an async function of a Cluster.")
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="How many there are.")]
Nics = Annotated[str, typer.Option("--nics", help="NICs of a node, N or LEAST-MOST.")]
Groups = Annotated[str, typer.Option("--faults", help="All, none, or groups: order,nics,...")]
Heal = Annotated[float, typer.Option("--heal-us", help="When trouble ends.")]
Literal = Annotated[str, typer.Option("--case", help="A literal, not a seed.")]
Survive = Annotated[bool, typer.Option("--must-survive", help="No fault excuses an error.")]
Shrink = Annotated[
    bool, typer.Option("--shrink", help="Reduce the first finding to what matters; tell its story.")
]
Findings = Annotated[
    int, typer.Option("--findings", min=1, help="Go on until so many seeds broke a promise.")
]


@app.callback()
def sim(
    context: typer.Context,
    seed: Seed = 0,
    runs: Runs = 1,
    protocol: Place = "",
    nodes: Nodes = 2,
    nics: Nics = "1-4",
    faults: Groups = "all",
    heal_us: Heal = 40.0,
    case: Literal = "",
    must_survive: Survive = False,
    shrink: Shrink = False,
    findings: Findings = 1,
    ray: Ray = "",
    json: Json = False,
) -> None:
    """Run an async function of yours on the chaos fabric, in a drawn case; exit 1 on the first
    violation, or after --findings of them. Several jobs share a search if each has its own --seed
    and --runs.
    """
    if context.invoked_subcommand is not None:
        return
    if not protocol:
        raise UsageError(
            "sim: --protocol FILE.py:NAME is asked for, an async function of a Cluster; the drawn "
            "runs of the engine itself are played in a clone: python -m tests.world SEED"
        )
    from tep.testing.spreading import ProtocolJudge  # numpy is loaded when something runs

    seeds = range(seed, seed + runs)
    if case:
        drawn = ("seed", "runs", "nodes", "nics", "faults", "heal_us", "findings", "ray")
        refuse_unused(context, "--case", drawn)
    shape = (nodes, _range(nics), faults, heal_us, case)
    judge = ProtocolJudge(protocol, *shape, may_fail=not must_survive)
    judge.case(seed)  # options that no case can have are refused before anything runs
    found, record = _search(judge, seeds, findings, ray, quiet=json)
    if found and shrink:
        first = found[0]._replace(violation=_shrunk(judge, found[0].seed))
        found = [first, *found[1:]]
    _show(judge, seeds, found, record, json=json)
    if found:
        raise typer.Exit(1)


def _range(nics: str) -> tuple[int, int]:
    """Parse N or LEAST-MOST."""
    found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", nics)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise typer.BadParameter(
            f"{nics!r} is no number of NICs: N or LEAST-MOST, e.g. 2 or 1-4", param_hint="--nics"
        )
    return least, most


@app.command("fit")
def fit(
    results: Annotated[
        Path,
        typer.Argument(help="JSON: points of kind, bytes and gbps.", exists=True, dir_okay=False),
    ],
    base: Annotated[
        str, typer.Option(help="The machine's kind: a profile's name or path.")
    ] = "cx7_400",
    out: Annotated[Path | None, OutFile("--out", help="Write the profile here.")] = None,
    name: Annotated[str, typer.Option(help="Of the new profile.")] = "fitted",
    json: Json = False,
) -> None:
    """Fit a profile to throughput that you measured; say how well it fits, and what each point
    would be by a fit to the others.
    """
    from dataclasses import replace

    from tep.sim.fit import fit as fitted
    from tep.sim.fit import left_out, read_results
    from tep.sim.profile import load_profile, write_profile

    points, machine = read_results(results), load_profile(base)
    found = fitted(points, machine, source=results.name)
    without = left_out(points, machine) if len(points) > 1 else [point.gbps for point in points]
    profile = replace(found.profile, name=name, summary=f"{machine.name}, fitted to {results.name}")
    if out is not None:
        write_profile(profile, out)
    rows = [
        {
            "point": f"{point.kind} {point.nbytes}",
            "measured, Gb/s": f"{point.gbps:.4g}",
            "the fit is off by": f"{residual:+.1%}",
            "a fit without it by": f"{other / point.gbps - 1:+.1%}",
        }
        for point, residual, other in zip(points, found.residuals, without, strict=True)
    ]
    numbers = [
        {
            "number": field,
            "value": f"{profile.numbers[field].value:g} {profile.numbers[field].unit}",
            "error": "no point left over" if error is None else f"{error:.1%}",
        }
        for field, error in found.errors.items()
    ]
    if json:
        emit_json({"points": rows, "numbers": numbers, "guessed": found.kept})
        return
    print_table(f"{results.name} on {machine.name}", list(rows[0]), rows)
    print_table("fitted", ["number", "value", "error"], numbers)
    for field in found.kept:
        typer.echo(f"{field}: the points do not determine it; a guess stands there")
    if out is not None:
        typer.echo(str(out))


@app.command("sweep")
def sweep_(
    context: typer.Context,
    function: Annotated[
        str, typer.Argument(help="FILE.py:NAME or MODULE:NAME; it takes the names and `seed`.")
    ],
    grid: Annotated[list[str], typer.Argument(help="NAME=VALUE,VALUE,... e.g. nbytes=4096,65536")],
    seeds: Annotated[int, typer.Option(min=1, help="Of each point, from 0 on.")] = 1,
    guessed: Guessed = 1.5,
    processes: Annotated[int | None, typer.Option(min=1, help="None: one a core.")] = None,
    out: Annotated[Path | None, OutFile("--out", help="The table: .csv or .json.")] = None,
    resume: Annotated[
        Path | None, OutFile("--resume", help="Keep runs here, and make none twice.")
    ] = None,
    ray: Ray = "",
    json: Json = False,
) -> None:
    """Call a function at every point of a grid; medians over the seeds, and intervals. With --ray a
    FILE.py must be on all nodes.
    """
    from tep.sim.sweeps import sweep

    calls = None
    if ray:
        refuse_unused(context, "--ray", ("processes",))
        from tep.integrations.ray.cluster import calls as calls_on_ray

        calls = calls_on_ray(ray)
    table = sweep(
        Named(str(Path(function).resolve()) if ".py:" in function else function),
        _grid(grid),
        seeds=seeds,
        guessed=guessed,
        processes=processes,
        calls=calls,
        path=resume,
        done=(lambda *_: None) if json else None,
    )
    if out is not None:
        table.write(out)
    if json:
        emit_json(list(table.rows))
    else:
        rows = [
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
            for row in table.rows
        ]
        print_table(function, list(rows[0]), rows)
    if table.missing:
        typer.echo(f"{table.missing} runs are missing: interrupted", err=True)
        raise typer.Exit(130)


def _grid(words: list[str]) -> dict[str, list[object]]:
    """Read NAME=VALUE,VALUE; a value is JSON, or else text."""
    grid: dict[str, list[object]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not (name.isidentifier() and equals and values):
            raise typer.BadParameter(f"{word!r}: NAME=VALUE,VALUE,... is asked for")
        for text in values.split(","):
            try:
                value = jsonlib.loads(text)
            except ValueError:
                value = text
            grid.setdefault(name, []).append(value)
    return grid


@dataclass(frozen=True)
class Named:
    """A function by its place, which each process loads for itself."""

    place: str

    def __call__(self, **arguments: object) -> Any:
        """Call it."""
        return _loaded(self.place)(**arguments)


@cache
def _loaded(place: str) -> Callable[..., Any]:
    where, _, name = place.rpartition(":")
    try:
        if where.endswith(".py"):
            found = runpy.run_path(where)[name]
        else:
            found = getattr(importlib.import_module(where), name)
    except (OSError, ImportError, AttributeError, KeyError, ValueError) as error:
        raise UsageError(f"{place}: FILE.py:NAME or MODULE:NAME is asked for") from error
    function: Callable[..., Any] = found
    return function


def _search(
    judge: ProtocolJudge, seeds: range, most: int, ray: str, *, quiet: bool
) -> tuple[Sequence[Finding], RowLog]:
    """Search here or on Ray, and show how far it is."""
    from tep.testing.spreading import search

    calls = None
    if ray:
        from tep.integrations.ray.cluster import calls as calls_on_ray

        calls = calls_on_ray(ray, folder=judge.folder, timeout_s=_SILENCE_S)
    with progress("seeds", len(seeds), quiet=quiet or len(seeds) == 1) as bar:

        def judged(count: int) -> None:
            bar.advance(bar.task_ids[0], count)

        return search(judge, seeds, most=most, calls=calls, judged=judged)


def _shrunk(judge: ProtocolJudge, seed: int) -> str:
    """Shrink a seed's finding to the simplest run that shows it; return its story."""
    from tep.testing.case import Violation
    from tep.testing.hunting import shrink, story

    try:
        judge.play(seed)
    except Violation as finding:
        found = shrink(finding)
        replay = str(found).rpartition("\n")[2]
        return f"{story(found)}\n{replay}"
    raise AssertionError(f"seed {seed} breaks no promise any more")


def _show(
    judge: ProtocolJudge,
    seeds: range,
    found: Sequence[Finding],
    record: RowLog,
    *,
    json: bool,
) -> None:
    """Print the findings, or the last run."""
    shown = judge.case(found[0].seed if found else seeds[-1])
    digest = record.digest()
    if json:
        document = {
            "seed": seeds.start,
            "runs": len(seeds),
            "violation": found[0].violation if found else None,
            "findings": [one._asdict() for one in found],
            "case": repr(shown),
            "digest": digest,
        }
        emit_json(document)
        return
    typer.echo(repr(shown))
    for one in found:
        typer.echo(f"VIOLATION: {one.violation}")
    if not found:
        typer.echo(f"{len(seeds)} clean; digest of the last: {digest}")
