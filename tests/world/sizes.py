"""Constants of the engine that decide between branches, made small for a run.

A batch of 32 MiB is posted in pieces, more than 24 completions are counted by columns, sums of
4,096 values are pruned: runs of a few rows would never get there. So a scenario draws these
constants. Data, its drawing, and a `with` that sets it; one run at a time in a process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tep.base.checks import check_int, shown
from tep.base.errors import BadRequest

Sizes = tuple[tuple[str, int], ...]
"""(module.NAME, value) pairs."""

SIZES: Final[dict[str, tuple[int, ...]]] = {
    "core.posting.LONG_BYTES": (40,),
    "core.posting.PIECE_BYTES": (16, 64),
    "core.posting._PIECES_MAX": (1000,),  # no least part of a transfer, where it has few rows
    "core.posting.SHARED_ROWS": (1,),
    "core.posting._LOOKED_AT": (1,),
    "core.posting._TEMPLATES_MAX": (1,),
    "core.imm._SCALAR_MAX": (1, 3),
    "core.imm._LINES_FEW": (1,),
    "core.outbox.WINDOW_MAX": (8,),
    "core.path._WIDE_MAX": (1,),
    "core.group._CURSORS_MAX": (1,),
    "core.path.PRUNE_AT": (2, 5),
    "core.path._CELLS_MAX": (2,),
    "core.path._ROWS_MAX": (2,),
    "core.handles._TOOK_MAX": (1,),
    "engine.worker._SCALAR_MAX": (1, 3),
    "sim.chaos_target.CONTROL_BYTES": (340,),  # few values fit a control message
    "core.posting.SEEN_BYTES": (8,),
    "core.group.SHARED_ROWS": (1,),
}
"""Small values of each constant; its own value is meant where a scenario does not name it."""


_PIECES: Final = tuple(SIZES)[:3]
"""These are small together, since only so a few rows are posted in pieces."""


def draw_sizes(below: Callable[[int, int], int]) -> Sizes:
    """Draw which constants are small, each in one of two runs.

    Args:
        below: (number of the draw, n) -> 0 .. n - 1.
    """
    found = []
    for number, (name, values) in enumerate(SIZES.items()):
        leader = 0 if name in _PIECES else number
        if below(2 * leader, 2):
            found.append((name, values[below(2 * number + 1, len(values))]))
    return tuple(found)


def check_sizes(sizes: object) -> Sizes:
    """Plain pairs of known names and numbers. Raises BadRequest."""
    pairs = sizes if isinstance(sizes, tuple) else (sizes,)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and pair[0] in SIZES):
            raise BadRequest(f"sizes: {shown(pair)} is no (name, number) with a name of SIZES")
    return tuple((name, check_int(f"sizes: {name}", value, 1)) for name, value in pairs)


def in_pieces(sizes: Sizes) -> bool:
    """True if batches of a few rows are posted in pieces, and shared with idle NICs."""
    return any(name in _PIECES for name, _ in sizes)


@contextmanager
def set_sizes(sizes: Sizes) -> Iterator[None]:
    """Have constants at these values."""
    before = []
    try:
        for name, value in sizes:
            module, _, constant = name.rpartition(".")
            room = importlib.import_module(f"tep.{module}")
            before.append((room, constant, getattr(room, constant)))
            setattr(room, constant, value)
        yield
    finally:
        for room, constant, value in reversed(before):
            setattr(room, constant, value)
