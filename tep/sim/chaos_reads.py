"""Reads on the chaos fabric: a request, the owner's bytes at drawn times, and hostile ends.

A request travels to the owner, is checked there, and is answered in fragments: each is taken from
the owner's memory at its own time, and placed here at another. Rule: once a read has ended nothing
of it is placed, except after NIC_DOWN and GIVEN_UP, which promise nothing, until close().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tep.backends.base import Kind, ReadBatch, ReadRow, Status
from tep.base.hashing import below
from tep.base.units import PS_PER_NS
from tep.sim.chaos_nic import ChaosNic
from tep.sim.chaos_parts import Fabric, Flight, Host, Nic, NicState, Peer, Region
from tep.sim.chaos_receiver import ACK_PS

__all__ = ["ChaosReader"]

_READ: Final = int(Kind.READ)
_LATE_PS: Final = 2000 * PS_PER_NS  # a few undisturbed rows
_AGAIN_PS: Final = 50 * PS_PER_NS  # between two looks at a link that is clogged


class _ReadFlight:
    """One read from its post to its completion.

    Attributes:
        peer, number, bits, ctx, index, nbytes: as of a Flight.
        sink: the region here; None for 0 bytes.
        at: byte in it, where the first one goes.
        remote, rkey: what is read.
        left: fragments that are not placed yet; 0: all are.
        flying: whether nothing is known of its end yet.
        ended: whether its completion is made.
        ghost: whether fragments are placed even after that.
        stuck_ps: since when it is stuck on a link, while the time it may be so runs; else -1.
    """

    __slots__ = (
        "at", "bits", "ctx", "ended", "flying", "ghost", "index", "left", "nbytes", "number",
        "peer", "remote", "rkey", "sink", "stuck_ps",
    )  # fmt: skip

    def __init__(
        self, spec: ReadRow, peer: Peer, number: int, bits: int, ctx: int, index: int
    ) -> None:
        self.peer, self.number, self.bits, self.ctx, self.index = peer, number, bits, ctx, index
        self.nbytes, self.remote, self.rkey = spec.nbytes, spec.remote, spec.rkey
        self.sink: Region | None = None
        self.at = 0
        self.left = -1
        self.flying = True
        self.ended = self.ghost = False
        self.stuck_ps = -1


_Piece = tuple[_ReadFlight, int, int, bytes | None]
"""Bytes from..to of a read, and the bytes where they were taken when the request came."""


class ChaosReader(ChaosNic):
    """One NIC of the chaos fabric, which also reads."""

    def __init__(self, fabric: Fabric, node: Host, number: int) -> None:
        super().__init__(fabric, node, number)
        self._reading: dict[int, _ReadFlight] = {}

    # ------------------------------------------------------------------ posting

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        room = self._room(stop - start, self.caps.reads - len(self._reading))
        for index, spec in enumerate(batch.rows(start, start + room), start):
            self.rows += 1
            number = self.fabric.rows = self.fabric.rows + 1
            bits = self._draws.row(self._uid + self.rows)
            read = _ReadFlight(spec, self._peers[spec.peer], number, bits, batch.ctx, index)
            self._reading[number] = read
            self._launch_read(read, spec)
        return room

    def _launch_read(self, read: _ReadFlight, spec: ReadRow) -> None:
        if read.nbytes:
            sink = read.sink = self._sinks.get(spec.lkey)
            if sink is None or not 0 <= spec.local - sink.ptr <= sink.nbytes - read.nbytes:
                self._doom_read(read, Status.LOCAL_KEY, ACK_PS)
                return
            read.at = spec.local - sink.ptr
        peer = read.peer
        if peer.target is None:
            peer.target = self.fabric.find(peer.name, peer.nic, peer.epoch)
        if self.state is NicState.DEAD:
            self._doom_read(read, Status.FLUSHED, self._read_delay(read, ACK_PS * 2))
        elif read.nbytes > self.caps.max_write_bytes:
            self._doom_read(read, Status.LENGTH, ACK_PS)
        elif peer.target is None or peer.target.state is not NicState.UP:
            status = self.fabric.why_lost(peer.name, peer.epoch)
            self._doom_read(read, status, self._read_delay(read, self._chaos.dead_after_ps))
        else:
            drawn = self._draws.fragment(self._uid + self.rows, 5)
            self._env.call_at(self._env.now + self._flight_ps(drawn), self._ask, read)

    # ------------------------------------------------------------------ at the owner

    def _ask(self, read: _ReadFlight) -> None:
        """The request is at the owner."""
        target = read.peer.target
        assert target is not None
        if not (read.flying or read.ghost):
            return
        if read.flying and self._is_stuck(read, target, self._ask, read):
            return
        found = target.readable_at(read.rkey, read.remote, read.nbytes, self.address, read.number)
        if isinstance(found, Status):
            if read.flying:
                self._refuse_read(read, found)
            return
        if read.nbytes == 0:
            if read.flying:
                read.left = 0
                self._end_later(read)
            return
        chaos, bits = self._chaos, read.bits
        pieces = 1 + ((bits & 0xFF) * chaos.fragments >> 8) if read.nbytes > 1 else 1
        places = self._draws.row(self._uid + read.number, 2)
        cuts = [read.nbytes * ((places >> 16 * k) & 0xFFFF) >> 16 for k in range(pieces - 1)]
        cuts = sorted([0, *cuts, read.nbytes])
        read.left = pieces
        slow = max(self.link.factor, target.link.factor)
        for k in range(pieces):
            drawn = self._draws.fragment(self._uid + read.number, 8 + k)
            start, stop = cuts[k], cuts[k + 1]
            early = None if chaos.late_read and drawn & 3 else bytes(found[start:stop])
            due = self._env.now + slow * self._flight_ps(drawn)
            self._env.call_at(due, self._bring, (read, start, stop, early))
            if chaos.dup_place and (drawn >> 8) & 3 == 0:
                read.left += 1
                self._env.call_at(
                    due + 1 + (drawn >> 10) % ACK_PS, self._bring, (read, start, stop, early)
                )

    # ------------------------------------------------------------------ at the reader

    def _bring(self, piece: _Piece) -> None:
        """Bytes of the owner are here."""
        read, target = piece[0], piece[0].peer.target
        assert target is not None
        if read.flying:
            if not self._is_stuck(read, target, self._bring, piece, hears=True):
                self._place(piece)
        elif read.ghost:  # as late as it can harm: when the reader believes that it is over
            late_ps = _LATE_PS + self._chaos.dead_after_ps if read.ended else _AGAIN_PS
            self._env.call_at(
                self._env.now + late_ps, self._place if read.ended else self._bring, piece
            )

    def _place(self, piece: _Piece) -> None:
        """Write bytes of the owner to memory here."""
        read, start, stop, early = piece
        target, sink = read.peer.target, read.sink
        assert target is not None
        assert sink is not None
        if self.state in (NicState.CLOSED, NicState.GONE) or not (read.flying or read.ghost):
            return
        if not sink.alive:  # deregistered while the read was on its way
            if read.flying:
                self._refuse_read(read, Status.LOCAL_KEY)
            return
        data: bytes | memoryview | Status = (
            early
            if early is not None
            else target.readable_at(read.rkey, read.remote, read.nbytes, self.address, read.number)
        )
        if isinstance(data, Status):
            if read.flying:
                self._refuse_read(read, data)
            return
        if early is None:
            data = data[start:stop]
        sink.view[read.at + start : read.at + stop] = data
        if read.ended:
            self.fabric.seen["read placed after its end"] += 1
        read.left -= 1
        if read.left == 0 and read.flying:
            self._end_later(read)

    def _end_later(self, read: _ReadFlight) -> None:
        delay_ps = 1 + below(read.bits >> 16, ACK_PS)
        self._env.call_at(self._env.now + delay_ps, self._arrived, read)

    def _arrived(self, read: _ReadFlight) -> None:
        if read.flying:
            read.flying = False
            self._end_read((read, Status.OK))

    def _is_stuck(
        self,
        read: _ReadFlight,
        target: Nic,
        again: Callable[[Any], object],
        arg: object,
        *,
        hears: bool = False,
    ) -> bool:
        """Whether a link lets nothing through; then the same is tried again soon."""
        mine, its = self.link, target.link
        if mine.hears(its) if hears else its.lets_in(mine):
            return False
        now = self._env.now
        if read.stuck_ps < 0:
            read.stuck_ps = now
            self._env.call_at(now + self._chaos.dead_after_ps, self._expire_read, read)
        # The longer it takes the rarer are the looks: some links are clogged for half a second.
        self._env.call_at(now + max(_AGAIN_PS, (now - read.stuck_ps) // 8), again, arg)
        return True

    def _expire_read(self, read: _ReadFlight) -> None:
        target = read.peer.target
        assert target is not None
        read.stuck_ps = -1
        mine, its = self.link, target.link
        if not read.flying or read.left == 0 or (mine.hears(its) and its.lets_in(mine)):
            return
        if self._chaos.late_land and read.bits >> 48 & 1:
            read.ghost = True
            self._doom_read(read, Status.GIVEN_UP, ACK_PS)
        else:
            self._refuse_read(read, Status.UNREACHABLE)

    # ------------------------------------------------------------------ ends

    def _refuse_read(self, read: _ReadFlight, status: Status) -> None:
        """The owner, or this NIC on the way, will not have it."""
        self._doom_read(read, status, ACK_PS + below(read.bits, ACK_PS))
        if self._chaos.ordered and self._chaos.flush_on_error:
            self._flush_behind(read.peer)

    def refuse(self, row: Flight, status: Status) -> None:
        super().refuse(row, status)
        if self._chaos.ordered and self._chaos.flush_on_error:
            self._flush_behind(row.peer, writes=False)

    def _flush_behind(self, peer: Peer, *, writes: bool = True) -> None:
        """An error on a connection flushes what else is on it."""
        for read in self._reading.values():
            if read.flying and read.peer is peer and read.left:
                self._doom_read(read, Status.FLUSHED, ACK_PS * 2)
        for row in self._open.values() if writes else ():
            if row.flying and row.peer is peer and row.payload is None:
                self._doom(row, Status.FLUSHED, ACK_PS * 2)

    def _doom_read(self, read: _ReadFlight, status: Status, delay_ps: int) -> None:
        """Its error comes after a delay."""
        read.flying = False
        self._env.call_at(self._env.now + delay_ps, self._end_read, (read, status))

    def _read_delay(self, read: _ReadFlight, longest_ps: int) -> int:
        step = below(self._draws.error(self._uid + read.number, 1), 1000)
        return 1 + longest_ps // 2 + longest_ps // 2 * step // 1000

    def _end_read(self, ending: tuple[_ReadFlight, Status]) -> None:
        """Give a read its one completion."""
        read, status = ending
        if self._reading.pop(read.number, None) is None:
            return  # close() was quicker
        read.ended = True
        if status is not Status.OK:
            self.fabric.failed.append((self.caps.nic, read.ctx, read.index, status))
            self.fabric.seen[f"read {status.name}"] += 1
        nbytes = 0 if status else read.nbytes
        self._cq.push((_READ, int(status), 1, 0, read.index, read.ctx, nbytes))

    def close(self) -> None:
        if self.state is not NicState.CLOSED:
            for read in list(self._reading.values()):
                read.flying = read.ghost = False
                self._end_read((read, Status.FLUSHED))
        super().close()

    def kill(self) -> None:
        """Die. A read is flushed for good, or nobody knows, and then more of it may be placed."""
        if self.state is NicState.UP:
            for read in self._reading.values():
                if read.flying:
                    unknown = read.bits >> 49 & 1
                    read.ghost = bool(unknown and self._chaos.late_land)
                    status = Status.NIC_DOWN if unknown else Status.FLUSHED
                    self._doom_read(read, status, self._read_delay(read, ACK_PS * 2))
        super().kill()

    def vanish(self, status: Status) -> None:
        for read in self._reading.values():
            read.flying = read.ghost = False
        super().vanish(status)

    def peer_lost(self, target: Nic, status: Status, *, acks_lost: bool) -> None:
        super().peer_lost(target, status, acks_lost=acks_lost)
        for read in self._reading.values():
            if read.flying and read.left and read.peer.target is target:
                delay_ps = self._read_delay(read, self._chaos.dead_after_ps)
                self._doom_read(read, status, delay_ps)
