"""The handles that `begin` and `expect` return, the events of `poll`, and the times to wait."""

from __future__ import annotations

import asyncio
import contextlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

from tep import UsageError, WaitTimeout
from tep.apps.kvcache.blocks.cache import KvBlocks

__all__ = ["KvEvent", "KvRequest", "KvSide", "Patience"]

State = Literal["open", "done", "failed", "free"]


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


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One change of a request.

    Attributes:
        request: its name.
        state: "done": it is complete, and its blocks are the engine's again. "failed": it will not
            be complete, and rows may still be under way. "free": after "failed", none is any more.
        reason: why it failed, else "".
        failed_blocks: for each group, the blocks that are not known to be complete; final once the
            state is "free".
        handle: what `begin` or `expect` returned.
    """

    request: str
    state: State
    reason: str
    failed_blocks: tuple[tuple[int, ...], ...]
    handle: KvRequest


class KvRequest:
    """One request under way, on one rank.

    Attributes:
        request: its name.
        blocks: for each group, its blocks here.
        state: "open", then "done", or "failed" and then "free".
        reason: why it failed.
        failed_blocks: see KvEvent.
    """

    def __init__(
        self, side: KvSide, request: str, blocks: list[list[int]], timeout_s: float | None
    ) -> None:
        self.request, self.blocks = request, blocks
        limit_s = side.patience.request_s if timeout_s is None else timeout_s
        self.deadline_s = side.now_s() + limit_s
        self.state: State = "open"
        self.reason = ""
        self.failed_blocks: tuple[tuple[int, ...], ...] = ()
        self._side = side
        self._wakes: set[Callable[[], object]] = set()

    @property
    def finished(self) -> bool:
        """Whether its blocks are the engine's again."""
        return self.state in {"done", "free"}

    @property
    def ok(self) -> bool:
        """Whether it is complete."""
        return self.state == "done"

    def _to(self, state: State, reason: str = "") -> None:
        self.state = state
        self.reason = self.reason or reason
        if state == "failed" and not self.failed_blocks:
            self.failed_blocks = tuple(tuple(group) for group in self.blocks)
        event = KvEvent(self.request, state, self.reason, self.failed_blocks, self)
        self._side.events.append(event)
        for wake in tuple(self._wakes):
            wake()

    def on_change(self, callback: Callable[[], object]) -> None:
        """Have callback() called after each change of the state, by the thread that makes it."""
        self._wakes.add(callback)

    async def wait_async(self, timeout_s: float = math.inf) -> Self:
        """Return once it is done or free; `ok` says which.

        Its deadline bounds the time to "failed". From there to "free" it waits for the other side,
        however long that takes. Meanwhile it does what `poll` does for time-outs and repeats.

        Raises:
            WaitTimeout: neither within `timeout_s`; the request goes on.
        """
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(changed.set)

        self._wakes.add(wake)
        try:
            async with asyncio.timeout(None if timeout_s == math.inf else timeout_s):
                while not self.finished:
                    changed.clear()
                    pause_s = self._side.turn()
                    if not self.finished:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(pause_s):
                                await changed.wait()
        except TimeoutError:
            if not self.finished:  # else it has ended in the same turn of the loop
                reason = f"{self.request} is {self.state} after {timeout_s} s: {self.reason}"
                raise WaitTimeout(reason) from None
        finally:
            self._wakes.discard(wake)
        return self


class KvSide(ABC):
    """The base of senders and receivers."""

    def __init__(self, blocks: KvBlocks, patience: Patience) -> None:
        self.blocks, self.patience = blocks, patience
        self.events: deque[KvEvent] = deque()

    def poll(self) -> list[KvEvent]:
        """Return the events since the last call; also repeat messages and look at deadlines.

        Call it now and then, as from an engine's loop, unless requests are awaited.
        """
        self.turn()
        with self.blocks.lock:
            found = list(self.events)
            self.events.clear()
        return found

    @abstractmethod
    def turn(self) -> float:
        """Repeat what was not answered, and end what is late; return when to look again."""

    def now_s(self) -> float:
        """The time of the engine's driver."""
        return self.blocks.engine.driver.now_s()
