"""One NIC on tcp behind the seam: what it needs beside what every NIC does; README.md says why.

- Leases: the owner of a region says which range a key opens, and when that ends. Rule 1: no row
  goes without a lease.
- Lost rows. tcp does not say what was wrong with a row that failed: it is lost until its peer has
  answered, which says that it lives, and whether the key is void.
- Reads. Each piece of a row lands in a buffer of this NIC; then the owner is asked whether the key
  opens the range still. If it does, every byte was read while it did, and is copied to where it
  belongs. The answer also says that the owner is of the incarnation that was meant. A row that has
  ended is over: what comes later of it stays in the buffer. Rule 2: a buffer is used again only
  when libfabric has given it back.
- Strangers. libfabric accepts whoever connects to a NIC's port, and keeps the connection for as
  long as the other end does. Those whose other end has not said Hello are shut down where they are
  many, or old; libfabric then closes them, and a peer connects again. Rule 3: a thread of
  libfabric's may close a socket at any time, and its number may then be another file's. So a socket
  is looked at, and shut down, through a descriptor of our own.
"""

from __future__ import annotations

import itertools
import mmap
import os
import resource
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterable
from ctypes import memmove
from pathlib import Path
from typing import Any, Final

import numpy as np

from tep.backends.base import (
    Completions,
    DomainCaps,
    DomainKey,
    Kind,
    ReadBatch,
    ReadRow,
    Row,
    Status,
    WriteBatch,
    hand_out,
)
from tep.backends.common import at, bounds, part
from tep.backends.ffi import libfabric as fi
from tep.backends.ffi.libc import ip_address
from tep.backends.libfabric import frames
from tep.backends.libfabric.domain import SHORT_POLLS, FabricDomain
from tep.backends.libfabric.objects import CqError, Nic, Region, mr_attr
from tep.backends.libfabric.peer import Accepted, Peer, PeersReads, Piece, State
from tep.backends.libfabric.peers import Peers
from tep.backends.libfabric.rows import Rows
from tep.backends.libfabric.rules import Rules, parse
from tep.backends.libfabric.slots import Ticket, descriptors
from tep.host.ways import is_loopback
from tep.memory.source import adapt

__all__ = ["READS_MAX", "STRANGERS_MAX", "STRANGER_S", "Strangers", "TcpDomain"]

_LOOPBACK: Final = (
    "a loopback address is reached on its own host only; for peers on other hosts open both ends "
    'with an interface or a network: nics=["eth0"], nics=["10.0.0.0/8"]'
)
_STRANGERS_S: Final = 2.0
"""Seconds from one look at strangers to the next; libfabric's threads accept them meanwhile."""

STRANGERS_MAX: Final = 64
STRANGER_S: Final = 10.0

_HELLO_BYTES_MIN: Final = 100
"""A peer has sent more than this once it has said Hello.

libfabric's own greeting is 40 bytes, and the frame with our Hello at
least 100 more. Measured with libfabric 2.5.1.
"""

# struct tcp_info, linux/tcp.h: u8 tcpi_state at 0; u32 tcpi_last_data_recv at 52, milliseconds
# since data came, or since the connection; u64 tcpi_bytes_received at 128 (Linux 4.1).
_INFO: Final = struct.Struct("=B51xI72xQ")
_ESTABLISHED: Final = 1  # net/tcp_states.h
_DESCRIPTORS: Final = Path("/proc/self/fd")
_DESCRIPTORS_MAX: Final = 1 << 16  # looked through one by one where they cannot be listed


READS_MAX: Final = 256
"""Rows of reads outstanding on one NIC."""

_PIECES: Final = 64
_PIECE_BYTES: Final = 64 * 1024
_SLOT_BYTES: Final = 64  # a fi_context2, which some providers write into
_READ: Final = int(Kind.READ)
_BOUNCE_KEY: Final = (1 << 62) - 2  # no region's, nor the mailbox's


class TcpRows(Rows):
    """The rows of one NIC that have been accepted and have not ended."""

    # --- leases

    def _may_go(self, batch: WriteBatch, start: int, stop: int, peer: Peer, region: Region) -> bool:
        assert isinstance(batch.rkey, int)
        base, nbytes = peer.leases.get(batch.rkey) or (0, 0)
        first, end = bounds(part(batch.dst, start, stop), part(batch.nbytes, start, stop))
        if not (nbytes and base <= first and end <= base + nbytes):
            return False
        return super()._may_go(batch, start, stop, peer, region)

    def _post_lone(self, batch: WriteBatch, peer: Peer, region: Region) -> bool:
        lease = peer.leases.get(batch.rkey)  # type: ignore[arg-type]  # an int: see post()
        if not lease:
            return False
        base, nbytes = lease
        if not base <= batch.dst <= base + nbytes - batch.nbytes:  # arrays of one are refused below
            return False
        return Rows._post_lone(self, batch, peer, region)  # super() takes 0.1 us more

    def _verdict(self, peer: Peer, row: Row) -> Status:
        status = super()._verdict(peer, row)
        lease = peer.leases.get(row.rkey)
        if status is not Status.OK or lease is None:
            return status
        base, nbytes = lease
        if not nbytes:
            return Status.OK if base and not row.nbytes else Status.REMOTE_KEY
        inside = base <= row.dst and row.dst + row.nbytes <= base + nbytes
        return Status.OK if inside else Status.REMOTE_RANGE

    def _granted(self, peer: Peer, rkey: int) -> bool:
        if rkey not in peer.leases:
            peer.leases[rkey] = None
            self._peers.say(peer, frames.Ask(self._peers.me, rkey))
            self._stir(peer)
        return peer.leases.get(rkey) is not None

    # --- rows that came back failed

    def lose(self, ticket: Ticket, row: int) -> None:
        """A row came back failed: it waits for the verdict on its peer."""
        peer, ctx, rkey = ticket.peer, ticket.batch.ctx, ticket.batch.rkey
        if peer.over:
            self.fail(ctx, row, peer.status)
            return
        peer.lost.append((ctx, row, at(rkey, row)))
        self.waiting += 1

    def go_on(self, peer: Peer) -> None:
        """A peer is READY: settle its lost rows, then post its held ones as far as they go."""
        for _ in range(len(peer.lost)):  # it lives, so they failed for a reason of their own
            ctx, row, rkey = peer.lost.pop(0)
            if self._granted(peer, rkey):
                self.waiting -= 1
                void = peer.leases[rkey] == (0, 0)
                self.fail(ctx, row, Status.REMOTE_KEY if void else Status.PROVIDER)
            else:
                peer.lost.append((ctx, row, rkey))
        super().go_on(peer)

    def end(self, peer: Peer, status: Status, *, gone: bool, spare: bool = False) -> None:
        for ctx, row, _ in peer.lost:
            self.fail(ctx, row, status)
        self.waiting -= len(peer.lost)
        peer.lost.clear()
        super().end(peer, status, gone=gone, spare=spare)


class TcpDomain(FabricDomain):
    """One NIC."""

    _rows: TcpRows
    _rows_kind = TcpRows
    _chore_s = _STRANGERS_S

    def __init__(self, nic: Nic, rules: Rules, caps: DomainCaps, **how: Any) -> None:
        super().__init__(nic, rules, caps, **how)
        self._askers: dict[int, set[int]] = {}  # peers that hold a lease, by rkey
        # sockaddr_in and sockaddr_in6 have the port there
        self._strangers = Strangers(int.from_bytes(self._main.name()[2:4], "big"))
        self._reads = TcpReads(self.peers, self._restless.add)
        self._queue.landed = self._reads.landed

    def _why_nobody(self) -> str:
        met = [peer.address for peer in self.peers.all]
        own = parse(self.peers.me, self._rules.provider)
        raws = [one.raw for one in (own, *met)]
        return _LOOPBACK if any(is_loopback(ip_address(raw)) for raw in raws) else ""

    # --- leases

    def deregister(self, key: DomainKey) -> None:
        super().deregister(key)
        if not (self._closed or self.nic.closed):
            for index in self._askers.pop(key.rkey, ()):
                peer = self.peers.all[index]
                self.peers.say(peer, frames.Revoke(self.address, key.rkey))
                self._stir(peer)

    def _cut(self, key: DomainKey) -> None:
        """Nothing to do: a registration that is closed early would lose the rows in flight."""

    def _take_talk(self, peer: Peer, frame: frames.Frame, now_s: float) -> None:
        match frame:
            case frames.Ask(rkey=rkey, number=number):
                found = self._regions.range_of(rkey, reads=number > 0)
                if found[1]:
                    self._askers.setdefault(rkey, set()).add(peer.index)
                self.peers.say(peer, frames.Lease(self.address, rkey, *found, number))
            case frames.Lease(number=0):
                peer.leases[frame.rkey] = frame.base, frame.nbytes
            case frames.Lease():
                self._reads.answered(peer, frame)
            case frames.Revoke(rkey=rkey):
                peer.leases[rkey] = (0, 0)
                if peer.reading is not None:
                    peer.reading.ranges[rkey] = (0, 0)
            case _:
                super()._take_talk(peer, frame, now_s)

    # --- reads

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        self._check_open()
        before = self._reads.open
        try:
            self._reads.post(batch, start, stop)  # poll() sends them
        except MemoryError:  # some may have been taken
            self._short = SHORT_POLLS
        return self._reads.open - before

    def _hand_out(self, out: Completions) -> int:
        filled, _, reads = hand_out(self._done, out, 0)
        self._reads.open -= reads
        if not self._done:
            self._rows.said()
        return filled

    def _take_error(self, error: CqError) -> None:
        if self._reads.owns(error.context):
            self._texts[Status.PROVIDER] = error.text
            self._reads.landed(error.context, failed=True)
        else:
            super()._take_error(error)

    def _is_offering(self, peer: Peer) -> bool:
        return super()._is_offering(peer) or self._reads.is_postable(peer)

    def _look_at_deadlines(self, now_s: float) -> None:
        for peer in [peer for peer in self._restless if peer.reading]:
            if self._reads.expire(peer, now_s):
                self.peers.doubt(peer, now_s)
                self._stir(peer)
        super()._look_at_deadlines(now_s)
        if now_s >= self._next_chore_s:
            self._do_chores(now_s)

    def _row_failed(self, ticket: Ticket, row: int, error: CqError) -> None:
        self._texts[Status.PROVIDER] = error.text
        self._rows.lose(ticket, row)
        self.peers.doubt(ticket.peer, time.monotonic())
        self._stir(ticket.peer)

    # --- looking after peers

    def forget(self, peer: int) -> None:
        if self._closed or self.nic.closed:
            return
        found = self.peers.all[peer]
        found.forget_s = time.monotonic() + self.timeout_s
        self._stir(found)

    def _go_on(self, peer: Peer, now_s: float) -> None:
        super()._go_on(peer, now_s)
        if peer.reading:
            self._reads.advance(peer)
            self.peers.flush(peer, now_s)
        if peer.forget_s:
            self.peers.let_go(peer, now_s)

    def _do_chores(self, now_s: float) -> None:
        self._next_chore_s = now_s + _STRANGERS_S
        self._strangers.look()

    def _drop(self, peer: Peer) -> None:
        # Its endpoint is closed: what surfaces in the queue now is the last of its rows. Frames
        # wait until it has ended: one of its own greets it again.
        self._queue.drain(self._done, self._take_errors)
        self._mailbox.reclaim(peer)
        if peer.reading:
            self._reads.end(peer, peer.status, gone=True)
        super()._drop(peer)
        self._take_rest()

    def _end_all(self, status: Status, *, gone: bool = True) -> None:
        for peer in self.peers.all:
            if peer.reading:  # they end in buffers of ours, so that they are over in any case
                self._reads.end(peer, Status.FLUSHED, gone=gone)
        super()._end_all(status, gone=gone)

    def _shut(self) -> None:
        self._strangers.close()
        super()._shut()


class TcpReads:
    """The reads of one NIC.

    Args:
        stir: called with a peer that has to be looked after by each poll().

    Attributes:
        open: rows accepted and not handed out; the owner subtracts.
    """

    def __init__(self, peers: Peers, stir: Callable[[Peer], object]) -> None:
        parts = peers.parts
        self.open = 0
        self._caps, self._regions, self._done = parts.caps, parts.regions, parts.done
        self._timeout_s = parts.timeout_s
        self._stir = stir
        self._peers = peers
        self._numbers = itertools.count(1)
        self._bytes = mmap.mmap(-1, _PIECES * (_PIECE_BYTES + _SLOT_BYTES))
        memory = adapt(self._bytes)
        attr, flags, kept = mr_attr(memory, fi.FI_READ)
        attr.requested_key = _BOUNCE_KEY
        self._handle = parts.nic.register(attr, flags)  # the NIC, which closes it, does not hold it
        del kept
        self._buffers = memory.ptr
        self._contexts = memory.ptr + _PIECES * _PIECE_BYTES
        self._pieces: list[Piece | None] = [None] * _PIECES
        self._free = list(range(_PIECES))
        self._flags = fi.ready(fi.FI_COMPLETION)
        self._records, self._messages = records, _ = descriptors(_PIECES)
        slots = np.arange(_PIECES, dtype=np.uint64)
        records["src"] = np.uint64(self._buffers) + np.uint64(_PIECE_BYTES) * slots
        records["context"] = np.uint64(self._contexts) + np.uint64(_SLOT_BYTES) * slots
        records["desc"] = int(self._handle.contents().mem_desc or 0)

    # --- posting

    def post(self, batch: ReadBatch, start: int, stop: int) -> None:
        """Accept rows start.. of a batch, as many as there is room for; `open` counts them."""
        stop = min(stop, start + self._caps.reads - self.open)
        if stop <= start:
            return
        now_s = time.monotonic()
        find = self._regions.by_lkey.get
        rows = [
            Accepted(batch.ctx, index, row, find(row.lkey), row.nbytes)
            for index, row in enumerate(batch.rows(start, stop), start)
        ]
        for accepted in rows:
            peer = self._peers.all[accepted.row.peer]
            if peer.state is State.SILENT:
                self._peers.greet(peer, now_s)
            status = self._verdict(peer, accepted.row, accepted.region)
            if status is not Status.OK:
                self._finish(accepted, status)
                self.open += 1
                continue
            self._stir(peer)
            if peer.reading is None:
                peer.reading = PeersReads()
            if not peer.reading.open:
                peer.reading.moved_s = now_s
            peer.reading.open[accepted] = None
            self.open += 1
            peer.reading.waiting.append(accepted)

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
        self._peers.say(peer, frames.Ask(self._peers.me, rkey, number))
        self._stir(peer)

    def _post_row(self, peer: Peer, reads: PeersReads, accepted: Accepted) -> bool:
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

    def _post_piece(self, peer: Peer, reads: PeersReads, accepted: Accepted) -> bool:
        row, at, slot = accepted.row, accepted.posted, self._free[-1]
        nbytes = min(row.nbytes - at, _PIECE_BYTES)
        record = self._records[slot]
        record["src_len"] = record["dst_len"] = nbytes
        record["dst"], record["rkey"], record["peer"] = row.remote + at, row.rkey, peer.number
        endpoint = peer.endpoint or self._peers.endpoint(peer)
        rc = endpoint.readmsg(endpoint.ready, self._messages[slot], self._flags)
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

    def answered(self, peer: Peer, frame: frames.Lease) -> None:
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

    def _settle(self, reads: PeersReads, accepted: Accepted, piece: Piece, *, holds: bool) -> None:
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

    def _end_row(self, reads: PeersReads, accepted: Accepted, status: Status) -> None:
        del reads.open[accepted]
        self._finish(accepted, status)

    def _finish(self, accepted: Accepted, status: Status) -> None:
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


class Strangers:
    """Strangers at the port of one NIC; `refused` counts those that were hung up on."""

    def __init__(self, port: int) -> None:
        self.refused = 0
        self._port = port
        self._known: set[int] = set()  # inodes of sockets that are no strangers
        self._null = self._held = -1

    def close(self) -> None:
        for fd in (self._held, self._null):
            if fd >= 0:
                os.close(fd)

    def look(self) -> None:
        """Hang up on strangers that are too many, the oldest first, or have been here too long."""
        try:  # the first time; then one is here when all others are in use
            if self._null < 0:
                self._null = os.open(os.devnull, os.O_RDONLY)
            if self._held < 0:
                self._held = os.dup(self._null)
        except OSError:
            return
        known: set[int] = set()
        found: list[tuple[float, int]] = []  # how long it has been silent, its descriptor
        for fd in _descriptors():
            inode = _socket(fd)
            if not inode:
                continue
            silent_s = 0.0 if inode in self._known else self._silent_s(fd)
            if silent_s:
                found.append((silent_s, fd))
            else:
                known.add(inode)
        self._known = known
        most = max(1, min(STRANGERS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        for number, (silent_s, fd) in enumerate(sorted(found, reverse=True)):
            if len(found) - number > most or silent_s > STRANGER_S:
                self.refused += bool(self._silent_s(fd, hang_up=True))

    def _silent_s(self, fd: int, *, hang_up: bool = False) -> float:
        """For how long a stranger has been silent; 0 = this is none."""
        try:
            os.dup2(fd, self._held, inheritable=False)
            sock = socket.socket(fileno=self._held)
        except OSError:  # closed meanwhile, or no socket any more
            return 0.0
        try:
            # A connection to our port?
            if sock.family not in {socket.AF_INET, socket.AF_INET6}:
                return 0.0
            if sock.type != socket.SOCK_STREAM or sock.getsockname()[1] != self._port:
                return 0.0
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            if len(info) < _INFO.size:
                return 0.0
            state, silent_ms, received = _INFO.unpack(info)
            if state != _ESTABLISHED or received >= _HELLO_BYTES_MIN:
                return 0.0
            if hang_up:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end was quicker
            return 0.0
        finally:
            sock.detach()
            os.dup2(self._null, self._held, inheritable=False)
        return max(0.001, float(silent_ms) / 1000)


def _socket(fd: int) -> int:
    """The inode of a socket; 0 = the descriptor is of something else, or closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return 0
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else 0


def _descriptors() -> Iterable[int]:
    try:
        return [int(path.name) for path in _DESCRIPTORS.iterdir()]
    except OSError:  # there is none left to list them with
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _DESCRIPTORS_MAX))
