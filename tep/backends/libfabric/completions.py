"""The completion queue, read in batches and sorted; buffers of frames; a descriptor to sleep on.

Hot: what comes once a row is done by columns from a few dozen entries on, and by plain integers
below (measured: the cross-over is at 40 to 60). What a frame means is not known here: a buffer that
came in is posted again as soon as its frame has been looked at; whoever wants the bytes longer
copies them.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tep.backends.base import (
    COMPLETION_BYTES,
    Completions,
    DomainCaps,
    DomainKey,
    Entry,
    Kind,
    Status,
    new_completions,
    put_completion,
)
from tep.backends.common import put_imms
from tep.backends.ffi import libfabric as fi
from tep.backends.ffi.load import check
from tep.backends.libfabric import frames
from tep.backends.libfabric.objects import CqError, Endpoint, Nic, Region, Regions, mr_attr
from tep.backends.libfabric.slots import READ, Slots
from tep.memory.source import Memory, adapt

if TYPE_CHECKING:
    from tep.backends.libfabric.peer import Peer
    from tep.backends.libfabric.rules import Rules

__all__ = ["Mailbox", "Parts", "Queue"]

_ENTRIES: Final = 512
_SCALAR_MAX: Final = 40
_ENTRY_BYTES: Final = fi.CQ_DATA_ENTRY.itemsize
_WORDS: Final = _ENTRY_BYTES // 8
_CONTEXT, _FLAGS, _LEN, _DATA = 0, 1, 2, 4  # words of an entry
_EMPTY: Final = -fi.FI_EAGAIN
_REMOTE: Final = fi.FI_REMOTE_WRITE

_WRITE: Final = int(Kind.WRITE)
_READ: Final = int(Kind.READ)
_IMM: Final = int(Kind.IMM)
_OK: Final = int(Status.OK)
_IMM_MASK: Final = 0xFFFFFFFF

_OUT_PER_PEER: Final = 8  # a peer that takes nothing must not hold all buffers
_SLOT_BYTES: Final = 64  # a fi_context2, which some providers write into


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of one NIC that touch it, and what all its parts share.

    Attributes:
        done: completions that were made here; poll() hands them out.
        timeout_s: how long a peer may owe an answer.
    """

    nic: Nic
    rules: Rules
    caps: DomainCaps
    slots: Slots
    regions: Regions
    mailbox: Mailbox
    queue: Queue
    done: deque[Entry]
    timeout_s: float


class Queue:
    """One NIC's completion queue.

    Args:
        reads: rows may be reads; else `landed` is called with the context of each read.

    Attributes:
        frames: what came in, copied; the caller takes them.
        errors: what failed; the caller takes them.
        full: whether there may be more to read, or there is something in `frames` or `errors`.
        behind: something was read, and not sorted yet, for want of memory.

    Where memory is short for the arrays of a burst, nothing is lost: what was read, and not sorted,
    is sorted one by one by the next read(), which takes next to no memory.
    """

    behind = False

    def __init__(self, nic: Nic, slots: Slots, mailbox: Mailbox, *, reads: bool) -> None:
        self._nic = nic
        self._slots = slots
        self._local = fi.FI_WRITE | (fi.FI_READ if reads else 0)  # flags of rows that ended
        self._mailbox = mailbox
        self._idle = mailbox.idle
        self._entries = np.zeros(_ENTRIES, fi.CQ_DATA_ENTRY)
        self._drained = new_completions(_ENTRIES)
        self._at = self._entries.ctypes.data
        words = self._entries.view(np.uint64)
        self._words = memoryview(words)  # type: ignore[arg-type]  # numpy has the buffer protocol
        self._contexts = self._entries["op_context"].view(np.int64)
        self._flags = self._entries["flags"]
        self._data = self._entries["data"]
        self._read = nic.cq_read
        self._cq = nic.cq
        self._streaming = False
        self._kept = 0  # entries of which no column was sorted
        self._others: deque[tuple[int, int]] = deque()  # contexts and lengths of what is no row
        self.frames: deque[bytes] = deque()
        self.errors: deque[CqError] = deque()
        self.landed: Callable[[int], object]
        self.full = False

    def drain(self, done: deque[Entry], take_rest: Callable[[], None]) -> None:
        """Read until it is empty, into `done`; `take_rest` sees to frames and errors."""
        out = self._drained
        while True:
            n = self.read(out, 0)
            done.extend(out[:n].tolist())
            more = bool(n or self.full)
            take_rest()
            if not more:
                return

    def read(self, out: Completions, filled: int) -> int:
        """Read what is there, fill `out` from entry `filled` on; return how many it holds then."""
        room = min(len(out) - filled, _ENTRIES)
        if room <= 0:
            return filled
        if self.behind:
            return self._catch_up(out, filled)
        read, cq = self._read, self._cq
        n = read(cq, self._at, room)
        if n == _EMPTY:
            self._streaming = self.full = False
            return filled
        if n > 0:
            if self._streaming:
                # Rows come one after the other: each read moves more of them along, and all that
                # they bring costs little more than one.
                more = n
                while more > 0 and n < room:
                    more = read(cq, self._at + n * _ENTRY_BYTES, room - n)
                    n += max(more, 0)
            self._streaming = True
            self.full = n == room
            try:
                if n == 1:
                    filled = self._take_one(out, filled)
                elif n > _SCALAR_MAX:
                    filled = self._take_columns(n, out, filled)
                else:
                    filled = self._take(n, out, filled)
            except MemoryError:
                self._kept, self.behind = n, True
            try:
                if self._others:
                    self._take_others()
                if self._idle:
                    self._mailbox.refill()
            except MemoryError:
                self.behind = True
            return filled
        self._streaming, self.full = False, True
        if n == -fi.FI_EAVAIL:
            # Once an error, then go on reading: the queue holds good entries behind it.
            error = self._nic.read_error()
            if error is not None:
                self.errors.append(error)
        else:
            self._nic.lose("fi_cq_read", n)
        if self._nic.failure:
            self.stop()
        return filled

    def stop(self) -> None:
        """Read nothing any more: the NIC is lost."""
        self._read = lambda *_: _EMPTY

    def _catch_up(self, out: Completions, filled: int) -> int:
        """Sort what there was no memory for, one by one."""
        self.full = True
        try:
            while self._kept and filled < len(out):
                filled = self._take_kept(out, filled)
            self._take_others()
            self._mailbox.refill()
            self.behind = self._kept > 0
        except MemoryError:
            pass
        return filled

    def _take_kept(self, out: Completions, filled: int) -> int:
        """Sort one of the entries that were kept, in any order (C4)."""
        filled = self._take_one(out, filled)
        self._kept -= 1
        last = self._kept * _WORDS
        self._words[:_WORDS] = self._words[last : last + _WORDS]
        return filled

    def _take_one(self, out: Completions, filled: int) -> int:
        words = self._words
        flags, at = words[_FLAGS], filled * COMPLETION_BYTES
        if flags & _REMOTE:
            put_completion(out, at, _IMM, _OK, 1, words[_DATA] & _IMM_MASK, 0, 0, 0)
            return filled + 1
        if flags & self._local:
            ticket = self._slots.take_back(words[_CONTEXT])
            if ticket is None:
                return filled
            ticket.peer.heard = True
            return self._end(ticket.batch.ctx, 1, out, filled)
        self._others.append((words[_CONTEXT], words[_LEN]))
        return filled

    def _end(self, ctx: int, count: int, out: Completions, filled: int) -> int:
        """Hand out that rows of a batch ended well."""
        kind = _WRITE
        if ctx & READ:
            self._slots.reads -= count
            kind, ctx = _READ, ctx ^ READ
        put_completion(out, filled * COMPLETION_BYTES, kind, _OK, count, 0, 0, ctx, 0)
        return filled + 1

    def _take(self, n: int, out: Completions, filled: int) -> int:
        words = self._words[: n * _WORDS].tolist()
        rows: list[int] = []
        others: list[tuple[int, int]] = []
        imms: dict[int, int] = {}
        for at in range(0, n * _WORDS, _WORDS):
            flags = words[at + 1]
            if flags & fi.FI_REMOTE_WRITE:
                # Not every release sets FI_RMA here, and 1.17 reports no length.
                imm = words[at + 4] & _IMM_MASK
                imms[imm] = imms.get(imm, 0) + 1
            elif flags & self._local:
                rows.append(words[at])
            else:
                others.append((words[at], words[at + 2]))
        if rows:
            for ctx, count in self._slots.give_back(rows).items():
                filled = self._end(ctx, count, out, filled)
        for imm, count in imms.items():
            out[filled] = (_IMM, _OK, count, imm, 0, 0, 0)
            filled += 1
        self._others += others
        return filled

    def _take_columns(self, n: int, out: Completions, filled: int) -> int:
        flags = self._flags[:n]
        remote = (flags & np.uint64(fi.FI_REMOTE_WRITE)) != 0
        count = int(np.count_nonzero(remote))
        if count == n:
            return self._take_imms(self._data[:n], out, filled)
        local = ~remote
        if count:
            filled = self._take_imms(self._data[:n][remote], out, filled)
        others = local & ((flags & np.uint64(self._local)) == 0)
        rest: list[tuple[int, int]] = []
        if others.any():
            rest = [(entry[0], entry[2]) for entry in self._entries[:n][others].tolist()]
            local &= ~others
        contexts = self._contexts[:n][local]
        # Nothing above cannot be done again, should memory be short for the arrays of a burst.
        if len(contexts):
            for ctx, rows in self._slots.give_back_many(contexts).items():
                filled = self._end(ctx, rows, out, filled)
        self._others += rest
        return filled

    @staticmethod
    def _take_imms(data: np.ndarray, out: Completions, filled: int) -> int:
        imms = data.astype(np.uint32)  # the low half; EFA carries no more
        n = len(imms)
        if bool((imms == imms[0]).all()):
            out[filled] = (_IMM, _OK, n, int(imms[0]), 0, 0, 0)
            return filled + 1
        put_imms(out[filled : filled + n], imms)
        return filled + n

    def _take_others(self) -> None:
        """Messages went out or came in, or reads of tcp landed."""
        while self._others:
            context, nbytes = self._others[0]
            if not self._mailbox.owns(context):
                self.landed(context)
            elif self._mailbox.is_receive(context):
                self._mailbox.received(context, nbytes, self._keep)
            else:
                self._mailbox.sent(context)
            self._others.popleft()

    def _keep(self, view: memoryview) -> None:
        self.frames.append(bytes(view))
        self.full = True


class Mailbox:
    """The frame buffers of one NIC.

    Attributes:
        region: the buffers, as what an empty row reads from.
        idle: numbers of the receive buffers that are not posted; refill() posts them.
    """

    def __init__(self, nic: Nic, frame_bytes: int, rules: Rules) -> None:
        self._nic = nic
        memory = self._map(frame_bytes, rules.frames_in, rules.frames_out, _SLOT_BYTES)
        count = len(self._owner)
        attr, flags, kept = mr_attr(memory, fi.FI_SEND | fi.FI_RECV | fi.FI_WRITE)
        attr.requested_key = (1 << 62) - 1  # no region's: those are random numbers with a counter
        handle = nic.register(attr, flags)
        del kept
        self._desc = int(handle.contents().mem_desc or 0)
        self.region = Region((handle,), memory, DomainKey(0, 0, 0), self._desc, target=False)
        self._contexts = memory.ptr + count * self._frame_bytes
        self._end = self._contexts + count * _SLOT_BYTES
        self._main: Endpoint | None = None
        self.idle = list(range(self._receives))

    def _map(self, frame_bytes: int, receives: int, sends: int, beside: int = 0) -> Memory:
        """Make the buffers, and `beside` bytes for each behind them."""
        self._frame_bytes = -(-frame_bytes // 64) * 64
        self._receives = receives
        count = receives + sends
        # An anonymous mapping: pages that no frame has touched cost nothing until registered.
        self._bytes = mmap.mmap(-1, count * (self._frame_bytes + beside))
        memory = adapt(self._bytes)
        self._view = memoryview(self._bytes)
        self._buffers = memory.ptr
        self._owner: list[Peer | None] = [None] * count
        self._free = list(range(receives, count))
        return memory

    def start(self, endpoint: Endpoint) -> None:
        """Post the receive buffers; frames arrive at this endpoint from now on."""
        self._main = endpoint
        rc = self.refill()
        check(rc, "fi_recv", describe=self._nic.lib.strerror, nic=self._nic.name)

    def refill(self) -> int:
        """Post what receive buffers are not posted; return what libfabric said last."""
        main = self._main
        assert main is not None
        while self.idle and main.address:  # 0 once it is closed
            at, context = self._places(self.idle[-1])
            size, sender = self._frame_bytes, fi.FI_ADDR_UNSPEC
            rc = main.recv(main.address, at, size, self._desc, sender, context)
            if rc:
                if rc != -fi.FI_EAGAIN:
                    self._nic.lose("fi_recv", rc)
                return rc
            self.idle.pop()
        return 0

    def _places(self, index: int) -> tuple[int, int]:
        """The addresses of a buffer and of its context."""
        return self._buffers + index * self._frame_bytes, self._contexts + index * _SLOT_BYTES

    def owns(self, context: int) -> bool:
        return self._contexts <= context < self._end

    def is_receive(self, context: int) -> bool:
        return context < self._contexts + self._receives * _SLOT_BYTES

    def send(self, peer: Peer, endpoint: Endpoint, frame: frames.Frame) -> bool:
        """Hand one frame to libfabric; False = not now. OSError if it refuses; errno is its own."""
        if not self._free or peer.sends >= _OUT_PER_PEER:
            return False
        data = frames.encode(frame)
        assert len(data) <= self._frame_bytes, (len(data), self._frame_bytes)
        index = self._free[-1]
        at = index * self._frame_bytes
        self._view[at : at + len(data)] = data
        if not self._post(peer, endpoint, index, len(data)):
            return False
        self._free.pop()
        self._owner[index] = peer
        peer.sends += 1
        return True

    def _post(self, peer: Peer, endpoint: Endpoint, index: int, nbytes: int) -> bool:
        """Post the frame in one buffer; False = the queue is full."""
        at, context = self._places(index)
        rc = endpoint.send(endpoint.address, at, nbytes, self._desc, peer.number, context)
        if rc and rc != -fi.FI_EAGAIN:
            raise OSError(-rc, "fi_send")
        return rc == 0

    def sent(self, context: int) -> Any:
        """Take a send's buffer back; return the Peer it went to. None = it was reclaimed before."""
        index = (context - self._contexts) // _SLOT_BYTES
        peer, self._owner[index] = self._owner[index], None
        if peer is not None:
            peer.sends -= 1
            self._free.append(index)
        return peer

    def reclaim(self, peer: Peer) -> None:
        """Take back all buffers that went to a peer, whose endpoint has been closed."""
        for index, owner in enumerate(self._owner):
            if owner is peer:
                self._owner[index] = None
                self._free.append(index)
        peer.sends = 0

    def received(self, context: int, nbytes: int, take: Callable[[memoryview], None]) -> None:
        """Let `take` look at a frame that came in, then post its buffer again."""
        index = (context - self._contexts) // _SLOT_BYTES
        at = index * self._frame_bytes
        with self._view[at : at + nbytes] as view:
            take(view)
        self.give_back(index)

    def give_back(self, index: int) -> None:
        self.idle.append(index)

    def dropped(self, context: int) -> None:
        """Post a receive buffer again whose receive failed."""
        self.give_back((context - self._contexts) // _SLOT_BYTES)
        self.refill()

    def close(self) -> None:
        """Unregister the buffers, after the endpoints are closed."""
        self.region.close()
        self._view.release()
        self._owner.clear()
