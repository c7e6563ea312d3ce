"""Columns of a batch, looked at in part, and rows copied between regions of host memory.

A column is one int for every row, or one value a row. Nothing here knows a queue, a peer or a
completion.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import Column, Row, WriteBatch
from tep.memory.source import Memory

__all__ = [
    "HostRegion", "Offsets", "at", "bounds", "copy_rows", "most", "offsets", "part", "row_of",
    "spread",
]  # fmt: skip


def part(column: Column, start: int, stop: int) -> Column:
    """Rows start..stop of a column."""
    return column if isinstance(column, int) else column[start:stop]


def at(column: Column, row: int) -> int:
    """One row's value."""
    return column if isinstance(column, int) else int(column[row])


def row_of(batch: WriteBatch, index: int) -> Row:
    """Spell out one row; its columns are ints most often."""
    peer, src, dst, rkey = batch.peer, batch.src, batch.dst, batch.rkey
    nbytes, imm = batch.nbytes, batch.imm
    return Row(
        peer if isinstance(peer, int) else int(peer[index]),
        src if isinstance(src, int) else int(src[index]),
        batch.lkey,
        dst if isinstance(dst, int) else int(dst[index]),
        rkey if isinstance(rkey, int) else int(rkey[index]),
        nbytes if isinstance(nbytes, int) else int(nbytes[index]),
        imm if imm is None or isinstance(imm, int) else int(imm[index]),
    )


def most(column: Column) -> int:
    """The largest value."""
    return column if isinstance(column, int) else int(np.maximum.reduce(column))


def spread(column: Column, n: int) -> list[int]:
    """The values of n rows, spelled out."""
    return [column] * n if isinstance(column, int) else column.tolist()


Offsets = int | npt.NDArray[np.intp]
"""Byte offsets in a region: one for every row, or one a row."""

# Below this length a gather by numpy beats one memmove a row. Measured, CPU ns a row, random pages:
# 64 B 27 against 437, 4 KiB 795 against 1,077, 16 KiB 2,997 against 2,370.
_GATHER_BYTES_MAX: Final = 8192
_CHUNK_BYTES: Final = 256 * 1024  # the gathered copy of a chunk should stay in the L2 cache


class HostRegion:
    """Registered host memory.

    Attributes:
        memory: the record; it keeps the bytes mapped.
        view: the bytes, uint8[nbytes].
        raw: the same; a slice of it costs a third of one of `view`.
        origin: virtual address of the first byte.
        nbytes: length.
        base: what the region's first byte is called by peers: origin, or 0.
        writable: whether peers may write here.
    """

    __slots__ = ("base", "memory", "nbytes", "origin", "raw", "view", "writable")

    def __init__(self, memory: Memory, base: int, *, writable: bool) -> None:
        self.memory = memory
        self.view = memory.bytes_view()
        self.raw = memoryview(self.view)  # type: ignore[arg-type]  # numpy has the buffer protocol
        self.origin = memory.ptr
        self.nbytes = memory.nbytes
        self.base = base
        self.writable = writable

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether offset .. offset + nbytes lies inside."""
        return 0 <= offset <= self.nbytes - nbytes

    def covers(self, column: Column, nbytes: Column, base: int) -> bool:
        """Whether all rows lie inside, whose first byte is called `base`."""
        first, end = bounds(column, nbytes)
        return base <= first and end <= base + self.nbytes


def copy_rows(
    source: HostRegion, src: Offsets, target: HostRegion, dst: Offsets, nbytes: Column, nrows: int
) -> None:
    """Copy `nrows` rows between offsets that were checked."""
    if (
        isinstance(src, int)
        or isinstance(dst, int)
        or not isinstance(nbytes, int)
        or nbytes > _GATHER_BYTES_MAX
    ):
        sources = _addresses(src, source.origin, nrows)
        targets = _addresses(dst, target.origin, nrows)
        deque(map(ctypes.memmove, targets, sources, spread(nbytes, nrows)), 0)
        return
    if nbytes == 0:
        return
    # Row k of such a window is the bytes from offset k on: rows may start anywhere.
    reads = np.ndarray((source.nbytes - nbytes + 1, nbytes), np.uint8, source.view, 0, (1, 1))
    writes = np.ndarray((target.nbytes - nbytes + 1, nbytes), np.uint8, target.view, 0, (1, 1))
    step = max(1, _CHUNK_BYTES // nbytes)
    for start in range(0, nrows, step):
        writes[dst[start : start + step]] = reads[src[start : start + step]]


def offsets(column: Column, origin: int) -> Offsets:
    """Turn addresses into offsets behind `origin`."""
    if isinstance(column, int):
        return column - origin
    return (column - np.uint64(origin)).astype(np.intp)


def bounds(column: Column, nbytes: Column) -> tuple[int, int]:
    """First byte and end of rows; as Python ints, which do not wrap."""
    if isinstance(column, int):
        return column, column + most(nbytes)
    if isinstance(nbytes, int):
        return int(column.min()), int(column.max()) + nbytes
    ends = column.astype(np.uint64) + nbytes.astype(np.uint64)
    wrapped = bool((ends < column).any())
    return int(column.min()), 2**64 if wrapped else int(ends.max())


def _addresses(offsets: Offsets, origin: int, nrows: int) -> list[int]:
    if isinstance(offsets, int):
        return [origin + offsets] * nrows
    return [origin + offset for offset in offsets.tolist()]
