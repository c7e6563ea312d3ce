"""The machine that a driver turns: worker, states of peers, regions; and how an engine ends.

It has the methods that drivers, handles and regions call. The users' verbs are in `verbs`.
Rule: nothing here checks arguments, and only the way it ends is private.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from tep.backends.base import Domain
from tep.base.api import EngineOptions
from tep.base.errors import BadRequest, BusyError, CallbackError, ClosedError, UsageError
from tep.base.waiting import note_escape, raise_escaped
from tep.base.wire import NetAddr
from tep.core.handles import Expectation, Handle, Removal, Transfer
from tep.core.path import Link
from tep.core.regions import Job, MrHandle, Quarantine
from tep.core.requests import longest_row, refuse_burnt
from tep.drivers.threads import Driver
from tep.engine import report
from tep.engine.worker import Worker

__all__ = ["Machine"]

_GIVEN_UP: Final = "a read into it was given up, and may still be carried out"

_HEAP_KEEPS: Final = 8 << 20
"""Bytes that the C library's heap keeps for later when they are freed.

From the first block of this size on that was freed, glibc neither maps blocks below it one by one
nor gives the end of its heap back at once. Without that the columns of a list of 16,384 pages may
be unmapped after each transfer and mapped anew for the next one: 112 page faults, which took half
of the time of a transfer (measured). Where the C library is another one, nothing happens.
"""

T = TypeVar("T")

_log = logging.getLogger("tep")


class Machine:
    """One engine without its verbs.

    Attributes:
        name: the engine's identity: a restarted engine has the same name and a later epoch, and
            replaces the former one.
        address: the address by which peers reach it.
        driver: what turns it.
        domains: its NICs.
        worker: posts, polls and counts.
        step, deliver, busy, engaged, owing, due_s: the worker's, for the driver; see Worker.
        tracer: who records it; None: nobody.
        peers: the peers and their regions.
        regions: registered memory, by number.
        kept: regions that were deregistered, but that a NIC may still touch.
        prepared: what was prepared here and is still held.
        about: why these NICs and CPUs were chosen; "" = the user named them, or had no choice.
        wait_timeout_s: what wait() uses when no timeout is given.
        callback_errors: the last 100 exceptions that users' callbacks raised.
        errors: how many there were.
        closed: it refuses new requests. crashed: a bug stopped it. ended: nothing is open.
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        driver: Driver,
        name: str,
        epoch: int,
        options: EngineOptions,
    ) -> None:
        if not domains:
            raise UsageError("an engine needs one NIC at the least")
        np.empty(_HEAP_KEEPS, np.uint8)  # freed at once; no byte of it is touched
        self.domains = tuple(domains)
        self.driver = driver
        self.name = name
        self.wait_timeout_s = options.wait_timeout_s
        self.switch_interval_s = options.switch_interval_s
        self.callback_errors: deque[CallbackError] = deque(maxlen=100)
        self.errors = 0
        self.regions: dict[int, MrHandle] = {}
        self.kept: dict[MrHandle, None] = {}
        self.address = NetAddr(
            domains[0].caps.backend,
            name,
            epoch,
            tuple(domain.address for domain in domains),
            tuple(domain.caps.link_bps for domain in domains),
        )
        self.about = ""
        self.prepared: weakref.WeakSet[report.Describes] = weakref.WeakSet()
        self.closed = self.crashed = self.ended = False
        self._backlog_max = options.backlog_rows_max
        self._rows_asked = 0  # of all submits; worker.taken counts those that the worker has taken
        self._stopped_by: BaseException | None = None
        self.region_numbers = itertools.count(1)
        self.worker = Worker(
            self.address, self.domains, options, driver, self._replaced, self._report_error
        )
        self._start, self._burnt = self.worker.start, self.worker.notices.burnt
        # Without a call between: drivers call these for each turn.
        self.step, self.deliver = self.worker.step, self.worker.deliver
        self.busy, self.owing, self.due_s = self.worker.busy, self.worker.owing, self.worker.due_s
        self.engaged = self.worker.engaged
        self.tracer: object | None = None
        self._row_bytes_max = min(domain.caps.max_write_bytes for domain in domains)
        self.peers = self.worker.peers
        for domain in domains:
            domain.set_waker(driver.kick)

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """Settle every open handle, close the NICs, and release the memory. Idempotent."""
        self.closed = True
        try:
            if not (self.ended or self.crashed):
                self.driver.call(self.end)
        finally:  # also if that was interrupted: then another close() ends the rest
            if self.ended or self.crashed:
                self.driver.close()
        self.regions.clear()  # the NICs, for which the memory was kept, are closed now
        self.kept.clear()
        raise_escaped()

    def __del__(self) -> None:
        """There is no reference to the engine any more: have its worker end it."""
        if getattr(self, "closed", True) or sys.is_finalizing():
            return
        drop = getattr(self.driver, "drop", None)
        if drop is not None:
            self.closed = True
            drop(self.end)
            warnings.warn(
                f"engine {self.name!r} was not closed: call close(), or use it by `with`",
                ResourceWarning,
                stacklevel=1,
            )

    def end(self) -> None:
        """Between two steps: settle everything, and close the NICs."""
        try:
            self.deliver()  # what arrived before this
            self.worker.close()
            self.deliver()
        finally:
            self.ended = True

    # ------------------------------------------------------------------ for drivers and handles

    def observe(self, observer: Callable[[list[Handle]], object]) -> None:
        """Call observer(handles) with all that has settled, before their callbacks, from now on."""
        self.driver.call(lambda: self.worker.observers.append(observer))

    def unobserve(self, observer: Callable[[list[Handle]], object]) -> None:
        """End observe()."""
        self.driver.call(lambda: self.worker.observers.remove(observer))

    def watching(self) -> bool:
        """Driver: whether there are watched words."""
        return len(self.worker.watch) > 0

    def crash(self, error: BaseException) -> None:
        """Driver: a step raised, and the engine is not turned any more. Idempotent."""
        if self.crashed:
            return
        self.closed = self.crashed = True
        _log.critical("%s: stopped by a bug", self.name, exc_info=error)
        stopped = ClosedError(
            f"engine {self.name!r} was stopped by a bug in tep or in its backend: "
            f"{type(error).__name__}: {error}; what NICs hold is unknown, keep memory mapped"
        )
        stopped.__cause__ = self._stopped_by = error
        self.worker.abandon(stopped)

    def must_poll(self) -> bool:
        """Driver: whether there is a NIC that does not signal news, and must be polled."""
        return not all(domain.caps.wakes for domain in self.domains)

    def wakeup_fds(self) -> list[int]:
        """Driver: the descriptors to sleep on."""
        return [fd for domain in self.domains if (fd := domain.wakeup_fd()) is not None]

    def arm(self) -> bool:
        """Driver: ask the NICs for wake-ups; False: there is news already."""
        quiet = True
        for domain in self.domains:  # every one, also after a False
            quiet = domain.arm() and quiet
        return quiet

    def cancel_handle(self, handle: Handle) -> None:
        """Handle: queue a cancel."""
        try:
            self.worker.commands.append((self.worker.cancel, handle))
        finally:
            self.driver.kick()

    def report_callback_error(self, handle: Handle, callback: object, error: BaseException) -> None:
        """Handle: a callback raised."""
        self._report_error(callback, error, f" of {handle.describe()}")

    def _report_error(self, callback: object, error: BaseException, what: str = "") -> None:
        name = getattr(callback, "__qualname__", repr(callback))
        found = CallbackError(f"callback {name}{what} raised {type(error).__name__}: {error}")
        found.__cause__ = error
        self.errors += 1
        self.callback_errors.append(found)
        _log.error("%s: %s", self.name, found, exc_info=error)
        note_escape(error)

    def stall_report(self) -> str:
        """Say what each open handle waits for: which peer, NIC, counter, how many, since when."""
        return report.stall_report(self)

    def snapshot(self) -> dict[str, object]:
        """Describe it for `tep top`; any thread may call this."""
        return report.snapshot(self)

    # ------------------------------------------------------------------ for regions and peers

    def quarantines(self, mr: MrHandle) -> tuple[Quarantine, ...]:
        """The bytes of a region that a NIC may touch although nothing is open."""
        whole = mr.memory.nbytes
        if self.crashed:
            why = "the engine's worker was stopped by a bug, and what NICs hold is unknown"
            return (Quarantine(0, whole, why),)
        if self.closed or (mr.closed and mr not in self.kept):
            return ()
        return tuple(Quarantine(0, whole, why) for why in self._touched_by(mr))

    def _touched_by(self, mr: MrHandle) -> list[str]:
        """Why a NIC may still write to a region, or read from it; [] = none can."""
        why = [
            f"NIC {k} ({self.domains[k].caps.nic}) is down, cannot be asked"
            for k, up in enumerate(self.worker.group.alive)
            if not up and (mr.access.target or k in mr.readers)
        ]
        return [*why, _GIVEN_UP] if mr.given_up else why

    def keep_or_free(self, mr: MrHandle) -> bool:
        """A region is about to be deregistered: keep its memory if a NIC may still touch it.

        Returns:
            Whether its keys are to be given back to the NICs. They are not where late rows may
            still use them: a NIC may give the same numbers to the next region.

        Raises:
            BusyError: the engine does not own the memory and cannot keep it.
        """
        why = self._touched_by(mr)
        if why and mr.memory.owner is None:
            raise BusyError(
                f"deregister: {why[0]}: region {mr.desc.region} may still be touched, and the "
                "engine cannot hold its memory for you: keep it mapped, and close() the engine"
            )
        if why:
            self.kept[mr] = None
        return not mr.given_up

    def _replaced(self, link: Link) -> None:
        """A later incarnation of a peer is known: remove the former one."""
        why = "a later incarnation of it is known"
        removal = Removal(self, link, self.driver.now_s(), why)
        self.worker.commands.append((self.worker.members.leave, removal))
        self.driver.kick()  # the verb that found it may raise, and then nobody else kicks

    # ------------------------------------------------------------------ for the verbs

    def check_open(self, what: str) -> None:
        """Raise ClosedError if the engine is closed; `what` is the verb."""
        if self.closed:
            cause = self._stopped_by
            why = "" if cause is None else f", stopped by {type(cause).__name__}: {cause}"
            raise ClosedError(f"{what}: engine {self.name!r} is closed{why}") from cause

    def reserve(self, kind: str, rows: int, reads: int = 0) -> int:
        """Reserve room for rows in the backlog, which includes commands that are not taken yet.

        Returns how many rows it has counted for the handle: none if no command is waiting, as is
        usual where the caller turns the engine, for then the backlog tells. So the first command
        that waits may not be counted; all behind it are.
        `reads` are rows that wait besides; only submits of reads count them.
        """
        worker = self.worker
        others = worker.group.backlog + worker.outbox.waiting + reads
        if not worker.commands and others + rows <= self._backlog_max:
            return 0
        with self.driver.lock:
            others = worker.group.backlog + worker.outbox.waiting + reads
            waiting = self._rows_asked - worker.taken + others
            waiting += _uncounted(worker)
            if waiting + rows > self._backlog_max:
                # Count again: a submit that a signal handler interrupted counted for nothing.
                asked = worker.not_taken()
                self._rows_asked = worker.taken + sum(handle.reserved for handle in asked)
                waiting = sum(handle.rows for handle in asked) + others
            if waiting + rows <= self._backlog_max:
                self._rows_asked += rows
                return rows
        raise BusyError(
            f"{kind}: {waiting} rows wait for NICs already, {rows} more pass the limit of "
            f"{self._backlog_max} (EngineOptions.backlog_rows_max); wait for some transfers"
        )

    def submit(self, job: Job, on_done: Callable[[Transfer], object] | None) -> Transfer:
        """Queue a write or read; what enqueue() and reserve() do, in one call."""
        if self.closed:
            self.check_open(f"submit ({job.kind})")
        worker, driver, rows = self.worker, self.driver, job.n
        if self._burnt.why:
            refuse_burnt(job, self._burnt)
        commands, group = worker.commands, worker.group
        start: Callable[[Transfer], None] = self._start
        reserved = reads = 0
        if not job.is_plain:
            start = worker.start_read if job.is_read else worker.start_ready
            reads = group.queued_reads if job.is_read else 0
        if job.longest > self._row_bytes_max:
            self.check_longest(job)
        if commands or group.backlog + worker.outbox.waiting + reads + rows > self._backlog_max:
            reserved = self.reserve(job.kind, rows, reads)
        transfer = Transfer(self, job, rows, driver.now_s(), reserved)
        if on_done is not None:
            transfer.add_done_callback(on_done)
        try:
            commands.append((start, transfer))
            driver.kick()
        except BaseException:  # raised by a signal handler
            driver.kick()
            raise
        if self.closed:  # meanwhile: nobody else would end this handle
            driver.call(self.end)
        return transfer

    def check_longest(self, job: Job) -> None:
        """Raise BadRequest if a row of a job is longer than a NIC takes."""
        limit = self._row_bytes_max
        if job.longest > limit and (longest := longest_row(job, len(self.domains))) > limit:
            raise BadRequest(
                f"{job.kind}: rows of {longest} bytes, but a NIC here takes {limit} at the most"
            )

    def enqueue(
        self, command: Callable[..., None], handle: Handle, on_done: Callable[..., object] | None
    ) -> None:
        """Queue a command for a handle; a step takes it."""
        if on_done is not None:
            handle.add_done_callback(on_done)
        driver = self.driver
        try:
            self.worker.commands.append((command, handle))
            # This check must come after the command is queued. A worker that counts its immediates
            # after this check had work, so it turns again, and takes commands first.
            if type(handle) is Expectation and handle.is_early():
                driver.nudge()
            else:
                driver.kick()
        except BaseException:  # raised by a signal handler
            driver.kick()
            raise
        if self.closed:  # meanwhile: nobody else would end this handle
            driver.call(self.end)

    def after_commands(self, function: Callable[[], T]) -> T:
        """Run a function between two steps, after all that was submitted before it."""

        def both() -> T:
            self.worker.take_all_commands()
            return function()

        return self.run(both)

    def run(self, function: Callable[[], T]) -> T:
        """Run a function between two steps; a later step looks at what it changed."""
        try:
            return self.driver.call(function)
        finally:
            self.driver.kick()


def _uncounted(worker: Worker) -> int:
    """Rows of the first command that waits, if reserve() has not counted them."""
    try:
        _, first = worker.commands[0]
    except IndexError:  # the worker has taken it just now
        return 0
    taken = first in worker.open or first.finished  # and is to be cancelled
    return 0 if taken else first.rows - first.reserved
