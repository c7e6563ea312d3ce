"""Handles: what a submit or an expectation returns. One finishes once: ok, cancelled or failed.

State and callbacks only. A handle never turns an engine: the driver waits, the worker settles.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from enum import Enum
from typing import ClassVar, Final, Protocol, Self, cast

from tep.base.checks import check_seconds, unpicklable
from tep.base.errors import Cancelled, ClosedError, TepError, WaitTimeout
from tep.base.waiting import escaped, raise_escaped, wake_main

__all__ = ["PENDING", "Handle", "Owner", "State", "Waits", "closed_error"]


class State(Enum):
    """The state of a handle."""

    PENDING = "pending"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"

    # Hash by identity, as they compare. Enum's own hash is a Python function and takes 0.1 us.
    __hash__ = object.__hash__


# As names of the module, since Python 3.11 takes 0.1 us to look a member up in its class.
PENDING: Final = State.PENDING
_DONE: Final = State.DONE
_CANCELLED: Final = State.CANCELLED


class Waits(Protocol):
    """What handles need of the driver; see `tep.drivers.threads.Driver`."""

    lock: AbstractContextManager[object]

    def wait(self, handle: Handle, timeout_s: float, /) -> bool:
        """Block, or turn, until the handle is finished; False after `timeout_s`."""

    def check_await(self, loop: asyncio.AbstractEventLoop, /) -> None:
        """Raise UsageError if awaiting under this event loop could never end."""

    def now_s(self) -> float:
        """The clock, seconds from an arbitrary start."""


class Owner(Protocol):
    """What handles need of the engine."""

    @property
    def driver(self) -> Waits: ...

    @property
    def wait_timeout_s(self) -> float: ...

    @property
    def domains(self) -> tuple[object, ...]: ...

    def cancel_handle(self, handle: Handle) -> None:
        """Queue a cancel."""

    def stall_report(self) -> str:
        """Say what each open handle waits for."""

    def report_callback_error(self, handle: Handle, callback: object, error: BaseException) -> None:
        """Record a user's callback that raised."""


class Handle:
    """Something that will settle. Users may call it from any thread; only the worker settles it.

    Attributes:
        submitted_s: when it was submitted, seconds of the driver's clock.
        counted: whether statistics count it as a transfer or message.
        rows: how many rows and messages it brings to the NICs.
        reserved: how many of them the engine counted when they were submitted.
    """

    counted: ClassVar[bool] = True
    rows: int = 0
    reserved: int = 0
    __slots__ = ("_callbacks", "_delivered", "_error", "_owner", "_state", "submitted_s")

    def __init__(self, owner: Owner, submitted_s: float) -> None:
        self._owner = owner
        self.submitted_s = submitted_s
        self._state = PENDING
        self._error: TepError | None = None
        self._callbacks: list[Callable[[Handle], object]] | None = None
        self._delivered = False

    @property
    def state(self) -> State:
        """pending, done (which is `ok`), cancelled or failed."""
        return self._state

    @property
    def finished(self) -> bool:
        """Whether it has ended, well or not; asyncio calls this `done()`."""
        return self._state is not PENDING

    @property
    def ok(self) -> bool:
        """Whether it ended well; False while it is pending."""
        return self._state is _DONE

    @property
    def failed(self) -> bool:
        """Whether it ended by an error; False after cancel()."""
        return self._state is State.FAILED

    @property
    def cancelled(self) -> bool:
        """Whether it ended by cancel()."""
        return self._state is _CANCELLED

    @property
    def error(self) -> TepError | None:
        """What went wrong, if it failed or was cancelled."""
        return self._error

    def describe(self) -> str:
        """Describe it and its progress in one line; used in stall reports."""
        return f"{type(self).__name__}: {self._state.value}"

    def __repr__(self) -> str:
        why = f"; {type(self._error).__name__}: {self._error}" if self.failed else ""
        return f"{type(self).__name__}({self.describe()}{why.splitlines()[0] if why else ''})"

    __reduce__ = unpicklable("it is open in this process; send what it tells, e.g. `stats()`")

    def result(self) -> Self:
        """Return the handle itself if it is ok.

        Raises:
            Cancelled: it was cancelled.
            FabricError: it failed.
            WaitTimeout: it is still pending.
        """
        if self._error is not None:
            # It is raised for each caller; without this their tracebacks would accumulate.
            raise self._error.with_traceback(None)
        if self._state is PENDING:
            raise WaitTimeout(f"not settled yet: {self.describe()}")
        return self

    def wait(self, timeout_s: float | None = None) -> Self:
        """Block until it is finished; then as `result()`, which returns the handle itself.

        On the main thread it raises, once, what a callback raised for that thread, e.g. SystemExit.

        Args:
            timeout_s: seconds of the driver's clock (simulated seconds in a simulation); None = the
                engine's `wait_timeout_s`; math.inf = for ever; less than 0 = 0. The handle stays
                valid after a timeout.

        Raises:
            BadRequest: not a number of seconds.
            WaitTimeout: with a report of what is outstanding.
            StallError: in a simulation, when nothing that is still to happen can settle it.
        """
        owner = self._owner
        if timeout_s is None:
            timeout_s = owner.wait_timeout_s
        elif type(timeout_s) is not float or timeout_s != timeout_s:  # noqa: PLR0124  # nan
            timeout_s = check_seconds("wait: timeout_s", timeout_s, -math.inf, math.inf)
        if escaped:
            raise_escaped()
        if self._state is PENDING and not owner.driver.wait(self, timeout_s):
            raise_escaped()
            raise self._late(timeout_s)
        return self if self._state is _DONE else self.result()

    def _late(self, timeout_s: float) -> WaitTimeout:
        """The error of a wait that ran out of time: what was waited for, and a stall report."""
        return WaitTimeout(f"{self.describe()} after {timeout_s} s\n{self._owner.stall_report()}")

    async def wait_async(self, timeout_s: float | None = None) -> Self:
        """`wait()` for coroutines: the same timeout, errors and report, and no thread is blocked.

        `await handle` alone has no timeout of its own, as is usual in asyncio.
        """
        if timeout_s is None:
            timeout_s = self._owner.wait_timeout_s
        timeout_s = check_seconds("wait_async: timeout_s", timeout_s, -math.inf, math.inf)
        limit = asyncio.timeout(None if timeout_s == math.inf else timeout_s)
        try:
            async with limit:
                return await self
        except TimeoutError:
            if not limit.expired():
                raise
            if not self.finished:
                raise self._late(timeout_s) from None
        return self.result()

    def __await__(self) -> Generator[object, None, Self]:
        """Wait without blocking the event loop; then as `result()`.

        Cancelling the task, e.g. by asyncio.timeout(), cancels only the wait; a note (PEP 678) of
        the CancelledError says what it waited for.
        """
        loop = asyncio.get_running_loop()
        if escaped:
            raise_escaped()
        while not self.finished:
            self._owner.driver.check_await(loop)
            future: asyncio.Future[None] = loop.create_future()
            wake = _waker(loop, future)
            try:
                wake_main[future] = wake
                self.add_done_callback(wake)
                yield from future
            except asyncio.CancelledError as error:
                error.add_note(f"it waited for {self.describe()}")
                raise
            finally:
                wake_main.pop(future, None)
                self.remove_done_callback(wake)  # also after a cancelled wait
            if escaped:
                raise_escaped()
        return self.result()

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call back with this handle once it has settled, outside the engine's step.

        At once, and on this thread, if it has settled and been delivered before. Else on the
        thread that turns the engine: callbacks must not block. One that raises is logged and kept
        in `engine.callback_errors`; it disturbs nothing else. KeyboardInterrupt, SystemExit and the
        like are raised again by the main thread's next wait(), or the one that goes on.
        """
        mine = cast("Callable[[Handle], object]", callback)  # it is called with this handle only
        with self._owner.driver.lock:
            if self._callbacks is None:
                self._callbacks = [mine]
            else:
                self._callbacks.append(mine)
        # The callback is stored before `_delivered` is read, and the worker sets `_delivered`
        # before it reads the callbacks. If both find it, the one that takes it out calls it.
        if self._delivered and self._take_back(mine):
            self._call(mine)

    def remove_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Take a callback back, once, if it has not been called yet."""
        self._take_back(cast("Callable[[Handle], object]", callback))

    def _take_back(self, callback: Callable[[Handle], object]) -> bool:
        with self._owner.driver.lock:
            if self._callbacks is None or callback not in self._callbacks:
                return False
            self._callbacks.remove(callback)
        return True

    def cancel(self) -> None:
        """Ask for an early end, which is confirmed by settling.

        A handle that has settled already does not change.
        """
        if self._state is PENDING:
            self._owner.cancel_handle(self)

    def _settle(self, state: State, error: TepError | None = None) -> None:
        """Worker only: settle, once."""
        assert self._state is PENDING, f"settled twice: {self.describe()}"
        self._state = state  # first, so that describe() below says how it ended
        if state is not _DONE:
            assert state is not PENDING
            self._error = error or Cancelled(f"cancelled: {self.describe()}")

    def _deliver(self) -> None:
        """Driver only, outside the step: run the callbacks."""
        self._delivered = True
        # There never was a callback: without the lock it takes half of the time.
        if self._callbacks is None:
            return
        with self._owner.driver.lock:
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            self._call(callback)

    def _call(self, callback: Callable[[Handle], object]) -> None:
        try:
            callback(self)
        except BaseException as error:  # noqa: BLE001  # a user's error, reported
            self._owner.report_callback_error(self, callback, error)


def _waker(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> Callable[..., None]:
    """A function that wakes a coroutine from any thread."""

    def settle() -> None:
        if not future.done():
            future.set_result(None)

    def wake(_: object = None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(settle)

    return wake


def closed_error() -> ClosedError:
    """The error of a handle that was open when its engine was closed."""
    return ClosedError("the engine was closed before this ended")
