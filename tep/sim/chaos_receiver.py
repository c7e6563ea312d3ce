"""The receiving side of a chaos NIC: fragments land, immediates come out, messages find buffers.

What is sent, and how rows end, is `chaos_nic`. Rule: the immediate of a row comes after all its
bytes.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Final

from tep.backends.base import Completions, Kind, Status
from tep.base.hashing import below
from tep.base.units import PS_PER_NS
from tep.sim.chaos_parts import Fabric, Flight, Fragment, Host, NicState, Peer
from tep.sim.chaos_port import ChaosPort
from tep.sim.faults import KillNic

__all__ = ["ACK_PS", "ChaosReceiver"]

ACK_PS: Final = 100 * PS_PER_NS
"""The shortest way of an answer; a choice, as all sizes of an undisturbed row."""

_OK: Final = int(Status.OK)
_IMM: Final = int(Kind.IMM)
_RECV: Final = int(Kind.RECV)
_CONTROL: Final = int(Kind.CONTROL)
_FENCED: Final = int(Kind.FENCED)
_ALL: Final = 1 << 62  # more rows than any fabric sees


class ChaosReceiver(ChaosPort):
    """One NIC as far as rows of others are concerned."""

    def __init__(self, fabric: Fabric, node: Host, number: int) -> None:
        super().__init__(fabric, node, number)
        self._credits = self._chaos.imm_credits
        self._waiting: list[Flight] = []
        self._serving = False
        self._slots: list[bytearray] = []
        self._filled: list[int] = []
        self._senders: list[bytes] = []
        self._free_slots: deque[int] = deque()
        self._controls: dict[int, tuple[bytes, bytes]] = {}
        self._controls_seen = 0
        self._sources: dict[bytes, int] = {}
        self._barred: dict[bytes, int] = {}  # by sender, the last row that may not land
        self._fencing: dict[bytes, set[int]] = {}  # by sender, the fences that are not confirmed

    def kill(self) -> None:
        """Die; the sending side knows how."""
        raise NotImplementedError

    def land(self, fragment: Fragment) -> None:
        """A fragment of somebody's row is here, at its target."""
        row, start, stop, early = fragment
        if not row.flying:
            if row.ghost is not None and self._chaos.late_ps:
                late_ps = below(row.bits, self._chaos.late_ps)
                self._env.call_at(self._env.now + late_ps, self._land_late, fragment)
            else:
                self._land_late(fragment)
            return
        peer = row.peer
        if peer.held is not None:
            peer.held.append(fragment)
            return
        if row.payload is not None:
            self._take_message(row)
            return
        if self._barred and self._is_barred(row):
            row.nic.refuse(row, Status.UNREACHABLE)
            return
        region = self._rkeys.get(row.rkey)
        if region is None and row.nbytes == 0:  # the immediate after a read (C9)
            region = self._readable.get(row.rkey)
        if region is None:
            row.nic.refuse(row, Status.REMOTE_KEY)
            return
        offset = row.dst - region.base
        if offset < 0 or offset + row.nbytes > region.nbytes:
            row.nic.refuse(row, Status.REMOTE_RANGE)
            return
        if stop > start:
            data: bytes | memoryview
            if early is not None:
                data = early
            else:
                source = row.region
                assert source is not None
                if not source.alive:  # deregistered while the row was on its way
                    row.nic.refuse(row, Status.LOCAL_KEY)
                    return
                data = source.view[row.src + start : row.src + stop]
            region.view[offset + start : offset + stop] = data
            if self._chaos.corrupt:
                self._turn_bit(row, region.view[offset + start : offset + stop], start)
            if self._row_log is not None:
                name = row.nic.node.name
                self._note("place", row, name, offset + start, stop - start, zlib.crc32(data))
        row.left -= 1
        if row.left == 0:
            self._arrive(row)

    def _turn_bit(self, row: Flight, placed: memoryview, start: int) -> None:
        """Turn a bit of a row on its way, if it is one of those, and this fragment has the byte."""
        if 255 - (row.bits >> 32 & 0xFF) >= self._chaos.corrupt or self.fabric.healed:
            return
        at = below(row.bits, row.nbytes) - start
        if 0 <= at < len(placed):
            placed[at] ^= 1 << (row.bits & 7)
            self.fabric.seen["bit turned"] += 1

    def readable_at(
        self, rkey: int, address: int, nbytes: int, reader: bytes, number: int
    ) -> memoryview | Status:
        """The bytes that row `number` of a reader asks for, or why it may not have them."""
        if self.state is not NicState.UP or number <= self._barred.get(reader, 0):
            return Status.UNREACHABLE
        if nbytes == 0:
            return memoryview(b"")
        region = self._readable.get(rkey)
        if region is None:
            return Status.REMOTE_KEY
        offset = address - region.base
        if offset < 0 or offset + nbytes > region.nbytes:
            return Status.REMOTE_RANGE
        return region.view[offset : offset + nbytes]

    def _land_late(self, fragment: Fragment) -> None:
        """A fragment of a row that has failed is here all the same."""
        row, start, stop, _ = fragment
        ghost, region = row.ghost, self._rkeys.get(row.rkey)
        if ghost is None or row.payload is not None or self.state is not NicState.UP:
            return
        if self._is_barred(row):
            return
        offset = 0 if region is None else row.dst - region.base
        if region is None or offset < 0 or offset + row.nbytes > region.nbytes:
            return
        region.view[offset + start : offset + stop] = ghost[start:stop]
        self.fabric.seen["landed after its error"] += 1
        if self._row_log is not None and stop > start:
            crc = zlib.crc32(ghost[start:stop])
            name = row.nic.node.name
            self._note("place", row, name, offset + start, stop - start, crc)
        row.left -= 1
        imm = row.imm
        if row.left == 0 and imm is not None and self._chaos.late_land > 1 and self._credits:
            self._credits -= self._chaos.ordered
            if self._row_log is not None:
                self._note("imm", row, row.nic.node.name, value=imm)
            self._cq.push((_IMM, _OK, 1, imm, 0, self._source_of(row.nic.address), 0))

    def _overruns(self) -> bool:
        """Whether one more unsolicited immediate is too much for the completion queue: it dies."""
        depth = self._chaos.cq_depth
        if not depth or self._chaos.ordered or self._cq.held < depth or self.fabric.healed:
            return False
        self.fabric.happened.append(KillNic(self.node.name, self.number))
        self.fabric.seen["completion queue overrun"] += 1
        self.kill()
        return True

    def _arrive(self, row: Flight) -> None:
        """All bytes of a row are here: its immediate may be seen."""
        imm = row.imm
        if imm is not None:
            if self._overruns():
                return
            if self._chaos.ordered:
                if self._credits == 0:
                    self._park(row)
                    return
                self._credits -= 1
            if self._row_log is not None:
                self._note("imm", row, row.nic.node.name, value=imm)
            self._cq.push((_IMM, _OK, 1, imm, 0, self._source_of(row.nic.address), 0))
        self._answer(row)

    def _answer(self, row: Flight) -> None:
        row.left = -1
        delay_ps = ACK_PS + ((row.bits >> 16) & 0xFFFF) * ACK_PS // 0x10000
        self._env.call_at(self._env.now + delay_ps, row.nic.acknowledge, row)

    def _take_message(self, row: Flight) -> None:
        assert row.payload is not None
        if row.is_control:
            self._hear(row)
            self._answer(row)
            return
        if not self._free_slots:
            self._park(row)
            return
        slot = self._free_slots.popleft()
        buffer = self._slots[slot]
        if row.nbytes > len(buffer):
            self._free_slots.append(slot)
            row.nic.refuse(row, Status.LENGTH)
            return
        buffer[: row.nbytes] = row.payload
        self._filled[slot] = row.nbytes
        self._senders[slot] = row.nic.address
        if self._row_log is not None:
            self._note("recv", row, row.nic.node.name, value=slot)
        self._cq.push((_RECV, _OK, 1, 0, 0, slot, row.nbytes))
        self._answer(row)

    def _hear(self, row: Flight) -> None:
        assert row.payload is not None
        self._controls_seen += 1
        self._controls[self._controls_seen] = (row.payload, row.nic.address)
        self._cq.push((_CONTROL, _OK, 1, 0, 0, self._controls_seen, row.nbytes))

    def take_copy(self, row: Flight) -> None:
        """A control message is here once more."""
        self.fabric.seen["control message doubled"] += 1
        self._hear(row)

    def _park(self, row: Flight) -> None:
        """No receive is posted: the row waits here, and on an ordered fabric all behind it too."""
        self._waiting.append(row)
        self.fabric.seen["row without a receive"] += 1
        if self._chaos.ordered:
            row.peer.held = []
        if self._chaos.rnr_retries >= 0 and not row.parked:
            tries_ps = (self._chaos.rnr_retries + 1) * self._chaos.rnr_timer_ps
            self._env.call_at(self._env.now + tries_ps, self._give_up, row)
        row.parked = True

    def _give_up(self, row: Flight) -> None:
        if row.flying and row in self._waiting:
            self._waiting.remove(row)
            row.nic.refuse(row, Status.RNR)
            self._release(row.peer)

    def _release(self, peer: Peer) -> None:
        """Let the fragments go on that were held behind a row."""
        held, peer.held = peer.held or [], None
        for fragment in held:
            self.land(fragment)

    def _has_receives(self) -> None:
        """Receives were posted: let what waits try again, at its sender's next try."""
        if self._waiting and not self._serving:
            self._serving = True
            drawn = self._draws.error(self._uid, self.fabric.rows)
            delay_ps = 1 + below(drawn, self._chaos.rnr_timer_ps)
            self._env.call_at(self._env.now + delay_ps, self._serve)

    def _serve(self, _: object) -> None:
        self._serving = False
        waiting, self._waiting = self._waiting, []
        for row in waiting:
            held, row.peer.held = row.peer.held or [], None
            if row.flying:
                if row.payload is not None:
                    self._take_message(row)
                elif self._is_barred(row):  # it was fenced off while it waited
                    row.nic.refuse(row, Status.UNREACHABLE)
                else:
                    self._arrive(row)
            if row.peer.held is None:
                row.peer.held = held
                self._release(row.peer)
            else:
                row.peer.held = held

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        return self._controls.pop(slot)

    def engine_of(self, address: bytes) -> bytes:
        """An address is sim:name/nic#epoch."""
        name, _, rest = address.rpartition(b"/")
        return name + b"#" + rest.rpartition(b"#")[2]

    def source(self, number: int) -> bytes:
        return list(self._sources)[number]

    def _source_of(self, address: bytes) -> int:
        return self._sources.setdefault(address, len(self._sources))

    def fence(self, source: bytes, ctx: int) -> None:
        """Refuse rows of one NIC, now or soon; messages and control messages are no rows."""
        self._check_open()
        if self._fails(self._chaos.fence_fails, 5):
            self.fabric.seen["fence failed"] += 1
            self._env.call_at(self._env.now + ACK_PS, self._say_failed, ctx)
            return
        if not self._chaos.late_fence:
            self._barred[source] = _ALL
        self._fencing.setdefault(source, set()).add(ctx)
        delay_ps = 1 + below(self._draws.error(self._uid, ctx), ACK_PS * 4)
        self._env.call_at(self._env.now + delay_ps, self._say_fenced, (source, ctx))

    def unfence(self, source: bytes) -> None:
        """Take rows that a NIC posts from now on; what is still flying here was posted before."""
        self._check_open()
        self._fencing.pop(source, None)
        if source in self._barred:
            self._barred[source] = min(self._barred[source], self.fabric.rows)

    def _is_barred(self, row: Flight) -> bool:
        return row.number <= self._barred.get(row.nic.address, 0)

    def _say_fenced(self, fence: tuple[bytes, int]) -> None:
        source, ctx = fence
        if ctx in self._fencing.get(source, ()):  # it was not lifted meanwhile
            self._fencing[source].remove(ctx)
            self._barred[source] = _ALL
        if self.state in (NicState.UP, NicState.DEAD):
            self._cq.push((_FENCED, _OK, 1, 0, 0, ctx, 0))

    def _say_failed(self, ctx: int) -> None:
        if self.state in (NicState.UP, NicState.DEAD):
            self._cq.push((_FENCED, int(Status.PROVIDER), 1, 0, 0, ctx, 0))

    def post_recvs(self, nbytes: int, count: int) -> None:
        self._check_open()
        for _ in range(count):
            self._free_slots.append(len(self._slots))
            self._slots.append(bytearray(nbytes))
            self._filled.append(0)
            self._senders.append(b"")
        self._has_receives()

    def recv_view(self, slot: int) -> memoryview:
        return memoryview(self._slots[slot])[: self._filled[slot]]

    def recv_source(self, slot: int) -> bytes:
        return self._senders[slot]

    def recv_done(self, slot: int) -> None:
        assert slot not in self._free_slots, slot
        self._free_slots.append(slot)
        self._has_receives()

    def poll(self, out: Completions) -> int:
        if not self.entries:
            return 0
        cq = self._cq
        before = cq.imms_polled
        found = cq.poll(out)
        self._credits += cq.imms_polled - before
        if self._waiting:
            self._has_receives()
        return found
