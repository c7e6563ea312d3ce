"""Columns of a batch (one int for every row, or one value a row), looked at in part."""

from __future__ import annotations

import numpy as np

from tep.backends.base import Column, Row, WriteBatch

__all__ = ["at", "most", "part", "row_of", "spread"]


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
