"""`tep bench` measures, `tep reproduce` simulates; both print numbers beside others'."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
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


@app.command("sim")
def sim(rounds: Rounds = 5, json: Json = False) -> None:
    """Measure the simulator: a large paged write and an all-to-all on the timing fabric."""
    from tep.bench.simulator import simulator_figures

    show_figures("tep bench sim", simulator_figures(rounds), 3, json=json)


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
    names: Names = None,
    out: Out = None,
    leave_one_out: LeaveOut = False,
    guessed: Guessed = 1.5,
    json: Json = False,
) -> None:
    """Print published, simulated and error of each point, and how its value was made: predicted by
    engines on the timing fabric (with an interval), fitted to, given, or counted. Exit 1 if an
    error is beyond its tolerance.
    """
    from tep.bench.reproduce import load_table, report, residue, runs, table_names

    tables = [load_table(name) for name in names or table_names()]
    outcomes: list[runs.Outcome] = []
    total = sum(len(table.points) for table in tables)
    with progress("points", total, quiet=json) as bar:
        for table in tables:
            for outcome in runs.reproduce(table.name, guessed):
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
                "interval": one.ends,
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
            rows = report.rows_of(mine)
            empty = {name for name in ("interval",) if not any(row[name] for row in rows)}
            empty |= set() if leave_one_out else {"left out"}
            title = f"{table.name}: {table.title}, {table.unit}; {table.source}"
            print_table(title, [c for c in report.COLUMNS if c not in empty], rows)
        for key, value in facts.items():
            typer.echo(f"{key}: {', '.join(value) if isinstance(value, list) else value}")
        for path in written:
            typer.echo(path)
    if not all(one.holds for one in outcomes):
        raise typer.Exit(1)
