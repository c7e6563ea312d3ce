"""One NIC that is software behind the seam: tcp, tcp;ofi_rxm.

Beside what every NIC does: it grants leases of its keys, and withdraws them; rows that failed wait
until it is known why; on tcp a peer's own endpoint is closed with it.
"""

from __future__ import annotations

import functools
import time
from typing import Final

from tep.backends.base import Completions, DomainKey, Kind, ReadBatch, Status
from tep.backends.libfabric import frames
from tep.backends.libfabric.address import is_loopback, parse
from tep.backends.libfabric.book import Book
from tep.backends.libfabric.domain import FabricDomain
from tep.backends.libfabric.objects import CqError, Endpoint, Option
from tep.backends.libfabric.rules import SoftwareRules
from tep.backends.libfabric.slots import Ticket
from tep.backends.libfabric.software.peer import SoftwarePeer
from tep.backends.libfabric.software.peers import SoftwarePeers
from tep.backends.libfabric.software.reads import SoftwareReads
from tep.backends.libfabric.software.rows import SoftwareRows
from tep.backends.libfabric.software.strangers import Strangers
from tep.backends.texts import says

__all__ = ["SoftwareDomain"]

_LOOPBACK: Final = (
    "a loopback address is reached on its own host only; for peers on other hosts open both ends "
    'with an interface or a network: nics=["eth0"], nics=["10.0.0.0/8"]'
)
_STRANGERS_S: Final = 2.0
"""How often strangers are looked at; libfabric's threads accept them while the engine sleeps."""


class SoftwareDomain(FabricDomain[SoftwarePeer]):
    """One NIC."""

    _rules: SoftwareRules
    _peers: SoftwarePeers
    _peers_kind = SoftwarePeers
    _rows: SoftwareRows
    _rows_kind = SoftwareRows
    _has_chores = True

    def _open_main(self, options: tuple[Option, ...]) -> tuple[Endpoint, Book[SoftwarePeer]]:
        nic = self._nic
        self._askers: dict[int, set[int]] = {}  # peers that hold a lease, by rkey
        main = nic.open_endpoint(options)
        nic.release_port()
        book = Book[SoftwarePeer](nic, main.name())
        # sockaddr_in and sockaddr_in6 have the port there
        self._strangers = Strangers(int.from_bytes(book.raw[2:4], "big"))
        return main, book

    def status_text(self, status: int) -> str:
        text = super().status_text(status)
        if status == Status.UNREACHABLE and not self._peers.answered:
            met = [peer.address for peer in self._peers.all]
            own = parse(self._peers.me, self._rules.provider)
            return says(text, _LOOPBACK if any(is_loopback(one.raw) for one in (own, *met)) else "")
        return text

    # --- leases

    def deregister(self, key: DomainKey) -> None:
        super().deregister(key)
        if not (self._closed or self._nic.closed):
            for index in self._askers.pop(key.rkey, ()):
                self._say(self._peers.all[index], frames.Revoke(self.address, key.rkey))

    def _take_talk(self, peer: SoftwarePeer, frame: frames.Frame, now_s: float) -> None:
        match frame:
            case frames.Ask(rkey=rkey):
                base, nbytes = self._regions.range_of(rkey)
                if nbytes:
                    self._askers.setdefault(rkey, set()).add(peer.index)
                self._peers.say(peer, frames.Lease(self.address, rkey, base, nbytes))
            case frames.AskRead(rkey=rkey, number=number):
                base, nbytes = self._regions.readable_range(rkey)
                if nbytes:
                    self._askers.setdefault(rkey, set()).add(peer.index)
                self._peers.say(peer, frames.Readable(self.address, rkey, base, nbytes, number))
            case frames.Readable():
                self._reads.answered(peer, frame)
            case frames.Lease(rkey=rkey, base=base, nbytes=nbytes):
                peer.leases[rkey] = (base, nbytes)
            case frames.Revoke(rkey=rkey):
                peer.leases[rkey] = (0, 0)
                self._rows.recheck()
                if peer.reading is not None:
                    peer.reading.ranges[rkey] = (0, 0)
            case _:
                super()._take_talk(peer, frame, now_s)

    # --- reads

    @functools.cached_property
    def _reads(self) -> SoftwareReads:
        """Made with the first read: its buffers are some MiB."""
        reads = SoftwareReads(
            self.caps, self._nic, self._regions, self._peers, self._done, self._timeout_s
        )
        self._queue.landed = reads.landed
        return reads

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        self._check_open()
        taken = self._reads.post(batch, start, stop)
        for peer in self._reads.stirred():
            self._stir(peer)
        return taken

    def _hand_out(self, out: Completions) -> int:
        filled = super()._hand_out(out)
        if "_reads" in vars(self) and self._reads.open:
            ended = out[:filled]
            self._reads.open -= int(ended["count"][ended["kind"] == Kind.READ].sum())
        return filled

    def _take_error(self, error: CqError) -> None:
        if "_reads" in vars(self) and self._reads.owns(error.context):
            self._texts[Status.PROVIDER] = error.text
            self._reads.landed(error.context, failed=True)
        else:
            super()._take_error(error)

    def arm(self) -> bool:
        if "_reads" in vars(self) and any(map(self._reads.is_postable, self._restless)):
            return False
        return super().arm()

    def _look_at_deadlines(self, now_s: float) -> None:
        for peer in [peer for peer in self._restless if peer.reading]:
            if self._reads.expire(peer, now_s):
                self._peers.doubt(peer, now_s)
                self._stir(peer)
        super()._look_at_deadlines(now_s)
        if now_s >= self._next_chore_s:
            self._do_chores(now_s)

    def _row_failed(self, ticket: Ticket, row: int, error: CqError) -> None:
        self._texts[Status.PROVIDER] = error.text
        peer = self._peers.all[ticket.peer.index]
        self._rows.lose(ticket, peer, row)
        self._peers.doubt(peer, time.monotonic())
        self._stir(peer)

    # --- looking after peers

    def forget(self, peer: int) -> None:
        if self._closed or self._nic.closed or not self._rules.endpoint_per_peer:
            return  # all peers share one endpoint
        found = self._peers.all[peer]
        found.forget_s = time.monotonic() + self._timeout_s
        self._stir(found)

    def _go_on(self, peer: SoftwarePeer, now_s: float) -> None:
        super()._go_on(peer, now_s)
        if peer.reading:
            self._reads.advance(peer)
            self._peers.flush(peer, now_s)
        if peer.forget_s:
            self._peers.let_go(peer, now_s)

    def _do_chores(self, now_s: float) -> None:
        self._next_chore_s = now_s + _STRANGERS_S
        self._strangers.look()

    def _chore_s(self) -> float:
        return _STRANGERS_S

    def _drop(self, peer: SoftwarePeer, status: Status, *, spare: bool, gone: bool = False) -> None:
        if self._rules.endpoint_per_peer:
            # Its endpoint is closed: what surfaces in the queue now is the last of its rows. Frames
            # wait until it has ended: one of its own greets it again.
            self._queue.drain(self._done, self._take_errors)
            self._mailbox.reclaim(peer)
            gone = True
        if peer.reading:
            self._reads.end(peer, status, gone=gone)
        super()._drop(peer, status, spare=spare, gone=gone)
        if self._rules.endpoint_per_peer:
            self._take_rest()

    def _end_all(self, status: Status, *, gone: bool = True) -> None:
        for peer in self._peers.all:
            if peer.reading:  # they end in buffers of ours, so that they are over in any case
                self._reads.end(peer, Status.FLUSHED, gone=gone)
        super()._end_all(status, gone=gone)

    def _shut(self) -> None:
        if "_reads" in vars(self):
            self._main.close()
            self._reads.close()
        self._strangers.close()
        super()._shut()
