"""Events between the parts of an engine: appended to one list, and handled once a step.

Values only. The part that appends an event does not know which part handles it; the worker does.
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
    """The NIC at an address asks to open the path to our NIC `nic`, which leases keep shut."""

    nic: int
    address: bytes


Event = PeerNicDown | PeerRestarted | PathKeptShut
