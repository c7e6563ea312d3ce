"""Checksums of rows in registered memory, on the host or on a GPU: did what was sent arrive?"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tep.base.checks import check_int
from tep.base.errors import BadRequest, ClosedError
from tep.cuda.memory import flush
from tep.host.cuda import device_number, driver
from tep.memory.source import Memory

if TYPE_CHECKING:
    from tep.core.regions import MrHandle

__all__ = ["checksum"]


def checksum(
    mr: MrHandle, offsets: npt.ArrayLike, nbytes: int, *, places: npt.ArrayLike | None = None
) -> int:
    """Add the CRC-32 of rows of a region, modulo 2^32; the order of the rows does not matter.

    Both ends of a transfer compute it: the source when the rows were written, the target when they
    are counted. Each CRC begins with the row's place, so rows that were swapped differ as well. A
    GPU's memory is copied to the host row by row, behind a flush, which takes time.

    Args:
        mr: the region, which no kernel writes meanwhile.
        offsets: of the rows, in bytes from its start.
        nbytes: length of each row.
        places: offset of each row at the target; None: `offsets`, as at the target itself.

    Raises:
        BadRequest: a row beyond the region, or not a place for each row.
        ClosedError: the region was given back.
        FabricError: the GPU's memory cannot be copied, or what NICs wrote there not be flushed.
    """
    if mr.closed:
        raise ClosedError(f"checksum: {mr} was given back")
    starts = np.asarray(offsets, np.int64).ravel()
    begins = starts if places is None else np.asarray(places, np.int64).ravel()
    nbytes = check_int("checksum: nbytes", nbytes, 1, mr.memory.nbytes)
    if len(starts) != len(begins):
        raise BadRequest(f"checksum: {len(begins)} places for {len(starts)} rows")
    if len(starts) and not 0 <= starts.min() <= starts.max() <= mr.memory.nbytes - nbytes:
        raise BadRequest(
            f"checksum: rows of {nbytes} bytes from {starts.min()} to {starts.max()} do not lie in "
            f"a region of {mr.memory.nbytes} bytes"
        )
    rows = zip(_rows(mr.memory, starts.tolist(), nbytes), begins.tolist(), strict=True)
    total = 0
    for row, place in rows:
        total += zlib.crc32(row, place & 0xFFFFFFFF)
    return total & 0xFFFFFFFF


def _rows(
    memory: Memory, starts: list[int], nbytes: int
) -> Iterator[memoryview | ctypes.Array[ctypes.c_char]]:
    """Yield each row, as a view that holds until the next one."""
    if memory.kind == "cpu":
        whole = memory.bytes_view().data
        yield from (whole[start : start + nbytes] for start in starts)
        return
    index, cuda = device_number(memory.device), driver()
    flush(index)
    row = ctypes.create_string_buffer(nbytes)
    with cuda.on(index):
        for start in starts:
            cuda.call("cuMemcpyDtoH", ctypes.addressof(row), memory.ptr + start, nbytes)
            yield row
