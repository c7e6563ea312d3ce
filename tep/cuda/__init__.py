"""GPU memory for engines, on cuda-python (extra `cuda`), which is imported when it is used.

No torch is needed. The tests run it with the real cuda-python on a fake driver; no GPU has run it,
scripts/gpu_check would.
"""

from tep.cuda.arena import Arena, Staged, alloc
from tep.cuda.checksum import checksum
from tep.cuda.memory import (
    GpuFlag,
    Pointer,
    export_dmabuf,
    flush,
    inspect,
    needs_flush,
    set_sync_memops,
)
from tep.host.cuda import list_devices

__all__ = [
    "Arena", "GpuFlag", "Pointer", "Staged", "alloc", "checksum", "export_dmabuf", "flush",
    "inspect", "list_devices", "needs_flush", "set_sync_memops",
]  # fmt: skip
