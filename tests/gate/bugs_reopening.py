"""Planted bugs: paths that were fenced off and are taken into use again."""

from __future__ import annotations

from collections.abc import Callable

from tep.control.failover import Failover
from tep.control.fencing import Fencing
from tep.control.reopening import Reopening
from tep.core.group import DomainGroup
from tests.gate.registry import Bug, Change
from tests.support.orders import Nic

REOPENING: dict[str, Bug] = {}

BUDGET = 600


def reopening(plant: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
    """Register a bug, to be looked for in the drawn cases of `tests.support.reopening`."""
    REOPENING[plant.__name__] = Bug(plant.__name__, plant, BUDGET)
    return plant


@reopening
def rows_of_before_land_after() -> list[Change]:
    """A NIC lifts a fence, and what it had kept out comes in."""

    def unfence(self, source):
        self.fenced.discard(source)

    return [(Nic, "unfence", unfence)]


@reopening
def agreed_but_not_lifted() -> list[Change]:
    """The receiver agrees, and its NIC still refuses."""
    return [(Nic, "unfence", lambda *_: None)]


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
    told = Reopening._told

    def deaf(self, path, answer, then):
        told(self, path, type(answer)(answer.number, "", ()), then)

    def refuse(self, message):
        return "not now"

    return [(Reopening, "_told", deaf), (Reopening, "_why_not", refuse)]


@reopening
def asked_once() -> list[Change]:
    """A path that was refused is never asked for again."""

    def told(self, path, answer, then):
        if not answer.why:
            then(path)

    return [(Reopening, "_told", told)]


@reopening
def never_asked_without_a_fence() -> list[Change]:
    """A path whose fence was not confirmed stays shut for good."""
    begin = Reopening.begin

    def only_fenced(self, path):
        if path.is_fenced:
            begin(self, path)

    return [(Reopening, "begin", only_fenced)]


@reopening
def open_in_name_only() -> list[Change]:
    """The path is told to be open, and stays shut."""
    return [(DomainGroup, "reopen", lambda *_: None)]
