"""The base of every wait: bounded times, signals deferred to a step's end, callbacks' exceptions.

No thread is started here and no engine is known.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = [
    "Interrupts", "Process", "escaped", "note_escape", "raise_escaped", "system_s", "thread_id",
    "wake_main",
]  # fmt: skip

SYSTEM_S: Final = 86400.0
"""The longest time that is given to a system call, seconds; poll() overflows at 24.8 days."""

# The C functions, which `signal` wraps to return enums: 0.5 us a call instead of 5 (measured).
_plain = importlib.import_module("_signal")
_signal: Final[Callable[[int, object], object]] = _plain.signal
_getsignal: Final[Callable[[int], object]] = _plain.getsignal

_ALL: Final = tuple(sorted(int(number) for number in signal.valid_signals()))
_SIGINT, _SIGALRM, _SIGTERM = int(signal.SIGINT), int(signal.SIGALRM), int(signal.SIGTERM)

thread_id: Final = threading.get_ident
"""The current thread's id, never 0."""

escaped: Final[deque[BaseException]] = deque()
"""Exceptions of callbacks that the main thread must raise, oldest first."""

wake_main: Final[dict[object, Callable[[], object]]] = {}
"""Functions that wake each `await` of the main thread, so that it looks at `escaped`."""


def system_s(left_s: float) -> float:
    """Return a time that poll, select and locks accept: nan and negative ones 0, at most a day.

    The caller must look at the clock after its sleep, and sleep again if it was cut short.
    """
    return min(left_s, SYSTEM_S) if left_s > 0 else 0.0


def note_escape(error: BaseException) -> None:
    """Keep a callback's exception for the main thread's next wait if it must reach it.

    SystemExit is one. The engine reports an Exception; GeneratorExit and CancelledError concern
    the callback only.
    """
    import asyncio

    if isinstance(error, Exception | GeneratorExit | asyncio.CancelledError):
        return
    escaped.append(error)
    for wake in tuple(wake_main.values()):
        wake()


def raise_escaped() -> None:
    """Raise the oldest exception that callbacks left for the main thread, on that thread."""
    if escaped and thread_id() == Process.main:
        raise escaped.popleft()


class Process:
    """The facts of this process that drivers cache, since each costs a system call.

    `main` is the id of its main thread. A driver keeps the number of `forks` of the process that
    made it.
    """

    forks = 0
    main = threading.main_thread().ident

    @classmethod
    def note_fork(cls) -> None:
        """Update `Process` in the child of a fork."""
        cls.forks += 1
        cls.main = threading.main_thread().ident
        escaped.clear()


os.register_at_fork(after_in_child=Process.note_fork)


class _Handlers:
    """The signal handlers of this process: (signal, handler) of each written in Python is `caught`.

    An object and not class attributes: a change of these would invalidate the interpreter's
    caches of the class, which costs each use 0.5 us.

    Attributes:
        known: handlers of SIGINT, SIGALRM and SIGTERM when all signals were last looked at.
        replaced: True while they are replaced; a nested `Interrupts` does nothing.
    """

    __slots__ = ("caught", "known", "replaced")

    def __init__(self) -> None:
        self.known: tuple[object, ...] = ()
        self.caught: tuple[tuple[int, object], ...] = ()
        self.replaced = False

    def look(self, known: tuple[object, ...]) -> None:
        """Look at every signal."""
        handlers = [(number, _getsignal(number)) for number in _ALL]
        self.caught = tuple(pair for pair in handlers if callable(pair[1]))
        self.known = known


_handlers: Final = _Handlers()


class Interrupts:
    """Defer signal handlers until the step is over, while the main thread steps an engine.

    A handler that raises in the middle of a step (Ctrl-C, an alarm) would leave it unknown which
    rows are posted. So a handler that only records the signal replaces each handler written in
    Python; at the end they are put back, and the recorded signals are raised again.

    SIGINT, SIGALRM and SIGTERM are looked at each time; the others when a handler of these three
    changes and when an engine is opened, since each look takes 0.05 us.

    One object may be entered repeatedly, but not within itself. `bell` is an eventfd that wakes the
    stepping thread from its sleep; `came` says whether a signal came.
    """

    __slots__ = ("_bell", "_noted", "_swapped", "came")

    def __init__(self, bell: int = -1) -> None:
        self.came = self._swapped = False
        self._bell = bell

    @staticmethod
    def forget() -> None:
        """Look at every signal again."""
        _handlers.known = ()

    def __enter__(self) -> Interrupts:
        handlers, self.came = _handlers, False
        if handlers.replaced or thread_id() != Process.main:
            return self
        known = _getsignal(_SIGINT), _getsignal(_SIGALRM), _getsignal(_SIGTERM)
        if known != handlers.known:
            handlers.look(known)
        if caught := handlers.caught:
            note = self._note
            try:
                self._swapped = handlers.replaced = True
                for number, _ in caught:
                    _signal(number, note)
            except BaseException:  # by a handler that is not replaced yet
                self.__exit__()
                raise
        return self

    def _note(self, number: int, _: object) -> None:
        self._noted: list[int] = [*self._noted, number] if self.came else [number]
        self.came = True
        if self._bell >= 0:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._bell, 1)

    def __exit__(self, *_: object) -> None:
        if self._swapped:
            try:  # putting a handler back twice does no harm
                for number, handler in _handlers.caught:
                    _signal(number, handler)
                _handlers.replaced = self._swapped = False
            finally:  # a handler raises as soon as it is back
                if self._swapped:
                    self.__exit__()
                elif self.came:
                    self._raise_again()

    def _raise_again(self) -> None:
        noted = self._noted
        try:
            while noted:
                number = noted.pop()
                if number not in noted:  # once each, as the kernel does
                    signal.raise_signal(number)
        finally:
            if noted:
                self._raise_again()
