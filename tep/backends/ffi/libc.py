"""The C library by ctypes, opened once: timers, which Python has from 3.13 on, and interfaces."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import os
import socket
import sys
import time
from typing import Any, Final, NamedTuple

from tep.base.waiting import system_s

__all__ = ["SOCKADDR_BYTES", "Interface", "Timer", "interfaces", "ip_address", "libc"]

SOCKADDR_BYTES: Final[dict[int, int]] = {socket.AF_INET: 16, socket.AF_INET6: 28}
"""The lengths of struct sockaddr_in and sockaddr_in6."""


@functools.cache
def libc() -> Any:
    """The C library of this process, with errno; a CDLL for each use would be a class for each."""
    return ctypes.CDLL(None, use_errno=True)


class Interface(NamedTuple):
    """One address of a network interface that is up; a link-local one ends in "%" and the name."""

    name: str
    address: str


class _IfAddrs(ctypes.Structure):
    # struct ifaddrs { struct ifaddrs *ifa_next; char *ifa_name; unsigned int ifa_flags;
    #                  struct sockaddr *ifa_addr; ... };                    <ifaddrs.h>
    _fields_ = (
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("addr", ctypes.c_void_p),
    )


def interfaces() -> list[Interface]:
    """Every IPv4 and IPv6 address of this host, in the kernel's order."""
    # int getifaddrs(struct ifaddrs **ifap); void freeifaddrs(struct ifaddrs *ifa);  <ifaddrs.h>
    first = ctypes.c_void_p()
    if libc().getifaddrs(ctypes.byref(first)):
        code = ctypes.get_errno()
        raise OSError(code, f"getifaddrs: {os.strerror(code)}")
    found, at = [], first.value
    try:
        while at:
            one = _IfAddrs.from_address(at)
            family = ctypes.c_uint16.from_address(one.addr).value if one.addr else 0
            if one.flags & _IFF_UP and family in SOCKADDR_BYTES:
                text = ip_address(ctypes.string_at(one.addr, SOCKADDR_BYTES[family]))
                found.append(_interface(one.name.decode(), text))
            at = one.next
    finally:
        libc().freeifaddrs(first)
    return found


_IFF_UP: Final = 1  # <net/if.h>


def _interface(name: str, address: str) -> Interface:
    local = ":" in address and ipaddress.ip_address(address).is_link_local
    return Interface(name, f"{address}%{name}" if local else address)


def ip_address(sockaddr: bytes) -> str:
    """The address in a sockaddr_in or a sockaddr_in6, as text."""
    if int.from_bytes(sockaddr[:2], sys.byteorder) == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, sockaddr[4:8])
    return socket.inet_ntop(socket.AF_INET6, sockaddr[8:24])


class Timer:
    """A timerfd: `fd` is readable once the time has come, until clear()."""

    def __init__(self) -> None:
        # int timerfd_create(int clockid, int flags);
        # int timerfd_settime(int fd, int flags, const struct itimerspec *new_value,
        #                     struct itimerspec *old_value);             <sys/timerfd.h>
        # struct itimerspec { struct timespec it_interval, it_value; };
        self._delay_s: float | None = None
        self._spec = (ctypes.c_long * 4)()
        self._set = libc().timerfd_settime
        self._set.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self.fd = int(libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self.fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"timerfd_create: {os.strerror(code)}")

    def set(self, delay_s: float | None) -> None:
        """Become readable after `delay_s`; None = never.

        More than a day counts as a day: whoever is woken looks at the clock and sets it again.
        """
        if delay_s != self._delay_s:  # most often it is the same again
            whole = rest_ns = 0
            if delay_s is not None:
                whole, rest_ns = divmod(max(1, int(system_s(delay_s) * 1e9)), 10**9)
            self._spec = (ctypes.c_long * 4)(0, 0, whole, rest_ns)
            self._delay_s = delay_s
        self._set(self.fd, 0, self._spec, None)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        os.close(self.fd)
