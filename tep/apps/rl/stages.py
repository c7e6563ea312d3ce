"""How a worker spends compute: at once, on threads, or as simulated time. No transfers here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

__all__ = ["AtOnce", "Compute", "Threads", "Timed"]

T = TypeVar("T")


class Compute(Protocol):
    """Where a stage's arithmetic runs."""

    async def run(self, stage: str, nbytes: int, function: Callable[[], T]) -> T:
        """Run a function that works on so many bytes; return its result."""


class AtOnce:
    """In the event loop's thread: for simulations, where computing takes no simulated time."""

    async def run(self, stage: str, nbytes: int, function: Callable[[], T]) -> T:
        del stage, nbytes
        return function()


class Threads:
    """On asyncio's threads, so that stages of different tasks overlap."""

    async def run(self, stage: str, nbytes: int, function: Callable[[], T]) -> T:
        del stage, nbytes
        return await asyncio.to_thread(function)


class Timed:
    """At once, but the stage takes the time of a device: bytes over a rate.

    Args:
        bytes_per_s: rate of each stage; a stage that is not named takes no time.
    """

    def __init__(self, bytes_per_s: Mapping[str, float]) -> None:
        self._rates = dict(bytes_per_s)

    async def run(self, stage: str, nbytes: int, function: Callable[[], T]) -> T:
        rate = self._rates.get(stage)
        if rate:
            await asyncio.sleep(nbytes / rate)
        return function()
