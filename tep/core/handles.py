"""Handles: what a submit or an expectation returns. One finishes once: ok, cancelled or failed.

State, callbacks and counts only. A handle never turns an engine: the driver waits, the worker
settles and updates the counts, which users read through `stats()` and `describe()`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, Self, cast

from tep.base.checks import check_seconds, unpicklable
from tep.base.errors import Cancelled, ClosedError, TepError, WaitTimeout
from tep.base.waiting import escaped, raise_escaped, wake_main
from tep.core.imm import ImmTable
from tep.core.path import Link
from tep.core.regions import Job, Remote, Targets
from tep.core.stats import NicBytes, TransferStats

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "PENDING", "Expectation", "Handle", "Message", "Owner", "Pace", "Removal", "State",
    "Transfer", "Waits", "closed_error", "names_of",
]  # fmt: skip


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
    """The driver's part that handles need; see `tep.drivers.threads.Driver`."""

    lock: AbstractContextManager[object]

    def wait(self, handle: Handle, timeout_s: float, /) -> bool: ...

    def check_await(self, loop: asyncio.AbstractEventLoop, /) -> None: ...

    def now_s(self) -> float: ...


class Owner(Protocol):
    """The engine's part that handles need; see `tep.engine.machine.Machine`."""

    @property
    def driver(self) -> Waits: ...

    @property
    def wait_timeout_s(self) -> float: ...

    @property
    def domains(self) -> tuple[object, ...]: ...

    def cancel_handle(self, handle: Handle) -> None: ...

    def stall_report(self) -> str: ...

    def report_callback_error(
        self, handle: Handle, callback: object, error: BaseException
    ) -> None: ...


class Handle:
    """Something that will settle. Users may call it from any thread; only the worker settles it.

    Attributes:
        submitted_s: when it was submitted, seconds of the driver's clock.
        counted: whether statistics count it as a transfer or message.
        rows: those that it brings to the NICs, `reserved` of them counted by `Machine.reserve`.
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
        """The error, if it failed or was cancelled."""
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
        return WaitTimeout(f"{self.describe()} after {timeout_s} s\n{self._owner.stall_report()}")

    async def wait_async(self, timeout_s: float | None = None) -> Self:
        """`wait()` for coroutines: the same timeout, errors and report, and no thread is blocked.

        `await handle` alone has no timeout of its own, as is usual in asyncio.
        """
        if timeout_s is None:
            timeout_s = self._owner.wait_timeout_s
        timeout_s = check_seconds("wait_async: timeout_s", timeout_s, -math.inf, math.inf)
        import asyncio

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
        import asyncio  # not above: programs that never await start 20 ms sooner without it

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
        """Take a callback back if it has not been called yet."""
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
        """Settle; for the worker."""
        assert self._state is PENDING, f"settled twice: {self.describe()}"
        if state is not _DONE:  # the error first: a waiter that sees the state must find it
            assert state is not PENDING
            self._error = error or Cancelled("cancelled")
        self._state = state
        if state is _CANCELLED and error is None:  # describe() says how it ended
            self._error = Cancelled(f"cancelled: {self.describe()}")

    def _deliver(self) -> None:
        """Run the callbacks, outside the step."""
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


_NAMES_MAX: Final = 4  # peers that a report names


_PIECES: Final = 12
"""A NIC that is slow, or not known yet, gets pieces of one part in so many of its share of what is
left: a link at an eighth of its speed ends two of them before the others end the rest.
"""

_AHEAD: Final = 2
"""Pieces that a NIC has: it sends one while the completion of the other is on its way."""


_TOOK_MAX: Final = 24
"""With so many entries of what NICs took, those of one NIC become one."""


class Queued(Protocol):
    """A batch of a transfer that was queued; see `tep.core.posting.Pending`."""

    at: int
    stop: int
    older: Queued | None


class Pace:
    """The progress of each NIC in one long transfer.

    Each NIC has `out` pieces, has returned `through` rows of others, and `last` is the last that
    was cut for it. Its next piece is one part in `part` of its share of what is left.
    """

    __slots__ = ("last", "out", "part", "through")

    def __init__(self, nics: int) -> None:
        self.out = [0] * nics
        self.through = [0] * nics
        self.part = [_PIECES] * nics
        self.last: list[Queued | None] = [None] * nics

    def end(self, nic: int, rows: int) -> None:
        """A NIC has returned a piece; `rows` of it had been posted."""
        self.out[nic] -= 1
        self.through[nic] += rows
        keeps_up = 4 * self.through[nic] >= 3 * max(self.through)
        self.part[nic] = max(2, self.part[nic] // 3) if keeps_up else _PIECES

    def is_full(self, nic: int) -> bool:
        """Whether a NIC has enough pieces: one that fell behind gets one at a time."""
        slow = self.part[nic] == _PIECES and self.through[nic] > 0
        return self.out[nic] >= (1 if slow else _AHEAD)


class Transfer(Handle):
    """One submitted request.

    `ok` means only that the source buffer may be reused; of a read, that all bytes are here.

    Attributes:
        rows: how many writes it makes; with an immediate, also how many immediates, over all
            targets. A read: its rows, and one more for each owner if an immediate follows.
        left: rows that have not come back from a NIC, posted or not.
        failure: the first error; the transfer fails with it when nothing is posted any more.
        dropped: queued rows that were removed by a cancel or a failure.
        held: rows whose NIC or peer's NIC died, until it is known whether they landed.
        extra: rows that were added to retransmit such rows.
        pace: set if it is posted in pieces.
        queued: the batch that was queued last, which names the one before it, and so on; all its
            queued rows are in these batches. None: no row is queued.
        took: (NIC, rows, bytes) of what NICs have taken; of one NIC perhaps in several entries.
    """

    __slots__ = (
        "dropped", "extra", "failed_rows", "failure", "held", "job", "left", "pace", "queued",
        "reserved", "rows", "settled_s", "took",
    )  # fmt: skip

    def __init__(
        self, owner: Owner, job: Job, rows: int, submitted_s: float, reserved: int
    ) -> None:
        # What Handle.__init__ does, without the call.
        self._owner = owner
        self.submitted_s = submitted_s
        self._state = PENDING
        self._error = None
        self._callbacks = None
        self._delivered = False
        self.reserved = reserved
        self.job = job
        self.rows = self.left = rows
        self.failed_rows = 0
        self.failure: TepError | None = None
        self.dropped = self.held = self.extra = 0
        self.pace: Pace | None = None
        self.queued: Queued | None = None
        self.took: tuple[tuple[int, int, int], ...] = ()  # a list for each NIC takes 0.15 us
        self.settled_s: float | None = None

    def batches(self) -> Iterator[Queued]:
        """Yield the batches that were queued, the last one first."""
        batch = self.queued
        while batch is not None:
            yield batch
            batch = batch.older

    def is_ending(self) -> bool:
        """Whether it will fail or be cancelled, so that no more of it is posted."""
        return self.failure is not None or self.dropped > 0

    def count_posted(self, nic: int, rows: int, nbytes: int) -> None:
        """A NIC has taken rows."""
        if len(self.took) >= _TOOK_MAX:
            self.took = tuple((k, *sums) for k, sums in enumerate(self._taken()) if sums.rows)
        self.took += ((nic, rows, nbytes),)

    def _taken(self) -> list[NicBytes]:
        nics = [NicBytes(0, 0) for _ in self._owner.domains]
        for nic, rows, nbytes in self.took:
            nics[nic] = NicBytes(nics[nic].rows + rows, nics[nic].nbytes + nbytes)
        return nics

    def stats(self) -> TransferStats:
        """Return its counts so far; see TransferStats."""
        nics = self._taken()
        posted = sum(nic.rows for nic in nics)
        end_s = self._owner.driver.now_s() if self.settled_s is None else self.settled_s
        return TransferStats(
            kind=self.job.kind,
            state=self._state.value,
            rows=self.rows,
            nbytes=self.job.total,
            rows_posted=posted,
            rows_back=self.rows + self.extra - self.left - self.dropped,
            rows_failed=self.failed_rows,
            rows_dropped=self.dropped,
            rows_again=self.extra,
            nics=tuple(nics),
            elapsed_s=end_s - self.submitted_s,
        )

    def describe(self) -> str:
        """Return one line for reports."""
        stats = self.stats()
        peers = names_of(self.job.remotes)
        return (
            f"{stats.kind} of {stats.rows} rows, {stats.nbytes} bytes "
            f"{'from' if self.job.is_read else 'to'} {peers}: {stats.state}; "
            f"{stats.rows_posted} posted, {stats.rows_back} back, {stats.rows_failed} failed, "
            f"{stats.rows_dropped} dropped"
            + (
                f"; a NIC lost {self.held} rows, and the peer is asked whether they landed"
                if self.held
                else ""
            )
        )


def names_of(remotes: Remote | Targets) -> str:
    """The names of the first peers, for reports."""
    listed = remotes.remotes if isinstance(remotes, Targets) else [remotes]
    names = [remote.desc.addr.name for remote in listed]
    more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
    return ", ".join(names[:_NAMES_MAX]) + more


class Message(Handle):
    """One message of submit_send. `ok` means that the peer's engine has it.

    Attributes:
        posted: whether a NIC has it; then `nic` is the peer's NIC, and `over` is ours.
    """

    rows = 1
    __slots__ = ("link", "nic", "over", "payload", "posted", "reserved")

    def __init__(
        self, owner: Owner, payload: bytes, link: Link, submitted_s: float, reserved: int
    ) -> None:
        super().__init__(owner, submitted_s)
        self.reserved = reserved
        self.payload = payload
        self.link = link
        self.posted = False
        self.nic = self.over = 0

    def describe(self) -> str:
        """Return one line for reports."""
        where = "posted" if self.posted else "waiting for the NIC"
        what = f"message of {len(self.payload)} bytes to {self.link.addr.name}"
        return f"{what}: {self._state.value}, {where}"


class Removal(Handle):
    """The removal of a peer. `ok` means that nothing refers to it any more.

    Attributes:
        why: why it is removed, if no user asked for that.
        waits: handles that may still refer to it; some of them may have settled.
        fencing: how many paths from it are being fenced off; -1: handles may still refer to it.
        unfenced: once it has settled: why what the peer has sent may still land here; "" = nothing
            of it lands any more.
    """

    counted = False
    __slots__ = ("fencing", "link", "unfenced", "waits", "why")

    def __init__(self, owner: Owner, link: Link, submitted_s: float, why: str = "") -> None:
        super().__init__(owner, submitted_s)
        self.link = link
        self.why = why
        self.waits: list[Handle] = []
        self.fencing = -1
        self.unfenced = ""

    def describe(self) -> str:
        """Return one line for reports."""
        left = sum(not handle.finished for handle in self.waits)
        what = f"removal of {self.link.addr.name} (epoch {self.link.addr.epoch})"
        why = f"; it may still write here: {self.unfenced}" if self.unfenced else ""
        return f"{what}: {self._state.value}, {left} transfers to it have not ended{why}"


class Expectation(Handle):
    """Waits for a count of one immediate.

    Attributes:
        imm: the immediate.
        count: how many arrivals make it ok.
        sender: the peer that sends them, if it was named.
    """

    counted = False
    __slots__ = ("_came", "_table", "count", "imm", "sender")

    def __init__(
        self,
        owner: Owner,
        table: ImmTable[Expectation],
        imm: int,
        count: int,
        sender: Link | None,
        submitted_s: float,
    ) -> None:
        Handle.__init__(self, owner, submitted_s)  # super() takes 0.1 us
        self._table = table
        self.imm = imm
        self.count = count
        self.sender = sender

    @property
    def arrived(self) -> int:
        """The number of arrivals; `count` once it is ok; if it failed, those until then."""
        if self.ok:
            return self.count
        came: int | None = getattr(self, "_came", None)  # it is set by fix_arrived() only
        return min(self.count, self._table.counts.get(self.imm, 0)) if came is None else came

    def is_early(self) -> bool:
        """Whether its command would change nothing now; may be called from any thread."""
        table = self._table
        early = table.counts.get(self.imm) < self.count
        return early and self.sender is None and not table.burnt.why

    def fix_arrived(self, came: int) -> None:
        """Keep `arrived` as it is: the expectation fails, and its count is dropped."""
        self._came = min(came, self.count)

    def describe(self) -> str:
        """Return one line for reports."""
        return f"imm {self.imm:#x}: {self.arrived} of {self.count} arrived; {self._state.value}"
