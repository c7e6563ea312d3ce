"""The C library by ctypes, opened once, and its timer, which Python offers only from 3.13 on."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from typing import Any

from tep.waiting import system_s

__all__ = ["Timer", "libc"]


@functools.cache
def libc() -> Any:
    """The C library of this process, with errno; a CDLL for each use would be a class for each."""
    return ctypes.CDLL(None, use_errno=True)


class Timer:
    """A timerfd.

    Attributes:
        fd: readable once the time has come, until clear().

    Raises:
        OSError: no descriptor is left.
    """

    def __init__(self) -> None:
        # int timerfd_create(int clockid, int flags);
        # int timerfd_settime(int fd, int flags, const struct itimerspec *new_value,
        #                     struct itimerspec *old_value);             <sys/timerfd.h>
        # struct itimerspec { struct timespec it_interval, it_value; };
        self._set = libc().timerfd_settime
        self._set.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self.fd = int(libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self.fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"timerfd_create: {os.strerror(code)}")

    def set(self, delay_s: float | None, *, again: bool = False) -> None:
        """Become readable after `delay_s`, and each time it has passed `again`; None = never.

        More than a day counts as a day: whoever is woken looks at the clock and sets it again.
        """
        whole = rest_ns = 0
        if delay_s is not None:
            whole, rest_ns = divmod(max(1, int(system_s(delay_s) * 1e9)), 10**9)
        every = (whole, rest_ns) if again else (0, 0)
        self._set(self.fd, 0, (ctypes.c_long * 4)(*every, whole, rest_ns), None)

    def clear(self) -> None:
        """Be readable no more."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)
