"""All NICs of one device together, and what becomes of rows when one of them or a path fails.

Rule 1: a posted row is never posted again unchanged. Queued rows may move to another NIC; posted
rows whose NIC died are kept in `losses`, and `tep.control.failover` finds out whether they landed.
Rule 2: a peer always has a NIC that counts as alive. Rule 3: the group calls nobody; it reports to
others through `events`.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Callable
from typing import Final

from tep.backends.base import Status
from tep.base.errors import FabricError, TepError
from tep.core.handles import Transfer
from tep.core.path import Link, Path, PathEvent, PeerNicDown, PeerRestarted
from tep.core.pending import (
    NO_IMM,
    Loss,
    LostRow,
    Pending,
    Retransmission,
    goes_to,
    on_lanes,
    row_error,
    varies,
)
from tep.core.posting import Posting

__all__ = ["DomainGroup", "not_made_good"]

_SHARED: Final = "a row of another request with the same immediate failed, and may have landed"


class DomainGroup(Posting):
    """All NICs of one engine; see Posting for its attributes."""

    __slots__ = ()

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
        if self.acks is not None and status not in NO_IMM:
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

        Returns:
            Whether the peer has other NICs that are up.
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

    def reopen(self, path: Path) -> None:
        """Use a path again: the peer has lifted its fence."""
        path.to(PathEvent.OPENED)

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

    # ------------------------------------------------------------------ failing over

    def nic_down(self, domain: int, error: BaseException | None = None) -> None:
        """One of our NICs is gone, perhaps by an error: move its queued rows to the others."""
        if self.alive[domain]:
            self.alive[domain] = False
            self.routes.version += 1
            why, up = "" if error is None else f": {error}", sum(self.alive)
            text = f"NIC {domain} ({self.domains[domain].caps.nic}) is down{why}; {up} are left"
            level = logging.WARNING if error is None else logging.ERROR
            self.journal.say("nic_down", text, level, error)
            self._reroute(lambda pending: pending.domain == domain)

    def give_up(self, domain: int, error: OSError | MemoryError) -> bool:
        """A NIC's post() or poll() raised, e.g. because there are no descriptors: it is down.

        Returns False if a signal interrupted it, and it is to be called again.
        """
        if isinstance(error, OSError) and error.errno == errno.EINTR:
            return False
        self.nic_down(domain, error)
        return True

    def lost(self, domain: int) -> None:
        """A NIC is gone: end its rows, which will not complete."""
        for ctx, pending in tuple(self.batches.items()):
            out = pending.at - pending.back
            if pending.domain == domain and out and not pending.is_read:
                self.finish_rows(domain, ctx, out, Status.NIC_DOWN, pending.back)

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
            (fresh,) = self._moved(old, row, row + 1, turn=1)  # our NIC may be the one that failed
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
        """The same rows with the keys of their new NICs; `turn` moves the choice on both sides.

        Rows of one batch to several peers may need several NICs of ours: each peer has its paths.
        """
        targets = map(old.target, range(start, stop) if varies(old) else (start,))
        routes = [self.route(old.domain + turn, to.link, nic + turn) for to, nic in targets]
        if not varies(old):
            ((domain, nic),) = routes
            return [on_lanes(old, start, stop, domain, [nic])]
        moved = []
        for domain, run in itertools.groupby(routes, key=lambda route: route[0]):
            nics = [nic for _, nic in run]
            moved.append(on_lanes(old, start, start + len(nics), domain, nics))
            start += len(nics)
        return moved


def not_made_good(error: FabricError, why: str) -> FabricError:
    """The error of a row that could not be retransmitted, with the reason."""
    return error.saying(f". It could not be retransmitted on another path: {why}")
