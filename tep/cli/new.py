"""`tep new`: a small project to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from tep.base.errors import UsageError
from tep.cli.show import Json, emit_json

__all__ = ["app"]

app = typer.Typer(help="Begin a small project.", no_args_is_help=True)

_FILES: Final = {
    "protocol.py": "protocol.py",
    "test_protocol.py": "test_protocol.py",
    "test.yml": ".github/workflows/test.yml",
}


@app.callback()
def new() -> None:
    """Begin a small project."""


@app.command("protocol")
def protocol(
    folder: Annotated[Path, typer.Argument(help="Made if it is not there.", file_okay=False)],
    json: Json = False,
) -> None:
    """Write a protocol, tests that hunt its bugs without a NIC, and a workflow for GitHub."""
    from importlib.resources import files

    paths = {name: folder / place for name, place in _FILES.items()}
    for path in paths.values():
        if path.exists():
            raise UsageError(f"{path} is there already, and is left as it is; name another folder")
    for name, path in paths.items():
        text = files("tep.cli").joinpath("template", f"{name}.txt").read_text(encoding="utf-8")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"tep new: {error}; name another folder") from error
    if json:
        emit_json({"files": [str(path) for path in paths.values()]})
        return
    for path in paths.values():
        typer.echo(str(path))
    typer.echo(f"run its tests: cd {folder} && python -m pytest")
