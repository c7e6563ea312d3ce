"""`tep info`: the backends that are here, and for each other one the reason and the remedy; and
`tep doctor`: the doctor's findings on a machine. Both as text or as JSON.

A backend's module may have `facts() -> dict[str, object]`: further facts by name; its `tried` are
(what, why not) of libraries that were looked at and not taken.
"""

from __future__ import annotations

import json as jsonlib
import platform
from pathlib import Path
from typing import Annotated, Final

import typer

from tep import __version__
from tep.base.errors import BackendUnavailable
from tep.cli.show import InPath, Json, OutFile, emit_json, print_items, progress
from tep.host.doctor import Finding, Level

__all__ = ["backend_states", "doctor", "info"]


def backend_states() -> list[dict[str, object]]:
    """Ask every backend of the registry whether it is available, and why."""
    from tep.backends import BACKENDS, load_backend

    states: list[dict[str, object]] = []
    for name, spec in BACKENDS.items():
        state: dict[str, object] = {"backend": name, "drives": spec.summary}
        try:
            module = load_backend(name)
            detail = module.probe()
            facts: dict[str, object] = getattr(module, "facts", dict)()
            tried = facts.pop("tried", [])
            assert isinstance(tried, list)
            state |= {
                "available": True,
                "detail": detail,
                "cure": None,
                "facts": facts,
                "tried": [list(step) for step in tried],
            }
        except BackendUnavailable as error:
            state |= {
                "available": False,
                "detail": str(error).splitlines()[0],
                "cure": spec.cure,
                "facts": {},
                "tried": [list(step) for step in error.tried],
            }
        states.append(state)
    return states


def info(
    json: Json = False,
    topology: Annotated[
        bool, typer.Option("--topology", help="Show which GPU is beside which NICs and cores.")
    ] = False,
    machine_file: Annotated[
        Path | None,
        InPath("--machine", help="Show the machine in a bundle of tep doctor instead."),
    ] = None,
) -> None:
    """Say which backends can run here; for the others, why not and what would bring them."""
    from tep.host.hostfiles import open_files
    from tep.host.topology import detect

    if topology or machine_file is not None:
        seen = detect(open_files(machine_file))
        emit_json(seen.to_json()) if json else typer.echo(seen.picture())
        return
    states = backend_states()
    machine = {
        "tep": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if json:
        emit_json({**machine, "backends": states})
        return
    typer.echo(f"tep {machine['tep']}, Python {machine['python']}, {machine['system']}")
    print_items(
        (f"{state['backend']}", "green" if state["available"] else "yellow", _lines(state))
        for state in states
    )


def _lines(state: dict[str, object]) -> list[str]:
    tried = state["tried"]
    assert isinstance(tried, list)
    here, verb = ("here", "not taken:") if state["available"] else ("not here", "tried")
    lines = [f"{here}: {state['detail']}", f"{state['drives']}"]
    lines += [f"{verb} {what}: {why}" for what, why in tried]
    return lines if state["available"] else [*lines, f"to get it: {state['cure']}"]


_COLOURS: Final = {Level.GOOD: "green", Level.NOTE: "cyan", Level.WARN: "yellow", Level.BAD: "red"}


def doctor(
    json: Json = False,
    machine: Annotated[
        Path | None,
        InPath("--machine", help="Look at the machine in a bundle, and try nothing."),
    ] = None,
    try_backends: Annotated[
        bool, typer.Option("--try/--no-try", help="Move bytes over each backend that opens.")
    ] = True,
    bundle_file: Annotated[
        Path | None, OutFile("--bundle", help="Write all of it here, for a bug report.")
    ] = None,
) -> None:
    """Say what works for transfers, what does not, and what mends it; status 1: some is bad."""
    from tep.host.doctor.report import bundle, examine, passed
    from tep.host.hostfiles import Recorder, open_files

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
    print_items((one.level.value, _COLOURS[one.level], _findings_lines(one)) for one in order)


def _findings_lines(one: Finding) -> list[str]:
    mends = [f"what mends it: {one.remedy}"] if one.remedy else []
    return [f"{one.area}: {one.text}", *mends]
