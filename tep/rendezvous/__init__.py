"""Rendezvous for scripts: N processes exchange bytes (addresses, descriptors) before they transfer.

    engine = tep.TransferEngine.open("libfabric", provider="tcp", nics=["127.0.0.1"])
    peers = tep.rendezvous.exchange(engine.main_address.to_bytes())  # by rank, under torchrun

Rank 0 listens, the others connect; everything goes through rank 0, over asyncio's TCP. It is made
for a few kilobytes a rank at the start and the end of a job, and moves no data of transfers. Here
are the functions for users; `ranks` has places and the collective calls, `wire` the messages, and
the listener that admits others to rank 0.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Self, TypeVar

from tep.base.checks import check_seconds, unpicklable
from tep.base.errors import UsageError
from tep.rendezvous.ranks import AsyncGroup, Place

__all__ = ["AsyncGroup", "Group", "Place", "exchange", "exchange_async", "join", "join_async"]

T = TypeVar("T")


def exchange(data: bytes, place: Place | None = None, *, timeout_s: float = 60.0) -> list[bytes]:
    """Give every rank's bytes to every rank: join, all_gather, close.

    Args:
        data: this rank's bytes.
        place: this process's rank and the address of rank 0; None = from the environment.
        timeout_s: limit of each wait for the other ranks, seconds.

    Returns:
        The bytes of all ranks, by rank.

    Raises:
        As join_async(); WaitTimeout too if a rank's bytes do not come in time.
    """
    return _run(lambda: exchange_async(data, place, timeout_s=timeout_s))


async def exchange_async(
    data: bytes, place: Place | None = None, *, timeout_s: float = 60.0
) -> list[bytes]:
    """Exchange bytes like exchange(), without blocking the event loop."""
    group = await join_async(place, timeout_s=timeout_s)
    try:
        return await group.all_gather(data, timeout_s=timeout_s)
    finally:
        await group.close()


async def join_async(
    place: Place | None = None,
    *,
    timeout_s: float = 60.0,
    listener: socket.socket | None = None,
) -> AsyncGroup:
    """Meet all other ranks.

    Args:
        place: this process's rank and the address of rank 0; None = from the environment.
        timeout_s: limit of the wait for all ranks, seconds.
        listener: rank 0 only: a bound socket to listen on instead of host and port; is closed.

    Raises:
        UsageError: refused by rank 0: wrong token, world size, a rank that is here already; or the
            port is taken.
        WaitTimeout: not all came in time; says who is missing.
        RendezvousError: the program that answers at host and port is not rank 0 of this job.
    """
    timeout_s = check_seconds("rendezvous: timeout_s", timeout_s, never=True)
    place = Place.from_env() if place is None else place
    group = AsyncGroup(place)
    try:
        if place.size > 1 and place.port == 0 and listener is None:
            raise UsageError(f"rendezvous: rank {place.rank} of {place.size} has no port")
        if place.rank == 0:
            await group.gather_ranks(timeout_s, listener)
        else:
            await group.find_rank_0(timeout_s)
    except BaseException:
        await group.close()
        raise
    return group


def join(
    place: Place | None = None,
    *,
    timeout_s: float = 60.0,
    listener: socket.socket | None = None,
) -> Group:
    """Meet all other ranks like join_async(), for scripts without an event loop."""
    _refuse_running_loop()
    runner = asyncio.Runner()
    try:
        group = runner.run(join_async(place, timeout_s=timeout_s, listener=listener))
    except BaseException:
        runner.close()
        raise
    return Group(runner, group)


class Group:
    """The blocking form of AsyncGroup; it runs its own event loop inside each call."""

    def __init__(self, runner: asyncio.Runner, group: AsyncGroup) -> None:
        self.rank = group.rank
        self.size = group.size
        self._runner = runner
        self._group = group
        self._closed = False

    __reduce__ = unpicklable("its connections are this process's; each process joins by itself")

    def __repr__(self) -> str:
        return f"Group({self._group!r})"

    def all_gather(self, data: bytes, *, timeout_s: float = 60.0) -> list[bytes]:
        """Give every rank's bytes to every rank; returns them by rank. See AsyncGroup."""
        self._check_open("all_gather")
        return self._runner.run(self._group.all_gather(data, timeout_s=timeout_s))

    def barrier(self, *, timeout_s: float = 60.0) -> None:
        """Return when all ranks have called."""
        self._check_open("barrier")
        self._runner.run(self._group.barrier(timeout_s=timeout_s))

    def close(self) -> None:
        """Hang up. Idempotent."""
        if not self._closed:
            self._closed = True
            self._runner.run(self._group.close())
            self._runner.close()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise UsageError(f"rendezvous: {what} after close")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(
        "rendezvous: an event loop runs here (a notebook?): use `await join_async()` or "
        "`await exchange_async()`"
    )


def _run(make: Callable[[], Coroutine[object, object, T]]) -> T:
    _refuse_running_loop()
    return asyncio.run(make())
