"""Waiting that can be called off: by a deadline, a failed write, or a peer's call for recovery."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from tep import ClosedError, FabricError, TepError, WaitTimeout

if TYPE_CHECKING:
    from tep import Expectation, Transfer
    from tep.apps.moe.link import Settles

__all__ = ["TROUBLE", "Guard"]

TROUBLE = (FabricError, WaitTimeout, ClosedError)
"""What a turn may end in where a rank, a NIC or the wire is to blame."""


class Guard:
    """All waits of one rank.

    Args:
        timeout_s: how long one wait may last, seconds of the running loop.
        name: of the rank, for messages.
    """

    def __init__(self, timeout_s: float, name: str) -> None:
        self.timeout_s = timeout_s
        self._name = name
        self._open: dict[asyncio.Future[None], Settles] = {}
        self.trouble: TepError | None = None
        self._resets = 0

    async def wait(self, handle: Settles, what: str) -> None:
        """Wait until a handle settles; then as its result().

        Raises:
            WaitTimeout: it did not in time.
            FabricError: what alarm() was called with, now or before.
        """
        if self.trouble is not None:
            handle.cancel()
            raise self.trouble
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        def wake(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle)

        def late() -> None:
            self._end(done, WaitTimeout(f"{self._name}: {what}: not within {self.timeout_s} s"))

        self._open[done] = handle
        timer = loop.call_later(self.timeout_s, late)
        handle.add_done_callback(wake)
        try:
            await done
        except BaseException:
            handle.cancel()
            raise
        finally:
            timer.cancel()
            self._open.pop(done, None)
        handle.result()

    def alarm(self, error: TepError) -> None:
        """Call off every wait, open or to come, until reset()."""
        if self.trouble is None:
            self.trouble = error
            for done in tuple(self._open):
                self._end(done, error)

    def reset(self) -> None:
        """Wait again; what was watched before does not matter any more."""
        self.trouble = None
        self._resets += 1

    def watch(self, transfer: Transfer) -> None:
        """Raise the alarm if a transfer fails, whether or not anybody waits for it."""
        loop, begun = asyncio.get_running_loop(), self._resets

        def look(settled: Transfer) -> None:
            error = settled.error
            if error is not None and not settled.cancelled and begun == self._resets:
                with contextlib.suppress(RuntimeError):  # the loop has ended: nobody to tell
                    loop.call_soon_threadsafe(self.alarm, error)

        transfer.add_done_callback(look)

    def watch_call(self, called: Expectation) -> None:
        """Raise the alarm when another rank calls for recovery, or its call has failed."""
        loop = asyncio.get_running_loop()

        def look(settled: Expectation) -> None:
            if settled.ok or isinstance(settled.error, FabricError):
                error = FabricError(f"{self._name}: another rank calls for recovery", code="CALLED")
                with contextlib.suppress(RuntimeError):  # as above
                    loop.call_soon_threadsafe(self.alarm, error)

        called.add_done_callback(look)

    @staticmethod
    def _end(done: asyncio.Future[None], error: TepError) -> None:
        if not done.done():
            done.set_exception(error)
