"""The calls of libc that Python does not offer, by ctypes; nothing else of C lives here."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import Final

from tep.backends.ffi.libc import libc

__all__ = [
    "IOV_MAX",
    "SHORT",
    "allow_any_tracer",
    "errno_of",
    "map_page",
    "read_remote",
    "row_caller",
    "unmap_page",
    "why",
    "write_remote",
]

IOV_MAX: Final = 1024
"""Entries that one call takes: UIO_MAXIOV of <linux/uio.h>, quoted."""

SHORT: Final = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.ENOSPC,  # of epoll: fs.epoll.max_user_watches
        errno.ETOOMANYREFS,  # descriptors in flight: RLIMIT_NOFILE
    }
)
"""Errors that may pass: a resource of this process or of the system is used up now."""

_PR_SET_PTRACER: Final = 0x59616D61  # <linux/prctl.h>
_PR_SET_PTRACER_ANY: Final = 2**64 - 1  # (unsigned long) -1


def _absent(*_: int) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


def _load(name: str) -> Callable[..., int]:
    try:
        function = getattr(libc(), name)
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


def row_caller(name: str, here: int, there: int) -> Callable[[int], int]:
    """Make a call by this name for a witness and one row: of a pid, with iovecs at these addresses.

    The argtypes of a function are applied anew in each call, 0.6 us of 2.2 (measured).
    Here each argument brings its type along, made once; a plain int is a C int, which pid_t is.
    """
    try:
        function = libc()[name]
    except (AttributeError, OSError):
        return _absent
    function.restype = ctypes.c_ssize_t
    number, pointer = ctypes.c_ulong.from_param, ctypes.c_void_p.from_param
    typed = pointer(here), number(2), pointer(there), number(2), number(0)
    return lambda pid: function(pid, *typed)


def allow_any_tracer() -> bool:
    """Let other processes of this user write here although Yama restricts them; False: refused.

    Yama's scope 1 (Ubuntu's default) lets a process reach only its children, unless the target
    has named it; of peers that come and go, only "any" can be named.
    """
    # int prctl(int option, ... /* unsigned long arg2, arg3, arg4, arg5 */);      <sys/prctl.h>
    with contextlib.suppress(AttributeError, OSError):
        prctl = libc().prctl
        prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
        prctl.restype = ctypes.c_int
        return bool(prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0) == 0)
    return False


def map_page(hint: int) -> int:
    """Map a private page of zeros, at `hint` if that is free, which forked children do not get.

    Raises:
        OSError: the kernel refuses.
    """
    # void *mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset);
    # int madvise(void *addr, size_t length, int advice);                    <sys/mman.h>
    lib, page = libc(), mmap.PAGESIZE
    lib.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    lib.mmap.restype = ctypes.c_void_p
    lib.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    found: int = lib.mmap(hint, page, access, kind, -1, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(errno_of(), why(errno_of()))
    if lib.madvise(found, page, mmap.MADV_DONTFORK):
        code = errno_of()
        unmap_page(found)
        raise OSError(code, why(code))
    return found


def unmap_page(address: int) -> None:
    """Undo map_page()."""
    # int munmap(void *addr, size_t length);                                 <sys/mman.h>
    munmap = libc().munmap
    munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    munmap(address, mmap.PAGESIZE)


def why(code: int) -> str:
    """An errno in words, with the cure where there is one."""
    cure = "; raise the limit of descriptors (ulimit -n)" if code == errno.EMFILE else ""
    return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}{cure}"
