"""The sender's half of a failover: rows that were posted on a path that died are made good.

Whether such a row landed is unknown, so the group keeps it, and its transfer stays open. Once no
row is in flight on the path any more, the receiver (`fencing`) fences it off and says what had
come. What landed whole counts as done. The bytes of the others are written again, without
immediates, over paths that are up. When all of these bytes have arrived, as many immediates as were
missing follow, without bytes.

Rule 1: no row goes out again before its path is fenced. Rule 2: if every row of one immediate had
landed, none of them is written again: the reader may have been released. Rule 3: an immediate
follows only after all bytes that it could vouch for. Rule 4: sums that contradict each other end in
an error, never in a guess. Rule 5: a row is written again as often as there are paths, no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tep.backends.base import Domain
from tep.control.channel import Channel
from tep.control.messages import Asked, Told, values_max
from tep.core.group import DomainGroup, not_made_good
from tep.core.path import Path, PathEvent
from tep.core.pending import Loss, LostRow, Pending, Retransmission, varies
from tep.core.transfer import Transfer
from tep.errors import TepError

__all__ = ["Failover", "why_unable"]

_NO_IMM = -1
"""Stands for the immediate of rows that have none."""


def why_unable(domains: Sequence[Domain]) -> str | None:
    """Why rows that these NICs lose cannot be made good; None: they can."""
    for domain in domains:
        if not domain.caps.imm_source:
            return (
                f"the {domain.caps.backend} backend cannot fence a dead path off, nor say what had "
                "come over it, so that nobody knows whether this row landed"
            )
    return None


class Failover:
    """What is being made good on one engine.

    Args:
        group: its NICs, with the rows that it keeps.
        channel: to the peers' engines.

    Attributes:
        rows: made good so far, in any way.
    """

    def __init__(self, group: DomainGroup, channel: Channel) -> None:
        self.rows = 0
        self._group, self._channel = group, channel

    # ------------------------------------------------------------------ asking

    def step(self) -> bool:
        """Ask about paths on which nothing is in flight any more; True if one was asked about."""
        work = False
        for loss in tuple(self._group.losses):
            # An older question about the same path comes first: its answer changes the sums.
            if not loss.asked and loss.path.losses[0] is loss and self._is_quiet(loss.path):
                loss.asked = work = True
                self._ask(loss)
        return work

    def is_clear(self, path: Path) -> bool:
        """Whether no row is in flight on a path, and none that it lost waits to be made good."""
        return not path.losses and self._is_quiet(path)

    def _is_quiet(self, path: Path) -> bool:
        """Whether no row is in flight on a path. Until the batch that was seen last is back, one
        is: so all batches are looked through once for each that ends, and not in every step.
        """
        seen = path.seen
        if seen is not None and seen.at > seen.back:
            return False
        batches = self._group.batches.values()
        path.seen = next((pending for pending in batches if _is_used(path, pending)), None)
        return path.seen is None

    def _ask(self, loss: Loss) -> None:
        imms = sorted({imm for lost in loss.rows if (imm := lost.imm) is not None})
        source = self._group.domains[loss.path.domain].address
        room = values_max(self._channel.note_bytes)
        parts = [tuple(imms[k : k + room]) for k in range(0, len(imms), room)] or [()]
        loss.left, loss.pruned = len(parts), None
        loss.path.to(PathEvent.ASKED)
        for part in parts:
            self._ask_about(loss, source, part)

    def _ask_about(self, loss: Loss, source: bytes, imms: tuple[int, ...]) -> None:
        self._channel.ask(
            loss.path.link,
            lambda number: Asked(number, source, loss.path.nic, imms),
            lambda told: self._told(loss, imms, told),
            lambda why: self._give_up(loss, why),
        )

    def _told(self, loss: Loss, imms: tuple[int, ...], told: object) -> None:
        path = loss.path
        if loss not in path.losses:
            return  # another part of the answer was missing
        assert isinstance(told, Told)
        name = path.link.addr.name
        if told.why or len(told.counts) != len(imms):
            self._give_up(loss, f"{name} says: {told.why or 'no such sums'}")
            return
        if imms and loss.pruned not in (None, told.pruned):
            self._give_up(loss, f"{name} has pruned its sums meanwhile")
            return
        if imms:
            loss.pruned = told.pruned
        path.to(PathEvent.FENCED)
        loss.counts.update(zip(imms, told.counts, strict=True))
        loss.left -= 1
        if loss.left == 0:
            if self._is_quiet(path):
                self._judge(loss)
            else:  # the peer was thought dead as a whole, so that this path was tried again
                loss.asked = False

    # ------------------------------------------------------------------ judging

    def _judge(self, loss: Loss) -> None:
        sums, name = loss.path.sums, loss.path.link.addr.name
        if loss.pruned is not None and not sums.sent.forgot and not sums.prune(loss.pruned):
            text = f"it has pruned its sums {loss.pruned} times, this engine {sums.pruned} times"
            self._give_up(loss, f"{name} says that {text}")
            return
        self._remove(loss)
        by_imm: dict[int, list[LostRow]] = {}
        for lost in loss.rows:
            imm = lost.imm
            by_imm.setdefault(_NO_IMM if imm is None else imm, []).append(lost)
        known = self._acknowledged(loss.path, by_imm)
        for imm, rows in by_imm.items():
            if imm == _NO_IMM:
                self.rows += len(rows)
                self._write_again(rows, [])
            else:
                self._judge_imm(loss, imm, rows, loss.counts[imm] - known[imm])
        self._settle(loss.rows)

    def _remove(self, loss: Loss) -> None:
        self._group.losses.remove(loss)
        loss.path.losses.remove(loss)

    def _acknowledged(self, path: Path, wanted: dict[int, list[LostRow]]) -> dict[int, int]:
        """How many of these immediates were acknowledged on a path since the beginning."""
        group = self._group
        if group.acks is not None:
            group.acks.fold()
        known = {imm: path.sums.sent.sum(imm) for imm in wanted if imm != _NO_IMM}
        for pending in group.batches.values():  # and of those that are not through
            if pending.domain == path.domain and pending.batch.imm is not None:
                for row in pending.posted_rows():
                    if _is_on(path, pending, row) and row not in pending.lost:
                        imm = pending.imm(row)
                        if imm in known:
                            known[imm] += 1
        return known

    def _judge_imm(self, loss: Loss, imm: int, rows: list[LostRow], landed: int) -> None:
        """Rows of one immediate, `landed` of which are known to have landed whole."""
        sums, name = loss.path.sums, loss.path.link.addr.name
        live = [lost for lost in rows if not lost.pending.transfer.is_ending()]
        doubt = len(rows) - len(live) + sums.doubt.pop(imm, 0)
        total = len(live) + doubt
        why: str | None = None
        if sums.sent.forgot:
            why = sums.why_forgot()
        elif not 0 <= landed <= total:
            why = f"{name} counted {landed} of {total} rows of imm {imm:#x}, which cannot be"
        elif doubt and 0 < landed < total:
            why = (
                f"{landed} of {total} immediates {imm:#x} came, {doubt} of them of failed requests"
            )
        if why is not None:
            sums.doubt[imm] += total
            self._fail(live, why)
            return
        sums.sent.add(imm, landed)
        self.rows += len(live)
        if landed == 0:
            self._write_again(live, live)
        elif landed < total:
            self._write_again(live, live[: total - landed])

    def _write_again(self, rows: list[LostRow], missing: list[LostRow]) -> None:
        """Write the bytes of all rows again, and then the immediates of those that are missing.

        Which of them are missing nobody can know, and nobody need: they are equal.
        """
        group = self._group
        retransmission = Retransmission()
        for pending, row, error in missing:
            transfer = pending.transfer
            transfer.left += 1
            transfer.extra += 1
            retransmission.after.append((pending, row, error))
        retransmission.left = 1  # ours, so that it cannot be over before it has begun
        for pending, row, error in rows:
            mine = pending.retransmission  # a row that is being written again already
            if pending.transfer.is_ending():
                if mine is not None:
                    group.finish_retransmission(mine)
            elif pending.row_bytes(row):
                pending.transfer.left += 1
                pending.transfer.extra += 1
                if mine is None:
                    mine = retransmission
                    retransmission.left += 1
                self._group.repost(pending, row, mine, error)
        group.finish_retransmission(retransmission)

    def _settle(self, rows: list[LostRow]) -> None:
        """The rows themselves are over; what was made of them counts by itself."""
        for lost in rows:
            transfer = lost.pending.transfer
            transfer.left -= 1
            transfer.held -= 1
        for transfer in dict.fromkeys(lost.pending.transfer for lost in rows):
            if transfer.left == 0:
                self._group.ended.append(transfer)

    # ------------------------------------------------------------------ giving up

    def _give_up(self, loss: Loss, why: str) -> None:
        if loss not in loss.path.losses:
            return
        self._remove(loss)
        if loss.asked:
            loss.path.to(PathEvent.UNANSWERED)
        counts = Counter(imm for lost in loss.rows if (imm := lost.imm) is not None)
        loss.path.sums.doubt.update(counts)
        for lost in loss.rows:
            self._group.doubt(lost.pending, lost.row, lost.error.code)
        self._fail([lost for lost in loss.rows if not lost.pending.transfer.is_ending()], why)
        for lost in loss.rows:
            if lost.pending.retransmission is not None:
                self._group.finish_retransmission(lost.pending.retransmission)
        self._settle(loss.rows)

    def _fail(self, rows: list[LostRow], why: str) -> None:
        for lost in rows:
            transfer: Transfer = lost.pending.transfer
            transfer.failed_rows += 1
            if transfer.failure is None:
                transfer.failure = not_made_good(lost.error, why)
                self._group.drop_queued(transfer)

    def close(self, error: TepError) -> None:
        """The engine is about to close: rows that are kept fail, and no more are kept."""
        group = self._group
        group.failover, group.closing = False, error
        for loss in tuple(group.losses):
            for lost in loss.rows:
                lost.pending.transfer.failure = lost.pending.transfer.failure or error
            self._give_up(loss, "the engine was closed")


def _is_used(path: Path, pending: Pending) -> bool:
    """Whether rows of a batch are in flight on a path."""
    if pending.at == pending.back or pending.domain != path.domain:
        return False
    rows = pending.posted_rows() if varies(pending) else (0,)
    return any(_is_on(path, pending, row) for row in rows)


def _is_on(path: Path, pending: Pending, row: int) -> bool:
    """Whether a row of a batch on our NIC goes over a path."""
    remote, nic = pending.target(row)
    return remote.link is path.link and nic == path.nic
