"""The ranks of one job, as processes and as tasks of one loop. Not a test."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from tep import rendezvous
from tep.rendezvous import Place

__all__ = [
    "TOKEN",
    "Ended",
    "begin",
    "close",
    "listen",
    "meet",
    "outcomes",
    "place",
    "start_rank",
    "start_ranks",
]

TOKEN = "a secret of these tests"  # noqa: S105  # of these tests

Ended = tuple[int, str, str]
"""Exit status, output and errors of a process."""


def start_rank(
    *arguments: object,
    env: Mapping[str, str] | None = None,
    fds: Iterable[int] = (),
    stdin: int | None = None,
) -> subprocess.Popen[str]:
    """This Python with these arguments, which keeps the descriptors `fds`."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=os.environ | (env or {}),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=tuple(fds),
        text=True,
    )


def start_ranks(
    size: int, port: int, *arguments: object, fds: Iterable[int] = ()
) -> list[subprocess.Popen[str]]:
    """All ranks of a job; torchrun's variables say to each which it is."""
    places = (place(rank, size, port) for rank in range(size))
    return [start_rank(*arguments, env=one.variables(), fds=fds) for one in places]


def outcomes(ranks: Sequence[subprocess.Popen[str]], timeout_s: float = 120.0) -> list[Ended]:
    """Wait for all ranks and return their results; leave none behind, whatever happens."""
    try:
        said = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


def listen() -> tuple[socket.socket, int]:
    """A bound socket for rank 0, and its port."""
    found = socket.create_server(("127.0.0.1", 0))
    return found, found.getsockname()[1]


def place(rank: int, size: int, port: int, token: str = TOKEN) -> Place:
    return Place(rank=rank, size=size, port=port, token=token)


def begin(size: int) -> tuple[asyncio.Future[rendezvous.AsyncGroup], int]:
    """Rank 0 of a job, which waits for the others, and its port; in the running loop."""
    listener, port = listen()
    joining = rendezvous.join_async(place(0, size, port), timeout_s=20.0, listener=listener)
    return asyncio.ensure_future(joining), port


async def meet(size: int, timeout_s: float = 20.0) -> list[rendezvous.AsyncGroup]:
    """All ranks of a job, joined, in this loop."""
    listener, port = listen()
    return await asyncio.gather(
        *(
            rendezvous.join_async(
                place(rank, size, port),
                timeout_s=timeout_s,
                listener=listener if rank == 0 else None,
            )
            for rank in range(size)
        )
    )


async def close(groups: list[rendezvous.AsyncGroup]) -> None:
    for group in groups:
        await group.close()
