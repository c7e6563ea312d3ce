"""An update as a picture: spans for Perfetto, and bars for matplotlib. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Final, Literal

from tep import Span as TraceSpan
from tep import Trace
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
    "drain": "#dddddd",
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
    """Write a trace for ui.perfetto.dev: a process a sub-mesh, a track a stage."""
    trace = Trace("host")
    for span in spans:
        # Writes of several tasks overlap: they are pairs of begin and end, as transfers are.
        kind: Literal["transfer", "step"] = "transfer" if span.stage == "write" else "step"
        times = span.start_ms / 1e3, span.stop_ms / 1e3
        trace.add(TraceSpan(kind, span.mesh, span.stage, span.task, *times, {}))
    trace.write(path)


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
