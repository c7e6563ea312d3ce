"""What wakes one local NIC: its epoll set, who is told of which event, and a timer."""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable

from tep.backends.ffi.libc import Timer

__all__ = ["Watches"]


class Watches:
    """The descriptors of one NIC, in one epoll set, and who is told of their events."""

    def __init__(self) -> None:
        self._timer = Timer()
        try:
            self.epoll = select.epoll()
        except OSError:
            self._timer.close()
            raise
        self._poll = self.epoll.poll
        self._told: dict[int, Callable[[], None]] = {}
        self._wake_s = math.inf
        self.add(self._timer.fd, self._woken)

    def add(self, fd: int, told: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """Watch a descriptor."""
        self.epoll.register(fd, events)
        self._told[fd] = told

    def add_process(self, pid: int, ended: Callable[[], None]) -> int:
        """Watch a process; return a descriptor for the caller to drop() and to close, or -1.

        -1: it cannot be named here, or there is no descriptor left; its socket will have to tell.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return -1
        try:
            self.add(pidfd, ended)
        except OSError:
            os.close(pidfd)
            return -1
        return pidfd

    def tell(self, fd: int, told: Callable[[], None]) -> None:
        """Tell somebody else of a descriptor's events."""
        self._told[fd] = told

    def wake_in(self, delay_s: float) -> None:
        """Have the owner polled in so many seconds, or earlier."""
        at_s = time.monotonic() + delay_s
        if at_s < self._wake_s:
            self._wake_s = at_s
            self._timer.set(delay_s)

    def _woken(self) -> None:
        self._wake_s = math.inf
        self._timer.clear()

    def close(self) -> None:
        """Close the set, not what it watches."""
        self.epoll.close()
        self._timer.close()

    def add_bell(self, fd: int) -> None:
        """Watch an eventfd that nobody reads: each ring is one edge, and taken back by look()."""
        self.epoll.register(fd, select.EPOLLIN | select.EPOLLET)

    def drop(self, fd: int) -> None:
        """Watch it no more; before it is closed."""
        if self._told.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def look(self) -> bool:
        """Tell everybody whose descriptor has news; whether there was any."""
        found = self._poll(0)
        for fd, _ in found:
            told = self._told.get(fd)  # None: a bell, or dropped on account of another just now
            if told is not None:
                told()
        return bool(found)
