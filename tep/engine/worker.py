"""Worker.step(): commands -> queues -> posts -> completions -> counts; bounded, nothing waits.

The worker owns the group, the table of immediates, the messages and the watched words. It settles
handles inside the step; `deliver()` runs the users' callbacks later, outside the step.
Rule: other threads only append, to `commands` and to the group's events; only the thread that turns
the worker uses the rest.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, assert_never

import numpy as np
import numpy.typing as npt

from tep.backends.base import (
    COMPLETION_BYTES,
    Completions,
    Domain,
    Entry,
    Kind,
    Status,
    first_completions,
    new_completions,
    take_completion,
)
from tep.base.api import EngineOptions, Sender
from tep.base.errors import ClosedError, TepError
from tep.base.wire import NetAddr
from tep.control.channel import CONTROL_CTX, Channel, Notices, sooner
from tep.control.failover import Failover, Fencing, Pruning, why_unable
from tep.control.membership import Membership
from tep.core.group import DomainGroup, Ready, may_pass
from tep.core.handles import (
    PENDING,
    Expectation,
    Handle,
    Message,
    Removal,
    State,
    Transfer,
    closed_error,
)
from tep.core.imm import ImmTable
from tep.core.outbox import Outbox
from tep.core.path import Arrivals, Link, PathShut, PeerHeard, PeerNicDown, PeerRestarted
from tep.core.reads import Reads
from tep.core.regions import PeerBook, deregistered
from tep.core.requests import refuse_burnt
from tep.core.stats import Journal
from tep.drivers.threads import Driver
from tep.memory.watch import WatchPage

__all__ = ["Worker"]

_log = logging.getLogger("tep")

_SCALAR_MAX: Final = 24
"""Up to so many completions a Python loop is faster than numpy columns.

Measured: the numpy work of one poll takes about 10 us.
"""

_WHOLE_MAX: Final = 256
"""Up to so many completions are compared whole; of more, the first 16 bytes of each."""

_LAST_WORDS_S: Final = 0.05
_LAST_TURNS: Final = 1000
"""The time and the number of looks by which close() waits for its last control messages."""

_RAISES_MAX: Final = 16
"""The number of errors of poll() of a NIC that is down, before its rows and messages are ended."""

_SHORT_MAX: Final = 1 << 14
"""The same while memory or descriptors are short, which may pass: a tenth of a second of polls."""

_WRITE, _IMM, _SENT, _RECV, _DOWN, _CONTROL, _FENCED, _READ = map(int, Kind)
_OK: Final = int(Status.OK)
_DONE: Final = State.DONE
_CANCELLED: Final = State.CANCELLED
Receive = Callable[..., object]


class Worker:
    """All parts of one engine: `step()` turns it, `deliver()` runs the callbacks.

    Attributes:
        arrivals: of each NIC, the immediates that came over it; empty where none can be fenced.
        commands: users' requests that no step has taken yet.
        taken: how many reserved rows and messages the commands taken so far had.
        open: every handle that was taken and has not settled, in order of submission.
        submitted: how many transfers and messages were taken.
        settled: how many of them settled, by state.
        observers: called with all handles that have settled, before their callbacks.
        closed: whether everything has ended; new commands fail.
    """

    __slots__ = (
        "_again", "_columns", "_commands_max", "_equal", "_equal_imm", "_gone", "_heads",
        "_is_stepping", "_large", "_now_s", "_out", "_raised", "_raw", "_read", "_received",
        "_settled", "_starts", "arrivals", "channel", "closed", "commands", "failover", "fencing",
        "group", "imms", "journal", "members", "notices", "observers", "open", "outbox", "peers",
        "pruning", "reads", "receive", "report", "settled", "steps", "submitted", "taken", "watch",
    )  # fmt: skip

    def __init__(
        self,
        address: NetAddr,
        domains: tuple[Domain, ...],
        options: EngineOptions,
        driver: Driver,
        replaced: Callable[[Link], object],
        report: Callable[[object, BaseException], None],
    ) -> None:
        now_s, lock = driver.now_s, driver.lock
        why = why_unable(domains) if options.failover else None
        able = options.failover and why is None
        self.journal = journal = Journal(address.name, address.backend)
        self.group = group = DomainGroup(
            domains, options, self._step_s, failover=able, why_not=why, journal=journal
        )
        self.imms: ImmTable[Expectation] = ImmTable()
        self.open: dict[Handle, None] = {}
        self.observers: list[Callable[[list[Handle]], object]] = []
        self.watch = WatchPage()
        self.steps = self.submitted = self.taken = 0
        self._read = -1, 0.0  # see _step_s()
        self.closed, self._now_s, self.report = False, now_s, report
        self._is_stepping = False  # a step takes commands, and posts then
        self.settled = dict.fromkeys((State.DONE, State.CANCELLED, State.FAILED), 0)
        self.commands: deque[tuple[Callable[..., None], Handle]] = deque()
        self.receive: tuple[Receive, bool] | None = None  # and whether it gets the sender
        self.channel = channel = Channel(group, now_s)
        self.failover = Failover(group, channel)
        self.pruning = Pruning(group, channel, now_s)
        self._large = self.pruning.large
        self.arrivals = [Arrivals() for _ in domains] if able else []
        self.peers = peers = PeerBook(address, domains, lock, replaced, group.routes)
        self.fencing = Fencing(group, self.arrivals, channel, peers.find)
        self.reads = Reads(group, options)
        parts = self.failover, self.fencing, self.imms, peers.find, self._drop
        self.members = Membership(group, channel, *parts, self.open, self._end, options, now_s)
        # With the epoch, since a restarted engine counts its messages from the beginning.
        name = f"{address.name} (epoch {address.epoch})"
        self.notices = Notices(name, group, channel, options, now_s)
        self._commands_max = options.commands_max
        self._settled: list[Handle] = []
        self._received: list[tuple[int, int]] = []
        self.outbox = Outbox(self.group, self._end)
        self._raised = [(0, 0) for _ in domains]  # by poll() of each NIC: times, step of the last
        self._gone: set[int] = set()  # NICs that were given up; their completions are ignored
        self._out: Completions = new_completions(options.poll_rows)
        self._columns = tuple(self._out[name] for name in ("kind", "count", "imm", "ctx"))
        self._raw = memoryview(self._out.view("u1"))  # type: ignore[arg-type]  # an array
        self._equal, self._equal_imm, self._again = bytearray(), 0, 0  # see _take_columns()
        # The first 8 bytes of an entry: kind, status, count; the first 16: immediate and row too.
        self._heads, self._starts = self._out.view("u8")[::4], self._out.view("c16")[::2]

    def _step_s(self) -> float:
        """Read the clock once a step: what NICs are found to have done in one step is as old."""
        if self._read[0] != self.steps:
            self._read = self.steps, self._now_s()
        return self._read[1]

    def _drop(self, link: Link, fenced: bool) -> None:
        self.notices.forget(link)
        self.peers.drop(link, fenced=fenced)

    # ------------------------------------------------------------------ one turn

    def step(self) -> bool:
        """Take commands, post, poll and count; True: there was work, so turn again soon."""
        if self.closed:
            return False
        self.steps += 1
        group, commands, work = self.group, self.commands, False
        if commands:
            self._is_stepping = work = True
            if len(commands) == 1:  # as _take_commands(), without the call
                command, handle = commands.popleft()
                command(handle)
            else:
                self._take_commands()
        if group.backlog:
            work |= group.post()
        if group.queued_reads:
            work |= self.reads.post()
        if self.outbox.turns:
            work |= self.outbox.post()
        if group.losses:
            work |= self.failover.step()
        if self._large:
            work |= self.pruning.step()
        if self.channel.busy:
            work |= self.channel.step()
        out, index = self._out, -1
        for domain in group.domains:
            index += 1  # enumerate() takes longer
            try:
                n = domain.poll(out)
            except (OSError, MemoryError) as error:
                n, work = 0, self._give_up(index, error) or work
            if n:
                work = True
                if group.raised and index in group.raised:
                    self._take_rows(index, self._known(index, n))
                elif n == 1:
                    entry = kind, status, count, imm, row, ctx, _ = take_completion(out)
                    if kind == _WRITE:
                        group.finish_rows(index, ctx, count, status, row)
                    elif kind == _IMM and not self.arrivals:
                        self.imms.add(imm, count)
                    else:
                        self._take_rows(index, (entry,))
                elif n <= _SCALAR_MAX:
                    self._take_rows(index, first_completions(out, n))
                else:
                    self._take_columns(index, n)
        if self._again:  # as _count_again(), without the call
            again, self._again = self._again, 0
            self.imms.add(self._equal_imm, again)
        if group.events:
            self._dispatch()
        if group.ended:
            self._settle_ended()
        if self.imms.reached:
            self._settle_reached()
        if self.members.busy:
            work |= self.members.step()
        return work or self._settled != []

    def _dispatch(self) -> None:
        events = self.group.events
        while events:
            match event := events.popleft():
                case PeerNicDown(link, nic):
                    self.members.nic_down(link, nic)
                case PeerRestarted(link):
                    self.members.met_later(link)
                case PeerHeard(link):
                    self.notices.heard(link)
                case PathShut(path):
                    self.members.path_shut(path)
                case _:
                    assert_never(event)

    def _give_up(self, index: int, error: OSError | MemoryError) -> bool:
        """A NIC's poll() raised: it is down, and is polled some more times for its completions.

        What may pass is waited for first. Returns whether another turn is wanted.
        """
        if index in self._gone:
            return False
        times, step = self._raised[index]
        went_well = self.group.alive[index] and step < self.steps - 1  # since the last time
        times = 1 if went_well else times + 1
        self._raised[index] = times, self.steps
        if may_pass(error) and times < _SHORT_MAX:
            return True
        if self.group.give_up(index, error) and times >= _RAISES_MAX:
            self._lose(index)
        return True

    def _lose(self, index: int) -> None:
        """A NIC cannot be polled: close it, end what was in flight, and poll it no more."""
        self._gone.add(index)
        domain = self.group.domains[index]
        try:
            domain.close()
        except (OSError, MemoryError) as error:
            _log.error("NIC %s cannot be closed: %s", domain.caps.nic, error, exc_info=error)
        self._end_rest(index)

    def _end_rest(self, index: int) -> None:
        """End what a NIC will not return; no read is posted again: nobody knows which were back."""
        group = self.group
        for ctx, pending in tuple(group.batches.items()):
            out = pending.at - pending.back
            if pending.domain == index and out:
                finish = self.reads.finish if pending.is_read else group.finish_rows
                finish(index, ctx, out, Status.NIC_DOWN, pending.back)
        self.outbox.lost(index)
        self.channel.lost(index)

    def deliver(self) -> None:
        """Run users' callbacks for everything that earlier steps found.

        A callback that raises is reported, and the others still run. An event of a peer is
        delivered before its consequences.
        """
        if self.members.events:
            for told, event in self.members.take_events():
                self.run_callback(told, event)
        if self._settled:
            settled, self._settled = self._settled, []
            for observer in self.observers:
                self.run_callback(observer, settled)
            for handle in settled:
                handle._deliver()
        if self.imms.loose:
            loose, self.imms.loose = self.imms.loose, []
            for callback, imm, count in loose:
                self.run_callback(callback, imm, count)
        if self._received:
            self._hand_over()
        if self.watch.callbacks and not self.closed:
            for watching, old, new in self.watch.look():
                self.run_callback(watching, old, new)

    def _hand_over(self) -> None:
        received, self._received = self._received, []
        for nic, slot in received:
            if self.closed:  # by a callback just now: the NICs are closed
                break
            domain = self.group.domains[nic]
            if self.receive is not None:
                callback, with_sender = self.receive
                if with_sender:
                    self.run_callback(callback, domain.recv_view(slot), self._sender(domain, slot))
                else:
                    self.run_callback(callback, domain.recv_view(slot))
            if not self.closed:
                domain.recv_done(slot)

    def _sender(self, domain: Domain, slot: int) -> Sender:
        nic = domain.recv_source(slot)
        engine_of = getattr(domain, "engine_of", bytes)  # each NIC for itself, where none knows
        link = self.peers.find(nic)
        return Sender(nic, engine_of(nic), None if link is None else link.addr, engine_of)

    def owing(self) -> bool:
        if self.closed:
            return False
        if self.imms.loose or self._received or self.watch.callbacks or self.members.events:
            return True
        for handle in self._settled:  # noqa: SIM110  # any() takes three times as long
            if handle._callbacks:
                return True
        return False

    def run_callback(self, callback: Callable[..., object], *args: object) -> None:
        """Call a user's function; what it raises is reported, and ends nothing else."""
        try:
            callback(*args)
        except BaseException as error:  # noqa: BLE001  # a user's fault, reported
            self.report(callback, error)

    def busy(self) -> bool:
        group = self.group
        return bool(
            group.batches
            or group.backlog
            or self.commands
            or self.outbox.waiting
            or self.outbox.posted
            or (self.channel.busy and self.channel.queued)
        )

    def engaged(self) -> bool:
        return bool(self.open) or self.busy()

    def due_s(self) -> float | None:
        if not (self.members.busy or self.channel.busy):
            return None
        return sooner(self.channel.due_s() if self.channel.busy else None, self.members.due_s())

    def unsettled(self) -> list[Handle]:
        """List every handle that has not settled, taken or not; for any thread."""
        asked = [handle for _, handle in tuple(self.commands)]
        return list(dict.fromkeys((*tuple(self.open), *asked)))

    def not_taken(self) -> list[Handle]:
        """List the handles of all commands, without those to be cancelled; for any thread."""
        asked = dict.fromkeys(handle for _, handle in tuple(self.commands))
        return [handle for handle in asked if handle not in self.open and not handle.finished]

    def _take_commands(self) -> None:
        for _ in range(min(len(self.commands), self._commands_max)):
            command, handle = self.commands.popleft()
            command(handle)

    # ------------------------------------------------------------------ commands

    def start(self, transfer: Transfer, deal: Callable[[Transfer], object] | None = None) -> None:
        """Command: deal a transfer out.

        `deal` puts its rows into queues; None: as writes. If a peer cannot be connected, the
        transfer fails here, and the submit does not.
        """
        mr = transfer.job.mr
        self.open[transfer] = None
        self.submitted += 1
        self.taken += transfer.reserved
        if mr is not None:
            mr.inflight += 1
        if self.closed:
            self._end(transfer, State.FAILED, closed_error())
            return
        try:
            if mr is not None and mr.closed:  # between the check at submit and this command
                transfer.job.forget()
                raise deregistered(mr, transfer.job.kind)
            if self.notices.burnt.why:
                refuse_burnt(transfer.job, self.notices.burnt)
            if deal is None:
                group = self.group
                group.alone = self._is_stepping and not (group.backlog or self.commands)
                group.start(transfer)
            else:
                deal(transfer)
        except TepError as error:
            self.group.drop_queued(transfer)
            transfer.dropped, transfer.left = transfer.rows, 0
            transfer.failure = transfer.failure or error
            self.group.ended.append(transfer)

    def start_ready(self, transfer: Transfer) -> None:
        """Command: start() of a prepared write, in less time where nothing is unusual.

        It is posted at once if nothing else waits: post() of this step would find nothing else.
        """
        job, group = transfer.job, self.group
        assert isinstance(job, Ready)
        mr, dealt = job.mr, group.dealt(job)
        unusual = self.notices.burnt.why or (mr is not None and mr.closed) or self.closed
        if dealt is None or unusual:
            transfer.job = job.placed()
            self.start(transfer, partial(group.start_and_learn, job=job))
            return
        self.open[transfer] = None
        self.submitted += 1
        self.taken += transfer.reserved
        if mr is not None:
            mr.inflight += 1
        alone = self._is_stepping and not (group.backlog or self.commands)
        group.start_ready(transfer, job, dealt, alone=alone)

    def start_read(self, transfer: Transfer) -> None:
        """Command: deal a read out; as start()."""
        self.start(transfer, self.reads.start)

    def send(self, message: Message) -> None:
        """Command: queue a message."""
        self.open[message] = None
        self.submitted += 1
        self.taken += message.reserved
        if self.closed:
            self._end(message, State.FAILED, closed_error())
        else:
            self.outbox.add(message)

    def expect(self, expectation: Expectation) -> None:
        """Command: enter an expectation.

        It fails if its immediate is burnt or claimed by on_imm, or if its sender is gone.
        """
        self.open[expectation] = None
        if self.closed:
            self._end(expectation, State.FAILED, closed_error())
            return
        try:
            self.imms.expect(expectation)
        except TepError as error:
            self._end(expectation, State.FAILED, error)
            return
        if expectation.sender is not None:
            self.members.check_sender(expectation.sender)

    def remove_imm(self, imm: int) -> int:
        """Forget an immediate's count, its claim, and that it is burnt; return the count."""
        left = self.imms.remove(imm)
        self.notices.remove(imm)
        return left

    def cancel(self, handle: Handle) -> None:
        """Command: end a handle early, as soon as nothing of it is posted."""
        if handle.finished:
            return
        if isinstance(handle, Expectation):
            if self.imms.cancel(handle):
                self._end(handle, State.CANCELLED)
        elif isinstance(handle, Message):
            if self.outbox.cancel(handle):
                self._end(handle, State.CANCELLED)
        elif isinstance(handle, Removal):
            pass  # it has begun, and cannot be taken back
        else:
            assert isinstance(handle, Transfer)
            # A transfer without a queued row has ended in this step, or all its rows are posted.
            if not self.group.drop_queued(handle) or handle.left:
                return
            self.group.ended.append(handle)
            self._settle_ended()  # the next command may be a request with the same immediate

    # ------------------------------------------------------------------ completions

    def _take_rows(self, domain: int, rows: Iterable[Entry]) -> None:
        if self._again:
            self._count_again()
        imms = self.imms
        noted = self.arrivals[domain].add if self.arrivals else None
        for kind, status, count, imm, row, ctx, _ in rows:
            if kind == _IMM:
                imms.add(imm, count)
                if noted is not None:
                    noted(ctx, imm, count)
            elif kind == _WRITE:
                self.group.finish_rows(domain, ctx, count, status, row)
            else:
                self._take_other(domain, kind, status, count, row, ctx)

    def _known(self, domain: int, n: int) -> Iterator[Entry]:
        """Yield the entries of the last poll; of a NIC that has raised, only those of what it has.

        It may have taken rows or messages before it raised. When it is gone, it has nothing to say.
        """
        doubtful = domain in self.group.raised
        for entry in self._out[:n].tolist() if domain not in self._gone else ():
            kind, status, count, imm, row, ctx, nbytes = entry
            if doubtful and kind in (_WRITE, _READ):
                count = min(count, self.group.count_out(ctx))  # the rest is unknown
            elif doubtful and kind == _SENT and ctx < CONTROL_CTX:
                count = int(ctx in self.outbox.posted)
            if count:
                yield kind, status, count, imm, row, ctx, nbytes

    def _take_columns(self, domain: int, n: int) -> None:
        """Take many entries.

        `_equal` has the last burst of equal immediates, which are `_equal_imm`; `_again` is how
        many of them came again and are not counted yet.
        """
        kinds, counts, imms, ctxs = self._columns
        # Comparing bytes takes a sixth of comparing columns; of few, whole entries take less. Most
        # often they are the same as the last time, which costs least: no byte is copied.
        entries = self._raw[: n * COMPLETION_BYTES]
        if self._equal == entries:
            if self.arrivals:
                self.arrivals[domain].add_columns(ctxs[:n], imms[:n].tobytes())
            self._again += n  # the next NIC has more of them, as a rule: counted together
            return
        if self._again:
            self._count_again()
        kind, status, count, imm, _, _, _ = take_completion(self._out)
        if kind == _IMM and count == 1 and imm == imms[n - 1]:
            raw = entries.tobytes() if n <= _WHOLE_MAX else b""
            is_equal = raw != b"" and raw == raw[:COMPLETION_BYTES] * n
            if is_equal:
                self._equal, self._equal_imm = bytearray(raw), imm
            else:
                starts = self._starts[:n].tobytes()
                is_equal = starts == starts[:16] * n
            if is_equal:
                if self.arrivals:
                    self.arrivals[domain].add_columns(ctxs[:n], imms[:n].tobytes())
                self.imms.add(imm, n)
                return
        heads = self._heads[:n].tobytes()
        if heads == heads[:8] * n:
            if kind == _IMM and count == 1:
                self._count_each(domain, imms[:n].tobytes(), ctxs[:n])
                return
            if kind == _WRITE and status == _OK:
                self._finish_uniform(domain, ctxs[:n], count)
                return
        # A mixed burst: immediates as columns, then the rest one by one, each in its order.
        mine = kinds[:n] == _IMM
        self._count(domain, imms[:n][mine], counts[:n][mine], ctxs[:n][mine])
        self._take_rows(domain, self._out[:n][~mine].tolist())

    def _count_again(self) -> None:
        again, self._again = self._again, 0
        self.imms.add(self._equal_imm, again)

    def _finish_uniform(self, domain: int, ctxs: npt.NDArray[np.uint64], count: int) -> None:
        """Take back a burst of rows that all completed with OK, `count` for each entry."""
        if np.logical_and.reduce(ctxs == ctxs[0]):
            self.group.finish_rows(domain, int(ctxs[0]), len(ctxs) * count, _OK, 0)
            return
        values, entries = np.unique(ctxs, return_counts=True)
        for ctx, n in zip(values.tolist(), entries.tolist(), strict=True):
            self.group.finish_rows(domain, ctx, n * count, _OK, 0)

    def _count(
        self,
        domain: int,
        imms: npt.NDArray[np.uint32],
        counts: npt.NDArray[np.uint32],
        sources: npt.NDArray[np.uint64],
    ) -> None:
        if not len(imms):
            return
        if (counts == 1).all():
            self._count_each(domain, imms.tobytes(), sources)
            return
        arrivals = self.arrivals[domain] if self.arrivals else None
        columns = zip(imms.tolist(), counts.tolist(), sources.tolist(), strict=True)
        for imm, count, source in columns:
            self.imms.add(imm, count)
            if arrivals is not None:
                arrivals.add(source, imm, count)

    def _count_each(self, domain: int, raw: bytes, sources: npt.NDArray[np.uint64]) -> None:
        """Count a burst of immediates, u32, one arrival for each."""
        if self.arrivals:
            self.arrivals[domain].add_columns(sources, raw)
        self.imms.add_many(raw)

    def _take_other(
        self, domain: int, kind: int, status: int, count: int, row: int, ctx: int
    ) -> None:
        if kind == _READ:
            self.reads.finish(domain, ctx, count, status, row)
        elif kind == _DOWN:
            self.group.nic_down(domain)
        elif kind == _SENT and ctx >= CONTROL_CTX:
            self.channel.sent(ctx, status)
        elif kind == _CONTROL:
            if self.group.events:  # they happened before the message arrived
                self._dispatch()
            self.channel.take(domain, ctx)
        elif kind == _FENCED:
            self.fencing.fenced(ctx, status)
        elif kind == _SENT:
            self.outbox.sent(domain, ctx, status)
        else:
            assert kind == _RECV, f"NIC {domain} reports a completion of unknown kind {kind}"
            self._received.append((domain, ctx))

    # ------------------------------------------------------------------ settling

    def _settle_ended(self) -> None:
        ended, self.group.ended = self.group.ended, []
        for transfer in ended if len(ended) == 1 else dict.fromkeys(ended):
            if transfer.failure is not None:
                self.notices.burn(transfer)
                self._end(transfer, State.FAILED, transfer.failure)
            elif transfer.dropped:
                self.notices.burn(transfer)
                self._end(transfer, _CANCELLED)
            else:
                self._end(transfer, _DONE)

    def _settle_reached(self) -> None:
        reached, self.imms.reached = self.imms.reached, []
        for expectation in reached:
            assert expectation._state is PENDING, f"settled twice: {expectation.describe()}"
            expectation._state = _DONE  # as _settle(), without the call
            del self.open[expectation]
        self._settled += reached

    def _end(self, handle: Handle, state: State, error: TepError | None = None) -> None:
        if type(handle) is Transfer:
            handle.settled_s = self._now_s()
            mr = handle.job.mr
            if mr is not None:
                mr.inflight -= 1
            handle.queued = None
            self.settled[state] += 1
        elif handle.counted:
            self.settled[state] += 1
        if state is _DONE and handle._state is PENDING:
            handle._state = state  # as _settle(), without the call
        else:
            handle._settle(state, error)
        del self.open[handle]
        self._settled.append(handle)

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """End everything: rows in flight come back flushed, all else fails with ClosedError.

        Completions that the NICs still have are counted, and may complete expectations. Idempotent.
        """
        self.members.close()
        self.take_all_commands()
        if self.closed:
            return
        self.group.closing = closed_error()  # from now on nothing is queued again
        for handle in tuple(self.open):
            if isinstance(handle, Transfer):
                if not self.group.drop_queued(handle):
                    continue
                handle.failure = handle.failure or closed_error()
                self.notices.burn(handle)
                if handle.left == 0:
                    self.group.ended.append(handle)
            elif isinstance(handle, Message) and self.outbox.cancel(handle):
                self._end(handle, State.FAILED, closed_error())
        self._speak_last()
        self.failover.close(closed_error())
        self.channel.close()
        for index, domain in enumerate(self.group.domains):
            if index in self._gone:
                continue
            try:
                domain.close()
                while n := domain.poll(self._out):
                    self._take_rows(index, self._known(index, n))
                if self._raised[index][0] or index in self.group.raised:
                    self._end_rest(index)
            except (OSError, MemoryError) as error:
                self.group.give_up(index, error)
                self._lose(index)
        self._dispatch()
        self._settle_ended()
        self._settle_reached()
        for expectation in self.imms.give_up():
            self._end(expectation, State.FAILED, closed_error())
        self.closed = True
        left = [handle.describe() for handle in self.open]
        assert not left, f"a NIC closed without returning what it had: {left}"

    def _speak_last(self) -> None:
        """Tell peers what close() dropped, and wait a moment until the NICs have sent that."""
        self.notices.last_words()
        if not self.channel.is_sending:
            return
        end_s = self._now_s() + _LAST_WORDS_S
        for _ in range(_LAST_TURNS):
            self.channel.step()
            if not self.channel.is_sending or self._now_s() > end_s:
                return
            for index, domain in enumerate(self.group.domains):
                if index in self._gone:
                    continue
                try:
                    n = domain.poll(self._out)
                except (OSError, MemoryError) as error:
                    self._give_up(index, error)
                else:
                    self._take_rows(index, self._known(index, n))

    def abandon(self, error: ClosedError) -> None:
        """Fail every open handle and run their callbacks; the state of the worker is not reliable.

        Messages that were received and not handed over yet are dropped.
        """
        for handle in self.unsettled():
            if not handle.finished:
                handle._settle(State.FAILED, error)
                self._settled.append(handle)
        self.closed = True
        self.deliver()

    def take_all_commands(self) -> None:
        """Take every command, so that the caller comes after all that was submitted before."""
        self._is_stepping = False  # nothing is posted here
        while self.commands:
            command, handle = self.commands.popleft()
            command(handle)
