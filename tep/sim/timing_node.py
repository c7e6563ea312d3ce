"""A node of the timing fabric: its NICs, and the CPU of the worker that posts and polls.

The CPU is one server. It posts the rows of one instant on all NICs in turn, a row each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tep.sim.machines import Machine
from tep.sim.queues import Ints
from tep.sim.timing_faces import Fabric, Nic
from tep.sim.timing_faults import MortalNic
from tep.sim.timing_nic import TimingNic
from tep.sim.wakes import Wakes

__all__ = ["Node"]


class Node:
    """One host with one device: its NICs and the CPU of its worker.

    Attributes:
        name: of the engine.
        epoch: this incarnation's number.
        machine: which one it is.
        domains: its NICs.
        busy_until_ps: when the worker can take its next turn.
        wakes: when the worker is woken.
        on_news: told of news that wake nobody, but that a poll would find.
    """

    def __init__(self, fabric: Fabric, name: str, epoch: int, machine: Machine) -> None:
        self.name = name
        self.epoch = epoch
        self.machine = machine
        self._profile = profile = machine.profile
        self.busy_until_ps = 0
        self._cpu_free_ps = 0
        self._turn_ps = profile.turn_rows * profile.post_first_ps
        self._fabric = fabric
        self._posts: list[_Post] = []
        self.wakes = Wakes(fabric)
        self.on_news: Callable[[], object] = _nobody
        make = MortalNic if fabric.mortal else TimingNic
        self.domains: Sequence[TimingNic] = [
            make(fabric, self, index) for index in range(profile.nics)
        ]

    def step_delay_ps(self) -> int:
        """How long from a kick, or news from a NIC, to the worker's turn."""
        return self._profile.step_delay_ps

    def charge(self, cost_ps: int) -> None:
        """Give the worker work, to be done when it is through with what it has."""
        now = self._fabric.env.now
        self._cpu_free_ps = max(now, self._cpu_free_ps) + cost_ps
        # While it posts many rows it looks at its NICs now and then.
        self.busy_until_ps = min(self._cpu_free_ps, now + self._turn_ps)

    def post(self, nic: Nic, numbers: Ints, costs: Ints) -> None:
        """Have the worker post rows; they are launched once it has told us of all it posts now.

        A real worker serves its NICs in turn, a few rows at a time, while a step of ours offers one
        NIC all its rows before it comes to the next. So the rows of one instant are put in turn.
        """
        if not self._posts:
            self._fabric.env.call_at(self._fabric.env.now, self._launch, self._cpu_free_ps)
        self._posts.append(_Post(nic, numbers, costs))
        self.charge(int(costs.sum()))

    def _launch(self, cpu_free_ps: int) -> None:
        posts, self._posts = self._posts, []
        now = self._fabric.env.now
        rows = sum(len(post.numbers) for post in posts)
        if rows <= self._profile.turn_rows:
            # A worker with a backlog takes new requests at its next turn. What it had planned for
            # that time is not put off, but the CPU time is charged behind the backlog.
            cpu_free_ps = min(cpu_free_ps, now + self._turn_ps)
        start_ps = max(now, cpu_free_ps)
        if len(posts) == 1:
            nic, numbers, costs = posts[0]
            nic.launch(numbers, start_ps + np.cumsum(costs))
            return
        mine: dict[int, list[_Post]] = {}
        for post in posts:
            mine.setdefault(post.nic.index, []).append(post)
        sizes = [sum(len(post.numbers) for post in found) for found in mine.values()]
        turns = np.zeros((max(sizes), len(mine)), np.int64)  # who has no more rows costs nothing
        for index, (found, size) in enumerate(zip(mine.values(), sizes)):
            turns[:size, index] = np.concatenate([post.costs for post in found])
        done = start_ps + np.cumsum(turns).reshape(turns.shape)
        for index, (found, size) in enumerate(zip(mine.values(), sizes)):
            numbers = np.concatenate([post.numbers for post in found])
            found[0].nic.launch(numbers, done[:size, index])


def _nobody() -> None:
    """Tells nobody: no driver has asked."""


class _Post(NamedTuple):
    """Rows that the worker posts on one NIC, and the CPU time each costs."""

    nic: Nic
    numbers: Ints
    costs: Ints
