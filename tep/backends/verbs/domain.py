"""VerbsDomain: one NIC behind the seam; every call of the engine enters here.

Rows go to send.py, messages to messages.py, peers and handshakes to peers.py; completions come from
receive.py. Here are the parts, made in order and freed in reverse; memory; waking; and the end.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

import numpy as np

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
    hand_out,
)
from tep.backends.common import (
    Sleeper,
    at,
    check_memory,
    closed,
    nothing,
    orphan_at_fork,
    says,
)
from tep.backends.ffi.ibverbs import ENUMS, Events, Struct, rights
from tep.backends.verbs.conns import Queues
from tep.backends.verbs.device import Device, plan_depths
from tep.backends.verbs.handshake import Address, engine_of, identity_of
from tep.backends.verbs.messages import Datagrams, Messages
from tep.backends.verbs.peers import Peers, ended_as
from tep.backends.verbs.receive import POLL_MAX, STATUS_TEXT, ImmReceives, Poller
from tep.backends.verbs.send import RKEY_MAX
from tep.base.errors import FabricError
from tep.memory.source import DmabufExport, Memory

__all__ = ["VerbsDomain"]

_LOG: Final = logging.getLogger("tep.verbs")
_EVENTS_EVERY: Final = 4096  # polls between two looks at the device's own events
_GOODBYE_S: Final = 0.02
_DOWN: Final = int(Kind.DOWN)
_FATAL: Final = ENUMS["IBV_EVENT_DEVICE_FATAL"]
_BROKEN: Final = {
    ENUMS["IBV_EVENT_CQ_ERR"]: "its completion queue failed (IBV_EVENT_CQ_ERR, most often overrun)",
    ENUMS["IBV_EVENT_SRQ_ERR"]: "a shared receive queue failed (IBV_EVENT_SRQ_ERR)",
}
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
        name, nic: of the engine, and of the NIC in it: the identity that outlives a restart.
        export: exports CUDA memory as a dma-buf; None = CUDA memory goes by peer memory, if at all.
        cuda: whether CUDA memory can be registered.

    Attributes:
        spares: devices of the engine's other NICs.
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
        self._export = export
        self._mrs: dict[int, tuple[Struct, Memory]] = {}
        self._on_devices: set[int] = set()  # local keys of memory that the CPU cannot read
        self._state = _State.OPEN
        self._reads = True  # whether completions may come: it is open, or dying
        self._ready: deque[Entry] = deque()
        self._waker: Callable[[], None] = nothing
        self._polls = 0
        qkey = random.SystemRandom().getrandbits(31)  # the top bit is for the kernel's own
        with contextlib.ExitStack() as undo:
            undo.callback(device.close)
            undo.callback(self._deregister_all)
            imms = self._make_queues(qkey, undo)
            self._free = undo.pop_all().close
        depths = self.depths
        own = Address(
            link=int(device.port.link_layer),
            lid=int(device.port.lid),
            gid=device.gid.gid,
            gid_type=device.gid.gid_type,
            ud_qpn=self._datagrams.number,
            qkey=qkey,
            epoch=epoch,
            identity=identity_of(name, nic),
        )
        self.address = own.encode()
        self.caps = device.caps(depths.rows, depths.reads, ("cpu", "cuda") if cuda else ("cpu",))
        self._credits, self._read_credits = depths.rows, depths.reads
        queues = Queues(self._cq, imms.srq, self._messages.srq, depths)
        self.peers = Peers(
            device,
            queues,
            self._messages,
            self._datagrams,
            own,
            self._ready,
            self._on_devices,
            self._link_lost,
        )
        self._writer, self._up = self.peers.writer, self.peers.writer.up
        self._poller = Poller(device, self._cq, imms, self.peers, self._ready, self._queues_failed)
        self._poll_cq, self._wc_ptr = device.data.poll_cq, self._poller.wc_ptr
        orphan_at_fork(self)

    def _make_queues(self, qkey: int, undo: contextlib.ExitStack) -> ImmReceives:
        """Make what all peers share, in order; it is freed in reverse."""
        device = self.device
        self.depths = depths = plan_depths(device)
        self._events = events = Events(device.lib, device.pointer)
        undo.callback(device.free, "ibv_destroy_comp_channel", events.channel)
        self._sleeper = Sleeper(*events.fds)
        undo.callback(self._sleeper.close)
        self._cq = device.lib.make(
            "ibv_create_cq", device.pointer, depths.cq, None, events.channel, 0
        )
        undo.callback(device.free, "ibv_destroy_cq", self._cq)
        undo.callback(self._clear_events)  # those that nobody took keep it busy
        imms = ImmReceives(device, depths.imms)
        undo.callback(device.free, "ibv_destroy_srq", imms.srq)
        self._messages = Messages(device, depths.messages_in, self._ready)
        undo.callback(self._messages.close)
        undo.callback(device.free, "ibv_destroy_srq", self._messages.srq)
        self._datagrams = Datagrams(device, self._cq, qkey)
        undo.callback(self._datagrams.close)
        return imms

    # --- memory and peers

    def register(self, memory: Memory, access: Access) -> DomainKey:
        self._check_open()
        check_memory(self.caps, memory, access)
        # Without relaxed ordering fabric-lib stays below 200 Gb/s on ConnectX-7 (quoted).
        flags = rights(access) | ENUMS["IBV_ACCESS_RELAXED_ORDERING"]
        if memory.kind == "cuda" and self._export is None:  # an export does it for the others
            from tep.cuda.memory import set_sync_memops

            set_sync_memops(memory)
        mr = self.device.register(memory, flags, self._export)
        # The memory stays mapped as long as the NIC knows it: a late write would else land in what
        # the allocator put there next.
        self._mrs[int(mr.lkey)] = (mr, memory)
        if memory.kind != "cpu":
            self._on_devices.add(int(mr.lkey))
        return DomainKey(lkey=int(mr.lkey), rkey=int(mr.rkey), base=memory.ptr)

    def deregister(self, key: DomainKey) -> None:
        found = self._mrs.pop(key.lkey, None)
        self._on_devices.discard(key.lkey)
        if found is not None and self._state is not _State.CLOSED:
            self.device.dereg_mr(found[0])

    def _deregister_all(self) -> None:
        for mr, _ in self._mrs.values():
            self.device.dereg_mr(mr)
        self._mrs.clear()

    def connect(self, peer: bytes) -> int:
        self._check_open()
        return self.peers.connect(peer)

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
            taken = self._writer.scatter(batch, start, stop)
            if start + taken < stop:
                taken += self._post_slowly(batch, start + taken, stop)
        elif (
            isinstance(nbytes, int)
            and isinstance(rkey, int)
            and (conn := self._up[peer]) is not None
            and nbytes <= self._writer.write_bytes_max
            and rkey <= RKEY_MAX
        ):
            taken = self._writer.post_up(conn, batch, start, stop)
        else:
            taken = self._post_slowly(batch, start, stop)
        self._credits = room - taken
        return taken

    def _post_slowly(self, batch: Batch, start: int, stop: int) -> int:
        """Take what is less simple: reads, many peers, none connected, impossible rows."""
        self._check_open()
        if self._state is not _State.OPEN:
            return self._fail(batch, start, stop, Status.NIC_DOWN)
        row = start
        while row < stop:
            end = self._writer.possible_until(batch, row, stop)
            if end == row:
                end += self._fail(batch, row, row + 1, self._writer.why_impossible(batch, row))
            else:
                self._post_possible(batch, row, end)
            row = end
        return stop - start

    def _post_possible(self, batch: Batch, start: int, stop: int) -> None:
        """Post rows peer by peer; what finds no room, or no connection, is kept."""
        peer, ends = batch.peer, [stop]
        if not isinstance(peer, int):
            others = np.flatnonzero(peer[start + 1 : stop] != peer[start : stop - 1])
            ends = [*(others + (start + 1)).tolist(), stop]
        for end in ends:
            number = at(peer, start)
            conn = self._up[number]
            if conn is None:
                self.peers.hold(number, batch, start, end)
            else:
                start += self._writer.post_any(conn, batch, start, end)
                if start < end:
                    self.peers.keep(number, batch, start, end)
            start = end

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
        return self._post_slowly(batch, start, end)

    # --- messages

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        self._check_open()
        long = len(payload) > self.caps.max_msg_bytes
        if long or self._state is not _State.OPEN:
            status = Status.LENGTH if long else Status.NIC_DOWN
            self._ready.append((int(Kind.SENT), int(status), 1, 0, 0, ctx, 0))
            return True
        try:
            slot = self._messages.reserve(payload, ctx)
        except MemoryError:
            self._writer.short = True
            return False
        except FabricError as error:
            self.peers.trouble = str(error)
            self._ready.append((int(Kind.SENT), int(Status.PROVIDER), 1, 0, 0, ctx, 0))
            return True
        if slot is None:
            return False
        to = self.peers.table[peer]
        if to.live is None or not self._messages.post(slot, to.live):
            to.messages.append(slot)
            self.peers.attend(to)
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
        return self.peers.controls.post(self.peers.table[peer], payload, ctx, time.monotonic())

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        return self.peers.controls.unread.take(slot)

    engine_of = staticmethod(engine_of)

    def source(self, number: int) -> bytes:
        return self.peers.table[number].where.encode()

    def fence(self, source: bytes, ctx: int) -> None:
        self._check_open()
        self.peers.fence(source, ctx)
        if self._state is _State.DOWN:  # then no completion will come of what there was
            self.peers.draining.progress(time.monotonic(), 0, whole=True)
        self._waker()

    def unfence(self, source: bytes) -> None:
        self._check_open()
        if self._state is _State.OPEN:
            self.peers.unfence(source, time.monotonic())

    # --- completions

    def poll(self, out: Completions) -> int:
        filled = self._hand_out(out, 0) if self._ready else 0
        try:
            if self._reads:
                room = len(out) - filled
                n = 0
                if room:
                    n = self._poll_cq(self._cq, min(room, POLL_MAX), self._wc_ptr)
                    if n > 0:
                        filled = self._poller.take(n, out, filled)
                    elif n < 0:
                        n = self._poller.fail(n)
                    self._polls += 1
                    if self._polls % _EVENTS_EVERY == 0:
                        self._look_at_events()
                if any(self.peers.work):
                    self._progress(time.monotonic(), n, whole=n < min(room, POLL_MAX))
                if self._ready and filled < len(out):
                    filled = self._hand_out(out, filled)
        except MemoryError:  # what was not handed out is there for the next poll
            self._writer.short = True
        return filled

    def _progress(self, now_s: float, n: int, *, whole: bool) -> None:
        """Let go on what no completion moves; `n` were read, `whole` if there are no more."""
        draining = self.peers.draining
        if draining.conns:
            self._look_at_events()
        self.peers.progress(now_s, n, whole=whole)
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
            said = said or self._writer.refusal or self.peers.trouble
        return says(said, STATUS_TEXT.get(status, ""))

    # --- waking

    def forget(self, peer: int) -> None:
        """Nothing is kept of a peer that could be given back."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker

    def wakeup_fd(self) -> int | None:
        return None if self._state is _State.CLOSED else self._sleeper.fd

    def arm(self) -> bool:
        try:
            if self._arm():
                return True
        except MemoryError:
            self._writer.short = True
        # Looking for news has taken it off the queue: no event will tell of it.
        self._waker()
        return False

    def _arm(self) -> bool:
        if not self._reads:
            return not self._ready
        self._look_at_events()
        self._clear_events()
        self.device.data.req_notify_cq(self._cq, 0)
        # What came before the request makes no event: look once more.
        n = self._poller.take_all()
        now_s = time.monotonic()
        if any(self.peers.work):
            self._progress(now_s, n, whole=n < POLL_MAX)
        short, self._writer.short = self._writer.short, False
        if n > 0 or short or self._ready or not self._reads or self.peers.has_steps:
            return False
        next_s = self.peers.next_s(now_s)
        self._sleeper.wake_in(None if next_s is None else next_s - now_s)
        return True

    def _clear_events(self) -> None:
        """Take the completion events that are there off the channel."""
        if taken := self._events.take_completions():
            self.device.lib.do("ibv_ack_cq_events", self._cq, taken)

    def _look_at_events(self) -> None:
        for kind, element in self._events.take_device():
            if kind == _FATAL:
                self.device.dead = True
                self.fail_device("the device reported a fatal error (IBV_EVENT_DEVICE_FATAL)")
            elif kind in _BROKEN:
                self._queues_failed(_BROKEN[kind])
            elif kind in _QP_EVENTS:
                for conn in set(self.peers.conns.values()):
                    if conn.holds(element):
                        self.peers.fail(conn, int(Status.PROVIDER))

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
        self.peers.blur(why)
        self.fail_device(why)

    def fail_device(self, why: str = "it was given up") -> None:
        """The device died: NIC_DOWN for all that is open, and Kind.DOWN after what had come."""
        if self._state is not _State.OPEN:
            return
        self._poller.said[int(Status.NIC_DOWN)] = why
        _LOG.warning("verbs: %s is down: %s", self.device.name, why)
        self._state = _State.DYING
        self.peers.sink(Status.NIC_DOWN)
        if not self.peers.draining.conns:
            self._go_down()

    def _go_down(self) -> None:
        self._state, self._reads = _State.DOWN, False
        self._sleeper.ignore(self._events.fds[1])
        self.peers.close(Status.NIC_DOWN)
        self._messages.fail_all(int(Status.NIC_DOWN))
        self._ready.append((_DOWN, int(Status.NIC_DOWN), 1, 0, 0, 0, 0))
        self._waker()

    # --- reports

    def describe(self) -> str:
        """Say which device, port and address are in use, and with how many peers."""
        up = sum(conn is not None for conn in self.peers.up)
        depths = self.depths
        return (
            f"{self.device.describe()}; {depths.rows} rows, {depths.reads} reads, {depths.imms} "
            f"immediates and {depths.messages_in} messages at a time; {up} of "
            f"{len(self.peers.table)} peers connected"
        )

    # --- the end

    def close(self) -> None:
        if self._state is _State.CLOSED:
            return
        if self._state is _State.OPEN:
            self._say_goodbye()
        self._state, self._reads = _State.CLOSED, False
        self.peers.close(Status.FLUSHED)
        self._messages.fail_all(int(Status.FLUSHED))
        self._free()

    def _say_goodbye(self) -> None:
        """Take what has come, tell the peers, and let the datagrams leave."""
        self.peers.say_goodbye()
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
