"""What the parts of an engine tell each other: appended to one list, handled once a step.

Values only. Whoever appends one neither knows nor waits for who handles it; the worker does.
"""

from __future__ import annotations

from typing import NamedTuple

from tep.core.path import Link

__all__ = ["Event", "PathKeptShut", "PeerNicDown", "PeerRestarted"]


class PeerNicDown(NamedTuple):
    """Rows or messages to a NIC of a peer came back UNREACHABLE, and it was marked down."""

    link: Link
    nic: int


class PeerRestarted(NamedTuple):
    """A later incarnation of a peer answers at its address."""

    link: Link


class PathKeptShut(NamedTuple):
    """The NIC at an address asks for the path to our NIC `nic` back; leases keep it shut."""

    nic: int
    address: bytes


Event = PeerNicDown | PeerRestarted | PathKeptShut
