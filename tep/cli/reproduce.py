"""`tep reproduce` simulates published figures, and prints both with their errors."""

from __future__ import annotations

from typing import Annotated

import typer

from tep.cli.show import Guessed, Json, emit_json, print_table, progress

__all__ = ["reproduce"]

Names = Annotated[list[str] | None, typer.Argument(help="Tables; none: all of them.")]


def reproduce(names: Names = None, guessed: Guessed = 1.5, json: Json = False) -> None:
    """Print published, simulated and error of each point, and how its value was made: predicted by
    engines on the timing fabric (with an interval), fitted to, given, or counted. Exit 1 if an
    error is beyond its tolerance.
    """
    from tep.bench.reproduce import runs, tables

    chosen = [tables.load_table(name) for name in names or tables.table_names()]
    outcomes: list[tables.Outcome] = []
    with progress("points", sum(len(table.points) for table in chosen), quiet=json) as bar:
        for table in chosen:
            for outcome in runs.reproduce(table.name, guessed):
                outcomes.append(outcome)
                bar.advance(bar.task_ids[0])
    facts = tables.summary(outcomes)
    if json:
        emit_json({"summary": facts, "points": [one.document() for one in outcomes]})
    else:
        for table in chosen:
            rows = [one.row() for one in outcomes if one.table is table]
            columns = [name for name in rows[0] if any(row[name] for row in rows)]
            title = f"{table.name}: {table.title}, {table.unit}; {table.source}"
            print_table(title, columns, rows)
        for key, value in facts.items():
            typer.echo(f"{key}: {', '.join(value) if isinstance(value, list) else value}")
    if not all(one.holds for one in outcomes):
        raise typer.Exit(1)
