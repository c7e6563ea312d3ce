"""Registered memory of one NIC: keys, what peers may reach, and its description to libfabric.

Rule 1: memory stays held, and its registration open, while a row in flight reads from it. Rule 2: a
key is never given twice, not even by a later incarnation at the same address. Rule 3: on a device,
what peers may read is registered once for us and once for them, so that the owner can end what
peers do while its own rows are in flight: libfabric must not lose a registration that such a row
was posted with, since it may post the row again.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof
from dataclasses import dataclass, field
from typing import Any, Final

from tep.backends.base import Access, Column, DomainKey, Status
from tep.backends.columns import bounds
from tep.backends.ffi import libfabric as fi
from tep.backends.ffi.libc import libc
from tep.backends.libfabric.objects import Nic
from tep.base.errors import FabricError
from tep.memory.source import DmabufExport, Memory, exported

__all__ = ["Region", "Regions", "mr_attr"]

_COUNTER_BITS: Final = 24
_LOCAL: Final = 1 << 62  # tells a region's local key from its remote one, so that a mix-up fails


@dataclass(slots=True, eq=False)
class Region:
    """One registered region.

    Attributes:
        handles: its registrations; where there are two, the second is what peers may do.
        desc: what a row passes as its memory descriptor; 0 where the provider wants none.
        key: what the engine knows it by.
        target: whether peers may write here.
        sink: whether our own reads may.
        open: tickets that read from it.
        start, end: addresses of its first byte, and behind its last.
    """

    handles: Sequence[Any]
    memory: Memory
    key: DomainKey
    desc: int
    target: bool
    sink: bool = False
    open: int = 0
    start: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.memory.ptr
        self.end = self.start + self.memory.nbytes

    def holds(self, src: Column, nbytes: Column) -> bool:
        """Tell whether all rows lie inside."""
        first, end = bounds(src, nbytes)
        return self.start <= first and end <= self.end

    def close(self) -> None:
        """Unregister."""
        for handle in self.handles:
            handle.close()


class Regions:
    """All regions of one NIC.

    Args:
        nic: where they are registered.
        software: no device reads and writes here, see Rules.
        dmabuf: makes a dma-buf of device memory; None = the provider finds the pages by CUDA.

    Attributes:
        by_lkey: the regions that rows may use.
        by_rkey, readable: those that peers may write, or read.
        dying: those that were given back while rows in flight read from them.
    """

    def __init__(self, nic: Nic, *, software: bool, dmabuf: DmabufExport | None = None) -> None:
        self._nic = nic
        self._software = software
        self._dmabuf = dmabuf
        attr = nic.info.contents.domain_attr.contents
        mode: int = attr.mr_mode
        self._virtual = bool(mode & fi.FI_MR_VIRT_ADDR)
        self._own_keys = not mode & fi.FI_MR_PROV_KEY
        self._key_bits = min(8 * int(attr.mr_key_size), 63)  # keys travel as msgpack integers
        # A random start, so that a key of an earlier incarnation at this address opens nothing.
        self._salt = int.from_bytes(os.urandom(8), "little")
        self._numbers = itertools.count(1)
        self.by_lkey: dict[int, Region] = {}
        self.by_rkey: dict[int, Region] = {}
        self.readable: dict[int, Region] = {}
        self.dying: list[Region] = []

    def add(self, memory: Memory, access: Access) -> Region:
        """Register memory.

        Raises:
            FabricError: the provider refuses, or the memory is not mapped.
        """
        if memory.owner is None and memory.kind == "cpu":
            # Software providers take anything, and crash once a row arrives.
            _check_mapped(memory, self._nic.name)
        number = (self._salt << _COUNTER_BITS | next(self._numbers)) & ((1 << 63) - 1)
        handles = []
        with contextlib.ExitStack() as stack:
            dmabuf = None
            if self._dmabuf is not None and memory.kind != "cpu":
                dmabuf = stack.enter_context(exported(self._dmabuf, memory))
            for rights in self._rights(access):
                attr, flags, kept = mr_attr(memory, rights, dmabuf=dmabuf)
                if self._own_keys:
                    attr.requested_key = number & ((1 << self._key_bits) - 1)
                handles.append(self._nic.register(attr, flags))
                del kept
        rkey = int(handles[-1].contents().key)
        key = DomainKey(number ^ _LOCAL, rkey, memory.ptr if self._virtual else 0)
        desc = int(handles[0].contents().mem_desc or 0)
        region = Region(handles, memory, key, desc, access.target)
        region.sink = access.sink
        self.by_lkey[key.lkey] = region
        if region.target:
            self.by_rkey[key.rkey] = region
        if access.readable:
            self.readable[key.rkey] = region
        return region

    def _rights(self, access: Access) -> tuple[int, ...]:
        """List the rights of each registration of some memory: ours first, peers' last.

        FI_SEND is not among it: on the fabric `efa` it opens memory for peers to read.
        """
        ours = fi.FI_WRITE
        theirs = fi.FI_REMOTE_WRITE if access.target else 0
        if self._software:
            # Reads end in buffers of the NIC's own. An empty row with an immediate may come under
            # a key that is to be read: what may be written the owner says by its leases.
            if access.readable:
                theirs |= fi.FI_REMOTE_READ | fi.FI_REMOTE_WRITE
            return (ours | theirs,)
        ours |= fi.FI_READ if access.sink else 0
        if access.readable:
            return ours, theirs | fi.FI_REMOTE_READ
        return (ours | theirs,)

    def remove(self, key: DomainKey) -> Region | None:
        """Forget a key; the registration ends when the last row that reads from it is back."""
        region = self.by_lkey.pop(key.lkey, None)
        if region is None:
            return None
        self.by_rkey.pop(key.rkey, None)
        self.readable.pop(key.rkey, None)
        if region.open:
            self.dying.append(region)
        else:
            region.close()
        return region

    def cut(self, key: DomainKey, reads_at: Callable[[Region], list[bool]]) -> None:
        """End at once what peers of a device may read, and what reads of ours write.

        The device ends such rows by itself. `reads_at` is the one of Slots.
        """
        region = self.by_lkey.get(key.lkey)
        if region is None:
            return
        if len(region.handles) > 1:
            region.handles[-1].close()
        if region.open and all(reads_at(region)):
            region.close()

    def bury(self) -> None:
        """End the registrations whose last row has come back."""
        for region in self.dying:
            if not region.open:
                region.close()
        self.dying[:] = [region for region in self.dying if region.open]

    def range_of(self, rkey: int) -> tuple[int, int]:
        """The range that a key opens to peers: (base, nbytes); nbytes 0 = none.

        (1, 0) = peers may only read there: an empty row with an immediate may still come (C9).
        """
        region = self.by_rkey.get(rkey)
        if region is None:
            return (1, 0) if rkey in self.readable else (0, 0)
        return region.key.base, region.memory.nbytes

    def readable_range(self, rkey: int) -> tuple[int, int]:
        """The range that peers may read under a key; nbytes 0 = none."""
        region = self.readable.get(rkey)
        return (region.key.base, region.memory.nbytes) if region else (0, 0)

    def close(self) -> None:
        """End all registrations."""
        for region in (*self.by_lkey.values(), *self.dying):
            region.close()
        self.by_lkey.clear()
        self.by_rkey.clear()
        self.readable.clear()
        self.dying.clear()


def mr_attr(
    memory: Memory, rights: int, *, dmabuf: tuple[int, int] | None = None
) -> tuple[Structure, int, object]:
    """Describe memory for fi_mr_regattr.

    Args:
        memory: host memory, or "cuda:N".
        rights: FI_WRITE and so on; no more than is done, since FI_RECV or FI_READ asks the NIC for
            write access, which memory that is mapped read-only refuses.
        dmabuf: (fd, offset) of memory that is exported so.

    Returns:
        The attributes, the flags, and what must live until the call has returned.
    """
    attr = fi.C.fi_mr_attr(iov_count=1, access=rights)
    kind, _, index = memory.device.partition(":")
    if kind == "cuda":
        attr.iface = fi.FI_HMEM_CUDA
        attr.device.cuda = int(index)
    if dmabuf is not None:
        fd, offset = dmabuf
        # The address by which peers call the first byte is base_addr + offset (fi_mr(3)).
        place = fi.C.fi_mr_dmabuf(fd, offset, memory.nbytes, memory.ptr - offset)
        attr.mr_iov = addressof(place)  # since 1.20 this place is a union with `dmabuf`
        return attr, fi.FI_MR_DMABUF, place
    where = fi.C.iovec(memory.ptr, memory.nbytes)
    attr.mr_iov = addressof(where)
    return attr, 0, where


def _check_mapped(memory: Memory, nic: str) -> None:
    """Raise FabricError unless every page of a raw range is mapped in this process."""
    # int mincore(void *addr, size_t length, unsigned char *vec);
    mincore = libc().mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    page = mmap.PAGESIZE
    step = 1 << 30
    pages = ctypes.create_string_buffer(step // page)
    start, end = memory.ptr // page * page, memory.ptr + memory.nbytes
    for at in range(start, end, step):
        if mincore(at, min(step, end - at), pages) != 0:
            raise FabricError(
                f"{nic}: {memory.nbytes} bytes at {memory.ptr:#x} are not all mapped in this "
                f"process: {os.strerror(ctypes.get_errno())}",
                code=Status.LOCAL_KEY.name,
            )
