"""Whom libfabric knows, by number: its address vector, where peers are addresses and nothing more.

This is tcp's; EFA has a book of its own, which knows when a peer may be removed.
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

    def meet(self, peer: PeerT) -> None:
        """Make a peer known to libfabric.

        Raises:
            FabricError: not now.
        """
        peer.number = self._nic.insert(peer.address.raw)

    def part(self, peer: PeerT) -> None:
        """A peer is gone for good."""
        self._nic.remove(peer.number)
