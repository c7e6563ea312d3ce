"""Which addresses of this host are meant: interfaces, networks, addresses; or none was named.

Peers get the address that an endpoint is opened on, so one that only this host reaches, or that
names no host at all, is told apart here and not by a time-out over there.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import Final, NamedTuple

from tep.backends.ffi.libc import Interface, interfaces
from tep.base.errors import UsageError
from tep.host.environment import SOCKET_IFNAME, read_list, said

__all__ = ["Chosen", "addresses", "default_addresses", "node_and_service"]

_PORT_MAX: Final = 65535


class Chosen(NamedTuple):
    """Addresses where none were named, and why these, for `explain`."""

    names: list[str]
    about: str


def addresses(names: Sequence[str]) -> list[str]:
    """One address a name, as "ADDRESS", "ADDRESS:PORT" or "[IPV6]:PORT".

    Args:
        names: addresses; interfaces ("eth0"), each for its first address; networks ("10.0.0.0/8"),
            each for the first address of this host in it; names of this host. Any with ":PORT".

    Raises:
        UsageError: an interface or a network that is not here, or an address of no host.
    """
    return [_address(name) for name in names]


def default_addresses(nics: int | None) -> Chosen:
    """Addresses for so many NICs, None = one.

    Those of NCCL_SOCKET_IFNAME where it is set; else, where a launcher has given this process
    ranks on other hosts, the one on the way to rank 0 (MASTER_ADDR); else loopback addresses, which
    are there on every Linux machine, all 16 million of them.

    Raises:
        UsageError: NCCL_SOCKET_IFNAME leaves too few.
    """
    count = nics or 1
    wanted = read_list(SOCKET_IFNAME, os.environ.get)
    if wanted.entries:
        usable = [one for one in _best_of_each(interfaces()) if wanted.takes(one.name)]
        if len(usable) < count:
            raise UsageError(
                f"libfabric: {SOCKET_IFNAME}={wanted.text} leaves {len(usable)} interfaces with an "
                f"address, wanted: {count}; here are {_listed()}"
            )
        names = [one.address for one in usable[:count]]
        return Chosen(names, said([wanted], {SOCKET_IFNAME: "which interfaces are taken"}))
    master = os.environ.get("MASTER_ADDR", "")
    if nics is None and master and os.environ.get("WORLD_SIZE", "1") != "1":
        own = _way_to(master)
        if own and not ipaddress.ip_address(own).is_loopback:
            return Chosen([own], f"{own} is on the way to MASTER_ADDR={master}")
    about = "only this host reaches loopback addresses; name interfaces or networks for others: "
    return Chosen([f"127.0.0.{k + 1}" for k in range(count)], f'{about}nics=["eth0"]')


def node_and_service(name: str) -> tuple[str, str]:
    """Take "ADDRESS:PORT" or "[IPV6]:PORT" apart; no port is ""."""
    if name.startswith("["):
        node, _, rest = name[1:].partition("]")
        return node, rest.removeprefix(":")
    node, _, service = name.partition(":") if name.count(":") == 1 else (name, "", "")
    return node, service


def _address(name: str) -> str:
    """The address that a name stands for: itself, or of an interface, or in a network."""
    node, service = node_and_service(name)
    if service and not (service.isdecimal() and int(service) <= _PORT_MAX):
        raise UsageError(f"libfabric: nics={name!r}: {service!r} is no port")
    try:
        literal = ipaddress.ip_address(node.partition("%")[0])
    except ValueError:
        literal = None
    if literal is not None:
        if literal.is_unspecified:
            raise UsageError(
                f"libfabric: nics={name!r} names no host, and peers are given it; name an address, "
                f"an interface or a network: {_listed()}"
            )
        return name
    here = interfaces()
    if "/" in node:
        return _join(_in_network(node, here), service)
    found = [one for one in _best_of_each(here) if one.name == node]
    if found:
        return _join(found[0].address, service)
    if any(one.name == node for one in here) or node in {n for _, n in socket.if_nameindex()}:
        raise UsageError(f"libfabric: interface {node!r} has no address; here are {_listed()}")
    if not node:
        raise UsageError(f"libfabric: nics={name!r} is empty; here are {_listed()}")
    try:  # a host's name, of this one
        infos = socket.getaddrinfo(node, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"libfabric: nics={name!r} is no address, no interface of this host and no name "
            f"({error}); here are {_listed()}"
        ) from error
    return _join(str(infos[0][4][0]), service)


def _in_network(text: str, here: Sequence[Interface]) -> str:
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise UsageError(f"libfabric: nics={text!r} is no network ({error})") from error
    for one in here:
        if ipaddress.ip_address(one.address.partition("%")[0]) in network:
            return one.address
    raise UsageError(f"libfabric: no address of this host is in {text}; here are {_listed()}")


def _join(address: str, service: str) -> str:
    if not service:
        return address
    return f"[{address}]:{service}" if ":" in address else f"{address}:{service}"


def _best_of_each(here: Sequence[Interface]) -> list[Interface]:
    """One address an interface: IPv4 before IPv6, and no link-local one if there is another."""
    best: dict[str, Interface] = {}
    for one in here:
        if one.name not in best or _rank(one) < _rank(best[one.name]):
            best[one.name] = one
    return list(best.values())


def _rank(one: Interface) -> tuple[bool, int]:
    address = ipaddress.ip_address(one.address.partition("%")[0])
    return address.is_link_local, address.version


def _listed() -> str:
    return ", ".join(f"{one.name} {one.address}" for one in interfaces()) or "none that is up"


def _way_to(host: str) -> str:
    """The address of this host from which packets to another leave; "" = none does."""
    try:
        target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
            probe.connect(target[4])  # a datagram socket: this asks the routes and sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""
