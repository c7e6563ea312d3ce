"""The `tep` command: each subcommand is one module here. No logic that another program would want
to import.

Every subcommand takes --json and then prints one JSON document and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tep import __version__
from tep.base.errors import TepError
from tep.cli import demo, info, kvcache, moe, new, reproduce, rl, sim, stall

__all__ = ["app", "main"]

app = typer.Typer(
    name="tep",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:  # typer calls it so
    if asked:
        typer.echo(f"tep {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit."),
    ] = False,
) -> None:
    """A transfer engine for LLM systems: one-sided writes, counted immediates, any fabric."""


app.command("info")(info.info)
app.command("doctor")(info.doctor)
app.command("demo")(demo.demo)
app.command("moe")(moe.moe)
app.command("reproduce")(reproduce.reproduce)
app.command("stall")(stall.stall)
app.add_typer(kvcache.app, name="kvcache")
app.add_typer(new.app, name="new")
app.add_typer(rl.app, name="rl")
app.add_typer(sim.app, name="sim")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    tep's own errors are printed without a traceback.
    """
    try:
        app(args=_with_values(sys.argv[1:] if argv is None else argv), standalone_mode=True)
    except TepError as error:
        sys.stderr.write(f"tep: {type(error).__name__}: {error}\n")
        return 1
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 1
    return 0


def _with_values(argv: Sequence[str]) -> list[str]:
    """Give --ray its value if it has none: typer knows no options with an optional value."""
    following = [*argv[1:], "-"]
    return [
        "--ray=auto" if word == "--ray" and after.startswith("-") else word
        for word, after in zip(argv, following)
    ]
