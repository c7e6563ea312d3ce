"""EFA's address vector: peers are removed once all that went to them is back, and where it is safe.

The provider drops the completions of a peer that is removed before: what they hold, slots and
regions, would stay taken. And of two addresses with one queue pair number it forgets the wrong one,
and crashes later (2.5.1, efa_av_reverse_av_remove): such addresses stay.
"""

from __future__ import annotations

from tep.backends.libfabric.address import efa_place
from tep.backends.libfabric.book import Book
from tep.backends.libfabric.objects import Nic
from tep.backends.libfabric.peer import Peer

__all__ = ["EfaBook"]


class EfaBook(Book[Peer]):
    """The address vector of one EFA device.

    Attributes:
        departed: peers that part() had to leave for settle(), which is called while there are some.
    """

    def __init__(self, nic: Nic, raw: bytes) -> None:
        super().__init__(nic, raw)
        self._at: dict[bytes, dict[bytes, Peer]] = {}  # whom libfabric knows, by queue pair
        self.departed: list[Peer] = []

    def meet(self, peer: Peer) -> None:
        super().meet(peer)
        raw = peer.address.raw
        self._at.setdefault(efa_place(raw), {})[raw] = peer

    def part(self, peer: Peer) -> None:
        self.departed.append(peer)

    def settle(self) -> None:
        """Do what part() had to leave for later."""
        for peer in self.departed:
            known = self._at.get(efa_place(peer.address.raw), {})
            if not peer.out and known == {peer.address.raw: peer}:
                self._nic.remove(peer.number)
                known.clear()
        self.departed = [peer for peer in self.departed if peer.out]
