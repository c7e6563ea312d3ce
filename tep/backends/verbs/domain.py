"""VerbsDomain: one NIC behind the seam; every call of the engine enters here.

Rows go to writes.py, messages to messages.py, peers and handshakes to peers.py; completions come
from poller.py; memory is in regions.py; parts.py makes them all. Here are the way in, waking,
and the end.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends import forks
from tep.backends.base import (
    Access,
    Batch,
    Completions,
    DomainKey,
    Entry,
    Kind,
    ReadBatch,
    Status,
    WriteBatch,
)
from tep.backends.checks import check_memory
from tep.backends.ffi.ibverbs_structs import ENUMS
from tep.backends.handing import hand_out
from tep.backends.texts import closed, says
from tep.backends.verbs.address import engine_of
from tep.backends.verbs.conns import Conn
from tep.backends.verbs.depths import peer_bytes
from tep.backends.verbs.device import Device
from tep.backends.verbs.limits import RKEY_MAX, Limits
from tep.backends.verbs.parts import Parts
from tep.backends.verbs.peer import ended_as
from tep.backends.verbs.poller import POLL_MAX
from tep.backends.verbs.status import STATUS_TEXT
from tep.memory.source import DmabufExport, Memory

__all__ = ["VerbsDomain"]

Array = npt.NDArray[np.unsignedinteger]
_LOG: Final = logging.getLogger("tep.verbs")
_EVENTS_EVERY: Final = 4096  # polls between two looks at the device's own events
_GOODBYE_S: Final = 0.02
_WRITE, _READ, _DOWN = int(Kind.WRITE), int(Kind.READ), int(Kind.DOWN)
_FATAL: Final = ENUMS["IBV_EVENT_DEVICE_FATAL"]
_BROKEN: Final = {
    ENUMS["IBV_EVENT_CQ_ERR"]: "its completion queue failed (IBV_EVENT_CQ_ERR, most often overrun)",
    ENUMS["IBV_EVENT_SRQ_ERR"]: "a shared receive queue failed (IBV_EVENT_SRQ_ERR)",
}
_LAST_WQE: Final = ENUMS["IBV_EVENT_QP_LAST_WQE_REACHED"]
_QP_EVENTS: Final = range(ENUMS["IBV_EVENT_QP_FATAL"], 4)  # QP_FATAL, QP_REQ_ERR, QP_ACCESS_ERR


class _State(Enum):
    OPEN = auto()
    DYING = auto()  # the device died; what has come is still handed out
    DOWN = auto()  # and nothing comes any more; what is posted ends with NIC_DOWN
    CLOSED = auto()


class VerbsDomain:
    """One NIC; `tep.backends.base.Domain` describes the methods.

    Args:
        device: opened for this domain alone, which closes it.
        name: of the engine; with `nic` the identity that outlives a restart.
        nic: index in its engine.
        epoch: of its engine's incarnation.
        export: exports CUDA memory as a dma-buf; None = CUDA memory goes by peer memory, if at all.
        cuda: whether CUDA memory can be registered.

    Attributes:
        spares: devices of the engine's other NICs.
        depths: of its queues.
    """

    def __init__(
        self,
        device: Device,
        *,
        name: str,
        nic: int,
        epoch: int,
        export: DmabufExport | None = None,
        cuda: bool = False,
    ) -> None:
        self.device = device
        self.spares: tuple[Device, ...] = ()
        self._state = _State.OPEN
        self._reads = True  # whether completions may come: it is open, or dying
        self._ready: deque[Entry] = deque()
        self._waker: Callable[[], None] = _wake_nobody
        self._polls = 0
        parts = Parts(
            device,
            name=name,
            nic=nic,
            epoch=epoch,
            export=export,
            ready=self._ready,
            link_lost=self._link_lost,
            failed=self._queues_failed,
        )
        self._free = parts.close
        self.depths = parts.depths
        self._credits = parts.depths.rows
        self._read_credits = parts.depths.reads
        self.address = parts.own.encode()
        kinds = ("cpu", "cuda") if cuda else ("cpu",)
        self.caps = device.caps(self.depths.rows, self.depths.reads, kinds)
        self._write_bytes_max = self.caps.max_write_bytes
        self._limits = Limits(self._write_bytes_max)
        self._cq, self._wakeup, self._regions = parts.cq, parts.wakeup, parts.regions
        self._messages, self._datagrams = parts.messages, parts.datagrams
        self._writer, self._poller, self._peers = parts.writer, parts.poller, parts.peers
        self._posting, self._up = self._peers.posting, self._peers.up
        forks.hold(self)

    # --- memory and peers

    def register(self, memory: Memory, access: Access) -> DomainKey:
        self._check_open()
        check_memory(self.caps, memory, access)
        return self._regions.add(memory, access)

    def deregister(self, key: DomainKey) -> None:
        self._regions.remove(key, closed=self._state is _State.CLOSED)

    def connect(self, peer: bytes) -> int:
        self._check_open()
        return self._peers.connect(peer)

    # --- writes

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        assert 0 <= start < stop <= batch.n, (start, stop, batch.n)
        room = self._credits
        if stop - start > room:
            stop = start + room
            if not room:
                self._check_open()
                return 0
        peer, nbytes, rkey = batch.peer, batch.nbytes, batch.rkey
        if not isinstance(peer, int):
            whole = self._posting.scatter(batch, start, stop, self._limits)
            taken = stop - start if whole else self._post_slowly(batch, start, stop)
        elif (
            isinstance(nbytes, int)
            and isinstance(rkey, int)
            and (conn := self._up[peer]) is not None
            and nbytes <= self._write_bytes_max
            and rkey <= RKEY_MAX
        ):
            taken = self._posting.post_up(conn, batch, start, stop)
        else:
            taken = self._post_slowly(batch, start, stop)
        self._credits = room - taken
        return taken

    def _post_slowly(self, batch: WriteBatch, start: int, stop: int) -> int:
        """Post what is not as simple as most: many peers, none connected, impossible rows."""
        self._check_open()
        if self._state is not _State.OPEN:
            return self._fail(batch, start, stop, Status.NIC_DOWN)
        stop = self._limits.possible_until(batch, start, stop)
        if stop == start:
            return self._fail(batch, start, start + 1, self._limits.why_impossible(batch, start))
        peer = batch.peer
        if not isinstance(peer, int):
            return self._scatter(batch, start, stop)
        conn = self._up[peer]
        if conn is not None:
            return self._posting.post_up(conn, batch, start, stop)
        found = self._peers.table[peer]
        self._peers.hold(found, batch, start, stop)
        return stop - start

    def _scatter(self, batch: WriteBatch, start: int, stop: int) -> int:
        """Post rows to a peer each, not all connected; all are taken, some to be kept a while."""
        if self._posting.scatter(batch, start, stop, self._limits):
            return stop - start
        assert not isinstance(batch.peer, int)
        for row, peer in enumerate(batch.peer[start:stop].tolist(), start):
            conn = self._up[peer]
            if conn is not None:
                self._posting.post_loose([conn], batch, row)
            else:
                found = self._peers.table[peer]
                self._peers.hold(found, batch, row, row + 1)
        return stop - start

    def _fail(self, batch: Batch, start: int, stop: int, status: Status) -> int:
        kind, told = ended_as(batch, status)
        self._ready.extend((kind, told, 1, 0, row, batch.ctx, 0) for row in range(start, stop))
        return stop - start

    # --- reads

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        self._check_open()
        if (end := min(stop, start + self._read_credits)) <= start:
            return 0
        self._read_credits -= end - start
        if self._state is not _State.OPEN:
            return self._fail(batch, start, end, Status.NIC_DOWN)
        at = start
        while at < end:
            possible = self._limits.possible_until(batch, at, end)
            if possible == at:
                at += self._fail(batch, at, at + 1, self._limits.why_impossible(batch, at))
            while at < possible:
                at = self._read_from_one(batch, at, possible)
        return end - start

    def _read_from_one(self, batch: ReadBatch, start: int, stop: int) -> int:
        """Read the first rows, of one peer; what finds no room is kept. Return where they end."""
        peer = batch.peer
        if not isinstance(peer, int):
            others = np.flatnonzero(peer[start:stop] != peer[start])
            stop = start + int(others[0]) if len(others) else stop
            peer = int(peer[start])
        conn, to = self._up[peer], self._peers.table[peer]
        if conn is None:
            self._peers.hold(to, batch, start, stop)
        else:
            taken = self._writer.post_reads(conn, batch, start, stop)
            if start + taken < stop:
                self._peers.keep(to, batch, start + taken, stop)
        return stop

    # --- messages

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        self._check_open()
        if len(payload) > self.caps.max_msg_bytes:
            self._ready.append((int(Kind.SENT), int(Status.LENGTH), 1, 0, 0, ctx, 0))
            return True
        if self._state is not _State.OPEN:
            self._ready.append((int(Kind.SENT), int(Status.NIC_DOWN), 1, 0, 0, ctx, 0))
            return True
        slot = self._messages.reserve(payload, ctx)
        if slot is None:
            return False
        to = self._peers.table[peer]
        if to.live is None or not self._messages.post(slot, to.live):
            self._peers.hold_message(to, slot)
        return True

    def post_recvs(self, nbytes: int, count: int) -> None:
        self._check_open()
        self._messages.add(nbytes, count)

    def recv_view(self, slot: int) -> memoryview:
        return self._messages.view(slot)

    def recv_source(self, slot: int) -> bytes:
        return self.source(self._messages.sender(slot))

    def recv_done(self, slot: int) -> None:
        self._messages.done(slot)

    # --- control messages and fences

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        self._check_open()
        assert len(payload) <= self.caps.control_bytes, len(payload)
        return self._peers.controls.post(self._peers.table[peer], payload, ctx, time.monotonic())

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        return self._peers.controls.unread.take(slot)

    engine_of = staticmethod(engine_of)

    def source(self, number: int) -> bytes:
        return self._peers.table[number].where.encode()

    def fence(self, source: bytes, ctx: int) -> None:
        self._check_open()
        self._peers.fence(source, ctx)
        if self._state is _State.DOWN:  # then no completion will come of what there was
            self._peers.draining.progress(time.monotonic(), 0, whole=True)
        self._waker()

    def unfence(self, source: bytes) -> None:
        self._check_open()
        if self._state is _State.OPEN:
            self._peers.unfence(source, time.monotonic())

    # --- completions

    def poll(self, out: Completions) -> int:
        filled = self._hand_out(out, 0) if self._ready else 0
        if self._reads:
            room = len(out) - filled
            n = 0
            if room:
                n = self._poller.read(room)
                if n:
                    filled = self._poller.take(n, out, filled)
                self._polls += 1
                if self._polls % _EVENTS_EVERY == 0:
                    self._look_at_events()
            if self._peers.busy:
                self._progress(time.monotonic(), n, whole=n < min(room, POLL_MAX))
            if self._ready and filled < len(out):
                filled = self._hand_out(out, filled)
        return filled

    def _progress(self, now_s: float, n: int, *, whole: bool) -> None:
        """Let go on what no completion moves; `n` were read, `whole` if there are no more."""
        draining = self._peers.draining
        if draining.conns:
            self._look_at_events()
        self._peers.progress(now_s, n, whole=whole)
        if self._state is _State.DYING and not draining.conns:
            self._go_down()

    def _hand_out(self, out: Completions, filled: int) -> int:
        filled, rows, reads = hand_out(self._ready, out, filled)
        self._credits += rows
        self._read_credits += reads
        return filled

    def status_text(self, status: int) -> str:
        said = self._poller.said.get(status, "")
        if status == Status.PROVIDER:
            said = said or self._writer.refusal or self._peers.trouble
        return says(said, STATUS_TEXT.get(status, ""))

    # --- waking

    def forget(self, peer: int) -> None:
        """Nothing is kept of a peer that could be given back."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker

    def wakeup_fd(self) -> int | None:
        return None if self._state is _State.CLOSED else self._wakeup.fd

    def arm(self) -> bool:
        if self._arm():
            return True
        # Looking for news has taken it off the queue: no event will tell of it.
        self._waker()
        return False

    def _arm(self) -> bool:
        if not self._reads:
            return not self._ready
        self._look_at_events()
        self._wakeup.clear(self._cq)
        self.device.data.req_notify_cq(self._cq, 0)
        # What came before the request makes no event: look once more.
        n = self._poller.take_all()
        now_s = time.monotonic()
        if self._peers.busy:
            self._progress(now_s, n, whole=n < POLL_MAX)
        if n > 0 or self._ready or not self._reads or self._peers.has_steps:
            return False
        next_s = self._peers.next_s(now_s)
        self._wakeup.set_timer(None if next_s is None else next_s - now_s)
        return True

    def _look_at_events(self) -> None:
        for kind, element in self._wakeup.take_device():
            if kind == _FATAL:
                self.device.dead = True
                self.fail_device("the device reported a fatal error (IBV_EVENT_DEVICE_FATAL)")
            elif kind in _BROKEN:
                self._queues_failed(_BROKEN[kind])
            elif kind == _LAST_WQE:
                self._peers.draining.take_last(element)
            elif kind in _QP_EVENTS:
                for conn in set(self._peers.conns.values()):
                    if conn.holds(element):
                        self._peers.fail(conn, int(Status.PROVIDER))

    def _link_lost(self) -> bool:
        """Whether it is our own port that is down, beside another NIC's that is up.

        Then this NIC is given up: its rows go on over the other. Where there is none, or all links
        went at the same time, it is kept for the day when they are back.
        """
        if self._state is _State.OPEN and not self.device.has_link():
            others = [device for device in self.spares if device.has_link()]
            if others:
                self.fail_device("its port stayed down while another NIC's was up")
        return self._state is not _State.OPEN

    def _queues_failed(self, why: str) -> None:
        """Completions were lost: this NIC can be used no more, nor can it say what had landed."""
        self._peers.blur(why)
        self.fail_device(why)

    def fail_device(self, why: str = "it was given up") -> None:
        """The device died: NIC_DOWN for all that is open, and Kind.DOWN after what had come."""
        if self._state is not _State.OPEN:
            return
        self._poller.said[int(Status.NIC_DOWN)] = why
        _LOG.warning("verbs: %s is down: %s", self.device.name, why)
        self._state = _State.DYING
        self._peers.sink(Status.NIC_DOWN)
        if not self._peers.draining.conns:
            self._go_down()

    def _go_down(self) -> None:
        self._state, self._reads = _State.DOWN, False
        self._wakeup.ignore_device()
        self._peers.close(Status.NIC_DOWN)
        self._messages.fail_all(int(Status.NIC_DOWN))
        self._ready.append((_DOWN, int(Status.NIC_DOWN), 1, 0, 0, 0, 0))
        self._waker()

    # --- reports

    @property
    def connections(self) -> list[Conn | None]:
        """By PeerId, the connection in use, or None."""
        return list(self._peers.up)

    def describe(self) -> str:
        """Say which device, port and address are in use, and with how many peers."""
        up = sum(conn is not None for conn in self._peers.up)
        depths = self.depths
        cost = peer_bytes(self.device, depths.rows, depths.reads)
        return (
            f"{self.device.describe()}; {depths.rows} rows, {depths.reads} reads, {depths.imms} "
            f"immediates and {depths.messages_in} messages at a time; a peer takes {cost // 1024} "
            f"KiB of send queues ({self.device.wqe_bytes} bytes a request); {up} of "
            f"{len(self._peers.table)} peers connected"
        )

    # --- the end

    def close(self) -> None:
        if self._state is _State.CLOSED:
            return
        if self._state is _State.OPEN:
            self._say_goodbye()
        self._state, self._reads = _State.CLOSED, False
        self._peers.close(Status.FLUSHED)
        self._messages.fail_all(int(Status.FLUSHED))
        self._free()

    def die(self) -> None:
        """Vanish as a killed process does: peers are told nothing, no completion is handed out."""
        self._state, self._reads = _State.CLOSED, False
        self._peers.close(Status.FLUSHED)
        self._free()
        self._ready.clear()

    def _say_goodbye(self) -> None:
        """Take what has come, tell the peers, and let the datagrams leave."""
        self._peers.say_goodbye()
        until_s = time.monotonic() + _GOODBYE_S
        while True:
            if not self._poller.take_all() and (
                not self._datagrams.in_flight or time.monotonic() > until_s
            ):
                return

    def _check_open(self) -> None:
        if self._state is _State.CLOSED:
            raise closed(self.caps.nic)

    def orphan(self) -> None:
        """In a forked child: touch nothing that the parent's NIC uses, now or later."""
        self._state, self._reads = _State.CLOSED, False
        self._ready.clear()


def _wake_nobody() -> None:
    """Wake nobody: the waker until one is set."""
