"""The process's signal handlers, kept where libfabric would replace them.

Debian's build takes six signals over as soon as it is loaded (PSM). The shm provider takes four;
EFA opens it where it may reach peers of this host by shared memory. Nothing here knows a NIC.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tep.backends.ffi.libc import libc

__all__ = ["keep_signals"]

_SIGACTION_BYTES: Final = 512  # more than any Linux libc's struct sigaction
_SIGNALS: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGBUS,
    signal.SIGSEGV,
    signal.SIGILL,
    signal.SIGABRT,
)


@contextmanager
def keep_signals() -> Iterator[None]:
    """Put the process's signal handlers back after a call that may have replaced some.

    By sigaction() and not by the signal module: that works in the main thread only, and does not
    see handlers that C code installed, such as faulthandler's.
    """
    # int sigaction(int sig, const struct sigaction *act, struct sigaction *oact);
    sigaction = libc().sigaction
    sigaction.argtypes, sigaction.restype = (
        (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        ctypes.c_int,
    )
    before = {sig: ctypes.create_string_buffer(_SIGACTION_BYTES) for sig in _SIGNALS}
    for sig, action in before.items():
        sigaction(sig, None, action)
    try:
        yield
    finally:
        for sig, action in before.items():
            sigaction(sig, action, None)
