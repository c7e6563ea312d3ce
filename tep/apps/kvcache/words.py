"""A watched word that its writer tells of: for simulated hosts, where nobody has to poll it.

An engine looks at its watched words every half microsecond of simulated time as long as there are
any, which is right where a GPU writes them and too dear for hours of a thousand engines.
"""

from __future__ import annotations

from collections.abc import Callable

from tep import TransferEngine

__all__ = ["ToldWord", "told_word"]


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


def told_word(engine: TransferEngine, callback: Callable[[int, int], object]) -> ToldWord:  # noqa: ARG001  # Watch's form
    """Allocate one; a `Watch` for Prefiller."""
    return ToldWord(callback)
