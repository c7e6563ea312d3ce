"""`tep info`: the backends that are here, and for each other one the reason and the remedy.

A backend's module may have `facts() -> dict[str, object]`: further facts by name; its `tried` are
(what, why not) of libraries that were looked at and not taken.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import typer

from tep import __version__
from tep.backends import BACKENDS, load_backend
from tep.base.errors import BackendUnavailable
from tep.cli.show import InPath, Json, emit_json, print_items
from tep.host.hostfiles import open_files
from tep.host.topology import detect

__all__ = ["backend_states", "info"]


def backend_states() -> list[dict[str, object]]:
    """Ask every backend of the registry: return its name, whether it is available, details,
    remedy, facts, and attempts.
    """
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
        InPath("--machine", help="Of scripts/capture_topology: show that machine instead."),
    ] = None,
) -> None:
    """Say which backends can run here; for the others, why not and what would bring them."""
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
