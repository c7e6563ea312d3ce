"""NIXL's Python interface on tep: `from tep.compat.nixl import nixl_agent, nixl_agent_config`.

Unmodified programs: `python -m tep.compat.nixl -- COMMAND`. The README beside this file lists the
differences.
"""

from __future__ import annotations

from tep.compat.nixl import lowlevel as _lowlevel  # noqa: F401  # it sets bindings.nixlAgent
from tep.compat.nixl.api import (
    DEFAULT_COMM_PORT,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_prepped_dlist_handle,
    nixl_thread_sync_t,
    nixl_xfer_handle,
    nixlBind,
)

__all__ = [
    "DEFAULT_COMM_PORT", "nixlBind", "nixl_agent", "nixl_agent_config", "nixl_backend_handle",
    "nixl_prepped_dlist_handle", "nixl_thread_sync_t", "nixl_xfer_handle",
]  # fmt: skip
