"""The sender's half of a failover: retransmit rows that were in flight on a path that failed.

Nobody knows whether such a row landed, so the group keeps it, and its transfer stays open. When no
row is in flight on the path any more, the receiver (`fencing`) fences the path off and says how
many of each immediate arrived over it. Rows that landed count as done. The bytes of the others are
written again, without immediates, over paths that are up. When all of these bytes have arrived, the
missing immediates are sent, without bytes.

Rule 1: no row is written again before its path is fenced. Rule 2: if all rows of one immediate
landed, none of them is written again, because the reader may already use the bytes. Rule 3: an
immediate is sent only after all bytes that it may stand for, and a transfer that fails meanwhile
settles only then, since it may be tried again under the same immediate. Rule 4: sums that
contradict each other end in an error, never in a guess. Rule 5: a row is written again at most once
for each path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tep.backends.base import Domain, Status
from tep.control.channel import Channel
from tep.control.messages import Answer, FenceOff, values_max
from tep.core.events import DoubtsEnded
from tep.core.group import DomainGroup, not_made_good
from tep.core.path import Path, PathEvent
from tep.core.pending import NEVER_LANDED, Loss, LostRow, Pending, Retransmission, varies
from tep.core.transfer import Transfer
from tep.errors import TepError

__all__ = ["Failover", "why_unable"]

_NO_IMM = -1
"""Stands for the immediate of rows that have none."""


def why_unable(domains: Sequence[Domain]) -> str | None:
    """Why rows that these NICs lose cannot be retransmitted; None: they can."""
    for domain in domains:
        if not domain.caps.imm_source:
            return (
                f"the {domain.caps.backend} backend cannot fence a dead path off, nor say what had "
                "come over it, so that nobody knows whether this row landed"
            )
    return None


class Failover:
    """The failovers of one engine.

    Args:
        group: its NICs, with the lost rows that it keeps.
        channel: control messages to the peers' engines.

    Attributes:
        rows: lost rows settled without an error so far: they had landed, or were retransmitted.
    """

    def __init__(self, group: DomainGroup, channel: Channel) -> None:
        self.rows = 0
        self._group, self._channel = group, channel

    # ------------------------------------------------------------------ asking

    def step(self) -> bool:
        """Ask about lost rows of paths with nothing in flight; True if a question was sent."""
        work = False
        for loss in tuple(self._group.losses):
            # An older loss of the same path comes first, because its answer changes the sums.
            if not loss.asked and loss.path.losses[0] is loss and self._is_quiet(loss.path):
                loss.asked = work = True
                self._ask(loss)
        return work

    def is_clear(self, path: Path) -> bool:
        """Whether a path has no row in flight, and no lost row that is not settled."""
        return not path.losses and self._is_quiet(path)

    def _is_quiet(self, path: Path) -> bool:
        """Whether no row is in flight on a path.

        A batch that was found in flight is remembered, so that all batches are searched again only
        when that one has ended, and not in every step.
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
        room = values_max(self._channel.control_bytes)
        parts = [tuple(imms[k : k + room]) for k in range(0, len(imms), room)] or [()]
        loss.left, loss.pruned = len(parts), None
        loss.path.to(PathEvent.ASKED)
        for part in parts:
            self._ask_about(loss, source, part)

    def _ask_about(self, loss: Loss, source: bytes, imms: tuple[int, ...]) -> None:
        self._channel.ask(
            loss.path.link,
            lambda number: FenceOff(number, source, loss.path.nic, imms),
            lambda told: self._told(loss, imms, told),
            lambda why: self._give_up(loss, why),
        )

    def _told(self, loss: Loss, imms: tuple[int, ...], told: Answer) -> None:
        path = loss.path
        if loss not in path.losses:
            return  # given up, because another part of the answer was missing
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
            else:  # all NICs of the peer were marked down, so this path was used again
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
        known = self.acknowledged(loss.path, by_imm)
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

    def acknowledged(self, path: Path, wanted: Iterable[int]) -> dict[int, int]:
        """How many of these immediates were acknowledged on a path, less what was pruned."""
        group = self._group
        if group.acks is not None:
            group.acks.fold()
        known = {imm: path.sums.sent.sum(imm) for imm in wanted if imm != _NO_IMM}
        for pending in group.batches.values():  # and those of batches that have not ended
            if pending.domain == path.domain and pending.batch.imm is not None:
                for row in pending.posted_rows():
                    if _is_on(path, pending, row) and row not in pending.lost:
                        imm = pending.imm(row)
                        if imm in known:
                            known[imm] += 1
        return known

    def _judge_imm(self, loss: Loss, imm: int, rows: list[LostRow], landed: int) -> None:
        """Settle lost rows of one immediate, `landed` of which are known to have landed."""
        sums, name = loss.path.sums, loss.path.link.addr.name
        live = [lost for lost in rows if not lost.pending.transfer.is_ending()]
        older = sums.doubt.pop(imm, 0)
        doubt = len(rows) - len(live) + older
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
        if older:
            self._group.events.append(DoubtsEnded(loss.path, {imm: older if landed else 0}))
        missing = rows if landed == 0 else live[: total - landed]
        for lost in rows:
            lost.pending.lose(lost.row, int(Status.OK))
        for lost in missing:
            lost.pending.lose(lost.row, NEVER_LANDED)
        if missing:
            self._write_again(live, live[: total - landed])

    def _write_again(self, rows: list[LostRow], missing: list[LostRow]) -> None:
        """Write the bytes of all rows again, then send the immediates of the missing rows.

        Nobody knows which rows are missing; it makes no difference, since their immediates are
        equal.
        """
        group = self._group
        retransmission = Retransmission()
        for pending, row, error in missing:
            transfer = pending.transfer
            transfer.left += 1
            transfer.extra += 1
            retransmission.after.append((pending, row, error))
        retransmission.left = 1  # released below, so that it cannot end before all rows are queued
        for pending, row, error in rows:
            if not pending.row_bytes(row):
                continue
            mine, transfer = pending.retransmission, pending.transfer
            if mine is None:  # else it was a retransmitted row already
                mine = retransmission
                mine.left += 1
            if transfer.is_ending():
                group.finish_retransmission(mine, transfer)
            else:
                transfer.left += 1
                transfer.extra += 1
                group.repost(pending, row, mine, error)
        group.finish_retransmission(retransmission)

    def _settle(self, rows: list[LostRow]) -> None:
        """Take the lost rows out of their transfers; rows written again are counted separately."""
        for lost in rows:
            transfer = lost.pending.transfer
            transfer.left -= 1
            transfer.held -= 1
        for transfer in dict.fromkeys(lost.pending.transfer for lost in rows):
            if transfer.left == 0:
                self._group.ended.append(transfer)

    # ------------------------------------------------------------------ doubts of failed requests

    def can_clear(self, path: Path) -> bool:
        """Whether rows of failed requests are in doubt on a path, and the peer can tell."""
        return self.able and bool(path.sums.doubt) and not (path.sums.sent.forgot or path.unclear)

    @property
    def able(self) -> bool:
        """Whether peers can fence paths and count by sender, as far as this engine knows."""
        return self._group.acks is not None

    def clear(
        self, path: Path, told: Callable[[str], object], lost: Callable[[str], object]
    ) -> None:
        """Have the peer fence a path, and say what landed of the rows in doubt, if it can.

        The path has no row in flight and no lost row. Ends in told(why it cannot, or ""), or in
        lost(why there is no answer).
        """
        imms: tuple[int, ...] = ()
        if self.can_clear(path):
            imms = tuple(sorted(path.sums.doubt)[: values_max(self._channel.control_bytes)])
        source = self._group.domains[path.domain].address
        path.asking = True
        path.to(PathEvent.ASKED)

        def answered(answer: Answer) -> None:
            path.asking = False
            if answer.why:
                path.unclear |= bool(imms)
                path.to(PathEvent.UNANSWERED)
            else:
                path.to(PathEvent.FENCED)
                if imms and self.is_clear(path):
                    self._clear(path, imms, answer)
            told(answer.why)

        def unanswered(why: str) -> None:
            path.asking = False
            path.to(PathEvent.UNANSWERED)
            lost(why)

        self._channel.ask(
            path.link, lambda number: FenceOff(number, source, path.nic, imms), answered, unanswered
        )

    def _clear(self, path: Path, imms: tuple[int, ...], answer: Answer) -> None:
        """Move rows in doubt that landed to the acknowledged ones, and forget the others."""
        sums = path.sums
        if len(answer.counts) != len(imms) or not sums.prune(answer.pruned):
            path.unclear = True
            return
        known = self.acknowledged(path, imms)
        ended = {}
        for imm, count in zip(imms, answer.counts, strict=True):
            landed = count - known[imm]
            if 0 <= landed <= sums.doubt[imm]:
                sums.sent.add(imm, landed)
                ended[imm] = landed
                del sums.doubt[imm]
            else:
                path.unclear = True
        self._group.events.append(DoubtsEnded(path, ended))

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
                self._group.finish_retransmission(
                    lost.pending.retransmission, lost.pending.transfer
                )
        self._settle(loss.rows)

    def _fail(self, rows: list[LostRow], why: str) -> None:
        for lost in rows:
            transfer: Transfer = lost.pending.transfer
            transfer.failed_rows += 1
            if transfer.failure is None:
                transfer.failure = not_made_good(lost.error, why)
                self._group.drop_queued(transfer)

    def close(self, error: TepError) -> None:
        """The engine is about to close: lost rows fail, and no more are kept."""
        group = self._group
        group.failover = False
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
