"""The libfabric backend: AWS EFA, and tcp on any Linux machine; opened here.

`open_domains` finds the library and the NICs; the rest of this folder drives them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from tep.backends.base import CallersTurn, DomainCaps, Opened
from tep.backends.common import all_or_none, check_timeout, identity
from tep.backends.ffi import libfabric as fi
from tep.backends.ffi.libfabric import NO_UNSOLICITED, Libfabric, load
from tep.backends.libfabric.discover import (
    Offer,
    check_nics,
    check_offer,
    default_addresses,
    find_offers,
    list_providers,
)
from tep.backends.libfabric.domain import FabricDomain
from tep.backends.libfabric.objects import Nic
from tep.backends.libfabric.peers import CONTROL_BYTES_MAX
from tep.backends.libfabric.rules import RULES, Rules, check_version, endpoint_options
from tep.backends.libfabric.tcp import READS_MAX, TcpDomain
from tep.base.errors import BackendUnavailable, FabricError, UsageError
from tep.memory.source import DmabufExport

__all__ = ["FabricDomain", "facts", "open_domains", "probe"]


class _How(NamedTuple):
    """The way in which the NICs of one engine are opened."""

    rules: Rules
    peer_timeout_s: float
    cuda: bool
    dmabuf: DmabufExport | None
    sleeps: bool


def open_domains(
    *,
    provider: str = "tcp",
    nics: Sequence[str] | int | None = None,
    name: str | None = None,
    epoch: int | None = None,
    peer_timeout_s: float = 5.0,
    cuda: bool = False,
    dmabuf: DmabufExport | None = None,
    sleeps: bool = True,
) -> Opened:
    """Open the NICs of one engine.

    Args:
        provider: "tcp", "efa" or "efa-direct"; nothing else is tried.
        nics: for tcp addresses ("10.0.0.7", "127.0.0.2:4000", "[fd00::7]:4000"), interfaces
            ("eth0") or networks ("10.0.0.0/8"); devices' names for EFA; or how many. None: one for
            tcp, see default_addresses(), all devices for EFA.
        name: for reports, and the identity of a restart; None = host, pid and a number.
        epoch: this incarnation's number; None = the time in nanoseconds.
        peer_timeout_s: how long a peer may be silent before rows to it fail.
        cuda: whether CUDA memory will be registered; on EFA only.
        dmabuf: exports CUDA memory as a dma-buf, see tep.memory.source; None = libfabric,
            built with CUDA, finds the pages itself.
        sleeps: let an idle engine sleep on a descriptor, where libfabric has one. False: it looks
            again and again, see ThreadDriver(watch_s=...). For EFA, where the provider was built
            with an rdma-core whose efadv_cq_attr has no doorbell: there a queue with a descriptor
            goes without the direct data path. Nothing tells tep how it was built.

    Raises:
        UsageError: an unknown provider, impossible names or numbers.
        BackendUnavailable: no libfabric, no such provider or no NIC; says what was tried.
    """
    rules = RULES.get(provider)
    if rules is None:
        use = '; between processes of one host use the backend "local"' if provider == "shm" else ""
        raise UsageError(f"libfabric: provider={provider!r}; tep drives: {', '.join(RULES)}{use}")
    check_timeout("libfabric", peer_timeout_s)
    if cuda and rules.software:
        raise UsageError(f"libfabric: cuda is for EFA, not for {provider!r}")
    how = _How(rules, peer_timeout_s, cuda, dmabuf, sleeps)
    name, epoch = identity("libfabric", name, epoch)
    check_nics(nics)
    nics, about = _environment(rules, nics)
    opened = _open_all(how, nics, epoch)
    # tcp moves the bytes in the thread that polls: let it be the one that waits.
    driver = CallersTurn() if rules.software else None
    return Opened(opened, epoch, name, driver, about=about)


def _open_all(how: _How, nics: Sequence[str] | int | None, epoch: int) -> tuple[FabricDomain, ...]:
    lib = load()
    offers = find_offers(lib, how.rules, nics, cuda=how.cuda)
    try:
        return all_or_none(_open_next(lib, offers, epoch, how) for _ in range(len(offers)))
    finally:
        for offer in offers:
            lib.freeinfo(offer.info)


def _open_next(lib: Libfabric, offers: list[Offer], epoch: int, how: _How) -> FabricDomain:
    offer = offers[0]
    check_offer(offer.info, offer.nic)
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
    imm_bits = 8 * int(info.domain_attr.contents.cq_data_size)
    # Room for all that can be in it: what a full queue of the device drops is lost.
    queues = int(info.tx_attr.contents.size) + int(info.rx_attr.contents.size)
    nic = Nic(
        lib,
        offer.info,
        offer.nic,
        cq_entries=8192 if rules.software else queues,
        wait_fd=how.sleeps,
        event_queue=not rules.software,
        long_posts=rules.software,
    )
    try:
        caps = DomainCaps(
            backend="libfabric",
            nic=offer.nic,
            link_bps=offer.link_bps,
            imm_bits=min(imm_bits, 32),
            sq_depth=2 * rules.window_rows,
            max_write_bytes=offer.row_bytes_max,
            max_msg_bytes=rules.msg_bytes_max,
            ordered=rules.ordered,
            imm_eats_recv=False,
            memory_kinds=("cpu", "cuda") if how.cuda else ("cpu",),
            peer_timeout_s=how.peer_timeout_s,
            wakes=nic.wait_fd is not None,
            control_bytes=CONTROL_BYTES_MAX,
            deregister_fences=False,
            reads=READS_MAX if rules.software else rules.window_rows,
        )
        return (TcpDomain if rules.software else FabricDomain)(
            nic,
            rules,
            caps,
            epoch=epoch,
            options=() if rules.software else endpoint_options(cuda=how.cuda),
            dmabuf=how.dmabuf,
            about=_about(lib, how, wakes=nic.wait_fd is not None),
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
        why = "there is no descriptor to sleep on" if how.sleeps else "sleeps=False"
        parts.append(f"an idle engine looks again and again: {why}")
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
