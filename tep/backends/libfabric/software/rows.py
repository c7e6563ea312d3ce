"""Rows on tcp: posted under a lease of their key, and lost until it is known why.

A lease is the range that a key opens, as its owner says. Rule: no row goes without one. A provider
that is software does not say what was wrong with a row that failed: it is lost until its peer has
answered, which says that it lives, and whether the key is void.
"""

from __future__ import annotations

from tep.backends.base import Row, Status, WriteBatch
from tep.backends.columns import at
from tep.backends.libfabric import frames
from tep.backends.libfabric.regions import Region, bounds
from tep.backends.libfabric.rows import Rows
from tep.backends.libfabric.slots import Ticket
from tep.backends.libfabric.software.peer import SoftwarePeer
from tep.backends.libfabric.software.peers import SoftwarePeers

__all__ = ["SoftwareRows"]


class SoftwareRows(Rows[SoftwarePeer]):
    """The rows of one NIC that have been accepted and have not ended."""

    _peers: SoftwarePeers

    # --- leases

    def _check(self, batch: WriteBatch, peer: SoftwarePeer, region: Region) -> bool:
        assert isinstance(batch.rkey, int)
        lease = peer.leases.get(batch.rkey)
        if not lease:
            return False
        base, nbytes = lease
        first, end = bounds(batch.dst, batch.nbytes)
        if not (nbytes and base <= first and end <= base + nbytes):
            return False
        return super()._check(batch, peer, region)

    def _post_lone(self, batch: WriteBatch, peer: SoftwarePeer, region: Region) -> bool:
        lease = peer.leases.get(batch.rkey)  # type: ignore[arg-type]  # an int: see post()
        if not lease:
            return False
        base, nbytes = lease
        if not base <= batch.dst <= base + nbytes - batch.nbytes:  # arrays of one are refused below
            return False
        return Rows._post_lone(self, batch, peer, region)  # super() takes 0.1 us more

    def _verdict(self, peer: SoftwarePeer, row: Row) -> Status:
        status = super()._verdict(peer, row)
        lease = peer.leases.get(row.rkey)
        if status is not Status.OK or lease is None:
            return status
        base, nbytes = lease
        if not nbytes:
            return Status.OK if base and not row.nbytes else Status.REMOTE_KEY
        inside = base <= row.dst and row.dst + row.nbytes <= base + nbytes
        return Status.OK if inside else Status.REMOTE_RANGE

    def _granted(self, peer: SoftwarePeer, rkey: int) -> bool:
        if rkey not in peer.leases:
            peer.leases[rkey] = None
            self._peers.say(peer, frames.Ask(self._peers.me, rkey))
            self._stir(peer)
        return peer.leases.get(rkey) is not None

    # --- rows that came back failed

    def lose(self, ticket: Ticket, peer: SoftwarePeer, row: int) -> None:
        """A row came back failed: it waits for the verdict on its peer."""
        ctx, rkey = ticket.batch.ctx, ticket.batch.rkey
        if peer.over:
            self.fail(ctx, row, peer.status)
            return
        peer.lost.append((ctx, row, at(rkey, row)))
        self.waiting += 1
        self._checked.clear()

    def go_on(self, peer: SoftwarePeer) -> None:
        """A peer is READY: settle its lost rows, then post its held ones as far as they go."""
        for _ in range(len(peer.lost)):  # it lives, so they failed for a reason of their own
            ctx, row, rkey = peer.lost.popleft()
            if self._granted(peer, rkey):
                self.waiting -= 1
                void = peer.leases[rkey] == (0, 0)
                self.fail(ctx, row, Status.REMOTE_KEY if void else Status.PROVIDER)
            else:
                peer.lost.append((ctx, row, rkey))
        super().go_on(peer)

    def end(self, peer: SoftwarePeer, status: Status, *, gone: bool, spare: bool = False) -> None:
        for ctx, row, _ in peer.lost:
            self.fail(ctx, row, status)
        self.waiting -= len(peer.lost)
        peer.lost.clear()
        super().end(peer, status, gone=gone, spare=spare)
