"""The libfabric backend: AWS EFA, and tcp on any Linux machine; opened here.

`open_domains` finds the library and the NICs: those that a provider offers, those that the user
asked for, and on tcp their addresses. The rest of this folder drives them. Hints are allocated by
libfabric and filled here; what comes back is one fi_info a NIC. Errors name the environment's
FI_PROVIDER, which filters providers in silence. Peers get the address that an endpoint is opened
on, so one that only this host reaches, or that names no host at all, is told apart here and not by
a time-out over there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from ctypes import string_at
from typing import Final, NamedTuple

from tep.backends.base import CallersTurn, DomainCaps, Opened
from tep.backends.common import all_or_none, check_timeout, identity
from tep.backends.ffi import libfabric as fi
from tep.backends.ffi.libc import Interface, interfaces
from tep.backends.ffi.libfabric import NO_UNSOLICITED, Libfabric, load
from tep.backends.libfabric.domain import FabricDomain
from tep.backends.libfabric.objects import Nic
from tep.backends.libfabric.peers import CONTROL_BYTES_MAX
from tep.backends.libfabric.rules import (
    ROW_BYTES_MAX,
    RULES,
    Rules,
    check_version,
    endpoint_options,
)
from tep.backends.libfabric.tcp import READS_MAX, TcpDomain
from tep.base.errors import BackendUnavailable, FabricError, UsageError
from tep.host.nics import SOCKET_IFNAME, read_list, said
from tep.host.ways import is_loopback, own_address
from tep.memory.source import DmabufExport

__all__ = ["FabricDomain", "facts", "open_domains", "probe"]

_NICS_MAX: Final = 64
_PORT_MAX: Final = 65535


class Offer(NamedTuple):
    """One NIC that can be opened, by its name; its fi_info is owned by whoever holds this."""

    info: fi.Info
    nic: str
    row_bytes_max: int


def find_offers(
    lib: fi.Libfabric, rules: Rules, nics: Sequence[str] | int | None, *, cuda: bool = False
) -> list[Offer]:
    """Find the NICs that were asked for; on tcp by names only."""
    if not rules.software:
        return _devices(lib, rules, nics, cuda=cuda)
    assert isinstance(nics, Sequence)
    return [_one(lib, rules, name) for name in nics]


def check_nics(nics: Sequence[str] | int | None) -> None:
    """Refuse impossible numbers, and what is no list of names."""
    if isinstance(nics, int):
        if not 1 <= nics <= _NICS_MAX:
            raise UsageError(f"libfabric: nics={nics}; 1 to {_NICS_MAX} are possible")
    elif nics is not None and (isinstance(nics, str) or not nics or len(nics) > _NICS_MAX):
        raise UsageError(f"libfabric: nics={nics!r}; give a list of 1 to {_NICS_MAX} names")


def _one(lib: fi.Libfabric, rules: Rules, name: str) -> Offer:
    node, service = node_and_service(address(name))
    first, *others = _ask(lib, rules, node, service or None)
    for info in others:
        lib.freeinfo(info)
    return Offer(first, name, int(first.contents.ep_attr.contents.max_msg_size))


def _devices(
    lib: fi.Libfabric, rules: Rules, nics: Sequence[str] | int | None, *, cuda: bool
) -> list[Offer]:
    """One NIC a device, by its own name."""
    found: dict[str, fi.Info] = {}
    longest: dict[str, int] = {}
    for info in _ask(lib, rules, None, None, cuda=cuda):
        fabric = _text(info.contents.fabric_attr.contents.name)
        name = _text(info.contents.domain_attr.contents.name)
        # Both fabrics of a device have its name; `efa` knows no limit, see ROW_BYTES_MAX.
        size = int(info.contents.ep_attr.contents.max_msg_size)
        longest[name] = min(size, longest.get(name, ROW_BYTES_MAX))
        # Releases give the usual fabric several names; the other one has had one only.
        if fabric == "efa-direct" or name in found:
            lib.freeinfo(info)
        else:
            found[name] = info
    if (isinstance(nics, int) and nics > len(found)) or not found:
        raise BackendUnavailable(
            f"provider {rules.provider!r}: {len(found)} NICs here ({', '.join(found) or 'none'}), "
            f"asked for: {nics}"
        )
    names = list(found)[:nics] if nics is None or isinstance(nics, int) else nics
    # libfabric adds what kind of endpoint it is to the device's own name: "rdmap79s0-rdm".
    names = [name if name in found else f"{name}-rdm" for name in names]
    missing = [name for name in names if name not in found]
    if missing:
        for info in found.values():
            lib.freeinfo(info)
        given = missing[0].removesuffix("-rdm")
        raise UsageError(f"libfabric: no NIC {given!r}; there are: {', '.join(found)}")
    if len(set(names)) < len(names):
        raise UsageError(f"libfabric: nics={nics!r} names one NIC twice")
    for name in set(found) - set(names):
        lib.freeinfo(found[name])
    return [Offer(found[name], name, longest[name]) for name in names]


def _ask(
    lib: fi.Libfabric, rules: Rules, node: str | None, service: str | None, *, cuda: bool = False
) -> list[fi.Info]:
    """Ask what a provider offers under any of its names; the first that has something."""
    tried = []
    for name in rules.names:
        with lib.hints() as hints:
            fill(lib, hints, rules, name, cuda=cuda)
            try:
                return lib.getinfo(hints, node, service, fi.FI_SOURCE if node else 0)
            except OSError as error:
                tried.append((f"fi_getinfo(prov={name!r}, node={node!r})", str(error)))
    filtered = os.environ.get("FI_PROVIDER")
    note = f"; FI_PROVIDER={filtered!r} filters providers" if filtered else ""
    what = f"provider {rules.provider!r}{' that takes CUDA memory' if cuda else ''}"
    if cuda:
        note += (
            "; one that was built without CUDA takes host memory only: use the libfabric of AWS's "
            "EFA installer (/opt/amazon/efa, or TEP_LIBFABRIC=its libfabric.so.1), the backend "
            "efa, or copies by tep.cuda.Staged"
        )
    raise BackendUnavailable(
        f"{lib.describe()} offers no {what}{f' at {node}' if node else ''}{note}; "
        "FI_LOG_LEVEL=warn makes libfabric say why",
        tuple(tried),
    )


def fill(lib: fi.Libfabric, hints: fi.Info, rules: Rules, name: str, *, cuda: bool) -> None:
    """Write what we ask for into empty hints; `name` is what libfabric calls the provider."""
    hint = hints.contents
    hint.caps = fi.FI_MSG | fi.FI_RMA | rules.caps | (fi.FI_HMEM if cuda else 0)
    hint.mode = fi.FI_CONTEXT | fi.FI_CONTEXT2 | fi.FI_RX_CQ_DATA
    hint.ep_attr.contents.type = fi.FI_EP_RDM
    domain = hint.domain_attr.contents
    domain.mr_mode = rules.mr_mode | (fi.FI_MR_HMEM if cuda else 0)
    domain.threading = fi.FI_THREAD_DOMAIN  # one thread turns an engine and its NICs
    if rules.tx_entries:
        hint.tx_attr.contents.size = rules.tx_entries
        hint.rx_attr.contents.size = rules.rx_entries
    hint.fabric_attr.contents.prov_name = lib.strdup(name)


def list_providers(lib: fi.Libfabric) -> list[str]:
    """The names of the providers that tep drives and this libfabric offers here, each once."""
    with lib.hints() as hints:
        hints.contents.ep_attr.contents.type = fi.FI_EP_RDM
        try:
            infos = lib.getinfo(hints, None, None, 0)
        except OSError:
            return []
    names = dict.fromkeys(_text(info.contents.fabric_attr.contents.prov_name) for info in infos)
    for info in infos:
        lib.freeinfo(info)
    driven = {name for rules in RULES.values() for name in rules.names}
    return [name for name in names if name in driven]


def _text(pointer: int | None) -> str:
    return string_at(pointer).decode(errors="replace") if pointer else ""


# ------------------------------------------------------------------ addresses of this host


def default_addresses(nics: int | None) -> tuple[list[str], str]:
    """Addresses for so many NICs, None = one; and why these, for `explain`.

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
        return names, said([wanted], {SOCKET_IFNAME: "which interfaces are taken"})
    master = os.environ.get("MASTER_ADDR", "")
    if nics is None and master and os.environ.get("WORLD_SIZE", "1") != "1":
        own = ""
        with contextlib.suppress(OSError):
            own = own_address(master)
        if own and not is_loopback(own):
            return [own], f"{own} is on the way to MASTER_ADDR={master}"
    about = "only this host reaches loopback addresses; name interfaces or networks for others: "
    return [f"127.0.0.{k + 1}" for k in range(count)], f'{about}nics=["eth0"]'


def node_and_service(name: str) -> tuple[str, str]:
    """Take "ADDRESS:PORT" or "[IPV6]:PORT" apart; no port is ""."""
    if name.startswith("["):
        node, _, rest = name[1:].partition("]")
        return node, rest.removeprefix(":")
    node, _, service = name.partition(":") if name.count(":") == 1 else (name, "", "")
    return node, service


def address(name: str) -> str:
    """The address that a name stands for: "ADDRESS", "ADDRESS:PORT" or "[IPV6]:PORT".

    A name is an address, an interface, for its first address, or a network, for the first address
    of this host in it; any of them may end in ":PORT".

    Raises:
        UsageError: an interface or a network that is not here, or an address of no host.
    """
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
    raise UsageError(
        f"libfabric: nics={name!r} is no address and no interface of this host; "
        f"here are {_listed()}"
    )


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


class _How(NamedTuple):
    """The way in which the NICs of one engine are opened."""

    rules: Rules
    peer_timeout_s: float
    cuda: bool
    dmabuf: DmabufExport | None


def open_domains(
    *,
    provider: str = "tcp",
    nics: Sequence[str] | int | None = None,
    name: str | None = None,
    epoch: int | None = None,
    peer_timeout_s: float = 5.0,
    cuda: bool = False,
    dmabuf: DmabufExport | None = None,
) -> Opened:
    """Open the NICs of one engine.

    Args:
        provider: "tcp" or "efa"; nothing else is tried.
        nics: for tcp addresses ("10.0.0.7", "127.0.0.2:4000", "[fd00::7]:4000"), interfaces
            ("eth0") or networks ("10.0.0.0/8"); devices' names for EFA; or how many. None: one for
            tcp, see default_addresses(), all devices for EFA.
        name: for reports, and the identity of a restart; None = host, pid and a number.
        epoch: this incarnation's number; None = the time in nanoseconds.
        peer_timeout_s: how long a peer may be silent before rows to it fail.
        cuda: whether CUDA memory will be registered; on EFA only.
        dmabuf: exports CUDA memory as a dma-buf, see tep.memory.source; None = libfabric,
            built with CUDA, finds the pages itself.

    Raises:
        UsageError: an unknown provider, impossible names or numbers.
        BackendUnavailable: no libfabric, no such provider or no NIC; says what was tried.
    """
    rules = RULES.get(provider)
    if rules is None:
        raise UsageError(f"libfabric: provider={provider!r}; tep drives: {', '.join(RULES)}")
    check_timeout("libfabric", peer_timeout_s)
    if cuda and rules.software:
        raise UsageError(f"libfabric: cuda is for EFA, not for {provider!r}")
    how = _How(rules, peer_timeout_s, cuda, dmabuf)
    name, epoch = identity("libfabric", name, epoch)
    check_nics(nics)
    nics, about = _environment(rules, nics)
    lib = load()
    offers = find_offers(lib, rules, nics, cuda=cuda)
    try:
        opened = all_or_none(_open_next(lib, offers, epoch, how) for _ in range(len(offers)))
    finally:
        for offer in offers:
            lib.freeinfo(offer.info)
    # tcp moves the bytes in the thread that polls: let it be the one that waits.
    driver = CallersTurn() if rules.software else None
    return Opened(opened, epoch, name, driver, about=about)


def _open_next(lib: Libfabric, offers: list[Offer], epoch: int, how: _How) -> FabricDomain:
    offer = offers[0]
    if not how.rules.software:
        check_version(offer.nic, lib.version)
    del offers[0]
    try:
        return _open(lib, offer, epoch, how)
    except (FabricError, OSError) as error:  # OSError: no descriptor for a timer
        raise BackendUnavailable(
            f"libfabric: NIC {offer.nic!r} of provider {how.rules.provider!r} cannot be opened",
            ((offer.nic, str(error)),),
        ) from error


def _open(lib: Libfabric, offer: Offer, epoch: int, how: _How) -> FabricDomain:
    rules, info = how.rules, offer.info.contents
    if rules.software:
        info.tx_attr.contents.op_flags |= fi.FI_DELIVERY_COMPLETE
    link = info.nic.contents.link_attr if info.nic else None
    # Room for all that can be in it: what a full queue of the device drops is lost.
    queues = int(info.tx_attr.contents.size) + int(info.rx_attr.contents.size)
    nic = Nic(
        lib,
        offer.info,
        offer.nic,
        cq_entries=8192 if rules.software else queues,
        software=rules.software,
    )
    try:
        caps = DomainCaps(
            backend="libfabric",
            nic=offer.nic,
            link_bps=int(link.contents.speed) if link else 0,
            sq_depth=2 * rules.window_rows,
            max_write_bytes=offer.row_bytes_max,
            max_msg_bytes=rules.msg_bytes_max,
            ordered=rules.ordered,
            memory_kinds=("cpu", "cuda") if how.cuda else ("cpu",),
            peer_timeout_s=how.peer_timeout_s,
            wakes=bool(nic.wait_fds),
            control_bytes=CONTROL_BYTES_MAX,
            reads=READS_MAX if rules.software else rules.window_rows,
        )
        return (TcpDomain if rules.software else FabricDomain)(
            nic,
            rules,
            caps,
            epoch=epoch,
            options=() if rules.software else endpoint_options(cuda=how.cuda),
            dmabuf=how.dmabuf,
            about=_about(lib, how, wakes=bool(nic.wait_fds)),
        )
    except BaseException:
        nic.close()
        raise


def _environment(
    rules: Rules, nics: Sequence[str] | int | None
) -> tuple[Sequence[str] | int | None, str]:
    """Return the NICs that the environment names where `nics` does not, and that in words."""
    if rules.software:
        return default_addresses(nics) if nics is None or isinstance(nics, int) else (nics, "")
    found = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("FI_EFA_") and (name, value) != NO_UNSOLICITED
    ]
    return nics, f"libfabric reads from the environment: {', '.join(found)}" if found else ""


def _about(lib: Libfabric, how: _How, *, wakes: bool) -> str:
    """Say for `explain` by what a NIC is driven, and which way rows go."""
    rules = how.rules
    parts = [f"provider {rules.provider} of {lib.describe()}"]
    if rules.software:
        parts.append("a row is done once it is at the target")
        parts.append(
            f"at most {rules.window_rows} rows or {rules.window_bytes >> 10} KiB in flight"
        )
    else:
        parts.append("all peers by the NIC, those of this host too")
    if not wakes:
        parts.append("an idle engine looks again and again: there is no descriptor to sleep on")
    return "; ".join(parts)


def facts() -> dict[str, object]:
    """Tell what there is to know of the library that was found, by name; for `tep info`.

    `tried` holds the places that were looked at before it, each with the reason why it was not
    taken, and the providers that tep drives and this library does not offer here.

    Raises:
        BackendUnavailable: with each place looked at, and why it failed.
    """
    lib = load()
    offered = list_providers(lib)
    filtered = os.environ.get("FI_PROVIDER")
    why = "no device of its kind here, or its module or a library that it needs is missing"
    if filtered:
        why += f"; or FI_PROVIDER={filtered!r} filters it"
    missing = [
        (f"provider {name}", why)
        for name, rules in RULES.items()
        if not any(known in offered for known in rules.names)
    ]
    return {
        "library": lib.found.path,
        "found via": lib.found.found_via,
        "version": f"{lib.version[0]}.{lib.version[1]}",
        "providers": offered,
        "tried": [*lib.found.tried, *missing],
    }


def probe() -> str:
    """Say which libfabric is here, where, and its providers.

    Raises:
        BackendUnavailable: with each place looked at, and why it failed.
    """
    lib = load()
    return f"{lib.describe()}; providers: {', '.join(list_providers(lib)) or 'none'}"
