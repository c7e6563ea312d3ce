"""The world of the contract suite on one backend: it makes nodes, lets time pass, breaks things.

A backend's test file gives the suite a World. Nothing here posts or polls.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol, Self, TypeVar

import pytest

from tep.backends.base import Domain
from tep.base.waiting import system_s

__all__ = ["Ability", "Node", "OpenWorld", "World", "need"]

T = TypeVar("T")


class Node(Protocol):
    """One engine's worth of NICs; `tep.backends.base.Opened` is one."""

    @property
    def domains(self) -> Sequence[Domain]:
        """The NICs, in NIC order."""


class Ability(Enum):
    """The abilities of a world besides making nodes; a test that needs more is skipped there."""

    KILL = auto()  # end a node as a killed process ends: nothing is said to anybody
    RESTART = auto()  # bring a node back: same name, later incarnation
    FAIL_NIC = auto()  # let one NIC die under its owner
    TWIN = auto()  # make a second world of the same seed, in which the same happens
    FORK = auto()  # the process may fork while nodes are open


class World:
    """The world of one test's nodes. Subclass it, or use OpenWorld.

    Attributes:
        abilities: its abilities.
        turns_max: turns after which a test gives up waiting.
        quiet_turns: turns after which nothing more arrives.
        burst_rows: immediates in the suite's largest burst; more than any receive queue holds.
        patience_s: real seconds within which a call that must not block has to return.
    """

    abilities: frozenset[Ability] = frozenset()
    turns_max: int = 20_000
    quiet_turns: int = 40
    burst_rows: int = 3_000
    patience_s: float = 5.0

    def node(self, nics: int = 1) -> Node:
        """Open a node; all nodes of one world reach each other."""
        raise NotImplementedError

    def turn(self) -> None:
        """Let a little time pass. The suite polls; this moves whatever else has to move."""

    def doze(self) -> None:
        """Let more time pass, while a test waits for a timeout."""
        self.turn()

    def now_s(self) -> float:
        """Say what time it is on the clock that caps.peer_timeout_s is measured by, seconds."""
        return time.monotonic()

    def returns(self, call: Callable[[], T], what: str) -> T:
        """Run a call that must not block; fail if it has not returned within patience_s."""
        box: list[T] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                box.append(call())
            except BaseException as error:  # noqa: BLE001  # raised again below
                raised.append(error)

        thread = threading.Thread(target=run, name=what, daemon=True)
        thread.start()
        thread.join(system_s(self.patience_s))
        assert not thread.is_alive(), f"C2: {what} has not returned within {self.patience_s} s"
        if raised:
            raise raised[0]
        return box[0]

    def kill(self, node: Node) -> None:
        """End a node as a killed process ends. Ability.KILL."""
        raise NotImplementedError

    def restart(self, node: Node) -> Node:
        """Open a killed node again: its next incarnation. Ability.RESTART."""
        raise NotImplementedError

    def fail_nic(self, node: Node, nic: int) -> None:
        """Let one NIC of a node die. Ability.FAIL_NIC."""
        raise NotImplementedError

    def twin(self) -> World:
        """Make a fresh world of the same seed. Ability.TWIN."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all nodes. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenWorld(World):
    """A world of real time, from a function that opens a node.

    Args:
        open_node: called with the number of NICs, e.g. a backend's `open_domains`.
        abilities: what holds for this backend besides; KILL, RESTART and so on need a subclass.
    """

    def __init__(
        self,
        open_node: Callable[[int], Node],
        abilities: frozenset[Ability] = frozenset({Ability.FORK}),
    ) -> None:
        self.abilities = abilities
        self._open_node = open_node
        self.nodes: list[Node] = []

    def node(self, nics: int = 1) -> Node:
        found = self._open_node(nics)
        self.nodes.append(found)
        return found

    def turn(self) -> None:
        # Else two threads that poll on one CPU take turns of a scheduler's slice.
        os.sched_yield()

    def close(self) -> None:
        for node in reversed(self.nodes):
            for domain in node.domains:
                domain.close()
        self.nodes.clear()


def need(world: World, *abilities: Ability) -> None:
    """Skip the calling test where the world lacks an ability; the first line of such a test."""
    missing = [ability.name for ability in abilities if ability not in world.abilities]
    if missing:
        pytest.skip(f"this world cannot {', '.join(missing)}")
