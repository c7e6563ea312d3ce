"""`tep reproduce`: published tables beside the simulated values, with the errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tep.cli.show import Json, emit_json, print_table, progress

__all__ = ["reproduce"]

Names = Annotated[list[str] | None, typer.Argument(help="Tables; none: all of them.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Write report.md and pictures into this folder.", file_okay=False),
]
LeaveOut = Annotated[
    bool,
    typer.Option(
        "--leave-one-out", help="Fit to all other points, and say what that makes of each."
    ),
]


def reproduce(
    names: Names = None, out: Out = None, leave_one_out: LeaveOut = False, json: Json = False
) -> None:
    """Print published, simulated and error of each point, and how its value was made: predicted by
    engines on the timing fabric, fitted to, given, or counted. Exit 1 if an error is beyond its
    tolerance.
    """
    from tep.bench.reproduce import load_table, report, residue, runs, table_names

    tables = [load_table(name) for name in names or table_names()]
    outcomes: list[runs.Outcome] = []
    total = sum(len(table.points) for table in tables)
    with progress("points", total, quiet=json) as bar:
        for table in tables:
            for outcome in runs.reproduce(table.name):
                outcomes.append(outcome)
                bar.advance(bar.task_ids[0])
    if leave_one_out:
        outcomes = residue.leave_one_out(outcomes)
    written = [str(path) for path in report.write_report(outcomes, out)] if out else []
    facts = report.summary(outcomes)
    if json:
        points = [
            {
                "table": one.table.name,
                "unit": one.table.unit,
                **one.point.keys,
                "published": one.point.published,
                "simulated": one.simulated,
                "error": one.error,
                "left_out": one.left_out,
                "class": one.point.kind,
                "of": one.point.of,
                "tolerance": one.point.tolerance,
                "holds": one.holds,
            }
            for one in outcomes
        ]
        emit_json({"summary": facts, "points": points, "files": written})
    else:
        for table in tables:
            mine = [one for one in outcomes if one.table is table]
            columns = [c for c in report.COLUMNS if c != "left out" or leave_one_out]
            title = f"{table.name}: {table.title}, {table.unit}; {table.source}"
            print_table(title, columns, report.rows_of(mine))
        for key, value in facts.items():
            typer.echo(f"{key}: {', '.join(value) if isinstance(value, list) else value}")
        for path in written:
            typer.echo(path)
    if not all(one.holds for one in outcomes):
        raise typer.Exit(1)
