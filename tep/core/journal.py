"""What an engine says of faults, and of how they were mended: a line each, to its log.

A trace and the metrics listen here as well. The logger is `tep.` and the name of the backend.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

__all__ = ["Journal"]

_EACH_MAX: Final = 8
"""So many of one kind are logged one by one; then the 16th, the 32nd, and so on."""


class Journal:
    """The events of one engine that somebody should know of.

    Attributes:
        counts: how often each kind has happened.
        listeners: functions that are called with the kind and the text of each.
    """

    def __init__(self, name: str = "?", backend: str = "none") -> None:
        self.counts: Counter[str] = Counter()
        self.listeners: list[Callable[[str, str], object]] = []
        self._name = name
        self._log = logging.getLogger(f"tep.{backend}")

    def decided(self, summary: str, why: Callable[[], str]) -> None:
        """Log a decision: the summary at INFO, its reasons at DEBUG, which are made only then."""
        self._log.info("%s: %s", self._name, summary)
        if self._log.isEnabledFor(logging.DEBUG):
            self._log.debug("%s: %s", self._name, why())

    def say(
        self, kind: str, text: str, level: int = logging.WARNING, error: BaseException | None = None
    ) -> None:
        """Log one event, if its kind is not too frequent, and tell the listeners of it.

        Args:
            kind: of a few: nic_down, peer_lost, peer_back, failover, fence, reopen, burnt.
            text: one line.
            level: of the log; `logging.INFO` for what mends something.
            error: what was raised, to be logged with its traceback.
        """
        self.counts[kind] += 1
        times = self.counts[kind]
        if times <= _EACH_MAX or times & (times - 1) == 0:
            many = f" ({times} times {kind} so far)" if times > _EACH_MAX else ""
            self._log.log(level, "%s: %s%s", self._name, text, many, exc_info=error)
        for listener in self.listeners:
            listener(kind, text)
