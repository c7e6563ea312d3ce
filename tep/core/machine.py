"""The engine below its verbs: what a driver turns, what handles report to, how it begins and ends.

Nothing here knows of peers or requests, and of regions only that it holds them: see `tep.engine`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self, TypeVar

from tep.api import EngineOptions
from tep.backends.base import Domain
from tep.control.lifecycle import Lifecycle
from tep.control.mailroom import sooner
from tep.core import report
from tep.core.quarantine import doubt_all
from tep.core.transfer import Expectation
from tep.core.worker import Worker
from tep.errors import BusyError, CallbackError, ClosedError, UsageError
from tep.waiting import note_escape, raise_escaped
from tep.wire import NetAddr

if TYPE_CHECKING:
    from tep.core.handle import Handle
    from tep.core.region import MrHandle
    from tep.drivers import Driver

__all__ = ["EngineMachine"]

T = TypeVar("T")

_log = logging.getLogger("tep")


class EngineMachine:
    """A worker with a driver, a name and an end.

    Attributes:
        name: the engine's identity: a restarted engine of the same name and a later epoch replaces
            the former.
        driver: what turns it.
        wait_timeout_s: what wait() uses when no timeout is given.
        callback_errors: the last 100 exceptions that users' callbacks raised.
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        *,
        driver: Driver,
        name: str,
        epoch: int,
        options: EngineOptions = EngineOptions(),
    ) -> None:
        if not domains:
            raise UsageError("an engine needs one NIC at the least")
        self._domains = tuple(domains)
        self.driver = driver
        self.name = name
        self.wait_timeout_s = options.wait_timeout_s
        self.callback_errors: deque[CallbackError] = deque(maxlen=100)
        self._errors = 0
        self._regions: dict[int, MrHandle] = {}
        self._kept: dict[MrHandle, None] = {}  # given back, but a NIC that is down may touch them
        self._address = NetAddr(
            domains[0].caps.backend,
            name,
            epoch,
            tuple(domain.address for domain in domains),
            tuple(domain.caps.link_bps for domain in domains),
        )
        self._backlog_max = options.backlog_rows_max
        self._rows_asked = 0  # of all submits; what the worker has taken of them is worker.taken
        self._closed = self._crashed = self._ended = False
        self._stopped_by: BaseException | None = None
        # With the epoch, since a restarted engine counts its notes from the beginning.
        self._worker = Worker(self._domains, options, driver.now_s, f"{name} (epoch {epoch})"[:200])
        self._worker.report = self._report_error
        self._life = Lifecycle(self._worker, options, driver.now_s)
        for domain in domains:
            domain.set_waker(driver.kick)

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """End everything: every open handle settles, NICs and memory are let go. Idempotent."""
        self._closed = True
        try:
            if not (self._ended or self._crashed):
                self.driver.call(self._end)
        finally:  # also where that is interrupted: then another close() ends what is left
            if self._ended or self._crashed:
                self.driver.close()
        self._let_go()
        raise_escaped()

    def __del__(self) -> None:
        """Nobody holds the engine any more; its worker ends it."""
        if getattr(self, "_closed", True) or sys.is_finalizing():
            return
        drop = getattr(self.driver, "drop", None)
        if drop is not None:
            self._closed = True
            drop(self._end)
            warnings.warn(
                f"engine {self.name!r} was not closed: call close(), or use it by `with`",
                ResourceWarning,
                stacklevel=1,
            )

    def _let_go(self) -> None:
        """Drop what was held for the NICs' sake: they are closed."""
        self._regions.clear()
        self._kept.clear()

    def _end(self) -> None:
        try:
            self._worker.deliver()  # what arrived before is handed over
            self._life.close()
            self._worker.close()
            self._worker.deliver()
            self._life.deliver()
        finally:
            self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address}{', closed' if self._closed else ''})"

    def stall_report(self) -> str:
        """Say what all that is open waits for: which peer, NIC, counter, how many, since when."""
        return report.stall_report(self)

    # ------------------------------------------------------------------ for drivers and handles

    def step(self) -> bool:
        """Driver: turn once."""
        if self._closed:
            return False
        work = self._worker.step()
        return (self._life.busy and self._life.step()) or work

    def deliver(self) -> None:
        """Driver: run callbacks."""
        if not self._closed:
            if self._life.events:  # first: an event comes before what follows from it
                self._life.deliver()
            self._worker.deliver()

    def owing(self) -> bool:
        """Driver: whether deliver() would run a user's function now."""
        return not self._closed and (self._worker.owing() or bool(self._life.events))

    def busy(self) -> bool:
        """Driver: whether NICs hold rows of ours, or rows wait for them."""
        return self._worker.busy()

    def due_s(self) -> float | None:
        """Driver: when to turn at the latest, on its own clock; None: when there is news."""
        worker, life = self._worker, self._life
        if not (life.busy or worker.mail.busy or worker.leases.granted):
            return None
        return sooner(worker.due_s(), life.due_s())

    def watching(self) -> bool:
        """Driver: whether words are watched."""
        return len(self._worker.watch) > 0

    def crash(self, error: BaseException) -> None:
        """Driver: a step raised; nothing will be turned any more. Idempotent."""
        if self._crashed:
            return
        self._closed = self._crashed = True
        _log.critical("%s: stopped by a bug", self.name, exc_info=error)
        doubt_all(self._worker.group)
        stopped = ClosedError(
            f"engine {self.name!r} was stopped by a bug in tep or in its backend: "
            f"{type(error).__name__}: {error}; what NICs hold is unknown, keep memory mapped"
        )
        stopped.__cause__ = self._stopped_by = error
        self._worker.abandon(stopped)

    def must_poll(self) -> bool:
        """Driver: whether a NIC gives no sign of news."""
        return not all(domain.caps.wakes for domain in self._domains)

    def wakeup_fds(self) -> list[int]:
        """Driver: what to sleep on."""
        return [fd for domain in self._domains if (fd := domain.wakeup_fd()) is not None]

    def arm(self) -> bool:
        """Driver: ask for wake-ups; False if there is news already."""
        quiet = True
        for domain in self._domains:  # every one, also after a False
            quiet = domain.arm() and quiet
        return quiet

    def cancel_handle(self, handle: Handle) -> None:
        """Handle: queue a cancel."""
        try:
            self._worker.commands.append((self._worker.cancel, handle))
        finally:
            self.driver.kick()

    def report_callback_error(self, handle: Handle, callback: object, error: BaseException) -> None:
        """Handle: a callback raised."""
        self._report_error(callback, error, f" of {handle.describe()}")

    # ------------------------------------------------------------------ inside

    def _report_error(self, callback: object, error: BaseException, what: str = "") -> None:
        name = getattr(callback, "__qualname__", repr(callback))
        found = CallbackError(f"callback {name}{what} raised {type(error).__name__}: {error}")
        found.__cause__ = error
        self._errors += 1
        self.callback_errors.append(found)
        _log.error("%s: %s", self.name, found, exc_info=error)
        note_escape(error)

    def _check_open(self, what: str) -> None:
        if self._closed:
            cause = self._stopped_by
            why = "" if cause is None else f", stopped by {type(cause).__name__}: {cause}"
            raise ClosedError(f"{what}: engine {self.name!r} is closed{why}") from cause

    def _check_notes(self, what: str, instead: str) -> None:
        if not self._worker.mail.able:
            raise UsageError(
                f"{what}: the backend {self._address.backend!r} has no notes between engines; "
                f"{instead}, or take a backend with notes, like loopback or sim"
            )

    def _reserve(self, kind: str, rows: int) -> None:
        """Count rows in, unless too many wait already, with those whose command is not taken."""
        worker = self._worker
        with self.driver.lock:
            others = worker.group.backlog + worker.outbox.waiting
            waiting = self._rows_asked - worker.taken + others
            if waiting + rows > self._backlog_max:
                # Counted anew: a submit that a signal handler interrupted counted rows in vain.
                asked = [handle for _, handle in tuple(worker.commands)]
                rows_asked = sum(getattr(handle, "rows", 1) for handle in asked if handle.counted)
                self._rows_asked = worker.taken + rows_asked
                waiting = rows_asked + others
            if waiting + rows <= self._backlog_max:
                self._rows_asked += rows
                return
        raise BusyError(
            f"{kind}: {waiting} rows wait for NICs already, {rows} more pass the limit of "
            f"{self._backlog_max} (EngineOptions.backlog_rows_max); wait for some transfers"
        )

    def _enqueue(
        self, command: Callable[..., None], handle: Handle, on_done: Callable[..., object] | None
    ) -> None:
        if on_done is not None:
            handle.add_done_callback(on_done)
        driver = self.driver
        try:
            self._worker.commands.append((command, handle))
            # Looked at once it is queued: whoever counts its immediates after this look had work,
            # so turns again, and takes commands first.
            if isinstance(handle, Expectation) and self._worker.is_early(handle):
                driver.nudge()
            else:
                driver.kick()
        except BaseException:  # a signal handler's, on the way
            driver.kick()
            raise
        if self._closed:  # while we were on the way: nobody else would end this handle
            driver.call(self._end)

    def _after_commands(self, function: Callable[[], T]) -> T:
        """Run a function between two steps, after all that was submitted before it."""

        def run() -> T:
            self._worker.take_all_commands()
            return function()

        try:
            return self.driver.call(run)
        finally:
            self.driver.kick()  # the commands may have settled something
