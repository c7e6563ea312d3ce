"""The completion queue, read in batches and sorted: rows, immediates, frames, errors.

Hot: what comes once a row is done by columns from a few dozen entries on, and by plain integers
below (measured: the cross-over is at 40 to 60). Nothing here knows peers or regions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from tep.backends.base import (
    COMPLETION_BYTES,
    Completions,
    Entry,
    Kind,
    Status,
    new_completions,
    put_completion,
)
from tep.backends.ffi import libfabric as fi
from tep.backends.ffi.libfabric_structs import CQ_DATA_ENTRY
from tep.backends.libfabric.mailbox import Mailbox
from tep.backends.libfabric.objects import CqError, Nic
from tep.backends.libfabric.rules import Rules
from tep.backends.libfabric.slots import I64, Slots

__all__ = ["Queue"]

_ENTRIES: Final = 512
_SCALAR_MAX: Final = 40
_ENTRY_BYTES: Final = CQ_DATA_ENTRY.itemsize
_WORDS: Final = _ENTRY_BYTES // 8
_CONTEXT, _FLAGS, _LEN, _DATA = 0, 1, 2, 4  # words of an entry
_EMPTY: Final = -fi.FI_EAGAIN
_REMOTE: Final = fi.FI_REMOTE_WRITE
_LOCAL: Final = fi.FI_WRITE

_WRITE: Final = int(Kind.WRITE)
_IMM: Final = int(Kind.IMM)
_OK: Final = int(Status.OK)
_IMM_MASK: Final = 0xFFFFFFFF


class Queue:
    """One NIC's completion queue.

    Args:
        nic, slots, mailbox, rules: of one NIC.

    Attributes:
        frames: what came in, copied; the caller takes them.
        errors: what failed; the caller takes them.
        landed: is called with the context of a read that went well.
        landed_many: is called with those of dozens.
        full: whether there may be more to read, or there is something in `frames` or `errors`.
    """

    def __init__(self, nic: Nic, slots: Slots, mailbox: Mailbox, rules: Rules) -> None:
        self._takes_receive = rules.imm_takes_receive
        self._receive = mailbox.receive
        self._nic = nic
        self._slots = slots
        self._mailbox = mailbox
        self._idle = mailbox.idle
        self._entries = np.zeros(_ENTRIES, CQ_DATA_ENTRY)
        self._at = self._entries.ctypes.data
        words = self._entries.view(np.uint64)
        self._words = memoryview(words)  # type: ignore[arg-type]  # numpy has the buffer protocol
        self._contexts = self._entries["op_context"].view(np.int64)
        self._flags = self._entries["flags"]
        self._data = self._entries["data"]
        self._read = nic.cq_read
        self._cq = nic.cq
        self._streaming = False
        self.frames: deque[bytes] = deque()
        self.errors: deque[CqError] = deque()
        self.landed: Callable[[int], object] = _nobody
        self.landed_many: Callable[[I64], object] = self._land_each
        self.full = False

    def drain(self, done: deque[Entry], take_rest: Callable[[], None]) -> None:
        """Read until it is empty, into `done`; `take_rest` sees to frames and errors."""
        out = new_completions(_ENTRIES)
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
            if n == 1:
                filled = self._take_one(out, filled)
            elif n > _SCALAR_MAX:
                filled = self._take_columns(n, out, filled)
            else:
                filled = self._take(n, out, filled)
            if self._idle:
                self._mailbox.refill()
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
        self._read = _nothing

    def _take_one(self, out: Completions, filled: int) -> int:
        words = self._words
        flags, at = words[_FLAGS], filled * COMPLETION_BYTES
        if flags & _REMOTE:
            put_completion(out, at, _IMM, _OK, 1, words[_DATA] & _IMM_MASK, 0, 0, 0)
            if self._takes_receive:
                self._idle.append(self._receive[words[_CONTEXT]])
            return filled + 1
        if flags & _LOCAL:
            ticket = self._slots.take_back(words[_CONTEXT])
            if ticket is None:
                return filled
            ticket.peer.heard = True
            put_completion(out, at, _WRITE, _OK, 1, 0, 0, ticket.batch.ctx, 0)
            return filled + 1
        self._take_frame(words[_CONTEXT], words[_LEN])
        return filled

    def _take(self, n: int, out: Completions, filled: int) -> int:
        words = self._words[: n * _WORDS].tolist()
        rows: list[int] = []
        imms: dict[int, int] = {}
        takes, idle, receive = self._takes_receive, self._idle, self._receive
        for at in range(0, n * _WORDS, _WORDS):
            flags = words[at + 1]
            if flags & fi.FI_REMOTE_WRITE:
                # Not every release sets FI_RMA here, and 1.17 reports no length.
                imm = words[at + 4] & _IMM_MASK
                imms[imm] = imms.get(imm, 0) + 1
                if takes:
                    idle.append(receive[words[at]])
            elif flags & fi.FI_WRITE:
                rows.append(words[at])
            else:
                self._take_frame(words[at], words[at + 2])
        if rows:
            for ctx, count in self._slots.give_back(rows).items():
                out[filled] = (_WRITE, _OK, count, 0, 0, ctx, 0)
                filled += 1
        for imm, count in imms.items():
            out[filled] = (_IMM, _OK, count, imm, 0, 0, 0)
            filled += 1
        return filled

    def _take_columns(self, n: int, out: Completions, filled: int) -> int:
        flags = self._flags[:n]
        remote = (flags & np.uint64(fi.FI_REMOTE_WRITE)) != 0
        count = int(np.count_nonzero(remote))
        if count and self._takes_receive:
            self._idle += map(self._receive.__getitem__, self._contexts[:n][remote].tolist())
        if count == n:
            return self._take_imms(self._data[:n], out, filled)
        local = ~remote
        if count:
            filled = self._take_imms(self._data[:n][remote], out, filled)
        others = local & ((flags & np.uint64(fi.FI_WRITE)) == 0)
        if others.any():
            reads = others & ((flags & np.uint64(fi.FI_READ)) != 0)
            if reads.any():
                self.landed_many(self._contexts[:n][reads])
                local &= ~reads
                others &= ~reads
            for entry in self._entries[:n][others].tolist():
                self._take_frame(entry[0], entry[2])
            local &= ~others
        contexts = self._contexts[:n][local]
        if len(contexts):
            for ctx, rows in self._slots.give_back_many(contexts).items():
                out[filled] = (_WRITE, _OK, rows, 0, 0, ctx, 0)
                filled += 1
        return filled

    @staticmethod
    def _take_imms(data: np.ndarray, out: Completions, filled: int) -> int:
        imms = data.astype(np.uint32)  # the low half; EFA carries no more
        n = len(imms)
        if bool((imms == imms[0]).all()):
            out[filled] = (_IMM, _OK, n, int(imms[0]), 0, 0, 0)
            return filled + 1
        part = out[filled : filled + n]
        part["kind"] = _IMM
        part["status"] = _OK
        part["count"] = 1
        part["imm"] = imms
        part["row"] = 0
        part["ctx"] = 0
        part["nbytes"] = 0
        return filled + n

    def _take_frame(self, context: int, nbytes: int) -> None:
        """A message went out or came in."""
        if self._mailbox.owns(context):
            if self._mailbox.is_receive(context):
                self._mailbox.received(context, nbytes, self._keep)
            else:
                self._mailbox.sent(context)
        else:
            self.landed(context)

    def _land_each(self, contexts: I64) -> None:
        for context in contexts.tolist():
            self.landed(context)

    def _keep(self, view: memoryview) -> None:
        self.frames.append(bytes(view))
        self.full = True


def _nobody(_context: int) -> None:
    """There are no reads."""


def _nothing(_cq: int, _at: int, _room: int) -> int:
    """fi_cq_read of a queue that is lost."""
    return _EMPTY
