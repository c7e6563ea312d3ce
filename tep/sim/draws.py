"""All that the simulator draws: the numbers of its streams, and the draws of a chaos fabric.

Rule: a stream's number is never given to another purpose, or seeds on record mean other runs.
A draw has a label (stream, entity, index), and is a hash of the seed, or tame. `Chaos.kept` lists
the labels whose draws a run keeps; all others come out tame: no pause, no delay, no short post, one
fragment a row. So a run can be reduced to the few draws that matter, and each of them has a name.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import count
from typing import Final

from tep.base.hashing import draw, stream_key

__all__ = ["Draw", "Draws", "Label", "Recorder", "Stream", "describe"]


class Stream(IntEnum):
    """The purpose of a draw; numbers 100 and up are the knobs of `Chaos.draw`."""

    TIES = 1  # order of events at one instant
    STEP = 2  # when a kicked engine steps
    POST = 3  # how many rows a post takes
    ROW = 4  # cuts and acknowledgement of one row
    FRAGMENT = 5  # delay of one fragment
    MESSAGE = 6
    ERROR = 7  # when a failure is reported
    TIMING = 8  # jitter of the timing fabric
    FAULTS = 9
    SCENARIO = 10
    KNOBS = 100  # one stream a knob: KNOBS + the knob's number


Label = tuple[int, int, int]
Draw = Callable[..., int]
"""(entity, index=0) -> 64 bits."""

_LOW: Final = 2**32 - 1  # `below` gives 0, and every mask of low bits misses
_TAME: Final = {
    (Stream.STEP, 0): _LOW,
    (Stream.POST, 0): 2**64 - 1,  # all rows are taken
    (Stream.ROW, 0): 0xF00 << 32,  # one fragment; no message is lost
    (Stream.FRAGMENT, 0): _LOW,
    (Stream.MESSAGE, 0): _LOW,
}
_STREAMS: Final = (
    *(Stream.STEP, Stream.POST, Stream.ROW),
    *(Stream.FRAGMENT, Stream.MESSAGE, Stream.ERROR),
)


class Recorder(Container[Label]):
    """Keeps all draws, and notes their labels in the order in which they are first made."""

    def __init__(self) -> None:
        self.labels: dict[Label, None] = {}

    def __contains__(self, label: object) -> bool:
        assert isinstance(label, tuple)
        self.labels[label] = None
        return True


@dataclass(frozen=True, slots=True)
class Draws:
    """The streams of one run; `steps(entity)` is `step` of one entity after the other."""

    step: Draw
    post: Draw
    row: Draw
    fragment: Draw
    message: Draw
    error: Draw
    steps: Callable[[int], Callable[[], int]]

    @classmethod
    def of(cls, seed: int, kept: Container[Label] | None) -> Draws:
        """Make the streams of a seed; with `kept`, all draws are tame but those."""
        step, *others = (_stream(seed, stream, kept) for stream in _STREAMS)
        post, row, fragment, message, error = others

        def steps(first: int) -> Callable[[], int]:
            return map(step, count(first)).__next__  # no generator: see `tep.base.hashing.draws`

        return cls(step, post, row, fragment, message, error, steps)


def _stream(seed: int, stream: Stream, kept: Container[Label] | None) -> Draw:
    key = stream_key(seed, stream)
    if kept is None:
        return partial(draw, key)
    some = kept

    def choose(entity: int, index: int = 0) -> int:
        if (int(stream), entity, index) in some:
            return draw(key, entity, index)
        return _TAME.get((stream, index), _LOW if stream in _BITS else 0)

    return choose


_BITS: Final = (Stream.FRAGMENT, Stream.MESSAGE)
"""Streams whose every index is read by masks."""


def describe(labels: Iterable[Label], names: Iterable[str]) -> list[str]:
    """Say what each kept draw decides, one line a stream and place.

    Args:
        labels: of one run.
        names: of its nodes, in order.
    """
    nodes = list(names)
    found: dict[str, list[int]] = {}
    for stream, entity, _ in labels:
        place, number = entity >> 32, entity & 0xFFFFFFFF
        node, nic = (place, None) if stream == Stream.STEP else divmod(place, 64)
        where = nodes[node - 1] if 0 < node <= len(nodes) else "all"  # datagrams have no place
        where += "" if nic is None or node == 0 else f"/{nic}"
        numbers = found.setdefault(f"{where}: {_WHAT[Stream(stream)]}", [])
        if number not in numbers:
            numbers.append(number)
    return [f"{what} {', '.join(map(str, numbers))}" for what, numbers in found.items()]


_WHAT: Final = {
    Stream.STEP: "when the worker takes step",
    Stream.POST: "how many rows are taken by post",
    Stream.ROW: "cuts, loss and acknowledgement of row",
    Stream.FRAGMENT: "flight of the bytes of row",
    Stream.MESSAGE: "flight or loss of message",
    Stream.ERROR: "time of the error of row",
}
