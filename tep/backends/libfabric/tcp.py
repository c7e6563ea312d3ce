"""One NIC on tcp behind the seam: tcp, tcp;ofi_rxm; what these need beside what every NIC does.

- Leases. tcp says nothing useful of a bad key, so the owner of a region is asked first which range
  a key opens; it says when the range is withdrawn. Rule 1: no row goes without a lease.
- Lost rows. tcp does not say what was wrong with a row that failed: it is lost until its peer has
  answered, which says that it lives, and whether the key is void.
- Endpoints. Each peer has its own, which is closed with it. On rxm all share one.
- Strangers. libfabric accepts whoever connects to a NIC's port, and keeps the connection for as
  long as the other end does. Its sockets are found among the process's descriptors, by the NIC's
  port, and those whose other end has not said Hello are shut down where they are many, or old;
  libfabric then closes them. A peer that is hung up on this way connects again. Rule 2: a thread of
  libfabric's may close a socket at any time, and its number may then be another file's. So a socket
  is looked at, and shut down, through a descriptor of our own.
"""

from __future__ import annotations

import functools
import os
import resource
import socket
import stat
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tep.backends.base import Completions, DomainKey, Kind, ReadBatch, Row, Status, WriteBatch
from tep.backends.columns import at
from tep.backends.libfabric import frames
from tep.backends.libfabric.address import is_loopback, parse
from tep.backends.libfabric.domain import FabricDomain
from tep.backends.libfabric.objects import CqError, Endpoint, Option
from tep.backends.libfabric.peer import Peer
from tep.backends.libfabric.reads import TcpReads
from tep.backends.libfabric.regions import Region, bounds
from tep.backends.libfabric.rows import Rows
from tep.backends.libfabric.slots import Ticket

__all__ = ["STRANGERS_MAX", "STRANGER_S", "Strangers", "TcpDomain"]

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

libfabric's own greeting is 40 bytes on tcp, 56 on tcp;ofi_rxm, and the frame with our Hello at
least 100 more. Measured with libfabric 2.5.1.
"""

# struct tcp_info, linux/tcp.h: u8 tcpi_state at 0; u32 tcpi_last_data_recv at 52, milliseconds
# since data came, or since the connection; u64 tcpi_bytes_received at 128 (Linux 4.1).
_INFO: Final = struct.Struct("=B51xI72xQ")
_ESTABLISHED: Final = 1  # net/tcp_states.h
_DESCRIPTORS: Final = Path("/proc/self/fd")
_DESCRIPTORS_MAX: Final = 1 << 16  # looked through one by one where they cannot be listed


class TcpRows(Rows):
    """The rows of one NIC that have been accepted and have not ended."""

    # --- leases

    def _check(self, batch: WriteBatch, peer: Peer, region: Region) -> bool:
        assert isinstance(batch.rkey, int)
        lease = peer.leases.get(batch.rkey)
        if not lease:
            return False
        base, nbytes = lease
        first, end = bounds(batch.dst, batch.nbytes)
        if not (nbytes and base <= first and end <= base + nbytes):
            return False
        return super()._check(batch, peer, region)

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
        self._checked.clear()

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

    def _open_main(self, options: tuple[Option, ...]) -> Endpoint:
        self._askers: dict[int, set[int]] = {}  # peers that hold a lease, by rkey
        main = self._nic.open_endpoint(options)
        self._nic.release_port()
        # sockaddr_in and sockaddr_in6 have the port there
        self._strangers = Strangers(int.from_bytes(main.name()[2:4], "big"))
        return main

    def _why_nobody(self) -> str:
        met = [peer.address for peer in self._peers.all]
        own = parse(self._peers.me, self._rules.provider)
        return _LOOPBACK if any(is_loopback(one.raw) for one in (own, *met)) else ""

    # --- leases

    def deregister(self, key: DomainKey) -> None:
        super().deregister(key)
        if not (self._closed or self._nic.closed):
            for index in self._askers.pop(key.rkey, ()):
                self._say(self._peers.all[index], frames.Revoke(self.address, key.rkey))

    def _cut(self, key: DomainKey) -> None:
        """Nothing to do: a registration that is closed early would lose the rows in flight."""

    def _take_talk(self, peer: Peer, frame: frames.Frame, now_s: float) -> None:
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
    def _reads(self) -> TcpReads:
        """Made with the first read: its buffers are some MiB."""
        reads = TcpReads(
            self.caps, self._nic, self._regions, self._peers, self._done, self._timeout_s
        )
        self._queue.landed, self._queue.landed_many = reads.landed, reads.landed_many
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
        self._rows.lose(ticket, row)
        self._peers.doubt(ticket.peer, time.monotonic())
        self._stir(ticket.peer)

    # --- looking after peers

    def forget(self, peer: int) -> None:
        if self._closed or self._nic.closed or not self._rules.endpoint_per_peer:
            return  # all peers share one endpoint
        found = self._peers.all[peer]
        found.forget_s = time.monotonic() + self._timeout_s
        self._stir(found)

    def _go_on(self, peer: Peer, now_s: float) -> None:
        super()._go_on(peer, now_s)
        if peer.reading:
            self._reads.advance(peer)
            self._peers.flush(peer, now_s)
        if peer.forget_s:
            self._peers.let_go(peer, now_s)

    def _do_chores(self, now_s: float) -> None:
        self._next_chore_s = now_s + _STRANGERS_S
        self._strangers.look()

    def _drop(self, peer: Peer, status: Status, *, spare: bool, gone: bool = False) -> None:
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


class Strangers:
    """Strangers at one NIC.

    Args:
        port: where the NIC listens.

    Attributes:
        refused: how many were hung up on.
    """

    def __init__(self, port: int) -> None:
        self.refused = 0
        self._port = port
        self._known: set[int] = set()  # inodes of sockets that are no strangers
        self._null = self._held = -1

    def close(self) -> None:
        """Give back the descriptors; nobody may look any more."""
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
            if not self._connected(sock):
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

    def _connected(self, sock: socket.socket) -> bool:
        """Tell whether this is a connection to our port."""
        return (
            sock.family in {socket.AF_INET, socket.AF_INET6}
            and sock.type == socket.SOCK_STREAM
            and sock.getsockname()[1] == self._port
        )


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
