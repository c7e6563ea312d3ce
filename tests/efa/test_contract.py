"""The contract on libfabric's own EFA provider, over the fake device."""

from __future__ import annotations

import pytest

from tep.backends.libfabric.rules import efa_place, parse
from tep.testing.contract import Ability, DomainContract
from tep.testing.contract_engine import EngineContract
from tests.conformance.test_libfabric import FabricWorld, fabric_engines


class EfaWorld(FabricWorld):
    """Nodes of one process; a NIC sends to itself."""

    def __init__(self, provider, **options):
        super().__init__(provider, **options)
        self.abilities = frozenset(set(Ability) - {Ability.TWIN})

    def restart(self, node):
        """Open again: the fake device gives the number of the closed queue pair to the next."""
        again = self._open(len(node.domains), node.name)
        assert self._places(node) == self._places(again)
        return again

    def _places(self, node):
        """GID and queue pair number of each NIC; the Q_Key behind them is another every time."""
        return [efa_place(parse(nic.address, self.provider).raw) for nic in node.domains]


class TestEfa(DomainContract):
    @pytest.fixture
    def world(self):
        with EfaWorld("efa") as world:
            yield world


class TestEngines(EngineContract):
    @pytest.fixture
    def engines(self):
        with fabric_engines("efa") as engines:
            yield engines
