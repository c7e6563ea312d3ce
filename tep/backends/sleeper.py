"""One descriptor to sleep on: the queue's own and a timer's, joined, so that deadlines wake us too.

A dead peer makes no event. The timer is what lets the engine sleep without a time limit.
"""

from __future__ import annotations

import select

from tep.backends.ffi.libc import Timer

__all__ = ["Sleeper"]


class Sleeper:
    """A descriptor that is readable when the queue's is, or when the timer has gone off.

    Args:
        queue_fd: the queue's.

    Attributes:
        fd: what to sleep on.
    """

    def __init__(self, queue_fd: int) -> None:
        self._timer = Timer()
        self._set_s = 0.0
        self._epoll = select.epoll()
        self._epoll.register(self._timer.fd, select.EPOLLIN)
        self._queue_fd = queue_fd
        self._epoll.register(queue_fd, select.EPOLLIN)
        self.fd = self._epoll.fileno()

    def set_timer(self, after_s: float) -> None:
        """Become readable every `after_s` seconds from now on; 0 = never. Cheap when unchanged."""
        if after_s == self._set_s:
            return
        self._set_s = after_s
        self._timer.set(after_s or None, again=True)

    def quiet(self) -> None:
        """Take note that the timer went off, so that it is not readable any more."""
        if self._set_s:
            self._timer.clear()

    def forget_queue(self) -> None:
        """Be woken by the timer only: a queue that is lost may stay readable for ever."""
        self._epoll.unregister(self._queue_fd)

    def close(self) -> None:
        """Close the timer and the joint descriptor; the queue's belongs to libfabric."""
        self._epoll.close()
        self._timer.close()
