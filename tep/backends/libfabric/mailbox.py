"""Frames in and out: rotating buffers for libfabric's messages on one NIC.

What a frame means is not known here. A buffer that came in is posted again as soon as its frame has
been looked at; whoever wants the bytes longer copies them.
"""

from __future__ import annotations

import mmap
import operator
from collections.abc import Callable
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tep.backends.base import DomainKey
from tep.backends.ffi import libfabric as fi
from tep.backends.ffi.load import check
from tep.backends.libfabric.objects import Endpoint, Nic
from tep.backends.libfabric.regions import Region, mr_attr
from tep.memory.source import Memory, adapt

if TYPE_CHECKING:
    from tep.backends.libfabric.peer import Peer
    from tep.backends.libfabric.rules import Rules

__all__ = ["OUT_PER_PEER", "Mailbox"]

OUT_PER_PEER: Final = 8  # a peer that takes nothing must not hold all buffers
_SLOT_BYTES: Final = 64

# One receive, all words of 64 bits: iovec, struct fi_msg. It is as long as a context, so that the
# address of one is that of the other and a constant.
_RECORD: Final = np.dtype(
    [
        ("base", "<u8"),  # iovec.iov_base
        ("len", "<u8"),  # iovec.iov_len
        ("p_iov", "<u8"),  # fi_msg from here on: msg_iov
        ("p_desc", "<u8"),
        ("iov_count", "<u8"),
        ("addr", "<u8"),
        ("context", "<u8"),
        ("data", "<u8"),
    ]
)
_MSG_AT: Final = 16
assert _RECORD.itemsize == _SLOT_BYTES


class Mailbox:
    """The frame buffers of one NIC.

    Args:
        nic: whose.
        frame_bytes: of the longest frame.
        rules: how many buffers there are.

    Attributes:
        region: the buffers, as what an empty row reads from.
        idle: receives that are not posted, each as its fi_msg; refill() posts them.
        receive: the fi_msg of a receive, by its context.
    """

    def __init__(self, nic: Nic, frame_bytes: int, rules: Rules) -> None:
        self._nic = nic
        self._flags = fi.ready(fi.FI_MORE if rules.more else 0), fi.ready(0)
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
        # One receive, spelled out once: it is posted again whenever an immediate has taken it.
        records = self._records = np.zeros(self._receives, _RECORD)
        at = records.ctypes.data + _RECORD.itemsize * np.arange(self._receives, dtype=np.uint64)
        records["base"] = self._buffers + self._frame_bytes * np.arange(self._receives)
        self._descs = np.array([self._desc], np.uint64)  # fi_msg.desc: an array of one
        records["len"], records["p_desc"] = self._frame_bytes, self._descs.ctypes.data
        records["p_iov"] = at
        records["iov_count"], records["addr"] = 1, fi.FI_ADDR_UNSPEC
        records["context"] = self._contexts + _SLOT_BYTES * np.arange(self._receives)
        self.idle: list[Any] = list(map(fi.ready, (at + np.uint64(_MSG_AT)).tolist()))
        self.receive = dict(zip(records["context"].tolist(), self.idle, strict=True))

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
        check(rc, "fi_recvmsg", describe=self._nic.lib.strerror, nic=self._nic.name)

    def refill(self) -> int:
        """Post what receive buffers are not posted; return what libfabric said last."""
        main = self._main
        assert main is not None
        idle, rc = self.idle, 0
        if not idle or not main.address:  # 0 once it is closed
            return 0
        posts = iter(idle)
        last = len(idle) - 1
        # In one go: the last one rings the doorbell.
        more, end = self._flags
        flags = chain(repeat(more, last), repeat(end))
        rc = next(filter(None, map(main.recvmsg, repeat(main.ready), posts, flags)), 0)
        if rc:
            del idle[: last - operator.length_hint(posts)]
            if rc != -fi.FI_EAGAIN:
                self._nic.lose("fi_recvmsg", rc)
        else:
            idle.clear()
        return rc

    def owns(self, context: int) -> bool:
        """Whether a completion's context is one of ours."""
        return self._contexts <= context < self._end

    def is_receive(self, context: int) -> bool:
        """Whether it is a receive's."""
        return context < self._contexts + self._receives * _SLOT_BYTES

    def send(self, peer: Peer, endpoint: Endpoint, frame: bytes) -> bool:
        """Hand one frame to libfabric; False = not now.

        Raises:
            OSError: refused for another reason than a full queue; errno is libfabric's.
        """
        if not self._free or peer.sends >= OUT_PER_PEER:
            return False
        assert len(frame) <= self._frame_bytes, (len(frame), self._frame_bytes)
        index = self._free[-1]
        at = index * self._frame_bytes
        self._view[at : at + len(frame)] = frame
        if not self._post(peer, endpoint, index, len(frame)):
            return False
        self._free.pop()
        self._owner[index] = peer
        peer.sends += 1
        return True

    def _post(self, peer: Peer, endpoint: Endpoint, index: int, nbytes: int) -> bool:
        """Post the frame in one buffer; False = the queue is full."""
        at = self._buffers + index * self._frame_bytes
        context = self._contexts + index * _SLOT_BYTES
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
        """A receive has been used; refill() posts it again."""
        self.idle.append(self.receive[self._contexts + index * _SLOT_BYTES])

    def dropped(self, context: int) -> None:
        """Post a receive buffer again whose receive failed."""
        self.give_back((context - self._contexts) // _SLOT_BYTES)
        self.refill()

    def close(self) -> None:
        """Unregister the buffers, after the endpoints are closed."""
        self.region.close()
        self._view.release()
        self._owner.clear()
