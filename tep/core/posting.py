"""Deal jobs out to the NICs of an engine, keep their queues, post rows, count completions.

Rule 1: only this file posts rows. Rule 2: a row is posted with the local key of our NIC and the
remote key of the peer's NIC; `route` chooses the two NICs together. Rule 3: a transfer settles only
when none of its rows is posted or kept. Rows that fail are the business of `DomainGroup`.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from tep.backends.base import Column, Domain, Status, WriteBatch
from tep.base.errors import FabricError, TepError
from tep.core.handles import Pace, Queued, Transfer
from tep.core.path import AS_FAST, Acks, Event, Link, PathShut, Routes
from tep.core.plan import plan_paged, plan_row, plan_single, plan_targets
from tep.core.regions import Job, Remote, Targets, Template, Way, shifted
from tep.core.requests import DEFAULT
from tep.core.stats import Journal

__all__ = [
    "IN_TURN_ROWS", "LONG_BYTES", "NO_ROWS", "PIECE_BYTES", "SHARED_ROWS", "TURNS_MAX",
    "Pending", "Posting", "Retransmission", "cut", "is_long", "is_seen", "on_lanes", "varies",
]  # fmt: skip

TURNS_MAX: Final = 64
"""Batches offered to one NIC in one step: limited, so that posting cannot starve polling."""

_TEMPLATES_MAX: Final = 256
"""Cursors for which a set of targets keeps its columns; unusual mixes of NIC counts have more."""

SHARED_ROWS: Final = 4
"""With fewer rows it is not worth the time to share them with another NIC."""

IN_TURN_ROWS: Final = 16
"""Rows that a NIC takes at a time of each of its batches of one transfer to several NICs."""

PIECE_BYTES: Final = 2 << 20
"""The smallest piece of a long batch: 40 us of a link of 400 Gb/s."""

_PIECES_MAX: Final = 64
"""The most pieces of a transfer, since each piece costs some CPU time."""

LONG_BYTES: Final = 32 << 20
"""A batch with more than this is posted in pieces, so that it can be shared again between them:
0.7 ms of such a link.
"""


SEEN_BYTES: Final = 1 << 20
"""A lane's share of a paged write is timed if it is as long as this, 20 us of such a link: of
shorter ones latency is a large part.
"""

_CALM: Final = 8
_UNSEEN: Final = 3
"""After so many paged writes whose shares took as long as each other, so many are not timed before
the next one is: timing takes 2 us.
"""

_LOOKED_AT: Final = 64
"""Batches of a queue that are searched for rows to share, so that a search takes bounded time."""

_OK: Final = int(Status.OK)

NO_ROWS: Final[set[int]] = set()
"""The lost rows of every batch that has lost none; it is never changed."""


@dataclass(slots=True, eq=False)
class Retransmission:
    """Rows that are written again, and the immediates that follow once all of them have arrived.

    Attributes:
        left: rows that are not over yet.
        missed: whether the bytes of one did not arrive, since its transfer failed meanwhile. Then
            no immediate follows, because it could stand for that row.
        after: (batch, row, error) whose immediates follow.
    """

    left: int = 0
    missed: bool = False
    after: list[tuple[Pending, int, FabricError]] = field(default_factory=list)


class Pending:
    """Rows of one batch on one NIC: `at` of them are posted, `back` of them have returned.

    Attributes:
        nbytes: the sum over the whole batch; -1: it is not known.
        lost: the rows that came back with an error.
        retransmission: the one that its row belongs to, if that is written again.
        is_piece: it is a piece of a long batch.
        tries: the number of paths on which its row was lost before.
        older: the batch of the same transfer that was queued before it.
        is_read: it is a batch of `tep.core.reads`, which queues, posts and ends it.
    """

    is_read = False
    __slots__ = (
        "at", "back", "batch", "domain", "is_piece", "lost", "nbytes", "nics", "older", "remotes",
        "retransmission", "stop", "transfer", "tries",
    )  # fmt: skip

    def __init__(
        self,
        transfer: Transfer,
        domain: int,
        batch: WriteBatch,
        remotes: Remote | Sequence[Remote],
        nics: int | Sequence[int],
    ) -> None:
        self.transfer = transfer
        self.domain = domain
        self.batch = batch
        self.remotes = remotes
        self.nics = nics
        self.at = 0
        self.back = 0
        self.stop = batch.n
        self.nbytes = -1
        self.lost = NO_ROWS
        self.retransmission: Retransmission | None = None
        self.is_piece = False
        self.tries = 0
        self.older: Queued | None = None

    def lose(self, row: int) -> None:
        """Record a row that came back with an error."""
        if not self.lost:
            self.lost = set()
        self.lost.add(row)

    def posted_rows(self) -> range:
        """The rows that a NIC has taken, returned or not."""
        return range(self.at)

    def imm(self, row: int) -> int | None:
        imm = self.batch.imm
        return imm if imm is None or isinstance(imm, int) else int(imm[row])

    def row_bytes(self, row: int) -> int:
        nbytes = self.batch.nbytes
        return nbytes if isinstance(nbytes, int) else int(nbytes[row])

    def sum_bytes(self, start: int, stop: int) -> int:
        """Add the bytes of rows start..stop."""
        nbytes = self.batch.nbytes
        if isinstance(nbytes, int):
            return nbytes * (stop - start)
        if self.nbytes >= 0 and stop - start == self.batch.n:
            return self.nbytes
        return int(np.add.reduce(nbytes[start:stop]))

    def target(self, row: int) -> tuple[Remote, int]:
        """Return the region and the remote NIC that a row goes to."""
        remote = self.remotes if isinstance(self.remotes, Remote) else self.remotes[row]
        return remote, self.nics if isinstance(self.nics, int) else self.nics[row]


@dataclass(slots=True, eq=False)
class _Race:
    """The shares of one paged write, which began together; `left` are not over.

    `ends` has those that are, and the time that each took, seconds; the first to end first.
    """

    start_s: float
    left: int
    ends: list[tuple[Pending, float]] = field(default_factory=list)


class Posting:
    """The queues of all NICs of one engine.

    Attributes:
        alive: which of the NICs can still be posted on.
        rows, nbytes: how many rows and bytes each NIC has taken so far.
        backlog: queued rows of all NICs, without reads.
        queued_reads: queued rows of reads, and immediates that wait for them; see `core.reads`.
        offered: the backlog when post() began.
        ended: transfers without a row in flight or queued; the caller empties the list, and a
            transfer may be in it twice.
        batches: batches that are not over, by ctx.
        closing: the error of retransmitted rows, since the engine is being closed; else None.
        alone: whether a lone row that is started now may be posted at once: post() follows, and
            would find nothing else.
        acks: the sums of acknowledged immediates of all paths; None: there is no failover.
    """

    __slots__ = (
        "_back", "_calm", "_ctx", "_cursor", "_in_turn_rows", "_is_offered", "_now_s", "_queues",
        "_races", "_rows_max", "_shares", "_unseen", "acks", "alive", "alone", "backlog", "batches",
        "closing", "domains", "ended", "events", "journal", "nbytes", "offered", "queued_reads",
        "routes", "rows", "why_down",
    )  # fmt: skip

    # What a failure makes of rows is decided by DomainGroup.
    lose: Callable[..., None]
    give_up: Callable[..., bool]
    finish_retransmission: Callable[..., None]
    _fail_rows: Callable[..., bool]

    def __init__(
        self,
        domains: tuple[Domain, ...],
        rows_max: int,
        journal: Journal,
        acks: Acks | None,
        now_s: Callable[[], float],
    ) -> None:
        self.domains = domains
        self.alive = [True] * len(domains)
        self.why_down = ""  # of the last NIC that raised
        self.backlog = self.offered = self.queued_reads = 0
        self.rows = [0] * len(domains)
        self.nbytes = [0] * len(domains)
        self._back = [0] * len(domains)
        self.ended: list[Transfer] = []
        self.batches: dict[int, Pending] = {}
        self._queues: list[deque[Pending]] = [deque() for _ in domains]
        self._rows_max = rows_max
        self._in_turn_rows = min(IN_TURN_ROWS, rows_max)
        self._shares = len(domains) > 1
        self.journal = journal
        events = self.events = deque[Event]()
        self.routes = Routes(self.journal, lambda path: events.append(PathShut(path)))
        self.routes.alive = self.alive
        self._now_s = now_s
        self._races: dict[int, _Race] = {}  # by ctx
        self._calm = self._unseen = 0  # races that nobody won, and writes until the next race
        self._ctx = 0
        self._cursor = 0
        self._is_offered = False  # post() has done its work of this step
        self.alone = False
        self.closing: TepError | None = None
        self.acks = acks

    @property
    def outstanding(self) -> list[int]:
        """The rows in flight, of each NIC."""
        back = self._back.copy()  # first: another thread may ask, and none is back before it is out
        return [rows - over for rows, over in zip(self.rows, back, strict=True)]

    def _is_full(self, domain: int) -> bool:
        out = self.rows[domain] - self._back[domain]
        return out >= self.domains[domain].caps.sq_depth

    # ------------------------------------------------------------------ dealing out

    def start(self, transfer: Transfer) -> None:
        """Deal a transfer's job out to the NICs' queues. Only a lone row may be posted already."""
        job = transfer.job
        remotes = job.remotes
        if True not in self.alive:
            self.lose(transfer, transfer.rows, self._down_error())
        elif isinstance(remotes, Remote):
            if job.split:
                self._deal_single(transfer, job, remotes)
            else:
                self._deal_paged(transfer, job, remotes)
        elif job.split:
            self._deal_slices(transfer, job, remotes)
        else:
            self._deal_targets(transfer, job, remotes)

    def _deal_single(self, transfer: Transfer, job: Job, remote: Remote) -> None:
        nlocal = len(self.domains)
        if job.n == 1 and job.routing is DEFAULT:
            lane, self._cursor = plan_row(nlocal, remote.nics, self._cursor)
            # As _enqueue(), without the call.
            if remote.ways_version == self.routes.version and lane in remote.ways:
                domain, nic, peer, rkey, shift = remote.ways[lane]
            else:
                domain, nic, peer, rkey, shift = self._find_way(remote, lane)
            dst, mr = job.dst, job.mr
            if shift:
                dst = shifted(dst, shift)
            assert mr is not None
            lkey = mr.keys[domain].lkey
            batch = WriteBatch(1, peer, job.src, lkey, dst, rkey, job.nbytes, job.imm, 0)
            pending = Pending(transfer, domain, batch, remote, nic)
            if not self.alone:
                self._push(pending)
                return
            # As _push(), post() and _take(), in a third of the time.
            self._ctx = ctx = self._ctx + 1
            batch.ctx = ctx
            transfer.queued = self.batches[ctx] = pending
            try:
                taken = self.domains[domain].post(batch, 0, 1)
            except (OSError, MemoryError) as error:
                self._go_on(pending, 0, [], error)
                return
            if taken != 1:
                self._go_on(pending, taken, [])
                return
            pending.at = 1
            self.rows[domain] += 1
            self.nbytes[domain] += job.total
            transfer.took = ((domain, 1, job.total),)
            return
        assert isinstance(job.src, int)
        assert isinstance(job.dst, int)
        assert isinstance(job.nbytes, int)
        self._deal_bytes(transfer, remote, job.src, job.dst, job.nbytes)

    def _deal_bytes(
        self, transfer: Transfer, remote: Remote, src: int, dst: int, nbytes: int
    ) -> None:
        nlocal, job = len(self.domains), transfer.job
        cursor = self._cursor % math.lcm(nlocal, remote.nics)
        plan = plan_single(nbytes, nlocal, remote.nics, cursor, job.routing)
        self._cursor = plan.cursor
        for share in plan.shares:
            columns = (src + share.start, dst + share.start, share.stop - share.start)
            self._enqueue(transfer, share[:2], 1, columns, job.imm, remote)

    def _deal_paged(self, transfer: Transfer, job: Job, remote: Remote) -> None:
        nlocal = len(self.domains)
        cursor = self._cursor % math.lcm(nlocal, remote.nics)
        link, pinned = remote.link, job.routing.domain
        weights = link.weights if link.weighed == self.routes.version else link.weigh()
        plan = plan_paged(job.n, nlocal, remote.nics, cursor, pinned, weights)
        self._cursor = plan.cursor
        for share in plan.shares:
            start, stop = share.start, share.stop
            columns = job.src, job.dst, job.imm
            if stop - start != job.n:  # else a view of all would cost a microsecond
                columns = cut(columns, slice(start, stop))
            src, dst, imm = columns
            self._enqueue(transfer, share[:2], stop - start, (src, dst, job.nbytes), imm, remote)
        if weights and any(is_long(cast("Pending", each)) for each in transfer.batches()):
            transfer.pace = Pace(nlocal)  # its shares differ, and a short one is to be cut as well
        if is_seen(len(plan.shares), job.total):
            self._watch(len(plan.shares))

    def _deal_slices(self, transfer: Transfer, job: Job, targets: Targets) -> None:
        """Scatter by bytes: every slice is a single write over all NICs."""
        columns = (ints(column, len(targets.remotes)) for column in (job.src, job.dst, job.nbytes))
        for remote, src, offset, nbytes in zip(targets.remotes, *columns, strict=True):
            self._deal_bytes(transfer, remote, src, remote.bases[0] + offset, nbytes)

    def _deal_targets(self, transfer: Transfer, job: Job, targets: Targets) -> None:
        """Scatter by peers, barrier: one row for each target, one batch for each local NIC."""
        cycle = math.lcm(len(self.domains), targets.cycle)
        cursor = self._cursor % cycle
        self._cursor = cursor + min(job.n, cycle)
        key = cursor, job.routing.domain
        if targets.routes_version != self.routes.version or len(targets.templates) > _TEMPLATES_MAX:
            targets.templates.clear()
            targets.routes_version = self.routes.version
        found = targets.templates.get(key)
        if found is None:
            found = targets.templates[key] = self._templates(targets, *key)
        for part in found:
            domain, rows, src = part.domain, part.rows, job.src
            if rows is not None:
                (src,) = cut((src,), rows)
            nbytes, total = part.sizes(job)
            lkey = 0 if job.mr is None else job.mr.keys[domain].lkey
            dst = part.places(job.dst)
            batch = WriteBatch(part.n, part.peer, src, lkey, dst, part.rkey, nbytes, job.imm, 0)
            pending = Pending(transfer, domain, batch, part.remotes, part.nics)
            pending.nbytes = total
            self._push(pending)

    def _watch(self, nshares: int) -> None:
        """See how long each of the last batches takes: the shares of one paged write.

        Where shares took as long as each other many times, only some writes are looked at.
        """
        if self._unseen:
            self._unseen -= 1
            return
        race = _Race(self._now_s(), nshares)
        self._races.update(dict.fromkeys(range(self._ctx - nshares + 1, self._ctx + 1), race))

    def _see(self, pending: Pending, race: _Race) -> None:
        """A share of a paged write is over; after the last one, its paths are weighed."""
        race.ends.append((pending, self._now_s() - race.start_s))
        race.left -= 1
        if race.left:
            return
        (_, first_s), (_, last_s) = race.ends[0], race.ends[-1]
        link = pending.target(0)[0].link
        if not link.weights and first_s >= AS_FAST * last_s:
            self._calm += 1
            self._unseen = _UNSEEN if self._calm > _CALM else 0
            return
        self._calm = 0
        if not any(each.stop != each.batch.n or each.lost for each, _ in race.ends):
            paths = [link.path(each.domain, each.target(0)[1]) for each, _ in race.ends]
            nbytes = [each.sum_bytes(0, each.stop) / max(took, 1e-9) for each, took in race.ends]
            link.learn(list(zip(paths, nbytes, strict=True)))

    def _templates(self, targets: Targets, cursor: int, pinned: int | None) -> list[Template]:
        nlocal = len(self.domains)
        routes: dict[int, list[tuple[int, int]]] = {}
        for share in plan_targets(targets.nics, nlocal, cursor, pinned):
            domain, nic = self.route(share.domain, targets.remotes[share.start].link, share.remote)
            routes.setdefault(domain, []).append((share.start, nic))
        return [template_of(targets, *route) for route in sorted(routes.items())]

    def _enqueue(
        self,
        transfer: Transfer,
        lane: tuple[int, int],
        n: int,
        columns: tuple[Column, Column, Column],
        imm: Column | None,
        remote: Remote,
    ) -> None:
        """Queue n rows on one lane; dst is an address for the target's NIC 0."""
        if remote.ways_version == self.routes.version and lane in remote.ways:
            domain, nic, peer, rkey, shift = remote.ways[lane]
        else:
            domain, nic, peer, rkey, shift = self._find_way(remote, lane)
        src, dst, nbytes = columns
        if shift:
            dst = shifted(dst, shift)
        mr = transfer.job.mr
        assert mr is not None
        batch = WriteBatch(n, peer, src, mr.keys[domain].lkey, dst, rkey, nbytes, imm, 0)
        self._push(Pending(transfer, domain, batch, remote, nic))

    def _find_way(self, remote: Remote, lane: tuple[int, int]) -> Way:
        """Resolve a lane to a path; the result is remembered until a route changes."""
        if remote.ways_version != self.routes.version:
            remote.ways.clear()
            remote.ways_version = self.routes.version
        link = remote.link
        domain, nic = self.route(lane[0], link, lane[1])
        shift = remote.bases[nic] - remote.bases[0]
        way = Way(domain, nic, link.peer(domain, nic), remote.rkeys[nic], shift)
        remote.ways[lane] = way
        return way

    def _push(self, pending: Pending) -> None:
        batch = pending.batch
        self._ctx = ctx = self._ctx + 1
        # As _enter(), without the call.
        batch.ctx = ctx
        self.batches[ctx] = pending
        transfer = pending.transfer
        pending.older = transfer.queued
        transfer.queued = pending
        self._queues[pending.domain].append(pending)
        self.backlog += batch.n

    def _enter(self, pending: Pending, ctx: int) -> None:
        pending.batch.ctx = ctx
        self.batches[ctx] = pending
        pending.older, pending.transfer.queued = pending.transfer.queued, pending

    def enter(self, pending: Pending) -> None:
        """Know a batch of reads, which `tep.core.reads` queues and posts."""
        self._ctx += 1
        self._enter(pending, self._ctx)
        self.queued_reads += pending.batch.n

    def enqueue_imm(self, transfer: Transfer, remote: Remote, imm: int | None) -> None:
        """Queue one empty row that carries an immediate. Raises FabricError if there is no way."""
        self.first_alive()
        lane, self._cursor = plan_row(len(self.domains), remote.nics, self._cursor)
        self._enqueue(transfer, lane, 1, (0, remote.bases[0], 0), imm, remote)

    def route(self, domain: int, link: Link, nic: int) -> tuple[int, int]:
        """Choose the path of a lane: see Link.route. Raises FabricError if all are fenced off."""
        found = link.route(self.alive, domain, nic)
        if link.is_fenced(*found):
            name = link.addr.name
            text = f"every path to {name} is fenced off; a path is opened again when {name} answers"
            raise FabricError(text, code="UNREACHABLE", peer=name)
        return found

    def _go_on(
        self,
        pending: Pending,
        taken: int,
        rest: list[Pending],
        error: OSError | MemoryError | None = None,
    ) -> None:
        """A NIC did not take all of a batch that was in no queue: go on as post() would."""
        domain = pending.domain
        queue = self._queues[domain]
        is_first = not taken and (error is not None or self._is_full(domain))
        for waiting in (pending, *rest) if is_first else (*rest, pending):
            self._queues[waiting.domain].append(waiting)
        self.backlog += pending.batch.n + sum(waiting.batch.n for waiting in rest)
        if error is not None:
            self.give_up(domain, error)
        else:
            if taken:
                self._take(pending, domain, taken)
            if not self._is_full(domain):
                self._post_on(domain, queue, refused=int(not taken))
        self.post(domain + 1)
        self._is_offered = self.backlog > 0

    # ------------------------------------------------------------------ posting

    def post(self, first: int = 0) -> bool:
        """Offer each NIC from `first` on its queued batches in turn; True if one took a row."""
        if first == 0 and self._is_offered:  # by start_ready(), in this step
            self._is_offered = False
            return False
        work = False
        self.offered = self.backlog
        for domain, queue in enumerate(self._queues):
            if queue and domain >= first:
                work |= self._post_on(domain, queue)
        # A NIC is full. If another one has nothing left to do, the links are not equally fast.
        if self.backlog >= SHARED_ROWS and not all(self._queues):
            work |= self._share_backlog()
        return work

    def _post_on(self, domain: int, queue: deque[Pending], refused: int = 0) -> bool:
        """Offer a NIC its queue; of the last `refused` batches of it nothing was taken just now."""
        nic, work = self.domains[domain], False
        for _ in range(TURNS_MAX):
            if refused >= len(queue):
                break
            pending = queue[0]
            start, stop = pending.at, pending.stop
            if start == stop:  # its rest was cut off while it was queued
                while queue and queue[0].at == queue[0].stop:
                    queue.popleft()
                if not queue:
                    break
                pending = queue[0]
                start, stop = pending.at, pending.stop
            batch = pending.batch
            if self._shares and batch.n > SHARED_ROWS and is_long(pending):
                if not self._cut_piece(pending, domain, queue):
                    refused += 1
                    queue.rotate(-1)
                    continue
                pending = queue[0]
                batch, start, stop = pending.batch, pending.at, pending.stop
            if len(queue) > 1 and stop - start > self._in_turn_rows:
                most = self._in_turn_rows if _is_in_turn(pending, queue) else self._rows_max
                stop = min(stop, start + most)
            try:
                taken = nic.post(batch, start, stop)
            except (OSError, MemoryError) as error:
                self.give_up(domain, error)
                return True  # no NIC has news of it: turn again
            assert 0 <= taken <= stop - start, (taken, start, stop)
            if taken == 0:
                if self._is_full(domain):
                    break
                # The NIC is not full: this peer's rows must wait, and others need not.
                refused += 1
                queue.rotate(-1)
                continue
            refused, work = 0, True
            self._take(pending, domain, taken)
            if pending.at < pending.stop:
                queue.rotate(-1)
                if self._is_full(domain):
                    break
                continue
            queue.popleft()
        return work

    def _take(self, pending: Pending, domain: int, taken: int) -> None:
        at = pending.at + taken
        nbytes = pending.batch.nbytes
        if not isinstance(nbytes, int):
            nbytes = pending.sum_bytes(pending.at, at)
        elif taken > 1:
            nbytes *= taken
        pending.at = at
        self.backlog -= taken
        self.rows[domain] += taken
        self.nbytes[domain] += nbytes
        transfer = pending.transfer
        if transfer.took:
            transfer.count_posted(domain, taken, nbytes)
        else:
            transfer.took = ((domain, taken, nbytes),)

    # ------------------------------------------------------------------ sharing long batches
    #
    # Queued rows can move to another NIC, posted rows cannot. So a long batch is posted in pieces,
    # and a NIC that has nothing left takes half of the rows queued at another. Pieces grow while
    # NICs keep up with each other; a NIC that falls behind gets small ones. Rows are not divided,
    # so that the number of immediates depends on the shape alone. A single write is one row for
    # each NIC, and keeps its equal shards.

    def _share_backlog(self) -> bool:
        """Give a NIC that has nothing to post half of the largest batch queued at another."""
        idle = [d for d, queue in enumerate(self._queues) if not queue and self.alive[d]]
        first = (p for queue in self._queues for p in itertools.islice(queue, _LOOKED_AT))
        found = max(first, key=_waiting)
        rows = (found.stop - found.at) // 2
        if not idle or rows == 0 or _waiting(found) <= PIECE_BYTES:
            return False
        remote, _ = found.target(0)
        domain = idle[0]
        here, nic = remote.link.route(self.alive, domain, domain % remote.nics)
        if here != domain:
            return False  # it has no path to this peer
        try:
            moved = on_lanes(found, found.stop - rows, found.stop, domain, [nic])
        except TepError:  # it cannot connect; the rows stay where they are
            return False
        found.transfer.pace = found.transfer.pace or Pace(len(self.domains))
        found.stop -= rows
        self.backlog -= rows
        self._push(moved)
        return True

    def _cut_piece(self, pending: Pending, domain: int, queue: deque[Pending]) -> bool:
        """Put a piece of a long batch in front of the queue, and the rest of the batch at the end.

        False: the NIC has enough pieces for now.
        """
        nbytes = pending.batch.nbytes
        assert isinstance(nbytes, int)
        transfer = pending.transfer
        pace = transfer.pace = transfer.pace or Pace(len(self.domains))
        last = pace.last[domain]
        if pace.is_full(domain) or (last is not None and last.at < last.stop):  # it is still queued
            return False
        # Pieces become smaller and smaller, so that giving the last one to the wrong NIC costs
        # little, and there are few of them. The last piece is a batch as well, because a NIC may
        # wait for its end.
        part = self.offered // (pace.part[domain] * len(self.domains))
        part = max(1, PIECE_BYTES // nbytes, transfer.rows // _PIECES_MAX, part)
        rows = min(part, pending.stop - pending.at)
        piece = on_lanes(pending, pending.stop - rows, pending.stop, domain, [pending.target(0)[1]])
        piece.is_piece = True
        piece.older, transfer.queued = transfer.queued, piece
        pace.last[domain] = piece
        pace.out[domain] += 1
        pending.stop -= rows
        self._ctx = piece.batch.ctx = self._ctx + 1
        self.batches[self._ctx] = piece
        if pending.stop > pending.at:
            queue.rotate(-1)
        else:
            queue.popleft()
            self.cut(pending)
        queue.appendleft(piece)
        return True

    # ------------------------------------------------------------------ completing

    def finish_rows(self, domain: int, ctx: int, count: int, status: int, row: int) -> None:
        """Take back `count` rows of batch `ctx` from a NIC."""
        pending = self.batches[ctx]
        assert pending.domain == domain, (pending.domain, domain)
        pending.back = back = pending.back + count
        assert back <= pending.at, f"NIC {domain} returned more rows of batch {ctx} than it took"
        self._back[domain] += count
        transfer = pending.transfer
        over = back == pending.stop  # else the batch is over when its rest is cut off
        held = status != _OK and self._fail_rows(pending, count, status, row)
        if not held:
            transfer.left -= count
        if over:
            if self.acks is None and not (pending.is_piece or self._races):  # as _forget()
                del self.batches[ctx]
            else:
                self._forget(pending)
            if pending.retransmission is not None and not held:
                self.finish_retransmission(pending.retransmission, missed=status != _OK)
        if transfer.left == 0:
            self.ended.append(transfer)

    def drop_queued(self, transfer: Transfer) -> int:
        """Remove a transfer's queued rows from the queues; return how many there were."""
        mine = []
        pending, transfer.queued = transfer.queued, None
        while pending is not None:
            assert isinstance(pending, Pending)
            if pending.at < pending.stop:
                mine.append(pending)
            pending = pending.older
        dropped = sum(pending.stop - pending.at for pending in mine)
        transfer.dropped += dropped  # before cut(), because finish_retransmission() looks at it
        for pending in reversed(mine):
            self.cut(pending)
        transfer.left -= dropped
        if not self.backlog:  # all batches that are still in the queues have ended
            for queue in self._queues:
                queue.clear()
        return dropped

    def cut(self, pending: Pending) -> int:
        """End a batch after its posted rows; return how many rows were cut off.

        It is removed from its queue when it becomes the first there.
        """
        rest = pending.stop - pending.at
        pending.stop = pending.at
        if pending.is_read:
            self.queued_reads -= rest
        else:
            self.backlog -= rest
        if pending.back == pending.stop:
            self._forget(pending)
            if pending.retransmission is not None:
                self.finish_retransmission(pending.retransmission, missed=True)
        return rest

    def _forget(self, pending: Pending) -> None:
        ctx = pending.batch.ctx
        del self.batches[ctx]
        if self._races and (race := self._races.pop(ctx, None)) is not None:
            self._see(pending, race)
        if self.acks is not None:
            self.acks.add(pending)
        if pending.is_piece and (pace := pending.transfer.pace) is not None:
            pace.end(pending.domain, pending.back)

    def first_alive(self) -> int:
        """Return the first NIC that can be posted on. Raises FabricError if there is none."""
        if not any(self.alive):
            raise self._down_error()
        return self.alive.index(True)

    def _down_error(self) -> FabricError:
        names = ", ".join(domain.caps.nic for domain in self.domains)
        text = f"no NIC of this engine is alive ({names}){self.why_down}; open it anew"
        return FabricError(text, code="NIC_DOWN")


def _is_in_turn(pending: Pending, queue: deque[Pending]) -> bool:
    """Whether a batch stands beside one of its own transfer that goes to another NIC of the peer.

    Posted one behind the other, these would keep first the one and then the other busy; where that
    side is the slower, the transfer takes longer by the time for which one of its NICs is idle.
    """
    for beside in (queue[1], queue[-1]):
        if beside.transfer is pending.transfer and beside.nics != pending.nics:
            return not pending.is_piece
    return False


def _waiting(pending: Pending) -> int:
    """Count the queued bytes of a batch that another NIC could post; 0: it cannot be shared."""
    nbytes = pending.batch.nbytes
    if not isinstance(nbytes, int) or pending.transfer.job.routing.domain is not None:
        return 0
    return 0 if varies(pending) else nbytes * (pending.stop - pending.at)


def is_seen(nshares: int, nbytes: int) -> bool:
    """Whether the pace of so many shares of a paged write is to be seen."""
    return nbytes >= SEEN_BYTES * nshares > SEEN_BYTES


def is_long(pending: Pending) -> bool:
    """Whether a batch is posted in pieces, because it is long or the rest of a long one."""
    if pending.is_piece:
        return False
    nbytes = _waiting(pending)
    return nbytes > LONG_BYTES or (nbytes > 0 and pending.transfer.pace is not None)


def varies(pending: Pending) -> bool:
    """Whether its rows go to different regions."""
    return not isinstance(pending.remotes, Remote)


def ints(column: Column, n: int) -> list[int]:
    """List a column of n rows as plain ints."""
    return [column] * n if isinstance(column, int) else column.tolist()


def cut(columns: Iterable[Column | None], rows: slice | npt.NDArray[np.int64]) -> Any:
    """Take some rows of each column."""
    return [c if c is None or isinstance(c, int) else c[rows] for c in columns]


def as_slice(rows: list[int]) -> slice | npt.NDArray[np.int64]:
    """Return consecutive row numbers as a slice, which costs no copy; others as an array."""
    if rows == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return np.array(rows, np.int64)


def template_of(targets: Targets, domain: int, mine: Sequence[tuple[int, int]]) -> Template:
    """Return the columns that rows of one NIC share; `mine` are (target, its NIC) pairs."""
    whole = len(mine) == len(targets.remotes)
    remotes = targets.remotes if whole else [targets.remotes[k] for k, _ in mine]
    nics = [nic for _, nic in mine]
    lanes_of = list(zip(remotes, nics, strict=True))
    columns = (
        [remote.link.peer(domain, nic) for remote, nic in lanes_of],
        [remote.rkeys[nic] for remote, nic in lanes_of],
        [remote.bases[nic] for remote, nic in lanes_of],
    )
    peer, rkey, base = (np.array(column, np.uint64) for column in columns)
    rows = None if whole else as_slice([k for k, _ in mine])
    return Template(domain, remotes, nics, (peer, rkey, base), rows)


def on_lanes(old: Pending, start: int, stop: int, domain: int, nics: Sequence[int]) -> Pending:
    """Make a batch on our NIC `domain` of rows start..stop of another, which is not changed.

    `nics` are the peers' NICs: of each row where the rows go to different regions, else one for
    all.
    """
    batch, mr = old.batch, old.transfer.job.mr
    lkey = 0 if mr is None else mr.keys[domain].lkey
    rows, n = slice(start, stop), stop - start
    src, dst, nbytes, imm = cut((batch.src, batch.dst, batch.nbytes, batch.imm), rows)
    if isinstance(old.remotes, Remote):
        assert isinstance(old.nics, int)
        remote, nic = old.remotes, nics[0]
        dst = shifted(dst, remote.bases[nic] - remote.bases[old.nics])
        peer = remote.link.peer(domain, nic)
        fresh = WriteBatch(n, peer, src, lkey, dst, remote.rkeys[nic], nbytes, imm, 0)
        return Pending(old.transfer, domain, fresh, remote, nic)
    targets = [old.target(row) for row in range(start, stop)]
    dsts = ints(dst, n)
    moved = [
        at - remote.bases[was] + remote.bases[now]
        for at, (remote, was), now in zip(dsts, targets, nics, strict=True)
    ]
    lanes = [(remote, nic) for (remote, _), nic in zip(targets, nics, strict=True)]
    peers = [remote.link.peer(domain, nic) for remote, nic in lanes]
    rkeys = [remote.rkeys[nic] for remote, nic in lanes]
    peer_column, dst_column, rkey_column = (
        np.array(column, np.uint64) for column in (peers, moved, rkeys)
    )
    fresh = WriteBatch(n, peer_column, src, lkey, dst_column, rkey_column, nbytes, imm, 0)
    return Pending(old.transfer, domain, fresh, [remote for remote, _ in lanes], list(nics))
