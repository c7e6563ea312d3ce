"""What every backend refuses in the same words, whatever it drives; `base` says what it promises.

Nothing here knows a provider. The engine's own checks are above the seam, in `core.requests`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tep.backends.base import Access, DomainCaps, Status
from tep.base.errors import FabricError

if TYPE_CHECKING:
    from tep.memory.source import Memory

__all__ = ["check_memory"]


def check_memory(caps: DomainCaps, memory: Memory, access: Access) -> None:
    """Raise unless a NIC can reach this memory, and peers may do with it what they are to.

    Raises:
        FabricError: LOCAL_KEY; a device that the NIC does not take, or read-only as a target.
    """
    if memory.kind not in caps.memory_kinds:
        raise FabricError(
            f"{caps.nic}: memory on {memory.device} cannot be registered; "
            f"this NIC takes {', '.join(caps.memory_kinds)}",
            code=Status.LOCAL_KEY.name,
        )
    if memory.readonly and access.sink:
        raise FabricError(
            f"{caps.nic}: {memory.nbytes} bytes at {memory.ptr:#x} are read-only "
            "and cannot be a target; register them with Access.SOURCE",
            code=Status.LOCAL_KEY.name,
        )
