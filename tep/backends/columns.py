"""Columns of a batch (one int for every row, or one value a row), looked at in part."""

from __future__ import annotations

from tep.backends.base import Column

__all__ = ["at", "part"]


def part(column: Column, start: int, stop: int) -> Column:
    """Rows start..stop of a column."""
    return column if isinstance(column, int) else column[start:stop]


def at(column: Column, row: int) -> int:
    """One row's value."""
    return column if isinstance(column, int) else int(column[row])
