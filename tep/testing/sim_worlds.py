"""The simulated fabrics as contract worlds, on the simulated clock. No test lives here."""

from __future__ import annotations

import dataclasses
from typing import Final

from tep.base.units import PS_PER_NS, PS_PER_S, PS_PER_US
from tep.sim.chaos import ChaosFabric, ChaosNode
from tep.sim.clock import FabricEnv
from tep.sim.faults import Chaos
from tep.sim.profile import load_profile
from tep.sim.timing import TimingFabric
from tep.sim.timing_node import Node as TimingNode
from tep.testing.world import Ability, Node, World

__all__ = ["ChaosWorld", "TimingWorld"]

_CHAOS_TURN_PS: Final = 250 * PS_PER_NS  # about one undisturbed flight
_TIMING_TURN_PS: Final = 4 * PS_PER_US
_DOZE_TURNS: Final = 100


class _SimWorld(World):
    """A world on a simulated clock."""

    def __init__(self, turn_ps: int) -> None:
        self.env = FabricEnv()
        self._turn_ps = turn_ps

    def turn(self) -> None:
        self.env.run(until=self.env.now + self._turn_ps)

    def doze(self) -> None:
        self.env.run(until=self.env.now + _DOZE_TURNS * self._turn_ps)

    def now_s(self) -> float:
        return self.env.now / PS_PER_S


class ChaosWorld(_SimWorld):
    """Nodes on one chaos fabric.

    Args:
        chaos: its knobs.
    """

    abilities = frozenset(Ability)
    burst_rows = 500  # one event a fragment; the credits of an ordered NIC are far fewer

    def __init__(self, chaos: Chaos) -> None:
        super().__init__(_CHAOS_TURN_PS)
        self._chaos = chaos
        self._fabric = ChaosFabric(self.env, chaos)
        self._nodes: list[ChaosNode] = []

    def node(self, nics: int = 1) -> ChaosNode:
        made = self._fabric.node(f"node{len(self._nodes)}", nics)
        self._nodes.append(made)
        return made

    def kill(self, node: Node) -> None:
        assert isinstance(node, ChaosNode), node
        self._fabric.crash(node.name)

    def restart(self, node: Node) -> ChaosNode:
        assert isinstance(node, ChaosNode), node
        made = self._fabric.restart(node.name)
        self._nodes.append(made)
        return made

    def fail_nic(self, node: Node, nic: int) -> None:
        assert isinstance(node, ChaosNode), node
        self._fabric.kill_nic(node.name, nic)

    def twin(self) -> ChaosWorld:
        return ChaosWorld(self._chaos)

    def close(self) -> None:
        for node in self._nodes:
            for domain in node.domains:
                domain.close()


class TimingWorld(_SimWorld):
    """Nodes on one timing fabric.

    Args:
        profile: name of the machine; its number of NICs is what each test asks for.
        seed: of the jitter.
        mortal: whether its NICs can die.
    """

    def __init__(self, profile: str, seed: int = 0, *, mortal: bool = False) -> None:
        super().__init__(_TIMING_TURN_PS)
        self.abilities = frozenset({Ability.KILL, Ability.RESTART, Ability.TWIN, Ability.FORK})
        if mortal:
            self.abilities |= {Ability.FAIL_NIC}
        self._profile = profile
        self._seed = seed
        self._fabric = TimingFabric(self.env, profile, seed=seed, mortal=mortal)
        self._nodes: list[TimingNode] = []

    def node(self, nics: int = 1) -> TimingNode:
        machine = dataclasses.replace(load_profile(self._profile), nics=nics)
        made = self._fabric.node(f"node{len(self._nodes)}", machine)
        self._nodes.append(made)
        return made

    def kill(self, node: Node) -> None:
        # This fabric carries no goodbyes: to its peers, a node whose NICs are closed is a dead one.
        for domain in node.domains:
            domain.close()

    def restart(self, node: Node) -> TimingNode:
        assert isinstance(node, TimingNode), node
        made = self._fabric.node(node.name, node.machine.profile)
        self._nodes.append(made)
        return made

    def fail_nic(self, node: Node, nic: int) -> None:
        assert isinstance(node, TimingNode), node
        self._fabric.kill_nic(node.name, nic)

    def twin(self) -> TimingWorld:
        return TimingWorld(self._profile, self._seed, mortal=self._fabric.mortal)

    def close(self) -> None:
        for node in self._nodes:
            for domain in node.domains:
                domain.close()
