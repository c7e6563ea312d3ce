"""The NICs of one device as one: deals jobs out to them, keeps their queues, joins completions.

Rule 1: only this file posts rows. Rule 2: a row is posted on the NIC its local key is from, with
the remote key of the NIC it goes to; the two are chosen together, in `_route`. Rule 3: a posted row
is never posted again; rows that never left may move to another NIC. Rule 4: a transfer settles only
when no row of it is posted. Rule 5: a peer always has a NIC that counts as alive.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from tep.backends.base import Column, Domain, Status, WriteBatch
from tep.errors import FabricError, TepError
from tep.pending import Pending, as_slice, cut_column, goes_to, ints, pick, shifted, varies
from tep.plan import Share, lanes, plan_paged, plan_single, plan_targets
from tep.region import Link, Remote, Targets, Template
from tep.requests import Job, shares_of
from tep.transfer import Transfer

__all__ = ["DomainGroup"]

_TURNS_MAX: Final = 64
"""Batches tried on one NIC in one step: a bound, so that posting cannot starve polling."""


_TEMPLATES_MAX: Final = 256
"""Cursors that one set of targets remembers its columns for; odd mixes of NIC counts have more."""


class DomainGroup:
    """All NICs of one engine.

    Attributes:
        domains: the NICs, in order.
        alive: which of them can still be posted on.
        backlog: rows accepted from the user and not yet by a NIC.
        outstanding: rows that each NIC has and has not returned.
        rows, nbytes: what each NIC has taken in all.
        ended: transfers that no NIC holds a row of any more, since the caller last emptied this
            list.
    """

    def __init__(self, domains: tuple[Domain, ...], rows_max: int) -> None:
        self.domains = domains
        self.alive = [True] * len(domains)
        self.backlog = 0
        self.outstanding = [0] * len(domains)
        self.rows = [0] * len(domains)
        self.nbytes = [0] * len(domains)
        self.ended: list[Transfer] = []
        self.batches: dict[int, Pending] = {}
        self._queues: list[deque[Pending]] = [deque() for _ in domains]
        self._rows_max = rows_max
        self._routes_version = 0
        self._ctx = 0
        self._cursor = 0

    # ------------------------------------------------------------------ dealing out

    def start(self, transfer: Transfer) -> None:
        """Deal a transfer's job out to the NICs' queues. Nothing is posted yet."""
        job = transfer.job
        transfer.left = transfer.rows
        if not any(self.alive):
            self._lose(transfer, transfer.rows, self._down_error())
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
        assert isinstance(job.src, int)
        assert isinstance(job.dst, int)
        assert isinstance(job.nbytes, int)
        nlocal = len(self.domains)
        cursor = self._cursor % lanes(nlocal, remote.nics)
        plan = plan_single(job.nbytes, nlocal, remote.nics, cursor, job.routing)
        self._cursor = plan.cursor
        for share in plan.shares:
            columns = (job.src + share.start, job.dst + share.start, share.stop - share.start)
            self._enqueue(transfer, share, 1, columns, job.imm, remote)

    def _deal_paged(self, transfer: Transfer, job: Job, remote: Remote) -> None:
        nlocal = len(self.domains)
        cursor = self._cursor % lanes(nlocal, remote.nics)
        plan = plan_paged(job.n, nlocal, remote.nics, cursor, job.routing.domain)
        self._cursor = plan.cursor
        src, dst, imm = job.src, job.dst, job.imm
        if len(plan.shares) == 1 or isinstance(src, int) or isinstance(dst, int):
            self._enqueue(transfer, plan.shares[0], job.n, (src, dst, job.nbytes), imm, remote)
            return
        for share in plan.shares:
            part = slice(share.start, share.stop)
            imms = imm if imm is None or isinstance(imm, int) else imm[part]
            columns = (src[part], dst[part], job.nbytes)
            self._enqueue(transfer, share, share.stop - share.start, columns, imms, remote)

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
                self._enqueue(transfer, share, 1, part, job.imm, remote)

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
        for domain, remotes, nics, peer, rkey, base, rows in found:
            src, dst, nbytes = pick(job.src, rows), pick(job.dst, rows), pick(job.nbytes, rows)
            lkey = 0 if job.mr is None else job.mr.keys[domain].lkey
            place = base if isinstance(dst, int) else base + dst  # a barrier's offset is 0
            batch = WriteBatch(len(peer), peer, src, lkey, place, rkey, nbytes, job.imm, 0)
            pending = Pending(transfer, domain, batch, remotes, nics)
            if job.lengths and isinstance(rows, slice):
                pending.nbytes = sum(job.lengths[rows])
            self._push(pending)

    def _templates(self, targets: Targets, cursor: int, pinned: int | None) -> list[Template]:
        nlocal = len(self.domains)
        routes: dict[int, list[tuple[int, int]]] = {}
        for share in plan_targets(targets.nics, nlocal, cursor, pinned):
            domain, nic = self._route(share.domain, targets.remotes[share.start], share.remote)
            routes.setdefault(domain, []).append((share.start, nic))
        found = []
        for domain, mine in sorted(routes.items()):
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
            rows = as_slice([k for k, _ in mine])
            found.append(Template(domain, remotes, nics, peer, rkey, base, rows))
        return found

    def _enqueue(
        self,
        transfer: Transfer,
        share: Share,
        n: int,
        columns: tuple[Column, Column, Column],
        imm: Column | None,
        remote: Remote,
    ) -> None:
        """Queue n rows on one lane; dst is an address for the target's NIC 0."""
        domain, nic = share.domain, share.remote
        link = remote.link
        if not (self.alive[domain] and link.alive[nic]):
            domain, nic = self._route(domain, remote, nic)
        src, dst, nbytes = columns
        shift = remote.bases[nic] - remote.bases[0]
        mr = transfer.job.mr
        assert mr is not None
        batch = WriteBatch(
            n,
            link.peer(domain, nic),
            src,
            mr.keys[domain].lkey,
            shifted(dst, shift) if shift else dst,
            remote.rkeys[nic],
            nbytes,
            imm,
            0,
        )
        self._push(Pending(transfer, domain, batch, remote, nic))

    def _push(self, pending: Pending) -> None:
        self._ctx = pending.batch.ctx = self._ctx + 1
        self.batches[self._ctx] = pending
        self._queues[pending.domain].append(pending)
        self.backlog += pending.batch.n

    def _route(self, domain: int, remote: Remote, nic: int) -> tuple[int, int]:
        """Where a lane's rows go today: its own NICs if they live, else the next on each side."""
        alive, there = self.alive, remote.link.alive
        here = next(i for k in range(len(alive)) if alive[i := (domain + k) % len(alive)])
        return here, next(j for k in range(len(there)) if there[j := (nic + k) % len(there)])

    # ------------------------------------------------------------------ posting

    def post(self) -> bool:
        """Offer each NIC what is queued for it, in turns; True if any took a row."""
        work = False
        for domain, queue in enumerate(self._queues):
            if queue:
                work |= self._post_on(domain, queue)
        return work

    def _post_on(self, domain: int, queue: deque[Pending]) -> bool:
        nic = self.domains[domain]
        before = self.outstanding[domain]
        for _ in range(_TURNS_MAX):
            if not queue:
                break
            pending = queue[0]
            start = pending.at
            stop = pending.stop
            if len(queue) > 1 and stop - start > self._rows_max:
                stop = start + self._rows_max
            taken = nic.post(pending.batch, start, stop)
            assert 0 <= taken <= stop - start, (taken, start, stop)
            if taken == 0:
                break
            pending.at = start + taken
            self.outstanding[domain] += taken
            self.backlog -= taken
            nbytes = pending.sum_bytes(start, pending.at)
            self.rows[domain] += taken
            self.nbytes[domain] += nbytes
            pending.transfer.note_posted(domain, taken, nbytes)
            if pending.at == pending.stop:
                queue.popleft()
            else:
                queue.rotate(-1)
        return self.outstanding[domain] != before

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
        if pending.back == pending.stop:
            del self.batches[ctx]
        transfer = pending.transfer
        transfer.left -= count
        if status != Status.OK:
            self._fail_rows(pending, count, status, row)
        if transfer.left == 0:
            self.ended.append(transfer)

    def _fail_rows(self, pending: Pending, count: int, status: int, row: int) -> None:
        transfer = pending.transfer
        remote, nic = pending.target(min(row, pending.batch.n - 1))
        transfer.failed_rows += count
        known = transfer.failure
        if known is None:
            self.drop_queued(transfer)
        if known is None or (isinstance(known, FabricError) and known.code == Status.FLUSHED.name):
            transfer.failure = self._row_error(pending, remote, nic, status, row)
        if status == Status.NIC_DOWN:
            self.nic_down(pending.domain)
        elif status == Status.UNREACHABLE:
            self._shun(remote.link, nic)

    def _shun(self, link: Link, nic: int) -> None:
        """A peer's NIC does not answer: what is queued for it and never left goes to its others."""
        if not link.alive[nic]:
            return
        link.alive[nic] = False
        self._routes_version += 1
        if any(link.alive):
            self._reroute(lambda waiting: goes_to(waiting, link, nic))
        else:
            # All its NICs failed once. The peer may be back: try as planned, the rows will tell.
            link.alive[:] = [True] * len(link.alive)

    def _row_error(
        self, pending: Pending, remote: Remote, nic: int, status: int, row: int
    ) -> FabricError:
        domain = self.domains[pending.domain]
        code = Status(status).name
        hint = domain.status_text(status)
        peer = f"{remote.link.addr.name} NIC {nic}"
        return FabricError(
            f"{pending.transfer.job.kind} to {peer} failed on NIC {pending.domain} "
            f"({domain.caps.nic}) at row {row}: {code}{': ' + hint if hint else ''}",
            code=code,
            domain=pending.domain,
            peer=peer,
            row=row,
        )

    def drop_queued(self, transfer: Transfer) -> int:
        """Take a transfer's rows that no NIC has out of the queues; return how many."""
        dropped = 0
        for queue in self._queues:
            mine = [pending for pending in queue if pending.transfer is transfer]
            for pending in mine:
                dropped += self._cut(pending)
                queue.remove(pending)
        transfer.left -= dropped
        transfer.dropped += dropped
        return dropped

    def _cut(self, pending: Pending) -> int:
        """End a batch at what is posted of it; return the rows cut off."""
        rest = pending.stop - pending.at
        pending.stop = pending.at
        self.backlog -= rest
        if pending.back == pending.stop:
            del self.batches[pending.batch.ctx]
        return rest

    def _lose(self, transfer: Transfer, rows: int, error: TepError) -> None:
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

    def first_alive(self) -> int:
        """The first NIC that can be posted on. Raises FabricError if there is none."""
        if not any(self.alive):
            raise self._down_error()
        return self.alive.index(True)

    def _down_error(self) -> FabricError:
        names = ", ".join(domain.caps.nic for domain in self.domains)
        return FabricError(f"no NIC of this engine is alive ({names})", code=Status.NIC_DOWN.name)

    def _reroute(self, wanted: Callable[[Pending], bool]) -> None:
        moving = [pending for queue in self._queues for pending in queue if wanted(pending)]
        for pending in moving:
            start, stop = pending.at, pending.stop
            if start == stop:
                continue  # dropped with a row of the same transfer that could not move
            self._queues[pending.domain].remove(pending)
            self._cut(pending)
            try:
                if not any(self.alive):
                    raise self._down_error()
                self._push(self._moved(pending, start, stop))
            except TepError as error:  # or a NIC that cannot connect to where its rows should go
                self._lose(pending.transfer, stop - start, error)

    def _moved(self, old: Pending, start: int, stop: int) -> Pending:
        """The same rows, with the keys of the NICs they now go over."""
        routes = [
            self._route(old.domain, *old.target(row))
            for row in (range(start, stop) if varies(old) else (start,))
        ]
        domain = routes[0][0]
        batch, mr = old.batch, old.transfer.job.mr
        lkey = 0 if mr is None else mr.keys[domain].lkey
        src, nbytes, imm = (
            cut_column(c, start, stop) for c in (batch.src, batch.nbytes, batch.imm)
        )
        assert src is not None
        assert nbytes is not None
        if isinstance(old.remotes, Remote):
            assert isinstance(old.nics, int)
            remote, nic = old.remotes, routes[0][1]
            shift = remote.bases[nic] - remote.bases[old.nics]
            dst = shifted(cut_column(batch.dst, start, stop), shift)
            peer = remote.link.peer(domain, nic)
            fresh = WriteBatch(
                stop - start, peer, src, lkey, dst, remote.rkeys[nic], nbytes, imm, 0
            )
            return Pending(old.transfer, domain, fresh, remote, nic)
        targets = [old.target(row) for row in range(start, stop)]
        nics = [nic for _, nic in routes]
        dsts = ints(batch.dst, batch.n)[start:stop]
        moved = [
            at - remote.bases[was] + remote.bases[now]
            for at, (remote, was), now in zip(dsts, targets, nics, strict=True)
        ]
        peers = [
            remote.link.peer(domain, nic) for (remote, _), nic in zip(targets, nics, strict=True)
        ]
        rkeys = [remote.rkeys[nic] for (remote, _), nic in zip(targets, nics, strict=True)]
        columns = [np.array(column, np.uint64) for column in (peers, moved, rkeys)]
        fresh = WriteBatch(
            stop - start, columns[0], src, lkey, columns[1], columns[2], nbytes, imm, 0
        )
        return Pending(old.transfer, domain, fresh, [remote for remote, _ in targets], nics)
