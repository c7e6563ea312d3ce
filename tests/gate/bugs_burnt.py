"""Planted bugs: immediates under which something failed, and peers that are removed.

Their gate, `test_burnt_bugs`, looks for them in the oracle's runs that can show them.
"""

from __future__ import annotations

from collections.abc import Callable

from tep.control.channel import Notices
from tep.control.failover import Failover, Fencing
from tep.core.group import DomainGroup
from tep.core.imm import ImmTable
from tep.core.path import Acks
from tep.core.regions import Job, PeerBook
from tests.gate.registry import CHANNEL, FAILOVER, IMM, MEMBERSHIP, Bug, Change, bug, mistake

__all__ = ["BARRING", "BURNT", "DIRECTED", "ORDERS"]

BURNT: dict[str, Bug] = {}
"""Bugs of notices, of burnt immediates, and of rows under them."""

BARRING: dict[str, Bug] = {}
"""Bugs of a receiver that removes the sender."""

ORDERS: dict[str, Bug] = {}
"""Bugs that only the cases played whole show: no drawn run removes an immediate."""

DIRECTED: dict[str, Bug] = {}
"""Bugs that need more to go wrong at its moment than is drawn: `test_burnt_orders` plays that."""

BUDGET = 20_000


burnt = bug(BUDGET, BURNT)
"""Register a bug of burnt immediates."""

barring = bug(BUDGET, BARRING)
"""Register a bug of removals; one run in six removes the sender."""

directed = bug(0, DIRECTED)
"""Register a bug that a test of one order of events shows."""

orders = bug(0, ORDERS)
"""Register a bug that only the cases played whole show."""

# ---------------------------------------------------------------------- the sender


def burns_only(wanted: Callable[[object], bool]) -> list[Change]:
    """Let a transfer burn its immediates only if wanted(its error)."""
    burn = Notices.burn

    def some(self, transfer):
        if wanted(transfer.failure):
            burn(self, transfer)

    return [(Notices, "burn", some)]


@burnt
def a_failure_burns_nothing() -> list[Change]:
    """A failed transfer burns nothing, and nobody is told."""
    return burns_only(lambda failure: failure is None)


@burnt
def a_cancel_burns_nothing() -> list[Change]:
    """A cancelled transfer burns nothing, and nobody is told."""
    return burns_only(lambda failure: failure is not None)


@burnt
def no_notice_is_sent() -> list[Change]:
    """The sender burns the immediates, and keeps that to itself."""
    return mistake(CHANNEL, "self._tell(link, fresh, reason)", "pass")


@burnt
def a_lost_notice_is_not_repeated() -> list[Change]:
    """A notice that got no answer is forgotten."""
    return mistake(CHANNEL, "self._wake(peer, peer.wait_s)", "peer.unsent.clear()")


@burnt
def only_the_first_run_is_sent() -> list[Change]:
    """A notice holds the first run of its immediates."""
    return mistake(
        CHANNEL,
        "Failed(number, serial, self._name, reason, runs)",
        "Failed(number, serial, self._name, reason, runs[:1])",
    )


@burnt
def only_the_first_target_is_told() -> list[Change]:
    """The other targets of a scatter are not told, and may be written to under the immediate."""
    by_peer = Job.imms_by_peer
    return [(Job, "imms_by_peer", lambda self: by_peer(self)[:1])]


@burnt
def burnt_immediates_are_accepted() -> list[Change]:
    """A request under a burnt immediate goes out like any other."""
    rooms = "tep.engine.machine", "tep.engine.worker"
    return [(room, "refuse_burnt", lambda *_: None) for room in rooms]


# ---------------------------------------------------------------------- the receiver


@burnt
def only_the_first_run_is_burnt() -> list[Change]:
    """The receiver burns the first run of a notice."""
    return mistake(
        MEMBERSHIP, "for first, n in message.imms for", "for first, n in message.imms[:1] for"
    )


@burnt
def open_expectations_wait_on() -> list[Change]:
    """The receiver refuses later expectations, and lets the open ones wait."""

    def burn(self, imm, owner, error):
        self.burnt.add(owner, imm, error)
        return [], 0

    return [(ImmTable, "burn", burn)]


@burnt
def one_expectation_of_several_fails() -> list[Change]:
    """The first of several queued expectations fails, and the others go on waiting."""
    return mistake(
        IMM, "return wants, self.counts.pop(imm)", "return wants[:1], self.counts.pop(imm)"
    )


@burnt
def later_expectations_are_not_refused() -> list[Change]:
    """An expectation that is stated after the notice waits for its timeout."""
    return mistake(IMM, "if self.burnt.why and (error", "if not self.burnt.why and (error")


@burnt
def what_comes_late_is_counted() -> list[Change]:
    """The receiver fails what is open, and counts for a later expectation what came or comes."""
    burn = ImmTable.burn

    def fail_only(self, imm, owner, error):
        came = self.counts.get(imm)
        wants, _ = burn(self, imm, owner, error)
        self.burnt.remove(imm)
        self.counts.put(imm, came)
        return wants, came

    return [(ImmTable, "burn", fail_only)]


@orders
def late_copies_burn_again() -> list[Change]:
    """A notice that comes again, after its immediate was removed, burns it again."""
    return mistake(MEMBERSHIP, "if message.serial not in serials:", "if message.serial:")


# ---------------------------------------------------------------------- rows under a burnt one


@burnt
def rows_under_an_unsure_immediate_are_guessed() -> list[Change]:
    """Rows are judged by sums that an earlier failed row may have changed."""
    judge = Failover._judge_imm

    def guess(self, loss, imm, rows, landed):
        loss.path.sums.unsure.clear()
        judge(self, loss, imm, rows, max(0, min(landed, len(rows))))

    return [(Failover, "_judge_imm", guess), (Acks, "miss", lambda *_: None)]


@directed
def immediates_follow_a_row_that_was_lost() -> list[Change]:
    """The immediates of a retransmission follow, although bytes of one of its rows never came."""
    finish = DomainGroup.finish_retransmission

    def blindly(self, retransmission, *, missed=False):
        finish(self, retransmission)

    return [(DomainGroup, "finish_retransmission", blindly)]


# ---------------------------------------------------------------------- removals


@barring
def removals_wait_for_no_fence() -> list[Change]:
    """A removal settles while paths from the peer are still being fenced off."""
    return mistake(MEMBERSHIP, "        if removal.fencing:\n            return False\n", "")


@barring
def removals_fence_nothing() -> list[Change]:
    """A removal forgets the peer, and lets it write."""
    return [(Fencing, "bar", lambda *_: None)]


@barring
def one_path_is_fenced_for_a_removal() -> list[Change]:
    """Only the first of the paths from a removed peer is fenced off."""
    return mistake(
        FAILOVER,
        "in itertools.product(range(len(self._nics)), removal.link.addr.domains):",
        "in [(0, removal.link.addr.domains[0])]:",
    )


@barring
def a_failed_fence_counts_as_a_fence() -> list[Change]:
    """A removal does not say that a path could not be fenced off."""
    return mistake(
        FAILOVER,
        'removal.unfenced = removal.unfenced or self.why_not(nic, status) or ""',
        'removal.unfenced = ""',
    )


@barring
def removed_peers_are_let_in() -> list[Change]:
    """A removed peer asks for its paths, and gets them."""
    return mistake(FAILOVER, "if link is None or link.barred:", "if not nic + 1:")


@barring
def named_for_messages_is_let_in() -> list[Change]:
    """A removed peer is let in again when it is named for messages only."""
    link = PeerBook.link

    def open_all(self, addr, what):
        found = link(self, addr, what)
        found.barred = False
        return found

    return [(PeerBook, "link", open_all)]
