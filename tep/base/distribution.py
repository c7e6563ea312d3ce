"""The name under which tep is installed, and the error for an extra that is missing.

The import is `tep`; on the package index that name belongs to another project. pyproject.toml has
the same name, and tests/tidy holds that no page and no message has another one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from tep.base.errors import BackendUnavailable

__all__ = ["DISTRIBUTION", "install", "need"]

DISTRIBUTION: Final = "tep-engine"


def install(extra: str) -> str:
    """Return the command that installs one of the extras of pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def need(module: str, extra: str, what: str) -> Any:  # a module of any kind
    """Import a module that an extra brings; "" where no extra has it.

    Raises:
        BackendUnavailable: `what`, the subject of its sentence, needs it; says what installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        command = install(extra) if extra else f"pip install {name}"
        why = ((name, str(error)),)
        raise BackendUnavailable(f"{what} needs {name}: {command}", why) from error
