"""Waiting for several handles: all of them (`gather`), or each as it finishes (`as_completed`).

Both can be waited for by threads and by coroutines, over handles of any engines. Nothing here
turns an engine: that is the drivers' work.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from threading import RLock
from typing import Final, Generic, TypeVar

from tep.checks import check_flag, check_kind, check_seconds, unpicklable
from tep.core.handle import Handle, Owner, until_finished, wait_for
from tep.core.progress import Metered, Progress, Told
from tep.errors import TepError, WaitTimeout
from tep.waiting import escaped, raise_escaped

__all__ = ["Completed", "Gathered", "as_completed", "gather"]

H = TypeVar("H", bound=Handle)


_LOOKS: Final = 16
"""Open handles that one look takes in: a wait that polls looks often, and may hold thousands."""

_SLICE_S: Final = 0.001
_SLICE_MAX_S: Final = 0.016
"""How long one engine is turned before the next, where handles are of several engines."""

_NAMED_MAX: Final = 8  # open handles that a report names


class _Together(Generic[H]):
    """Several handles that are waited for together.

    Attributes:
        handles: all of them, as they were given.
    """

    def __init__(self, what: str, handles: Iterable[H]) -> None:
        self.handles = tuple(handles)
        for handle in self.handles:
            check_kind(f"{what}: handle", handle, Handle)
        self._what = what
        self._open = deque(self.handles)
        self._lock = RLock()  # workers look as well as those who wait
        self._wakers: list[tuple[Callable[..., object], Callable[[Handle], None]]] = []

    __reduce__ = unpicklable("its handles are open in this process")

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to wait for."""
        raise NotImplementedError

    def _ended(self, handle: H) -> None:
        """Take note of a handle that has finished."""

    def _look(self) -> bool:
        """Sort out handles that have finished; True if none is open."""
        with self._lock:
            looks, line = 0, self._open
            while line and looks < _LOOKS:
                if line[0].finished:
                    self._ended(line.popleft())
                else:
                    line.rotate(-1)
                    looks += 1
            return not line

    def describe(self) -> str:
        """Say in one line how many handles these are, and how they stand."""
        ok = sum(handle.ok for handle in self.handles)
        still = sum(not handle.finished for handle in self.handles)
        counts = f"{ok} ok, {len(self.handles) - ok - still} failed or cancelled, {still} open"
        return f"{self._what} of {len(self.handles)} handles: {counts}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"

    @property
    def wait_timeout_s(self) -> float:
        """What is used when no timeout is given: the largest of their engines', seconds."""
        return max((handle.wait_timeout_s for handle in self.handles), default=0.0)

    def _late(self, timeout_s: float) -> WaitTimeout:
        """The error of a wait that ran out of time: what is open, and their engines' reports."""
        still = [handle for handle in self.handles if not handle.finished]
        lines = [f"{self.describe()} after {timeout_s} s"]
        lines += [f"  open: {handle.describe()}" for handle in still[:_NAMED_MAX]]
        if len(still) > _NAMED_MAX:
            lines.append(f"  and {len(still) - _NAMED_MAX} more")
        lines += [owner.stall_report() for owner in self._owners()]
        return WaitTimeout("\n".join(lines))

    def _owners(self) -> list[Owner]:
        """The engines of the handles that are open."""
        with self._lock:
            return list({id(each._owner): each._owner for each in self._open}.values())

    def _wait_until(self, timeout_s: float) -> bool:
        """Block, or turn, until it is finished; False after `timeout_s`."""
        if escaped:
            raise_escaped()
        owners = self._owners()
        if not self.finished:
            clock, slice_s, k = owners[0].driver, _SLICE_S, 0
            deadline_s = clock.now_s() + timeout_s
            while not self.finished:
                # Several engines may have several drivers, of which each turns only its own: they
                # take turns. One driver is let wait for the whole time.
                drivers = list({id(each.driver): each.driver for each in self._owners()}.values())
                if not drivers:
                    break
                left_s = deadline_s - clock.now_s()
                each_s = left_s if len(drivers) == 1 else min(slice_s, left_s)
                drivers[k % len(drivers)].wait(self, max(0.0, each_s))
                if escaped:
                    raise_escaped()
                k += 1
                if k % len(drivers) == 0:
                    slice_s = min(2 * slice_s, _SLICE_MAX_S)
                if each_s >= left_s and not self.finished:
                    return False
        return self.finished

    def _check_await(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raise UsageError if awaiting it under this event loop could never end."""
        for owner in self._owners():
            owner.driver.check_await(loop)

    def add_done_callback(self, callback: Callable[..., object]) -> None:
        """For drivers and event loops: call back when a handle ends, and this is finished then."""

        def look(_: Handle) -> None:
            if self.finished:
                callback(self)

        with self._lock:
            self._wakers.append((callback, look))
            still = tuple(self._open)
        for handle in still:
            handle.add_done_callback(look)

    def remove_done_callback(self, callback: Callable[..., object]) -> None:
        """Take one back, if it is there."""
        with self._lock:
            mine = [pair for pair in self._wakers if pair[0] == callback][:1]
            for pair in mine:
                self._wakers.remove(pair)
        for _, look in mine:
            for handle in self.handles:
                handle.remove_done_callback(look)

    def cancel(self) -> None:
        """Ask all that are open to end early."""
        for handle in self.handles:
            handle.cancel()


class Gathered(_Together[H]):
    """What `gather` returns: wait() for it, or await it; both return the list of handles.

    Attributes:
        handles: all of them, as they were given.
        error: what the first that was seen to fail, or to be cancelled, ended with.
    """

    def __init__(self, handles: Iterable[H], *, return_exceptions: bool) -> None:
        super().__init__("gather", handles)
        self._keeps = check_flag("gather: return_exceptions", return_exceptions)
        self.error: TepError | None = None

    def _ended(self, handle: H) -> None:
        if self.error is None:
            self.error = handle.error

    @property
    def finished(self) -> bool:
        """Whether all have ended or, unless exceptions are returned, one has not ended well."""
        whole = self._look()
        return whole or (self.error is not None and not self._keeps)

    def result(self) -> list[H | TepError]:
        """The handles, in the order in which they were given.

        Raises:
            WaitTimeout: not finished yet.
            TepError: what the first handle that failed ended with, unless errors are returned.
        """
        if not self.finished:
            raise WaitTimeout(f"not finished yet: {self.describe()}")
        if self._keeps:
            return [handle.error or handle for handle in self.handles]
        if self.error is not None:
            raise self.error.with_traceback(None)
        return list(self.handles)

    def wait(
        self,
        timeout_s: float | None = None,
        *,
        on_progress: Callable[[Progress], object] | None = None,
        every_s: float = 1.0,
    ) -> list[H | TepError]:
        """Block until finished; then as `result()`. The timeout is for all of it.

        Args:
            timeout_s: seconds; None = the largest `wait_timeout_s` of their engines.
            on_progress: as of `Transfer.wait`; it gets the sum over the transfers among them.
            every_s: seconds.

        Raises:
            WaitTimeout: with what is open, and reports of its engines.
        """
        if on_progress is not None and self.handles:
            told = self._told(timeout_s, every_s, on_progress)
            timeout_s, done = told.timeout_s, told.wait(self._wait_until)
        else:
            if timeout_s is None:
                timeout_s = self.wait_timeout_s
            timeout_s = check_seconds("gather: timeout_s", timeout_s, -math.inf, math.inf)
            done = self._wait_until(timeout_s)
        if not done:
            raise self._late(timeout_s)
        return self.result()

    async def wait_async(
        self,
        timeout_s: float | None = None,
        *,
        on_progress: Callable[[Progress], object] | None = None,
        every_s: float = 1.0,
    ) -> list[H | TepError]:
        """`wait()` for coroutines; `await gathered` alone has no timeout, as is usual there."""
        if on_progress is not None and self.handles:
            await self._told(timeout_s, every_s, on_progress).wait_async()
        else:
            await wait_for(self, timeout_s)
        return self.result()

    def _told(
        self, timeout_s: float | None, every_s: float, on_progress: Callable[[Progress], object]
    ) -> Told:
        handles: tuple[object, ...] = self.handles  # what mypy lets be a Metered as well
        metered = [handle for handle in handles if isinstance(handle, Metered)]
        clock = self.handles[0]._owner.driver
        return Told("gather", self, metered, clock, timeout_s, every_s, on_progress)

    def __await__(self) -> Generator[object, None, list[H | TepError]]:
        yield from until_finished(self)
        return self.result()


class Completed(_Together[H]):
    """What `as_completed` returns: an iterator over handles in the order in which they finish."""

    def __init__(self, handles: Iterable[H], timeout_s: float | None) -> None:
        super().__init__("as_completed", handles)
        self._ready: deque[H] = deque()
        if timeout_s is None:
            timeout_s = self.wait_timeout_s
        self._timeout_s = check_seconds("as_completed: timeout_s", timeout_s, -math.inf, math.inf)
        self._clock = self.handles[0]._owner.driver if self.handles else None
        self._deadline_s = self._timeout_s + (self._clock.now_s() if self._clock else 0.0)

    def _ended(self, handle: H) -> None:
        self._ready.append(handle)

    @property
    def finished(self) -> bool:
        """Whether there is a handle to return, or none is left."""
        return bool(self._ready) or self._look() or bool(self._ready)

    def _left_s(self) -> float:
        return 0.0 if self._clock is None else self._deadline_s - self._clock.now_s()

    def __iter__(self) -> Iterator[H]:
        return self

    def __next__(self) -> H:
        if not self._wait_until(self._left_s()):
            raise self._late(self._timeout_s)
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def __aiter__(self) -> AsyncIterator[H]:
        return self

    async def __anext__(self) -> H:
        try:
            await wait_for(self, self._left_s())
        except WaitTimeout:
            raise self._late(self._timeout_s) from None
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()


def gather(*handles: H, return_exceptions: bool = False) -> Gathered[H]:
    """Wait for several handles of any engines: `tep.gather(a, b).wait()`, `await tep.gather(a, b)`.

    As with asyncio's: the first error that is seen is raised at once, and the other handles go on;
    a source buffer of theirs is still in use.

    Args:
        *handles: transfers, expectations, messages.
        return_exceptions: wait for all, and return the error of a handle in its place.

    Returns:
        What wait() and await return is the list of handles, in the order given.
    """
    return Gathered(handles, return_exceptions=return_exceptions)


def as_completed(handles: Iterable[H], *, timeout_s: float | None = None) -> Completed[H]:
    """Iterate over handles as they finish, by `for` or by `async for`.

    Each comes once, however it ended: ask `handle.ok`, or let `handle.result()` raise.

    Args:
        handles: transfers, expectations, messages, of any engines.
        timeout_s: seconds from this call, for all of them; None = the largest `wait_timeout_s` of
            their engines.

    Raises:
        WaitTimeout: from the iteration, with what is open and reports of its engines.
    """
    return Completed(handles, timeout_s)
