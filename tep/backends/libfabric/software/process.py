"""What libfabric does to the whole process, kept harmless: signal handlers, shared-memory files.

The shm provider installs handlers for four signals and leaves a file in /dev/shm behind when its
process is killed. Nothing here knows a NIC.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import os
import re
import resource
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tep.backends.ffi.libc import libc
from tep.base.errors import FabricError

__all__ = [
    "Process",
    "keep_signals",
    "rehearse_shm",
    "reserve_shm",
    "shm_free",
    "sweep_shm",
    "unlink_own_shm_at_exit",
]

_SIGACTION_BYTES: Final = 512  # more than any Linux libc's struct sigaction
_SIGNALS: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGBUS,
    signal.SIGSEGV,
    signal.SIGILL,
    signal.SIGABRT,
)
_ENDPOINT_BYTES_MAX: Final = 32 << 20  # 12.8 MiB with 2.5, 16 with 1.17
_SHM: Final = Path("/dev/shm")  # noqa: S108  # where POSIX shared memory is
_SHM_NAME: Final = re.compile(r"(\d+):(\d+):\d+(\.seats)?")


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


_GONE: Final = -1
_UNKNOWN: Final = -2


class Process:
    """Another process of this host, watched until it ends.

    A descriptor of the process and not its pid is asked: a pid is given again, and a killed child
    stays listed until it is waited for.
    """

    def __init__(self, pid: int) -> None:
        self._poll = select.poll()
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = _GONE
            return
        except OSError:  # not ours to watch
            self._fd = _UNKNOWN
            return
        self._poll.register(self._fd, select.POLLIN)

    def ended(self) -> bool:
        """Whether it has ended."""
        return self._fd == _GONE or bool(self._fd >= 0 and self._poll.poll(0))

    def close(self) -> None:
        """Let go of it. Idempotent."""
        fd, self._fd = self._fd, _UNKNOWN
        if fd >= 0:
            self._poll.unregister(fd)
            os.close(fd)


def _runs(pid: int) -> bool:
    """Whether a process is there and is no zombie; True where that cannot be told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # this process has no descriptor left, say
        return True
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def sweep_shm() -> list[str]:
    """Remove the shm provider's files of our dead processes; return their names.

    Only files of this user are looked at. A process of another pid namespace that shares /dev/shm
    would seem dead; such a set-up does not work with this provider anyway, since its addresses are
    pids.
    """
    swept: list[str] = []
    try:
        entries = os.scandir(_SHM)
    except OSError:  # there is none
        return swept
    with entries:
        for entry in entries:
            match = _SHM_NAME.fullmatch(entry.name)
            with contextlib.suppress(OSError):  # somebody else has removed it meanwhile
                if match and entry.stat().st_uid == os.geteuid() and not _runs(int(match[1])):
                    Path(entry.path).unlink()
                    swept.append(entry.name)
    return swept


def rehearse_shm() -> None:
    """Make and map a file as large as an endpoint's.

    The provider does not look whether it could make its own, and would end the process with a
    segmentation fault (2.5.1, smr_ep_ctrl).

    Raises:
        FabricError: it cannot be made: descriptors, the size of files, or of the address space.
    """
    try:
        fd = os.open(_SHM, os.O_RDWR | os.O_TMPFILE, 0o600)
        try:
            os.ftruncate(fd, _ENDPOINT_BYTES_MAX)
            mmap.mmap(fd, _ENDPOINT_BYTES_MAX).close()
        finally:
            os.close(fd)
    except OSError as error:
        fsize, nofile = (
            resource.getrlimit(what)[0] for what in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
        )
        raise FabricError(
            f"shm: no file of {_ENDPOINT_BYTES_MAX >> 20} MiB can be made in {_SHM} for an "
            f"endpoint: {error.strerror}; limits of this process: files of {fsize} bytes (ulimit "
            f"-f), {nofile} descriptors (ulimit -n); -1 is none",
            code="PROVIDER",
        ) from error


def reserve_shm(name: str) -> None:
    """Give an endpoint's file in /dev/shm all its memory now.

    A full /dev/shm would otherwise be met at the first touch of a page, and end the process with
    SIGBUS.

    Raises:
        FabricError: there is not enough left.
    """
    path = _SHM / name
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        os.posix_fallocate(fd, 0, os.fstat(fd).st_size)
    except OSError as error:
        size = os.fstat(fd).st_size
        raise FabricError(
            f"shm: {_SHM} has {shm_free() >> 20} MiB left, an endpoint needs {size >> 20} MiB: "
            f"{error.strerror}; make it larger, or remove what dead processes left there",
            code="PROVIDER",
        ) from error
    finally:
        os.close(fd)


def shm_free() -> int:
    """Bytes left in /dev/shm."""
    found = os.statvfs(_SHM)
    return found.f_bavail * found.f_frsize


def unlink_own_shm_at_exit() -> None:
    """See to it that what this process leaves open in /dev/shm goes when the interpreter ends."""
    if not _REGISTERED:
        _REGISTERED.append(os.getpid())
        atexit.register(_unlink_own)


_REGISTERED: Final[list[int]] = []


def _unlink_own() -> None:
    if os.getpid() != _REGISTERED[0]:
        return  # a forked child: the files are its parent's
    with contextlib.suppress(OSError):
        for entry in os.scandir(_SHM):
            match = _SHM_NAME.fullmatch(entry.name)
            if match and int(match[1]) == os.getpid():
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()
