"""Planted bugs: which rows are posted, with which immediates and keys."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from tep.backends.base import WriteBatch
from tep.base.api import Routing
from tep.core import plan as plans
from tep.core.group import DomainGroup
from tep.core.handles import Transfer
from tep.core.plan import Plan
from tep.core.posting import Pending
from tep.core.regions import PeerBook, PeerGroup, Remote
from tep.engine import verbs
from tep.engine.worker import Worker
from tests.gate.registry import POSTING, Change, bug, mistake

# ---------------------------------------------------------------------- which rows carry immediates


def part(pending: Pending, start: int, stop: int, imm) -> Pending:
    """Rows start..stop of a batch that was never posted, with another immediate."""
    old = pending.batch

    def cut(column):
        return column if column is None or isinstance(column, int) else column[start:stop]

    batch = WriteBatch(
        stop - start,
        cut(old.peer),
        cut(old.src),
        old.lkey,
        cut(old.dst),
        cut(old.rkey),
        cut(old.nbytes),
        imm,
        0,
    )
    remotes, nics = pending.remotes, pending.nics
    return Pending(
        pending.transfer,
        pending.domain,
        batch,
        remotes if isinstance(remotes, Remote) else remotes[start:stop],
        nics if isinstance(nics, int) else nics[start:stop],
    )


def changes_rows(change: Callable[[Transfer, list[Pending]], list[Pending]]) -> list[Change]:
    """Let change() see and replace the batches of each single or paged write with one immediate."""
    start, push = DomainGroup.start, DomainGroup._push

    def start_changed(self, transfer):
        if transfer.job.kind not in ("single", "paged") or not isinstance(transfer.job.imm, int):
            start(self, transfer)
            return
        found: list[Pending] = []
        self.alone = False  # so that a lone row is pushed as well
        with mock.patch.object(DomainGroup, "_push", lambda _, pending: found.append(pending)):
            start(self, transfer)
        for pending in change(transfer, found) if found else ():
            push(self, pending)

    return [(DomainGroup, "start", start_changed)]


def counts_as(change: Callable[[int, int], int]) -> list[Change]:
    """Let receivers count otherwise: change(count, lanes)."""
    count_imms = plans.count_imms

    def counted(shape, nlocal=1, nremote=1):
        count = count_imms(shape, nlocal, nremote)
        if type(shape).__name__ not in ("Single", "Paged"):
            return count
        return change(count, plans.lanes(nlocal, nremote))

    return [(plans, "count_imms", counted)]


@bug()
def imm_on_last_only() -> list[Change]:
    """Only the last row carries the immediate, and the receiver waits for one: order is assumed."""

    def change(_, pendings):
        *rest, last = pendings
        imm, n = last.batch.imm, last.batch.n
        silent = [part(p, 0, p.batch.n, None) for p in rest]
        if n > 1:
            silent.append(part(last, 0, n - 1, None))
        return [*silent, part(last, n - 1, n, imm)]

    return [*changes_rows(change), *counts_as(lambda *_: 1)]


@bug()
def flag_write_after_data() -> list[Change]:
    """The data goes without immediates, and an empty write behind it with one: order is assumed."""

    def change(transfer, pendings):
        last = pendings[-1]
        flag = part(last, last.batch.n - 1, last.batch.n, last.batch.imm)
        flag.batch.nbytes = 0
        transfer.rows += 1
        transfer.left += 1
        return [*(part(p, 0, p.batch.n, None) for p in pendings), flag]

    return [*changes_rows(change), *counts_as(lambda *_: 1)]


@bug(budget=1500)
def imm_once_per_lane() -> list[Change]:
    """The last row of each lane carries the immediate: order is assumed within a NIC."""

    def change(transfer, pendings):
        remote, group = transfer.job.remotes, transfer.job.mr.owner.worker.group
        wanted = min(transfer.rows, plans.lanes(len(group.domains), remote.nics))
        # Each lane's last row; where a lane is not used, as when pinned, another row for it.
        rows = [(k, row) for k, p in enumerate(pendings) for row in range(p.batch.n)]
        last = [(k, p.batch.n - 1) for k, p in enumerate(pendings)]
        flagged = [*last, *(at for at in reversed(rows) if at not in last)][:wanted]
        imm = transfer.job.imm
        return [
            part(pendings[k], row, row + 1, imm if (k, row) in flagged else None) for k, row in rows
        ]

    return [*changes_rows(change), *counts_as(min)]


# ---------------------------------------------------------------------- which rows are posted


@bug()
def remainder_dropped() -> list[Change]:
    """Shards of equal length: what a division leaves over is not sent."""
    plan_single = plans.plan_single

    def equal(nbytes, nlocal, nremote, cursor, routing=Routing()):
        good = plan_single(nbytes, nlocal, nremote, cursor, routing)
        n = len(good.shares)
        size = nbytes // n
        cut = (s._replace(start=k * size, stop=(k + 1) * size) for k, s in enumerate(good.shares))
        return Plan(tuple(cut), good.imms, good.cursor)

    return [("tep.core.posting", "plan_single", equal), ("tep.core.requests", "plan_single", equal)]


@bug()
def zero_bytes_skipped() -> list[Change]:
    """An empty write has nothing to do, so it is done; its immediate is forgotten."""
    start = DomainGroup.start

    def skip(self, transfer):
        if transfer.job.total == 0 and transfer.job.kind == "single":
            transfer.rows = transfer.left = 0
            self.ended.append(transfer)
        else:
            start(self, transfer)

    return [(DomainGroup, "start", skip)]


@bug()
def page_index_swapped() -> list[Change]:
    """Source and target page lists are mistaken for each other."""
    paged_job = verbs.paged_job

    def swapped(page_bytes, src, dst, *rest):
        return paged_job(page_bytes, (src[0], dst[1]), (dst[0], src[1]), *rest)

    return [(verbs, "paged_job", swapped)]


@bug()
def scatter_rows_misaligned() -> list[Change]:
    """The columns of a NIC's part of a scatter are taken from the front, not from its rows."""

    def cut(columns, rows):
        return [c if c is None or isinstance(c, int) else c[: len(c[rows])] for c in columns]

    return [("tep.core.posting", "cut", cut)]


@bug()
def ctx_reused() -> list[Change]:
    """Batch numbers run in a small circle, so that two batches in flight share one."""
    numbers = "self._ctx = ctx = self._ctx"
    return mistake(POSTING, f"{numbers} + 1\n        # As", f"{numbers} % 3 + 1\n        # As")


def posts(
    taken_is: Callable[[int, int], int], resume: Callable[[Pending, int], int]
) -> list[Change]:
    """DomainGroup._post_on with another idea of what a short post means."""

    def post_on(self, domain, queue, refused=0):
        before = self.outstanding[domain]
        for _ in range(64):
            if refused >= len(queue):
                break
            pending = queue[0]
            start, stop = pending.at, pending.stop
            if start == stop:  # its rest was cut off while it was queued
                queue.popleft()
                continue
            if len(queue) > 1:
                stop = min(stop, start + self._rows_max)
            try:
                taken = self.domains[domain].post(pending.batch, start, stop)
            except (OSError, MemoryError) as error:
                self.give_up(domain, error)
                return True
            refused = 0 if taken else refused + 1
            if taken == 0:
                queue.rotate(-1)
                continue
            taken = taken_is(taken, stop - start)
            self.outstanding[domain] += taken
            self.backlog -= taken
            size = pending.batch.nbytes
            done = slice(start, start + taken)
            nbytes = size * taken if isinstance(size, int) else int(size[done].sum())
            self.rows[domain] += taken
            self.nbytes[domain] += nbytes
            pending.transfer.count_posted(domain, taken, nbytes)
            pending.at = start + taken
            if pending.at == pending.stop:
                queue.popleft()
            else:
                pending.at = resume(pending, start)
                queue.rotate(-1)
        return self.outstanding[domain] != before

    return [(DomainGroup, "_post_on", post_on)]


@bug()
def short_post_ignored() -> list[Change]:
    """post() is believed to take all it is offered."""
    return posts(lambda _, offered: offered, lambda pending, _: pending.at)


@bug()
def short_post_starts_over() -> list[Change]:
    """After a short post the batch is offered again from its first row."""
    return posts(lambda taken, _: taken, lambda _, start: start)


@bug()
def only_first_nic_polled() -> list[Change]:
    """While rows are outstanding, only the first NIC's completions are looked at."""
    step = Worker.step

    def poll_first(self):
        def quiet(domain):
            return lambda out: 0 if any(self.group.outstanding) else type(domain).poll(domain, out)

        for domain in self.group.domains[1:]:
            domain.poll = quiet(domain)
        return step(self)

    return [(Worker, "step", poll_first)]


@bug()
def message_buffer_kept() -> list[Change]:
    """A message's buffer does not go back to the pool once the callback has returned."""
    deliver = Worker.deliver

    def keep(self):
        for domain in self.group.domains:
            domain.recv_done = lambda slot: None
        deliver(self)

    return [(Worker, "deliver", keep)]


# ---------------------------------------------------------------------- which keys they carry


@bug()
def rkey_of_wrong_nic() -> list[Change]:
    """The remote key is chosen by the local NIC's number: right until the two sides differ."""
    push = DomainGroup._push

    def wrong(self, pending):
        if isinstance(pending.remotes, Remote):
            pending.batch.rkey = pending.remotes.rkeys[pending.domain % pending.remotes.nics]
        push(self, pending)

    return [(DomainGroup, "_push", wrong)]


@bug()
def lkey_of_first_nic() -> list[Change]:
    """The local key is the first NIC's, on whatever NIC the row is posted."""
    push = DomainGroup._push

    def wrong(self, pending):
        if pending.transfer.job.mr is not None:
            pending.batch.lkey = pending.transfer.job.mr.keys[0].lkey
        push(self, pending)

    return [(DomainGroup, "_push", wrong)]


@bug()
def stale_keys_cached() -> list[Change]:
    """A peer's region is remembered by name and number, whatever its epoch."""
    resolve = PeerBook.resolve

    def cached(self, desc, what, **reads):
        known = self.__dict__.setdefault("_by_name", {})
        key = desc.addr.name, desc.region, *reads
        if key not in known:
            known[key] = resolve(self, desc, what, **reads)
        return known[key]

    return [(PeerBook, "resolve", cached)]


@bug()
def stale_group_targets() -> list[Change]:
    """A peer group does not notice that a peer came back in a later incarnation."""
    targets = PeerGroup.targets

    def kept(self, descs, what):
        # All groups to the same peers share what the first of them has resolved.
        known = self.book.__dict__.setdefault("_by_names", {})
        key = tuple((desc.addr.name, desc.region) for desc in descs)
        if key not in known:
            known[key] = targets(self, descs, what)
        return known[key]

    return [(PeerGroup, "targets", kept)]


@bug()
def stale_epoch_accepted() -> list[Change]:
    """An older incarnation's descriptor replaces the newer link in place of being refused."""
    return mistake("tep/core/regions.py", "if old > addr.epoch:", "if False:")
