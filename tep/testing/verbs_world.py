"""The verbs backend as a contract world: on the stub, or on the RDMA devices of a guest.

No test lives here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from tep.backends.base import Domain, Opened
from tep.backends.verbs import open_domains
from tep.backends.verbs.domain import VerbsDomain
from tep.testing.world import Ability, Node, World

__all__ = ["VerbsWorld"]


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

    def node(self, nics: int = 1) -> Opened:
        devices = [self.devices[(self._next + k) % len(self.devices)] for k in range(nics)]
        self._next += nics
        return self._open(devices, f"node{len(self.nodes)}-{id(self)}")

    def _open(self, devices: list[str], name: str) -> Opened:
        opened = open_domains(devices, name=name, **self.options)
        self.nodes.append(opened)
        return opened

    def turn(self) -> None:
        os.sched_yield()

    def doze(self) -> None:
        time.sleep(0.001)

    def kill(self, node: Node) -> None:
        for domain in node.domains:
            _verbs(domain).die()

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
