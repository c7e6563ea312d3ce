"""The interpreter's switch interval, lowered while an engine works or somebody waits for it.

A thread that needs the interpreter while another one computes in Python sleeps for
`sys.getswitchinterval()`, 5 ms by default, and for the kernel's timer slack of 50 us before it may
ask for it. Each transfer needs it several times. Both are lowered here, and only here.

Rule: each change looks again afterwards at who holds a pace, so whichever thread comes last leaves
the right interval. There is no lock, since a signal handler may come between any two lines.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from pathlib import Path
from typing import Final

__all__ = ["Pace", "wake_on_time"]

_SLACK_NS: Final = 1000
_HOLDERS: Final[dict[int, float]] = {}
"""The interval that each holder wants, seconds, by its id(): nothing is kept alive."""

_OURS: Final[set[float]] = set()  # every interval that may have been set here
_USUAL: Final = [sys.getswitchinterval()]  # the program's own
_get, _set = sys.getswitchinterval, sys.setswitchinterval
_here: Final = threading.local()


class Pace:
    """One reason to have a short switch interval: an engine that works, or a wait.

    Args:
        interval_s: the interval while held, seconds; a shorter one of the program is left alone.
            Infinite: hold() changes nothing.

    Attributes:
        held: whether it is held.
    """

    __slots__ = ("_interval_s", "held")

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.held = False
        if interval_s < math.inf:
            _OURS.add(1e-6 * int(1e6 * interval_s))  # the interpreter cuts it to microseconds

    def hold(self) -> None:
        """Lower the interval until let_go(). Idempotent."""
        if not self.held and self._interval_s < math.inf:
            self.held = True
            _HOLDERS[id(self)] = self._interval_s
            now = _get()
            if now > self._interval_s:
                if now not in _OURS:
                    _USUAL[0] = now
                _set(self._interval_s)
                if not _HOLDERS:
                    _put_back()

    def let_go(self) -> None:
        """Put the interval back, unless others hold it, or the program has set another one."""
        self.held = False
        _HOLDERS.pop(id(self), None)
        if not _HOLDERS:
            _put_back()

    def __del__(self) -> None:
        if self.held:
            self.let_go()


def _put_back() -> None:
    if _get() in _OURS:
        _set(_USUAL[0])
        if wanted := tuple(_HOLDERS.values()):  # somebody holds it since
            _set(min(_USUAL[0], *wanted))


def wake_on_time() -> None:
    """Let this thread's short sleeps end when they should. Linux has the timer slack by thread."""
    if not getattr(_here, "done", False):
        _here.done = True
        with contextlib.suppress(OSError):  # another system, or no /proc: it is a courtesy
            Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text(str(_SLACK_NS))


def _forked() -> None:
    """In a forked child nobody holds a pace: the parent's threads are not here."""
    _HOLDERS.clear()
    _put_back()


os.register_at_fork(after_in_child=_forked)
