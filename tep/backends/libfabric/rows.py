"""Rows on their way out: checked, then posted, held until their peer is ready, or failed.

The fast paths post a batch's rows by columns, or one row without a detour; whatever is not as
simple as that (several peers, a peer not ready, a row out of range) goes row by row.

Rule 1: an accepted row is in exactly one place: in flight (a ticket), waiting (held for its peer,
or lost on tcp, see tcp.py), or failed into `done`. Rule 2: a row is posted once. One that failed
is never posted again: it may have landed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tep.backends.base import Kind, Row, Status, WriteBatch
from tep.backends.common import at, most, part, row_of
from tep.backends.libfabric.objects import Region
from tep.backends.libfabric.peer import Peer, State
from tep.backends.libfabric.peers import Peers
from tep.backends.libfabric.slots import READ, Ticket
from tep.base.units import MiB

if TYPE_CHECKING:
    from tep.backends.libfabric.objects import Endpoint

__all__ = ["Rows"]

_WRITE: Final = int(Kind.WRITE)
_READ: Final = int(Kind.READ)
_READY: Final = State.READY  # looking it up in its class takes 0.1 us
_EACH_MAX: Final = 256  # rows posted one by one in a call

_SLOWEST_BYTES_PER_S: Final = 64 * MiB
"""A row may take this much longer than peer_timeout_s, since nothing is heard before its end. A
guess: a quarter of what tcp on one crowded core reaches."""


class Rows:
    """The rows of one NIC that have been accepted and have not ended.

    Args:
        stir: called with a peer that has something to be sent or looked after.

    Attributes:
        waiting: how many are neither in flight nor have ended.
        budget_bytes: what may still be posted before the next poll.
        refusal: what libfabric last said when it refused a row.
    """

    def __init__(self, peers: Peers, stir: Callable[[Peer], None]) -> None:
        parts = peers.parts
        rules, caps = parts.rules, parts.caps
        self.waiting = 0
        self.refusal = 0
        self.budget_bytes = rules.turn_bytes
        self._depth = caps.sq_depth
        self._longest = caps.max_write_bytes
        self._window_bytes = rules.window_bytes
        self._window_rows = rules.window_rows
        self._slots, self._regions, self._done = parts.slots, parts.regions, parts.done
        self._peers = peers
        self._nothing = parts.mailbox.region  # what empty rows read from: an address must be valid
        self._timeout_s = parts.timeout_s
        self._stir = stir
        self._fresh: set[Peer] = set()  # whose rows have ended, which poll() has not said yet

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        """Accept rows start.. of a batch; return how many."""
        room = self._depth - self._slots.open - self.waiting
        if stop - start > room:
            stop = start + room
        if stop <= start:
            return 0
        if type(batch.peer) is int and type(batch.rkey) is int:
            peer = self._peers.all[batch.peer]
            if peer.state is _READY and not peer.held:
                region = self._regions.by_lkey.get(batch.lkey)
                if region is not None:
                    if batch.n == 1 and not batch.ctx & READ:
                        taken = 1 if self._post_lone(batch, peer, region) else None
                    else:
                        taken = self._post_same(batch, start, stop, peer, region)
                    if taken is not None:
                        return taken
        return self.post_each(batch, start, min(stop, start + _EACH_MAX))

    # --- the fast paths: one peer, one key, all in range

    def _may_go(
        self,
        batch: WriteBatch,
        start: int,
        stop: int,
        peer: Peer,  # noqa: ARG002  # for tcp
        region: Region,
    ) -> bool:
        """Tell whether rows of a batch may be posted as they are."""
        return region.holds(part(batch.src, start, stop), part(batch.nbytes, start, stop))

    def _post_lone(self, batch: WriteBatch, peer: Peer, region: Region) -> bool:
        """Post the only row of a batch, under one int as its key; False = nothing was done."""
        src, dst, nbytes, imm = batch.src, batch.dst, batch.nbytes, batch.imm
        if not (type(src) is int and type(dst) is int and type(nbytes) is int):
            return False
        if not (imm is None or type(imm) is int):
            return False
        slots = self._slots
        if (slots.open or slots.adrift) and (
            not slots.room or (slots.open and slots.nbytes + nbytes > self._window_bytes)
        ):
            return False
        if not (region.start <= src and src + nbytes <= region.end and 0 < nbytes <= self._longest):
            return False
        endpoint = peer.endpoint or self._peers.endpoint(peer)
        due_s = time.monotonic() + self._timeout_s + nbytes / _SLOWEST_BYTES_PER_S
        ticket = Ticket(batch, 0, peer, region, due_s)
        try:
            taken = slots.post_row(
                endpoint.writemsg,
                endpoint.ready,
                ticket,
                src,
                dst,
                batch.rkey,  # type: ignore[arg-type]  # an int: see post()
                nbytes,
                imm,
            )
        except OSError as error:
            self.refusal = error.errno or 0
            return False
        return taken == 1

    def _post_same(
        self, batch: WriteBatch, start: int, stop: int, peer: Peer, region: Region
    ) -> int | None:
        """Post as many rows as the window holds; None = not so simple, nothing was done."""
        slots, nbytes = self._slots, batch.nbytes
        wanted = min(stop - start, slots.chunk_rows)
        longest = most(part(nbytes, start, start + wanted))
        window = min(self._window_rows, self._window_bytes // longest if longest else wanted)
        n = min(wanted, slots.room)
        if longest:
            n = min(n, (self._window_bytes - slots.nbytes) // longest)
        if not slots.room:
            return 0
        # Half a window at a time: a row by itself costs ten times what it costs among others.
        if slots.open and n < max(1, min(wanted, window // 2)):
            return 0
        if self.budget_bytes <= 0:
            return 0
        n = max(n, 1)
        if n * longest > self.budget_bytes:
            n = self.budget_bytes // longest or 1
        if longest > self._longest or not self._may_go(batch, start, start + n, peer, region):
            return None
        due_s = time.monotonic() + self._timeout_s + n * longest / _SLOWEST_BYTES_PER_S
        endpoint = peer.endpoint or self._peers.endpoint(peer)
        ticket = Ticket(batch, start, peer, region, due_s)
        try:
            taken = slots.post(_call(endpoint, batch), endpoint.ready, ticket, n)
        except OSError as error:
            self.refusal = error.errno or 0
            return None
        self.budget_bytes -= taken * longest
        if taken or peer.open:
            return taken
        return None  # nothing of it is in flight, so nothing would tell when to offer it again

    # --- row by row

    def post_each(self, batch: WriteBatch, start: int, stop: int) -> int:
        """Accept rows one by one; return how many."""
        taken = 0
        try:
            for index, row in enumerate(batch.rows(start, stop), start):
                if not self._place(batch, index, row):
                    break
                taken += 1
        except MemoryError:
            if not taken:
                raise
        return taken

    def _place(self, batch: WriteBatch, index: int, row: Row) -> bool:
        """Post, hold or fail one row; False = no room now."""
        if batch.ctx & READ and not row.nbytes:  # its keys mean nothing (C29): no device is asked
            self.fail(batch.ctx, index, Status.OK)
            return True
        peer = self._peers.all[row.peer]
        if peer.state is State.SILENT and peer not in self._fresh:
            self._peers.greet(peer, time.monotonic())
        status = self._verdict(peer, row)
        if status is not Status.OK:
            self.fail(batch.ctx, index, status)
            return True
        granted = self._granted(peer, row.rkey)
        if granted and peer.state is State.READY:
            posted = self._post_row(batch, index, row, peer)
            if posted is not None:
                return posted
        peer.held.append((batch, index, time.monotonic() + self._timeout_s))
        self.waiting += 1
        self._stir(peer)
        return True

    def _verdict(self, peer: Peer, row: Row) -> Status:
        """Tell whether a row can be, as far as is known."""
        if row.nbytes:  # an empty row has no source
            region = self._regions.by_lkey.get(row.lkey)
            if region is None or not region.holds(row.src, row.nbytes):
                return Status.LOCAL_KEY
        if row.nbytes > self._longest:
            return Status.LENGTH
        if peer.over:
            return peer.status
        if peer in self._fresh and peer.state is not State.READY:
            return Status.UNREACHABLE  # who posts it has not heard of those before it
        return Status.OK

    def _granted(self, peer: Peer, rkey: int) -> bool:  # noqa: ARG002  # see tcp.py
        """Tell whether rows under a key may be posted; False = asked for, and not known yet."""
        return True

    def _post_row(self, batch: WriteBatch, index: int, row: Row, peer: Peer) -> bool | None:
        """Post one row; False = full, None = its peer takes nothing."""
        slots = self._slots
        if slots.room == 0 or (slots.open and slots.nbytes + row.nbytes > self._window_bytes):
            return False
        region = self._regions.by_lkey[row.lkey] if row.nbytes else self._nothing
        if not row.nbytes:
            row = row._replace(src=region.memory.ptr)
        due_s = time.monotonic() + self._timeout_s + row.nbytes / _SLOWEST_BYTES_PER_S
        endpoint = self._peers.endpoint(peer)
        call = _call(endpoint, batch)
        ticket = Ticket(batch, index, peer, region, due_s)
        try:
            if slots.post_row(
                call, endpoint.ready, ticket, row.src, row.dst, row.rkey, row.nbytes, row.imm
            ):
                return True
        except OSError as error:
            self.refusal = error.errno or 0
            self.fail(batch.ctx, index, Status.PROVIDER)
            return True
        if peer.open:
            return False
        # Nothing of it is in flight, so nothing would tell when to offer it again: does it live?
        self._peers.doubt(peer, time.monotonic())
        return None

    def fail(self, ctx: int, row: int, status: Status) -> None:
        if ctx & READ:
            self._slots.reads -= 1
            self._done.append((_READ, int(status), 1, 0, row, ctx ^ READ, 0))
            return
        self._done.append((_WRITE, int(status), 1, 0, row, ctx, 0))

    # --- rows that wait

    def go_on(self, peer: Peer) -> None:
        """A peer is READY: post its held rows as far as they go."""
        while peer.held and peer.state is State.READY:
            batch, index, _ = peer.held[0]
            row = row_of(batch, index)
            status = self._verdict(peer, row)
            if status is not Status.OK:
                self.fail(batch.ctx, index, status)
            elif not self._granted(peer, row.rkey) or not self._post_row(batch, index, row, peer):
                return
            peer.held.popleft()
            self.waiting -= 1

    def expire(self, peer: Peer, now_s: float) -> None:
        """End the rows that have waited too long for a peer's word: it is there, or a lease."""
        while peer.held:
            batch, index, due_s = peer.held[0]
            rkey = at(batch.rkey, index)
            if due_s > now_s or (peer.state is State.READY and self._granted(peer, rkey)):
                return
            self.fail(batch.ctx, index, Status.UNREACHABLE)
            self._fresh.add(peer)
            peer.held.popleft()
            self.waiting -= 1

    def said(self) -> None:
        """Allow rows to peers whose failures poll() has returned by now to be tried again."""
        self._fresh.clear()

    def end(self, peer: Peer, status: Status, *, gone: bool, spare: bool = False) -> None:
        """End all rows to a peer, but with `spare` none that are not posted and not due.

        `gone` says that libfabric has let go of what was in flight.
        """
        slots = self._slots
        # Reads that the device has still may write where they go.
        reads = status if gone or status is Status.NIC_DOWN else Status.GIVEN_UP
        for ticket in [ticket for ticket in slots.tickets.values() if ticket.peer is peer]:
            ctx = ticket.batch.ctx
            for row in slots.give_up(ticket, gone=gone):
                self.fail(ctx, row, reads if ctx & READ else status)
        until_s = time.monotonic() if spare else math.inf
        while peer.held and peer.held[0][2] <= until_s:
            batch, row, _ = peer.held.popleft()
            self.waiting -= 1
            self.fail(batch.ctx, row, status)
        if spare and self._done:
            self._fresh.add(peer)


def _call(endpoint: Endpoint, batch: WriteBatch) -> Callable[..., int]:
    return endpoint.readmsg if batch.ctx & READ else endpoint.writemsg
