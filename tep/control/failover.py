"""Failover: rows that were in flight on a path that failed are made good on others.

Nobody knows whether such a row landed, so the group keeps it, and its transfer stays open. When no
row is in flight on the path any more, the sender (`Failover`) asks the receiver (`Fencing`), which
fences the path off and says how many of each immediate arrived over it. Rows that landed count as
done. The bytes of the others are written again, without immediates, over paths that are up. When
all of these bytes have arrived, the missing immediates are sent, without bytes. Later the fenced
path is opened again (`Reopening`), and the sums of both ends are kept short (`Pruning`).

Rule 1: no row is written again before its path is fenced. Rule 2: if all rows of one immediate
landed, none of them is written again, because the reader may already use the bytes. Rule 3: an
immediate is sent only after all bytes that it may stand for. Rule 4: sums that contradict each
other, or that a failed row may have changed, end in an error, never in a guess. Rule 5: a row is
written again at most once for each path. Rule 6: the counts of a path are sent only after it is
fenced, since more rows could arrive before that. Rule 7: a path is opened again when neither end
has rows on it that are in flight or not settled, and never for a peer that was removed and has not
been named since.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, cast

from tep.backends.base import ControlDomain, Domain, Status
from tep.base.errors import FabricError, TepError
from tep.control.channel import Channel, Drop
from tep.control.messages import (
    NICS_MAX,
    PRUNED_MAX,
    Answer,
    FenceOff,
    Prune,
    Reopen,
    runs_max,
    values_max,
)
from tep.core.group import DomainGroup, Loss, LostRow, not_made_good
from tep.core.handles import Removal, Transfer
from tep.core.path import Arrivals, Fence, Link, Path, PathEvent, PathState, PathSums, Run, runs_of
from tep.core.posting import Pending, Retransmission, varies

__all__ = ["Failover", "Fencing", "Pruning", "Reopening", "why_unable"]

_NO_IMM: Final = -1
"""Stands for the immediate of rows that have none."""

_ASKING_MAX: Final = 64
"""Questions about one path that may wait for its fence; others are dropped and repeated."""

_PATHS_MAX: Final = 1 << 14
"""Paths that are remembered. Beyond that, the paths of the first engine are forgotten: then a late
copy of a question may fence or open a path once more, and its rows are retransmitted."""

_RETRY_S: Final = 0.01
"""Time from the first refusal to the next try; the receiver may not have counted everything yet."""

_RETRY_MAX_S: Final = 60.0
"""The longest time to the next try: it doubles from one to the next that does not succeed."""


def why_unable(domains: Sequence[Domain]) -> str | None:
    """Say why rows that these NICs lose cannot be retransmitted; None: they can."""
    for domain in domains:
        if not domain.caps.imm_source:
            return (
                f"the {domain.caps.backend} backend cannot fence a dead path off, nor say what had "
                "come over it, so that nobody knows whether this row landed"
            )
    return None


class Failover:
    """The sender's half: `rows` lost rows have landed so far, or were retransmitted."""

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
        """Count the acknowledged ones of these immediates on a path, less what was pruned."""
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
        """Settle lost rows of one immediate; `landed` of them are known to have landed."""
        sums, name = loss.path.sums, loss.path.link.addr.name
        live = [lost for lost in rows if not lost.pending.transfer.is_ending()]
        total, failed = len(rows), len(rows) - len(live)
        why: str | None = None
        if sums.sent.forgot:
            why = sums.why_forgot()
        elif imm in sums.unsure:
            why = f"a row with imm {imm:#x} failed on that path before, and may have landed"
        elif not 0 <= landed <= total:
            why = f"{name} counted {landed} of {total} rows of imm {imm:#x}, which cannot be"
        elif failed and 0 < landed < total:
            why = f"{landed} of {total} rows of imm {imm:#x} came, {failed} are of failed requests"
        if why is not None:
            sums.unsure.add(imm)
            self._fail(live, why)
            return
        sums.sent.add(imm, landed)
        self.rows += len(live)
        missing = live[: total - landed]
        if missing:
            self._write_again(live, missing)

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
                group.finish_retransmission(mine, missed=True)
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

    # ------------------------------------------------------------------ fencing

    def fence(self, path: Path, then: Callable[[], object]) -> None:
        """Have the peer fence a path without lost rows, before it is opened again."""
        source = self._group.domains[path.domain].address
        path.asking = True
        path.to(PathEvent.ASKED)

        def ended(why: str) -> None:
            path.asking = False
            path.to(PathEvent.UNANSWERED if why else PathEvent.FENCED)
            if not why:
                then()

        self._channel.ask(
            path.link,
            lambda number: FenceOff(number, source, path.nic, ()),
            lambda answer: ended(answer.why),
            ended,
        )

    # ------------------------------------------------------------------ giving up

    def _give_up(self, loss: Loss, why: str) -> None:
        if loss not in loss.path.losses:
            return
        self._remove(loss)
        if loss.asked:
            loss.path.to(PathEvent.UNANSWERED)
        loss.path.sums.unsure.update(imm for lost in loss.rows if (imm := lost.imm) is not None)
        self._fail([lost for lost in loss.rows if not lost.pending.transfer.is_ending()], why)
        for lost in loss.rows:
            if lost.pending.retransmission is not None:
                self._group.finish_retransmission(lost.pending.retransmission, missed=True)
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


class Pruning:
    """The sender's half of pruning; the receiver's is `Fencing`.

    step() must be called while paths are `large`: they hold many values.
    """

    def __init__(self, group: DomainGroup, channel: Channel, now_s: Callable[[], float]) -> None:
        self._group, self._channel, self._now_s = group, channel, now_s
        self.large: dict[Path, None] = {} if group.acks is None else group.acks.large

    def step(self) -> bool:
        """Ask the peers of paths with many values to prune; True if a question was sent."""
        work, now_s = False, self._now_s()
        for path in tuple(self.large):
            sums = path.sums
            if not path.link.current or sums.sent.forgot or not self._channel.able:
                del self.large[path]
            elif not sums.asking and sums.retry_s <= now_s:
                work = True
                self._ask(path, sums)
        return work

    def _ask(self, path: Path, sums: PathSums) -> None:
        if not sums.waiting:
            runs = runs_of(sums.sent.items(), PRUNED_MAX)
            sums.waiting.extend(_lists(runs, runs_max(self._channel.control_bytes)))
            if not sums.waiting:  # all of it was pruned meanwhile
                self._rest(path, sums)
                return
        generation, runs_now = sums.pruned + 1, sums.waiting[0]
        source, nic = self._group.domains[path.domain].address, path.nic

        def told(answer: Answer) -> None:
            if answer.why:
                again(answer.why)
                return
            sums.asking, sums.why, sums.wait_s = False, "", 0.0
            if sums.pruned < generation:  # else the answer to a failover said so earlier
                sums.prune(generation)
                self._rest(path, sums)

        def again(why: str) -> None:
            sums.asking, sums.why = False, why
            sums.wait_s = min(2 * sums.wait_s or _RETRY_S, _RETRY_MAX_S)
            sums.retry_s = self._now_s() + sums.wait_s

        sums.asking = True
        self._channel.ask(
            path.link, lambda n: Prune(n, source, nic, generation, runs_now), told, again
        )

    def _rest(self, path: Path, sums: PathSums) -> None:
        """After the last list, wait until the path has many values again."""
        if not sums.waiting:
            sums.sent.calm()
            self.large.pop(path, None)


class Reopening:
    """Both ends of reopening paths.

    `opened` is called with each path that is in use again, and `busy` with each that stays shut
    because of rows in flight on it, though the peer answers.
    """

    def __init__(
        self,
        group: DomainGroup,
        channel: Channel,
        failover: Failover,
        fencing: Fencing,
        find: Callable[[bytes], Link | None],
        opened: Callable[[Path], object],
        busy: Callable[[Path], object],
    ) -> None:
        self._group, self._channel = group, channel
        self._failover, self._fencing = failover, fencing
        self._find, self._opened, self._busy = find, opened, busy
        channel.hear(Reopen, self._asked)

    # ------------------------------------------------------------------ the sender's half

    def wanted(self, link: Link, nic: int) -> list[tuple[int, int]]:
        """List the paths from working NICs of ours to a NIC of a peer that are not UP."""
        alive = enumerate(self._group.alive)
        return [(domain, nic) for domain, up in alive if up and not link.is_up(domain, nic)]

    def begin(self, path: Path) -> None:
        """A peer answers over a path: if the path is not UP, ask the peer to open it.

        A path that could not be fenced while the peer did not answer is fenced first.
        """
        if path.is_up or path.asking:
            return
        if not self._is_clear(path):
            self._busy(path)
        elif path.state is PathState.SUSPECT:
            self._failover.fence(path, lambda: self._fenced(path))
        else:  # FENCED: in the other two states it is being asked, or has lost rows to settle
            self._ask(path)

    def _is_clear(self, path: Path) -> bool:
        live = path.link.current and self._group.alive[path.domain]
        return live and self._failover.is_clear(path)

    def _fenced(self, path: Path) -> None:
        if self._is_clear(path):
            self._ask(path)

    def _ask(self, path: Path) -> None:
        path.asking = True
        path.to(PathEvent.ASKED_BACK)
        own = self._group.domains[path.domain].address
        self._channel.ask(
            path.link,
            lambda number: Reopen(number, own, path.nic),
            lambda answer: self._answered(path, agreed=not answer.why),
            lambda _: self._answered(path, agreed=False),
        )

    def _answered(self, path: Path, *, agreed: bool) -> None:
        """A path that stays shut is asked for again when the peer answers the next time."""
        path.asking = False
        if path.state is not PathState.REOPENING:
            return  # rows were lost on it meanwhile
        if not (agreed and self._is_clear(path)):
            path.to(PathEvent.REFUSED)
            if agreed:
                self._busy(path)
            return
        # Lift our own fence against the other direction, if there is one.
        self._fencing.lift(path.link.addr.domains[path.nic], path.domain)
        path.to(PathEvent.OPENED)
        self._opened(path)

    # ------------------------------------------------------------------ the receiver's half

    def _asked(self, nic: int, address: bytes, message: Reopen) -> None:
        if not self._fencing.admit(nic, address, message) or self._fencing.is_outdated(message):
            return
        why = self._why_not(message) or self._fencing.lift(message.source, message.nic)
        self._channel.tell(nic, address, message.number, why)

    def _why_not(self, message: Reopen) -> str | None:
        if not self._group.alive[message.nic]:
            return f"its NIC {message.nic} is down"
        link = self._find(message.source)
        if link is not None:
            number = link.addr.domains.index(message.source)
            shut = not link.is_up(message.nic, number)
            if shut and not self._failover.is_clear(link.path(message.nic, number)):
                return "rows that it lost in the other direction are not settled yet"
        return None


class Fencing:
    """The receiver's half: all fences of one engine.

    `arrivals` are the immediates that arrived on each NIC; empty if they are not counted.
    """

    def __init__(
        self,
        group: DomainGroup,
        arrivals: Sequence[Arrivals],
        channel: Channel,
        find: Callable[[bytes], Link | None],
    ) -> None:
        self._nics = [cast("ControlDomain", domain) for domain in group.domains]
        self.arrivals = arrivals
        self._channel, self._find = channel, find
        self._far_ends = group.far_ends
        self._barred: dict[tuple[int, bytes], None] = {}  # in the order of their removals
        self._begun: dict[int, Fence] = {}
        self._paths: dict[bytes, set[tuple[int, bytes]]] = {}  # that were asked about, by engine
        self._npaths = 0
        self._ctxs = itertools.count()
        channel.hear(FenceOff, self._asked)
        channel.hear(Prune, self._prune)

    def is_outdated(self, message: FenceOff | Reopen) -> bool:
        """Whether a question is a late copy: a later question has opened or fenced its path."""
        far = self._far_ends.at(message.nic, message.source)
        if message.number < (far.reopened if isinstance(message, FenceOff) else far.asked):
            return True
        if isinstance(message, FenceOff):
            far.asked = max(message.number, far.asked)
        else:
            far.reopened = max(message.number, far.reopened)
        return False

    def admit(self, nic: int, address: bytes, message: FenceOff | Reopen) -> bool:
        """Whether a question is about a path that can exist and for which there is room."""
        if message.nic >= len(self._nics):
            why = f"it has NICs 0 to {len(self._nics) - 1}, and was asked about NIC {message.nic}"
            self._channel.tell(nic, address, message.number, why)
            return False
        engine, key = self._channel.engine_of(nic, address), (message.nic, message.source)
        mine = self._paths.setdefault(engine, set())
        if key in mine:
            return True
        if len(mine) >= NICS_MAX * len(self._nics):
            self._channel.drop(Drop.FULL, address, f"{len(mine)} paths of this engine are known")
            return False
        mine.add(key)
        self._npaths += 1
        while self._npaths > _PATHS_MAX:
            keys = self._paths.pop(next(iter(self._paths)))
            self._npaths -= len(keys)
            for key in keys:
                self._far_ends.drop(*key)
        return True

    def _asked(self, nic: int, address: bytes, message: FenceOff) -> None:
        if not self.admit(nic, address, message) or self.is_outdated(message):
            return
        fence = self._far_ends.at(message.nic, message.source).fence
        if fence is not None and len(fence.asking) >= _ASKING_MAX:
            self._channel.drop(Drop.FULL, address, "too many questions about one path")
            return

        def tell(status: int) -> None:
            self._channel.guard(address, self._tell, nic, address, message, status)

        try:
            self.fence(message.source, message.nic, tell)
        except TepError as error:
            why = f"no fence: {error}"
            self._channel.tell(nic, address, message.number, why)

    def fence(self, source: bytes, nic: int, then: Callable[[int], object]) -> None:
        """Fence the NIC at an address off at our NIC `nic`, and call then(status) when that ends.

        If the path is fenced already, then(status) is called at once. A fence that failed is tried
        again. Raises TepError if the NIC cannot begin.
        """
        there = self._nics[nic].caps
        if not there.imm_source:
            raise FabricError(f"its NIC {there.nic} cannot fence a path off", code="PROVIDER")
        far = self._far_ends.at(nic, source)
        fence = far.fence
        if fence is None or fence.status not in (None, Status.OK):
            ctx = next(self._ctxs)
            self._nics[nic].fence(source, ctx)
            fence = far.fence = self._begun[ctx] = Fence()
        if fence.status is None:
            fence.asking.append(then)
        else:
            then(fence.status)

    def lift(self, source: bytes, nic: int) -> str | None:
        """Accept rows of the NIC at an address at our NIC `nic` again; return why not, or None.

        Rows that had ended before this call do not land any more (C27). A fence that failed, for a
        removal, is forgotten: who asks has been told of an earlier one that did not.
        """
        far = self._far_ends.get(nic, source)
        fence = None if far is None else far.fence
        if far is not None and far.barred:
            link = self._find(source)
            if link is None or link.barred:
                return "this engine has removed the peer, and has not named it for rows since"
            far.barred = False
            self._barred.pop((nic, source), None)
        if fence is not None and fence.status is None:
            return "it is being fenced off"
        try:
            self._nics[nic].unfence(source)
        except TepError as error:
            return str(error)
        if far is not None:
            far.fence = None
        return None

    def bar(self, removal: Removal) -> None:
        """Fence every path from a peer that is removed, until it is named for rows again."""

        def ended(nic: int, status: int) -> None:
            removal.fencing -= 1
            removal.unfenced = removal.unfenced or self.why_not(nic, status) or ""

        for nic, address in itertools.product(range(len(self._nics)), removal.link.addr.domains):
            removal.fencing += 1
            try:
                self.fence(address, nic, partial(ended, nic))
            except TepError as error:
                removal.fencing -= 1
                removal.unfenced = removal.unfenced or str(error)
            else:
                self._far_ends.at(nic, address).barred = True
                self._barred[nic, address] = None
        while len(self._barred) > _PATHS_MAX:
            first = next(iter(self._barred))
            del self._barred[first]
            self._far_ends.at(*first).barred = False
            self._far_ends.drop(*first)

    def fenced(self, ctx: int, status: int) -> None:
        """Take a NIC's completion of a fence."""
        fence = self._begun.pop(ctx)
        fence.status = status
        asking, fence.asking = fence.asking, []
        for then in asking:
            then(status)

    def why_not(self, nic: int, status: int) -> str | None:
        """Say why a path could not be fenced off; None: it was fenced."""
        if status == Status.OK:
            return None
        there = self._nics[nic]
        hint = there.status_text(status)
        why = f"its NIC {there.caps.nic} cannot fence the path off: {Status(status).name}"
        return why + (f": {hint}" if hint else "")

    def forget(self, addresses: Collection[bytes]) -> None:
        """Drop what is known of a peer that was removed, by its NICs' addresses."""
        self._far_ends.forget(addresses)
        for engine, keys in tuple(self._paths.items()):
            gone = {key for key in keys if key[1] in addresses}
            keys.difference_update(gone)
            self._npaths -= len(gone)
            if not keys:
                del self._paths[engine]
        for nic, arrivals in zip(self._nics, self.arrivals, strict=False):
            arrivals.forget(nic, addresses)

    def _tell(self, nic: int, address: bytes, message: FenceOff, status: int) -> None:
        counts: tuple[int, ...] = ()
        pruned = 0
        there = self._nics[message.nic]
        why = self.why_not(message.nic, status)
        if message.imms and why is None:
            if not self.arrivals:
                why = "it does not count immediates by their sender"
            elif (why := self.arrivals[message.nic].forgot(there, message.source)) is None:
                counts = self.arrivals[message.nic].sums(there, message.source, message.imms)
                pruned = self.arrivals[message.nic].pruned(message.source)
        self._channel.tell(nic, address, message.number, why, counts, pruned)

    def _prune(self, nic: int, address: bytes, message: Prune) -> None:
        # The counts of a fenced path must not change while its sender compares them.
        far = self._far_ends.get(message.nic, message.source)
        why: str | None
        if message.nic >= len(self.arrivals):
            why = f"it counts no immediates at a NIC {message.nic}"
        elif far is not None and far.fence is not None:
            why = "this path is fenced off"
        else:
            why = self.arrivals[message.nic].prune(
                self._nics[message.nic], message.source, message.generation, message.runs
            )
        self._channel.tell(nic, address, message.number, why)


def _is_used(path: Path, pending: Pending) -> bool:
    if pending.at == pending.back or pending.domain != path.domain:
        return False
    rows = pending.posted_rows() if varies(pending) else (0,)
    return any(_is_on(path, pending, row) for row in rows)


def _is_on(path: Path, pending: Pending, row: int) -> bool:
    remote, nic = pending.target(row)
    return remote.link is path.link and nic == path.nic


def _lists(runs: Iterable[Run], longest: int) -> Iterator[tuple[Run, ...]]:
    part: list[Run] = []
    values = 0
    for run in runs:
        if len(part) == longest or values + run[1] > PRUNED_MAX:
            yield tuple(part)
            part, values = [], 0
        part.append(run)
        values += run[1]
    if part:
        yield tuple(part)
