"""The project's own backends as worlds of the contract suite. No test lives here.

Loopback NICs can die if they are mortal ones; the simulated fabrics run
on the simulated clock; the verbs backend runs on the stub, or on the RDMA devices of a guest.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Sequence
from typing import Any, Final

from tep.backends import verbs
from tep.backends.base import Domain, Opened
from tep.backends.loopback import Hub, LoopbackDomain
from tep.backends.verbs.domain import VerbsDomain
from tep.base.units import PS_PER_NS, PS_PER_S, PS_PER_US
from tep.sim.chaos import ChaosFabric, ChaosNode
from tep.sim.clock import FabricEnv
from tep.sim.faults import Chaos
from tep.sim.profile import load_profile
from tep.sim.timing import TimingFabric
from tep.sim.wakes import Node as TimingNode
from tep.testing.world import Ability, Node, World
from tests.support.loopbacks import MortalLoopback, open_made
from tests.verbs.rig import die

_TOKEN: Final = 0x7E57  # one number for all test hubs: equal worlds have equal addresses
_CHAOS_TURN_PS: Final = 250 * PS_PER_NS  # about one undisturbed flight
_TIMING_TURN_PS: Final = 4 * PS_PER_US
_DOZE_TURNS: Final = 100
_DOZES: Final = 1_000  # in a timeout that is longer than so many


class LoopbackWorld(World):
    """Nodes on a hub of their own.

    Attributes:
        hub: where they meet.
        nodes: all that were opened, in order.

    Args:
        make: the class of its NICs.
        caps: what replaces some of their caps.
    """

    abilities = frozenset(Ability) - {Ability.FAIL_NIC}

    def __init__(self, make: type[LoopbackDomain] = LoopbackDomain, **caps: Any) -> None:
        if issubclass(make, MortalLoopback):
            self.abilities = frozenset(Ability)
        self.make = make
        self._caps = caps
        self.hub = Hub(_TOKEN)
        self.nodes: list[Opened] = []

    def node(self, nics: int = 1) -> Opened:
        return self._open(f"node{len(self.nodes)}", nics)

    def _open(self, name: str, nics: int) -> Opened:
        opened = open_made(self.make, nics, hub=self.hub, name=name, **self._caps)
        self.nodes.append(opened)
        return opened

    def kill(self, node: Node) -> None:
        for domain in node.domains:
            assert isinstance(domain, LoopbackDomain), domain
            domain.close()
            domain.arrived.clear()  # a dead process hands nothing out

    def restart(self, node: Node) -> Opened:
        assert isinstance(node, Opened), node
        return self._open(node.name, len(node.domains))

    def fail_nic(self, node: Node, nic: int) -> None:
        domain = node.domains[nic]
        assert isinstance(domain, MortalLoopback), domain
        domain.fail()

    def twin(self) -> LoopbackWorld:
        return type(self)(self.make, **self._caps)

    def close(self) -> None:
        for node in self.nodes:
            for domain in node.domains:
                domain.close()


class _SimWorld(World):
    """A world on a simulated clock."""

    def __init__(self, turn_ps: int, timeout_ps: int = 0) -> None:
        self.env = FabricEnv()
        self._turn_ps = turn_ps
        self._doze_ps = max(_DOZE_TURNS * turn_ps, timeout_ps // _DOZES)

    def turn(self) -> None:
        self.env.run(until=self.env.now + self._turn_ps)

    def doze(self) -> None:
        self.env.run(until=self.env.now + self._doze_ps)

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
        super().__init__(_CHAOS_TURN_PS, chaos.dead_after_ps)
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


class VerbsWorld(World):
    """Nodes in one process, each on devices of its own as far as these go.

    Args:
        devices: their names; nodes take them in turn.
        options: further options of `open_domains`.
    """

    abilities = frozenset({Ability.KILL, Ability.RESTART, Ability.FAIL_NIC, Ability.FORK})
    turns_max = 200_000  # of real time: a lost datagram costs a pause

    def __init__(self, devices: Sequence[str], **options: Any) -> None:
        self.devices = devices
        self.options = options
        self.nodes: list[Opened] = []
        self._next = 0
        self._never = threading.Event()

    def node(self, nics: int = 1) -> Opened:
        devices = [self.devices[(self._next + k) % len(self.devices)] for k in range(nics)]
        self._next += nics
        return self._open(devices, f"node{len(self.nodes)}-{id(self)}")

    def _open(self, devices: list[str], name: str) -> Opened:
        opened = verbs.open_domains(devices, name=name, **self.options)
        self.nodes.append(opened)
        return opened

    def turn(self) -> None:
        os.sched_yield()

    def doze(self) -> None:
        self._never.wait(0.001)

    def kill(self, node: Node) -> None:
        for domain in node.domains:
            die(_verbs(domain))

    def restart(self, node: Node) -> Opened:
        assert isinstance(node, Opened), node
        return self._open([domain.caps.nic for domain in node.domains], node.name)

    def fail_nic(self, node: Node, nic: int) -> None:
        _verbs(node.domains[nic]).fail_device()

    def close(self) -> None:
        for node in reversed(self.nodes):
            for domain in node.domains:
                domain.close()
        self.nodes.clear()


def _verbs(domain: Domain) -> VerbsDomain:
    assert isinstance(domain, VerbsDomain), domain
    return domain
