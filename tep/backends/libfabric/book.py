"""Whom libfabric knows, by number: its address vector, where peers are addresses and nothing more.

This is tcp's; shared memory and EFA have books of their own, which know when a peer may be removed.
"""

from __future__ import annotations

from typing import Generic

from tep.backends.libfabric.objects import Nic
from tep.backends.libfabric.peer import PeerT

__all__ = ["Book"]


class Book(Generic[PeerT]):
    """The address vector of one NIC.

    Args:
        nic: whose.
        raw: the address of its main endpoint; an attribute, too.
    """

    def __init__(self, nic: Nic, raw: bytes) -> None:
        self._nic = nic
        self.raw = raw

    def meet(self, peer: PeerT) -> str:
        """Make a peer known to libfabric; return why that cannot be, "" = done.

        Raises:
            FabricError: not now.
        """
        peer.number = self._nic.insert(peer.address.raw)
        return ""

    def has_left(self, peer: PeerT) -> bool:  # noqa: ARG002  # who can know overrides it
        """Whether a peer is known to have closed, or to be dead, without asking the network."""
        return False

    def part(self, peer: PeerT) -> None:
        """A peer is gone for good."""
        self._nic.remove(peer.number)

    def let_go(self, peer: PeerT) -> None:
        """Nothing of ours goes to a peer any more."""

    def close(self, peer: PeerT) -> None:
        """This NIC closes."""
