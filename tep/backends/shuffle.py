"""Hashed disorder for backends in one process: what is held comes back later, in no fixed order.

A draw is a hash of (seed, stream, index), so one stream's draws never move another's. Only its
owner's thread may touch what is here. No clock, no `random`; nothing is posted or delivered here.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tep.backends.base import Batch, Completions
from tep.base.hashing import draw, draw_array, stream_key

__all__ = ["Disorder", "Draws", "Entry", "Message", "Shelf"]

T = TypeVar("T")

Entry = tuple[int, int, int, int, int, int, int] | Completions
"""One completion in the order of COMPLETION's fields, or an array of them."""

_TURNS_MAX: Final = 3  # polls that a held thing waits at the most
_PIECES_MAX: Final = 6  # runs that one post or one counted completion is broken into


class Message(NamedTuple):
    """A message on its way out."""

    peer: int
    payload: bytes
    ctx: int


class Draws:
    """A stream of 64-bit draws: hash(seed, stream, 0), hash(seed, stream, 1), ...

    Args:
        seed: of the run; any integer.
        stream: name of this stream; equal names with equal seeds draw equal numbers.
    """

    __slots__ = ("_index", "_key")

    def __init__(self, seed: int, stream: str) -> None:
        self._key = stream_key(seed, zlib.crc32(stream.encode()))
        self._index = 0

    def one(self) -> int:
        """Draw one number, 0 to 2**64 - 1."""
        self._index += 1
        return draw(self._key, self._index)

    def below(self, bound: int) -> int:
        """Draw a number 0 to bound - 1."""
        return self.one() % bound

    def order(self, n: int) -> npt.NDArray[np.intp]:
        """Draw a permutation of 0 .. n - 1."""
        steps = np.arange(self._index + 1, self._index + 1 + n, dtype=np.uint64)
        self._index += n
        return np.argsort(draw_array(self._key, steps), kind="stable")

    def runs(self, n: int, pieces_max: int) -> itertools.pairwise[tuple[int, int]]:
        """Draw (start, stop) of at most `pieces_max` runs that tile 0 .. n, n >= 1."""
        inner = {1 + self.below(n - 1) for _ in range(self.below(pieces_max))} if n > 1 else set()
        return itertools.pairwise([0, *sorted(inner), n])


class Shelf(Generic[T]):
    """Holds things for a few turns and hands them back in hashed order.

    Args:
        draws: decides how long and in which order.
        turns_max: the longest stay, in calls of due().
    """

    __slots__ = ("_draws", "_held", "_turn", "_turns_max")

    def __init__(self, draws: Draws, turns_max: int) -> None:
        self._draws = draws
        self._turns_max = turns_max
        self._turn = 0
        self._held: list[tuple[int, int, T]] = []

    def __len__(self) -> int:
        return len(self._held)

    def put(self, thing: T) -> None:
        """Hold one thing."""
        draw = self._draws.one()
        self._held.append((self._turn + 1 + draw % self._turns_max, draw, thing))

    def due(self) -> list[T]:
        """Let one turn pass; return what has stayed long enough."""
        self._turn += 1
        ripe = [held for held in self._held if held[0] <= self._turn]
        if ripe:
            self._held = [held for held in self._held if held[0] > self._turn]
            ripe.sort(key=lambda held: held[1])
        return [thing for _, _, thing in ripe]

    def drain(self) -> list[T]:
        """Take everything at once, in the order it came."""
        things = [thing for _, _, thing in self._held]
        self._held.clear()
        return things


class Disorder:
    """What one shuffling domain holds back: rows and messages going out, completions coming in.

    Args:
        seed: of the run.
        who: the domain; two domains of one run draw differently.
    """

    def __init__(self, seed: int, who: str) -> None:
        self.rows: Shelf[tuple[Batch, npt.NDArray[np.intp]]]
        self.rows = Shelf(Draws(seed, f"{who}/rows"), _TURNS_MAX)
        self.messages: Shelf[Message] = Shelf(Draws(seed, f"{who}/messages"), _TURNS_MAX)
        self.entries: Shelf[Entry] = Shelf(Draws(seed, f"{who}/entries"), _TURNS_MAX)
        self._posts = Draws(seed, f"{who}/posts")
        # Its own stream: with threads, how many entries arrive before a post is anyone's guess.
        self._splits = Draws(seed, f"{who}/splits")

    def __len__(self) -> int:
        return len(self.rows) + len(self.messages) + len(self.entries)

    def shorten(self, take: int) -> int:
        """Take all, often; a part, sometimes; nothing, rarely."""
        match self._posts.below(16):
            case 0:
                return 0
            case 1 | 2 | 3:
                return 1 + self._posts.below(take)
            case _:
                return take

    def hold_rows(self, batch: Batch, start: int, take: int) -> None:
        """Hold accepted rows, broken into runs and mixed."""
        order = self._posts.order(take) + start
        for low, high in self._posts.runs(take, _PIECES_MAX):
            self.rows.put((batch, order[low:high]))

    def hold_entry(self, entry: Entry) -> None:
        """Hold a completion; a counted one, or an array, is broken into runs."""
        if not isinstance(entry, tuple):
            mixed = entry[self._splits.order(len(entry))]
            for low, high in self._splits.runs(len(entry), _PIECES_MAX):
                self.entries.put(mixed[low:high])
            return
        kind, status, count, imm, row, ctx, nbytes = entry
        for low, high in self._splits.runs(count, _PIECES_MAX):
            # A run's share of the bytes; a message (count 1) keeps its length.
            moved = nbytes * high // count - nbytes * low // count
            self.entries.put((kind, status, high - low, imm, row, ctx, moved))
