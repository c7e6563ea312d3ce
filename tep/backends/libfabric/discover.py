"""Which NICs a provider offers, and which of them the user asked for.

Hints are allocated by libfabric and filled here; what comes back is one fi_info a NIC. Errors name
the environment's FI_PROVIDER, which filters providers in silence.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import string_at
from typing import Final, NamedTuple

from tep.backends.ffi import libfabric as fi
from tep.backends.libfabric.efa.device import ROW_BYTES_MAX
from tep.backends.libfabric.rules import Rules, SoftwareRules
from tep.backends.libfabric.software.sockets import addresses, default_addresses, node_and_service
from tep.base.errors import BackendUnavailable, UsageError

__all__ = ["Offer", "check_nics", "check_offer", "find_offers", "list_providers"]

_NICS_MAX: Final = 64
_IMM_BYTES: Final = 4


class Offer(NamedTuple):
    """One NIC that can be opened.

    Attributes:
        info: its fi_info, owned by whoever holds this.
        nic: its name, for people.
        link_bps: nominal rate, or 0.
        row_bytes_max: longest row.
    """

    info: fi.Info
    nic: str
    link_bps: int
    row_bytes_max: int


def find_offers(
    lib: fi.Libfabric, rules: Rules, nics: Sequence[str] | int | None, *, cuda: bool = False
) -> list[Offer]:
    """Find the NICs that were asked for.

    Args:
        lib: the library.
        rules: of the provider.
        nics: names: see addresses() for tcp, else devices' names; or how many; or None for one
            (all that there are on EFA).
        cuda: whether CUDA memory will be registered.

    Raises:
        UsageError: impossible names or numbers.
        BackendUnavailable: nothing fits; says what was tried.
    """
    check_nics(nics)
    if not isinstance(rules, SoftwareRules):
        return _devices(lib, rules, nics, cuda=cuda)
    if nics is None or isinstance(nics, int):
        nics = default_addresses(nics).names
    return [_one(lib, rules, name) for name in addresses(nics)]


def check_nics(nics: Sequence[str] | int | None) -> None:
    """Refuse impossible numbers, and what is no list of names."""
    if isinstance(nics, int):
        if not 1 <= nics <= _NICS_MAX:
            raise UsageError(f"libfabric: nics={nics}; 1 to {_NICS_MAX} are possible")
    elif nics is not None and (isinstance(nics, str) or not nics or len(nics) > _NICS_MAX):
        raise UsageError(f"libfabric: nics={nics!r}; give a list of 1 to {_NICS_MAX} names")


def _one(lib: fi.Libfabric, rules: Rules, name: str) -> Offer:
    node, service = node_and_service(name)
    return _named(_first(lib, _ask(lib, rules, node, service or None)), name)


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
        # Releases give EFA's usual fabric several names; the other one has had one only.
        if (fabric == "efa-direct") != (rules.fabric == "efa-direct") or name in found:
            lib.freeinfo(info)
        else:
            found[name] = info
    if (isinstance(nics, int) and nics > len(found)) or not found:
        raise BackendUnavailable(
            f"provider {rules.provider!r}: {len(found)} NICs of fabric {rules.fabric!r} here "
            f"({', '.join(found) or 'none'}), asked for: {nics}"
        )
    names = (
        list(found)[: nics if isinstance(nics, int) else None]
        if nics is None or isinstance(nics, int)
        else nics
    )
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
    return [_named(found[name], name, longest[name]) for name in names]


def check_offer(info: fi.Info, nic: str) -> None:
    """Refuse a NIC that could not carry an immediate.

    Raises:
        BackendUnavailable: with what was found and what is needed.
    """
    size = int(info.contents.domain_attr.contents.cq_data_size)
    if size < _IMM_BYTES:
        raise BackendUnavailable(
            f"{nic}: its completions carry {size} bytes of immediate, tep needs {_IMM_BYTES}"
        )


def _first(lib: fi.Libfabric, infos: list[fi.Info]) -> fi.Info:
    """The first of what was offered; the others go back."""
    for info in infos[1:]:
        lib.freeinfo(info)
    return infos[0]


def _named(info: fi.Info, name: str, row_bytes_max: int = 1 << 62) -> Offer:
    nic = info.contents.nic
    link_bps = 0
    if nic and nic.contents.link_attr:
        link_bps = int(nic.contents.link_attr.contents.speed)
    longest = min(int(info.contents.ep_attr.contents.max_msg_size), row_bytes_max)
    return Offer(info, name, link_bps, longest)


def _ask(
    lib: fi.Libfabric, rules: Rules, node: str | None, service: str | None, *, cuda: bool = False
) -> list[fi.Info]:
    """What a provider offers under any of its names; the first that has something."""
    tried = []
    for name in rules.names:
        with lib.hints() as hints:
            fill(lib, hints, rules, name, cuda=cuda)
            try:
                return lib.getinfo(hints, node, service, fi.FI_SOURCE if node else 0)
            except OSError as error:
                tried.append((f"fi_getinfo(prov={name!r}, node={node!r})", str(error)))
    if cuda and _offers_host_memory(lib, rules):
        raise BackendUnavailable(
            f"{lib.describe()} was built without CUDA: its provider {rules.provider!r} takes host "
            "memory only. Use the libfabric of AWS's EFA installer (/opt/amazon/efa, or "
            "TEP_LIBFABRIC=its libfabric.so.1), the backend efa, or copies by tep.cuda.Staged",
            tuple(tried),
        )
    filtered = os.environ.get("FI_PROVIDER")
    note = f"; FI_PROVIDER={filtered!r} filters providers" if filtered else ""
    raise BackendUnavailable(
        f"{lib.describe()} offers no provider {rules.provider!r}"
        f"{f' at {node}' if node else ''}{note}; FI_LOG_LEVEL=warn makes libfabric say why",
        tuple(tried),
    )


def _offers_host_memory(lib: fi.Libfabric, rules: Rules) -> bool:
    """Tell whether the provider is there for an engine that registers no CUDA memory."""
    try:
        infos = _ask(lib, rules, None, None)
    except BackendUnavailable:
        return False
    for info in infos:
        lib.freeinfo(info)
    return True


def fill(lib: fi.Libfabric, hints: fi.Info, rules: Rules, name: str, *, cuda: bool) -> None:
    """Write what we ask for into empty hints.

    Args:
        lib: the library.
        hints: empty.
        rules: of the provider.
        name: what libfabric calls it.
        cuda: whether CUDA memory will be registered.
    """
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
    """The names of all providers that this libfabric offers here, each once."""
    with lib.hints() as hints:
        hints.contents.ep_attr.contents.type = fi.FI_EP_RDM
        try:
            infos = lib.getinfo(hints, None, None, 0)
        except OSError:
            return []
    names = dict.fromkeys(_text(info.contents.fabric_attr.contents.prov_name) for info in infos)
    for info in infos:
        lib.freeinfo(info)
    return list(names)


def _text(pointer: int | None) -> str:
    return string_at(pointer).decode(errors="replace") if pointer else ""
