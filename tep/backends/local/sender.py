"""The sending half of a local NIC: rows in line, carried out in bounded helpings; messages.

A post takes rows into the line of their peer, and carries out what its helping allows; each poll
opens a new helping. Rows to one peer go out in order. A row that needs room in the peer's lane, or
a peer that has not answered, holds up only its own line. Reads stand in a line of their own, so
that a write that waits for room holds up no read.

Messages go through the lane, and end when the peer has taken them. Control messages need neither
the lane nor a buffer: they go through the socket. Once the kernel has taken one for the peer it is
as good as in the peer's NIC, and lost only together with the peer; a full socket lets it wait here.

Rule 1: a row is OK only if the peer was alive after its bytes had moved, or has taken its
immediate: a peer that closes because it has seen the immediate is no failure. Each copy is over
when the call that made it returns: what ends, well or not, is written no more.
"""

from __future__ import annotations

import errno
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from tep.backends.base import Batch, DomainCaps, Entry, Kind, ReadBatch, Status, WriteBatch
from tep.backends.common import STRONG, Unread, at, bounds, most, part, total
from tep.backends.local.channel import CONTROL_BYTES_MAX, Address, Control, Watches, why
from tep.backends.local.copying import ROWS_MAX, Flow
from tep.backends.local.memory import ACKS, COPYING, EVENTS
from tep.backends.local.outbound import Line, Outbound, Segment, Way
from tep.backends.local.port import UNWRITABLE

__all__ = ["HELPING_BYTES", "Sender"]

HELPING_BYTES: Final = 4 << 20
"""The most bytes that one post or poll moves: half a millisecond's worth, since a submit posts too.

It is 1,024 pages of 4 KiB, one more than one call of the kernel takes.
"""

_TIMES_MAX: Final = 8
"""The largest factor by which a helping grows while nothing else is to do; see Sender.go_on().

A helping costs 40 us beside its bytes, and up to 200 us on busy CPUs (measured): what it needs is
not in the caches any more after so many bytes.
"""

_UNRUNG_BYTES_MAX: Final = 32 << 20
"""In the middle of a long list a sleeping peer is woken once in so many bytes.

A peer waits for the whole list as a rule. To wake it takes a sender 20 to 70 us (measured, idle
CPUs of a virtual machine): with a bell after each helping that was a tenth of the time of a list.
"""

_GONE_MAX: Final = 1024  # addresses of peers that are gone, and still known
_PUT_BYTES_MAX: Final = 4096
"""Longer rows go by process_vm_writev. Measured, us: 8 B 1.2 against 2.4, 4 KiB 2.4 against 3.7,
16 KiB 6.3 against 4.7.
"""

_SCALAR_MAX: Final = 3  # rows up to which a loop is cheaper than columns
_UP: Final = Way.UP  # looking it up in its class takes 0.1 us
_WRITE, _SENT = int(Kind.WRITE), int(Kind.SENT)
_CONTROLS_MAX: Final = 64  # that wait for one peer


class Sender:
    """Rows and messages of one NIC, to all its peers.

    Attributes:
        done: completions, for the owner to hand out.
        outs: the way to each peer, by its number.
        active: peers with rows or messages in line, or open.
        lost: peers that were lost since the last poll.
        helping: bytes that may be moved until the next poll; each opens a new helping.
        least: bytes of a helping where others wait.
        why: the last cause of a PROVIDER or UNREACHABLE status, in words.
        unread: the control messages that have come.
    """

    def __init__(
        self,
        me: bytes,
        caps: DomainCaps,
        watches: Watches,
        fence: Callable[[], None],
    ) -> None:
        self.done: deque[Entry] = deque()
        self.why = ""
        self.unread = Unread(self.done.append)
        self.writes, self.reads = Flow(Kind.WRITE), Flow(Kind.READ)
        self._me, self._caps = me, caps
        self._depth = caps.sq_depth
        self._watches = watches
        self._fence = fence
        self.outs: list[Outbound] = []
        self._ids: dict[bytes, int] = {}
        self.active: dict[Outbound, None] = {}
        self.lost: list[Outbound] = []
        self._numbers: dict[Outbound, tuple[int, bytes]] = {}  # of all that are not gone
        self._gone_addresses: deque[bytes] = deque()
        self._gone = self._new(Address.from_bytes(me))  # stands for every peer that is gone
        self._gone.release()
        self.least = self._next = self.helping = HELPING_BYTES

    # --- peers

    def connect(self, address: bytes) -> int:
        """Return the number of a peer; knock at its door when it is new."""
        found = self._ids.get(address)
        if found is None:
            parsed = Address.from_bytes(address)
            found = self._ids[address] = len(self.outs)
            out = self._new(parsed)
            self.outs.append(out)
            self._numbers[out] = found, address
            out.ask()
        return found

    def _new(self, address: Address) -> Outbound:
        caps, shared = self._caps, (self._watches, self._fence)
        patience_s = caps.peer_timeout_s
        return Outbound(address, self._me, caps.nic, *shared, patience_s, self.lost.append)

    def _forget(self, out: Outbound) -> None:
        """Keep of a peer that is gone its number, and for a while its address.

        Whoever asks for an older address gets a new number, and calls in vain.
        """
        number, address = self._numbers.pop(out)
        self.outs[number] = self._gone
        self._gone_addresses.append(address)
        if len(self._gone_addresses) > _GONE_MAX:
            del self._ids[self._gone_addresses.popleft()]

    def _clear_lost(self) -> None:
        """Fail what stands in line for peers that are gone."""
        while self.lost:
            out = self.lost.pop()
            self.why = f"{out.address}: {out.why}"
            self._end(out, Status.UNREACHABLE)
            self.active.pop(out, None)
            if out.way is Way.GONE and out in self._numbers:
                self._forget(out)

    @property
    def asking(self) -> bool:
        return any(out.way is Way.ASKING for out in self.active)

    # --- posting

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        """Take rows into line, and carry out what goes at once; 0 = full."""
        flow, peer = self.writes, batch.peer
        if stop - start == 1 and isinstance(peer, int) and flow.open < self._depth:
            out = self.outs[peer]
            if not out.line:
                self._next = self.least
                if self._carry_one(out, batch, start):
                    flow.open += 1
                    if self.lost:
                        self._clear_lost()
                    return 1
        return self._line_up(flow, self._depth, batch, start, stop)

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        """Take reads into line, and carry out what goes at once; 0 = full."""
        return self._line_up(self.reads, self._caps.reads, batch, start, stop)

    def _line_up(self, flow: Flow, depth: int, batch: Batch, start: int, stop: int) -> int:
        take = min(stop - start, depth - flow.open)
        if take <= 0:
            return 0
        self._next = self.least
        taken = list(self._by_peer(batch, start, start + take))  # it may raise, for want of memory
        flow.open += take
        for out, segment in taken:
            if out.way is Way.GONE:
                self._fail(segment, flow, Status.UNREACHABLE)
                continue
            line = out.reads if flow.reads else out.line
            line.append(segment)
            if len(line) == 1 and out.way is _UP and self.helping > 0:
                self._serve(out, line, flow)
            if line:
                self.active[out] = None
        if self.lost:
            self._clear_lost()
        return take

    def _by_peer(self, batch: Batch, start: int, stop: int) -> Iterator[tuple[Outbound, Segment]]:
        """The rows that follow each other to one peer, and that peer."""
        peer = batch.peer
        if isinstance(peer, int):
            yield self.outs[peer], Segment(batch, start, stop)
            return
        for number, same in itertools.groupby(peer[start:stop].tolist()):
            upto = start + sum(1 for _ in same)
            yield self.outs[number], Segment(batch, start, upto)
            start = upto

    def go_on(self) -> bool:
        """Open a new helping, and go on with every peer's line; True: that has used it up.

        The next one is four times as large if this went to one peer and nothing is posted
        meanwhile; see also small_helpings().
        """
        least, alone = self.least, len(self.active) == 1
        self.helping = self._next
        self._next = min(4 * self._next, _TIMES_MAX * least) if alone else least
        self._advance()
        return self.helping <= 0

    def small_helpings(self) -> None:
        """Something else is to be done: poll again soon."""
        self._next = self.least

    def _advance(self) -> None:
        for out in list(self.active):
            if out.way is Way.ASKING:
                out.ask()
            if out.controls:
                self._serve_controls(out)
            if out.way is _UP:
                if out.open or out.letters:
                    self._serve_letters(out)
                if out.line and self.helping > 0:
                    self._serve(out, out.line, self.writes)
                if out.reads and self.helping > 0:
                    self._serve(out, out.reads, self.reads)
                del self.active[out]
                if out.line or out.open or out.letters or out.controls or out.reads:
                    self.active[out] = None  # behind the others, for the next helping
        if self.lost:
            self._clear_lost()

    def runnable(self) -> bool:
        """Whether advance() would get on now; if not, all its peers were asked to ring our bell."""
        if not (self.active or self.lost):
            return False
        waiting = [out for out in self.active if out.way is _UP]
        for out in waiting:
            out.lane.want()
        if waiting:
            self._fence()
        return bool(self.lost) or any(
            out.reads
            or (out.line and (out.line[0].batch.imm is None or out.lane.room(look=True) > 0))
            or (out.open and out.lane.news())
            or (out.letters and out.lane.fits(len(out.letters[0][0])))
            for out in waiting
        )

    # --- rows

    def _serve(self, out: Outbound, line: Line, flow: Flow) -> None:
        """Carry out a peer's rows, in order, until the helping or the lane's room is used up."""
        was, had = out.lane.tail, self.helping
        first = line[0]
        while line and self.helping > 0 and out.way is _UP:
            segment = line[0]
            try:
                n = self._fitting(out, segment)
                if n == 0:
                    break
                if n <= _SCALAR_MAX or not self._carry_columns(out, segment, flow, n):
                    self._carry_each(out, segment, flow, n)
            except MemoryError:  # nothing of them was told to anybody: the next poll tries again
                out.lane.words[COPYING] = 0
                self.helping = 0
            if segment.at == segment.stop:
                line.popleft()
        if out.way is _UP and out.lane.tail != was:
            same = line and line[0] is first and isinstance(first.batch.imm, int)
            out.unrung = out.unrung + had - self.helping if same and self.helping <= 0 else 0
            if out.unrung >= _UNRUNG_BYTES_MAX:
                out.unrung = 0
            out.publish(ring=not out.unrung)

    def _fitting(self, out: Outbound, segment: Segment) -> int:
        """Count the rows that go next, one at the least; 0 = there is no room in the lane."""
        batch, start = segment.batch, segment.at
        # The rest of a row goes alone, so that all rows behind it can go as columns.
        n = 1 if segment.moved else min(segment.stop - start, ROWS_MAX)
        if batch.imm is not None:
            n = min(n, out.lane.room())
        if n <= 1:
            return n
        nbytes, fitting = batch.nbytes, n
        if not isinstance(nbytes, int):
            sizes = np.cumsum(nbytes[start : start + n])
            fitting = int(np.searchsorted(sizes, self.helping, "right"))
        elif nbytes:
            fitting = min(n, self.helping // nbytes)
        return max(1, fitting)

    def _carry_columns(self, out: Outbound, segment: Segment, flow: Flow, n: int) -> bool:
        """Move rows of one region to one region at once; False = not so simple, none has ended."""
        batch, start = segment.batch, segment.at
        stop, rkey = start + n, batch.rkey
        if segment.moved or not isinstance(rkey, int):
            return False
        here, there = part(batch.src, start, stop), part(batch.dst, start, stop)
        nbytes = part(batch.nbytes, start, stop)
        if isinstance(here, int) and isinstance(there, int) and isinstance(nbytes, int):
            here = np.full(n, here, np.uint64)  # the same row n times
        mine = flow.regions.get(batch.lkey)
        target = out.target(rkey, reads=flow.reads)
        if mine is None or target is None or (target.mapped is None and not out.pid):
            return False
        first, end = bounds(there, nbytes)
        if (
            most(nbytes) > self._caps.max_write_bytes
            or not mine.covers(here, nbytes, mine.origin)
            or not target.base <= first
            or end > target.base + target.nbytes
        ):
            return False
        if not out.begin_copy(target):
            return False
        moved = flow.move_rows(out.pid, target, mine, here, there, nbytes, n)
        if not STRONG:  # else the word could tell of the end before the last byte was read
            self._fence()
        out.lane.words[COPYING] = 0
        self._watches.look()
        if out.way is not _UP:  # what is in line ends with it
            return True
        if not moved:  # one by one: a row that was moved already is moved once more
            return False
        length, imm = total(nbytes, n), batch.imm
        self.helping -= max(length, 1)
        if isinstance(imm, int):
            out.lane.put_event(imm, n)
        elif imm is not None:
            out.lane.put_events(imm[start:stop])
        segment.at = stop
        self._finish(flow, Status.OK, batch.ctx, count=n, nbytes=length)
        return True

    def _carry_each(self, out: Outbound, segment: Segment, flow: Flow, n: int) -> None:
        """Carry out rows one by one; the last may be done in part."""
        batch = segment.batch
        fine = moved = 0
        for row in range(segment.at, segment.at + n):
            if out.way is not _UP or self.helping <= 0:
                break
            status = self._carry_row(out, segment, flow, row)
            if status is None:
                break
            segment.at = row + 1
            segment.moved = 0
            if status is Status.OK:
                fine += 1
                moved += at(batch.nbytes, row)
                if batch.imm is not None:
                    out.lane.put_event(at(batch.imm, row), 1)
            else:
                self._finish(flow, status, batch.ctx, row=row)
        if fine:
            self._finish(flow, Status.OK, batch.ctx, count=fine, nbytes=moved)

    def _carry_one(self, out: Outbound, batch: WriteBatch, row: int) -> bool:
        """Carry out a lone short row when nothing is in its way; False = nothing is done.

        The same steps as _carry_row(), in a third of the time: this is what latency is made of.
        """
        src, dst, nbytes, imm, rkey = batch.src, batch.dst, batch.nbytes, batch.imm, batch.rkey
        if not (isinstance(src, int) and isinstance(dst, int) and isinstance(nbytes, int)):
            return False
        if not isinstance(rkey, int) or not 0 < nbytes <= self.helping or out.way is not _UP:
            return False
        source, target, lane = self.writes.regions.get(batch.lkey), out.targets.get(rkey), out.lane
        if source is None or target is None or rkey >= UNWRITABLE:
            return False
        if lane.tail - lane.head >= EVENTS and lane.room() <= 0 and imm is not None:
            return False
        here, there, mapped = src - source.origin, dst - target.base, target.mapped
        if (
            not 0 <= here <= source.nbytes - nbytes
            or not 0 <= there <= target.nbytes - nbytes
            or (mapped is None and not out.pid)
            or not out.begin_copy(target)
        ):
            return False
        code = 0
        if mapped is not None:
            mapped.raw[there : there + nbytes] = source.raw[here : here + nbytes]
        elif (
            out.memory < 0
            or nbytes > _PUT_BYTES_MAX
            or not out.put(source.raw[here : here + nbytes], dst)
        ):
            code = self.writes.move_row(out.pid, target, src, dst, nbytes)
        lane.words[COPYING] = 0
        self.helping -= nbytes
        shown = False
        if imm is not None and not code:
            lane.put_event(imm if isinstance(imm, int) else int(imm[row]), 1)
            out.publish()
            shown = True
        self._watches.look()  # a system call, behind what the peer waits for
        if code and out.way is _UP:
            self._finish(self.writes, self._status(out, self.writes, code), batch.ctx, row=row)
        elif out.way is _UP or (shown and lane.all_taken()):
            self.done.append((_WRITE, 0, 1, 0, 0, batch.ctx, nbytes))
        else:
            self._finish(self.writes, Status.UNREACHABLE, batch.ctx, row=row)
        return True

    def _carry_row(self, out: Outbound, segment: Segment, flow: Flow, row: int) -> Status | None:
        """Carry out one row; None = a part of it, the helping is used up."""
        batch = segment.batch
        here, there, nbytes = at(batch.src, row), at(batch.dst, row), at(batch.nbytes, row)
        if nbytes:  # an empty row has no memory here
            mine = flow.regions.get(batch.lkey)
            if mine is None or not mine.holds(here - mine.origin, nbytes):
                return Status.LOCAL_KEY
            if nbytes > self._caps.max_write_bytes:
                return Status.LENGTH
        target = None
        if nbytes or not flow.reads:  # an empty read asks only whether the peer is there
            rkey = at(batch.rkey, row)
            target = out.target(rkey, reads=flow.reads)
            if target is None and not nbytes:  # the immediate after a read (C9)
                target = out.target(rkey, reads=True)
            if target is None:
                return out.without_key()
            if not 0 <= there - target.base <= target.nbytes - nbytes:
                return Status.REMOTE_RANGE
        done = segment.moved
        size = min(nbytes - done, self.helping)
        self.helping -= max(size, 1)
        if size and target is not None:
            if target.mapped is None and not out.pid:
                return self._status(out, flow, errno.EPERM)
            if not out.begin_copy(target):
                return out.without_key()
            code = flow.move_row(out.pid, target, here + done, there + done, size)
            if not STRONG:  # else the word could tell of the end before the last byte was read
                self._fence()
            out.lane.words[COPYING] = 0
            if code:
                return self._status(out, flow, code)
        self._watches.look()
        if out.way is not _UP:
            return Status.UNREACHABLE
        segment.moved = done + size
        return Status.OK if segment.moved == nbytes else None

    def _status(self, out: Outbound, flow: Flow, code: int) -> Status:
        if code == errno.ESRCH:
            return Status.UNREACHABLE
        self.why = out.why or f"{flow.name} of {out.address}: {why(code)}"
        return Status.PROVIDER

    # --- messages and control messages

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        """Take a message; False = too many are on their way to that peer."""
        out = self.outs[peer]
        if out.way is Way.GONE:
            self._sent(Status.UNREACHABLE, ctx)
        elif len(out.open) + len(out.letters) >= ACKS:
            return False
        elif len(payload) > self._caps.max_msg_bytes:
            self._sent(Status.LENGTH, ctx)
        else:
            out.letters.append((bytes(payload), ctx))
            if out.way is _UP:
                self._serve_letters(out)
            if out.open or out.letters:
                self.active[out] = None
        return True

    def _serve_letters(self, out: Outbound) -> None:
        """Take acknowledgements, and put into the lane what it has room for."""
        self._take_acks(out)
        put = False
        while out.letters and out.lane.put_message(out.letters[0][0]):
            out.open.append(out.letters.popleft()[1])
            put = True
        if put:
            out.publish()

    def _take_acks(self, out: Outbound) -> None:
        """End the messages that the peer, which is up, has taken."""
        for status in out.lane.take_acks():
            self._sent(status, out.open.popleft())

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        """Take a control message; False = too many wait for room in the peer's socket."""
        out = self.outs[peer]
        if out.way is Way.GONE:
            self._sent(Status.UNREACHABLE, ctx)
        elif len(payload) > CONTROL_BYTES_MAX:
            self._sent(Status.LENGTH, ctx)
        elif len(out.controls) >= _CONTROLS_MAX:
            return False
        else:
            out.controls.append((Control(self._me, bytes(payload)), ctx))
            self._serve_controls(out)
            if out.controls:
                self.active[out] = None
        if self.lost:
            self._clear_lost()
        return True

    def _serve_controls(self, out: Outbound) -> None:
        """Hand the kernel what it has room for."""
        while out.controls and out.try_say(out.controls[0][0]):
            self._sent(Status.OK, out.controls.popleft()[1])

    # --- ends

    def _finish(
        self,
        flow: Flow,
        status: Status,
        ctx: int,
        *,
        row: int = 0,
        count: int = 1,
        nbytes: int = 0,
    ) -> None:
        self.done.append((flow.kind, int(status), count, 0, row, ctx, nbytes))

    def _fail(self, segment: Segment, flow: Flow, status: Status) -> None:
        for row in range(segment.at, segment.stop):
            self._finish(flow, status, segment.batch.ctx, row=row)

    def _sent(self, status: int, ctx: int) -> None:
        self.done.append((_SENT, int(status), 1, 0, 0, ctx, 0))

    def close(self) -> None:
        """End everything that is in line, and all ways."""
        for out in self.outs:
            if out.way is _UP and out.open:
                self._take_acks(out)
            self._end(out, Status.FLUSHED)
        self.active.clear()
        self.abandon()

    def _end(self, out: Outbound, status: Status) -> None:
        """Nothing more goes to this peer, or is read from it."""
        for line, flow in ((out.line, self.writes), (out.reads, self.reads)):
            for segment in line:
                self._fail(segment, flow, status)
            line.clear()
        waiting = out.letters, out.controls
        for ctx in (*out.open, *(ctx for line in waiting for _, ctx in line)):
            self._sent(status, ctx)
        out.open.clear()
        out.letters.clear()
        out.controls.clear()

    def abandon(self) -> None:
        """Let go of all ways, saying nothing."""
        for out in self.outs:
            out.release()
        self.lost.clear()
