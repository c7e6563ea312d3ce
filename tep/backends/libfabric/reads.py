"""Reads on tcp: into buffers of ours, and on from there at the owner's word.

The provider can neither take a read back nor say whether its key still held. So each piece of a
row lands in a buffer of this NIC; then the owner is asked whether the key opens the range still. If
it does, every byte was read while it did, and is copied to where it belongs. A row that has ended
is over: what comes later of it stays in the buffer. An answer also says that the owner lives, and
that it is of the incarnation that was meant.

Rule: a buffer is used again only when libfabric has given it back.
"""

from __future__ import annotations

import itertools
import mmap
import time
from collections import deque
from ctypes import memmove
from typing import Final

import numpy as np

from tep.backends.base import DomainCaps, Entry, Kind, ReadBatch, ReadRow, Status
from tep.backends.ffi import libfabric as fi
from tep.backends.libfabric import frames
from tep.backends.libfabric.objects import Nic
from tep.backends.libfabric.peer import Peer, PeersReads, Piece, Row, State
from tep.backends.libfabric.peers import Peers
from tep.backends.libfabric.regions import Region, Regions, mr_attr
from tep.backends.libfabric.slots import I64
from tep.memory.source import adapt

__all__ = ["READS_MAX", "TcpReads"]

READS_MAX: Final = 256
"""Rows of reads outstanding on one NIC."""

_PIECES: Final = 64
_PIECE_BYTES: Final = 64 * 1024
_SLOT_BYTES: Final = 64  # a fi_context2, which some providers write into
_READ: Final = int(Kind.READ)
_BOUNCE_KEY: Final = (1 << 62) - 2  # no region's, nor the mailbox's

# One read, all words of 64 bits: iovec, fi_rma_iov, the array of one descriptor, fi_msg_rma.
_RECORD: Final = np.dtype(
    [
        (name, "<u8")
        for name in (
            *("here", "here_len", "there", "there_len", "rkey", "desc"),
            *("p_iov", "p_desc", "iov_count", "peer", "p_rma", "rma_count", "context", "data"),
        )
    ]
)
_MSG_AT: Final = 48


class TcpReads:
    """The reads of one NIC.

    Attributes:
        open: rows accepted and not handed out; the owner subtracts.
    """

    def __init__(
        self,
        caps: DomainCaps,
        nic: Nic,
        regions: Regions,
        peers: Peers,
        done: deque[Entry],
        timeout_s: float,
    ) -> None:
        self.open = 0
        self._caps = caps
        self._regions = regions
        self._peers = peers
        self._done = done
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._stirred: dict[Peer, None] = {}
        self._bytes = mmap.mmap(-1, _PIECES * (_PIECE_BYTES + _SLOT_BYTES))
        memory = adapt(self._bytes)
        attr, flags, kept = mr_attr(memory, fi.FI_READ)
        attr.requested_key = _BOUNCE_KEY
        self._handle = nic.register(attr, flags)
        del kept
        self._buffers = memory.ptr
        self._contexts = memory.ptr + _PIECES * _PIECE_BYTES
        self._pieces: list[Piece | None] = [None] * _PIECES
        self._free = list(range(_PIECES))
        self._flags = fi.ready(fi.FI_COMPLETION)
        records = self._records = np.zeros(_PIECES, _RECORD)
        slots = np.arange(_PIECES, dtype=np.uint64)
        at = np.uint64(records.ctypes.data) + np.uint64(_RECORD.itemsize) * slots
        records["here"] = np.uint64(self._buffers) + np.uint64(_PIECE_BYTES) * slots
        records["context"] = np.uint64(self._contexts) + np.uint64(_SLOT_BYTES) * slots
        records["desc"] = int(self._handle.contents().mem_desc or 0)
        records["p_iov"], records["p_rma"] = at, at + np.uint64(16)
        records["p_desc"] = at + np.uint64(40)
        records["iov_count"] = records["rma_count"] = 1
        self._messages = list(map(fi.ready, (at + np.uint64(_MSG_AT)).tolist()))

    # --- posting

    def post(self, batch: ReadBatch, start: int, stop: int) -> int:
        """Accept rows start.. of a batch; return how many."""
        stop = min(stop, start + self._caps.reads - self.open)
        if stop <= start:
            return 0
        self.open += stop - start
        now_s = time.monotonic()
        for index, row in enumerate(batch.rows(start, stop), start):
            region = self._regions.by_lkey.get(row.lkey)
            peer = self._peers.all[row.peer]
            if peer.state is State.SILENT:
                self._peers.greet(peer, now_s)
            status = self._verdict(peer, row, region)
            accepted = Row(batch.ctx, index, row, region)
            if status is not Status.OK:
                self._finish(accepted, status)
                continue
            if peer.reading is None:
                peer.reading = PeersReads()
            if not peer.reading.open:
                peer.reading.moved_s = now_s
            peer.reading.open[accepted] = None
            peer.reading.waiting.append(accepted)
            self._stirred[peer] = None
        for peer in self._stirred:
            self.advance(peer)
        return stop - start

    def stirred(self) -> list[Peer]:
        """Peers that have something to be sent, or looked after, since the last call."""
        found = list(self._stirred)
        self._stirred.clear()
        return found

    def _verdict(self, peer: Peer, row: ReadRow, region: Region | None) -> Status:
        if row.nbytes and (
            region is None or not region.sink or not region.holds(row.local, row.nbytes)
        ):
            return Status.LOCAL_KEY
        if row.nbytes > self._caps.max_write_bytes:
            return Status.LENGTH
        return peer.status if peer.over else Status.OK

    def advance(self, peer: Peer) -> None:
        """Post what can be posted; ask what has to be asked."""
        reads = peer.reading
        if reads is None or peer.state is not State.READY:
            return
        for rkey in [rkey for rkey in reads.landed if rkey not in reads.asked]:
            self._ask(peer, reads, rkey, reads.landed.pop(rkey))
        while reads.waiting:
            accepted = reads.waiting[0]
            if not (accepted.ended or self._post_row(peer, reads, accepted)):
                return
            reads.waiting.popleft()

    def is_postable(self, peer: Peer) -> bool:
        """Tell whether advance() would get on, as far as is known."""
        reads = peer.reading
        if not reads or not reads.waiting or not self._free or peer.state is not State.READY:
            return False
        return reads.ranges.get(reads.waiting[0].row.rkey) is not None

    def _ask(self, peer: Peer, reads: PeersReads, rkey: int, pieces: list[Piece]) -> None:
        number = next(self._numbers)
        reads.asked[rkey] = number, pieces
        self._peers.say(peer, frames.AskRead(self._peers.me, rkey, number))
        self._stirred[peer] = None

    def _post_row(self, peer: Peer, reads: PeersReads, accepted: Row) -> bool:
        """Post the rest of a row, or end it; False = not all of it yet."""
        row = accepted.row
        if not row.nbytes:
            self._end_row(reads, accepted, Status.OK)
            return True
        if row.rkey not in reads.ranges:
            reads.ranges[row.rkey] = None
            self._ask(peer, reads, row.rkey, [])
        found = reads.ranges[row.rkey]
        if found is None:
            return False
        base, nbytes = found
        if not nbytes or not base <= row.remote <= base + nbytes - row.nbytes:
            status = Status.REMOTE_RANGE if nbytes else Status.REMOTE_KEY
            self._end_row(reads, accepted, status)
            return True
        while accepted.posted < row.nbytes:
            if not self._free or not self._post_piece(peer, reads, accepted):
                return accepted.ended
        return True

    def _post_piece(self, peer: Peer, reads: PeersReads, accepted: Row) -> bool:
        row, at, slot = accepted.row, accepted.posted, self._free[-1]
        nbytes = min(row.nbytes - at, _PIECE_BYTES)
        record = self._records[slot]
        record["here_len"] = record["there_len"] = nbytes
        record["there"], record["rkey"], record["peer"] = row.remote + at, row.rkey, peer.number
        endpoint = peer.endpoint or self._peers.endpoint(peer)
        rc = endpoint.readmsg_long(endpoint.ready, self._messages[slot], self._flags)
        if rc == -fi.FI_EAGAIN:
            return False
        if rc:
            self._end_row(reads, accepted, Status.PROVIDER)
            return False
        self._free.pop()
        self._pieces[slot] = Piece(slot, reads, accepted, at, nbytes)
        accepted.posted += nbytes
        return True

    # --- coming back

    def owns(self, context: int) -> bool:
        """Tell whether a completion's context is one of ours."""
        return 0 <= context - self._contexts < _PIECES * _SLOT_BYTES

    def landed(self, context: int, *, failed: bool = False) -> None:
        """A piece is in its buffer, or never will be; advance() asks about it."""
        slot = (context - self._contexts) // _SLOT_BYTES
        piece, self._pieces[slot] = self._pieces[slot], None
        if piece is None:
            return  # it was taken back with its endpoint
        if piece.row.ended:
            self._free.append(slot)
            return
        piece.failed = failed
        reads = piece.reads
        reads.landed.setdefault(piece.row.row.rkey, []).append(piece)
        if not failed:
            reads.moved_s = time.monotonic()

    def landed_many(self, contexts: I64) -> None:
        """Pieces are in their buffers; dozens."""
        for context in contexts.tolist():
            self.landed(context)

    def answered(self, peer: Peer, frame: frames.Readable) -> None:
        """The owner says what a key opens: what had landed before the question is good, or not."""
        reads = peer.reading
        if reads is None or reads.asked.get(frame.rkey, (0, []))[0] != frame.number:
            return
        reads.ranges[frame.rkey] = frame.base, frame.nbytes
        reads.moved_s = time.monotonic()
        for piece in reads.asked.pop(frame.rkey)[1]:
            self._free.append(piece.slot)
            accepted = piece.row
            if not accepted.ended:
                self._settle(reads, accepted, piece, holds=frame.nbytes > 0)
        self.advance(peer)

    def _settle(self, reads: PeersReads, accepted: Row, piece: Piece, *, holds: bool) -> None:
        row = accepted.row
        if not holds:
            self._end_row(reads, accepted, Status.REMOTE_KEY)
        elif piece.failed:
            self._end_row(reads, accepted, Status.PROVIDER)
        elif self._regions.by_lkey.get(row.lkey) is not accepted.region:
            self._end_row(reads, accepted, Status.LOCAL_KEY)
        else:
            at = self._buffers + piece.slot * _PIECE_BYTES
            memmove(row.local + piece.at, at, piece.nbytes)
            accepted.left -= piece.nbytes
            if not accepted.left:
                self._end_row(reads, accepted, Status.OK)

    def _end_row(self, reads: PeersReads, accepted: Row, status: Status) -> None:
        del reads.open[accepted]
        self._finish(accepted, status)

    def _finish(self, accepted: Row, status: Status) -> None:
        accepted.ended = True
        self._done.append((_READ, int(status), 1, 0, accepted.index, accepted.ctx, 0))

    # --- ends

    def expire(self, peer: Peer, now_s: float) -> bool:
        """End the reads of a peer that has been silent for too long; return whether it was."""
        reads = peer.reading
        if not reads or now_s - reads.moved_s < self._timeout_s:
            return False
        self.end(peer, Status.UNREACHABLE, gone=False)
        return True

    def end(self, peer: Peer, status: Status, *, gone: bool) -> None:
        """End all reads of a peer; `gone` = libfabric has let go of what was in flight."""
        reads = peer.reading
        assert reads is not None
        for accepted in list(reads.open):
            self._end_row(reads, accepted, status)
        back = [*itertools.chain(*reads.landed.values())]
        back += itertools.chain(*(pieces for _, pieces in reads.asked.values()))
        self._free += [piece.slot for piece in back]
        if gone:
            for slot, piece in enumerate(self._pieces):
                if piece is not None and piece.reads is reads:
                    self._pieces[slot] = None
                    self._free.append(slot)
        peer.reading = None

    def close(self) -> None:
        """Unregister the buffers, after the endpoints are closed."""
        self._handle.close()
