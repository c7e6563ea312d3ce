"""Who is alive: beats to every peer that is watched, and silence noticed.

Silence proves nothing: a peer that is silent may still write. What follows from it (cancel,
quarantine, retry elsewhere) is the caller's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tep import UsageError

__all__ = ["Patience", "Pulse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait, in seconds of the event loop's clock.

    Attributes:
        beat_s: between two beats to a peer.
        silent_s: without a word from a peer it counts as silent; several times beat_s.
        hello_s: for the answer to a Hello, before it is asked again.
        hello_tries: how often it is asked.
        cancel_s: for the answer to a Cancel, before it is asked again.
        request_s: for one attempt at a request, from its dispatch on.
        linger_s: how long a write whose path died may still land, after its error: packets can be
            held up on a link that flaps. The default is a guess, on the safe side; pages wait.
        sends: how often a message is sent whose loss would cost an attempt.
    """

    beat_s: float = 0.2
    silent_s: float = 2.0
    hello_s: float = 1.0
    hello_tries: int = 3
    cancel_s: float = 0.5
    request_s: float = 120.0
    linger_s: float = 5.0
    sends: int = 4

    def __post_init__(self) -> None:
        """Refuse times that contradict each other."""
        times = (self.beat_s, self.silent_s, self.hello_s, self.cancel_s, self.request_s)
        if min(times) <= 0 or self.linger_s < 0 or self.silent_s <= self.beat_s:
            raise UsageError(f"{self}: times are positive, and silent_s is longer than beat_s")
        if min(self.hello_tries, self.sends) < 1:
            raise UsageError(f"{self}: hello_tries and sends are 1 or more")


class Pulse:
    """Beats to watched peers, and a call for each that falls silent.

    Args:
        patience: how often, and how long.
        beat: called with a peer's name: send it a beat.
        on_silent: called once with a peer's name when it has been silent for too long; it is not
            watched any more then.
    """

    def __init__(
        self,
        patience: Patience,
        beat: Callable[[str], object],
        on_silent: Callable[[str], object],
    ) -> None:
        self._patience = patience
        self._beat = beat
        self._on_silent = on_silent
        self._heard: dict[str, float] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def watched(self) -> list[str]:
        """Names of the peers."""
        return list(self._heard)

    def watch(self, peer: str) -> None:
        """Beat to a peer from now on, and expect its beats. Idempotent."""
        if peer not in self._heard:
            self._heard[peer] = self._loop.time()
            self._beat(peer)
        if self._timer is None:
            self._timer = self._loop.call_later(self._patience.beat_s, self._turn)

    def leave(self, peer: str) -> None:
        """Watch a peer no more. Idempotent."""
        self._heard.pop(peer, None)

    def heard(self, peer: str) -> None:
        """Something came from a peer."""
        if peer in self._heard:
            self._heard[peer] = self._loop.time()

    def close(self) -> None:
        """Watch nobody. Idempotent."""
        self._heard.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self._timer = None
        now = self._loop.time()
        for peer, heard_s in list(self._heard.items()):
            if now - heard_s > self._patience.silent_s:
                del self._heard[peer]
                self._on_silent(peer)
            else:
                self._beat(peer)
        if self._heard and self._timer is None:
            self._timer = self._loop.call_later(self._patience.beat_s, self._turn)
