"""Planted bugs: leases that end too early, on either side, and doubts that are forgotten.

Their gate, `test_lease_bugs`, looks for them in those of the oracle's runs that lease: one in six.
"""

from __future__ import annotations

from collections.abc import Callable

from tep.backends.base import Status
from tep.control.failover import Failover
from tep.control.fencing import Fencing
from tep.control.held_leases import HeldLeases
from tep.control.leases import Leases
from tep.control.messages import NICS_MAX, Answer
from tep.core import group as groups
from tep.core.quarantine import MAY_LAND
from tests.gate.registry import Bug, Change

__all__ = ["LEASE_BUGS"]

LEASE_BUGS: dict[str, Bug] = {}


def bug(plant: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
    """Register a bug; few of the seeds have leases."""
    LEASE_BUGS[plant.__name__] = Bug(plant.__name__, plant, budget=20_000)
    return plant


# ---------------------------------------------------------------------- the owner


@bug
def free_when_run_out() -> list[Change]:
    """A lease that has run out counts as over, and nobody is asked."""

    def end(self, grant):
        if not grant.ending:
            grant.ending = True
            self._fenced(grant, ())

    return [(Leases, "end", end)]


@bug
def silence_is_consent() -> list[Change]:
    """A writer that does not answer is taken for dead, and not fenced off."""
    return [(Leases, "_silent", lambda self, grant, _: self._fence(grant, ()))]


@bug
def silent_writer_is_let_in_again() -> list[Change]:
    """A writer that was cut off comes back, with a lease that it believes in."""
    lift = Fencing.lift

    def let_in(self, source, nic):
        self._far_ends.at(nic, source).leases.clear()
        return lift(self, source, nic)

    return [(Fencing, "lift", let_in)]


@bug
def restart_is_an_end() -> list[Change]:
    """A writer that has restarted cannot write: what it had sent before may land all the same."""
    silent = Leases._silent

    def trusting(self, grant, why):
        if "restarted" in why:
            self._fence(grant, ())
        else:
            silent(self, grant, why)

    return [(Leases, "_silent", trusting)]


@bug
def paths_ignored() -> list[Change]:
    """The writer names paths over which bytes may come, and the owner fences none of them."""
    stopped = Leases._stopped

    def deaf(self, grant, answer):
        stopped(self, grant, Answer(answer.number, answer.why, ()))

    return [(Leases, "_stopped", deaf)]


@bug
def paths_turned_round() -> list[Change]:
    """The owner takes the writer's NIC for its own, and its own for the writer's."""
    stopped = Leases._stopped

    def mixed(self, grant, answer: Answer):
        paths = (divmod(count, NICS_MAX) for count in answer.counts)
        stopped(self, grant, Answer(answer.number, "", tuple(j * NICS_MAX + i for i, j in paths)))

    return [(Leases, "_stopped", mixed)]


@bug
def failed_fence_is_a_fence() -> list[Change]:
    """A NIC that cannot fence is taken for one that has."""
    fenced = Leases._fenced
    return [(Leases, "_fenced", lambda self, grant, _: fenced(self, grant, ()))]


@bug
def deregistered_under_a_writer() -> list[Change]:
    """A region is given back although a lease of it is not over."""
    return [(Leases, "refuse", lambda *_: None)]


@bug
def never_runs_out() -> list[Change]:
    """Nobody looks at the clock: what is not revoked is never over."""
    return [(Leases, "step", lambda _: False), (Leases, "due_s", lambda _: None)]


# ---------------------------------------------------------------------- the writer


@bug
def answered_at_once() -> list[Change]:
    """The writer says that it has stopped while rows of it are posted."""
    ended, answer = HeldLeases._ended, HeldLeases._answer

    def hasty(self, nic, address, message):
        held = self._find(message.owner, message.lease)
        held.asking[nic, address, message.number] = None
        answer(self, held)
        ended(self, nic, address, message)

    return [(HeldLeases, "_ended", hasty)]


@bug
def written_after_the_end() -> list[Change]:
    """The writer forgets that the lease was asked back."""
    check = HeldLeases._check

    def forgiving(self, held, what):
        over, held.over = held.over, False
        try:
            check(self, held, what)
        finally:
            held.over = over

    return [(HeldLeases, "_check", forgiving)]


@bug
def end_not_remembered() -> list[Change]:
    """The writer hears of the end of a lease before it meets the lease, and forgets it."""
    ended = HeldLeases._ended

    def forgetful(self, nic, address, message):
        if (message.owner, message.lease) in self.known:
            ended(self, nic, address, message)
        else:
            self._channel.answer(nic, address, Answer(message.number, "", ()))

    return [(HeldLeases, "_ended", forgetful)]


@bug
def doubts_kept_back() -> list[Change]:
    """The writer does not say over which paths bytes may still come."""
    answer = HeldLeases._answer

    def silent(self, held):
        held.paths.clear()
        answer(self, held)

    return [(HeldLeases, "_answer", silent)]


@bug
def dead_end_is_an_end() -> list[Change]:
    """A row whose target did not answer counts as one that cannot land."""
    return [(groups, "MAY_LAND", MAY_LAND - {Status.UNREACHABLE})]


@bug
def own_death_is_an_end() -> list[Change]:
    """A row whose own NIC died counts as one that cannot land."""
    return [(groups, "MAY_LAND", MAY_LAND - {Status.NIC_DOWN})]


@bug
def given_up_and_forgotten() -> list[Change]:
    """Rows that failover could not make good are not in doubt."""
    give_up = Failover._give_up

    def careless(self, loss, why):
        doubt, groups.DomainGroup.doubt = groups.DomainGroup.doubt, lambda *_: None
        give_up(self, loss, why)
        groups.DomainGroup.doubt = doubt

    return [(Failover, "_give_up", careless)]


@bug
def shut_for_ever() -> list[Change]:
    """Nobody asks to have a path opened that was fenced off for a lease."""
    return [(groups.DomainGroup, "has_lost", groups.DomainGroup.is_silent)]
