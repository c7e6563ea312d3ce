"""Planted bugs: paths that are shut and taken into use again, and sums that both ends prune.

They are looked for in the oracle's runs in which one transfer comes again and again while links
flap. The two that spoil a NIC spoil it in the cases played whole as well.
"""

from __future__ import annotations

from tep.control.failover import Failover, Fencing, Pruning
from tep.control.membership import Membership
from tep.core.group import DomainGroup
from tep.core.path import Arrivals, FarEnds, Path, PathEvent, PathSums, expand
from tep.sim.chaos_target import ChaosTarget
from tests.gate.registry import FAILOVER, Bug, Change, bug, mistake
from tests.support.orders import Nic

REOPENING: dict[str, Bug] = {}

PRUNING: dict[str, Bug] = {}

BUDGET = 40_000
"""The number of seeds; one in twenty flaps."""


reopening = bug(BUDGET, REOPENING)
"""Register a bug of paths that come back."""

pruning = bug(BUDGET, PRUNING)
"""Register a bug of sums that are pruned."""


@reopening
def rows_of_before_land_after() -> list[Change]:
    """A NIC lifts a fence, and what it had kept out comes in."""

    def unfence(self, source):
        self.fenced.discard(source)

    def unbar(self, source):
        self._fencing.pop(source, None)
        self._barred.pop(source, None)

    return [(Nic, "unfence", unfence), (ChaosTarget, "unfence", unbar)]


@reopening
def agreed_but_not_lifted() -> list[Change]:
    """The receiver agrees, and its NIC still refuses."""
    return [(owner, "unfence", lambda *_: None) for owner in (Nic, ChaosTarget)]


@reopening
def lifted_but_remembered_as_shut() -> list[Change]:
    """The next failover of the path finds it fenced, which it is not any more."""

    def lift(self, source, nic):
        self._nics[nic].unfence(source)

    return [(Fencing, "lift", lift)]


@reopening
def asked_back_while_rows_are_held() -> list[Change]:
    """A path is asked back before it is known what became of its rows."""
    return [(Failover, "is_clear", lambda *_: True)]


@reopening
def late_copies_count() -> list[Change]:
    """A question of before, whose copy comes late, shuts a path that its sender has in use."""
    return [(Fencing, "is_outdated", lambda *_: False)]


@reopening
def taken_into_use_when_refused() -> list[Change]:
    """The sender goes on, whatever the receiver says."""
    return [
        *mistake(
            FAILOVER, "if not (agreed and self._is_clear(path)):", "if not self._is_clear(path):"
        ),
        *mistake(FAILOVER, "why = self._why_not(message) or self", 'why = "not now" or self'),
    ]


@reopening
def asked_once() -> list[Change]:
    """A path that was refused is never asked for again."""
    return mistake(
        FAILOVER,
        "        path.asking = False\n        if path.state",
        "        path.asking = not agreed\n        if path.asking or path.state",
    )


@reopening
def never_asked_without_a_fence() -> list[Change]:
    """A path whose fence was not confirmed stays shut for good."""
    return mistake(
        FAILOVER,
        "if path.is_up or path.asking:",
        "if not path.is_fenced or path.is_up or path.asking:",
    )


@reopening
def open_in_name_only() -> list[Change]:
    """The path is told to be open, and stays shut."""
    to = Path.to
    return [(Path, "to", lambda path, event: event is PathEvent.OPENED or to(path, event))]


@reopening
def left_and_forgotten() -> list[Change]:
    """A path that rows have left is asked for only if its peer's NIC is marked down."""
    return [(Membership, "path_shut", lambda *_: None)]


@reopening
def shunned_for_good() -> list[Change]:
    """A NIC that is back is told of, and not used."""
    return [(DomainGroup, "mark_up", lambda *_: None)]


@reopening
def back_over_a_fenced_path() -> list[Change]:
    """A NIC that answers control messages is used again, though no row gets there."""

    def every(self, link, number):
        return [(nic, number) for nic, alive in enumerate(self._group.alive) if alive]

    def route(self, domain, link, nic):
        alive, there = self.alive, link.alive
        here = next(i for k in range(len(alive)) if alive[i := (domain + k) % len(alive)])
        return here, next(j for k in range(len(there)) if there[j := (nic + k) % len(there)])

    return [(Membership, "_paths", every), (DomainGroup, "route", route)]


@reopening
def notes_take_rows_along() -> list[Change]:
    """A heartbeat fails and flushes the rows on its path, which fail for no reason of their own."""
    return [(FarEnds, "control_heard", lambda *_, **__: None)]


# ---------------------------------------------------------------------- pruned sums


@pruning
def subtracted_before_the_answer() -> list[Change]:
    """The sender subtracts when it asks; the receiver may never have heard of it."""
    ask = Pruning._ask

    def early(self, path, sums):
        ask(self, path, sums)
        if sums.asking:
            sums.sent.take(expand(sums.waiting[0]))

    def late(self, generation):
        if generation > self.pruned:
            self.waiting.popleft()
            self.pruned = generation
        return True

    return [(Pruning, "_ask", early), (PathSums, "prune", late)]


@pruning
def applied_twice() -> list[Change]:
    """The receiver subtracts each copy of a message."""

    def again(self, nic, address, generation, runs):
        for source in self._of(nic, (address,)):
            self.counted.take(expand(runs, source))
        self._pruned[address] = max(generation, self.pruned(address))

    return [(Arrivals, "prune", again)]


@pruning
def generation_ignored_by_the_judge() -> list[Change]:
    """The sender compares its sums with another generation's."""
    return mistake(FAILOVER, "loss.pruned = told.pruned", "loss.pruned = path.sums.pruned")


@pruning
def generation_not_told() -> list[Change]:
    """The receiver does not say which generation its sums stand at."""
    return [(Arrivals, "pruned", lambda *_: 0)]


@pruning
def answered_and_not_subtracted() -> list[Change]:
    """The receiver agrees, and keeps its sums."""

    def lazy(self, nic, address, generation, runs):
        self._pruned[address] = generation

    return [(Arrivals, "prune", lazy)]


@pruning
def subtracted_by_the_receiver_alone() -> list[Change]:
    """The sender counts generations, and keeps its sums."""

    def idle(self, generation):
        if generation > self.pruned:
            self.waiting.popleft()
            self.pruned = generation
        return True

    return [(PathSums, "prune", idle)]
