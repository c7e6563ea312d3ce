"""One NIC behind the seam, as far as all providers are alike: rows, completions, deadlines.

The parts: objects (libfabric's), rows, slots (rows in flight), regions, peers (greetings), mailbox
(frames), messages. Here they are joined, and deadlines are kept. What is special about EFA is in
efa/, about tcp in software/; each has its domain, which fills in the methods
under "what a room decides".
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic

from tep.backends.base import (
    Access,
    Completions,
    DomainCaps,
    DomainKey,
    Entry,
    Kind,
    Status,
    WriteBatch,
)
from tep.backends.checks import check_memory
from tep.backends.ffi import libfabric as fi
from tep.backends.handing import Unread, hand_out
from tep.backends.libfabric import frames
from tep.backends.libfabric.address import NicAddress, engine_of
from tep.backends.libfabric.book import Book
from tep.backends.libfabric.completions import Queue
from tep.backends.libfabric.mailbox import Mailbox
from tep.backends.libfabric.messages import Inbox, Outgoing
from tep.backends.libfabric.objects import CqError, Endpoint, Nic, Option
from tep.backends.libfabric.peer import PeerT, State
from tep.backends.libfabric.peers import Peers
from tep.backends.libfabric.regions import Regions
from tep.backends.libfabric.rows import Rows
from tep.backends.libfabric.rules import Rules
from tep.backends.libfabric.slots import Slots, Ticket
from tep.backends.sleeper import Sleeper
from tep.backends.texts import closed, meaning, says
from tep.memory.source import DmabufExport, Memory

__all__ = ["FabricDomain"]

_USUALLY: Final = meaning()

_LOOK_S: Final = 0.05  # between two looks at deadlines, while something is outstanding

_LATE_S: Final = 0.2
"""A look that comes so late finds this process itself was held up, and excuses its peers once."""

_RETRY_S: Final = 0.001
"""How often what libfabric would not take yet is offered again while the engine sleeps."""

_READS_MAX: Final = 64  # of the queue in one poll()
_LINGER_S: Final = 0.25
_QUIET_S: Final = 0.003


class FabricDomain(Generic[PeerT]):
    """One NIC; `tep.backends.base.Domain` describes the methods.

    Args:
        nic: opened, without endpoints; this object closes it.
        rules: of its provider.
        caps: for the seam.
        epoch: of the engine's incarnation.
        options: of every endpoint.
        delivery_complete: whether local completions wait for the target.
        dmabuf: exports device memory, see Regions.
        about: what `explain` says of this NIC.
    """

    _peers_kind: type[Peers[PeerT]] = Peers
    _rows_kind: type[Rows[PeerT]] = Rows
    _has_chores = False

    def __init__(
        self,
        nic: Nic,
        rules: Rules,
        caps: DomainCaps,
        *,
        epoch: int,
        options: tuple[Option, ...] = (),
        delivery_complete: bool = False,
        dmabuf: DmabufExport | None = None,
        about: str = "",
    ) -> None:
        self.caps = caps
        self._about = about
        self._nic = nic
        self._rules = rules
        self._main, self._book = self._open_main(options)
        me = NicAddress(rules.provider, epoch, caps.nic, self._book.raw)
        self.address = me.to_bytes()
        self._done: deque[Entry] = deque()
        self._texts: dict[int, str] = {}
        self._timeout_s = 0.8 * caps.peer_timeout_s  # the rest is for looking and telling
        self._slots, self._regions, self._mailbox, self._queue = self._parts(
            nic, rules, dmabuf, delivery_complete=delivery_complete
        )
        self._mailbox.start(self._main)
        self._peers = self._peers_kind(
            nic, self._mailbox, rules, me, self._book, self._main, self._timeout_s, self._peer_over
        )
        self._outgoing = Outgoing(self.address, self._done, self._timeout_s)
        self._inbox = Inbox(self.address, self._done)
        self._unread = Unread(self._done.append)
        self._rows = self._rows_kind(
            caps,
            rules,
            self._slots,
            self._regions,
            self._peers,
            self._mailbox.region,
            self._done,
            self._timeout_s,
            self._stir,
        )
        self._restless: set[PeerT] = set()  # peers that need looking after at each poll
        self._next_look_s = self._next_chore_s = 0.0
        self._excused = self._closed = self._lost = False
        self._sleeper = Sleeper(nic.wait_fd) if nic.wait_fd is not None else None

    def _parts(
        self, nic: Nic, rules: Rules, dmabuf: DmabufExport | None, *, delivery_complete: bool
    ) -> tuple[Slots, Regions, Mailbox, Queue]:
        """What touches the NIC; a backend that drives it without libfabric has its own."""
        flags = fi.FI_COMPLETION | (fi.FI_DELIVERY_COMPLETE if delivery_complete else 0)
        slots = Slots(rules.window_rows, flags, more=rules.more)
        mailbox = Mailbox(nic, rules.msg_bytes_max + frames.HEAD_BYTES_MAX, rules)
        queue = Queue(nic, slots, mailbox, rules)
        return slots, Regions(nic, dmabuf), mailbox, queue

    # --- what a room decides

    def _open_main(self, options: tuple[Option, ...]) -> tuple[Endpoint, Book[PeerT]]:
        """Open the endpoint that peers write to, and the book of whom it knows."""
        raise NotImplementedError

    def _row_failed(self, ticket: Ticket, row: int, error: CqError) -> None:
        """End a row that came back failed, or find out why first."""
        raise NotImplementedError

    def _do_chores(self, now_s: float) -> None:
        """What a room that `_has_chores` does now and then while nothing is outstanding."""

    def _chore_s(self) -> float:
        """How often to be woken for chores while nothing is outstanding, seconds; 0 = never."""
        return 0.0

    def _drop(self, peer: PeerT, status: Status, *, spare: bool, gone: bool = False) -> None:
        """End all that was to go to a peer; `spare` and `gone` as in Rows.end()."""
        self._rows.end(peer, status, gone=gone, spare=spare)
        self._outgoing.drop(peer, status)
        self._inbox.drop(peer)
        self._rows.recheck()
        self._restless.discard(peer)

    def _shut(self) -> None:
        """Close all; the queue has been read out: tcp 2.5.1 may crash if it is read in between."""
        self._main.close()
        self._regions.close()
        self._mailbox.close()
        if self._sleeper is not None:
            sleeper, self._sleeper = self._sleeper, None
            sleeper.close()
        self._nic.close()

    # --- the seam

    def describe(self) -> str:
        """Say what drives this NIC, and which way its rows go; `explain` asks."""
        return self._about

    # --- memory and peers

    def register(self, memory: Memory, access: Access) -> DomainKey:
        self._check_open()
        check_memory(self.caps, memory, access)
        return self._regions.add(memory, access).key

    def deregister(self, key: DomainKey) -> None:
        if self._closed or self._nic.closed:
            return
        self._rows.recheck()
        self._regions.remove(key)

    def connect(self, peer: bytes) -> int:
        self._check_open()
        found = self._peers.find(peer)
        if found.state is not State.READY:
            self._peers.greet(found, time.monotonic())
            self._stir(found)
        return found.index

    def forget(self, peer: int) -> None:
        """Nothing to do: an entry of the address vector costs little, the dead are found later."""

    # --- writes

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        if self._closed or self._nic.closed:
            self._check_open()
        return self._rows.post(batch, start, stop)

    # --- messages and control messages

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        return self._send(peer, payload, ctx, is_control=False)

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        return self._send(peer, payload, ctx, is_control=True)

    def _send(self, peer: int, payload: bytes, ctx: int, *, is_control: bool) -> bool:
        self._check_open()
        to = self._peers.all[peer]
        now_s = time.monotonic()
        self._peers.greet_again(to, now_s)
        taken = self._outgoing.send(self._peers, to, payload, ctx, now_s, is_control=is_control)
        self._stir(to)
        return taken

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        return self._unread.take(slot)

    engine_of = staticmethod(engine_of)

    def post_recvs(self, nbytes: int, count: int) -> None:
        self._check_open()
        self._inbox.add(self._peers, nbytes, count)
        self._stir_all()

    def recv_view(self, slot: int) -> memoryview:
        return self._inbox.view(slot)

    def recv_source(self, slot: int) -> bytes:
        return self._inbox.source(slot)

    def recv_done(self, slot: int) -> None:
        self._inbox.give_back(self._peers, slot)
        if not self._closed:
            self._stir_all()

    def _say(self, peer: PeerT, frame: frames.Frame) -> None:
        self._peers.say(peer, frame)
        self._stir(peer)

    def _stir(self, peer: PeerT) -> None:
        """Try to send what a peer's outbox holds; look after it until all is settled."""
        self._peers.flush(peer, time.monotonic())
        if peer.unsettled:
            self._restless.add(peer)

    def _stir_all(self) -> None:
        for peer in self._peers.all:
            if peer.outbox:
                self._stir(peer)

    # --- completions

    def poll(self, out: Completions) -> int:
        filled = 0
        if self._done:
            filled = self._hand_out(out)
        if self._nic.closed:
            return filled
        rows, queue = self._rows, self._queue
        if rows.budget != self._rules.turn_rows:  # some of it was used
            rows.new_turn()
        filled = queue.read(out, filled)
        if queue.full:
            filled = self._read_on(out, filled)
        slots = self._slots
        if self._restless:
            self._look_after()
        if slots.open or self._restless or self._outgoing.open:
            now_s = time.monotonic()
            if now_s >= self._next_look_s:
                first = self._next_look_s == 0.0  # since nothing was outstanding, long ago perhaps
                late = not first and self._next_look_s < now_s - _LATE_S
                self._next_look_s = now_s + _LOOK_S
                self._excused = late and not self._excused  # what they sent may wait to be read
                if not (first or self._excused):
                    self._look_at_deadlines(now_s)
        elif self._next_look_s:
            self._next_look_s, self._excused = 0.0, False  # nothing to be late for
        elif self._has_chores:
            now_s = time.monotonic()
            if now_s >= self._next_chore_s:
                self._do_chores(now_s)
        if self._regions.dying:
            self._regions.bury()
        return filled

    def _read_on(self, out: Completions, filled: int) -> int:
        """See to frames and errors, and read what follows them.

        Bounded, since an answer may bring the next frame, or the next error, at once (C2).
        """
        queue = self._queue
        for _ in range(_READS_MAX):
            self._take_rest()
            filled = queue.read(out, filled)
            if filled >= len(out) or not queue.full:
                break
        return filled

    def _take_rest(self) -> None:
        """See to what the queue brought besides rows and immediates."""
        queue = self._queue
        while queue.frames:
            self._take_frame(queue.frames.popleft())
        self._take_errors()

    def _take_errors(self) -> None:
        queue = self._queue
        while queue.errors:
            self._take_error(queue.errors.popleft())
        if self._nic.failure and not self._lost:
            self._go_down()

    def _drain(self) -> None:
        """Empty the queue into `_done`."""
        self._queue.drain(self._done, self._take_rest)

    def _hand_out(self, out: Completions) -> int:
        filled, _, _ = hand_out(self._done, out, 0)
        if not self._done:
            self._rows.said()
        return filled

    def _take_frame(self, data: bytes) -> None:
        frame = frames.decode(memoryview(data))
        if frame is None:
            return
        now_s = time.monotonic()
        peers = self._peers
        match frame:
            case frames.Hello():
                peer = peers.take_hello(frame, now_s)
            case frames.Welcome():
                peer = peers.take_welcome(frame, now_s)
            case frames.Stale():
                peers.take_stale(frame)
                return
            case frames.Bye():
                leaving = peers.take_bye(frame, now_s)
                if leaving is not None and leaving.unsettled:
                    self._restless.add(leaving)
                return
            case _:
                peer = peers.known(frame.sender)
                if peer is not None:
                    if peer.state is State.SILENT:
                        peers.greet(peer, now_s)
                    self._take_talk(peer, frame, now_s)
        if peer is not None:
            self._stir(peer)

    def _take_talk(self, peer: PeerT, frame: frames.Frame, now_s: float) -> None:
        """Handle what is said between greeting and goodbye."""
        peers = self._peers
        match frame:
            case frames.Data():
                self._inbox.take_data(peers, peer, frame)
            case frames.Control():
                self._unread.add(frame.payload, frame.sender)
                peers.say(peer, frames.Ack(self.address, frame.number, Status.OK))
            case frames.Ack():
                self._outgoing.take_ack(frame)
            case frames.Wait():
                self._outgoing.take_wait(peers, frame, now_s)
            case frames.Go():
                self._outgoing.take_go(peers, frame, now_s)
            case _:
                pass

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
                self._peers.frame_failed(to, now_s)
                self._rows.recheck()
                to.pause_until_s = now_s + _RETRY_S
                self._restless.add(to)

    def _go_down(self) -> None:
        """libfabric has lost this NIC: hand out what had come, end the rest, say so.

        Until close() endpoints stay open, and slots and regions of rows that are out taken.
        """
        self._lost = True
        self._drain()
        self._queue.stop()
        self._texts[Status.NIC_DOWN] = self._nic.failure
        self._peers.give_up()
        self._end_all(Status.NIC_DOWN, gone=False)
        if self._sleeper is not None:
            self._sleeper.forget_queue()
        self._done.append((int(Kind.DOWN), int(Status.NIC_DOWN), 1, 0, 0, 0, 0))

    # --- looking after peers

    def _look_after(self) -> None:
        """Offer libfabric what it would not take, and settle what waited for an answer."""
        now_s = time.monotonic()
        for peer in list(self._restless):
            if now_s >= peer.pause_until_s:
                self._peers.flush(peer, now_s)
            self._go_on(peer, now_s)
            if not peer.unsettled:
                self._restless.discard(peer)

    def _go_on(self, peer: PeerT, now_s: float) -> None:
        if peer.state is State.READY:
            self._rows.go_on(peer)
        elif peer.state is State.LEAVING:
            self._peers.see_off(peer, now_s)

    def _look_at_deadlines(self, now_s: float) -> None:
        due = self._slots.oldest_due()
        for peer in {*due, *self._restless}:
            self._rows.expire(peer, now_s)
            self._peers.look(peer, due.get(peer), now_s)
            if peer.unsettled:
                self._restless.add(peer)
        self._outgoing.look(self._peers, now_s)

    def _peer_over(self, peer: PeerT) -> None:
        """End all that was to go to a peer that is SILENT or GONE."""
        self._drop(peer, peer.status, spare=peer.state is State.SILENT)

    # --- telling and sleeping

    def status_text(self, status: int) -> str:
        own = self._texts.get(status, "")
        if status == Status.PROVIDER and self._rows.refusal:
            own = says(f"a post was refused: {self._nic.strerror(self._rows.refusal)}", own)
        if status == Status.UNREACHABLE:
            own = self._peers.refusal or own
        return says(_USUALLY.get(status, ""), own)

    def set_waker(self, waker: Callable[[], None]) -> None:
        """Not needed: there is a descriptor, or caps.wakes is False."""

    def wakeup_fd(self) -> int | None:
        return self._sleeper.fd if self._sleeper is not None else None

    def arm(self) -> bool:
        if self._done or self._nic.closed or self._lost:
            return not self._done
        if self._queue.frames or self._queue.errors:
            return False
        if self._sleeper is None:
            return True
        if any(peer.outbox or (peer.held and peer.state is State.READY) for peer in self._restless):
            timer_s = _RETRY_S
        elif self._slots.open or self._restless or self._outgoing.open:
            timer_s = _LOOK_S
        else:
            timer_s = self._chore_s()
        self._sleeper.quiet()
        self._sleeper.set_timer(timer_s)
        return self._nic.trywait()

    # --- ends

    def _check_open(self) -> None:
        if self._closed or self._nic.closed:
            raise closed(self.caps.nic)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._nic.closed:  # in a forked child
            self._end_all(Status.FLUSHED)
            return
        self._say_bye()
        self._peers.close()
        self._retire()
        self._end_all(Status.FLUSHED)

    def _retire(self) -> None:
        self._drain()
        self._shut()

    def _say_bye(self) -> None:
        """Tell the peers, and let what we owe them leave: answers still in this process."""
        listening = self._peers.farewell()
        start_s = quiet_s = time.monotonic()
        while True:
            before = len(self._done)
            self._drain()
            now_s = time.monotonic()
            for peer in listening:
                self._peers.flush(peer, now_s)
            if len(self._done) != before:
                quiet_s = now_s
            owing = any(peer.outbox and not peer.over for peer in listening)
            if now_s - start_s > _LINGER_S or (not owing and now_s - quiet_s > _QUIET_S):
                return
            time.sleep(0.0002)

    def _end_all(self, status: Status, *, gone: bool = True) -> None:
        """End every open row and message; `gone` as in Rows.end()."""
        for peer in self._peers.all:
            self._rows.end(peer, status, gone=gone)
        self._outgoing.close(status)
        self._restless.clear()
