"""Rows that bring bytes here: their queues, one a NIC, and what becomes of rows that fail.

Reads stand apart from writes, so that no write pays for them; what they share is the group's: the
batches by ctx, the choice of a path, what is known of NICs. Rule 1: only this file posts reads.
Rule 2: a row is posted again only after its first posting has certainly ended (C30), so that no old
posting writes over a newer one, nor over memory that was given back. Rule 3: the owner's
immediate is queued when all rows of the transfer are back, and not at all if one has failed.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import Final, cast

from tep.backends.base import Column, ReadBatch, ReadDomain, Status, WriteBatch
from tep.base.api import EngineOptions
from tep.base.errors import FabricError, TepError
from tep.core.group import DomainGroup, not_made_good, row_error
from tep.core.handles import Transfer
from tep.core.path import Link, PeerRestarted
from tep.core.plan import plan_paged, plan_single
from tep.core.posting import TURNS_MAX, Pending, cut
from tep.core.regions import Remote, shifted
from tep.core.requests import ReadJob

__all__ = ["Reads"]

Columns = tuple[Column, Column, Column]

_TRIES_MIN: Final = 3
"""A row is posted so often again where there are fewer paths: others' errors may flush it."""

_OK: Final = int(Status.OK)

_OPEN_ENDED: Final = frozenset({Status.NIC_DOWN, Status.GIVEN_UP})
"""A row that ended so may still be carried out: its memory is in quarantine (C30)."""

_AGAIN: Final = frozenset({Status.FLUSHED, Status.UNREACHABLE})
"""A row that ended so is over, by no fault of its own: another path may carry it out."""


class _Reading(Pending):
    """Rows of one read on one NIC; all of them from one region of one owner."""

    __slots__ = ()
    is_read = True


class _Following(_Reading):
    """The immediate of a read while its rows are out. It is in no queue; only its row counts."""

    __slots__ = ()


class Reads:
    """The reads of one engine.

    Attributes:
        outstanding: rows in flight, of each NIC.
        rows, nbytes: how many rows and bytes each NIC was asked for so far.
        again: rows that were posted again.
    """

    def __init__(self, group: DomainGroup, options: EngineOptions) -> None:
        nics = len(group.domains)
        self.outstanding = [0] * nics
        self.rows = [0] * nics
        self.nbytes = [0] * nics
        self.again = 0
        self._group = group
        self._rows_max = options.post_rows_max
        self._retried = options.failover
        self._queues: list[deque[_Reading]] = [deque() for _ in range(nics)]
        self._cursor = 0

    # ------------------------------------------------------------------ dealing out

    def start(self, transfer: Transfer) -> None:
        """Deal a transfer's job out to the NICs' queues. Nothing is posted yet."""
        job, group = transfer.job, self._group
        assert isinstance(job, ReadJob)
        if job.told:
            self._hold_back(transfer, job)
        try:
            group.first_alive()
        except FabricError as error:
            group.lose(transfer, transfer.left - job.told, error)
            return
        self._deal(transfer, job)

    def _deal(self, transfer: Transfer, job: ReadJob) -> None:
        """Deal it out by bytes where the columns are one piece, else by rows."""
        remote, here, there, nbytes = job.remotes, job.src, job.dst, job.nbytes
        assert isinstance(remote, Remote)
        nlocal = len(self._group.domains)
        cursor = self._cursor % math.lcm(nlocal, remote.nics)
        if job.split:
            assert isinstance(here, int)
            assert isinstance(there, int)
            assert isinstance(nbytes, int)
            plan = plan_single(nbytes, nlocal, remote.nics, cursor, job.routing)
            for share in plan.shares:
                one = (here + share.start, there + share.start, share.stop - share.start)
                self._enqueue(transfer, share[:2], one, 1)
        else:
            n = job.n - job.told
            plan = plan_paged(n, nlocal, remote.nics, cursor, job.routing.domain)
            for share in plan.shares:
                columns = cut((here, there, nbytes), slice(share.start, share.stop))
                self._enqueue(transfer, share[:2], columns, share.stop - share.start)
        self._cursor = plan.cursor

    def _enqueue(self, transfer: Transfer, lane: tuple[int, int], columns: Columns, n: int) -> None:
        """Queue n rows on one lane; the owner's addresses are for its NIC 0."""
        remote = transfer.job.remotes
        assert isinstance(remote, Remote)
        domain, nic = self._group.route(lane[0], remote.link, lane[1])
        self._push(self._made(transfer, domain, nic, columns, n))

    def _made(
        self, transfer: Transfer, domain: int, nic: int, columns: Columns, n: int
    ) -> _Reading:
        (here, there, nbytes), mr, remote = columns, transfer.job.mr, transfer.job.remotes
        assert mr is not None
        assert isinstance(remote, Remote)
        there = shifted(there, remote.bases[nic] - remote.bases[0])
        keys = mr.keys[domain].lkey, remote.rkeys[nic]
        peer = remote.link.peer(domain, nic)
        batch = ReadBatch(n, peer, here, keys[0], there, keys[1], nbytes, None, 0)
        # Only post() here looks at the batch's type: the group posts what is in its own queues.
        return _Reading(transfer, domain, cast("WriteBatch", batch), remote, nic)

    def _push(self, pending: _Reading) -> None:
        self._group.enter(pending)
        self._queues[pending.domain].append(pending)

    # ------------------------------------------------------------------ posting

    def post(self) -> bool:
        """Offer each NIC its queued batches in turn; True if one took a row, or to turn again."""
        work = False
        for domain, queue in enumerate(self._queues):
            if queue and not self._group.alive[domain]:
                self._move_all(queue)
        for domain, queue in enumerate(self._queues):
            if queue:
                work |= self._post_on(domain, queue)
        return work

    def _post_on(self, domain: int, queue: deque[_Reading]) -> bool:
        group = self._group
        nic = cast("ReadDomain", group.domains[domain])
        before = self.outstanding[domain]
        again = False  # as no NIC has news of what was done
        refused = 0  # consecutive batches that were refused
        for _ in range(TURNS_MAX):
            if refused >= len(queue):
                break
            pending = queue.popleft()
            if pending.at == pending.stop:  # it was dropped while it was queued
                again = True  # there may be too many of them for one turn
                continue
            remote, far = pending.target(0)
            if not (remote.link.alive[far] and remote.link.is_up(domain, far)) and self._moved(
                pending, pending.at, pending.stop
            ):
                again = True  # it went to a NIC whose turn may be over
                continue
            start, stop = pending.at, pending.stop
            if queue and stop - start > self._rows_max:
                stop = start + self._rows_max
            assert isinstance(pending.batch, ReadBatch)
            try:
                taken = nic.post_read(pending.batch, start, stop)
            except (OSError, MemoryError) as error:
                queue.appendleft(pending)
                group.give_up(domain, error)
                return True
            assert 0 <= taken <= stop - start, (taken, start, stop)
            self._take(pending, domain, taken)
            if pending.at < pending.stop:
                queue.append(pending)
            refused = 0 if taken else refused + 1
            if taken == 0 and self.outstanding[domain] >= nic.caps.reads:
                break
        return again or self.outstanding[domain] != before

    def _take(self, pending: _Reading, domain: int, taken: int) -> None:
        start = pending.at
        pending.at += taken
        self.outstanding[domain] += taken
        self._group.queued_reads -= taken
        nbytes = pending.sum_bytes(start, pending.at)
        self.rows[domain] += taken
        self.nbytes[domain] += nbytes
        pending.transfer.count_posted(domain, taken, nbytes)

    # ------------------------------------------------------------------ completing

    def finish(self, domain: int, ctx: int, count: int, status: int, row: int) -> None:
        """Take back `count` rows of batch `ctx` from a NIC."""
        group = self._group
        pending = group.batches[ctx]
        assert isinstance(pending, _Reading), f"NIC {domain} reports writes of batch {ctx} as reads"
        assert pending.domain == domain, (pending.domain, domain)
        pending.back += count
        assert pending.back <= pending.at, (
            f"NIC {domain} returned more reads of batch {ctx} than it took"
        )
        self.outstanding[domain] -= count
        over = pending.back == pending.stop
        transfer = pending.transfer
        job = transfer.job
        assert isinstance(job, ReadJob)
        if status == _OK and job.silent:
            job.silent.clear()
        again = status != _OK and self._fail_rows(pending, count, status, row)
        if not again:
            transfer.left -= count
        if over:
            del group.batches[ctx]
        all_back = transfer.left == job.told and not transfer.is_ending()
        if all_back and job.after is not None:
            self._follow(transfer, job)
        if transfer.left == 0:
            group.ended.append(transfer)

    def _fail_rows(self, pending: _Reading, count: int, status: int, row: int) -> bool:
        """Handle rows that came back with an error; True: they are queued again."""
        group, transfer, domain = self._group, pending.transfer, pending.domain
        row = min(row, pending.batch.n - 1)
        remote, nic = pending.target(row)
        mr = transfer.job.mr
        assert mr is not None
        if status in _OPEN_ENDED:
            mr.readers |= {domain}
            if status == Status.GIVEN_UP:
                mr.given_up = True
        others = True  # whether there is a path to try
        if status == Status.NIC_DOWN:
            group.nic_down(domain)
        elif status in (Status.UNREACHABLE, Status.GIVEN_UP):
            cast("ReadJob", transfer.job).silent.add((domain, nic))
            others = group.has_lost(domain, remote.link, nic)
        elif status == Status.STALE_PEER:
            group.events.append(PeerRestarted(remote.link))
        error = row_error(group.domains[domain], pending, row, status)
        wanted = status in _AGAIN and others and not transfer.is_ending()
        if wanted and group.closing is None and self._retried:
            if pending.tries < max(_TRIES_MIN, len(group.domains) * len(remote.link.alive)):
                if self._moved(pending, row, row + count, turn=1):
                    transfer.extra += count
                    self.again += count
                    return True
                error = not_made_good(error, "no other path is left that may answer")
            else:
                error = not_made_good(error, f"it was tried {pending.tries} times before")
        transfer.failed_rows += count
        if transfer.failure is None:
            group.drop_queued(transfer)
        known = transfer.failure
        if known is None or (isinstance(known, FabricError) and known.code == Status.FLUSHED.name):
            transfer.failure = error
        return False

    # ------------------------------------------------------------------ other paths

    def _move_all(self, queue: deque[_Reading]) -> None:
        """Our NIC is down: queue what waits for it at the others."""
        waiting = list(queue)
        queue.clear()
        for pending in waiting:
            if pending.at < pending.stop and not self._moved(pending, pending.at, pending.stop):
                error = FabricError("no path is left for this read", code="UNREACHABLE")
                self._group.lose(pending.transfer, 0, error)

    def _moved(self, old: _Reading, start: int, stop: int, turn: int = 0) -> bool:
        """Queue rows start..stop on a path that works; `turn` moves the choice on both sides.

        If `turn` is 0 they are the rest of a queued batch, which is cut off. False: there is no
        other path, and nothing has changed.
        """
        group = self._group
        remote, nic = old.target(start)
        try:
            group.first_alive()
            here, there = group.route(old.domain + turn, remote.link, nic + turn)
            if turn:
                here, there = self._answering(old.transfer, remote.link, (here, there))
            elif (here, there) == (old.domain, nic):
                return False
            batch = old.batch
            src, dst, nbytes = cut((batch.src, batch.dst, batch.nbytes), slice(start, stop))
            far = shifted(dst, remote.bases[0] - remote.bases[nic])
            made = self._made(old.transfer, here, there, (src, far, nbytes), stop - start)
        except TepError:  # no NIC is alive, or it cannot connect
            return False
        made.tries = old.tries + turn
        if not turn:
            group.cut(old)
        self._push(made)
        return True

    def _answering(self, transfer: Transfer, link: Link, path: tuple[int, int]) -> tuple[int, int]:
        """Return this path, or else another on which no row of the transfer waited in vain.

        Raises FabricError if there is none: each other would take a peer's silence once more.
        """
        silent = cast("ReadJob", transfer.job).silent
        ours = [i for i, alive in enumerate(self._group.alive) if alive]
        theirs = [j for j, alive in enumerate(link.alive) if alive]
        for here, there in (path, *itertools.product(ours, theirs)):
            if (here, there) not in silent and (link.is_up(here, there) or not silent):
                return here, there
        raise FabricError("no path is left for this read", code="UNREACHABLE")

    # ------------------------------------------------------------------ the owner's immediate

    def _hold_back(self, transfer: Transfer, job: ReadJob) -> None:
        """Let the immediate wait: it counts as a queued row, so a cancel or failure drops it."""
        assert isinstance(job.remotes, Remote)
        batch = WriteBatch(1, 0, 0, 0, 0, 0, 0, job.owner_imm, 0)
        job.after = _Following(transfer, 0, batch, job.remotes, 0)
        self._group.enter(job.after)

    def _follow(self, transfer: Transfer, job: ReadJob) -> None:
        """All rows are back: queue an empty row with the immediate for the owner."""
        after, job.after = job.after, None
        assert isinstance(after, _Following)
        assert isinstance(after.remotes, Remote)
        group = self._group
        group.cut(after)
        try:
            group.enqueue_imm(transfer, after.remotes, job.owner_imm)
        except TepError as error:  # every path is fenced off, or there is no connection
            group.lose(transfer, 1, error)
