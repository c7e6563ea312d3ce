"""The engines of plug-ins for other systems, with longer timeouts for silent peers.

Such a system's process loads models, unpickles and collects garbage for seconds, and keeps the
interpreter's lock meanwhile. On libfabric's providers its peers would take it for dead after 5 s;
hardware and shared memory need no Python at the remote end.
"""

from __future__ import annotations

import os
from typing import Any, Final

import msgspec

from tep import TransferEngine, UsageError
from tep.backends.auto import choose

__all__ = ["PATIENCE_S", "engine_of", "open_engine", "options_of"]

PATIENCE_S: Final = 30.0


def open_engine(backend: str, **options: Any) -> TransferEngine:
    """Call TransferEngine.open, with PATIENCE_S for `peer_timeout_s` if the backend has one."""
    if backend == "libfabric" or (backend == "auto" and choose().backend == "libfabric"):
        options.setdefault("peer_timeout_s", PATIENCE_S)
    return TransferEngine.open(backend, **options)


def engine_of(program: str, **options: Any) -> TransferEngine:
    """Open the backend that PROGRAM_BACKEND names (or "auto"), with `options_of` and these."""
    backend = os.environ.get(f"{program}_BACKEND", "auto")
    return open_engine(backend, **(options_of(program) | options))


def options_of(program: str) -> dict[str, Any]:
    """Read PROGRAM_OPTIONS, an object in JSON.

    Raises:
        UsageError: PROGRAM_OPTIONS is something else.
    """
    text = os.environ.get(f"{program}_OPTIONS", "{}")
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"{program}_OPTIONS={text!r} is no object in JSON: {error}") from error
