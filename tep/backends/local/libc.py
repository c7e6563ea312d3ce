"""The three calls of libc that Python does not offer, by ctypes; nothing else of C lives here.

Each raises OSError with errno's own words, or returns what its page says.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable
from typing import Final

__all__ = [
    "IOV_MAX",
    "allow_any_tracer",
    "errno_of",
    "read_remote",
    "row_writer",
    "why",
    "write_remote",
]

IOV_MAX: Final = 1024
"""Entries that one call takes: UIO_MAXIOV of <linux/uio.h>, quoted."""

_PR_SET_PTRACER: Final = 0x59616D61  # <linux/prctl.h>
_PR_SET_PTRACER_ANY: Final = 2**64 - 1  # (unsigned long) -1


def _absent(*_: int) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


def _load(name: str) -> Callable[..., int]:
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):  # another libc or system: news at use, not at import
        return _absent
    # ssize_t process_vm_writev(pid_t pid,
    #     const struct iovec *local_iov, unsigned long liovcnt,
    #     const struct iovec *remote_iov, unsigned long riovcnt,
    #     unsigned long flags);                          <sys/uio.h>, glibc 2.15; readv alike
    number, pointer = ctypes.c_ulong, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
    function.restype = ctypes.c_ssize_t
    return function  # type: ignore[no-any-return]  # typed by the two lines above


# Each returns the bytes moved, or -1 and errno. The interpreter's lock is free meanwhile.
write_remote: Final = _load("process_vm_writev")
read_remote: Final = _load("process_vm_readv")
errno_of: Final = ctypes.get_errno


def row_writer(here: int, there: int) -> Callable[[int], int]:
    """Make write_remote for one row: of a pid, from and to the iovecs at these addresses.

    The argtypes of a function are applied anew in each call, 0.6 us of 2.2 (measured).
    Here each argument brings its type along, made once; a plain int is a C int, which pid_t is.
    """
    try:
        function = ctypes.CDLL(None, use_errno=True)["process_vm_writev"]
    except (AttributeError, OSError):
        return _absent
    function.restype = ctypes.c_ssize_t
    number, pointer = ctypes.c_ulong.from_param, ctypes.c_void_p.from_param
    typed = pointer(here), number(1), pointer(there), number(1), number(0)
    return lambda pid: function(pid, *typed)


def allow_any_tracer() -> bool:
    """Let other processes of this user write here although Yama restricts them; False: refused.

    Yama's scope 1 (Ubuntu's default) lets a process reach only its children, unless the target
    has named it; of peers that come and go, only "any" can be named.
    """
    # int prctl(int option, ... /* unsigned long arg2, arg3, arg4, arg5 */);      <sys/prctl.h>
    with contextlib.suppress(AttributeError, OSError):
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
        prctl.restype = ctypes.c_int
        return bool(prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0) == 0)
    return False


def why(code: int) -> str:
    """An errno in words."""
    return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"
