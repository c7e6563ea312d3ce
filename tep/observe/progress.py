"""The bar that long work shows: on a terminal, and in notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["progress"]


@contextmanager
def progress(what: str, total: int | None, *, quiet: bool = False) -> Iterator[Progress]:
    """Show a bar while something runs that may take more than two seconds.

    It is shown on stderr if that is a terminal, and in a notebook that has ipywidgets. Its one task
    is number 0: `advance(0)` moves it. `total` counts its steps; None: unknown.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    counted = [] if total is None else [MofNCompleteColumn()]
    columns = (TextColumn("{task.description}"), BarColumn(), *counted, TimeElapsedColumn())
    in_notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    hidden = quiet or not (in_notebook or (console.is_terminal and not console.is_jupyter))
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        bar.add_task(what, total=total)
        yield bar
