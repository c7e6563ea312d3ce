"""How the subcommands print: tables for people, one JSON document for programs, progress on
stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

__all__ = ["Json", "Seed", "emit_json", "print_table", "progress"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")]


def emit_json(document: object) -> None:
    """Print a JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Print rows of a table; each row maps a column's name to what stands there, None = nothing."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name == columns[0] else "right", overflow="fold")
    for row in rows:
        table.add_row(*("" if row.get(name) is None else str(row[name]) for name in columns))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


@contextmanager
def progress(what: str, total: int, *, quiet: bool = False) -> Iterator[Progress]:
    """Show a bar on stderr while something runs that may take more than two seconds.

    The bar has one task, number 0; `advance(0)` moves it.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        bar.add_task(what, total=total)
        yield bar
