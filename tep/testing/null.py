"""A NIC that takes everything and completes it at once, without moving a byte: what is left is the
engine's own cost.

For benchmarks only. Every immediate reaches the target as an entry of its own, as from a real NIC.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.backends.base import (
    COMPLETION_BYTES,
    Access,
    Column,
    Completions,
    DomainCaps,
    DomainKey,
    Kind,
    ReadBatch,
    Status,
    WriteBatch,
    new_completions,
    put_completion,
)
from tep.memory import Memory

__all__ = ["NullDomain", "null_pair"]

_COUNT_MAX: Final = 2**32 - 1
_WRITE, _READ, _IMM, _OK = int(Kind.WRITE), int(Kind.READ), int(Kind.IMM), int(Status.OK)


_entry: Final = Struct("=BBxxIIIQQ").pack
"""The bytes of one completion: a burst of equal immediates costs one copy of them."""


class NullDomain:
    """One end of a wire without length.

    Give every domain the list of all of them; a PeerId is an index in it.
    """

    def __init__(self, index: int, wire: list[NullDomain]) -> None:
        self.caps = DomainCaps(
            backend="null",
            nic=f"null{index}",
            link_bps=0,
            sq_depth=1 << 30,
            max_write_bytes=1 << 40,
            max_msg_bytes=0,
            ordered=True,
            imm_eats_recv=False,
            peer_timeout_s=1.0,
            moves_bytes=False,
            reads=1 << 30,
        )
        self.address = index.to_bytes(4, "little")
        self.posted = 0
        self._wire = wire
        self._done: deque[tuple[int, int]] = deque()
        self._read: deque[tuple[int, int]] = deque()
        self._imms: deque[tuple[Column, int]] = deque()
        self._scattered: deque[tuple[npt.NDArray[np.unsignedinteger], Column]] = deque()
        self._out: Completions = new_completions(
            0
        )  # the last that poll() filled, and columns of it
        self._values = self._out["imm"]
        self._bytes = memoryview(b"")
        self._burst: object = None  # the last immediate and how many there were
        self._entries = b""  # and what poll() wrote for them
        wire.append(self)

    def register(self, memory: Memory, access: Access) -> DomainKey:
        return DomainKey(1, 1, memory.ptr)

    def deregister(self, key: DomainKey) -> None:
        pass

    def connect(self, peer: bytes) -> int:
        return int.from_bytes(peer, "little")

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        n = stop - start
        self._done.append((batch.ctx, n))
        self.posted += n
        imm, peer = batch.imm, batch.peer
        if imm is None:
            return n
        if isinstance(peer, int):
            part = imm if isinstance(imm, int) else imm[start:stop]
            self._wire[peer]._imms.append((part, n))
        else:
            self._scattered.append((peer[start:stop], imm))
        return n

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        self._read.append((batch.ctx, stop - start))
        self.posted += stop - start
        return stop - start

    def post_send(self, peer: int, payload: bytes, ctx: int) -> bool:
        return False

    def post_recvs(self, nbytes: int, count: int) -> None:
        pass

    def recv_view(self, slot: int) -> memoryview:
        raise NotImplementedError("the null NIC has no messages")

    def recv_source(self, slot: int) -> bytes:
        raise NotImplementedError("the null NIC has no messages")

    def recv_done(self, slot: int) -> None:
        pass

    def poll(self, out: Completions) -> int:
        if not (self._done or self._imms or self._scattered or self._read):
            return 0
        at, room = 0, len(out)
        while self._scattered:  # here and not in post(), so that a post's time is the engine's own
            peers, one = self._scattered.popleft()
            for peer in peers.tolist():
                self._wire[peer]._imms.append((one, 1))
        while self._done and at < room:
            ctx, n = self._done.popleft()
            put_completion(
                out, at * COMPLETION_BYTES, _WRITE, _OK, min(n, _COUNT_MAX), 0, 0, ctx, 0
            )
            at += 1
        while self._read and at < room:
            ctx, n = self._read.popleft()
            count = min(n, _COUNT_MAX)
            put_completion(out, at * COMPLETION_BYTES, _READ, _OK, count, 0, 0, ctx, 0)
            at += 1
        while self._imms and at < room:
            imm, n = self._imms.popleft()
            take = min(n, room - at)
            if out is not self._out:
                self._out, self._values = out, out["imm"]
                self._bytes = memoryview(out.view("u1"))  # type: ignore[arg-type]  # an array
            one = imm if isinstance(imm, int) else 0 if take > 1 else int(imm[0])
            if take == 1:
                put_completion(out, at * COMPLETION_BYTES, _IMM, _OK, 1, one, 0, 0, 0)
                at += 1
                continue
            start, stop = at * COMPLETION_BYTES, (at + take) * COMPLETION_BYTES
            if (one, take) != self._burst:
                self._burst = one, take
                self._entries = _entry(_IMM, _OK, 1, one, 0, 0, 0) * take
            self._bytes[start:stop] = self._entries
            if not isinstance(imm, int):
                self._values[at : at + take] = imm[:take]
            if take < n:
                self._imms.appendleft((imm if isinstance(imm, int) else imm[take:], n - take))
            at += take
        return at

    def status_text(self, status: int) -> str:
        return ""

    def forget(self, peer: int) -> None:
        """Nothing is kept of a peer that could be given back."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        pass

    def wakeup_fd(self) -> int | None:
        return None

    def arm(self) -> bool:
        return not (self._done or self._imms or self._read)

    def close(self) -> None:
        pass


def null_pair(nics: int) -> tuple[list[NullDomain], list[NullDomain]]:
    """The NICs of two engines that can reach each other."""
    wire: list[NullDomain] = []
    return [NullDomain(k, wire) for k in range(nics)], [
        NullDomain(nics + k, wire) for k in range(nics)
    ]


def null_memory(nbytes: int) -> Memory:
    """A region that is never touched, so that it may be larger than the machine's memory."""
    return Memory(np.iinfo(np.int32).max, nbytes, "cpu", False, None)
