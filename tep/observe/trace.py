"""A trace of engines as spans and marks, with its Perfetto file, its picture and its table.

The one writer of traces, for hardware, for tcp and `local`, and for simulated runs. Values only:
tracing.py records engines, and `tep.sim.row_log` the rows of a simulated fabric.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from tep.base.distribution import need
from tep.base.errors import UsageError
from tep.observe.shown import Shown

__all__ = ["Mark", "Span", "Trace", "lanes_of"]

SpanKind = Literal["transfer", "wait", "batch", "step"]
"""Transfer or message; expectation; rows of one transfer on one NIC; step of the engine."""

_US: Final = 1e6
_MS: Final = 1e3
_LONG_S: Final = 0.01
"""A longer run is drawn in ms."""

_COLOURS: Final = {"transfer": "#4c78a8", "wait": "#bab0ac", "batch": "#54a24b", "step": "#f58518"}


class Span(NamedTuple):
    """An event with a duration.

    Attributes:
        kind: see SpanKind.
        engine: its engine, or node.
        track: its row in the picture: "transfers", "expectations", "NIC 0 (name)", "worker".
        name: its label in the picture.
        start_s, stop_s: seconds of the driver's clock.
        args: more about it. A batch: `nic`, `to`, `rows`, `bytes`. A transfer: `state`. A step:
            `cpu_us`, where the clock is real.
    """

    kind: SpanKind
    engine: str
    track: str
    name: str
    start_s: float
    stop_s: float
    args: dict[str, Any]


class Mark(NamedTuple):
    """An event without a duration.

    Attributes:
        kind: "imm", with `imm` and `count` in args; "fault"; or a fabric's own: "place".
        engine, track, name, args: same as for a span.
        at_s: its time.
    """

    kind: str
    engine: str
    track: str
    name: str
    at_s: float
    args: dict[str, Any]


class Trace(Shown):
    """A recording. `engine.trace()` and `cluster.trace()` make one; it records until stop().

    Use it as a context manager, and read it afterwards.

    Attributes:
        spans, marks: the events; spans in the order of their ends.
        missed: number of spans and marks that were dropped, because `events_max` were there.
        clock: "host": the monotonic clock, which all processes of a host share; or "simulated".
        events_max: limit of spans and marks that are kept.
        stops: functions that end the recording; stop() calls each once.
    """

    def __init__(self, clock: Literal["host", "simulated"], events_max: int = 1 << 62) -> None:
        self.clock: Final = clock
        self.events_max: Final = events_max
        self.spans: list[Span] = []
        self.marks: list[Mark] = []
        self.missed = 0
        self.stops: list[Any] = []

    def add(self, span: Span) -> None:
        """Keep a span, if there is room."""
        if len(self.spans) + len(self.marks) < self.events_max:
            self.spans.append(span)
        else:
            self.missed += 1

    def mark(self, mark: Mark) -> None:
        """Keep a mark, if there is room."""
        if len(self.spans) + len(self.marks) < self.events_max:
            self.marks.append(mark)
        else:
            self.missed += 1

    def stop(self) -> Trace:
        """End the recording; return the trace. Idempotent."""
        while self.stops:
            self.stops.pop()()
        return self

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        faults = sum(mark.kind == "fault" for mark in self.marks)
        return (
            f"Trace({len(self.engines)} engines in {self.clock} time: {len(self.spans)} spans, "
            f"{len(self.marks)} marks, {faults} of them faults; {self.missed} more were not kept)"
        )

    def __getstate__(self) -> dict[str, Any]:
        if self.stops:
            raise UsageError(
                "a Trace cannot be pickled or copied while it records; stop() it first"
            )
        return self.__dict__

    @property
    def engines(self) -> list[str]:
        """The names of the engines, sorted."""
        return sorted({s.engine for s in self.spans} | {m.engine for m in self.marks})

    @property
    def start_s(self) -> float:
        """The start of the first event; 0 if there is none."""
        times = [span.start_s for span in self.spans] + [mark.at_s for mark in self.marks]
        return min(times, default=0.0)

    def of(self, kind: SpanKind, engine: str | None = None) -> list[Span]:
        """Return the spans of one kind, of one engine or of all, in the order of their starts."""
        found = [s for s in self.spans if s.kind == kind and engine in {None, s.engine}]
        return sorted(found, key=lambda span: span.start_s)

    # ------------------------------------------------------------------ the file

    def events(self) -> list[dict[str, Any]]:
        """Return events in the trace event format: a process an engine, a thread a lane of a track.

        Batches and steps are complete events, drawn in lanes so that none overlaps another;
        transfers and expectations are pairs of begin and end; immediates and faults are instants.
        Times are microseconds since the first event.
        """
        return list(self._events())

    def write(self, path: str | PathLike[str]) -> None:
        """Write the trace event format, JSON, for ui.perfetto.dev and chrome://tracing."""
        document = {
            "displayTimeUnit": "ns",
            "otherData": {"clock": self.clock, "start_s": self.start_s, "missed": self.missed},
            "traceEvents": self.events(),
        }
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    def _events(self) -> Iterator[dict[str, Any]]:
        zero = self.start_s
        tracks: defaultdict[tuple[str, str], list[Span | Mark]] = defaultdict(list)
        for span in self.spans:
            tracks[span.engine, span.track].append(span)
        for mark in self.marks:
            tracks[mark.engine, mark.track].append(mark)
        pids = {name: pid for pid, name in enumerate(self.engines, 1)}
        for name, pid in pids.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        # Perfetto takes thread 0 for the process's main thread, and drops overlapping events.
        tid, number = len(pids) + 1, 0
        for (engine, track), found in sorted(tracks.items()):
            pid = pids[engine]
            pairs = [s for s in found if isinstance(s, Span) and s.kind in {"transfer", "wait"}]
            bars = [s for s in found if isinstance(s, Span) and s.kind in {"batch", "step"}]
            bars.sort(key=lambda span: (span.start_s, span.stop_s))
            lanes = lanes_of(bars)
            for lane in range(max(lanes, default=0) + 1):
                name = f"{track}, lane {lane}" if lane else track
                yield {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": pid,
                    "tid": tid + lane,
                    "args": {"name": name},
                }
            for span, lane in zip(bars, lanes, strict=True):
                start = _us(span.start_s - zero)
                length = round(_us(span.stop_s - zero) - start, 3)
                head = {"name": span.name, "cat": span.kind, "pid": pid, "tid": tid + lane}
                yield {**head, "ph": "X", "ts": start, "dur": length, "args": span.args}
            for span in pairs:
                number += 1
                head = {"name": span.name, "cat": span.kind, "pid": pid, "tid": tid}
                head["id2"] = {"local": hex(number)}  # of this process: Perfetto draws it there
                yield {**head, "ph": "b", "ts": _us(span.start_s - zero), "args": span.args}
                yield {**head, "ph": "e", "ts": _us(span.stop_s - zero)}
            for each in found:
                if isinstance(each, Mark):
                    scope = "p" if each.kind == "fault" else "t"
                    head = {"name": each.name, "cat": each.kind, "pid": pid, "tid": tid}
                    at = _us(each.at_s - zero)
                    yield {**head, "ph": "i", "s": scope, "ts": at, "args": each.args}
            tid += max(lanes, default=0) + 1

    # ------------------------------------------------------------------ for people

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each NIC: what it carried, and how long it was busy.

        "gap" is the longest time between two batches. pandas.DataFrame(trace.spans) has each span.
        """
        found = []
        tracks: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in self.of("batch"):
            tracks[span.engine, span.track].append(span)
        for (engine, track), mine in sorted(tracks.items()):
            row: dict[str, Any] = {"engine": engine, "NIC": track, "batches": len(mine)}
            row |= {name: sum(span.args[name] for span in mine) for name in ("rows", "bytes")}
            busy_s, gap_s = _busy_and_gap(mine)
            found.append(row | {"busy, us": busy_s * _US, "gap, us": gap_s * _US})
        return found

    def plot(self, axes: Any = None) -> Any:  # type: ignore[override]  # it has its own axes
        """Draw a timeline with matplotlib (extra `plot`): a row a lane, faults as lines.

        Args:
            axes: matplotlib's, where to draw; None: a figure of its own.

        Returns:
            The axes.
        """
        if axes is None:
            pyplot = need("matplotlib.pyplot", "plot", "a timeline")
            axes = pyplot.figure(figsize=(10, 4), layout="constrained").add_subplot()
        zero, labels = self.start_s, list[str]()
        stop_s = max((span.stop_s for span in self.spans), default=zero)
        unit, scale = ("ms", _MS) if stop_s - zero > _LONG_S else ("us", _US)
        tracks = sorted({(s.engine, s.track) for s in self.spans if s.kind != "wait"})
        for engine, track in tracks:
            bars = [s for s in self.spans if (s.engine, s.track) == (engine, track)]
            bars.sort(key=lambda span: (span.start_s, span.stop_s))
            lanes = lanes_of(bars)
            for lane in range(max(lanes) + 1):
                mine = [s for s, at in zip(bars, lanes, strict=True) if at == lane]
                colour = _COLOURS[mine[0].kind]
                # The edge keeps a bar that is thinner than a pixel from vanishing.
                axes.broken_barh(
                    [((s.start_s - zero) * scale, (s.stop_s - s.start_s) * scale) for s in mine],
                    (len(labels) - 0.4, 0.8),
                    facecolors=colour,
                    edgecolors=colour,
                    linewidth=0.4,
                    alpha=0.8,
                )
                labels.append(f"{engine} {track}" if lane == 0 else "")
        for mark in self.marks:
            if mark.kind == "fault":
                axes.axvline((mark.at_s - zero) * scale, color="#e45756", linewidth=1)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_xlabel(f"{unit} of {self.clock} time")
        return axes


def lanes_of(spans: Sequence[Span]) -> list[int]:
    """Assign a lane to each span, of spans sorted by start, so that no lane has two at a time."""
    free: list[tuple[float, int]] = []  # lanes in use, by the time at which they are free again
    idle: list[int] = []
    found = []
    for span in spans:
        while free and free[0][0] <= span.start_s:
            heapq.heappush(idle, heapq.heappop(free)[1])
        lane = heapq.heappop(idle) if idle else len(free)
        heapq.heappush(free, (span.stop_s, lane))
        found.append(lane)
    return found


def _busy_and_gap(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the time covered by a span, and the longest between two, of spans sorted by start."""
    busy, gap, end = 0.0, 0.0, spans[0].start_s
    for span in spans:
        gap = max(gap, span.start_s - end)
        busy += max(0.0, span.stop_s - max(span.start_s, end))
        end = max(end, span.stop_s)
    return busy, gap


def _us(seconds: float) -> float:
    """Convert to microseconds, rounded to a nanosecond: Perfetto's resolution.

    Perfetto would round finer times, start and length separately, and drop spans that then overlap
    by a nanosecond.
    """
    return round(seconds * _US, 3)
