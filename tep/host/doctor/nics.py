"""Checks of the RDMA NICs from files: ports, addresses, slots, counters, GPUs and PCIe bridges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tep.backends.ffi.ibverbs import ENUMS
from tep.backends.verbs.device import rank_gids
from tep.host.doctor import Finding, Level, bad, good, note, warn
from tep.host.hostfiles import HostFiles
from tep.host.nics import read_number
from tep.host.topology import FILES_CURE, Topology, detect, number

__all__ = ["acs_control", "check_acs", "check_nics", "read_counters"]

_TOP: Final = "/sys/class/infiniband"
_VERSIONS: Final = ("efa", "mlx5_core", "ib_core", "bnxt_re", "irdma")
_JUMBO: Final = 4096
_GIDS_MAX: Final = 256

# Access Control Services (ACS) of a bridge can redirect what one device below it sends to another
# up to the root complex. That isolates virtual machines, and costs GPU memory most of its
# bandwidth. The registers are in the extended configuration space, which only root may read.
# Source: PCI Express Base Specification, Access Control Services Extended Capability; numbers as in
# linux/pci_regs.h.
_EXTENDED: Final = 0x100  # offset at which extended capabilities begin
_CAP_ACS: Final = 0x000D
_CONTROL: Final = 6  # id of the capability
_REDIRECTS: Final = 0x04 | 0x08  # PCI_ACS_RR, PCI_ACS_CR: of requests, of completions
_CAPS_MAX: Final = 64  # more than a configuration space has room for
_AREA: Final = "PCIe ACS"
_SHOWN: Final = 4


def check_nics(files: HostFiles) -> Iterator[Finding]:
    """Check every NIC, and the places of the GPUs."""
    names = files.names(_TOP)
    if not names:
        yield note(
            "NICs",
            "no RDMA NIC is here: transfers stay on this host (local) or go over tcp",
            "cloud instances: attach EFA interfaces; own machines: modprobe mlx5_ib, or rdma link",
        )
        return
    versions = [
        f"{name} {version}"
        for name in _VERSIONS
        if (version := files.read(f"/sys/module/{name}/version"))
    ]
    yield good("NIC drivers", ", ".join(versions) or "part of the kernel")
    seen = detect(files)
    left = dict(seen.left)
    missing = {nic.name: nic.missing for nic in seen.nics if nic.missing}
    for name in names:
        why_not = left.get(name, "")
        for found in _nic(files, name):
            # A fault of a NIC that is not meant for transfers matters little.
            minor = why_not and "ACTIVE" not in why_not and found.level is not Level.GOOD
            yield found._replace(level=Level.NOTE) if minor else found
        if why_not and "ACTIVE" not in why_not:
            cure = "name it in nics=[...] to take it all the same"
            yield note(name, f"not taken by default: {why_not}", cure)
        if name in missing:
            text = f"there is no {missing[name]}: the container was not given this NIC"
            yield bad(name, text, FILES_CURE)
    yield from _distances(seen)
    yield from check_acs(files, seen)
    if any(nic.is_efa for nic in seen.nics):
        yield note(
            "security group",
            "not visible from here: EFA packets pass only where a group allows all traffic within "
            "itself, in both directions; without it every row between two instances is UNREACHABLE",
            "aws ec2 authorize-security-group-ingress (and -egress) --protocol -1 with the group "
            "itself as source (as destination)",
        )
    roce = [nic.name for nic in seen.nics if "Ethernet" in nic.text and not nic.is_efa]
    if roce:
        yield _traffic_class(files, roce)


def _nic(files: HostFiles, name: str) -> Iterator[Finding]:
    ports = files.names(f"{_TOP}/{name}/ports")
    for port in ports:
        yield from _port(files, name, port)
    path = files.real(f"{_TOP}/{name}/device")
    yield from _slot(files, name, path)
    net = files.names(f"{path}/net")
    yield from _bond(files, name, path, net)
    yield from _neighbours(files, name, net)
    for device in net:
        mtu = number(files.read(f"{path}/net/{device}/mtu"))
        if 0 < mtu < _JUMBO:
            yield warn(
                name,
                f"MTU {mtu} of {device}: more packets for the same bytes",
                f"ip link set {device} mtu 9000, on all hosts and switches",
            )
        elif mtu > 0:
            yield good(name, f"MTU {mtu} of {device}")


def _traffic_class(files: HostFiles, roce: list[str]) -> Finding:
    """Report the traffic class of RoCE packets, and whether it is forced for all of them."""
    for name in roce:
        if forced := files.read(f"{_TOP}/{name}/tc/1/traffic_class"):
            return note(
                "traffic class",
                f"{name}: its driver puts all packets into one class ({forced}), whatever tep says",
                f"echo -1 > {_TOP}/{name}/tc/1/traffic_class, where that is not wanted",
            )
    given = read_number("NCCL_IB_TC", files.environ, (0, 255)).value
    if given == 0:
        return warn(
            "traffic class",
            "NCCL_IB_TC=0: packets are dropped under load where a network has PFC",
            "set it, or traffic_class=, to the lossless class of the network; 106 is common",
        )
    which = f"{given} (NCCL_IB_TC)" if given is not None else "106 (DSCP 26 with ECN), as UCX's do"
    return note(
        "traffic class",
        f"packets over RoCE v2 carry {which}; files do not say which priority has PFC",
        f"compare with: mlnx_qos -i DEVICE, or dcb pfc show dev DEVICE, of {', '.join(roce[:4])}",
    )


def _bond(files: HostFiles, name: str, path: str, net: list[str]) -> Iterator[Finding]:
    """Report if several ports are behind one RDMA device."""
    for device in net:
        ports = (files.read(f"{path}/net/{device}/master/bonding/slaves") or "").split()
        if len(ports) > 1:
            yield warn(
                name,
                f"a bond of {len(ports)} ports ({', '.join(ports)}): a queue pair uses one of "
                "them, and tep has one for each peer",
                f"name it {len(ports)} times: nics={[name] * len(ports)}",
            )
            return


def _neighbours(files: HostFiles, name: str, net: list[str]) -> Iterator[Finding]:
    """Report hosts that do not answer to requests for their Ethernet address through this NIC."""
    for line in (files.read("/proc/net/arp") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) == 6 and fields[5] in net and not number(fields[2].removeprefix("0x")):
            yield warn(
                name,
                f"{fields[0]} on {fields[5]} does not answer for its Ethernet address: rows to it "
                "end as UNREACHABLE",
                f"is that host up, and in this network? ip neigh show dev {fields[5]}",
            )


def _port(files: HostFiles, name: str, port: str) -> Iterator[Finding]:
    top = f"{_TOP}/{name}/ports/{port}"
    state = files.read(f"{top}/state") or "unknown"
    rate, layer = files.read(f"{top}/rate") or "rate unknown", files.read(f"{top}/link_layer") or ""
    if "ACTIVE" in state:
        yield good(name, f"port {port}: {state}, {rate}, {layer}")
    else:
        physical = files.read(f"{top}/phys_state") or "unknown"
        cure = "check the cable and the switch's port"
        if layer == "InfiniBand" and "LinkUp" in physical:
            cure = "the link is up: a subnet manager has to run (opensm, or on the switch)"
        yield bad(name, f"port {port}: {state}, physically {physical}", cure)
        return
    if layer == "Ethernet":
        yield from _gids(files, name, top)


def _gids(files: HostFiles, name: str, top: str) -> Iterator[Finding]:
    table = []
    for entry in range(_GIDS_MAX):
        text = files.read(f"{top}/gids/{entry}")
        if text is None:
            break
        digits = text.replace(":", "")
        raw = bytes.fromhex(digits) if re.fullmatch("[0-9a-fA-F]{32}", digits) else b""
        if not any(raw):
            continue
        kind = files.read(f"{top}/gid_attrs/types/{entry}") or ""
        v2 = ENUMS["IBV_GID_TYPE_ROCE_V2"] if kind == "RoCE v2" else ENUMS["IBV_GID_TYPE_ROCE_V1"]
        table.append((entry, raw, v2))
    ranked = rank_gids(table)
    if not ranked:
        yield bad(name, "the port has no address (GID)", "give its network interface an IP address")
    elif ranked[0].rank >= 2:
        rest = f"the best address is {ranked[0]}"
        cure = "give its network interface a routable IP address, and use RoCE v2"
        yield warn(name, rest, cure)
    else:
        rest = "".join(f"; then {choice}" for choice in ranked[1:4])
        yield good(name, f"address {ranked[0]}{rest}")


def _slot(files: HostFiles, name: str, path: str) -> Iterator[Finding]:
    now, most = (
        (
            files.read(f"{path}/{which}_link_speed") or "",
            files.read(f"{path}/{which}_link_width") or "",
        )
        for which in ("current", "max")
    )
    if not path or not all((*now, *most)) or "Unknown" in now[0]:
        return
    here, could = (_gt(speed) * number(width) for speed, width in (now, most))
    if here < could:
        yield warn(
            name,
            f"PCIe {now[0]} x{now[1]}, and the NIC can {most[0]} x{most[1]}",
            "put it into a wider slot, or look for a bad riser: lspci -vv shows LnkSta",
        )
    else:
        yield good(name, f"PCIe {now[0]} x{now[1]}")


def _gt(speed: str) -> float:
    found = re.match(r"([0-9]+(?:\.[0-9]+)?)", speed)
    return float(found[1]) if found else 0.0


def _distances(seen: Topology) -> Iterator[Finding]:
    shares = seen.shares()
    for gpu in seen.gpus:
        if gpu.index is None or not shares[gpu.pci]:
            continue
        nics = shares[gpu.pci]
        how = seen.relation(gpu, nics[0])
        names = ", ".join(nic.name for nic in nics)
        area = f"cuda:{gpu.index}"
        if "switch" in how:
            yield good(area, f"NICs {names}, {how}")
        else:
            yield warn(
                area,
                f"NICs {names} are nearest, only {how}: bytes cross the CPU",
                "move the NIC into a slot beside the GPU; in a virtual machine, ask for the real "
                "PCIe tree",
            )


def read_counters(files: HostFiles) -> dict[tuple[str, str], int]:
    """Read every hardware counter of every NIC's driver, by (NIC, counter)."""
    found = {}
    for name in files.names(_TOP):
        folders = [f"{_TOP}/{name}/hw_counters"]
        for port in files.names(f"{_TOP}/{name}/ports"):
            folders += [
                f"{_TOP}/{name}/ports/{port}/{kind}" for kind in ("hw_counters", "counters")
            ]
        for folder in folders:
            for counter in files.names(folder):
                text = files.read(f"{folder}/{counter}") or ""
                if (value := number(text)) >= 0:
                    found[name, counter] = value
    return found


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
    found = {path: files.read_bytes(f"{path}/config") or b"" for path in bridges}
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
