"""Whom libfabric knows, by number: its address vector, where peers are addresses and nothing more.

This is tcp's; shared memory and EFA have books of their own.
"""

from __future__ import annotations

from tep.backends.libfabric.objects import Nic
from tep.backends.libfabric.peer import Peer

__all__ = ["Book"]


class Book:
    """The address vector of one NIC.

    Args:
        nic: whose.
        raw: the address of its main endpoint; an attribute, too.
    """

    def __init__(self, nic: Nic, raw: bytes) -> None:
        self._nic = nic
        self.raw = raw

    def meet(self, peer: Peer) -> str:
        """Make a peer known to libfabric; return why that cannot be, "" = done.

        Raises:
            FabricError: not now.
        """
        peer.number = self._nic.insert(peer.address.raw)
        return ""

    def has_left(self, peer: Peer) -> bool:  # noqa: ARG002  # who can know overrides it
        """Whether a peer is known to have closed, or to be dead, without asking the network."""
        return False

    def part(self, peer: Peer) -> None:
        """A peer is gone for good."""
        self._nic.remove(peer.number)

    def let_go(self, peer: Peer) -> None:
        """Nothing of ours goes to a peer any more."""

    def settle(self) -> None:
        """Do what part() had to leave for later; called at each poll."""

    def close(self, peer: Peer) -> None:
        """This NIC closes."""
