"""The contract on the backend `efa`, which drives the fake device itself."""

from __future__ import annotations

import ctypes

import pytest

import tep
from tep.backends import efa
from tep.testing.contract import DomainContract
from tep.testing.contract_engine import EngineContract, OpenEngines
from tep.testing.world import Net
from tests.conformance.test_libfabric import TIMEOUT_S
from tests.efa.test_contract import EfaWorld


class DirectWorld(EfaWorld):
    """Nodes of one process; a NIC sends to itself."""

    def __init__(self):
        super().__init__("srd")
        self._run = ctypes.CDLL("libibverbs.so.1").fake_efa_run

    def turn(self):
        """Let the device end the move that it is in.

        It fills one completion queue after the other: the sender may read its end, and the target
        must not count as quiet before its queue is filled.
        """
        super().turn()
        self._run(0)

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


@pytest.mark.parametrize("out", [0, 16, 48])
def test_rows_go_by_the_half_window_or_by_what_is_left_of_it(out, monkeypatch):
    """A row by itself costs ten times what it costs among others, but half a window is enough."""
    window = 64
    monkeypatch.setattr(efa, "_SEND", window + 64)  # as many again are for messages
    with DirectWorld() as world:
        world.nodes.append(efa.open_domains(nics=1, name="half"))
        net = Net(world)
        a = net.side(node=world.nodes[0])
        net.write(a.batch(a), a)
        at = [8 * k for k in range(window)]
        first = a.batch(a, src=at[:out], dst=at[:out], nbytes=8)
        assert out == (a.try_post(first, 0, out) if out else 0)
        taken = a.try_post(a.batch(a, src=at, dst=at, nbytes=8), 0, window)
        net.settle()

        assert (window - out if out <= window // 2 else 0) == taken
