"""The address by which other hosts reach this one, and names that stand for loopback here alone."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

__all__ = ["is_loopback", "names_this_host", "own_address"]

_LOCAL: Final = frozenset({"", "localhost", "localhost6", "ip6-localhost", "ip6-loopback"})
_ELSEWHERE: Final = ("192.0.2.1", "2001:db8::1")
"""Addresses of no host, RFC 5737 and 3849: packets to them take the default route."""


def own_address(host: str) -> str:
    """The address of this host on the way to another.

    A host's own name may stand for loopback (127.0.1.1 on Debian), where nobody else reaches it.
    Then it is the address on the default route, or else the first one of an interface.

    Raises:
        OSError: the name has no address, or no way leads there.
    """
    own = _on_the_way_to(host)
    if not names_this_host(host, [own]):
        return own
    for other in _ELSEWHERE:
        with contextlib.suppress(OSError):
            return _on_the_way_to(other)
    from tep.backends.ffi.libc import interfaces

    others = [one.address for one in interfaces() if not is_loopback(one.address)]
    return min(others, key=lambda one: ("%" in one, ":" in one), default=own)


def names_this_host(host: str, addresses: Iterable[str]) -> bool:
    """Whether a name, with these addresses, means this host to others, and loopback here."""
    if host.partition(".")[0] in _LOCAL:
        return False
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return all(map(is_loopback, addresses))
    return False  # whoever writes 127.0.0.1 means it


def is_loopback(address: str) -> bool:
    """Whether no other host reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _on_the_way_to(host: str) -> str:
    target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
        probe.connect(target[4])  # a datagram socket: this asks the routes and sends nothing
        return str(probe.getsockname()[0])
