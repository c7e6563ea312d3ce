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

__all__ = ["PATIENCE_S", "engine_of", "open_engine"]

PATIENCE_S: Final = 30.0


def open_engine(backend: str, **options: Any) -> TransferEngine:
    """Call TransferEngine.open, with PATIENCE_S for `peer_timeout_s` if the backend has one."""
    if backend == "libfabric" or (backend == "auto" and choose().backend == "libfabric"):
        options.setdefault("peer_timeout_s", PATIENCE_S)
    return TransferEngine.open(backend, **options)


def engine_of(program: str, **options: Any) -> TransferEngine:
    """Open the backend that PROGRAM_BACKEND names (or "auto"), with PROGRAM_OPTIONS, in JSON.

    Raises:
        UsageError: PROGRAM_OPTIONS is something else.
    """
    text = os.environ.get(f"{program}_OPTIONS", "{}")
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"{program}_OPTIONS={text!r} is no object in JSON: {error}") from error
    return open_engine(os.environ.get(f"{program}_BACKEND", "auto"), **(found | options))
