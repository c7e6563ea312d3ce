"""The loopback as a contract world: all abilities, since a process can do anything to itself.

No test lives here.
"""

from __future__ import annotations

from typing import Any, Final

from tep.backends.base import Domain, Opened
from tep.backends.loopback import Hub, LoopbackDomain, open_domains
from tep.testing.world import Ability, Node, World

__all__ = ["LoopbackWorld"]

_TOKEN: Final = 0x7E57  # one number for all test hubs: same seed, same addresses


class LoopbackWorld(World):
    """Nodes on a hub of their own.

    Attributes:
        hub: where they meet.
        nodes: all that were opened, in order.

    Args:
        seed: of the shuffle; None = in order.
        options: further options of `open_domains`.
    """

    abilities = frozenset(Ability)

    def __init__(self, seed: int | None = 0, **options: Any) -> None:
        self.seed = seed
        self._options = options
        self.hub = Hub(_TOKEN)
        self.nodes: list[Opened] = []

    def node(self, nics: int = 1) -> Opened:
        return self._open(f"node{len(self.nodes)}", nics)

    def _open(self, name: str, nics: int) -> Opened:
        opened = self.open_domains(name, nics)
        self.nodes.append(opened)
        return opened

    def open_domains(self, name: str, nics: int) -> Opened:
        """Open one node's NICs; what a world of spoiled domains overrides."""
        return open_domains(nics, hub=self.hub, seed=self.seed, name=name, **self._options)

    def kill(self, node: Node) -> None:
        for domain in node.domains:
            _loopback(domain).die()

    def restart(self, node: Node) -> Opened:
        assert isinstance(node, Opened), node
        return self._open(node.name, len(node.domains))

    def fail_nic(self, node: Node, nic: int) -> None:
        _loopback(node.domains[nic]).fail()

    def twin(self) -> LoopbackWorld:
        return type(self)(self.seed, **self._options)

    def close(self) -> None:
        for node in self.nodes:
            for domain in node.domains:
                domain.close()


def _loopback(domain: Domain) -> LoopbackDomain:
    assert isinstance(domain, LoopbackDomain), domain
    return domain
