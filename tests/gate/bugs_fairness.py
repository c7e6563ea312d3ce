"""Planted bugs: who waits for whom at a NIC."""

from __future__ import annotations

from collections import deque

from tep.backends.base import Domain
from tep.base.api import EngineOptions
from tep.core.group import DomainGroup
from tep.engine.worker import Worker
from tests.gate.registry import Change, bug


class Line(deque):
    """A queue in which nobody is sent to the end."""

    def rotate(self, n: int = 1) -> None:
        pass


def with_queues(kind: type[deque]) -> list[Change]:
    """Let NICs have queues of this kind."""
    init = DomainGroup.__init__

    def other(self, domains: tuple[Domain, ...], *rest: object, **more: object) -> None:
        init(self, domains, *rest, **more)
        self._queues = [kind() for _ in domains]

    return [(DomainGroup, "__init__", other)]


@bug()
def first_come_first_served() -> list[Change]:
    """A huge transfer is posted to its end before a small one behind it gets its turn."""
    return with_queues(Line)


@bug()
def whole_batches_in_one_turn() -> list[Change]:
    """A turn lasts as long as the NIC takes rows, however many others wait."""
    init = DomainGroup.__init__

    def endless(
        self, domains: tuple[Domain, ...], options: EngineOptions, *rest: object, **more: object
    ) -> None:
        init(self, domains, options, *rest, **more)
        self._rows_max = 1 << 30

    return [(DomainGroup, "__init__", endless)]


@bug()
def one_refusal_for_all() -> list[Change]:
    """A batch that is refused ends the turn of its NIC: one deaf peer holds up all others."""

    class Shy(deque):
        def __len__(self) -> int:  # compared with the refusals in a row
            return min(1, super().__len__())

    return with_queues(Shy)


@bug()
def nics_wait_for_each_other() -> list[Change]:
    """A NIC posts only when those before it have nothing left to post."""
    post_on = DomainGroup._post_on

    def in_line(self, domain, queue, refused=0):
        return not any(self._queues[:domain]) and post_on(self, domain, queue, refused)

    return [(DomainGroup, "_post_on", in_line)]


@bug()
def new_requests_wait_for_old_ones() -> list[Change]:
    """No request is taken while rows of others are queued."""
    step = Worker.step

    def later(self):
        if not self.group.backlog:
            return step(self)
        held, self.commands = self.commands, deque()
        work = step(self)
        held.extend(self.commands)
        self.commands = held
        return work

    return [(Worker, "step", later)]


@bug()
def small_ones_last() -> list[Change]:
    """The batch with most rows left is served first."""
    post_on = DomainGroup._post_on

    def largest_first(self, domain, queue, refused=0):
        most = max(queue, key=lambda pending: pending.stop - pending.at)
        queue.remove(most)
        queue.appendleft(most)
        return post_on(self, domain, queue, refused)

    return [(DomainGroup, "_post_on", largest_first)]
