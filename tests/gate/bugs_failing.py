"""Planted bugs: what happens when a NIC dies, here or at the peer."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from tep.base.api import Routing
from tep.control.channel import Channel
from tep.control.messages import Pong
from tep.core import plan as plans
from tep.core.group import DomainGroup
from tep.core.posting import Pending
from tests.gate.registry import Change, bug

LATE = 2000
"""Seeds for what one run in fifty meets."""

# ---------------------------------------------------------------------- failing over


@bug()
def dead_nic_queue_stuck() -> list[Change]:
    """Rows that are queued for a dead NIC stay there."""

    def nic_down(self, domain, _error=None):
        self.alive[domain] = False
        self.routes.version += 1

    post_on = DomainGroup._post_on

    def skip_dead(self, domain, queue, refused=0):
        return self.alive[domain] and post_on(self, domain, queue, refused)

    return [(DomainGroup, "nic_down", nic_down), (DomainGroup, "_post_on", skip_dead)]


@bug()
def dead_nic_still_used() -> list[Change]:
    """A NIC's death is not noticed."""
    return [(DomainGroup, "nic_down", lambda *_: None)]


@bug()
def dead_peer_nic_still_used() -> list[Change]:
    """A peer's NIC that does not answer is posted to as before."""
    return [(DomainGroup, "mark_down", lambda *_: None)]


@bug(budget=1500)
def scatter_to_dead_nic() -> list[Change]:
    """The prepared columns of scatters are not made anew when a NIC has died."""
    down, shun = DomainGroup.nic_down, DomainGroup.mark_down

    def frozen(change):
        def changed(self, *args):
            version = self.routes.version
            change(self, *args)
            self.routes.version = version

        return changed

    return [(DomainGroup, "nic_down", frozen(down)), (DomainGroup, "mark_down", frozen(shun))]


def moves_with(keep: Callable[[Pending, Pending, int], None]) -> list[Change]:
    """Let keep(old, fresh, start) spoil the rows that move to another NIC."""
    moved = DomainGroup._moved

    def spoiled(self, old, start, stop, turn=0):
        parts = moved(self, old, start, stop, turn)
        for fresh in parts:
            keep(old, fresh, start)
            start += fresh.batch.n
        return parts

    return [(DomainGroup, "_moved", spoiled)]


@bug(budget=1500)
def reroute_keeps_rkey() -> list[Change]:
    """Rows that move to another NIC keep the remote key they had."""

    def keep(old, fresh, start):
        rkey = old.batch.rkey
        fresh.batch.rkey = rkey if isinstance(rkey, int) else rkey[start:]

    return moves_with(keep)


@bug(budget=1500)
def reroute_keeps_lkey() -> list[Change]:
    """Rows that move to another NIC keep the local key they had."""

    def keep(old, fresh, _):
        fresh.batch.lkey = old.batch.lkey

    return moves_with(keep)


@bug(budget=1500)
def reroute_keeps_base() -> list[Change]:
    """Rows that move to another NIC keep the address that the first one's key began at."""

    def keep(old, fresh, start):
        dst = old.batch.dst
        fresh.batch.dst = dst if isinstance(dst, int) else dst[start:]

    return moves_with(keep)


@bug(budget=1500)
def reroute_from_first_row() -> list[Change]:
    """A batch that was posted in part moves as a whole: rows are posted twice."""
    reroute = DomainGroup._reroute

    def whole(self, wanted):
        for queue in self._queues:
            for pending in queue:
                if wanted(pending) and pending.at:
                    pending.transfer.left += pending.at
                    self.backlog += pending.at
                    pending.at = 0
        reroute(self, wanted)

    return [(DomainGroup, "_reroute", whole)]


@bug(budget=1500)
def shards_from_live_nics() -> list[Change]:
    """A write is cut by the NICs that live today, while the receiver counts by those there are."""
    deal = DomainGroup._deal_single

    plan_single = plans.plan_single

    def deal_living(self, transfer, job, remote):
        here, there = self.alive, remote.link.alive
        lanes = range(plans.lanes(len(here), len(there)))
        living = sum(here[k % len(here)] and there[k % len(there)] for k in lanes)

        def plan_living(nbytes, nlocal, nremote, cursor, routing):
            shards = plan_single(nbytes, nlocal, nremote, cursor, routing).imms
            fewer = Routing(num_shards=max(1, min(shards, living)), domain=routing.domain)
            found = plan_single(nbytes, nlocal, nremote, cursor, fewer)
            transfer.rows = transfer.left = len(found.shares)
            return found

        with mock.patch("tep.core.posting.plan_single", plan_living):
            deal(self, transfer, job, remote)

    return [(DomainGroup, "_deal_single", deal_living)]


# ---------------------------------------------------------------------- too few resources


@bug(budget=LATE)
def registered_in_part() -> list[Change]:
    """Memory that one NIC does not register stays known to those that were asked before."""

    def register(domains, memory, access):
        return tuple(domain.register(memory, access) for domain in domains)

    return [("tep.engine.verbs", "register", register)]


@bug(budget=LATE)
def a_nic_that_raised_is_posted_on() -> list[Change]:
    """A NIC whose post raises is offered the next rows as before."""
    return [(DomainGroup, "give_up", lambda *_: False)]


@bug(budget=2 * LATE)
def a_signal_is_an_end() -> list[Change]:
    """A NIC whose post is interrupted by a signal is taken for dead."""

    def give_up(self, domain, error):
        self.nic_down(domain, error)
        return True

    return [(DomainGroup, "give_up", give_up)]


# ---------------------------------------------------------------------- clocks


@bug(budget=3 * LATE)
def times_of_two_clocks_are_compared() -> list[Change]:
    """A peer that is asked whether it is there answers with its own time, not the question's."""
    answer = Channel.answer

    def own_time(self, nic, address, message):
        if isinstance(message, Pong):
            message = Pong(int(self._now_s() * 1e9))
        answer(self, nic, address, message)

    return [(Channel, "answer", own_time)]
