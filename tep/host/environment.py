"""Variables that people have set for NCCL, read where an option of ours is unset.

`explain` names those that were read.

Values only. The environment is handed in, so that a captured machine's is read as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

__all__ = [
    "HCA", "SOCKET_IFNAME", "Environ", "NameList", "Number", "read_list", "read_number", "said",
]  # fmt: skip

HCA: Final = "NCCL_IB_HCA"
SOCKET_IFNAME: Final = "NCCL_SOCKET_IFNAME"

Environ = Callable[[str], str | None]
"""Returns the value of a variable; None if it is unset."""


class Number(NamedTuple):
    """A number of the environment.

    Attributes:
        name: the variable's name.
        text: the variable's value; "" = unset.
        value: the number; None = unset, no number or out of range.
    """

    name: str
    text: str
    value: int | None


class NameList(NamedTuple):
    """Names of devices or interfaces as NCCL lists them: [^][=]name[:port],...

    Attributes:
        name: the variable's name.
        text: the variable's value; "" = unset.
        entries: (name, port); port None = any.
        excludes: "^": all but these.
        exact: "=": whole names, and not beginnings.
    """

    name: str
    text: str
    entries: tuple[tuple[str, int | None], ...]
    excludes: bool
    exact: bool

    def takes(self, name: str, port: int | None = None) -> bool:
        """Return True if a device (or one port of it) is selected; if unset, all are."""
        if not self.entries:
            return True
        found = any(
            (name == entry if self.exact else name.startswith(entry))
            and (port is None or wanted is None or port == wanted)
            for entry, wanted in self.entries
        )
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
    entries = []
    for word in rest.removeprefix("=").split(","):
        entry, _, port = word.strip().partition(":")
        if entry:
            entries.append((entry, int(port) if port.isdecimal() else None))
    return NameList(name, text, tuple(entries), excludes, exact)


def said(used: Iterable[Number | NameList], meant: Mapping[str, str]) -> str:
    """Describe the variables that were read; "" if none is set.

    Args:
        used: the variables that were read.
        meant: the meaning of each variable here, by its name.
    """
    words = []
    for one in used:
        if one.text and isinstance(one, Number) and one.value is None:
            words.append(f"{one.name}={one.text} is not possible here and not used")
        elif one.text:
            words.append(f"{one.name}={one.text} ({meant[one.name]})")
    return f"from the environment: {', '.join(words)}" if words else ""
