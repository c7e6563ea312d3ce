"""Fakes of a driver's machine and handles, without an engine. Not a test."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["FakeMachine", "Handle"]


class Handle:
    """Something to wait for, settled by the test: at once, or in two steps as an engine does."""

    def __init__(self) -> None:
        self.finished = False
        self.callbacks: list[Callable[[Handle], object]] = []

    def add_done_callback(self, callback: Callable[[Handle], object]) -> None:
        # In this order, since another thread may settle it meanwhile: told twice, but not never.
        self.callbacks.append(callback)
        if self.finished:
            callback(self)

    def remove_done_callback(self, callback: Callable[[Handle], object]) -> None:
        if callback in self.callbacks:
            self.callbacks.remove(callback)

    def settle(self) -> None:
        self.finished = True
        self.call_back()

    def call_back(self) -> None:
        for callback in tuple(self.callbacks):
            callback(self)


class FakeMachine:
    """Says what its attributes say; a test's own subclass has step() and deliver()."""

    def __init__(self) -> None:
        self.todo: list[Callable[[], object]] = []
        self.armed = threading.Event()
        self.arms = True
        self.fds: list[int] = []
        self.is_busy = self.is_watching = False
        self.crashed_by: BaseException | None = None

    def busy(self) -> bool:
        return self.is_busy

    engaged = busy

    def watching(self) -> bool:
        return self.is_watching

    def must_poll(self) -> bool:
        return False

    def due_s(self) -> float | None:
        return None

    def wakeup_fds(self) -> list[int]:
        return self.fds

    def arm(self) -> bool:
        if self.arms:
            self.armed.set()
        return self.arms

    def crash(self, error: BaseException) -> None:
        self.crashed_by = error
