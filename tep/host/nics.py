"""The choice of a machine's NICs that belong together, with reasons; and the paths of its GPUs.

The rules, each applied to the NICs that the one before has left:

1. A NIC must be usable: it opens, its port is up and has an address.
2. EFA where there is one: its protocol reaches no other NIC.
   Elsewhere those that NCCL_IB_HCA names: a list of them is the user's own choice, and the rules
   below leave it alone; a list of exceptions ("^...") only takes some away.
3. One link layer, the one with more bandwidth: InfiniBand and Ethernet never reach each other.
4. The fastest; slower ones are most often for management.
5. Where a virtual function (SR-IOV) is beside its physical one, the physical one: they are one
   port.
6. Where some share a PCIe switch with a GPU, only those: the others are for storage. So it is on a
   DGX H100, whose storage ports are as fast as its eight for computing.
7. Where some are alone on their card, those before ports of cards that have several, if there are
   as many: the same machine, seen from a container without GPUs.
8. On InfiniBand, those in the subnet that more than half of them are in. Where there is none, each
   rail is a subnet, and all are kept.

The variables that people have set for NCCL are read here too, where an option of ours is unset;
`explain` names those that were read. The environment is handed in, so that a captured machine's is
read as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from tep.host.hostfiles import HostFiles, LiveFiles

__all__ = [
    "HCA", "PCI", "SOCKET_IFNAME", "Choice", "Environ", "Found", "NameList", "Number", "choose",
    "gpu_paths", "natural", "read_list", "read_number", "said",
]  # fmt: skip

HCA: Final = "NCCL_IB_HCA"
SOCKET_IFNAME: Final = "NCCL_SOCKET_IFNAME"

Environ = Callable[[str], str | None]
"""Returns the value of a variable; None if it is unset."""


class Number(NamedTuple):
    """A variable of the environment, its text ("": unset), and its number.

    The number is None if it is unset, no number or out of range.
    """

    name: str
    text: str
    value: int | None


class NameList(NamedTuple):
    """Names of devices or interfaces as NCCL lists them in a variable: [^][=]name[:port],...

    "^" excludes: all but these. "=" is exact: whole names, and not beginnings. A port is not looked
    at, as each NIC has one here.
    """

    name: str
    text: str
    entries: tuple[str, ...]
    excludes: bool
    exact: bool

    def takes(self, name: str) -> bool:
        """Return True if a device is selected; if unset, all are."""
        if not self.entries:
            return True
        found = name in self.entries if self.exact else name.startswith(self.entries)
        return found != self.excludes


def read_number(name: str, environ: Environ, limits: tuple[int, int]) -> Number:
    """Read a number, decimal or 0x..., that lies within limits; NCCL's -1 means unset."""
    text = (environ(name) or "").strip()
    try:
        value = int(text, 0) if text else None
    except ValueError:
        value = None
    low, high = limits
    if value == -1:
        return Number(name, "", None)
    return Number(name, text, value if value is not None and low <= value <= high else None)


def read_list(name: str, environ: Environ) -> NameList:
    """Read a list in NCCL's syntax (quoted: its documentation of NCCL_IB_HCA)."""
    text = (environ(name) or "").strip()
    rest = text.removeprefix("^")
    excludes, exact = rest != text, rest.startswith("=")
    words = (word.strip().partition(":")[0] for word in rest.removeprefix("=").split(","))
    return NameList(name, text, tuple(filter(None, words)), excludes, exact)


def said(used: Iterable[Number | NameList], meant: Mapping[str, str]) -> str:
    """Describe the variables that were read, by the meaning of each here; "" if none is set."""
    words = []
    for one in used:
        if one.text and isinstance(one, Number) and one.value is None:
            words.append(f"{one.name}={one.text} is not possible here and not used")
        elif one.text:
            words.append(f"{one.name}={one.text} ({meant[one.name]})")
    return f"from the environment: {', '.join(words)}" if words else ""


PCI: Final = "/sys/bus/pci/devices"
_GPU_VENDORS: Final = frozenset({"0x10de", "0x1002"})
_GPU_CLASS: Final = "0x03"  # display controllers, those without a display among them


class Found(NamedTuple):
    """One RDMA device, as examined.

    Attributes:
        text: its description, or why it cannot be used.
        link_bps: nominal rate, bits a second; 0 where unknown.
        subnet: prefix of the InfiniBand subnet, 16 hex digits; "" on Ethernet.
        path: sysfs path of its PCI device; "" if it has none.
        physical: path of the physical function if this is a virtual one; else "".
        missing: its device file, if this container was not given it; else "".
    """

    name: str
    text: str
    usable: bool
    link_bps: int = 0
    is_ib: bool = False
    subnet: str = ""
    path: str = ""
    is_efa: bool = False
    physical: str = ""
    missing: str = ""


class Choice(NamedTuple):
    """The NICs that belong together, and (name, reason) of all others."""

    taken: list[Found]
    left: list[tuple[str, str]]


def choose(found: Sequence[Found], gpus: Sequence[str], hca: NameList | None = None) -> Choice:
    """Take the NICs that belong together, by the rules above; `hca` is NCCL_IB_HCA."""
    left = [(seen.name, seen.text) for seen in found if not seen.usable]
    taken = [seen for seen in found if seen.usable]

    def keep(fits: Callable[[Found], bool], why: Callable[[Found], str]) -> None:
        left.extend((seen.name, why(seen)) for seen in taken if not fits(seen))
        taken[:] = [seen for seen in taken if fits(seen)]

    if not taken:
        return Choice(taken, left)
    if any(seen.is_efa for seen in taken):
        keep(lambda seen: seen.is_efa, lambda _: "no EFA NIC, and there are some")
    elif hca is not None and hca.entries:
        keep(lambda seen: hca.takes(seen.name), lambda _: f"{hca.name}={hca.text} leaves it out")
        if not hca.excludes or not taken:
            return Choice(taken, left)
    ib = max((False, True), key=lambda layer: _weight(taken, is_ib=layer))
    most = f"{'InfiniBand' if ib else 'Ethernet'}, as those with most of the bandwidth are"
    keep(lambda seen: seen.is_ib == ib, lambda _: f"not {most}")
    fastest = max(seen.link_bps for seen in taken)
    keep(
        lambda seen: seen.link_bps == fastest,
        lambda seen: f"{seen.link_bps / 1e9:g} Gb/s, and others have {fastest / 1e9:g}",
    )
    paths = {seen.path for seen in taken} - {""}
    keep(
        lambda seen: seen.physical not in paths,
        lambda _: "a virtual function of a NIC that is taken: they are one port",
    )
    beside = {_root_port(gpu) for gpu in gpus} - {""}
    near = {seen.name for seen in taken if _root_port(seen.path) in beside}
    if near:
        keep(
            lambda seen: seen.name in near,
            lambda _: "it shares no PCIe switch with a GPU, and others do: most often for storage",
        )
    ports = Counter(_card(seen.path) for seen in found if seen.path and not seen.physical)
    alone = {seen.name for seen in taken if seen.path and ports[_card(seen.path)] <= 1}
    if 2 * len(alone) >= len(taken):
        keep(
            lambda seen: seen.name in alone,
            lambda seen: (
                f"its card has {ports[_card(seen.path)]} ports, and others are alone on "
                "theirs: most often for storage"
            ),
        )
    (subnet, members), *_ = Counter(seen.subnet for seen in taken).most_common(1)
    if 2 * members > len(taken):
        keep(
            lambda seen: seen.subnet == subnet,
            lambda seen: f"in InfiniBand subnet {seen.subnet}, and most are in {subnet}",
        )
    return Choice(taken, left)


def _weight(found: Sequence[Found], *, is_ib: bool) -> tuple[int, int, bool]:
    """Make a sort key: by bandwidth, then by number; InfiniBand where both are equal."""
    members = [seen for seen in found if seen.is_ib == is_ib]
    return sum(seen.link_bps for seen in members), len(members), is_ib


def _root_port(path: str) -> str:
    """Return the root complex and port that a PCI device is behind; "" without such a port."""
    _, _, below = path.partition("/pci")
    steps = below.split("/")
    return "/".join(steps[:2]) if len(steps) > 2 else ""


def _card(path: str) -> str:
    """Return a PCI address without its function number, which all ports of one card share."""
    return path.rpartition(".")[0]


def natural(name: str) -> tuple[str, int, str]:
    """Make a key that sorts mlx5_10 after mlx5_9."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or -1), name


def gpu_paths(files: HostFiles | None = None, vendors: frozenset[str] = _GPU_VENDORS) -> list[str]:
    """List the GPUs of a machine (None: this one), as paths of PCI devices in sysfs."""
    files = files or LiveFiles()
    found = []
    for name in files.names(PCI):
        kind, vendor = files.read(f"{PCI}/{name}/class"), files.read(f"{PCI}/{name}/vendor")
        if (kind or "").startswith(_GPU_CLASS) and vendor in vendors:
            found.append(files.real(f"{PCI}/{name}"))
    return found
