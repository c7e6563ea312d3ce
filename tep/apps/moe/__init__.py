"""MoE dispatch and combine over tep: an all-to-all of tokens by counted immediates.

Names only; each is imported from its room when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tep.apps.moe.alltoall import AllToAll
    from tep.apps.moe.config import Format, MoeConfig
    from tep.apps.moe.group import Group, Nvlink, NvlinkTimes, local_groups
    from tep.apps.moe.kernels import Gpu, load_gpu
    from tep.apps.moe.payload import Received

__all__ = [
    "AllToAll", "Format", "Gpu", "Group", "MoeConfig", "Nvlink", "NvlinkTimes", "Received",
    "load_gpu", "local_groups",
]  # fmt: skip

_ROOMS = {
    "AllToAll": "alltoall",
    "Format": "config",
    "Gpu": "kernels",
    "Group": "group",
    "MoeConfig": "config",
    "Nvlink": "group",
    "NvlinkTimes": "group",
    "Received": "payload",
    "load_gpu": "kernels",
    "local_groups": "group",
}

if not TYPE_CHECKING:  # a checker that saw __getattr__ would believe in every misspelt name

    def __getattr__(name: str) -> object:
        """Import a public name from its room, once; afterwards it is an ordinary attribute."""
        room = _ROOMS.get(name)
        if room is None:
            raise AttributeError(f"module 'tep.apps.moe' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"tep.apps.moe.{room}"), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
