"""Events between the parts of an engine: appended to one list, and handled once a step.

Values only. The part that appends an event does not know which part handles it; the worker does.
Any thread may append one; only the worker takes them.
"""

from __future__ import annotations

from typing import NamedTuple

from tep.core.path import Link, Path

__all__ = [
    "DoubtsEnded", "Event", "PathKeptShut", "PathShut", "PeerHeard", "PeerNicDown", "PeerRestarted",
]  # fmt: skip


class PeerNicDown(NamedTuple):
    """Rows or messages to a NIC of a peer came back UNREACHABLE, and it was marked down."""

    link: Link
    nic: int


class PeerRestarted(NamedTuple):
    """A later incarnation of a peer answers at its address."""

    link: Link


class PathKeptShut(NamedTuple):
    """The NIC at an address asks to open the path to our NIC `nic`, which leases keep shut."""

    nic: int
    address: bytes


class PathShut(NamedTuple):
    """Rows are not sent over a path any more: it is to be opened again."""

    path: Path


class PeerHeard(NamedTuple):
    """A peer that did not answer, or a NIC of it, does again."""

    link: Link


class DoubtsEnded(NamedTuple):
    """Of rows in doubt of failed requests on a path, so many of each immediate had landed."""

    path: Path
    landed: dict[int, int]


Event = PeerNicDown | PeerRestarted | PathKeptShut | PathShut | PeerHeard | DoubtsEnded
