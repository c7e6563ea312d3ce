"""One peer's NIC on tcp: what the software providers add to `Peer`."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tep.backends.libfabric.address import NicAddress
from tep.backends.libfabric.peer import Peer, State

if TYPE_CHECKING:
    from tep.backends.libfabric.software.reading import PeersReads

__all__ = ["SoftwarePeer"]


class SoftwarePeer(Peer):
    """One NIC of a peer, in one incarnation.

    Attributes:
        forget_s: when what it costs us is given back at the latest, once it is quiet; 0 = keep it.
        leases: (base, nbytes) of its keys; None = asked.
        lost: (ctx, row, rkey) that came back failed and wait until it is known whether it lives.
        reading: its reads, see reading.py; None = there never was one.
    """

    __slots__ = ("forget_s", "leases", "lost", "reading")

    def __init__(self, index: int, data: bytes, address: NicAddress) -> None:
        super().__init__(index, data, address)
        self.forget_s = 0.0
        self.leases: dict[int, tuple[int, int] | None] = {}
        self.lost: deque[tuple[int, int, int]] = deque()
        self.reading: PeersReads | None = None

    @property
    def unanswered(self) -> bool:
        return self.state is State.CONNECTING or bool(self.lost)

    @property
    def has_rows(self) -> bool:
        return bool(self.open or self.held or self.lost or self.reading)

    @property
    def unsettled(self) -> bool:
        waits = self.state is State.CONNECTING or self.state is State.LEAVING
        if waits or self.outbox or self.held or self.lost or self.forget_s:
            return True
        return bool(self.reading)

    def empty(self) -> None:
        super().empty()
        self.lost = deque(maxlen=0)
        self.leases = {}
