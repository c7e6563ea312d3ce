"""One NIC of the timing fabric: a Domain of the seam over columns of arrival times.

Posting turns rows into units of a SendQueue; the fabric says when they land; polling hands out what
is due by now. Rule 1: bytes are placed when somebody looks, and never before their arrival.
Rule 2: a row's bytes are placed before its immediate or its completion is handed out.
Rule 3: a poll between two looks hands out nothing new: `wakes.py` says when it is time to look.

A `MortalNic` can die, and fence others off. One that dies tells its owner at once; how long a
driver takes to notice is not modelled. To a peer it is silent: a row that does not land for that
ends UNREACHABLE, `peer_timeout` after it would have landed. Bytes under way when a NIC dies are
lost.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import (
    COMPLETION,
    COMPLETION_BYTES,
    Access,
    Completions,
    DomainKey,
    Kind,
    Status,
    WriteBatch,
    put_completion,
)
from tep.backends.common import check_memory, part
from tep.base.errors import BadDescriptor, ClosedError
from tep.memory.source import Memory
from tep.sim.ledger import Hold
from tep.sim.queues import (
    NEVER_PS,
    Ints,
    Units,
    cut_quanta,
    has_all,
    has_any,
    is_alike,
)
from tep.sim.receiving import FEW, Inlet, trace_ends, trace_posts, trace_row
from tep.sim.wakes import Fabric, Nic, Node, Region

__all__ = ["MortalNic", "TimingNic"]

_ADDRESS: Final = re.compile(rb"[^/#]{1,256}/[0-9]{1,3}#[0-9]{1,18}")

_SENDER: Final = np.uint8(Hold.SENDER)
_WIRE: Final = np.uint8(Hold.WIRE)
_BOTH: Final = int(Hold.SENDER | Hold.WIRE)
_OK: Final = int(Status.OK)
_IMM, _WRITE, _SENT = int(Kind.IMM), int(Kind.WRITE), int(Kind.SENT)


class TimingNic(Nic):
    """One NIC; made by TimingFabric.node(). See `tep.backends.base.Domain` for the methods."""

    def __init__(self, fabric: Fabric, node: Node, index: int) -> None:
        super().__init__(fabric, node, index)
        self._machine = node.machine
        self._inlet = Inlet(fabric, self)
        self._keys = 0
        self._closed = False
        self._batches: dict[int, int] = {}

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.caps.nic}: this NIC was closed")

    # ------------------------------------------------------------------ memory and peers

    def register(self, memory: Memory, access: Access) -> DomainKey:
        self._check_open()
        check_memory(self.caps, memory, access)
        writable = access.target
        self._keys += 1
        # Unique to a NIC and an incarnation: another's key is never valid here by accident.
        key = (self.number << 24) + (self._keys << 1)
        region = Region(memory, writable=writable, host=self.fabric.move_bytes)
        self.sources[key + 1] = region
        if writable:
            self._inlet.targets[key] = region
        return DomainKey(lkey=key + 1, rkey=key, base=memory.ptr)

    def deregister(self, key: DomainKey) -> None:
        self.take_landed(self.fabric.env.now)
        self.sources.pop(key.lkey, None)
        self._inlet.targets.pop(key.rkey, None)

    def connect(self, peer: bytes) -> int:
        self._check_open()
        peer = bytes(peer)
        if not _ADDRESS.fullmatch(peer):
            raise BadDescriptor(
                f"{peer!r} is no address of the timing fabric; those are 'name/nic#epoch'"
            )
        return self.fabric.number_of(peer)

    # ------------------------------------------------------------------ sending

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        self._check_open()
        assert 0 <= start < stop <= batch.n, (start, stop, batch.n)
        n = min(stop - start, self.caps.sq_depth - self.open_rows)
        if n <= 0:
            self.node.wakes.refuse(self)
            return 0
        ledger = self.fabric.ledger
        where = ledger.open_rows(n)
        self._fill(where, batch, start)
        if start + n < stop:
            self.node.wakes.refuse(self)
        costs = self._costs(n, part(batch.peer, start, start + n))
        ledger.batch[where] = self._join_batch(batch, start, start + n)
        self.node.post(self, np.arange(ledger.end - n, ledger.end), costs)
        if self.fabric.row_log is not None:
            trace_posts(self, where, batch.ctx)
        return n

    def _fill(self, where: slice, batch: WriteBatch, start: int) -> None:
        ledger, n = self.fabric.ledger, where.stop - where.start
        stop = start + n
        self.open_rows += n
        ledger.source[where] = self.number
        ledger.target[where] = part(batch.peer, start, stop)
        ledger.src[where] = part(batch.src, start, stop)
        ledger.dst[where] = part(batch.dst, start, stop)
        ledger.rkey[where] = part(batch.rkey, start, stop)
        ledger.nbytes[where] = part(batch.nbytes, start, stop)
        ledger.imm[where] = -1 if batch.imm is None else part(batch.imm, start, stop)
        ledger.lkey[where] = batch.lkey
        ledger.ctx[where] = batch.ctx
        ledger.row[where] = np.arange(start, stop)
        ledger.status[where] = _OK
        ledger.hold[where] = _BOTH
        ledger.message[where] = False

    def _costs(self, n: int, peer: int | npt.NDArray[np.unsignedinteger]) -> Ints:
        """Compute the CPU time of posting each of n rows."""
        profile = self.profile
        costs = np.full(n, profile.post_next_ps)
        costs[0] = profile.post_first_ps
        if not isinstance(peer, int):
            costs[1:][peer[1:] != peer[:-1]] = profile.post_first_ps
        return costs

    def _join_batch(self, batch: WriteBatch, start: int, stop: int) -> int:
        """Return the number of a batch whose rows start..stop are posted now."""
        batches = self.fabric.batches
        number = self._batches.pop(batch.ctx, -1)
        if number < 0:
            one = isinstance(batch.peer, int) or batch.n == 1
            target = batch.peer if isinstance(batch.peer, int) else int(batch.peer[0])
            number = batches.begin(target if one else -1)
        batches.left[number] += stop - start
        batches.whole[number] = stop == batch.n
        if stop < batch.n:
            self._batches[batch.ctx] = number
        return number

    def launch(self, numbers: Ints, ready: Ints) -> None:
        """Queue rows, which are with the NIC at `ready`, for the wire. Unfit ones fail here."""
        fabric = self.fabric
        ledger, profile, machine = fabric.ledger, self.profile, self._machine
        if fabric.gone[self.number]:
            self._drop(numbers - ledger.base)
            return
        if not self._are_sound(numbers):
            bad = self._flaws(numbers - ledger.base)
            if bad is not None:
                self._fail_here(numbers[bad], ready[bad])
                numbers, ready = numbers[~bad], ready[~bad]
                if not len(numbers):
                    return
        rows = ledger.where(numbers)
        nbytes, target = ledger.nbytes[rows].copy(), ledger.target[rows].copy()
        ledger.extra_ps[rows] = machine.late.extra_ps(numbers, nbytes)
        some = nbytes[:1] if is_alike(nbytes) else nbytes  # of equal rows one says it for all
        ready = ready + machine.dma.ps(np.minimum(some, profile.fill_bytes))
        if int(some.max()) <= profile.quantum_bytes:
            first, last, sizes = None, np.ones(len(numbers), np.bool_), nbytes
            service = machine.service_ps(some)
            if len(some) < len(nbytes):
                service = np.full(len(nbytes), service.item(0))
        else:
            row, sizes, last = cut_quanta(nbytes, profile.quantum_bytes)
            first = np.concatenate(([True], last[:-1]))
            numbers, target, ready = numbers[row], target[row], ready[row]
            service = machine.service_ps(sizes, first)
        holds = None
        if fabric.pairs is not None:
            holds = fabric.pairs.holds_ps(target, sizes, first)
        if self.number in fabric.slow:
            percent = fabric.slow[self.number]
            service = service * percent // 100
            holds = None if holds is None else holds * percent // 100
        self.queue.add(Units(numbers, target, ready, service, last, sizes, holds), fabric.env.now)
        fabric.sending(self)

    def _flaws(self, rows: Ints) -> npt.NDArray[np.bool_] | None:
        """Say which rows have no readable source or are too long, and set their status."""
        ledger = self.fabric.ledger
        nbytes, lkeys, messages = ledger.nbytes[rows], ledger.lkey[rows], ledger.message[rows]
        bad = nbytes > self.caps.max_write_bytes
        if has_any(messages):
            bad[messages] = nbytes[messages] > self.caps.max_msg_bytes
        ledger.status[rows[bad]] = Status.LENGTH
        for lkey in _distinct(lkeys):
            region = self.sources.get(lkey)
            if region is None:
                lost = (lkeys == lkey) & (nbytes > 0) & ~messages
            else:
                # Unsigned: an address below the region wraps, and is beyond its end.
                offset = ledger.src[rows] - np.uint64(region.ptr)
                room = np.maximum(region.nbytes - nbytes, 0).astype(np.uint64)
                lost = ((offset > room) | (nbytes > region.nbytes)) & (nbytes > 0)
                if not has_any(lost):
                    continue
                lost &= lkeys == lkey
            ledger.status[rows[lost & ~bad]] = Status.LOCAL_KEY
            bad |= lost
        return bad if has_any(bad) else None

    def _are_sound(self, numbers: Ints) -> bool:
        """True if these are no messages, and none has a flaw; False: `_flaws` is to look."""
        ledger = self.fabric.ledger
        rows = ledger.where(numbers)
        lkeys, nbytes = ledger.lkey[rows], ledger.nbytes[rows]
        region, longest = self.sources.get(lkeys.item(0)), nbytes.item(0)
        if region is None or not (is_alike(lkeys) and is_alike(nbytes)):  # messages have no region
            return False
        if longest > self.caps.max_write_bytes:
            return False
        offset = ledger.src[rows] - np.uint64(region.ptr)  # one below the region wraps
        return int(offset.max()) <= region.nbytes - longest

    def _fail_here(self, numbers: Ints, times: Ints) -> None:
        """Complete rows, whose status is set, that never leave."""
        ledger, batches = self.fabric.ledger, self.fabric.batches
        rows = numbers - ledger.base
        ledger.hold[rows] = _SENDER
        np.subtract.at(batches.left, ledger.batch[rows], 1)
        self.outbox.add(times, numbers)
        for time_ps in np.unique(times).tolist():
            self.node.wakes.wake_at(time_ps)
        self.node.wakes.book()

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        return self._send(peer, payload, ctx, is_control=False)

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        return self._send(peer, payload, ctx, is_control=True)

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        return self._inlet.take_control(slot)

    def _send(self, peer: int, payload: bytes, ctx: int, *, is_control: bool) -> bool:
        self._check_open()
        if self.open_rows >= self.caps.sq_depth:
            self.node.wakes.refuse(self)
            return False
        fabric = self.fabric
        batch = WriteBatch(1, peer, 0, 0, 0, 0, len(payload), None, ctx)
        where = fabric.ledger.open_rows(1)
        self._fill(where, batch, 0)
        fabric.ledger.message[where] = True
        number = fabric.ledger.end - 1
        fabric.payloads[number] = bytes(payload)
        if is_control:
            fabric.controls.add(number)
        group = fabric.ledger.batch[where.start] = fabric.batches.begin(-1)
        fabric.batches.left[group] = 1
        fabric.batches.whole[group] = True
        if fabric.row_log is not None:
            trace_row(self, "send", fabric.env.now, number, fabric.name_of(peer))
        self.node.post(self, np.array([number]), self._costs(1, peer))
        return True

    def post_recvs(self, nbytes: int, count: int) -> None:
        self._check_open()
        self.pool.add(nbytes, count)
        self._inlet.feed()

    def recv_done(self, slot: int) -> None:
        self.pool.give_back(slot)
        self._inlet.feed()

    # ------------------------------------------------------------------ completions

    def poll(self, out: Completions) -> int:
        if not self._closed:
            self.node.wakes.poll()
        ready, filled, room = self.ready, 0, len(out)
        while ready and filled < room:
            entry = ready.popleft()
            if isinstance(entry, tuple):
                put_completion(out, filled * COMPLETION_BYTES, *entry)
                filled += 1
                continue
            fits = min(room - filled, len(entry))
            out[filled : filled + fits] = entry[:fits]
            filled += fits
            if fits < len(entry):
                ready.appendleft(entry[fits:])
        if ready:
            self.waker()
        if filled and self.profile.poll_ps:
            imms = out["count"][:filled][out["kind"][:filled] == _IMM]
            self.node.took(int(imms.sum()) * self.profile.poll_ps)
        return filled

    def take_in(self, now: int) -> None:
        """Take in everything that is here by now: bytes, immediates, messages, completions."""
        if self.inbox.first_ps <= now:
            self._inlet.take(now)
        if self.outbox.first_ps <= now:
            self._reap(now)

    def take_landed(self, now: int) -> None:
        """Place all rows that have landed by now, before their sender is notified."""
        if self.inbox.first_ps <= now:
            wakes = self.node.wakes
            looks = wakes.is_due(now)  # at this instant, and behind this: as if it had been before
            self._inlet.take(now)
            if not looks:
                wakes.gather()

    def _reap(self, now: int) -> None:
        """Complete rows of this sender whose acknowledgement is here."""
        fabric = self.fabric
        ledger = fabric.ledger
        times, numbers = self.outbox.take(now)
        rows = numbers - ledger.base
        if len(rows) <= FEW:
            rest = [k for k, row in enumerate(rows.tolist()) if not self._reap_one(row, now)]
            if not rest:
                return
            times, numbers, rows = times[rest], numbers[rest], rows[rest]
        for target in _distinct(ledger.target[rows]):
            if not fabric.gone[target]:
                fabric.nic(target).take_landed(now)
        ledger.hold[rows] &= ~_SENDER
        self.open_rows -= len(rows)
        if fabric.row_log is not None:
            trace_ends(self, times, numbers)
        sent = ledger.message[rows]
        failed = ledger.status[rows] != _OK
        other = sent | failed
        if not has_any(other):
            self._report_done(rows)
            return
        if not has_all(other):
            self._report_done(rows[~other])
        for row in rows[other].tolist():
            kind = _SENT if ledger.message[row] else _WRITE
            ctx, index = int(ledger.ctx[row]), int(ledger.row[row])
            self.ready.append((kind, int(ledger.status[row]), 1, 0, index, ctx, 0))

    def _reap_one(self, row: int, now: int) -> bool:
        """Do as `_reap` for a lone row; False, the row is still to be ended: it is no usual one."""
        fabric, ledger = self.fabric, self.fabric.ledger
        target = ledger.target.item(row)
        if ledger.message[row] or fabric.row_log is not None or fabric.gone[target]:
            return False
        fabric.nic(target).take_landed(now)
        if ledger.status[row] != _OK:
            return False
        ledger.hold[row] &= ~_SENDER
        self.open_rows -= 1
        self.ready.append((_WRITE, _OK, 1, 0, 0, ledger.ctx.item(row), ledger.nbytes.item(row)))
        return True

    def _report_done(self, rows: Ints) -> None:
        """Report rows that are done, an entry a batch."""
        ledger = self.fabric.ledger
        ctxs, nbytes = ledger.ctx[rows], ledger.nbytes[rows]
        if is_alike(ctxs):
            self.ready.append((_WRITE, _OK, len(rows), 0, 0, int(ctxs[0]), int(nbytes.sum())))
            return
        values, where, counts = np.unique(ctxs, return_inverse=True, return_counts=True)
        entries = np.zeros(len(values), COMPLETION)
        entries["kind"] = _WRITE
        entries["count"] = counts
        entries["ctx"] = values
        np.add.at(entries["nbytes"], where, nbytes.astype(np.uint64))
        self.ready.append(entries)

    def _drop(self, rows: Ints) -> None:
        """Give up rows that have not left."""
        ledger = self.fabric.ledger
        ledger.hold[rows] &= ~_WIRE
        np.subtract.at(self.fabric.batches.left, ledger.batch[rows], 1)

    def status_text(self, status: int) -> str:
        return _STATUS_TEXT.get(status, "")

    # ------------------------------------------------------------------ wakes

    def arm(self) -> bool:
        now = self.fabric.env.now
        return not self.ready and min(self.inbox.first_ps, self.outbox.first_ps) > now

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        if self._closed:
            return
        self.take_in(self.fabric.env.now)
        self._closed = True
        self._end(Status.FLUSHED)
        self.node.wakes.nics.remove(self)
        self.sources.clear()

    def _end(self, status: Status) -> None:
        """End all that is open here with a status."""
        fabric = self.fabric
        ledger, now = fabric.ledger, fabric.env.now
        fabric.gone[self.number] = True
        fabric.refused.pop(self.number, None)
        dropped = self.queue.drop_waiting(now)
        self._drop(dropped.number[dropped.last] - ledger.base)
        for number in self._batches.values():
            fabric.batches.whole[number] = True
        numbers = ledger.of_sender(self.number)
        rows = numbers - ledger.base
        ledger.status[rows] = status
        ledger.hold[rows] &= ~_SENDER
        if fabric.row_log is not None and len(rows):
            trace_ends(self, np.full(len(rows), now), numbers)
        entries = np.zeros(len(rows), COMPLETION)
        entries["kind"] = np.where(ledger.message[rows], _SENT, _WRITE)
        entries["status"] = status
        entries["count"] = 1
        entries["row"] = ledger.row[rows]
        entries["ctx"] = ledger.ctx[rows]
        if len(rows):
            self.ready.append(entries)
        self.outbox.clear()
        self._inlet.close()


def _distinct(values: npt.NDArray[np.integer]) -> list[int]:
    if len(values) and is_alike(values):
        return [int(values[0])]
    found: list[int] = np.unique(values).tolist()
    return found


_STATUS_TEXT: Final = {
    int(Status.FLUSHED): "this NIC was closed while the row was under way",
    int(Status.LOCAL_KEY): "the source is not registered here, or the row leaves its region",
    int(Status.REMOTE_KEY): "the target's key is unknown there: never made, or deregistered",
    int(Status.REMOTE_RANGE): "the row leaves the target's region",
    int(Status.LENGTH): "longer than the NIC, or the receive buffer, can take",
    int(Status.RNR): "the peer posted no receive buffer in time",
    int(Status.UNREACHABLE): "the peer's NIC is closed, or was never there",
    int(Status.NIC_DOWN): "this NIC was killed; whether the row landed is unknown",
    int(Status.STALE_PEER): "the peer has restarted; ask it for new addresses and descriptors",
}


_DOWN, _FENCED = int(Kind.DOWN), int(Kind.FENCED)


class _MortalInlet(Inlet):
    """The receiving end of a MortalNic: it keeps fences, and names senders."""

    barred: dict[int, int]
    """The last row of each sender that may not land."""

    def _place(self, rows: Ints) -> None:
        ledger = self._fabric.ledger
        for sender, last in self.barred.items():
            late = (ledger.source[rows] == sender) & (rows + ledger.base <= last)
            if late.any():
                ledger.status[rows[late]] = Status.UNREACHABLE
                rows = rows[~late]
                if not len(rows):
                    return
        super()._place(rows)

    def _announce(self, imms: Ints, rows: Ints) -> None:
        ledger = self._fabric.ledger
        source = ledger.source[rows[ledger.imm[rows] >= 0]]
        if is_alike(imms) and is_alike(source):
            self._nic.ready.append((_IMM, _OK, len(imms), int(imms[0]), 0, int(source[0]), 0))
            return
        entries = np.zeros(len(imms), COMPLETION)
        entries["kind"] = _IMM
        entries["count"] = 1
        entries["imm"] = imms
        entries["ctx"] = source
        self._nic.ready.append(entries)


class MortalNic(TimingNic):
    """A NIC that can die, and whose engine can retransmit the lost rows: C23 and C25 to C27."""

    def __init__(self, fabric: Fabric, node: Node, index: int) -> None:
        super().__init__(fabric, node, index)
        self.caps = replace(self.caps, imm_source=True)
        self._inlet = self._mortal = _MortalInlet(fabric, self)
        self._mortal.barred = {}

    @property
    def is_dead(self) -> bool:
        return bool(self.fabric.gone[self.number])

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        if not self.is_dead:
            return super().post(batch, start, stop)
        self._check_open()
        down = int(Status.NIC_DOWN)
        self.ready.extend((_WRITE, down, 1, 0, row, batch.ctx, 0) for row in range(start, stop))
        self.waker()
        return stop - start

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        return self._end_send(ctx) if self.is_dead else super().post_send(peer, payload, ctx)

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        return self._end_send(ctx) if self.is_dead else super().post_control(peer, payload, ctx)

    def _end_send(self, ctx: int) -> bool:
        self._check_open()
        self.ready.append((_SENT, int(Status.NIC_DOWN), 1, 0, 0, ctx, 0))
        self.waker()
        return True

    # ------------------------------------------------------------------ faults

    def kill(self) -> None:
        self._lose_flying()
        self._end(Status.NIC_DOWN)
        self.ready.append((_DOWN, int(Status.NIC_DOWN), 1, 0, 0, 0, 0))
        self.waker()

    def _lose_flying(self) -> None:
        """Fail all rows that are booked to land, here or from here; landed ones stay."""
        fabric = self.fabric
        ledger, now = fabric.ledger, fabric.env.now
        self.take_in(now)
        self._lose(self, *self.inbox.take(NEVER_PS))
        sent = ledger.of_sender(self.number)
        for target in np.unique(ledger.target[sent - ledger.base]).tolist():
            if fabric.gone[target]:
                continue
            nic = fabric.nic(target)
            nic.take_landed(now)
            times, numbers = nic.inbox.take(NEVER_PS)
            mine = ledger.source[numbers - ledger.base] == self.number
            if (~mine).any():
                nic.inbox.add(times[~mine], numbers[~mine])
            self._lose(nic, times[mine], numbers[mine])

    def _lose(self, target: Nic, seen: Ints, numbers: Ints) -> None:
        """Fail rows that a NIC was booked to see then: their senders learn it by a timeout."""
        fabric, ledger = self.fabric, self.fabric.ledger
        rows = numbers - ledger.base
        ledger.hold[rows] &= ~_WIRE
        ledger.status[rows] = Status.UNREACHABLE
        for number in numbers[ledger.message[rows]].tolist():
            fabric.payloads.pop(number, None)
            fabric.controls.discard(number)
        landed = seen - target.profile.receive_ps
        for sender in np.unique(ledger.source[rows]).tolist():
            if fabric.gone[sender]:
                continue
            mine = (ledger.source[rows] == sender).nonzero()[0]
            nic = fabric.nic(sender)
            failed = landed[mine] + nic.profile.peer_timeout_ps
            nic.outbox.put_off(numbers[mine], failed)
            for time_ps in np.unique(failed).tolist():
                nic.node.wakes.wake_at(time_ps)
            nic.node.wakes.book()

    # ------------------------------------------------------------------ fences

    def source(self, number: int) -> bytes:
        return self.fabric.nic(number).address

    def fence(self, source: bytes, ctx: int) -> None:
        self._check_open()
        if not self.is_dead:
            self.take_in(self.fabric.env.now)
        self._mortal.barred[self.fabric.number_of(source)] = NEVER_PS
        self.ready.append((_FENCED, _OK, 1, 0, 0, ctx, 0))
        self.waker()

    def unfence(self, source: bytes) -> None:
        self._check_open()
        number = self.fabric.number_of(source)
        if self._mortal.barred.get(number) == NEVER_PS:
            self._mortal.barred[number] = self.fabric.ledger.end - 1
