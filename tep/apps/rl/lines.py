"""Sharing out a task's bytes: its rows laid end to end in one line, which is cut in stretches.

Pure. Each sender gets one stretch, in proportion to its speed. So all are balanced, and a receiver
hears from at most two senders more than its share of the line asks for.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tep.apps.rl.routes import ROW, Rows
from tep.base.units import KiB, MiB

__all__ = ["PIECE_BYTES_MIN", "ROW_BYTES_MAX", "coalesce", "deal_out"]

PIECE_BYTES_MIN: Final = 64 * KiB
"""Less than this is not shared by two senders. Source: a NIC is near its line rate from 64 KiB on
(arXiv 2510.27656, Table 2, paged writes; quoted)."""

ROW_BYTES_MAX: Final = 256 * MiB
"""Longer rows are cut: below the 1 GiB that one row of the engine may have, and fine enough for
turns."""

_PAGE: Final = 4096

Floats = npt.NDArray[np.float64]


def coalesce(rows: Rows) -> Rows:
    """Sort rows by receiver and source, and join those that adjoin at both ends."""
    rows = rows[np.lexsort((rows["src"], rows["receiver"]))]
    before, behind = rows[:-1], rows[1:]
    joins = (
        (before["receiver"] == behind["receiver"])
        & (before["src"] + before["nbytes"] == behind["src"])
        & (before["dst"] + before["nbytes"] == behind["dst"])
    )
    heads = np.flatnonzero(np.concatenate(([True], ~joins)))
    found = rows[heads].copy()
    found["nbytes"] = np.add.reduceat(rows["nbytes"], heads)
    return found


def deal_out(line: Rows, loads: Floats, speeds: Floats) -> tuple[Rows, Floats]:
    """Cut a line of rows in stretches, one for each sender that is wanted.

    Args:
        line: rows in order; their senders are not set.
        loads: bytes that each sender has been given before.
        speeds: relative speed of each sender.

    Returns:
        The rows, cut where stretches end, with `sender` an index into `loads`; and the bytes given
        to each.
    """
    ends = np.cumsum(line["nbytes"])
    total = int(ends[-1])
    wanted = min(len(loads), max(1, total // PIECE_BYTES_MIN))
    chosen = np.argsort((loads + total / len(loads)) / speeds, kind="stable")[:wanted]
    # In rank order neighbours on the line are neighbours in rank, as they were in the task before.
    chosen = np.sort(chosen) if wanted == len(loads) else chosen
    shares = np.cumsum(speeds[chosen])
    cuts = _snapped(shares[:-1] / shares[-1] * total, ends, total / wanted)
    rows = _split(line, ends, np.concatenate((cuts, _long_rows(line, ends))))
    starts = np.cumsum(rows["nbytes"]) - rows["nbytes"]
    rows["sender"] = chosen[np.searchsorted(cuts, starts, side="right")]
    given = np.zeros(len(loads))
    np.add.at(given, rows["sender"], rows["nbytes"])
    return rows, given


def _snapped(cuts: Floats, ends: npt.NDArray[np.int64], mean: float) -> npt.NDArray[np.int64]:
    """Move cuts to a row's end where one is near, else to a page of its row."""
    at = np.searchsorted(ends, cuts)
    at = np.minimum(at, len(ends) - 1)
    starts = np.concatenate(([0], ends[:-1]))
    near_start = cuts - starts[at] < mean / 16
    near_end = ends[at] - cuts < mean / 16
    paged = starts[at] + np.round((cuts - starts[at]) / _PAGE).astype(np.int64) * _PAGE
    moved = np.where(near_end, ends[at], np.where(near_start, starts[at], paged))
    found: npt.NDArray[np.int64] = np.minimum(np.maximum.accumulate(moved), ends[-1])
    return found


def _long_rows(line: Rows, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    long = np.flatnonzero(line["nbytes"] > ROW_BYTES_MAX)
    found = [
        np.arange(ends[k] - line["nbytes"][k] + ROW_BYTES_MAX, ends[k], ROW_BYTES_MAX) for k in long
    ]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _split(line: Rows, ends: npt.NDArray[np.int64], cuts: npt.NDArray[np.int64]) -> Rows:
    """Cut rows at positions of the line."""
    starts = ends - line["nbytes"]
    edges = np.unique(np.concatenate((starts, cuts)))
    edges = edges[edges < ends[-1]]
    origin = np.searchsorted(starts, edges, side="right") - 1
    rows = np.zeros(len(edges), ROW)
    into = edges - starts[origin]
    rows["receiver"] = line["receiver"][origin]
    rows["src"] = line["src"][origin] + into
    rows["dst"] = line["dst"][origin] + into
    rows["nbytes"] = np.diff(np.concatenate((edges, ends[-1:])))
    return rows
