"""The contract on the backend `efa`, which drives the fake device itself."""

from __future__ import annotations

import pytest

import tep
from tep.backends import efa
from tep.testing.contract import DomainContract
from tep.testing.contract_engine import EngineContract, OpenEngines
from tests.conformance.test_libfabric import TIMEOUT_S
from tests.efa.test_contract import EfaWorld


class DirectWorld(EfaWorld):
    """Nodes of one process; a NIC sends to itself."""

    def __init__(self):
        super().__init__("srd")

    def _open(self, nics, name):
        found = efa.open_domains(nics=nics, name=name, peer_timeout_s=TIMEOUT_S)
        self.nodes.append(found)
        return found

    def fail_nic(self, node, nic):
        """The device says that it is gone, once what is there has been read."""
        node.domains[nic]._drain()
        node.domains[nic]._device.lose("the test says so")


class TestDomain(DomainContract):
    @pytest.fixture
    def world(self):
        with DirectWorld() as world:
            yield world


class TestEngines(EngineContract):
    @pytest.fixture
    def engines(self):
        def opened(name=None):
            found = efa.open_domains(nics=2, name=name, peer_timeout_s=TIMEOUT_S)
            driver = tep.ThreadDriver(found.name)
            return tep.TransferEngine(
                found.domains, driver=driver, name=found.name, epoch=found.epoch
            )

        with OpenEngines(opened, opened) as engines:
            yield engines
