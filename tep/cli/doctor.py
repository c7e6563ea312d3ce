"""`tep doctor`: the doctor's findings on a machine, as a table or as JSON."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Final

import typer

from tep.cli.show import InPath, Json, OutFile, emit_json, print_items, progress
from tep.host.doctor import Finding, Level
from tep.host.doctor.report import bundle, examine, passed
from tep.host.hostfiles import Recorder, open_files

__all__ = ["doctor"]

_COLOURS: Final = {Level.GOOD: "green", Level.NOTE: "cyan", Level.WARN: "yellow", Level.BAD: "red"}


def doctor(
    json: Json = False,
    machine: Annotated[
        Path | None,
        InPath(
            "--machine", help="Look at a captured file or a copied root directory, and try nothing."
        ),
    ] = None,
    try_backends: Annotated[
        bool, typer.Option("--try/--no-try", help="Move bytes over each backend that opens.")
    ] = True,
    bundle_file: Annotated[
        Path | None, OutFile("--bundle", help="Write all of it here, for a bug report.")
    ] = None,
) -> None:
    """Say what works for transfers, what does not, and what mends it; status 1: some is bad."""
    recorder = Recorder(open_files(machine))
    with progress("looking, and trying each backend", None, quiet=json):
        found = list(examine(recorder, try_backends=try_backends and machine is None))
    if bundle_file is not None:
        text = jsonlib.dumps(bundle(recorder, found), indent=1)
        bundle_file.write_text(text + "\n", encoding="utf-8")
    if json:
        emit_json({"passed": passed(found), "findings": [one.to_json() for one in found]})
    else:
        _print(found)
    if not passed(found):
        raise typer.Exit(1)


def _print(found: list[Finding]) -> None:
    order = sorted(found, key=lambda one: -list(Level).index(one.level))
    count = {level: sum(one.level is level for one in found) for level in Level}
    typer.echo(", ".join(f"{number} {level.value}" for level, number in count.items()))
    print_items((one.level.value, _COLOURS[one.level], _lines(one)) for one in order)


def _lines(one: Finding) -> list[str]:
    mends = [f"what mends it: {one.remedy}"] if one.remedy else []
    return [f"{one.area}: {one.text}", *mends]
