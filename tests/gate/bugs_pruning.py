"""Planted bugs: the sums of both ends are pruned, and not alike."""

from __future__ import annotations

from collections.abc import Callable

from tep.control.failover import Failover
from tep.control.messages import Answer
from tep.control.pruning import Pruning
from tep.core.sums import Arrivals, PathSums, expand
from tests.gate.registry import Bug, Change

PRUNING: dict[str, Bug] = {}

BUDGET = 600


def pruning(plant: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
    """Register a bug, to be looked for by `tests.support.reopening.pruning_swarm`."""
    PRUNING[plant.__name__] = Bug(plant.__name__, plant, BUDGET)
    return plant


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
    """The sender compares its sums with those of another generation."""
    told = Failover._told

    def blind(self, loss, imms, answer):
        pruned = loss.path.sums.pruned
        told(self, loss, imms, Answer(answer.number, answer.why, answer.counts, pruned))

    return [(Failover, "_told", blind)]


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


__all__ = ["PRUNING"]
