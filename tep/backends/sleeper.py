"""One descriptor to sleep on: the queue's own and a timer's, joined, so that deadlines wake us too.

A dead peer makes no event. The timer is what lets the engine sleep without a time limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from typing import Final

from tep.ffi.check import check

__all__ = ["Sleeper"]

_CLOCK_MONOTONIC: Final = 1
_TFD_FLAGS: Final = 0o4000 | 0o2000000  # TFD_NONBLOCK | TFD_CLOEXEC


# <bits/types/struct_itimerspec.h>, glibc; struct timespec written out:
#   struct itimerspec {
#       struct timespec it_interval;
#       struct timespec it_value;
#   };
class itimerspec(ctypes.Structure):
    """When a timer goes off."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Sleeper:
    """A descriptor that is readable when the queue's is, or when the timer has gone off.

    Args:
        queue_fd: the queue's.

    Attributes:
        fd: what to sleep on.
    """

    def __init__(self, queue_fd: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        # int timerfd_create(int clockid, int flags);
        create = libc.timerfd_create
        create.argtypes, create.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
        # int timerfd_settime(int fd, int flags, const struct itimerspec *new_value,
        #                     struct itimerspec *old_value);
        self._settime = libc.timerfd_settime
        self._settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._settime.restype = ctypes.c_int
        self._timer = check(create(_CLOCK_MONOTONIC, _TFD_FLAGS), "timerfd_create")
        self._set_s = 0.0
        self._epoll = select.epoll()
        self._epoll.register(self._timer, select.EPOLLIN)
        self._queue_fd = queue_fd
        self._epoll.register(queue_fd, select.EPOLLIN)
        self.fd = self._epoll.fileno()

    def set_timer(self, after_s: float) -> None:
        """Become readable every `after_s` seconds from now on; 0 = never. Cheap when unchanged."""
        if after_s == self._set_s:
            return
        self._set_s = after_s
        whole = int(after_s)
        part = int((after_s - whole) * 1e9)
        spec = itimerspec(whole, part, whole, part)
        check(self._settime(self._timer, 0, ctypes.byref(spec), None), "timerfd_settime")

    def quiet(self) -> None:
        """Take note that the timer went off, so that it is not readable any more."""
        if self._set_s:
            with contextlib.suppress(BlockingIOError):
                os.read(self._timer, 8)

    def forget_queue(self) -> None:
        """Be woken by the timer only: a queue that is lost may stay readable for ever."""
        self._epoll.unregister(self._queue_fd)

    def close(self) -> None:
        """Close the timer and the joint descriptor; the queue's belongs to libfabric."""
        self._epoll.close()
        os.close(self._timer)
