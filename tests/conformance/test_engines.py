"""The engine's share of the contract: on the loopback, inline and threaded, and in simulation."""

from __future__ import annotations

from unittest import mock

import pytest

import tep
from tep.backends import loopback
from tep.backends.loopback import Hub
from tep.sim.cluster import Cluster
from tep.testing.contract_engine import EngineContract, Engines, OpenEngines


def loopback_engines(make_driver):
    """Engines on a hub of their own."""
    hub = Hub()

    def opened(name=None):
        return tep.TransferEngine.open("loopback", nics=2, hub=hub, name=name, driver=make_driver())

    return OpenEngines(opened, opened)


class SimulatedEngines(Engines):
    """The engines of a cluster."""

    def __init__(self, **options):
        self.cluster = Cluster(nodes=2, **options)
        self.can_restart = "profile" not in options
        self.next = iter(self.cluster.engines[:])

    def engine(self):
        return next(self.next)

    def restart(self, engine):
        return self.cluster.restart(engine.name)

    def close(self):
        self.cluster.close()


class TestInline(EngineContract):
    """One thread turns both ends, over a deep queue and a shallow one."""

    @pytest.fixture(params=[loopback._SQ_DEPTH, 3], ids=["deep", "shallow"])
    def engines(self, request):
        ring = []
        with (
            mock.patch.object(loopback, "_SQ_DEPTH", request.param),
            loopback_engines(lambda: tep.InlineDriver(ring)) as engines,
        ):
            yield engines


class TestThreads(EngineContract):
    """A worker thread for each engine, as people use it."""

    @pytest.fixture
    def engines(self):
        with loopback_engines(lambda: None) as engines:
            yield engines


class TestChaos(EngineContract):
    """The chaos fabric, with knobs drawn from the seed."""

    @pytest.fixture(params=range(3))
    def engines(self, request):
        with SimulatedEngines(seed=request.param) as engines:
            yield engines


class TestTiming(EngineContract):
    """The timing fabric of two NICs."""

    @pytest.fixture
    def engines(self):
        with SimulatedEngines(profile="efa_2x200") as engines:
            yield engines
