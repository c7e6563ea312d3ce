"""The PCIe bridges between GPUs and NICs: do they pass peer traffic, or redirect it by the CPU?

Access Control Services (ACS) of a bridge can redirect what one device below it sends to another up
to the root complex. That isolates virtual machines, and costs GPU memory most of its bandwidth.
The registers are in the extended configuration space, which only root may read.

Source: PCI Express Base Specification, Access Control Services Extended Capability; numbers as in
linux/pci_regs.h.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tep.host.doctor.finding import Finding, good, note, warn
from tep.host.hostfiles import HostFiles
from tep.host.topology import Topology

__all__ = ["acs_control", "check_acs"]

_EXTENDED: Final = 0x100  # offset at which extended capabilities begin
_CAP_ACS: Final = 0x000D
_CONTROL: Final = 6  # id of the capability
_REDIRECTS: Final = 0x04 | 0x08  # PCI_ACS_RR, PCI_ACS_CR: of requests, of completions
_CAPS_MAX: Final = 64  # more than a configuration space has room for
_AREA: Final = "PCIe ACS"
_SHOWN: Final = 4


def check_acs(files: HostFiles, seen: Topology) -> Iterator[Finding]:
    """Check the bridges between each GPU and its NICs."""
    shares = seen.shares()
    pairs = [(gpu.path, nic.path) for gpu in seen.gpus for nic in shares[gpu.pci]]
    if not pairs:
        return
    bridges = sorted({one for pair in pairs for path in pair for one in _bridges(path)})
    if not bridges:
        text = "no PCIe bridge is visible above GPUs and NICs: the host of this machine decides"
        yield note(_AREA, text)
        return
    found = {path: _config(files, path) for path in bridges}
    hidden = [path for path, config in found.items() if len(config) <= _EXTENDED]
    redirect = [
        path.rpartition("/")[2]
        for path, config in found.items()
        if (acs_control(config) or 0) & _REDIRECTS
    ]
    if redirect:
        more = f" and {len(redirect) - _SHOWN} more" if len(redirect) > _SHOWN else ""
        yield warn(
            _AREA,
            f"{', '.join(redirect[:_SHOWN])}{more} of {len(bridges)} bridges redirect to the root "
            "complex: bytes between GPU and NIC cross the CPU",
            f"setpci -s {redirect[0]} ECAP_ACS+6.w=0000 for each, or boot with "
            "pci=disable_acs_redir=...; keep it where devices are passed on to virtual machines",
        )
    elif hidden:
        yield note(
            _AREA,
            f"not known at {len(hidden)} of {len(bridges)} bridges: only root may read the "
            "extended configuration space, and some hosts hide it",
            "run tep doctor once as root",
        )
    else:
        yield good(_AREA, f"none of {len(bridges)} bridges between GPUs and NICs redirects")


def _bridges(path: str) -> list[str]:
    """List the bridges above a PCI device, from the root port on."""
    found = []
    above = path.rpartition("/")[0]
    while re.search(r"/[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$", above):
        found.append(above)
        above = above.rpartition("/")[0]
    return found


def _config(files: HostFiles, path: str) -> bytes:
    return files.read_bytes(f"{path}/config") or b""


def acs_control(config: bytes) -> int | None:
    """Read the control register of ACS in a configuration space; None: it is not there."""
    at = _EXTENDED
    for _ in range(_CAPS_MAX):
        if at < _EXTENDED or at + 4 > len(config):
            return None
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _CAP_ACS:
            return int.from_bytes(config[at + _CONTROL : at + _CONTROL + 2], "little")
        at = header >> 20
    return None
