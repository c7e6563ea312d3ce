"""One NIC of the local backend: its two halves put together behind the seam.

The sending half is `sender`, the receiving half `port`; here are registration, the pool of receive
buffers, what poll() hands out, sleeping, and the ends. All of it belongs to one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

import numpy as np

from tep.backends import forks
from tep.backends.base import (
    COMPLETION,
    COMPLETION_BYTES,
    Access,
    Completions,
    DomainCaps,
    DomainKey,
    Kind,
    ReadBatch,
    Status,
    WriteBatch,
    put_completion,
)
from tep.backends.checks import check_memory
from tep.backends.fences import new_fence
from tep.backends.handing import ReceivePool, hand_out
from tep.backends.hostcopy import HostRegion
from tep.backends.local.address import Address, engine_of
from tep.backends.local.libc import why
from tep.backends.local.port import ASLEEP, Inbound, Port
from tep.backends.local.rings import EVENTS, NONSENSE, LaneReader
from tep.backends.local.sender import Sender
from tep.backends.local.watches import Watches
from tep.backends.texts import closed, meaning, says
from tep.base.errors import BackendUnavailable
from tep.memory.source import Memory

__all__ = ["LocalDomain"]

_LOOKS: Final = 16
"""One poll in so many looks at the sockets: it costs 0.4 us (measured)."""

_HALF: Final = EVENTS // 2  # see LaneReader.wanted()
_IMM_MASK: Final = 2**32 - 1
_SCALAR_MAX: Final = 8  # events up to which a loop is cheaper than numpy's first microseconds
_IMM, _RECV = int(Kind.IMM), int(Kind.RECV)
_OK: Final = int(Status.OK)


class _State(Enum):
    OPEN = auto()
    CLOSED = auto()


_OPEN: Final = _State.OPEN  # looking it up in its class takes 0.1 us


class LocalDomain:
    """One NIC; `tep.backends.base.Domain` describes the methods.

    Args:
        address: of this incarnation.
        caps: its limits.
        copy_threads: threads that copy long rows.

    Raises:
        BackendUnavailable: no socket, no shared memory, no descriptor left.
    """

    def __init__(self, address: Address, caps: DomainCaps, copy_threads: int = 1) -> None:
        self.caps = caps
        self.address = address.to_bytes()
        self._state = _OPEN
        self._watches, self._bell = _new_watches()
        self._fence = new_fence()
        self._sources: dict[int, HostRegion] = {}
        self._sinks: dict[int, HostRegion] = {}
        shared = self._watches, self._bell, self._fence
        self._sender = Sender(
            self.address, caps, self._sources, self._sinks, *shared, copy_threads=copy_threads
        )
        try:
            self._port = Port(address, *shared, self._sender.controls.unread.add)
        except BackendUnavailable:
            self._let_go()
            raise
        self._words = self._port.words
        self._asleep = self._rung = False
        self._refused = False
        self._polls = 0
        self._lkey = 0
        self._waker: Callable[[], None] = _wake_nobody
        self._pool = ReceivePool()
        halves = self._sender, self._port, self._watches, self._bell
        self._finalize = weakref.finalize(self, _let_go, caps.nic, *halves)
        forks.hold(self)

    # --- memory and peers

    def register(self, memory: Memory, access: Access) -> DomainKey:
        self._check_open()
        check_memory(self.caps, memory, access)
        port, readable = self._port, access.readable
        region = HostRegion(memory, memory.ptr, writable=access.target)
        shown = region.writable or readable
        rkey = port.grant(region, readable=readable) if shown else port.new_key()
        self._lkey += 2
        lkey = self._lkey + 1
        self._sources[lkey] = region
        if access.sink:
            self._sinks[lkey] = region
        return DomainKey(lkey=lkey, rkey=rkey, base=memory.ptr)

    def deregister(self, key: DomainKey) -> None:
        if self._state is _OPEN:
            self._sources.pop(key.lkey, None)
            self._sinks.pop(key.lkey, None)
            self._port.withdraw(key.rkey, self.caps.peer_timeout_s)

    def connect(self, peer: bytes) -> int:
        self._check_open()
        return self._sender.connect(peer)

    # --- posting

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        if self._state is not _OPEN:
            self._check_open()
        if self._asleep:  # what is carried out now is news; and a quick answer need not ring
            self._awake()
            self._waker()
        take = self._sender.post(batch, start, stop)
        if take == 0:
            self._refuse()
        return take

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        self._check_open()
        if self._asleep:
            self._awake()
            self._waker()
        take = self._sender.post_read(batch, start, stop)
        if take == 0:
            self._refuse()
        return take

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        self._check_open()
        taken = self._sender.post_send(peer, payload, ctx)
        if not taken:
            self._refuse()
        return taken

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        self._check_open()
        taken = self._sender.post_control(peer, payload, ctx)
        if not taken:
            self._refuse()
        return taken

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        return self._sender.controls.unread.take(slot)

    engine_of = staticmethod(engine_of)

    def _refuse(self) -> None:
        self._refused = True
        if self._sender.done or self._sender.runnable():
            self._waker()  # polling is what makes room here

    def post_recvs(self, nbytes: int, count: int) -> None:
        self._check_open()
        self._pool.add(nbytes, count)
        self._feed()

    def recv_view(self, slot: int) -> memoryview:
        return self._pool.view(slot)

    def recv_source(self, slot: int) -> bytes:
        return self._pool.sender(slot)

    def recv_done(self, slot: int) -> None:
        self._pool.give_back(slot)
        self._feed()

    def _feed(self) -> None:
        """There is a receive buffer again: look at who waited for one."""
        if self._state is _OPEN and self._port.starved:
            self._port.ready.update(self._port.starved)
            self._port.starved.clear()
            self._waker()

    # --- completions

    def poll(self, out: Completions) -> int:
        at = 0
        if self._state is _OPEN:
            woken = self._asleep
            if woken:
                self._awake()
            self._polls += 1
            sender, port = self._sender, self._port
            if sender.active or sender.lost:  # of a peer to whom nothing waits
                if sender.go_on() and not sender.done:
                    self._waker()  # part of a row has moved: no completion tells of the work
            else:
                sender.helping = sender.least
            if sender.done:
                at = self._hand_out(out)
            if port.scan():
                sender.small_helpings()
                at = self._collect(out, at)
            if woken and not at:
                self._rung = False
                self._watches.look()  # what woke us was a socket, or nothing did
            elif self._polls % _LOOKS == 0 or (sender.active and sender.asking):
                self._watches.look()
                if port.callers:
                    port.hang_up_on_silent()
        elif self._sender.done:
            at = self._hand_out(out)
        if at and self._refused:
            self._refused = False
            self._waker()
        return at

    def _hand_out(self, out: Completions) -> int:
        at, rows, reads = hand_out(self._sender.done, out, 0)
        self._sender.open_rows -= rows
        self._sender.reads.open_rows -= reads
        return at

    def _collect(self, out: Completions, at: int) -> int:
        """Take what peers wrote: immediates, then messages."""
        port, room = self._port, len(out)
        for inbound in list(port.ready):
            if at == room:
                break
            lane = inbound.lane
            if lane is not None:
                before, n = at, lane.tail - lane.head
                if n <= _SCALAR_MAX and n <= room - at:
                    for k in range(at, at + n):
                        word = lane.take_event()
                        count, imm = word >> 32, word & _IMM_MASK
                        put_completion(out, k * COMPLETION_BYTES, _IMM, _OK, count, imm, 0, 0, 0)
                    at += n
                else:
                    at = self._take_burst(lane, min(n, room - at), out, at)
                if lane.mhead != lane.mtail:
                    at = self._take_messages(inbound, out, at)
                    n = _HALF
                if n >= _HALF and at != before and lane.wanted():
                    _ring(inbound.bell)
                if at == room and (lane.head != lane.tail or lane.mhead != lane.mtail):
                    break
            del port.ready[inbound]
            if inbound.gone:
                port.drop(inbound)
        return at

    def _take_burst(self, lane: LaneReader, n: int, out: Completions, at: int) -> int:
        found = lane.take_events(n)
        rows = out[at : at + n]
        rows[:] = _BLANK_IMM
        rows["imm"] = found & np.uint64(_IMM_MASK)
        rows["count"] = found >> np.uint64(32)
        return at + n

    def _take_messages(self, inbound: Inbound, out: Completions, at: int) -> int:
        lane = inbound.lane
        assert lane is not None
        room = len(out)
        while at < room and (nbytes := self._next_message(inbound, lane)) is not None:
            found = self._pool.take(nbytes, inbound.sender)
            if found is not None:
                slot, buffer = found
                lane.take_message(nbytes, buffer, _OK)
                put_completion(out, at * COMPLETION_BYTES, _RECV, _OK, 1, 0, 0, slot, nbytes)
                at += 1
            elif self._pool.never_fits(nbytes):
                lane.take_message(nbytes, None, int(Status.LENGTH))
                if lane.wanted():
                    _ring(inbound.bell)
            else:
                if not inbound.gone:
                    self._port.starved[inbound] = None
                break
        return at

    def _next_message(self, inbound: Inbound, lane: LaneReader) -> int | None:
        nbytes = lane.next_message()
        if nbytes == NONSENSE:
            lane.mhead = lane.mtail
            self._port.part(inbound)
            return None
        return nbytes

    def status_text(self, status: int) -> str:
        failed = status in {Status.PROVIDER, Status.UNREACHABLE}
        return says(self._sender.why if failed else "", _STATUS_TEXT.get(status, ""))

    # --- sleeping

    def forget(self, peer: int) -> None:
        """Nothing is kept of a peer that could be given back."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker

    def wakeup_fd(self) -> int | None:
        return self._watches.epoll.fileno() if self._state is _OPEN else None

    def arm(self) -> bool:
        sender, port = self._sender, self._port
        if self._state is not _OPEN:
            return not sender.done
        if self._rung:  # a ring that nobody takes back would wake the next sleeper
            self._rung = False
            self._watches.look()
        if sender.done or port.ready:
            return False
        self._words[ASLEEP] = 1
        self._fence()
        if port.unseen() or sender.runnable():
            self._words[ASLEEP] = 0
            return False
        self._asleep = True
        return True

    def _awake(self) -> None:
        """Let nobody ring, and note whether somebody did."""
        self._asleep = False
        if self._words[ASLEEP]:
            self._words[ASLEEP] = 0
        else:
            self._rung = True

    # --- ends

    def close(self) -> None:
        if self._state is not _OPEN:
            return
        self._state = _State.CLOSED
        self._finalize.detach()
        try:
            self._sender.close(Status.FLUSHED)
            self._port.close(self.caps.peer_timeout_s)
        finally:
            self._let_go()
            self._waker()

    def die(self) -> None:
        """Vanish as a killed process does: no completion is handed out, nobody is told."""
        if self._state is not _OPEN:
            return
        self._state = _State.CLOSED
        self._finalize.detach()
        self._sender.abandon()
        self._sender.done.clear()
        self._port.abandon()
        self._let_go()

    orphan = die  # in a forked child the NIC is the parent's

    def _let_go(self) -> None:
        self._sources.clear()
        self._sinks.clear()
        self._watches.close()
        os.close(self._bell)

    def _check_open(self) -> None:
        if self._state is not _OPEN:
            raise closed(self.caps.nic)


_BLANK_IMM: Final = np.array((_IMM, _OK, 1, 0, 0, 0, 0), COMPLETION)

_STATUS_TEXT: Final = meaning(
    LOCAL_KEY="the memory here was deregistered, or the row reaches beyond it, or is read into "
    "memory that reads may not write",
    UNREACHABLE="the peer is gone, or in another network namespace (container)",
    PROVIDER="the kernel does not let this process reach the peer's memory: run both as one "
    "user, in one pid namespace, with kernel.yama.ptrace_scope 0, or 1 and allow_tracer left on at "
    "the peer (containers: --cap-add=SYS_PTRACE); or register memory of tep.alloc_shared(), which "
    "needs no more than the same user, or root",
)


def _new_watches() -> tuple[Watches, int]:
    """An epoll set with a bell in it."""
    with contextlib.ExitStack() as undo:
        try:
            watches = Watches()
            undo.callback(watches.close)
            bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, bell)
            watches.add_bell(bell)
        except OSError as error:
            what = "an eventfd, a timer and an epoll set"
            raise BackendUnavailable(
                "the local backend cannot start", ((what, why(error.errno or 0)),)
            ) from error
        undo.pop_all()
    return watches, bell


def _ring(bell: int) -> None:
    with contextlib.suppress(OSError):  # rung 2**64 times: it is ringing still
        os.eventfd_write(bell, 1)


def _wake_nobody() -> None:
    pass


def _let_go(nic: str, sender: Sender, port: Port, watches: Watches, bell: int) -> None:
    """The net under close(); what is given here holds no reference to the NIC."""
    sender.abandon()
    port.abandon()
    watches.close()
    os.close(bell)
    warnings.warn(f"{nic} was dropped without close()", ResourceWarning, stacklevel=2)
