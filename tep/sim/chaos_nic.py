"""One NIC of the chaos fabric: a Domain of the seam that cuts, delays, reorders, repeats and fails.

Each row becomes 1 to 5 fragments, each an event of its own that copies real bytes, visible at once.
Here rows are sent, and end; what happens at their target is `chaos_receiver`'s matter.
Rule 1: the immediate of a row comes after all its bytes, and nothing else comes in any promised
order, unless `Chaos.ordered`. Rule 2: every accepted row is in `_open` until its one completion.
"""

from __future__ import annotations

import errno
from collections import Counter
from typing import Final

from tep.backends.base import Kind, Row, Status, WriteBatch
from tep.base.errors import UsageError
from tep.base.hashing import below
from tep.base.units import PS_PER_NS
from tep.sim.chaos_parts import Fabric, Flight, Fragment, Host, Link, Nic, NicState, nobody
from tep.sim.chaos_receiver import ACK_PS, ChaosReceiver
from tep.sim.faults import KillNic
from tep.sim.row_log import What

__all__ = ["ChaosNic"]

# The shape of an undisturbed row; choices, sized like Chaos's own times.
_ISSUE_PS: Final = 5 * PS_PER_NS
_BYTES_PER_NS: Final = 32
_LATENCY_PS: Final = 200 * PS_PER_NS
_AGAIN_PS: Final = 100 * PS_PER_NS  # after a post that was refused for no reason
_REPEAT_PS: Final = 50 * PS_PER_NS
_COPY_PS: Final = 4000 * PS_PER_NS  # a copy comes so much, or 4, 16 or 64 times as much, later
_MESSAGES_MAX: Final = 64
"""Messages have room of their own: one that waits for its reader holds back no row to others."""

_LATE: Final = (Status.NIC_DOWN, Status.UNREACHABLE, Status.FLUSHED)
"""What rows end with that may still land: their path died, or an error of others flushed them."""

_OK: Final = int(Status.OK)
_WRITE: Final = int(Kind.WRITE)
_SENT: Final = int(Kind.SENT)
_DOWN: Final = int(Kind.DOWN)


class ChaosNic(ChaosReceiver):
    """One NIC; made by ChaosFabric.node().

    Attributes:
        link: what its way to the others is like just now.
    """

    def __init__(self, fabric: Fabric, node: Host, number: int) -> None:
        super().__init__(fabric, node, number)
        skews = self._chaos.skew_ps
        self._latency_ps = _LATENCY_PS + skews[number % len(skews)]
        self.link: Link[Fragment, Flight] = Link(fabric.env, _land, _acknowledge)
        self._free_ps = 0
        self._posts = 0
        self._open: dict[int, Flight] = {}
        self._messages = 0

    def close(self) -> None:
        if self.state is NicState.CLOSED:
            return
        crashed = self.state is NicState.GONE
        self.state = NicState.CLOSED
        for row in list(self._open.values()):
            row.flying = False
            self._end((row, Status.FLUSHED))
        self._cq.flush()
        if not crashed:
            self.revoke()
            self.fabric.lost(self, Status.UNREACHABLE, acks_lost=False)

    # ------------------------------------------------------------------ sending

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        free = self._chaos.sq_depth - len(self._open) + self._messages
        wanted = stop - start
        if free > 0 and self._chaos.peer_depth:
            wanted = self._ahead(batch, start, stop)
        room = self._room(wanted, free)
        if room == 0:
            return 0
        for index, row in enumerate(batch.rows(start, start + room), start):
            self._launch(row, batch.ctx, index)
        return room

    def _ahead(self, batch: WriteBatch, start: int, stop: int) -> int:
        """How many rows come before the first one to a peer that holds as many as it may."""
        depth, peers = self._chaos.peer_depth, self._peers
        if isinstance(batch.peer, int):
            return min(stop - start, max(0, depth - peers[batch.peer].rows))
        more: Counter[int] = Counter()
        for ahead, peer in enumerate(batch.peer[start:stop].tolist()):
            more[peer] += 1
            if peers[peer].rows + more[peer] > depth:
                return ahead
        return stop - start

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        return self._send(peer, payload, ctx, is_control=False)

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        assert len(payload) <= self.caps.control_bytes, len(payload)
        return self._send(peer, payload, ctx, is_control=True)

    def _send(self, peer: int, payload: bytes, ctx: int, *, is_control: bool) -> bool:
        if self._room(1, _MESSAGES_MAX - self._messages, is_control=is_control) == 0:
            return False
        self._messages += 1
        row = self._accept(peer, ctx)
        row.payload = bytes(payload)
        row.is_control = is_control
        row.nbytes = len(payload)
        if self._row_log is not None:
            self._note("send", row, row.peer.name)
        if not self._is_hopeless(row, row.nbytes > self.caps.max_msg_bytes):
            if self._chaos.message_loss and self._is_lost(row):
                return True
            drawn = self._draws.message(self._uid + self.rows)
            due = self._book((row, 0, 0, None), self._env.now + self._flight_ps(drawn))
            twice = 15 - (row.bits >> 52 & 15) < self._chaos.control_dup
            if is_control and twice and not self.fabric.healed:
                self._env.call_at(due + 1 + (below(drawn, _COPY_PS) << 2 * (drawn & 3)), _copy, row)
        return True

    def _is_lost(self, row: Flight) -> bool:
        """Whether a message gets lost for good; it may also arrive, and only its answer be lost."""
        if self.fabric.healed or (row.bits >> 40) & 15 >= self._chaos.message_loss:
            return False
        row.unheard = bool(row.bits >> 44 & 1)
        self.fabric.seen["message lost"] += 1
        if not row.unheard:
            delay_ps = self._error_delay(row, self._chaos.dead_after_ps)
            self._doom(row, Status.UNREACHABLE, delay_ps)
        return not row.unheard

    def _room(self, wanted: int, room: int, *, is_control: bool = False) -> int:
        """How many of the rows offered are taken this time, where there is room for some."""
        if self.state is not NicState.UP:
            self._check_open()
        if self._chaos.post_fails and (why := self._fails(self._chaos.post_fails, 4)):
            self._fail_post(why, is_control=is_control)
        if self.state is NicState.DEAD and self._cq.down_seen:
            self.fabric.violations.append(f"{self.caps.nic}: posted on after its DOWN was polled")
        chaos = self._chaos
        room = min(room, wanted)
        if room <= 0:
            return 0  # the completion that makes room wakes the owner
        if chaos.refuse_post or (chaos.short_post and room > 1):
            self._posts += 1
            bits = self._draws.post(self._uid + self._posts)
            if chaos.refuse_post and (bits & 3) == 0:
                self._env.call_at(self._env.now + _AGAIN_PS, self._cq.wake)
                self.fabric.seen["post refused"] += 1
                return 0
            if chaos.short_post:
                room = 1 + below(bits, room)
        if room < wanted:
            self.fabric.seen["short post"] += 1
        return room

    def _fail_post(self, why: int, *, is_control: bool) -> None:
        """Raise what a post raises. Its owner calls again, or posts no more rows here."""
        if is_control:  # another NIC may be able to
            self.fabric.seen["control post failed"] += 1
            raise OSError(errno.ENOMEM, f"{self.caps.nic}: no memory for a control message (F29)")
        if why == 1:
            self.fabric.seen["post interrupted"] += 1
            raise OSError(errno.EINTR, f"{self.caps.nic}: interrupted by a signal (F29)")
        self.fabric.seen["post failed"] += 1
        self.fabric.happened.append(KillNic(self.node.name, self.number))
        if why == 2:
            raise MemoryError(f"{self.caps.nic}: no memory for a row (F29)")
        raise OSError(errno.ENOMEM, f"{self.caps.nic}: no memory for a row (F29)")

    def _accept(self, peer_id: int, ctx: int) -> Flight:
        if not 0 <= peer_id < len(self._peers):
            raise UsageError(
                f"{self.caps.nic}: peer {peer_id}, but {len(self._peers)} are connected"
            )
        self.rows += 1
        number = self.fabric.rows = self.fabric.rows + 1
        bits = self._draws.row(self._uid + self.rows)
        row = self._open[number] = Flight(self, self._peers[peer_id], number, bits, ctx)
        return row

    def _launch(self, spec: Row, ctx: int, index: int) -> None:
        row = self._accept(spec.peer, ctx)
        row.peer.rows += 1
        row.index = index
        row.dst = spec.dst
        row.rkey = spec.rkey
        nbytes = row.nbytes = spec.nbytes
        row.imm = spec.imm
        if nbytes:
            region = row.region = self._lkeys.get(spec.lkey)
            if region is None or not 0 <= spec.src - region.ptr <= region.nbytes - nbytes:
                self._doom(row, Status.LOCAL_KEY, ACK_PS)
                return
            row.src = spec.src - region.ptr
        if self._row_log is not None:
            self._note("post", row, row.peer.name, row.src)
        if self._is_hopeless(row, nbytes > self.caps.max_write_bytes):
            return
        self._scatter(row)

    def _is_hopeless(self, row: Flight, too_long: bool) -> bool:
        """Doom a row that cannot even leave; True if it cannot."""
        if self.state is NicState.DEAD:
            self._doom(row, Status.NIC_DOWN, self._error_delay(row, ACK_PS * 2))
        elif too_long:
            self._doom(row, Status.LENGTH, ACK_PS)
        else:
            peer = row.peer
            target = peer.target
            if target is None:
                target = peer.target = self.fabric.find(peer.name, peer.nic, peer.epoch)
            if target is not None and target.state is NicState.UP:
                return False
            status = self.fabric.why_lost(peer.name, peer.epoch)
            self._doom(row, status, self._error_delay(row, self._chaos.dead_after_ps))
        return True

    def _scatter(self, row: Flight) -> None:
        """Cut a row into fragments and book the landing of each."""
        chaos = self._chaos
        nbytes = row.nbytes
        uid = self._uid + self.rows
        bits = row.bits
        pieces = 1 + ((bits & 0xFF) * chaos.fragments >> 8) if nbytes > 1 else 1
        late = ((bits >> 8) & 0xFF) * pieces >> 8 if chaos.last_late_ps else -1
        if pieces == 1:
            cuts = [0, nbytes]
        else:
            places = self._draws.row(uid, 1)
            cuts = [nbytes * ((places >> 16 * k) & 0xFFFF) >> 16 for k in range(pieces - 1)]
            cuts += [0, nbytes]
            cuts.sort()
        row.left = pieces
        target = row.peer.target
        assert target is not None
        slow = max(self.link.factor, target.link.factor)
        takes_ps = _ISSUE_PS + slow * nbytes * PS_PER_NS // _BYTES_PER_NS
        leaves = self._free_ps = max(self._env.now, self._free_ps) + takes_ps
        for k in range(pieces):
            start, stop = cuts[k], cuts[k + 1]
            drawn = self._draws.fragment(uid, k)
            data = None
            if not chaos.late_read or (drawn & 0xFF) < 51:  # 20 % are read early
                data = _snapshot(row, start, stop)
            fragment = (row, start, stop, data)
            due = leaves + slow * self._flight_ps(drawn) + (chaos.last_late_ps if k == late else 0)
            due = self._book(fragment, due)
            if chaos.dup_place and (drawn >> 8) & 3 == 0:
                row.left += 1
                self._book(fragment, due + 1 + (drawn >> 10) % _REPEAT_PS)

    def _flight_ps(self, drawn: int) -> int:
        return self._latency_ps + below(drawn, self._chaos.reorder_ps + 1)

    def _book(self, fragment: Fragment, due: int) -> int:
        """Have a fragment land at a time, or later where the order asks for it; return when."""
        if self._chaos.ordered:
            peer = fragment[0].peer
            # Strictly later than all before, so that no shuffling of ties can turn them round.
            due = peer.landed_ps = max(due, peer.landed_ps + 1)
        self._env.call_at(due, _land, fragment)
        return due

    # ------------------------------------------------------------------ ending rows

    def acknowledge(self, row: Flight) -> None:
        if not row.flying:
            return
        target = row.peer.target
        assert target is not None
        mine, its = self.link, target.link
        if not mine.hears(its):
            stays = its.clogs and not (mine.clogs or mine.mutes or mine.deafs)
            (its if stays else mine).hold_ack(row)
            self.stuck(row)
            return
        if row.unheard:
            self._doom(row, Status.UNREACHABLE, self._error_delay(row, ACK_PS * 2))
            return
        row.flying = False
        odd = row.payload is None and 255 - (row.bits >> 56) < self._chaos.odd_errors
        if odd and not self.fabric.healed:
            self.fabric.seen["row PROVIDER"] += 1
        self._end((row, Status.PROVIDER if odd and not self.fabric.healed else Status.OK))

    def stuck(self, row: Flight) -> None:
        """A row, or its answer, cannot pass a link: it has so much time for that, and no more."""
        if not row.timed:
            row.timed = True
            self._env.call_at(self._env.now + self._chaos.dead_after_ps, self._expire, row)

    def _expire(self, row: Flight) -> None:
        target = row.peer.target
        assert target is not None
        row.timed = False
        mine, its = self.link, target.link
        passes = mine.hears(its) if row.left < 0 else its.lets_in(mine)
        if row.flying and not passes:
            self.refuse(row, Status.UNREACHABLE)

    def _doom(self, row: Flight, status: Status, delay_ps: int) -> None:
        """From now on nothing of the row lands, unless late; its error comes after a delay."""
        row.flying = False
        if status in _LATE:
            self._may_land_late(row)
        self._env.call_at(self._env.now + delay_ps, self._end, (row, status))

    def _may_land_late(self, row: Flight) -> None:
        if self._chaos.late_land and row.left > 0 and row.bits >> 48 & 1:
            row.ghost = _snapshot(row, 0, row.nbytes) or b""

    def _error_delay(self, row: Flight, longest_ps: int) -> int:
        # Times beyond 2**32 ps do not fit one draw; thousandths of the longest are fine enough.
        step = below(self._draws.error(self._uid + row.number), 1000)
        return 1 + longest_ps // 2 + longest_ps // 2 * step // 1000

    def refuse(self, row: Flight, status: Status) -> None:
        """The target, or this NIC on its way, will not have a row."""
        self._doom(row, status, ACK_PS + below(row.bits, ACK_PS))
        if self._chaos.ordered and self._chaos.flush_on_error:
            for other in self._open.values():
                if other.flying and other.peer is row.peer:
                    self._doom(other, Status.FLUSHED, ACK_PS * 2)

    def _end(self, ending: tuple[Flight, Status]) -> None:
        """Give a row its one completion."""
        row, status = ending
        if self._open.pop(row.number, None) is None:
            return  # close() was quicker
        if self._row_log is not None:
            what: What = "sent" if row.payload is not None else "fail" if status else "done"
            self._note(what, row, row.peer.name, value=int(status))
        if status is not Status.OK:
            self.fabric.failed.append((self.caps.nic, row.ctx, row.index, status))
        kind = _WRITE
        if row.payload is not None:
            kind = _SENT
            self._messages -= 1
        else:
            row.peer.rows -= 1
        nbytes = 0 if status else row.nbytes
        self._cq.push((kind, int(status), 1, 0, row.index, row.ctx, nbytes))

    # ------------------------------------------------------------------ faults

    def kill(self) -> None:
        """Die: what is in flight here ends NIC_DOWN, also what landed but was not acknowledged."""
        if self.state is not NicState.UP:
            return
        self.state = NicState.DEAD
        self._control_fault("kill")
        for row in self._open.values():
            if row.flying:
                self._doom(row, Status.NIC_DOWN, self._error_delay(row, ACK_PS * 2))
        delay_ps = below(self._draws.error(self._uid), ACK_PS * 2)
        self._env.call_at(self._env.now + delay_ps, self._announce_down)
        self.fabric.lost(self, Status.UNREACHABLE, acks_lost=True)

    def _announce_down(self, _: object) -> None:
        self._cq.push((_DOWN, int(Status.NIC_DOWN), 1, 0, 0, 0, 0))

    def vanish(self, status: Status) -> None:
        """The host crashed: nothing of this NIC is heard of again; rows towards it get `status`."""
        if self.state is NicState.GONE:
            return
        self.state = NicState.GONE
        self._control_fault("crash")
        for row in self._open.values():
            if row.flying and row.payload is None:
                self._may_land_late(row)
            row.flying = False
        self._cq.waker = nobody
        self.revoke()
        self.fabric.lost(self, status, acks_lost=True)

    def peer_lost(self, target: Nic, status: Status, *, acks_lost: bool) -> None:
        """Rows towards a NIC that is gone fail; answered ones only if the answers are lost.

        Where an error flushes, one row of a connection meets it, and the others are flushed after.
        """
        flushes = self._chaos.ordered and self._chaos.flush_on_error
        delays: dict[int, int] = {}
        for row in self._open.values():
            peer = row.peer
            if row.flying and peer.target is target and (acks_lost or row.left >= 0):
                peer.held = None
                known = delays.get(id(peer)) if flushes and row.payload is None else None
                if known is not None:
                    self._doom(row, Status.FLUSHED, known + 1)
                    continue
                delay_ps = self._error_delay(row, self._chaos.dead_after_ps)
                if row.payload is None:
                    delays[id(peer)] = delay_ps
                self._doom(row, status, delay_ps)


def _snapshot(row: Flight, start: int, stop: int) -> bytes | None:
    region = row.region
    return None if region is None else bytes(region.view[row.src + start : row.src + stop])


def _land(fragment: Fragment) -> None:
    row = fragment[0]
    target = row.peer.target
    assert target is not None, "a row without a target never leaves"
    its, mine = target.link, row.nic.link
    if its.lets_in(mine):
        target.land(fragment)
        return
    (its if its.clogs or its.deafs or not mine.clogs else mine).hold(fragment)
    row.nic.stuck(row)


def _copy(row: Flight) -> None:
    target = row.peer.target
    assert target is not None
    if target.state is NicState.UP and target.link.lets_in(row.nic.link):
        target.take_copy(row)


def _acknowledge(row: Flight) -> None:
    row.nic.acknowledge(row)
