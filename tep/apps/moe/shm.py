"""The node's link on one real host: arenas in shared memory, flags as immediates of the engine.

An arena is an anonymous memory file, which peers of the same user open through /proc; nothing is
left behind when a process dies. Rule: flags go through the engine, whose system calls and locks
order them behind the stores before; so a peer that has counted a flag sees those stores.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tep import UsageError
from tep.apps.moe.link import Move, Settles
from tep.apps.moe.numerics import Bytes

if TYPE_CHECKING:
    from tep import MrDesc, TransferEngine

__all__ = ["SharedMemory"]


class SharedMemory:
    """One rank's end; a NodeLink. All ranks of the node are processes of one user on one host."""

    def __init__(self) -> None:
        self.arena: Bytes | None = None
        self._fd = -1
        self._peers: dict[int, Bytes] = {}
        self._engine: TransferEngine | None = None
        self._descs: Mapping[int, MrDesc] = {}

    def allocate(self, nbytes: int) -> Bytes:
        self._fd = os.memfd_create("tep-moe", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        self.arena = np.frombuffer(mmap.mmap(self._fd, nbytes), np.uint8)
        return self.arena

    def hello(self) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._fd}".encode()

    def connect(
        self, engine: TransferEngine, hellos: Mapping[int, bytes], descs: Mapping[int, MrDesc]
    ) -> None:
        self._engine, self._descs = engine, descs
        for rank, hello in hellos.items():
            path = hello.decode()
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise UsageError(
                    f"rank {rank}: its memory {path} cannot be opened: {error.strerror}; ranks of "
                    "one node must be processes of one user and one PID namespace; else use "
                    "node_size=1"
                ) from error
            try:
                self._peers[rank] = np.frombuffer(mmap.mmap(fd, descs[rank].nbytes), np.uint8)
            finally:
                os.close(fd)

    async def push(self, moves: Sequence[Move]) -> None:
        await self._move(moves, pushes=True)

    async def pull(self, moves: Sequence[Move]) -> None:
        await self._move(moves, pushes=False)

    async def _move(self, moves: Sequence[Move], *, pushes: bool) -> None:
        assert self.arena is not None, "allocate() comes first"
        for peer, here, there, nbytes in moves:
            mine, theirs = self.arena[here : here + nbytes], self._peers[peer][there:][:nbytes]
            if pushes:
                theirs[:] = mine
            else:
                mine[:] = theirs
            await asyncio.sleep(0)  # the proxy must go on between copies

    def signal(self, peers: Sequence[int], flag: int) -> None:
        assert self._engine is not None, "connect() comes first"
        self._engine.submit_barrier([self._descs[peer] for peer in peers], flag)

    def expect(self, flag: int, count: int) -> Settles:
        assert self._engine is not None, "connect() comes first"
        return self._engine.expect_imm_count(flag, count)

    def close(self) -> None:
        # The mappings live as long as somebody uses their arrays; the engine may hold the arena.
        self._peers = {}
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
