"""`tep info`: which backends are here, and for each that is not, why and what would bring it."""

from __future__ import annotations

import platform

from tep import __version__
from tep.backends import BACKENDS, load_backend
from tep.cli.show import Json, emit_json, print_table
from tep.errors import BackendUnavailable

__all__ = ["backend_states", "info"]


def backend_states() -> list[dict[str, object]]:
    """Ask every backend of the registry what is here; name, available, detail, cure, tried."""
    states: list[dict[str, object]] = []
    for name, spec in BACKENDS.items():
        state: dict[str, object] = {"backend": name, "drives": spec.summary}
        try:
            state |= {
                "available": True,
                "detail": load_backend(name).probe(),
                "cure": None,
                "tried": [],
            }
        except BackendUnavailable as error:
            state |= {
                "available": False,
                "detail": str(error).splitlines()[0],
                "cure": spec.cure,
                "tried": [list(step) for step in error.tried],
            }
        states.append(state)
    return states


def info(json: Json = False) -> None:
    """Say which backends can run here; for the others, why not and what would bring them."""
    states = backend_states()
    machine = {
        "tep": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if json:
        emit_json({**machine, "backends": states})
        return
    print_table(
        f"tep {machine['tep']}, Python {machine['python']}, {machine['system']}",
        ("backend", "here", "what", "to get it"),
        (
            {
                "backend": state["backend"],
                "here": "yes" if state["available"] else "no",
                "what": _what(state),
                "to get it": state["cure"],
            }
            for state in states
        ),
    )


def _what(state: dict[str, object]) -> str:
    lines = [f"{state['drives']}", f"{state['detail']}"]
    tried = state["tried"]
    assert isinstance(tried, list)
    return "\n".join([*lines, *(f"tried {what}: {why}" for what, why in tried)])
