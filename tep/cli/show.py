"""The functions that all subcommands use: tables for people, one JSON document for programs,
progress on stderr, and options that are checked before anything runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from tep.observe.progress import progress

__all__ = [
    "Guessed", "InPath", "Json", "OutFile", "Ray", "Seed", "emit_json",
    "print_items", "print_table", "progress", "refuse_unused", "run_on_ray", "show_rows", "span",
]  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")]


def _factor(value: float) -> float:
    if value < 1:
        raise typer.BadParameter(f"{value:g}; a factor of 1 or more is asked for")
    return value


Guessed = Annotated[
    float,
    typer.Option(
        "--guessed",
        callback=_factor,
        help="Interval: what is guessed of a machine so many times as slow, and as fast; 1: none.",
    ),
]

Ray = Annotated[
    str,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run on a Ray cluster: HOST:PORT, auto (what --ray alone means: the one of "
        "RAY_ADDRESS or of this machine), or local (start one here).",
    ),
]

_NUMBER: Final = re.compile(
    r"[+-]?(\d[\d,]*\.?\d*|\.\d+|nan|inf)(e[+-]?\d+)?\s?(%|x|[A-Za-z/]{1,9})?"
)
"""A number, perhaps with a unit."""

_COLUMNS_LEAST: Final = 60


def InPath(*names: str, help: str) -> Any:  # noqa: A002  # as typer.Option, whose value it is
    """An option whose file or folder must be there."""
    return typer.Option(*names, help=help, exists=True, readable=True)


def OutFile(*names: str, help: str) -> Any:  # noqa: A002  # as above
    """An option whose file is written at the end; checked for write access at the start."""
    return typer.Option(*names, help=help, dir_okay=False, callback=_writable)


def _writable(path: Path | None) -> Path | None:
    if path is not None:
        folder = path.parent
        if not folder.is_dir():
            raise typer.BadParameter(f"there is no folder {folder}; make it, or name another")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written here; name another")
    return path


def refuse_unused(context: typer.Context, where: str, names: Iterable[str]) -> None:
    """Raise BadParameter for the first option that was given and would be ignored.

    `where` is the mode that ignores them, e.g. "--fabric chaos"; `names` are those of the command's
    parameters in Python.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(
                f"it has no effect with {where}; leave it out", param_hint=flag
            )


def run_on_ray(words: Sequence[str], size: int, address: str, *, quiet: bool) -> NoReturn:
    """Start the ranks of a tep command by Ray, and print rank 0's output."""
    from tep.integrations.ray.cluster import run_ranks

    with progress("the job", None, quiet=quiet):
        status, out = run_ranks("tep.cli:main", words, size, address)
    typer.echo(out.rstrip())
    raise typer.Exit(status)


def emit_json(document: object) -> None:
    """Print a JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Print rows of a table; each row maps a column's name to its value, None = empty.

    Columns of numbers are set to the right, all others to the left. On a terminal long texts are
    folded; into a pipe a row is one line (or as many as its text has), without borders.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    style = box.HEAVY_HEAD if terminal else box.SIMPLE
    table = Table(box=style, show_edge=terminal, pad_edge=False)
    cells = [["" if row.get(name) is None else str(row[name]) for name in columns] for row in rows]
    for k, name in enumerate(columns):
        texts = [Text.from_markup(row[k]).plain.strip() for row in cells]
        numbers = any(texts) and all(_NUMBER.fullmatch(text) for text in texts if text)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    console = Console(width=None if terminal else 1 << 14)
    console.print(title, style="bold", markup=False, highlight=False)
    if terminal:
        console.print(table)
        return
    console.width = max(1, console.measure(table).maximum)
    with console.capture() as captured:
        console.print(table)
    lines = (line.rstrip() for line in captured.get().splitlines())
    typer.echo("\n".join(line for line in lines if line))


def span(ends: tuple[float, float]) -> str:
    """The text of an interval."""
    return " to ".join(f"{end:.1f}" for end in ends)


def print_items(items: Iterable[tuple[str, str, Iterable[str]]]) -> None:
    """Print of each thing its label, in a colour, and lines that a CI log shows whole.

    Lines are folded at the terminal's width (COLUMNS, else 100 in a pipe), and no word is broken.
    """
    given = list(items)
    indent = 2 + max(len(label) for label, _, _ in given)
    width = max(_COLUMNS_LEAST, shutil.get_terminal_size((100, 24)).columns)
    fold = textwrap.TextWrapper(width - indent, break_long_words=False, break_on_hyphens=False)
    for label, colour, lines in given:
        first, *others = [part for line in lines for part in fold.wrap(line)]
        typer.echo(typer.style(label.ljust(indent), fg=colour) + first)
        for line in others:
            typer.echo(" " * indent + line)


def show_rows(title: str, rows: Sequence[Mapping[str, object]], *, json: bool) -> None:
    """Print rows that have the same columns, one at the least: as a table, or as JSON."""
    if json:
        emit_json({"what": title, "rows": [dict(row) for row in rows]})
    else:
        print_table(title, list(rows[0]), rows)
