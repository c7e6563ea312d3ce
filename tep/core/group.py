"""The NICs of one device as one: deals jobs out to them, keeps their queues, joins completions.

Rule 1: only this file posts rows. Rule 2: a row is posted on the NIC its local key is from, with
the remote key of the NIC it goes to; `route` chooses the two together. Rule 3: a posted row is
never posted again as it was. Rows that never left may move to another NIC; posted rows whose NIC
died are kept in `losses`, and `tep.control.failover` finds out what became of them. Rule 4: a
transfer settles only when no row of it is posted or kept. Rule 5: a peer always has a NIC that
counts as alive. Rule 6: the group calls nobody back; what others should know is in `events`.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Final

from tep.backends.base import Column, Domain, Status, WriteBatch
from tep.core.events import Event, PeerNicDown, PeerRestarted
from tep.core.path import FarEnds, Link, Path, PathEvent
from tep.core.pending import (
    Acks,
    Loss,
    LostRow,
    Pending,
    Retransmission,
    goes_to,
    ints,
    on_lanes,
    pick,
    row_error,
    shifted,
    template_of,
    varies,
)
from tep.core.plan import lanes, plan_paged, plan_row, plan_single, plan_targets
from tep.core.quarantine import MAY_LAND
from tep.core.region import Job, Remote, Targets, Template
from tep.core.requests import DEFAULT, shares_of
from tep.core.transfer import Pace, Transfer
from tep.errors import FabricError, TepError

__all__ = ["LONG_BYTES", "PIECE_BYTES", "DomainGroup", "not_made_good"]

_log = logging.getLogger("tep")

_TURNS_MAX: Final = 64
"""Batches tried on one NIC in one step: a bound, so that posting cannot starve polling."""

_TEMPLATES_MAX: Final = 256
"""Cursors that one set of targets remembers its columns for; odd mixes of NIC counts have more."""

_SHARED_ROWS: Final = 4
"""Fewer rows are not worth a look whether another NIC could take some."""

PIECE_BYTES: Final = 2 << 20
"""No piece of a long batch is smaller: 40 us of a link of 400 Gb/s."""

_PIECES_MAX: Final = 64
"""Nor is it a smaller part of its transfer: each piece costs some time of the CPU."""

LONG_BYTES: Final = 32 << 20
"""A batch with more than this is posted in pieces, which leaves time to think again between them:
0.7 ms of such a link.
"""


_LOOKED_AT: Final = 64
"""Batches of a queue that are looked at for rows to give away: a look must not take longer the more
there are.
"""

_OK: Final = int(Status.OK)

_NEVER_LANDED: Final = {Status.LOCAL_KEY, Status.REMOTE_KEY, Status.REMOTE_RANGE, Status.LENGTH}
"""Of such a row it is known that it made no immediate (C11)."""


class DomainGroup:
    """All NICs of one engine.

    Attributes:
        domains: the NICs, in order.
        alive: which of them can still be posted on.
        backlog: rows accepted from the user and not yet by a NIC.
        offered: the same when post() began.
        outstanding: rows that each NIC has and has not returned.
        rows, nbytes: what each NIC has taken in all.
        ended: transfers that no NIC holds a row of any more, since the caller last emptied this
            list; one may stand there twice.
        batches: what is on its way, by ctx.
        in_doubt: transfers of which rows ended that may still land.
        failover: whether rows whose end is unknown are kept, to be written again elsewhere.
        why_not: why the NICs cannot have that; None: they can, or it is not wanted.
        closing: what rows written again fail with, since the engine is being closed.
        losses: rows that are kept, path by path, in the order of their loss.
        acks: sums up acknowledged immediates, path by path; None: there is no failover.
        events: what peers were found to be, for whoever handles it.
        far_ends: what is known of paths by address.
    """

    def __init__(
        self,
        domains: tuple[Domain, ...],
        rows_max: int,
        *,
        failover: bool = False,
        why_not: str | None = None,
    ) -> None:
        self.domains = domains
        self.alive = [True] * len(domains)
        self.backlog = self.offered = 0
        self.outstanding = [0] * len(domains)
        self.rows = [0] * len(domains)
        self.nbytes = [0] * len(domains)
        self.ended: list[Transfer] = []
        self.batches: dict[int, Pending] = {}
        self._queues: list[deque[Pending]] = [deque() for _ in domains]
        self._rows_max = rows_max
        self._shares = len(domains) > 1
        self.in_doubt = 0
        self._routes_version = 0
        self._ctx = 0
        self._cursor = 0
        self.failover = failover
        self.why_not = why_not
        self.closing: TepError | None = None
        self.losses: list[Loss] = []
        self.acks = Acks() if failover else None
        self.events: list[Event] = []
        self.far_ends = FarEnds()

    # ------------------------------------------------------------------ dealing out

    def start(self, transfer: Transfer) -> None:
        """Deal a transfer's job out to the NICs' queues. Nothing is posted yet."""
        job = transfer.job
        if not any(self.alive):
            self.lose(transfer, transfer.rows, self._down_error())
        elif isinstance(job.remotes, Remote):
            if job.split:
                self._deal_single(transfer, job, job.remotes)
            else:
                self._deal_paged(transfer, job, job.remotes)
        elif job.split:
            self._deal_slices(transfer, job, job.remotes)
        else:
            self._deal_targets(transfer, job, job.remotes)

    def _deal_single(self, transfer: Transfer, job: Job, remote: Remote) -> None:
        nlocal = len(self.domains)
        if job.n == 1 and job.routing is DEFAULT:
            lane, self._cursor = plan_row(nlocal, remote.nics, self._cursor)
            self._enqueue(transfer, lane, 1, (job.src, job.dst, job.nbytes), job.imm, remote)
            return
        assert isinstance(job.src, int)
        assert isinstance(job.dst, int)
        assert isinstance(job.nbytes, int)
        cursor = self._cursor % lanes(nlocal, remote.nics)
        plan = plan_single(job.nbytes, nlocal, remote.nics, cursor, job.routing)
        self._cursor = plan.cursor
        for share in plan.shares:
            columns = (job.src + share.start, job.dst + share.start, share.stop - share.start)
            self._enqueue(transfer, share[:2], 1, columns, job.imm, remote)

    def _deal_paged(self, transfer: Transfer, job: Job, remote: Remote) -> None:
        nlocal = len(self.domains)
        cursor = self._cursor % lanes(nlocal, remote.nics)
        plan = plan_paged(job.n, nlocal, remote.nics, cursor, job.routing.domain)
        self._cursor = plan.cursor
        src, dst, imm = job.src, job.dst, job.imm
        if len(plan.shares) == 1 or isinstance(src, int) or isinstance(dst, int):
            lane = plan.shares[0][:2]
            self._enqueue(transfer, lane, job.n, (src, dst, job.nbytes), imm, remote)
            return
        for share in plan.shares:
            part = slice(share.start, share.stop)
            imms = imm if imm is None or isinstance(imm, int) else imm[part]
            columns = (src[part], dst[part], job.nbytes)
            self._enqueue(transfer, share[:2], share.stop - share.start, columns, imms, remote)

    def _deal_slices(self, transfer: Transfer, job: Job, targets: Targets) -> None:
        """Scatter by bytes: every slice is a single write of its own over all NICs."""
        nlocal = len(self.domains)
        columns = (ints(column, len(targets.remotes)) for column in (job.src, job.dst, job.nbytes))
        for remote, src, offset, nbytes in zip(targets.remotes, *columns, strict=True):
            dst = remote.bases[0] + offset
            cursor = self._cursor % lanes(nlocal, remote.nics)
            shares, self._cursor = shares_of(job, remote.nics, nbytes, nlocal, cursor)
            for share in shares:
                part = (src + share.start, dst + share.start, share.stop - share.start)
                self._enqueue(transfer, share[:2], 1, part, job.imm, remote)

    def _deal_targets(self, transfer: Transfer, job: Job, targets: Targets) -> None:
        """Scatter by peers, barrier: one row a target, one batch a local NIC."""
        cycle = math.lcm(len(self.domains), targets.cycle)
        cursor = self._cursor % cycle
        self._cursor = cursor + min(job.n, cycle)
        key = cursor, job.routing.domain
        if (
            targets.routes_version != self._routes_version
            or len(targets.templates) > _TEMPLATES_MAX
        ):
            targets.templates.clear()
            targets.routes_version = self._routes_version
        found = targets.templates.get(key)
        if found is None:
            found = targets.templates[key] = self._templates(targets, *key)
        for part in found:
            domain, rows, src, nbytes = part.domain, part.rows, job.src, job.nbytes
            if rows is not None:
                src, nbytes = pick(src, rows), pick(nbytes, rows)
            lkey = 0 if job.mr is None else job.mr.keys[domain].lkey
            dst = part.places(job.dst)
            batch = WriteBatch(part.n, part.peer, src, lkey, dst, part.rkey, nbytes, job.imm, 0)
            pending = Pending(transfer, domain, batch, part.remotes, part.nics)
            if rows is None:
                pending.nbytes = job.total
            elif job.lengths and isinstance(rows, slice):
                pending.nbytes = sum(job.lengths[rows])
            self._push(pending)

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
        domain, nic = lane
        link = remote.link
        usable = self.alive[domain] and link.alive[nic]
        if not usable or (link.closed and not link.is_up(domain, nic)):
            domain, nic = self.route(domain, link, nic)
        src, dst, nbytes = columns
        if nic:
            dst = shifted(dst, remote.bases[nic] - remote.bases[0])
        mr = transfer.job.mr
        assert mr is not None
        peer, lkey, rkey = link.peer(domain, nic), mr.keys[domain].lkey, remote.rkeys[nic]
        batch = WriteBatch(n, peer, src, lkey, dst, rkey, nbytes, imm, 0)
        self._push(Pending(transfer, domain, batch, remote, nic))

    def _push(self, pending: Pending) -> None:
        batch = pending.batch
        self._ctx = batch.ctx = ctx = self._ctx + 1
        self.batches[ctx] = pending
        transfer = pending.transfer
        pending.older, transfer.queued = transfer.queued, pending
        self._queues[pending.domain].append(pending)
        self.backlog += batch.n

    def route(self, domain: int, link: Link, nic: int) -> tuple[int, int]:
        """Where a lane's rows go today; see Link.route. Raises FabricError if nothing lands."""
        found = link.route(self.alive, domain, nic)
        if link.closed and link.is_fenced(*found):
            name = link.addr.name
            text = f"every path to {name} is fenced off; one is opened again when it answers"
            raise FabricError(text, code="UNREACHABLE", peer=name)
        return found

    # ------------------------------------------------------------------ posting

    def post(self) -> bool:
        """Offer each NIC what is queued for it, in turns; True if any took a row."""
        work = False
        self.offered = self.backlog
        for domain, queue in enumerate(self._queues):
            if queue:
                work |= self._post_on(domain, queue)
        # Somebody is full. Where another has nothing left to do, the links are not equally fast.
        if self.backlog >= _SHARED_ROWS and not all(self._queues):
            work |= self._share_backlog()
        return work

    def _post_on(self, domain: int, queue: deque[Pending]) -> bool:
        nic = self.domains[domain]
        before = self.outstanding[domain]
        refused = 0  # batches in a row of which nothing was taken
        for _ in range(_TURNS_MAX):
            if refused >= len(queue):
                break
            pending = queue[0]
            if pending.at == pending.stop:  # cut off while it stood here
                _drop_ended(queue)
                if not queue:
                    break
                pending = queue[0]
            if self._shares and pending.batch.n > _SHARED_ROWS and _is_long(pending):
                if not self._cut_piece(pending, domain, queue):
                    refused += 1
                    queue.rotate(-1)
                    continue
                pending = queue[0]
            start = pending.at
            stop = pending.stop
            if len(queue) > 1 and stop - start > self._rows_max:
                stop = start + self._rows_max
            try:
                taken = nic.post(pending.batch, start, stop)
            except (OSError, MemoryError) as error:
                return self.give_up(domain, error)
            assert 0 <= taken <= stop - start, (taken, start, stop)
            if taken == 0:
                if self.outstanding[domain] >= nic.caps.sq_depth:
                    break
                # Not full: one peer holds its own rows up, and nobody else's.
                refused += 1
                queue.rotate(-1)
                continue
            refused = 0
            pending.at = start + taken
            self.outstanding[domain] += taken
            self.backlog -= taken
            nbytes = pending.sum_bytes(start, pending.at)
            self.rows[domain] += taken
            self.nbytes[domain] += nbytes
            pending.transfer.count_posted(domain, taken, nbytes)
            if pending.at == pending.stop:
                queue.popleft()
            else:
                queue.rotate(-1)
        return self.outstanding[domain] != before

    # ------------------------------------------------------------------ sharing long batches
    #
    # What is posted cannot move any more, what is queued can: a long batch is posted in pieces,
    # and a NIC that has nothing left takes half of what is queued at another. Pieces grow while
    # NICs keep up with each other; one that falls behind gets small ones. No time is measured,
    # and nothing is remembered beyond a transfer: a link that recovers has its full share at
    # once. Rows stay whole, so that the number of immediates depends on the shape alone. A single
    # write is no batch of rows, and keeps its equal shards.

    def _share_backlog(self) -> bool:
        """Give a NIC that has nothing to post half of what waits longest at another."""
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
        except TepError:  # it cannot connect; the rows wait where they are
            return False
        self._pace(found.transfer)
        found.stop -= rows
        self.backlog -= rows
        self._push(moved)
        return True

    def _cut_piece(self, pending: Pending, domain: int, queue: deque[Pending]) -> bool:
        """Put a piece of a long batch in front of the queue, and what is left of it at the end.

        Returns:
            False: the NIC has enough for now, and will say when a piece is through.
        """
        nbytes = pending.batch.nbytes
        assert isinstance(nbytes, int)
        transfer = pending.transfer
        pace = self._pace(transfer)
        last = pace.last[domain]
        if pace.is_full(domain) or (last is not None and last.at < last.stop):  # it is queued still
            return False
        # Ever smaller pieces: a wrong choice of the last one costs little, and so does the
        # number of pieces. The last one is a batch of its own as well: a NIC may wait for its end.
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
            self._cut(pending)
        queue.appendleft(piece)
        return True

    def _pace(self, transfer: Transfer) -> Pace:
        if transfer.pace is None:
            transfer.pace = Pace(len(self.domains))
        return transfer.pace

    # ------------------------------------------------------------------ completing

    def finish_rows(self, domain: int, ctx: int, count: int, status: int, row: int) -> None:
        """Take back `count` rows of batch `ctx` from a NIC."""
        pending = self.batches[ctx]
        assert pending.domain == domain, (pending.domain, domain)
        pending.back += count
        assert pending.back <= pending.at, (
            f"NIC {domain} returned more rows of batch {ctx} than it took"
        )
        self.outstanding[domain] -= count
        transfer = pending.transfer
        over = pending.back == pending.stop  # else the batch ends where its rest is cut off
        held = status != _OK and self._fail_rows(pending, count, status, row)
        if not held:
            transfer.left -= count
        if over:
            self._forget(pending)
            if pending.retransmission is not None and not held:
                self.finish_retransmission(pending.retransmission)
        if transfer.left == 0:
            self.ended.append(transfer)

    def _fail_rows(self, pending: Pending, count: int, status: int, row: int) -> bool:
        """Account for rows that did not end well; True: they are kept, to be written again."""
        transfer = pending.transfer
        row = min(row, pending.batch.n - 1)
        remote, nic = pending.target(row)
        pending.lose(row)
        lost = False  # whether it is the way that failed, and another is there
        if status in (Status.NIC_DOWN, Status.FLUSHED) and transfer.job.mr is not None:
            transfer.job.mr.readers |= {pending.domain}
        if status == Status.NIC_DOWN:
            self.nic_down(pending.domain)
            lost = any(self.alive)
        elif status == Status.UNREACHABLE:
            others = [i for i, up in enumerate(self.alive) if up and i != pending.domain]
            lost = self.mark_down(remote.link, nic) or remote.link.has_way(others)
        elif status == Status.STALE_PEER:
            self.events.append(PeerRestarted(remote.link))
        elif status == Status.FLUSHED:
            far = self.far_ends.get(pending.domain, remote.link.addr.domains[nic])
            if far is not None and far.unheard:
                self.mark_down(remote.link, nic)  # a control message took the rows along
            lost = not remote.link.is_up(pending.domain, nic)
            lost = lost or not (self.alive[pending.domain] and remote.link.alive[nic])
        known = transfer.failure
        error = row_error(self.domains[pending.domain], pending, row, status)
        final = self._keep(pending, row, error) if lost else error
        if final is None:
            return True
        if status in MAY_LAND:
            self.doubt(pending, row, Status(status).name)
        if self.acks is not None and status not in _NEVER_LANDED:
            self.acks.doubt(pending, row)
        transfer.failed_rows += count
        if known is None:
            self.drop_queued(transfer)
        known = transfer.failure
        if known is None or (isinstance(known, FabricError) and known.code == Status.FLUSHED.name):
            transfer.failure = final
        return False

    def _keep(self, pending: Pending, row: int, error: FabricError) -> FabricError | None:
        """Keep a row whose end is unknown, or say with which error it fails."""
        transfer = pending.transfer
        if not self.failover or transfer.failure is not None:
            return error if self.why_not is None else not_made_good(error, self.why_not)
        remote, nic = pending.target(row)
        if pending.tries >= len(self.domains) * len(remote.link.alive):
            return not_made_good(error, f"it was lost on {pending.tries} paths before")
        path = remote.link.path(pending.domain, nic)
        loss = next((loss for loss in path.losses if not loss.asked), None)
        if loss is None:
            loss = Loss(path)
            path.losses.append(loss)
            self.losses.append(loss)
            path.to(PathEvent.LOST)
        assert isinstance(loss, Loss)
        loss.rows.append(LostRow(pending, row, error))
        transfer.held += 1
        return None

    def doubt(self, pending: Pending, row: int, code: str) -> None:
        """Note a row that ended, and whose bytes may land all the same."""
        if pending.row_bytes(row):
            remote, nic = pending.target(row)
            self.in_doubt += pending.transfer.add_doubt(remote, pending.domain, nic, code)

    def mark_down(self, link: Link, nic: int) -> bool:
        """A peer's NIC does not answer: what is queued for it and never left goes to its others.

        Returns:
            Whether it has others.
        """
        if not link.alive[nic]:
            return True
        link.alive[nic] = False
        self._routes_version += 1
        has_others = any(link.alive)
        if has_others:
            self._reroute(lambda waiting: goes_to(waiting, link, nic))
        else:
            # All its NICs failed once. It may be back: try as planned, the rows will tell.
            link.alive[:] = [True] * len(link.alive)
        self.events.append(PeerNicDown(link, nic))
        return has_others

    def mark_up(self, link: Link, alive: list[bool]) -> None:
        """Use these NICs of a peer from now on: one that was marked down answers again."""
        assert any(alive), link.addr
        link.alive[:] = alive
        self._routes_version += 1

    def reopen(self, path: Path) -> None:
        """Use a path again: the peer has lifted its fence."""
        path.to(PathEvent.OPENED)
        self._routes_version += 1

    def drop_queued(self, transfer: Transfer) -> int:
        """Take a transfer's rows that no NIC has out of the queues; return how many."""
        mine = []
        pending, transfer.queued = transfer.queued, None
        while pending is not None:
            assert isinstance(pending, Pending)
            if pending.at < pending.stop:
                mine.append(pending)
            pending = pending.older
        dropped = sum(pending.stop - pending.at for pending in mine)
        transfer.dropped += dropped  # first: what a retransmission does next depends on it
        for pending in reversed(mine):
            self._cut(pending)
        transfer.left -= dropped
        if not self.backlog:  # whatever stands there has ended
            for queue in self._queues:
                queue.clear()
        return dropped

    def _cut(self, pending: Pending) -> int:
        """End a batch at what is posted of it; return the rows cut off.

        It leaves its queue when it is the first there.
        """
        rest = pending.stop - pending.at
        pending.stop = pending.at
        self.backlog -= rest
        if pending.back == pending.stop:
            self._forget(pending)
            if pending.retransmission is not None:
                self.finish_retransmission(pending.retransmission)
        return rest

    def _forget(self, pending: Pending) -> None:
        """A batch is over."""
        del self.batches[pending.batch.ctx]
        if self.acks is not None and pending.batch.imm is not None:
            self.acks.add(pending)
        if pending.is_piece and (pace := pending.transfer.pace) is not None:
            pace.end(pending.domain, pending.back)

    def doubt_all(self) -> None:
        """Nothing comes back any more: what is posted may land, or not."""
        for pending in list(self.batches.values()):
            if pending.at > pending.back:
                one = isinstance(pending.nics, int)  # all rows go to one region
                for row in (0,) if one else pending.posted_rows():
                    self.doubt(pending, row, "UNKNOWN")

    def lose(self, transfer: Transfer, rows: int, error: TepError) -> None:
        """Fail rows that no NIC will ever take."""
        transfer.failed_rows += rows
        transfer.failure = transfer.failure or error
        transfer.left -= rows
        self.drop_queued(transfer)
        if transfer.left == 0:
            self.ended.append(transfer)

    # ------------------------------------------------------------------ failing over

    def nic_down(self, domain: int) -> None:
        """A local NIC is gone: what is queued for it and never left moves to the NICs that live."""
        if self.alive[domain]:
            self.alive[domain] = False
            self._routes_version += 1
            self._reroute(lambda pending: pending.domain == domain)

    def give_up(self, domain: int, error: OSError | MemoryError) -> bool:
        """A NIC's post() or poll() raised, e.g. for want of descriptors: it is down.

        Returns False if a signal interrupted it, and it is to be called again.
        """
        if isinstance(error, OSError) and error.errno == errno.EINTR:
            return False
        if self.alive[domain]:
            _log.error("NIC %s is down: %s", self.domains[domain].caps.nic, error, exc_info=error)
            self.nic_down(domain)
        return True

    def lost(self, domain: int) -> None:
        """A NIC will never say how its rows fared."""
        for ctx, pending in tuple(self.batches.items()):
            out = pending.at - pending.back
            if pending.domain == domain and out:
                self.finish_rows(domain, ctx, out, Status.NIC_DOWN, pending.back)

    def first_alive(self) -> int:
        """The first NIC that can be posted on. Raises FabricError if there is none."""
        if not any(self.alive):
            raise self._down_error()
        return self.alive.index(True)

    def _down_error(self) -> FabricError:
        names = ", ".join(domain.caps.nic for domain in self.domains)
        return FabricError(f"no NIC of this engine is alive ({names})", code="NIC_DOWN")

    def _reroute(self, wanted: Callable[[Pending], bool]) -> None:
        queued = [p for queue in self._queues for p in queue if p.at < p.stop]
        for pending in filter(wanted, queued):
            start, stop = pending.at, pending.stop
            if start == stop:
                continue  # dropped with a row of the same transfer that could not move
            retransmission, pending.retransmission = pending.retransmission, None
            self._cut(pending)
            try:
                if not any(self.alive):
                    raise self._down_error()
                moved = self._moved(pending, start, stop)
                moved.retransmission, moved.tries = retransmission, pending.tries
                self._push(moved)
            except TepError as error:  # or a NIC that cannot connect to where its rows should go
                self.lose(pending.transfer, stop - start, error)
                if retransmission is not None:
                    self.finish_retransmission(retransmission)

    def repost(
        self, old: Pending, row: int, retransmission: Retransmission | None, error: TepError
    ) -> None:
        """Queue one row again on a lane that lives: its bytes if a retransmission waits for
        them, else its immediate without bytes. `error` is what it fails with if no lane is left.
        """
        try:
            self.first_alive()
            fresh = self._moved(old, row, row + 1, turn=1)  # perhaps it is our NIC that is deaf
            fresh.tries = old.tries + 1
        except TepError:
            self.lose(old.transfer, 1, error)
            if retransmission is not None:
                self.finish_retransmission(retransmission)
            return
        if retransmission is None:
            fresh.batch.nbytes = 0
        else:
            fresh.batch.imm = None
            fresh.retransmission = retransmission
        self._push(fresh)

    def finish_retransmission(self, retransmission: Retransmission) -> None:
        """A row of a retransmission is over. After the last one the immediates follow."""
        retransmission.left -= 1
        if retransmission.left:
            return
        after, retransmission.after = retransmission.after, []
        for pending, row, error in after:
            transfer = pending.transfer
            transfer.failure = transfer.failure or self.closing
            if not transfer.is_ending():
                self.repost(pending, row, None, error)
                continue
            transfer.left -= 1
            transfer.dropped += 1
            if transfer.left == 0:
                self.ended.append(transfer)

    def _moved(self, old: Pending, start: int, stop: int, turn: int = 0) -> Pending:
        """The same rows, with the keys of the NICs they now go over; `turn` NICs on, both sides."""
        targets = map(old.target, range(start, stop) if varies(old) else (start,))
        routes = [self.route(old.domain + turn, to.link, nic + turn) for to, nic in targets]
        return on_lanes(old, start, stop, routes[0][0], [nic for _, nic in routes])


def _drop_ended(queue: deque[Pending]) -> None:
    """Take batches of which nothing is left to post out of the front of a queue."""
    while queue and queue[0].at == queue[0].stop:
        queue.popleft()


def _waiting(pending: Pending) -> int:
    """Bytes that could be posted on another NIC as well; 0 where that is not worth while."""
    nbytes = pending.batch.nbytes
    if not isinstance(nbytes, int) or pending.transfer.job.routing.domain is not None:
        return 0
    return 0 if varies(pending) else nbytes * (pending.stop - pending.at)


def _is_long(pending: Pending) -> bool:
    """Whether it is posted in pieces: because of its length, or because it is the rest of such."""
    if pending.is_piece:
        return False
    nbytes = _waiting(pending)
    return nbytes > LONG_BYTES or (nbytes > 0 and pending.transfer.pace is not None)


def not_made_good(error: FabricError, why: str) -> FabricError:
    """The error of a row that could not be written again over another NIC, with the reason."""
    return error.saying(f". It could not be made good over another NIC: {why}")
