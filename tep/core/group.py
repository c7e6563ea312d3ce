"""All NICs of one device together: prepared writes, and what becomes of rows when a path fails.

Rule 1: a posted row is never posted again unchanged. Queued rows may move to another NIC; posted
rows whose NIC died are kept in `losses`, and `tep.control.failover` finds out whether they landed.
Rule 2: a peer always has a NIC that counts as alive. Rule 3: the group calls nobody; it reports to
others through `events`. Rule 4: what is kept of a prepared write was made by the group when it
dealt the same request out, at another offset; so a prepared write goes where its verb would go.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast
from weakref import ref

import numpy as np
import numpy.typing as npt

from tep.backends.base import LATER, Column, Domain, Status, WriteBatch
from tep.base.api import EngineOptions
from tep.base.errors import FabricError, TepError
from tep.core.handles import Transfer
from tep.core.path import Acks, FarEnds, Link, Path, PathEvent, PeerNicDown, PeerRestarted
from tep.core.posting import (
    IN_TURN_ROWS,
    NO_ROWS,
    SHARED_ROWS,
    Pending,
    Posting,
    Retransmission,
    is_long,
    is_seen,
    on_lanes,
    varies,
)
from tep.core.regions import Job, Remote, Targets, shifted, summand
from tep.core.stats import Journal

__all__ = [
    "Dealt", "DomainGroup", "Laid", "Loss", "LostRow", "Part", "Ready", "may_pass", "not_made_good",
    "row_error",
]  # fmt: skip

U64 = npt.NDArray[np.uint64]

_KEPT_ROWS_MAX: Final = 2048
"""Rows of the longest write whose batches are kept: of longer ones making them is a small part."""

_CURSORS_MAX: Final = 16
"""Cursors for which a prepared write keeps its parts; unusual mixes of NIC counts have more."""


class Part(NamedTuple):
    """The rows of one batch, `total` bytes, without what a submit adds: addresses, immediate, ctx.

    `place` is its number among the parts, in the order in which they are queued.
    """

    place: int
    domain: int
    n: int
    nbytes: Column
    total: int
    peer: Column
    lkey: int
    rkey: Column
    remotes: Remote | Sequence[Remote]
    nics: int | Sequence[int]

    def pending(
        self, transfer: Transfer, columns: tuple[Column, Column], imm: Column | None
    ) -> Pending:
        """Make the batch of a submit, without a ctx."""
        _, domain, n, nbytes, total, peer, lkey, rkey, remotes, nics = self
        src, dst = columns
        batch = WriteBatch(n, peer, src, lkey, dst, rkey, nbytes, imm, 0)
        pending = Pending(transfer, domain, batch, remotes, nics)
        pending.nbytes = total
        return pending


class Dealt:
    """The batches of a request at one cursor.

    The batches of the last submit that was posted at once are kept with their columns, and posted
    again once it has ended well: then only the offsets are added, in place.

    Attributes:
        parts: in the order in which they are queued; `by_nic`: in that in which they are posted,
            as are `took` (NIC, rows and bytes of each), `places` and the batches that are `kept`.
        columns: source and target addresses of each part, at no offset.
        whole: both columns of all rows, and which rows each part has; None: addresses are ints.
        cursor: where the next request starts.
        in_turn: some NIC has several parts that it takes in turn, so that they are queued.
        is_watched: the pace of its parts is to be seen; all go to one peer.
    """

    __slots__ = (
        "_at", "_moved", "by_nic", "columns", "cursor", "in_turn", "is_watched", "kept", "parts",
        "places", "took", "whole",
    )  # fmt: skip

    def __init__(
        self,
        parts: tuple[Part, ...],
        columns: list[tuple[Column, Column]],
        whole: tuple[U64, U64, list[slice]] | None,
        cursor: int,
    ) -> None:
        self.parts = parts
        self.by_nic = tuple(sorted(parts, key=lambda part: part.domain))
        self.columns = columns
        self.whole = whole
        self.cursor = cursor
        self.in_turn = len(parts) > len({part.domain for part in parts}) and any(
            part.n > IN_TURN_ROWS for part in parts
        )
        to_one = all(part.remotes is parts[0].remotes for part in parts)  # no lists
        self.is_watched = to_one and is_seen(len(parts), sum(part.total for part in parts))
        self.took = tuple((part.domain, part.n, part.total) for part in self.by_nic)
        self.places = tuple(part.place for part in self.by_nic)
        self.kept: list[Pending] = []
        self._at = 0, 0
        self._moved: tuple[U64, U64] | None = None

    def at(self, here: int, there: int) -> list[tuple[Column, Column]]:
        """Compute source and target addresses of each part, at these offsets."""
        if not (here or there):
            return self.columns
        if self.whole is None:
            return [(src + here, dst + there) for src, dst in self.columns]
        src, dst, rows = self.whole
        if here:
            src = np.add(src, summand(here))
        if there:
            dst = np.add(dst, summand(there))
        if len(rows) == 1:
            return [(src, dst)]
        return [(src[part], dst[part]) for part in rows]

    def posts(self, transfer: Transfer, job: Ready) -> list[Pending]:
        """Return the batches of a submit, as `by_nic`, in the state of batches posted whole.

        Kept ones are as the submit before left them, but for their columns: what else belongs to
        one submit is for the caller to set.
        """
        kept, here, there = self.kept, job.here, job.there
        if kept and kept[0].transfer.ok:
            if (here, there) != self._at:
                self._at = here, there
                self._move(kept, here, there)
            return kept
        columns = self.at(here, there)
        fresh = [part.pending(transfer, columns[part.place], job.imm) for part in self.by_nic]
        last: Pending | None = None
        for pending in fresh:
            pending.at, pending.older, last = pending.stop, last, pending
        if transfer.rows <= _KEPT_ROWS_MAX:
            self.kept, self._at, self._moved = fresh, (here, there), None
        return fresh

    def _move(self, kept: list[Pending], here: int, there: int) -> None:
        """Write the addresses at these offsets into the columns of the kept batches."""
        if self._moved is not None:
            base, moved = self._moved
            if here == there:
                np.add(base, summand(here), moved)
            else:
                n = len(base) // 2
                np.add(base[:n], summand(here), moved[:n])
                np.add(base[n:], summand(there), moved[n:])
            return
        columns = self.at(here, there)
        if self.whole is not None:  # columns of their own, to be written to from now on
            src, dst, rows = self.whole
            moved = np.concatenate((np.add(src, summand(here)), np.add(dst, summand(there))))
            self._moved = np.concatenate((src, dst)), moved
            src, dst = moved[: len(src)], moved[len(src) :]
            columns = [(src[part], dst[part]) for part in rows]
        for part, pending in zip(self.by_nic, kept, strict=True):
            pending.batch.src, pending.batch.dst = columns[part.place]


class Laid:
    """The batches of one prepared write by cursor: good as long as no route changes.

    The lanes are the same again after `cycle` cursors.
    """

    __slots__ = ("__weakref__", "cycle", "dealt", "version")

    def __init__(self, remotes: Remote | Targets, nlocal: int) -> None:
        nics = remotes.nics if isinstance(remotes, Remote) else remotes.cycle
        self.cycle = math.lcm(nlocal, nics)
        self.version = -1
        self.dealt: dict[int, Dealt] = {}

    def find(self, cursor: int, version: int) -> Dealt | None:
        """Find the batches at this cursor, if they are known."""
        if self.version != version:
            self.dealt.clear()
            self.version = version
        return self.dealt.get(cursor % self.cycle)

    def learn(self, cursor: int, job: Ready, transfer: Transfer, following: int) -> None:
        """Keep how it was dealt out just now; nothing of it was posted."""
        made = cast("list[Pending]", list(transfer.batches()))[::-1]
        if len(self.dealt) >= _CURSORS_MAX:
            self.dealt.clear()
        parts = tuple(_part(place, pending) for place, pending in enumerate(made))
        columns = [
            (shifted(each.batch.src, -job.here), shifted(each.batch.dst, -job.there))
            for each in made
        ]
        whole = _whole(job.base, columns)
        self.dealt[cursor % self.cycle] = Dealt(parts, columns, whole, following)


class Ready(Job):
    """A prepared write with its immediate, `here` and `there` bytes from where its `base` is.

    `laid` is weak: the batches that are kept there know their transfer, and by that this request.
    """

    __slots__ = ("base", "here", "laid", "there")
    is_plain = False

    def __init__(self, base: Job, laid: Laid, here: int, there: int, imm: int | None) -> None:
        self.base = base
        self.laid = ref(laid)
        self.here = here
        self.there = there
        self.imm = imm
        self.mr = base.mr
        self.n = base.n
        self.longest = base.longest

    def __getattr__(self, name: str) -> object:
        return getattr(self.base, name)

    def placed(self) -> Job:
        """Make the same with columns of its own, to be dealt out as any other."""
        return self.base.moved(self.here, self.there, self.imm)


def _part(place: int, pending: Pending) -> Part:
    batch = pending.batch
    rows = batch.n, batch.nbytes, pending.sum_bytes(0, batch.n)
    keys = batch.peer, batch.lkey, batch.rkey
    return Part(place, pending.domain, *rows, *keys, pending.remotes, pending.nics)


def _whole(base: Job, columns: list[tuple[Column, Column]]) -> tuple[U64, U64, list[slice]] | None:
    """Join the columns of all parts, so that a submit adds an offset once, and not once a part.

    Where they are the request's own, which is usual, no copy is kept.
    """
    srcs, dsts = zip(*columns, strict=True)
    if any(isinstance(column, int) for column in (*srcs, *dsts)):
        return None
    src, dst = np.concatenate(srcs), np.concatenate(dsts)
    ends = np.cumsum([len(column) for column in srcs]).tolist()
    rows = [slice(a, b) for a, b in zip((0, *ends), ends, strict=False)]
    if isinstance(base.src, np.ndarray) and np.array_equal(src, base.src):
        src = base.src
    if isinstance(base.dst, np.ndarray) and np.array_equal(dst, base.dst):
        dst = base.dst
    for place, part in enumerate(rows):
        columns[place] = src[part], dst[part]
    return src, dst, rows


_SHARED: Final = "a row of another request with the same immediate failed, and may have landed"

_NO_IMM: Final = frozenset(
    (Status.LOCAL_KEY, Status.REMOTE_KEY, Status.REMOTE_RANGE, Status.LENGTH)
)
"""A row with one of these statuses has made no immediate (C11)."""

_PASSING: Final = LATER | {errno.EINTR}


def may_pass(error: OSError | MemoryError) -> bool:
    """Whether a call may go well a little later: memory or descriptors are short, or a signal."""
    return isinstance(error, MemoryError) or error.errno in _PASSING


class LostRow(NamedTuple):
    """A row that may have landed, and the error that it may fail with."""

    pending: Pending
    row: int
    error: FabricError

    @property
    def imm(self) -> int | None:
        return self.pending.imm(self.row)


@dataclass(slots=True, eq=False)
class Loss:
    """Rows that one path lost, until it is known which of them landed.

    Attributes:
        asked: whether the receiver was asked about them; no row is added after that.
        counts: the receiver's sums, by immediate.
        pruned: the generation of these sums; None: no answer has come yet.
        left: answers that are missing.
    """

    path: Path
    rows: list[LostRow] = field(default_factory=list)
    asked: bool = False
    counts: dict[int, int] = field(default_factory=dict)
    pruned: int | None = None
    left: int = 0


class DomainGroup(Posting):
    """All NICs of one engine; see Posting for most of its attributes.

    Attributes:
        failover: whether lost rows are kept, to be retransmitted on other paths.
        why_not: why the NICs are unable to do that; None: they are able, or it is not wanted.
        losses: lost rows that are kept, in the order of their loss.
        raised: NICs that are down since a call raised, and may have taken something before that.
    """

    __slots__ = (
        "_can_fence", "_turn", "failover", "far_ends", "losses", "raised",
        "why_not",
    )  # fmt: skip

    def __init__(
        self,
        domains: tuple[Domain, ...],
        options: EngineOptions,
        now_s: Callable[[], float],
        *,
        failover: bool,
        why_not: str | None,
        journal: Journal,
    ) -> None:
        acks = Acks() if failover else None
        super().__init__(domains, options.post_rows_max, journal, acks, now_s)
        self._turn = 0
        self.failover = failover
        self.why_not = why_not
        self.losses: list[Loss] = []
        self.far_ends = FarEnds()
        self.raised: set[int] = set()
        self._can_fence = all(domain.caps.imm_source for domain in domains)

    def _fail_rows(self, pending: Pending, count: int, status: int, row: int) -> bool:
        """Handle rows that came back with an error; True: they are kept, to be retransmitted."""
        transfer = pending.transfer
        row = min(row, pending.batch.n - 1)
        remote, nic = pending.target(row)
        pending.lose(row)
        lost = False  # whether the path failed, and there is another one
        if status in (Status.NIC_DOWN, Status.FLUSHED) and transfer.job.mr is not None:
            transfer.job.mr.readers |= {pending.domain}
        if status == Status.NIC_DOWN:
            self.nic_down(pending.domain)
            lost = any(self.alive)
        elif status == Status.UNREACHABLE:
            lost = self.has_lost(pending.domain, remote.link, nic)
        elif status == Status.STALE_PEER:
            self.events.append(PeerRestarted(remote.link))
        elif status == Status.FLUSHED:
            far = self.far_ends.get(pending.domain, remote.link.addr.domains[nic])
            if far is not None and far.unheard:  # the error of what was not flushed these rows
                lost = self.has_lost(pending.domain, remote.link, nic)
            lost = lost or not remote.link.is_up(pending.domain, nic)
            lost = lost or not (self.alive[pending.domain] and remote.link.alive[nic])
        known = transfer.failure
        error = row_error(self.domains[pending.domain], pending, row, status)
        final = self._keep(pending, row, error) if lost else error
        if final is None:
            return True
        if self.acks is not None and status not in _NO_IMM:
            self.acks.miss(pending, row)
        transfer.failed_rows += count
        if known is None:
            self.drop_queued(transfer)
        known = transfer.failure
        if known is None or (isinstance(known, FabricError) and known.code == Status.FLUSHED.name):
            transfer.failure = final
        return False

    def _keep(self, pending: Pending, row: int, error: FabricError) -> FabricError | None:
        """Keep a row that may have landed; else return the error that it fails with."""
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
            self.suspect(path)
        assert isinstance(loss, Loss)
        loss.rows.append(LostRow(pending, row, error))
        transfer.held += 1
        return None

    def suspect(self, path: Path) -> None:
        """Leave a path that is to be fenced: rows that wait for it go over others, if there are.

        A row posted on it from now on may land before the peer fences it, and would be taken for a
        lost one; or the fence stops it.
        """
        path.to(PathEvent.LOST)
        link, nic = path.link, path.nic
        if link.has_way(i for i, up in enumerate(self.alive) if up):
            self._reroute(lambda w: w.domain == path.domain and goes_to(w, link, nic))

    def has_lost(self, domain: int, link: Link, nic: int) -> bool:
        """A row had no answer: mark the peer's NIC down; return whether there is another path."""
        others = self.is_silent(domain, link, nic)
        if self._can_fence:  # perhaps the peer has removed this engine and fenced the path
            self.suspect(link.path(domain, nic))
        return others

    def is_silent(self, domain: int, link: Link, nic: int) -> bool:
        """A peer's NIC did not answer ours: mark it down; return whether there is another path."""
        link.path(domain, nic).silent = True
        # When an error flushes a connection, every later row on it fails too.
        self.far_ends.at(domain, link.addr.domains[nic]).unheard = True
        if not link.alive[nic]:  # rows for it were sent on, as no other path was up
            self._reroute(lambda waiting: goes_to(waiting, link, nic))
        ours = [i for i, up in enumerate(self.alive) if up]
        return self.mark_down(link, nic) or link.has_way(ours, but=(domain, nic))

    def mark_down(self, link: Link, nic: int) -> bool:
        """A peer's NIC does not answer: move its queued rows to the peer's other NICs.

        Returns whether the peer has others that are up.
        """
        if not link.alive[nic]:
            return True
        link.alive[nic] = False
        self.routes.version += 1
        has_others = any(link.alive)
        if has_others:
            self._reroute(lambda waiting: goes_to(waiting, link, nic))
        else:
            # All its NICs have failed. One may be back, so use them all again; rows find out.
            link.alive[:] = [True] * len(link.alive)
        self.events.append(PeerNicDown(link, nic))
        return has_others

    def mark_up(self, link: Link, alive: list[bool]) -> None:
        """Use these NICs of a peer from now on, because one that was marked down answers again."""
        link.alive[:] = alive
        self.routes.version += 1
        for path in link.paths():
            path.silent &= not alive[path.nic]
            path.pace = 1.0

    def lose(
        self,
        transfer: Transfer,
        rows: int,
        error: TepError,
        retransmission: Retransmission | None = None,
    ) -> None:
        """Fail rows that no NIC will ever take; of a retransmission one."""
        transfer.failed_rows += rows
        transfer.failure = transfer.failure or error
        if retransmission is not None:
            self.finish_retransmission(retransmission, missed=True)
        transfer.left -= rows
        self.drop_queued(transfer)
        if transfer.left == 0:
            self.ended.append(transfer)

    # ------------------------------------------------------------------ prepared writes

    def dealt(self, job: Ready) -> Dealt | None:
        """Find the batches of a prepared write, if it was dealt out like this before."""
        laid = job.laid()
        return None if laid is None else laid.find(self._cursor, self.routes.version)

    def start_and_learn(self, transfer: Transfer, job: Ready) -> None:
        """start() of a prepared write, whose `job` has its columns by now; keep what came of it."""
        cursor = self._cursor
        self.alone = False
        self.start(transfer)
        if transfer.queued is None:  # no NIC is alive
            return
        made = cast("list[Pending]", list(transfer.batches()))
        laid = job.laid()
        if laid is not None and not (self._shares and any(map(is_long, made))):
            laid.learn(cursor, job, transfer, self._cursor)

    def start_ready(self, transfer: Transfer, job: Ready, dealt: Dealt, *, alone: bool) -> None:
        """start() of a prepared write; also post() if it is `alone`, without a backlog."""
        self._cursor = dealt.cursor
        if not alone or dealt.in_turn:
            columns = dealt.at(job.here, job.there)
            for part in dealt.parts:
                self._push(part.pending(transfer, columns[part.place], job.imm))
            if dealt.is_watched:
                self._watch(len(dealt.parts))
            return
        base = self._ctx + 1
        self._ctx += len(dealt.parts)
        domains, batches, rows, nbytes = self.domains, self.batches, self.rows, self.nbytes
        posts, imm = dealt.posts(transfer, job), job.imm
        for (domain, n, total), place, pending in zip(dealt.took, dealt.places, posts):
            batch = pending.batch
            # As _enter(), without the call.
            batch.ctx = ctx = base + place
            batch.imm = imm
            pending.transfer = transfer
            pending.back = 0
            pending.lost = NO_ROWS
            batches[ctx] = pending
            try:
                taken = domains[domain].post(batch, 0, n)
            except (OSError, MemoryError) as error:
                self._stop(pending, 0, dealt, posts, error)
                return
            if taken != n:
                self._stop(pending, taken, dealt, posts)
                return
            rows[domain] += n
            nbytes[domain] += total
        transfer.queued = posts[-1]
        transfer.took = dealt.took
        if dealt.is_watched:
            self._watch(len(dealt.parts))

    def _stop(
        self,
        stopped: Pending,
        taken: int,
        dealt: Dealt,
        posts: list[Pending],
        error: OSError | MemoryError | None = None,
    ) -> None:
        """Queue the rest of a prepared write after a NIC took a batch in part."""
        transfer, dealt.kept = stopped.transfer, []
        stopped.at = 0
        at = posts.index(stopped)
        transfer.queued, transfer.took = stopped, dealt.took[:at]
        base = stopped.batch.ctx - dealt.by_nic[at].place
        rest = []
        for part, post in zip(dealt.by_nic[at + 1 :], posts[at + 1 :], strict=True):
            batch = post.batch  # it may be of the submit before, but for its columns
            waiting = part.pending(transfer, (batch.src, batch.dst), stopped.batch.imm)
            self._enter(waiting, base + part.place)
            rest.append(waiting)
        self._go_on(stopped, taken, rest, error)

    # ------------------------------------------------------------------ failing over

    def nic_down(self, domain: int, error: BaseException | None = None) -> None:
        """One of our NICs is gone, perhaps by an error: move its queued rows to the others."""
        if self.alive[domain]:
            self.alive[domain] = False
            self.routes.version += 1
            self.why_down, up = "" if error is None else f": {error!r}", sum(self.alive)
            nic = self.domains[domain].caps.nic
            text = f"NIC {domain} ({nic}) is down{self.why_down}; {up} are left"
            level = logging.WARNING if error is None else logging.ERROR
            self.journal.say("nic_down", text, level)
            self._reroute(lambda pending: pending.domain == domain)

    def give_up(self, domain: int, error: OSError | MemoryError) -> bool:
        """A NIC's post() or poll() raised, e.g. because there are no descriptors: it is down.

        Returns False if a signal interrupted it, and it is to be called again.
        """
        if isinstance(error, OSError) and error.errno == errno.EINTR:
            return False
        self.raised.add(domain)
        self.nic_down(domain, error)
        return True

    def count_out(self, ctx: int) -> int:
        """Count the rows of a batch that its NIC has not returned; 0 without such a batch."""
        pending = self.batches.get(ctx)
        return 0 if pending is None else pending.at - pending.back

    def _reroute(self, wanted: Callable[[Pending], bool]) -> None:
        queued = [p for queue in self._queues for p in queue]
        for pending in filter(wanted, queued):
            start, stop = pending.at, pending.stop
            if start == stop:
                continue  # it was cut, perhaps as another row of its transfer could not move
            retransmission, pending.retransmission = pending.retransmission, None
            self.cut(pending)
            try:
                if not any(self.alive):
                    raise self._down_error()
                for moved in self._moved(pending, start, stop):
                    moved.retransmission, moved.tries = retransmission, pending.tries
                    self._push(moved)
            except TepError as error:  # or the NIC cannot connect to the peer
                self.lose(pending.transfer, stop - start, error, retransmission)

    def repost(
        self, old: Pending, row: int, retransmission: Retransmission | None, error: TepError
    ) -> None:
        """Queue one row again on a path that works.

        Its bytes are written if a retransmission waits for them, else its immediate is sent without
        bytes. If no path is left, it fails with `error`; while the engine closes, with that.
        """
        try:
            if self.closing is not None:  # nobody would post it
                raise self.closing
            self.first_alive()
            # Our NIC may be the one that failed. The rows of one NIC go to all others in turn.
            self._turn = self._turn % max(1, len(self.domains) - 1) + 1
            (fresh,) = self._moved(old, row, row + 1, self._turn)
            fresh.tries = old.tries + 1
        except TepError:
            self.lose(old.transfer, 1, self.closing or error, retransmission)
            return
        if retransmission is None:
            fresh.batch.nbytes = 0
        else:
            fresh.batch.imm = None
            fresh.retransmission = retransmission
        self._push(fresh)

    def finish_retransmission(
        self, retransmission: Retransmission, *, missed: bool = False
    ) -> None:
        """Count a row of a retransmission that is over. After the last one, send the immediates.

        Where the bytes of a row did not arrive, no immediate is sent, because it could stand for
        that row: the transfers that wait for one fail.
        """
        retransmission.left -= 1
        retransmission.missed |= missed
        if retransmission.left:
            return
        after, retransmission.after = retransmission.after, []
        for pending, row, error in after:
            transfer = pending.transfer
            transfer.failure = transfer.failure or self.closing
            if transfer.is_ending():
                transfer.dropped += 1
                transfer.left -= 1
                if transfer.left == 0:
                    self.ended.append(transfer)
            elif retransmission.missed:
                self.lose(transfer, 1, not_made_good(error, _SHARED))
            else:
                self.repost(pending, row, None, error)

    def _moved(self, old: Pending, start: int, stop: int, turn: int = 0) -> list[Pending]:
        """Make the same rows with the keys of new NICs; `turn` moves the choice on both sides.

        Many rows to one peer are spread over all NICs that have a way there. Rows of one batch to
        several peers may need several NICs of ours: each peer has its paths.
        """
        moved = []
        if not varies(old):
            (to, nic), n = old.target(start), stop - start
            most = 1 if old.transfer.job.routing.domain is not None else max(1, n // SHARED_ROWS)
            ways: dict[int, int] = {}
            for k in range(turn, turn + min(most, len(self.domains))):
                ways.setdefault(*self.route(old.domain + k, to.link, nic + k))
            cuts = [start + n * k // len(ways) for k in range(len(ways) + 1)]
            for (domain, nic), first, end in zip(ways.items(), cuts, cuts[1:], strict=False):
                moved.append(on_lanes(old, first, end, domain, [nic]))
            return moved
        targets = map(old.target, range(start, stop))
        routes = [self.route(old.domain + turn, to.link, nic + turn) for to, nic in targets]
        for domain, run in itertools.groupby(routes, key=lambda route: route[0]):
            nics = [nic for _, nic in run]
            moved.append(on_lanes(old, start, start + len(nics), domain, nics))
            start += len(nics)
        return moved


def not_made_good(error: FabricError, why: str) -> FabricError:
    """Make the error of a row that could not be retransmitted, with the reason."""
    return error.saying(f". It could not be retransmitted on another path: {why}")


def row_error(domain: Domain, pending: Pending, row: int, status: int) -> FabricError:
    """Make the error of a row that did not complete with OK."""
    remote, nic = pending.target(row)
    code, hint = Status(status).name, domain.status_text(status)
    peer = f"{remote.link.addr.name} NIC {nic}"
    what = f"{pending.transfer.job.kind} {'from' if pending.is_read else 'to'} {peer}"
    return FabricError(
        f"{what} failed on NIC {pending.domain} "
        f"({domain.caps.nic}) at row {row}: {code}{': ' + hint if hint else ''}",
        code=code,
        domain=pending.domain,
        peer=peer,
        row=row,
    )


def goes_to(pending: Pending, link: Link, nic: int) -> bool:
    """Whether a row that was not posted goes to this NIC of this peer."""
    rows = range(pending.at, pending.stop) if varies(pending) else (pending.at,)
    return any(remote.link is link and j == nic for remote, j in map(pending.target, rows))
