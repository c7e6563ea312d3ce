"""The machine that a driver turns: worker, states of peers, regions; how an engine ends, and
its reports: statistics, the paths to a peer, and what each open handle waits for.

It has the methods that drivers, handles and regions call. The users' verbs are in `verbs`.
Rule: nothing here checks arguments. Reports only read, and work while the engine runs.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from operator import add
from typing import Final, Protocol, TypeVar, runtime_checkable

import numpy as np

from tep.backends.base import Domain
from tep.base.api import EngineOptions
from tep.base.errors import BadRequest, BusyError, CallbackError, ClosedError, UsageError
from tep.base.units import MiB
from tep.base.waiting import note_escape, raise_escaped
from tep.base.wire import NetAddr
from tep.core.handles import Expectation, Handle, Removal, State, Transfer
from tep.core.path import Link
from tep.core.plan import lanes, plan_paged, plan_single
from tep.core.regions import Job, MrHandle, Quarantine
from tep.core.requests import longest_row, refuse_burnt
from tep.core.stats import EngineStats, Failover, NicBytes
from tep.drivers.threads import Driver
from tep.engine.worker import Worker

__all__ = ["Describes", "Machine", "engine_stats", "explain"]

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


@runtime_checkable
class Describes(Protocol):
    """The protocol of things that describe themselves in one line."""

    def describe(self) -> str: ...


class Machine:
    """One engine without its verbs.

    Attributes:
        address: the address by which peers reach it.
        step, deliver, busy, engaged, owing, due_s: the worker's, for the driver.
        tracer: who records it; None: nobody.
        regions: registered memory, by number.
        kept: regions that were deregistered, but that a NIC may still touch.
        about: why these NICs and CPUs were chosen; "" = the user named them, or had no choice.
        errors: how many callbacks raised.
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
        return len(self.worker.watch) > 0

    def crash(self, error: BaseException) -> None:
        """Fail all that is open, because a step raised; the engine is not turned any more."""
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
        return not all(domain.caps.wakes for domain in self.domains)

    def wakeup_fds(self) -> list[int]:
        return [fd for domain in self.domains if (fd := domain.wakeup_fd()) is not None]

    def arm(self) -> bool:
        quiet = True
        for domain in self.domains:  # every one, also after a False
            quiet = domain.arm() and quiet
        return quiet

    def cancel_handle(self, handle: Handle) -> None:
        """Queue a cancel."""
        try:
            self.worker.commands.append((self.worker.cancel, handle))
        finally:
            self.driver.kick()

    def report_callback_error(self, handle: Handle, callback: object, error: BaseException) -> None:
        """Record a user's callback that raised."""
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
        """List every open handle, oldest first, what it waits for and since when.

        Then each NIC, and the immediates that have arrived and that nobody waits for.
        """
        worker = self.worker
        group = worker.group
        waiting = worker.unsettled()
        now_s = self.driver.now_s()
        untaken = len(worker.commands)
        lines = [f"engine {self.name}: {len(waiting)} open, {untaken} commands not taken yet"]
        lines += [
            f"  {handle.describe()}; for {now_s - handle.submitted_s:.6f} s"
            for handle in waiting[:_LISTED_MAX]
        ]
        if len(waiting) > _LISTED_MAX:
            lines.append(f"  ... and {len(waiting) - _LISTED_MAX} more")
        for k, domain in enumerate(group.domains):
            state = "alive" if group.alive[k] else "DOWN"
            rows, reads = group.outstanding[k], worker.reads.outstanding[k]
            more = f", {reads} reads" if reads else ""
            lines.append(f"  NIC {k} ({domain.caps.nic}, {state}): {rows} rows outstanding{more}")
        lines += [f"  {n} control messages dropped: {d}" for d, n in _drops(worker)]
        queued = group.backlog + group.queued_reads
        lines.append(f"  {queued} rows wait for a NIC; {worker.imms.total} immediates counted")
        lines += [f"  {line}" for line in worker.notices.describe()[:_LISTED_MAX]]
        extra = [f"{imm:#x} x {n}" for imm, n in list(worker.imms.counts.items())[:_LISTED_MAX]]
        if extra:
            lines.append(f"  immediates here that no expectation has used: {', '.join(extra)}")
        return "\n".join([*lines, *_quarantine_lines(self)])

    # ------------------------------------------------------------------ for regions and peers

    def quarantines(self, mr: MrHandle) -> tuple[Quarantine, ...]:
        """List the bytes of a region that a NIC may touch although nothing is open."""
        whole = mr.memory.nbytes
        if self.crashed:
            why = "the engine's worker was stopped by a bug, and what NICs hold is unknown"
            return (Quarantine(0, whole, why),)
        if self.closed or (mr.closed and mr not in self.kept):
            return ()
        return tuple(Quarantine(0, whole, why) for why in self._touched_by(mr))

    def _touched_by(self, mr: MrHandle) -> list[str]:
        """Say why a NIC may still write to a region, or read from it; [] = none can."""
        why = [
            f"NIC {k} ({self.domains[k].caps.nic}) is down, cannot be asked"
            for k, up in enumerate(self.worker.group.alive)
            if not up and (mr.access.target or k in mr.readers)
        ]
        return [*why, _GIVEN_UP] if mr.given_up else why

    def keep_or_free(self, mr: MrHandle) -> bool:
        """Keep the memory of a region that is to be deregistered if a NIC may still touch it.

        Returns whether its keys go back to the NICs. They do not where late rows may still use
        them: a NIC may give the same numbers to the next region. Raises BusyError if the engine
        does not own the memory and cannot keep it.
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
        that waits may not be counted; all behind it are. Only submits of reads count queued
        `reads`.
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
        """Queue a write or read: enqueue() and reserve() in one call."""
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
    """Count the rows of the first command that waits, unless reserve() has counted them."""
    try:
        _, first = worker.commands[0]
    except IndexError:  # the worker has taken it just now
        return 0
    taken = first in worker.open or first.finished  # and is to be cancelled
    return 0 if taken else first.rows - first.reserved


_LISTED_MAX: Final = 20
_UNEXPECTED_MAX: Final = 1000


def engine_stats(engine: Machine) -> EngineStats:
    """Collect an engine's statistics."""
    worker = engine.worker
    group = worker.group
    unexpected = list(worker.imms.counts.items())[:_UNEXPECTED_MAX]
    return EngineStats(
        steps=worker.steps,
        transfers_submitted=worker.submitted,
        transfers_done=worker.settled[State.DONE],
        transfers_failed=worker.settled[State.FAILED],
        transfers_cancelled=worker.settled[State.CANCELLED],
        rows_backlog=group.backlog + group.queued_reads,
        rows_outstanding=tuple(map(add, group.outstanding, worker.reads.outstanding)),
        nics=tuple(map(NicBytes, group.rows, group.nbytes)),
        reads=tuple(map(NicBytes, worker.reads.rows, worker.reads.nbytes)),
        reads_again=worker.reads.again,
        imms_counted=worker.imms.total,
        imms_unexpected=tuple(unexpected),
        expectations=worker.imms.waiting
        + sum(isinstance(handle, Expectation) for handle in worker.not_taken()),
        regions=len(engine.regions),
        peers=len(engine.worker.peers.links),
        callback_errors=engine.errors,
        imms_burnt=len(worker.imms.burnt.why) + len(worker.notices.burnt.why),
        imms_burnt_forgotten=worker.imms.burnt.forgotten + worker.notices.burnt.forgotten,
        bytes_quarantined=sum(found.stop - found.start for _, found in _quarantines(engine)),
        control_dropped=_drops(worker),
        failover=_failover(engine)[0],
        nics_up=tuple(group.alive),
        faults=tuple(worker.journal.counts.items()),
    )


def _failover(engine: Machine) -> tuple[Failover, list[str]]:
    worker = engine.worker
    if worker.group.acks is None:
        if (why := worker.group.why_not) is not None:
            return Failover.UNABLE, [why]
        return Failover.OFF, ["EngineOptions(failover=False)"]
    why_not = [
        f"to {link.addr.name} over NIC {path.domain} to its NIC {path.nic}: "
        + path.sums.why_forgot()
        for link in list(engine.worker.peers.links.values())
        for path in link.paths()
        if path.sums.sent.forgot
    ]
    for arrivals in worker.fencing.arrivals:
        why_not += [f"from a sender: {why}" for why in arrivals.forgotten]
    return (Failover.PARTIAL if why_not else Failover.AVAILABLE), why_not


def _failover_lines(engine: Machine) -> list[str]:
    found, why_not = _failover(engine)
    if found is Failover.AVAILABLE:
        return ["  failover: available"]
    rest = [f"  ... and {len(why_not) - _LISTED_MAX} more"] if len(why_not) > _LISTED_MAX else []
    return [*(f"  failover: no, because {why}" for why in why_not[:_LISTED_MAX]), *rest]


def _notice_lines(engine: Machine) -> list[str]:
    """Say whether peers are told which immediates are burnt, and what they do not know yet."""
    if not all(domain.caps.control_bytes for domain in engine.worker.group.domains):
        why = f"the {engine.address.backend} backend has no control messages"
        return [f"  peers are not told of transfers that fail, because {why}"]
    return [f"  {line}" for line in engine.worker.notices.describe()[:_LISTED_MAX]]


def _drops(worker: Worker) -> tuple[tuple[str, int], ...]:
    return tuple((reason.value, times) for reason, times in list(worker.channel.dropped.items()))


def _quarantines(engine: Machine) -> list[tuple[MrHandle, Quarantine]]:
    regions = [*list(engine.regions.values()), *list(engine.kept)]
    return [(mr, found) for mr in regions for found in mr.quarantined]


def _quarantine_lines(engine: Machine) -> list[str]:
    found = _quarantines(engine)
    lines = [
        f"  bytes {start} .. {stop} of region {mr.desc.region} are in quarantine: {why}"
        for mr, (start, stop, why) in found[:_LISTED_MAX]
    ]
    if len(found) > _LISTED_MAX:
        lines.append(f"  ... and {len(found) - _LISTED_MAX} more quarantines")
    return lines


def explain(engine: Machine, peer: NetAddr | None) -> str:
    """Say which NICs an engine has and, for a peer, its lanes and how requests are divided.

    Raises:
        UsageError: the peer is not known to this engine.
    """
    group = engine.worker.group
    lines = [f"engine {engine.address}"]
    lines += [f"  {engine.about}"] if engine.about else []
    for k, domain in enumerate(group.domains):
        caps = domain.caps
        order = "ordered" if caps.ordered else "unordered"
        state = "alive" if group.alive[k] else "DOWN"
        reads = f"reads {caps.reads}" if caps.reads else f"no reads ({caps.no_reads})"
        lines.append(
            f"  NIC {k}: {caps.nic} on {caps.backend}, {caps.link_bps / 1e9:g} Gb/s, {order}, "
            f"queue {caps.sq_depth}, {reads}, memory {'/'.join(caps.memory_kinds)}, {state}"
        )
        if isinstance(domain, Describes):
            lines.append(f"    {domain.describe()}")
    lines += _failover_lines(engine)
    lines += _notice_lines(engine)
    lines += _quarantine_lines(engine)
    lines += [f"  watched words: {engine.worker.watch.describe()}"] if engine.worker.watch else []
    copied = [mr for mr in list(engine.regions.values()) if mr.memory.stands_for]
    lines += [f"  region {mr.desc.region}: {mr.memory.stands_for}" for mr in copied[:_LISTED_MAX]]
    if peer is None:
        lines += [f"  peer: {link.addr}" for link in list(engine.worker.peers.links.values())]
        return "\n".join(lines)
    link = engine.worker.peers.links.get((peer.backend, peer.name))
    if link is None:
        raise UsageError(
            f"explain: nothing was ever submitted to {peer}; submit something, or add_peer_group"
        )
    return "\n".join([*lines, *_explain_link(engine, link)])


def _explain_link(engine: Machine, link: Link) -> list[str]:
    nlocal, nremote = len(engine.worker.group.domains), len(link.addr.domains)
    pairs = [(k % nlocal, k % nremote) for k in range(lanes(nlocal, nremote))]
    single = plan_single(MiB, nlocal, nremote, 0)
    paged = plan_paged(256, nlocal, nremote, 0, None, link.weights_now())
    state = "".join("." if alive else "X" for alive in link.alive)
    shards = [share.stop - share.start for share in single.shares]
    runs = [share.stop - share.start for share in paged.shares]
    return [
        f"to {link.addr}",
        f"  its NICs (. answers, X does not): {state}",
        f"  lanes (local NIC -> its NIC): {', '.join(f'{i}->{j}' for i, j in pairs)}",
        f"  1 MiB single: {single.imms} immediates, shards of {shards} bytes",
        f"  256 pages: {paged.imms} immediates, runs of {runs} pages",
    ]
