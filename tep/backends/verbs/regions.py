"""Users' memory as one NIC knows it: registered, held, withdrawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tep.backends.base import Access, DomainKey
from tep.backends.ffi.ibverbs_structs import ENUMS
from tep.memory.source import DmabufExport, Memory, exported

if TYPE_CHECKING:
    from tep.backends.ffi.ibverbs_structs import Mr
    from tep.backends.verbs.device import Device

__all__ = ["Regions"]


class Regions:
    """The registered memory of one NIC.

    Args:
        device: where.
        export: exports CUDA memory as a dma-buf; None = CUDA memory goes by peer memory, if at all.

    Attributes:
        on_devices: local keys of memory that the CPU cannot read.
    """

    def __init__(self, device: Device, export: DmabufExport | None) -> None:
        self._device = device
        self._export = export
        self.on_devices: set[int] = set()
        self._mrs: dict[int, tuple[Mr, Memory]] = {}

    def add(self, memory: Memory, access: Access) -> DomainKey:
        """Make memory known to the NIC, and hold it.

        Raises:
            FabricError: the NIC does not allow it, or copies to GPU memory cannot be made to wait.
            BackendUnavailable: GPU memory, and no cuda-python or no driver.
        """
        device = self._device
        flags = ENUMS["IBV_ACCESS_LOCAL_WRITE"] if access.sink else 0
        if access.target:
            flags |= ENUMS["IBV_ACCESS_REMOTE_WRITE"]
        if access.readable:
            flags |= ENUMS["IBV_ACCESS_REMOTE_READ"]
        if device.settings.relaxed_ordering:
            flags |= ENUMS["IBV_ACCESS_RELAXED_ORDERING"]
        if memory.kind == "cuda" and self._export is not None:
            with exported(self._export, memory) as (fd, offset):
                mr = device.reg_dmabuf_mr(fd, offset, memory.ptr, memory.nbytes, flags)
        else:
            if memory.kind == "cuda":  # an export does it for the others
                from tep.cuda.memory import set_sync_memops

                set_sync_memops(memory)
            mr = device.reg_mr(memory.ptr, memory.nbytes, flags)
        # The memory stays mapped as long as the NIC knows it: a late write would else land in what
        # the allocator put there next.
        self._mrs[int(mr.lkey)] = (mr, memory)
        if memory.kind != "cpu":
            self.on_devices.add(int(mr.lkey))
        return DomainKey(lkey=int(mr.lkey), rkey=int(mr.rkey), base=memory.ptr)

    def remove(self, key: DomainKey, *, closed: bool) -> None:
        """Withdraw a region; one that is not there is none."""
        found = self._mrs.pop(key.lkey, None)
        self.on_devices.discard(key.lkey)
        if found is not None and not closed:
            self._device.dereg_mr(found[0])

    def close(self) -> None:
        """Withdraw all."""
        for mr, _ in self._mrs.values():
            self._device.dereg_mr(mr)
        self._mrs.clear()
