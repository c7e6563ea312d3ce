"""A signal whose handler raises at a chosen place of tep. Not a test."""

from __future__ import annotations

import gc
import opcode
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

CHECKS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}
"""After these instructions the interpreter calls signal handlers, and nowhere else."""


_FINALIZER = weakref.finalize.__call__.__code__


class Alarm(Exception):
    """The exception of the handler."""


@contextmanager
def alarmed() -> Iterator[None]:
    """Have SIGALRM raise Alarm; put the former handler back, and leave nothing traced."""

    def handle(*_: object) -> None:
        raise Alarm

    before, traced = signal.signal(signal.SIGALRM, handle), sys.gettrace()
    try:
        yield
        assert signal.getsignal(signal.SIGALRM) is handle, "a handler was not put back"
    finally:
        sys.settrace(traced)
        signal.signal(signal.SIGALRM, before)


class Injector:
    """Raises SIGALRM at the k-th place in tep where a handler could be called.

    Attributes:
        places: how many were passed.
        fired: whether the signal was raised.
    """

    def __init__(self, k: int) -> None:
        self.places = 0
        self.fired = False
        self._k = k
        self._before: dict[FrameType, str] = {}

    def run(self, action: Callable[[], object]) -> bool:
        """Run an action; return True if the handler's exception came out of it.

        Without the garbage collector, which would run at random and end the engines of earlier
        rounds.
        """
        gc.disable()
        sys.settrace(self._enter)
        try:
            action()
        except Alarm:
            return True
        finally:
            sys.settrace(None)
            gc.enable()
            self._before.clear()  # frames that were left by an exception, with all they hold
        return False

    def _enter(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if "/tep/" not in frame.f_code.co_filename or "/tests/" in frame.f_code.co_filename:
            return None
        # Python drops what is raised in a finaliser, and CPython 3.11 does not survive it there if
        # it comes out of a trace function: it may call freed memory afterwards.
        caller = frame.f_back
        while caller is not None:
            if caller.f_code is _FINALIZER:
                return None
            caller = caller.f_back
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._look

    def _look(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "opcode":
            before = self._before.get(frame)
            self._before[frame] = opcode.opname[frame.f_code.co_code[frame.f_lasti]]
            if before in CHECKS:
                self.places += 1
                if self.places == self._k:
                    self.fired = True
                    signal.raise_signal(signal.SIGALRM)
        elif event == "return":
            self._before.pop(frame, None)
        return self._look
