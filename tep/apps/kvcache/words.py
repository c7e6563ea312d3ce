"""Watched words that their writer tells of: for simulated hosts, where nobody has to poll them.

An engine looks at its watched words every half microsecond of simulated time as long as there are
any, which is right where a GPU writes them and too dear for hours of a thousand engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tep import TransferEngine
from tep.apps.kvcache.job import Watch

__all__ = ["LateWord", "ToldWord", "late_words", "told_word"]


class ToldWord:
    """One word; `store` calls back at once, with the old value and the new."""

    __slots__ = ("_callback", "_value")

    def __init__(self, callback: Callable[[int, int], object]) -> None:
        self._callback: Callable[[int, int], object] | None = callback
        self._value = 0

    def store(self, value: int) -> None:
        """Write the word."""
        old, self._value = self._value, value
        if self._callback is not None and value != old:
            self._callback(old, value)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._callback = None


def told_word(
    engine: TransferEngine,  # noqa: ARG001  # Watch's form
    callback: Callable[[int, int], object],
) -> ToldWord:
    """Allocate one; a `Watch` for Prefiller."""
    return ToldWord(callback)


class LateWord:
    """One word that is looked at a while after it was written: values in between are missed.

    Args:
        callback: called with the old value and the new.
        delay_s: gives the time from a write to the look.
    """

    __slots__ = ("_callback", "_delay_s", "_looking", "_seen", "_value")

    def __init__(
        self, callback: Callable[[int, int], object], delay_s: Callable[[], float]
    ) -> None:
        self._callback: Callable[[int, int], object] | None = callback
        self._delay_s = delay_s
        self._looking = False
        self._seen = self._value = 0

    def store(self, value: int) -> None:
        """Write the word."""
        self._value = value
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(self._delay_s(), self._look)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._callback = None

    def _look(self) -> None:
        self._looking = False
        old, self._seen = self._seen, self._value
        if self._callback is not None:
            self._callback(old, self._value)


def late_words(delay_s: Callable[[], float]) -> Watch:
    """Make a `Watch` of late words."""

    def watch(_: TransferEngine, callback: Callable[[int, int], object]) -> LateWord:
        return LateWord(callback, delay_s)

    return watch
