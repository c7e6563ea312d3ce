"""Planted bugs: how rows are made good whose NIC died: asking, fencing, summing, writing again."""

from __future__ import annotations

import itertools

import numpy as np

from tep.backends.base import Status
from tep.control.channel import Channel
from tep.control.failover import Failover, Fencing
from tep.control.messages import Answer
from tep.core.group import DomainGroup
from tep.core.handles import State, Transfer
from tep.core.imm import Counts
from tep.core.path import Acks, Arrivals, Link, Sums
from tep.engine.worker import Worker
from tep.sim.faults import Clog, Cut, KillNic, Mute, Swizzle
from tests.gate.bugs_counting import BY_COLUMNS
from tests.gate.registry import (
    CHANNEL,
    FAILOVER,
    GROUP,
    HANDLES,
    POSTING,
    WORKER,
    Change,
    bug,
    mistake,
)  # fmt: skip
from tests.world.scenario import Scenario

LATE = 2000
"""Seeds for what needs a NIC to die at its moment: one run in twenty makes a row good."""


def can_show(scenario: Scenario) -> bool:
    """Return True if a row may need a retry in this scenario; others do not show these bugs."""
    trouble = any(isinstance(f, KillNic | Clog | Cut | Mute | Swizzle) for _, f in scenario.faults)
    return scenario.failover and (trouble or scenario.chaos.cq_depth > 0)


# ---------------------------------------------------------------------- what the receiver counted


@bug(budget=LATE)
def lost_rows_never_landed() -> list[Change]:
    """A row whose acknowledgement is missing is taken not to have landed: it counts twice."""
    return mistake(
        FAILOVER,
        "self._judge_imm(loss, imm, rows, loss.counts[imm] - known[imm])",
        "self._judge_imm(loss, imm, rows, 0)",
    )


@bug(budget=LATE)
def lost_rows_all_landed() -> list[Change]:
    """A row whose acknowledgement is missing is taken to have landed: it never counts."""
    return mistake(
        FAILOVER,
        "self._judge_imm(loss, imm, rows, loss.counts[imm] - known[imm])",
        "self._judge_imm(loss, imm, rows, len(rows))",
    )


@bug(budget=LATE)
def top_up_one_short() -> list[Change]:
    """Off by one: one immediate less follows than is missing."""
    return mistake(
        FAILOVER, "missing = live[: total - landed]", "missing = live[: total - landed - 1]"
    )


@bug(budget=LATE)
def acknowledged_not_subtracted() -> list[Change]:
    """The receiver's sum is since the beginning; what was acknowledged is not taken off it."""
    return mistake(FAILOVER, "loss.counts[imm] - known[imm])", "loss.counts[imm])")


@bug(budget=LATE)
def sums_over_all_senders() -> list[Change]:
    """The receiver tells how often an immediate came, from whomever."""

    def everybody(self, nic, address, imms):
        found = dict.fromkeys(imms, 0)
        for key, count in self.counted.items():
            if key & 0xFFFFFFFF in found:
                found[key & 0xFFFFFFFF] += count
        return tuple(found.values())

    return [(Arrivals, "sums", everybody)]


@bug(budget=LATE)
def sums_over_all_nics() -> list[Change]:
    """The receiver tells how often an immediate came from that NIC, at whichever of its own."""
    each = "mine.sums(its, message.source, message.imms)"
    nics = "for mine, its in zip(self.arrivals, self._nics)"
    return mistake(
        FAILOVER,
        "counts = self.arrivals[message.nic].sums(there, message.source, message.imms)",
        f"counts = tuple(map(sum, zip(*[{each} {nics}])))",
    )


@bug(budget=2 * LATE)
def arrivals_counted_as_entries() -> list[Change]:
    """A completion that stands for several immediates is one arrival in the sums."""
    add = Arrivals.add
    return [(Arrivals, "add", lambda self, source, imm, _: add(self, source, imm, 1))]


@bug(budget=LATE)
def arrivals_by_columns_missed() -> list[Change]:
    """Immediates that are counted by columns do not get into the sums."""
    return [BY_COLUMNS, (Arrivals, "add_columns", lambda _self, _sources, _raw: None)]


@bug(budget=LATE)
def acks_of_lost_rows() -> list[Change]:
    """A batch that is through counts as acknowledged as a whole, lost rows and all."""
    add = Acks.add

    def all_of_it(self, pending):
        lost, pending.lost = pending.lost, set()
        add(self, pending)
        pending.lost = lost

    return [(Acks, "add", all_of_it)]


@bug(budget=LATE)
def tally_keeps_first() -> list[Change]:
    """Sums are set, not added to."""

    def put(self, key, count):
        self._sums.setdefault(key, count)

    return [(Sums, "add", put)]


# ---------------------------------------------------------------------- fencing


@bug(budget=LATE)
def path_not_fenced() -> list[Change]:
    """The receiver answers without a fence: what is in flight lands after it was counted."""
    return mistake(FAILOVER, "self.fence(message.source, message.nic, tell)", "tell(Status.OK)")


@bug(budget=4 * LATE)
def sums_taken_before_the_fence() -> list[Change]:
    """The sums are taken at the moment of the question; the fence comes after."""
    asked, tell = Fencing._asked, Fencing._tell

    def note_first(self, nic, address, message):
        early = self.__dict__.setdefault("_early", {})
        if message.nic < len(self.arrivals):
            there = self._nics[message.nic]
            sums = self.arrivals[message.nic].sums(there, message.source, message.imms)
            early[address, message.number] = sums
        asked(self, nic, address, message)

    def tell_early(self, nic, address, message, status):
        counts = self.__dict__.get("_early", {}).get((address, message.number))
        if counts is None or status != Status.OK:
            tell(self, nic, address, message, status)
        else:
            self._channel.answer(nic, address, Answer(message.number, "", counts))

    return [(Fencing, "_asked", note_first), (Fencing, "_tell", tell_early)]


@bug(budget=LATE)
def first_nic_fenced() -> list[Change]:
    """The receiver fences at its first NIC, whichever the path went to."""
    return mistake(
        FAILOVER,
        "self.fence(message.source, message.nic, tell)",
        "self.fence(message.source, 0, tell)",
    )


@bug(budget=2 * LATE)
def asked_while_rows_are_out() -> list[Change]:
    """The receiver is asked while rows are still out on the path."""
    return [(Failover, "_is_quiet", lambda *_: True)]


# ---------------------------------------------------------------------- writing again


@bug(budget=LATE)
def only_missing_rows_written() -> list[Change]:
    """So many rows are written again as immediates are missing, and it is guessed which."""
    return mistake(
        FAILOVER, "self._write_again(live, missing)", "self._write_again(missing, missing)"
    )


@bug(budget=LATE)
def all_immediates_again() -> list[Change]:
    """Every row that is written again gets its immediate again."""
    return mistake(FAILOVER, "self._write_again(live, missing)", "self._write_again(live, live)")


@bug(budget=LATE)
def immediates_before_the_bytes() -> list[Change]:
    """The immediates follow at once, and not when the bytes are there."""
    return mistake(
        FAILOVER,
        "retransmission.after.append((pending, row, error))",
        "group.repost(pending, row, None, error)",
    )


@bug(budget=LATE)
def written_after_release() -> list[Change]:
    """Rows that had all landed are written again: the reader owns that memory by now."""
    return mistake(
        FAILOVER,
        "        if missing:\n            self._write_again(live",
        "        if live:\n            self._write_again(live",
    )


@bug(budget=LATE)
def only_the_first_transfer_is_written_again() -> list[Change]:
    """Transfers under one immediate lost rows together: the bytes of one are written again."""
    rows = "[row for row in live if row.pending.transfer is live[0].pending.transfer]"
    return mistake(
        FAILOVER, "self._write_again(live, missing)", f"self._write_again({rows}, missing)"
    )


@bug(budget=4 * LATE)
def sharing_transfers_are_written_again_apart() -> list[Change]:
    """Each transfer under one immediate is written again by itself: the missing immediates of
    one may stand for bytes of another that are still in flight.
    """
    write_again = Failover._write_again

    def apart(self, rows, missing):
        for transfer in dict.fromkeys(row.pending.transfer for row in rows):
            mine = [row for row in rows if row.pending.transfer is transfer]
            write_again(self, mine, [row for row in missing if row.pending.transfer is transfer])
        if not rows:
            write_again(self, rows, missing)

    return [(Failover, "_write_again", apart)]


@bug(budget=LATE)
def first_row_written_again() -> list[Change]:
    """The first row of a batch is written again, not the lost ones."""
    repost = DomainGroup.repost

    def first(self, old, _row, retransmission, error):
        repost(self, old, 0, retransmission, error)

    return [(DomainGroup, "repost", first)]


@bug(budget=LATE)
def ending_requests_written_again() -> list[Change]:
    """Rows of a cancelled or failed transfer are retried, although nobody wants them."""
    return [(Transfer, "is_ending", lambda _: False)]


# ---------------------------------------------------------------------- keeping, and ending


@bug(budget=LATE)
def done_while_rows_are_held() -> list[Change]:
    """A held row is taken off the account: the transfer is done before anybody knows."""
    return [
        *mistake(GROUP, "transfer.held += 1", "transfer.held += 1; transfer.left -= 1"),
        *mistake(FAILOVER, "            transfer.left -= 1\n", ""),
    ]


def fails_with(status: str) -> list[Change]:
    """Make rows with one status good no more."""
    keeps = "self._keep(pending, row, error) if lost"
    return mistake(GROUP, keeps, f"{keeps} and status != Status.{status}")


@bug(budget=LATE)
def flushed_rows_fail() -> list[Change]:
    """Rows that were flushed with a dead path fail, though another NIC lives."""
    return fails_with("FLUSHED")


@bug(budget=LATE)
def rows_to_a_dead_nic_fail() -> list[Change]:
    """Only the death of one's own NIC is made good, not the peer's."""
    return fails_with("UNREACHABLE")


@bug(budget=LATE)
def cancel_ends_held_rows() -> list[Change]:
    """Cancel ends a transfer whose rows are being asked about."""
    cancel = Worker.cancel

    def eager(self, handle):
        if isinstance(handle, Transfer) and not handle.finished and handle.held:
            self._end(handle, State.CANCELLED)
        else:
            cancel(self, handle)

    return [(Worker, "cancel", eager)]


# ---------------------------------------------------------------------- asking


@bug(budget=LATE)
def lost_question_not_repeated() -> list[Change]:
    """A question that got lost is waited for."""
    return [(Channel, "_again", lambda *_: None)]


@bug(budget=LATE)
def given_up_at_the_first_lane() -> list[Change]:
    """A question that fails on one lane is not tried on the next."""
    return mistake(CHANNEL, "self._ask_over(question, others)", "self._lose(question, why)")


@bug(budget=LATE)
def questions_share_a_number() -> list[Change]:
    """All questions have one number: an answer ends the wrong one."""
    ask = Channel.ask

    def same(self, link, message, told, lost):
        self._numbers = itertools.repeat(1)
        ask(self, link, message, told, lost)

    return [(Channel, "ask", same)]


# ---------------------------------------------------------------------- callbacks, and columns


@bug()
def no_callback_after_failure() -> list[Change]:
    """A transfer that is not done gets no callback."""
    none = "        if self._callbacks is None:\n            return"
    return mistake(HANDLES, none, none.replace(":", " or self.state is not State.DONE:"))


@bug()
def called_back_too_early() -> list[Change]:
    """Callbacks run before the handle knows how it ended."""
    begin = "        if type(handle) is Transfer:"
    return mistake(WORKER, begin, f"        handle._deliver()\n{begin}")


@bug(budget=LATE)
def mixed_burst_bypasses_its_page() -> list[Change]:
    """A burst over several stretches of values is counted beside the pages they have."""

    def count(self, raw):
        halves = np.frombuffer(raw, np.uint16)
        if len(set(halves[1::2].tolist())) == 1:
            page = self._pages.setdefault(int(halves[1]), np.zeros(1 << 16, np.int64))
            np.add.at(page, halves[::2].astype(np.intp), 1)
            return int(halves[1])
        self._rest.update(np.frombuffer(raw, np.uint32).tolist())
        return None

    return [BY_COLUMNS, ("tep.core.imm", "_SCALAR_MAX", 0), (Counts, "count", count)]


@bug(budget=LATE)
def first_part_of_the_answer_is_all() -> list[Change]:
    """The first of several messages of an answer is judged as if it were the whole."""
    return mistake(
        FAILOVER, "loss.left, loss.pruned = len(parts), None", "loss.left, loss.pruned = 1, None"
    )


@bug(budget=8000)
def lost_pieces_stay_out() -> list[Change]:
    """A piece that lost a row keeps its place at its NIC: with two of them it gets no other."""
    leaves = "if pending.is_piece and (pace"
    return mistake(POSTING, leaves, leaves.replace("and", "and not pending.lost and"))


# ---------------------------------------------------------------------- paths, not NICs

CUT = 2000
"""Seeds for what shows only where two NICs do not reach each other, and both reach others."""


@bug(budget=CUT)
def routes_go_by_nics() -> list[Change]:
    """A path is used if both of its NICs work, though it is shut, and others are not."""
    route = Link.route

    def by_nics(self, here, domain, nic):
        closed, self.closed = self.closed, 0
        found = route(self, here, domain, nic)
        self.closed = closed
        return found

    return [(Link, "route", by_nics)]


@bug(budget=CUT)
def our_other_nics_are_no_way() -> list[Change]:
    """A row that got no answer fails where the peer has no other NIC, though we have one."""
    return [(Link, "has_way", lambda *_, **__: False)]
