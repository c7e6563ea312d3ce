"""How a work request's id says what its completion is about: kind, object, row. Pure.

On an error a completion's opcode is undefined (Soft-RoCE reports a SEND for a failed write), so the
id is all there is to go by, together with the queue pair's number.

    bits 60..63  kind
    bits 16..59  object: set of loose rows, slot, or connection; 0 for runs
    bits  0..15  row within the run or set
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "DATAGRAM_IN",
    "DATAGRAM_OUT",
    "IMM",
    "KIND_SHIFT",
    "LOOSE",
    "MARKER",
    "MESSAGE_IN",
    "MESSAGE_OUT",
    "NUMBER_MASK",
    "NUMBER_SHIFT",
    "ROW_MASK",
    "RUN",
    "TAIL",
    "number_of",
    "tag",
]

KIND_SHIFT: Final = 60
NUMBER_SHIFT: Final = 16
NUMBER_MASK: Final = (1 << 44) - 1
ROW_MASK: Final = 0xFFFF

RUN: Final = 1  # row of the oldest run on its queue pair
TAIL: Final = 2  # stands behind rows of a run that asked for no completion of their own
LOOSE: Final = 9  # row of a loose set; the object is the set
MARKER: Final = 3  # last request of a failed queue pair; the object is the connection
IMM: Final = 4  # receive without a buffer, used up by an immediate
MESSAGE_OUT: Final = 5
MESSAGE_IN: Final = 6
DATAGRAM_OUT: Final = 7
DATAGRAM_IN: Final = 8


def tag(kind: int, number: int = 0) -> int:
    """The id of row 0 of an object; add the row."""
    return kind << KIND_SHIFT | number << NUMBER_SHIFT


def number_of(wr_id: int) -> int:
    """The object that an id names."""
    return wr_id >> NUMBER_SHIFT & NUMBER_MASK
