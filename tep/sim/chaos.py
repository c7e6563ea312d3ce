"""The chaos fabric: nodes whose NICs break every promise that the contract does not make.

For correctness: every byte real, one event a fragment, time arbitrary. A crash takes a host with
all its NICs. A NIC is a Domain of the seam that cuts, delays, reorders, repeats and fails. Each row
becomes 1 to 5 fragments, each an event of its own that copies real bytes, visible at once. A read
is a request that travels to the owner, is checked there, and is answered in fragments: each is
taken from the owner's memory at its own time, and placed here at another. Here is what a NIC posts,
and how that ends; `chaos_target` has what lands at it, `faults` the knobs.

Rule 1: the immediate of a row comes after all its bytes, and nothing else comes in any promised
order, unless `Chaos.ordered`. Rule 2: every accepted write and message is in `_open`, and every
read in `_reading`, until its one completion. Rule 3: once a read has ended nothing of it is placed,
except after NIC_DOWN and GIVEN_UP, which promise nothing, until close().
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from tep.backends.base import Kind, ReadBatch, ReadRow, Row, Status, WriteBatch
from tep.base.checks import check_int
from tep.base.errors import UsageError
from tep.base.hashing import below
from tep.base.units import PS_PER_NS
from tep.sim.chaos_parts import NicState
from tep.sim.chaos_target import (
    ACK_PS,
    ChaosNode,
    ChaosTarget,
    Fabric,
    Flight,
    Fragment,
    Link,
    is_address,
    reach,
)
from tep.sim.clock import FabricEnv, in_one_process
from tep.sim.driver import nobody
from tep.sim.faults import (
    Chaos,
    Clog,
    Cut,
    Drift,
    Fault,
    KillNic,
    Mute,
    Pause,
    Restart,
    Revoke,
    Slow,
    Swizzle,
)
from tep.sim.row_log import RowLog, What

__all__ = ["ChaosFabric", "ChaosNic", "ChaosNode"]


_NICS_MAX: Final = 64


class ChaosFabric(Fabric):
    """Nodes on one clock, with the chaos of one record; see `Fabric` for its attributes.

    Args:
        env: the clock; `chaos.tie_shuffle` is switched on there.
        chaos: the knobs.
        row_log: where to record; None: nowhere.
    """

    def __init__(self, env: FabricEnv, chaos: Chaos, *, row_log: RowLog | None = None) -> None:
        super().__init__(env, chaos, row_log)
        if chaos.tie_shuffle:
            env.shuffle_ties(chaos.seed)

    __reduce__ = in_one_process

    def __repr__(self) -> str:
        nodes = ", ".join(self.nodes)
        return f"ChaosFabric(nodes {nodes or 'none'}; {self.rows} rows, {len(self.failed)} failed)"

    def node(self, name: str, nics: int) -> ChaosNode:
        """Add a host.

        Raises:
            UsageError: the name is taken, or cannot stand in an address, or so many NICs cannot be.
        """
        if name in self.nodes:
            raise UsageError(f"node {name!r} is there already; restart() makes a new incarnation")
        if not 1 <= nics <= _NICS_MAX:
            raise UsageError(f"node {name!r}: nics={nics}; 1 to {_NICS_MAX} are possible")
        made = self._make(name, len(self.nodes) + 1, nics, 1)
        if not is_address(made.nics[0].address):
            raise UsageError(f"node name {name!r}: 1 to 200 bytes of UTF-8 without NUL")
        self.nodes[name] = made
        return made

    def _make(self, name: str, uid: int, nics: int, epoch: int) -> ChaosNode:
        made = ChaosNode(self, name, uid, epoch)
        own = tuple(ChaosNic(self, made, number) for number in range(nics))
        made.domains = made.nics = own
        return made

    def watch(self, row_log: RowLog) -> None:
        """Record from now on; for a fabric that was made without a row log."""
        self.row_log = row_log
        for node in self.nodes.values():
            for nic in node.nics:
                nic.watch(row_log)

    def crash(self, name: str) -> None:
        """End a host as a pulled plug does; restart() can bring it back later."""
        for nic in self._node(name).nics:
            nic.vanish(Status.UNREACHABLE)

    def restart(self, name: str) -> ChaosNode:
        """Crash a host and start it again: same name, next epoch, no regions, no connections."""
        old = self._node(name)
        new = self._make(name, old.uid, len(old.nics), old.epoch + 1)
        self.nodes[name] = new
        for nic in old.nics:
            nic.vanish(Status.STALE_PEER)
        return new

    def kill_nic(self, name: str, nic: int) -> None:
        self._nic(name, nic).kill()

    def revoke(self, name: str, nic: int | None = None) -> None:
        """Lose the registrations of one NIC, or of all NICs of a node."""
        for number in range(len(self._node(name).nics)) if nic is None else (nic,):
            self._nic(name, number).revoke()

    def inflict(self, fault: Fault) -> None:
        match fault:
            case KillNic(name, nic):
                self.kill_nic(name, nic)
            case Revoke(name, nic):
                self.revoke(name, nic)
            case Restart(name):
                self.restart(name)
            case Drift(name, ppm, ahead_ps):
                check_int("Drift: ppm", ppm, -999_999)
                self._node(name).on_drift(
                    1_000_000 + ppm, check_int("Drift: ahead_ps", ahead_ps, 0)
                )
            case Pause(name, for_ps):
                self._node(name).pause(for_ps)
            case Slow(name, nic, factor, for_ps):
                self._nic(name, nic).link.slow(factor, for_ps)
            case Clog(name, nic, for_ps, inward):
                self._nic(name, nic).link.trouble("deaf" if inward else "clog", for_ps)
            case Cut(name, nic, peer, peer_nic, for_ps, one_way):
                here, there = self._nic(name, nic).link, self._nic(peer, peer_nic).link
                there.trouble(here, for_ps)
                if not one_way:
                    here.trouble(there, for_ps)
            case Mute(name, nic, for_ps):
                self._nic(name, nic).link.trouble("mute", for_ps)
            case Swizzle():
                for delay_ps, one in fault.clogs():
                    self.env.call_at(self.env.now + delay_ps, self._inflict_later, one)

    def _inflict_later(self, fault: Fault) -> None:
        if not self.healed:
            self.inflict(fault)

    def heal(self) -> None:
        """End every trouble of links and workers, for good; the dead stay dead."""
        self.healed = True
        for node in self.nodes.values():
            node.pause(0)
            for nic in node.nics:
                nic.link.heal()

    def _node(self, name: str) -> ChaosNode:
        if name not in self.nodes:
            raise UsageError(f"no node {name!r}; there are: {', '.join(self.nodes)}")
        return self.nodes[name]

    def _nic(self, name: str, nic: int) -> ChaosNic:
        nics = self._node(name).nics
        if not 0 <= nic < len(nics):
            raise UsageError(f"node {name!r} has NICs 0 to {len(nics) - 1}, not {nic}")
        found = nics[nic]
        assert isinstance(found, ChaosNic), "the fabric makes no others"
        return found


# The shape of an undisturbed row; choices, sized like Chaos's own times.
_ISSUE_PS: Final = 5 * PS_PER_NS
_BYTES_PER_NS: Final = 32
_LATENCY_PS: Final = 200 * PS_PER_NS
_AGAIN_PS: Final = 100 * PS_PER_NS  # after a post that was refused for no reason
_REPEAT_PS: Final = 50 * PS_PER_NS
_COPY_PS: Final = 4000 * PS_PER_NS  # a copy comes so much, or 4, 16 or 64 times as much, later
_LOOK_PS: Final = 50 * PS_PER_NS  # between two looks of a read at a link that is clogged
_LATE_PS: Final = 2000 * PS_PER_NS  # a few undisturbed rows
_MESSAGES_MAX: Final = 64
"""Messages have room of their own: one that waits for its reader holds back no row to others."""

_LATE: Final = (Status.NIC_DOWN, Status.UNREACHABLE, Status.FLUSHED)
"""Ends of rows that may still land: their path died, or an error of others flushed them."""

_WRITE: Final = int(Kind.WRITE)
_READ: Final = int(Kind.READ)
_SENT: Final = int(Kind.SENT)
_DOWN: Final = int(Kind.DOWN)


class ChaosNic(ChaosTarget):
    """One NIC; made by ChaosFabric.node()."""

    def __init__(self, fabric: Fabric, node: ChaosNode, number: int) -> None:
        super().__init__(fabric, node, number)
        skews = self._chaos.skew_ps
        self._latency_ps = _LATENCY_PS + skews[number % len(skews)]
        self.link = Link(fabric.env)
        self._free_ps = 0
        self._posts = 0
        self._open: dict[int, Flight] = {}
        self._reading: dict[int, Flight] = {}
        self._messages = 0

    def close(self) -> None:
        if self.state is NicState.CLOSED:
            return
        for read in list(self._reading.values()):
            read.flying, read.ghost = False, None
            self._end((read, Status.FLUSHED))
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

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        room = self._room(stop - start, self.caps.reads - len(self._reading))
        for index, row in enumerate(batch.rows(start, start + room), start):
            self._launch_read(row, batch.ctx, index)
        return room

    def _ahead(self, batch: WriteBatch, start: int, stop: int) -> int:
        """Count the rows before the first one to a peer that holds as many as it may."""
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
        row = self._accept(peer, ctx, _SENT)
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
        """Draw whether a message is lost for good, or arrives and only its answer is lost."""
        if self.fabric.healed or (row.bits >> 40) & 15 >= self._chaos.message_loss:
            return False
        row.ack_lost = bool(row.bits >> 44 & 1)
        self.fabric.seen["message lost"] += 1
        if not row.ack_lost:
            delay_ps = self._error_delay(row, self._chaos.dead_after_ps)
            self._doom(row, Status.UNREACHABLE, delay_ps)
        return not row.ack_lost

    def _room(self, wanted: int, room: int, *, is_control: bool = False) -> int:
        """Draw how many of the offered rows are taken this time, if there is room for some."""
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

    def _accept(self, peer_id: int, ctx: int, kind: int) -> Flight:
        if not 0 <= peer_id < len(self._peers):
            raise UsageError(
                f"{self.caps.nic}: peer {peer_id}, but {len(self._peers)} are connected"
            )
        self.rows += 1
        number = self.fabric.rows = self.fabric.rows + 1
        bits = self._draws.row(self._uid + self.rows)
        row = Flight(self, self._peers[peer_id], number, bits, ctx, kind)
        (self._reading if kind == _READ else self._open)[number] = row
        return row

    def _launch(self, spec: Row, ctx: int, index: int) -> None:
        row = self._accept(spec.peer, ctx, _WRITE)
        row.peer.rows += 1
        row.index = index
        row.remote = spec.dst
        row.rkey = spec.rkey
        nbytes = row.nbytes = spec.nbytes
        row.imm = spec.imm
        if nbytes:
            region = row.region = self._lkeys.get(spec.lkey)
            if region is None or not 0 <= spec.src - region.ptr <= region.nbytes - nbytes:
                self._doom(row, Status.LOCAL_KEY, ACK_PS)
                return
            row.at = spec.src - region.ptr
        if self._row_log is not None:
            self._note("post", row, row.peer.name, row.at)
        if self._is_hopeless(row, nbytes > self.caps.max_write_bytes):
            return
        self._scatter(row)

    def _launch_read(self, spec: ReadRow, ctx: int, index: int) -> None:
        read = self._accept(spec.peer, ctx, _READ)
        read.index = index
        read.remote = spec.remote
        read.rkey = spec.rkey
        nbytes = read.nbytes = spec.nbytes
        read.left = -1
        if nbytes:
            sink = read.region = self._sinks.get(spec.lkey)
            if sink is None or not 0 <= spec.local - sink.ptr <= sink.nbytes - nbytes:
                self._doom(read, Status.LOCAL_KEY, ACK_PS)
                return
            read.at = spec.local - sink.ptr
        if not self._is_hopeless(read, nbytes > self.caps.max_write_bytes):
            drawn = self._draws.fragment(self._uid + self.rows, 5)
            self._env.call_at(self._env.now + self._flight_ps(drawn), self._ask, read)

    def _is_hopeless(self, row: Flight, too_long: bool) -> bool:
        """Doom a row that cannot even leave; True if it cannot."""
        if self.state is NicState.DEAD:
            status = Status.FLUSHED if row.kind == _READ else Status.NIC_DOWN
            self._doom(row, status, self._error_delay(row, ACK_PS * 2))
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
        cuts = [0, nbytes] if pieces == 1 else _cuts(nbytes, pieces, self._draws.row(uid, 1))
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
        self._env.call_at(due, reach, fragment)
        return due

    # ------------------------------------------------------------------ at the owner

    def _ask(self, read: Flight) -> None:
        """Take the request at the owner."""
        target = read.peer.target
        assert target is not None
        if not read.flying and read.ghost is None:
            return
        if read.flying and self._is_stuck(read, target, self._ask, read):
            return
        found = target.readable_at(read.rkey, read.remote, read.nbytes, self.address, read.number)
        if isinstance(found, Status):
            if read.flying:
                self.refuse(read, found)
            return
        if read.nbytes == 0:
            if read.flying:
                read.left = 0
                self._end_later(read)
            return
        chaos, bits = self._chaos, read.bits
        pieces = 1 + ((bits & 0xFF) * chaos.fragments >> 8) if read.nbytes > 1 else 1
        cuts = _cuts(read.nbytes, pieces, self._draws.row(self._uid + read.number, 2))
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

    def _bring(self, piece: Fragment) -> None:
        """Take bytes of the owner that have come here."""
        read, target = piece[0], piece[0].peer.target
        assert target is not None
        if read.flying:
            if not self._is_stuck(read, target, self._bring, piece, acks=True):
                self._place(piece)
        elif read.ghost is not None and read.number in self._reading:
            self._env.call_at(self._env.now + _LOOK_PS, self._bring, piece)
        elif read.ghost is not None:  # as late as it can harm: the reader believes that it is over
            late_ps = _LATE_PS + self._chaos.dead_after_ps
            self._env.call_at(self._env.now + late_ps, self._place, piece)

    def _place(self, piece: Fragment) -> None:
        """Write bytes of the owner to memory here."""
        read, start, stop, early = piece
        target, sink = read.peer.target, read.region
        assert target is not None
        assert sink is not None
        if self.state in (NicState.CLOSED, NicState.GONE):
            return
        if not read.flying and read.ghost is None:
            return
        if not sink.alive:  # deregistered while the read was on its way
            if read.flying:
                self.refuse(read, Status.LOCAL_KEY)
            return
        data: bytes | memoryview | Status = (
            early
            if early is not None
            else target.readable_at(read.rkey, read.remote, read.nbytes, self.address, read.number)
        )
        if isinstance(data, Status):
            if read.flying:
                self.refuse(read, data)
            return
        if early is None:
            data = data[start:stop]
        sink.view[read.at + start : read.at + stop] = data
        if self._chaos.corrupt:
            self._turn_bit(read, sink.view[read.at + start : read.at + stop], start)
        if read.number not in self._reading:
            self.fabric.seen["read placed after its end"] += 1
        read.left -= 1
        if read.left == 0 and read.flying:
            self._end_later(read)

    def _end_later(self, read: Flight) -> None:
        delay_ps = 1 + below(read.bits >> 16, ACK_PS)
        self._env.call_at(self._env.now + delay_ps, self._arrived, read)

    def _arrived(self, read: Flight) -> None:
        if read.flying:
            read.flying = False
            self._end((read, Status.OK))

    def _is_stuck(
        self,
        read: Flight,
        target: ChaosTarget,
        again: Callable[[Any], object],
        arg: object,
        *,
        acks: bool = False,
    ) -> bool:
        """Whether a link lets nothing through; then the same is tried again soon."""
        mine, its = self.link, target.link
        if mine.lets_acks_in(its) if acks else its.lets_in(mine):
            return False
        now = self._env.now
        self.stuck(read)
        # The longer it takes the rarer are the looks: some links are clogged for half a second.
        self._env.call_at(now + max(_LOOK_PS, (now - read.stuck_ps) // 8), again, arg)
        return True

    # ------------------------------------------------------------------ ending rows

    def acknowledge(self, row: Flight) -> None:
        if not row.flying:
            return
        target = row.peer.target
        assert target is not None
        mine, its = self.link, target.link
        if not mine.lets_acks_in(its):
            stays = "clog" in its.troubles and not {"clog", "mute", "deaf"} & mine.troubles.keys()
            (its if stays else mine).acks.append(row)
            self.stuck(row)
            return
        if row.ack_lost:
            self._doom(row, Status.UNREACHABLE, self._error_delay(row, ACK_PS * 2))
            return
        row.flying = False
        odd = row.payload is None and 255 - (row.bits >> 56) < self._chaos.odd_errors
        if odd and not self.fabric.healed:
            self.fabric.seen["row PROVIDER"] += 1
        self._end((row, Status.PROVIDER if odd and not self.fabric.healed else Status.OK))

    def stuck(self, row: Flight) -> None:
        """A row, or its answer, cannot pass a link: it has so much time for that, and no more."""
        if row.stuck_ps < 0:
            row.stuck_ps = self._env.now
            self._env.call_at(self._env.now + self._chaos.dead_after_ps, self._expire, row)

    def _expire(self, row: Flight) -> None:
        target = row.peer.target
        assert target is not None
        row.stuck_ps = -1
        mine, its = self.link, target.link
        if row.kind == _READ:
            passes = not row.left or (mine.lets_acks_in(its) and its.lets_in(mine))
        else:
            passes = mine.lets_acks_in(its) if row.left < 0 else its.lets_in(mine)
        if passes or not row.flying:
            return
        if row.kind == _READ and self._chaos.late_land and row.bits >> 48 & 1:
            row.ghost = b""
            self._doom(row, Status.GIVEN_UP, ACK_PS)
        else:
            self.refuse(row, Status.UNREACHABLE)

    def _doom(self, row: Flight, status: Status, delay_ps: int) -> None:
        """From now on nothing of the row lands, unless late; its error comes after a delay."""
        row.flying = False
        if status in _LATE and row.kind != _READ:
            self._may_land_late(row)
        self._env.call_at(self._env.now + delay_ps, self._end, (row, status))

    def _may_land_late(self, row: Flight) -> None:
        if self._chaos.late_land and row.left > 0 and row.bits >> 48 & 1:
            row.ghost = _snapshot(row, 0, row.nbytes) or b""

    def _error_delay(self, row: Flight, longest_ps: int) -> int:
        # Times beyond 2**32 ps do not fit one draw; thousandths of the longest are fine enough.
        index = 1 if row.kind == _READ else 0
        step = below(self._draws.error(self._uid + row.number, index), 1000)
        return 1 + longest_ps // 2 + longest_ps // 2 * step // 1000

    def refuse(self, row: Flight, status: Status) -> None:
        """End a row that its target, or this NIC on its way, will not have."""
        self._doom(row, status, ACK_PS + below(row.bits, ACK_PS))
        if self._chaos.ordered and self._chaos.flush_on_error:
            self._flush_behind(row)

    def _flush_behind(self, row: Flight) -> None:
        """An error on a connection flushes what else is on it; one of a read spares messages."""
        peer, spares = row.peer, row.kind == _READ
        reads = [one for one in self._reading.values() if one.left]
        rows = [one for one in self._open.values() if not spares or one.payload is None]
        for other in reads + rows if spares else rows + reads:
            if other.flying and other.peer is peer:
                self._doom(other, Status.FLUSHED, ACK_PS * 2)

    def _end(self, ending: tuple[Flight, Status]) -> None:
        """Give a row its one completion."""
        row, status = ending
        kind = row.kind
        reads = kind == _READ
        if (self._reading if reads else self._open).pop(row.number, None) is None:
            return  # close() was quicker
        if self._row_log is not None and not reads:
            what: What = "sent" if kind == _SENT else "fail" if status else "done"
            self._note(what, row, row.peer.name, value=int(status))
        if status is not Status.OK:
            self.fabric.failed.append((self.caps.nic, row.ctx, row.index, status))
            if reads:
                self.fabric.seen[f"read {status.name}"] += 1
        if kind == _SENT:
            self._messages -= 1
        elif not reads:
            row.peer.rows -= 1
        nbytes = 0 if status else row.nbytes
        self._cq.push((kind, int(status), 1, 0, row.index, row.ctx, nbytes))

    # ------------------------------------------------------------------ faults

    def kill(self) -> None:
        """Die: what is in flight here ends NIC_DOWN, also what landed but was not acknowledged.

        A read is flushed for good, or its end is unknown, and then more of it may be placed.
        """
        if self.state is not NicState.UP:
            return
        for read in self._reading.values():
            if read.flying:
                unknown = read.bits >> 49 & 1
                read.ghost = b"" if unknown and self._chaos.late_land else None
                status = Status.NIC_DOWN if unknown else Status.FLUSHED
                self._doom(read, status, self._error_delay(read, ACK_PS * 2))
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
        """Crash with the host: this NIC is silent from now on; rows towards it get `status`."""
        for read in self._reading.values():
            read.flying, read.ghost = False, None
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

    def peer_lost(self, target: ChaosTarget, status: Status, *, acks_lost: bool) -> None:
        """Fail rows towards a NIC that is gone; answered ones only if the answers are lost.

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
        for read in self._reading.values():
            if read.flying and read.left and read.peer.target is target:
                self._doom(read, status, self._error_delay(read, self._chaos.dead_after_ps))


def _cuts(nbytes: int, pieces: int, places: int) -> list[int]:
    """Cut a row: return the ends of so many pieces, at drawn places of 16 bits each."""
    cuts = [nbytes * ((places >> 16 * k) & 0xFFFF) >> 16 for k in range(pieces - 1)]
    return sorted([0, *cuts, nbytes])


def _snapshot(row: Flight, start: int, stop: int) -> bytes | None:
    region = row.region
    return None if region is None else bytes(region.view[row.at + start : row.at + stop])


def _copy(row: Flight) -> None:
    target = row.peer.target
    assert target is not None
    if target.state is NicState.UP and target.link.lets_in(row.nic.link):
        target.take_copy(row)
