"""The sender's half of a failover: rows that were posted on a path that died are made good.

Whether such a row landed is unknown, so it is held here, and its transfer stays open. Once no row
is out on the path any more, the receiver fences it off and says what had come (`audit`). What
landed whole counts as done. Of the others the bytes are written again, without immediates, over
lanes that live; and when all of these bytes are there, as many immediates as were missing follow,
without bytes.

Rule 1: no row goes out again before its path is fenced. Rule 2: if every row of one immediate had
landed, none of them is written again: the reader may have been released. Rule 3: an immediate
follows only after all bytes that it could vouch for. Rule 4: sums that contradict each other end in
an error, never in a guess. Rule 5: a row is written again as often as there are paths, no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tep.backends.base import Domain
from tep.control.channel import Channel
from tep.control.messages import Asked, Told, values_max
from tep.core.group import DomainGroup
from tep.core.pending import Acks, Pending, Rescue, varies
from tep.core.region import Link
from tep.core.transfer import Transfer
from tep.errors import FabricError, TepError

__all__ = ["Recovery", "why_unable"]

_NO_IMM = -1
"""Stands for the immediate of rows that have none."""


class _Lost(NamedTuple):
    """A row of which nobody knows whether it landed, and the error it would fail with."""

    pending: Pending
    row: int
    error: FabricError

    @property
    def imm(self) -> int | None:
        return self.pending.imm(self.row)


class _Path:
    """One lane that died.

    Attributes:
        domain, link, nic: our NIC, the peer, its NIC.
        rows: lost there.
        asked: whether the receiver was asked; no row joins after that.
        counts: what it told, by immediate.
        pruned: the generation that these counts stand at; None: none was told.
        left: answers that are missing.
        seen: a batch with rows out there, as far as is known.
    """

    __slots__ = ("asked", "counts", "domain", "left", "link", "nic", "pruned", "rows", "seen")

    def __init__(self, domain: int, link: Link, nic: int) -> None:
        self.domain = domain
        self.link = link
        self.nic = nic
        self.rows: list[_Lost] = []
        self.asked = False
        self.counts: dict[int, int] = {}
        self.pruned: int | None = None
        self.left = 0
        self.seen: Pending | None = None

    def is_used_by(self, pending: Pending) -> bool:
        """Whether rows of a batch are out on this lane."""
        if pending.at == pending.back or pending.domain != self.domain:
            return False
        rows = pending.posted_rows() if varies(pending) else (0,)
        return any(self.holds(pending, row) for row in rows)

    def holds(self, pending: Pending, row: int) -> bool:
        """Whether a row goes over this lane."""
        remote, nic = pending.target(row)
        return remote.link is self.link and nic == self.nic


def why_unable(domains: Sequence[Domain]) -> str:
    """Why rows that these NICs lose cannot be made good; "" = they can."""
    for domain in domains:
        if not domain.caps.imm_source:
            return (
                f"the {domain.caps.backend} backend cannot fence a dead path off, nor say what had "
                "come over it, so that nobody knows whether this row landed"
            )
    return ""


class Recovery:
    """What is being made good on one engine.

    Args:
        group: its NICs.
        mail: to the peers' engines.
        able: whether lost rows are made good at all.
        why: the reason to give where they are not; "" = none.

    Attributes:
        paths: that died and whose rows are not settled.
        able: False where nothing can be made good, and lost rows fail at once.
        rows: made good so far, in any way.
        why: why the NICs cannot; "" = they can, or it is not wanted.
    """

    def __init__(self, group: DomainGroup, mail: Channel, *, able: bool, why: str = "") -> None:
        self.paths: list[_Path] = []
        self.able = able
        self.rows = 0
        self._group = group
        self._channel = mail
        self.why = why
        self._closed: TepError | None = None
        group.hold = self._hold
        group.rescued = self._rescued
        group.acks = Acks() if able else None

    def _hold(self, pending: Pending, row: int, error: FabricError) -> FabricError | None:
        """Keep a row whose end is unknown, or say with which error it fails."""
        transfer = pending.transfer
        if not self.able or transfer.failure is not None:
            return _with_reason(error, self.why) if self.why else error
        remote, nic = pending.target(row)
        if pending.tries >= len(self._group.domains) * len(remote.link.alive):
            return _with_reason(error, f"it was lost on {pending.tries} paths before")
        for path in self.paths:
            if not path.asked and path.domain == pending.domain and path.holds(pending, row):
                break
        else:
            path = _Path(pending.domain, remote.link, nic)
            self.paths.append(path)
            remote.link.shut.add((pending.domain, nic))  # as it will be, by the first question
        path.rows.append(_Lost(pending, row, error))
        transfer.held += 1
        return None

    # ------------------------------------------------------------------ asking

    def step(self) -> bool:
        """Ask about paths on which nothing is out any more; True if one was asked about."""
        work = False
        for path in tuple(self.paths):
            if not path.asked and self._is_first(path) and self._is_quiet(path):
                path.asked = work = True
                self._ask(path)
        return work

    def _is_first(self, path: _Path) -> bool:
        """Whether no older question about the same lane is open, of which the sums would change."""
        key = path.domain, path.link, path.nic
        return next(p for p in self.paths if (p.domain, p.link, p.nic) == key) is path

    def is_clear(self, domain: int, link: Link, nic: int) -> bool:
        """Whether no row is out on a lane, and none that it lost waits to be made good."""
        lane = domain, link, nic
        held = any((path.domain, path.link, path.nic) == lane for path in self.paths)
        return not held and self._is_quiet(_Path(domain, link, nic))

    def _is_quiet(self, path: _Path) -> bool:
        """Whether no row is out on a lane. Until the batch that was seen last is back, it is not:
        so all batches are looked through once for each that ends, and not in every step.
        """
        seen = path.seen
        if seen is not None and seen.at > seen.back:
            return False
        path.seen = next(filter(path.is_used_by, self._group.batches.values()), None)
        return path.seen is None

    def _ask(self, path: _Path) -> None:
        imms = sorted({imm for lost in path.rows if (imm := lost.imm) is not None})
        source = self._group.domains[path.domain].address
        room = values_max(self._channel.note_bytes)
        parts = [tuple(imms[k : k + room]) for k in range(0, len(imms), room)] or [()]
        path.left, path.pruned = len(parts), None
        for part in parts:
            self._ask_about(path, source, part)

    def _ask_about(self, path: _Path, source: bytes, imms: tuple[int, ...]) -> None:
        self._channel.ask(
            path.link,
            lambda number: Asked(number, source, path.nic, imms),
            lambda told: self._told(path, imms, told),
            lambda why: self._give_up(path, why),
        )

    def _told(self, path: _Path, imms: tuple[int, ...], told: object) -> None:
        if path not in self.paths:
            return  # another part of the answer was missing
        assert isinstance(told, Told)
        if told.why or len(told.counts) != len(imms):
            self._give_up(path, f"{path.link.addr.name} says: {told.why or 'no such sums'}")
            return
        if imms and path.pruned not in (None, told.pruned):
            self._give_up(path, f"{path.link.addr.name} has pruned its sums meanwhile")
            return
        if imms:
            path.pruned = told.pruned
        path.link.fence(path.domain, path.nic)
        path.counts.update(zip(imms, told.counts, strict=True))
        path.left -= 1
        if path.left == 0:
            if self._is_quiet(path):
                self._judge(path)
            else:  # the peer was thought dead as a whole, so that this lane was tried again
                path.asked = False

    # ------------------------------------------------------------------ judging

    def _judge(self, path: _Path) -> None:
        lane = path.link.lane(path.domain, path.nic)
        if path.pruned is not None and not lane.sent.forgot and not lane.prune(path.pruned):
            text = f"it has pruned its sums {path.pruned} times, this engine {lane.pruned} times"
            self._give_up(path, f"{path.link.addr.name} says that {text}")
            return
        self.paths.remove(path)
        by_imm: dict[int, list[_Lost]] = {}
        for lost in path.rows:
            imm = lost.imm
            by_imm.setdefault(_NO_IMM if imm is None else imm, []).append(lost)
        known = self._acknowledged(path, by_imm)
        for imm, rows in by_imm.items():
            if imm == _NO_IMM:
                self.rows += len(rows)
                self._write_again(rows, [])
            else:
                self._judge_imm(path, imm, rows, path.counts[imm] - known[imm])
        self._settle(path.rows)

    def _acknowledged(self, path: _Path, wanted: dict[int, list[_Lost]]) -> dict[int, int]:
        """How many of these immediates were acknowledged on a lane since the beginning."""
        group = self._group
        if group.acks is not None:
            group.acks.fold()
        lane = path.link.lane(path.domain, path.nic)
        known = {imm: lane.sent.sum(imm) for imm in wanted if imm != _NO_IMM}
        for pending in group.batches.values():  # and of those that are not through
            if pending.domain == path.domain and pending.batch.imm is not None:
                for row in pending.posted_rows():
                    if path.holds(pending, row) and row not in pending.lost:
                        imm = pending.imm(row)
                        if imm in known:
                            known[imm] += 1
        return known

    def _judge_imm(self, path: _Path, imm: int, rows: list[_Lost], landed: int) -> None:
        """Rows of one immediate, `landed` of which are known to have landed whole."""
        lane = path.link.lane(path.domain, path.nic)
        live = [lost for lost in rows if not lost.pending.transfer.is_ending()]
        doubt = len(rows) - len(live) + lane.doubt.pop(imm, 0)
        total = len(live) + doubt
        name = path.link.addr.name
        why = ""
        if lane.sent.forgot:
            why = lane.why_forgot()
        elif not 0 <= landed <= total:
            why = f"{name} counted {landed} of {total} rows of imm {imm:#x}, which cannot be"
        elif doubt and 0 < landed < total:
            why = (
                f"{landed} of {total} immediates {imm:#x} came, {doubt} of them of failed requests"
            )
        if why:
            lane.doubt[imm] += total
            self._fail(live, why)
            return
        lane.sent.add(imm, landed)
        self.rows += len(live)
        if landed == 0:
            self._write_again(live, live)
        elif landed < total:
            self._write_again(live, live[: total - landed])

    def _write_again(self, rows: list[_Lost], missing: list[_Lost]) -> None:
        """Write the bytes of all rows again, and then the immediates of those that are missing.

        Which of them are missing nobody can know, and nobody need: they are equal.
        """
        group = self._group
        rescue = Rescue()
        for pending, row, error in missing:
            transfer = pending.transfer
            transfer.left += 1
            transfer.extra += 1
            rescue.after.append((pending, row, error))
        rescue.left = 1  # ours, so that it cannot be over before it has begun
        for pending, row, error in rows:
            mine = pending.rescue  # a row that is being written again already
            if pending.transfer.is_ending():
                if mine is not None:
                    group.finish_rescue(mine)
            elif pending.row_bytes(row):
                pending.transfer.left += 1
                pending.transfer.extra += 1
                if mine is None:
                    mine = rescue
                    rescue.left += 1
                self._group.repost(pending, row, mine, error)
        group.finish_rescue(rescue)

    def _rescued(self, rescue: Rescue) -> None:
        """All bytes are there: now the immediates may follow."""
        after, rescue.after = rescue.after, []
        for pending, row, error in after:
            transfer = pending.transfer
            transfer.failure = transfer.failure or self._closed
            if transfer.is_ending():
                transfer.left -= 1
                transfer.dropped += 1
                self._note_ended(transfer)
            else:
                self._group.repost(pending, row, None, error)

    def _settle(self, rows: list[_Lost]) -> None:
        """The rows themselves are over; what was made of them counts by itself."""
        for lost in rows:
            transfer = lost.pending.transfer
            transfer.left -= 1
            transfer.held -= 1
        for transfer in dict.fromkeys(lost.pending.transfer for lost in rows):
            self._note_ended(transfer)

    def _note_ended(self, transfer: Transfer) -> None:
        if transfer.left == 0:
            self._group.ended.append(transfer)

    # ------------------------------------------------------------------ giving up

    def _give_up(self, path: _Path, why: str) -> None:
        if path not in self.paths:
            return
        self.paths.remove(path)
        lane = path.link.lane(path.domain, path.nic)
        counts = Counter(imm for lost in path.rows if (imm := lost.imm) is not None)
        lane.doubt.update(counts)
        for lost in path.rows:
            self._group.doubt(lost.pending, lost.row, lost.error.code)
        self._fail([lost for lost in path.rows if not lost.pending.transfer.is_ending()], why)
        for lost in path.rows:
            if lost.pending.rescue is not None:
                self._group.finish_rescue(lost.pending.rescue)
        self._settle(path.rows)

    def _fail(self, rows: list[_Lost], why: str) -> None:
        for lost in rows:
            transfer: Transfer = lost.pending.transfer
            transfer.failed_rows += 1
            if transfer.failure is None:
                transfer.failure = _with_reason(lost.error, why)
                self._group.drop_queued(transfer)

    def close(self, error: TepError) -> None:
        """The engine is about to close: what is held fails, and nothing is held any more."""
        self.able, self._closed = False, error
        for path in tuple(self.paths):
            for lost in path.rows:
                lost.pending.transfer.failure = lost.pending.transfer.failure or error
            self._give_up(path, "the engine was closed")


def _with_reason(error: FabricError, why: str) -> FabricError:
    return error.saying(f". It could not be made good over another NIC: {why}")
