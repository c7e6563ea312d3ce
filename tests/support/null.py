"""A NIC that takes everything and completes it at once, without moving a byte: what is left is the
engine's own cost.

For benchmarks and counts of work. Every immediate reaches the target as an entry of its own, as
from a real NIC.
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
from tep.memory.source import Memory

__all__ = ["NullDomain", "null_memory", "null_pair"]

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
            peer_timeout_s=1.0,
            moves_bytes=False,
            reads=1 << 30,
        )
        self.address = index.to_bytes(4, "little")
        self.posted = 0
        self._wire = wire
        self.news: deque[tuple[int, Column, int]] = deque()  # kind, ctx or immediate, rows
        self._scattered: deque[tuple[npt.NDArray[np.unsignedinteger], Column]] = deque()
        self._out: Completions = new_completions(0)  # the last that poll() filled, and its columns
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
        self.news.append((_WRITE, batch.ctx, n))
        self.posted += n
        imm, peer = batch.imm, batch.peer
        if imm is None:
            return n
        if isinstance(peer, int):
            part = imm if isinstance(imm, int) else imm[start:stop]
            self._wire[peer].news.append((_IMM, part, n))
        else:
            self._scattered.append((peer[start:stop], imm))
        return n

    def post_read(self, batch: ReadBatch, start: int, stop: int) -> int:
        self.news.append((_READ, batch.ctx, stop - start))
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
        news = self.news
        if not news:
            return 0
        while self._scattered:  # here and not in post(), so that a post's time is the engine's own
            peers, imm = self._scattered.popleft()
            for peer in peers.tolist():
                self._wire[peer].news.append((_IMM, imm, 1))
        at, room = 0, len(out)
        while news and at < room:
            kind, value, n = news.popleft()
            if kind != _IMM:
                put_completion(out, at * COMPLETION_BYTES, kind, _OK, n, 0, 0, value, 0)
                at += 1
            elif n == 1:
                one = value if isinstance(value, int) else int(value[0])
                put_completion(out, at * COMPLETION_BYTES, kind, _OK, 1, one, 0, 0, 0)
                at += 1
            else:
                at = self._arrive(out, at, value, n)
        return at

    def _arrive(self, out: Completions, at: int, imm: Column, n: int) -> int:
        """Fill `out` from an entry on with immediates; return where they end."""
        take = min(n, len(out) - at)
        if out is not self._out:
            self._out, self._values = out, out["imm"]
            self._bytes = memoryview(out.view("u1"))  # type: ignore[arg-type]  # an array
        one = imm if isinstance(imm, int) else 0
        if (one, take) != self._burst:
            self._burst = one, take
            self._entries = _entry(_IMM, _OK, 1, one, 0, 0, 0) * take
        self._bytes[at * COMPLETION_BYTES : (at + take) * COMPLETION_BYTES] = self._entries
        if not isinstance(imm, int):
            self._values[at : at + take] = imm[:take]
        if take < n:
            rest = imm if isinstance(imm, int) else imm[take:]
            self.news.appendleft((_IMM, rest, n - take))
        return at + take

    def status_text(self, status: int) -> str:
        return ""

    def forget(self, peer: int) -> None:
        """Nothing is kept of a peer that could be given back."""

    def set_waker(self, waker: Callable[[], None]) -> None:
        pass

    def wakeup_fd(self) -> int | None:
        return None

    def arm(self) -> bool:
        return not self.news

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
