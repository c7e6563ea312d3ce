"""One NIC behind the seam: rows, completions, deadlines; as it stands here, one of EFA.

It is a device: it reads by itself, and says what was wrong with a row. The parts are objects
(libfabric's), regions, slots (rows in flight), completions, peers (greetings), rows and frames.
Here they are joined, and deadlines are kept. tcp.py overrides what tcp does in another way; the
backend `efa` puts parts of its own in the place of libfabric's.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from tep.backends.base import (
    Access,
    Completions,
    DomainCaps,
    DomainKey,
    Entry,
    Kind,
    ReadBatch,
    Status,
    WriteBatch,
    hand_out,
)
from tep.backends.common import Sleeper, Unread, check_memory, closed, meaning, says
from tep.backends.ffi import libfabric as fi
from tep.backends.libfabric import frames
from tep.backends.libfabric.completions import Mailbox, Parts, Queue
from tep.backends.libfabric.objects import CqError, Nic, Option, Regions
from tep.backends.libfabric.peer import Peer, State
from tep.backends.libfabric.peers import Inbox, Outgoing, Peers
from tep.backends.libfabric.rows import Rows
from tep.backends.libfabric.rules import STATUSES, NicAddress, Rules, check_device, engine_of
from tep.backends.libfabric.slots import Slots, Ticket, marked
from tep.memory.source import DmabufExport, Memory

__all__ = ["SHORT_POLLS", "FabricDomain"]

_LOG: Final = logging.getLogger("tep.libfabric")
_USUALLY: Final = meaning()
_NOBODY: Final = (
    "no peer has ever answered this NIC; on EC2 both instances need a security group that allows "
    "all traffic within itself, in both directions"
)

_LOOK_S: Final = 0.05  # between two looks at deadlines, while something is outstanding

_LATE_S: Final = 0.2
"""A look that comes so late finds this process itself was held up, and excuses its peers once."""

_RETRY_S: Final = 0.001
"""The time after which what libfabric would not take is offered again while the engine sleeps.

It doubles up to _LOOK_S: a dead peer takes nothing until its silence is over.
"""

SHORT_POLLS: Final = 2
"""A MemoryError is remembered so long: by the poll() after it, and by arm() after that."""

_READS_MAX: Final = 64  # of the queue in one poll()
_LINGER_S: Final = 0.25
_QUIET_S: Final = 0.003


class FabricDomain:
    """One NIC; `tep.backends.base.Domain` describes the methods.

    Args:
        nic: opened, without endpoints; this object closes it.
        options: of every endpoint.
        dmabuf: exports device memory, see Regions.
        about: what `explain` says of this NIC.

    Attributes:
        timeout_s: how long a peer may owe an answer.
    """

    _rows_kind: type[Rows] = Rows
    _chore_s = 0.0
    """Seconds from chores to chores while nothing is outstanding; 0 = there are none."""

    def __init__(
        self,
        nic: Nic,
        rules: Rules,
        caps: DomainCaps,
        *,
        epoch: int,
        options: tuple[Option, ...] = (),
        dmabuf: DmabufExport | None = None,
        about: str = "",
    ) -> None:
        self.caps = caps
        self._about = about
        self.nic = nic
        self._rules = rules
        self._main = nic.open_endpoint(options)
        me = NicAddress(rules.provider, epoch, caps.nic, self._main.name())
        self.address = me.to_bytes()
        self._done: deque[Entry] = deque()
        self._texts: dict[int, str] = {}
        self.timeout_s = 0.8 * caps.peer_timeout_s  # the rest is for looking and telling
        made = self._make(nic, rules, dmabuf)
        self._slots, self._regions, self._mailbox, self._queue = made
        self._mailbox.start(self._main)
        parts = Parts(nic, rules, caps, *made, self._done, self.timeout_s)
        self.peers = Peers(parts, me, self._main, self._drop)
        self._dying, self._departed = self._regions.dying, self.peers.departed
        self._outgoing, self._inbox = Outgoing(self.peers), Inbox(self.peers)
        self._unread = Unread(self._done.append)
        self._rows = self._rows_kind(self.peers, self._stir)
        self._restless: set[Peer] = set()  # peers that need looking after at each poll
        self._next_look_s = self._next_chore_s = 0.0
        self._retry_s = _RETRY_S
        self._excused = self._closed = self._lost = False
        self._short = 0  # polls for which a MemoryError is remembered
        self._sleeper = Sleeper(*nic.wait_fds) if nic.wait_fds else None

    def _make(
        self, nic: Nic, rules: Rules, dmabuf: DmabufExport | None
    ) -> tuple[Slots, Regions, Mailbox, Queue]:
        """Make what touches the NIC; a backend that drives it without libfabric has its own."""
        if rules.software:
            nic.release_port()
        else:
            check_device(self._main, nic.name)
        flags = fi.FI_COMPLETION | (fi.FI_DELIVERY_COMPLETE if rules.software else 0)
        slots = Slots(rules.window_rows, flags)
        mailbox = Mailbox(nic, rules.msg_bytes_max + frames.HEAD_BYTES_MAX, rules)
        queue = Queue(nic, slots, mailbox, reads=not rules.software)
        return slots, Regions(nic, dmabuf), mailbox, queue

    # --- what tcp.py does in another way

    def _row_failed(self, ticket: Ticket, row: int, error: CqError) -> None:
        """End a row that came back failed, or find out why first."""
        status = STATUSES.get(error.prov_errno, Status.PROVIDER)
        self._texts[status] = error.text
        self._rows.fail(ticket.batch.ctx, row, status)
        if status is Status.PROVIDER:  # that says nothing of the peer: is it there?
            self.peers.doubt(ticket.peer, time.monotonic())
            self._stir(ticket.peer)

    def _why_nobody(self) -> str:
        """Say why perhaps no peer has ever answered."""
        return _NOBODY

    def _cut(self, key: DomainKey) -> None:
        """End at once what peers may read under a key, and what reads of ours write."""
        self._regions.cut(key, self._slots.reads_at)

    def _is_offering(self, peer: Peer) -> bool:
        """Tell whether libfabric has refused something for this peer that it may take soon."""
        return bool(peer.outbox) or (bool(peer.held) and peer.state is State.READY)

    def _do_chores(self, now_s: float) -> None:
        """Do what is due each `_chore_s` while nothing is outstanding."""

    def _drop(self, peer: Peer) -> None:
        """End all that was to go to a peer that is SILENT or GONE."""
        spare = peer.state is State.SILENT
        self._rows.end(peer, peer.status, gone=self._rules.software, spare=spare)
        self._outgoing.drop(peer, peer.status)
        self._inbox.drop(peer)
        self._restless.discard(peer)

    def _shut(self) -> None:
        """Close all; the queue has been read out: tcp 2.5.1 may crash if it is read in between."""
        self._main.close()
        self._regions.close()
        self._mailbox.close()
        if self._sleeper is not None:
            sleeper, self._sleeper = self._sleeper, None
            sleeper.close()
        self.nic.close()

    # --- the seam

    def describe(self) -> str:
        """Say what drives this NIC, and which way its rows go; `explain` asks."""
        return self._about

    def register(self, memory: Memory, access: Access) -> DomainKey:
        self._check_open()
        check_memory(self.caps, memory, access)
        return self._regions.add(memory, access).key

    def deregister(self, key: DomainKey) -> None:
        if self._closed or self.nic.closed:
            return
        self._cut(key)
        self._regions.remove(key)

    def connect(self, peer: bytes) -> int:
        self._check_open()
        found = self.peers.find(peer)
        if found.state is not State.READY:
            self.peers.greet(found, time.monotonic())
            self._stir(found)
        return found.index

    def forget(self, peer: int) -> None:
        """Nothing to do: an entry of the address vector costs little, the dead are found later."""

    # --- writes

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        if self._closed or self.nic.closed:
            self._check_open()
        try:
            return self._rows.post(batch, start, stop)
        except MemoryError:  # nothing was taken: one row by itself needs the least memory
            with contextlib.suppress(MemoryError):
                return self._rows.post_each(batch, start, start + 1)
            self._short = SHORT_POLLS
            return 0

    # --- reads

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        self._check_open()
        slots, rows = self._slots, self._rows
        room = min(self.caps.reads - slots.reads, slots.room - rows.waiting)
        stop = min(stop, start + room)
        if stop <= start:
            return 0
        nbytes = batch.nbytes
        if nbytes if isinstance(nbytes, int) else nbytes.all():
            taken = self.post(marked(batch), start, stop)
        else:  # empty rows end here
            taken = rows.post_each(marked(batch), start, stop)
        slots.reads += taken
        return taken

    # --- messages and control messages

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        return self._send(peer, payload, ctx, is_control=False)

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        return self._send(peer, payload, ctx, is_control=True)

    def _send(self, peer: int, payload: bytes, ctx: int, *, is_control: bool) -> bool:
        self._check_open()
        to = self.peers.all[peer]
        now_s = time.monotonic()
        self.peers.greet_again(to, now_s)
        try:
            taken = self._outgoing.send(to, payload, ctx, now_s, is_control=is_control)
        except MemoryError:  # nothing was taken
            self._short, taken = SHORT_POLLS, False
        self._stir(to)
        return taken

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        return self._unread.take(slot)

    engine_of = staticmethod(engine_of)

    def post_recvs(self, nbytes: int, count: int) -> None:
        self._check_open()
        self._inbox.add(nbytes, count)
        self._stir_all()

    def recv_view(self, slot: int) -> memoryview:
        return self._inbox.view(slot)

    def recv_source(self, slot: int) -> bytes:
        return self._inbox.sender(slot)

    def recv_done(self, slot: int) -> None:
        self._inbox.give_back(slot)
        if not self._closed:
            self._stir_all()

    def _stir(self, peer: Peer) -> None:
        """Try to send what a peer's outbox holds; look after it until all is settled."""
        self.peers.flush(peer, time.monotonic())
        if peer.unsettled:
            self._restless.add(peer)
            self._retry_s = _RETRY_S

    def _stir_all(self) -> None:
        for peer in self.peers.all:
            if peer.outbox:
                self._stir(peer)

    # --- completions

    def poll(self, out: Completions) -> int:
        filled = 0
        if self._done:
            filled = self._hand_out(out)
        if self.nic.closed:
            return filled
        rows, queue = self._rows, self._queue
        try:
            rows.budget_bytes = self._rules.turn_bytes
            filled = queue.read(out, filled)
            if queue.full or self._short:
                self._short = max(0, self._short - 1)
                filled = self._read_on(out, filled)
            slots = self._slots
            if self._restless:
                self._look_after()
            if slots.open or self._restless or self._outgoing.open:
                now_s = time.monotonic()
                if now_s >= self._next_look_s:
                    first = self._next_look_s == 0.0  # nothing was outstanding, perhaps for long
                    late = not first and self._next_look_s < now_s - _LATE_S
                    self._next_look_s = now_s + _LOOK_S
                    self._excused = late and not self._excused  # what they sent may wait to be read
                    if not (first or self._excused):
                        self._look_at_deadlines(now_s)
            elif self._next_look_s:
                self._next_look_s, self._excused = 0.0, False  # nothing to be late for
            elif self._chore_s:
                now_s = time.monotonic()
                if now_s >= self._next_chore_s:
                    self._do_chores(now_s)
            if self._dying:
                self._regions.bury()
            if self._departed:
                self.peers.settle()
        except MemoryError:  # what was not handed out is there for the next poll
            self._short = SHORT_POLLS
        return filled

    def _read_on(self, out: Completions, filled: int) -> int:
        """See to frames and errors, and read what follows them.

        Bounded, since an answer may bring the next frame, or the next error, at once (C2).
        """
        queue = self._queue
        for _ in range(_READS_MAX):
            try:
                self._take_rest()
                filled = queue.read(out, filled)
            except MemoryError:
                self._short = SHORT_POLLS
                break
            if filled >= len(out) or not queue.full:
                break
        return filled

    def _take_rest(self) -> None:
        """See to what the queue brought besides rows and immediates."""
        queue = self._queue
        while queue.frames:
            frame = frames.decode(memoryview(queue.frames[0]))
            queue.frames.popleft()
            self._take_frame(frame)
        self._take_errors()

    def _take_errors(self) -> None:
        queue = self._queue
        while queue.errors:
            self._take_error(queue.errors.popleft())
        if self.nic.failure and not self._lost:
            self._go_down()

    def _drain(self) -> None:
        self._queue.drain(self._done, self._take_rest)

    def _hand_out(self, out: Completions) -> int:
        filled, _, _ = hand_out(self._done, out, 0)
        if not self._done:
            self._rows.said()
        return filled

    def _take_frame(self, frame: frames.Frame | None) -> None:
        peers = self.peers
        # Whoever has another's address now is met as the later incarnation, which ends the earlier.
        peer = peers.known(frame.sender) if frame is not None else None
        if frame is None or peer is None:
            return
        now_s = time.monotonic()
        match frame:
            case frames.Hello():
                peers.take_hello(peer, frame, now_s)
            case frames.Welcome():
                peers.is_ready(peer, now_s)
            case frames.Bye():
                peers.take_bye(peer, now_s)
            case _:
                if peer.state is State.SILENT and not isinstance(frame, frames.Stale):
                    peers.greet(peer, now_s)
                self._take_talk(peer, frame, now_s)
        self._stir(peer)

    def _take_talk(self, peer: Peer, frame: frames.Frame, now_s: float) -> None:
        """Handle what is said between greeting and goodbye."""
        peers = self.peers
        match frame:
            case frames.Data():
                self._inbox.take_data(peer, frame)
            case frames.Control():
                self._unread.add(frame.payload, frame.sender)
                peers.say(peer, frames.Ack(self.address, frame.number, Status.OK))
            case frames.Ack():
                self._outgoing.take_ack(frame)
            case frames.Wait() | frames.Go():
                self._outgoing.balance(frame, now_s)

    def _take_error(self, error: CqError) -> None:
        """One operation failed: a row, a frame, or a receive."""
        now_s = time.monotonic()
        if self._slots.owns(error.context):
            found = self._slots.take_failed(error.context)
            if found is not None:
                self._row_failed(*found, error)
        elif self._mailbox.owns(error.context):
            if self._mailbox.is_receive(error.context):
                self._mailbox.dropped(error.context)
                return
            to = self._mailbox.sent(error.context)
            if to is not None and not to.over:
                self._texts[Status.UNREACHABLE] = error.text
                self._outgoing.interrupt(to)
                self.peers.frame_failed(to, now_s)
                to.pause_until_s = now_s + _RETRY_S
                self._restless.add(to)

    def _go_down(self) -> None:
        """libfabric has lost this NIC: hand out what had come, end the rest, say so.

        Until close() endpoints stay open, and slots and regions of rows that are out taken.
        """
        self._lost = True
        self._drain()
        self._queue.stop()
        self._texts[Status.NIC_DOWN] = self.nic.failure
        self.peers.give_up()
        self._end_all(Status.NIC_DOWN, gone=False)
        if self._sleeper is not None:
            for fd in self.nic.wait_fds:
                self._sleeper.ignore(fd)
        self._done.append((int(Kind.DOWN), int(Status.NIC_DOWN), 1, 0, 0, 0, 0))

    # --- looking after peers

    def _look_after(self) -> None:
        """Offer libfabric what it would not take, and settle what waited for an answer."""
        now_s = time.monotonic()
        for peer in list(self._restless):
            if now_s >= peer.pause_until_s:
                self.peers.flush(peer, now_s)
            self._go_on(peer, now_s)
            if not peer.unsettled:
                self._restless.discard(peer)

    def _go_on(self, peer: Peer, now_s: float) -> None:
        if peer.state is State.READY:
            self._rows.go_on(peer)
        elif peer.state is State.LEAVING:
            self.peers.see_off(peer, now_s)

    def _look_at_deadlines(self, now_s: float) -> None:
        # What went wrong with no operation of ours: an answer that found nobody, say.
        while event := self.nic.read_event():
            _LOG.warning("%s: %s", self.caps.nic, event)
        due = self._slots.oldest_due()
        for peer in {*due, *self._restless}:
            self._rows.expire(peer, now_s)
            self.peers.look(peer, due.get(peer), now_s)
            if peer.unsettled:
                self._restless.add(peer)
        self._outgoing.look(now_s)

    # --- telling and sleeping

    def status_text(self, status: int) -> str:
        own = self._texts.get(status, "")
        if status == Status.PROVIDER and self._rows.refusal:
            own = says(f"a post was refused: {self.nic.strerror(self._rows.refusal)}", own)
        if status == Status.UNREACHABLE:
            own = self.peers.refusal or own
            if not self.peers.answered:
                own = says(own, self._why_nobody())
        return says(_USUALLY.get(status, ""), own)

    def set_waker(self, waker: Callable[[], None]) -> None:
        """Not needed: there is a descriptor, or caps.wakes is False."""

    def wakeup_fd(self) -> int | None:
        return self._sleeper.fd if self._sleeper is not None else None

    def arm(self) -> bool:
        if self._done or self.nic.closed or self._lost:
            return not self._done
        if self._queue.frames or self._queue.errors or self._queue.behind:
            return False
        if self._sleeper is None:
            return True
        if self._short:
            timer_s = _RETRY_S
        elif any(map(self._is_offering, self._restless)):
            timer_s = self._retry_s
            self._retry_s = min(2 * timer_s, _LOOK_S)
        elif self._slots.open or self._restless or self._outgoing.open:
            timer_s = _LOOK_S
        else:
            timer_s = self._chore_s
        self._sleeper.wake_in(timer_s or None)
        return self.nic.trywait()

    # --- ends

    def _check_open(self) -> None:
        if self._closed or self.nic.closed:
            raise closed(self.caps.nic)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.nic.closed:  # in a forked child
            self._end_all(Status.FLUSHED)
            return
        self._say_bye()
        self.peers.close()
        self._drain()
        self._shut()
        self._end_all(Status.FLUSHED)

    def _say_bye(self) -> None:
        """Tell the peers, and let what we owe them leave: answers still in this process."""
        listening = self.peers.farewell()
        start_s = quiet_s = time.monotonic()
        while True:
            before = len(self._done)
            self._drain()
            now_s = time.monotonic()
            for peer in listening:
                self.peers.flush(peer, now_s)
            if len(self._done) != before:
                quiet_s = now_s
            owing = any(peer.outbox and not peer.over for peer in listening)
            if now_s - start_s > _LINGER_S or (not owing and now_s - quiet_s > _QUIET_S):
                return
            time.sleep(0.0002)

    def _end_all(self, status: Status, *, gone: bool = True) -> None:
        """End every open row and message; `gone` as in Rows.end()."""
        for peer in self.peers.all:
            self._rows.end(peer, status, gone=gone)
        self._outgoing.close(status)
        self._restless.clear()
