"""Times to wait, and who is alive: beats to every peer that is watched, and silence noticed.

Silence proves nothing: a peer that is silent may still write. What follows from it (cancel, retry
elsewhere) is the caller's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tep import NetAddr, UsageError

__all__ = ["Patience", "Pulse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Times to wait, in seconds of the engine's or the event loop's clock.

    Attributes:
        beat_s: between two beats to a peer.
        silent_s: without a word from a peer it counts as silent; several times beat_s.
        cancel_s: for an answer about a transfer, before it is asked for again.
        request_s: for one attempt at a request.
        linger_s: how long a write whose path died may still land, after its error: packets can be
            held up on a link that flaps. The default is a guess, on the safe side; pages wait.
    """

    beat_s: float = 0.2
    silent_s: float = 2.0
    cancel_s: float = 0.5
    request_s: float = 120.0
    linger_s: float = 5.0

    def __post_init__(self) -> None:
        """Refuse times that contradict each other."""
        times = (self.beat_s, self.silent_s, self.cancel_s, self.request_s)
        if min(times) <= 0 or self.linger_s < 0 or self.silent_s <= self.beat_s:
            raise UsageError(f"{self}: times are positive, and silent_s is longer than beat_s")


class Pulse:
    """A turn every beat_s: beats to watched peers, and a call for each that falls silent.

    Args:
        patience: how often, and how long.
        beat: called with a watched peer: send it a beat.
        on_silent: called once with a peer that has been silent for too long; it is not watched any
            more then.
        turn: called once a turn; turns go on while it returns True or somebody is watched.
    """

    def __init__(
        self,
        patience: Patience,
        *,
        beat: Callable[[NetAddr], object],
        on_silent: Callable[[NetAddr], object],
        turn: Callable[[], bool],
    ) -> None:
        self._patience = patience
        self._beat, self._on_silent, self._each = beat, on_silent, turn
        self._heard: dict[NetAddr, float] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def watch(self, peer: NetAddr) -> None:
        """Beat to a peer from now on, and expect its beats. Idempotent."""
        if peer not in self._heard:
            self._heard[peer] = self._loop.time()
        self.start()

    def start(self) -> None:
        """Begin to turn. Idempotent."""
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._patience.beat_s, self._turn)

    def leave(self, peer: NetAddr) -> None:
        """Watch a peer no more. Idempotent."""
        self._heard.pop(peer, None)

    def heard(self, peer: NetAddr) -> None:
        """Something came from a peer."""
        if peer in self._heard:
            self._heard[peer] = self._loop.time()

    def close(self) -> None:
        """Turn no more. Idempotent."""
        self._closed = True
        self._heard.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        for peer, heard_s in list(self._heard.items()):
            if now_s - heard_s > self._patience.silent_s:
                self._heard.pop(peer, None)
                self._on_silent(peer)
            else:
                self._beat(peer)
        if self._each() or self._heard:
            self.start()
