"""The work of Python code as a count that no other process changes. Not a test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["Opcodes"]


class Opcodes:
    """Bytecodes that this thread runs while it is entered.

    A search in C counts where what it compares has its comparison in Python. From Python 3.12 on
    the first call of a function that is traced does not count: do a little of the work before.
    """

    def __init__(self) -> None:
        self.count = 0

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., object]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self._trace

    def __enter__(self) -> Opcodes:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
