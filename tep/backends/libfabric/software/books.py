"""Shared memory's address vector: seats in each other's tables, and the processes behind addresses.

An endpoint's address names its process. Within this process it is a neighbour, see neighbours.py;
else the process is watched, so that a dead one gives back what it held here.
"""

from __future__ import annotations

import os

from tep.backends.ffi.libfabric import FI_ADDR_UNSPEC
from tep.backends.libfabric.address import shm_alias, shm_name, shm_pid
from tep.backends.libfabric.book import Book
from tep.backends.libfabric.objects import Nic
from tep.backends.libfabric.software import neighbours
from tep.backends.libfabric.software.peer import SoftwarePeer
from tep.backends.libfabric.software.process import Process, reserve_shm
from tep.backends.libfabric.software.seats import SEATS, open_seats, take_seat

__all__ = ["ShmBook"]


class ShmBook(Book[SoftwarePeer]):
    """The address vector of one endpoint.

    Args:
        nic, raw: as for Book.
        asks_first: see SoftwareRules.
    """

    def __init__(self, nic: Nic, raw: bytes, *, asks_first: bool) -> None:
        super().__init__(nic, raw)
        self._asks_first = asks_first
        reserve_shm(shm_name(raw))
        open_seats(shm_name(raw))
        neighbours.arrive(raw)

    def meet(self, peer: SoftwarePeer) -> str:
        raw = peer.address.raw
        pid = shm_pid(raw)
        if pid == os.getpid():
            peer.neighbour = True
            if not neighbours.meet(self.raw, raw):
                return f"shm: {shm_name(raw)} of this process has closed"
        else:
            peer.process = Process(pid)
        peer.watched = peer.neighbour or self._asks_first
        me, it = self.raw, raw
        if peer.neighbour:
            raw = shm_alias(raw)
        # Within one process each is known to the other by two names, see shm_alias().
        names = {me: {it, raw}, it: {me, shm_alias(me) if peer.neighbour else me}}
        full = [
            shm_name(one)
            for one, others in names.items()
            if not all(take_seat(shm_name(one), shm_name(other)) for other in others)
        ]
        if full:
            return (
                f"shm: {' and '.join(full)} met {SEATS} peers, those of its own process counted "
                "twice, and has no more places: open that engine anew"
            )
        peer.number = self._nic.insert(raw)
        return ""

    def has_left(self, peer: SoftwarePeer) -> bool:
        if peer.neighbour:
            return peer.address.raw not in neighbours.OPEN
        return peer.process is not None and peer.process.ended()

    def part(self, peer: SoftwarePeer) -> None:
        super().part(peer)
        self.let_go(peer)
        if peer.process is not None:
            peer.process.close()

    def let_go(self, peer: SoftwarePeer) -> None:
        """A neighbour may be unmapped now."""
        if peer.neighbour:
            peer.neighbour = False
            neighbours.forget(peer.address.raw, self.raw)

    def close(self, peer: SoftwarePeer) -> None:
        if peer.neighbour and peer.number != FI_ADDR_UNSPEC:
            self._nic.remove(peer.number)
        self.let_go(peer)
        if peer.process is not None:
            peer.process.close()
