"""An update as a picture: spans for Perfetto, and bars for matplotlib. Nothing is computed here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tep.apps.rl.ports import Span
from tep.apps.rl.predict import MeshSpan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "draw", "from_reports", "write_perfetto"]

COLOURS: Final = {
    "load": "#4c78a8",
    "unshard": "#f58518",
    "gather": "#f58518",
    "fuse": "#b279a2",
    "quantise": "#e45756",
    "make": "#e45756",
    "submit": "#9d755d",
    "other": "#bab0ac",
    "watermark": "#eeeeee",
    "write": "#54a24b",
    "barrier": "#222222",
}
"""A colour for each stage."""


def from_reports(spans: Iterable[Span]) -> list[MeshSpan]:
    """Spans of real workers, from the first one's start on."""
    found = list(spans)
    first_s = min(span.start_s for span in found)
    return [
        MeshSpan(
            f"rank {span.rank}",
            span.stage,
            span.task,
            (span.start_s - first_s) * 1e3,
            (span.stop_s - first_s) * 1e3,
        )
        for span in found
    ]


def write_perfetto(path: str | PathLike[str], spans: Iterable[MeshSpan]) -> None:
    """Write Chrome's trace format for ui.perfetto.dev: a process a sub-mesh, a track a stage."""
    events: list[dict[str, object]] = []
    pids: dict[str, int] = {}
    tids: dict[str, int] = {}
    for span in spans:
        if span.mesh not in pids:
            pids[span.mesh] = len(pids) + 1
            name = {"name": span.mesh}
            events.append({"ph": "M", "name": "process_name", "pid": pids[span.mesh], "args": name})
        # Writes of several tasks overlap; they are on a track of their own, as asynchronous spans.
        tid = tids.setdefault(span.stage, len(tids) + 1)
        head = {"pid": pids[span.mesh], "tid": tid, "cat": span.stage, "name": span.task}
        if span.stage == "write":
            number = len(events)
            events.append({**head, "ph": "b", "id": number, "ts": span.start_ms * 1e3})
            events.append({**head, "ph": "e", "id": number, "ts": span.stop_ms * 1e3})
        else:
            length = (span.stop_ms - span.start_ms) * 1e3
            events.append({**head, "ph": "X", "ts": span.start_ms * 1e3, "dur": length})
    document = {"displayTimeUnit": "ms", "traceEvents": events}
    Path(path).write_text(json.dumps(document), encoding="utf-8")


def draw(axes: Axes, spans: Sequence[MeshSpan], lanes: Sequence[str]) -> None:
    """Draw one sub-mesh's, or rank's, stages as bars: a lane a stage, from top to bottom."""
    for y, lane in enumerate(lanes):
        mine = [span for span in spans if span.stage == lane]
        bars = [(span.start_ms, span.stop_ms - span.start_ms) for span in mine]
        alpha = 0.35 if lane == "write" else 1.0  # those of neighbours overlap
        colour = COLOURS.get(lane, "#888888")
        # The edge keeps a bar that is thinner than a pixel from vanishing.
        axes.broken_barh(
            bars, (y - 0.4, 0.8), facecolors=colour, edgecolors=colour, linewidth=0.4, alpha=alpha
        )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
