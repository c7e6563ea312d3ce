"""Planted bugs: reads that end too early, are repeated too often, or notify their owner too soon.

Their gate, `test_read_bugs`, looks for them in the oracle's runs that read: one in three.
"""

from __future__ import annotations

from tep.backends.base import Status
from tep.core import reads, requests
from tep.core.group import DomainGroup
from tep.core.reads import Reads
from tep.engine import verbs
from tests.gate.registry import Bug, Change, bug

__all__ = ["READ_BUGS"]

READ_BUGS: dict[str, Bug] = {}


# ---------------------------------------------------------------------- the owner's immediate


@bug(50, READ_BUGS)
def owner_told_at_once() -> list[Change]:
    """The immediate is queued with the rows, like a write's."""
    start = Reads.start

    def at_once(self, transfer):
        start(self, transfer)
        if transfer.job.after is not None and not transfer.is_ending():
            self._follow(transfer, transfer.job)

    return [(Reads, "start", at_once)]


@bug(50, READ_BUGS)
def owner_told_at_the_first_row() -> list[Change]:
    """The immediate follows the first row that is back, and not the last."""
    finish = Reads.finish

    def first(self, domain, ctx, count, status, row):
        transfer = self._group.batches[ctx].transfer
        finish(self, domain, ctx, count, status, row)
        if transfer.job.after is not None and not transfer.is_ending():
            self._follow(transfer, transfer.job)

    return [(Reads, "finish", first)]


@bug(400, READ_BUGS)
def owner_told_of_a_cancelled_read() -> list[Change]:
    """A cancel drops rows, and forgets that somebody is to be told when the others are back."""
    drop = DomainGroup.drop_queued

    def rows_only(self, transfer):
        after = getattr(transfer.job, "after", None)
        if after is None or transfer.failure is not None:
            return drop(self, transfer)
        after.at = after.stop  # so that it is not dropped
        dropped = drop(self, transfer)
        after.at = 0
        transfer.dropped -= dropped
        transfer.rows -= dropped
        return dropped

    return [(DomainGroup, "drop_queued", rows_only)]


# ---------------------------------------------------------------------- ends, and second tries


OVER = {Status.FLUSHED, Status.UNREACHABLE}


@bug(5000, READ_BUGS)
def posted_again_after_nic_down() -> list[Change]:
    """A row of a dead NIC is posted again, while the first posting may still arrive."""
    return [(reads, "_AGAIN", frozenset({*OVER, Status.NIC_DOWN}))]


@bug(5000, READ_BUGS)
def posted_again_after_giving_up() -> list[Change]:
    """A row that was given up is posted again, while the first posting may still arrive."""
    return [(reads, "_AGAIN", frozenset({*OVER, Status.GIVEN_UP}))]


@bug(1000, READ_BUGS)
def no_quarantine_after_nic_down() -> list[Change]:
    """Memory of a read that may still be carried out by a dead NIC is said to be free."""
    return [(reads, "_OPEN_ENDED", frozenset({Status.GIVEN_UP}))]


@bug(1000, READ_BUGS)
def no_quarantine_after_giving_up() -> list[Change]:
    """Memory of a read that was given up is said to be free."""
    return [(reads, "_OPEN_ENDED", frozenset({Status.NIC_DOWN}))]


@bug(400, READ_BUGS)
def second_tries_count_as_back() -> list[Change]:
    """A row that is posted again counts as back: the read is done before its bytes are here."""
    moved = Reads._moved

    def counted(self, old, start, stop, turn=0):
        done = moved(self, old, start, stop, turn)
        if done and turn:
            old.transfer.left -= stop - start
        return done

    return [(Reads, "_moved", counted)]


@bug(400, READ_BUGS)
def first_row_is_tried_again() -> list[Change]:
    """The first row of a batch is posted again, whichever failed."""
    moved = Reads._moved

    def first(self, old, start, stop, turn=0):
        return moved(self, old, 0, stop - start, turn) if turn else moved(self, old, start, stop)

    return [(Reads, "_moved", first)]


@bug(400, READ_BUGS)
def moved_rows_stay_queued() -> list[Change]:
    """Rows that wait for a dead NIC are queued at another, and not cut off where they were."""
    moved = Reads._moved

    def twice(self, old, start, stop, turn=0):
        cut, DomainGroup.cut = DomainGroup.cut, lambda *_: 0
        try:
            return moved(self, old, start, stop, turn)
        finally:
            DomainGroup.cut = cut

    return [(Reads, "_moved", twice)]


@bug(400, READ_BUGS)
def queue_of_a_dead_nic_is_kept() -> list[Change]:
    """Rows wait for a NIC that is down."""
    return [(Reads, "_move_all", lambda self, queue: None)]


# ---------------------------------------------------------------------- columns and keys


@bug(400, READ_BUGS)
def other_nics_address() -> list[Change]:
    """Rows have the owner's address on its first NIC, and the key of another."""
    return [(reads, "shifted", lambda column, shift: column)]


@bug(400, READ_BUGS)
def every_lane_reads_the_first_pages() -> list[Change]:
    """Each NIC gets its own pages here, and the first ones there."""
    cut = reads.cut

    def first(columns, rows):
        here, _, nbytes = cut(columns, rows)
        return here, *cut(columns[1:2], slice(0, rows.stop - rows.start)), nbytes

    deal = Reads._deal

    def dealt(self, *args):
        reads.cut = first
        try:
            deal(self, *args)
        finally:
            reads.cut = cut

    return [(Reads, "_deal", dealt)]


@bug(400, READ_BUGS)
def both_ends_mixed_up() -> list[Change]:
    """The page lists of source and destination are exchanged."""
    job = requests.paged_read_job

    def mixed(page_bytes, src, dst, *rest):
        (remote, there), (mr, here) = src, dst
        return job(page_bytes, (remote, here), (mr, there), *rest)

    return [(verbs, "paged_read_job", mixed)]
