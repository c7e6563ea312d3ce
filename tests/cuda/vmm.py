"""Memory of cuMemCreate, mapped as torch's expandable segments and vLLM's sleep mode map it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tep.cuda.driver import Driver

__all__ = ["MiB2", "fill", "mapped"]

MiB2 = 2 << 20
"""The granularity of mappings on every GPU so far."""


def fill(cuda: Driver, start: int, pieces: int, device: int = 0, *, capable: bool = True) -> None:
    """Map some pieces of 2 MiB, each memory of its own, one behind the other."""
    m = cuda.m
    prop = m.CUmemAllocationProp()
    prop.type = m.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = m.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device
    prop.allocFlags.gpuDirectRDMACapable = int(capable)
    access = m.CUmemAccessDesc()
    access.location = prop.location
    access.flags = m.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    for k in range(pieces):
        handle = cuda.call("cuMemCreate", MiB2, prop, 0)
        cuda.call("cuMemMap", start + k * MiB2, MiB2, 0, handle, 0)
        cuda.call("cuMemRelease", handle)  # the mapping keeps it
    cuda.call("cuMemSetAccess", start, pieces * MiB2, [access], 1)


@contextlib.contextmanager
def mapped(cuda: Driver, pieces: int, device: int = 0, *, capable: bool = True) -> Iterator[int]:
    """Reserve addresses, and have memory there meanwhile."""
    start = int(cuda.call("cuMemAddressReserve", pieces * MiB2, 0, 0, 0))
    fill(cuda, start, pieces, device, capable=capable)
    yield start
    cuda.call("cuMemUnmap", start, pieces * MiB2)
    cuda.call("cuMemAddressFree", start, pieces * MiB2)
