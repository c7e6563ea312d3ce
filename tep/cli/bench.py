"""`tep bench` measures, `tep reproduce` simulates; both print numbers beside others'."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer

from tep.bench import Figure
from tep.cli.show import Guessed, Json, emit_json, print_table, progress

__all__ = ["app", "machine_of_figures", "reproduce", "show_figures"]


app = typer.Typer(
    no_args_is_help=True,
    help="Measure: CPU time, medians, side by side with the numbers they are compared to.",
)
Rounds = Annotated[
    int, typer.Option("--rounds", min=3, help="Rounds of each figure; the median is shown.")
]


@app.command("engine")
def engine(rounds: Rounds = 40, json: Json = False) -> None:
    """Measure the engine's own CPU time a page, a write and a scatter, over NICs without cost."""
    from tep.bench.engine import engine_figures  # numpy is loaded when something is measured

    show_figures("tep bench engine", engine_figures(rounds), 21, json=json)


@app.command("busy")
def busy(
    fabric: Annotated[str, typer.Option("--fabric", help="local or tcp; both if not given.")] = "",
    rounds: Rounds = 5,
    json: Json = False,
) -> None:
    """Measure beside a busy program: threads in Python and numpy, an asyncio loop, a process."""
    from tep.bench.busy import FABRICS, NFIGURES, busy_figures

    fabrics = [fabric] if fabric else FABRICS
    figures = itertools.chain.from_iterable(busy_figures(one, rounds) for one in fabrics)
    total = NFIGURES * len(fabrics)
    show_figures("tep bench busy", figures, total, json=json, decimals=2)


def show_figures(
    title: str, figures: Iterable[Figure], total: int, *, json: bool, decimals: int = 1
) -> None:
    """Measure `total` figures while a bar moves, and print them as a table or as JSON."""
    found: list[Figure] = []
    with progress(title, total, quiet=json) as bar:
        for figure in figures:
            found.append(figure)
            bar.advance(bar.task_ids[0])
    machine = machine_of_figures()
    if json:
        emit_json(
            {
                "command": title,
                "machine": machine,
                "figures": [_document(figure) for figure in found],
            }
        )
        return
    rows = (
        {
            "what": figure.what,
            "median": f"{figure.value:,.{decimals}f} {figure.unit}",
            "best": f"{figure.best:,.{decimals}f}",
            "worst": None if figure.worst is None else f"{figure.worst:,.{decimals}f}",
            "calls": None if figure.calls is None else f"{figure.calls:,.2f}",
            "aim": _aim(figure),
            "ratio": None if figure.ratio is None else f"{figure.ratio:.2f} x {figure.reference:g}",
        }
        for figure in found
    )
    columns = ("what", "median", "best", "worst", "calls", "aim", "ratio")
    print_table(f"{title} ({machine}; CPU time)", columns, rows)
    for source in dict.fromkeys(
        figure.reference_source for figure in found if figure.reference_source
    ):
        typer.echo(f"compared to: {source}")


def machine_of_figures() -> str:
    """Describe the machine on which figures were measured."""
    return f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"


def _document(figure: Figure) -> dict[str, object]:
    return {**asdict(figure), "ratio": figure.ratio, "reached": figure.reached}


def _aim(figure: Figure) -> str | None:
    if figure.aim is None:
        return None
    sign = ">=" if figure.more_is_better else "<="
    return f"{sign} {figure.aim:g} {'reached' if figure.reached else 'MISSED'}"


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
